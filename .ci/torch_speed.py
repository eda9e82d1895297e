"""PyTorch's f16 on the shape of Qwen3 8B, to compare with: the matrices and attention of all layers, eager and as a CUDA graph.

Prints one line of JSON. A floor, not a model: norms, rotation and sampling are left out, so PyTorch is favoured.
"""
import json
import sys
import time


def main(device):
    try:
        import torch
    except ImportError:
        return {"ok": True, "skipped": "PyTorch is not installed"}
    is_gpu = device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        return {"ok": False, "error": "PyTorch sees no GPU"}
    layers, hidden, heads, kv_heads, dim, inner, vocab = (36, 4096, 32, 8, 128, 12288, 151936) if is_gpu else (2, 64, 4, 2, 16, 96, 384)
    kind = torch.float16 if is_gpu else torch.float32
    new = lambda *shape: torch.randn(*shape, dtype=kind, device=device) * 0.02
    widths = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    weights = [[new(*width) for width in widths] for _ in range(layers)]
    head, context = new(vocab, hidden), 512 if is_gpu else 32
    attend = torch.nn.functional.scaled_dot_product_attention

    def step(x, batch, keys, values):
        """One step of x, [batch * rows, hidden]; decoding reads a context of keys and values."""
        for qkv, out, up, down in weights:
            rows = x.shape[0] // batch
            parts = (x @ qkv.T).view(batch, rows, heads + 2 * kv_heads, dim).transpose(1, 2)
            q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
            if rows == 1:
                k, v = keys[:batch], values[:batch]
            mixed = attend(q, k, v, is_causal=rows > 1, enable_gqa=True)
            x = x + mixed.transpose(1, 2).reshape(batch * rows, heads * dim) @ out.T
            gate, up = (x @ up.T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ down.T
        return x[::rows] @ head.T

    def rate(call, count):
        sync = torch.cuda.synchronize if is_gpu else lambda: None
        for _ in range(3):
            call()
        sync()
        rounds, began = 20 if is_gpu else 2, time.perf_counter()
        for _ in range(rounds):
            call()
        sync()
        return count * rounds / (time.perf_counter() - began)

    keys, values = new(8, kv_heads, context, dim), new(8, kv_heads, context, dim)
    found = {"ok": True, "torch": torch.__version__, "layers": layers, "prompt_tokens": context}
    with torch.inference_mode():
        prompt = new(context, hidden)
        found["prefill_tokens_per_second"] = rate(lambda: step(prompt, 1, keys, values), context)
        for batch in (1, 8):
            x = new(batch, hidden)
            call = lambda: step(x, batch, keys, values)
            found[f"decode_{batch}_tokens_per_second"] = rate(call, batch)
            if is_gpu:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                found[f"decode_{batch}_graph_tokens_per_second"] = rate(graph.replay, batch)
    return found


if __name__ == "__main__":
    try:
        result = main(sys.argv[1])
    except Exception as error:  # the other sections' results do not depend on this one
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"section": "torch", **result}))
    sys.exit(not result["ok"])
