// Export conversations to JSON, and import them.

import { newId } from "./identity.js";

const FORMAT = "labinfer-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant"];

const text = (value) => typeof value === "string";
const number = Number.isFinite;
const boolean = (value) => typeof value === "boolean";
const listOf = (fits) => (value) => Array.isArray(value) && value.every(fits);
const object = (value) => value?.constructor === Object;
const objectOf = (shapes) => (value) => object(value) && Object.entries(shapes).every(([name, fits]) => fits(value[name]));

// Fields of messages and their types. Their names cannot change, as saved conversations have them: thoughtMs is the
// duration of the reasoning.
const MESSAGE_FIELDS = {
  role: text, content: text, reasoning: text, thoughtMs: number, created: number, status: text, finishReason: text, model: text,
  failure: objectOf({ kind: text, message: text }),
  stats: objectOf({ tokens: number, about: boolean, firstMs: number, perSecond: number }),
  usage: objectOf({ prompt_tokens: number, completion_tokens: number, prompt_tokens_details: objectOf({ cached_tokens: number }) }),
  edited: boolean, begins: objectOf({ summary: text }), attachments: listOf(objectOf({ name: text, text })),
  toolCalls: listOf(objectOf({ id: text, name: text, arguments: text })),
  drafted: listOf((pair) => Array.isArray(pair) && text(pair[0]) && boolean(pair[1])),
  logprobs: listOf(objectOf({ token: text, logprob: number, top: listOf((pair) => Array.isArray(pair) && text(pair[0]) && number(pair[1])) })),
};
const RECORD_FIELDS = { title: text, named: boolean, created: number, updated: number, model: text, system: text };
const SETTING_FIELDS = {
  temperature: number, top_p: number, top_k: number, min_p: number, max_tokens: number, repetition_penalty: number,
  presence_penalty: number, frequency_penalty: number, seed: number, stop: listOf(text), logprobs: number,
  return_drafted: boolean, extra: object,
};

/** Export conversations to JSON text. @param {{record: object, messages: object[]}[]} conversations */
export function toJson(conversations) {
  const list = conversations.map(({ record, messages }) => ({ ...record, messages }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: list }, null, 1);
}

/**
 * Import the conversations of an exported file, with new ids, so that no stored conversation is overwritten.
 * @throws {Error} the text is not an export
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
    if (!ROLES.includes(message?.role) || typeof message.content !== "string") fail("a message has no role or content");
    const from = ids.get(message.from) ?? null;
    return { ...known(message, MESSAGE_FIELDS), id: renew(message.id), conversation: id, parent: renew(message.parent), from };
  });
  checkTree(messages);
  const now = Date.now();
  const record = {
    title: "", named: false, created: now, updated: now, model: "", system: "", ...known(given, RECORD_FIELDS),
    id, leaf: renew(given.leaf ?? null), settings: known(given.settings ?? {}, SETTING_FIELDS),
  };
  return { record, messages };
}

/** Copy of an object with only its fields of the expected types. */
function known(given, shapes) {
  return Object.fromEntries(Object.entries(shapes)
    .filter(([name, fits]) => Object.hasOwn(given, name) && fits(given[name]))
    .map(([name]) => [name, given[name]]));
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
