// The official Node client's Responses API against a running server: `node responses_node.mjs BASE_URL API_KEY`. The server's model
// has random weights, so nothing here asks for sense. Prints one line per check and ends with the number that passed; any failure is
// an exception.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { run } from "./checks.mjs";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const input = "Say something: übung, 日本, 🦀.";
const weather = {
  type: "function",
  name: "get_weather",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

const checks = {
  async answersHaveText() {
    const answer = await client.responses.create({ model, input, max_output_tokens: 12, temperature: 0 });
    assert.equal(typeof answer.output_text, "string");
    assert.equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens);
  },

  async streamsAreNumbered() {
    const stream = await client.responses.create({ model, input, max_output_tokens: 12, stream: true });
    const events = [];
    for await (const event of stream) events.push(event);
    assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
    assert.equal(events[0].type, "response.created");
    assert.ok(["response.completed", "response.incomplete"].includes(events.at(-1).type));
  },

  async streamHelperSeesTheWholeAnswer() {
    const format = { type: "json_schema", name: "light", strict: true, schema: weather.parameters };
    const request = { model, input, text: { format } };
    const whole = await client.responses.create({ ...request, temperature: 0 });
    let text = "";
    const stream = client.responses.stream({ ...request, temperature: 0 });
    stream.on("response.output_text.delta", (event) => (text += event.delta));
    const final = await stream.finalResponse();
    assert.equal(final.output_text, whole.output_text);
    assert.equal(text, whole.output_text);
    assert.ok(["Oslo", "Rome"].includes(JSON.parse(text).city));
  },

  async functionsAreCalledAndAnswered() {
    const request = { model, tools: [weather], parallel_tool_calls: false, max_output_tokens: 600 };
    const stream = client.responses.stream({ ...request, input, tool_choice: "required" });
    const first = await stream.finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.arguments).city));
    const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const next = await client.responses.create({
      ...request, input: [output], previous_response_id: first.id, tool_choice: "none", max_output_tokens: 8,
    });
    assert.ok(next.usage.input_tokens_details.cached_tokens > 0);
  },

  async responsesAreStored() {
    const first = await client.responses.create({ model, input, max_output_tokens: 8 });
    assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
    await client.responses.delete(first.id);
    await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
    await assert.rejects(
      client.responses.create({ model, input, previous_response_id: first.id }),
      (error) => error instanceof OpenAI.NotFoundError && error.code === "previous_response_not_found",
    );
  },

  async abortsEndTheRequest() {
    const controller = new AbortController();
    const stream = await client.responses.create({ model, input, stream: true }, { signal: controller.signal });
    for await (const _ of stream) {
      controller.abort();
      break;
    }
    assert.ok((await client.responses.create({ model, input, max_output_tokens: 4 })).id);
  },
};

await run(checks);
