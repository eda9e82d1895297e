#!/usr/bin/env python3
"""Makes the tiny random checkpoints of `CONFIGS` with their golden files, and the assistants of gemma4 and gemma4-e in
`parity-assistants`.

    python3 tests/parity/make.py [NAME ...]

Needs torch, transformers (made with 5.23.0; the assistants, gemma4-unified and what follows phi4-mini with 5.24.0) and safetensors. A checkpoint has the published form of its family: its
weights are random (seed 0) and stored as bf16; the logits are transformers' in float32 with eager attention (the assistants' in float64). Prompts and
tokenizer are those of the checkpoint qwen3.
"""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import lightning
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = pathlib.Path(__file__).resolve().parent
PROMPTS = HERE / "qwen3"
NEW_TOKENS = 24

TEXT = dict(
    vocab_size=384, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)
MROPE = dict(rope_type="default", rope_theta=5e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=32, out_hidden_size=32, patch_size=4,
    num_position_embeddings=16, deepstack_visual_indexes=[0],
)
TOKENS = dict(image_token_id=380, video_token_id=381, vision_start_token_id=382, vision_end_token_id=383)


def long_rope(pairs):
    factors = lambda slope: [1.0 + slope * pair for pair in range(pairs)]
    return dict(rope_type="longrope", rope_theta=1e4, short_factor=factors(0.1), long_factor=factors(0.7))


# Nemotron 3 Nano: as published, time steps have no least value; transformers to 5.23 takes one from
# `time_step_min` in prompts, so that it is next to nothing here.
NEMOTRON = dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"], head_dim=16, ssm_state_size=16, mamba_num_heads=4,
    mamba_head_dim=16, n_groups=2, chunk_size=16, time_step_min=1e-30, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
    topk_group=1, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, routed_scaling_factor=2.5,
)

EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)

# Latent attention to 8 tokens that an indexer chooses; prompts are longer.
SPARSE = dict(
    TEXT, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
    index_topk=8, index_head_dim=16, index_n_heads=8,
)

CONFIGS = {
    "qwen3-vl": dict(
        model_type="qwen3_vl", vision_config=VISION, tie_word_embeddings=True, **TOKENS,
        text_config=dict(TEXT, head_dim=16, rope_parameters=MROPE, tie_word_embeddings=True),
    ),
    "qwen3-vl-moe": dict(
        model_type="qwen3_vl_moe", vision_config=VISION, tie_word_embeddings=False, **TOKENS,
        text_config=dict(
            TEXT, head_dim=16, rope_parameters=MROPE, tie_word_embeddings=False, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[],
        ),
    ),
    "nemotron-h-moe": dict(
        {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}, model_type="nemotron_h", **NEMOTRON
    ),
    # The text part of Gemma 4 12B; transformers stores the numbers of global layers by layer.
    "gemma4-unified": dict(
        TEXT | dict(num_hidden_layers=6), model_type="gemma4_unified_text", head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=32, final_logit_softcapping=30.0,
        tie_word_embeddings=True, layer_types=5 * ["sliding_attention"] + ["full_attention"],
    ),
    # Every prompt is longer than the original context: transformers takes the long factors, as llmctl does by the context.
    "phi4-mini": dict(
        TEXT, model_type="phi3", tie_word_embeddings=True, partial_rotary_factor=0.75, rms_norm_eps=1e-5,
        original_max_position_embeddings=4, sliding_window=None,
        rope_parameters=dict(long_rope(3), partial_rotary_factor=0.75, original_max_position_embeddings=4),
    ),
    # Norms of layers are stored minus 1, that of the end is not.
    "muse-glimmer": dict(
        model_type="muse_glimmer", image_token_id=380, video_token_id=381, out_hidden_size=64, projector_hidden_size=16,
        tie_word_embeddings=False, vision_config=dict(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=4, pos_emb_height=4,
            pos_emb_width=4, max_position_embeddings=16,
        ),
        text_config=dict(
            TEXT, head_dim=16, sliding_window=32, rope_parameters=dict(rope_type="default", rope_theta=5e5),
            output_multiplier=0.7, final_logit_softcapping=2.0,
        ),
    ),
    "afmoe": dict(
        TEXT | EXPERTS, model_type="afmoe", head_dim=16, num_dense_layers=1, num_shared_experts=2, route_scale=2.5,
        route_norm=True, sliding_window=32, mup_enabled=True,
    ),
    "hy3": dict(TEXT | EXPERTS, model_type="hy_v3", head_dim=16, router_scaling_factor=2.826),
    "exaone-moe": dict(
        TEXT | EXPERTS, model_type="exaone_moe", head_dim=16, sliding_window=32, sliding_window_pattern=4,
        scoring_func="sigmoid", rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    # Full attention with half-rotated heads in every fourth layer; heads differ in number.
    "laguna": dict(
        TEXT | EXPERTS, model_type="laguna", head_dim=16, sliding_window=32, shared_expert_intermediate_size=40,
        moe_routed_scaling_factor=2.5, num_attention_heads_per_layer=[4, 6, 6, 6],
        layer_types=["full_attention"] + 3 * ["sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(
                rope_type="yarn", rope_theta=5e5, partial_rotary_factor=0.5, factor=4.0, original_max_position_embeddings=64,
                beta_fast=64.0, beta_slow=1.0, attention_factor=1.0,
            ),
            sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
        ),
    ),
    # Layers differ in windows, heads and rotated parts; the limits cut off some values. No rotary pair is blended, so that llama.cpp's
    # divisors give the same bits.
    "step3.5": dict(
        model_type="step3p7", image_token_id=380, tie_word_embeddings=False, vision_config=dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14, mlp_ratio=2.0,
            max_position_embeddings=16,
        ),
        text_config=dict(
            TEXT, head_dim=16, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, share_expert_dim=40,
            moe_router_scaling_factor=3.0, sliding_window=32, num_sliding_attention_heads=6,
            layer_types=["full_attention"] + 3 * ["sliding_attention"], moe_layers_enum="1,2,3",
            swiglu_limits=[0.0, 0.0, 0.3, 0.3], swiglu_limits_shared=[0.0, 0.0, None, 0.4],
            rope_theta=[5e6, 1e4, 1e4, 1e4], partial_rotary_factors=[0.5, 1.0, 1.0, 1.0],
            rope_scaling=dict(
                rope_type="llama3", factor=2.0, original_max_position_embeddings=60, low_freq_factor=2.0, high_freq_factor=3.0,
            ),
        ),
    ),
    "cohere2": dict(
        TEXT, model_type="cohere2", sliding_window=32, logit_scale=0.25, rotary_pct=1.0,
        rope_parameters=dict(rope_type="default", rope_theta=5e4),
    ),
    "cohere2-moe": dict(
        TEXT | dict(intermediate_size=24), model_type="cohere2_moe", head_dim=16, sliding_window=32, logit_scale=0.25,
        num_experts=8, num_experts_per_tok=2, num_shared_experts=2, first_k_dense_replace=1,
        prefix_dense_intermediate_size=96, expert_selection_fn="sigmoid", rope_theta=5e4,
    ),
    "mistral4": dict(
        TEXT, model_type="mistral4", num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=24, first_k_dense_replace=1, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        ),
    ),
    "deepseek3.2": dict(
        SPARSE, model_type="deepseek_v32", n_group=4, topk_group=2, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
            mscale=1.0, mscale_all_dim=1.0,
        ),
    ),
    # With this width no scores tie where the choice ends; torch leaves open which of them it takes.
    "glm-dsa": dict(
        SPARSE | dict(index_head_dim=24), model_type="glm_moe_dsa", rms_norm_eps=1e-5,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    # GLM-4.5 computes what Ling 2 does; the file gets the names of the latter.
    "bailing-moe2": dict(
        TEXT, model_type="glm4_moe", head_dim=16, attention_bias=False, use_qk_norm=True, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=6e5, partial_rotary_factor=0.5),
    ),
    "bailing-moe3": dict(
        TEXT | dict(num_key_value_heads=4), model_type="bailing_hybrid", q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, head_dim=16, num_experts=8, num_experts_per_tok=2, num_shared_experts=1, n_group=4,
        topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1, layer_group_size=4, short_conv_kernel_size=4,
        kda_safe_gate=True, kda_lower_bound=-5.0, routed_scaling_factor=2.5, norm_topk_prob=True, rope_theta=6e6,
        num_nextn_predict_layers=0,
    ),
    "mimo-v2": dict(
        TEXT | dict(num_key_value_heads=1), model_type="mimo_v2_flash", head_dim=24, v_head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=32, norm_topk_prob=True, rms_norm_eps=1e-5,
        layer_types=["full_attention"] + 3 * ["sliding_attention"], tie_word_embeddings=False,
    ),
    # Two heads of keys choose two blocks of 32 tokens each; the last prompt has five blocks.
    "minimax-m3": dict(
        model_type="minimax_m3_vl", image_token_index=380, video_token_index=381, projector_hidden_size=16, vision_config=dict(
            hidden_size=20, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=4,
        ),
        text_config=dict(
            TEXT | dict(intermediate_size=24), head_dim=16, dense_intermediate_size=96, shared_intermediate_size=24,
            num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, partial_rotary_factor=0.5, rope_theta=5e6,
            moe_layer_freq=[0, 1, 1, 1], sparse_attention_config=dict(
                use_sparse_attention=True, sparse_index_dim=24, sparse_num_index_heads=2, sparse_topk_blocks=2,
                sparse_block_size=32, sparse_score_type="max", sparse_init_block=0, sparse_local_block=1,
                sparse_attention_freq=[0, 1, 1, 1], sparse_disable_index_value=[0, 1, 1, 1],
            ),
        ),
    ),
    # An indexer chooses two blocks of 4 tokens. The n-grams' table is stored in parts. There are as many key heads as value heads, since
    # llama.cpp's converter would order more value heads anew, and sums over them, so that its file would give other bits.
    "qwen4-exp": dict(
        model_type="qwen4_exp", tie_word_embeddings=False, **TOKENS,
        vision_config=dict(
            depth=1, hidden_size=16, num_heads=2, intermediate_size=32, out_hidden_size=32, patch_size=4, num_position_embeddings=16,
        ),
        text_config=dict(
            TEXT | EXPERTS, head_dim=16, shared_expert_intermediate_size=40, tie_word_embeddings=False, rms_norm_eps=1e-6,
            layer_types=2 * ["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, output_gate_type="sigmoid",
            rope_parameters=dict(
                rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True,
            ),
            hc_count=4, hc_lowrank=8, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
            indexer_compress_ratio=4, ple_layer_ids=[3], ple_embed_dim=32, ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=2,
            ngram_vocab_size_base=200, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=4, seed=1234,
        ),
    ),
    "kimi-linear": dict(
        TEXT | dict(num_key_value_heads=4), model_type="kimi_linear", kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, num_experts=8, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=24, first_k_dense_replace=1, linear_attn_config=dict(
            head_dim=16, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3],
        ),
    ),
}
# No class of transformers: lightning.py computes it.
LING = dict(
    TEXT | dict(num_attention_heads=6, num_key_value_heads=6), model_type="bailing_hybrid", q_lora_rank=24, kv_lora_rank=32,
    qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, head_dim=16, num_experts=8, num_experts_per_tok=2,
    num_shared_experts=1, n_group=4, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1, layer_group_size=4,
    group_norm_size=3, partial_rotary_factor=0.5, use_qk_norm=True, use_bias=False, use_qkv_bias=False, routed_scaling_factor=2.5,
    norm_topk_prob=True, score_function="sigmoid", moe_router_enable_expert_bias=True, rope_theta=6e5, rope_interleave=True,
    rms_norm_eps=1e-6, tie_word_embeddings=False, num_nextn_predict_layers=0, architectures=["BailingMoeV2_5ForCausalLM"],
)
CONFIGS["mimo-v2.5"] = CONFIGS["mimo-v2"] | dict(num_key_value_heads=2)
CENTERED = {
    "minimax_m3_vl": "norm.weight", "muse_glimmer": "layernorm.weight", "step3p7": "norm.weight",
    "qwen4_exp": ("hc_norm.weight", "layernorm.weight", "q_norm.weight", "k_norm.weight"),
}


# Names of assistants: the checkpoint that each drafts for, and whether it has centroids.
ASSISTANTS = {"gemma4-assistant": ("gemma4", False), "gemma4-e-assistant": ("gemma4-e", True)}
OF_ASSISTANTS = HERE.parent / "parity-assistants"
DRAFTED = 4


def draw(model):
    centered = CENTERED.get(model.config.model_type, "-")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                is_norm = name.endswith(("norm.weight", "norm_f.weight")) and not name.endswith(centered)
                weight.normal_(1.0 if is_norm else 0.0, 0.1)
            else:
                weight.normal_(0.0, 0.3 if "embed_tokens" in name or "word_embeddings" in name else 1.0 / math.sqrt(weight.shape[-1]))
            weight.copy_(weight.bfloat16().float())


def make_model(config):
    torch.manual_seed(0)
    is_multimodal = hasattr(config, "vision_config") or config.model_type == "mistral4"
    auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw(model)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn_like(bias).mul(0.1).bfloat16().float())
    return model


def golden(model, tokens):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        greedy, margins, all_tokens = [], [], list(tokens)
        for _ in range(NEW_TOKENS):
            last = model(input_ids=torch.tensor([all_tokens]), use_cache=False).logits[0, -1]
            best, second = last.topk(2).values.tolist()
            margins.append(best - second)
            greedy.append(int(last.argmax()))
            all_tokens.append(greedy[-1])
    positions = sorted({*range(0, len(tokens), 16), len(tokens) - 1})
    return positions, logits[positions].contiguous(), greedy, min(margins)


def turn_experts(path):
    """Stores experts as `[expert, in, out]`, as the published Qwen3-VL-MoE checkpoints do; transformers reads both."""
    tensors = load_file(path)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata=dict(format="pt"))


BAILING = [
    ("model.embed_tokens", "model.word_embeddings"), ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"), ("self_attn.k_norm", "attention.key_layernorm"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
]


def name_as_bailing(into):
    """Gives a checkpoint of GLM-4.5 the names of Ling 2's files."""
    tensors = {}
    for name, tensor in load_file(into / "model.safetensors").items():
        for ours, theirs in BAILING:
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    for layer in range(TEXT["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    save_file(tensors, into / "model.safetensors", metadata=dict(format="pt"))
    config = json.loads((into / "config.json").read_text())
    config |= dict(architectures=["BailingMoeV2ForCausalLM"], model_type="bailing_moe_v2", score_function="sigmoid")
    config |= dict(num_experts=config.pop("n_routed_experts"), num_shared_experts=config.pop("n_shared_experts"))
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")


STEP = dict(
    architectures=["Step3p5ForCausalLM"], model_type="step3p5", num_attention_groups=2, moe_num_experts=8, moe_top_k=2,
    norm_expert_weight=True, attention_other_setting=dict(num_attention_heads=6, num_attention_groups=2, head_dim=16),
    num_nextn_predict_layers=0,
)


def publish_step(into):
    """Leaves the text of Step 3.5, with the keys of the published config."""
    text = {name: tensor for name, tensor in load_file(into / "model.safetensors").items() if name.startswith(("model.", "lm_head"))}
    save_file(text, into / "model.safetensors", metadata=dict(format="pt"))
    config = STEP | {key: value for key, value in CONFIGS["step3.5"]["text_config"].items() if key not in (
        "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "num_sliding_attention_heads",
    )}
    (into / "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=False), indent=2) + "\n")


def publish_ling(into):
    """Writes the keys of the published config of Ling 3."""
    published = dict(
        architectures=["BailingMoeV3ForCausalLM"], no_kda_lora=True, gated_attention_proj_granularity_type="head_wise",
        scoring_func="sigmoid", moe_shared_expert_intermediate_size=24, tie_word_embeddings=False, rms_norm_eps=1e-6,
    )
    (into / "config.json").write_text(json.dumps(published | CONFIGS["bailing-moe3"], indent=2) + "\n")


def publish_mimo(name, into):
    """Writes the keys of the published config of MiMo V2 Flash; MiMo V2.5 has queries, keys and values in one matrix."""
    of_class = CONFIGS[name]
    heads = dict(num_attention_heads=4, head_dim=24, v_head_dim=16)
    published = dict(
        architectures=["MiMoV2FlashForCausalLM"], hybrid_layer_pattern=[0, 1, 1, 1], moe_layer_freq=[0, 1, 1, 1],
        layernorm_epsilon=1e-5, rope_theta=5e6, swa_rope_theta=1e4, partial_rotary_factor=0.334, swa_num_key_value_heads=2 * of_class["num_key_value_heads"],
        attention_value_scale=0.707, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, n_group=1,
        topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", routed_scaling_factor=None, n_shared_experts=None,
        rope_scaling=None, **{f"swa_{key}": value for key, value in heads.items()},
    )
    config = {key: value for key, value in of_class.items() if key not in ("layer_types", "rms_norm_eps")}
    published |= config
    (into / "config.json").write_text(json.dumps(published, indent=2) + "\n")
    if name == "mimo-v2.5":
        convert_split(into)
        fuse_mimo(into, published)


def convert_split(into):
    """Writes a GGUF file of separate queries, keys and values; llama.cpp's converter joins parts only of FP8 in blocks of 128."""
    if "LLAMA_CPP" in os.environ:
        subprocess.run([sys.executable, HERE.parent / "parity-gguf/convert.py", into], check=True)


def fuse_mimo(into, config):
    """Cuts queries, keys and values into as many parts as full layers have heads of keys, and joins the three of each part. Writes
    the matrices in FP8 to tests/packed, too, where each part has its own blocks of scales."""
    num_parts, block = config["num_key_value_heads"], [64, 16]
    tensors, packed, values = load_file(into / "model.safetensors"), {}, {}
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}.self_attn"
        three = [tensors.pop(f"{stem}.{part}_proj.weight").chunk(num_parts) for part in "qkv"]
        parts = [torch.cat(part) for part in zip(*three)]
        tensors[f"{stem}.qkv_proj.weight"] = torch.cat(parts)
        codes, scales, dequantized = map(list, zip(*(fp8_blocks(part.float(), block) for part in parts)))
        packed[f"{stem}.qkv_proj.weight"] = torch.cat(codes)
        packed[f"{stem}.qkv_proj.weight_scale_inv"] = torch.cat(scales)
        lengths = [len(part[0]) for part in three]
        for name, *shares in zip("qkv", *(part.split(lengths) for part in dequantized)):
            values[f"{stem}.{name}_proj.weight"] = torch.cat(shares)
    save_file(tensors, into / "model.safetensors", metadata=dict(format="pt"))
    published = dict(architectures=["MiMoV2ForCausalLM"], model_type="mimo_v2", attention_projection_layout="fused_qkv")
    quantized = dict(quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=block))
    out = HERE.parent / "packed/fp8-fused"
    out.mkdir(exist_ok=True)
    save_file(packed, out / "model.safetensors")
    save_file(values, out / "dequantized.safetensors")
    for folder, more in [(into, {}), (out, quantized)]:
        (folder / "config.json").write_text(json.dumps(config | published | more, indent=2) + "\n")


def fp8_blocks(weight, block):
    """Returns codes, the scale of each block, and the values that both stand for."""
    spread = lambda scales: scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: weight.shape[0], : weight.shape[1]]
    rows, cols = (-(-size // of) for size, of in zip(weight.shape, block))
    parts = [[weight[row * block[0] :][: block[0], col * block[1] :][:, : block[1]] for col in range(cols)] for row in range(rows)]
    scales = torch.stack([torch.stack([part.abs().max() / 448 for part in row]) for row in parts])
    codes = (weight / spread(scales)).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread(scales)


def publish_minimax(into):
    """Leaves the text of MiniMax M3, with the keys of the published config."""
    text = {name: tensor for name, tensor in load_file(into / "model.safetensors").items() if name.startswith("language_model.")}
    save_file(text, into / "model.safetensors", metadata=dict(format="pt"))
    published = CONFIGS["minimax-m3"]["text_config"] | dict(
        hidden_act="swigluoai", use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head", scoring_func="sigmoid",
        use_routing_bias=True, n_shared_experts=1, routed_scaling_factor=2.0, swiglu_alpha=1.702, swiglu_limit=7.0,
        rms_norm_eps=1e-6, tie_word_embeddings=False, num_nextn_predict_layers=0,
    )
    config = dict(
        architectures=["MiniMaxM3SparseForConditionalGeneration"], model_type="minimax_m3_vl", image_token_index=380,
        text_config=published,
    )
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def publish_qwen4(into):
    """Leaves the text of Qwen3.8-Flash-Next, with the keys of the published config."""
    text = {name: tensor for name, tensor in load_file(into / "model.safetensors").items() if ".visual." not in name}
    save_file(text, into / "model.safetensors", metadata=dict(format="pt"))
    published = dict(
        architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp", tie_word_embeddings=False,
        text_config=CONFIGS["qwen4-exp"]["text_config"] | dict(model_type="qwen4_exp_text", hidden_act="silu", norm_topk_prob=True), **TOKENS,
    )
    (into / "config.json").write_text(json.dumps(published, indent=2) + "\n")


def name_dense(path):
    """Names dense parts as the published Kimi Linear does, not as experts."""
    published = lambda name: re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    tensors = {published(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata=dict(format="pt"))


def make(name, into):
    if name == "bailing-moe2.5":
        torch.manual_seed(0)
        model = lightning.Ling(LING)
        config = model.config
        draw(model)
    else:
        config = AutoConfig.for_model(**CONFIGS[name])
        model = make_model(config)
    prompts = json.loads((PROMPTS / "golden.json").read_text())["prompts"]
    into.mkdir(parents=True, exist_ok=True)
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        shutil.copy(PROMPTS / file, into / file)
    report = dict(
        architecture=name, model_type=config.model_type, transformers=transformers.__version__,
        torch=torch.__version__, dtype="float64" if name == "bailing-moe2.5" else "float32", prompts={},
    )
    tensors = {}
    for prompt, stored in prompts.items():
        positions, logits, greedy, margin = golden(model, stored["tokens"])
        report["prompts"][prompt] = dict(tokens=stored["tokens"], greedy=greedy, greedy_margin_min=margin)
        tensors[f"{prompt}.tokens"] = torch.tensor(stored["tokens"])
        tensors[f"{prompt}.positions"] = torch.tensor(positions)
        tensors[f"{prompt}.logits"] = logits
        print(name, prompt, f"least margin {margin:.2e}, largest logit {logits.abs().max():.1f}")
    save_file(tensors, into / "golden.safetensors")
    (into / "golden.json").write_text(json.dumps(report, indent=1) + "\n")
    if name == "bailing-moe2.5":
        stored = {key: tensor.bfloat16() for key, tensor in model.tensors.items()}
        save_file(stored, into / "model.safetensors", metadata=dict(format="pt"))
        (into / "config.json").write_text(json.dumps(LING, indent=2) + "\n")
        return
    model.to(torch.bfloat16).save_pretrained(into)
    if name.startswith("qwen3-vl"):
        turn_experts(into / "model.safetensors")
    if name == "bailing-moe2":
        name_as_bailing(into)
    if name == "bailing-moe3":
        publish_ling(into)
    shutil.copy(PROMPTS / "generation_config.json", into / "generation_config.json")
    if name.startswith("mimo-v2"):
        publish_mimo(name, into)
    if name == "step3.5":
        publish_step(into)
    if name == "minimax-m3":
        publish_minimax(into)
    if name == "qwen4-exp":
        publish_qwen4(into)
    if name == "kimi-linear":
        name_dense(into / "model.safetensors")


def assistant_of(of, has_centroids):
    stored = json.loads((HERE / of / "config.json").read_text())
    stored = stored.get("text_config", stored)
    text = stored | dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_kv_shared_layers=4, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, use_double_wide_mlp=False, final_logit_softcapping=None,
        layer_types=3 * ["sliding_attention"] + ["full_attention"],
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=stored["hidden_size"], use_ordered_embeddings=has_centroids,
        num_centroids=24, centroid_intermediate_top_k=4,
    )
    torch.manual_seed(0)
    return transformers.Gemma4AssistantForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float64).eval()


def drafts(target, assistant, tokens):
    """A draft after a prompt and its likeliest token: logits and hidden states of each step, as the class's generator makes them."""
    with torch.no_grad():
        out = target(
            input_ids=torch.tensor([tokens]), use_cache=True, output_hidden_states=True, return_shared_kv_states=True
        )
        token, hidden = out.logits[0, -1].argmax(), out.hidden_states[-1][:, -1:]
        drafted, logits, states = [int(token)], [], []
        for _ in range(DRAFTED):
            embedding = target.get_input_embeddings()(token.view(1, 1))
            step = assistant(
                inputs_embeds=torch.cat([embedding, hidden], dim=-1), position_ids=torch.tensor([[len(tokens)]]),
                shared_kv_states=out.shared_kv_states,
            )
            logits.append(step.logits[0, 0])
            hidden, token = step.last_hidden_state, logits[-1].argmax()
            states.append(hidden[0, 0])
            drafted.append(int(token))
    return drafted, torch.stack(logits), torch.stack(states)


def make_assistant(name, into):
    of, has_centroids = ASSISTANTS[name]
    target = AutoModelForCausalLM.from_pretrained(HERE / of, attn_implementation="eager", dtype=torch.float64).eval()
    assistant = assistant_of(of, has_centroids)
    draw(assistant)
    with torch.no_grad():
        for name, buffer in assistant.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_((0.5 + torch.rand_like(buffer)).bfloat16())
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    # The golden logits are those of all tokens, whatever centroids choose. An assistant sees the rows that the model's next row
    # will see; transformers' mask has two more.
    assistant.config.use_ordered_embeddings = False
    assistant.config.text_config.sliding_window -= 2
    into.mkdir(parents=True, exist_ok=True)
    report = dict(
        architecture=name, transformers=transformers.__version__, torch=torch.__version__, dtype="float64", prompts={}
    )
    tensors = {}
    for prompt, stored in json.loads((PROMPTS / "golden.json").read_text())["prompts"].items():
        drafted, logits, states = drafts(target, assistant, stored["tokens"])
        report["prompts"][prompt] = dict(tokens=stored["tokens"], drafted=drafted)
        tensors[f"{prompt}.logits"], tensors[f"{prompt}.hidden"] = logits.float(), states.float()
        print(name, prompt, len(stored["tokens"]), f"largest logit {logits.abs().max():.1f}")
    save_file(tensors, into / "golden.safetensors")
    (into / "golden.json").write_text(json.dumps(report, indent=1) + "\n")
    assistant.config.use_ordered_embeddings = has_centroids
    assistant.config.text_config.sliding_window += 2
    assistant.to(torch.bfloat16).save_pretrained(into)
    (into / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*CONFIGS, "bailing-moe2.5", *ASSISTANTS]:
        if name in ASSISTANTS:
            make_assistant(name, OF_ASSISTANTS / name)
        else:
            make(name, HERE / name)
