// How much of the time a rank waited while there was work: its bubble.

import { intersection, total, union } from "./intervals.js";

const COMPUTING = new Set(["prepare", "run", "sample"]);
const JOIN_US = 5000; // between two turns of the engine there is still work

/** Whether a rank computes in a slice of this name; all other time is its bubble, as long as there is work. */
export function computes(name) {
  return COMPUTING.has(name);
}

/** Whether a slice says that there was work: all but the wait of a rank for the next plan. */
function isWork({ name, step }) {
  return step >= 0 || name === "engine";
}

/**
 * When there was work for anyone, of the time that is known and lies in [begin, end].
 * @param {import("./timeline.js").Timeline} timeline
 */
export function workPeriods(timeline, begin, end) {
  const slices = timeline.ranks.flatMap((rank) => timeline.slices(rank, begin - JOIN_US, end + JOIN_US).filter(isWork));
  const work = union(slices.map((slice) => [slice.begin, slice.end]), JOIN_US);
  return intersection(intersection(work, timeline.covered), [[begin, end]]);
}

/**
 * The share of bubbles in [begin, end].
 * @returns {{work: number, overall: number | null, ofRank: Map<number, number>}} microseconds in which there was work;
 *   shares from 0 to 1, null where there was none
 */
export function bubbleShares(timeline, begin, end) {
  const periods = workPeriods(timeline, begin, end), work = total(periods), ofRank = new Map();
  for (const rank of work ? timeline.ranks : []) {
    const busy = union(timeline.slices(rank, begin, end).filter(({ name }) => computes(name)).map((slice) => [slice.begin, slice.end]));
    ofRank.set(rank, 1 - total(intersection(busy, periods)) / work);
  }
  const shares = [...ofRank.values()];
  return { work, ofRank, overall: shares.length ? shares.reduce((sum, share) => sum + share) / shares.length : null };
}
