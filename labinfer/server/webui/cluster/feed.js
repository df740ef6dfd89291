// Feed: the news of a model's ranks, as long as they are wanted; it comes back by itself.

import { ApiFailure } from "../api.js";

const RETRY_MS = 2000;

export class Feed {
  /**
   * @param {import("../api.js").Api} api
   * @param {object} handlers opened(cluster), news(event), closed(failure): against our will
   */
  constructor(api, handlers) {
    Object.assign(this, { _api: api, _handlers: handlers });
    this._model = "";
    this._running = null; // aborts what is under way
  }

  /** The news of this model from now on; of none where it is "". */
  follow(model) {
    if (model === this._model) return;
    this._model = model;
    this._running?.abort();
    this._running = null;
    if (model) this._run(this._running = new AbortController());
  }

  /** Try at once what would be tried again later. */
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
        if (!(failure instanceof ApiFailure)) console.error(failure); // this page is at fault
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
