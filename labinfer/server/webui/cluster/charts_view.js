// ChartsView: latencies, throughput, queue, batch size and cache use over time.

import { Chart } from "./chart.js";
import { grouped, percent, seconds, short } from "./units.js";

export class ChartsView {
  /** @param {HTMLElement} place @param {import("./history.js").History} history */
  constructor(place, history) {
    this._history = history;
    this._numBlocks = 0;
    this._charts = [
      latencyChart("ttft", (point) => point.ttft),
      latencyChart("timePerToken", (point) => point.time_per_output_token),
      latencyChart("queueTime", (point) => point.queue_time),
      {
        title: "tokensPerSecond", format: short, series: [
          { word: "generated", figure: (point) => point.generation_tokens_per_second },
          { word: "ofPrompts", figure: (point) => point.prompt_tokens_per_second },
        ],
      },
      {
        title: "requests", least: 2, format: short,
        series: [{ word: "running", figure: (point) => point.running }, { word: "queued", figure: (point) => point.waiting }],
      },
      {
        title: "tokensPerStep", format: short, series: [{ word: "tokensPerStep", figure: (point) => point.tokens_per_step }],
        also: (point, words) => words.stepRate(short(point.steps_per_second)),
      },
      {
        title: "kvUse", least: 0.01, format: percent, series: [{ word: "ofBlocks", figure: (point) => point.kv_usage }],
        also: (point, words) => [
          words.blocks(grouped(point.kv_usage * this._numBlocks, words), grouped(this._numBlocks, words)), words.preemptions(point.preemptions),
        ].join(words.comma),
      },
      {
        title: "prefixCache", least: 1, format: percent, series: [{ word: "hitRate", figure: (point) => point.prefix_cache_hit_rate }],
      },
    ].map((kind) => new Chart(kind));
    place.replaceChildren(...this._charts.map((chart) => chart.place));
    new ResizeObserver(() => this._words && this.render(this._words)).observe(place);
  }

  /** @param {number} numBlocks KV blocks per rank */
  setCapacity(numBlocks) {
    this._numBlocks = numBlocks;
  }

  render(words) {
    this._words = words;
    for (const chart of this._charts) chart.render(this._history, words);
  }
}

/** Percentiles of a latency over the last minute. @param {(point: object) => {p50: number, p99: number} | null} figure in seconds */
function latencyChart(title, figure) {
  const series = ["p50", "p99"].map((word) => ({ word, figure: (point) => figure(point)?.[word] }));
  return { title, format: seconds, series, left: 50 };
}
