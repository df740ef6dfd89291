// StepsView: table of the steps in view; rendered only while it is open.

import { make } from "../element.js";
import { kindOf } from "./geometry.js";
import { scrolledTable } from "./table.js";
import { duration, grouped } from "./units.js";

const MOST = 40; // maximum number of rows; older steps are left out

export class StepsView {
  /** @param {HTMLDetailsElement} place @param {(step: number) => void} select @param {() => void} toggled called when the table is opened or closed */
  constructor(place, select, toggled) {
    Object.assign(this, { _place: place, _select: select, _body: place.querySelector("div") });
    place.ontoggle = () => {
      this._draw();
      toggled();
    };
  }

  get isOpen() { return this._place.open; }

  close() {
    this._place.open = false;
  }

  /** @param {number[]} steps numbers of the steps in view */
  render(timeline, steps, selected, words) {
    this._last = { timeline, steps, selected, words };
    this._draw();
  }

  _draw() {
    if (!this._place.open || !this._last) return;
    const { timeline, steps, selected, words } = this._last, focused = document.activeElement?.dataset.step;
    const rows = steps.slice(-MOST).map((number) => {
      const step = timeline.step(number), runs = [...timeline.slicesOfStep(number).values()].flat();
      const whole = Math.max(...runs.map(({ end }) => end)) - Math.min(...runs.map(({ begin }) => begin));
      const button = make("button", {
        type: "button", className: "quiet", "data-step": number, "aria-pressed": number === selected, onclick: () => this._select(number),
      }, String(number));
      return make("tr", {}, make("th", { scope: "row" }, button), make("td", {}, words[kindOf(step)]),
        make("td", {}, step ? grouped(step.num_sequences, words) : "–"),
        make("td", {}, step ? grouped(step.prefill_tokens + step.decode_tokens, words) : "–"), make("td", {}, duration(whole)));
    });
    const columns = ["step", "kind", "sequences", "tokens", "time"].map((name) => words.columns[name]);
    const { scrollLeft, scrollTop } = this._body.firstElementChild ?? { scrollLeft: 0, scrollTop: 0 };
    this._body.replaceChildren(scrolledTable(words.stepsInView, columns, rows));
    this._body.firstElementChild.scrollTo(scrollLeft, scrollTop);
    if (focused) this._body.querySelector(`[data-step="${focused}"]`)?.focus({ preventScroll: true });
  }
}
