// OpenAI's and Anthropic's Node clients with images, against a server whose model reads them:
// `node images_node.mjs BASE_URL API_KEY FOLDER_OF_IMAGES`. As images_python.py: the model has random weights.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { run } from "./checks.mjs";

const [baseURL, apiKey, images] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const claude = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey, maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const data = readFileSync(join(images, "lossy.webp")).toString("base64");
const url = `data:image/webp;base64,${data}`;
const text = { type: "text", text: "What is this?" };
const image = { type: "image_url", image_url: { url } };
const block = { type: "image", source: { type: "base64", media_type: "image/webp", data } };
const user = (...content) => ({ role: "user", content });
const chat = (messages, more = {}) => client.chat.completions.create({ model, messages, max_tokens: 6, ...more });
const say = (...messages) => claude.messages.create({ model, messages, max_tokens: 4 });
const total = (usage) => usage.input_tokens + usage.cache_read_input_tokens;

const checks = {
  async anImageIsReadOnce() {
    const first = await chat([user(image, text)]);
    const alone = await chat([user(text)]);
    assert.ok(first.usage.prompt_tokens > alone.usage.prompt_tokens + 3);
    const more = [user(image, text), first.choices[0].message, user(text)];
    const second = await chat(more);
    assert.ok(second.usage.prompt_tokens_details.cached_tokens > 0, JSON.stringify(second.usage));
  },

  async aStreamIsAsTheWhole() {
    const request = [[user(text, image)], { temperature: 0.7, seed: 3 }];
    const whole = await chat(...request);
    let streamed = "";
    for await (const chunk of await chat(request[0], { ...request[1], stream: true })) streamed += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(streamed, whole.choices[0].message.content);
  },

  async responsesTakeImages() {
    const part = { type: "input_image", image_url: url, detail: "auto" };
    const first = await client.responses.create({ model, input: [user(part)], max_output_tokens: 4 });
    const call = { type: "function_call", call_id: "c1", name: "look", arguments: "{}" };
    const output = { type: "function_call_output", call_id: "c1", output: [part] };
    const input = [user({ type: "input_text", text: "Look." }), call, output];
    const second = await client.responses.create({ model, input, max_output_tokens: 4 });
    assert.ok(first.usage.input_tokens > 8 && second.usage.input_tokens > first.usage.input_tokens);
  },

  async messagesTakeImages() {
    const [without, seen] = [await say(user(text)), await say(user(text, block))];
    assert.ok(total(seen.usage) > total(without.usage) + 3);
    const counted = await claude.messages.countTokens({ model, messages: [user(text, block)] });
    assert.equal(counted.input_tokens, total(seen.usage));
  },

  async resultsHaveImages() {
    const use = { type: "tool_use", id: "c1", name: "look", input: {} };
    const result = (...content) => user({ type: "tool_result", tool_use_id: "c1", content });
    const asked = [user(text), { role: "assistant", content: [use] }];
    const [without, seen] = [await say(...asked, result(text)), await say(...asked, result(text, block))];
    assert.ok(total(seen.usage) > total(without.usage) + 3);
  },

  async whatIsNoImageIsRefused() {
    const bad = { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } };
    await assert.rejects(chat([user(bad)]), (error) => error.status === 400 && error.code === "image_undecodable");
    const source = { type: "base64", media_type: "image/png", data: "AAAA" };
    await assert.rejects(say(user({ type: "image", source })), (error) => error.status === 400 && error.message.includes("messages.0.content.0.source"));
  },
};

await run(checks);
