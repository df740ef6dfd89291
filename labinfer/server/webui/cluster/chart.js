// Chart: one or two curves over time, with axes. Pointing at it shows the values of that time.

import { make } from "../element.js";
import { roundUp } from "./geometry.js";
import { timeOfDay } from "./units.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132, TOP = 8, BOTTOM = 22, LEFT = 40, RIGHT = 10; // pixels
const MINUTE_US = 60e6;
const MARKS = new Map([[5, [1, 2]], [15, [3, 6]], [60, [15, 30]]]); // range → interval of time marks, also in a narrow chart; in minutes
const NARROW_PX = 230;
const LINES = [0, 0.5, 1]; // grid lines, as fractions of the axis

export class Chart {
  /**
   * @param {object} kind
   * @param {string} kind.title key of the words
   * @param {{word: string, figure: (point: object) => number | null | undefined}[]} kind.series the second curve is dashed
   * @param {(value: number | null | undefined) => string} kind.format
   * @param {number} [kind.least] minimum upper end of the axis
   * @param {number} [kind.left] width of the axis labels, in pixels
   * @param {(point: object, words: object) => string} [kind.also] text beside the current value
   */
  constructor(kind) {
    this._kind = kind;
    this._heading = make("h3");
    this._values = make("p", { className: "values" });
    this._svg = element("svg", { class: "plot", role: "img" });
    this._pointed = null; // x position of the pointer, in pixels
    this._left = kind.left ?? LEFT;
    this._svg.onpointermove = ({ offsetX }) => this._point(offsetX);
    this._svg.onpointerleave = () => this._point(null);
    this.place = make("figure", { className: "chart" }, make("figcaption", {}, this._heading, this._values), this._svg);
  }

  /** @param {import("./history.js").History} history */
  render(history, words) {
    const { title, series, format, least = 0, also } = this._kind, { latest } = history;
    const pointed = this._pointedPoint(history), shown = pointed ?? latest;
    this._last = { history, words };
    const lines = series.map(({ figure }) => history.runs(figure));
    const highest = Math.max(0, ...lines.flat(2).map(([, value]) => value));
    this._heading.textContent = pointed ? `${words[title]} · ${timeOfDay(pointed.time_us, words)}` : words[title];
    this._values.replaceChildren(...series.map(({ word, figure }, i) => make("span", { className: "value" },
      ...(series.length > 1 ? [make("span", { className: `stroke series-${i}` })] : []),
      make("strong", {}, shown ? format(figure(shown)) : "–"),
      !also ? ` ${words[word]}` : shown ? ` ${also(shown, words)}` : "")));
    const said = latest && series.map(({ word, figure }) => `${words[word]} ${format(figure(latest))}`).join(words.comma);
    this._svg.setAttribute("aria-label", latest
      ? words.chartSays(words[title], said, format(highest), words.inRange(history.range / MINUTE_US))
      : words.chartEmpty(words[title], words.inRange(history.range / MINUTE_US)));
    this._plot(history, lines, roundUp(Math.max(least, highest)), words, pointed);
  }

  _point(x) {
    this._pointed = x;
    if (this._last) this.render(this._last.history, this._last.words);
  }

  _pointedPoint(history) {
    if (this._pointed === null) return undefined;
    const share = (this._pointed - this._left) / (this._svg.clientWidth - this._left - RIGHT);
    return history.nearest(history.begin + share * (history.end - history.begin));
  }

  _plot(history, lines, most, words, pointed) {
    const width = this._svg.clientWidth;
    if (!width) return;
    const bottom = HEIGHT - BOTTOM, left = this._left, { begin, end } = history;
    const x = (time) => left + (width - left - RIGHT) * (time - begin) / (end - begin);
    const y = (value) => bottom - (bottom - TOP) * Math.min(1, value / most);
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = LINES.flatMap((share) => [
      element("path", { class: "rule", d: `M${left} ${y(share * most)}H${width - RIGHT}` }),
      text(left - 6, y(share * most) + 4, "end", this._kind.format(share * most)),
    ]);
    if (history.latest) {
      const every = MARKS.get(history.range / MINUTE_US)[width < NARROW_PX ? 1 : 0] * MINUTE_US;
      for (let time = Math.ceil(begin / every) * every; time <= end; time += every) {
        parts.push(element("path", { class: "rule", d: `M${x(time)} ${bottom}v4` }));
        if (x(time) > left + 12 && x(time) < width - 22) parts.push(text(x(time), HEIGHT - 4, "middle", timeOfDay(time, words, false)));
      }
    }
    lines.forEach((runs, i) => {
      const points = (run) => run.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
      if (i === 0) {
        const areas = runs.map((run) => `M${x(run[0][0]).toFixed(1)} ${bottom}L${points(run)}L${x(run.at(-1)[0]).toFixed(1)} ${bottom}Z`);
        parts.push(element("path", { class: "area", d: areas.join("") }));
      }
      parts.push(element("path", { class: `curve series-${i}`, d: runs.map((run) => `M${points(run)}h0`).join("") }));
    });
    if (pointed) parts.push(element("path", { class: "pointed", d: `M${x(pointed.time_us)} ${TOP}V${bottom}` }));
    this._svg.replaceChildren(...parts);
  }
}

/** A new SVG element. */
export function element(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function text(x, y, anchor, content) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
