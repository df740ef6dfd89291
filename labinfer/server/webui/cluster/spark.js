// Spark: a small curve of a fraction over time. Pointing at it shows the value of that time.

import { make } from "../element.js";
import { element } from "./chart.js";
import { percent, timeOfDay } from "./units.js";

const WIDTH = 112, HEIGHT = 24;

export class Spark {
  /** @param {(point: object) => number | null | undefined} figure from 0 to 1; null or undefined if unknown */
  constructor(figure) {
    this._figure = figure;
    this._pointed = null; // x position of the pointer, in pixels
    this.place = element("svg", { class: "spark", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT });
    this.value = make("span");
    this.time = make("span", { className: "more" });
    this.place.onpointermove = ({ offsetX }) => this._point(offsetX);
    this.place.onpointerleave = () => this._point(null);
  }

  /** @param {import("./history.js").History} history @param {string} title name of the curve */
  render(history, title, words) {
    this._last = { history, title, words };
    const { begin, end, latest } = history;
    const x = (time) => WIDTH * (time - begin) / (end - begin), y = (value) => HEIGHT - 1 - (HEIGHT - 2) * value;
    const runs = history.runs(this._figure);
    const paths = runs.map((run) => run.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("L"));
    const areas = runs.map((run, i) => `M${x(run[0][0]).toFixed(1)} ${HEIGHT}L${paths[i]}L${x(run.at(-1)[0]).toFixed(1)} ${HEIGHT}Z`);
    const pointed = this._pointed === null ? undefined : history.nearest(begin + this._pointed / WIDTH * (end - begin));
    this.place.replaceChildren(
      element("path", { class: "area", d: areas.join("") }), element("path", { class: "curve", d: paths.map((path) => `M${path}h0`).join("") }),
      ...(pointed ? [element("path", { class: "pointed", d: `M${x(pointed.time_us)} 0V${HEIGHT}` })] : []));
    const now = latest && this._figure(latest), most = Math.max(0, ...runs.flat().map(([, value]) => value));
    this.place.setAttribute("aria-label", words.chartSays(title, percent(now), percent(most), words.inRange(history.range / 60e6)));
    this.value.textContent = percent(pointed ? this._figure(pointed) : now);
    this.time.textContent = pointed ? timeOfDay(pointed.time_us, words) : "";
  }

  _point(x) {
    this._pointed = x;
    if (this._last) this.render(this._last.history, this._last.title, this._last.words);
  }
}
