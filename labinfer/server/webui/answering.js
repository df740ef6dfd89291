// Answering: one streamed chat request, from sending the conversation to the end of the answer or its failure.

import { ApiFailure } from "./api.js";
import { beginOf } from "./context.js";
import { newId } from "./identity.js";
import { requestBody, sentPart } from "./request_body.js";

const SAVE_EVERY_MS = 400;
const TOO_SHORT_MS = 100; // minimum duration for a token rate: tokens of a shorter time may come in one chunk

export class Answering extends EventTarget {
  /**
   * Dispatches "change" when the message has grown, "wait" when the request waits for the server, "unsaved" when the
   *   browser fails to store the message.
   * @param {import("./conversation.js").Conversation} conversation ends with the answer
   * @param {object} message the answer, which grows
   * @param {boolean} goesOn whether to continue a partial answer
   */
  constructor(api, serverState, store, conversation, message, goesOn = false) {
    super();
    Object.assign(this, { api, serverState, store, conversation, message });
    this._abort = new AbortController();
    this._goesOn = goesOn;
    this._tokensBefore = goesOn ? message.stats?.tokens ?? 0 : 0;
    this._saving = 0; // timer of the next save of the message; 0 if the message is saved
    /** ApiFailure after which the request waits for a retry; null while the request runs. */
    this.waitsFor = null;
    /** Promise that the caller of `run` sets; it resolves when the complete message is shown and stored. */
    this.finished = null;
  }

  /** Resolves when the answer is complete, failed or stopped. */
  async run() {
    const body = requestBody(this.conversation, this.message, this._goesOn);
    this.message.from = beginOf(sentPart(this.conversation.path));
    for (;;) {
      try {
        await this._once(body);
        break;
      } catch (error) {
        if (this._abort.signal.aborted || error.kind === "cancelled") {
          this.message.status = "stopped";
          break;
        }
        const failure = error instanceof ApiFailure ? error : new ApiFailure("failed", error.message);
        if (!failure.passes || this._begun) {
          this.message.status = this._begun ? "interrupted" : "failed";
          this.message.failure = { kind: failure.kind, message: failure.message, code: failure.code };
          break;
        }
        await this._wait(failure);
        if (this._abort.signal.aborted) {
          this.message.status = "stopped";
          break;
        }
      }
    }
    this._endReasoning();
    this._measure();
    await this._save();
  }

  /** Stop reading, and cancel the request on the server. */
  stop() {
    this._abort.abort();
    if (this._id) this.api.cancel(this._id).catch(() => {}); // a failure is ignored: closing the connection cancels the request, too
  }

  async _once(body) {
    this._id = newId();
    this._begun = false;
    this._sent = performance.now();
    this._first = this._last = 0;
    this._chunks = 0;
    this._thinksSince = 0;
    this._decoder = new TextDecoder(); // one character may be the bytes of several tokens
    const { message } = this;
    message.model = body.model;
    for await (const chunk of this.api.chat(this._id, body, this._abort.signal)) {
      message.model = chunk.model;
      if (chunk.usage) message.usage = chunk.usage;
      const [choice] = chunk.choices;
      if (choice) this._take(choice);
    }
    this._id = null;
    message.status = "done";
  }

  _take({ delta, logprobs, tokens, finish_reason }) {
    const { message } = this;
    if (delta.content || delta.reasoning || delta.tool_calls || logprobs || tokens) {
      this._last = performance.now();
      this._first ||= this._last;
      this._begun = true;
      this._chunks += 1;
    }
    if (delta.reasoning) {
      this._thinksSince ||= this._last;
      message.reasoning = (message.reasoning ?? "") + delta.reasoning;
    } else if (delta.content || delta.tool_calls) this._endReasoning();
    message.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      message.toolCalls ??= [];
      const known = (message.toolCalls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id += call.id ?? "";
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (logprobs) (message.logprobs ??= []).push(...logprobs.content.map(shortened));
    if (tokens) (message.drafted ??= []).push(...tokens.map((token) => this._spell(token)));
    if (finish_reason) message.finishReason = finish_reason;
    this.dispatchEvent(new Event("change"));
    this._saving ||= setTimeout(() => this._save(), SAVE_EVERY_MS);
  }

  /** Text that a token adds, and whether the token was drafted. A character belongs to the token that completes it. */
  _spell({ token, bytes, drafted }) {
    return [bytes ? this._decoder.decode(new Uint8Array(bytes), { stream: true }) : token, drafted];
  }

  _endReasoning() {
    if (!this._thinksSince) return;
    this.message.thoughtMs = (this.message.thoughtMs ?? 0) + performance.now() - this._thinksSince;
    this._thinksSince = 0;
  }

  async _wait(failure) {
    this.waitsFor = failure;
    this.dispatchEvent(new Event("wait"));
    await this.serverState.until(failure.retryAfter, this._abort.signal);
    this.waitsFor = null;
    this.dispatchEvent(new Event("wait"));
  }

  _measure() {
    const { message } = this;
    if (!this._first) return;
    const tokens = message.usage?.completion_tokens ?? this._chunks;
    const afterFirstMs = this._last - this._first;
    const [counted, ms] = afterFirstMs < TOO_SHORT_MS ? [tokens, this._last - this._sent] : [tokens - 1, afterFirstMs];
    message.stats = { tokens: this._tokensBefore + tokens, about: !message.usage, firstMs: this._first - this._sent, perSecond: (1000 * counted) / ms };
  }

  async _save() {
    clearTimeout(this._saving);
    this._saving = 0;
    await this.store.saveMessage(structuredClone(this.message)).catch(() => this.dispatchEvent(new Event("unsaved")));
  }
}

function shortened({ token, logprob, top_logprobs }) {
  return { token, logprob, top: top_logprobs.map((one) => [one.token, one.logprob]) };
}
