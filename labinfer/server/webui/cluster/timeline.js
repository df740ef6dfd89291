// Timeline: recent trace slices of every rank, by step. Times are microseconds since 1970, by the ranks' clocks.

import { union } from "./intervals.js";

const KEPT_US = 60e6;
const KEPT_SLICES = 50000; // maximum number of slices of all ranks: some seconds of short steps on eight ranks
const BETWEEN_US = 20e3; // a gap of at most this length between two events is no loss of slices: not all work is a slice
const BACK_US = 5e6; // if a rank's new slices are older than its last ones by more, its clock was set back
const TYPICAL_STEPS = 50; // number of steps whose median is the typical step time
const LEFT_OUT = new Set(["step"]); // names of slices that are not shown, as they enclose other slices

/**
 * @typedef {{name: string, begin: number, end: number, step: number}} Slice step is -1 outside a step
 * @typedef {{step: number, prefill_tokens: number, decode_tokens: number, num_sequences: number, sequences: object[]}} Step
 */

export class Timeline {
  constructor() {
    this.clear();
  }

  clear() {
    this._slices = new Map(); // rank → slices, by begin time
    this._steps = new Map();
    this._lastStep = -1;
    this._wasCut = false;
    /** Time intervals with complete slices; there may be gaps between events. @type {[number, number][]} */
    this.covered = [];
  }

  /** @param {object} news event `cluster.steps` */
  add(news) {
    const numbers = news.steps.map(({ step }) => step);
    const isNewServer = Math.min(...numbers) <= this._lastStep; // every server numbers its steps from 0, and sends a step once
    if (isNewServer || news.ranks.some((rank) => this._goesBack(rank))) this.clear();
    this._lastStep = Math.max(this._lastStep, ...numbers);
    for (const step of news.steps) this._steps.set(step.step, step);
    for (const { rank, slices } of news.ranks) this._append(rank, slices);
    const known = knownTime(news, this._wasCut, this._steps);
    if (known && !this._wasCut && known[0] - this.end < BETWEEN_US) known[0] = Math.min(known[0], this.end);
    if (known) this.covered = union([...this.covered, known]);
    this._wasCut = news.dropped > 0;
    this._trim();
  }

  get isEmpty() {
    return this.covered.length === 0;
  }

  /** Begin of the recorded time, in microseconds since 1970. */
  get begin() {
    return this.covered[0]?.[0] ?? 0;
  }

  /** End of the recorded time, in microseconds since 1970. */
  get end() {
    return this.covered.at(-1)?.[1] ?? 0;
  }

  /** @returns {number[]} ranks with slices */
  get ranks() {
    return [...this._slices.keys()].sort((a, b) => a - b);
  }

  /** Slices of a rank that overlap [begin, end]. @returns {Slice[]} */
  slices(rank, begin = this.begin, end = this.end) {
    return (this._slices.get(rank) ?? []).filter((slice) => slice.begin < end && slice.end > begin);
  }

  /** @returns {Step | undefined} contents of a step; undefined if not recorded */
  step(number) {
    return this._steps.get(number);
  }

  /** Number of prompt tokens that a request had run after its latest recorded prefill step; 0 without one. @param {string} request */
  promptTokens(request) {
    const chunks = [...this._steps.values()].flatMap(({ sequences }) => sequences.filter((one) => one.request === request && !one.decode));
    const { context = 0, tokens = 0 } = chunks.at(-1) ?? {};
    return context + tokens;
  }

  /** Whether a slice can be shown: its step is recorded, or it lies in recorded time. @param {Slice} slice */
  isClear({ begin, end, step }) {
    return this._steps.has(step) || this.covered.some(([from, to]) => begin < to && end > from);
  }

  /** Slices of a step. @returns {Map<number, Slice[]>} rank to slices */
  slicesOfStep(number) {
    return new Map(this.ranks
      .map((rank) => [rank, this._slices.get(rank).filter(({ step }) => step === number)])
      .filter(([, slices]) => slices.length));
  }

  /** Sorted numbers of the steps that ran in [begin, end]. */
  stepsIn(begin = this.begin, end = this.end) {
    const numbers = new Set();
    for (const rank of this.ranks) {
      for (const slice of this.slices(rank, begin, end)) if (slice.name === "run" && this.isClear(slice)) numbers.add(slice.step);
    }
    return [...numbers].sort((a, b) => a - b);
  }

  /** Median time between the beginnings of steps on the first rank; the median ignores idle time. */
  get stepTime() {
    const begins = this.slices(this.ranks[0]).filter(({ name }) => name === "run").slice(-TYPICAL_STEPS).map(({ begin }) => begin);
    const gaps = begins.slice(1).map((begin, n) => begin - begins[n]).sort((a, b) => a - b);
    return gaps[Math.floor(gaps.length / 2)] ?? 0;
  }

  _goesBack({ rank, slices }) {
    const last = this._slices.get(rank)?.at(-1);
    return last !== undefined && slices.length > 0 && slices.at(-1)[2] < last.end - BACK_US;
  }

  _append(rank, rows) {
    const kept = this._slices.get(rank) ?? [];
    const last = kept.at(-1)?.begin ?? 0;
    for (const [name, begin, end, step] of rows) if (!LEFT_OUT.has(name)) kept.push({ name, begin, end, step });
    if (rows.some(([, begin]) => begin < last)) kept.sort((a, b) => a.begin - b.begin);
    this._slices.set(rank, kept);
  }

  /** Drop the oldest slices of all ranks. */
  _trim() {
    const all = [...this._slices.values()];
    const perRank = Math.max(1, Math.floor(KEPT_SLICES / all.length));
    const from = Math.max(this.end - KEPT_US, ...all.map((slices) => slices.at(-perRank)?.begin ?? 0));
    if (from <= this.begin) return;
    for (const [rank, slices] of this._slices) this._slices.set(rank, slices.filter(({ begin }) => begin >= from));
    this.covered = this.covered.filter(([, end]) => end > from).map(([begin, end]) => [Math.max(begin, from), end]);
    const known = new Set([...this._slices.values()].flatMap((slices) => slices.map(({ step }) => step)));
    const last = Math.max(...known); // later steps may still get slices
    for (const number of this._steps.keys()) if (!known.has(number) && number < last) this._steps.delete(number);
  }
}

/**
 * Time interval in which the slices of all ranks are complete. A rank with a full buffer sends only its first slices;
 *   slices of other ranks, and of steps that were dropped, may be later.
 * @param {boolean} afterCut whether the previous event had dropped slices, too
 * @param {Map<number, Step>} steps recorded steps
 */
function knownTime({ begin_us, end_us, dropped, ranks }, afterCut, steps) {
  const ofRanks = ranks.map(({ slices }) => slices).filter((slices) => slices.length), all = ofRanks.flat();
  if (!all.length) return null;
  const begin = afterCut ? Math.max(...ofRanks.map((slices) => Math.min(...slices.map((slice) => slice[1])))) : begin_us;
  const first = Math.min(...all.map(([, , , step]) => step).filter((step) => steps.has(step)));
  const end = !dropped ? end_us : Math.min(
    ...ofRanks.map((slices) => Math.max(...slices.map((slice) => slice[2]))),
    ...all.filter(([, , , step]) => step > first && !steps.has(step)).map((slice) => slice[1]),
  );
  return begin < end ? [begin, end] : null;
}
