// Tables with caption and header.

import { make } from "../element.js";

/** @param {string} caption for screen readers @param {string[]} columns @param {HTMLElement[]} rows */
export function table(caption, columns, rows) {
  return make("table", {},
    make("caption", { className: "unseen" }, caption),
    make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows));
}

/** A `table` in a frame that scrolls, by keyboard too. */
export function scrolledTable(caption, columns, rows) {
  return make("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": caption }, table(caption, columns, rows));
}
