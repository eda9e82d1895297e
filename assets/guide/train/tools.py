"""Documents with tools: any name and schema, requests in daily words, arguments copied letter by letter."""

import re
from pathlib import Path

from chat import assistant, result, user
from values import invented

STYLES = [lambda w: "_".join(w)] * 6 + [
    lambda w: w[0] + "".join(x.capitalize() for x in w[1:]),
    lambda w: "".join(x.capitalize() for x in w),
    lambda w: w[-1] + "." + "_".join(w[:-1]),
    lambda w: "-".join(w),
]
TYPES = {"small": "integer", "int": "integer", "digit": "integer", "number": "number", "boolean": "boolean"}
LEADS = ["", "", "", "", "", "please ", "can you ", "could you ", "hey, ", "I'd like you to ", "now ", "ok, ", "would you ", "just ", "hi, ", "next, ", "go on and ", "quick: "]
TAILS = ["", "", "", "", "", " please", " thanks", " now", ".", ", thank you", " for me", " if you can", " right away", ", will you?", " while I wait"]
REQUESTS = [
    "{act}", "please {act}", "can you {act}?", "could you {act}", "I want to {act}", "use {name} to {act}", "use {name}",
    "call {name}", "I need you to {act}", "run {name}", "{act} now", "call the tool {name}", "time to {act}", "let us {act}",
]
PARTS = ["{p} {v}", "{p} {v}", "{p}={v}", "{p}: {v}", "the {p} {v}", "{p} is {v}", "{v} as {p}", "{v} for the {p}"]
ERRORS = ["not found", "timeout", "permission denied", "no connection", "invalid value", "service unavailable", "no such {w}",
          "{w} is closed", "unknown {w}", "too many requests"]
RESULT_KEYS = """status price total temperature time date count name message level speed distance state condition number
seats stock balance eta weight height rating length duration platform gate delay address phone humidity wind score winner
value id code amount size color owner version left free open available ready booked found success""".split()


FAMILIES = Path(__file__).parent / "language/tools.txt"


def families(text):
    """The tools of each family: paragraphs of lines; `#` begins a remark."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [[parse(line) for line in part.splitlines()] for part in re.split(r"\n\s*\n", lines.strip())]


def parse(line):
    name, description, parameters, *asks = line.split("|")
    # An enum's values follow its kind behind one more blank.
    found = re.findall(r"(\w+):(enum \S+|\w+)", parameters)
    return name.split(), description, dict(found), asks


class Tools:
    """Draws tools and requests; `held_names` are the tests' tools, which stay out."""

    def __init__(self, values, held_names):
        self.values = values
        flat = lambda words: "".join(words).lower()
        held = {re.sub(r"[^a-z]", "", name.lower()) for name in held_names}
        parted = ([tool for tool in family if flat(tool[0]) not in held] for family in families(FAMILIES.read_text()))
        self.families = [family for family in parted if family]
        self.domains = [tool for family in self.families for tool in family]

    def schema(self, r, name, description, kinds, about=None):
        """A function definition of the shape that OpenAI's clients send."""
        properties = {}
        describes = r.choice([0.0, 0.5, 1.0])
        for p, kind in kinds.items():
            properties[p] = {"type": TYPES.get(kind, "string")}
            if kind.startswith("enum "):
                properties[p]["enum"] = kind[5:].split(",")
            if r.random() < describes:
                noun = p.replace("_", " ")
                properties[p]["description"] = r.choice(
                    [noun.capitalize(), f"The {noun}", f"Name of the {noun}", f"{noun.capitalize()} to use", f"{noun.capitalize()} of the {about or 'request'}"]
                )
        required = [p for p in kinds] if r.random() < 0.8 else [p for p in kinds if r.random() < 0.7]
        return {"type": "function", "function": {"name": name, "description": description,
                "parameters": {"type": "object", "properties": properties, "required": required}}}

    def living(self, r, tool):
        """A tool of daily life, and what draws requests for it as a person words them."""
        words, description, kinds, asks = tool
        # Another parameter name in a part of the documents: the schema counts, not habit.
        rename = {p: r.choice([f"{p}_{r.choice(['name', 'id', 'value'])}", self.values.word(r)]) if r.random() < 0.15 else p for p in kinds}
        style = r.choice(STYLES)
        k = r.random()
        named = words if k < 0.75 else [*words[:1], invented(r), *words[1:]] if k < 0.88 else [invented(r), invented(r)]
        tool = self.schema(r, style(named), description, {rename[p]: k for p, k in kinds.items()}, words[-1])

        def request():
            args = {p: self.values.draw(r, k) for p, k in kinds.items()}
            form = ask = r.choice(asks)
            for p, v in args.items():
                ask = ask.replace("{" + p + "}", say(v))
            if form.endswith("?"):
                ask = ask[:-1] if r.random() < 0.4 else ask
            elif r.random() < 0.35:
                ask = r.choice(LEADS) + ask + r.choice(TAILS)
            # A value at the beginning keeps its letters.
            ask = ask if form.startswith("{") or r.random() < 0.5 else ask[0].upper() + ask[1:]
            return ask, {rename[p]: v for p, v in args.items()}

        return tool, request

    def made_up(self, r):
        """A tool whose name, parameters and requests are put together from any words."""
        verb, noun = (invented(r) if r.random() < 0.3 else r.choice(self.values.verbs)), self.values.word(r)
        words = [verb, noun] if r.random() < 0.7 else [verb, r.choice(self.values.adjectives), noun]
        name = r.choice(STYLES)(words)
        act = f"{words[0]} {r.choice(['the ', 'a ', ''])}{' '.join(words[1:])}"
        description = r.choice(["{a}", "{a} by name", "Use this to {b}", "{a} for the user", "{a} now", "Tool to {b}"])
        description = description.replace("{a}", act.capitalize()).replace("{b}", act)
        kinds = {}
        for _ in range(r.choice([0, 1, 1, 1, 2, 2, 2, 3])):
            p = self.values.word(r) if r.random() < 0.8 else self.values.word(r) + "_" + self.values.word(r)
            kinds[p] = r.choice(["thing", "thing", "place", "person", "code", "int", "small", "number", "phrase", "date", "slug", "boolean",
                                 "enum " + ",".join(dict.fromkeys(self.values.word(r) for _ in range(3)))])
        tool = self.schema(r, name, description, kinds, noun)
        required = tool["function"]["parameters"]["required"]

        def request():
            args = {p: self.values.draw(r, k) for p, k in kinds.items() if p in required or r.random() < 0.5}
            ask = r.choice(REQUESTS).replace("{act}", act).replace("{name}", name)
            items = list(args.items())
            if r.random() < 0.4:
                r.shuffle(items)
            if len(items) == 1 and r.random() < 0.5 and not isinstance(items[0][1], bool):
                ask = ask.rstrip("?") + r.choice([" for ", " of ", " with ", " in ", " to ", " "]) + say(items[0][1])
            elif items:
                form, spaced = r.choice(PARTS), r.random() < 0.6
                parts = [form.replace("{p}", p.replace("_", " ") if spaced else p).replace("{v}", say(v)) for p, v in items]
                ask = ask.rstrip("?") + r.choice([" with ", " with ", ", ", ": ", " using "]) + r.choice([", ", " and "]).join(parts)
            return ask + r.choice(["", "", "", ".", "!"]), args

        return tool, request

    def some(self, r, count):
        """Tools with their requests: often several of one family, which must be told apart, or of any."""
        if count > 1 and r.random() < 0.45:
            family = r.choice([f for f in self.families if len(f) > 1])
            drawn = [self.living(r, tool) for tool in r.sample(family, min(count, len(family)))]
        else:
            drawn = [self.living(r, r.choice(self.domains)) if r.random() < 0.7 else self.made_up(r) for _ in range(count)]
        r.shuffle(drawn)
        return drawn

    def answer(self, r):
        """What a tool gives back, and the sentence that uses all of it."""
        if r.random() < 0.15:
            error = r.choice(ERRORS).replace("{w}", self.values.word(r))
            return {"error": error}, f"The call failed: {error}."
        if r.random() < 0.08:
            text = self.values.phrase(r)
            return text, f"The result: {text}."
        found = {}
        for _ in range(r.choice([1, 1, 2, 2, 2, 3])):
            key = r.choice(RESULT_KEYS) if r.random() < 0.7 else self.values.word(r)
            if r.random() < 0.2:
                key += "_" + r.choice(["m", "km", "kg", "id", "min", "eur", "c", "percent", "name", "date", "count"])
            kind = r.choice(["int", "number", "number", "thing", "phrase", "date", "time", "place", "person", "boolean", "code", "list"])
            found[key] = [self.values.draw(r, r.choice(["thing", "person"])) for _ in range(r.choice([2, 3]))] if kind == "list" else self.values.draw(r, kind)
        return found, "The result: " + ", ".join(f"{k.replace('_', ' ')} is {say(v)}" for k, v in found.items()) + "."

    def document(self, r, count, aside=None):
        """Requests with `count` tools, several for each, since the list of tools is most of the document; `aside` draws
        a turn that needs none."""
        drawn = self.some(r, count)
        tools = [tool for tool, _ in drawn]
        if any(len({t["function"][key] for t in tools}) < len(tools) for key in ("description", "name")):
            return self.document(r, count, aside)
        messages = []
        for _ in range(r.choice([2, 3, 5]) if count == 1 else r.choice([4, 6, 8])):
            if aside and r.random() < 0.05:
                messages += aside(r)
                continue
            tool, request = r.choice(drawn)
            ask, args = request()
            messages += [user(ask), assistant(calls=[(tool["function"]["name"], args)])]
            if r.random() < 0.35:
                value, text = self.answer(r)
                messages += [result(value), assistant(text)]
        return messages, tools


def say(value):
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(say, value[:-1])) + " and " + say(value[-1])
    return str(value)
