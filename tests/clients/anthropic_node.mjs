// Anthropic's official Node client against a running server: `node anthropic_node.mjs BASE_URL API_KEY`.
// As anthropic_python.py: shapes, order and what is enforced; the model has random weights.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { run } from "./checks.mjs";

const [url, apiKey] = process.argv.slice(2);
const baseURL = url.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say something: übung, 日本, 🦀." }];
const weather = {
  name: "get_weather",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
    required: ["city"],
  },
};
const text = (message) => message.content.map((block) => block.text ?? "").join("");

const checks = {
  async modelsAreFound() {
    const found = await client.models.retrieve(model);
    assert.equal(found.type, "model");
    assert.ok(found.max_input_tokens > 0);
  },

  async streamHelperSeesTheWholeAnswer() {
    const request = { model, messages, max_tokens: 24, temperature: 0.7, seed: 7 };
    const whole = await client.messages.create(request);
    const stream = client.messages.stream(request);
    let streamed = "";
    stream.on("text", (delta) => (streamed += delta));
    const final = await stream.finalMessage();
    assert.equal(text(final), text(whole));
    assert.equal(streamed, text(whole));
    assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
    assert.ok(stream.request_id);
  },

  async eventsComeInOrder() {
    const types = [];
    for await (const event of await client.messages.create({ model, messages, max_tokens: 8, stream: true })) {
      types.push(event.type);
    }
    assert.equal(types[0], "message_start");
    assert.deepEqual(types.slice(-2), ["message_delta", "message_stop"]);
    const starts = types.filter((type) => type === "content_block_start").length;
    assert.equal(types.filter((type) => type === "content_block_stop").length, starts);
  },

  async toolsAreCalledAndAnswered() {
    const tool_choice = { type: "tool", name: "get_weather", disable_parallel_tool_use: true };
    const request = { model, messages, tools: [weather], tool_choice, max_tokens: 300 };
    const whole = await client.messages.create(request);
    const final = await client.messages.stream(request).finalMessage();
    for (const message of [whole, final]) {
      assert.equal(message.stop_reason, "tool_use");
      const call = message.content.find((block) => block.type === "tool_use");
      assert.ok(["Oslo", "Rome"].includes(call.input.city), JSON.stringify(call));
    }
    const call = final.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: "No such city", is_error: true };
    const more = [...messages, { role: "assistant", content: final.content }, { role: "user", content: [result] }];
    const answer = await client.messages.create({ model, messages: more, tools: [weather], max_tokens: 4 });
    assert.ok(answer.usage.cache_read_input_tokens > 0, JSON.stringify(answer.usage));
  },

  async tokensAreCounted() {
    const request = { model, messages, tools: [weather], system: "Be brief." };
    const { input_tokens } = await client.messages.countTokens(request);
    const { usage } = await client.messages.create({ ...request, max_tokens: 1 });
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },

  async schemasAreKept() {
    const schema = {
      type: "object",
      properties: { colour: { enum: ["red", "green"] } },
      required: ["colour"],
      additionalProperties: false,
    };
    const output_config = { format: { type: "json_schema", schema } };
    const message = await client.messages.create({ model, messages, output_config, max_tokens: 100 });
    assert.ok(["red", "green"].includes(JSON.parse(text(message)).colour), text(message));
  },

  async errorsAreTyped() {
    const refused = client.messages.create({ model, messages: [], max_tokens: 1 });
    await assert.rejects(refused, (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.equal(error.type, "invalid_request_error");
      assert.ok(error.requestID);
      return true;
    });
    const stranger = new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), Anthropic.AuthenticationError);
    const bearer = new Anthropic({ baseURL, apiKey: null, authToken: apiKey, maxRetries: 0 });
    assert.equal((await bearer.models.list()).data[0].id, model);
  },

  async aClientThatLeavesFreesItsPlace() {
    const stream = client.messages.stream({ model, messages, max_tokens: 400 });
    await new Promise((resolve) => stream.once("connect", resolve));
    stream.abort();
    await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
    assert.equal((await client.messages.create({ model, messages, max_tokens: 1 })).type, "message");
  },
};

await run(checks);
process.exit(0);
