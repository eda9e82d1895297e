"""The official Python client against a running server: `python openai_python.py BASE_URL API_KEY`.

The server's model has random weights, so nothing here asks for sense: only for shapes, order, and what is enforced (schemas,
tool calls, limits). Prints one line per check and ends with the number that passed; any failure is an exception.
"""

import json
import pathlib
import sys
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from checks import check, run

BASE_URL, API_KEY = sys.argv[1:3]
client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
USER = [{"role": "user", "content": "Say something: übung, 日本, 🦀."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Light(BaseModel):
    colour: Literal["red", "green"]
    seconds: int = Field(ge=0, le=99)


@check
def models_are_listed_and_found():
    assert client.models.retrieve(MODEL).id == MODEL
    try:
        client.models.retrieve("no-such-model")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("an unknown model was found")


@check
def the_first_example_of_the_documentation_runs():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "server.md").read_text()
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    for of_the_page, here in {"http://127.0.0.1:8484/v1": BASE_URL, '"none"': repr(API_KEY), "stream=True": "stream=True, max_tokens=8"}.items():
        assert of_the_page in code, of_the_page
        code = code.replace(of_the_page, here)
    exec(code, {})
    print()


@check
def chat_answers_with_usage():
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


@check
def streams_in_order_and_as_unstreamed():
    whole = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=24, temperature=0.7, seed=7)
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=24, temperature=0.7, seed=7, stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({c.id for c in chunks}) == 1 and len({c.created for c in chunks}) == 1


@check
def a_client_that_leaves_frees_its_place():
    for _ in range(3):
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4).choices


@check
def several_choices_and_logprobs():
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=6, n=3, temperature=1, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 2 and bytes(token.bytes) is not None


@check
def a_required_tool_is_called():
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=300
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    assert arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 7
    after = USER + [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=after, tools=[WEATHER], tool_choice="none", max_tokens=8)
    assert again.choices[0].message.tool_calls is None


@check
def tool_calls_stream():
    named = {"type": "function", "function": {"name": "get_weather"}}
    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], tool_choice=named, max_tokens=300, stream=True
    ):
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert name == "get_weather" and json.loads(arguments)["city"] in ("Oslo", "Rome") and finish == "tool_calls"


@check
def the_parse_helper_gets_what_it_asked_for():
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Light, max_tokens=300)
    light = answer.choices[0].message.parsed
    assert light.colour in ("red", "green") and 0 <= light.seconds <= 99


@check
def completions_work():
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, echo=True, temperature=0)
    assert answer.choices[0].text.startswith("Once") and answer.object == "text_completion"


@check
def sessions_are_warm():
    headers = {"X-Session-Id": "python-client"}
    first = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=8, extra_headers=headers)
    history = USER + [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=history, max_tokens=8, extra_headers=headers)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens, second.usage


@check
def errors_are_the_clients_own():
    def refused(kind, code, **request):
        try:
            client.chat.completions.create(**({"model": MODEL, "messages": USER, "max_tokens": 4} | request))
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError(f"{request} was taken")

    refused(openai.BadRequestError, "invalid_value", temperature=3)
    refused(openai.BadRequestError, "context_length_exceeded", messages=[{"role": "user", "content": "word " * 40_000}])
    refused(openai.BadRequestError, "unsupported_parameter", extra_body={"no_such_parameter": 1})
    refused(openai.UnprocessableEntityError, "invalid_value", messages="not a list")
    try:
        OpenAI(base_url=BASE_URL, api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was taken")


run()
