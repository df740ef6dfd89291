// The tokens of an answer, those tinted that came from accepted drafts.

import { make } from "./element.js";

/** @param {[string, boolean][]} tokens the text of each, and whether it was drafted */
export function draftedView(tokens, words) {
  const count = tokens.filter(([, drafted]) => drafted).length;
  const texts = tokens.map(([text, drafted]) => (drafted && text ? make("mark", { title: words.isDrafted }, text) : text));
  return make("details", { className: "drafted", open: true },
    make("summary", {}, words.draftedOf(count, tokens.length)), make("div", { className: "tokens" }, ...texts));
}
