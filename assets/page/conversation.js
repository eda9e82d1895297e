// The open session: shows its messages, sends the next one, and replaces turns (edit, retry).
//
// The server holds the conversation. A new message is appended by the session's id. An edit or a retry sends the messages before
// it, which becomes a branch; when its answer is there, the branch takes the session's place and the replaced turns become a
// branch, as in the terminal. Until then the session is as it was. An answer that calls tools is followed by their results, and by the
// next answer.

import { AnswerView, textOf, userMessage } from "./answer.js";
import { CallDesk } from "./calls.js";
import { announce, button, byId, el } from "./dom.js";
import { contentOf, imagesOf, learn, pictures } from "./images.js";
import { json, sessionPath, streamChat } from "./server.js";
import { chatFields, settings } from "./settings.js";
import { mcp } from "./tools.js";

// Answers in a row whose calls run without the user.
const MAX_ROUNDS = 16;

export class Conversation {
  #hooks;
  #log = byId("log");
  #abort = null;
  #generation = 0;
  #wanted = null;
  #last = null;
  // The calls of the last answer, until all have results.
  #desk = null;
  #rounds = 0;
  // Results that the session has not taken yet.
  #unsent = [];

  // hooks: busy(isBusy, said), changed(id, error) after a turn, failed(error), explain(id), giveBack(images) of an unsent message.
  constructor(hooks) {
    this.#hooks = hooks;
    this.id = null;
    this.messages = [];
    this.isFollowing = true;
    const place = byId("scroll");
    place.addEventListener("scroll", () => {
      this.isFollowing = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
      byId("to-end").hidden = this.isFollowing;
    });
    byId("to-end").addEventListener("click", () => this.#follow(true));
  }

  get isBusy() {
    return this.#abort !== null;
  }

  // An empty conversation, which gets its id with its first message.
  begin() {
    this.#show(null, {});
  }

  async open(id) {
    this.#wanted = id;
    const session = await json(sessionPath(id, "?messages=true"));
    if (this.#wanted !== id) return;
    this.#show(id, session);
  }

  #show(id, session) {
    // An answer under way is stopped; what follows it belongs to a session that is not open any more.
    this.stop();
    this.#generation += 1;
    this.#wanted = id;
    this.#forgetCalls();
    this.#setBusy(null);
    this.id = id;
    this.messages = session.messages ?? [];
    this.#log.replaceChildren(...this.#views(session));
    byId("welcome").hidden = this.messages.length > 0;
    this.#follow(true);
    this.#openDesk(false);
  }

  #views(session = {}) {
    const views = [];
    const finishes = finishesOf(session);
    let last = null;
    this.messages.forEach((message, index) => {
      if (message.role === "assistant") {
        last = new AnswerView();
        last.show(message);
        const finish = finishes.get(index);
        if (finish === "cancelled") last.showError("Stopped.");
        if (finish === "length") last.showNote("Stopped at the token limit.");
        if (finish === "repetition") last.showNote("Stopped: the text repeated itself.");
        this.#addActions(last, index, finish);
        views.push(last.element);
      } else if (message.role === "tool" && last?.addResult(message.tool_call_id, textOf(message.content))) {
        // Shown below its call.
      } else {
        views.push(this.#userView(message, index));
      }
    });
    this.#last = last;
    return views;
  }

  #userView(message, index) {
    const text = textOf(message.content);
    const edit = button("Edit", () => this.#edit(view, text, index), { className: "quiet" });
    const view = userMessage(text, message.role, message.role === "user" ? [edit] : [], pictures(message.content));
    return view;
  }

  #addActions(view, index, finish) {
    const retry = button("Retry", () => this.retry(index), { className: "quiet" });
    const isCut = index === this.messages.length - 1 && ["cancelled", "length", "repetition"].includes(finish);
    const goOn = isCut && !this.messages[index].tool_calls && button("Continue", () => this.#continue(), { className: "quiet" });
    view.actions.replaceChildren(...[view.copyButton(), retry, goOn].filter(Boolean));
  }

  // Goes on with the last answer, which was cut. As with a retry, the answer so far is kept as a branch.
  async #continue() {
    if (this.isBusy) return;
    const messages = this.messages;
    this.#forgetCalls();
    this.#last.element.remove();
    this.messages = messages.slice(0, -1);
    await this.#request({ messages, session_id: this.id, continue_final_message: true }, messages.at(-1));
  }

  #follow(always) {
    const place = byId("scroll");
    if (always) this.isFollowing = true;
    if (this.isFollowing) place.scrollTop = place.scrollHeight;
  }

  // Replaces a message of the user by a field to change it in.
  #edit(view, text, index) {
    if (this.isBusy) return;
    const field = el("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Your message" });
    const cancel = () => {
      form.replaceWith(view);
      view.querySelector("button")?.focus();
    };
    const save = () => {
      const changed = field.value.trim();
      const images = imagesOf(this.messages[index].content);
      if (changed !== "") this.#replace(index, { role: "user", content: contentOf(changed, images) });
    };
    const buttons = el("div.actions", {}, el("button.primary", { type: "submit" }, "Send"), button("Cancel", cancel));
    const note = el("p.label", {}, "The turns from here on are kept as a branch.");
    const form = el("form.edit", { onsubmit: (event) => (event.preventDefault(), save()) }, field, note, buttons);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    view.replaceWith(form);
    field.focus();
  }

  // Edits the last message of the user.
  editLast() {
    const views = [...this.#log.querySelectorAll(".message.user > .actions > button")];
    views.at(-1)?.click();
  }

  // Answers again what was answered at `index`.
  retry(index = this.messages.length - 1) {
    if (this.isBusy) return;
    while (index >= 0 && this.messages[index].role === "assistant") index -= 1;
    if (index >= 0) this.#replace(index, this.messages[index]);
  }

  async #replace(index, message) {
    if (this.isBusy) return;
    const before = this.messages.slice(0, index);
    this.#forgetCalls();
    this.messages = [...before, message];
    this.#log.replaceChildren(...this.#views());
    this.#follow(true);
    await this.#request({ messages: this.messages, session_id: this.id });
  }

  // Sends what the user says. Returns false if nothing was sent.
  async say(text, images = []) {
    if (this.isBusy) return false;
    const system = this.id === null ? settings.system.trim() : "";
    const results = this.#resultsSoFar();
    const added = [...results, ...(system === "" ? [] : [{ role: "system", content: system }]), { role: "user", content: contentOf(text, images) }];
    await this.#append(added, text);
    return true;
  }

  async #append(added, text = "") {
    this.id ??= newId(text);
    byId("welcome").hidden = true;
    const index = this.messages.length;
    this.messages = [...this.messages, ...added];
    const views = added.map((message, at) => message.role !== "tool" && this.#userView(message, index + at));
    this.#log.append(...views.filter(Boolean));
    this.#follow(true);
    await this.#request({ messages: added, session_id: this.id, session_append: true });
  }

  #setBusy(abort, said = "The model answers.") {
    this.#abort = abort;
    this.#hooks.busy(abort !== null, said);
  }

  // `begun` is the answer that continues.
  async #request(body, begun = null) {
    const view = new AnswerView();
    if (begun) view.show(begun);
    const generation = this.#generation;
    const id = this.id;
    this.#setBusy(new AbortController());
    this.#log.append(view.element);
    view.wait("Waiting for the server …");
    this.#follow(false);
    const answer = { timings: null, finish: null, branch: null };
    let error = null;
    try {
      await mcp.renew({ signal: this.#abort.signal });
      await streamChat({ ...body, ...chatFields(mcp.definitions()), stream: true }, {
        signal: this.#abort.signal,
        onBranch: (branch) => (answer.branch = branch),
        onWait: (text) => view.wait(waitText(text)),
        onChunk: (chunk) => this.#take(chunk, view, answer),
      });
    } catch (caught) {
      error = caught;
    }
    view.finish();
    if (answer.timings) view.showFigures(answer.timings, answer.finish, () => this.#hooks.explain(id));
    if (generation === this.#generation) await this.#settle(view, error, body, answer.branch);
    if (generation !== this.#generation) return;
    this.#follow(false);
    this.#setBusy(null);
    this.#hooks.changed(this.id, error);
    if (this.#last === view && !error) this.#openDesk(true, answer.finish);
  }

  #take(chunk, view, answer) {
    const choice = chunk.choices?.[0];
    if (choice?.delta) view.add(choice.delta);
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.timings = chunk.timings ?? answer.timings;
    answer.branch = chunk.llmctl?.branch ?? answer.branch;
    requestAnimationFrame(() => this.#follow(false));
  }

  // After a turn, what the session holds is what counts: a stopped answer is kept up to where it was stopped.
  async #settle(view, error, body, branch) {
    const wasStopped = error?.name === "AbortError";
    if (wasStopped) view.showError("Stopped.");
    else if (error) view.showError(error.message);
    announce(error ? "The answer was not completed." : "The answer is complete.");
    try {
      const id = body.session_id;
      const generation = this.#generation;
      const isReplaced = !body.session_append;
      const hasTurn = wasStopped || !error;
      const isPlaced = isReplaced && hasTurn && (branch === null ? !error : await this.#place(id, branch));
      const session = await this.#held(id, wasStopped && !isReplaced);
      const held = session.messages ?? [];
      if (generation !== this.#generation) return;
      const isAppended = !isReplaced && held.length > this.messages.length - body.messages.length;
      learn(body.messages, held);
      if (isPlaced || isAppended || (!error && !isReplaced)) this.#keep(view, session);
      else if (isReplaced) this.#returnFailed(view, session);
      else this.#giveBack(view, body, held);
    } catch (failure) {
      if (!error) view.showError(failure.message);
      view.actions.replaceChildren(button("Retry", () => this.#again(view, body), { className: "quiet" }));
    }
  }

  // Puts the branch that has the new turn in the session's place. A stopped turn may have to be saved first; there is none if the
  // answer had not begun.
  async #place(id, branch) {
    for (let attempt = 0; attempt < 20; attempt += 1) {
      const held = await json(sessionPath(branch));
      if (held.turns > (held.fork_of?.turns ?? 0) && held.state === "idle") {
        await json(sessionPath(id, "/restore"), { method: "POST", body: { branch } });
        return true;
      }
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    return false;
  }

  // The turn is in the session.
  #keep(view, session) {
    this.messages = session.messages ?? [];
    this.#last = view;
    const index = this.messages.length - 1;
    this.#addActions(view, index, finishesOf(session).get(index));
  }

  // The session; empty if there is none. After a stop, the server saves first; that may take a moment.
  async #held(id, wasStopped) {
    let session = null;
    for (let attempt = 0; attempt < (wasStopped ? 20 : 1); attempt += 1) {
      if (wasStopped) await new Promise((resolve) => setTimeout(resolve, 100));
      session = await json(sessionPath(id, "?messages=true")).catch((error) => {
        if (error.code === "session_not_found") return null;
        throw error;
      });
      if ((session?.messages?.length ?? 0) > this.messages.length && session.state === "idle") break;
    }
    return session ?? {};
  }

  // A message that the session did not take goes back to where it was written.
  #giveBack(view, body, held) {
    this.messages = held;
    for (let said = view.element.previousElementSibling; said?.classList.contains("user"); said = view.element.previousElementSibling) {
      said.remove();
    }
    if (held.length === 0) this.id = null;
    this.#unsent = body.messages.filter((message) => message.role === "tool");
    if (body.messages.at(-1).role === "tool") {
      const resend = () => this.isBusy || (view.element.remove(), this.#append(this.#resultsSoFar()));
      view.actions.replaceChildren(button("Retry", resend, { className: "quiet" }));
    }
    const text = textOf(body.messages.at(-1).content);
    const input = byId("input");
    if (input.value === "" && body.messages.at(-1).role === "user") {
      this.#hooks.giveBack(imagesOf(body.messages.at(-1).content));
      input.value = text;
      input.dispatchEvent(new Event("input"));
    }
  }

  // The session is as it was before the edit; the message can be edited again.
  #returnFailed(view, session) {
    this.messages = session.messages ?? [];
    const back = button("Show the session as it is", () => this.#show(this.id, session), { className: "quiet" });
    view.element.append(el("p.label", {}, "The session was not changed. ", back));
  }

  // Sends a message again whose fate was unknown, unless the session has its answer by now.
  async #again(view, body) {
    const generation = this.#generation;
    const session = await this.#held(body.session_id, false).catch((error) => this.#hooks.failed(error));
    if (session === undefined || generation !== this.#generation || this.isBusy) return;
    const before = this.messages.length - (body.session_append ? body.messages.length : 0);
    if (body.session_append && (session.messages ?? []).length > before) {
      this.#show(this.id, session);
      return;
    }
    view.element.remove();
    this.#request(body);
  }

  stop() {
    this.#abort?.abort();
  }

  // Goes to a call that waits for the user.
  focusCall() {
    this.#desk?.focus();
  }

  // After an answer that calls tools: asks for its calls and for results. Calls run by themselves after a fresh answer only.
  #openDesk(isFresh, finish = null) {
    const calls = this.messages.at(-1)?.role === "assistant" ? (this.#last?.pendingCalls ?? []) : [];
    if (calls.length === 0) return;
    const view = this.#last;
    const ifOpen = (action) => (...given) => this.#desk === desk && action(...given);
    const desk = new CallDesk(calls, {
      busy: ifOpen((abort) => this.#setBusy(abort, "The model's call runs.")),
      addResult: (call, text) => {
        view.showResult(call, text);
        this.#follow(false);
      },
      done: ifOpen((results, wasAsked) => this.#goOn(results, wasAsked)),
    });
    if (finish === "length" && desk.hasTools) {
      view.calls.append(el("p.note", {}, "The last call was cut off at the token limit: nothing was called."));
      return;
    }
    this.#desk = desk;
    const isOver = this.#rounds >= MAX_ROUNDS;
    const hasAlways = desk.begin(isFresh && !isOver);
    if (isFresh && isOver && hasAlways) {
      const said = `The model has called tools in ${MAX_ROUNDS} answers in a row: its next calls need you.`;
      view.calls.append(el("p.note", { role: "status" }, said));
    }
    this.#follow(false);
  }

  // All calls have results.
  #goOn(results, wasAsked) {
    this.#rounds = wasAsked ? 0 : this.#rounds + 1;
    this.#desk = null;
    this.#append(results);
  }

  #forgetCalls() {
    this.#desk = null;
    this.#rounds = 0;
    this.#unsent = [];
  }

  // The results that go with what the user says instead of deciding on calls.
  #resultsSoFar() {
    const results = [...this.#unsent, ...(this.#desk?.hasTools ? this.#desk.close() : [])];
    this.#forgetCalls();
    return results;
  }
}

// "prompt: 4096 of 9000 tokens, about 12 s left" as a sentence.
function waitText(text) {
  const words = text.replace(/^(waiting|prompt): /, (_, kind) => (kind === "prompt" ? "Reading the prompt: " : "Waiting: "));
  return `${words} …`;
}

// Why answers ended, by the index of their message.
function finishesOf(session) {
  let end = 0;
  return new Map((session.turn_ends ?? []).map(({ messages, finish_reason: finish }) => [(end += messages) - 1, finish]));
}

// An id of the first words of the message and 32 random bits, so that no other session has it.
function newId(text) {
  const words = text.toLowerCase().match(/[a-z0-9]+/g) ?? [];
  const short = words.slice(0, 8).join("-").slice(0, 48).replace(/-+$/, "") || "chat";
  const random = crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0");
  return `${short}-${random}`;
}
