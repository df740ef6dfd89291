// Conversation: a tree of messages, and the path through it that is shown. An edited message is a sibling of the original.

import { newId } from "./identity.js";

const TITLE_LENGTH = 60;

/** Make the record of a new conversation, for the store. @param {string} model name of the model; "" for the server's default */
export function newRecord(model = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, leaf: null, model, system: "", settings: {} };
}

export class Conversation {
  /**
   * @param {object} record the conversation's record in the store
   * @param {object[]} messages all messages of the conversation
   */
  constructor(record, messages = []) {
    this.record = record;
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  /** The shown messages, in order. */
  get path() {
    const path = [];
    for (let at = this.messages.get(this.record.leaf); at; at = this.messages.get(at.parent)) path.unshift(at);
    return path;
  }

  /** All versions of a message, oldest first. */
  siblings(message) {
    return [...this.messages.values()]
      .filter((one) => one.parent === message.parent)
      .sort((a, b) => a.created - b.created);
  }

  /** Add a message after `parent` (null: as the first), and show the path that ends with it. */
  add(role, parent, fields = {}) {
    const latest = Math.max(0, ...[...this.messages.values()].map((one) => one.created));
    const message = {
      id: newId(), conversation: this.record.id, parent, role, content: "",
      created: Math.max(Date.now(), latest + 1), ...fields,
    };
    this.messages.set(message.id, message);
    this.record.leaf = message.id;
    this.record.updated = Date.now();
    if (role === "user" && !this.record.title) this.record.title = titleOf(message.content || message.attachments[0].name);
    return message;
  }

  /** Show the path through a message that ends with its latest descendant. */
  select(message) {
    let leaf = message;
    for (;;) {
      const next = [...this.messages.values()].filter((one) => one.parent === leaf.id);
      if (!next.length) break;
      leaf = next.reduce((a, b) => (b.created > a.created ? b : a));
    }
    this.record.leaf = leaf.id;
  }

  /** A message and its descendants on all branches. */
  under(message) {
    const subtree = [message];
    for (const one of subtree) subtree.push(...[...this.messages.values()].filter(({ parent }) => parent === one.id));
    return subtree;
  }

  /** Remove a message and its descendants, and show another version of the message, or else its parent. @returns {object[]} removed messages */
  remove(message) {
    const gone = this.under(message), { path } = this;
    for (const { id } of gone) this.messages.delete(id);
    if (path.includes(message)) {
      const other = this.siblings(message).at(-1);
      if (other) this.select(other);
      else this.record.leaf = message.parent;
    }
    return gone;
  }
}

/** Copy the path up to a message as a new conversation: its record and messages. @param {(title: string) => string} entitle makes the new title */
export function forkOf({ record, path }, message, entitle) {
  const { title, model, system, settings } = record;
  const copy = { ...newRecord(model), title: entitle(title), named: true, system, settings: structuredClone(settings) };
  const part = path.slice(0, path.indexOf(message) + 1), ids = new Map(part.map(({ id }) => [id, newId()]));
  const messages = part.map((one) => ({
    ...structuredClone(one), id: ids.get(one.id), conversation: copy.id, parent: ids.get(one.parent) ?? null, from: ids.get(one.from) ?? null,
  }));
  return { record: Object.assign(copy, { leaf: ids.get(message.id) }), messages };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}
