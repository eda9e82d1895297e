"""Fills the model card with what a run has measured: `python card.py FOLDER`, after `evaluate.py FOLDER/guide.pt FOLDER/scores`."""

import json
import re
import sys
from pathlib import Path

from data import Data, rows

HERE = Path(__file__).parent
CARD = HERE.parent / "README.md"
TUNE = json.loads((HERE / "tune.json").read_text())


def fill(text, name, content):
    """Replaces what stands between the marks of a part."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
    assert pattern.search(text), name
    return pattern.sub(lambda m: m[1] + content.rstrip() + "\n" + m[2], text)


def run_facts(log):
    """What the long run was."""
    last = log[-1]
    digest = next((r["hash"] for r in reversed(log) if "hash" in r), "")
    pace = [r["pace"] for r in log if "pace" in r]
    return "\n".join([
        f"- tokens seen: {last['tokens']:,} in {last['steps']:,} steps, {last['seconds'] / 3600:.1f} hours, {sum(pace) // len(pace):,} tokens/s on average",
        f"- seed 20261122; SHA-256 chained over the token ids of all chunks: `{digest}`",
    ])


def tune_facts(log, begun):
    """What was added to the shipped weights of `begun` tokens, the last time."""
    last = log[-1]
    return "\n".join([
        f"- tuned: {last['tokens'] - begun:,} further tokens in {last['steps']:,} steps, from the rounded weights of {begun:,} tokens",
        f"- {len(TUNE['often'])} facts drawn {TUNE['times']} times as often as the other {len(Data().facts.list) - len(TUNE['often'])}; highest rate {TUNE['rate']} of the long run's; share of the tuned weights {TUNE['blend']}",
    ])


def counts():
    facts = Data().facts
    phrases = sum(len(f["do"]) + len(f["ask"]) + len(f.get("thing", [])) for f in facts.list)
    tests = sum(len(rows(p.name)) for p in sorted((HERE.parent / "tests").glob("*.jsonl")))
    return "\n".join([
        f"- {len(facts.list)} facts with {phrases:,} phrases, most of them with alternatives; {len(facts.words)} groups of like words",
        f"- {len(facts.oos)} topics outside llmctl, {len(facts.lacking)} things that llmctl lacks, {len(facts.talk)} kinds of small talk",
        f"- {tests} test items written by hand, and the held-out phrases of every fact",
    ])


def main():
    folder = Path(sys.argv[1])
    text = CARD.read_text()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    begun = log[0].get("tuned_from")
    text = fill(text, "tune", tune_facts(log, begun)) if begun else fill(text, "run", run_facts(log))
    text = fill(text, "data", counts())
    text = fill(text, "scores", (folder / "scores.md").read_text())
    CARD.write_text(text)


if __name__ == "__main__":
    main()
