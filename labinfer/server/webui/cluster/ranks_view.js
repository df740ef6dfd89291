// RanksView: placement, memory and load of each rank.

import { make } from "../element.js";
import { Spark } from "./spark.js";
import { table } from "./table.js";
import { bytes } from "./units.js";

export class RanksView {
  /** @param {HTMLElement} place @param {import("./history.js").History} history */
  constructor(place, history) {
    Object.assign(this, { _place: place, _history: history });
    this._live = new Map(); // elements that show changing values, by rank
  }

  /** @param {object} cluster response of `/v1/cluster` */
  render(cluster, words) {
    this._live.clear();
    const names = ["rank", "stageColumn", "host", "device", "layers", "numberTypes", "weights", "kvCache", "memory", "busy"];
    const rows = cluster.ranks.map((rank) => this._row(rank, cluster, words));
    this._place.replaceChildren(table(words.ranks, names.map((name) => words.columns[name]), rows));
  }

  /** Update memory and load. */
  update(words) {
    for (const [rank, { busy }] of this._live) busy.render(this._history, words.busyRank(rank), words);
    for (const { rank, private_memory, memory_used, memory_total } of this._history.latest?.ranks ?? []) {
      const places = this._live.get(rank);
      if (!places) continue;
      places.memory.textContent = bytes(private_memory);
      places.used.textContent = memory_total ? places.saysUsed(bytes(memory_used), bytes(memory_total)) : "";
      places.bar.style.width = `${memory_total ? Math.min(1, memory_used / memory_total) * 100 : 0}%`;
    }
  }

  _row(rank, cluster, words) {
    const busy = new Spark((point) => point.ranks.find((one) => one.rank === rank.rank)?.busy);
    const memory = make("span", {}, "–"), bar = make("span", { className: "bar" }), used = make("span", { className: "more" });
    const saysUsed = rank.device === "cpu" ? words.usedOfHost : words.usedOfDevice;
    this._live.set(rank.rank, { busy, bar, memory, used, saysUsed });
    const alone = cluster.ranks.filter(({ stage }) => stage === rank.stage).length === 1;
    const cores = rank.device === "cpu" ? [rank.threads && words.threads(rank.threads), rank.cpus && words.cores(rank.cpus)] : [];
    const types = [rank.dtype, ...(rank.quantization && rank.quantization !== "none" ? [rank.quantization] : []),
      ...(rank.kv_dtype === rank.dtype ? [] : [`KV ${rank.kv_dtype}`])];
    return make("tr", {},
      make("th", { scope: "row" }, String(rank.rank)),
      cell(alone ? String(rank.stage) : `${rank.stage} · tp ${rank.tp_rank}`),
      cell(rank.host),
      cell(rank.device, cores.filter(Boolean).join(" · ")),
      make("td", {}, layerStrip(rank, cluster.num_layers), layerNumbers(rank)),
      cell(types[0], types.slice(1).join(" · ")),
      cell(bytes(rank.weight_bytes)), cell(bytes(rank.kv_bytes)),
      make("td", {}, memory, make("span", { className: "meter", "aria-hidden": "true" }, bar), used),
      make("td", { className: "busy" }, busy.place, busy.value, busy.time),
    );
  }
}

function cell(text, more = "") {
  return make("td", {}, text, ...(more ? [make("span", { className: "more" }, more)] : []));
}

function layerNumbers({ first_layer, num_layers }) {
  return num_layers === 1 ? String(first_layer) : `${first_layer}–${first_layer + num_layers - 1}`;
}

/** Bar that shows which of the model's layers the rank holds. */
function layerStrip({ first_layer, num_layers }, all) {
  const part = make("span", { className: "bar" });
  part.style.marginLeft = `${first_layer / all * 100}%`;
  part.style.width = `${num_layers / all * 100}%`;
  return make("span", { className: "meter", "aria-hidden": "true" }, part);
}
