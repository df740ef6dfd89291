// The server that the suites ask, and what they ask it for.

export const server = process.env.SERVER;
export const baseURL = `${server}/v1`;
export const apiKey = process.env.API_KEY;
export const model = "demo";
export const question = "17 + 25 = ?";
export const tooLong = "red blue ".repeat(3000);
export const weather = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] }, days: { type: "integer", enum: [1, 2] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const call = (city, days) =>
  `<tool_call>\n{"name": "get_weather", "arguments": {"city": "${city}", "days": ${days}}}\n</tool_call>`;
export const twoCalls = `${call("Rome", 1)}\n${call("Oslo", 2)}`;
export const expectedCalls = [{ city: "Rome", days: 1 }, { city: "Oslo", days: 2 }];
export const thoughtful = "<think>\nAdd.\n</think>\n\n42";

/** The field that makes the model write this, as one with more training would by itself. */
export const writing = (text) => ({ structured_outputs: { choice: [text] } });

/** A fetch that adds such a field, for clients that send no fields but OpenAI's. */
export const fetchWriting = (text) => (url, init) =>
  fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), ...writing(text) }) });
