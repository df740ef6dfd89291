// History: the figures of the last minutes, a point for each time they were told.

const KEPT_US = 300e6;
const GAP_US = 4e6; // longer without a point: nobody knows, or there was no work

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
    const last = this.latest?.time_us ?? 0;
    this.points.push(...points.filter(({ time_us }) => time_us > last));
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
