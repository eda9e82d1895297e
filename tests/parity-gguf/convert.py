#!/usr/bin/env python3
"""Converts checkpoints of the parity tables to GGUF with llama.cpp's own converter.

    LLAMA_CPP=/path/to/llama.cpp python3 tests/parity-gguf/convert.py FOLDER ...

Writes NAME-bf16.gguf beside this file. The tiny tokenizer is not one of those that the converter knows by its hash, and some
families ask for a tokenizer of their own: all get the pre-tokenizer of GPT-2. Needs torch, transformers and sentencepiece.
"""

import importlib
import json
import os
import pathlib
import runpy
import sys

import transformers

ROOT = pathlib.Path(os.environ["LLAMA_CPP"])
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "gguf-py")]

base = importlib.import_module("conversion.base")
# Their converters read the published keys, which transformers' classes rename.
AS_PUBLISHED = {"bailing_hybrid", "mimo_v2_flash", "minimax_m3_vl", "qwen4_exp", "step3p5"}


class PublishedConfig:
    @staticmethod
    def from_pretrained(folder, **options):
        config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        if config["model_type"] in AS_PUBLISHED:
            raise ValueError("to be read from config.json")
        return transformers.AutoConfig.from_pretrained(folder, **options)


base.AutoConfig = PublishedConfig
# The class that transformers takes for Qwen 3.5 would add a token.
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for module in ["bailingmoe3", "deepseek", "ernie", "glm", "kimi_linear", "laguna", "mimo", "minimax", "mistral3", "muse_glimmer", "nemotron", "phi", "qwen4exp", "step3"]:
    for kind in vars(importlib.import_module(f"conversion.{module}")).values():
        if isinstance(kind, type) and issubclass(kind, base.TextModel):
            kind.set_vocab = base.TextModel._set_vocab_gpt2

for folder in map(pathlib.Path, sys.argv[1:]):
    out = HERE / f"{folder.name}-bf16.gguf"
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", "bf16", "--outfile", str(out)]
    runpy.run_path(str(ROOT / "convert_hf_to_gguf.py"), run_name="__main__")
