// History: stats of the last hour, as points. Points older than five minutes are merged, as on the server.

const KEPT_US = 3600e6;
const FINE_US = 300e6; // age above which points are merged
const MERGED_US = 10e6; // seconds that a merged point covers, in microseconds
const GAP_US = 4e6; // a longer time without a point is a gap in a curve
const SHORT_US = 900e3; // a point whose rates cover less time is merged with the next point, as such rates are noise
const TICK_US = 500e3; // interval of stats while there is work
const RATES = ["prompt_tokens_per_second", "generation_tokens_per_second"];

export class History {
  /** @param {() => number} clock monotonic time in milliseconds */
  constructor(clock = () => performance.now()) {
    this._clock = clock;
    /** Time from `begin` to `end`, in microseconds. */
    this.range = FINE_US;
    this.clear();
  }

  clear() {
    /** Points as in `/v1/cluster`, oldest first. */
    this.points = [];
    this._zero = 0; // server time at which this page's clock was 0
  }

  /**
   * Add points; points that are already known are skipped.
   * @param {object[]} points oldest first
   * @param {number} now_us server time; it advances with this page's clock
   */
  add(points, now_us = points.at(-1).time_us) {
    this._zero = now_us - this._clock() * 1000;
    if (points.at(-1)?.time_us < this.latest?.time_us) this.points = []; // the server's clock was set back
    for (const point of points) {
      const { latest } = this;
      if (latest && point.time_us <= latest.time_us) continue;
      if (latest && isShort(latest, point)) this.points[this.points.length - 1] = merge(latest, point);
      else this.points.push(point);
    }
    this._age();
  }

  get latest() {
    return this.points.at(-1);
  }

  /** Server time now. */
  get end() {
    return this._zero + this._clock() * 1000;
  }

  get begin() {
    return this.end - this.range;
  }

  /** The point nearest to a time; undefined if it is more than some seconds away. */
  nearest(time_us) {
    const distance = (point) => Math.max(0, beginOf(point) - time_us, time_us - point.time_us);
    const best = this.points.reduce((one, other) => (one && distance(one) <= distance(other) ? one : other), undefined);
    return best && distance(best) <= GAP_US ? best : undefined;
  }

  /** Curves of a figure: (time, value) pairs, split at gaps. @param {(point: object) => number | null | undefined} figure @returns {[number, number][][]} */
  runs(figure) {
    const runs = [], { begin } = this;
    for (const point of this.points.filter(({ time_us }) => time_us >= begin)) {
      const run = runs.at(-1), value = figure(point);
      if (value === null || value === undefined) continue;
      if (run && beginOf(point) - run.at(-1)[0] <= GAP_US) run.push([point.time_us, value]);
      else runs.push([[point.time_us, value]]);
    }
    return runs;
  }

  /** Merge points older than five minutes, and drop those older than an hour. */
  _age() {
    const { points, latest, end } = this;
    this.points = points.filter((point) => point === latest || point.time_us >= end - KEPT_US);
    const interval = ({ time_us }) => Math.floor(time_us / MERGED_US);
    for (let n = 0; this.points[n + 1]?.time_us < end - FINE_US;) {
      const [first, second] = this.points.slice(n, n + 2);
      if (interval(first) === interval(second)) this.points.splice(n, 2, merge(first, second));
      else n += 1;
    }
  }
}

/** Begin of the time that a point's rates cover. */
function beginOf({ time_us, seconds }) {
  return time_us - seconds * 1e6;
}

/** Whether the rates of one of two consecutive points cover too little time. */
function isShort(first, second) {
  const between = second.time_us - first.time_us, covered = first.seconds * 1e6;
  return between <= GAP_US && (covered < SHORT_US || (between < TICK_US / 2 && covered < 2 * SHORT_US));
}

/** Merge two consecutive points: rates cover the time of both, all other values are those of the second. */
function merge(first, second) {
  const seconds = first.seconds + second.seconds;
  const mean = (figure) => (figure(first) * first.seconds + figure(second) * second.seconds) / seconds;
  const steps = mean((point) => point.steps_per_second), tokens = mean((point) => point.steps_per_second * point.tokens_per_step);
  const busyOf = (point, rank) => point.ranks?.find((one) => one.rank === rank)?.busy ?? null;
  const ranks = second.ranks?.map((rank) => {
    const before = busyOf(first, rank.rank);
    const busy = before === null || rank.busy === null ? rank.busy ?? before : mean((point) => busyOf(point, rank.rank));
    return { ...rank, busy };
  });
  const rates = Object.fromEntries(RATES.map((name) => [name, mean((point) => point[name])]));
  return { ...second, ...rates, seconds, ranks, steps_per_second: steps, tokens_per_step: steps ? tokens / steps : 0 };
}
