"""The official Python client's Responses API against a running server: `python responses_python.py BASE_URL API_KEY`.

Every object and every event is validated against the models of Open Responses (`openresponses-types`) too. The server's model has
random weights, so nothing here asks for sense. Prints one line per check and ends with the number that passed; any failure is an
exception.
"""

import copy
import json
import re
import sys
from typing import Literal

import openai
import openresponses_types.types as published
from openai import OpenAI
from pydantic import BaseModel, Field

from checks import check, run

BASE_URL, API_KEY = sys.argv[1:3]
client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
TEXT = "Say something: übung, 日本, 🦀."
WEATHER = {
    "type": "function",
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
    "strict": True,
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin" LF line{1,3} "*** End"\nline: "+" /[ab"\\\\]{0,4}/ LF\n%import common.LF\n',
    },
}
# Of an event's name the published model; reasoning has another name there.
EVENTS = {}
for model in vars(published).values():
    if isinstance(model, type) and issubclass(model, BaseModel) and model.__name__.endswith("StreamingEvent"):
        EVENTS[list(model.model_fields["type"].annotation)[0].value] = model
RENAMED = {"response.reasoning_text.delta": "response.reasoning.delta", "response.reasoning_text.done": "response.reasoning.done"}
# OpenAI's own additions.
UNPUBLISHED = {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"}


class Light(BaseModel):
    colour: Literal["red", "green"]
    seconds: int = Field(ge=0, le=99)


def published_form(response):
    """A response without what the published models lack: custom tools, and the schema of a format (they only take null there)."""
    response = copy.deepcopy(response)
    response["tools"] = [tool for tool in response["tools"] if tool["type"] == "function"]
    response["output"] = [item for item in response["output"] if item["type"] != "custom_tool_call"]
    if response["text"]["format"]["type"] == "json_schema":
        response["text"]["format"]["schema"] = None
    if not isinstance(response["tool_choice"], str) and response["tool_choice"]["type"] == "custom":
        response["tool_choice"] = "auto"
    return response


def valid(response):
    data = response.to_dict(mode="json") if not isinstance(response, dict) else response
    published.ResponseResource.model_validate(published_form(data))
    return response


def valid_events(events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        event = copy.deepcopy(event)
        event["type"] = RENAMED.get(event["type"], event["type"])
        if event["type"] in UNPUBLISHED or event.get("item", {}).get("type") == "custom_tool_call":
            continue
        if "response" in event:
            event["response"] = published_form(event["response"])
        EVENTS[event["type"]].model_validate(event)


def raw_events(**request):
    events = client.responses.create(model=MODEL, stream=True, **request)
    return [event.to_dict(mode="json") for event in events]


@check
def answers_are_valid():
    answer = valid(client.responses.create(model=MODEL, input=TEXT, max_output_tokens=12, temperature=0.7, metadata={"a": "b"}))
    assert isinstance(answer.output_text, str) and answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.id.startswith("resp_") and answer.status in ("completed", "incomplete")


@check
def every_event_is_valid():
    for request in [
        {"input": TEXT, "max_output_tokens": 16},
        {"input": TEXT, "max_output_tokens": 16, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"input": TEXT, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 600},
        {"input": TEXT, "tools": [PATCH], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 600},
        {"input": TEXT, "reasoning": {"effort": "high", "summary": "auto"}, "max_output_tokens": 30},
    ]:
        valid_events(raw_events(**request))


@check
def the_stream_helper_sees_the_whole_answer():
    request = {"model": MODEL, "input": TEXT, "max_output_tokens": 24, "temperature": 0.7, "seed": 7}
    seed = {"seed": request.pop("seed")}
    whole = client.responses.create(**request, extra_body=seed)
    with client.responses.stream(**request, extra_body=seed) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    events = raw_events(input=TEXT, max_output_tokens=24, temperature=0.7, extra_body=seed)
    final = events[-1]["response"]
    assert "".join(deltas) == whole.output_text
    assert [part["text"] for item in final["output"] for part in item.get("content", []) if part["type"] == "output_text"] == [whole.output_text]
    assert final["usage"]["output_tokens"] == whole.usage.output_tokens


@check
def formats_are_parsed():
    answer = client.responses.parse(model=MODEL, input=TEXT, text_format=Light)
    assert isinstance(valid(answer).output_parsed, Light)
    with client.responses.stream(model=MODEL, input=TEXT, text_format=Light) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Light)


@check
def functions_are_called_and_answered():
    request = {"model": MODEL, "tools": [WEATHER], "parallel_tool_calls": False, "max_output_tokens": 600}
    with client.responses.stream(input=TEXT, tool_choice="required", **request) as stream:
        answer = stream.get_final_response()
    call = [item for item in answer.output if item.type == "function_call"][0]
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    items = [{"role": "user", "content": TEXT}, *[item.to_dict(mode="json") for item in answer.output]]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    valid(client.responses.create(input=items, tool_choice="none", **request))


@check
def texts_of_custom_tools_follow_their_grammar():
    for seed in range(3):
        answer = client.responses.create(
            model=MODEL, input=TEXT, tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}, max_output_tokens=900,
            temperature=1.0, extra_body={"seed": seed},
        )
        calls = [item for item in valid(answer).output if item.type == "custom_tool_call"]
        assert re.fullmatch(r'\*\*\* Begin\n(\+[ab"\\]{0,4}\n){1,3}\*\*\* End', calls[0].input), calls


@check
def responses_are_stored():
    first = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens, second.usage
    found = valid(client.responses.retrieve(second.id))
    assert found.output_text == second.output_text and found.previous_response_id == first.id
    client.responses.delete(second.id)
    for gone in (second.id, "resp_unknown"):
        try:
            client.responses.retrieve(gone)
        except openai.NotFoundError:
            pass
        else:
            raise AssertionError("a deleted response was found")
    try:
        client.responses.create(model=MODEL, input="?", previous_response_id=second.id)
    except openai.NotFoundError as error:
        assert error.code == "previous_response_not_found", error
    else:
        raise AssertionError("a deleted response was continued")


@check
def input_tokens_are_counted():
    count = client.responses.input_tokens.count(model=MODEL, input=TEXT, instructions="Be brief.")
    answer = client.responses.create(model=MODEL, input=TEXT, instructions="Be brief.", max_output_tokens=1, store=False)
    assert count.input_tokens == answer.usage.input_tokens
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


@check
def refusals_name_the_item():
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}
    try:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": "x"}, image], stream=True)
    except openai.BadRequestError as error:
        assert error.param == "input[1].content[0].image_url", error
    else:
        raise AssertionError("an image was taken")


run()
