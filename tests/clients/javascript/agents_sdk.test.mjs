// OpenAI's Agents SDK (JavaScript) over chat completions and responses.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { apiKey, baseURL, model, question, tooLong } from "./service.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const runner = new Runner({ tracingDisabled: true });
const getWeather = tool({
  name: "get_weather",
  description: "The weather of a city.",
  parameters: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

for (const Model of [OpenAIChatCompletionsModel, OpenAIResponsesModel]) {
  const agent = (fields = {}, settings = {}) =>
    new Agent({
      name: "Someone",
      model: new Model(client, model),
      modelSettings: { temperature: 0, maxTokens: 400, ...settings },
      ...fields,
    });

  test(`${Model.name}: answer, whole and streamed`, async () => {
    assert.equal((await runner.run(agent(), question)).finalOutput, "42");
    const run = await runner.run(agent(), question, { stream: true });
    for await (const _ of run) {
      // to its end
    }
    assert.equal(run.finalOutput, "42");
  });

  test(`${Model.name}: a forced call is run and answered`, async () => {
    const run = await runner.run(agent({ tools: [getWeather] }, { toolChoice: "required" }), question);
    assert.equal(run.newItems[0].type, "tool_call_item");
  });

  test(`${Model.name}: output type`, async () => {
    const outputType = z.object({ name: z.enum(["Ada", "Bob"]) });
    assert.ok(outputType.parse((await runner.run(agent({ outputType }), question)).finalOutput));
  });

  test(`${Model.name}: errors`, async () => {
    await assert.rejects(runner.run(agent(), tooLong), /maximum context length/);
  });
}
