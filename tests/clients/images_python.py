"""OpenAI's and Anthropic's Python clients with images, against a server whose model reads them:
`python images_python.py BASE_URL API_KEY FOLDER_OF_IMAGES`. As openai_python.py: the model has random weights."""

import base64
import pathlib
import sys

import anthropic
import openai
from anthropic import Anthropic
from openai import OpenAI

from checks import check, run

BASE_URL, API_KEY, IMAGES = sys.argv[1:4]
client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)
claude = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=API_KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
PNG, JPEG = (base64.b64encode((pathlib.Path(IMAGES) / name).read_bytes()).decode() for name in ("rgba.png", "cmyk.jpg"))
URL = f"data:image/png;base64,{PNG}"
TEXT = {"type": "text", "text": "What is this?"}
IMAGE_URL = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": JPEG}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(*messages, **more):
    return client.chat.completions.create(model=MODEL, messages=list(messages), max_tokens=6, **more)


def user(*parts):
    return {"role": "user", "content": list(parts)}


@check
def the_model_says_that_it_sees():
    told = client.models.retrieve(MODEL).model_extra
    assert told["capabilities"]["vision"] and "image" in told["architecture"]["input_modalities"], told


@check
def an_image_of_a_chat_is_read_once():
    alone = chat(user(TEXT)).usage.prompt_tokens
    first = chat(user(IMAGE_URL, TEXT))
    assert first.usage.prompt_tokens > alone + 3, (first.usage, alone)
    more = [user(IMAGE_URL, TEXT), {"role": "assistant", "content": first.choices[0].message.content}, user(TEXT)]
    second = chat(*more, stream=True, stream_options={"include_usage": True})
    usage = [chunk.usage for chunk in second][-1]
    assert usage.prompt_tokens_details.cached_tokens > 0, usage  # the page that the image is in
    other = chat(user({"type": "image_url", "image_url": {"url": f"data:;base64,{JPEG}"}}, TEXT)).usage
    assert other.prompt_tokens_details.cached_tokens == 0, other


@check
def a_tool_of_a_chat_gives_an_image():
    asked = [user(TEXT), {"role": "assistant", "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]}
    without = chat(*asked, result).usage.prompt_tokens
    result["content"].append(IMAGE_URL)
    assert chat(*asked, result).usage.prompt_tokens > without + 3


@check
def responses_take_images_and_tools_give_them():
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    text = {"type": "input_text", "text": "What is this?"}
    first = client.responses.create(model=MODEL, input=[user(image, text)], max_output_tokens=6)
    assert first.status in ("completed", "incomplete") and first.usage.input_tokens > 20, first
    second = client.responses.create(model=MODEL, previous_response_id=first.id, input="And now?", max_output_tokens=6)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens, second.usage
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [text]}
    ask = lambda: client.responses.create(model=MODEL, input=[user(text), call, output], max_output_tokens=4)
    without = ask().usage.input_tokens
    output["output"] = [text, image]
    assert ask().usage.input_tokens > without + 3


@check
def a_message_has_images_also_in_results():
    ask = lambda *messages: claude.messages.create(model=MODEL, messages=list(messages), max_tokens=4)
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    first = ask(user(BLOCK, TEXT))
    counted = claude.messages.count_tokens(model=MODEL, messages=[user(BLOCK, TEXT)])
    assert counted.input_tokens == total(first.usage), (counted, first.usage)
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = lambda *blocks: user({"type": "tool_result", "tool_use_id": "c1", "content": list(blocks)})
    asked = [user(TEXT), {"role": "assistant", "content": [use]}]
    without, seen = ask(*asked, result(TEXT)), ask(*asked, result(TEXT, BLOCK))
    assert total(seen.usage) > total(without.usage) + 3


@check
def what_is_no_image_is_refused_by_its_place():
    for url, code in [
        ("data:image/png;base64,AAAA", "image_undecodable"),
        ("https://example.com/a.png", "image_url_refused"),
        (f"data:image/png;base64,{PNG[:80]}", "image_undecodable"),
    ]:
        try:
            chat(user(TEXT, {"type": "image_url", "image_url": {"url": url}}))
        except openai.BadRequestError as error:
            assert (error.code, error.param) == (code, "messages[0].content[1].image_url"), error
        else:
            raise AssertionError(f"{url} was taken")
    try:
        claude.messages.create(model=MODEL, messages=[user({**BLOCK, "source": {**BLOCK["source"], "data": "AAAA"}})], max_tokens=1)
    except anthropic.BadRequestError as error:
        assert "messages.0.content.0.source" in error.message, error
    else:
        raise AssertionError("no image was taken")


@check
def a_damaged_image_in_a_result_is_named_and_the_work_goes_on():
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = [user(TEXT), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": [bad]}]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=asked, max_tokens=4)
    assert raw.headers["x-llmctl-ignored"] == "messages[].content[].image_url", raw.headers


run()
