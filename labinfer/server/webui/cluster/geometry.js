// Geometry of the pipeline timeline: rows, times, axis marks. Lengths in CSS pixels, times in microseconds.

export const AXIS_HEIGHT = 24;
const HEAD_HEIGHT = 24; // height of a stage's name, above its rows
const STAGE_GAP = 10;
const ROW_HEIGHTS = [[4, 52], [8, 40], [16, 30], [Infinity, 22]]; // (maximum number of ranks, height of their rows)
const NEAR_PX = 5;

/** Selectable time spans. */
export const SPANS = [20e3, 50e3, 200e3, 1e6, 5e6, 30e6];
const STEP_PX = 28; // minimum width of a typical step
const NEAR = 1.25; // the time span changes only if it would change by a larger factor

/**
 * Positions of the timeline's rows, one per rank, grouped by stage.
 * @param {{rank: number, stage: number}[]} ranks
 * @returns {{height: number, stages: {stage: number, top: number}[], rows: {rank: number, stage: number, top: number, height: number}[]}}
 */
export function layOut(ranks) {
  const [, rowHeight] = ROW_HEIGHTS.find(([most]) => ranks.length <= most);
  const rows = [], stages = [];
  let y = 0;
  for (const { rank, stage } of [...ranks].sort((a, b) => a.stage - b.stage || a.rank - b.rank)) {
    if (stages.at(-1)?.stage !== stage) {
      if (stages.length) y += STAGE_GAP;
      stages.push({ stage, top: y });
      y += HEAD_HEIGHT;
    }
    rows.push({ rank, stage, top: y, height: rowHeight - 4 });
    y += rowHeight;
  }
  return { height: y + AXIS_HEIGHT, rows, stages };
}

/** Conversion between times and x positions. */
export class Scale {
  constructor(begin, span, width) {
    Object.assign(this, { begin, end: begin + span, _factor: width / span });
  }

  x(time) { return (time - this.begin) * this._factor; }
  time(x) { return this.begin + x / this._factor; }
  length(time) { return time * this._factor; }
}

/** Axis marks from 0 to `span` at numbers of few digits, with at most `most` intervals. */
export function marks(span, most) {
  const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  return Array.from({ length: Math.floor(span / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Round `value` up to a number of few digits, for the end of a chart's axis. From 2 on, half of the result is an integer, too, as charts of counts mark the middle. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].find((factor) => factor * power >= value * (1 - 1e-9)) * power;
}

/**
 * Longest selectable time span in which single steps are distinguishable.
 * @param {number} stepTime typical time between steps
 * @param {number} current current span; kept while it is near the best span, so that the view does not oscillate
 */
export function fittingSpan(stepTime, width, current) {
  const longest = (stepPx) => SPANS.findLast((span) => span / stepTime * stepPx <= width) ?? SPANS[0];
  return longest(STEP_PX * NEAR) <= current && current <= longest(STEP_PX / NEAR) ? current : longest(STEP_PX);
}

/**
 * Step at a position of the timeline.
 * @param {import("./timeline.js").Slice[]} slices of the row's rank
 * @returns {number} -1 for none
 */
export function stepAt(slices, scale, x) {
  let closest = -1, nearest = NEAR_PX;
  for (const { begin, end, step, name } of slices) {
    if (step < 0) continue;
    const away = Math.max(scale.x(begin) - x, x - scale.x(end), 0) + (name.startsWith("wait") ? 0.5 : 0); // at equal distance, work precedes waits
    if (away < nearest) [closest, nearest] = [step, away];
  }
  return closest;
}

/** Phase of a step: "prefill", "decode", "mixed", or "unknown" if the step is not recorded. @param {import("./timeline.js").Step} [step] */
export function kindOf(step) {
  if (!step) return "unknown";
  if (step.prefill_tokens && step.decode_tokens) return "mixed";
  return step.prefill_tokens ? "prefill" : "decode";
}
