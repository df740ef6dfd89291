// Examples: questions for an empty page that the demo model can answer.

import { make } from "./element.js";

const MODEL = "demo";

export class Examples {
  /** @param {HTMLElement} place @param {(question: string) => void} onchoose */
  constructor(place, onchoose) {
    Object.assign(this, { _place: place, _onchoose: onchoose, _shown: null });
  }

  /** @param {string|undefined} model name of the model */
  render(model, words) {
    const shown = model === MODEL ? words : null;
    if (shown === this._shown) return; // the examples stay, so that a button keeps the focus
    this._shown = shown;
    this._place.replaceChildren(...(shown?.examples ?? []).map((question) => make("button", {
      type: "button", onclick: () => this._onchoose(question),
    }, question)));
  }
}
