// SpeedsView: compute time per step of each stage, compared with its time at startup or with the other stages.

import { byId, make } from "../element.js";
import { table } from "./table.js";
import { duration, percent, short } from "./units.js";

const SLOW = 1.5; // slowdown since startup above which a stage is red; a stage that was slow at startup is not red

export class SpeedsView {
  /** @param {HTMLElement} section hidden if there is a single stage and no startup measurement */
  constructor(section) {
    this._section = section;
  }

  /** @param {object[]} stages from `/v1/cluster` or the latest stats @param {object} cluster response of `/v1/cluster` */
  render(stages, cluster, words) {
    const compared = compare(stages);
    this._section.hidden = !compared.some(({ ratio }) => ratio !== null);
    if (this._section.hidden) return;
    const longest = Math.max(...compared.flatMap(({ step_seconds, expected }) => [step_seconds, expected ?? 0])) || 1;
    const rows = compared.map((stage) => row(stage, longest, cluster, words));
    const place = byId("speeds-table");
    const { scrollLeft } = place;
    place.replaceChildren(table(words.speeds, ["stageColumn", "computes", "expected", "ratio"].map((name) => words.columns[name]), rows));
    place.scrollLeft = scrollLeft;
    byId("speeds-say").textContent = words.speedsSay(String(SLOW));
    const { better_layers: layers, gain } = cluster.drift ?? {};
    byId("speeds-try").textContent = layers ? words.betterLayers(layers.join(","), percent(gain)) : "";
  }
}

/**
 * Add the expected time of each stage: predicted from times at startup, else the mean of the other stages, else null. Only a
 * slowdown since startup makes a stage slow.
 * @param {{step_seconds: number, predicted_seconds: number | null, slowdown: number | null}[]} stages
 */
export function compare(stages) {
  const sum = stages.reduce((total, { step_seconds }) => total + step_seconds, 0);
  return stages.map((stage) => {
    const others = stages.length > 1 ? (sum - stage.step_seconds) / (stages.length - 1) : null;
    const expected = stage.predicted_seconds ?? others;
    const ratio = stage.slowdown ?? (expected ? stage.step_seconds / expected : null);
    return { ...stage, expected, ratio, isSlow: stage.slowdown !== null && stage.slowdown > SLOW };
  });
}

function row({ stage, rank, step_seconds, predicted_seconds, expected, ratio, isSlow }, longest, cluster, words) {
  const holder = cluster.ranks.find((one) => one.rank === rank), isAlone = cluster.ranks.filter((one) => one.stage === stage).length === 1;
  const parts = holder ? [holder.host, layersOf(holder, words), ...(isAlone ? [] : [words.slowestRank(rank)])] : [];
  const bar = make("span", { className: "bar" }), mark = make("span", { className: "mark", hidden: expected === null });
  bar.style.width = `${step_seconds / longest * 100}%`;
  mark.style.left = `${(expected ?? 0) / longest * 100}%`;
  return make("tr", isSlow ? { "data-slow": "" } : {},
    make("th", { scope: "row" }, words.stage(stage), make("span", { className: "more" }, parts.join(" · "))),
    make("td", { className: "computes" }, time(step_seconds), make("span", { className: "meter", "aria-hidden": "true" }, bar, mark)),
    make("td", {}, expected === null ? "–" : time(expected), make("span", { className: "more" }, predicted_seconds === null ? words.ofOthers : words.predicted)),
    make("td", {}, ratio === null ? "–" : make("strong", {}, `${short(ratio)} ×`), ...(isSlow ? [make("span", { className: "more" }, words.slow)] : [])),
  );
}

function time(seconds) {
  return duration(seconds * 1e6);
}

function layersOf({ first_layer, num_layers }, words) {
  return words.layerRange(first_layer, first_layer + num_layers - 1);
}
