// ExpertsView: heat map of the tokens per expert and layer, and expert-cache stats; hidden for models without
// experts.

import { byId } from "../element.js";
import { bytes, duration, grouped, percent, short } from "./units.js";

const MIN_CELL = 3, MAX_CELL = 18; // CSS pixels
const FULL = 3; // ratio to the mean of the layer from which a cell has the full colour

export class ExpertsView {
  /** @param {HTMLElement} section hidden without experts */
  constructor(section) {
    this._section = section;
    this._layers = [];
    this._canvas = byId("experts-picture");
    this._canvas.addEventListener("pointermove", (event) => this._point(event));
    this._canvas.addEventListener("pointerleave", () => this._say());
    new ResizeObserver(() => this._words && this._paint()).observe(section);
  }

  /** @param {{experts: {layer: number, tokens: number[]}[], expert_reads: object[]}} cluster response of `/v1/cluster` */
  render({ experts: layers = [], expert_reads: reads = [] }, words) {
    Object.assign(this, { _layers: layers, _words: words });
    this._section.hidden = layers.length === 0;
    if (layers.length === 0) return;
    this._canvas.setAttribute("aria-label", this._summary());
    this._paint();
    this._say();
    byId("experts-read").textContent = reads.length ? describeReads(reads, words) : "";
  }

  _paint() {
    const canvas = this._canvas, density = devicePixelRatio || 1, style = getComputedStyle(canvas);
    const columns = Math.max(...this._layers.map(({ tokens }) => tokens.length));
    const width = Math.max(columns * MIN_CELL, Math.min(canvas.parentElement.clientWidth, columns * MAX_CELL));
    this._cell = [width / columns, Math.min(MAX_CELL, Math.max(6, width / columns))];
    const height = this._layers.length * this._cell[1];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    [canvas.width, canvas.height] = [Math.round(width * density), Math.round(height * density)];
    const draw = canvas.getContext("2d");
    draw.setTransform(density, 0, 0, density, 0, 0);
    this._layers.forEach(({ tokens }, row) => {
      const mean = sum(tokens) / tokens.length || 1;
      tokens.forEach((count, column) => {
        draw.globalAlpha = 1;
        draw.fillStyle = style.getPropertyValue("--raised");
        const place = [column * this._cell[0], row * this._cell[1], this._cell[0] - 0.5, this._cell[1] - 0.5];
        draw.fillRect(...place);
        draw.globalAlpha = Math.min(1, count / mean / FULL);
        draw.fillStyle = style.getPropertyValue("--accent");
        draw.fillRect(...place);
      });
    });
  }

  /** Show the values of the cell under the pointer. */
  _point({ offsetX, offsetY }) {
    const item = this._layers[Math.floor(offsetY / this._cell[1])], expert = Math.floor(offsetX / this._cell[0]);
    if (!item || expert >= item.tokens.length) return;
    const count = item.tokens[expert];
    const share = count / (sum(item.tokens) || 1);
    this._say(this._words.expertSays(item.layer, expert, grouped(count, this._words), percent(share)));
  }

  _say(text = this._summary()) {
    byId("experts-say").textContent = text;
  }

  _summary() {
    const peaks = this._layers.map(({ tokens }) => Math.max(...tokens) * tokens.length / (sum(tokens) || 1));
    const idle = sum(this._layers.map(({ tokens }) => tokens.filter((count) => count === 0).length));
    const all = sum(this._layers.map(({ tokens }) => tokens.length));
    return this._words.expertsSay(short(sum(peaks) / peaks.length), grouped(idle, this._words), grouped(all, this._words));
  }
}

function describeReads(ranks, words) {
  const [hits, misses, read] = ["hits", "misses", "bytes_read"].map((name) => sum(ranks.map((rank) => rank[name])));
  const stalled = Math.max(...ranks.map((rank) => rank.stall_seconds));
  return words.expertsRead(percent(hits / (hits + misses || 1)), grouped(hits + misses, words), bytes(read), duration(stalled * 1e6));
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}
