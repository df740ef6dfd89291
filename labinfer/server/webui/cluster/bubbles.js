// Bubbles: time in which a rank waited while there was work.

import { intersection, total, union } from "./intervals.js";

const COMPUTING = new Set(["prepare", "run", "sample"]);
const JOIN_US = 20e3; // a gap between two steps of at most this length counts as time with work

/** Whether a trace slice of this name is computation; all other time with work is a bubble. */
export function computes(name) {
  return COMPUTING.has(name);
}

/** Whether a trace slice shows that there was work: all slices do, except the wait for the next plan. */
function isWork({ name, step }) {
  return step >= 0 || name === "engine";
}

/**
 * Intervals with work on any rank, within [begin, end] and the recorded time, and the bubble share of that time.
 * @param {import("./timeline.js").Timeline} timeline
 * @returns {{work: [number, number][], overall: number | null, ofRank: Map<number, number>}} fractions from 0 to 1; null or missing
 *   without work
 */
export function findBubbles(timeline, begin, end) {
  const working = timeline.ranks.flatMap((rank) => timeline.slices(rank, begin - JOIN_US, end + JOIN_US).filter(isWork));
  const work = intersection(intersection(union(working.map(ends), JOIN_US), timeline.covered), [[begin, end]]);
  const time = total(work), ofRank = new Map();
  for (const rank of time ? timeline.ranks : []) {
    const busy = union(timeline.slices(rank, begin, end).filter(({ name }) => computes(name)).map(ends));
    ofRank.set(rank, 1 - total(intersection(busy, work)) / time);
  }
  const shares = [...ofRank.values()];
  return { work, ofRank, overall: shares.length ? shares.reduce((sum, share) => sum + share) / shares.length : null };
}

function ends({ begin, end }) {
  return [begin, end];
}
