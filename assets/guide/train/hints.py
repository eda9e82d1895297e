"""Which facts a question may be about: `python hints.py` counts the words of the training's questions, writes
`../hints.bin` and says how often the fact meant is among the hints.

A naive Bayes on words and their first four letters. A fact's hint is one word of the vocabulary; those that are likely
stand behind the user's text ("see: save keep name"), the likeliest first, and guide learns how far to trust them. Where
a task is likelier than any fact, there are none. Scores are whole numbers: llmctl (`src/runtime/hints.rs`) and training
agree to the last bit.

Of what changed since the training (`since` in `language/names.toml`) the index has the answer behind the hint, and where that hint comes
first, a grammar holds guide to it (`Planner::grammar` in `src/runtime/turn/plan.rs`).

Some facts answer the same question at different places ("how do I fork a session" in `chat` and over HTTP). Where another
place's fact comes first and this one's is within reach, they change places, and the prompt names the place, because
guide answers from memory too. A fact that an earlier message of the conversation was about scores lower, so that a
follow-up does not get the same answer again.

The file, little-endian: `LLMHINT2`; u32 counts of labels, features, postings and bytes of text; i16 per label (score of
a feature that its questions never had); two u8 per label (its group of facts that answer the same, from 1, or 0; its
place: 0 other, 1 chat, 2 HTTP); u32 pairs per feature and one more (begin of its text, begin of its postings); u16 label
per posting; u8 score above the label's base per posting; the text: the features in order, then the labels' hints, a line
each, with a tab and the answer where guide has not learnt it.

`language/names.toml` holds questions that came after the training; they are counted here and are in no document. Hints'
words stay those of `language/hint_words.json`, since guide has learnt them, and new facts get one beside them; `python hints.py
--rename` chooses all anew."""

import json
import math
import random
import re
import struct
import sys
import tomllib
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from chat import user
from grammar import casual

FILE = Path(__file__).parent.parent / "hints.bin"
NAMES = Path(__file__).parent / "language/names.toml"
HINT_WORDS = Path(__file__).parent / "language/hint_words.json"
"""The hint of each fact. guide has learnt these words, so that they stay; those of new facts are added."""
EXPECTED = Path(__file__).parent.parent / "hints.jsonl"
"""What questions of the tests get, for llmctl's own tests to compare with."""
MAGIC = b"LLMHINT2"
UNIT = 16
"""Scores per nat."""
ALPHA = 0.05
PER_FACT, PER_FOLLOW, TASKS = 250, 80, 4000
RAREST = 3
"""Features that occur less often are left out."""
MOST, NEAR = 8, 8 * UNIT
"""Hints at most, and how far below the best."""
LONGEST = 64
"""Words of a text that may still be a question about llmctl."""
PLACES = ["other", "chat", "http"]
LINES = ["", "in chat", "over HTTP"]
"""What the prompt says of the place, where that decided."""
TOLD = 3 * UNIT
"""How much lower facts score that the conversation had before."""
PER_NAME = 300
"""Questions drawn for each entry of names.toml."""
WHOLE = 10
"""Words of a question that counts as a whole too: only those of names.toml do, so that their hint stands alone."""
SURE = 50
"""How often a whole question counts."""
PARTS = 4
"""Of the phrases; for training there is also an index without each."""
TALKS = [["I want to serve a model", "how do I put a key on it?"], ["how do I fork a session", "and then how do I see all the forks", "which one am I in?"],
         ["what is KV", "why is it 4G"], ["what is llmctl?", "what is bench?", "what is serve?", "what is run?", "what is chat?"],
         ["what is warm?", "what is a session?", "what is serve?"], ["what is warm?", "what is warm?"]]
"""Conversations that went wrong once."""
TASK = ""
"""The label of what is no question about llmctl's facts: it has no hint."""


def features(text, after=""):
    """The words of a text, the first four letters of the longer ones, the fact that the question before was about, and the
    whole text of up to `WHOLE` words; each once, in no order. None where a text is too long."""
    words = [w for w in (w.rstrip(".-").lower() for w in re.findall(r"[A-Za-z0-9_/.-]+", text)) if w]
    if len(words) > LONGEST:
        return None
    whole = ["=" + " ".join(words)] if 0 < len(words) <= WHOLE else []
    return {*words, *(w[:4] + "*" for w in words if len(w) > 4), *([">" + after] if after else []), *whole}


def part_of(phrase):
    return zlib.crc32(phrase.encode()) % PARTS


def among(part, is_without=False):
    """Whether a phrase is in a part, or is not; all are where there is none."""
    return lambda phrase: part is None or (part_of(phrase) == part) != is_without


class Hints:
    """The index, from its file or as `counted`."""

    def __init__(self, data=None):
        data = data or FILE.read_bytes()
        assert data[:8] == MAGIC
        labels, count, postings, size = struct.unpack_from("<4I", data, 8)
        at = 24
        take = lambda kind, n: np.frombuffer(data, kind, n, at)
        self.base = take("<i2", labels).astype(np.int64)
        at += 2 * labels
        self.groups = [tuple(pair) for pair in take("u1", 2 * labels).reshape(-1, 2).tolist()]
        at += 2 * labels
        starts = take("<u4", 2 * (count + 1)).reshape(-1, 2)[:, 1]
        at += 8 * (count + 1)
        whose = take("<u2", postings)
        at += 2 * postings
        above = take("u1", postings)
        lines = data[at + postings :].decode().split("\n")
        self.names, self.hints = lines[:count], [line.split("\t")[0] for line in lines[count : count + labels]]
        self.row = {name: n for n, name in enumerate(self.names)}
        self.above = np.zeros((count, labels), np.int16)
        for n in range(count):
            part = slice(starts[n], starts[n + 1])
            self.above[n, whose[part]] = above[part]

    def ranked(self, text, after="", place=0, told=()):
        """The labels within reach of the best, the best first, or none; and whether the place decided which is first."""
        found = features(text, after)
        rows = [self.row[f] for f in found or () if f in self.row]
        if not rows:
            return [], False
        scores = self.above[rows].sum(0, dtype=np.int64) + len(rows) * self.base
        scores[list(told)] -= TOLD
        order = [int(n) for n in np.argsort(-scores, kind="stable")[:MOST]]
        order = [n for n in order if scores[n] >= scores[order[0]] - NEAR]
        group, own = self.groups[order[0]]
        same = [n for n in order if self.groups[n] == (group, place)]
        if not place or not group or own == place or not same:
            return order, False
        return [same[0], *(n for n in order if n != same[0])], True

    def told(self, texts, place=0):
        """Per user's message: the hints, and the place where it decided."""
        before, said = "", {}
        for text in texts:
            if text not in said:
                after = self.ranked(before, place=place)[0][:1] if before else []
                told = {found[0] for found, _ in said.values() if found}
                found, is_placed = self.ranked(text, self.hints[after[0]] if after else "", place, told)
                is_task = not found or self.hints[found[0]] == TASK
                said[text] = ([], False) if is_task else (found, is_placed)
            found, is_placed = said[text]
            before = text
            yield [self.hints[n] for n in found if self.hints[n] != TASK], LINES[place] if is_placed else ""

    def of(self, text, before=None):
        """The hints for a user's text, where `before` is what the user said before, as in training: anywhere, and
        whatever was told before."""
        after = self.ranked(before)[0][:1] if before else []
        found, _ = self.ranked(text, self.hints[after[0]] if after else "")
        if not found or self.hints[found[0]] == TASK:
            return []
        return [self.hints[n] for n in found if self.hints[n] != TASK]

    def line(self, text, before=None):
        """What the prompt says behind a user's text."""
        found = self.of(text, before)
        return "\nsee: " + " ".join(found) if found else ""


def examples(data, r, without=None):
    """(label, label of the fact before, question) for every fact and for what is none; nothing that a test asks, nor of
    a part of the phrases."""
    import facts as language
    from skills import skill

    facts = data.facts
    is_free = lambda text: not data.held.has([user(text)])
    for fact in facts.list:
        for _ in range(PER_FACT):
            if is_free(text := facts.question(r, fact, among(without, True))):
                yield fact["id"], "", text
        for _ in range(PER_FOLLOW):
            if (follow := facts.followed(r, fact, among(without, True))) and is_free(text := casual(r, follow[0])):
                yield follow[1]["id"], fact["id"], text
    for n in range(TASKS):
        text = casual(r, r.choice(language.EXAMPLES + language.AGAINS)) if n % 4 == 0 else skill(r, data.values)[0]["content"]
        if is_free(text):
            yield TASK, "", text


def later(data):
    """(label, label of the fact before, question) for the questions that came after the training."""
    names = tomllib.loads(NAMES.read_text())
    for entries, r in (names["name"], random.Random(5)), (names["since"], random.Random(6)):
        for entry in entries:
            things, asks = entry.get("things", []), entry.get("asks", [])
            for _ in range(PER_NAME):
                pool = things if r.randrange(len(things) + len(asks)) < len(things) else asks
                text = r.choice(pool)
                # They come after one another: "what is run?", "and what is serve?".
                after = r.choice(entries)["of"] if r.random() < 0.5 else ""
                yield entry["of"], after, casual(r, r.choice(names["frames"]).replace("{x}", text) if pool is things else text)


def groups():
    """(group, place) of the facts that answer the same question at different places."""
    same = tomllib.loads(NAMES.read_text())["same"]
    return {fact: (n, PLACES.index(place)) for n, group in enumerate(same, 1) for place, facts in group.items() for fact in facts}


def named(data, counts, known=()):
    """A hint for every fact that has none: a word of the vocabulary that its own texts have and others' have not, each given once."""
    words = sorted(p[1:] for p in data.codec.plain.get_vocab() if re.fullmatch(r"Ġ[a-z]{3,}", p))
    total = Counter()
    for count in counts.values():
        total.update(count)
    rank = []
    for fact in data.facts.list:
        own = Counter(re.findall(r"[a-z]+", (fact["id"] + " " + fact["answers"][0]).lower()))
        for word in words:
            seen = counts[fact["id"]][word] + 40 * own[word]
            rank.append((seen * seen / (total[word] + 100), fact["id"], word))
    hints = dict(known)
    taken = set(hints.values())
    for _, fact, word in sorted(rank, key=lambda x: (-x[0], x[1], x[2])):
        if fact not in hints and word not in taken:
            hints[fact] = word
            taken.add(word)
    assert all(fact["id"] in hints for fact in data.facts.list), "more facts than words"
    return {fact["id"]: hints[fact["id"]] for fact in data.facts.list}


def counted(data, seed=3, hints=None, without=None):
    """The index as it is written, of all phrases or without a part of them; the examples; the facts' hints."""
    counts = {fact["id"]: Counter() for fact in data.facts.list} | {TASK: Counter()}
    drawn = list(examples(data, random.Random(seed), without))
    for label, _, text in drawn:
        counts[label].update(f for f in features(text) or () if f[0] != "=")
    if hints is None or any(fact["id"] not in hints for fact in data.facts.list):
        hints = named(data, counts, hints or {}) | {TASK: TASK}
    since = tomllib.loads(NAMES.read_text())["since"]
    hints = hints | {entry["of"]: entry["word"] for entry in since if "word" in entry}
    counts |= {entry["of"]: Counter() for entry in since if "word" in entry}
    for label, after, text in later(data):
        found = features(text) or set()
        counts[label].update(found | ({">" + hints[after]} if after else set()))
        counts[label].update({f: SURE for f in found if f[0] == "="})
    for label, after, _ in drawn:
        if after:
            counts[label][">" + hints[after]] += 1
    total = Counter()
    for count in counts.values():
        total.update(count)
    names = sorted(n for n, c in total.items() if c >= RAREST)
    labels = list(counts)
    kept = set(names)
    sums = [sum(c for n, c in counts[label].items() if n in kept and n[0] != "=") for label in labels]
    base = [round(UNIT * math.log(ALPHA / (s + ALPHA * len(names)))) for s in sums]
    above = lambda c: round(UNIT * math.log((c + ALPHA) / ALPHA))
    postings = [[(n, above(counts[label][name])) for n, label in enumerate(labels) if counts[label][name]] for name in names]
    answers = {entry["of"]: "\t" + entry["answer"] for entry in since}
    text = "\n".join([*names, *(hints[label] + answers.get(label, "") for label in labels)]).encode()
    starts, begin, place = [], 0, 0
    for name, found in zip([*names, ""], [*postings, []]):
        starts += [place, begin]
        place, begin = place + len(name.encode()) + 1, begin + len(found)
    flat = [p for found in postings for p in found]
    parts = [MAGIC, struct.pack("<4I", len(labels), len(names), len(flat), len(text)), struct.pack(f"<{len(base)}h", *base), bytes(n for label in labels for n in groups().get(label, (0, 0))),
             struct.pack(f"<{len(starts)}I", *starts), struct.pack(f"<{len(flat)}H", *(n for n, _ in flat)), bytes(s for _, s in flat), text]
    return b"".join(parts), drawn, hints


def partial(data):
    """Indexes with the hints of the file, each without a part of the phrases."""
    names = data.facts.hint_of | {TASK: TASK}
    return [Hints(counted(data, 4 + part, names, part)[0]) for part in range(PARTS)]


def main():
    from data import Data, rows

    # A rename chooses the words by the questions; otherwise those of old facts stay.
    is_rename = "--rename" in sys.argv or not FILE.exists()
    data = Data(hinted=not is_rename)
    words = None if is_rename else data.facts.hint_of | {TASK: TASK}
    index, drawn, names = counted(data, hints=words)
    FILE.write_bytes(index)
    HINT_WORDS.write_text(json.dumps({fact: word for fact, word in names.items() if fact in data.facts.by_id}, indent=0) + "\n")
    hints, r = Hints(), random.Random(1)
    alone = [[row["ask"]] for row in rows("free.jsonl") + rows("skills.jsonl")]
    talks = alone + [row["turns"] for row in rows("followups.jsonl")] + TALKS
    lines = [{"turns": talk, "place": place, "hints": [list(told) for told in hints.told(talk, place)]} for talk in talks for place in range(3)]
    EXPECTED.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(FILE.stat().st_size, "bytes,", len(hints.names), "features")
    sample = [d for d in r.sample(drawn, 4000) if d[0] != TASK and not d[1]]
    found = [hints.of(text) for _, _, text in sample]
    print("the fact is first", sum(f[:1] == [names[l]] for f, (l, _, _) in zip(found, sample)) / len(sample),
          "among them", sum(names[l] in f for f, (l, _, _) in zip(found, sample)) / len(sample), "of", sum(map(len, found)) / len(sample))
    other = [(text, label) for label, _, text in sample]
    for place, name in enumerate(LINES):
        told = [next(hints.told([text], place)) for text, _ in other]
        print("asked", name or "anywhere", sum(t[0][:1] == [names[label]] for t, (_, label) in zip(told, other)) / len(other), "the place decides", sum(t[1] != "" for t in told) / len(told))


if __name__ == "__main__":
    main()
