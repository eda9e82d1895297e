#!/usr/bin/env python3
"""Converts the vision checkpoints of the shared fixtures to GGUF with llama.cpp's own converter.

    LLAMA_CPP=/path/to/llama.cpp python3 tests/vision-gguf/convert.py FOLDER ...

Writes NAME-bf16.gguf with the text, and NAME-mmproj-f32.gguf where the fixture has no mmproj, beside this file. What the checkpoints
lack of their published forms is set before: names of text classes, settings of tiles, a size of experts. The tiny tokenizer is not
one of those that the converter knows by its hash: all get the pre-tokenizer of GPT-2. Needs torch, transformers and sentencepiece.
"""

import importlib
import json
import os
import pathlib
import runpy
import shutil
import sys
import tempfile

ROOT = pathlib.Path(os.environ["LLAMA_CPP"])
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "gguf-py")]

import gguf  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

base = importlib.import_module("conversion.base")
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for path in (ROOT / "conversion").glob("[!_]*.py"):
    for kind in vars(importlib.import_module(f"conversion.{path.stem}")).values():
        if isinstance(kind, type) and issubclass(kind, base.TextModel) and kind is not base.TextModel:
            kind.set_vocab = base.TextModel._set_vocab_gpt2

# The projector's numbers of InternVL go beyond the layers of its tiny tower.
name_map = gguf.get_tensor_name_map
gguf.get_tensor_name_map = lambda arch, blocks: name_map(arch, max(blocks, 8))
# The class of Qwen 3.5's tokenizer adds tokens.
transformers.AutoTokenizer.from_pretrained = lambda folder, **_: transformers.PreTrainedTokenizerFast.from_pretrained(folder)

TEXTS = {"internvl3": "Qwen3", "lfm2-vl": "Lfm2", "smolvlm": "Llama", "idefics3": "Llama"}


def convert(source, mmproj):
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / source.name
        shutil.copytree(source, folder, copy_function=shutil.copyfile)
        config = json.loads((folder / "config.json").read_text())
        if source.name in TEXTS:
            config["text_config"]["architectures"] = [f"{TEXTS[source.name]}ForCausalLM"]
        if source.name == "gemma4-unified":
            config["text_config"]["moe_intermediate_size"] = None
            config["audio_config"] = {"audio_embed_dim": 32, "model_type": "gemma4_unified_audio"}
        if source.name == "internvl3" and mmproj:
            config |= {"architectures": ["InternVisionModel"], "min_dynamic_patch": 1, "max_dynamic_patch": 6}
            weights = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            of_tower = ("vision_tower", "multi_modal_projector")
            weights = {f"model.{key}" if key.startswith(of_tower) else key: value for key, value in weights.items()}
            save_file(weights, folder / "model.safetensors")
        if source.name == "qwen3-vl-moe" and not mmproj:  # the published matrices of experts are the transposed ones
            weights = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            weights = {key: value.transpose(1, 2).contiguous() if ".experts." in key else value for key, value in weights.items()}
            save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        kind, form = ("f32", "mmproj-f32") if mmproj else ("bf16", "bf16")
        out = HERE / f"{source.name}-{form}.gguf"
        sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", kind, "--outfile", str(out)]
        sys.argv += ["--mmproj"] * mmproj + ["--no-mtp"] * source.name.startswith("qwen3.5")
        runpy.run_path(str(ROOT / "convert_hf_to_gguf.py"), run_name="__main__")


for source in map(pathlib.Path, sys.argv[1:]):
    convert(source, False)
    if not (source / "mmproj-F32.gguf").exists():
        convert(source, True)
