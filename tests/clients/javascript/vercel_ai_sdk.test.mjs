// Vercel's AI SDK in three generations: createOpenAI over responses and over chat completions, createOpenAICompatible, createAnthropic.

import assert from "node:assert/strict";
import { test } from "node:test";
import { z } from "zod";
import { apiKey, baseURL, expectedCalls, fetchWriting, model, question, thoughtful, tooLong, twoCalls } from "./service.mjs";

const Person = z.object({ name: z.enum(["Ada", "Bob"]), age: z.enum(["1", "2"]) });
const noCalls = { temperature: 0, maxRetries: 0, maxOutputTokens: 400, prompt: question };

for (const generation of [5, 6, 7]) {
  const { generateText, Output, streamText, tool } = await import(`ai-${generation}`);
  const { createOpenAI } = await import(`ai-${generation}-openai`);
  const { createOpenAICompatible } = await import(`ai-${generation}-compatible`);
  const { createAnthropic } = await import(`ai-${generation}-anthropic`);
  const makers = {
    responses: (options) => createOpenAI({ baseURL, apiKey, ...options })(model),
    chat: (options) => createOpenAI({ baseURL, apiKey, ...options }).chat(model),
    compatible: (options) =>
      createOpenAICompatible({ name: "labinfer", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true, ...options })(model),
    messages: (options) => createAnthropic({ baseURL, apiKey, ...options })(model),
  };
  const tools = {
    get_weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]), days: z.union([z.literal(1), z.literal(2)]) }),
    }),
  };

  for (const [name, make] of Object.entries(makers)) {
    const title = (text) => `ai ${generation}, ${name}: ${text}`;

    test(title("answer, whole and streamed"), async () => {
      assert.equal((await generateText({ ...noCalls, model: make() })).text, "42");
      const stream = streamText({ ...noCalls, model: make() });
      let text = "";
      for await (const piece of stream.textStream) text += piece;
      assert.equal(text, "42");
      assert.ok((await stream.usage).outputTokens > 0);
    });

    test(title("a forced call, whole and streamed"), async () => {
      const forced = { ...noCalls, model: make(), tools, toolChoice: { type: "tool", toolName: "get_weather" } };
      const whole = await generateText(forced);
      const streamed = streamText(forced);
      await streamed.consumeStream();
      for (const calls of [whole.toolCalls, await streamed.toolCalls]) {
        assert.ok(["Rome", "Oslo"].includes(calls[0].input.city));
      }
    });

    test(title("an object"), async () => {
      const fields = { ...noCalls, model: make() };
      const key = generation === 5 ? "experimental_output" : "output";
      assert.ok(Person.parse((await generateText({ ...fields, [key]: Output.object({ schema: Person }) }))[key]));
    });

    test(title("errors"), async () => {
      await assert.rejects(generateText({ ...noCalls, prompt: tooLong, model: make() }), /maximum context length/);
      await assert.rejects(generateText({ ...noCalls, model: make({ apiKey: "wrong" }) }), { statusCode: 401 });
    });

    if (name === "messages") continue; // no field of its API makes this model write what follows

    test(title("two calls, streamed"), async () => {
      const stream = streamText({ ...noCalls, model: make({ fetch: fetchWriting(twoCalls) }), tools });
      await stream.consumeStream();
      assert.deepEqual((await stream.toolCalls).map((call) => call.input), expectedCalls);
    });

    if (name === "chat") continue; // createOpenAI reads no thoughts out of chat completions

    test(title("thoughts"), async () => {
      const stream = streamText({ ...noCalls, model: make({ fetch: fetchWriting(thoughtful) }) });
      await stream.consumeStream();
      assert.equal(await stream.text, "42");
      if (name === "compatible") assert.equal(await stream.reasoningText, "Add.");
    });
  }
}
