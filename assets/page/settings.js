// The user's settings, kept in the browser: appearance, and the fields that go with each message.

import { byId } from "./dom.js";

const STORED = "llmctl.settings";
const DEFAULTS = { theme: "auto", system: "", temperature: "", max_tokens: "", reasoning: "", tools: "", model: "" };

export const settings = { ...DEFAULTS, ...read() };

function read() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "{}");
  } catch {
    return {};
  }
}

function write() {
  try {
    localStorage.setItem(STORED, JSON.stringify(settings));
  } catch {
    // They last as long as the page then.
  }
}

export function applyTheme() {
  const { theme } = settings;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

// The fields of a chat completion. Empty ones are left to the server and the model.
export function chatFields() {
  const fields = {};
  if (settings.model !== "") fields.model = settings.model;
  if (settings.temperature !== "") fields.temperature = Number(settings.temperature);
  if (settings.max_tokens !== "") fields.max_tokens = Number(settings.max_tokens);
  if (settings.reasoning !== "") fields.chat_template_kwargs = { enable_thinking: settings.reasoning === "on" };
  if (settings.tools.trim() !== "") fields.tools = JSON.parse(settings.tools);
  return fields;
}

// The fields that go with each message beside its text, in words.
function activeText() {
  const { model, temperature, max_tokens: most, reasoning, tools } = settings;
  const parts = [
    model !== "" && `model ${model}`,
    temperature !== "" && `temperature ${temperature}`,
    most !== "" && `at most ${most} tokens`,
    reasoning !== "" && `reasoning ${reasoning}`,
    tools.trim() !== "" && `tools: ${JSON.parse(tools).length}`,
  ];
  const active = parts.filter(Boolean);
  return active.length > 0 ? `Set: ${active.join(", ")}` : "";
}

function isToolList(text) {
  try {
    return text.trim() === "" || Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

// Fills the dialog and keeps what is changed there; `show` gets what is set for all messages.
export function bindSettings(show) {
  const form = byId("settings-form");
  for (const name of Object.keys(DEFAULTS)) {
    const field = form.elements[name];
    field.value = settings[name];
    field.addEventListener("change", () => {
      const problem = name === "tools" && !isToolList(field.value) ? "This is not a JSON list of tools." : "";
      field.setCustomValidity(problem);
      if (!field.reportValidity()) return;
      settings[name] = field.value;
      write();
      applyTheme();
      show(activeText());
    });
  }
  applyTheme();
  show(activeText());
}
