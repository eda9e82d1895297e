"""Ollama's Python client against a running server: `python ollama_python.py BASE_URL API_KEY`, as openai_python.py.

The server's model has random weights, so nothing here asks for sense: only for shapes, order, and what is enforced.
"""

import json
import sys
from typing import Literal

import ollama
from pydantic import BaseModel, Field

from checks import check, run

BASE_URL, API_KEY = sys.argv[1:3]
HOST = BASE_URL.removesuffix("/v1")
client = ollama.Client(host=HOST, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120)
MODEL = client.list().models[0].model
USER = [{"role": "user", "content": "Say something: übung, 日本, 🦀."}]
SHORT = {"num_predict": 12, "temperature": 0.5, "seed": 1}


class Light(BaseModel):
    colour: Literal["red", "green"]
    seconds: int = Field(ge=0, le=99)


def get_weather(city: str, days: int) -> str:
    """The weather of a city

    Args:
      city: The city
      days: How many days
    """
    return f"{city}: rain for {days} days"


def refused(call, status, words):
    try:
        call()
    except ollama.ResponseError as error:
        assert error.status_code == status and words in error.error, error
    else:
        raise AssertionError(f"not refused: {words}")


@check
def models_are_listed_shown_and_running():
    listed = client.list().models[0]
    assert listed.size > 0 and listed.details.format == "safetensors", listed
    shown = client.show(MODEL)
    assert shown.modelinfo["general.architecture"] == listed.details.family, shown
    assert {"completion", "tools"} <= set(shown.capabilities) and "im_start" in shown.template, shown
    running = client.ps().models[0]
    assert running.model == MODEL and running.size_vram == 0 and running.context_length > 0, running
    refused(lambda: client.show("no-such-model"), 404, "no-such-model")


@check
def a_chat_has_counts_and_times():
    answer = client.chat(MODEL, USER, options=SHORT)
    assert answer.done and answer.done_reason in ("stop", "length") and answer.model == MODEL, answer
    assert answer.message.role == "assistant" and answer.prompt_eval_count > 10, answer
    assert answer.total_duration >= answer.eval_duration > 0 and answer.load_duration >= 0, answer


@check
def a_stream_says_what_the_whole_answer_says():
    whole = client.chat(MODEL, USER, options=SHORT).message.content
    parts = list(client.chat(MODEL, USER, options=SHORT, stream=True))
    assert "".join(part.message.content for part in parts) == whole
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12 or parts[-1].done_reason == "stop", parts[-1]


@check
def a_schema_is_enforced():
    answer = client.chat(MODEL, USER, format=Light.model_json_schema(), options={"seed": 1})
    Light.model_validate_json(answer.message.content)
    answer = client.generate(MODEL, "An object", format="json", options={"seed": 1, "num_predict": 40})
    assert answer.response.lstrip().startswith("{"), answer


@check
def a_tool_is_called_and_its_result_taken():
    asked = dict(tools=[get_weather], options={"seed": 3, "num_predict": 80})
    answer = client.chat(MODEL, USER, **asked)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}}
    history = USER + [
        answer.message,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo", 2)},
        {"role": "user", "content": "And?"},
    ]
    if answer.message.tool_calls:
        history.insert(2, {"role": "tool", "content": "rain"})
    again = client.chat(MODEL, history, **asked)
    assert again.done, again


@check
def a_call_is_an_object():
    with_choice = {"model": MODEL, "messages": USER, "tools": [
        {"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}}}],
        "tool_choice": "required", "stream": False}
    answer = client._client.post("/api/chat", json=with_choice).json()
    function = answer["message"]["tool_calls"][0]["function"]
    assert function["name"] == "get_weather" and function["arguments"] == {"city": "Oslo"}, answer


@check
def a_conversation_goes_on_with_its_context():
    first = client.generate(MODEL, "One", options=SHORT)
    assert first.context and first.done, first
    second = client.generate(MODEL, "Two", context=first.context, options=SHORT)
    assert second.prompt_eval_count > first.prompt_eval_count + first.eval_count, second
    chat = [{"role": "user", "content": "One"}, {"role": "assistant", "content": first.response}, {"role": "user", "content": "Two"}]
    assert client.chat(MODEL, chat, options=SHORT).message.content == second.response


@check
def a_raw_text_has_no_template():
    raw = client.generate(MODEL, "Once", raw=True, options=SHORT)
    assert raw.context is None and raw.prompt_eval_count < 8, raw


@check
def log_probabilities_are_told():
    answer = client.chat(MODEL, USER, options=SHORT, logprobs=True, top_logprobs=2)
    assert answer.logprobs and all(len(entry.top_logprobs) == 2 for entry in answer.logprobs), answer
    parts = client.chat(MODEL, USER, options=SHORT, logprobs=True, top_logprobs=2, stream=True)
    tokens = [entry.token for part in parts for entry in part.logprobs or []]
    assert tokens == [entry.token for entry in answer.logprobs], tokens


@check
def a_model_is_loaded_without_a_text():
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"


@check
def what_cannot_be_done_is_refused_by_name():
    refused(lambda: client.chat(MODEL, USER, options={"mirostat": 9}), 400, "mirostat")
    refused(lambda: client.chat(MODEL, USER, options={"no_such": 2}), 400, "options.no_such")
    refused(lambda: client.generate(MODEL, "x", template="{{ .Prompt }}"), 400, "template")
    refused(lambda: client.chat(MODEL, [{"role": "user", "content": "x", "images": ["aGk="]}]), 400, "images")
    refused(lambda: client.embed(MODEL, "x"), 400, "embeddings")
    refused(lambda: client.generate(MODEL, "x " * 60000, raw=True), 400, "context")
    refused(lambda: client.delete(MODEL), 403, "llmctl models rm")
    refused(lambda: client.copy(MODEL, "other"), 403, "--alias")
    refused(lambda: client.pull("org/repo"), 403, "--allow-pull")
    assert client.pull(MODEL).status == "success"


@check
def an_error_within_a_stream_is_raised():
    refused(lambda: list(client.chat(MODEL, USER, options={"mirostat": 9}, stream=True)), 400, "mirostat")
    stranger = ollama.Client(host=HOST)
    refused(lambda: stranger.list(), 401, "API key")


run()
