#!/usr/bin/env python3
"""Promise: the page that `llmctl serve` gives to browsers works, keeps its promises when the model or the network does not, and
never runs what a model has written.

Needs Chromium and PyPI's `playwright`; axe-core (npm), where --axe names its folder, checks accessibility. Starts servers with the
built-in model on 127.0.0.1, in a folder of their own, and ends them by their process id.

    python tests/page/browser.py --llmctl target/debug/llmctl [--axe node_modules/axe-core] [--shots FOLDER] [--only NAME]
"""

import argparse
import base64
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

PATIENCE_MS = 30_000
VISION = Path(os.environ.get("LLMCTL_FIXTURES", Path(__file__).parents[2] / "../shared/fixtures")) / "vision"
# Drops a file, given as base64 and its name, on the page.
DROP = """([data, name]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type: "image/jpeg"}));
  document.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""
# The mark of an answer that was stopped, or that the server had ended at its limit before the stop reached it.
STOPPED = "#log > :last-child >> text=/Stopped( at the token limit)?\\./"
QUESTION = "How do I save a conversation?"

# Answers that would do harm as markup, as an address or as work.
HOSTILE = """# <img src=x onerror="window.harmed=1">
<script>window.harmed=1</script><svg onload=window.harmed=1><iframe srcdoc="<script>parent.harmed=1</script>">
[one](javascript:window.harmed=1) [two](JaVaScRiPt:window.harmed=1) [three](&#106;avascript:window.harmed=1)
[four](data:text/html,<script>window.harmed=1</script>) [five](  java\tscript:window.harmed=1) [six](vbscript:x) [seven](//evil.invalid/x)
[eight](file:///etc/passwd) [nine](blob:http://evil.invalid/1) <javascript:window.harmed=1> [good](http://good.invalid/a_(b)?c=1 "title")
![image](http://evil.invalid/pixel.png) ![x](x" onerror="window.harmed=1) <http://good.invalid/> http://good.invalid/bare.
| <script>window.harmed=1</script> | `a\\|b` |
|---|:-:|
| <b onclick=window.harmed=1>x</b> | [t](javascript:harmed=1) |

```html" onmouseover="window.harmed=1
</code></pre><script>window.harmed=1</script>
```
<style>body{display:none}</style><base href="http://evil.invalid/"><form action="http://evil.invalid/"><input name=a></form>
<meta http-equiv="refresh" content="0;url=http://evil.invalid/"><link rel=stylesheet href=http://evil.invalid/x.css>
"""

# Elements within each other that an answer may have: two for each nested block, and one for each open mark.
MOST_LEVELS = 50

# Texts that take minutes or a deep tree of elements if the work on them is not bounded.
HEAVY = [
    ">" * 20_000 + " deep",
    "\n".join("  " * depth + "- item" for depth in range(400)),
    "[" * 30_000 + "](" * 2_000,
    "*a **b " * 20_000,
    "_a " * 30_000 + "a_ " * 30_000,
    "`" * 5_000 + " a " + "".join("`" * size + " " for size in range(1, 300)),
    "|a" * 5_000 + "\n" + "|-" * 5_000 + "\n" + "|b" * 5_000,
    "\\(" * 30_000 + "$$" * 9_999,
    "<" * 50_000 + "http://" * 10_000,
    "```\n" + "x = '" * 20_000,
    "1. " * 20_000,
]

MARKDOWN = """## Heading
A paragraph with **bold**, *italic*, ***both***, ~~gone~~, `code`, snake_case_name and 2*3*4.
Second line.

1. first
   - inner **bold**
   - [link](https://good.invalid/)
2. second

> quoted
> text

| name | number |
|:--|--:|
| a | 1 |
| b \\| c | 22 |

```python
def f(x):
    # a comment
    return "text" + str(42)
```

- [x] done
- [ ] open

---
Formula \\(a_1 * b_1\\) and an [unfinished link](http
"""


class Server:
    """`llmctl serve` in a folder of its own."""

    def __init__(self, llmctl, folder, *flags, port=0, key=None):
        self.llmctl, self.folder, self.flags, self.port, self.key = llmctl, folder, flags, port, key
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LLMCTL_")},
            **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "CACHE", "STATE", "CONFIG")},
            **({"LLMCTL_API_KEY": key} if key else {}),
        }
        self.process = None

    def start(self):
        log = open(self.folder / "serve.log", "a+")
        start = log.seek(0, os.SEEK_END)
        command = [self.llmctl, "serve", "--port", str(self.port), *self.flags]
        self.process = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(600):
            text = (self.folder / "serve.log").read_text()[start:]
            found = re.search(r"listening on (http://127\.0\.0\.1:(\d+))", text)
            if found:
                self.port = int(found.group(2))
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"the server did not start:\n{text}")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def stop(self, how=signal.SIGTERM):
        if self.process and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(60)

    def request(self, path, body=None, method=None, accept="application/json"):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": accept}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def get(self, path):
        return json.loads(self.request(path))

    def run(self, *arguments):
        done = subprocess.run([self.llmctl, *arguments], env=self.environment, capture_output=True, text=True, timeout=120)
        return done.stdout

    def tell(self, session, *messages, **more):
        """Puts a conversation into a session."""
        body = {"session_id": session, "messages": list(messages), "max_tokens": 4, **more}
        return json.loads(self.request("v1/chat/completions", body))


class Proxy(http.server.ThreadingHTTPServer):
    """Serves a server below /llm/, as a proxy that strips the path does."""

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.port = server.port
        self.url = f"http://127.0.0.1:{self.server_port}/llm/"


class ProxyHandler(http.server.BaseHTTPRequestHandler):
    def forward(self):
        if not self.path.startswith("/llm/"):
            return self.send_error(404)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request(self.command, self.path.removeprefix("/llm"), body, dict(self.headers))
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
        connection.close()

    do_GET = do_POST = do_DELETE = forward

    def log_message(self, *_):
        pass


class ToolLog:
    """What the MCP server of a check has been asked for."""

    def __init__(self, path):
        self.path = path

    def text(self):
        return self.path.read_text() if self.path.exists() else ""

    def calls(self):
        return [line.removeprefix("call ") for line in self.text().splitlines() if line.startswith("call ")]


class Script:
    """Answers of the model, one a request, in place of the server's, and the session that they make. The tools are real."""

    def __init__(self, page, answers, session=()):
        self.answers, self.messages, self.sent = list(answers), list(session), []
        page.route("**/v1/chat/completions", self.answer)
        page.route(re.compile(r"/v1/sessions/[^/?]+\?messages=true"), self.show)

    @staticmethod
    def calling(*calls, finish="tool_calls"):
        """An answer that calls tools: pairs of a name and arguments, or of a name and their text."""
        text = lambda given: given if isinstance(given, str) else json.dumps(given)
        call = lambda at, name, given: {"id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": text(given)}}
        return {"role": "assistant", "content": "", "tool_calls": [call(at, *one) for at, one in enumerate(calls)], "finish": finish}

    def answer(self, route):
        body = route.request.post_data_json
        self.sent.append(body)
        answer = self.answers.pop(0)
        answer = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer, "finish": "stop"}
        finish = answer["finish"]
        message = {name: value for name, value in answer.items() if name != "finish"}
        self.messages += [*body["messages"], message]
        delta = {"content": message["content"]}
        if "tool_calls" in message:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        timings = {"decode_tokens": 9, "decode_tokens_per_second": 3.0, "ttft_ms": 1.0, "cached_tokens": 1, "prefill_tokens": 2}
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "timings": timings},
        ]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=text, content_type="text/event-stream")

    def show(self, route):
        session = {"id": "s", "object": "session", "turns": 1, "state": "idle", "branches": [], "messages": self.messages}
        route.fulfill(body=json.dumps(session), content_type="application/json")


CHECKS = []


def check(test):
    """Adds a method of the suite to the checks."""
    CHECKS.append(test.__name__)
    return test


class Suite:
    def __init__(self, options, browser):
        self.options, self.browser = options, browser
        self.server = None

    @contextmanager
    def page(self, server=None, **context):
        """A page on a server, watched: no error, no refused content, no request to elsewhere, no script of a model's."""
        server = server or self.server
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        faults, elsewhere = [], []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if self.is_fault(line) else None)
        page.on("request", lambda sent: elsewhere.append(sent.url) if not sent.url.startswith(server.url) else None)
        try:
            page.goto(server.url)
            yield page
            assert page.evaluate("window.harmed") is None, "a model's text ran as script"
        except Exception:
            self.shot(page, "failed")
            raise
        finally:
            context.close()
        assert not faults, faults
        assert not elsewhere, elsewhere

    @staticmethod
    def is_fault(line):
        # Refusals by status are what some checks are about.
        return line.type == "error" and "Failed to load resource" not in line.text or "Content Security Policy" in line.text

    def shot(self, page, name):
        if self.options.shots:
            page.screenshot(path=str(Path(self.options.shots) / f"{name}.png"))

    def check_access(self, page, where):
        """axe-core's findings, and that nothing is wider than the window."""
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1], f"{where}: {width[0]} pixels wide in {width[1]}"
        if not self.options.axe:
            return
        page.evaluate((Path(self.options.axe) / "axe.min.js").read_text())
        found = page.evaluate("axe.run({resultTypes: ['violations']}).then(({violations}) => violations)")
        lines = [f"{rule['id']}: {node['html']}: {node['failureSummary']}" for rule in found for node in rule["nodes"]]
        assert not lines, f"{where}:\n" + "\n".join(lines)

    # Each check below is a promise; those that need no server of their own share one.

    @check
    def a_message_is_answered_saved_and_seen_by_the_terminal(self):
        with self.page() as page:
            self.shot(page, "empty")
            self.say(page, QUESTION)
            assert "/save" in page.inner_text(".answer")
            assert "prompt tokens warm" in page.inner_text(".figures")
            session = page.get_attribute("#title", "title")
            assert page.url.endswith(f"#{session}"), page.url
            assert page.inner_text("#title") == "How do i save a conversation" and session.startswith("how-do-i-save-a-conversation-"), session
            self.say(page, "What is a session?")
            saved = self.server.get(f"v1/sessions/{session}?messages=true")
            assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2, saved
            assert saved["last_resume"]["reason"] == "exact_prefix", saved
            assert session in self.server.run("sessions")
            page.reload()
            page.wait_for_selector(".message.assistant >> nth=1")
            assert QUESTION in page.inner_text("#log")
            self.shot(page, "chat")

    @check
    def a_session_of_the_terminal_goes_on_in_the_page(self):
        self.server.run("run", "--session", "from-the-terminal", "--quiet", QUESTION)
        with self.page() as page:
            page.click("text=from-the-terminal")
            page.wait_for_selector(".answer")
            self.say(page, "What is a session?")
            assert self.server.get("v1/sessions/from-the-terminal")["turns"] == 2

    @check
    def edit_and_retry_keep_the_replaced_turns(self):
        with self.page() as page:
            self.say(page, QUESTION)
            self.say(page, "What is a session?")
            session = page.get_attribute("#title", "title")
            page.click(".message.user >> nth=1 >> text=Edit")
            page.fill(".edit textarea", "How do I delete a session?")
            page.press(".edit textarea", "Enter")
            self.wait_turn(page)
            held = self.server.get(f"v1/sessions/{session}?messages=true")
            said = [message["content"] for message in held["messages"] if message["role"] == "user"]
            assert said == [QUESTION, "How do I delete a session?"], said
            assert [branch["turns"] for branch in held["branches"]] == [2], held
            page.click(".figures .link")
            page.wait_for_selector("#explain-dialog mark")
            marks = page.eval_on_selector_all("#explain-dialog mark", "marks => marks.map(mark => mark.textContent)")
            assert len(marks) == 2 and marks[0] != marks[1], marks
            self.check_access(page, "explain")
            self.shot(page, "explain")
            page.keyboard.press("Escape")
            page.keyboard.press("Alt+r")
            self.wait_turn(page)
            assert self.server.get(f"v1/sessions/{session}")["turns"] == 2
            # The branch is listed below, and can be put back.
            page.click(".branch .session >> nth=0")
            self.wait(page, "document.querySelector('#title').textContent.includes('~')")
            self.act(page, "#restore")
            self.wait(page, f"document.querySelector('#title').title === '{session}'")

    @check
    def sessions_are_renamed_forked_and_deleted(self):
        self.server.tell("old-name", {"role": "user", "content": QUESTION})
        with self.page() as page:
            page.fill("#filter", "OLD-n")
            page.click("#session-list >> text=old-name")
            page.wait_for_selector(".answer")
            self.act(page, "#rename")
            page.fill("#text-input", "new-name")
            page.keyboard.press("Enter")
            self.wait_title(page, "new-name")
            self.act(page, "#fork")
            assert page.input_value("#text-input") == "new-name-fork", page.input_value("#text-input")
            page.keyboard.press("Enter")
            self.wait_title(page, "new-name-fork")
            self.act(page, "#remove")
            page.wait_for_selector("#confirm-dialog[open]")
            assert "new-name-fork (1 turn)" in page.inner_text("#confirm-text")
            self.check_access(page, "confirm")
            page.keyboard.press("Escape")
            assert self.server.get("v1/sessions/new-name-fork")["turns"] == 1, "nothing is deleted without a yes"
            self.act(page, "#remove")
            page.click("#confirm-ok")
            self.wait_title(page, "New chat")
            ids = [session["id"] for session in self.server.get("v1/sessions?limit=1000")["data"]]
            assert "new-name" in ids and not {"old-name", "new-name-fork"} & set(ids), ids

    @check
    def an_answer_is_stopped_and_kept_so_far(self):
        with self.page() as page:
            self.stop_next(page)
            page.fill("#input", QUESTION)
            page.press("#input", "Enter")
            self.wait_stopped(page)
            # The mark is the server's: it is there after a reload, and the answer can go on.
            page.reload()
            page.wait_for_selector(STOPPED)
            self.say(page, "What is a session?")
            session = page.get_attribute("#title", "title")
            held = self.server.get(f"v1/sessions/{session}?messages=true")
            assert [message["role"] for message in held["messages"]] == ["user", "assistant"] * 2, held
            self.stop_next(page)
            page.press("#input", "ArrowUp")
            page.fill(".edit textarea", "How do I delete a session?")
            page.press(".edit textarea", "Enter")
            self.wait_stopped(page)
            held = self.server.get(f"v1/sessions/{session}?messages=true")
            assert held["messages"][2]["content"] == "How do I delete a session?", held
            assert len(held["messages"]) == 4 and held["branches"], held
            begun = held["messages"][3]["content"]
            page.reload()
            self.lengthen_next(page, 20) # the stop may have come where the model would end its answer
            page.click("#log > :last-child >> text=Continue")
            self.wait_turn(page)
            whole = self.server.get(f"v1/sessions/{session}?messages=true")["messages"]
            assert len(whole) == 4 and whole[3]["content"].startswith(begun) and len(whole[3]["content"]) > len(begun), whole
            assert "Stopped." not in page.inner_text("#log > :last-child")

    def stop_next(self, page):
        """The next answer is long, reaches the page slowly, and is stopped as soon as it is seen; the server may be done by then."""
        self.lengthen_next(page, 985)
        self.limit_download(page, 20_000)
        page.evaluate(
            """new MutationObserver((_, observer) => {
                if (!document.querySelector(".busy #log > :last-child .answer p")) return;
                observer.disconnect();
                document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
            }).observe(document.querySelector("#log"), { childList: true, subtree: true })"""
        )

    def lengthen_next(self, page, tokens):
        """The next answers have this many tokens, even where the model would end before."""
        def lengthen(route):
            body = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": tokens}
            route.continue_(post_data=json.dumps(body))

        page.route("**/v1/chat/completions", lengthen)

    def limit_download(self, page, bytes_per_second):
        """-1 is no limit."""
        network = page.context.new_cdp_session(page)
        limits = {"downloadThroughput": bytes_per_second, "uploadThroughput": -1, "latency": 0, "offline": False}
        network.send("Network.emulateNetworkConditions", limits)

    def wait_stopped(self, page):
        page.wait_for_selector(STOPPED)
        self.limit_download(page, -1)
        page.wait_for_selector("#send:visible")
        self.wait(page, "!document.querySelector('#log .message.assistant:last-of-type .actions:empty')")
        page.unroute("**/v1/chat/completions")

    @check
    def hostile_answers_stay_text(self):
        user = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE}
        calls = [{"id": HOSTILE[:20], "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}]
        called = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": calls}
        tool = {"role": "tool", "tool_call_id": HOSTILE[:20], "content": HOSTILE}
        messages = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE}, answer, user, called, tool]
        with self.page() as page:
            self.serve_session(page, "hostile", messages)
            page.goto(self.server.url + "#hostile")
            page.reload()
            page.wait_for_selector(".answer")
            self.check_is_text(page)
            self.shot(page, "hostile")
        with self.page() as page:
            pieces = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
            deltas = [{"reasoning_content": piece} for piece in pieces] + [{"content": piece} for piece in pieces]
            self.serve_stream(page, deltas)
            page.fill("#input", "x")
            page.press("#input", "Enter")
            self.wait(page, "document.querySelector('.answer')?.textContent.includes('refresh')")
            self.check_is_text(page)

    def check_is_text(self, page):
        page.wait_for_timeout(300)
        tags = page.eval_on_selector_all("#log *", "all => [...new Set(all.map(one => one.localName))]")
        known = "a article blockquote br button code del details div em figcaption figure footer h3 hr li ol p pre span strong summary table tbody td textarea th thead tr ul form label"
        assert set(tags) <= set(known.split()), tags
        names = page.eval_on_selector_all("#log *", "all => [...new Set(all.flatMap(one => one.getAttributeNames()))]")
        assert not [name for name in names if name.startswith("on") or name in ("src", "style", "action", "id")], names
        links = page.eval_on_selector_all("#log a", "all => all.map(one => one.href)")
        assert links and all(re.match(r"https?://(good|evil)\.invalid/", link) for link in links), links
        assert "http://good.invalid/a_(b)?c=1" in links, links

    @check
    def heavy_answers_are_shown_within_bounds(self):
        """Time has no bound of its own here: a text whose work grows too fast runs into the limit of the whole."""
        with self.page() as page:
            for number, text in enumerate(HEAVY):
                took, depth = page.evaluate(
                    """async (text) => {
                        const { MarkdownView } = await import(new URL("page/markdown.js", document.baseURI).href);
                        const root = document.createElement("div");
                        const start = performance.now();
                        new MarkdownView(root).update(text);
                        document.querySelector("#log").replaceChildren(root);
                        root.getBoundingClientRect();
                        let depth = 0;
                        for (let level = [root]; level.length > 0; level = level.flatMap((one) => [...one.children])) depth += 1;
                        return [performance.now() - start, depth];
                    }""",
                    text,
                )
                print(f"    heavy text {number}, {len(text):,} characters: {took:.0f} ms, {depth} levels")
                assert depth <= MOST_LEVELS, (number, depth)

    @check
    def markdown_is_shown_as_it_is_meant(self):
        with self.page() as page:
            pieces = [MARKDOWN[at : at + 3] for at in range(0, len(MARKDOWN), 3)]
            self.serve_stream(page, [{"content": piece} for piece in pieces])
            page.fill("#input", "x")
            page.press("#input", "Enter")
            self.wait(page, "document.querySelector('.answer')?.textContent.includes('unfinished')")
            expected = {
                "h3.level-2": "Heading", "strong": "bold", "em": "italic", "em strong, strong em": "both", "del": "gone",
                "ol > li > ul > li strong": "bold", "ol > li > ul a": "link", "blockquote p": "quotedtext", "td.end": "1",
                "tbody tr:nth-child(2) td": "b | c", ".code .comment": "# a comment", ".code .string": '"text"', ".code .number": "42",
                ".code .keyword": "def", "ul > li:nth-child(2)": "link", "code.math": "a_1 * b_1", "p code": "code",
            }
            for selector, text in expected.items():
                found = page.eval_on_selector_all(f".answer :is({selector})", "all => all.map(one => one.textContent)")
                assert text in found, (selector, text, found)
            text = page.inner_text(".answer")
            for part in ["snake_case_name and 2*3*4", "☑ done", "☐ open", "[unfinished link](http"]:
                assert part in text, (part, text)
            self.shot(page, "markdown")

    @check
    def reasoning_is_folded_and_tool_calls_get_results(self):
        with self.page() as page:
            call = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": ""}}
            deltas = [{"reasoning_content": "I need "}, {"reasoning_content": "the weather."}, {"content": "Let me look."}]
            deltas += [{"tool_calls": [call]}] + [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ['{"city": ', '"Oslo"}']]
            self.serve_stream(page, deltas)
            said = {"role": "assistant", "content": "Let me look.", "reasoning_content": "I need the weather."}
            said["tool_calls"] = [{"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
            self.serve_session(page, "*", [{"role": "user", "content": "Weather?"}, said])
            page.fill("#input", "Weather?")
            page.press("#input", "Enter")
            page.wait_for_selector(".calls textarea")
            assert not page.is_visible(".reasoning .said"), "reasoning is folded"
            page.click(".reasoning summary")
            assert page.inner_text(".reasoning .said") == "I need the weather."
            assert '"city": "Oslo"' in page.inner_text(".call pre")
            self.check_access(page, "tool call")
            self.shot(page, "tools")
            sent = []
            page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
            page.fill(".calls textarea", "sunny")
            page.click("text=Send results")
            page.wait_for_selector(".results pre")
            assert sent[-1]["messages"] == [{"role": "tool", "tool_call_id": "call-1", "content": "sunny"}], sent
            assert sent[-1]["session_append"] is True, sent

    # Tools of MCP servers.

    @check
    def a_tool_runs_when_the_user_agrees(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            first = Script.calling(("t__echo", {"text": "one"}))
            script = Script(page, [first, Script.calling(("t__echo", {"text": "two"}), ("t__add", {"a": 2, "b": 3})), "Done."])
            self.ask_for_tools(page)
            offered = [tool["function"]["name"] for tool in script.sent[0]["tools"]]
            assert offered[:2] == ["t__echo", "t__add"] and len(offered) == 11, offered
            question = page.inner_text(".consent")
            assert "The model wants to call echo of the MCP server t." in question, question
            assert '"text": "one"' in page.inner_text(".call pre")
            assert page.inner_text("#announcements").startswith("The model wants to call echo of t")
            buttons = page.eval_on_selector_all(".consent button", "all => all.map(one => one.textContent)")
            assert buttons == ["Run", "Refuse", "Always run this tool"], buttons
            self.check_access(page, "consent")
            self.shot(page, "consent")
            assert log.calls() == [], "nothing runs before a press"
            self.press(page, "Run")
            page.wait_for_selector(".consent >> nth=1")
            assert script.sent[1]["messages"] == [{"role": "tool", "tool_call_id": "call-0", "content": "one"}], script.sent
            assert script.sent[1]["session_append"] is True and script.sent[1]["tools"] == script.sent[0]["tools"]
            self.press(page, "Refuse")
            page.wait_for_timeout(200)
            assert len(script.sent) == 2, "the other call waits"
            self.press(page, "Run")
            self.wait_answers(page, 3)
            results = [message["content"] for message in script.sent[2]["messages"]]
            assert results == ["error: the user refused the call", '{"sum":5}'], results
            assert log.calls() == ['echo {"text": "one"}', 'add {"a": 2, "b": 3}'], log.calls()
            shown = page.eval_on_selector_all(".results pre", "all => all.map(one => one.textContent)")
            assert shown == ["one", *results], shown
            self.shot(page, "consent-done")

    @check
    def a_model_goes_on_with_the_result_of_its_call(self):
        """The built-in model, whose requests say that it is to call the tool, and then that it is not. Nothing else is changed."""
        with self.tool_server("--only", "now") as (server, log), self.page(server) as page:
            def choose(route):
                body = route.request.post_data_json
                has_result = body["messages"][-1]["role"] == "tool"
                choice = "none" if has_result else {"type": "function", "function": {"name": "t__now"}}
                route.continue_(post_data=json.dumps({**body, "tool_choice": choice, "max_tokens": 60}))

            page.route("**/v1/chat/completions", choose)
            self.ask_for_tools(page)
            assert '"zone": "UTC"' in page.inner_text(".call pre")
            self.press(page, "Run")
            self.wait_answers(page, 2)
            assert log.calls() == ['now {"zone": "UTC"}'], log.calls()
            saved = server.get(f"v1/sessions/{page.get_attribute('#title', 'title')}?messages=true")["messages"]
            assert [message["role"] for message in saved] == ["user", "assistant", "tool", "assistant"], saved
            assert saved[2]["content"] == "noon in UTC" and saved[2]["tool_call_id"] == saved[1]["tool_calls"][0]["id"], saved
            page.reload()
            page.wait_for_selector(".message.assistant >> nth=1")
            assert page.inner_text(".results pre") == "noon in UTC"
            assert page.locator(".consent").count() == 0, "a call with a result waits for nothing"

    @check
    def always_holds_for_one_tool_and_never_for_an_opened_session(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            echo = lambda text: Script.calling(("t__echo", {"text": text}))
            script = Script(page, [echo("one"), echo("two"), Script.calling(("t__add", {"a": 1, "b": 1})), "Done."])
            self.ask_for_tools(page)
            self.press(page, "Always run this tool")
            page.wait_for_selector("text=The model wants to call add")
            assert log.calls() == ['echo {"text": "one"}', 'echo {"text": "two"}'], "the second without a press"
            assert len(script.sent) == 3
            page.click("#open-settings")
            page.click("#mcp-list summary")
            assert "Runs without asking" in page.inner_text("#mcp-list li li >> nth=0")
            assert page.locator(".always").count() == 1
            page.keyboard.press("Escape")
            # A session that ends with a call of that tool is opened, in the same page.
            Script(page, ["On."], [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": echo("three")["tool_calls"]}])
            page.evaluate("location.hash = '#opened'")
            self.wait_title(page, "opened")
            page.wait_for_selector(".consent")
            page.wait_for_timeout(500)
            assert len(log.calls()) == 2, "nothing of an opened session runs by itself"
            self.press(page, "Run")
            self.wait_answers(page, 1)
            assert log.calls()[2:] == ['echo {"text": "three"}'], log.calls()
            # After a reload every tool is asked for.
            page.reload()
            script = Script(page, [echo("four")])
            self.ask_for_tools(page)
            page.wait_for_timeout(500)
            assert len(log.calls()) == 3, log.calls()

    @check
    def consent_ends_when_it_is_taken_back_or_a_server_changes_its_tools(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            grow, echo = (Script.calling((f"t__{name}", given)) for name, given in [("grow", {}), ("echo", {"text": "x"})])
            Script(page, [echo, grow, echo, "Done."])
            self.ask_for_tools(page)
            self.press(page, "Always run this tool")
            page.wait_for_selector("text=The model wants to call grow")
            self.press(page, "Run")
            page.wait_for_selector("text=The model wants to call echo")
            assert len(log.calls()) == 2, "asked again, because the server has another tool"
            self.press(page, "Always run this tool")
            self.wait_answers(page, 4)
            page.click("#open-settings")
            page.click("#mcp-list summary")
            page.click("text=Ask again")
            assert page.locator(".always").count() == 0
            page.keyboard.press("Escape")
            Script(page, [echo])
            self.ask_for_tools(page)
            assert len(log.calls()) == 3, log.calls()

    @check
    def a_running_call_is_stopped(self):
        with self.tool_server("--mode", "parallel") as (server, log), self.page(server) as page:
            script = Script(page, [Script.calling(("t__hang", {}), ("t__echo", {"text": "x"})), "Fine."])
            self.ask_for_tools(page)
            self.press(page, "Run")
            page.wait_for_selector(".consent .pending")
            page.wait_for_selector("#stop:visible")
            self.shot(page, "calling")
            self.wait_for(lambda: log.calls() == ["hang {}"])
            page.keyboard.press("Escape")
            page.wait_for_selector("text=Stopped. It may have run.")
            self.wait_for(lambda: "notifications/cancelled" in log.text())
            page.wait_for_selector("#send:visible")
            assert len(script.sent) == 1, "the model does not go on"
            page.fill("#input", "Never mind.")
            page.press("#input", "Enter")
            self.wait_answers(page, 2)
            said = [(message["role"], message["content"]) for message in script.sent[1]["messages"]]
            results = [("tool", "error: the user stopped it"), ("tool", "error: the user refused the call")]
            assert said == [*results, ("user", "Never mind.")], said
            assert page.locator(".consent").count() == 0 and log.calls() == ["hang {}"]

    @check
    def answers_that_call_tools_are_bounded(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            echo = Script.calling(("t__echo", {"text": "x"}))
            script = Script(page, [echo] * 19 + ["Done."])
            self.ask_for_tools(page)
            self.press(page, "Always run this tool")
            page.wait_for_selector("text=The model has called tools in 16 answers in a row: its next calls need you.")
            assert (len(script.sent), len(log.calls())) == (18, 17), "the first one was asked for"
            self.press(page, "Run")
            self.wait_answers(page, 20)
            assert len(log.calls()) == 19, "a press is the user: the next rounds run"

    @check
    def calls_of_all_kinds_in_one_answer(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            own = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}
            page.click("#open-settings")
            page.fill("[name=tools]", json.dumps([own]))
            page.keyboard.press("Escape")
            self.wait(page, "document.querySelector('#active').textContent === 'Set: tools: 1, tools of MCP servers: 11'")
            hidden = '{"text": "a\u202eb\u200b"}'
            calls = [("t__echo", hidden), ("own", {}), ("t__nope", {}), ("t__fail", {}), ("t__echo", "[1]")]
            script = Script(page, [Script.calling(*calls), Script.calling(("t__echo", '{"text": "cu'), finish="length")])
            self.ask_for_tools(page)
            assert [tool["function"]["name"] for tool in script.sent[0]["tools"]][:2] == ["own", "t__echo"]
            assert "a\\u{202e}b\\u{200b}" in page.inner_text(".call pre >> nth=0"), "nothing hides"
            page.fill(".calls textarea", "mine")
            page.click("text=Send results")
            for _ in range(4):
                number = page.locator(".consent").count()
                self.press(page, "Run")
                self.wait(page, f"document.querySelectorAll('.consent').length < {number}")
            self.wait_answers(page, 2)
            results = [message["content"] for message in script.sent[1]["messages"]]
            expected = ["a\u202eb\u200b", "mine", "error: there is no tool t__nope", "error: no luck", "error: the arguments are not a JSON object"]
            assert results == expected, results
            page.wait_for_selector("text=The last call was cut off at the token limit: nothing was called.")
            assert page.locator(".consent").count() == 0
            assert len(log.calls()) == 2, log.calls()

    @check
    def servers_are_listed_and_their_tools_can_be_left_out(self):
        with self.tool_server(others={"dies": ["--mode", "dies"], "silent": ["--mode", "silent"]}) as (server, _), self.page(server) as page:
            page.wait_for_selector("#active >> text=tools of MCP servers: 11")
            page.click("#open-settings")
            page.wait_for_selector("#mcp-list >> text=t running, 11 tools (test-server 1.2)")
            listed = page.inner_text("#mcp-list")
            assert "dies down: it has ended (exit status: 7)" in listed and "silent starting" in listed, listed
            page.click("#mcp-list summary")
            assert "echo Say a text again" in page.inner_text("#mcp-list")
            self.check_access(page, "MCP settings")
            page.locator("#mcp-settings").scroll_into_view_if_needed()
            self.shot(page, "mcp-settings")
            page.uncheck("[name=mcp]")
            page.keyboard.press("Escape")
            assert page.inner_text("#active") == ""
            script = Script(page, ["No tools.", Script.calling(("t__echo", {"text": "x"}))])
            self.ask_for_tools(page, answers=True)
            assert "tools" not in script.sent[0], script.sent
            page.reload()
            page.click("#open-settings")
            assert not page.is_checked("[name=mcp]"), "the setting is kept"

    @check
    def consent_works_from_the_keyboard_and_at_every_width(self):
        with self.tool_server() as (server, log):
            for name, width, theme in [("narrow", 320, "light"), ("narrow", 320, "dark"), ("desk", 1280, "dark")]:
                with self.page(server, viewport={"width": width, "height": 700}, color_scheme=theme) as page:
                    long = {"text": "word " * 60, "path": "/a/" + "b" * 200}
                    script = Script(page, [Script.calling(("t__echo", long), ("t__add", {"a": 1, "b": 2})), "Done."])
                    self.ask_for_tools(page)
                    self.check_access(page, f"consent, {name}, {theme}")
                    self.shot(page, f"consent-{name}-{theme}")
                    focused = lambda: page.evaluate("document.activeElement.textContent")
                    assert page.evaluate("document.activeElement.id") == "input", "a call takes no key press by surprise"
                    page.keyboard.press("Alt+t")
                    assert focused() == "Run", focused()
                    page.keyboard.press("Tab")
                    page.keyboard.press("Enter")
                    assert focused() == "Run", "the next call's"
                    page.keyboard.press("Space")
                    self.wait_answers(page, 2)
                    assert [message["content"] for message in script.sent[1]["messages"]] == ["error: the user refused the call", '{"sum":3}']
                    self.wait(page, "document.activeElement.id === 'input'")
            assert len(log.calls()) == 3, log.calls()

    @check
    def a_server_that_is_lost_in_a_call_leaves_the_decision_to_the_user(self):
        with self.tool_server() as (server, log), self.page(server) as page:
            script = Script(page, [Script.calling(("t__die", {})), Script.calling(("t__echo", {"text": "x"})), "Done."])
            self.ask_for_tools(page)
            self.press(page, "Run")
            page.wait_for_selector("text=The model wants to call echo")
            assert script.sent[1]["messages"][0]["content"] == "error: the server t has ended or cannot be reached"
            assert "tools" not in script.sent[1], "its tools are no longer offered"
            self.press(page, "Always run this tool")
            self.wait_answers(page, 3)
            assert script.sent[2]["messages"][0]["content"] == "error: the server t does not run"
            page.route("**/v1/mcp/tools/*", lambda route: route.abort())
            script.answers = [Script.calling(("t__echo", {"text": "x"})), "Late."]
            page.fill("#input", "again")
            page.press("#input", "Enter")
            self.press(page, "Run")
            page.wait_for_selector(".consent .error")
            assert "cannot be reached" in page.inner_text(".consent .error")
            self.press(page, "Refuse")
            self.wait_answers(page, 5)

    @check
    def images_are_shown_sent_and_given_back(self):
        """With a model that reads images, as its entry in the list says; the answers are made up."""
        picture = base64.b64decode("R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs=")
        url = "data:image/gif;base64," + base64.b64encode(picture).decode()
        with self.page() as page:
            assert not page.is_visible("#attach"), "the built-in model reads no images"

            def see(route):
                listed = route.fetch().json()
                for model in listed["data"]:
                    model["capabilities"]["vision"] = True
                route.fulfill(body=json.dumps(listed), content_type="application/json")

            page.route("**/v1/models", see)
            script = Script(page, ["A dot.", "Still a dot."])
            page.reload()
            page.wait_for_selector("#attach:visible")
            page.set_input_files("#files", {"name": "dot.gif", "mimeType": "image/gif", "buffer": picture})
            page.wait_for_selector("#tray img")
            page.click("#tray button")
            assert page.is_hidden("#tray"), "it is taken back"
            page.set_input_files("#files", {"name": "dot.gif", "mimeType": "image/gif", "buffer": picture})
            page.wait_for_selector("#tray img")
            self.check_access(page, "images")
            self.say(page, "What is it?")
            assert script.sent[0]["messages"][-1]["content"] == [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What is it?"},
            ], script.sent
            assert page.is_hidden("#tray") and page.get_attribute(".message.user img", "src") == url
            assert page.evaluate("document.querySelector('.message.user img').naturalWidth") == 1, "the policy lets it be shown"
            page.route("**/v1/chat/completions", lambda route: route.fulfill(
                status=400, body=json.dumps({"error": {"code": "image_undecodable", "message": "the image is damaged"}}), content_type="application/json"))
            page.set_input_files("#files", {"name": "dot.gif", "mimeType": "image/gif", "buffer": picture})
            page.wait_for_selector("#tray img")
            page.fill("#input", "And this?")
            page.press("#input", "Enter")
            page.wait_for_selector(".message .error")
            assert "the image is damaged" in page.inner_text(".message .error >> nth=-1")
            page.wait_for_selector("#tray img")
            page.set_viewport_size({"width": 320, "height": 640})
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, "it fits a phone"
            self.shot(page, "images")

    @check
    def a_model_that_sees_answers_again_about_a_stored_image(self):
        model, picture = VISION / "qwen3-vl", VISION / "images" / "photo.jpg"
        if not model.exists():
            print(f"  skipped: no fixtures at {VISION}")
            return
        sent = []

        def limit(route):
            sent.append(route.request.post_data_json)
            route.continue_(post_data=json.dumps({**sent[-1], "max_tokens": 8}))

        with self.own_server("--model", str(model)) as server, self.page(server) as page:
            page.route("**/v1/chat/completions", limit)
            page.wait_for_selector("#attach:visible")
            page.evaluate(DROP, [base64.b64encode(picture.read_bytes()).decode(), "photo.jpg"])
            page.wait_for_selector("#tray img")
            self.say(page, "What is this?")
            self.say(page, "And now?")
            session = page.get_attribute("#title", "title")
            turns = lambda: server.get(f"v1/sessions/{session}?messages=true")["messages"]
            [stored] = [part for part in turns()[0]["content"] if part["type"] == "image"]
            self.shot(page, "seen")
            # The bytes are gone from the page; the session has them.
            page.reload()
            page.wait_for_selector(".message.user .tag")
            assert page.inner_text(".message.user .tag") == f"[image/jpeg {stored['width']}×{stored['height']}]"
            for index, press in enumerate(["Retry", "Edit"]):
                page.click(f".message.{'assistant' if press == 'Retry' else 'user'} .actions button:text('{press}') >> nth=0")
                if press == "Edit":
                    page.fill(".edit textarea", "What else?")
                    page.press(".edit textarea", "Enter")
                self.wait(page, "document.querySelectorAll('#log .message.assistant').length === 1")
                self.wait_turn(page)
                assert not page.query_selector(".message .error"), page.inner_text("#log")
                question = turns()[0]["content"]
                assert question[0] == stored and question[1]["text"] == ["What is this?", "What else?"][index], question
                assert sent[-1]["messages"][0]["content"][0] == stored, "it is named and not sent"

    @check
    def a_stored_image_is_named(self):
        with self.page() as page:
            stored = {"type": "image", "sha256": "0" * 64, "width": 640, "height": 480, "media_type": "image/png", "name": "a.png"}
            content = [stored, {"type": "text", "text": "What is it?"}]
            self.serve_session(page, "*", [{"role": "user", "content": content}, {"role": "assistant", "content": "A dot."}])
            page.goto(self.server.url + "#stored")
            page.reload()
            page.wait_for_selector(".message.user .tag")
            assert page.inner_text(".message.user .tag") == "[a.png 640×480]"
            assert "What is it?" in page.inner_text(".message.user .said")

    @check
    def an_error_gives_the_message_back(self):
        with self.page() as page:
            long = "word " * 20_000
            page.fill("#input", long)
            page.press("#input", "Enter")
            page.wait_for_selector(".message .error")
            assert "context" in page.inner_text(".message .error")
            assert page.input_value("#input").strip() == long.strip(), "the message is not lost"
            self.shot(page, "error")

    @check
    def a_key_is_asked_for_and_kept_for_the_tab(self):
        with self.own_server(key="sk-right") as server, self.page(server) as page:
            page.wait_for_selector("#key-dialog[open]")
            self.check_access(page, "key")
            self.shot(page, "key")
            page.fill("#key-input", "sk-wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-refused:visible")
            page.fill("#key-input", "sk-right")
            page.keyboard.press("Enter")
            page.wait_for_selector("text=guide")
            self.say(page, QUESTION)
            assert "sk-right" not in page.url
            kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]")
            assert "sk-" not in kept[0] + kept[1] and "sk-right" in kept[2], kept
            page.reload()
            page.wait_for_selector(".answer")
            page.click("#forget-key")
            page.wait_for_selector("#key-dialog[open]")

    @check
    def a_lost_server_is_reported_and_found_again(self):
        with self.own_server() as server, self.page(server) as page:
            self.say(page, QUESTION)
            server.stop(signal.SIGKILL)
            page.fill("#input", "What is a session?")
            page.press("#input", "Enter")
            page.wait_for_selector("#banner:visible")
            assert "cannot be reached" in page.inner_text("#banner")
            self.shot(page, "gone")
            server.start()
            page.wait_for_selector("#banner", state="hidden")
            page.click(".message .actions >> text=Retry >> nth=-1")
            self.wait_turn(page)
            held = server.get(f"v1/sessions/{page.get_attribute('#title', 'title')}?messages=true")
            assert len(held["messages"]) == 4, held

    @check
    def what_the_server_does_is_plotted(self):
        with self.page() as page:
            page.click("#toggle-panel")
            page.wait_for_selector(".plot svg polyline[points]", state="attached")
            self.say(page, QUESTION)
            self.wait(page, "/^Since the start: [1-9]/.test(document.querySelector('#plots').lastChild.textContent)")
            titles = page.eval_on_selector_all(".plot h3", "all => all.map(one => one.firstChild.data)")
            assert titles == ["Tokens/s", "Requests", "KV in use", "Warm share of prompts"], titles
            # A client that writes the time into its system prompt.
            page.evaluate("""async () => {
                for (const time of ["07:36", "07:41"]) {
                    const messages = [
                        {role: "system", content: `You help people who write programs. It is ${time} now.`},
                        {role: "user", content: "hello"}, {role: "assistant", content: "hi"}, {role: "user", content: `At ${time}?`},
                    ];
                    const headers = {"content-type": "application/json"};
                    await fetch("v1/chat/completions", {method: "POST", headers, body: JSON.stringify({messages, max_tokens: 1})});
                }
            }""")
            page.wait_for_selector("#plots .note >> text=broke the warm prefix by a date or time: 1 prompt, ")
            self.check_access(page, "plots")
            page.wait_for_timeout(4500 if self.options.shots else 0)
            self.shot(page, "plots")

    @check
    def every_width_and_both_themes_are_usable(self):
        for name, width, height in [("phone", 320, 640), ("tablet", 800, 1100), ("desk", 1280, 800), ("large", 3840, 2160)]:
            for theme in ["light", "dark"]:
                with self.page(viewport={"width": width, "height": height}, color_scheme=theme) as page:
                    self.check_access(page, f"empty, {name}, {theme}")
                    self.serve_stream(page, [{"content": MARKDOWN}])
                    page.fill("#input", "Show me **Markdown**, please, " * 6)
                    page.press("#input", "Enter")
                    page.wait_for_selector(".answer figure")
                    page.wait_for_selector("#send:visible")
                    self.check_access(page, f"chat, {name}, {theme}")
                    self.shot(page, f"{name}-{theme}")
                    page.click("#toggle-panel")
                    page.wait_for_selector(".plot svg polyline[points]", state="attached")
                    self.check_access(page, f"panel, {name}, {theme}")
                    self.shot(page, f"{name}-{theme}-panel")
                    page.keyboard.press("Escape")
                    for dialog in ["settings", "keys"]:
                        if dialog == "keys" and not page.is_visible("#sidebar"):
                            page.click("#toggle-sidebar")
                            page.wait_for_timeout(200)
                            self.shot(page, f"{name}-{theme}-sessions")
                        page.click(f"#open-{dialog}")
                        self.check_access(page, f"{dialog}, {name}, {theme}")
                        self.shot(page, f"{name}-{theme}-{dialog}")
                        page.keyboard.press("Escape")

    @check
    def the_keyboard_does_everything(self):
        with self.page() as page:
            self.say(page, QUESTION)
            page.press("#input", "ArrowUp")
            assert page.evaluate("document.activeElement.closest('.edit') !== null"), "the last message is being edited"
            page.keyboard.press("Escape")
            page.keyboard.press("Alt+k")
            assert page.evaluate("document.activeElement.id") == "filter"
            for _ in range(3):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.className") == "session":
                    break
            page.keyboard.press("Enter")
            self.wait(page, "document.activeElement.id === 'input'")
            page.keyboard.press("Alt+n")
            assert page.inner_text("#title") == "New chat", page.inner_text("#title")
            self.wait(page, "document.activeElement.id === 'input'")
            title = page.inner_text("#title")
            page.locator(".skip").dispatch_event("click")
            assert page.evaluate("document.activeElement.id") == "input" and page.inner_text("#title") == title
            assert page.evaluate("location.hash") != "#input"
            page.keyboard.type("line one")
            page.keyboard.press("Shift+Enter")
            page.keyboard.type("line two")
            assert page.input_value("#input") == "line one\nline two"

    @check
    def a_proxy_may_strip_a_path(self):
        proxy = Proxy(self.server)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            with self.page(proxy) as page:
                self.say(page, QUESTION)
                assert "/save" in page.inner_text(".answer")
                page.click("#toggle-panel")
                page.wait_for_selector(".plot svg polyline[points]", state="attached")
        finally:
            proxy.shutdown()

    @check
    def settings_go_with_each_message_and_are_named(self):
        with self.page() as page:
            page.click("#open-settings")
            page.fill("[name=system]", "Answer with one word.")
            page.fill("[name=temperature]", "0")
            page.fill("[name=max_tokens]", "3")
            page.fill("[name=tools]", "no list")
            page.select_option("[name=theme]", "dark")
            page.keyboard.press("Escape")
            assert page.inner_text("#active") == "Set: temperature 0, at most 3 tokens", page.inner_text("#active")
            assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
            sent = []
            page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
            self.say(page, QUESTION)
            assert [message["role"] for message in sent[0]["messages"]] == ["system", "user"], sent
            assert (sent[0]["temperature"], sent[0]["max_tokens"], "tools" in sent[0]) == (0, 3, False), sent
            assert "stopped at the token limit" in page.inner_text(".figures")
            page.reload()
            page.wait_for_selector(".answer")
            assert page.evaluate("document.documentElement.dataset.theme") == "dark"

    @check
    def an_engine_elsewhere_is_named(self):
        with self.page() as page:
            about = {**self.server.get(""), "remote_engine": True}

            def answer(route):
                is_page = "text/html" in route.request.headers["accept"]
                route.fallback() if is_page else route.fulfill(body=json.dumps(about), content_type="application/json")

            page.route(self.server.url, answer)
            page.reload()
            page.wait_for_selector("#remote:visible")
            page.click("#toggle-panel")
            page.wait_for_selector("#plots .note:visible")
            assert "KV in use" not in page.inner_text("#plots")
            self.check_access(page, "remote engine")
            self.shot(page, "remote")

    @check
    def the_page_can_be_turned_off(self):
        with self.own_server("--no-page") as server:
            text = server.request("", accept="text/html")
            assert text.startswith("{") and json.loads(text)["name"] == "llmctl", text

    # Helpers of the checks.

    @contextmanager
    def own_server(self, *flags, key=None):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(self.options.llmctl, Path(folder), *flags, key=key).start()
            try:
                yield server
            finally:
                server.stop()

    @contextmanager
    def tool_server(self, *args, others={}):
        """A server with the MCP server `t` of tests/mcp/server.py, and its log."""
        with tempfile.TemporaryDirectory() as folder:
            log = ToolLog(Path(folder) / "t.log")
            program = str(Path(__file__).parent.parent / "mcp" / "server.py")
            entry = lambda *own: {"command": sys.executable, "args": [program, *own]}
            servers = {"t": entry("--log", str(log.path), *args), **{name: entry(*own) for name, own in others.items()}}
            config = Path(folder) / "mcp.json"
            config.write_text(json.dumps({"mcpServers": servers}))
            with self.own_server("--mcp-config", str(config)) as server:
                self.wait_for(lambda: server.get("v1/mcp")["servers"][0]["state"] == "running")
                yield server, log

    def ask_for_tools(self, page, answers=False):
        """Sends a message to a script whose answer calls tools."""
        page.wait_for_selector("#send:visible")
        self.wait(page, "document.querySelector('#version').textContent !== ''")
        page.fill("#input", "Use the tool.")
        page.press("#input", "Enter")
        page.wait_for_selector(".answer p" if answers else ".consent")

    def press(self, page, label):
        """A button of the first call that waits."""
        page.click(f".consent button:text-is('{label}') >> nth=0")

    def wait_answers(self, page, number):
        """So many answers are there, and the page is ready for a message."""
        self.wait(page, f"document.querySelectorAll('.message.assistant .figures button').length === {number}")
        page.wait_for_selector("#send:visible")

    def wait_for(self, condition):
        for _ in range(PATIENCE_MS // 50):
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError("never true")

    def say(self, page, text):
        page.fill("#input", text)
        page.press("#input", "Enter")
        self.wait_turn(page)

    def wait(self, page, condition):
        """Playwright's own waiting for a condition needs eval, which the page's policy refuses."""
        for _ in range(PATIENCE_MS // 50):
            if page.evaluate(condition):
                return
            page.wait_for_timeout(50)
        raise AssertionError(f"never true: {condition}")

    def wait_turn(self, page):
        """The last answer has its figures, and its turn is listed."""
        self.wait(page, "document.querySelector('#log .message.assistant:last-of-type .figures button')")
        page.wait_for_selector("#send:visible")
        self.wait(page, "!document.querySelector('#log .message.assistant:last-of-type .actions:empty')")

    def act(self, page, action):
        page.click("[popovertarget=session-menu]")
        page.click(action)

    def wait_title(self, page, text):
        self.wait(page, f"document.querySelector('#title').textContent === {json.dumps(text)}")

    def serve_session(self, page, session, messages):
        """The server's answer about a session, for messages that the built-in model's template would not take."""
        body = json.dumps({"id": session, "object": "session", "turns": 1, "state": "idle", "branches": [], "messages": messages})
        pattern = re.compile(r"/v1/sessions/[^/?]+\?messages=true" if session == "*" else rf"/v1/sessions/{session}\?messages=true")
        page.route(pattern, lambda route: route.fulfill(body=body, content_type="application/json"))

    def serve_stream(self, page, deltas):
        """An answer with these deltas, in place of the model's."""
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        timings = {"decode_tokens": 9, "decode_tokens_per_second": 3.0, "ttft_ms": 1.0, "cached_tokens": 1, "prefill_tokens": 2}
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=text, content_type="text/event-stream"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmctl", required=True)
    parser.add_argument("--axe", help="folder of axe-core")
    parser.add_argument("--shots", help="folder for screenshots")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    options = parser.parse_args()
    if options.shots:
        Path(options.shots).mkdir(parents=True, exist_ok=True)
    names = [name for name in CHECKS if options.only in name]
    if not names:
        parser.error(f"no check has {options.only!r} in its name")
    failed = []
    with sync_playwright() as playwright:
        # A container's root has no user namespaces, which Chromium's sandbox needs.
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        suite = Suite(options, browser)
        with suite.own_server("--share-sessions") as suite.server:
            for name in names:
                print(f"{name.replace('_', ' ')} ...", flush=True)
                try:
                    getattr(suite, name)()
                except Exception as error:
                    failed.append(name)
                    print(f"  FAILED: {type(error).__name__}: {str(error)[:2000]}", flush=True)
        browser.close()
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
