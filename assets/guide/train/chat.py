"""Conversations as tokens, exactly as `chat_template.jinja` renders them (`python chat.py` checks that they agree)."""

import json
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Tokens that never are text."""
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens that a parser of answers must see."""
CUT_SHARE = 0.06
"""Of the places between two letters."""


def dumps(value):
    """JSON as the template's `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def result(value):
    return {"role": "tool", "content": value if isinstance(value, str) else dumps(value)}


def assistant(text="", calls=(), reasoning=None):
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def tools_text(tools):
    lines = "".join("\n" + dumps(tool["function"]) for tool in tools)
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>{lines}\n</tools>\n\nTo call one, answer:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def turns(messages, tools=()):
    """(role, text before what the model writes, text that the model writes) per turn."""
    if tools:
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        yield "system", (first["content"] + "\n\n" if first else "") + tools_text(tools), ""
        messages = messages[1:] if first else messages
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            yield "user", f"<tool_response>\n{content}\n</tool_response>", ""
        elif role == "assistant":
            thought = message.get("reasoning_content")
            calls = [
                f'<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {dumps(c["function"]["arguments"])}}}\n</tool_call>'
                for c in message.get("tool_calls", [])
            ]
            body = "\n".join(([content] if content else []) + calls)
            yield "assistant", "<think>\n" if thought else "", (thought + "\n</think>\n\n" if thought else "") + body
        else:
            yield role, content, ""


class Codec:
    """The tokenizer with its special ids, and the hints that questions get (`hints.py`)."""

    def __init__(self, path, hints=None):
        self.plain, self.hints = Tokenizer.from_file(str(path)), hints
        self.start, self.end = self.plain.token_to_id("<|im_start|>"), self.plain.token_to_id("<|im_end|>")
        self.newline = self.plain.encode("\n").ids

    def loose(self, r, text, tail):
        """Tokens of a text some of whose words are cut in two, so that a slip does not make a stranger of a word."""
        cuts = [n for n in range(1, len(text)) if text[n - 1 : n + 1].isalpha() and r.random() < CUT_SHARE]
        text += tail
        return [token for start, end in zip([0, *cuts], [*cuts, len(text)]) for token in self.plain.encode(text[start:end]).ids]

    def encode(self, messages, tools=(), loose=None, hinted=True):
        """Tokens, and for each whether the model is to write it; `loose` draws cuts of words in the users' turns. Where
        there are tools, there are no hints."""
        tokens, written, before = [], [], None
        # Without tools there is a turn for each message; one of training may come with an index of its own.
        indexes = [message.get("hints") for message in messages]
        for n, (role, given, answer) in enumerate(turns(messages, tools)):
            is_users = role == "user" and not given.startswith("<tool_response>")
            tail = ""
            if is_users and hinted and self.hints and not tools:
                tail, before = (indexes[n] or self.hints).line(given, before), given
            if loose and is_users:
                given_ids = self.plain.encode(role + "\n").ids + self.loose(loose, given, tail)
            else:
                given_ids = self.plain.encode(f"{role}\n{given}{tail}").ids
            answer_ids = self.plain.encode(answer).ids
            tokens += [self.start, *given_ids, *answer_ids, self.end, *self.newline]
            is_written = role == "assistant"
            written += [False] * (1 + len(given_ids)) + [is_written] * (len(answer_ids) + 1) + [False] * len(self.newline)
        return tokens, written

    def prompt(self, messages, tools=(), thinking=False):
        """Tokens of a prompt that waits for an answer."""
        tokens, _ = self.encode(messages, tools)
        return tokens + [self.start] + self.plain.encode("assistant\n" + ("<think>\n" if thinking else "")).ids

    def decode(self, tokens):
        return self.plain.decode(tokens, skip_special_tokens=False)


def check():
    """Renders with Jinja and by hand, with and without the last messages."""
    import jinja2

    environment = jinja2.Environment()
    environment.filters["tojson"] = dumps
    template = environment.from_string((HERE.parent / "chat_template.jinja").read_text())
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}}}]
    talk = [
        system("Be brief."),
        user("hi"),
        assistant("Hello!"),
        user("call f"),
        assistant(calls=[("f", {"x": 1.5, "y": "ä"}), ("g", {})]),
        result({"a": 1}),
        result("two"),
        assistant("Done.", reasoning="The question is about f."),
    ]
    for use in ((), tools):
        for skip in (0, 1):
            before = ""
            for n in range(skip + 1, len(talk) + 1):
                mine = "".join(f"<|im_start|>{r}\n{g}{a}<|im_end|>\n" for r, g, a in turns(talk[skip:n], use))
                theirs = template.render(messages=talk[skip:n], tools=list(use) or None)
                assert mine == theirs, (mine, theirs)
                assert theirs.startswith(before), (before, theirs)
                before = theirs
    assert template.render(messages=talk[1:2], add_generation_prompt=True, enable_thinking=True).endswith("assistant\n<think>\n")
    assert template.render(messages=talk[1:2], add_generation_prompt=True).endswith("assistant\n")
    print("rendering agrees and only ever appends")


if __name__ == "__main__":
    check()
