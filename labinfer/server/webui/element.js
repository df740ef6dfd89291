// Making elements of the page: never from strings of HTML, so that no text can become markup.

import { icon } from "./icon.js";

/**
 * A new element.
 * @param {string} tag
 * @param {object} properties what `element[name] = value` sets; `aria-…`, `data-…` and `role` become attributes
 * @param {...(Node|string)} children
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(aria-|data-|role$)/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A button with a picture and, for whoever does not see it, its meaning. */
export function iconButton(name, label, onclick, className = "icon small") {
  return make("button", { type: "button", className, title: label, "aria-label": label, onclick }, icon(name));
}

/** Give an element this text, unless it has it: a screen reader reads it out whenever it is written. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The element with this id; it must be there. */
export function byId(id) {
  return document.getElementById(id);
}
