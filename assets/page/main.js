// The page as a whole: what is open, the state of the connection, the key, the keyboard.

import { announce, ask, button, byId, el } from "./dom.js";
import { Conversation } from "./conversation.js";
import { explain } from "./explain.js";
import { Panel } from "./plots.js";
import { ImageTray } from "./images.js";
import { hasKey, json, onKeyWanted, setKey } from "./server.js";
import { Sessions, titleOf } from "./sessions.js";
import { activeText, applyTheme, bindSettings, settings } from "./settings.js";
import { mcp } from "./tools.js";

const RETRY_MS = 2000;
const input = byId("input");
let panel = null;
let lastTry = 0;
// The model that the server names first.
let served = "llmctl";
// The models that read images.
let seeing = new Set();

const conversation = new Conversation({
  busy: showBusy,
  failed,
  explain: (id) => explain(id).catch(failed),
  giveBack: (images) => tray.giveBack(images),
  changed: async (id, error) => {
    if (error?.status === 0) failed(error);
    showOpen(id);
    await sessions.refresh().catch(failed);
    showTitle();
  },
});

const tray = new ImageTray(failed);
const sessions = new Sessions({ open: (id) => open(id).catch(failed), current: () => conversation.id });

// The state of the server --------------------------------------------------------------------------------------------------

const STATES = {
  loading: "The model is being loaded; messages can be sent when that is done.",
  draining: "The server is stopping: it takes no new messages.",
};

// Asks the server what it is; asks again until it serves.
async function connect() {
  clearTimeout(lastTry);
  try {
    const server = await json("./");
    showBanner(STATES[server.status] ?? "");
    if (server.status !== "serving") lastTry = setTimeout(connect, RETRY_MS);
    else await serve(server);
  } catch (error) {
    failed(error);
  }
}

async function serve(server) {
  served = server.model;
  byId("version").textContent = `llmctl ${server.version}`;
  const flag = el("code", {}, "--share-sessions");
  if (server.shares_sessions) byId("shared").textContent = "Sessions of llmctl chat and run are here, too.";
  else byId("shared").replaceChildren("Sessions of llmctl chat and run are here, too, with ", flag, ".");
  byId("remote").hidden = !server.remote_engine;
  byId("forget-key").hidden = !hasKey();
  panel ??= new Panel(server.remote_engine, failed);
  panel.start();
  await Promise.all([sessions.refresh(), offerModels(), mcp.renew({ isFirst: true })]);
  const wanted = sessionInAddress();
  if (wanted !== "" && wanted !== conversation.id && !conversation.isBusy) await open(wanted);
}

// The session that the address names; "" without one, or where the address is malformed.
function sessionInAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

// A choice, where the server has several models.
async function offerModels() {
  const { data } = await json("v1/models");
  const ids = data.map((model) => model.id);
  seeing = new Set(data.filter((model) => model.capabilities?.vision).map(({ id }) => id));
  const field = byId("settings-form").elements.model;
  field.replaceChildren(new Option(served, ""), ...ids.filter((id) => id !== served).map((id) => new Option(id, id)));
  const isKnown = ids.includes(settings.model) && settings.model !== served;
  field.value = isKnown ? settings.model : "";
  field.dispatchEvent(new Event("change"));
  byId("model-choice").hidden = ids.length < 2;
  byId("model").hidden = ids.length > 1;
}

// The model that answers, and what else is set.
function showActive() {
  const model = settings.model || served;
  byId("model").textContent = model;
  document.title = `${model} – llmctl`;
  tray.allow(seeing.has(model));
  byId("active").textContent = activeText(mcp.definitions().length);
}

function showBanner(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = text === "";
}

// Reports an error; one of the connection is tried again until it works.
function failed(error) {
  if (error.name === "AbortError") return;
  const isAway = error.status === 0 || error.status === 503;
  if (error.status === undefined) console.error(error);
  showBanner(isAway ? `${error.message} Trying again …` : error.message);
  if (error.status === 401) byId("banner").append(" ", button("Give a key", connect));
  if (!isAway) return;
  clearTimeout(lastTry);
  lastTry = setTimeout(connect, RETRY_MS);
}

let keyAsked = null;
onKeyWanted((wasRefused) => {
  keyAsked ??= askKey(wasRefused).finally(() => (keyAsked = null));
  return keyAsked;
});

async function askKey(wasRefused) {
  byId("key-refused").hidden = !wasRefused;
  byId("key-input").value = "";
  const given = (await ask(byId("key-dialog"))) === "ok" ? byId("key-input").value.trim() : "";
  if (given !== "") setKey(given);
  return given !== "";
}

// The open session -----------------------------------------------------------------------------------------------------------

async function open(id) {
  closeNarrow();
  if (id === conversation.id) return input.focus();
  showBanner("");
  try {
    await conversation.open(id);
  } catch (error) {
    if (error.code !== "session_not_found") throw error;
    showBanner(`There is no session ${id}.`);
    conversation.begin();
  }
  showOpen(conversation.id);
  await sessions.refresh();
  showTitle();
  input.focus();
}

function begin() {
  closeNarrow();
  conversation.begin();
  showOpen(null);
  sessions.refresh().catch(failed);
  input.focus();
}

// The address names the session behind #, which no browser sends to a server.
function showOpen(id) {
  const hash = id === null ? "" : `#${encodeURIComponent(id)}`;
  if (location.hash !== hash) history.pushState(null, "", hash === "" ? location.pathname : hash);
  showTitle();
}

function showTitle() {
  const { id } = conversation;
  byId("title").textContent = id === null ? "New chat" : titleOf(id);
  byId("title").title = id ?? "";
  for (const item of byId("session-menu").querySelectorAll("button")) item.disabled = id === null || conversation.isBusy;
  byId("restore").hidden = !sessions.find(id)?.branch?.of;
}

function showBusy(isBusy, said) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  document.body.classList.toggle("busy", isBusy);
  if (isBusy) announce(said);
  if (isBusy) showOpen(conversation.id);
  else showTitle();
}

// Does something to the open session, which may have another id then; null if it is gone.
async function act(action) {
  try {
    const id = await action(conversation.id);
    if (id === null) begin();
    else if (id !== conversation.id) await open(id);
    else await sessions.refresh();
  } catch (error) {
    failed(error);
  }
}

const ACTIONS = {
  rename: (id) => sessions.rename(id),
  fork: (id) => sessions.fork(id),
  restore: (id) => sessions.restore(id),
  remove: async (id) => ((await sessions.remove(id)) ? null : id),
};

// Composing messages ----------------------------------------------------------------------------------------------------------

async function send() {
  const text = input.value.trim();
  if ((text === "" && tray.isEmpty) || conversation.isBusy) return;
  showBanner("");
  input.value = "";
  grow();
  await conversation.say(text, tray.take());
  input.focus();
}

// The field is as high as its text, up to what the style allows.
function grow() {
  input.rows = Math.min(10, Math.max(1, input.value.split("\n").length));
}

// Panels: beside the conversation where there is room, over it where not.
function toggle(name, isShown = byId(name).hidden) {
  byId(name).hidden = !isShown;
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(isShown));
  if (name === "panel") panel?.start();
  if (isShown) byId(name).querySelector("input, button")?.focus();
  else byId(`toggle-${name}`).focus();
}

const narrow = { sidebar: matchMedia("(max-width: 50rem)"), panel: matchMedia("(max-width: 75rem)") };

function closeNarrow() {
  for (const [name, query] of Object.entries(narrow)) if (query.matches && !byId(name).hidden) toggle(name, false);
}

// Keys: none of a single letter, so that nothing is in the way of typing or of screen readers.
const SHORTCUTS = {
  KeyN: begin,
  KeyK: () => (toggle("sidebar", true), byId("filter").focus()),
  KeyP: () => toggle("panel"),
  KeyR: () => conversation.retry(),
  KeyE: () => conversation.editLast(),
  KeyI: () => input.focus(),
  KeyT: () => conversation.focusCall(),
};

function onKey(event) {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code];
  if (shortcut) {
    event.preventDefault();
    shortcut();
  } else if (event.key === "Escape") {
    if (conversation.isBusy) conversation.stop();
    else closeNarrow();
  }
}

function bind() {
  byId("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && input.value === "") {
      event.preventDefault();
      conversation.editLast();
    }
  });
  byId("stop").addEventListener("click", () => conversation.stop());
  byId("new").addEventListener("click", begin);
  byId("why").addEventListener("click", () => explain(conversation.id).catch(failed));
  for (const [name, action] of Object.entries(ACTIONS)) byId(name).addEventListener("click", () => act(action));
  for (const item of byId("session-menu").querySelectorAll("button")) item.addEventListener("click", () => byId("session-menu").hidePopover());
  for (const name of ["sidebar", "panel"]) {
    byId(`toggle-${name}`).addEventListener("click", () => toggle(name));
    byId(`close-${name}`).addEventListener("click", () => toggle(name, false));
  }
  for (const cancel of document.querySelectorAll("dialog .cancel")) {
    cancel.addEventListener("click", () => cancel.closest("dialog").close(""));
  }
  byId("open-settings").addEventListener("click", () => {
    byId("settings-dialog").showModal();
    mcp.renew().catch(failed);
  });
  byId("open-keys").addEventListener("click", () => byId("keys-dialog").showModal());
  byId("forget-key").addEventListener("click", () => (setKey(""), location.reload()));
  // A link to a fragment would change the address, which names the session.
  document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), input.focus()));
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => {
    // The terminal and other clients use the sessions, too.
    if (!document.hidden) sessions.refresh().catch(failed);
    panel?.start();
  });
  addEventListener("popstate", () => {
    const id = sessionInAddress();
    if (id === "") begin();
    else open(id).catch(failed);
  });
}

mcp.onChange = showActive;
bindSettings(showActive);
bind();
byId("sidebar").hidden = narrow.sidebar.matches;
byId("toggle-sidebar").setAttribute("aria-expanded", String(!narrow.sidebar.matches));
showTitle();
input.focus();
connect();
