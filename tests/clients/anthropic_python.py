"""Anthropic's official Python client against a running server: `python anthropic_python.py BASE_URL API_KEY`.

As openai_python.py: the server's model has random weights, so only shapes, order and what is enforced are looked at.
"""

import sys
from typing import Literal

import anthropic
from anthropic import Anthropic
from pydantic import BaseModel

from checks import check, run

BASE_URL, API_KEY = sys.argv[1].removesuffix("/v1"), sys.argv[2]
client = Anthropic(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
USER = [{"role": "user", "content": "Say something: übung, 日本, 🦀."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
    },
}


class Light(BaseModel):
    colour: Literal["red", "green"]
    is_on: bool


@check
def models_are_listed_and_found():
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL and model.type == "model" and model.max_input_tokens > 0, model
    try:
        client.models.retrieve("no-such-model")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("an unknown model was found")


@check
def a_message_has_content_and_usage():
    message = client.messages.create(model=MODEL, messages=USER, max_tokens=12)
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    assert message.stop_reason in ("end_turn", "max_tokens"), message
    assert all(block.type == "text" for block in message.content), message
    usage = message.usage
    assert usage.input_tokens > 0 and usage.output_tokens > 0 and usage.cache_read_input_tokens >= 0
    assert message._request_id


@check
def either_header_brings_the_key():
    bearer = Anthropic(base_url=BASE_URL, api_key=None, auth_token=API_KEY, max_retries=0, timeout=120)
    assert bearer.messages.create(model=MODEL, messages=USER, max_tokens=2).type == "message"
    try:
        Anthropic(base_url=BASE_URL, api_key="wrong", max_retries=0).messages.create(
            model=MODEL, messages=USER, max_tokens=2
        )
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error" and error.request_id, error
    else:
        raise AssertionError("a wrong key was taken")


@check
def the_stream_helper_sees_the_whole_answer():
    request = dict(model=MODEL, messages=USER, max_tokens=24, extra_body={"temperature": 0.7, "seed": 7})
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop", events
    text = lambda message: "".join(block.text for block in message.content)
    assert text(final) == text(whole) and final.stop_reason == whole.stop_reason, (final, whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(final.usage) == total(whole.usage), (final.usage, whole.usage)


@check
def tokens_are_counted():
    request = dict(model=MODEL, messages=USER, system="Be brief.", tools=[WEATHER])
    counted = client.messages.count_tokens(**request).input_tokens
    usage = client.messages.create(**request, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)


@check
def tools_are_called_and_answered():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    request = dict(model=MODEL, messages=USER, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert snapshots and whole.stop_reason == final.stop_reason == "tool_use"
    for message in (whole, final):
        [call] = [block for block in message.content if block.type == "tool_use"]
        assert call.name == "get_weather" and call.input["city"] in ("Oslo", "Rome"), call
        assert 1 <= call.input["days"] <= 7
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}], "is_error": False}
    follow_up = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, messages=follow_up, tools=[WEATHER], max_tokens=4)
    assert answer.usage.cache_read_input_tokens > 0, answer.usage


@check
def a_session_keeps_a_conversation_warm():
    headers = {"x-claude-code-session-id": "python"}
    first = client.messages.create(model=MODEL, messages=USER, max_tokens=8, extra_headers=headers)
    more = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
    second = client.messages.create(model=MODEL, messages=more, max_tokens=8, extra_headers=headers)
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= before, (first.usage, second.usage)


@check
def a_schema_is_kept():
    parsed = client.messages.parse(model=MODEL, messages=USER, max_tokens=200, output_format=Light)
    assert isinstance(parsed.parsed_output, Light), parsed


@check
def hints_of_agents_are_taken():
    raw = client.beta.messages.with_raw_response.create(
        model=MODEL, messages=USER, max_tokens=4, betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        metadata={"user_id": "me"}, thinking={"type": "adaptive"},
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be kind."}],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    ignored = raw.headers["x-llmctl-ignored"].split(", ")
    assert ignored == ["context_management", "metadata", "tools.web_search_20250305"], ignored
    assert raw.parse().type == "message"


@check
def a_result_with_an_image_goes_on_as_text():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image]}
    messages = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    raw = client.messages.with_raw_response.create(model=MODEL, messages=messages, max_tokens=4)
    assert raw.headers["x-llmctl-ignored"] == "messages[].content[].content[].image", raw.headers


@check
def errors_name_the_place():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    try:
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=4)
    except anthropic.BadRequestError as error:
        assert "messages.0.content.0" in error.message, error
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert error.body["request_id"] == error.request_id, error.body
    else:
        raise AssertionError("an image was taken")


run()
