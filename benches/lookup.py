#!/usr/bin/env python3
"""Drafts of llmctl beside prompt lookup on llama.cpp, on the same scripted texts and the same file, in turns.

  python benches/lookup.py MODEL.gguf [--texts NAMES] [--lines N] [--real LLMCTL] [--drafts 2,10] [-r N] [-t N]

Needs llama-cpp-python built for this machine; builds the bench `speculation`, which makes the texts (a file rewritten with small edits, JSON, tool
calls, prose) and measures llmctl with and without drafts. Weights and logits have no part in what is accepted: both sides compute every row, and
the text goes on as written. So a model of random weights serves.

With --real, the path of an llmctl, the texts are the model's own likeliest answers to the prompts of `real_prompts`, in the model's chat template: what
drafts gain on the text of a trained model. llama.cpp computes the same tokens.

llama.cpp's side drafts as llama-cpp-python's LlamaPromptLookupDecoding: the latest two tokens, or else the last one, are looked for from the
beginning of the text, and the tokens behind the first match, at most as many as --drafts says, go with the known token into one llama_decode.
Only llama_decode and the removal of refused rows are timed, not the search. Each of its settings (no drafts, each number of
drafts; with and without flash attention) is measured, and the best one of the medians counts, for each text anew.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import side_by_side

REPOSITORY = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^(?P<name>.+): (?P<off>[\d.]+) tok/s off, (?P<auto>[\d.]+) tok/s auto, ")
LONGEST_MATCH = 2


def real_prompts():
    """Prompts about files of this repository, so that an answer can repeat what it read."""
    def lines(path, first, last):
        return "\n".join((REPOSITORY / path).read_text().splitlines()[first - 1 : last])

    call = '{{"name": "read_file", "arguments": {{"path": "{}", "first": 1, "last": 8}}}}'
    paths = ["src/runtime/sample.rs", "src/runtime/step.rs", "src/runtime/spec.rs"]
    transcript = "\n".join(f"<tool_call>{call.format(path)}</tool_call>\n<result>\n{lines(path, 1, 8)}\n</result>" for path in paths)
    return {
        "rewrite": f"Write this text again. Replace \"llmctl\" by \"the program\" and change nothing else.\n\n{lines('docs/speculation.md', 3, 19)}",
        "code edit": f"Rename the variable `words` to `parts` in this code and print the whole code.\n\n```rust\n{lines('benches/speculation.rs', 130, 160)}\n```",
        "JSON": "List the rows of this table as a JSON array of objects with the keys \"processor\", \"run\" and \"speed\".\n\n"
                + "\n".join(line for line in (REPOSITORY / "docs/speed.md").read_text().splitlines() if "AVX" in line and line.startswith("|")),
        "tool loop": f"You read files by calls like these. Go on with src/runtime/request.rs, src/runtime/receipt.rs and src/runtime/thread.rs.\n\n{transcript}",
        "prose": "Explain in five paragraphs why a computer needs memory, and what would happen without it.",
    }


def prompt_ids(program, model, prompt):
    """The tokens of a prompt in the chat template of the model, or as it is where the model has none."""
    command = [program, "run", "--model", str(model), "--dry-run", "--output", "json", "--no-stdin"]
    out = subprocess.run([*command, prompt], capture_output=True, text=True)
    if out.returncode:
        out = subprocess.run([*command, "--raw", prompt], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)["tokens"]


class LookupDecoding:
    """One context of llama.cpp that decodes scripted texts."""

    def __init__(self, path, threads, size):
        self.sides = {flash: side_by_side.LlamaCpp(str(path), threads, size, flash) for flash in (0, 1)}
        self.contexts = {flash: side.new_context(size, 1) for flash, side in self.sides.items()}

    def decode(self, flash, ids, position, last_only):
        """Computes `ids` from `position` on, with logits of all rows or of the last one. Returns seconds."""
        side, batch = self.sides[flash], self.sides[flash].batch
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = not last_only or row == len(ids) - 1
        batch.n_tokens = len(ids)
        start = time.perf_counter()
        code = side.lib.llama_decode(self.contexts[flash], batch)
        side.lib.llama_synchronize(self.contexts[flash])
        if code:
            sys.exit(f"llama_decode returned {code}")
        return time.perf_counter() - start

    def rate(self, flash, most, prompt, answer):
        """Tokens per second of decoding `answer` with at most `most` drafted tokens a step."""
        side, memory = self.sides[flash], self.sides[flash].lib.llama_get_memory(self.contexts[flash])
        side.lib.llama_memory_clear(memory, True)
        for start in range(0, len(prompt), 512):
            self.decode(flash, prompt[start : start + 512], start, True)
        text, known, seconds = prompt + answer, len(prompt) + 1, 0.0
        index = Matches(text[:known])
        while known < len(text):
            # The last known token has no row yet.
            draft = index.after(text[:known], min(most, len(text) - known - 1)) if most else []
            seconds += self.decode(flash, [text[known - 1], *draft], known - 1, False)
            accepted = next((at for at, token in enumerate(draft) if token != text[known + at]), len(draft))
            if accepted < len(draft):
                start = time.perf_counter()
                side.lib.llama_memory_seq_rm(memory, 0, known + accepted, -1)
                seconds += time.perf_counter() - start
            taken = text[known : known + accepted + 1]
            known += len(taken)
            index.extend(taken)
        return (len(answer) - 1) / seconds


class Matches:
    """The first place of every run of one or two tokens."""

    def __init__(self, ids):
        self.ids, self.first = [], {}
        self.extend(ids)

    def extend(self, ids):
        for token in ids:
            self.ids.append(token)
            for length in range(1, LONGEST_MATCH + 1):
                if len(self.ids) >= length:
                    self.first.setdefault(tuple(self.ids[-length:]), len(self.ids))

    def after(self, ids, most):
        for length in range(LONGEST_MATCH, 0, -1):
            end = self.first.get(tuple(ids[-length:]), len(ids))
            if end < len(ids):
                return ids[end : end + most]
        return []


def bench(program, *options):
    out = subprocess.run([program, *options], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return out.stdout


def build():
    command = ["cargo", "bench", "--locked", "--bench", "speculation", "--no-run", "--message-format", "json"]
    out = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout
    artifacts = [json.loads(line) for line in out.splitlines()]
    return next(a["executable"] for a in artifacts if a.get("executable") and a["target"]["name"] == "speculation")


def measure(args, program, theirs, name, text):
    """Medians of llmctl (`off`, `auto`) and of llama.cpp by its settings."""
    rates = {}
    for _ in range(args.repeat):
        out = bench(program, *args.script, f"threads={args.threads}", f"only={name}", "runs=1")
        found = LINE.match(out)
        for key in ("off", "auto"):
            rates.setdefault(key, []).append(float(found[key]))
        for flash in (0, 1):
            for most in (0, *args.drafts):
                rates.setdefault((flash, most), []).append(theirs.rate(flash, most, text["prompt"], text["answer"]))
        print(f"  {name}: {({str(key): round(values[-1], 1) for key, values in rates.items()})}", file=sys.stderr, flush=True)
    return {key: statistics.median(values) for key, values in rates.items()}


def report(name, medians, count):
    theirs = {key: rate for key, rate in medians.items() if isinstance(key, tuple)}
    plain = max(rate for (_, most), rate in theirs.items() if most == 0)
    (_, most), best = max(theirs.items(), key=lambda item: item[1])
    print(f"| {name} | {count} | {medians['off']:.1f} | {medians['auto']:.1f} | {medians['auto'] / medians['off']:.2f} | {plain:.1f} "
          f"| {best:.1f} ({most or 'no'} drafts) | {best / plain:.2f} | {medians['auto'] / best:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=lambda names: names.split(","), help="rewrite, JSON, tool calls, prose; all without it")
    parser.add_argument("--lines", type=int, default=60, help="lines of the source file")
    parser.add_argument("--real", metavar="LLMCTL", help="a built llmctl: texts of the model itself")
    parser.add_argument("--drafts", type=lambda numbers: [int(n) for n in numbers.split(",")], default=[2, 10])
    parser.add_argument("-r", "--repeat", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    args.model = args.model.resolve()
    program = build()
    folder = tempfile.TemporaryDirectory()
    file, prompts = (os.path.join(folder.name, name) for name in ("texts.json", "prompts.json"))
    args.script = [str(args.model), f"lines={args.lines}"]
    if args.real:
        texts = {name: prompt_ids(args.real, args.model, prompt) for name, prompt in real_prompts().items()}
        Path(prompts).write_text(json.dumps(texts))
        args.script = [str(args.model), f"real={prompts}"]
    bench(program, *args.script, f"threads={args.threads}", f"scripts={file}")
    texts = json.loads(Path(file).read_text())
    texts = {name: text for name, text in texts.items() if args.texts is None or name in args.texts}
    longest = max(len(text["prompt"]) + len(text["answer"]) for text in texts.values())
    theirs = LookupDecoding(args.model, args.threads, longest + 64)
    print("| text | tokens | llmctl off | llmctl | ratio | llama.cpp | with lookup | ratio | llmctl / llama.cpp |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, text in texts.items():
        report(name, measure(args, program, theirs, name, text), len(text["answer"]))
    kind = "answers of the model" if args.real else f"{args.lines} lines"
    print(f"{args.threads} threads, {args.repeat} rounds, {kind}, {args.model.name}")


if __name__ == "__main__":
    main()
