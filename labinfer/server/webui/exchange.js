// Conversations as a JSON file, and back.

import { newId } from "./identity.js";

const FORMAT = "labinfer-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant"];

/** The text of a file with these conversations. @param {{record: object, messages: object[]}[]} conversations */
export function toJson(conversations) {
  const list = conversations.map(({ record, messages }) => ({ ...record, messages }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: list }, null, 1);
}

/**
 * The conversations of such a file, with new ids: nothing that is there is overwritten.
 * @throws {Error} it is no such file
 */
export function fromJson(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT || file.version !== VERSION || !Array.isArray(file.conversations)) {
    throw new Error(`format is not ${FORMAT} ${VERSION}`);
  }
  return file.conversations.map(renewed);
}

function renewed(given) {
  const ids = new Map();
  const renew = (id) => (id === null ? null : ids.get(id) ?? fail(`a message ${JSON.stringify(id)} is missing`));
  if (!Array.isArray(given?.messages)) fail("a conversation has no messages");
  for (const message of given.messages) ids.set(message?.id, newId());
  const id = newId();
  const messages = given.messages.map((message) => {
    if (!ROLES.includes(message.role) || typeof message.content !== "string") fail("a message has no role or content");
    return { ...message, id: renew(message.id), conversation: id, parent: renew(message.parent), created: Number(message.created) || 0 };
  });
  checkTree(messages);
  const record = {
    id, title: String(given.title ?? ""), named: Boolean(given.named), created: Number(given.created) || Date.now(),
    updated: Number(given.updated) || Date.now(), leaf: renew(given.leaf ?? null), model: String(given.model ?? ""),
    system: String(given.system ?? ""), settings: { ...given.settings },
  };
  return { record, messages };
}

function checkTree(messages) {
  const parents = new Map(messages.map((one) => [one.id, one.parent]));
  for (const { id } of messages) {
    let steps = 0;
    for (let at = id; at; at = parents.get(at)) if (++steps > messages.length) fail("messages follow each other in a circle");
  }
}

function fail(why) {
  throw new Error(why);
}
