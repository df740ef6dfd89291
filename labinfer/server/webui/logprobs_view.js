// Tokens of an answer, coloured by probability. Pointing at a token shows its probability and those of the alternatives.

import { make } from "./element.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // minimum probabilities of colour levels 0 to 3; a smaller probability has level 4

/** @param {{token: string, logprob: number, top: [string, number][]}[]} logprobs */
export function logprobsView(logprobs, words) {
  const tip = make("div", { className: "tip", role: "status" }, make("p", { className: "hint" }, words.probabilityHint));
  const tokens = logprobs.map(({ token, logprob }) =>
    make("span", { className: `token level-${levelOf(logprob)}` }, token));
  const text = make("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": words.probabilities }, ...tokens);
  let at = -1;

  function point(index) {
    if (index < 0 || index >= tokens.length) return;
    tokens[at]?.classList.remove("pointed");
    at = index;
    tokens[at].classList.add("pointed");
    tip.replaceChildren(table(logprobs[at]));
  }

  text.onmouseover = ({ target }) => point(tokens.indexOf(target));
  text.onclick = ({ target }) => point(tokens.indexOf(target)); // for touch screens, which have no hover
  text.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    point(Math.max(0, at + step));
    tokens[at]?.scrollIntoView({ block: "nearest" });
  };
  return make("div", { className: "logprobs" }, text, tip);
}

function table({ token, logprob, top }) {
  const rows = [[token, logprob], ...top.filter(([other]) => other !== token)];
  return make("dl", {}, ...rows.flatMap(([spelled, value], index) => [
    make("dt", { className: index ? "" : "chosen" }, visible(spelled)),
    make("dd", {}, `${(100 * Math.exp(value)).toFixed(2)} %  ${value.toFixed(3).replace("-0.000", "0.000").padStart(8)}`),
  ]));
}

function levelOf(logprob) {
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return level < 0 ? LEVELS.length : level;
}

function visible(token) {
  return token.replace(/\n/g, "⏎").replace(/ /g, "␣") || "∅";
}
