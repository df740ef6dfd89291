// Meaning of keys in a text field.

/** Whether the key belongs to an input method (IME): Enter accepts a word, Escape cancels it (229 in Safari). @param {KeyboardEvent} event */
export function composes(event) {
  return event.isComposing || event.keyCode === 229;
}

/**
 * Whether the key sends the message. Shift+Enter inserts a new line, as does Enter on a touch screen, whose keyboard has no
 * Shift+Enter. With Ctrl or Command, Enter always sends.
 * @param {KeyboardEvent} event
 */
export function sends(event) {
  if (event.key !== "Enter" || composes(event)) return false;
  return event.ctrlKey || event.metaKey || (!event.shiftKey && !matchMedia("(pointer: coarse)").matches);
}
