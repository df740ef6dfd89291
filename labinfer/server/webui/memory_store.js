// MemoryStore: Store in memory, for a browser that cannot store data (private window, full disk).

export class MemoryStore {
  constructor() {
    this._conversations = new Map();
    this._messages = new Map();
    this._attachments = new Map();
  }

  async conversations() {
    return [...this._conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  async conversation(id) { return this._conversations.get(id); }

  async messages(conversation) {
    return [...this._messages.values()].filter((message) => message.conversation === conversation);
  }

  async attachments(conversation) { return this._attachments.get(conversation) ?? []; }

  async keepAttachments(conversation, files) { this._attachments.set(conversation, [...files]); }

  async save(conversation) { this._conversations.set(conversation.id, conversation); }

  async saveMessage(message) { this._messages.set(message.id, message); }

  async saveAll(conversations, messages) {
    for (const one of conversations) await this.save(one);
    for (const one of messages) await this.saveMessage(one);
  }

  async removeMessages(ids) {
    for (const id of ids) this._messages.delete(id);
  }

  async remove(id) {
    this._conversations.delete(id);
    this._attachments.delete(id);
    for (const message of await this.messages(id)) this._messages.delete(message.id);
  }

  async everyMessage(look) {
    for (const message of this._messages.values()) look(message);
  }
}
