// BottleneckView: the bottleneck report as a sentence, and advice.

import { byId, setText } from "../element.js";
import { duration, percent, short, timeOfDay } from "./units.js";

export class BottleneckView {
  /** @param {object | null} report from `/v1/cluster`; null without data */
  render(report, words) {
    byId("bottleneck").dataset.bound = report?.bound ?? "";
    setText(byId("bottleneck-says"), report ? bottleneckText(report, words) : words.noBottleneck);
    setText(byId("bottleneck-try"), report ? adviceText(report, words) : "");
    setText(byId("bottleneck-of"), report ? words.measuredOver(duration(report.seconds * 1e6), timeOfDay(report.time_us, words)) : "");
  }
}

/** Sentence that names the bottleneck, with its figures. */
export function bottleneckText({ bound, stages, busiest, lead, running, stage_latency_seconds }, words) {
  const shares = stages.map(({ busy }) => busy), most = Math.max(...shares), least = Math.min(...shares);
  const { busy, step_seconds } = stages.find(({ stage }) => stage === busiest);
  return words.bounds[bound]({
    count: stages.length, stage: busiest, other: stages.find(({ stage }) => stage !== busiest)?.stage, busy: percent(busy), lead: short(lead),
    shares: percent(least) === percent(most) ? percent(most) : words.range(percent(least), percent(most)),
    running: short(running ?? 0), latency: milliseconds(stage_latency_seconds ?? 0), step: milliseconds(step_seconds),
    waits: milliseconds(step_seconds * (1 - busy) / busy),
  });
}

/** Milliseconds as text with two significant digits, which suffice for a comparison. */
function milliseconds(seconds) {
  return `${Number((seconds * 1000).toPrecision(2))} ms`;
}

/** Advice against the bottleneck. If a resource is full, it never asks for more concurrent requests, which would only wait. */
export function adviceText({ bound, stages, busiest, move_to, full }, words) {
  const { tries } = words, more = full ? "" : tries.requests;
  const first = {
    stage: move_to === null ? tries.ranks : tries.layers(busiest, move_to), stages: tries.ranks,
    requests: more, communication: full ? tries.links : tries.communication, models: "", outside: more,
  }[bound];
  return [first, full ? tries[full] : ""].filter(Boolean).join(words.between);
}
