// The line under an answer: how the answer ended, its length, and its tokens per second.

import { make } from "./element.js";

/** @returns {Node[]} */
export function figures(message, words) {
  const { stats, usage, status, finishReason, failure } = message;
  const parts = [];
  if (stats) {
    parts.push(words.tokens(stats.tokens, stats.about));
    parts.push(words.rate(stats.perSecond.toFixed(stats.perSecond < 10 ? 1 : 0)));
    parts.push(words.firstToken(duration(stats.firstMs)));
  }
  if (message.edited) parts.push(words.edited);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(words.cached(cached, usage.prompt_tokens));
  const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong, steps } = usage?.completion_tokens_details ?? {};
  if (right + wrong) parts.push(words.drafted(right, right + wrong));
  if (steps) parts.push(words.perStep((usage.completion_tokens / steps).toFixed(1)));
  const reason = status === "done" ? finishReason : status;
  if (reason in words.reasons) parts.push(words.reasons[reason]);
  const nodes = [make("span", { className: "figures" }, ...parts.map((part) => make("span", {}, part)))];
  if (failure || status === "interrupted") nodes.unshift(make("p", { className: "failure" }, explain(failure, words)));
  return nodes;
}

/** Text that says why an answer is missing or incomplete. @param {object} [failure] undefined if the page was closed during the answer */
export function explain(failure, words) {
  if (!failure) return words.reloaded;
  if (failure.kind === "broken" || failure.kind === "away" || failure.kind === "draining") return words.broken;
  if (failure.kind === "key") return words.keyRefused;
  if (Object.hasOwn(words.errors, failure.code ?? "")) return words.errors[failure.code];
  return words.failed(failure.message);
}

/** Text that says how an answer has ended. */
export function outcome({ status, failure }, words) {
  if (failure) return explain(failure, words);
  return status === "done" ? words.finished : words.reasons[status];
}

/** Text that says why a request waits. @param {import("./api.js").ApiFailure} failure the reason why it waits @param {import("./preferences.js").Preferences} preferences */
export function explainWait({ kind, retryAfter }, { words, key }) {
  if (kind === "busy") return words.busy(retryAfter);
  if (kind === "limited") return words.limited(retryAfter);
  if (kind === "key") return key ? words.keyRefused : words.keyWanted;
  return kind === "draining" ? words.draining : words.away;
}

/** A duration as text. */
export function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
