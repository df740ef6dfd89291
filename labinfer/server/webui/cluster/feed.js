// Feed: receives the event stream of a model, and reconnects when the connection is lost.

import { ApiFailure } from "../api.js";

const RETRY_MS = 2000;

export class Feed {
  /**
   * @param {import("../api.js").Api} api
   * @param {object} handlers callbacks: opened(cluster), news(event), closed(failure) when the connection is lost
   */
  constructor(api, handlers) {
    Object.assign(this, { _api: api, _handlers: handlers });
    this._model = "";
    this._running = null; // AbortController of the running stream
  }

  /** Receive the events of a model; "" stops. */
  follow(model) {
    if (model === this._model) return;
    this._model = model;
    this._running?.abort();
    this._running = null;
    if (model) this._run(this._running = new AbortController());
  }

  /** Reconnect at once. */
  retry() {
    this._wake?.();
  }

  async _run(controller) {
    const { signal } = controller, model = this._model;
    while (!signal.aborted) {
      try {
        this._handlers.opened(await this._api.cluster(model, signal));
        for await (const event of this._api.clusterEvents(model, signal)) this._handlers.news(event);
      } catch (failure) {
        if (signal.aborted) return;
        if (!(failure instanceof ApiFailure)) console.error(failure); // any other error is a bug of this page
        this._handlers.closed(failure);
      }
      await this._pause(signal);
    }
  }

  _pause(signal) {
    return new Promise((resolve) => {
      const end = () => {
        clearTimeout(timer);
        signal.removeEventListener("abort", end);
        resolve();
      };
      const timer = setTimeout(end, RETRY_MS);
      signal.addEventListener("abort", end);
      this._wake = end;
    });
  }
}
