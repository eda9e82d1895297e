// Ollama's JavaScript client against a running server: `node ollama_node.mjs BASE_URL API_KEY`, as openai_node.mjs.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { run } from "./checks.mjs";

const [baseURL, key] = process.argv.slice(2);
const host = baseURL.replace(/\/v1$/, "");
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const model = (await client.list()).models[0].model;
const messages = [{ role: "user", content: "Say something: übung, 日本, 🦀." }];
const options = { num_predict: 12, temperature: 0.5, seed: 1 };

await run({
  async modelsAreListedAndShown() {
    const shown = await client.show({ model });
    assert.ok(shown.capabilities.includes("completion") && shown.template.includes("im_start"));
    assert.equal((await client.ps()).models[0].model, model);
    assert.ok((await client.version()).version.split(".").length === 3);
  },
  async aStreamSaysWhatTheWholeAnswerSays() {
    const whole = await client.chat({ model, messages, options });
    assert.ok(whole.done && whole.total_duration > 0 && whole.eval_count > 0);
    let text = "";
    let last;
    for await (last of await client.chat({ model, messages, options, stream: true })) text += last.message.content;
    assert.equal(text, whole.message.content);
    assert.ok(last.done && last.done_reason === whole.done_reason);
  },
  async aSchemaIsEnforced() {
    const format = { type: "object", properties: { colour: { enum: ["red", "green"] } }, required: ["colour"] };
    const answer = await client.chat({ model, messages, format, options: { seed: 1 } });
    assert.ok(["red", "green"].includes(JSON.parse(answer.message.content).colour));
  },
  async aConversationGoesOnWithItsContext() {
    const first = await client.generate({ model, prompt: "One", options });
    const second = await client.generate({ model, prompt: "Two", context: first.context, options });
    assert.ok(second.prompt_eval_count > first.prompt_eval_count);
  },
  async aStreamIsAborted() {
    const stream = await client.generate({ model, prompt: "Once", raw: true, stream: true, options: { num_predict: 400, stop: [] } });
    await assert.rejects(async () => {
      for await (const part of stream) if (!part.done) stream.abort();
    }, { name: "AbortError" });
  },
  async aModelIsLoadedWithoutAText() {
    assert.equal((await client.generate({ model, prompt: "" })).done_reason, "load");
  },
  async whatCannotBeDoneIsRefusedByName() {
    await assert.rejects(client.chat({ model, messages, options: { mirostat: 9 } }), /mirostat/);
    await assert.rejects(client.delete({ model }), /llmctl models rm/);
    await assert.rejects(client.pull({ model: "org/repo" }), /--allow-pull/);
  },
});
