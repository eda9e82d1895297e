//! Cohere's Command from Command R7B on: one norm per layer, by mean and deviation, which attention and the feed-forward part
//! both read; a window and positions on three of four layers, neither on the others; scaled logits. Command A+ has experts, of
//! which routed and shared ones are averaged. Sources: transformers `Cohere2Config`, `Cohere2MoeConfig`; llama.cpp's `cohere2`
//! and `cohere2moe` for GGUF.

use super::deepseek::{ExpertFacts, set_experts};
use super::dense::{ConfigDefaults, MAX_WIDTH};
use super::experts::ExpertKeys;
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, MixerConfig, PartNames};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        context_length: 8192,
        norm_eps: 1e-5,
        tied: Some(true),
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [true; 2],
    adjust,
    ..Family::new("cohere2", &["cohere2"], &["cohere2"])
};

pub const MOE_FAMILY: Family = Family {
    name: "cohere2-moe",
    model_types: &["cohere2_moe"],
    gguf_names: &["cohere2moe"],
    defaults: ConfigDefaults { head_dim: Some(128), experts: true, ..FAMILY.defaults },
    adjust: |description, reader| {
        adjust(description, reader)?;
        set_averaged_experts(description, reader)
    },
    ..FAMILY
};

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    let num_layers = description.config.layers.len();
    let slides = slides(reader, num_layers)?;
    description.slide_with_positions(reader.window()?.unwrap_or(4096), &slides);
    let rms = reader.pick("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    let config = &mut description.config;
    config.centers_norms = reader.value(rms).is_none();
    if config.centers_norms {
        let key = reader.pick("layer_norm_eps", "attention.layer_norm_epsilon");
        config.final_norm_eps = reader.number(key)?.unwrap_or(1e-5);
    }
    config.logit_scale = reader.number("logit_scale")?.unwrap_or(0.0625);
    for layer in &mut config.layers {
        (layer.is_parallel, layer.norm_eps) = (true, config.final_norm_eps);
    }
    Ok(())
}

/// Returns which layers have a window. In config.json the first dense layers have a pattern of their own.
fn slides(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    let period = reader.interval("sliding_window_pattern", 4)?;
    let (dense, first) = (num_dense(reader)?, reader.interval("prefix_dense_sliding_window_pattern", 1)?);
    if reader.is_gguf() {
        return reader.sliding_pattern(num_layers, 4);
    }
    reader.sliding_or(num_layers, |layer| match layer.checked_sub(dense) {
        None => !(layer + 1).is_multiple_of(first),
        Some(layer) => !(layer + 1).is_multiple_of(period),
    })
}

/// Returns the number of first layers without experts.
fn num_dense(reader: &ConfigReader) -> LoadResult<usize> {
    Ok(reader.count(reader.pick("first_k_dense_replace", "leading_dense_block_count"))?.unwrap_or(0))
}

fn set_averaged_experts(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    const WAY: &str = "shared_expert_combination_strategy";
    const WEIGHTS: &str = "expert_selection_fn";
    const FACTS: ExpertFacts = ExpertFacts {
        keys: ExpertKeys { intermediate_size: "intermediate_size", ..ExpertKeys::QWEN },
        dense: ("first_k_dense_replace", 0),
        parts: PartNames::SHARED_EXPERTS,
        ..ExpertFacts::NUMBERED
    };
    set_experts(description, reader, &FACTS)?;
    let averages = match reader.string(WAY)?.as_deref() {
        None | Some("average") => true,
        Some("sum") => false,
        Some(other) => return Err(reader.error(WAY, format!("{other:?} is not known"))),
    };
    let sums_to_one = reader.flag(reader.pick("norm_topk_prob", "expert_weights_norm"))?.unwrap_or(true);
    let weights = match reader.string(WEIGHTS)?.as_deref() {
        None if reader.is_gguf() && reader.count("expert_gating_func")? != Some(1) => {
            ExpertWeights::sigmoid(sums_to_one)
        }
        None | Some("softmax") => ExpertWeights::OfUsed,
        Some("sigmoid") => ExpertWeights::sigmoid(sums_to_one),
        Some(other) => return Err(reader.error(WEIGHTS, format!("{other:?} is not known"))),
    };
    let dense_key = reader.pick("prefix_dense_intermediate_size", "feed_forward_length");
    let dense_width = reader.count(dense_key)?.map(|_| reader.size(dense_key, MAX_WIDTH)).transpose()?;
    let forces_rope = reader.is_gguf() || reader.interval("prefix_dense_sliding_window_pattern", 1)? == 1;
    for layer in &mut description.config.layers {
        let part = &mut layer.feed_forward;
        match &mut part.experts {
            Some(experts) => {
                (experts.weights, experts.has_bias) = (weights, false);
                if averages && part.dense.is_some() {
                    layer.residual_scales[1] = 0.5;
                }
            }
            None => {
                if let (Some(dense), Some(width)) = (&mut part.dense, dense_width) {
                    dense.intermediate_size = width;
                }
                if let (MixerConfig::Attention(attention), true) = (&mut layer.mixer, forces_rope) {
                    attention.rope = Some(0);
                }
            }
        }
    }
    Ok(())
}
