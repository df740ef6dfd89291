// Meaning of keys in a text field.

/** Whether an input method (IME) handles the key: Enter accepts its word, Escape cancels it. Safari reports key code 229. @param {KeyboardEvent} event */
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
