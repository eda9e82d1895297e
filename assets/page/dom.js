// Elements without markup: text of the model and of sessions only ever becomes text nodes.

// el("p.note", {title: "x", onclick: f}, child, "text"): an element with classes, properties or attributes, and children.
export function el(spec, props = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag);
  if (classes.length > 0) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

export function button(text, onclick, props = {}) {
  return el("button", { type: "button", onclick, ...props }, text);
}

// A text in which nothing hides: characters without a shape of their own, or that reorder others, as their numbers.
export function shown(text) {
  const number = (char) => `\\u{${char.codePointAt(0).toString(16)}}`;
  return text.replace(/[\p{C}\p{M}\p{Z}\p{DI}]/gu, (char) => (char === " " || char === "\n" ? char : number(char)));
}

// Says something to screen readers, once.
export function announce(text) {
  byId("announcements").textContent = text;
}

// Opens a dialog and returns what it was closed with; "" if it was dismissed.
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

// Asks for a line of text: null if dismissed.
export async function askText(title, label, value) {
  const dialog = byId("text-dialog");
  const input = byId("text-input");
  byId("text-title").textContent = title;
  byId("text-label").textContent = label;
  input.value = value;
  const closed = ask(dialog);
  input.select();
  return (await closed) === "ok" ? input.value.trim() : null;
}

export async function confirmed(title, text, action) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-ok").textContent = action;
  return (await ask(byId("confirm-dialog"))) === "ok";
}

export async function copy(text, pressed) {
  const label = pressed.textContent;
  const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  pressed.textContent = isCopied || copySelected(text) ? "Copied" : "Not allowed here";
  announce(pressed.textContent);
  setTimeout(() => (pressed.textContent = label), 1500);
}

// Without TLS, browsers have no clipboard but that of a selection.
function copySelected(text) {
  const field = el("textarea", { value: text, className: "hidden" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

// 1234567 as "1,234,567" in the reader's way of writing numbers.
export function count(number, digits = 0) {
  return number.toLocaleString(undefined, { maximumFractionDigits: digits });
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${count(number, number < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}
