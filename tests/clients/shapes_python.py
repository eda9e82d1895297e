"""Every answer against the official types, member by member: `python shapes_python.py BASE_URL API_KEY`.

The clients themselves take anything. Here a member that the types do not know fails, unless EXTENSIONS names it, one that they
require and that is missing, one of another type, and a null, unless NULLS names it: OpenAI and Anthropic leave most members out
where they have nothing to say, and strict clients refuse a null there.
"""

import json
import sys
import types
import typing
import urllib.error
import urllib.request

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
from pydantic import BaseModel

from checks import check, run

BASE_URL, API_KEY = sys.argv[1:3]
TEXT = "Say something: übung, 日本, 🦀."
USER = [{"role": "user", "content": TEXT}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}

# Members of ours, by the type that they are in.
EXTENSIONS = {
    "ChatCompletion": {"timings", "llmctl"},
    "ChatCompletionChunk": {"timings", "llmctl"},
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "Completion": {"timings"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},  # of the Node client's type
    "Logprob": {"bytes"},  # of Open Responses, as the next
    "LogprobTopLogprob": {"bytes"},
    "OutputTokensDetails": {"accepted_prediction_tokens", "rejected_prediction_tokens"},
    "Response": {"timings", "llmctl", "store", "presence_penalty", "frequency_penalty"},  # the last three are Open Responses'
}
# Members that the APIs themselves send as null, by the type that they are in.
NULLS = {
    "Choice": {"logprobs", "finish_reason"},
    "ChatCompletionMessage": {"refusal", "content"},
    "ChoiceDelta": {"refusal"},
    "ChoiceLogprobs": {"refusal"},
    "ChatCompletionChunk": {"usage"},
    "CompletionChoice": {"logprobs", "finish_reason"},
    "Completion": {"usage"},
    "Message": {"stop_reason", "stop_sequence"},
    "Delta": {"stop_sequence"},
    "Response": {
        "error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
        "safety_identifier", "usage", "user", "completed_at",
    },
    "Reasoning": {"effort", "summary"},
    "ResponseReasoningItem": {"encrypted_content"},
    "FunctionTool": {"description"},
    "ModelInfo": {"capabilities", "line", "deprecated_at", "retires_at"},
    "ResponseFormatTextJSONSchemaConfig": {"description"},
}


def faults(kind, value, at):
    """Returns where a JSON value is not of this type, as the module's text says."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return faults(kind.__value__, value, at)
    if origin is typing.Annotated:
        return faults(args[0], value, at)
    if origin in (typing.Union, types.UnionType):
        return min((faults(one, value, at) for one in args if one is not type(None)), key=len)
    if origin is typing.Literal:
        return [] if value in args else [f"{at}: {value!r} is none of {args}"]
    if origin in (list, typing.List):
        if not isinstance(value, list):
            return [f"{at}: no list"]
        # The first token of an echoed prompt has no probability.
        items = [(index, item) for index, item in enumerate(value) if item is not None or not at.endswith("logprobs.token_logprobs")]
        return [fault for index, item in items for fault in faults(args[0], item, f"{at}[{index}]")]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return faults_of_model(kind, value, at)
    if kind in (str, int, float, bool):
        fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        return [] if fits else [f"{at}: {value!r} is no {kind.__name__}"]
    return []


def faults_of_model(model, value, at):
    if not isinstance(value, dict):
        return [f"{at}: no object"]
    name, found = model.__name__, []
    fields = {field.alias or key: field for key, field in model.model_fields.items()}
    for key, field in fields.items():
        if key not in value and field.is_required():
            found.append(f"{at}.{key}: missing")
    for key, inner in value.items():
        if key not in fields:
            if key not in EXTENSIONS.get(name, ()):
                found.append(f"{at}.{key}: {name} has no such member")
        elif inner is None:
            if key not in NULLS.get(name, ()):
                found.append(f"{at}.{key}: null in {name}")
        else:
            found.extend(faults(fields[key].annotation, inner, f"{at}.{key}"))
    return found


def ask(path, body=None, headers=()):
    """Returns the status, and the answer or the objects of the stream."""
    sent = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json", **dict(headers)}
    data = None if body is None else json.dumps(body).encode()
    try:
        reply = urllib.request.urlopen(urllib.request.Request(BASE_URL + path, data, sent), timeout=120)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    text = reply.read().decode()
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return reply.status, json.loads(text)
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return reply.status, [json.loads(line) for line in lines if line != "[DONE]"]


def valid(kind, path, body=None, headers=()):
    status, answer = ask(path, body, headers)
    assert status == 200, (status, answer)
    found = [fault for item in (answer if isinstance(answer, list) else [answer]) for fault in faults(kind, item, path)]
    assert answer and not found, "\n".join(dict.fromkeys(found))
    return answer


def whole_and_streamed(kind, event, path, *bodies):
    for body in bodies:
        valid(kind, path, body)
        valid(event, path, {**body, "stream": True})


@check
def chat_completions():
    tool = {"type": "function", "function": FUNCTION}
    base = {"messages": USER, "max_tokens": 24}
    whole_and_streamed(
        openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk, "/chat/completions", base,
        {**base, "logprobs": True, "top_logprobs": 2, "n": 2}, {**base, "session_id": "shapes"},
        {**base, "tools": [tool], "tool_choice": "required", "max_tokens": 300}, {**base, "tools": [tool], "tool_choice": "none"},
        {**base, "max_tokens": 200, "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": PARAMETERS}}},
    )
    valid(openai.types.chat.ChatCompletionChunk, "/chat/completions", {**base, "stream": True, "stream_options": {"include_usage": True}})


@check
def completions():
    base = {"prompt": TEXT, "max_tokens": 8}
    whole_and_streamed(
        openai.types.Completion, openai.types.Completion, "/completions", base, {**base, "logprobs": 2, "echo": True, "n": 2},
        {**base, "prompt": [TEXT, "x"]},
    )


@check
def responses():
    tool = {"type": "function", **FUNCTION, "strict": True}
    base = {"input": TEXT, "max_output_tokens": 24}
    whole_and_streamed(
        openai.types.responses.Response, openai.types.responses.ResponseStreamEvent, "/responses", base,
        {**base, "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}, {**base, "tools": [tool], "tool_choice": "none"},
        {**base, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "instructions": "Be brief.", "reasoning": {"effort": "high"}},
        {**base, "max_output_tokens": 200, "text": {"format": {"type": "json_schema", "name": "f", "schema": PARAMETERS, "strict": True}}},
    )


@check
def messages():
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    base = {"messages": USER, "max_tokens": 24}
    whole_and_streamed(
        anthropic.types.Message, anthropic.types.RawMessageStreamEvent, "/messages", base, {**base, "thinking": {"type": "adaptive"}},
        {**base, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 300},
        {**base, "tools": [tool], "tool_choice": {"type": "none"}},
    )
    valid(anthropic.types.MessageTokensCount, "/messages/count_tokens", {"messages": USER})


@check
def models():
    for listed in ask("/models")[1]["data"]:
        assert {"id", "object", "created", "owned_by"} <= listed.keys() and listed["object"] == "model", listed
    version = {"anthropic-version": "2023-06-01"}
    for listed in ask("/models", None, version)[1]["data"]:
        found = faults(anthropic.types.ModelInfo, listed, "/models")
        assert not found, found


@check
def errors():
    for path in ("/chat/completions", "/completions", "/responses"):
        status, answer = ask(path, {"max_tokens": 8})
        assert status == 422 and answer.keys() == {"error"}, answer
        assert answer["error"].keys() == {"message", "type", "param", "code"}, answer
    status, answer = ask("/messages", {"max_tokens": 8})
    assert answer["error"].pop("details").keys() == {"error_code", "param"}, answer  # docs/http.md; the types do not name it
    found = faults(anthropic.types.ErrorResponse, answer, "/messages")
    assert status == 400 and not found, (status, found)


run()
