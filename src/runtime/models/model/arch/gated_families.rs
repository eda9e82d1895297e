//! Families with a gate of their own on the output of attention.

use serde_json::Value;

use super::deepseek::{ExpertFacts, SharedNetwork, set_experts};
use super::dense::{ConfigDefaults, MAX_WIDTH};
use super::expert_families::ROUTER_MODULE;
use super::rope::{partial_factor, rope};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, NormNames, OutputGate, PartNames, QkNorm, RopeConfig, RopeScaling};
use llmctl_base::error::LoadResult;

/// Interval of the layers that see the whole context.
const EVERY_FOURTH: usize = 4;

/// Muse Glimmer, text: a window and positions on three of four layers, counted from the last, neither on the others; a norm of
/// the embeddings and norms of q and k without weights, norms around each part, a factor and a cap of the logits. Sources:
/// transformers `MuseGlimmerTextConfig`; llama.cpp's `muse-glimmer` for GGUF, which has the factor of q as a norm's weights.
pub const MUSE_GLIMMER: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        context_length: 131_072,
        norm_eps: 1e-5,
        tied: Some(false),
        ..ConfigDefaults::CLASS
    },
    norms: NormNames::SANDWICH,
    interleaved_qk: [false, true],
    adjust: muse_glimmer,
    ..Family::new("muse-glimmer", &["muse_glimmer", "muse_glimmer_text"], &["muse-glimmer"])
};

fn muse_glimmer(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    let backward = |layer: usize| !(num_layers - 1 - layer).is_multiple_of(EVERY_FOURTH);
    let slides = match reader.is_gguf() {
        true => reader.sliding_pattern(num_layers, EVERY_FOURTH)?,
        false => reader.sliding_or(num_layers, backward)?,
    };
    description.slide_with_positions(reader.window()?.unwrap_or(2048), &slides);
    let number = |value: &Value| value.as_f64();
    let thetas = reader.list("layer_rope_theta", num_layers, "thetas of the layers", number)?;
    description.normalize_qk(match reader.is_gguf() {
        true => QkNorm::PerHead,
        false => QkNorm::PerHeadBy(reader.number("qk_scale_factor")?.unwrap_or(3.87)),
    });
    let config = &mut description.config;
    config.embedding_norm = Some(config.final_norm_eps);
    let multiplier = reader.number(reader.pick("output_multiplier", "logit_scale"))?;
    config.logit_scale = multiplier.unwrap_or(0.196_116_14);
    let cap = reader.number("final_logit_softcapping")?.unwrap_or(20.0);
    config.final_softcap = Some(cap).filter(|cap| *cap > 0.0);
    let post_norm_eps = reader.number("post_norm_eps")?.unwrap_or(1e-8);
    for layer in &mut config.layers {
        (layer.post_norms, layer.post_norm_eps) = (true, post_norm_eps);
    }
    for (layer, attention) in config.attentions_mut() {
        attention.output_gate = Some(OutputGate::Own(Activation::Sigmoid));
        // The class reads no more of a layer's theta than that there is none.
        if let Some(thetas) = &thetas {
            attention.rope = (thetas[layer] != 0.0).then_some(0);
        }
    }
    description.naming.norm_offset = if reader.is_gguf() { 0.0 } else { 1.0 };
    Ok(())
}

/// AFMoE (Trinity): norms around each part, a window and positions on three of four layers, neither on the others, scaled
/// embeddings, experts weighed by sigmoids. Sources: transformers `AfmoeConfig`; llama.cpp's `afmoe` for GGUF, which scales
/// embeddings always.
pub const AFMOE: Family = Family {
    defaults: ConfigDefaults {
        head_dim: Some(128),
        context_length: 16_384,
        norm_eps: 1e-5,
        experts: true,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames {
        pre_mlp: ["pre_mlp_layernorm", "ffn_norm"],
        post_mlp: ["post_mlp_layernorm", "post_ffw_norm"],
        ..NormNames::SANDWICH
    },
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        const FACTS: ExpertFacts = ExpertFacts {
            scale: "route_scale",
            dense: ("num_dense_layers", 1),
            parts: ROUTER_MODULE,
            ..ExpertFacts::NUMBERED
        };
        set_experts(description, reader, &FACTS)?;
        let period = reader.interval("global_attn_every_n_layers", EVERY_FOURTH)?;
        let slides = reader.sliding_pattern(description.config.layers.len(), period)?;
        description.slide_with_positions(reader.window()?.unwrap_or(1024), &slides);
        let config = &mut description.config;
        if reader.is_gguf() || reader.flag("mup_enabled")? == Some(true) {
            config.embedding_scale = (config.hidden_size as f32).sqrt();
        }
        config.layers.iter_mut().for_each(|layer| layer.post_norms = true);
        let gate = Some(OutputGate::Own(Activation::Sigmoid));
        config.attentions_mut().for_each(|(_, attention)| attention.output_gate = gate);
        Ok(())
    },
    ..Family::new("afmoe", &["afmoe"], &["afmoe"])
};

/// Laguna: layers differ in windows, in the number of heads and in rotary tables; heads have norms of q and k, and a softplus of
/// their gates; experts are weighed by sigmoids. Sources: transformers `LagunaConfig`; llama.cpp's `laguna` for GGUF.
pub const LAGUNA: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 131_072,
        rope_theta: 500_000.0,
        rotated: 0.5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    parts: PartNames { attention_gate: HEAD_GATE, ..PartNames::LLAMA },
    qk_norm: QkNorm::PerHead,
    adjust: laguna,
    ..Family::new("laguna", &["laguna"], &["laguna"])
};

/// Names of gates in families that call them so.
pub const HEAD_GATE: [&str; 2] = ["self_attn.g_proj", "attn_gate"];

fn laguna(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    const FACTS: ExpertFacts = ExpertFacts {
        shared: [SharedNetwork::Width("shared_expert_intermediate_size"), SharedNetwork::GGUF_WIDTH],
        scale: "moe_routed_scaling_factor",
        parts: PartNames {
            attention_gate: HEAD_GATE,
            mlp_beside_experts: PartNames::SHARED_EXPERT,
            expert_bias: ["mlp.experts.e_score_correction_bias", "exp_probs_b.bias"],
            ..PartNames::LLAMA
        },
        ..ExpertFacts::NUMBERED
    };
    const CAP: &str = "moe_router_logit_softcapping";
    if reader.number(CAP)?.is_some_and(|cap| cap > 0.0) {
        return Err(reader.error(CAP, "a cap of the routers' outputs is not supported"));
    }
    set_experts(description, reader, &FACTS)?;
    let num_layers = description.config.layers.len();
    let heads_key = reader.pick("num_attention_heads_per_layer", "attention.head_count");
    set_heads(description, reader, heads_key)?;
    let window = reader.window()?.filter(|window| *window > 0);
    let slides = match (reader.is_gguf(), window) {
        (true, None) => vec![false; num_layers],
        (true, Some(_)) if reader.is_absent("attention.sliding_window_pattern") => {
            (0..num_layers).map(|layer| !layer.is_multiple_of(EVERY_FOURTH)).collect()
        }
        (true, Some(_)) => reader.sliding_pattern(num_layers, EVERY_FOURTH)?,
        (false, _) => reader.sliding_or(num_layers, |_| false)?,
    };
    set_tables(description, reader, &slides, (window.or(Some(512)), 1.0))?;
    let gate = Some(OutputGate::Own(Activation::Softplus));
    description.config.attentions_mut().for_each(|(_, attention)| attention.output_gate = gate);
    Ok(())
}

/// Sets each layer's number of heads, from a list or one for all.
pub fn set_heads(description: &mut Description, reader: &ConfigReader, key: &str) -> LoadResult<()> {
    let Some(heads) = reader.counts(key, description.config.layers.len())? else { return Ok(()) };
    for (layer, attention) in description.config.attentions_mut() {
        let (heads, shared) = (heads[layer], attention.num_kv_heads);
        if heads == 0 || heads > MAX_WIDTH || !heads.is_multiple_of(shared) {
            return Err(reader.error(key, format!("{heads} query heads cannot share {shared} evenly")));
        }
        attention.num_heads = heads;
    }
    Ok(())
}

/// Gives the layers that slide a window and a rotary table of their own, of which the class rotates the fraction `rotated`.
pub fn set_tables(
    description: &mut Description,
    reader: &ConfigReader,
    slides: &[bool],
    (window, rotated): (Option<usize>, f64),
) -> LoadResult<()> {
    const KIND: &str = "sliding_attention";
    let config = &mut description.config;
    let head_dim = config.attentions().next().map_or(0, |attention| attention.head_dim);
    let local = match reader.is_gguf() {
        true => {
            let dim = reader.count("rope.dimension_count_swa")?.unwrap_or(head_dim);
            let theta = reader.number("rope.freq_base_swa")?.unwrap_or(config.ropes[0].theta);
            RopeConfig::new(dim, theta, RopeScaling::None)
        }
        false => {
            let factor = partial_factor(reader, KIND).and_then(|factor| factor.as_f64()).unwrap_or(rotated);
            rope(reader, KIND, (head_dim as f64 * factor) as usize, 10_000.0)?
        }
    };
    if local.dim == 0 || local.dim > head_dim || !local.dim.is_multiple_of(2) {
        let key = reader.pick("rope_parameters", "rope.dimension_count_swa");
        return Err(reader.error(key, format!("{} of {head_dim} values cannot be rotated", local.dim)));
    }
    config.ropes.push(local);
    description.slide(window, |layer| slides[layer]);
    for (layer, attention) in description.config.attentions_mut() {
        attention.rope = Some(usize::from(slides[layer]));
    }
    Ok(())
}
