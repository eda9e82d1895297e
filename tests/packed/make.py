"""Makes tiny quantised Llama folders with the values that they stand for: python3 make.py OUT_FOLDER

One folder per form: config.json and model.safetensors as its tool writes them, and dequantized.safetensors with every packed
matrix in f32, computed by the tool's own reader or, for AWQ and GPTQ, by the formula of their reference kernels. The shapes
are those of tests/parity/llama, whose tokenizer the tests add. Seed 7. Needs torch, safetensors, compressed-tensors, mlx.
"""

import json
import os
import sys

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, HEADS, KV, HEAD, LAYERS = 64, 96, 384, 4, 2, 16, 1
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV * HEAD, HIDDEN),
    "self_attn.v_proj": (KV * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def grouped(weight, group):
    return weight.reshape(weight.shape[0], -1, group)


def asymmetric(weight, group, bits, dtype=torch.float16):
    """Numbers 0..2^bits-1, zero points, scales [rows, groups] and the values that they stand for."""
    g = grouped(weight, group)
    low, high, top = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0), 2**bits - 1
    scale = ((high - low) / top).to(dtype).float()
    zero = (-low / scale).round().clamp(0, top)
    q = (g / scale[..., None] + zero[..., None]).round().clamp(0, top)
    value = ((q - zero[..., None]) * scale[..., None]).reshape(weight.shape)
    return q.reshape(weight.shape).to(torch.int32), zero.to(torch.int32), scale.to(dtype), value


def symmetric(weight, group, bits, dtype=torch.float16):
    g = grouped(weight, group)
    half = 2 ** (bits - 1)
    scale = (g.abs().amax(-1) / (half - 1)).to(dtype).float()
    q = (g / scale[..., None]).round().clamp(-half, half - 1)
    value = (q * scale[..., None]).reshape(weight.shape)
    return q.reshape(weight.shape).to(torch.int8), scale.to(dtype), value


def bitstream(numbers, bits):
    """Words of 32 bits with the numbers of each row one after another, the lowest bits first."""
    rows = numbers.numpy().astype(np.uint8)
    flat = np.unpackbits(rows[..., None], axis=-1, bitorder="little")[..., :bits].reshape(rows.shape[0], -1)
    return torch.from_numpy(np.packbits(flat, axis=-1, bitorder="little").view(np.int32).copy())


def fp8_block(weight):
    block = 32
    rows, cols = weight.shape
    scales = torch.zeros(-(-rows // block), -(-cols // block))
    codes = torch.zeros_like(weight).to(torch.float8_e4m3fn)
    value = torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            value[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, value


def fp8_channel(weight):
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_tensor(weight):
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}
    return parts, codes.float() * scale


def ct_int4(weight):
    q, scale, value = symmetric(weight, 32, 4, torch.bfloat16)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": pack_to_int32(q, 4), "weight_scale": scale, "weight_shape": shape}, value


def ct_int4_zeros(weight):
    q, zero, scale, value = asymmetric(weight, 32, 4)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    packed = pack_to_int32((q - 8).to(torch.int8), 4)
    zeros = pack_to_int32((zero - 8).to(torch.int8), 4, packed_dim=0)
    return {"weight_packed": packed, "weight_scale": scale, "weight_zero_point": zeros, "weight_shape": shape}, value


def ct_int8(weight):
    q, scale, value = symmetric(weight, weight.shape[1], 8, torch.bfloat16)
    return {"weight": q, "weight_scale": scale}, value


def nvfp4(weight):
    g = grouped(weight, 16)
    total = 448 * 6 / weight.abs().max()
    scale = (g.abs().amax(-1) / 6 * total).to(torch.float8_e4m3fn)
    real = scale.float() / total
    ratio = g / real[..., None].clamp(min=1e-12)
    code = (ratio.abs()[..., None] - FP4).abs().argmin(-1)
    value = (FP4[code] * ratio.sign() * real[..., None]).reshape(weight.shape)
    code = (code + 8 * (ratio < 0)).reshape(weight.shape).to(torch.uint8)
    packed = code[:, 0::2] | code[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": total.reshape(1)}, value


def awq(weight):
    q, zero, scale, value = asymmetric(weight, 32, 4)

    def pack(lines):  # [lines, rows] -> [lines, rows / 8]
        words = torch.zeros(lines.shape[0], lines.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate(AWQ_ORDER):
            words |= lines[:, column::8].long() << (4 * place)
        return words.numpy().astype(np.uint32).view(np.int32)

    parts = {"qweight": pack(q.T), "qzeros": pack(zero.T)}
    parts = {name: torch.from_numpy(words.copy()) for name, words in parts.items()}
    return parts | {"scales": scale.T.contiguous()}, value


def gptq(bits, order=None, is_symmetric=False):
    def convert(weight):
        rows, cols = weight.shape
        group = torch.arange(cols) // 32 if order is None else torch.from_numpy(order(cols))
        sorted_cols = torch.argsort(group, stable=True)
        if is_symmetric:
            n, scale, _ = symmetric(weight[:, sorted_cols], 32, bits)
            q, zero = n.to(torch.int32) + 2 ** (bits - 1), torch.full(scale.shape, 2 ** (bits - 1))
        else:
            q, zero, scale, _ = asymmetric(weight[:, sorted_cols], 32, bits)
            zero = zero.clamp(min=1)
        unsorted = torch.empty_like(q)
        unsorted[:, sorted_cols] = q
        value = (unsorted - zero[:, group]) * scale.float()[:, group]
        return {
            "qweight": bitstream(unsorted, bits).T.contiguous(),
            "qzeros": bitstream((zero - 1).T.contiguous().to(torch.int32), bits),
            "scales": scale.T.contiguous(),
            "g_idx": group.to(torch.int32),
        }, value

    return convert


def mlx(bits, group):
    def convert(weight):
        words, scales, biases = mx.quantize(mx.array(weight.half().numpy()), group_size=group, bits=bits)
        value = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
        parts = {"weight": torch.from_numpy(np.array(words))}
        for name, part in [("scales", scales), ("biases", biases)]:
            parts[name] = torch.from_numpy(np.array(part))
        return parts, torch.from_numpy(np.array(value))

    return convert


def ct(format_name, **weights):
    group = {"weights": weights, "targets": ["Linear"]}
    return {"quantization_config": {
        "quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}}


def shuffled(cols):
    return np.random.default_rng(7).permutation(np.arange(cols) // 32)


def plain(method, **more):
    return {"quantization_config": {"quant_method": method} | more}


FORMS = {
    "fp8-block": (fp8_block, plain("fp8", weight_block_size=[32, 32])),
    "fp8-channel": (fp8_channel, ct("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8-tensor": (fp8_tensor, ct("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "int4": (ct_int4, ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)),
    "int4-zeros": (
        ct_int4_zeros, ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    "int8": (ct_int8, ct("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)),
    "nvfp4": (nvfp4, ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "awq": (awq, plain("awq", bits=4, group_size=32, version="gemm", zero_point=True)),
    "gptq": (gptq(4), plain("gptq", bits=4, group_size=32, desc_act=False)),
    "gptq-symmetric": (gptq(4, is_symmetric=True), plain("gptq", bits=4, group_size=32, sym=True)),
    "gptq-3bit": (gptq(3), plain("gptq", bits=3, group_size=32)),
    "gptq-8bit": (gptq(8, is_symmetric=True), plain("gptq", bits=8, group_size=32)),
    "gptq-order": (gptq(4, shuffled), plain("gptq", bits=4, group_size=32, desc_act=True)),
    "mlx-4bit": (mlx(4, 32), {"quantization": {"group_size": 32, "bits": 4}}),
    "mlx-3bit": (mlx(3, 32), {"quantization": {"group_size": 32, "bits": 3}}),
    "mlx-6bit": (mlx(6, 32), {"quantization": {"group_size": 32, "bits": 6}}),
    "mlx-8bit": (mlx(8, 32), {"quantization": {"group_size": 32, "bits": 8}}),
}


def main():
    torch.manual_seed(7)
    matrices = {name: torch.randn(shape) * 0.15 for name, shape in MATRICES.items()}
    others = {
        "model.embed_tokens.weight": (torch.randn(VOCAB, HIDDEN) * 0.5).half(),
        "model.norm.weight": torch.ones(HIDDEN).half(),
        "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN).half(),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN).half(),
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    }
    for name, (convert, quantized) in FORMS.items():
        folder = os.path.join(sys.argv[1], name)
        os.makedirs(folder, exist_ok=True)
        stored, values = {}, {}
        for part, weight in matrices.items():
            stem = f"model.layers.0.{part}"
            parts, value = convert(weight)
            stored |= {f"{stem}.{key}": tensor.contiguous() for key, tensor in parts.items()}
            values[f"{stem}.weight"] = value.float().contiguous()
        save_file(stored, os.path.join(folder, "model.safetensors"))
        save_file(values, os.path.join(folder, "dequantized.safetensors"))
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config | quantized, file)
    save_file(others, os.path.join(sys.argv[1], "others.safetensors"))


main()
