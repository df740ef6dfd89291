// Timeline: what every rank has lately done, and for which step. Times are microseconds since 1970, by the ranks' clocks.

import { union } from "./intervals.js";

const KEPT_US = 60e6;
const KEPT_SLICES = 50000; // of all ranks: with eight of them, some seconds at the most that is told
const BETWEEN_US = 20e3; // from the last slice of some news to the first of the next, less is no loss: not all that is done is a slice
const BACK_US = 5e6; // news of a rank that are older than its last ones by more: its clock was set back
const TYPICAL_STEPS = 50; // the last ones tell how long a step takes
const LEFT_OUT = new Set(["step"]); // it is around others, which say more

/**
 * @typedef {{name: string, begin: number, end: number, step: number}} Slice step is -1 where it is of none
 * @typedef {{step: number, prefill_tokens: number, decode_tokens: number, num_sequences: number, sequences: object[]}} Step
 */

export class Timeline {
  constructor() {
    this.clear();
  }

  clear() {
    this._slices = new Map(); // by rank, in order of begin
    this._steps = new Map();
    this._lastStep = -1;
    this._wasCut = false;
    /** The time that is known of: news may leave some out. @type {[number, number][]} */
    this.covered = [];
  }

  /** @param {object} news an event `cluster.steps` */
  add(news) {
    const numbers = news.steps.map(({ step }) => step);
    const isNewServer = Math.min(...numbers) <= this._lastStep; // it counts from 0; within one, no step is told of twice
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

  /** The first moment that is known of. */
  get begin() {
    return this.covered[0]?.[0] ?? 0;
  }

  /** The last one. */
  get end() {
    return this.covered.at(-1)?.[1] ?? 0;
  }

  /** @returns {number[]} ranks of which anything is known */
  get ranks() {
    return [...this._slices.keys()].sort((a, b) => a - b);
  }

  /** Of one rank, where they meet [begin, end]. @returns {Slice[]} */
  slices(rank, begin = this.begin, end = this.end) {
    return (this._slices.get(rank) ?? []).filter((slice) => slice.begin < end && slice.end > begin);
  }

  /** @returns {Step | undefined} what was told of it, which may be nothing */
  step(number) {
    return this._steps.get(number);
  }

  /** How many tokens of a request's prompt were run by the latest step that is known of; 0 where none is. @param {string} request */
  promptTokens(request) {
    const chunks = [...this._steps.values()].flatMap(({ sequences }) => sequences.filter((one) => one.request === request && !one.decode));
    const { context = 0, tokens = 0 } = chunks.at(-1) ?? {};
    return context + tokens;
  }

  /** Whether enough is known of a slice to show it: its step, or all that happened beside it. @param {Slice} slice */
  isClear({ begin, end, step }) {
    return this._steps.has(step) || this.covered.some(([from, to]) => begin < to && end > from);
  }

  /** The slices of one step. @returns {Map<number, Slice[]>} by rank */
  slicesOfStep(number) {
    return new Map(this.ranks
      .map((rank) => [rank, this._slices.get(rank).filter(({ step }) => step === number)])
      .filter(([, slices]) => slices.length));
  }

  /** Numbers of the steps that any rank worked on in [begin, end], in order. */
  stepsIn(begin = this.begin, end = this.end) {
    const found = new Set();
    for (const rank of this.ranks) {
      for (const slice of this.slices(rank, begin, end)) if (slice.name === "run" && this.isClear(slice)) found.add(slice.step);
    }
    return [...found].sort((a, b) => a - b);
  }

  /** From the begin of a step to that of the next one, on the first rank: the median, as there may have been no work between. */
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

  /** Forget the oldest, of all ranks alike. */
  _trim() {
    const all = [...this._slices.values()];
    const perRank = Math.max(1, Math.floor(KEPT_SLICES / all.length));
    const from = Math.max(this.end - KEPT_US, ...all.map((slices) => slices.at(-perRank)?.begin ?? 0));
    if (from <= this.begin) return;
    for (const [rank, slices] of this._slices) this._slices.set(rank, slices.filter(({ begin }) => begin >= from));
    this.covered = this.covered.filter(([, end]) => end > from).map(([begin, end]) => [Math.max(begin, from), end]);
    const known = new Set([...this._slices.values()].flatMap((slices) => slices.map(({ step }) => step)));
    const last = Math.max(...known); // slices of later steps are still to come
    for (const number of this._steps.keys()) if (!known.has(number) && number < last) this._steps.delete(number);
  }
}

/**
 * When it is known what every rank did. A rank that had no room for all its slices, has kept the first ones; those of another may
 * reach further, and so may slices of steps that there was no room for.
 * @param {boolean} afterCut whether there was no room before these news, either
 * @param {Map<number, Step>} steps that something was told of
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
