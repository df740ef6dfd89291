// MessageActions: what the buttons under messages do.

import { forkOf } from "./conversation.js";
import { openDialog } from "./dialog.js";
import { make } from "./element.js";

export class MessageActions {
  /** @param {import("./chat.js").Chat} chat @param {import("./preferences.js").Preferences} preferences which keep what is not sent yet */
  constructor(chat, preferences) {
    Object.assign(this, { _chat: chat, _preferences: preferences });
  }

  /** Texts of messages that were being edited when the conversation was last open, by the message. */
  edits(conversation) {
    return this._preferences.edits(conversation.record.id);
  }

  /** The text of a message that is being edited; none where that is given up. */
  keepEdit(message, text) {
    this._preferences.keepEdit(message, text);
  }

  /** Another version of a message: of a question with an answer to it, of an answer as it was written by hand. */
  async edit(message, text) {
    const { role, parent, attachments, model } = message;
    if (!text.trim()) return;
    this.keepEdit(message);
    const conversation = await this._chat.atRest();
    if (!conversation) return;
    if (role === "user") return this._chat.answer(conversation, conversation.add(role, parent, { content: text.trim(), attachments }));
    this._chat.keep(conversation, [conversation.add(role, parent, { content: text.trim(), status: "done", edited: true, model })]);
  }

  /** Another version of an answer; to a question that has none, the first. */
  async again(message) {
    const conversation = await this._chat.atRest();
    if (conversation) await this._chat.answer(conversation, message.role === "user" ? message : conversation.messages.get(message.parent));
  }

  /** Go on with an answer where it ends. */
  async goOn(message) {
    const conversation = await this._chat.atRest();
    if (!conversation) return;
    Object.assign(message, { status: "streaming", failure: undefined, finishReason: undefined, usage: undefined });
    await this._chat.answer(conversation, conversation.messages.get(message.parent), message);
  }

  select(message, isNext) {
    this._chat.select(message, isNext);
  }

  /** Delete a message with what follows it, on all branches, when that is confirmed. */
  remove(message) {
    const { words, conversation } = this._chat, count = conversation.under(message).length;
    openDialog(words.remove, [make("p", {}, words.removeMessageAsk(count - 1))], [
      { label: words.cancel, run() {} },
      { label: words.remove, danger: true, run: () => { this._removeNow(message); } },
    ], words.close);
  }

  async _removeNow(message) {
    const conversation = await this._chat.atRest();
    if (conversation) await this._chat.drop(conversation, conversation.remove(message));
  }

  /** A new conversation that begins as this one does, up to this message. */
  async fork(message) {
    const { record, messages } = forkOf(this._chat.conversation, message, this._chat.words.forked);
    await this._chat.take([{ record, messages }]);
  }

  /** Send again what was left out before this message. */
  async sendAll(message) {
    delete message.begins;
    this._chat.keep(this._chat.conversation, [message], message);
  }
}
