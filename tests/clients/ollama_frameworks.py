"""langchain-ollama and llama-index-llms-ollama against a running server: `python ollama_frameworks.py BASE_URL API_KEY`."""

import sys
from typing import Literal

import ollama
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama, OllamaLLM
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel

from checks import check, run

BASE_URL, API_KEY = sys.argv[1:3]
HOST = BASE_URL.removesuffix("/v1")
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
MODEL = ollama.Client(host=HOST, headers=HEADERS).list().models[0].model
KEY = {"headers": HEADERS}
OPTIONS = {"num_predict": 16, "temperature": 0.5, "seed": 1}
chain = ChatOllama(model=MODEL, base_url=HOST, client_kwargs=KEY, validate_model_on_init=True, **OPTIONS)
index = Ollama(
    model=MODEL, base_url=HOST, request_timeout=120, additional_kwargs=OPTIONS, context_window=512,
    client=ollama.Client(host=HOST, headers=HEADERS),
)


class Light(BaseModel):
    colour: Literal["red", "green"]


@check
def langchain_invokes_and_streams():
    whole = chain.invoke("Say something.")
    assert whole.response_metadata["done_reason"] in ("stop", "length"), whole
    assert whole.usage_metadata["input_tokens"] > 5, whole
    assert "".join(part.content for part in chain.stream("Say something.")) == whole.content


@check
def langchain_has_structured_output():
    model = ChatOllama(model=MODEL, base_url=HOST, client_kwargs=KEY, seed=1)
    assert isinstance(model.with_structured_output(Light).invoke("A light"), Light)


@check
def langchain_binds_tools():
    def add(a: int, b: int) -> int:
        """Adds two numbers"""
        return a + b

    answer = chain.bind_tools([add]).invoke([HumanMessage("1 + 2?")])
    assert answer.content or answer.tool_calls or answer.response_metadata["done_reason"], answer


@check
def langchain_completes_texts():
    text = OllamaLLM(model=MODEL, base_url=HOST, client_kwargs=KEY, **OPTIONS)
    assert isinstance(text.invoke("Once"), str)
    assert "".join(text.stream("Once")) == text.invoke("Once")


@check
def llama_index_chats():
    answer = index.chat([ChatMessage(role="user", content="Say something.")])
    assert answer.message.role == "assistant", answer


@check
def llama_index_streams():
    parts = list(index.stream_chat([ChatMessage(role="user", content="Say something.")]))
    assert parts and parts[-1].message.content == index.chat([ChatMessage(role="user", content="Say something.")]).message.content


@check
def llama_index_completes():
    assert isinstance(index.complete("Once").text, str)


run()
