// Use of the context length, and which messages to drop.

import { asMessages, sentPart } from "./request_body.js";

export const SHOWN_FROM = 0.7;
const KEPT = 0.5; // fraction of the context that dropping messages leaves in use
const OVERFLOW = "context_length_exceeded";

/**
 * Use of the context by a conversation, from the `usage` of its last answer; null without `usage`.
 * @param {number|undefined} length context length, in tokens
 * @returns {{used: number, length: number, overflows: boolean}|null} overflows: the last request was rejected because of the context length
 */
export function contextUse({ path }, length) {
  if (!length) return null;
  const part = sentPart(path), last = part.at(-1);
  if (last?.failure?.code === OVERFLOW) return { used: length, length, overflows: true };
  const told = part.findLast((one) => one.usage && (one.from ?? null) === beginOf(part));
  if (!told) return null;
  return { used: Math.min(length, told.usage.prompt_tokens + told.usage.completion_tokens), length, overflows: false };
}

/** Key of the messages in a request, to compare it with another: the key differs if other messages were dropped. @param {object[]} part messages sent */
export function beginOf(part) {
  return part[0]?.begins ? part[0].id : null;
}

/**
 * Split of a conversation that frees half of the context: the messages to drop (`before`), and the first message to
 *   keep.
 * @returns {{before: object[], first: object}|null} null if there is only one question
 */
export function cutOf(conversation, { used, length }) {
  const part = sentPart(conversation.path);
  const sizes = part.map((one) => asMessages([{ ...one, begins: undefined }], "")[0].content.length);
  const perCharacter = used / Math.max(1, sizes.reduce((sum, size) => sum + size, 0));
  const questions = part.map((_, index) => index).filter((index) => index > 0 && part[index].role === "user");
  const kept = (index) => perCharacter * sizes.slice(index).reduce((sum, size) => sum + size, 0);
  const at = questions.find((index) => kept(index) <= KEPT * length) ?? questions.at(-1);
  return at === undefined ? null : { before: part.slice(0, at), first: part[at] };
}
