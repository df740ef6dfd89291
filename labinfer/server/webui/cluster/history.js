// History: the figures of the last minutes, a point for each time they were told.

const KEPT_US = 300e6;
const GAP_US = 4e6; // longer without a point: nobody knows, or there was no work
const SHORT_US = 900e3; // a rate over less says little: it is taken together with the next
const TICK_US = 500e3; // how often figures come while there is work
const RATES = ["steps_per_second", "prompt_tokens_per_second", "generation_tokens_per_second"];

export class History {
  /** @param {() => number} clock milliseconds, by a clock that is never set */
  constructor(clock = () => performance.now()) {
    this._clock = clock;
    this.clear();
  }

  clear() {
    /** As `/v1/cluster` has them, the oldest first. */
    this.points = [];
    this._zero = 0; // of this page's clock, by the server's
  }

  /**
   * @param {object[]} points in order, up to the newest; of what is known already, nothing is taken again
   * @param {number} now_us what time it is by the server's clock; from here on it passes by itself
   */
  add(points, now_us = points.at(-1).time_us) {
    this._zero = now_us - this._clock() * 1000;
    if (points.at(-1)?.time_us < this.latest?.time_us) this.points = []; // the server's clock was set back
    for (const point of points) {
      const { latest } = this;
      if (latest && point.time_us <= latest.time_us) continue;
      const counted = withCounts(point, latest);
      if (belongTogether(latest, point)) this.points[this.points.length - 1] = together(latest, counted);
      else this.points.push(counted);
    }
    const { latest, begin } = this;
    this.points = this.points.filter((point) => point === latest || point.time_us >= begin);
  }

  get latest() {
    return this.points.at(-1);
  }

  /** Now. */
  get end() {
    return this._zero + this._clock() * 1000;
  }

  get begin() {
    return this.end - KEPT_US;
  }

  /** The point that is nearest to a time; none where nothing is known within some seconds of it. */
  nearest(time_us) {
    const away = (point) => Math.abs(point.time_us - time_us);
    const found = this.points.reduce((best, point) => (best && away(best) <= away(point) ? best : point), undefined);
    return found && away(found) <= GAP_US ? found : undefined;
  }

  /** The values of one figure where it is known, cut where there was a gap. @param {(point: object) => number | null | undefined} figure @returns {[number, number][][]} */
  runs(figure) {
    const found = [], { begin } = this;
    for (const point of this.points.filter(({ time_us }) => time_us >= begin)) {
      const run = found.at(-1), value = figure(point);
      if (value === null || value === undefined) continue;
      if (run && point.time_us - run.at(-1)[0] <= GAP_US) run.push([point.time_us, value]);
      else found.push([[point.time_us, value]]);
    }
    return found;
  }
}

/** Whether one of two points that follow each other says little without the other. */
function belongTogether(before, now) {
  const told = now.time_us - before?.time_us, kept = before?.time_us - before?.since_us;
  return told <= GAP_US && (kept < SHORT_US || (told < TICK_US / 2 && kept < 2 * SHORT_US));
}

/** The point, since when it tells, and what was counted since then. Rates after a pause are told over the pause, which says nothing. */
function withCounts(point, before) {
  const told = point.time_us - (before?.time_us ?? point.time_us - TICK_US);
  const since_us = told > GAP_US ? point.time_us - TICK_US : point.time_us - told;
  const counts = Object.fromEntries(RATES.map((name) => [name, point[name] * told]));
  return withRates({ ...point, since_us, counts, tokens: point.tokens_per_step * counts.steps_per_second });
}

/** One point for two that follow each other. */
function together(before, now) {
  const counts = Object.fromEntries(RATES.map((name) => [name, before.counts[name] + now.counts[name]]));
  return withRates({ ...now, since_us: before.since_us, counts, tokens: before.tokens + now.tokens });
}

function withRates(point) {
  const { counts, tokens, since_us, time_us } = point;
  for (const name of RATES) point[name] = counts[name] / (time_us - since_us);
  point.tokens_per_step = counts.steps_per_second ? tokens / counts.steps_per_second : 0;
  return point;
}
