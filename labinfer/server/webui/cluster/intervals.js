// Time intervals: sorted arrays of disjoint [begin, end].

/** Union of intervals. @param {[number, number][]} intervals in any order @param {number} join maximum gap to close */
export function union(intervals, join = 0) {
  const joined = [];
  for (const [begin, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    if (end <= begin) continue;
    const last = joined.at(-1);
    if (last && begin <= last[1] + join) last[1] = Math.max(last[1], end);
    else joined.push([begin, end]);
  }
  return joined;
}

/** Intersection of two arrays of intervals. */
export function intersection(one, other) {
  const overlaps = [];
  for (let i = 0, j = 0; i < one.length && j < other.length;) {
    const begin = Math.max(one[i][0], other[j][0]), end = Math.min(one[i][1], other[j][1]);
    if (begin < end) overlaps.push([begin, end]);
    if (one[i][1] < other[j][1]) i++;
    else j++;
  }
  return overlaps;
}

/** Complement of the intervals within [begin, end]. */
export function complement(intervals, begin, end) {
  const gaps = [];
  let at = begin;
  for (const [from, to] of intervals) {
    if (from > at) gaps.push([at, Math.min(from, end)]);
    at = Math.max(at, to);
    if (at >= end) return gaps;
  }
  if (at < end) gaps.push([at, end]);
  return gaps;
}

/** Total length of the intervals. */
export function total(intervals) {
  return intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);
}
