// Api: the gateway's public API as this page uses it.

import { readEvents } from "./event_stream.js";

const DEFAULT_RETRY_SECONDS = 2;

/** Why an answer will not come. */
export class ApiFailure extends Error {
  /**
   * @param {"away"|"busy"|"limited"|"draining"|"key"|"cancelled"|"broken"|"failed"} kind
   * @param {string} message the server's own words
   * @param {number} retryAfter seconds
   * @param {string} code the error for programs
   * @param {string} param the field of the request that is wrong
   */
  constructor(kind, message = "", retryAfter = DEFAULT_RETRY_SECONDS, code = "", param = "") {
    super(message);
    this.kind = kind;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  /** Whether the same request may succeed later, perhaps with another key. */
  get passes() {
    return ["away", "busy", "limited", "draining", "key"].includes(this.kind);
  }
}

export class Api {
  /** @param {() => string} key the API key, or "" */
  constructor(key) {
    this._key = key;
  }

  async models() {
    return (await (await this._ask("/v1/models")).json()).data;
  }

  /** Resolves when requests are taken now. */
  async ready() {
    await this._ask("/ready");
  }

  /** The wait that holds up the engine, null where there is none. @returns {Promise<{seconds: number, rank: number|null, peers: string, step: number|null}|null>} */
  async wait() {
    const response = await fetch("/health", { cache: "no-store" }).catch(() => null); // 503 where it is long
    return (await response?.json().catch(() => null))?.wait ?? null;
  }

  /**
   * A streamed chat answer: yields OpenAI's chunks.
   * @param {string} id of the request; with it, it can be cancelled
   */
  async *chat(id, body, signal) {
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const ask = (asked) => this._ask("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(asked), signal,
      headers: { "Content-Type": "application/json", "X-Request-Id": id },
    });
    const { max_tokens, ...unbounded } = whole;
    const response = await ask(whole).catch((failure) => {
      if (failure.param !== "max_tokens") throw failure;
      return ask(unbounded); // fewer tokens than `max_tokens` fit in the context: the answer may have these
    });
    yield* objectsOf(response);
  }

  /** End a request in the engine; it may be over already. @throws {ApiFailure} nobody has ended it */
  async cancel(id) {
    await this._ask(`/v1/requests/${id}/cancel`, { method: "POST", keepalive: true }).catch((failure) => {
      if (failure.code !== "request_not_found") throw failure;
    });
  }

  /** Open requests to a model. */
  async requests(model) {
    return (await this._ask(`/v1/requests?${query({ model })}`)).json();
  }

  /** The ranks of a model, and its figures of the last minutes. */
  async cluster(model, signal) {
    return (await this._ask(`/v1/cluster?${query({ model })}`, { signal })).json();
  }

  /** What the ranks of a model do, as it happens. */
  async *clusterEvents(model, signal) {
    yield* objectsOf(await this._ask(`/v1/cluster/events?${query({ model })}`, { signal }));
  }

  /** What was lately seen of them, as a trace for Perfetto. @returns {Promise<Blob>} */
  async clusterTrace(model) {
    return (await this._ask(`/v1/cluster/trace?${query({ model })}`)).blob();
  }

  async _ask(path, options = {}) {
    const headers = { ...options.headers };
    if (this._key()) headers.Authorization = `Bearer ${this._key()}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiFailure("away", error.message);
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    throw failureOf(body.error, response.status, Number(response.headers.get("Retry-After")) || undefined);
  }
}

function query(fields) {
  return new URLSearchParams(fields);
}

/** What a stream of events has, up to its end, which it must say. */
async function* objectsOf(response) {
  try {
    for await (const { event, data } of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (event === "error") throw failureOf(object.error);
      yield object;
    }
  } catch (error) {
    if (error instanceof ApiFailure || error.name === "AbortError") throw error;
  }
  throw new ApiFailure("broken");
}

function failureOf(error, status = 0, retryAfter = undefined) {
  const { message = `HTTP ${status}`, code = "", param = "" } = error ?? {};
  if (status === 401) return new ApiFailure("key", message);
  if (status === 429) return new ApiFailure("limited", message, retryAfter);
  if (code === "draining") return new ApiFailure("draining", message);
  if (code === "overloaded") return new ApiFailure("busy", message, retryAfter);
  if (status === 502 || status === 503 || status === 504) return new ApiFailure("away", message, retryAfter);
  if (code === "request_cancelled") return new ApiFailure("cancelled", message);
  return new ApiFailure("failed", message, undefined, code ?? "", param ?? "");
}
