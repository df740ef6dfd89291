// ServerState: whether the server accepts requests, polled every few seconds, and more often while it does not.

const OFTEN_MS = 1500;
const SELDOM_MS = 5000;

export class ServerState extends EventTarget {
  constructor(api) {
    super();
    this._api = api;
    this._timer = 0;
    this._round = 0;
    this._waiting = 0; // number of requests that wait for the server
    /** Why the server does not accept requests: the kind of an ApiFailure; "" if it is ready. */
    this.trouble = "";
    /** Wait of the ranks that stalls all answers, see `Api.wait`; null if there is none. */
    this.wait = null;
    this.models = [];
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    addEventListener("online", () => this.check());
  }

  /**
   * Check the server now. Dispatches "change" if anything has changed.
   * @param {boolean} fresh whether to list the models again, which requires a valid API key
   */
  async check(fresh = false) {
    clearTimeout(this._timer);
    const round = ++this._round;
    let trouble = "", models = this.models, wait = null;
    try {
      await this._api.ready();
      if (fresh || this.trouble || !models.length) models = await this._api.models();
    } catch (failure) {
      trouble = failure.kind === "busy" ? "loading" : failure.kind ?? "failed"; // "busy" of /ready means that models are being loaded
    }
    if (trouble !== "away") wait = await this._api.wait();
    if (round !== this._round) return; // superseded by a later check
    const changed = trouble !== this.trouble || models !== this.models || wait !== this.wait;
    this.wait = wait;
    this.trouble = trouble;
    this.models = models;
    if (changed) this.dispatchEvent(new Event("change"));
    if (document.hidden && !this._waiting) return; // checked again when the page becomes visible
    this._timer = setTimeout(() => this.check(), trouble && trouble !== "key" ? OFTEN_MS : SELDOM_MS);
  }

  /** Resolves after `seconds`. If the server then accepts no requests, resolves when it does; at once if `signal` is aborted. */
  async until(seconds, signal) {
    const end = Date.now() + seconds * 1000;
    this._waiting += 1;
    await this.check(true);
    while (!signal.aborted && (this.trouble || Date.now() < end)) await pause(200);
    this._waiting -= 1;
  }
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
