// DraftedView: the tokens of an answer, those tinted that came from accepted drafts; also while it grows.

import { make, setText } from "./element.js";

export class DraftedView {
  constructor(words) {
    this._words = words;
    this._title = make("summary");
    this._text = make("div", { className: "tokens" });
    this._shown = this._count = 0; // tokens, and those of them that were drafted
    this.element = make("details", { className: "drafted", open: true }, this._title, this._text);
  }

  /** @param {[string, boolean][]} tokens the text of each, and whether it was drafted; those that are shown go first */
  show(tokens) {
    for (const [text, drafted] of tokens.slice(this._shown)) {
      this._count += drafted;
      this._text.append(drafted && text ? make("mark", { title: this._words.isDrafted }, text) : text);
    }
    this._shown = tokens.length;
    setText(this._title, this._words.draftedOf(this._count, this._shown));
  }
}
