"""Records which type llama.cpp's quantiser gives each tensor: python3 llama_cpp_mixes.py LIBLLAMA.so > mixes.json

The models have the names and shapes that the rules look at and few rows; values are zeros. Made with llama.cpp as of
llama-cpp-python 0.3.36. Needs the packages gguf and numpy.
"""

import ctypes
import json
import os
import sys
import tempfile

import gguf
import numpy as np

# general.file_type of each mix.
MIXES = {
    "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8, "Q4_K_M": 15,
    "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "Q2_K": 10,
}

# layers, heads, heads of keys and values, experts, columns, tied, with importance
MODELS = {
    "llama": ("llama", 32, 8, 2, 0, 256, False, False),
    "llama-mha": ("llama", 12, 4, 4, 0, 256, True, False),
    "llama-narrow": ("llama", 6, 4, 4, 0, 96, False, False),
    "llama-odd": ("llama", 3, 4, 4, 0, 40, True, False),
    "llama-70b": ("llama", 80, 8, 1, 0, 256, False, False),
    "mixtral": ("llama", 16, 8, 2, 8, 256, False, False),
    "qwen3moe": ("qwen3moe", 10, 4, 2, 16, 256, True, False),
    "falcon": ("falcon", 18, 4, 1, 0, 256, False, False),
    "llama-importance": ("llama", 17, 4, 2, 0, 256, False, True),
}


class Params(ctypes.Structure):
    _fields_ = [
        ("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int), ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool), ("only_copy", ctypes.c_bool), ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool), ("dry_run", ctypes.c_bool), ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p), ("tt_overrides", ctypes.c_void_p), ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    ]


class Importance(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


def tensors(model):
    arch, layers, heads, kv, experts, cols, tied, _ = model
    rows = 2
    yield "token_embd.weight", (rows, cols)
    if not tied:
        yield "output.weight", (rows, cols)
    yield "output_norm.weight", (cols,)
    for layer in range(layers):
        name = lambda part: f"blk.{layer}.{part}.weight"
        yield name("attn_norm"), (cols,)
        if arch == "falcon":
            yield name("attn_qkv"), (rows, cols)
        else:
            for part in "qkv":
                yield name(f"attn_{part}"), (rows, cols)
        yield name("attn_output"), (rows, cols)
        if experts:
            yield name("ffn_gate_inp"), (experts, cols)
        parts = ["up", "down"] if arch == "falcon" else ["gate", "up", "down"]
        for part in parts:
            if experts:
                yield name(f"ffn_{part}_exps"), (experts, rows, cols)
            else:
                yield name(f"ffn_{part}"), (rows, cols)


def write(path, model):
    arch, layers, heads, kv, experts, cols, _, _ = model
    out = gguf.GGUFWriter(path, arch)
    out.add_block_count(layers)
    out.add_context_length(64)
    out.add_embedding_length(cols)
    out.add_feed_forward_length(cols)
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_layer_norm_eps(1e-5)
    out.add_rope_dimension_count(cols // heads)
    out.add_vocab_size(2)
    if experts:
        out.add_expert_count(experts)
        out.add_expert_used_count(2)
        out.add_expert_feed_forward_length(cols)
    for name, shape in tensors(model):
        out.add_tensor(name, np.zeros(shape, dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def importance(model):
    names = [(name, shape) for name, shape in tensors(model) if len(shape) > 1]
    array = (Importance * (len(names) + 1))()
    kept = []
    for slot, (name, shape) in zip(array, names):
        size = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        data = (ctypes.c_float * size)(*([1.0] * size))
        kept.append(data)
        slot.name, slot.data, slot.size = name.encode(), data, size
    return array, kept


def main():
    lib = ctypes.CDLL(sys.argv[1])
    lib.llama_model_quantize_default_params.restype = Params
    lib.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    lib.llama_backend_init()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    lib.llama_log_set(callback, None)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            source, target = os.path.join(folder, "in.gguf"), os.path.join(folder, "out.gguf")
            write(source, model)
            listed = list(tensors(model))
            array, _kept = importance(model)
            choices = {}
            mixes = {"Q4_0": 2, "Q5_0": 8, "Q2_K_S": 21, "Q4_K_M": 15} if model[-1] else MIXES
            for mix, number in mixes.items():
                params = lib.llama_model_quantize_default_params()
                params.ftype, params.nthread = number, 1
                if model[-1]:
                    params.imatrix = ctypes.cast(array, ctypes.c_void_p)
                code = lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
                if code != 0:
                    raise SystemExit(f"{name} {mix}: code {code}")
                types = {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(target).tensors}
                found = [types[tensor] for tensor, _ in listed]
                # Runs of the same type, in the order of the tensors.
                runs = []
                for kind in found:
                    if runs and runs[-1].split("*")[0] == kind:
                        count = int(runs[-1].split("*")[1]) + 1
                        runs[-1] = f"{kind}*{count}"
                    else:
                        runs.append(f"{kind}*1")
                choices[mix] = " ".join(run.removesuffix("*1") for run in runs)
            arch, layers, heads, kv, experts, cols, tied, has_importance = model
            result[name] = {
                "architecture": arch, "layers": layers, "heads": heads, "kv_heads": kv, "experts": experts,
                "columns": cols, "tied": tied, "has_importance": has_importance, "types": choices,
            }
    json.dump(result, sys.stdout, indent=1)
    print()


main()
