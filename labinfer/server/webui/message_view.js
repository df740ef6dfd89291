// MessageView: a message with its buttons, stats and versions.

import { attachmentViews } from "./attachments.js";
import { copy } from "./clipboard.js";
import { frameCode } from "./code_view.js";
import { DraftedView } from "./drafted_view.js";
import { iconButton, make } from "./element.js";
import { composes, sends } from "./enter_key.js";
import { logprobsView } from "./logprobs_view.js";
import { icon } from "./icon.js";
import { GrowingMarkdown, renderMarkdown } from "./markdown.js";
import { duration, figures } from "./figures.js";
import { reasoningOf } from "./thinking.js";

export class MessageView {
  /**
   * @param {object} message
   * @param {object[]} siblings all versions of the message
   * @param {import("./message_actions.js").MessageActions} actions actions of the buttons
   */
  constructor(message, siblings, words, actions) {
    Object.assign(this, { message, words, _siblings: siblings, _actions: actions });
    const who = message.role === "user" ? words.you : words.assistant;
    this.element = make("article", { className: `message ${message.role}`, "aria-label": who, "data-id": message.id });
    this.render();
  }

  /** Render the whole message. */
  render() {
    this._growing = this._drafted = null;
    this._body = make("div", { className: "body" });
    this._foot = make("div", { className: "foot" });
    this.element.replaceChildren(...this._cut(), this._body, this._foot);
    if (this.message.role === "user") {
      this._body.append(...attachmentViews(this.message.attachments ?? [], this.words));
      if (this.message.content) this._body.append(make("p", { className: "said" }, this.message.content));
      this._foot.append(this._buttons(), this._branches());
      return;
    }
    if (this.message.status === "streaming" && !this.message.content && !this.message.reasoning) return this.showWaiting("");
    const { reasoning, closed, answer, ms } = reasoningOf(this.message);
    if (reasoning?.trim()) this._body.append(this._makeReasoning(reasoning, closed, ms).box);
    this._body.append(make("div", { className: "markdown" }, renderMarkdown(answer, this._frame)), ...this._calls());
    this._showEnd();
  }

  /** Render the end of an answer. Content that is rendered stays, with its selection and scroll position. */
  finish() {
    if (!this._growing) return this.render();
    this.grow();
    this._growing.finish(reasoningOf(this.message).answer);
    this._growing = null;
    this._showEnd();
  }

  /** Whether this view can stay for `message` with these versions, so that nothing is rendered again. An open editor stays. */
  shows(message, siblings) {
    const same = this.isEdited || (message === this.message && siblings.length === this._siblings.length)
      || JSON.stringify([message, siblings.map(({ id }) => id)]) === JSON.stringify([this.message, this._siblings.map(({ id }) => id)]);
    if (same) Object.assign(this, { message, _siblings: siblings }); // `message` must be one of `siblings`
    return same;
  }

  get isEdited() {
    return Boolean(this._body.querySelector(".editing"));
  }

  /** Focus the button that shows the next or previous version; if it is disabled, the other button. */
  focusBranches(isNext) {
    const [previous, next] = this._foot.querySelectorAll(".branches button");
    const [wanted, other] = isNext ? [next, previous] : [previous, next];
    (wanted.disabled ? other : wanted).focus();
  }

  /** Render an answer that has grown. Called at most once per animation frame. */
  grow() {
    const { reasoning, closed, answer, ms } = reasoningOf(this.message);
    if (!this._growing) {
      this._drafted = null;
      const place = make("div", { className: "markdown" });
      this._thinking = this._makeReasoning("", false);
      this._thinking.box.hidden = true;
      this._callsPlace = make("div");
      this._body.replaceChildren(this._thinking.box, place, this._callsPlace);
      this._foot.replaceChildren();
      this._growing = new GrowingMarkdown(place, this._frame);
    }
    if (reasoning !== null) {
      this._thinking.box.hidden = !reasoning.trim();
      this._thinking.title.textContent = this._reasoningTitle(closed, ms);
      this._thinking.text.textContent = reasoning.trim();
    }
    this._growing.show(answer);
    if (this.message.toolCalls) this._callsPlace.replaceChildren(...this._calls());
    this._showDrafted();
  }

  /** Show a placeholder until the answer begins. */
  showWaiting(text) {
    this._growing = null;
    const dots = make("span", { className: "dots", "aria-hidden": "true" }, make("i"), make("i"), make("i"));
    this._body.replaceChildren(make("p", { className: "waiting" }, dots, make("span", { className: text ? "" : "unseen" }, text || this.words.waiting)));
    this._foot.replaceChildren();
  }

  _frame = (pre) => frameCode(pre, this.words);

  _showEnd() {
    this._showDrafted();
    this._foot.append(...figures(this.message, this.words), this._branches(), this._buttons());
  }

  _showDrafted() {
    if (!this.message.drafted) return;
    if (!this._drafted) this._body.append((this._drafted = new DraftedView(this.words)).element);
    this._drafted.show(this.message.drafted);
  }

  _reasoningTitle(closed, ms) {
    if (!closed) return this.words.thinking;
    return ms === undefined ? this.words.reasoning : `${this.words.reasoning} · ${duration(ms)}`;
  }

  _makeReasoning(reasoning, closed, ms) {
    const title = make("summary", {}, this._reasoningTitle(closed, ms));
    const text = make("div", { className: "reasoning" }, reasoning.trim());
    return { box: make("details", { className: "thinking" }, title, text), title, text };
  }

  _calls() {
    return (this.message.toolCalls ?? []).map((call) => {
      const code = make("pre", { "data-language": "json" }, make("code", {}, pretty(call.arguments)));
      const box = make("details", { className: "call", open: true }, make("summary", {}, this.words.toolCall(call.name)), code);
      frameCode(code, this.words);
      return box;
    });
  }

  _branches() {
    const { words } = this;
    const at = this._siblings.indexOf(this.message), count = this._siblings.length;
    if (count < 2) return "";
    const step = (icon, label, index) => {
      const button = iconButton(icon, label, () => this._actions.select(this._siblings[index], index > at));
      button.disabled = index < 0 || index >= count;
      return button;
    };
    return make("span", { className: "branches" }, step("left", words.previousBranch, at - 1),
      make("span", { "aria-label": words.version(at + 1, count), role: "img" }, `${at + 1}/${count}`),
      step("right", words.nextBranch, at + 1));
  }

  _buttons() {
    const { words, message } = this;
    const shown = message.role === "user" ? message.content : reasoningOf(message).answer;
    const copyButton = iconButton("copy", words.copy, async () => {
      await copy(shown);
      const done = iconButton("check", words.copied, () => {});
      copyButton.replaceChildren(...done.childNodes);
      setTimeout(() => copyButton.replaceChildren(...iconButton("copy", words.copy).childNodes), 1500);
    });
    const buttons = make("span", { className: "buttons" });
    if (shown.trim()) buttons.append(copyButton);
    const again = iconButton("again", words.regenerate, () => this._actions.again(message));
    if (message.role === "user") {
      again.classList.add("of-last"); // a question without an answer
      buttons.append(iconButton("edit", words.edit, () => this.edit().focus()), again);
    } else {
      const fork = iconButton("fork", words.branch, () => this._actions.fork(message));
      buttons.append(again, iconButton("edit", words.editAnswer, () => this.edit().focus()), fork);
    }
    buttons.append(iconButton("trash", words.removeMessage, () => this._actions.remove(message)));
    if (this._canGoOn) {
      const goOn = () => this._actions.goOn(message);
      buttons.append(make("button", { type: "button", className: "quiet of-last", onclick: goOn }, icon("play"), words.continueAnswer));
    }
    if (message.logprobs?.length) {
      const toggle = iconButton("bars", words.probabilities, () => {
        const shownNow = this._body.querySelector(".logprobs");
        if (shownNow) shownNow.remove();
        else this._body.append(logprobsView(message.logprobs, words));
        toggle.setAttribute("aria-expanded", String(!shownNow));
      });
      toggle.setAttribute("aria-expanded", "false");
      buttons.append(toggle);
    }
    return buttons;
  }

  /** Whether the message is an incomplete answer that can be continued. */
  get _canGoOn() {
    const { status, finishReason, edited, content, toolCalls } = this.message;
    const isCut = edited || finishReason === "length" || ["stopped", "interrupted", "failed"].includes(status);
    return this.message.role === "assistant" && isCut && !toolCalls && Boolean(content && reasoningOf(this.message).answer.trim());
  }

  /** Show a note if the messages before this one are not sent. */
  _cut() {
    const { words, message } = this;
    if (!message.begins) return [];
    const all = make("button", { type: "button", className: "quiet", onclick: () => this._actions.sendAll(message) }, words.sendAll);
    const { summary } = message.begins;
    return [make("div", { className: "cut" },
      make("p", {}, summary ? words.summarised : words.leftOut, " ", all),
      ...(summary ? [make("details", {}, make("summary", {}, words.summary), make("p", { className: "said" }, summary))] : []))];
  }

  /** Open the editor. @param {string} text initial text @returns {HTMLElement} the text field */
  edit(text = this.message.content) {
    const { words } = this, isAnswer = this.message.role !== "user";
    const [began, label, done] = isAnswer ? [words.editAnswer, words.editAnswer, words.keepEdited] : [words.edit, words.editMessage, words.sendEdited];
    const area = make("textarea", { value: text, "aria-label": label });
    area.oninput = () => this._actions.keepEdit(this.message, area.value);
    const send = make("button", { type: "button", className: "primary", onclick: () => this._actions.edit(this.message, area.value) }, done);
    const giveUp = () => {
      this._actions.keepEdit(this.message);
      this.render();
      this.element.querySelector(`.buttons [title="${began}"]`).focus();
    };
    const cancel = make("button", { type: "button", onclick: giveUp }, words.cancel);
    area.onkeydown = (event) => {
      const isLine = isAnswer && !event.ctrlKey && !event.metaKey; // Enter begins a new line in an answer, which has several
      if (sends(event) && !isLine) { event.preventDefault(); send.click(); }
      if (event.key === "Escape" && !composes(event)) { event.stopPropagation(); cancel.click(); }
    };
    this._body.replaceChildren(make("div", { className: "editing" }, area, make("div", { className: "row" }, cancel, send)));
    this._foot.replaceChildren();
    area.rows = Math.min(12, text.split("\n").length + 1);
    return area;
  }
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}
