// VerdictView: what bounds the model's speed, in a sentence, and what to try.

import { byId, setText } from "../element.js";
import { duration, percent, short, timeOfDay } from "./units.js";

export class VerdictView {
  /** @param {object | null} verdict as `/v1/cluster` has it; null where nothing was measured yet */
  render(verdict, words) {
    byId("verdict").dataset.bound = verdict?.bound ?? "";
    setText(byId("verdict-says"), verdict ? saysBound(verdict, words) : words.noVerdict);
    setText(byId("verdict-try"), verdict ? saysTry(verdict, words) : "");
    setText(byId("verdict-of"), verdict ? words.verdictOf(duration(verdict.seconds * 1e6), timeOfDay(verdict.time_us, words)) : "");
  }
}

/** Which stage bounds, or what else, and by how much. */
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

/** What may help. Where something is full, more requests at once would only wait. */
export function saysTry({ bound, stages, busiest, move_to, full }, words) {
  const { tries } = words, more = full ? "" : tries.requests;
  const first = {
    stage: move_to === null ? tries.ranks : tries.layers(busiest, move_to), stages: tries.ranks,
    requests: more, hops: full ? tries.links : tries.hops, models: "", outside: more,
  }[bound];
  return [first, full ? tries[full] : ""].filter(Boolean).join(words.between);
}
