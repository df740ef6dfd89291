// StepView: details of the selected step: its sequences, and its times on each rank.

import { iconButton, make } from "../element.js";
import { computes } from "./bubbles.js";
import { kindOf } from "./geometry.js";
import { scrolledTable } from "./table.js";
import { duration, grouped } from "./units.js";

const PARTS = ["prepare", "wait for activations", "run", "sample", "send", "wait for tokens"];

export class StepView {
  /** @param {HTMLElement} place @param {(step: number) => void} select -1 for none */
  constructor(place, select) {
    Object.assign(this, { _place: place, _select: select });
    place.onkeydown = ({ key }) => {
      if (key === "Escape") select(-1);
    };
  }

  /**
   * @param {import("./timeline.js").Timeline} timeline
   * @param {number} number -1 for none
   * @param {object[]} ranks from `/v1/cluster`
   */
  render(timeline, number, ranks, words) {
    this._place.hidden = number < 0;
    if (number < 0) return;
    const step = timeline.step(number), slices = timeline.slicesOfStep(number);
    const focused = this._place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this._place.replaceChildren(
      make("div", { className: "step-head" },
        make("div", {}, make("h3", {}, words.step(number)),
          make("span", { className: `kind ${kindOf(step)}` }, make("span", { className: "swatch" }), words[kindOf(step)])),
        make("div", {},
          iconButton("left", words.previousStep, () => this._select(this._beside(timeline, number, -1))),
          iconButton("right", words.nextStep, () => this._select(this._beside(timeline, number, 1))),
          iconButton("close", words.close, () => this._select(-1)))),
      make("p", {}, describe(timeline, number, words)),
      timesTable(slices, ranks, words),
      ...(step?.sequences.length ? [sequencesTable(step, words)] : []),
    );
    if (focused) this._place.querySelector(`[aria-label="${focused}"]`)?.focus(); // the focused button was replaced by a new one
  }

  _beside(timeline, number, by) {
    const known = timeline.stepsIn();
    return (by < 0 ? known.findLast((one) => one < number) : known.find((one) => one > number)) ?? number;
  }
}

/** Text that describes a step. */
export function describe(timeline, number, words) {
  const step = timeline.step(number), all = [...timeline.slicesOfStep(number).values()].flat();
  const parts = [];
  if (step) {
    parts.push(words.numSequences(step.num_sequences));
    if (step.prefill_tokens) parts.push(words.promptTokens(grouped(step.prefill_tokens, words)));
    if (step.decode_tokens) parts.push(words.generatedTokens(step.decode_tokens));
  }
  if (all.length) {
    const computing = all.filter(({ name }) => computes(name));
    const whole = Math.max(...all.map(({ end }) => end)) - Math.min(...all.map(({ begin }) => begin));
    const computed = computing.reduce((sum, { begin, end }) => sum + end - begin, 0);
    parts.push(words.wholeTime(duration(whole)), words.computedTime(duration(computed)));
  }
  return words.sentence(parts);
}

function timesTable(slices, ranks, words) {
  const start = Math.min(...[...slices.values()].flat().map(({ begin }) => begin));
  const parts = PARTS.filter((name) => [...slices.values()].flat().some((slice) => slice.name === name));
  const columns = [words.columns.rank, words.columns.stageColumn, words.columns.begins, ...parts.map((name) => words.slices[name])];
  return scrolledTable(words.timesOnRanks, columns, [...slices].map(([rank, own]) => {
    const inside = own.filter(({ name }) => PARTS.includes(name));
    const begin = Math.min(...(inside.length ? inside : own).map((slice) => slice.begin));
    const time = (name) => own.filter((slice) => slice.name === name).reduce((sum, slice) => sum + slice.end - slice.begin, 0);
    const stage = ranks.find((one) => one.rank === rank)?.stage ?? "";
    return make("tr", {}, make("th", { scope: "row" }, String(rank)),
      ...[stage, `+${duration(begin - start)}`, ...parts.map((name) => (time(name) ? duration(time(name)) : "–"))]
        .map((text) => make("td", {}, String(text))));
  }));
}

function sequencesTable(step, words) {
  const left = step.num_sequences - step.sequences.length;
  const rows = step.sequences.map(({ request, tokens, context, decode }) => make("tr", {},
    make("td", {}, decode ? words.decode : words.prefill), make("td", {}, grouped(tokens, words)), make("td", {}, grouped(context, words)),
    make("th", { scope: "row", className: "mono" }, request)));
  if (left > 0) rows.push(make("tr", {}, make("td", { colSpan: 4 }, words.moreSequences(left))));
  return scrolledTable(words.sequencesOfStep, ["kind", "tokens", "context", "request"].map((name) => words.columns[name]), rows);
}
