// Markdown of an answer as DOM nodes. A model's text is hostile: it becomes text nodes and a fixed set of elements without
// attributes, except links to http, https and mail addresses. Nothing is loaded from outside: an image becomes a link.
//
// The work is bounded: nesting by MAX_DEPTH, open marks by MAX_OPEN, and no regular expression backtracks over its input.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";

const MAX_DEPTH = 10;
const MAX_OPEN = 40;

// Shows a text that grows. A block whose text did not change keeps its nodes, so that a selection in it survives.
export class MarkdownView {
  #root;
  #shown = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const blocks = parse(text.replace(/\r\n?/g, "\n").split("\n"), 0);
    let same = 0;
    while (same < blocks.length && same < this.#shown.length && blocks[same].key === this.#shown[same].key) same += 1;
    for (const gone of this.#shown.splice(same)) gone.node.remove();
    for (const block of blocks.slice(same)) {
      const node = block.build();
      this.#root.append(node);
      this.#shown.push({ key: block.key, node });
    }
  }
}

function render(lines, depth) {
  return parse(lines, depth).map((block) => block.build());
}

// Blocks -----------------------------------------------------------------------------------------------------------------

// Each rule looks at the lines from `at` on and returns null, or a block and the line after it.
const RULES = [fence, heading, rule, quote, list, table];

function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const found = depth < MAX_DEPTH ? firstOf(RULES, lines, at, depth) : null;
    const { end, build } = found ?? paragraph(lines, at, depth);
    blocks.push({ key: lines.slice(at, end).join("\n"), build });
    at = end;
  }
  return blocks;
}

function firstOf(rules, lines, at, depth) {
  for (const rule of rules) {
    const found = rule(lines, at, depth);
    if (found) return found;
  }
  return null;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function fenceOf(line) {
  const match = /^ *(`{3,}|~{3,})([^`]*)$/.exec(line);
  return match && { mark: match[1], info: match[2].trim(), indent: indentOf(line) };
}

function fence(lines, at) {
  const open = fenceOf(lines[at]);
  if (!open) return null;
  let end = at + 1;
  const closes = (line) => {
    const close = fenceOf(line);
    return close && close.info === "" && close.mark.startsWith(open.mark);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indentOf(line), open.indent)));
  return { end: Math.min(end + 1, lines.length), build: () => codeBlock(body.join("\n"), open.info.split(/[\s{,]/)[0]) };
}

function heading(lines, at) {
  const match = /^ {0,3}(#{1,6})(?: |\t|$)/.exec(lines[at]);
  if (!match) return null;
  const text = lines[at].slice(match[0].length).trim().replace(/ #+$/, "");
  // One level below the page's own headings, because a model may skip levels; the size is as it meant it.
  return { end: at + 1, build: () => withInline(el(`h3.level-${match[1].length}`), text) };
}

function rule(lines, at) {
  const marks = lines[at].replace(/\s/g, "");
  const isRule = marks.length >= 3 && "-*_".includes(marks[0]) && [...marks].every((mark) => mark === marks[0]);
  return isRule ? { end: at + 1, build: () => el("hr") } : null;
}

function quote(lines, at, depth) {
  const isQuoted = (line) => /^ {0,3}>/.test(line);
  if (!isQuoted(lines[at])) return null;
  let end = at;
  while (end < lines.length && isQuoted(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { end, build: () => el("blockquote", {}, ...render(inner, depth + 1)) };
}

function markerOf(line) {
  const match = /^( *)([-*+]|\d{1,9}[.)])( +|$)/.exec(line);
  if (!match) return null;
  const [, space, mark, gap] = match;
  const width = space.length + mark.length + (gap.length > 4 ? 1 : Math.max(gap.length, 1));
  return { indent: space.length, width, isOrdered: mark.length > 1, kind: mark.at(-1), number: parseInt(mark, 10) };
}

function list(lines, at, depth) {
  const first = markerOf(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const marker = markerOf(lines[end]);
    const isNext = marker && marker.kind === first.kind && marker.indent < first.indent + 2 && !rule(lines, end);
    if (!isNext) break;
    const start = end;
    end = itemEnd(lines, end + 1, marker);
    items.push({ start, end, marker });
  }
  const build = () => {
    const element = el(first.isOrdered ? "ol" : "ul");
    if (first.isOrdered) element.start = first.number;
    element.append(...items.map((item) => listItem(lines, item, depth)));
    return element;
  };
  return { end, build };
}

// Models indent what belongs to an item by two or more, whatever the width of its marker.
function itemEnd(lines, from, marker) {
  let end = from;
  for (let at = from; at < lines.length; at += 1) {
    const line = lines[at];
    if (line.trim() === "") continue;
    const isInside = indentOf(line) >= marker.indent + 2;
    const isLazy = at === end && !markerOf(line) && !startsBlock(lines, at);
    if (!isInside && !isLazy) break;
    end = at + 1;
  }
  return end;
}

function listItem(lines, { start, end, marker }, depth) {
  const strip = (line) => line.slice(Math.min(indentOf(line), marker.width));
  const inner = [lines[start].slice(marker.width), ...lines.slice(start + 1, end).map(strip)];
  const task = /^\[([ xX])\] /.exec(inner[0]);
  if (task) inner[0] = (task[1] === " " ? "☐ " : "☑ ") + inner[0].slice(4);
  const blocks = render(inner, depth + 1);
  // The paragraph of a tight item needs no space around it.
  const isTight = !inner.slice(0, -1).some((line) => line.trim() === "");
  const nodes = blocks.flatMap((node) => (isTight && node.tagName === "P" ? [...node.childNodes] : [node]));
  return el("li", {}, ...nodes);
}

function cellsOf(line) {
  const cells = [];
  let cell = "";
  const row = line.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") cell += row[(at += 1)];
    else if (row[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else cell += row[at];
  }
  if (cell.trim() !== "") cells.push(cell.trim());
  return cells;
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const heads = cellsOf(lines[at]);
  const marks = cellsOf(lines[at + 1]);
  if (marks.length !== heads.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : ""));
  const row = (tag, cells) =>
    el("tr", {}, ...sides.map((side, column) => withInline(el(side ? `${tag}.${side}` : tag), cells[column] ?? "")));
  const build = () => {
    const body = lines.slice(at + 2, end).map((line) => row("td", cellsOf(line)));
    const whole = el("table", {}, el("thead", {}, row("th", heads)), el("tbody", {}, ...body));
    return el("div.table", { tabIndex: 0, role: "group", "aria-label": "Table" }, whole);
  };
  return { end, build };
}

function startsBlock(lines, at) {
  const line = lines[at];
  const marker = markerOf(line);
  const isList = marker && (!marker.isOrdered || marker.number === 1) && line.trim().length > 2;
  return Boolean(isList || fenceOf(line) || heading(lines, at) || rule(lines, at) || /^ {0,3}>/.test(line));
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "") {
    if (depth < MAX_DEPTH && (startsBlock(lines, end) || table(lines, end))) break;
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return { end, build: () => withInline(el("p"), text) };
}

// Text within a block -----------------------------------------------------------------------------------------------------

const PLAIN = /[^\\`*_~[\]!<\nhH$]+/y;
const BARE_URL = /https?:\/\/[^\s<>"'`]+/iy;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BREAK = /<br ?\/?>/iy;
const ESCAPED = /[!-/:-@[-`{-~]/;

function at(pattern, text, position) {
  pattern.lastIndex = position;
  return pattern.exec(text);
}

// Fills an element with a block's text.
export function withInline(element, text) {
  new Inline(element, text).run();
  return element;
}

// One pass over the text. Marks are put down as text nodes and remembered; when a mark closes one, the nodes between them move
// into an element.
class Inline {
  constructor(element, text) {
    this.element = element;
    this.text = text;
    this.at = 0;
    this.open = [];
    this.brackets = [];
    this.absent = new Set();
  }

  run() {
    while (this.at < this.text.length) {
      if (!this.step()) this.put(this.text[this.at++]);
    }
  }

  put(node) {
    const last = this.element.lastChild;
    const canJoin = typeof node === "string" && last?.nodeType === Node.TEXT_NODE && !last.isMark;
    if (canJoin) last.appendData(node);
    else this.element.append(node);
    return this.element.lastChild;
  }

  step() {
    const plain = at(PLAIN, this.text, this.at);
    if (plain) {
      this.put(plain[0]);
      this.at += plain[0].length;
      return true;
    }
    switch (this.text[this.at]) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.mark();
      case "[":
        return this.bracket();
      case "]":
        return this.link();
      case "<":
        return this.angle();
      case "\n":
        return this.newline();
      case "h":
      case "H":
        return this.bareUrl();
      case "$":
        return this.math("$$", "$$");
      default:
        return false;
    }
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" && this.math("\\(", "\\)")) return true;
    if (next === "[" && this.math("\\[", "\\]")) return true;
    if (next === undefined || !ESCAPED.test(next)) return false;
    this.put(next);
    this.at += 2;
    return true;
  }

  // Finds `closing` behind the current position; what was not found once is not looked for again.
  find(closing, from) {
    if (this.absent.has(closing)) return -1;
    const found = this.text.indexOf(closing, from);
    if (found < 0) this.absent.add(closing);
    return found;
  }

  // Formulas are shown as they are written, so that their marks are not taken for emphasis.
  math(opening, closing) {
    if (!this.text.startsWith(opening, this.at)) return false;
    const end = this.find(closing, this.at + 2);
    if (end < 0) return false;
    this.put(el("code.math", {}, this.text.slice(this.at + 2, end).trim()));
    this.at = end + closing.length;
    return true;
  }

  code() {
    let size = 1;
    while (this.text[this.at + size] === "`") size += 1;
    const marks = "`".repeat(Math.min(size, 100));
    let end = size > 100 ? -1 : this.find(marks, this.at + size);
    // A longer run of marks does not close a shorter one.
    while (end >= 0 && this.text[end + size] === "`") {
      let next = end + size;
      while (this.text[next] === "`") next += 1;
      end = this.find(marks, next);
    }
    if (end < 0) {
      this.put(this.text.slice(this.at, this.at + size));
      this.at += size;
      return true;
    }
    const inner = this.text.slice(this.at + size, end).replaceAll("\n", " ");
    const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
    this.put(el("code", {}, isPadded ? inner.slice(1, -1) : inner));
    this.at = end + size;
    return true;
  }

  mark() {
    const char = this.text[this.at];
    let size = 1;
    while (this.text[this.at + size] === char && size < 4) size += 1;
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + size] ?? " ";
    const isSpace = (c) => /\s/.test(c);
    const isWord = (c) => /[\p{L}\p{N}]/u.test(c);
    const isPunctuation = (c) => !isSpace(c) && !isWord(c);
    const left = !isSpace(after) && (!isPunctuation(after) || !isWord(before));
    const right = !isSpace(before) && (!isPunctuation(before) || !isWord(after));
    const isUnderscore = char === "_";
    // 2*3*4 is a product.
    const isProduct = char === "*" && /\d/.test(before) && /\d/.test(after);
    const canOpen = left && !isProduct && (!isUnderscore || !isWord(before));
    const canClose = right && !isProduct && (!isUnderscore || !isWord(after));
    this.at += size;
    let rest = char === "~" && size !== 2 ? 0 : size;
    if (canClose) rest = this.close(char, rest);
    const unused = char === "~" && size !== 2 ? size : rest;
    if (unused > 0) {
      const node = this.putMark(char.repeat(unused));
      if (canOpen && rest > 0) this.remember({ char, size: rest, node });
    }
    return true;
  }

  putMark(text) {
    const node = document.createTextNode(text);
    node.isMark = true;
    return this.put(node);
  }

  remember(mark) {
    this.open.push(mark);
    if (this.open.length > MAX_OPEN) this.open.shift();
  }

  // Closes what the marks close; returns how many of them are left.
  close(char, size) {
    for (let index = this.open.length - 1; index >= 0 && size > 0; index -= 1) {
      const opener = this.open[index];
      if (opener.char !== char) continue;
      while (size > 0 && opener.size > 0) {
        const used = Math.min(2, size, opener.size);
        this.wrap(opener.node, el(char === "~" ? "del" : used === 2 ? "strong" : "em"));
        opener.size -= used;
        opener.node.data = char.repeat(opener.size);
        size -= used;
      }
      this.open.length = opener.size > 0 ? index + 1 : index;
    }
    return size;
  }

  // Moves what follows a node into an element.
  wrap(node, element) {
    while (node.nextSibling) element.append(node.nextSibling);
    this.element.append(element);
  }

  bracket() {
    const isImage = this.text[this.at - 1] === "!";
    this.brackets.push({ node: this.putMark("["), open: this.open.length, isImage });
    if (this.brackets.length > MAX_OPEN) this.brackets.shift();
    this.at += 1;
    return true;
  }

  link() {
    const bracket = this.brackets.pop();
    const target = bracket && this.text[this.at + 1] === "(" ? this.target(this.at + 2) : null;
    const url = target && safeUrl(target.url);
    if (!url) return false;
    this.open.length = Math.min(this.open.length, bracket.open);
    this.wrap(bracket.node, anchor(url));
    bracket.node.data = bracket.isImage ? "image: " : "";
    // No link lies within a link.
    this.brackets.length = 0;
    this.at = target.end;
    return true;
  }

  // The address in the round brackets of a link, which may hold brackets of its own and a title.
  target(from) {
    let depth = 0;
    let end = from;
    for (; end < this.text.length && end < from + 4096; end += 1) {
      const char = this.text[end];
      if (char === "(") depth += 1;
      else if (char === ")" && depth === 0) break;
      else if (char === ")") depth -= 1;
      else if (char === "\n") return null;
    }
    if (this.text[end] !== ")") return null;
    const inner = this.text.slice(from, end).trim();
    const url = inner.startsWith("<") ? inner.slice(1).split(">")[0] : inner.split(/\s/)[0];
    return { url, end: end + 1 };
  }

  angle() {
    const lineBreak = at(BREAK, this.text, this.at);
    if (lineBreak) {
      this.put(el("br"));
      this.at += lineBreak[0].length;
      return true;
    }
    const found = at(ANGLE_URL, this.text, this.at);
    const url = found && safeUrl(found[1]);
    if (!url) return false;
    this.put(anchor(url, found[1]));
    this.at += found[0].length;
    return true;
  }

  bareUrl() {
    const isInWord = /[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ");
    const found = isInWord || this.brackets.length > 0 ? null : at(BARE_URL, this.text, this.at);
    if (!found) return false;
    let shown = found[0].replace(/[.,;:!?*_~\]]{1,8}$/, "");
    if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
    const url = safeUrl(shown);
    if (!url) return false;
    this.put(anchor(url, shown));
    this.at += shown.length;
    return true;
  }

  newline() {
    this.put(el("br"));
    this.at += 1;
    return true;
  }
}

// An address that a click may open: absolute, and of a scheme that runs nothing.
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

function anchor(url, text) {
  const children = text === undefined ? [] : [text];
  return el("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
