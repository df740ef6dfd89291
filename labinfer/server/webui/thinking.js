// Reasoning of a model. The server separates it from the answer, unless it does not know the model's format: then the
// text contains <think> and </think>. Some chat templates contain the <think>, so that only </think> is in the text.

const OPEN = "<think>";
const CLOSE = "</think>";

/** @returns {{reasoning: string|null, closed: boolean, answer: string, ms: number|undefined}} ms: duration of the reasoning */
export function reasoningOf(message) {
  const { reasoning, content, toolCalls, status, thoughtMs } = message;
  if (!reasoning) return split(content);
  return { reasoning, closed: Boolean(content || toolCalls) || status !== "streaming", answer: content, ms: thoughtMs };
}

function split(text) {
  const begin = text.trimStart();
  const closeAt = text.indexOf(CLOSE);
  if (begin.startsWith(OPEN)) {
    const openAt = text.indexOf(OPEN) + OPEN.length;
    if (closeAt < 0) return { reasoning: text.slice(openAt), closed: false, answer: "" };
    return { reasoning: text.slice(openAt, closeAt), closed: true, answer: after(text, closeAt) };
  }
  const openAt = text.indexOf(OPEN);
  if (closeAt >= 0 && (openAt < 0 || closeAt < openAt)) {
    return { reasoning: text.slice(0, closeAt), closed: true, answer: after(text, closeAt) };
  }
  return { reasoning: null, closed: true, answer: text };
}

function after(text, closeAt) {
  return text.slice(closeAt + CLOSE.length).trimStart();
}
