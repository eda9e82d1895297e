// The server's load over the last minutes, from /metrics: tokens per second, requests, KV and the warm share of prompts.

import { byId, bytes, count, el } from "./dom.js";
import { text } from "./server.js";

const INTERVAL_MS = 2000;
const POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [240, 56];

// Sums each metric of a text in Prometheus' format over its labels.
export function sums(metrics) {
  const found = new Map();
  for (const line of metrics.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const name = line.split(/[{ ]/, 1)[0];
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    if (Number.isFinite(value)) found.set(name, (found.get(name) ?? 0) + value);
  }
  return found;
}

const CAUSES = {
  billing_header: "a billing header",
  countdown: "a token countdown",
  date: "a date or time",
  number: "a number",
  id: "an id",
  tools_order: "tools in another order",
  tools: "other tools",
  inserted_message: "a message put in between",
  removed_message: "a message that is gone",
  text: "another text",
};

// What clients changed of prompts that they had sent before, one line each, the most tokens first.
export function breaks(metrics) {
  const found = new Map();
  const sample = /^llmctl_prefix_break(s|_tokens)_total\{client="([^"]*)",cause="([^"]*)"\} (\d+)$/gm;
  for (const [, kind, client, cause, value] of metrics.matchAll(sample)) {
    const row = found.get(`${client} ${cause}`) ?? { client, cause, prompts: 0, tokens: 0 };
    row[kind === "s" ? "prompts" : "tokens"] = Number(value);
    found.set(`${client} ${cause}`, row);
  }
  const rows = [...found.values()].sort((a, b) => b.tokens - a.tokens);
  return rows.map(({ client, cause, prompts, tokens }) =>
    `${client} broke the warm prefix by ${CAUSES[cause] ?? cause}: ${count(prompts)} ${prompts === 1 ? "prompt" : "prompts"}, ${count(tokens)} tokens computed again`);
}

// One plot: the series it draws, and how the last values are worded.
class Plot {
  #points = [];

  constructor({ title, series, words, top }) {
    Object.assign(this, { title, series, words, top });
    this.value = el("span.value");
    this.lines = series.map((name) => svg("polyline", { class: `line ${name}`, fill: "none" }));
    this.image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.image.append(...this.lines);
    this.scale = el("span.scale");
    const keys = series.length > 1 ? series.map((name) => el(`span.key.${name}`, {}, name)) : [];
    this.element = el("section.plot", {}, el("h3", {}, title, " ", ...keys), this.value, el("div.frame", {}, this.image, this.scale));
  }

  add(values) {
    this.#points.push(values);
    if (this.#points.length > POINTS) this.#points.shift();
    this.#draw();
  }

  #draw() {
    const last = this.#points.at(-1);
    this.value.textContent = this.words(...last);
    this.image.setAttribute("aria-label", `${this.title}: ${this.value.textContent}`);
    const known = this.#points.flat().filter((value) => value !== null);
    const top = this.top ?? roundUp(Math.max(1, ...known));
    this.scale.textContent = this.top === 1 ? "100%" : count(top);
    this.lines.forEach((line, index) => line.setAttribute("points", this.#path(index, top)));
  }

  // An unknown value repeats the one before it.
  #path(index, top) {
    let value = 0;
    const first = POINTS - this.#points.length;
    const place = (values, at) => {
      value = values[index] ?? value;
      const x = ((first + at) / (POINTS - 1)) * WIDTH;
      return `${x.toFixed(1)},${(HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1)}`;
    };
    return this.#points.map(place).join(" ");
  }
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

const PLOTS = [
  {
    title: "Tokens/s",
    series: ["generated", "prompt"],
    words: (generated, prompt) => `${count(generated, 1)} generated, ${count(prompt, 1)} of prompts computed`,
  },
  {
    title: "Requests",
    series: ["running", "waiting"],
    words: (running, waiting) => `${count(running)} running, ${count(waiting)} waiting`,
  },
];

const KV_PLOT = {
  title: "KV in use",
  series: ["share"],
  top: 1,
  words: (share, held, capacity) => `${count(100 * share, 1)}%: ${bytes(held)} of ${bytes(capacity)}`,
};

const WARM_PLOT = {
  title: "Warm share of prompts",
  series: ["share"],
  top: 1,
  words: (share) => (share === null ? "no prompt in the last seconds" : `${count(100 * share)}%`),
};

export class Panel {
  #last = null;
  #timer = 0;
  #onError;

  constructor(isRemote, onError) {
    this.#onError = onError;
    const kv = isRemote ? [] : [KV_PLOT];
    this.plots = [...PLOTS, ...kv, WARM_PLOT].map((plot) => new Plot(plot));
    this.total = el("p.label");
    this.breaks = el("div");
    const note = isRemote && el("p.note", {}, "An engine elsewhere computes and keeps the KV: its use, its place on disk and the reasons of misses are not known here.");
    byId("plots").replaceChildren(...this.plots.map((plot) => plot.element), note || "", this.breaks, this.total);
  }

  // Looks at the server as long as the panel is open and the tab visible.
  start() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (byId("panel").hidden) return;
    if (!document.hidden) this.#look();
    this.#timer = setTimeout(() => this.start(), INTERVAL_MS);
  }

  async #look() {
    try {
      const metrics = await text("metrics", { accept: "text/plain" });
      this.#add(sums(metrics), performance.now());
      this.breaks.replaceChildren(...breaks(metrics).map((line) => el("p.note", {}, line)));
    } catch (error) {
      this.#last = null;
      this.#onError(error);
    }
  }

  #add(metrics, now) {
    const get = (name) => metrics.get(name) ?? 0;
    const counters = { at: now, generated: get("vllm:generation_tokens_total"), prompt: get("vllm:prefix_cache_queries_total"), cached: get("vllm:prefix_cache_hits_total") };
    const before = this.#last ?? counters;
    const seconds = Math.max((now - before.at) / 1000, 0.001);
    const since = (name) => Math.max(0, counters[name] - before[name]);
    const [prompt, cached] = [since("prompt"), since("cached")];
    // Of all engines together: their own shares do not add up.
    const [held, capacity] = [get("llmctl_kv_held_bytes"), get("llmctl_kv_capacity_bytes")];
    const kv = [capacity > 0 ? held / capacity : 0, held, capacity];
    const values = new Map([
      ["Tokens/s", [since("generated") / seconds, Math.max(0, prompt - cached) / seconds]],
      ["Requests", [get("vllm:num_requests_running"), get("vllm:num_requests_waiting")]],
      ["KV in use", kv],
      ["Warm share of prompts", [prompt > 0 ? cached / prompt : null]],
    ]);
    this.#last = counters;
    for (const plot of this.plots) plot.add(values.get(plot.title));
    const share = counters.prompt > 0 ? Math.round((100 * counters.cached) / counters.prompt) : 0;
    const [prompts, made] = [count(counters.prompt), count(counters.generated)];
    this.total.textContent = `Since the start: ${made} tokens generated, ${prompts} of prompts, ${share}% of them warm.`;
  }
}
