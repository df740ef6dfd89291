// Texts, icons and theme of a page's static HTML.

import { icon } from "./icon.js";

/** Insert the icons of [data-icon]. */
export function showIcons() {
  for (const place of document.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}

/** Set the texts of [data-word], [data-label] and [data-placeholder], and the theme. @param {import("./preferences.js").Preferences} preferences */
export function showPreferences({ words, shownTheme }) {
  document.documentElement.lang = words.language;
  document.documentElement.dataset.theme = shownTheme;
  for (const place of document.querySelectorAll("[data-word]")) {
    const text = place.querySelector(":scope > .text") ?? place.appendChild(Object.assign(document.createElement("span"), { className: "text" }));
    text.textContent = words[place.dataset.word];
  }
  for (const place of document.querySelectorAll("[data-label]")) {
    place.setAttribute("aria-label", words[place.dataset.label]);
    if (place.tagName === "BUTTON") place.title = words[place.dataset.label];
  }
  for (const place of document.querySelectorAll("[data-placeholder]")) place.placeholder = words[place.dataset.placeholder];
}
