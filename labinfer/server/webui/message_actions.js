// MessageActions: actions of the buttons below messages.

import { forkOf } from "./conversation.js";
import { openDialog } from "./dialog.js";
import { make } from "./element.js";

export class MessageActions {
  /** @param {import("./chat.js").Chat} chat @param {import("./preferences.js").Preferences} preferences store of the edited texts */
  constructor(chat, preferences) {
    Object.assign(this, { _chat: chat, _preferences: preferences });
  }

  /** Edits that were open when the conversation was last shown: message id to the edited text. */
  edits(conversation) {
    return this._preferences.edits(conversation.record.id);
  }

  /** Store the text of a message being edited; undefined ends the edit. */
  keepEdit(message, text) {
    this._preferences.keepEdit(message, text);
  }

  /** Save an edited message as a new version; an edited question is answered again. */
  async edit(message, text) {
    const { role, parent, attachments, model } = message;
    if (!text.trim()) return;
    this.keepEdit(message);
    const conversation = await this._chat.atRest();
    if (!conversation) return;
    if (role === "user") return this._chat.answer(conversation, conversation.add(role, parent, { content: text.trim(), attachments }));
    this._chat.keep(conversation, [conversation.add(role, parent, { content: text.trim(), status: "done", edited: true, model })]);
  }

  /** Regenerate an answer; for a question, generate an answer if it has none. */
  async again(message) {
    const conversation = await this._chat.atRest();
    if (conversation) await this._chat.answer(conversation, message.role === "user" ? message : conversation.messages.get(message.parent));
  }

  /** Continue an answer. */
  async goOn(message) {
    const conversation = await this._chat.atRest();
    if (!conversation) return;
    Object.assign(message, { status: "streaming", failure: undefined, finishReason: undefined, usage: undefined });
    await this._chat.answer(conversation, conversation.messages.get(message.parent), message);
  }

  select(message, isNext) {
    this._chat.select(message, isNext);
  }

  /** Delete a message and its descendants after confirmation. */
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

  /** Branch: copy the conversation up to a message as a new one. */
  async fork(message) {
    const { record, messages } = forkOf(this._chat.conversation, message, this._chat.words.branchTitle);
    await this._chat.take([{ record, messages }]);
  }

  /** Include the messages before this one, which were dropped, in requests again. */
  async sendAll(message) {
    delete message.begins;
    this._chat.keep(this._chat.conversation, [message], message);
  }
}
