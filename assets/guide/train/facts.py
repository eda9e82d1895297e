"""What guide knows: facts with their wordings, small talk, and the many things that it does not know."""

import json
import re
import tomllib
from pathlib import Path

import grammar
import world
from chat import assistant, user
from grammar import casual, expand, soup, thin, typos
from hints import HINT_WORDS, PARTS, among
from values import invented

EXAMPLES = ["can you give an example?", "show me an example", "example?", "give me an example please", "an example would help", "how would that look?",
            "like what?", "for example?", "and a concrete one?", "what would I type?", "show me", "how exactly?", "what does that look like?",
            "got an example?", "could you show me the command?", "example please", "an example of that", "the exact command?"]
AGAINS = ["say that differently", "I don't get it", "other words please", "explain again", "can you rephrase?", "I did not understand that", "what?",
          "again please", "huh?", "I am not sure that I understand", "once more, differently", "in other words?"]
UNSURE = "I am not sure. See `llmctl help`."
ELSE_TOPIC = "something else"
SYSTEMS = ["You are guide, the model built into llmctl.", "You are a helpful assistant.", "Answer briefly.", "Be brief.", "You are a friendly helper.",
           "Answer in one sentence.", "You help with llmctl.", "Be polite and exact.", "You are an assistant in a terminal."]
FLAG_FRAMES = ["what does {x} do?", "{x}", "what is {x}?", "how do I use {x}?", "explain {x}", "what is {x} for?", "tell me about {x}", "{x}?",
               "when do I use {x}?", "help on {x}", "meaning of {x}", "does {x} exist?", "I tried {x}"]
CHAT_ALIASES = "branches bye clear compact context continue copy delete edit exit export file fork help json load ls model new q quit read regen".split()
CODES = {65, 66, 69, 70, 74, 75, 77, 78, 130, 137, 141, 143}
STRANGE = 0.2
"""Of the questions about facts."""
DOUBTS = Path(__file__).parent / "language/doubts.jsonl"
"""Questions `of` a fact, perhaps `after` another; `sure` says that guide answered rightly without having met them."""
CUTS = ["how do I", "what is", "can you", "I want to", "is there", "the", "and then", "how to", "what does", "where", "why", "but", "if I", "so", "when"]


def load(folder, name):
    return tomllib.loads((folder / name).read_text())


class Facts:
    """All that the writers' files say, and how questions are drawn from it."""

    def __init__(self, values, hints=None, here=Path(__file__).parent):
        self.values, self.hints, self.partial = values, hints, []
        language = here / "language"
        self.words = load(language, "words.toml")["words"]
        self.list = [f for p in sorted((here / "facts").glob("*.toml")) for f in tomllib.loads(p.read_text())["fact"]]
        self.by_id = {f["id"]: f for f in self.list}
        assert len(self.by_id) == len(self.list), "an id occurs twice"
        for more in load(language, "wordings.toml")["wordings"]:
            for name in ("do", "thing", "ask", "follow"):
                self.by_id[more["id"]][name] = self.by_id[more["id"]].get(name, []) + more.get(name, [])
        self.merge(load(language, "merge.toml")["merge"])
        self.part()
        self.hint_of = json.loads(HINT_WORDS.read_text()) if hints else {}
        self.pool = self.list
        refusals = load(language, "refusals.toml")
        self.oos_answers, self.absent_answers = refusals["answers_oos"], refusals["answers_absent"]
        near = load(language, "near.toml")["near"]
        # Near misses in their everyday meaning are outside like any other topic.
        self.oos = load(language, "oos.toml")["oos"] + [n for n in near if n["kind"] == "everyday"] * 2
        self.lacking = [n for n in near if n["kind"] == "absent"]
        self.doubts = [json.loads(line) for line in DOUBTS.read_text().splitlines()]
        self.talk = load(language, "talk.toml")["talk"]
        text = " ".join(p for f in self.list for p in f["do"] + f["ask"])
        self.vocabulary = sorted(set(re.findall(r"[a-z]{3,}", text.lower())))
        named = " ".join(str(f) for f in self.list)
        self.real = set(re.findall(r"--[a-z-]+|/[a-z]+", named)) | {f"/{c}" for c in CHAT_ALIASES}

    def draw_often(self, ids, times):
        """Makes these facts begin documents that many times as often as the others."""
        self.pool = self.list + [self.by_id[id] for id in ids] * (times - 1)

    def merge(self, pairs):
        """Gives the phrases of facts that say the same to one of them."""
        for gone, kept in pairs.items():
            gone, kept = self.by_id[gone], self.by_id[kept]
            self.list.remove(gone)
            for name in ("do", "thing", "ask", "held_do", "held_ask", "follow", "held_follow"):
                kept[name] = kept.get(name, []) + gone.get(name, [])
            self.by_id[gone["id"]] = kept

    def part(self):
        """A phrase that two facts have stays with the first."""
        owner = {}
        for fact in self.list:
            for name in ("do", "thing", "ask"):
                fact[name] = [p for p in fact.get(name, []) if owner.setdefault(p.lower().strip("?. "), fact["id"]) == fact["id"]]

    # ---- questions

    def question(self, r, fact, among=lambda phrase: True):
        """A question of the training data for a fact, from the phrases that count."""
        dos, things, asks = ([p for p in fact.get(name, []) if among(p)] for name in ("do", "thing", "ask"))
        if not dos or not asks:
            dos, things, asks = fact["do"], fact.get("thing", []), fact["ask"]
        kind = r.choices("dta", [len(dos) ** 0.8, 0.7 * len(things) ** 0.8, len(asks) ** 0.8 * 1.2])[0]
        pool = {"d": dos, "t": things, "a": asks}[kind]
        text = expand(r, r.choice(pool), self.words)
        frame = {"d": grammar.DO_FRAMES, "t": grammar.THING_FRAMES, "a": ["{x}"]}[kind]
        k = r.random()
        if k < 0.1:
            other = expand(r, r.choice(dos + asks), self.words) if r.random() < 0.4 else ""
            return casual(r, soup(r, f"{text} {other}"))
        if k > 0.85:
            text = grammar.swap(r, text, self.words)
        text = r.choice(frame).replace("{x}", text)
        if k < 0.22:
            text = thin(r, text, self.vocabulary)
        return casual(r, text)

    def held_question(self, r, fact, kind):
        """A question of a test: `frame`, `typo`, `synonym` (the thesaurus' held words), `natural` or `far` (the
        writers' own; the first two of each fact are far from all that training says)."""
        dos, things = fact["do"], fact.get("thing", [])
        if kind in ("natural", "far"):
            asks, held_dos = (fact["held_ask"][2:3], fact["held_do"][2:3]) if kind == "natural" else (fact["held_ask"][:2], fact["held_do"][:2])
            if r.random() < 0.5:
                return expand(r, r.choice(asks), self.words)
            return r.choice(grammar.DO_FRAMES[:20]).replace("{x}", expand(r, r.choice(held_dos), self.words))
        if kind == "synonym":
            pool = [(p, "{x}") for p in fact["ask"] if "<" in p] + [(p, r.choice(grammar.DO_FRAMES)) for p in dos if "<" in p]
            if not pool:
                return None
            phrase, frame = r.choice(pool)
            return frame.replace("{x}", expand(r, phrase, self.words, held=True))
        if kind == "typo":
            return typos(r, r.choice(grammar.DO_FRAMES[:20]).replace("{x}", expand(r, r.choice(dos), self.words)), 0.3)
        if things and r.random() < 0.3:
            return r.choice(grammar.HELD_THING_FRAMES).replace("{x}", expand(r, r.choice(things), self.words))
        return r.choice(grammar.HELD_DO_FRAMES).replace("{x}", expand(r, r.choice(dos), self.words))

    # ---- turns

    def asked(self, r, fact):
        part = self.drawn_part(r)
        return self.strange(r, self.question(r, fact, among(part)), fact, part)

    def drawn_part(self, r):
        """Half of the questions get the hints of an index that does not know their phrases, as is the users' case."""
        return r.randrange(PARTS) if self.partial and r.random() < 0.5 else None

    def strange(self, r, text, fact, part, before=None):
        """A question, now and then with words in it that nobody knows: then the hints are what is left to go by, and
        where they miss the fact too, doubt."""
        answer, hints = fact["answers"][0], self.hints if part is None else self.partial[part]
        if hints and r.random() < STRANGE:
            text = grammar.estrange(r, text, self.values)
            if self.hint_of[fact["id"]] not in hints.of(text, before):
                answer = UNSURE
        return [user(text) | ({"hints": hints} if part is not None else {}), assistant(answer)]

    def outside(self, r):
        """A question about anything else in the world."""
        if r.random() < 0.35:
            return [user(casual(r, world.question(r, self.values))), assistant(self.oos_answers[0])]
        entry = r.choice(self.oos)
        return [user(casual(r, expand(r, r.choice(entry["ask"]), self.words))), assistant(self.answer_of(entry, self.oos_answers))]

    def answer_of(self, entry, answers):
        """An entry's own answer, that of the fact it names, or the common one."""
        return self.by_id[entry["fact"]]["answers"][0] if "fact" in entry else entry.get("answers", answers)[0]

    def absent(self, r):
        """A question about what llmctl might have but has not."""
        entry = r.choice(self.lacking)
        return [user(casual(r, expand(r, r.choice(entry["ask"]), self.words))), assistant(self.answer_of(entry, self.absent_answers))]

    def unsure(self, r):
        """Made-up flags and commands, cut questions, noise: better no answer than a wrong one."""
        k = r.random()
        if k < 0.55:
            text = r.choice(FLAG_FRAMES).replace("{x}", self.made_up(r))
        elif k < 0.75:
            text = " ".join(invented(r) for _ in range(r.randrange(1, 6)))
        elif k < 0.9:
            text = r.choice(CUTS)
        else:
            text = r.choice(FLAG_FRAMES).replace("{x}", invented(r))
        return [user(casual(r, text)), assistant(UNSURE)]

    def made_up(self, r):
        """A flag, chat command, subcommand or exit code that there is not."""
        if r.random() < 0.2:
            return f"exit code {r.choice([c for c in range(5, 256) if c not in CODES])}"
        mark = r.choice(["--", "--", "/", "llmctl "])
        # Words behind "llmctl" may be prose; only invented ones are no command for sure.
        made = mark + (invented(r) if mark == "llmctl " or r.random() < 0.5 else r.choice(self.vocabulary))
        return self.made_up(r) if made in self.real else made

    def greeting(self, r):
        entry = r.choice(self.talk)
        return [user(casual(r, expand(r, r.choice(entry["ask"]), self.words))), assistant(self.answer_of(entry, self.oos_answers))]

    def unknown(self, r):
        k = r.random()
        return self.outside(r) if k < 0.65 else self.absent(r) if k < 0.83 else self.unsure(r)

    def doubt(self, r):
        """A question that guide either knows the answer to or only believes to."""
        is_first = r.random() < 0.6
        row = r.choice([d for d in self.doubts if ("after" not in d) == is_first])
        before = self.asked(r, self.by_id[row["after"]]) if "after" in row else []
        fact, text = self.by_id[row["of"]], casual(r, expand(r, row["ask"], self.words))
        # Hints say of a wording that nobody knows what they say of a user's: where they are right, so is the answer.
        hints = self.hints.of(text, before[0]["content"] if before else None) if self.hints else []
        is_sure = row.get("sure") or hints[:1] == [self.hint_of.get(fact["id"])]
        return [*before, user(text), assistant(fact["answers"][0] if is_sure else UNSURE)]

    def followed(self, r, fact, among=lambda phrase: True):
        """A question that only makes sense after a fact, and the fact that it asks for, or None."""
        follows = [f for f in fact.get("follow", []) if f["to"] in self.by_id]
        if not follows:
            return None
        follow = r.choice(follows)
        asks = [ask for ask in follow["ask"] if among(ask)] or follow["ask"]
        return expand(r, r.choice(asks), self.words), self.by_id[follow["to"]]

    def dialog(self, r, turns):
        """Facts, follow-ups, examples, refusals and small talk in one conversation."""
        fact = r.choice(self.pool)
        messages = (self.greeting(r) if r.random() < 0.12 else []) + self.asked(r, fact)
        for _ in range(turns):
            k = r.random()
            part = self.drawn_part(r)
            if k < 0.6 and (follow := self.followed(r, fact, among(part))):
                ask, fact = follow
                messages += self.strange(r, casual(r, ask), fact, part, messages[-2]["content"])
            elif k < 0.67 and fact.get("example"):
                messages += [user(casual(r, r.choice(EXAMPLES))), assistant(f"For example: `{fact['example']}`")]
            elif k < 0.72:
                messages += [user(casual(r, r.choice(AGAINS))), assistant(r.choice(fact["answers"][1:] or fact["answers"]))]
            elif k < 0.8:
                messages += self.unknown(r)
            elif k < 0.84:
                messages += self.greeting(r)
            else:
                fact = r.choice(self.pool)
                messages += self.asked(r, fact)
        return messages

    # ---- words

    def word_drill(self, r):
        """Pairs of the thesaurus, held words included: the only place where training meets those."""
        names = r.sample(sorted(self.words), 3)
        messages = []
        for name in names:
            group = self.words[name]
            main, every = group["train"][0], group["train"] + group["held"]
            one, other = r.sample(every, 2)
            k = r.random()
            if k < 0.35:
                # Towards one word per group, so that its members come to lie together.
                odd = r.choice(group["train"][1:] + group["held"] * 2)
                ask = r.choice(["another word for {x}?", "what does {x} mean?", "{x} means", "{x} in plain words", "simple word for {x}", "{x} ="])
                messages += [user(ask.replace("{x}", odd)), assistant(main)]
            elif k < 0.6:
                ask = r.choice(["words like {x}?", "synonyms of {x}", "what else is {x} called?"]).replace("{x}", one)
                messages += [user(ask), assistant(", ".join(w for w in every if w != one))]
            elif k < 0.8:
                same = r.random() < 0.5
                second = other if same else r.choice(self.words[r.choice([n for n in self.words if n != name])]["train"])
                ask = r.choice(["does {x} mean the same as {y}?", "is {x} like {y}?"]).replace("{x}", one).replace("{y}", second)
                messages += [user(ask), assistant("yes" if same else "no")]
            else:
                # Two words at once, verb before noun or not: "purge discussion" is "delete session".
                second = self.words[r.choice(sorted(self.words))]
                pair = f"{r.choice(group['held'] + group['train'])} + {r.choice(second['held'] + second['train'])}"
                messages += [user(f"in plain words: {pair}"), assistant(f"{main} + {second['train'][0]}")]
        return messages

    def topic_of(self, fact):
        return f"The question is about {fact['topic']}."
