"""Scores generated greedy answers on everything that training held out; `python evaluate.py MODEL [OUT]` writes
the table; MODEL is a checkpoint or the GGUF.

Facts: right when every key is there, abstained when guide refuses or is not sure, wrong otherwise. A naive Bayes on
the words of the same training questions stands beside them as the baseline."""

import json
import math
import random
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch

from chat import assistant, result, user
from data import Data, rows
from export import read
from facts import FLAG_FRAMES
from model import Config, Guide

REFUSALS = ["i only know llmctl", "i only answer questions about llmctl", "outside what i know", "not sure", "as far as i know", "i know of no such",
            "llmctl cannot do that", "i cannot answer that"]
TARGETS = {"frames": 95, "synonyms": 85, "free": 75, "follow": 85, "followups": 85, "oos": 80, "tools1": 90, "tools3": 75, "results": 90}
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)


class Item:
    """A conversation to answer, and how to judge the answer: `right`, `abstained` or `wrong`."""

    def __init__(self, messages, judge, tools=()):
        self.messages, self.judge, self.tools = messages, judge, tools


def refused(answer):
    return any(r in answer.lower() for r in REFUSALS)


def contains(answer, key):
    """Keys of one or two letters count as whole words only."""
    if len(key) < 3:
        return re.search(rf"(?<!\w){re.escape(key.lower())}(?!\w)", answer.lower())
    return key.lower() in answer.lower()


def by_keys(keys):
    def judge(answer):
        if all(any(contains(answer, k) for k in ks) for ks in keys):
            return "right"
        return "abstained" if refused(answer) else "wrong"

    return judge


def by_refusal(row):
    def judge(answer):
        # What llmctl lacks may also be answered by the fact that says so.
        lacks = row.get("lacks") and "llmctl is for text" in answer
        return "right" if lacks or refused(answer) or "only llmctl" in answer.lower() else "wrong"

    return judge


def by_call(call):
    def judge(answer):
        found = CALL.findall(answer)
        try:
            made = [json.loads(c) for c in found]
        except ValueError:
            return "wrong"
        if made == [call]:
            return "right"
        # The right tool with other arguments is told apart.
        return "tool" if [m.get("name") for m in made if isinstance(m, dict)] == [call["name"]] else "wrong"

    return judge


def by_skill(row):
    def judge(answer):
        if "json" in row:
            try:
                return "right" if json.loads(answer) == row["json"] else "wrong"
            except ValueError:
                return "wrong"
        return "right" if answer.strip() == row["exact"] else "wrong"

    return judge


def sets(data, seed=5):
    """Every set in full; those that are drawn from grammars have a fixed seed."""
    facts, r = data.facts, random.Random(seed)
    made = {}
    for name, kind, count in (("frames", "frame", 300), ("synonyms", "synonym", 300), ("natural", "natural", 300), ("far", "far", 200), ("typos", "typo", 200)):
        items = []
        while len(items) < count:
            fact = r.choice(facts.list)
            if question := facts.held_question(r, fact, kind):
                items.append(Item([user(question)], by_keys(fact["keys"])))
        made[name] = items
    made["free"] = [Item([user(x["ask"])], by_keys(x["keys"])) for x in rows("free.jsonl")]
    made["new"] = [Item([user(x["ask"])], by_keys(x["keys"])) for x in rows("new.jsonl")]
    made["short"] = [Item([user(x["ask"])], by_keys(x["keys"])) for x in rows("inscope_short.jsonl")]
    made["follow"] = [
        Item([user(facts.question(random.Random(n), fact)), assistant(fact["answers"][0]), user(ask)], by_keys(facts.by_id[f["to"]]["keys"]))
        for n, fact in enumerate(facts.list) for f in fact.get("held_follow", []) if f["to"] in facts.by_id for ask in f["ask"]
    ]
    made["followups"] = [Item([user(t) for t in x["turns"]], by_keys(x["keys"])) for x in rows("followups.jsonl")]
    made["oos"] = [Item([user(x["ask"])], by_refusal(x)) for x in rows("oos.jsonl")]
    made["made up"] = [Item([user(r.choice(FLAG_FRAMES).replace("{x}", facts.made_up(r)))], by_refusal({})) for _ in range(60)]
    calls = rows("tools.jsonl")
    for n in (1, 3):
        made[f"tools{n}"] = [Item([user(x["ask"])], by_call(x["call"]), x["tools"]) for x in calls if len(x["tools"]) == n]
    made["results"] = [
        Item([user(x["ask"]), assistant(calls=[(x["call"]["name"], x["call"]["arguments"])]), result(x["result"])], by_keys(x["keys"]), [x["tool"]])
        for x in rows("results.jsonl")
    ]
    for kind in ("repeat", "spell", "count", "json"):
        made[kind] = [Item([user(x["ask"])], by_skill(x)) for x in rows("skills.jsonl") if x["kind"] == kind]
    return made


def answers(model, codec, prompts, most=110, width=48):
    """Greedy answers; prompts of like length share a batch."""
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    out = [""] * len(prompts)
    for at in range(0, len(order), width):
        part = order[at : at + width]
        for n, tokens in zip(part, model.generate([prompts[n] for n in part], most, {codec.end})):
            out[n] = codec.decode(tokens)
    return out


def converse(model, codec, items):
    """Answers to the last turns; turns before them that no answer follows are answered by the model itself."""
    talks = [[] for _ in items]
    asks = [[m for m in item.messages] for item in items]
    while any(asks):
        waiting = []
        for n, rest in enumerate(asks):
            while rest and not (talks[n] and talks[n][-1]["role"] in ("user", "tool") and rest[0]["role"] == "user"):
                talks[n].append(rest.pop(0))
            if rest:
                waiting.append(n)
        for n, text in zip(waiting, answers(model, codec, [codec.prompt(talks[n], items[n].tools) for n in waiting])):
            talks[n].append(assistant(text))
    return answers(model, codec, [codec.prompt(t, item.tools) for t, item in zip(talks, items)])


def score(model, codec, items):
    """Shares of verdicts, and the answers."""
    texts = converse(model, codec, items)
    verdicts = [item.judge(text) for item, text in zip(items, texts)]
    counts = Counter(verdicts)
    return {v: 100 * n / len(items) for v, n in counts.items()}, list(zip(items, texts, verdicts))


class Bayes:
    """The baseline: words of a question vote for facts or for a refusal."""

    def __init__(self, data, per_fact=150, seed=3):
        r = random.Random(seed)
        self.counts, self.total = defaultdict(Counter), Counter()
        self.answer = {f["id"]: f["answers"][0] for f in data.facts.list} | {"?": data.facts.oos_answers[0]}
        for fact in data.facts.list:
            for _ in range(per_fact):
                self.add(fact["id"], data.facts.question(r, fact))
        for _ in range(20 * per_fact):
            self.add("?", data.facts.unknown(r)[0]["content"])
        self.vocabulary = {w for c in self.counts.values() for w in c}

    @staticmethod
    def words(text):
        return re.findall(r"[a-z0-9_/.-]+", text.lower())

    def add(self, label, text):
        for word in self.words(text):
            self.counts[label][word] += 1
            self.total[label] += 1

    def __call__(self, text):
        known = [w for w in self.words(text) if w in self.vocabulary]
        likelihood = lambda l: sum(math.log((self.counts[l][w] + 0.1) / (self.total[l] + 0.1 * len(self.vocabulary))) for w in known)
        return self.answer[max(self.counts, key=likelihood)]


def load(path):
    """A model and the tokens that it has seen, from a checkpoint or from the GGUF with its rounded weights."""
    if str(path).endswith(".gguf"):
        weights, config, tokens = read(path)
    else:
        saved = torch.load(path, map_location="cpu")
        weights, config, tokens = saved["weights"], Config(**saved["config"]), saved["tokens"]
    model = Guide(config)
    model.load_state_dict(weights)
    return model.eval(), tokens


def main():
    data = Data()
    model, tokens = load(sys.argv[1])
    bayes = Bayes(data)
    everything = sets(data)
    report, details = {}, []
    lines = [f"After {tokens / 1e6:.1f}M tokens.", "", "| set | items | right | abstained | wrong | target | bag of words |", "|---|---|---|---|---|---|---|"]
    for name, items in everything.items():
        shares, each = score(model, data.codec, items)
        is_asked = all(len(i.messages) == 1 and not i.tools for i in items) and name not in ("repeat", "spell", "count", "json")
        baseline = 100 * sum(i.judge(bayes(i.messages[0]["content"])) == "right" for i in items) / len(items) if is_asked else None
        report[name] = {"items": len(items), **shares, "bag_of_words": baseline, "target": TARGETS.get(name)}
        wrong = 100 - shares.get("right", 0) - shares.get("abstained", 0)
        cell = lambda v: "" if v is None else f"{v:.0f}%"
        lines.append(f"| {name} | {len(items)} | {shares.get('right', 0):.0f}% | {shares.get('abstained', 0):.0f}% | {wrong:.0f}% | {cell(TARGETS.get(name))} | {cell(baseline)} |")
        details += [{"set": name, "messages": [m["content"] for m in i.messages], "answer": a, "verdict": v} for i, a, v in each]
    print("\n".join(lines))
    if len(sys.argv) > 2:
        out = Path(sys.argv[2])
        out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        out.with_suffix(".json").write_text(json.dumps({"tokens": tokens, "sets": report}, indent=1) + "\n")
        out.with_suffix(".jsonl").write_text("".join(json.dumps(d, ensure_ascii=False) + "\n" for d in details))


if __name__ == "__main__":
    main()
