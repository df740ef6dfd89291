// openai (JavaScript): chat completions and responses.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { apiKey, baseURL, expectedCalls, model, question, thoughtful, tooLong, twoCalls, weather, writing } from "./service.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: question }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: weather, strict: true } }];
const Person = z.object({ name: z.enum(["Ada", "Bob"]), age: z.literal([1, 2]) });

test("chat, whole and streamed", async () => {
  const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(answer.choices[0].message.content, "42");
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, "42");
});

test("two calls, whole and streamed", async () => {
  const fields = { model, messages, tools, ...writing(twoCalls) };
  const whole = await client.chat.completions.create(fields);
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  for (const answer of [whole, streamed]) {
    const calls = answer.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments));
    assert.deepEqual(calls, expectedCalls);
  }
});

test("parsed answer", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.ok(Person.parse(answer.choices[0].message.parsed));
});

test("thoughts", async () => {
  const answer = await client.chat.completions.create({ model, messages, ...writing(thoughtful) });
  assert.equal(answer.choices[0].message.reasoning_content, "Add.");
});

test("responses, whole, streamed and parsed", async () => {
  const fields = { model, input: question, temperature: 0 };
  assert.equal((await client.responses.create(fields)).output_text, "42");
  assert.equal((await client.responses.stream(fields).finalResponse()).output_text, "42");
  const parsed = await client.responses.parse({ ...fields, text: { format: zodTextFormat(Person, "person") } });
  assert.ok(Person.parse(parsed.output_parsed));
});

test("responses with two calls", async () => {
  const offered = [{ type: "function", ...tools[0].function }];
  const response = await client.responses.stream({ model, input: question, tools: offered, ...writing(twoCalls) }).finalResponse();
  assert.deepEqual(response.output.map((item) => JSON.parse(item.arguments)), expectedCalls);
});

test("errors", async () => {
  const long = { model, messages: [{ role: "user", content: tooLong }] };
  await assert.rejects(client.chat.completions.create(long), { status: 400, code: "context_length_exceeded" });
  const stranger = client.withOptions({ apiKey: "wrong" });
  await assert.rejects(stranger.chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
});
