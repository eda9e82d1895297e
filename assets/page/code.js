// Blocks of code: a line with the language and a button to copy, and colours for comments, strings, numbers and keywords.

import { copy, el } from "./dom.js";

// Longer code is shown in one colour.
const MAX_COLOURED = 60_000;

const HASH = new Set("bash dockerfile elixir julia make makefile nix perl ps1 py python r rb ruby sh shell toml yaml yml zsh".split(" "));
const DASH = new Set("haskell hs lua sql".split(" "));
const SLASH = new Set(
  "c c++ cc cpp cs csharp css dart go h hpp java javascript js json jsonc jsx kotlin kt php rs rust scala scss swift ts tsx typescript zig".split(" "),
);

const KEYWORDS = new Set(
  `abstract and as assert async await begin break case catch class const continue def default defer del do done echo elif else end
  enum esac except export extends extern false False fi final finally fn for foreach from func function global go if impl implements
  import in include inline instanceof interface is lambda let local loop match mod module mut namespace new nil None nonlocal not null
  of or override package pass private protected pub public raise range ref return self Self static struct super switch then this
  throw trait true True try type typeof union unless unsafe until use using var virtual void where while with yield
  select SELECT FROM WHERE JOIN LEFT INNER ON GROUP ORDER BY INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE AND OR NOT NULL AS LIMIT`.split(
    /\s+/,
  ),
);

const STRING = String.raw`"""[^]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\[^])*`?";
const NUMBER = String.raw`\b\d[\w.]*`;
const WORD = String.raw`[A-Za-z_][\w-]*`;
const COMMENT = { hash: String.raw`#[^\n]*`, dash: String.raw`--[^\n]*`, slash: String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)` };

function commentsOf(language) {
  if (HASH.has(language)) return COMMENT.hash;
  if (DASH.has(language)) return COMMENT.dash;
  return SLASH.has(language) ? COMMENT.slash : null;
}

// The code as text nodes and spans.
function coloured(code, comment) {
  const token = new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>${WORD})`, "g");
  const nodes = [];
  let end = 0;
  for (const match of code.matchAll(token)) {
    const { word } = match.groups;
    if (word !== undefined && !KEYWORDS.has(word)) continue;
    const kind = word !== undefined ? "keyword" : Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    nodes.push(code.slice(end, match.index), el(`span.${kind}`, {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...nodes, code.slice(end)];
}

export function codeBlock(code, language) {
  const comment = code.length <= MAX_COLOURED && commentsOf(language.toLowerCase());
  const shown = el("code", {}, ...(comment ? coloured(code, comment) : [code]));
  const copied = el("button.quiet", { type: "button", onclick: () => copy(code, copied) }, "Copy");
  const name = language.slice(0, 30) || "text";
  const bar = el("figcaption", {}, el("span", {}, name), copied);
  return el("figure.code", {}, bar, el("pre", { tabIndex: 0, role: "group", "aria-label": `Code, ${name}` }, shown));
}
