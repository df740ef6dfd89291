// Time intervals: sorted arrays of disjoint [begin, end].

/** Union of intervals. @param {[number, number][]} intervals in any order @param {number} join maximum gap to close */
export function union(intervals, join = 0) {
  const found = [];
  for (const [begin, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    if (end <= begin) continue;
    const last = found.at(-1);
    if (last && begin <= last[1] + join) last[1] = Math.max(last[1], end);
    else found.push([begin, end]);
  }
  return found;
}

/** Intersection. */
export function intersection(one, other) {
  const found = [];
  for (let i = 0, j = 0; i < one.length && j < other.length;) {
    const begin = Math.max(one[i][0], other[j][0]), end = Math.min(one[i][1], other[j][1]);
    if (begin < end) found.push([begin, end]);
    if (one[i][1] < other[j][1]) i++;
    else j++;
  }
  return found;
}

/** Complement within [begin, end]. */
export function complement(intervals, begin, end) {
  const found = [];
  let at = begin;
  for (const [from, to] of intervals) {
    if (from > at) found.push([at, Math.min(from, end)]);
    at = Math.max(at, to);
    if (at >= end) return found;
  }
  if (at < end) found.push([at, end]);
  return found;
}

/** Total length. */
export function total(intervals) {
  return intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);
}
