// RequestsView: open requests, with callers, states and progress; own requests can be cancelled.

import { byId, make, setText } from "../element.js";
import { table } from "./table.js";
import { duration, grouped } from "./units.js";

const ANONYMOUS = "anonymous"; // caller on a server without API keys

export class RequestsView {
  /** @param {HTMLElement} place @param {(id: string) => Promise<void>} cancel */
  constructor(place, cancel) {
    Object.assign(this, { _place: place, _cancel: cancel });
    this._rows = new Map(); // row by row key; see `render`
  }

  /**
   * @param {{data: object[], total: number, running: number}} open response of `/v1/requests`
   * @param {(id: string) => number} promptTokens prompt tokens that the steps in view have run, by request id
   */
  render(open, promptTokens, words) {
    if (this._words !== words) this._begin(words);
    const rows = new Map();
    for (const request of open.data) {
      const base = `${request.own} ${request.id}`, name = rows.has(base) ? `${base} ${rows.size}` : base; // two callers may choose one id
      const row = this._rows.get(name) ?? this._row(request);
      rows.set(name, row);
      this._update(row, request, promptTokens);
    }
    for (const [name, { element }] of this._rows) if (!rows.has(name)) element.remove();
    this._rows = rows;
    [...rows.values()].forEach(({ element }, n) => { // a row is moved only if needed, as a moved row loses the focus
      if (this._body.children[n] !== element) this._body.insertBefore(element, this._body.children[n] ?? null);
    });
    this._table.hidden = rows.size === 0;
    if (!open.data.some(({ id }) => id === this._refused)) this._tell("");
    byId("open-counts").textContent = open.total ? words.openCounts(open.running, open.total - open.running) : "";
    this._rest.textContent = rows.size === 0 ? words.noRequests : open.total > rows.size ? words.moreRequests(open.total - rows.size) : "";
  }

  /** Replace the table by an empty one, with headers in the chosen language. */
  _begin(words) {
    this._words = words;
    this._rows.clear();
    const names = ["request", "caller", "state", "age", "prompt", "generated", "end"];
    this._table = table(words.openRequests, names.map((name) => words.columns[name]), []);
    this._body = this._table.tBodies[0];
    this._rest = make("p", { className: "hint" });
    this._trouble = make("p", { className: "failure", role: "alert" });
    this._refused = ""; // id of the request whose cancellation failed
    this._place.replaceChildren(this._table, this._rest, this._trouble);
  }

  _row({ id, own, caller, user }) {
    const words = this._words, [state, age, prompt, said] = [0, 0, 0, 0].map(() => make("span"));
    const callers = [...(caller === ANONYMOUS ? [] : [caller]), ...(user ? [user] : [])];
    const bar = make("span", { className: "bar" });
    const end = own
      ? make("button", { type: "button", className: "quiet small", "aria-label": words.cancelRequest(id), onclick: () => this._end(end, id) }, words.cancel)
      : "–";
    const element = make("tr", {},
      make("th", { scope: "row", className: "mono", title: id }, id),
      make("td", { className: "caller" }, callers.join(" / ") || "–"), make("td", {}, state), make("td", {}, age), make("td", {}, prompt),
      make("td", {}, make("span", { className: "meter", "aria-hidden": "true" }, bar), said),
      make("td", {}, end));
    return { element, state, age, prompt, said, bar };
  }

  _update({ state, age, prompt, said, bar }, request, promptTokens) {
    const words = this._words, { prompt_tokens, generated_tokens, max_tokens } = request;
    const read = generated_tokens ? prompt_tokens : Math.min(prompt_tokens, Math.max(request.cached_tokens, promptTokens(request.id)));
    state.textContent = words.requestStates[request.state];
    age.textContent = duration(Math.round(request.age * 10) * 1e5);
    prompt.textContent = read < prompt_tokens
      ? words.partOf(grouped(read, words), grouped(prompt_tokens, words)) : grouped(prompt_tokens, words);
    said.textContent = max_tokens ? words.atMost(grouped(generated_tokens, words), grouped(max_tokens, words)) : "–";
    bar.style.width = `${max_tokens ? Math.min(1, generated_tokens / max_tokens) * 100 : 0}%`;
  }

  async _end(button, id) {
    if (button.ariaBusy === "true") return;
    button.ariaBusy = "true"; // not disabled: a disabled button loses the focus
    this._tell("");
    try {
      await this._cancel(id);
    } catch (failure) {
      this._tell(id, failure.message);
    }
    button.ariaBusy = "false";
  }

  /** Show why request `id` could not be cancelled, until it ends; "" shows nothing. */
  _tell(id, why) {
    this._refused = id;
    setText(this._trouble, id && this._words.notCancelled(id, why));
  }
}
