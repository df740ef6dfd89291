// How full a model's context is, and what can be left out.

import { asMessages, sentPart } from "./request_body.js";

export const SHOWN_FROM = 0.7;
const KEPT = 0.5; // of the context, at most, when the oldest is left out
const OVERFLOW = "context_length_exceeded";

/**
 * Tokens of a conversation, as far as its last answer tells; null where none does.
 * @param {number|undefined} length of the model's context, in tokens
 * @returns {{used: number, length: number, overflows: boolean}|null} overflows: the last request was refused for that
 */
export function contextUse({ path }, length) {
  if (!length) return null;
  const part = sentPart(path), last = part.at(-1);
  if (last?.failure?.code === OVERFLOW) return { used: length, length, overflows: true };
  const told = part.findLast((one) => one.usage && (one.from ?? null) === beginOf(part));
  if (!told) return null;
  return { used: Math.min(length, told.usage.prompt_tokens + told.usage.completion_tokens), length, overflows: false };
}

/** What tells requests that left out different parts from each other. @param {object[]} part that is sent */
export function beginOf(part) {
  return part[0]?.begins ? part[0].id : null;
}

/**
 * Where a conversation is cut so that half of the context is free: the messages before go, those from there on stay.
 * @returns {{before: object[], first: object}|null} null where only one question is left
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
