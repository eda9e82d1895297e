"""Checks of the data and of its agreement with llmctl.

`python check.py` looks for the tests' wordings in many documents, and for held-out wordings among the writers' phrases.
`python check.py URL` compares rendered prompts and token ids with those of a running `llmctl serve --model guide`."""

import json
import random
import sys
import urllib.request

from chat import dumps
from data import KINDS, Data, normal
from grammar import expand


def phrases(facts, r):
    """What training may say, as far as a few readings of each phrase show."""
    for fact in facts.list:
        for phrase in fact["do"] + fact["thing"] + fact["ask"] + [p for f in fact.get("follow", []) for p in f["ask"]]:
            yield from (normal(expand(r, phrase, facts.words)) for _ in range(4))
    for entry in facts.oos + facts.lacking + facts.talk:
        for phrase in entry["ask"]:
            yield from (normal(expand(r, phrase, facts.words)) for _ in range(4))


def leaks(data, documents=400):
    r = random.Random(3)
    # Readings that a test has are drawn again by `Data.allowed`; here they are only counted.
    shared = data.held.asks & set(phrases(data.facts, r))
    print(len(shared), "readings of phrases are a test's and are never drawn:", *sorted(shared), sep="\n  ")
    for kind in KINDS:
        for _ in range(documents):
            messages, tools = data.allowed(r, kind)
            assert not data.held.has(messages, tools), messages
    print(documents * len(KINDS), "documents without any question or tool of a test")


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


def as_sent(message):
    """A message as clients send it: arguments of calls as text."""
    # A result names its call; all have one id, since no template prints it.
    calls = [{"id": "c", "type": "function", "function": {**c["function"], "arguments": dumps(c["function"]["arguments"])}} for c in message.get("tool_calls", [])]
    return {**message, **({"tool_calls": calls} if calls else {}), **({"tool_call_id": "c"} if message["role"] == "tool" else {})}


def agrees(data, url, documents=12):
    r = random.Random(9)
    for kind in KINDS:
        for _ in range(documents):
            messages, tools = data.allowed(r, kind)
            asked = messages[:-1]
            body = {"messages": [as_sent(m) for m in asked], **({"tools": list(tools)} if tools else {})}
            theirs = post(url + "/apply-template", body)["prompt"]
            mine = data.codec.prompt(asked, tools)
            assert theirs == data.codec.decode(mine), (theirs, data.codec.decode(mine))
            assert post(url + "/tokenize", {"content": theirs})["tokens"] == mine, theirs
    print(documents * len(KINDS), "prompts and their tokens are the same")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        agrees(Data(), sys.argv[1])
    else:
        leaks(Data())
