// The tool calls of one answer: what the user agrees to is called on the server, the results of other tools are typed in, and all go
// back to the model together.
//
// Nothing runs that this page's user did not agree to: each call by a button, or its tool by "Always run this tool" since the page was
// loaded. The calls of a session that was opened always wait for a button.

import { announce, button, byId, el, shown } from "./dom.js";
import { mcp } from "./tools.js";

// What the model is told of a call without a result; the words of `llmctl chat`.
const REFUSED = "error: the user refused the call";
const STOPPED = "error: the user stopped it";
const NO_OBJECT = "error: the arguments are not a JSON object";
const NO_RESULT = "error: there is no result of the call";

export class CallDesk {
  #hooks;
  #calls;
  #abort = null;
  #numRunning = 0;
  #wasAsked = false;

  // hooks: busy(abort) while calls run and null after, done(messages, wasAsked) with all results, addResult(call, text).
  constructor(calls, hooks) {
    this.#hooks = hooks;
    this.#calls = calls.map((call) => ({ call, meant: mcp.meant(call.said.name), text: null, box: el("div.consent", { tabIndex: -1 }) }));
  }

  // Whether some of the calls are for tools of MCP servers.
  get hasTools() {
    return this.#calls.some((one) => one.meant !== null);
  }

  // Shows what to decide. `mayRun`: tools that were always allowed run at once, one after the other. Returns whether some would have.
  begin(mayRun) {
    const isAlways = (one) => one.meant !== null && mcp.isAlways(one.call.said.name);
    for (const one of this.#calls.filter((one) => one.meant !== null)) this.#ask(one);
    this.#askResults();
    const always = this.#calls.filter(isAlways);
    if (mayRun && always.length > 0) this.#runAll(always);
    const waiting = this.#calls.filter((one) => one.meant !== null && !(mayRun && isAlways(one)));
    if (waiting.length > 0) announce(`The model wants to call ${waiting.map((one) => named(one.meant)).join(", ")}: run or refuse?`);
    return always.length > 0;
  }

  // Ends it without a decision, because the user continues. Returns a result for each call.
  close() {
    this.#form?.remove();
    for (const one of this.#calls.filter((one) => one.text === null)) {
      this.#finish(one, one.meant === null ? NO_RESULT : one.wasStopped ? STOPPED : REFUSED);
    }
    return this.#calls.map(message);
  }

  // Goes to the first call that waits. Returns whether there is one.
  focus() {
    const waiting = this.#calls.find((one) => one.text === null);
    const field = waiting?.box.querySelector("button") ?? this.#form?.querySelector("textarea");
    field?.focus();
    return Boolean(field);
  }

  #ask(one, note = "") {
    const { server, tool } = one.meant;
    const { name } = one.call.said;
    const press = (action) => () => {
      this.#wasAsked = true;
      action();
    };
    const run = press(() => this.#runAll([one]));
    const refuse = press(() => this.#decide(one, REFUSED));
    const always = press(() => (mcp.allowAlways(name), this.#runAll([one])));
    const question = el("p", {}, "The model wants to call ", el("code", {}, shown(tool)), " of the MCP server ", el("code", {}, server), ".");
    const buttons = el("div.actions", {}, button("Run", run, { className: "primary" }), button("Refuse", refuse), button("Always run this tool", always));
    const about = note !== "" && el("p.error", { role: "alert" }, note);
    one.box.setAttribute("role", "group");
    one.box.setAttribute("aria-label", `Call of ${named(one.meant)}`);
    one.box.replaceChildren(...[question, about, buttons].filter(Boolean));
    one.call.element.append(one.box);
  }

  // Calls one after the other; several presses call at the same time.
  async #runAll(calls) {
    this.#abort ??= new AbortController();
    const { signal } = this.#abort;
    this.#numRunning += 1;
    this.#hooks.busy(this.#abort);
    for (const one of calls.slice(1)) one.box.replaceChildren(el("p.pending", {}, `Waits: ${named(one.meant)} …`));
    for (const one of calls) {
      if (signal.aborted) this.#stopped(one, "Stopped before it ran.");
      else await this.#run(one, signal);
    }
    this.#numRunning -= 1;
    if (this.#numRunning > 0) return;
    this.#abort = null;
    this.#hooks.busy(null);
    this.#settle();
  }

  async #run(one, signal) {
    const given = objectOf(one.call.said.arguments);
    if (given === null) return this.#finish(one, NO_OBJECT);
    const hadFocus = one.box.contains(document.activeElement);
    one.box.replaceChildren(el("p.pending", {}, `Calling ${named(one.meant)} …`));
    if (hadFocus) one.box.focus();
    announce(`Calling ${named(one.meant)}.`);
    try {
      const { text } = await mcp.call(one.call.said.name, given, signal);
      this.#finish(one, text);
    } catch (error) {
      if (error.name === "AbortError") this.#stopped(one, "Stopped. It may have run.");
      else if (error.code === "tool_not_found") this.#finish(one, `error: ${error.message}`);
      else this.#ask(one, error.message);
    }
  }

  #stopped(one, note) {
    one.wasStopped = true;
    this.#ask(one, note);
  }

  #decide(one, text) {
    this.#finish(one, text);
    this.#settle();
  }

  #finish(one, text) {
    const hadFocus = one.box.contains(document.activeElement);
    one.text = text;
    one.box.remove();
    this.#hooks.addResult(one.call, text);
    if (hadFocus && !this.focus()) byId("input").focus();
  }

  // Hands the results on when the last one is there.
  #settle() {
    if (this.#numRunning > 0 || this.#calls.some((one) => one.text === null)) return;
    this.#hooks.done(this.#calls.map(message), this.#wasAsked);
  }

  // Fields for the results of tools that the user runs.
  #form = null;

  #askResults() {
    const own = this.#calls.filter((one) => one.meant === null);
    if (own.length === 0) return;
    const fields = own.map(({ call }) => el("textarea", { rows: 2, "aria-label": `Result of ${call.said.name}` }));
    const labels = own.map(({ call }, at) => el("label", {}, `Result of ${call.said.name}`, fields[at]));
    const send = (event) => {
      event.preventDefault();
      this.#form.remove();
      this.#wasAsked = true;
      own.forEach((one, at) => this.#finish(one, fields[at].value));
      this.#settle();
    };
    this.#form = el("form.edit", { onsubmit: send }, ...labels, el("button.primary", { type: "submit" }, "Send results"));
    own.at(-1).call.element.after(this.#form);
  }
}

function message({ call, text }) {
  return { role: "tool", tool_call_id: call.id, content: text };
}

function named({ server, tool }) {
  return `${shown(tool)} of ${server}`;
}

function objectOf(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}
