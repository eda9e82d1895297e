// The official Node client against a running server: `node openai_node.mjs BASE_URL API_KEY`.
// As openai_python.py: shapes, order and what is enforced; the model has random weights.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { run } from "./checks.mjs";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say something: übung, 日本, 🦀." }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const checks = {
  async chatAnswers() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 12 });
    assert.equal(typeof answer.choices[0].message.content, "string");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },

  async streamHelperSeesTheWholeAnswer() {
    const request = { model, messages, max_tokens: 24, temperature: 0.7, seed: 7 };
    const whole = await client.chat.completions.create(request);
    const runner = client.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
  },

  async toolsAreCalled() {
    const request = { model, messages, tools: [weather], tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 };
    const answer = await client.chat.completions.create(request);
    const [call] = answer.choices[0].message.tool_calls;
    assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
    const final = await client.chat.completions.stream(request).finalChatCompletion();
    assert.deepEqual(
      JSON.parse(final.choices[0].message.tool_calls[0].function.arguments),
      JSON.parse(call.function.arguments),
    );
  },

  async schemasAreKept() {
    const schema = {
      type: "object",
      properties: { colour: { enum: ["red", "green"] } },
      required: ["colour"],
      additionalProperties: false,
    };
    const answer = await client.chat.completions.create({
      model, messages, max_tokens: 200,
      response_format: { type: "json_schema", json_schema: { name: "light", strict: true, schema } },
    });
    assert.ok(["red", "green"].includes(JSON.parse(answer.choices[0].message.content).colour));
  },

  async abortsEndTheRequest() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create({ model, messages, stream: true }, { signal: controller.signal });
    for await (const _ of stream) {
      controller.abort();
      break;
    }
    assert.ok((await client.chat.completions.create({ model, messages, max_tokens: 4 })).choices.length);
  },

  async errorsAreTheClientsOwn() {
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 3 }), (error) => {
      return error instanceof OpenAI.BadRequestError && error.code === "invalid_value" && error.param === "temperature";
    });
  },
};

await run(checks);
