// History: the figures of the last minutes, a point for each time they were told.

const KEPT_US = 300e6;
const GAP_US = 4e6; // longer without a point: nobody knows, or there was no work
const SHORT_US = 900e3; // a rate over less says little: it is taken together with the next
const TICK_US = 500e3; // how often figures come while there is work
const RATES = ["steps_per_second", "prompt_tokens_per_second", "generation_tokens_per_second"];

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    /** As `/v1/cluster` has them, the oldest first. */
    this.points = [];
  }

  /** @param {object[]} points in order; of what is known already, nothing is taken again */
  add(points) {
    for (const point of points) {
      const { latest } = this;
      if (latest && point.time_us <= latest.time_us) continue;
      const counted = withCounts(point, latest);
      if (belongTogether(latest, point)) this.points[this.points.length - 1] = together(latest, counted);
      else this.points.push(counted);
    }
    const from = this.end - KEPT_US;
    this.points = this.points.filter(({ time_us }) => time_us >= from);
  }

  get latest() {
    return this.points.at(-1);
  }

  get end() {
    return this.latest?.time_us ?? 0;
  }

  get begin() {
    return this.end - KEPT_US;
  }

  /** The values of one figure, cut where there was a gap. @param {(point: object) => number} figure @returns {[number, number][][]} */
  runs(figure) {
    const found = [];
    for (const point of this.points) {
      const run = found.at(-1);
      if (run && point.time_us - run.at(-1)[0] <= GAP_US) run.push([point.time_us, figure(point)]);
      else found.push([[point.time_us, figure(point)]]);
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
