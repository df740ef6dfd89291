// Conversation: a tree of messages, and the way through it that is shown. An edited message is a sibling of the first.

import { newId } from "./identity.js";

const TITLE_LENGTH = 60;

/** A new record, as the store keeps it. @param {string} model its name, or "" for the server's first */
export function newRecord(model = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, leaf: null, model, system: "", settings: {} };
}

export class Conversation {
  /**
   * @param {object} record of the store
   * @param {object[]} messages its messages
   */
  constructor(record, messages = []) {
    this.record = record;
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  /** The messages that are shown, from the first to the last. */
  get path() {
    const path = [];
    for (let at = this.messages.get(this.record.leaf); at; at = this.messages.get(at.parent)) path.unshift(at);
    return path;
  }

  /** The versions of a message, itself among them, in the order of their making. */
  siblings(message) {
    return [...this.messages.values()]
      .filter((one) => one.parent === message.parent)
      .sort((a, b) => a.created - b.created);
  }

  /** A new message after `parent` (null: at the beginning), which is now the last one shown. */
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

  /** Show this message, and after it what was made last. */
  select(message) {
    let leaf = message;
    for (;;) {
      const next = [...this.messages.values()].filter((one) => one.parent === leaf.id);
      if (!next.length) break;
      leaf = next.reduce((a, b) => (b.created > a.created ? b : a));
    }
    this.record.leaf = leaf.id;
  }

  /** This message and all that follow it, on all branches. */
  under(message) {
    const found = [message];
    for (const one of found) found.push(...[...this.messages.values()].filter(({ parent }) => parent === one.id));
    return found;
  }

  /** Take a message out with what follows it, and show another version of it or else what is before it. @returns {object[]} what went */
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

/** A new record and its messages: the way through a conversation up to one message. @param {(title: string) => string} entitle */
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
