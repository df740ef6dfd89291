// Where things stand in the picture of the pipeline: rows, times, marks on the axis. Lengths are CSS pixels, times microseconds.

export const AXIS_HEIGHT = 24;
const HEAD_HEIGHT = 24; // above the rows of a stage: its name
const STAGE_GAP = 10;
const ROW_HEIGHTS = [[4, 52], [8, 40], [16, 30], [Infinity, 22]]; // up to so many ranks
const NEAR_PX = 5;

/** What is chosen from as the length of time in view. */
export const SPANS = [20e3, 50e3, 200e3, 1e6, 5e6, 30e6];
const STEP_PX = 28; // of a typical step, at least
const NEAR = 1.25; // by what factor it may be less, or more, before another span is taken

/**
 * A row for each rank, those of a stage below each other.
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

/** From times in view to places, and back. */
export class Scale {
  constructor(begin, span, width) {
    Object.assign(this, { begin, end: begin + span, _factor: width / span });
  }

  x(time) { return (time - this.begin) * this._factor; }
  time(x) { return this.begin + x / this._factor; }
  length(time) { return time * this._factor; }
}

/** Round marks from 0 to `span`, at most so many between them. */
export function marks(span, most) {
  const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  return Array.from({ length: Math.floor(span / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** A round number that is no less: the end of a chart's axis. From 2 on its half is whole too: there is no half a request. */
export function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].find((factor) => factor * power >= value * (1 - 1e-9)) * power;
}

/**
 * The longest span in which steps are still told apart.
 * @param {number} stepTime from one step to the next
 * @param {number} current it stays as long as it is not far from that: the picture is not to change back and forth
 */
export function fittingSpan(stepTime, width, current) {
  const longest = (stepPx) => SPANS.findLast((span) => span / stepTime * stepPx <= width) ?? SPANS[0];
  return longest(STEP_PX * NEAR) <= current && current <= longest(STEP_PX / NEAR) ? current : longest(STEP_PX);
}

/**
 * The step at a place of the picture.
 * @param {import("./timeline.js").Slice[]} slices of the rank in whose row it is
 * @returns {number} -1 where there is none
 */
export function stepAt(slices, scale, x) {
  let found = -1, nearest = NEAR_PX;
  for (const { begin, end, step, name } of slices) {
    if (step < 0) continue;
    const away = Math.max(scale.x(begin) - x, x - scale.x(end), 0) + (name.startsWith("wait") ? 0.5 : 0); // work before waits
    if (away < nearest) [found, nearest] = [step, away];
  }
  return found;
}

/** "prefill", "decode", "mixed", or "unknown" where nothing was told of it. @param {import("./timeline.js").Step} [step] */
export function kindOf(step) {
  if (!step) return "unknown";
  if (step.prefill_tokens && step.decode_tokens) return "mixed";
  return step.prefill_tokens ? "prefill" : "decode";
}
