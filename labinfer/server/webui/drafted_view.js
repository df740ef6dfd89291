// DraftedView: the tokens of an answer, in which accepted draft tokens are marked; also during generation.

import { make, setText } from "./element.js";

export class DraftedView {
  constructor(words) {
    this._words = words;
    this._title = make("summary");
    this._text = make("div", { className: "tokens" });
    this._shown = this._count = 0; // shown tokens, and drafted ones among them
    this.element = make("details", { className: "drafted", open: true }, this._title, this._text);
  }

  /** @param {[string, boolean][]} tokens (text, was drafted) pairs; all tokens so far, beginning with those shown before */
  show(tokens) {
    for (const [text, drafted] of tokens.slice(this._shown)) {
      this._count += drafted;
      this._text.append(drafted && text ? make("mark", { title: this._words.isDrafted }, text) : text);
    }
    this._shown = tokens.length;
    setText(this._title, this._words.draftedOf(this._count, this._shown));
  }
}
