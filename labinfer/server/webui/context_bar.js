// ContextBar: shows the use of a nearly full context, and offers to drop or summarize messages.

import { asMessages } from "./request_body.js";
import { contextUse, cutOf, SHOWN_FROM } from "./context.js";
import { byId, make } from "./element.js";
import { newId } from "./identity.js";

const SUMMARY_TOKENS = 300;

export class ContextBar {
  /**
   * @param {import("./api.js").Api} api
   * @param {(conversation: object, first: object, summary: string) => void} oncut drops the messages before `first`
   */
  constructor(api, oncut) {
    Object.assign(this, { _api: api, _oncut: oncut, _place: byId("context") });
    this._abort = null; // AbortController of a running summary
    this._trouble = "";
  }

  /** @param {number|undefined} length context length, in tokens @param {boolean} isBusy whether an answer is being generated */
  render(conversation, length, isBusy, words) {
    if (conversation !== this._conversation) this._forget();
    Object.assign(this, { _conversation: conversation, _length: length, _isBusy: isBusy, _words: words });
    const use = contextUse(conversation, length);
    this._place.hidden = isBusy || !use || use.used < SHOWN_FROM * use.length;
    this._place.replaceChildren();
    if (this._place.hidden) return;
    const share = Math.round((100 * use.used) / use.length), cut = cutOf(conversation, use);
    const text = use.overflows ? words.contextOver(use.length) : words.contextFull(share, use.used, use.length);
    const meter = make("span", { className: "meter", "aria-hidden": "true" }, make("span", { className: "bar" }));
    meter.firstChild.style.width = `${share}%`;
    this._place.append(meter, make("span", {}, this._trouble || text), ...(cut ? this._ways(cut) : [make("span", {}, words.contextAlone)]));
  }

  _ways(cut) {
    const words = this._words, button = (label, onclick) => make("button", { type: "button", className: "quiet", onclick }, label);
    if (this._abort) return [make("span", {}, words.summarising), button(words.cancel, () => this._forget(true))];
    return [
      button(words.dropOldest, () => this._oncut(this._conversation, cut.first, "")),
      button(words.summarise, () => this._summarise(cut)),
    ];
  }

  async _summarise({ before, first }) {
    const conversation = this._conversation, { record } = conversation, abort = new AbortController();
    Object.assign(this, { _abort: abort, _trouble: "" });
    this._again();
    const id = newId();
    abort.signal.onabort = () => this._api.cancel(id).catch(() => {}); // a failure is ignored: closing the connection cancels the request, too
    const messages = [...asMessages(before, ""), { role: "user", content: this._words.summaryAsk }];
    const body = { messages, model: record.model, temperature: 0, max_tokens: SUMMARY_TOKENS };
    let summary = "", trouble = "";
    try {
      for await (const { choices: [choice] } of this._api.chat(id, body, abort.signal)) summary += choice?.delta.content ?? "";
    } catch (error) {
      trouble = error.message || error.kind;
    }
    if (this._abort !== abort) return; // cancelled, or another conversation is open
    this._abort = null;
    if (!trouble && summary.trim()) return this._oncut(conversation, first, summary.trim());
    this._trouble = this._words.summaryFailed(trouble);
    this._again();
  }

  _forget(renders = false) {
    this._abort?.abort();
    Object.assign(this, { _abort: null, _trouble: "" });
    if (renders) this._again();
  }

  _again() {
    this.render(this._conversation, this._length, this._isBusy, this._words);
  }
}
