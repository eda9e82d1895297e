"""Tool calls and their results through a running `llmctl serve --model guide.gguf`, where the grammar holds calls to the
schemas: `python serve_tools.py URL`. Without the grammar they are scored by `evaluate.py`."""

import json
import sys

from check import as_sent, post
from chat import assistant, result, user
from data import rows
from evaluate import by_keys


def answer(url, messages, tools, choice):
    body = {"messages": [as_sent(m) for m in messages], "tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 160}
    return post(url + "/v1/chat/completions", body)["choices"][0]["message"]


def calls_of(message):
    """Names and arguments; None where the arguments are no JSON."""
    try:
        return [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in message.get("tool_calls") or []]
    except ValueError:
        return None


def main():
    url = sys.argv[1]
    print("| tool calls through serve | items | valid | right tool | exact |", "|---|---|---|---|---|", sep="\n")
    for choice in ("auto", "required"):
        for count in (1, 3):
            items = [row for row in rows("tools.jsonl") if len(row["tools"]) == count]
            made = [calls_of(answer(url, [user(row["ask"])], row["tools"], choice)) for row in items]
            valid = sum(bool(m) for m in made)
            named = sum(bool(m) and m[0]["name"] == row["call"]["name"] for m, row in zip(made, items))
            exact = sum(m == [row["call"]] for m, row in zip(made, items))
            print(f"| {choice}, {count} of them | {len(items)} |", " | ".join(f"{100 * n / len(items):.0f}%" for n in (valid, named, exact)), "|")
    items = rows("results.jsonl")
    right = 0
    for row in items:
        talk = [user(row["ask"]), assistant(calls=[(row["call"]["name"], row["call"]["arguments"])]), result(row["result"])]
        right += by_keys(row["keys"])(answer(url, talk, [row["tool"]], "auto").get("content") or "") == "right"
    print(f"\nResults used: {100 * right / len(items):.0f}% of {len(items)}.")


if __name__ == "__main__":
    main()
