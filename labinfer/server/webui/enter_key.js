// What keys mean where a text is written.

/** Whether this key is the input method's: Enter that chooses a word, Escape that gives it up (229 in Safari). @param {KeyboardEvent} event */
export function composes(event) {
  return event.isComposing || event.keyCode === 229;
}

/**
 * Whether this key sends the message. Shift+Enter begins a line; so does Enter on a touch screen, whose keyboard has no
 * Shift+Enter; with Ctrl or Command it always sends.
 * @param {KeyboardEvent} event
 */
export function sends(event) {
  if (event.key !== "Enter" || composes(event)) return false;
  return event.ctrlKey || event.metaKey || (!event.shiftKey && !matchMedia("(pointer: coarse)").matches);
}
