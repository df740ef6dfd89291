// History: the figures of the last minutes, a point for each time they were told.

const KEPT_US = 300e6;
const GAP_US = 4e6; // longer without a point: nobody knows, or there was no work
const SHORT_US = 400e3; // a rate over less says little: it is taken together with the next

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
      const last = this.latest;
      if (last && point.time_us <= last.time_us) continue;
      if (last && point.time_us - last.since_us < SHORT_US) this.points[this.points.length - 1] = together(last, point);
      else this.points.push({ ...point, since_us: last ? last.time_us : point.time_us - SHORT_US });
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

/** One point for two that follow each other: rates over the time of both, the rest as it is now. */
function together(before, now) {
  const times = [before.time_us - before.since_us, now.time_us - before.time_us], all = times[0] + times[1];
  const rate = (name) => (before[name] * times[0] + now[name] * times[1]) / all;
  const steps = rate("steps_per_second");
  const tokens = (before.tokens_per_step * before.steps_per_second * times[0] + now.tokens_per_step * now.steps_per_second * times[1]) / all;
  return {
    ...now, since_us: before.since_us, steps_per_second: steps, tokens_per_step: steps ? tokens / steps : 0,
    prompt_tokens_per_second: rate("prompt_tokens_per_second"), generation_tokens_per_second: rate("generation_tokens_per_second"),
  };
}
