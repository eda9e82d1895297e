"""Writes GGUF files in every type of llama.cpp's quantisers, with llama.cpp's own logits inside, for tests/quant_types.rs.

    python make.py golden                     # prints the table of hashes in src/runtime/kernel/quant.rs
    python make.py tiny tests/quant_types     # the committed files: one layer of random weights each
    python make.py trained OUT MODELS         # fixtures/models, widened to rows of 256 values; for LLMCTL_QUANT_TYPES=OUT

Needs numpy, and llama-cpp-python 0.3.36 with its llama.cpp's gguf-py on PYTHONPATH (the sdist has both). Where the wheel is not
built, LLAMA_CPP_LIB_PATH names a folder with libllama and libggml-base of the same version.

The quantisers are ggml's own (`ggml_quantize_chunk`), applied to every matrix whose rows are whole blocks, with a uniform
importance matrix. Each file has in its metadata `test.tokens`, `test.logits` (llama.cpp on this file) and `test.exact`
(llama.cpp on the file with its weights dequantised to f32).
"""

import ctypes
import json
import os
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np

TYPES = {
    "iq4_xs": 23, "iq4_nl": 20, "iq3_s": 21, "iq3_xxs": 18, "iq2_s": 22, "iq2_xs": 17, "iq2_xxs": 16, "iq1_m": 29, "iq1_s": 19,
    "tq2_0": 35, "tq1_0": 34, "q2_0": 42, "q1_0": 41, "nvfp4": 40, "mxfp4": 39, "q4_k": 12,
}
# Offsets of half-precision scales in a block, whose exponents are made small enough for finite values.
SCALES = {"tq2_0": 64, "tq1_0": 52, "iq1_m": 54, "nvfp4": None, "mxfp4": None}
F32, Q4_0 = 0, 2


class Traits(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("block_len", ctypes.c_int64), ("interleave", ctypes.c_int64),
                ("block_bytes", ctypes.c_size_t), ("is_quantized", ctypes.c_bool),
                ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64))]


def library():
    folder = os.environ.get("LLAMA_CPP_LIB_PATH", os.path.join(os.path.dirname(llama_cpp.__file__), "lib"))
    ggml = ctypes.CDLL(os.path.join(folder, "libggml-base.so"))
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    return ggml


GGML = library()


def traits(kind):
    return GGML.ggml_get_type_traits(kind).contents


def dequantize(kind, raw, count):
    out = np.empty(count, np.float32)
    raw = np.ascontiguousarray(raw)
    traits(kind).to_float(raw.ctypes.data, out.ctypes.data, count)
    return out


def quantize(kind, values):
    rows, cols = values.shape
    values = np.ascontiguousarray(values, np.float32)
    info = traits(kind)
    raw = np.zeros((rows, cols // info.block_len * info.block_bytes), np.uint8)
    weights = np.ones(cols, np.float32)
    written = GGML.ggml_quantize_chunk(kind, values.ctypes.data, raw.ctypes.data, 0, rows, cols, weights.ctypes.data)
    assert written == raw.size, (kind, written, raw.size)
    return raw


def golden():
    """Dequantises eight blocks of seeded random bytes; prints a hash (FNV-1a) of the bits of all values, and the first value."""
    for name, kind in TYPES.items():
        info, state, raw = traits(kind), 7, bytearray()
        for _ in range(8 * info.block_bytes):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            raw.append(state >> 56)
        if SCALES.get(name, 0) is not None:
            for block in range(8):
                raw[block * info.block_bytes + SCALES.get(name, 0) + 1] &= 0xBF
        values = dequantize(kind, np.frombuffer(bytes(raw), np.uint8), 8 * info.block_len)
        digest = 0xCBF29CE484222325
        for byte in values.tobytes():
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        print(f"{name:8} {digest:#018x} {values[0]!r} {np.isfinite(values).all()}")


def write(path, config, tensors, extra):
    """Writes `tensors`, a dictionary from names to pairs of a type number and rows of values or of bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["context"])
    writer.add_embedding_length(config["width"])
    writer.add_block_count(config["layers"])
    writer.add_feed_forward_length(config["inner"])
    writer.add_head_count(config["heads"])
    writer.add_head_count_kv(config["kv_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{id}>" for id in range(config["vocab"])])
    writer.add_token_scores([0.0] * config["vocab"])
    writer.add_token_types([3 if id < 3 else 1 for id in range(config["vocab"])])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, values in extra.items():
        writer.add_array(key, values.ravel().tolist())
    for name, (kind, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=None if kind == F32 else gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path, tokens, vocab):
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, logits_all=True, verbose=False, n_threads=2, type_k=0, type_v=0)
    model.eval(tokens)
    return np.array(model._scores[: len(tokens), :vocab], np.float32)


def stored(name, kind, values):
    """Returns the tensors of one matrix: as `kind` if its rows are whole blocks, else as Q4_0."""
    kind = kind if values.shape[1] % traits(kind).block_len == 0 else Q4_0
    if kind != TYPES["nvfp4"] or name in ("token_embd", "output"):
        return {f"{name}.weight": (kind, quantize(kind, values))}
    # As converters do: the largest scale of a block is the largest 8-bit float.
    factor = np.float32(abs(values).max() / (6 * 448))
    return {f"{name}.weight": (kind, quantize(kind, values / factor)), f"{name}.scale": (F32, np.array([factor]))}


def widened(tensors):
    """Returns the tensors in f32, with factors applied."""
    wide = {}
    for name, (kind, rows) in tensors.items():
        if name.endswith(".scale"):
            continue
        if kind != F32:
            count = rows.shape[1] // traits(kind).block_bytes * traits(kind).block_len
            rows = dequantize(kind, rows, len(rows) * count).reshape(len(rows), count)
            rows = rows * tensors.get(name.replace(".weight", ".scale"), (F32, np.float32(1)))[1]
        wide[name] = (F32, rows.astype(np.float32))
    return wide


def make(path, config, matrices, vectors, kind, tokens):
    tensors = {f"{name}.weight": (F32, values) for name, values in vectors.items()}
    for name, values in matrices.items():
        tensors |= stored(name, kind, values)
    with tempfile.TemporaryDirectory() as folder:
        plain, exact = os.path.join(folder, "plain.gguf"), os.path.join(folder, "exact.gguf")
        write(plain, config, tensors, {})
        write(exact, config, widened(tensors), {})
        extra = {"test.tokens": np.array(tokens)}
        for key, file in [("test.logits", plain), ("test.exact", exact)]:
            extra[key] = logits(file, tokens, config["vocab"])
    write(path, config, tensors, extra)
    a, b = [x - x.max(1, keepdims=True) for x in (extra[key].astype(np.float64) for key in ("test.exact", "test.logits"))]
    a, b = [x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b)]
    kl = (np.exp(a) * (a - b)).sum(1)
    print(f"{path}: {os.path.getsize(path)} bytes; llama.cpp to f32: KL {kl.mean():.1e}, top-1 {(a.argmax(1) == b.argmax(1)).mean():.3f}",
          flush=True)


def tiny(folder):
    config = dict(context=64, width=256, layers=1, inner=32, heads=2, kv_heads=1, head_dim=16, eps=1e-5, vocab=32)
    random = np.random.default_rng(24)
    shapes = {"token_embd": (32, 256), "output": (32, 256), "blk.0.attn_q": (32, 256), "blk.0.attn_k": (16, 256),
              "blk.0.attn_v": (16, 256), "blk.0.attn_output": (256, 32), "blk.0.ffn_gate": (32, 256), "blk.0.ffn_up": (32, 256),
              "blk.0.ffn_down": (256, 32)}
    matrices = {name: (random.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32) for name, shape in shapes.items()}
    vectors = {name: np.ones(256, np.float32) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    tokens = [1] + random.integers(3, 32, 23).tolist()
    for name, kind in TYPES.items():
        if name != "q4_k":
            make(os.path.join(folder, f"{name}.gguf"), config, matrices, vectors, kind, tokens)


def wide_model(path):
    """Reads a model and repeats its channels, heads and neurons until rows are multiples of 256: the same function."""
    reader = gguf.GGUFReader(path)
    field = lambda key: reader.fields[f"llama.{key}"].contents()
    read = {t.name.removesuffix(".weight"): gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    width, inner, heads = field("embedding_length"), field("feed_forward_length"), field("attention.head_count")
    times = 256 // width
    config = dict(context=512, width=256, layers=field("block_count"), inner=-(-inner // 256) * 256, heads=heads * times,
                  kv_heads=field("attention.head_count_kv") * times, head_dim=width // heads,
                  eps=field("attention.layer_norm_rms_epsilon"), vocab=len(read["token_embd"]))
    neurons = np.arange(config["inner"]) % inner
    copies = np.bincount(neurons)[neurons]
    matrices, vectors = {}, {}
    for name, values in read.items():
        part = name.split(".")[-1]
        if values.ndim == 1:
            vectors[name] = np.tile(values, times)
        elif part == "token_embd":
            matrices[name] = np.tile(values, (1, times))
        elif part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[name] = np.tile(values, (times, times)) / times
        elif part in ("ffn_gate", "ffn_up"):
            matrices[name] = np.tile(values, (1, times))[neurons] / times
        elif part == "ffn_down":
            matrices[name] = np.tile(values, (times, 1))[:, neurons] / copies
        elif part == "output":
            matrices[name] = np.tile(values, (1, times)) / times
        else:
            raise ValueError(name)
    matrices.setdefault("output", np.tile(read["token_embd"], (1, times)) / times)
    return config, matrices, vectors


def trained(folder, models):
    for name, file in [("babyllama-361", "babyllama-361-f16.gguf"), ("stories260K", "stories260K-f32.gguf")]:
        config, matrices, vectors = wide_model(os.path.join(models, name, file))
        texts = json.load(open(os.path.join(models, name, "reference.json")))["perplexity"]
        for number, text in enumerate(texts):
            for type_name, kind in TYPES.items():
                path = os.path.join(folder, f"{name}-{number}-{type_name}.gguf")
                make(path, config, matrices, vectors, kind, [int(id) for id in text["ids"]])


if __name__ == "__main__":
    {"golden": golden, "tiny": tiny, "trained": trained}[sys.argv[1]](*sys.argv[2:])
