//! gpt-oss: experts in every layer, a window on every other one, learned sinks, biases everywhere, YaRN.
//! Source: transformers `GptOssConfig`; llama.cpp's converter for the names in GGUF.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    Activation, ExpertWeights, FeedForwardConfig, MlpConfig, NormNames, PartNames, RopeScaling,
};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("gpt-oss", &["gpt_oss"], &["gpt-oss"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        head_dim: Some(64),
        context_length: 131_072,
        rope_theta: 150_000.0,
        norm_eps: 1e-5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("gpt-oss", reader, defaults)?;
    description.naming.alternating_experts = !reader.is_gguf();
    description.naming.norms = NormNames::POST_ATTENTION;
    description.naming.parts = PartNames { router: ["mlp.router", "ffn_gate_inp"], ..PartNames::LLAMA };
    for rope in &mut description.config.ropes {
        // As in the published config; GGUF lacks the key.
        if let (RopeScaling::Yarn { truncate, .. }, true) = (&mut rope.scaling, reader.is_gguf()) {
            *truncate = false;
        }
    }
    set_experts(&mut description, reader)?;
    for (_, attention) in description.config.attentions_mut() {
        attention.has_sinks = true;
    }
    let window = reader.count(reader.pick("sliding_window", "attention.sliding_window"))?.unwrap_or(128);
    let listed = reader.sliding_layers(description.config.layers.len())?;
    let slides = |layer: usize| listed.as_ref().map_or(layer.is_multiple_of(2), |listed| listed[layer]);
    description.slide(Some(window), slides);
    Ok(description)
}

fn set_experts(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    let activation = Activation::ClampedSwish {
        alpha: reader.number("swiglu_alpha")?.unwrap_or(1.702),
        limit: match reader.number("swiglu_limit")?.unwrap_or(7.0) {
            limit if limit >= 0.0 => limit,
            limit => return Err(reader.error("swiglu_limit", format!("{limit} is below 0"))),
        },
    };
    description.replace_dense(
        |_| true,
        |dense| {
            let dense = MlpConfig { activation, ..dense };
            let experts = experts(reader, &ExpertKeys::LOCAL, &dense, ExpertWeights::OfUsed)?;
            Ok(FeedForwardConfig::of_experts(experts))
        },
    )
}
