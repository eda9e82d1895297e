// The user's settings, kept in the browser: appearance, and the fields that go with each message.

import { byId } from "./dom.js";

const STORED = "llmctl.settings";
const DEFAULTS = { theme: "auto", system: "", temperature: "", max_tokens: "", reasoning: "", tools: "", mcp: "on", model: "" };

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

// The fields of a chat completion. Empty ones are left to the server and the model. `offered` are tools beside the user's own, which
// come first where both have a name.
export function chatFields(offered) {
  const fields = {};
  if (settings.model !== "") fields.model = settings.model;
  if (settings.temperature !== "") fields.temperature = Number(settings.temperature);
  if (settings.max_tokens !== "") fields.max_tokens = Number(settings.max_tokens);
  if (settings.reasoning !== "") fields.chat_template_kwargs = { enable_thinking: settings.reasoning === "on" };
  const own = ownTools();
  const names = new Set(own.map((tool) => tool?.function?.name));
  const tools = [...own, ...offered.filter((tool) => !names.has(tool.function.name))];
  if (tools.length > 0) fields.tools = tools;
  return fields;
}

function ownTools() {
  return settings.tools.trim() === "" ? [] : JSON.parse(settings.tools);
}

// The fields that go with each message beside its text, in words.
export function activeText(numOffered) {
  const { temperature, max_tokens: most, reasoning, tools } = settings;
  const parts = [
    temperature !== "" && `temperature ${temperature}`,
    most !== "" && `at most ${most} tokens`,
    reasoning !== "" && `reasoning ${reasoning}`,
    tools.trim() !== "" && `tools: ${ownTools().length}`,
    numOffered > 0 && `tools of MCP servers: ${numOffered}`,
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

// Fills the dialog and keeps what is changed there; `changed` is called then.
export function bindSettings(changed) {
  const form = byId("settings-form");
  for (const name of Object.keys(DEFAULTS)) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = settings[name] !== "";
    else field.value = settings[name];
    field.addEventListener("change", () => {
      const problem = name === "tools" && !isToolList(field.value) ? "This is not a JSON list of tools." : "";
      field.setCustomValidity(problem);
      if (!field.reportValidity()) return;
      settings[name] = field.type === "checkbox" && !field.checked ? "" : field.value;
      write();
      applyTheme();
      changed();
    });
  }
  applyTheme();
  changed();
}
