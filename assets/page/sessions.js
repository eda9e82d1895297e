// The list of sessions, and what can be done to one: open, fork, rename, delete, and put a branch in its session's place.

import { askText, byId, confirmed, count, el } from "./dom.js";
import { json, sessionPath } from "./server.js";

const PAGE = 1000;
const DAY = 86_400;

// Contents of a branch, by the reason that it was made for.
const BRANCHES = {
  edit: "before an edit",
  retry: "before a retry",
  undo: "undone",
  reset: "before a reset",
  request: "another course",
  restore: "replaced",
};

// The page's own ids are the first words of a message and a number, and are shown as words.
export function titleOf(id) {
  const [, words, branch = ""] = /^(.+)-[0-9a-f]{8}(~\d+)?$/.exec(id) ?? [];
  return words ? words[0].toUpperCase() + words.slice(1).replaceAll("-", " ") + branch : id;
}

export class Sessions {
  #hooks;
  #all = [];

  // hooks: open(id), current() as the open session's id.
  constructor(hooks) {
    this.#hooks = hooks;
    byId("filter").addEventListener("input", () => this.#show());
  }

  find(id) {
    return this.#all.find((session) => session.id === id);
  }

  async refresh() {
    const all = [];
    for (let path = `v1/sessions?limit=${PAGE}`; path !== null; ) {
      const page = await json(path);
      all.push(...page.data.filter((session) => !session.transient));
      path = page.has_more ? `v1/sessions?limit=${PAGE}&after=${encodeURIComponent(page.last_id)}` : null;
    }
    this.#all = all.sort((a, b) => (b.last_used_at ?? 0) - (a.last_used_at ?? 0));
    this.#show();
  }

  #show() {
    const words = byId("filter").value.trim().toLowerCase();
    const found = this.#all.filter(({ id }) => id.toLowerCase().includes(words) || titleOf(id).toLowerCase().includes(words));
    // A branch stands below its session, while that or one of its branches is open; else the session's row has their number.
    const ids = new Set(found.map((session) => session.id));
    const isBelow = (session) => session.branch && ids.has(session.branch.of);
    const below = Map.groupBy(found.filter(isBelow), (branch) => branch.branch.of);
    const current = this.#hooks.current();
    const rows = found.filter((session) => !isBelow(session)).flatMap((session) => {
      const branches = below.get(session.id) ?? [];
      const isOpen = [session, ...branches].some(({ id }) => id === current);
      return [this.#row(session, false, isOpen ? 0 : branches.length), ...(isOpen ? branches : []).map((branch) => this.#row(branch, true, 0))];
    });
    byId("session-list").replaceChildren(...rows);
    const nothing = words === "" ? "No sessions yet." : "No session has this in its name.";
    byId("no-sessions").textContent = rows.length === 0 ? nothing : "";
  }

  #row(session, isBranch, numHidden) {
    const isOpen = session.id === this.#hooks.current();
    const hidden = numHidden > 0 && (numHidden === 1 ? "1 branch" : `${numHidden} branches`);
    const facts = [turnsText(session), hidden, BRANCHES[session.branch?.reason], ageText(session.last_used_at)];
    const detail = session.error ?? facts.filter(Boolean).join(" · ");
    const props = { type: "button", onclick: () => this.#hooks.open(session.id), "aria-current": isOpen ? "true" : null, title: session.id };
    const warm = session.resident_tokens > 0 && el("span.warm", { title: "In memory: the next answer begins at once" }, "warm");
    const row = el("button.session", props, el("span.name", {}, titleOf(session.id)), el("span.detail", {}, detail, warm && " · ", warm));
    return el(isBranch ? "li.branch" : "li", {}, row);
  }

  async rename(id) {
    const to = await askText("Rename session", "New name", id);
    if (to === null || to === "" || to === id) return id;
    await json(sessionPath(id, "/rename"), { method: "POST", body: { to } });
    return to;
  }

  async fork(id) {
    const to = await askText("Fork session", "Name of the copy", this.#free(`${id.replace(/~\d+$/, "")}-fork`));
    if (to === null || to === "") return id;
    await json(sessionPath(id, "/fork"), { method: "POST", body: { to } });
    return to;
  }

  #free(name) {
    let free = name;
    for (let number = 2; this.find(free); number += 1) free = `${name}-${number}`;
    return free;
  }

  // Returns whether it was removed.
  async remove(id) {
    const session = await json(sessionPath(id));
    const names = (session.branches ?? []).map((branch) => branch.id);
    const also = names.length > 0 ? ` Its branches are deleted, too: ${names.join(", ")}.` : "";
    const text = `${id} (${turnsText(session)}) is deleted from disk and cannot be brought back.${also}`;
    if (!(await confirmed("Delete session", text, "Delete"))) return false;
    await json(sessionPath(id), { method: "DELETE" });
    return true;
  }

  // Puts a branch in its session's place, whose turns become a branch.
  async restore(id) {
    const of = this.find(id)?.branch?.of;
    if (!of) return id;
    await json(sessionPath(of, "/restore"), { method: "POST", body: { branch: id } });
    return of;
  }
}

function turnsText({ turns = 0 }) {
  return turns === 1 ? "1 turn" : `${count(turns)} turns`;
}

function ageText(seconds) {
  if (!seconds) return null;
  const age = Date.now() / 1000 - seconds;
  if (age < 60) return "now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < DAY) return `${Math.floor(age / 3600)} h ago`;
  return new Date(seconds * 1000).toLocaleDateString();
}
