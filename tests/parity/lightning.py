"""Ling 2.6 as a plain pass in double precision, for make.py: transformers has no class of it.

Lightning attention is computed as sums over all earlier tokens, without a state, so that nothing is shared with what it checks.
Facts from vLLM's `bailing_moe_linear`: names, rates of fading, order of norm, rotation, scale and gate.
"""

import math
import types

import torch


def rates(heads):
    """Rates at which the heads forget, before a layer's factor."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start ** (index + 1) for index in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return rates(lower) + rates(2 * lower)[0::2][: heads - lower]


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def angles(positions, dim, theta):
    return positions[:, None, None] / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def rotate_halves(x, dim, theta):
    """Rotates value i with i + dim / 2 of each head; x is [tokens, heads, values]."""
    turn = angles(torch.arange(len(x)).double(), dim, theta)
    first, second, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat([first * turn.cos() - second * turn.sin(), second * turn.cos() + first * turn.sin(), rest], -1)


def rotate_pairs(x, theta):
    """Rotates value 2i with 2i + 1."""
    turn = angles(torch.arange(len(x)).double(), x.shape[-1], theta)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * turn.cos() - second * turn.sin(), second * turn.cos() + first * turn.sin()], -1)


class Ling:
    """The model with the keys of config.json; weights by their published names, in double precision."""

    def __init__(self, config):
        self.config = types.SimpleNamespace(**config)
        self.tensors = {name: torch.empty(shape, dtype=torch.float64) for name, shape in self.shapes().items()}

    def is_linear(self, layer):
        return (layer + 1) % self.config.layer_group_size != 0

    def shapes(self):
        c = self.config
        hidden, inner = c.hidden_size, c.num_attention_heads * c.head_dim
        network = lambda stem, width: {
            f"{stem}.gate_proj.weight": (width, hidden), f"{stem}.up_proj.weight": (width, hidden),
            f"{stem}.down_proj.weight": (hidden, width),
        }
        shapes = {
            "model.word_embeddings.weight": (c.vocab_size, hidden), "model.norm.weight": (hidden,),
            "lm_head.weight": (c.vocab_size, hidden),
        }
        for layer in range(c.num_hidden_layers):
            stem = f"model.layers.{layer}"
            for norm in ["input_layernorm", "post_attention_layernorm"]:
                shapes[f"{stem}.{norm}.weight"] = (hidden,)
            if self.is_linear(layer):
                of_mixer = dict(
                    query_key_value=(3 * inner, hidden), query_layernorm=(c.head_dim,), key_layernorm=(c.head_dim,),
                    g_proj=(inner, hidden), g_norm=(inner,), dense=(hidden, inner),
                )
            else:
                heads = c.num_attention_heads
                of_mixer = dict(
                    q_a_proj=(c.q_lora_rank, hidden), q_a_layernorm=(c.q_lora_rank,),
                    q_b_proj=(heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
                    kv_a_proj_with_mqa=(c.kv_lora_rank + c.qk_rope_head_dim, hidden), kv_a_layernorm=(c.kv_lora_rank,),
                    kv_b_proj=(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank), dense=(hidden, heads * c.v_head_dim),
                )
            shapes |= {f"{stem}.attention.{name}.weight": shape for name, shape in of_mixer.items()}
            if layer < c.first_k_dense_replace:
                shapes |= network(f"{stem}.mlp", c.intermediate_size)
                continue
            shapes |= {f"{stem}.mlp.gate.weight": (c.num_experts, hidden), f"{stem}.mlp.gate.expert_bias": (c.num_experts,)}
            for expert in range(c.num_experts):
                shapes |= network(f"{stem}.mlp.experts.{expert}", c.moe_intermediate_size)
            shapes |= network(f"{stem}.mlp.shared_experts", c.moe_intermediate_size)
        return shapes

    def named_parameters(self):
        return self.tensors.items()

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x, name):
        return rms(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def network(self, x, stem):
        gate = self.linear(x, f"{stem}.gate_proj")
        return self.linear(gate * gate.sigmoid() * self.linear(x, f"{stem}.up_proj"), f"{stem}.down_proj")

    def lightning(self, x, stem, layer):
        c, tokens = self.config, len(x)
        heads, dim = c.num_attention_heads, c.head_dim
        q, k, v = self.linear(x, f"{stem}.query_key_value").view(tokens, 3, heads, dim).unbind(1)
        rotated = int(dim * c.partial_rotary_factor)
        q = rotate_halves(self.norm(q, f"{stem}.query_layernorm"), rotated, c.rope_theta) / math.sqrt(dim)
        k = rotate_halves(self.norm(k, f"{stem}.key_layernorm"), rotated, c.rope_theta)
        factor = 1 - layer / (c.num_hidden_layers - 1) + 1e-5
        age = (torch.arange(tokens)[:, None] - torch.arange(tokens)).double()
        kept = torch.exp(-age * factor * torch.tensor(rates(heads), dtype=torch.float64)[:, None, None])
        kept = torch.where(age < 0, 0.0, kept)
        out = torch.einsum("hts,thd,shd,she->the", kept, q, k, v).reshape(tokens, c.group_norm_size, -1)
        weight = self.tensors[f"{stem}.g_norm.weight"].view(c.group_norm_size, -1)
        out = rms(out, weight, c.rms_norm_eps).reshape(tokens, -1)
        return self.linear(out * self.linear(x, f"{stem}.g_proj").sigmoid(), f"{stem}.dense")

    def latent(self, x, stem):
        c, tokens = self.config, len(x)
        plain, turned = c.qk_nope_head_dim, c.qk_rope_head_dim
        q = self.norm(self.linear(x, f"{stem}.q_a_proj"), f"{stem}.q_a_layernorm")
        q = self.linear(q, f"{stem}.q_b_proj").view(tokens, c.num_attention_heads, -1)
        row, key = self.linear(x, f"{stem}.kv_a_proj_with_mqa").split([c.kv_lora_rank, turned], -1)
        both = self.linear(self.norm(row, f"{stem}.kv_a_layernorm"), f"{stem}.kv_b_proj").view(tokens, c.num_attention_heads, -1)
        scores = torch.einsum("thd,shd->hts", q[..., :plain], both[..., :plain])
        turned_key = rotate_pairs(key[:, None], c.rope_theta)[:, 0]
        scores += torch.einsum("thd,sd->hts", rotate_pairs(q[..., plain:], c.rope_theta), turned_key)
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = (scores / math.sqrt(plain + turned)).masked_fill(later, -math.inf).softmax(-1)
        return self.linear(torch.einsum("hts,she->the", weights, both[..., plain:]).reshape(tokens, -1), f"{stem}.dense")

    def experts(self, x, stem):
        c = self.config
        scores = self.linear(x, f"{stem}.gate").sigmoid()
        choice = scores + self.tensors[f"{stem}.gate.expert_bias"]
        of_groups = choice.view(len(x), c.n_group, -1).topk(2, -1).values.sum(-1)
        groups = torch.zeros_like(of_groups).scatter(1, of_groups.topk(c.topk_group, -1).indices, 1.0)
        allowed = groups.repeat_interleave(c.num_experts // c.n_group, -1) > 0
        chosen = choice.masked_fill(~allowed, -math.inf).topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor
        out = self.network(x, f"{stem}.shared_experts")
        for token in range(len(x)):
            for expert, weight in zip(chosen[token].tolist(), weights[token]):
                out[token] += weight * self.network(x[token : token + 1], f"{stem}.experts.{expert}")[0]
        return out

    def __call__(self, input_ids, use_cache):
        c = self.config
        x = self.tensors["model.word_embeddings.weight"][input_ids[0]]
        for layer in range(c.num_hidden_layers):
            stem = f"model.layers.{layer}"
            seen = self.norm(x, f"{stem}.input_layernorm")
            mixed = self.lightning(seen, f"{stem}.attention", layer) if self.is_linear(layer) else self.latent(seen, f"{stem}.attention")
            x = x + mixed
            seen = self.norm(x, f"{stem}.post_attention_layernorm")
            part = self.network if layer < c.first_k_dense_replace else self.experts
            x = x + part(seen, f"{stem}.mlp")
        logits = self.linear(self.norm(x, "model.norm"), "lm_head")
        return types.SimpleNamespace(logits=logits[None].float())
