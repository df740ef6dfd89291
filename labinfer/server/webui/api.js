// Api: client of the gateway's HTTP API.

import { readEvents } from "./event_stream.js";

const DEFAULT_RETRY_SECONDS = 2;

/** A failed request. */
export class ApiFailure extends Error {
  /**
   * @param {"away"|"busy"|"limited"|"draining"|"key"|"cancelled"|"broken"|"failed"} kind
   * @param {string} message the server's error message
   * @param {number} retryAfter seconds
   * @param {string} code the server's error code
   * @param {string} param name of the invalid request field
   */
  constructor(kind, message = "", retryAfter = DEFAULT_RETRY_SECONDS, code = "", param = "") {
    super(message);
    this.kind = kind;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  /** Whether the request may succeed later without a change, perhaps with another API key. */
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

  /** Resolves if the server accepts requests; see `/ready`. */
  async ready() {
    await this._ask("/ready");
  }

  /** The wait that stalls the engine; null if there is none. @returns {Promise<{seconds: number, rank: number|null, peers: string, step: number|null}|null>} */
  async wait() {
    const response = await fetch("/health", { cache: "no-store" }).catch(() => null); // a long wait gives status 503 with the usual body
    return (await response?.json().catch(() => null))?.wait ?? null;
  }

  /**
   * Stream a chat answer: yields OpenAI's chunks.
   * @param {string} id request id, for `cancel`
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
      return ask(unbounded); // `max_tokens` exceeds the rest of the context: send no limit
    });
    yield* objectsOf(response);
  }

  /** Cancel a request; does nothing if the request has ended. @throws {ApiFailure} the request was not cancelled */
  async cancel(id) {
    await this._ask(`/v1/requests/${id}/cancel`, { method: "POST", keepalive: true }).catch((failure) => {
      if (failure.code !== "request_not_found") throw failure;
    });
  }

  /** Open requests of a model. */
  async requests(model) {
    return (await this._ask(`/v1/requests?${query({ model })}`)).json();
  }

  /** Ranks of a model, and statistics of the model in the last hour. */
  async cluster(model, signal) {
    return (await this._ask(`/v1/cluster?${query({ model })}`, { signal })).json();
  }

  /** Stream statistics and steps of a model. */
  async *clusterEvents(model, signal) {
    yield* objectsOf(await this._ask(`/v1/cluster/events?${query({ model })}`, { signal }));
  }

  /** Trace of the recorded steps, for Perfetto. @returns {Promise<Blob>} */
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

/** JSON objects of an event stream. @throws {ApiFailure} the stream ends without [DONE], or with an error */
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
