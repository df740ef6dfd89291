// Chat: the whole chat page, with the open conversation and the running answers.

import { Answering } from "./answering.js";
import { Composer } from "./composer.js";
import { contextUse } from "./context.js";
import { ContextBar } from "./context_bar.js";
import { Conversation, newRecord } from "./conversation.js";
import { byId } from "./element.js";
import { Examples } from "./examples.js";
import { explainWait, outcome } from "./figures.js";
import { MessageActions } from "./message_actions.js";
import { modelFacts } from "./model_facts.js";
import { Presets } from "./presets.js";
import { openSettings } from "./settings_dialog.js";
import { Sidebar } from "./sidebar.js";
import { Tabs } from "./tabs.js";
import { ThreadView } from "./thread_view.js";
import { exportRecords, importFile } from "./transfer.js";

const NEW = "new";
const NEW_SETTINGS = "new.settings"; // draft name of the settings of a conversation without messages

export class Chat {
  constructor(api, serverState, store, preferences) {
    Object.assign(this, { _api: api, _serverState: serverState, _store: store, _preferences: preferences });
    this._presets = new Presets(preferences);
    this._examples = new Examples(byId("examples"), (text) => this._send(text, []));
    this._answerings = new Map(); // conversation id → running answer
    this._wishes = new Map(); // conversation id → the user's latest action that waits until an answer stops
    this._conversation = new Conversation(newRecord());
    this._records = [];
    this._thread = new ThreadView(byId("thread"), byId("messages"), byId("to-end"), new MessageActions(this, preferences));
    this._contextBar = new ContextBar(api, (conversation, first, summary) => this._leaveOut(conversation, first, summary));
    this.sidebar = new Sidebar(store, preferences, {
      open: (id) => { location.hash = id; this.sidebar.show(false); },
      rename: (id, title) => this._rename(id, title),
      remove: (id) => this._remove(id),
      export: (id) => exportRecords(store, [this._record(id)]),
    });
    this._tabs = new Tabs(() => this._answerings.keys(), (id) => this._changedElsewhere(id));
    this.composer = new Composer(preferences, store, (text, attachments) => this._send(text, attachments), () => this.stop());
    this._connect();
  }

  /** Load the stored conversations, and show the one in the URL. */
  start() {
    this._started = this._start();
    return this._started;
  }

  /** Show the conversation with this id; a new conversation if the id is unknown. */
  async show(id, takesFocus = true) {
    const record = this._record(id);
    const round = (this._round = (this._round ?? 0) + 1);
    const messages = record ? await this._messages(id) : [];
    if (round !== this._round) return; // superseded by a later call
    const { model } = this._conversation.record; // a new conversation keeps the chosen model
    this._conversation = this._answerings.get(id)?.conversation ?? new Conversation(record ?? this._fresh(model), messages);
    this.composer.open(record ? id : NEW);
    this.render();
    if (takesFocus) this.composer.focus();
  }

  /** Render again if the language has changed. */
  preferencesChanged() {
    if (this._shownWords !== this.words) this.render();
  }

  /** Render everything. */
  render() {
    this._shownWords = this.words;
    this._thread.open(this._conversation, this.words);
    if (this._answering) this._showGrowth(this._answering);
    this._renderFrame();
  }

  /** Stop the running answer of the open conversation. */
  stop() {
    this._wishes.delete(this._conversation.record.id);
    this._answering?.stop();
  }

  openNew() {
    this.sidebar.endSearch(); // the search might hide the new conversation
    if (location.hash) location.hash = "";
    else this.show(NEW);
    this.sidebar.show(false);
  }

  async importFile(file) {
    const count = await importFile(this, file);
    if (count) this._say(this.words.imported(count));
    this._renderFrame();
  }

  /** Store new conversations, and open the first. @param {{record: object, messages: object[]}[]} whole */
  async take(whole) {
    await this._store.saveAll(whole.map((one) => one.record), whole.flatMap((one) => one.messages));
    for (const { record } of whole) {
      this._records.push(record);
      this._tell(record.id);
    }
    this._sort();
    if (whole.length) location.hash = whole[0].record.id;
  }

  exportAll() {
    return exportRecords(this._store, this._records);
  }

  get words() { return this._preferences.words; }

  /** The open conversation. */
  get conversation() { return this._conversation; }

  get _answering() { return this._answerings.get(this._conversation.record.id); }

  /** Handle a change or removal of a conversation by another tab. */
  async _changedElsewhere(id) {
    const record = await this._store.conversation(id).catch(() => undefined);
    const answering = this._answerings.get(id);
    if (answering) { // this tab's messages are newer
      if (record) Object.assign(answering.conversation.record, entered(record));
      this._renderFrame();
      return;
    }
    this._records = this._records.filter((one) => one.id !== id);
    if (record) this._records.push(record);
    this._sort();
    if (id !== location.hash.slice(1)) this._frameDue ||= requestAnimationFrame(() => this._renderFrame()); // one rendering per frame
    else if (record && id === this._conversation.record.id) await this._takeOver(record);
    else if (record) await this.show(id, false);
    else location.hash = "";
  }

  /** Show the open conversation as another tab has stored it. If a message is being edited here, its branch stays visible. */
  async _takeOver(record) {
    const round = (this._round = (this._round ?? 0) + 1);
    const conversation = new Conversation(record, await this._messages(record.id));
    if (round !== this._round || this._answerings.has(record.id)) return; // superseded by a later call, or this tab receives an answer
    const edited = conversation.messages.get(this._thread.edited?.id);
    if (edited && !conversation.path.includes(edited)) conversation.select(edited);
    this._conversation = conversation;
    this._thread.update(() => this._thread.sync(conversation));
    this._renderFrame();
  }

  /** The current record of a conversation; undefined if it was deleted or has no messages. */
  _record(id) {
    return this._records.find((one) => one.id === id);
  }

  /** Sort the conversations, latest first. */
  _sort() {
    this._records.sort((a, b) => b.updated - a.updated);
  }

  /** Notify other tabs that a conversation has changed. */
  _tell(id) {
    this._tabs.tell(id, this._answerings.has(id));
  }

  _connect() {
    addEventListener("hashchange", () => this.show(location.hash.slice(1)));
    document.querySelector(".skip").onclick = (event) => {
      event.preventDefault(); // the default would replace the URL's fragment, the conversation id
      byId("input").focus();
    };
    byId("new").onclick = () => this.openNew();
    byId("settings").onclick = () => {
      const { record } = this._conversation; // the user may open another conversation before saving
      openSettings(record, this._defaults(), this._presets, this.words, (chosen) => this._change(record, chosen));
    };
    byId("model").onchange = ({ target }) => this._change(this._conversation.record, { model: target.value });
  }

  _model() {
    const { models } = this._serverState;
    return models.find((one) => one.id === this._conversation.record.model) ?? models[0];
  }

  _defaults() {
    const model = this._model();
    return { max_tokens: model?.max_model_len, ...model?.default_sampling };
  }

  async _messages(id) {
    const messages = await this._store.messages(id).catch(() => []);
    if (this._tabs.answering.has(id)) return messages;
    for (const message of messages) if (message.status === "streaming") message.status = "interrupted";
    return messages;
  }

  /** Make the record of a new conversation, with the settings that were entered before a reload. */
  _fresh(model) {
    return Object.assign(newRecord(model), this._presets.forNew, JSON.parse(this._preferences.draft(NEW_SETTINGS) || "{}"));
  }

  async _start() {
    this._records = await this._store.conversations();
    await this.show(location.hash.slice(1));
  }

  async _send(text, attachments) {
    await this._started; // the user may send a message before loading has ended
    const conversation = this._conversation;
    const parent = conversation.path.at(-1)?.id ?? null;
    const message = conversation.add("user", parent, attachments.length ? { content: text, attachments } : { content: text });
    this._thread.toEnd();
    await this.answer(conversation, message);
  }

  /** Switch to another version of a message. */
  select(message, isNext) {
    const { record } = this._conversation;
    this._conversation.select(message);
    this._thread.sync();
    if (this._answering) this._showGrowth(this._answering);
    this._thread.view(message).focusBranches(isNext);
    this._change(record, { leaf: record.leaf });
  }

  /** Store and show new or changed messages. The message `again` is rendered again, even if its view exists. */
  async keep({ record }, messages, again = null) {
    this._thread.sync();
    this._thread.view(again ?? {})?.render();
    this._change(record, { leaf: record.leaf });
    await this._store.saveAll([], messages.map((one) => structuredClone(one))).catch(() => this._storageFailed());
    this._tell(record.id);
  }

  /** Delete messages that were removed from a conversation, and the conversation with its last message. */
  async drop(conversation, gone) {
    const { record } = conversation;
    if (!conversation.messages.size) return this._remove(record.id);
    await this._store.removeMessages(gone.map(({ id }) => id));
    await this.keep(conversation, []);
    if (document.activeElement === document.body) this.composer.focus(); // the pressed button was removed
  }

  /** Leave the messages before `first` out of later requests; `summary` replaces them if not empty. An answer that failed because of the context length is requested again. */
  async _leaveOut(conversation, first, summary) {
    const failed = contextUse(conversation, this._model()?.max_model_len)?.overflows && conversation.path.at(-1);
    first.begins = { summary };
    await this.keep(conversation, [first], first);
    this.composer.focus();
    if (failed) await this.answer(conversation, conversation.messages.get(failed.parent));
  }

  /**
   * Stop the running answer of the open conversation, and return the conversation when it has ended. Returns null if a later call
   * supersedes this one.
   */
  async atRest() {
    const conversation = this._conversation, answering = this._answering, { id } = conversation.record, wish = {};
    this._wishes.set(id, wish);
    answering?.stop();
    await answering?.finished;
    if (this._wishes.get(id) !== wish) return null;
    this._wishes.delete(id);
    return conversation;
  }

  /** Request an answer to `question`, or the continuation of the partial answer `begun`. */
  async answer(conversation, question, begun = null) {
    const { record } = conversation;
    Object.assign(record, entered(this._record(record.id) ?? record)); // another tab may have stored changes that are not shown yet
    record.model = this._model()?.id ?? record.model;
    const message = begun ?? conversation.add("assistant", question.id, { status: "streaming" });
    const answering = new Answering(this._api, this._serverState, this._store, conversation, message, begun !== null);
    this._answerings.set(record.id, answering);
    answering.finished = this._accompany(answering, question);
    await answering.finished;
  }

  /** Show and store an answer until it ends. */
  async _accompany(answering, question) {
    const { conversation, message } = answering, { record } = conversation;
    const isNew = !this._record(record.id);
    this._records = [record, ...this._records.filter((one) => one.id !== record.id)]; // another tab may have stored another record
    if (isNew) {
      history.replaceState(null, "", `#${record.id}`);
      this.composer.open(record.id);
      this._preferences.keepDraft(NEW_SETTINGS, "");
    }
    this._sort();
    this._thread.sync();
    this._showGrowth(answering);
    this._thread.toEnd();
    this._renderFrame();
    if (document.activeElement === document.body) this.composer.focus(); // the pressed button was removed
    this._say(this.words.writing);
    await this._store.saveAll([record], [question, message].map((one) => structuredClone(one))).catch(() => this._storageFailed());
    this._tell(record.id);
    let drawn = 0;
    const draw = () => { drawn ||= requestAnimationFrame(() => { drawn = 0; this._showGrowth(answering); }); };
    answering.addEventListener("change", draw);
    answering.addEventListener("wait", () => {
      draw();
      const { waitsFor } = answering;
      if (["busy", "limited"].includes(waitsFor?.kind)) this._say(explainWait(waitsFor, this._preferences)); // the banner shows other waits
    });
    answering.addEventListener("unsaved", () => this._storageFailed());
    await answering.run();
    cancelAnimationFrame(drawn);
    if (this._answerings.get(record.id) === answering) this._answerings.delete(record.id);
    this._tell(record.id);
    if (conversation === this._conversation) {
      this._thread.update(() => this._thread.view(message)?.finish());
      this._say(outcome(message, this.words));
    }
    this._renderFrame();
  }

  _showGrowth(answering) {
    if (answering.conversation !== this._conversation) return;
    const view = this._thread.view(answering.message);
    const { message, waitsFor } = answering;
    this._thread.update(() => {
      if (waitsFor || !(message.content || message.reasoning || message.toolCalls)) view?.showWaiting(waitsFor ? explainWait(waitsFor, this._preferences) : "");
      else view?.grow();
    });
  }

  _rename(id, title) {
    const record = this._record(id);
    if (!record) return;
    this._save(Object.assign(record, { title, named: true }));
    this._renderFrame();
  }

  async _remove(id) {
    const answering = this._answerings.get(id);
    this._wishes.delete(id);
    answering?.stop();
    await answering?.finished; // the answer's last save must come before the deletion
    await this._store.remove(id);
    this._tell(id);
    this._records = this._records.filter((one) => one.id !== id);
    this._preferences.forgetDrafts(id);
    if (id === this._conversation.record.id) location.hash = "";
    this._renderFrame();
  }

  /** Change and store a record. */
  _change(shown, fields) {
    const record = this._record(shown.id);
    if (record) this._save(Object.assign(record, fields));
    else if (!shown.leaf) { // the conversation has no messages yet
      const { model, system, settings } = Object.assign(shown, fields);
      this._preferences.keepDraft(NEW_SETTINGS, JSON.stringify({ model, system, settings }));
    }
    this._renderFrame();
  }

  async _save(record) {
    await this._store.save(record).catch(() => this._storageFailed());
    this._tell(record.id);
  }

  _storageFailed() {
    byId("not-kept").hidden = false;
  }

  /** Announce a text to screen readers. */
  _say(text) {
    byId("said").textContent = text;
  }

  /** Render everything but the messages. */
  _renderFrame() {
    this._frameDue = 0;
    const { record } = this._conversation, words = this.words;
    byId("title").textContent = record.title || words.untitled;
    document.title = record.title ? `${record.title} · LABInfer` : "LABInfer";
    byId("welcome").hidden = Boolean(record.leaf);
    byId("settings").classList.toggle("chosen", Boolean(record.system || Object.keys(record.settings).length));
    const select = byId("model"), { models } = this._serverState;
    select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    select.hidden = !models.length;
    if (models.length) select.value = this._model().id;
    byId("facts").textContent = modelFacts(this._model(), words);
    this.composer.answering = Boolean(this._answering);
    this._contextBar.render(this._conversation, this._model()?.max_model_len, Boolean(this._answering), words);
    this._examples.render(this._model()?.id, words);
    this.sidebar.render(this._records, record.id, new Set([...this._answerings.keys(), ...this._tabs.answering]), words);
  }

  /** Handle a change of the server's state or models. */
  serverChanged() {
    this._renderFrame();
  }
}

/** The fields of a record that the user can edit, with their values. */
function entered({ title, named, model, system, settings }) {
  return { title, named, model, system, settings };
}
