// The Enter key where a message is written.

/**
 * Whether this key sends the message. Shift+Enter begins a line; so does Enter on a touch screen, whose keyboard has no
 * Shift+Enter; with Ctrl or Command it always sends. What chooses a word of an input method does neither (229 in Safari).
 * @param {KeyboardEvent} event
 */
export function sends(event) {
  if (event.key !== "Enter" || event.isComposing || event.keyCode === 229) return false;
  return event.ctrlKey || event.metaKey || (!event.shiftKey && !matchMedia("(pointer: coarse)").matches);
}
