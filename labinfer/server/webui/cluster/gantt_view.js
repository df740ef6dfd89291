// GanttView: the pipeline timeline with row names; scrolled and selected by pointer and keyboard.

import { make } from "../element.js";
import { computes, findBubbles } from "./bubbles.js";
import { AXIS_HEIGHT, layOut, Scale, SPANS, stepAt } from "./geometry.js";
import { GanttPainter } from "./gantt_painter.js";
import { describe } from "./step_view.js";
import { percent } from "./units.js";

const DRAG_PX = 6; // a shorter movement of the pointer is a click
const HOVER_PX = 14; // distance of the tooltip from the pointer
const FAR = 10; // number of steps that Page Up and Page Down move the selection

export class GanttView {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} names row names
   * @param {HTMLElement} hover tooltip
   * @param {import("./timeline.js").Timeline} timeline
   * @param {object} actions callbacks: hold() when the user pauses; select(step), -1 for none; drawn(picture) after
   *   each drawing
   */
  constructor(canvas, names, hover, timeline, actions) {
    Object.assign(this, { _canvas: canvas, _names: names, _hover: hover, _timeline: timeline, _actions: actions });
    this._painter = new GanttPainter(canvas);
    this._layout = layOut([]);
    this._shares = new Map(); // elements with the bubble share, by rank
    this._span = SPANS[2];
    this._selected = -1;
    this._heldEnd = null; // end of a paused view; null while following events
    canvas.onkeydown = (event) => this._onKey(event);
    canvas.onpointerdown = (event) => this._onPointer(event);
    canvas.addEventListener("pointermove", (event) => this._point(event.pointerType === "mouse" && !event.buttons ? event : null));
    canvas.addEventListener("pointerleave", () => this._point(null));
    new ResizeObserver(() => this.render()).observe(canvas);
  }

  /** Visible time span, in microseconds. */
  get span() { return this._span; }
  set span(value) {
    if (this._heldEnd !== null) this._heldEnd = this._clamp(this._heldEnd + (value - this._span) / 2); // keeps the middle of the view
    this._span = value;
    this.select(this._selected);
  }

  /** Visible time. @returns {[number, number]} */
  get inView() {
    const end = this._heldEnd ?? this._timeline.end;
    return [end - this._span, end];
  }

  get selected() { return this._selected; }

  /** Pause: keep the view at its current end. */
  hold() {
    this._heldEnd ??= this._timeline.end;
  }

  /** End a pause: follow the events again. */
  release() {
    this._heldEnd = null;
    this.render();
  }

  /** Select a step, and scroll it into view. */
  select(step) {
    this._selected = step;
    const slices = [...this._timeline.slicesOfStep(step).values()].flat().filter(({ name }) => computes(name));
    if (step >= 0 && slices.length) {
      const begin = Math.min(...slices.map((slice) => slice.begin)), end = Math.max(...slices.map((slice) => slice.end));
      const [from, to] = this.inView;
      if (end - begin > this._span) this._heldEnd = this._clamp(begin + 0.95 * this._span); // of a longer step, show the beginning
      else if (begin < from || end > to) this._heldEnd = this._clamp((begin + end) / 2 + this._span / 2);
    }
    this.render();
  }

  /** @param {object[]} ranks from `/v1/cluster` */
  setRanks(ranks, words) {
    this._layout = layOut(ranks);
    this._words = words;
    this._shares.clear();
    const of = (stage) => ranks.find((rank) => rank.stage === stage);
    const last = (one) => one.first_layer + one.num_layers - 1;
    this._names.replaceChildren(
      ...this._layout.stages.map(({ stage, top }) => placed(top, make("div", { className: "stage" },
        make("strong", {}, words.stage(stage)), ` · ${words.layerRange(of(stage).first_layer, last(of(stage)))}`))),
      ...this._layout.rows.map(({ rank, top, height }) => {
        const share = make("span", { className: "share" });
        this._shares.set(rank, share);
        const row = placed(top, make("div", { className: "name" }, make("span", {}, words.rankName(rank)), share));
        row.style.height = `${height}px`;
        return row;
      }),
    );
    this._canvas.style.height = this._names.style.height = `${this._layout.height}px`;
    this.recolour();
  }

  /** Redraw after a change of theme. */
  recolour() {
    this._painter.readColours();
    this.render();
  }

  /** Redraw in the next animation frame. */
  render() {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      if (this._layout.rows.length && this._canvas.clientWidth) this._draw();
    });
  }

  _draw() {
    const [begin, end] = this.inView;
    const { work, overall, ofRank } = findBubbles(this._timeline, begin, end);
    this._painter.paint(this._timeline, this._layout, this._scale(), work, this._selected);
    for (const [rank, place] of this._shares) {
      place.textContent = ofRank.has(rank) ? this._words.bubbleShare(percent(ofRank.get(rank))) : "";
    }
    this._showHover();
    const steps = this._timeline.stepsIn(begin, end), known = this._timeline.stepsIn();
    this._canvas.setAttribute("aria-valuemin", known[0] ?? 0);
    this._canvas.setAttribute("aria-valuemax", known.at(-1) ?? 0);
    this._canvas.setAttribute("aria-valuenow", this._selected >= 0 ? this._selected : known.at(-1) ?? 0);
    this._actions.drawn({ begin, end, steps, overall });
  }

  _scale() {
    return new Scale(this.inView[0], this._span, this._canvas.clientWidth);
  }

  _clamp(end) {
    return Math.max(Math.min(end, this._timeline.end), Math.min(this._timeline.begin + this._span, this._timeline.end));
  }

  _onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const known = this._timeline.stepsIn(), inView = this._timeline.stepsIn(...this.inView);
    const at = known.indexOf(this._selected);
    const go = (by) => known[Math.max(0, Math.min(known.length - 1, at + by))];
    const step = {
      ArrowLeft: () => (at < 0 ? inView.at(-1) : go(-1)), ArrowRight: () => (at < 0 ? inView[0] : go(1)),
      PageUp: () => (at < 0 ? inView[0] : go(-FAR)), PageDown: () => (at < 0 ? inView.at(-1) : go(FAR)),
      Home: () => inView[0], End: () => inView.at(-1), Escape: () => (at < 0 ? undefined : -1),
    }[event.key]?.();
    if (step === undefined) return;
    event.preventDefault();
    this._actions.select(step);
  }

  _onPointer(event) {
    if (event.button !== 0) return;
    const startX = event.clientX, [, startEnd] = this.inView;
    const pressed = this._stepAt(event.offsetX, event.offsetY); // determined now, as the view may scroll before the pointer goes up
    let drags = false;
    this._canvas.setPointerCapture(event.pointerId);
    this._canvas.onpointermove = ({ clientX }) => {
      if (!drags && Math.abs(clientX - startX) < DRAG_PX) return;
      if (!drags) this._actions.hold();
      drags = true;
      this._heldEnd = this._clamp(startEnd - (clientX - startX) * this._span / this._canvas.clientWidth);
      this.render();
    };
    const end = () => {
      this._canvas.onpointermove = this._canvas.onpointerup = this._canvas.onpointercancel = null;
    };
    this._canvas.onpointercancel = end;
    this._canvas.onpointerup = () => {
      end();
      if (!drags) this._actions.select(pressed);
    };
  }

  /** @param {{offsetX: number, offsetY: number} | null} at pointer position; null outside */
  _point(at) {
    this._pointed = at && { x: at.offsetX, y: at.offsetY };
    this._showHover();
  }

  _showHover() {
    const at = this._pointed, step = at ? this._stepAt(at.x, at.y) : -1;
    this._hover.hidden = step < 0;
    if (step < 0) return;
    this._hover.textContent = `${this._words.step(step)}${this._words.colon}${describe(this._timeline, step, this._words)}`;
    const room = this._canvas.clientWidth - this._hover.offsetWidth;
    this._hover.style.left = `${Math.max(0, Math.min(room, at.x + HOVER_PX))}px`;
    this._hover.style.top = `${at.y + HOVER_PX}px`;
  }

  _stepAt(x, y) {
    const row = this._layout.rows.find(({ top, height }) => y >= top - 2 && y <= top + height + 2);
    if (!row || y >= this._layout.height - AXIS_HEIGHT) return -1;
    const shown = this._timeline.slices(row.rank, ...this.inView).filter((slice) => this._timeline.isClear(slice));
    return stepAt(shown, this._scale(), x);
  }
}

function placed(top, element) {
  element.style.top = `${top}px`;
  return element;
}
