// MachinesView: matrix of latencies and bandwidths between machines.

import { byId, make } from "../element.js";
import { table } from "./table.js";
import { bytes, duration } from "./units.js";

const STEPS = [2, 8, 32, 128]; // ratios to the lowest latency from which a cell gets darker

export class MachinesView {
  /** @param {HTMLElement} section hidden without measurements */
  constructor(section) {
    this._section = section;
  }

  /** @param {{a: string, b: string, latency: number, bytes_per_second: number}[]} links from `/v1/cluster` */
  render(links, words) {
    this._section.hidden = links.length === 0;
    if (links.length === 0) return;
    const names = [...new Set(links.flatMap(({ a, b }) => [a, b]))], least = Math.min(...links.map(({ latency }) => latency));
    const between = (from, to) => links.find(({ a, b }) => a === from && b === to) ?? links.find(({ a, b }) => a === to && b === from);
    const rows = names.map((from) => make("tr", {}, make("th", { scope: "row" }, from), ...names.map((to) => cell(between(from, to), least))));
    byId("machines-table").replaceChildren(table(words.machines, [words.columns.fromMachine, ...names], rows));
  }
}

function cell(link, least) {
  if (!link) return make("td", {}, "–");
  const level = STEPS.filter((step) => link.latency >= step * least).length;
  return make("td", { "data-level": level }, duration(link.latency * 1e6), make("span", { className: "more" }, `${bytes(link.bytes_per_second)}/s`));
}
