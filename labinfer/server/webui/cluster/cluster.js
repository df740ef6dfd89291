// Cluster: the page as a whole. It knows whether the picture moves, and which model and step are looked at.

import { byId, make } from "../element.js";
import { icon } from "../icon.js";
import { saveFile } from "../save_file.js";
import { ChartsView } from "./charts_view.js";
import { Feed } from "./feed.js";
import { GanttView } from "./gantt_view.js";
import { fittingSpan, SPANS } from "./geometry.js";
import { History } from "./history.js";
import { RanksView } from "./ranks_view.js";
import { describe, StepView } from "./step_view.js";
import { StepsView } from "./steps_view.js";
import { Timeline } from "./timeline.js";
import { duration, grouped, percent } from "./units.js";

const QUIET_MS = 4000; // without news: no request is running
const PAUSE_MS = 800; // between two requests, which is not worth a word
const ENOUGH_STEPS = 5; // to choose how much time is in view

export class Cluster {
  constructor(api, serverState, preferences) {
    Object.assign(this, { _api: api, _serverState: serverState, _preferences: preferences });
    this._timeline = new Timeline();
    this._history = new History();
    this._cluster = null; // what the server has told of it
    this._connection = "connecting"; // or "open", or "lost"
    this._isQuiet = true; // no request is running
    this._pausedBy = ""; // by whom: "user", or "step" while one is looked at
    this._spanIsChosen = false;
    this._feed = new Feed(api, {
      opened: (cluster) => this._opened(cluster), news: (event) => this._take(event), closed: () => this._closed(),
    });
    this._gantt = new GanttView(byId("gantt"), byId("rows"), this._timeline, {
      hold: () => this._pause("user"), select: (step) => this._select(step), drawn: (picture) => this._drawn(picture),
    });
    this._charts = new ChartsView(byId("charts"), this._history);
    this._ranks = new RanksView(byId("ranks"));
    this._step = new StepView(byId("step"), (step) => this._select(step));
    this._steps = new StepsView(byId("steps"), (step) => this._select(step));
    this._connect();
    this.render();
  }

  /** Everything anew, as after a change of language or theme. */
  render() {
    const words = this._words;
    byId("download").title = words.downloadHint;
    document.title = `${words.cluster} · LABInfer`;
    byId("span").replaceChildren(...SPANS.map((span) => new Option(duration(span), String(span))));
    byId("span").value = String(this._gantt.span);
    byId("minutes").hidden = byId("everyone").hidden = !this._cluster;
    if (this._cluster) this._renderCluster();
    this._charts.render(words);
    this._renderState();
    this._renderModels();
    this._gantt.recolour();
  }

  /** The server has come, gone, or tells of other models. */
  serverChanged() {
    this._renderModels();
    if (!this._serverState.trouble) this._feed.retry();
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
    byId("model").onchange = ({ target }) => {
      history.replaceState(null, "", `?${new URLSearchParams({ model: target.value })}`);
      this._resume();
    };
    byId("download").onclick = () => this._download();
    document.addEventListener("visibilitychange", () => this._follow());
  }

  /** News are wanted while somebody looks and the picture moves. */
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
    this._showStep(-1);
    this._gantt.release();
    this._follow();
  }

  _select(step) {
    if (step >= 0) this._pause("step");
    else if (this._pausedBy === "step") return this._resume();
    this._showStep(step);
    if (document.activeElement !== byId("gantt")) byId("said").textContent = this._describe(step);
    return undefined;
  }

  _showStep(step) {
    if (step < 0 && byId("step").contains(document.activeElement)) byId("gantt").focus({ preventScroll: true });
    this._gantt.select(step);
    this._step.render(this._timeline, step, this._cluster?.ranks ?? [], this._words);
    byId("gantt").setAttribute("aria-valuetext", this._describe(step));
    byId("gantt-hint").hidden = step >= 0;
  }

  _describe(step) {
    return step < 0 ? this._words.noStep : `${this._words.step(step)}: ${describe(this._timeline, step, this._words)}`;
  }

  _opened(cluster) {
    this._connection = "open";
    if (cluster.model !== this._cluster?.model) {
      this._timeline.clear();
      this._history.clear();
      this._spanIsChosen = false;
    }
    this._cluster = cluster;
    this._history.add(cluster.history);
    this.render();
  }

  _take(event) {
    if (event.object === "cluster.stats") {
      this._history.add([event]);
      this._charts.render(this._words);
      this._ranks.update(event);
      this._busyFor(event.running + event.waiting ? QUIET_MS : PAUSE_MS);
    } else if (event.object === "cluster.steps") {
      this._timeline.add(event);
      this._chooseSpan();
      this._gantt.render();
      if (this._isQuiet) this._busyFor(QUIET_MS); // the last ones come after the figures that say that all is over
    }
  }

  /** The connection has ended, and nobody here wanted it. */
  _closed() {
    this._connection = "lost";
    this._renderState();
    this._serverState.check(true); // it finds out why, and says so
  }

  /** Requests run, or have just run; unless there are news, they do so no more after this time. */
  _busyFor(ms) {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this._setQuiet(true), ms);
    if (ms === QUIET_MS) this._setQuiet(false);
  }

  _setQuiet(isQuiet) {
    if (isQuiet === this._isQuiet) return;
    this._isQuiet = isQuiet;
    this._renderState();
  }

  _chooseSpan() {
    if (this._spanIsChosen || this._timeline.stepsIn().length < ENOUGH_STEPS) return;
    this._spanIsChosen = true;
    this._gantt.span = fittingSpan(this._timeline.stepTime, byId("gantt").clientWidth);
    byId("span").value = String(this._gantt.span);
  }

  async _download() {
    const button = byId("download");
    button.disabled = true;
    byId("download-failed").textContent = "";
    try {
      saveFile(await this._api.clusterTrace(this._model), "labinfer-trace.json");
    } catch (failure) {
      byId("download-failed").textContent = this._words.downloadFailed(failure.message);
    }
    button.disabled = false;
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
    if (this._history.latest) this._ranks.update(this._history.latest);
    this._showStep(this._gantt.selected);
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
    const state = this._pausedBy ? "paused" : this._connection !== "open" ? this._connection : this._isQuiet ? "idle" : "live";
    byId("state").dataset.state = state;
    byId("state").textContent = words.states[state];
    byId("pause").replaceChildren(icon(this._pausedBy ? "play" : "pause"), this._pausedBy ? words.resume : words.pause);
    byId("nothing").hidden = !this._timeline.isEmpty;
    byId("nothing").textContent = this._cluster ? words.nothingYet : words.states[state];
  }

  /** What the picture shows, in words. */
  _drawn({ begin, steps, overall }) {
    const words = this._words;
    byId("nothing").hidden = !this._timeline.isEmpty;
    byId("overall").textContent = percent(overall);
    byId("overall-place").hidden = overall === null;
    byId("summary").textContent = this._timeline.isEmpty ? "" : words.inPicture(
      new Date(begin / 1000).toLocaleTimeString(words.language, { hour12: false }), duration(this._gantt.span), grouped(steps.length, words),
    );
    this._steps.render(this._timeline, steps, this._gantt.selected, words);
  }
}
