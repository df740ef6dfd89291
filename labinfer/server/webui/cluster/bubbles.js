// How much of the time a rank waited while there was work: its bubble.

import { intersection, total, union } from "./intervals.js";

const COMPUTING = new Set(["prepare", "run", "sample"]);
const JOIN_US = 20e3; // between two turns of the engine there is still work

/** Whether a rank computes in a slice of this name; all other time is its bubble, as long as there is work. */
export function computes(name) {
  return COMPUTING.has(name);
}

/** Whether a slice says that there was work: all but the wait of a rank for the next plan. */
function isWork({ name, step }) {
  return step >= 0 || name === "engine";
}

/**
 * When there was work for anyone, of the time that is known and lies in [begin, end], and how much of it was bubbles.
 * @param {import("./timeline.js").Timeline} timeline
 * @returns {{work: [number, number][], overall: number | null, ofRank: Map<number, number>}} shares from 0 to 1; none where there
 *   was no work
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
