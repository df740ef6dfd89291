// Tables with their captions and heads.

import { make } from "../element.js";

/** @param {string} caption for whoever does not see where it stands @param {string[]} columns @param {HTMLElement[]} rows */
export function table(caption, columns, rows) {
  return make("table", {},
    make("caption", { className: "unseen" }, caption),
    make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows));
}

/** The same where it may be wider than the screen, or higher than its place: it can be scrolled by keyboard too. */
export function scrolledTable(caption, columns, rows) {
  return make("div", { className: "scrolled", tabIndex: 0, role: "region", "aria-label": caption }, table(caption, columns, rows));
}
