"""The training documents: deterministic chunks from a seed, a chunk's number and a mixture.

`python data.py` prints a few documents of every kind and counts."""

import json
import random
import re
import sys
import tomllib
from pathlib import Path

from chat import Codec, assistant, system, user
from facts import ELSE_TOPIC, SYSTEMS, Facts
from hints import FILE as HINTS
from hints import Hints
from skills import drill, skill
from tools import Tools
from values import Values

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
LONGEST = 1024
"""Longer documents are left out, but for `long` ones."""


def rows(name):
    path = TESTS / name
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def normal(text):
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


CUT = {"fact", "dialog", "unknown", "doubt"}
"""Kinds whose last answer is often cut short."""
HINTED = 0.9
"""Of the documents: guide also answers where it has no hints."""
LOOSE = CUT | {"long", "talk"}
"""Kinds whose users' words are cut in two now and then; where something is to be copied, its tokens stay what they are."""


def held_values():
    """The texts in the tests' calls and objects, and the words to spell: names that training shall not know."""
    given = [row["call"]["arguments"] for row in rows("tools.jsonl") + rows("results.jsonl")] + [row.get("json", {}) for row in rows("skills.jsonl")]
    spelt = {row["exact"].replace("-", "").lower() for row in rows("skills.jsonl") if row["kind"] == "spell"}
    return spelt | {str(v).lower() for values in given for v in values.values() if isinstance(v, str)}


def daily_texts():
    """Phrases of daily language: what is asked about the rest of the world."""
    parts = (tomllib.loads((HERE / f"language/{name}.toml").read_text())[name] for name in ("oos", "near"))
    return [ask for part in parts for entry in part for ask in entry["ask"] if entry.get("kind") != "absent"]


class Held:
    """What tests hold out: their questions and their tools' names."""

    def __init__(self, facts):
        self.tool_names = {t["function"]["name"] for row in rows("tools.jsonl") + rows("results.jsonl") for t in row.get("tools") or [row["tool"]]}
        asks = [row["ask"] for n in ("free", "new", "inscope_short", "oos", "skills", "tools", "results") for row in rows(n + ".jsonl")]
        asks += [turn for row in rows("followups.jsonl") for turn in row["turns"]]
        asks += [p for f in facts.list for p in f["held_do"] + f["held_ask"]]
        asks += [p for f in facts.list for follow in f.get("held_follow", []) for p in follow["ask"]]
        # Key words of up to three ("seed", "exit code 4") are what anybody types, held out or not.
        self.asks = {normal(a) for a in asks if len(normal(a).split()) > 3}

    def has(self, messages, tools=()):
        """Whether a user of these messages says what a test says, or a tool is a test's."""
        is_asked = any(m["role"] == "user" and normal(m["content"]) in self.asks for m in messages)
        return is_asked or any(t["function"]["name"] in self.tool_names for t in tools)



class Data:
    """Draws documents and packs them into chunks."""

    def __init__(self, tokenizer=HERE / "tokenizer.json", hinted=True):
        self.values = Values(held_values(), daily_texts())
        hints = Hints() if hinted and HINTS.exists() else None
        self.facts = Facts(self.values, hints)
        self.held = Held(self.facts)
        self.tools = Tools(self.values, self.held.tool_names)
        self.codec = Codec(tokenizer, hints) if Path(tokenizer).exists() else None
        if self.codec:
            vocabulary = self.codec.plain.get_vocab()
            self.pieces = sorted(p.lstrip("Ġ") for p in vocabulary if re.fullmatch(r"Ġ?[A-Za-z]{2,}", p))
        else:
            self.pieces = self.values.things

    # ---- documents: (messages, tools)

    def fact(self, r):
        fact = r.choice(self.facts.pool)
        messages = self.facts.asked(r, fact)
        if r.random() < 0.06:
            messages[-1] = assistant(messages[-1]["content"], reasoning=self.facts.topic_of(fact))
        return messages, ()

    def dialog(self, r):
        return self.facts.dialog(r, r.choice([1, 1, 1, 2, 2, 3])), ()

    def long(self, r):
        return self.facts.dialog(r, r.randrange(8, 16)), ()

    def unknown(self, r):
        messages = self.facts.unknown(r)
        if r.random() < 0.06:
            messages[-1] = assistant(messages[-1]["content"], reasoning=f"The question is about {ELSE_TOPIC}.")
        return messages, ()

    def doubt(self, r):
        return self.facts.doubt(r), ()

    def talk(self, r):
        return self.facts.greeting(r), ()

    def words(self, r):
        return self.facts.word_drill(r), ()

    def drill(self, r):
        return drill(r, self.values, self.pieces), ()

    def skill(self, r):
        messages = skill(r, self.values)
        return messages + skill(r, self.values) if r.random() < 0.3 else messages, ()

    def tool(self, r):
        """Now and then a question in between that no tool answers."""
        aside = lambda r: self.facts.unknown(r) if r.random() < 0.5 else self.facts.asked(r, r.choice(self.facts.list))
        messages, tools = self.tools.document(r, r.choice([1, 2, 2, 3, 3, 4]), aside)
        if r.random() < 0.05:
            names = "".join(c["function"]["name"] for c in messages[1].get("tool_calls", []))
            if names:
                messages[1]["reasoning_content"] = f"The question is about {names}."
        return messages, tools

    def tool_one(self, r):
        """One tool and nothing beside it: the short form with which copying begins."""
        return self.tools.document(r, 1)

    def document(self, r, kind):
        messages, tools = getattr(self, kind)(r)
        if r.random() < (0.3 if tools else 0.12) and kind not in ("drill", "words"):
            messages = [system(r.choice(SYSTEMS)), *messages]
        return messages, tools

    def allowed(self, r, kind):
        """A document without any question or tool of a test."""
        messages, tools = self.document(r, kind)
        return self.allowed(r, kind) if self.held.has(messages, tools) else (messages, tools)

    def cut(self, r, tokens, written):
        """Leaves the last answer out behind its first tokens: which fact is meant shows there, and the rest of the
        answer is learnt long before the wordings of its questions are."""
        begin = len(tokens) - 1
        while not written[begin]:
            begin -= 1
        while written[begin]:
            begin -= 1
        end = begin + 1 + r.randrange(5, 15)
        return tokens[:end], written[:end]

    def plain(self, r, kind):
        """Tokens of a document and which of them the model is to write."""
        return self.codec.encode(*self.allowed(r, kind))

    def varied(self, r, kind):
        """As `plain`, with words cut in two, with the answer cut short, or with all of it to be predicted."""
        is_loose, hinted = kind in LOOSE and r.random() < 0.3, r.random() < HINTED
        tokens, written = self.codec.encode(*self.allowed(r, kind), loose=r if is_loose else None, hinted=hinted)
        if r.random() < 0.1:
            return tokens, [True] * len(written)
        if kind in CUT and r.random() < 0.65:
            return self.cut(r, tokens, written)
        return tokens, written

    def chunk(self, seed, number, shares, size, draw=None):
        """About `size` tokens: a list of (kind, tokens, targets' mask). Every kind gets its share of the tokens."""
        draw = draw or self.varied
        r = random.Random(f"{seed}/{number}")
        spent = dict.fromkeys(shares, 0)
        documents = []
        while sum(spent.values()) < size:
            kind = min(shares, key=lambda k: (spent[k] + 1) / shares[k])
            tokens, written = draw(r, kind)
            if len(tokens) <= (2 * LONGEST if kind == "long" else LONGEST):
                spent[kind] += len(tokens)
                documents.append((kind, tokens, written))
        return documents


KINDS = ["fact", "dialog", "long", "unknown", "doubt", "talk", "words", "drill", "skill", "tool", "tool_one"]


def main():
    data = Data()
    r = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for kind in KINDS:
        for _ in range(4):
            messages, tools = data.allowed(r, kind)
            print(f"--- {kind}", *(t["function"] for t in tools), sep="\n")
            for m in messages[:6]:
                print(f"{m['role']}: {m['content']}", *(c["function"] for c in m.get("tool_calls", [])), m.get("reasoning_content", ""))
    print(len(data.facts.list), "facts")


if __name__ == "__main__":
    main()
