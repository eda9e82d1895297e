"""Marks what guide is sure of: `python doubts.py MODEL` answers the questions of `language/doubts.jsonl`, which no other
kind of document has, and notes which answers were right.

Trained on afterwards (kind `doubt`), they teach what a question looks like whose answer would be a guess: those that
were missed are to be answered with "I am not sure"."""

import json
import random
import sys
from pathlib import Path

from chat import assistant, user
from data import Data
from evaluate import Item, by_keys, load, score
from facts import DOUBTS
from grammar import expand


def main():
    data = Data()
    model, _ = load(sys.argv[1])
    facts = data.facts.by_id
    items, r = [], random.Random(4)
    for row in data.facts.doubts:
        before = [user(facts[row["after"]]["ask"][0]), assistant(facts[row["after"]]["answers"][0])] if "after" in row else []
        items.append(Item([*before, user(expand(r, row["ask"], data.facts.words))], by_keys(facts[row["of"]]["keys"])))
    _, answered = score(model, data.codec, items)
    for row, (_, _, verdict) in zip(data.facts.doubts, answered):
        row["sure"] = verdict == "right"
    DOUBTS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data.facts.doubts))
    for after in (False, True):
        rows = [row for row in data.facts.doubts if ("after" in row) == after]
        print("follow-ups" if after else "questions", len(rows), "sure of", sum(row["sure"] for row in rows))


if __name__ == "__main__":
    main()
