// RequestsView: the open requests, how old and how far they are, and the ends of one's own.

import { make, setText } from "../element.js";
import { table } from "./table.js";
import { duration, grouped } from "./units.js";

export class RequestsView {
  /** @param {HTMLElement} place @param {(id: string) => Promise<void>} cancel */
  constructor(place, cancel) {
    Object.assign(this, { _place: place, _cancel: cancel });
    this._rows = new Map(); // by what tells requests apart
  }

  /**
   * @param {{data: object[], total: number}} open as `/v1/requests` has it
   * @param {(id: string) => number} promptTokens how many tokens of a prompt have been run, as far as the steps tell
   */
  render(open, promptTokens, words) {
    if (this._words !== words) this._begin(words);
    const rows = new Map();
    for (const request of open.data) {
      const base = `${request.own} ${request.id}`, name = rows.has(base) ? `${base} ${rows.size}` : base; // two may have the same id
      const row = this._rows.get(name) ?? this._row(request);
      rows.set(name, row);
      this._update(row, request, promptTokens);
    }
    for (const [name, { element }] of this._rows) if (!rows.has(name)) element.remove();
    this._rows = rows;
    [...rows.values()].forEach(({ element }, n) => { // one that stays is not moved, which would take the focus away
      if (this._body.children[n] !== element) this._body.insertBefore(element, this._body.children[n] ?? null);
    });
    this._table.hidden = rows.size === 0;
    if (!open.data.some(({ id }) => id === this._refused)) this._tell("");
    this._rest.textContent = rows.size === 0 ? words.noRequests : open.total > rows.size ? words.moreRequests(open.total - rows.size) : "";
  }

  /** An empty table, in this language. */
  _begin(words) {
    this._words = words;
    this._rows.clear();
    const names = ["request", "age", "prompt", "generated", "end"];
    this._table = table(words.openRequests, names.map((name) => words.columns[name]), []);
    this._body = this._table.tBodies[0];
    this._rest = make("p", { className: "hint" });
    this._trouble = make("p", { className: "failure", role: "alert" });
    this._refused = ""; // id of the request that was not cancelled
    this._place.replaceChildren(this._table, this._rest, this._trouble);
  }

  _row({ id, own }) {
    const words = this._words, [age, prompt, said] = [0, 0, 0].map(() => make("span"));
    const bar = make("span", { className: "bar" });
    const end = own
      ? make("button", { type: "button", className: "quiet small", "aria-label": words.cancelRequest(id), onclick: () => this._end(end, id) }, words.cancel)
      : words.notYours;
    const element = make("tr", {},
      make("th", { scope: "row", className: "mono", title: id }, id), make("td", {}, age), make("td", {}, prompt),
      make("td", {}, make("span", { className: "meter", "aria-hidden": "true" }, bar), said),
      make("td", own ? {} : { className: "hint" }, end));
    return { element, age, prompt, said, bar };
  }

  _update({ age, prompt, said, bar }, request, promptTokens) {
    const words = this._words, { prompt_tokens, generated_tokens, max_tokens } = request;
    const read = generated_tokens ? prompt_tokens : Math.min(prompt_tokens, Math.max(request.cached_tokens, promptTokens(request.id)));
    age.textContent = duration(Math.round(request.age * 10) * 1e5);
    prompt.textContent = read < prompt_tokens
      ? words.partOf(grouped(read, words), grouped(prompt_tokens, words)) : grouped(prompt_tokens, words);
    said.textContent = max_tokens ? words.atMost(grouped(generated_tokens, words), grouped(max_tokens, words)) : "–";
    bar.style.width = `${max_tokens ? Math.min(1, generated_tokens / max_tokens) * 100 : 0}%`;
  }

  async _end(button, id) {
    if (button.ariaBusy === "true") return;
    button.ariaBusy = "true"; // and not disabled, which would take the focus away
    this._tell("");
    try {
      await this._cancel(id);
    } catch (failure) {
      this._tell(id, failure.message);
    }
    button.ariaBusy = "false";
  }

  /** Say why a request was not cancelled, as long as it is listed; "" for none. */
  _tell(id, why) {
    this._refused = id;
    setText(this._trouble, id && this._words.notCancelled(id, why));
  }
}
