// Chart: one or two figures over the last minutes, with axes.

import { make } from "../element.js";
import { roundUp } from "./geometry.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132, TOP = 8, BOTTOM = 22, LEFT = 40, RIGHT = 10;
const MINUTE_US = 60e6;
const NARROW_PX = 230; // with a mark every other minute
const LINES = [0, 0.5, 1]; // of the axis

export class Chart {
  /**
   * @param {object} kind
   * @param {string} kind.title key of the words
   * @param {{word: string, figure: (point: object) => number}[]} kind.series the second one is dashed
   * @param {(value: number) => string} kind.format
   * @param {number} [kind.least] what the axis reaches at least
   * @param {(point: object, words: object) => string} [kind.also] said beside the current value
   */
  constructor(kind) {
    this._kind = kind;
    this._heading = make("h3");
    this._values = make("p", { className: "values" });
    this._svg = element("svg", { class: "plot", role: "img" });
    this.place = make("figure", { className: "chart" }, make("figcaption", {}, this._heading, this._values), this._svg);
  }

  /** @param {import("./history.js").History} history */
  render(history, words) {
    const { title, series, format, least = 0, also } = this._kind, { latest } = history;
    const lines = series.map(({ figure }) => history.runs(figure));
    const highest = Math.max(0, ...lines.flat(2).map(([, value]) => value));
    this._heading.textContent = words[title];
    this._values.replaceChildren(...series.map(({ word, figure }, i) => make("span", { className: "value" },
      ...(series.length > 1 ? [make("span", { className: `stroke series-${i}` })] : []),
      make("strong", {}, latest ? format(figure(latest)) : "–"),
      !also ? ` ${words[word]}` : latest ? ` ${also(latest, words)}` : "")));
    this._svg.setAttribute("aria-label", latest
      ? words.chartSays(words[title], series.map(({ word, figure }) => `${words[word]} ${format(figure(latest))}`).join(words.comma), format(highest))
      : words.chartEmpty(words[title]));
    this._plot(history, lines, roundUp(Math.max(least, highest)), words);
  }

  _plot(history, lines, most, words) {
    const width = this._svg.clientWidth;
    if (!width) return;
    const bottom = HEIGHT - BOTTOM, { begin, end } = history;
    const x = (time) => LEFT + (width - LEFT - RIGHT) * (time - begin) / (end - begin);
    const y = (value) => bottom - (bottom - TOP) * Math.min(1, value / most);
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = LINES.flatMap((share) => [
      element("path", { class: "rule", d: `M${LEFT} ${y(share * most)}H${width - RIGHT}` }),
      text(LEFT - 6, y(share * most) + 4, "end", this._kind.format(share * most)),
    ]);
    if (history.latest) {
      const every = width < NARROW_PX ? 2 * MINUTE_US : MINUTE_US;
      for (let time = Math.ceil(begin / every) * every; time <= end; time += every) {
        parts.push(element("path", { class: "rule", d: `M${x(time)} ${bottom}v4` }));
        const label = new Date(time / 1000).toLocaleTimeString(words.language, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
        if (x(time) > LEFT + 12 && x(time) < width - 22) parts.push(text(x(time), HEIGHT - 4, "middle", label));
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
    this._svg.replaceChildren(...parts);
  }
}

function element(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function text(x, y, anchor, content) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
