// @anthropic-ai/sdk over messages.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { apiKey, model, question, server, tooLong, weather } from "./service.mjs";

const client = new Anthropic({ baseURL: server, apiKey, maxRetries: 0, timeout: 60_000 });
const fields = { model, max_tokens: 400, messages: [{ role: "user", content: question }] };

test("whole and streamed", async () => {
  assert.equal((await client.messages.create(fields)).content[0].text, "42");
  assert.equal(await client.messages.stream(fields).finalText(), "42");
});

test("calls, whole and streamed", async () => {
  const forced = {
    ...fields,
    tools: [{ name: "get_weather", input_schema: weather }],
    tool_choice: { type: "any", disable_parallel_tool_use: true },
  };
  for (const message of [await client.messages.create(forced), await client.messages.stream(forced).finalMessage()]) {
    assert.equal(message.stop_reason, "tool_use");
    assert.ok(["Rome", "Oslo"].includes(message.content.at(-1).input.city));
  }
});

test("thoughts", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const message = await client.messages.stream({ ...fields, model: "thinker", max_tokens: 12, thinking }).finalMessage();
  assert.equal(message.content[0].type, "thinking");
});

test("errors", async () => {
  const long = { ...fields, messages: [{ role: "user", content: tooLong }] };
  await assert.rejects(client.messages.create(long), /prompt is too long/);
  await assert.rejects(client.withOptions({ apiKey: "wrong" }).messages.create(fields), Anthropic.AuthenticationError);
});
