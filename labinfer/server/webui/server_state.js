// ServerState: whether the server takes requests, asked about every few seconds: often while it does not.

const OFTEN_MS = 1500;
const SELDOM_MS = 5000;

export class ServerState extends EventTarget {
  constructor(api) {
    super();
    this._api = api;
    this._timer = 0;
    this._round = 0;
    this._waiting = 0; // requests
    /** "" where all is well, else the kind of an ApiFailure. */
    this.trouble = "";
    /** The wait of ranks that holds up all answers; null where there is none. See ``Api.wait``. */
    this.wait = null;
    this.models = [];
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    addEventListener("online", () => this.check());
  }

  /**
   * Ask now, and tell listeners what has changed.
   * @param {boolean} fresh whether to ask for the models again; that needs a valid key, and being ready does not
   */
  async check(fresh = false) {
    clearTimeout(this._timer);
    const round = ++this._round;
    let trouble = "", models = this.models, wait = null;
    try {
      await this._api.ready();
      if (fresh || this.trouble || !models.length) models = await this._api.models();
    } catch (failure) {
      trouble = failure.kind === "busy" ? "loading" : failure.kind ?? "failed"; // /ready is never merely busy
    }
    if (trouble !== "away") wait = await this._api.wait();
    if (round !== this._round) return; // a later check is on its way
    const changed = trouble !== this.trouble || models !== this.models || wait !== this.wait;
    this.wait = wait;
    this.trouble = trouble;
    this.models = models;
    if (changed) this.dispatchEvent(new Event("change"));
    if (document.hidden && !this._waiting) return; // it asks when somebody looks again
    this._timer = setTimeout(() => this.check(), trouble && trouble !== "key" ? OFTEN_MS : SELDOM_MS);
  }

  /** Resolves when the server takes requests, or `signal` is aborted, or `seconds` have passed since it did. */
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
