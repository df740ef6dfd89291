// GanttPainter: draws the pipeline timeline on a canvas. Prefill, decode and mixed steps differ in colour and pattern.

import { computes } from "./bubbles.js";
import { AXIS_HEIGHT, kindOf, marks } from "./geometry.js";
import { complement } from "./intervals.js";
import { duration } from "./units.js";

const COLOURS = ["prefill", "decode", "mixed", "unknown", "on-step", "bubble", "missing", "wait", "line", "soft", "text", "ground"];
const LABEL_PX = 11;
const LABEL_ROOM = 6; // minimum space around a label, in pixels
const DIGIT_PX = 6; // minimum width of a digit; the text of narrower slices is not measured, as measuring is slower than drawing
const ROUND_PX = 8; // bars of narrower steps have square corners
const MARK_PX = 110; // approximate distance of two axis marks
const PATTERN_PX = 5; // bars of narrower steps have no pattern
const BESIDE = 0.62; // height of the bars of `prepare` and `sample`, relative to `run`

export class GanttPainter {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this._canvas = canvas;
    this._context = canvas.getContext("2d");
  }

  /** Read the colours from the styles, as after a change of theme. */
  readColours() {
    const style = getComputedStyle(this._canvas);
    this._colour = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this._font = `${LABEL_PX}px ${style.fontFamily}`;
    this._patterns = {
      prefill: this._pattern(this._colour["on-step"], (draw) => {
        for (const shift of [-4, 0, 4]) { draw.moveTo(shift - 2, shift + 10); draw.lineTo(shift + 10, shift - 2); }
      }),
      mixed: this._pattern(this._colour["on-step"], (draw) => { draw.moveTo(-1, 4); draw.lineTo(9, 4); }),
      missing: this._pattern(this._colour.missing, (draw) => { draw.moveTo(-2, -2); draw.lineTo(10, 10); }),
    };
  }

  /**
   * @param {import("./timeline.js").Timeline} timeline
   * @param {ReturnType<import("./geometry.js").layOut>} layout
   * @param {import("./geometry.js").Scale} scale
   * @param {[number, number][]} work intervals with work
   * @param {number} selected step number, or -1
   */
  paint(timeline, layout, scale, work, selected) {
    const draw = this._context, density = devicePixelRatio || 1, width = this._canvas.clientWidth;
    if (this._canvas.width !== Math.round(width * density)) this._canvas.width = Math.round(width * density);
    if (this._canvas.height !== Math.round(layout.height * density)) this._canvas.height = Math.round(layout.height * density);
    draw.setTransform(density, 0, 0, density, 0, 0);
    draw.clearRect(0, 0, width, layout.height);
    draw.font = this._font;
    draw.textBaseline = "middle";
    this._axis(layout, scale, width);
    const missing = complement(timeline.covered, Math.max(scale.begin, timeline.begin), Math.min(scale.end, timeline.end));
    for (const row of layout.rows) {
      this._bands(row, scale, work, this._colour.bubble);
      this._bands(row, scale, missing, this._patterns.missing);
      for (const slice of timeline.slices(row.rank, scale.begin, scale.end)) {
        if (!timeline.isClear(slice)) continue;
        draw.globalAlpha = selected < 0 || slice.step === selected ? 1 : 0.38;
        if (computes(slice.name)) this._block(row, scale, slice, kindOf(timeline.step(slice.step)), slice.step === selected);
        else if (slice.name !== "engine" && slice.name !== "wait for a plan") this._line(row, scale, slice);
      }
      draw.globalAlpha = 1;
    }
    if (selected >= 0) this._way(timeline.slicesOfStep(selected), layout, scale);
  }

  _axis(layout, scale, width) {
    const draw = this._context, bottom = layout.height - AXIS_HEIGHT, span = scale.end - scale.begin;
    const all = marks(span, Math.max(2, Math.round(width / MARK_PX)));
    for (const mark of all) {
      const x = Math.round(scale.length(mark)) + 0.5, text = duration(mark);
      draw.fillStyle = this._colour.line;
      const left = Math.min(x, width - 1) - 0.5;
      for (const { top, height } of layout.rows) draw.fillRect(left, top - 2, 1, height + 4);
      draw.fillRect(left, bottom, 1, 4);
      draw.fillStyle = this._colour.soft;
      draw.textAlign = mark === 0 ? "left" : x > width - 30 ? "right" : "center";
      draw.fillText(text, Math.min(x, width - 1), bottom + 15);
    }
    draw.textAlign = "center";
  }

  _bands(row, scale, intervals, fill) {
    this._context.fillStyle = fill;
    for (const [begin, end] of intervals) this._context.fillRect(scale.x(begin), row.top, scale.length(end - begin), row.height);
  }

  /** Draw a trace slice of computation as a bar with the number of the step. */
  _block(row, scale, { name, begin, end, step }, kind, isSelected) {
    const draw = this._context, whole = scale.length(end - begin);
    const x = scale.x(begin), width = whole > 4 ? whole - 1 : whole; // leaves a gap between neighbours
    const height = name === "run" ? row.height : Math.round(row.height * BESIDE), y = row.top + (row.height - height) / 2;
    draw.fillStyle = this._colour[kind];
    if (width <= PATTERN_PX && !isSelected) {
      draw.fillRect(x, y, width, height);
      return;
    }
    draw.beginPath();
    draw.roundRect(x, y, width, height, width > ROUND_PX ? 3 : 0);
    draw.fill();
    const pattern = this._patterns[kind];
    if (pattern && width > PATTERN_PX) {
      draw.fillStyle = pattern;
      draw.fill();
    }
    if (isSelected) {
      draw.strokeStyle = this._colour.text;
      draw.lineWidth = width > ROUND_PX ? 2 : 1;
      draw.stroke();
    }
    const left = Math.max(x, 0), right = Math.min(x + width, this._canvas.clientWidth); // the visible part
    if (name !== "run" || right - left < DIGIT_PX + LABEL_ROOM) return;
    const text = [String(step), `…${String(step).slice(-2)}`].find((one) => draw.measureText(one).width + LABEL_ROOM <= right - left);
    if (!text) return;
    const room = draw.measureText(text).width + LABEL_ROOM, middle = (left + right) / 2;
    if (pattern) { // a background without pattern for the label
      draw.fillStyle = this._colour[kind];
      draw.fillRect(middle - room / 2 + 1, y + height / 2 - LABEL_PX / 2 - 2, room - 2, LABEL_PX + 4);
    }
    draw.fillStyle = this._colour["on-step"];
    draw.fillText(text, middle, y + height / 2 + 0.5);
  }

  /** Draw a trace slice of work outside the model as a thin line, and a wait as a dotted line. */
  _line(row, scale, { name, begin, end }) {
    const draw = this._context, y = Math.round(row.top + row.height / 2) + 0.5, waits = name.startsWith("wait");
    if (scale.length(end - begin) < 0.5) return;
    draw.strokeStyle = this._colour.wait;
    draw.lineWidth = waits ? 1 : 5;
    draw.setLineDash(waits ? [2, 3] : []);
    draw.beginPath();
    draw.moveTo(scale.x(begin), y);
    draw.lineTo(scale.x(end), y);
    draw.stroke();
    draw.setLineDash([]);
  }

  /** Connect the slices of a step from stage to stage. */
  _way(slices, layout, scale) {
    const draw = this._context, places = [];
    for (const row of layout.rows) {
      const run = slices.get(row.rank)?.find(({ name }) => name === "run");
      if (run) places.push({ row, run });
    }
    draw.strokeStyle = this._colour.text;
    draw.lineWidth = 1.5;
    draw.beginPath();
    for (const from of places) {
      const to = places.find(({ row }) => row.stage === from.row.stage + 1);
      if (!to || places.find(({ row }) => row.stage === from.row.stage) !== from) continue;
      draw.moveTo(scale.x(from.run.end), from.row.top + from.row.height);
      draw.lineTo(scale.x(to.run.begin), to.row.top);
    }
    draw.stroke();
  }

  /** A pattern that repeats every 8 pixels. @param {(draw: CanvasRenderingContext2D) => void} path */
  _pattern(colour, path) {
    const tile = document.createElement("canvas"), density = devicePixelRatio || 1, draw = tile.getContext("2d");
    tile.width = tile.height = Math.round(8 * density);
    draw.scale(tile.width / 8, tile.width / 8);
    draw.strokeStyle = colour;
    draw.globalAlpha = 0.7;
    draw.lineWidth = 1.4;
    draw.beginPath();
    path(draw);
    draw.stroke();
    const pattern = this._context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(8 / tile.width));
    return pattern;
  }
}
