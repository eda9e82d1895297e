// The reason why a prompt was not resumed further, in words, and both texts at the point where they differ, with the difference marked.

import { byId, count, el } from "./dom.js";
import { json, sessionPath } from "./server.js";

// The reasons of docs/http.md.
const REASONS = {
  new: "Nothing of the prompt was cached.",
  exact_prefix: "The prompt continued where the session ended: only the new message was computed.",
  equal: "The prompt was what the session holds; only its last token was computed again.",
  partial_prefix: "The prompt and the session part before the session's end.",
  mismatch: "The prompt and the session part at the first token.",
  adapters: "The session was computed with other LoRA adapters.",
  prefix_cache: "The session was not in memory, but pages of other requests begin in the same way.",
  restored: "The session's pages were read from disk.",
  evicted: "Other requests had taken the session's memory.",
  engine_lost: "The engine was restarted.",
  remote_engine: "An engine elsewhere keeps the KV; llmctl does not see why it reuses what it does.",
  dirty: "The session's last step failed.",
  prompt_logprobs: "The prompt was scored, which needs all of it computed.",
};

export async function explain(id) {
  const { last_resume: last, last_miss: miss, notices } = await json(sessionPath(id, "/explain"));
  const parts = [];
  if (last) parts.push(...resumeParts("The last prompt", last));
  else parts.push(el("p", {}, "The server has computed no prompt of this session since it started."));
  if (miss) parts.push(...missParts(miss, last));
  if (notices?.length > 0) parts.push(el("h3", {}, "Changed before it reached the model"), list(notices));
  byId("explain-body").replaceChildren(...parts);
  byId("explain-dialog").showModal();
}

function list(texts) {
  return el("ul", {}, ...texts.map((text) => el("li", {}, text)));
}

function resumeParts(title, resume) {
  const { prompt_tokens: prompt, cached_tokens: cached, restored_tokens: restored } = resume;
  const share = prompt > 0 ? Math.round((100 * cached) / prompt) : 0;
  const meter = el("meter", { min: 0, max: Math.max(prompt, 1), value: cached, "aria-label": "Share of the prompt that was warm" });
  const disk = restored > 0 ? `, ${count(restored)} of them from disk` : "";
  return [
    el("h3", {}, title),
    el("p", {}, REASONS[resume.reason] ?? resume.reason),
    el("p", {}, meter, ` ${count(cached)} of ${count(prompt)} tokens warm (${share}%)${disk}`),
  ];
}

function missParts(miss, last) {
  const isLast = last && miss.at === last.at && miss.prompt_tokens === last.prompt_tokens;
  const head = isLast ? [el("h3", {}, "Where they part")] : resumeParts("The last prompt that did not continue the session", miss);
  const [session, prompt] = marked(miss.session.text, miss.prompt.text);
  const side = (title, text) => el("div.side", {}, el("h4", {}, title), el("pre", { tabIndex: 0, role: "group", "aria-label": title }, ...text));
  return [
    ...head,
    el("p", {}, `At token ${count(miss.position)}, after:`),
    el("pre.before", { tabIndex: 0, role: "group", "aria-label": "Text before the difference" }, visible(miss.before)),
    el("div.sides", {}, side("The session holds", session), side("The prompt has", prompt)),
  ];
}

// Both texts, with the part marked that lies between what they have in common at the start and at the end.
export function marked(one, other) {
  const a = [...one];
  const b = [...other];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  const most = Math.min(a.length, b.length) - start;
  while (end < most && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  return [a, b].map((chars) => {
    const part = (from, to) => visible(chars.slice(from, to).join(""));
    const middle = part(start, chars.length - end) || "(nothing)";
    return [part(0, start), el("mark", {}, middle), part(chars.length - end)];
  });
}

// Line ends, tabs and other characters without a shape of their own as signs.
function visible(text) {
  const named = text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
  return named.replace(/[\p{Cc}\p{Cf}]/gu, (char) => {
    const isShown = char === "\n" || char === "\t";
    return isShown ? char : `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}
