// One message in the conversation: what the user said, or an answer with its reasoning, tool calls and figures.

import { imagesOf } from "./images.js";
import { copy, count, el, shown } from "./dom.js";
import { MarkdownView } from "./markdown.js";

// The text of a message, whose content may be null or a list of parts.
export function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  const isShown = (part) => !imagesOf([part]).length;
  return content.filter(isShown).map((part) => part.text ?? `[${part.type}]`).join("\n");
}

export function userMessage(text, role, actions, images = null) {
  const name = role === "user" ? "You" : role === "system" || role === "developer" ? "System prompt" : role;
  const body = el("div.said", { dir: "auto" }, images, text);
  const shown = role === "user" ? body : el("details.fold", {}, el("summary", {}, name), body);
  const bar = actions.length > 0 && el("div.actions", {}, ...actions);
  return el("article.message.user", { "aria-label": name }, shown, bar);
}

// An answer that may still be growing.
export class AnswerView {
  #texts = { content: "", reasoning: "" };
  #calls = new Map();
  #frame = 0;
  #lastRender = 0;

  constructor() {
    this.body = el("div.answer", { dir: "auto" });
    this.markdown = new MarkdownView(this.body);
    this.thoughts = el("div.said", { dir: "auto" });
    this.summary = el("summary", {}, "Reasoning");
    this.reasoning = el("details.fold.reasoning", { hidden: true }, this.summary, this.thoughts);
    this.calls = el("div.calls");
    this.waiting = el("p.pending", { hidden: true });
    this.figures = el("p.figures");
    this.actions = el("div.actions");
    this.footer = el("footer", {}, this.actions, this.figures);
    const parts = [this.reasoning, this.body, this.calls, this.waiting, this.footer];
    this.element = el("article.message.assistant", { "aria-label": "Answer" }, ...parts);
  }

  get text() {
    return this.#texts.content;
  }

  get isEmpty() {
    return this.#texts.content === "" && this.#texts.reasoning === "" && this.#calls.size === 0;
  }

  // A whole message of the session.
  show(message) {
    this.#texts.content = textOf(message.content);
    this.#texts.reasoning = message.reasoning_content ?? "";
    (message.tool_calls ?? []).forEach((call, index) => this.#call({ index, ...call }));
    this.#render();
  }

  // A piece of a stream.
  add(delta) {
    this.#texts.content += delta.content ?? "";
    this.#texts.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.#call(call);
    this.summary.textContent = this.#texts.content === "" ? "Reasoning …" : "Reasoning";
    this.wait("");
    this.#frame ||= requestAnimationFrame(() => this.#later());
  }

  // Long answers are drawn less often, so that drawing takes at most a fifth of the time.
  #later() {
    this.#frame = 0;
    const start = performance.now();
    if (start < this.#lastRender) {
      this.#frame = requestAnimationFrame(() => this.#later());
      return;
    }
    this.#render();
    const end = performance.now();
    this.#lastRender = end + 4 * (end - start);
  }

  finish() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.wait("");
    this.summary.textContent = "Reasoning";
    this.#render();
  }

  wait(text) {
    this.waiting.textContent = text;
    this.waiting.hidden = text === "";
  }

  #render() {
    this.markdown.update(this.#texts.content);
    this.reasoning.hidden = this.#texts.reasoning === "";
    if (this.thoughts.textContent !== this.#texts.reasoning) this.thoughts.textContent = this.#texts.reasoning;
    for (const call of this.#calls.values()) {
      // What is shown of a call is what may be run.
      call.name.textContent = shown(call.said.name);
      call.code.textContent = shown(indented(call.said.arguments));
    }
  }

  #call({ index, id, function: part }) {
    let call = this.#calls.get(index);
    if (!call) {
      call = { id, said: { name: "", arguments: "" }, name: el("code"), code: el("code") };
      call.results = el("div.results");
      const details = el("details.fold.call", { open: true }, el("summary", {}, "Tool call: ", call.name));
      details.append(el("pre", { tabIndex: 0, role: "group", "aria-label": "Arguments" }, call.code), call.results);
      call.element = details;
      this.calls.append(details);
      this.#calls.set(index, call);
    }
    call.said.name += part?.name ?? "";
    call.said.arguments += part?.arguments ?? "";
  }

  // Calls that have no result yet.
  get pendingCalls() {
    return [...this.#calls.values()].filter((call) => call.results.childElementCount === 0);
  }

  // Shows a tool's result below its call; returns whether the call is one of this answer's.
  addResult(id, text) {
    const call = [...this.#calls.values()].find((known) => known.id === id && known.results.childElementCount === 0);
    if (call) this.showResult(call, text);
    return call !== undefined;
  }

  showResult(call, text) {
    call.results.append(el("p.label", {}, "Result"), el("pre", { tabIndex: 0, role: "group", "aria-label": "Result" }, text));
  }

  // The last line: speed, and how much of the prompt was warm. `explain` opens the reason.
  showFigures(timings, finish, explain) {
    const parts = [];
    if (finish === "length") parts.push("stopped at the token limit");
    if (finish === "repetition") parts.push("stopped: the text repeated itself");
    parts.push(`${count(timings.decode_tokens)} tokens`);
    if (timings.decode_tokens_per_second) parts.push(`${count(timings.decode_tokens_per_second, 1)} tokens/s`);
    if (timings.ttft_ms !== null) parts.push(`first after ${count(timings.ttft_ms / 1000, 2)} s`);
    const prompt = timings.cached_tokens + timings.prefill_tokens;
    parts.push(`${count(timings.cached_tokens)} of ${count(prompt)} prompt tokens warm`);
    const why = el("button.link", { type: "button", onclick: explain }, "why?");
    this.figures.replaceChildren(parts.join(" · "), " ", why);
  }

  showNote(text) {
    this.footer.before(el("p.note", {}, text));
  }

  showError(text) {
    this.footer.before(el("p.error", { role: "alert" }, text));
  }

  copyButton() {
    const pressed = el("button.quiet", { type: "button", onclick: () => copy(this.text, pressed) }, "Copy");
    return pressed;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
