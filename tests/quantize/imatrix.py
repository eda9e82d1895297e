"""Makes a small importance matrix, in both of llama.cpp's forms: python3 imatrix.py MODEL_FOLDER TEXT OUT_STEM

Runs a Llama folder over the text with transformers and adds up the squares of what each projection is multiplied with, as
llama.cpp's tools/imatrix does. Writes OUT_STEM.gguf and OUT_STEM.dat. Needs torch, transformers, gguf and numpy.
"""

import struct
import sys

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def main():
    folder, text_file, stem = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums, counts = {}, {}
    for index, layer in enumerate(model.model.layers):
        for part, name in NAMES.items():
            tensor = f"blk.{index}.{name}.weight"

            def hook(_, inputs, tensor=tensor):
                x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double().numpy()
                sums[tensor] = sums.get(tensor, 0) + (x * x).sum(axis=0)
                counts[tensor] = counts.get(tensor, 0) + x.shape[0]

            layer.get_submodule(part).register_forward_pre_hook(hook)
    ids = tokenizer(open(text_file, encoding="utf-8").read(), return_tensors="pt").input_ids[:, :4096]
    with torch.no_grad():
        for chunk in ids.split(128, dim=1):
            model(chunk)
    out = gguf.GGUFWriter(stem + ".gguf", "imatrix")
    out.add_type("imatrix")
    out.add_array("imatrix.datasets", ["text"])
    out.add_uint32("imatrix.chunk_count", 1)
    out.add_uint32("imatrix.chunk_size", 128)
    for tensor in sorted(sums):
        out.add_tensor(tensor + ".in_sum2", sums[tensor].astype(np.float32).reshape(1, -1))
        out.add_tensor(tensor + ".counts", np.array([[counts[tensor]]], dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with open(stem + ".dat", "wb") as file:
        file.write(struct.pack("<i", len(sums)))
        for tensor in sorted(sums):
            name = tensor.encode()
            values = (sums[tensor] / counts[tensor]).astype(np.float32)
            file.write(struct.pack("<i", len(name)) + name + struct.pack("<ii", 1, len(values)) + values.tobytes())


main()
