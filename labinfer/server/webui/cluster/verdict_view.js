// VerdictView: the bottleneck report in a sentence, and what to try.

import { byId, setText } from "../element.js";
import { duration, percent, short, timeOfDay } from "./units.js";

export class VerdictView {
  /** @param {object | null} verdict from `/v1/cluster`; null without data */
  render(verdict, words) {
    byId("verdict").dataset.bound = verdict?.bound ?? "";
    setText(byId("verdict-says"), verdict ? saysBound(verdict, words) : words.noVerdict);
    setText(byId("verdict-try"), verdict ? saysTry(verdict, words) : "");
    setText(byId("verdict-of"), verdict ? words.verdictOf(duration(verdict.seconds * 1e6), timeOfDay(verdict.time_us, words)) : "");
  }
}

/** Sentence that names the bottleneck, with its figures. */
export function saysBound({ bound, stages, busiest, lead, running, hop_seconds }, words) {
  const shares = stages.map(({ busy }) => busy), most = Math.max(...shares), least = Math.min(...shares);
  const { busy, step_seconds } = stages.find(({ stage }) => stage === busiest);
  return words.bounds[bound]({
    count: stages.length, stage: busiest, other: stages.find(({ stage }) => stage !== busiest)?.stage, busy: percent(busy), lead: short(lead),
    shares: percent(least) === percent(most) ? percent(most) : words.range(percent(least), percent(most)),
    running: short(running ?? 0), hop: duration((hop_seconds ?? 0) * 1e6), step: duration(step_seconds * 1e6),
    waits: duration(step_seconds * (1 - busy) / busy * 1e6),
  });
}

/** What to try. If a resource is full, more concurrent requests would only wait. */
export function saysTry({ bound, stages, busiest, move_to, full }, words) {
  const { tries } = words, more = full ? "" : tries.requests;
  const first = {
    stage: move_to === null ? tries.ranks : tries.layers(busiest, move_to), stages: tries.ranks,
    requests: more, hops: full ? tries.links : tries.hops, models: "", outside: more,
  }[bound];
  return [first, full ? tries[full] : ""].filter(Boolean).join(words.between);
}
