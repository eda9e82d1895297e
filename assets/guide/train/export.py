"""Writes a checkpoint as GGUF (`qwen3`, matrices Q8_0, norms f32): `python export.py CHECKPOINT OUT.gguf`.

`--blend BEFORE.gguf` writes the mean of a tuned checkpoint and the weights that it began with, by `tune.json`'s `blend`: what was
learnt new mostly stays, and what tuning had begun to forget mostly comes back."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch

from chat import MARKUP, SPECIAL
from model import Config, Guide

HERE = Path(__file__).parent
TOKENS_KEY = "guide.tokens_seen"
BLOCK = {
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
    "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}


def gguf_name(name):
    """llama.cpp's name of one of our tensors."""
    if name.startswith("blocks."):
        _, number, part, _ = name.split(".")
        return f"blk.{number}.{BLOCK[part]}.weight"
    return {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]


def add_tokenizer(writer, tokenizer):
    """Vocabulary, merges and kinds of tokens as llama.cpp's converter writes those of Qwen3."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = {t: gguf.TokenType.CONTROL for t in SPECIAL} | {t: gguf.TokenType.USER_DEFINED for t in MARKUP}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(t, gguf.TokenType.NORMAL) for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((HERE.parent / "chat_template.jinja").read_text())


def write(weights, config, tokens, path):
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name("guide")
    writer.add_description("Answers questions about llmctl; made for llmctl and carried in its binary.")
    writer.add_license("MIT OR Apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_freq_base(config.theta)
    writer.add_vocab_size(config.vocab)
    # Greedy: a model this small knows one good answer.
    writer.add_float32("general.sampling.temp", 0.0)
    writer.add_uint64(TOKENS_KEY, tokens)
    add_tokenizer(writer, json.loads((HERE / "tokenizer.json").read_text()))
    for name, weight in weights.items():
        weight = weight.float().numpy()
        if weight.ndim == 2:
            quantised = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path):
    """Weights as f32, config and tokens seen, from a file that `write` wrote."""
    reader = gguf.GGUFReader(str(path))
    ours = {gguf_name(name): (name, weight.shape) for name, weight in Guide().state_dict().items()}
    weights = {}
    for tensor in reader.tensors:
        name, shape = ours[tensor.name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = torch.from_numpy(np.array(values, np.float32)).reshape(shape)
    return weights, Config(), int(reader.fields[TOKENS_KEY].contents())


def main():
    checkpoint, out = sys.argv[1], Path(sys.argv[2])
    saved = torch.load(checkpoint, map_location="cpu")
    weights = saved["weights"]
    if "--blend" in sys.argv:
        share = json.loads((HERE / "tune.json").read_text())["blend"]
        before, _, _ = read(sys.argv[sys.argv.index("--blend") + 1])
        weights = {name: (1 - share) * before[name] + share * weight.float() for name, weight in weights.items()}
    # Written beside and moved: a build may be reading the old one.
    beside = out.with_suffix(".new")
    write(weights, Config(**saved["config"]), saved["tokens"], beside)
    beside.replace(out)
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
