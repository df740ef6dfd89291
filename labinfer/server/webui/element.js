// DOM elements, never made from HTML strings: text cannot become markup.

import { icon } from "./icon.js";

/**
 * Create an element.
 * @param {string} tag
 * @param {object} properties set as `element[name] = value`; `aria-…`, `data-…` and `role` become attributes
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

/** A button with an icon, and a label for screen readers. */
export function iconButton(name, label, onclick, className = "icon small") {
  return make("button", { type: "button", className, title: label, "aria-label": label, onclick }, icon(name));
}

/** Set the text of an element if it differs: a screen reader announces every assignment. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The element with an id that exists. */
export function byId(id) {
  return document.getElementById(id);
}
