//! Falcon-H1: in every layer, attention and a Mamba-2 mixer read the same input; multipliers everywhere.
//! Source: transformers `FalconH1Config`, `FalconH1DecoderLayer`; llama.cpp's `falcon-h1`, whose converter
//! has multiplied the matrices.

use serde_json::Value;

use super::dense::ConfigDefaults;
use super::ssm::{MAMBA_KEYS, inner_size, ssm};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, MixerConfig, NormNames, PartNames, SsmConfig, SsmFactors, SsmNorm};
use llmctl_base::error::{LoadError, LoadResult};

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        context_length: 8192,
        norm_eps: 1e-5,
        tied: Some(false),
        ..ConfigDefaults::CLASS
    },
    norms: NormNames {
        pre_mlp: ["pre_ff_layernorm", "ffn_norm"],
        last: ["final_layernorm", "output_norm"],
        ..NormNames::LLAMA
    },
    parts: PartNames {
        mlp: [
            ["feed_forward.gate_proj", "ffn_gate"],
            ["feed_forward.up_proj", "ffn_up"],
            ["feed_forward.down_proj", "ffn_down"],
        ],
        ..PartNames::LLAMA
    },
    adjust,
    ..Family::new("falcon-h1", &["falcon_h1"], &["falcon-h1"])
};

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let inner = inner_size(reader, Some("mamba_d_ssm"), "mamba_expand", description.config.hidden_size)?;
    let mut ssm = ssm(reader, &MAMBA_KEYS, inner)?;
    ssm.norm = norm(reader)?;
    let factors = Multipliers::parse(reader)?;
    factors.scale_ssm(&mut ssm);
    description.config.embedding_scale = factors.embedding;
    description.config.logit_scale = factors.head;
    for layer in &mut description.config.layers {
        if let MixerConfig::Attention(attention) = &mut layer.mixer {
            // q . k has the input's factor twice, and the values once.
            attention.scale *= factors.attention_in * factors.attention_in * factors.key;
            let scales = [factors.attention_in * factors.attention_out, factors.ssm_out];
            let (attention, ssm) = (attention.clone(), ssm.clone());
            layer.mixer = MixerConfig::AttentionAndSsm { attention, ssm, scales };
        }
        if let Some(dense) = layer.feed_forward.dense.as_mut().filter(|_| factors.mlp[0] != 1.0) {
            dense.activation = Activation::ScaledSilu { factor: factors.mlp[0] };
        }
        layer.residual_scales = [1.0, factors.mlp[1]];
    }
    Ok(())
}

/// Returns the kind of norm.
fn norm(reader: &ConfigReader) -> LoadResult<SsmNorm> {
    if reader.is_gguf() {
        return Ok(SsmNorm::IfStored);
    }
    Ok(match (reader.flag("mamba_rms_norm")?, reader.flag("mamba_norm_before_gate")?) {
        (Some(true), None | Some(true)) => SsmNorm::BeforeGate,
        (Some(true), Some(false)) => SsmNorm::AfterGate,
        _ => SsmNorm::None,
    })
}

/// Multipliers of a configuration, all 1 in GGUF.
struct Multipliers {
    embedding: f32,
    head: f32,
    attention_in: f32,
    attention_out: f32,
    key: f32,
    ssm_in: f32,
    ssm_out: f32,
    /// Gate, values, key, query, step.
    ssm: [f32; 5],
    /// Gate and down.
    mlp: [f32; 2],
}

impl Multipliers {
    fn parse(reader: &ConfigReader) -> LoadResult<Self> {
        let one = |key| Ok::<_, LoadError>(reader.number(key)?.unwrap_or(1.0));
        let this = Self {
            embedding: one("embedding_multiplier")?,
            head: one("lm_head_multiplier")?,
            attention_in: one("attention_in_multiplier")?,
            attention_out: one("attention_out_multiplier")?,
            key: one("key_multiplier")?,
            ssm_in: one("ssm_in_multiplier")?,
            ssm_out: one("ssm_out_multiplier")?,
            ssm: list(reader, "ssm_multipliers")?,
            mlp: list(reader, "mlp_multipliers")?,
        };
        // The multipliers are applied to products, which would multiply biases too.
        for (flag, multiplies) in [
            ("attention_bias", this.attention_in != 1.0 || this.key != 1.0),
            ("mamba_proj_bias", this.ssm_in != 1.0),
        ] {
            if multiplies && reader.flag(flag)? == Some(true) {
                return Err(reader.error(flag, "biases are not supported beside multipliers of inputs"));
            }
        }
        Ok(this)
    }

    fn scale_ssm(&self, ssm: &mut SsmConfig) {
        let [gate, values, key, query, step] = self.ssm.map(|factor| factor * self.ssm_in);
        ssm.factors = SsmFactors { gate, values, key, query, step };
    }
}

/// Parses a list of `N` multipliers, all 1 if the file lacks it.
fn list<const N: usize>(reader: &ConfigReader, key: &str) -> LoadResult<[f32; N]> {
    let Some(value) = reader.value(key) else { return Ok([1.0; N]) };
    let numbers = value.as_array().map(|list| list.iter().filter_map(Value::as_f64).map(|x| x as f32));
    let numbers: Option<Vec<f32>> = numbers.map(Iterator::collect);
    numbers
        .and_then(|numbers| numbers.try_into().ok())
        .ok_or_else(|| reader.error(key, format!("{value} is not a list of {N} numbers")))
}
