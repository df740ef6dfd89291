// Body of a chat request: the messages before the answer, and the conversation's settings.

import { reasoningOf } from "./thinking.js";

/**
 * @param {import("./conversation.js").Conversation} conversation
 * @param {object} answer message on the shown path that is generated or continued
 */
export function requestBody({ record, path }, answer, goesOn = false) {
  const before = sentPart(path).filter((_, index, part) => index < part.indexOf(answer) + Number(goesOn));
  const { logprobs, extra, ...sampling } = record.settings;
  const body = { messages: asMessages(before, record.system), ...sampling, ...extra };
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  if (record.model) body.model = record.model;
  if (logprobs !== undefined) Object.assign(body, { logprobs: true, top_logprobs: logprobs });
  return body;
}

/** Messages of a path that a request contains: from the last message whose predecessors were dropped. */
export function sentPart(path) {
  return path.slice(Math.max(0, path.findLastIndex((one) => one.begins)));
}

/** Messages in the API's format, with the summary of dropped ones. */
export function asMessages(part, system) {
  const summary = part[0]?.begins?.summary;
  const told = [system, summary && `Summary of the conversation so far:\n${summary}`].filter(Boolean).join("\n\n");
  return [...(told ? [{ role: "system", content: told }] : []), ...part.map(asMessage)];
}

/** Text of a user message with its attached files. */
export function textOf({ content, attachments = [] }) {
  return [...attachments.map(({ name, text }) => `File ${name}:\n\n${text}`), content].filter(Boolean).join("\n\n");
}

function asMessage(said) {
  const { role, toolCalls } = said;
  if (role === "user") return { role, content: textOf(said) };
  const message = { role, content: reasoningOf(said).answer };
  if (toolCalls?.length) {
    message.tool_calls = toolCalls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}
