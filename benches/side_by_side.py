#!/usr/bin/env python3
"""llmctl and other engines on the same models, interleaved in one run: speed, memory, and the machine's limits.

  python benches/side_by_side.py [--quick] [--shapes NAMES | --model FILE] [--types NAMES] [--peers NAMES] [--more] [--tests NAMES] [-r N] [--json FILE]

Needs numpy and gguf, and llama-cpp-python built for this machine (all from PyPI; where there is AMX, built by gcc 12,
llama.cpp crashes without the change of its pull request 26954: the compiler leaves out most of the tiles'
configuration); builds examples/throughput.rs itself. Models of the real shapes with random weights are written to a
cache folder once: speed does not depend on the values. All sides stay loaded and take turns; a row is the ratio of medians, against the
best of the peers, each with the better of its options. benches/peers.py has the peers, and what each of them needs.

Definitions are llama-bench's. pp512: a prompt of 512 tokens (pp4096 of 4,096). tg128: 128 single steps after almost nothing;
@N: after N tokens. 8 seq (32 seq): so many sequences of 128 tokens that decode together, all tokens. No prompt comes twice.
load: from the start of loading to the first token of a short prompt, the file in the page cache; `kept`: the same with
packed weights that an earlier load has kept on disk. RSS: peak
resident memory over the whole run, without what Python and the libraries held before loading. % limit: of
the int8 peak for prefill, of the read bandwidth for decoding, both read in the same run between the others'
turns.
"""
import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from peers import CONTEXT_SLACK, OPTIONS, LlamaCpp, peak_rss_mib  # noqa: F401, the last two for the other scripts

REPOSITORY = Path(__file__).resolve().parent.parent

SHAPES = {
    "qwen3-0.6b": dict(arch="qwen3", layers=28, hidden=1024, heads=16, kv=8, head=128, ffn=3072, vocab=151936),
    "llama-3.2-1b": dict(arch="llama", layers=16, hidden=2048, heads=32, kv=8, head=64, ffn=8192, vocab=128256),
    "smollm2-135m": dict(arch="llama", layers=30, hidden=576, heads=9, kv=3, head=64, ffn=1536, vocab=49152),
}
# Models with experts, by --shapes: the first layers of a published one (`of` in all). The first `dense` layers have no
# experts, `conv` ones have a short convolution instead of attention. With `delta` all layers but every fourth have a gated delta
# net of so many heads of keys and values and so many values per head; `shared` is the width of the expert that every token
# passes. MXFP4 means experts in MXFP4 and everything else in Q8_0.
EXPERT_SHAPES = {
    "qwen3-30b-a3b": dict(arch="qwen3moe", layers=6, of=48, hidden=2048, heads=32, kv=4, head=128, ffn=6144, vocab=151936,
                          experts=128, used=8, expert_ffn=768),
    "gpt-oss-20b": dict(arch="gpt-oss", layers=4, of=24, hidden=2880, heads=64, kv=8, head=64, ffn=2880, vocab=201088,
                        experts=32, used=4, expert_ffn=2880),
    "lfm2-8b-a1b": dict(arch="lfm2moe", layers=7, of=24, hidden=2048, heads=32, kv=8, head=64, ffn=7168, vocab=65536,
                        experts=32, used=4, expert_ffn=1792, dense=2, conv=(0, 1, 3, 4, 5)),
    "qwen3.5-35b-a3b": dict(arch="qwen35moe", layers=4, of=40, hidden=2048, heads=16, kv=2, head=256, ffn=512, vocab=248320,
                            experts=256, used=8, expert_ffn=512, shared=512, delta=(16, 32, 128)),
}
# Gemma 4 E2B: local layers with heads of `head` and every fifth a global one with `global_head`; the last `shared_kv` layers read
# the KV of earlier ones and have feed-forward parts twice as wide; `per_layer` inputs of each token for each layer. Its assistant
# reads hidden states of `backbone` values and the KV of the model; llama-cpp-python cannot draft with it, so that it is for --write.
OTHER_SHAPES = {
    "qwen3-4b": dict(arch="qwen3", layers=36, hidden=2560, heads=32, kv=8, head=128, ffn=9728, vocab=151936),
    "gemma-4-e2b": dict(arch="gemma4", layers=35, hidden=1536, heads=8, kv=1, head=256, global_head=512, ffn=6144, vocab=262144,
                        shared_kv=20, per_layer=256, window=512),
    "gemma-4-e2b-assistant": dict(arch="gemma4-assistant", layers=4, hidden=256, heads=4, kv=1, head=256, global_head=512,
                                  ffn=2048, vocab=262144, shared_kv=4, per_layer=0, window=512, backbone=1536),
}
GLOBAL_PERIODS = {"gemma4": 5, "gemma4-assistant": 4}
DELTA_PERIOD, DELTA_KERNEL = 4, 4
UNTIED = ("qwen3moe", "gpt-oss", "qwen35moe")  # the others use the embeddings for logits too
ONLY_TYPES = {"qwen3-30b-a3b": "Q4_K_M", "gpt-oss-20b": "MXFP4", "lfm2-8b-a1b": "Q4_K_M", "qwen3.5-35b-a3b": "Q4_K_M",
              "gemma-4-e2b": "Q4_K_M", "gemma-4-e2b-assistant": "Q8_0", "qwen3-4b": "Q4_K_M"}
TYPES = ["Q4_0", "Q4_K_M", "Q8_0", "F16"]
ROWS = ("pp512", "pp4096", "tg128", "tg32@2048", "tg32@8192", "8 seq", "32 seq", "load")
OURS = "llmctl"
LONGEST_ANSWER = 900  # seconds after which a process is killed; prompts of 4,096 tokens take a slow peer minutes
SETTLING = 0.5  # seconds after each turn of ours, in which an idle engine prepares memory for KV: a peer's turn must not share the cores with it

# What issue 4 asks for: (shape, type) -> test -> ratio; "*" stands for any.
TARGETS = [
    ("qwen3-0.6b", ("Q4_0", "Q4_K_M"), "pp512", 2.0),
    ("llama-3.2-1b", ("Q4_0", "Q4_K_M"), "pp512", 1.9),
    ("*", ("Q8_0",), "pp512", 2.5),
    ("*", ("F16",), "pp512", 1.5),
    ("qwen3-0.6b", ("Q4_0", "Q4_K_M", "Q8_0"), "tg128", 1.3),
    ("llama-3.2-1b", "*", "tg128", 1.0),
    ("smollm2-135m", "*", "tg128", 1.2),
    ("qwen3-0.6b", ("Q4_K_M",), "tg32@2048", 1.35),
    ("qwen3-0.6b", ("Q4_K_M",), "tg32@8192", 2.0),
    ("qwen3-30b-a3b", "*", "pp512", 3.5),
    ("qwen3-30b-a3b", "*", "tg128", 1.3),
    ("qwen3-30b-a3b", "*", "8 seq", 3.0),
    ("*", "*", "8 seq", 2.5),
]


def shape_of(name):
    """The shape of that name; `None` for a file of --model."""
    return SHAPES.get(name) or EXPERT_SHAPES.get(name) or OTHER_SHAPES.get(name)


def target(shape, kind, test):
    for shapes, kinds, name, ratio in TARGETS:
        if shapes in ("*", shape) and (kinds == "*" or kind in kinds) and name == test:
            return ratio
    return None


# ---------- synthetic models

def byte_characters():
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def random_matrix(rng, rows, cols, kind):
    """`rows` rows of `cols` weights with a standard deviation near 1 / sqrt(cols), as they lie in a file."""
    import numpy as np

    # A few million random numbers, over and over, from another start each time: far faster, and no less random to a kernel.
    if kind == "F16":
        normal = (rng.standard_normal(1_000_003, dtype=np.float32) / np.sqrt(cols)).astype(np.float16)
        return np.resize(normal, (rows, cols))
    # Bytes per block, values per block, where the f16 scales are, and the standard deviation for scale 1.
    size, values, scales, spread = {
        "Q4_0": (18, 32, [(0, 1.0)], 4.6),
        "Q5_0": (22, 32, [(0, 1.0)], 9.2),
        "Q8_0": (34, 32, [(0, 1.0)], 74.0),
        "Q4_K": (144, 256, [(0, 1.0), (2, 7.5)], 260.0),
        "Q6_K": (210, 256, [(208, 1.0)], 1370.0),
        "MXFP4": (17, 32, [], 1.0),
        "IQ4_XS": (136, 256, [(0, 1.0)], 1200.0),
    }[kind]
    assert cols % values == 0, (kind, cols)
    blocks = np.resize(np.frombuffer(rng.bytes(4_000_037), np.uint8), (rows, cols // values, size))
    scale = 1.0 / np.sqrt(cols) / spread
    for at, factor in scales:
        two = np.frombuffer(np.float16(scale * factor).tobytes(), np.uint8)
        blocks[:, :, at : at + 2] = two
    if kind == "MXFP4":
        blocks[:, :, 0] = 127 + round(np.log2(1.0 / np.sqrt(cols) / 5.0))  # an exponent; the values are half of 0 to 12
    return blocks.reshape(rows, -1)


def kind_of(name, layer, layers, cols, file_type, head):
    """The type of a matrix in llama.cpp's mixes; `head` is the one that makes logits."""
    if file_type == "MXFP4":
        return "MXFP4" if name.endswith("_exps") else "Q8_0"
    kind = {"Q4_K_M": "Q4_K"}.get(file_type, file_type)
    if name == head and file_type in ("Q4_0", "Q4_K_M"):
        kind = "Q6_K"
    if file_type == "Q4_K_M" and name in ("attn_v", "ffn_down", "ffn_down_exps"):
        eighth = layers // 8
        if layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2:
            kind = "Q6_K"
    if cols % 256 and kind in ("Q4_K", "Q6_K"):
        kind = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}[kind]
    return kind


def write_vocabulary(writer, size):
    tokens = byte_characters() + ["th", "<|end|>"]
    kinds = [1] * 257 + [3]
    tokens += [f"[{index}]" for index in range(len(tokens), size)]
    kinds += [5] * (size - len(kinds))
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)


def write_config(writer, shape):
    import gguf

    arch, conv = shape["arch"], shape.get("conv", ())
    writer.add_context_length(32768)
    writer.add_block_count(shape["layers"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length([ffn_width(shape, layer) for layer in range(shape["layers"])] if arch in GLOBAL_PERIODS else shape["ffn"])
    writer.add_head_count(shape["heads"])
    per_layer = [0 if layer in conv else shape["kv"] for layer in range(shape["layers"])]
    writer.add_head_count_kv(per_layer if conv else shape["kv"])
    head = shape.get("global_head", shape["head"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head // 4 if "delta" in shape else head)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if "experts" in shape:
        writer.add_expert_count(shape["experts"])
        writer.add_expert_used_count(shape["used"])
        writer.add_expert_feed_forward_length(shape["expert_ffn"])
    if arch == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if arch == "qwen35moe":
        keys, values, dim = shape["delta"]
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_expert_shared_feed_forward_length(shape["shared"])
        writer.add_full_attention_interval(DELTA_PERIOD)
        writer.add_ssm_conv_kernel(DELTA_KERNEL)
        writer.add_ssm_state_size(dim)
        writer.add_ssm_group_count(keys)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(values * dim)
    if arch in GLOBAL_PERIODS:
        layers = range(shape["layers"])
        writer.add_key_length_swa(shape["head"])
        writer.add_value_length_swa(shape["head"])
        writer.add_rope_dimension_count_swa(shape["head"])
        writer.add_rope_freq_base_swa(1e4)
        writer.add_sliding_window(shape["window"])
        writer.add_sliding_window_pattern([not is_global(shape, layer) for layer in layers])
        writer.add_shared_kv_layers(shape["shared_kv"])
        writer.add_embedding_length_per_layer_input(shape["per_layer"])
        writer.add_final_logit_softcapping(30.0)
    if arch == "gemma4-assistant":
        writer.add_embedding_length_out(shape["backbone"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(shape["dense"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_shortconv_l_cache(3)


class TensorWriter:
    """Adds tensors of random weights in the types of `file_type`."""

    def __init__(self, writer, shape, file_type):
        import numpy as np

        self.writer, self.shape, self.file_type = writer, shape, file_type
        self.rng = np.random.default_rng(7)

    def matrix(self, name, rows, cols, layer=0, experts=None):
        import gguf

        head = "output" if self.shape["arch"] in UNTIED else "token_embd"
        kind = kind_of(name.split(".")[-1], layer, self.shape["layers"], cols, self.file_type, head)
        data = random_matrix(self.rng, rows * (experts or 1), cols, kind)
        if experts:
            data = data.reshape(experts, rows, -1)
        raw = None if kind == "F16" else gguf.GGMLQuantizationType[kind]
        self.writer.add_tensor(name + ".weight", data, raw_dtype=raw)

    def numbers(self, name, *size, ones=False, negative=False):
        import numpy as np

        values = np.ones(size) if ones else self.rng.standard_normal(size) / np.sqrt(size[-1])
        values = -np.abs(values) if negative else values
        self.writer.add_tensor(name, values.astype(np.float32))

    def values(self, name, values):
        import numpy as np

        self.writer.add_tensor(name, np.array(values, np.float32))

    def vector(self, name, size):
        self.numbers(name + ".weight", size, ones=True)


def write_delta_net(tensors, block, layer):
    hidden, (keys, values, dim) = tensors.shape["hidden"], tensors.shape["delta"]
    width = (2 * keys + values) * dim
    for name, rows, cols in (("attn_qkv", width, hidden), ("attn_gate", values * dim, hidden), ("ssm_beta", values, hidden),
                             ("ssm_alpha", values, hidden), ("ssm_out", hidden, values * dim)):
        tensors.matrix(block + name, rows, cols, layer)
    tensors.numbers(block + "ssm_conv1d.weight", width, DELTA_KERNEL)
    tensors.numbers(block + "ssm_a", values, negative=True)
    tensors.numbers(block + "ssm_dt.bias", values)
    tensors.vector(block + "ssm_norm", dim)


def is_global(shape, layer):
    return "global_head" in shape and (layer + 1) % GLOBAL_PERIODS[shape["arch"]] == 0


def reads_others(shape, layer):
    """Whether a layer's KV is an earlier layer's."""
    return layer >= shape["layers"] - shape.get("shared_kv", 0)


def ffn_width(shape, layer):
    return shape["ffn"] * (2 if shape["arch"] == "gemma4" and reads_others(shape, layer) else 1)


def is_delta_net(shape, layer):
    return "delta" in shape and (layer + 1) % DELTA_PERIOD != 0


def write_mixer(tensors, block, layer):
    """Attention, a short convolution, or a gated delta net."""
    shape = tensors.shape
    if is_delta_net(shape, layer):
        return write_delta_net(tensors, block, layer)
    hidden, head = shape["hidden"], shape["global_head" if is_global(shape, layer) else "head"]
    if layer in shape.get("conv", ()):
        tensors.numbers(block + "shortconv.conv.weight", hidden, 3)
        tensors.matrix(block + "shortconv.in_proj", 3 * hidden, hidden, layer)
        tensors.matrix(block + "shortconv.out_proj", hidden, hidden, layer)
        return
    queries, keys = shape["heads"] * head, shape["kv"] * head
    if shape["arch"] in ("qwen3", "qwen3vl", "qwen3moe", "lfm2moe", "qwen35moe", "gemma4", "gemma4-assistant"):
        tensors.vector(block + "attn_q_norm", head)
        if not reads_others(shape, layer):
            tensors.vector(block + "attn_k_norm", head)
    gates = queries if "delta" in shape else 0  # of the output, in the matrix of queries
    for name, rows, cols in (("attn_q", queries + gates, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden),
                             ("attn_output", hidden, queries)):
        if not (name in ("attn_k", "attn_v") and reads_others(shape, layer)):
            tensors.matrix(block + name, rows, cols, layer)
        if shape["arch"] == "gpt-oss":
            tensors.numbers(block + name + ".bias", rows)
    if shape["arch"] == "gpt-oss":
        tensors.numbers(block + "attn_sinks.weight", shape["heads"])


def write_feed_forward(tensors, block, layer):
    shape = tensors.shape
    hidden, experts = shape["hidden"], shape.get("experts")
    dense = not experts or layer < shape.get("dense", 0)
    inner, suffix, count = (ffn_width(shape, layer), "", None) if dense else (shape["expert_ffn"], "_exps", experts)
    for name, rows, cols in (("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)):
        tensors.matrix(block + name + suffix, rows, cols, layer, count)
        if shape["arch"] == "gpt-oss":
            tensors.numbers(block + name + "_exps.bias", experts, rows)
    if dense:
        return
    tensors.numbers(block + "ffn_gate_inp.weight", experts, hidden)
    if "shared" in shape:
        tensors.numbers(block + "ffn_gate_inp_shexp.weight", hidden)
        for name, rows, cols in (("ffn_gate", shape["shared"], hidden), ("ffn_up", shape["shared"], hidden),
                                 ("ffn_down", hidden, shape["shared"])):
            tensors.matrix(block + name + "_shexp", rows, cols, layer)
    if shape["arch"] == "gpt-oss":
        tensors.numbers(block + "ffn_gate_inp.bias", experts)
    if shape["arch"] == "lfm2moe":
        tensors.numbers(block + "exp_probs_b.bias", experts)


def write_gemma4(tensors):
    """What Gemma 4 E and its assistant have beside attention and feed-forward parts."""
    shape = tensors.shape
    layers, hidden, size = shape["layers"], shape["hidden"], shape["per_layer"]
    if size:
        tensors.matrix("per_layer_token_embd", shape["vocab"], layers * size)
        tensors.matrix("per_layer_model_proj", layers * size, hidden)
        tensors.vector("per_layer_proj_norm", size)
    else:
        tensors.matrix("nextn.pre_projection", hidden, 2 * shape["backbone"])
        tensors.matrix("nextn.post_projection", shape["backbone"], hidden)
    pairs = shape["global_head"] // 2
    divisors = [1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4)
    tensors.values("rope_freqs.weight", divisors)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("post_attention_norm", "post_ffw_norm", *(["post_norm"] if size else [])):
            tensors.vector(block + name, hidden)
        if size:
            tensors.matrix(block + "inp_gate", size, hidden, layer)
            tensors.matrix(block + "proj", hidden, size, layer)
        tensors.numbers(block + "layer_output_scale.weight", 1, ones=True)


def write_model(path, shape, file_type):
    import gguf

    writer = gguf.GGUFWriter(str(path), shape["arch"])
    writer.add_name(path.stem)
    write_config(writer, shape)
    write_vocabulary(writer, shape["vocab"])
    tensors = TensorWriter(writer, shape, file_type)
    hidden, arch = shape["hidden"], shape["arch"]
    tensors.matrix("token_embd", shape["vocab"], hidden)
    if arch in UNTIED:
        tensors.matrix("output", shape["vocab"], hidden)
    tensors.vector("token_embd_norm" if arch == "lfm2moe" else "output_norm", hidden)
    for layer in range(shape["layers"]):
        block = f"blk.{layer}."
        tensors.vector(block + "attn_norm", hidden)
        tensors.vector(block + ("post_attention_norm" if arch in ("gpt-oss", "qwen35moe") else "ffn_norm"), hidden)
        write_mixer(tensors, block, layer)
        write_feed_forward(tensors, block, layer)
    if arch in GLOBAL_PERIODS:
        write_gemma4(tensors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_file(cache, shape, file_type):
    path = cache / f"{shape}-{file_type}.gguf"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        draft = path.with_suffix(".part")
        write_model(draft, shape_of(shape), file_type)
        draft.rename(path)
    with open(path, "rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    return path


# ---------- both sides

class Side:
    """A process that answers a line of JSON to every line."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.answer()

    def answer(self):
        limit = threading.Timer(LONGEST_ANSWER, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line and self.process.wait() == -signal.SIGKILL:
            return {"absent": f"killed, as after {LONGEST_ANSWER} s without an answer"}
        if not line:
            sys.exit(f"{self.process.args[0]} ended with {self.process.wait()}")
        answer = json.loads(line)
        if answer.get("error"):
            sys.exit(f"{self.process.args[0]}: {answer['error']}")
        return answer

    def run(self, command):
        if self.process.poll() is not None:
            return {"absent": "it did not answer before"}
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def build():
    command = ["cargo", "build", "--release", "--locked", "--example", "throughput"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")
    return str(Path(target) / "release/examples/throughput")


def tests_of(args, shape, file_type):
    tests = [("pp512", "prefill 512"), ("tg128", "decode 128 1")]
    if args.more:
        tests += [("pp4096", "prefill 4096"), ("tg32@2048", "decode 32 2048"), ("tg32@8192", "decode 32 8192"), ("8 seq", "batch 64 8"),
                  ("32 seq", "batch 32 32")]
    elif shape == "qwen3-0.6b" and file_type in ("Q4_K_M", "F16"):
        tests.append(("tg32@2048", "decode 32 2048"))
        if file_type == "Q4_K_M" and not args.quick:
            tests.append(("tg32@8192", "decode 32 8192"))
    if not args.more and (shape in EXPERT_SHAPES or (shape != "smollm2-135m" and file_type in ("Q4_K_M", "Q4_0"))):
        tests.append(("8 seq", "batch 64 8"))
    return [test for test in tests if args.tests is None or test[0] in args.tests]


def limits(program, threads):
    out = subprocess.run([program, "limits", f"threads={threads}"], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def measure_loads(args, ready, starts):
    """Adds the times to the first token of `args.repeat - 1` processes of each side, in turns."""
    with tempfile.TemporaryDirectory(dir=args.cache) as folder:
        kept = lambda: starts[OURS](f"packed={folder}")
        kept().end()  # not counted: checks what is there, and begins to write what is not
        while list(Path(folder).glob("**/*.part")):
            kept().end()
        for _ in range(args.repeat - 1):
            for name, start in [*starts.items(), ("kept", kept)]:
                side = start()
                if side.facts.get("ready_s") is not None:
                    ready.setdefault(name, []).append(side.facts["ready_s"])
                side.end()


def starts_of(args, program, path, context):
    """A function for each side that starts it: llmctl, and every peer with each of its options."""
    command = [program, str(path), f"threads={args.threads}", f"ctx={context}"]
    starts = {OURS: lambda *more: Side([*command, *more])}
    for peer, bench in args.peers.items():
        for option in OPTIONS[peer]:
            worker = [sys.executable, str(Path(__file__).with_name("peers.py")), peer, option, bench, str(path), str(args.threads), str(context)]
            starts[f"{peer} {option}".strip()] = lambda worker=worker: Side(worker)
    return starts


def measure(args, program, shape, file_type, path):
    """Rows of (test, rates of each side), and facts. A side that does not read the file is left out, and its reason is a fact."""
    tests = tests_of(args, shape, file_type)
    depths = [int(name.split("@")[1]) for name, _ in tests if "@" in name]
    context = max([*depths, *(4096 for name, _ in tests if name == "pp4096")], default=0) + 2 * CONTEXT_SLACK
    starts, ready = starts_of(args, program, path, context), {}
    sides = {name: start() for name, start in starts.items()}
    absent = {name: side.facts["absent"] for name, side in sides.items() if "absent" in side.facts}
    sides = {name: side for name, side in sides.items() if name not in absent}
    for name, side in sides.items():
        if side.facts.get("ready_s") is not None:
            ready[name] = [side.facts["ready_s"]]
    if args.tests is None or "load" in args.tests:
        measure_loads(args, ready, {name: start for name, start in starts.items() if name in sides})
    rows, read = [], []
    for name, command in tests:
        taking = {}
        for key, side in sides.items():  # not counted: memory is touched, sequences reach their depth; a batch does so itself
            answer = {} if command.startswith("batch") else side.run(command.replace("128 1", "8 1"))
            if "absent" not in answer:
                taking[key] = side
        rates = {key: [] for key in taking}
        for _ in range(args.repeat):
            for key, side in taking.items():
                answer = side.run(command)
                if key == OURS:
                    time.sleep(SETTLING)
                if "absent" in answer:
                    absent.setdefault(f"{key}, {name}", answer["absent"])
                else:
                    rates[key].append(answer["rate"])
            read.append(limits(program, args.threads))
        rates = {key: measured for key, measured in rates.items() if measured}
        rows.append(dict(test=name, rates=rates))
        print(f"  {name:10} " + "  ".join(f"{k}: {[round(x, 1) for x in v]}" for k, v in rates.items()),
              file=sys.stderr, flush=True)
    read = read or [limits(program, args.threads)]
    memory = {key: side.run("memory").get("peak_rss_mib") for key, side in sides.items()}
    facts = dict(ready={key: statistics.median(value) for key, value in ready.items()}, memory=memory, ours=sides[OURS].facts,
                 versions={key: side.facts.get("version") for key, side in sides.items() if key != OURS}, absent=absent,
                 limits={key: statistics.median(x[key] for x in read) for key in read[0]})
    for side in sides.values():
        side.end()
    return rows, facts


def weights_of(shape, size):
    """Weights that every token is multiplied with, and bytes that a step reads of a file of `size` bytes: all of it, with experts
    unknown (`None`), because how many a step of several rows reads depends on the routes."""
    s = shape_of(shape)
    head, hidden = s["head"], s["hidden"]
    attention = hidden * head * (2 * s["heads"] + 2 * s["kv"])
    conv, dense = len(s.get("conv", ())), s.get("dense", 0 if "experts" in s else s["layers"])
    experts = (s["layers"] - dense) * 3 * hidden * (s.get("used", 0) * s.get("expert_ffn", 0) + s.get("shared", 0))
    deltas = sum(is_delta_net(s, layer) for layer in range(s["layers"]))
    keys, values, dim = s.get("delta", (0, 0, 0))
    gates = hidden * head * s["heads"] if deltas else 0
    mixers = (s["layers"] - conv - deltas) * (attention + gates) + conv * 4 * hidden * hidden
    mixers += deltas * hidden * dim * (2 * keys + 3 * values)
    return mixers + dense * 3 * hidden * s["ffn"] + experts, None if "experts" in s else size


def part_of_limit(shape, test, rate, size, limits):
    """How much of the machine's arithmetic (prefill) or bandwidth (decode, KV included) a rate takes."""
    s = shape_of(shape)
    if s is None:
        return size * rate / 1e9 / limits["read_gb_s"] if test == "tg128" else None
    weights, read = weights_of(shape, size)
    if test.startswith("pp"):
        return 2 * weights * rate / 1e9 / limits["int8_gop_s"] if limits["int8_gop_s"] else None
    if test.startswith("tg") and read:
        depth = int(test.split("@")[1]) if "@" in test else 64
        kv = depth * s["layers"] * 2 * s["kv"] * s["head"] * 2
        return (read + kv) * rate / 1e9 / limits["read_gb_s"]
    return None


def best_of(numbers, better):
    """For each peer that has numbers, the best of its options: {peer: (number, option)}."""
    best = {}
    for name, number in numbers.items():
        peer = next((peer for peer in OPTIONS if name.startswith(peer)), None)
        if peer and number is not None and (peer not in best or better(number, best[peer][0]) == number):
            best[peer] = (number, name[len(peer):].strip())
    return best


def rows_of(result):
    """Rows of (test, ours, the best of each peer, unit, whether more is better)."""
    facts = result["facts"]
    for row in result["rows"]:
        rates = {key: statistics.median(measured) for key, measured in row["rates"].items()}
        yield row["test"], rates.pop(OURS), best_of(rates, max), "", True
    ready, memory = dict(facts["ready"]), dict(facts["memory"])
    ours, kept = ready.pop(OURS), ready.pop("kept", None)
    if kept is not None:  # a time of one start alone is no measurement
        yield "load", ours, best_of(ready, min), ", s", False
        yield "load, kept", kept, best_of(ready, min), ", s", False
    yield "RSS", memory.pop(OURS), best_of(memory, min), ", MiB", False


def conditions(args):
    """The machine, the commit and the options of a run."""
    told = lambda *command: subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return dict(date=time.strftime("%Y-%m-%d"), commit=told("git", "rev-parse", "HEAD"), processor=args.processor or (named[1] if named else "unknown"),
                threads=args.threads, rounds=args.repeat)


def report(results, peers):
    print(f"| model | test | llmctl | {' | '.join(peers)} | ratio to the best | target | % limit |")
    print("|---" * (6 + len(peers)) + "|")
    for result in results:
        shape, kind, facts = result["shape"], result["type"], result["facts"]
        for test, ours, best, unit, is_rate in rows_of(result):
            shown = lambda number: f"{number:.1f}" if is_rate or number >= 100 else f"{number:.2f}"
            cells = [f"{shown(best[peer][0])}{f' ({best[peer][1]})' if best[peer][1] else ''}" if peer in best else "" for peer in peers]
            top = (max if is_rate else min)((number for number, _ in best.values()), default=None)
            ratio = ours / top if top else None
            wanted = target(shape, kind, test) if is_rate else 1.0
            met = ratio is not None and wanted is not None and (ratio >= wanted if is_rate else ratio <= wanted)
            mark = "" if wanted is None or ratio is None else f"{wanted:.2f} {'met' if met else 'MISSED'}"
            part = part_of_limit(shape, test, ours, result["bytes"], facts["limits"]) if is_rate else None
            print(f"| {shape} {kind} | {test}{unit} | {shown(ours)} | {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.2f}'} "
                  f"| {mark} | {'' if part is None else f'{100 * part:.0f}'} |")
    print()
    for result in results:
        facts = result["facts"]
        print(f"{result['shape']} {result['type']}: read {facts['limits']['read_gb_s']:.1f} GB/s, int8 "
              f"{facts['limits']['int8_gop_s']:.0f} GOP/s")
        for name, reason in facts["absent"].items():
            print(f"  without {name}: {reason}")
    first = results[0]["facts"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    print(f"llmctl: {first['ours']['instruction_set']}, products by {first['ours']['products']}; {versions}")


def peers_of(text):
    """Names of peers, with what each needs: {"llama.cpp": "", "ik_llama.cpp": PATH}."""
    peers = dict((*word.split("=", 1), "")[:2] for word in text.split(","))
    for name, value in peers.items():
        if name not in OPTIONS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(OPTIONS)}")
        if (name == "ik_llama.cpp") != bool(value):
            raise argparse.ArgumentTypeError("ik_llama.cpp=PATH names its llama-bench, and no other peer has a path")
    return peers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models, depths up to 2,048")
    parser.add_argument("--shapes", default=",".join(SHAPES),
                        help=f"some of {', '.join([*SHAPES, *EXPERT_SHAPES, *OTHER_SHAPES])}; {len(EXPERT_SHAPES)} have experts, and these "
                             "and the others behind them one type each")
    parser.add_argument("--write", action="store_true", help="write the models and measure nothing")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a real GGUF file instead of shapes; may be repeated")
    parser.add_argument("--peers", type=peers_of, default="llama.cpp",
                        help="some of llama.cpp, ik_llama.cpp=PATH of its llama-bench, openvino and mistral.rs, with commas (default: llama.cpp)")
    parser.add_argument("--more", action="store_true", help="all rows for every model: long prompts, depths, 8 and 32 sequences")
    parser.add_argument("--types", default=",".join(TYPES), help="IQ4_XS is another")
    parser.add_argument("--tests", type=lambda names: names.split(","), help="names of rows, `load` among them; all without it")
    parser.add_argument("-r", "--repeat", type=int, default=3, help="rounds, at least 2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/llmctl-side-by-side")
    parser.add_argument("--program", help="a built examples/throughput, instead of building it")
    parser.add_argument("--json", type=Path, help="where all rates go; benches/speed_page.py makes pages of docs/speed/*.json")
    parser.add_argument("--processor", help="name of the processor in the file, without it the system's")
    args = parser.parse_args()
    unknown = set(args.tests or ()) - set(ROWS)
    if unknown:
        parser.error(f"--tests: no row is called {', '.join(sorted(unknown))} ({', '.join(ROWS)})")
    start = time.time()
    types = lambda shape: [ONLY_TYPES[shape]] if shape in ONLY_TYPES else args.types.split(",")
    pairs = [(shape, kind) for shape in args.shapes.split(",") for kind in types(shape)]
    if args.model:
        pairs = [(file.stem, "") for file in args.model]
    elif args.quick:
        pairs = [("qwen3-0.6b", "Q4_K_M"), ("qwen3-0.6b", "F16"), ("smollm2-135m", "Q4_0")]
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.write:
        for shape, kind in pairs:
            print(model_file(args.cache, shape, kind))
        return
    program = args.program or build()
    results = []
    for shape, kind in pairs:
        path = next((file for file in args.model if file.stem == shape), None) or model_file(args.cache, shape, kind)
        print(f"{shape} {kind}", file=sys.stderr, flush=True)
        rows, facts = measure(args, program, shape, kind, path)
        results.append(dict(shape=shape, type=kind, bytes=path.stat().st_size, rows=rows, facts=facts))
        if args.json:
            args.json.write_text(json.dumps(dict(conditions(args), results=results), indent=1) + "\n")
    report(results, args.peers)
    print(f"{args.threads} threads, {args.repeat} rounds, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
