// Cluster: the whole cluster page. It holds the chosen model, the selected step, and whether the timeline is paused.

import { byId, make, setText } from "../element.js";
import { icon } from "../icon.js";
import { saveFile } from "../save_file.js";
import { ChartsView } from "./charts_view.js";
import { ExpertsView } from "./experts_view.js";
import { Feed } from "./feed.js";
import { GanttView } from "./gantt_view.js";
import { fittingSpan, SPANS } from "./geometry.js";
import { History } from "./history.js";
import { LinksView } from "./links_view.js";
import { MachinesView } from "./machines_view.js";
import { RanksView } from "./ranks_view.js";
import { RequestsView } from "./requests_view.js";
import { SpeedsView } from "./speeds_view.js";
import { describe, StepView } from "./step_view.js";
import { StepsView } from "./steps_view.js";
import { Timeline } from "./timeline.js";
import { duration, grouped, percent, timeOfDay } from "./units.js";
import { BottleneckView } from "./bottleneck_view.js";

const PAUSE_MS = 1600; // time without work until the page says idle: steps may arrive this long after the last stats
const MOVE_MS = 5000; // interval of moving the charts while no stats come, and of polling expert loads
const ASK_MS = 1000; // polling interval of open requests while there is work
const ENOUGH_STEPS = 5; // minimum number of recorded steps for an automatic choice of the time span
const MINUTE_US = 60e6;
const RANGES = [5, 15, 60]; // selectable lengths of the history, in minutes

export class Cluster {
  constructor(api, serverState, preferences) {
    Object.assign(this, { _api: api, _serverState: serverState, _preferences: preferences });
    this._timeline = new Timeline();
    this._history = new History();
    this._cluster = null; // response of `/v1/cluster`
    this._connection = "connecting"; // "connecting", "open" or "lost"
    this._failure = ""; // error of a lost connection, unless the banner shows it
    this._isRunning = false; // whether a request runs or waits, by the latest stats
    this._isQuiet = true; // whether there was no work for `PAUSE_MS`
    this._hadTrouble = false;
    this._pausedBy = ""; // who paused: "user", or "reader" while a step is selected or the table is open; ""
    this._spanIsChosen = false; // whether the user has chosen the time span
    this._feed = new Feed(api, {
      opened: (cluster) => this._opened(cluster), news: (event) => this._take(event), closed: (failure) => this._closed(failure),
    });
    this._gantt = new GanttView(byId("gantt"), byId("rows"), byId("hover"), this._timeline, {
      hold: () => this._pause("user"), select: (step) => this._select(step), drawn: (picture) => this._drawn(picture),
    });
    this._charts = new ChartsView(byId("charts"), this._history);
    this._ranks = new RanksView(byId("ranks"), this._history);
    this._links = new LinksView(byId("links"));
    this._speeds = new SpeedsView(byId("speeds"));
    this._machines = new MachinesView(byId("machines"));
    this._bottleneck = new BottleneckView();
    this._requests = new RequestsView(byId("requests"), (id) => this._cancel(id));
    this._open = { data: [], total: 0, running: 0 }; // open requests, as in `/v1/requests`
    this._experts = new ExpertsView(byId("experts"));
    this._step = new StepView(byId("step"), (step) => this._select(step));
    this._steps = new StepsView(byId("steps"), (step) => this._showFromTable(step), () => this._read());
    this._connect();
    this.render();
  }

  /** Render everything, as after a change of language or theme. */
  render() {
    const words = this._words;
    byId("download").title = words.downloadHint;
    document.title = `${words.cluster} · LABInfer`;
    byId("span").replaceChildren(...SPANS.map((span) => new Option(duration(span), String(span))));
    byId("span").value = String(this._gantt.span);
    byId("range").replaceChildren(...RANGES.map((minutes) => new Option(words.ranges[minutes], String(minutes))));
    byId("range").value = String(this._history.range / MINUTE_US);
    for (const id of ["bottleneck", "open", "minutes", "everyone"]) byId(id).hidden = !this._cluster;
    if (this._cluster) this._renderCluster();
    this._charts.render(words);
    this._renderState();
    this._renderModels();
    this._gantt.recolour();
  }

  /** The server's state or models have changed. */
  serverChanged() {
    const { trouble } = this._serverState;
    this._renderModels();
    if (this._hadTrouble && !trouble) this._feed.retry();
    this._hadTrouble = trouble !== "";
  }

  get _words() { return this._preferences.words; }

  get _model() {
    const { models } = this._serverState, wanted = new URLSearchParams(location.search).get("model");
    return (models.find(({ id }) => id === wanted) ?? models[0])?.id ?? "";
  }

  _connect() {
    byId("pause").onclick = () => (this._pausedBy ? this._resume() : this._pause("user"));
    byId("span").onchange = ({ target }) => {
      this._spanIsChosen = true;
      this._gantt.span = Number(target.value);
    };
    byId("range").onchange = ({ target }) => {
      this._history.range = Number(target.value) * MINUTE_US;
      this._charts.render(this._words);
      this._ranks.update(this._words);
    };
    byId("model").onchange = ({ target }) => {
      history.replaceState(null, "", `?${new URLSearchParams({ model: target.value })}`);
      this._resume();
    };
    byId("download").onclick = () => this._download();
    document.addEventListener("visibilitychange", () => this._follow());
    setInterval(() => this._connection === "open" && this._move(), MOVE_MS);
    setInterval(() => this._connection === "open" && !this._isQuiet && this._askForRequests(), ASK_MS);
  }

  /** Update the values that change without events: the charts' time axis and the expert loads. */
  _move() {
    this._charts.render(this._words);
    this._ranks.update(this._words);
    if (!this._isQuiet) this._askForLoads();
  }

  /** Poll the expert loads, which are not in events. Called while there is work, and once afterwards. */
  async _askForLoads() {
    if (!this._cluster?.experts?.length) return;
    const { experts, expert_reads } = await this._api.cluster(this._model).catch(() => this._cluster); // the feed reports a lost connection
    Object.assign(this._cluster, { experts, expert_reads });
    this._experts.render(this._cluster, this._words);
  }

  async _askForRequests() {
    const model = this._model, open = await this._api.requests(model).catch(() => this._open);
    if (model !== this._model) return; // the user has chosen another model
    this._open = open;
    this._renderRequests();
  }

  async _cancel(id) {
    await this._api.cancel(id);
    await this._askForRequests();
  }

  _renderRequests() {
    this._requests.render(this._open, (id) => this._timeline.promptTokens(id), this._words);
  }

  /** Connect to the events if the page is visible and not paused, else disconnect. */
  _follow() {
    const wanted = !document.hidden && !this._pausedBy;
    if (!wanted) this._connection = "connecting";
    this._feed.follow(wanted ? this._model : "");
    this._renderState();
  }

  _pause(by) {
    if (by === "user" || !this._pausedBy) this._pausedBy = by;
    this._gantt.hold();
    this._follow();
  }

  _resume() {
    this._pausedBy = "";
    this._steps.close();
    this._showStep(-1);
    this._gantt.release();
    this._follow();
  }

  _select(step) {
    this._showStep(step);
    this._read();
    if (document.activeElement !== byId("gantt")) byId("said").textContent = this._describe(step);
  }

  /** Select a step from the table, and scroll to its details above the table. */
  _showFromTable(step) {
    this._select(step);
    byId("step").firstElementChild.scrollIntoView({ block: "nearest" });
  }

  /** Pause while a step is selected or the table is open: rows that change twice a second can neither be clicked nor focused. */
  _read() {
    if (this._gantt.selected >= 0 || (this._steps.isOpen && !this._timeline.isEmpty)) this._pause("reader");
    else if (this._pausedBy === "reader") this._resume();
  }

  _showStep(step) {
    if (step < 0 && byId("step").contains(document.activeElement)) byId("gantt").focus({ preventScroll: true });
    this._gantt.select(step);
    this._step.render(this._timeline, step, this._cluster?.ranks ?? [], this._words);
    byId("gantt").setAttribute("aria-valuetext", this._describe(step));
    byId("gantt-hint").hidden = step >= 0;
  }

  _describe(step) {
    return step < 0 ? this._words.noStep : `${this._words.step(step)}${this._words.colon}${describe(this._timeline, step, this._words)}`;
  }

  _opened(cluster) {
    this._connection = "open";
    if (!this._cluster || rowsOf(cluster) !== rowsOf(this._cluster)) {
      this._timeline.clear();
      this._history.clear();
      this._spanIsChosen = false;
    }
    if (cluster.model !== this._cluster?.model) this._open = { data: [], total: 0, running: 0 };
    this._cluster = cluster;
    this._history.add(cluster.history, cluster.time_us);
    this._isRunning = isAtWork(cluster.history.at(-1));
    if (this._isRunning) this._worked();
    else this._setQuiet(true);
    this.render();
    this._askForRequests();
  }

  _take(event) {
    if (event.object === "cluster.stats") {
      const { links, stages, bottleneck, drift, ...point } = event;
      Object.assign(this._cluster, { links, stages, bottleneck, drift });
      this._history.add([point]);
      this._charts.render(this._words);
      this._renderPresent();
      const wasRunning = this._isRunning;
      this._isRunning = isAtWork(event);
      if (wasRunning || this._isRunning) this._worked();
    } else if (event.object === "cluster.steps") {
      this._timeline.add(event);
      this._chooseSpan();
      this._gantt.render();
      if (this._steps.isOpen) this._read(); // the open table was empty until now
      if (event.steps.length) this._worked(); // a short request may end before any stats show it
    }
  }

  /** Handle the loss of the connection. */
  _closed(failure) {
    this._connection = "lost";
    this._failure = failure.kind === "failed" ? failure.message : "";
    this._renderState();
    this._serverState.check(true); // makes the banner show the reason
  }

  /** Note that there is work, or was until now. (During a long step no events come.) */
  _worked() {
    clearTimeout(this._timer);
    this._setQuiet(false);
    if (!this._isRunning) this._timer = setTimeout(() => this._setQuiet(true), PAUSE_MS);
  }

  _setQuiet(isQuiet) {
    if (isQuiet === this._isQuiet) return;
    this._isQuiet = isQuiet;
    this._renderState();
    if (!isQuiet) return;
    this._askForLoads();
    this._askForRequests();
  }

  _chooseSpan() {
    if (this._spanIsChosen || this._timeline.stepsIn().length < ENOUGH_STEPS) return;
    const fitting = fittingSpan(this._timeline.stepTime, byId("gantt").clientWidth, this._gantt.span);
    if (fitting === this._gantt.span) return;
    this._gantt.span = fitting;
    byId("span").value = String(fitting);
  }

  async _download() {
    const button = byId("download");
    if (button.ariaBusy === "true") return;
    button.ariaBusy = "true"; // not disabled: a disabled button loses the focus
    byId("download-failed").textContent = "";
    try {
      saveFile(await this._api.clusterTrace(this._model), "labinfer-trace.json");
    } catch (failure) {
      byId("download-failed").textContent = this._words.downloadFailed(failure.message);
    }
    button.ariaBusy = "false";
  }

  _renderCluster() {
    const words = this._words, cluster = this._cluster;
    const stages = new Set(cluster.ranks.map(({ stage }) => stage)).size, hosts = new Set(cluster.ranks.map(({ host }) => host)).size;
    byId("about").replaceChildren(...[
      cluster.model, words.numStages(stages), words.numRanks(cluster.ranks.length, hosts), words.numLayers(cluster.num_layers),
      ...(stages > 1 ? [words.schedule(cluster.pipeline_schedule)] : []), words.contextOf(grouped(cluster.max_model_len, words)),
    ].map((part) => make("span", {}, part)));
    this._charts.setCapacity(cluster.num_blocks);
    this._gantt.setRanks(cluster.ranks, words);
    this._ranks.render(cluster, words);
    this._experts.render(cluster, words);
    this._machines.render(cluster.machine_links ?? [], words);
    byId("plan").hidden = !cluster.plan;
    byId("plan-text").textContent = cluster.plan ?? "";
    this._renderPresent();
    this._renderRequests();
    this._showStep(this._gantt.selected);
  }

  /** Render the latest stats. */
  _renderPresent() {
    const words = this._words;
    this._ranks.update(words);
    this._links.render(this._cluster.links, this._cluster, words);
    this._speeds.render(this._cluster.stages ?? [], this._cluster, words);
    this._bottleneck.render(this._cluster.bottleneck, words);
  }

  _renderModels() {
    const { models } = this._serverState, select = byId("model");
    select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    select.hidden = models.length < 2;
    select.value = this._model;
    this._follow();
  }

  _renderState() {
    const words = this._words;
    const shown = this._serverState.wait ? "stalled" : this._isQuiet ? "idle" : "live"; // the banner names the stalled ranks
    const state = this._pausedBy ? "paused" : this._connection !== "open" ? this._connection : shown;
    byId("state").dataset.state = state;
    setText(byId("state"), words.states[state]);
    setText(byId("lost"), state === "lost" && this._failure ? words.failed(this._failure) : "");
    byId("pause").replaceChildren(icon(this._pausedBy ? "play" : "pause"), this._pausedBy ? words.resume : words.pause);
    byId("nothing").hidden = !this._timeline.isEmpty;
    byId("nothing").textContent = this._cluster ? words.nothingYet : words.states[state];
  }

  /** Describe the visible part of the timeline in text. */
  _drawn({ begin, steps, overall }) {
    const words = this._words;
    byId("nothing").hidden = !this._timeline.isEmpty;
    byId("overall").textContent = percent(overall);
    byId("overall-place").hidden = overall === null;
    byId("summary").textContent = this._timeline.isEmpty ? "" : words.inPicture(
      timeOfDay(begin, words), duration(this._gantt.span), grouped(steps.length, words),
    );
    this._steps.render(this._timeline, steps, this._gantt.selected, words);
  }
}

/** Key of the timeline's rows (ranks and stages); recorded steps are dropped when it changes. */
function rowsOf({ model, ranks }) {
  return JSON.stringify([model, ...ranks.map(({ rank, stage, first_layer, num_layers }) => [rank, stage, first_layer, num_layers])]);
}

/** @param {object} [figures] latest stats */
function isAtWork(figures) {
  return figures !== undefined && figures.running + figures.waiting > 0;
}
