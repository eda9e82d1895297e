//! Gemma 3n, text: Gemma 4 E's per-layer inputs and shared rows, several residual streams (alternating
//! updates) with a learned residual of low rank, and gates of which only the largest stay in the first
//! layers. Source: transformers `Gemma3nTextConfig`; llama.cpp's converter for GGUF's keys.

use serde_json::Value;

use super::dense::ConfigDefaults;
use super::gemma4::{per_layer_size, set_widths, share_rows};
use super::rope::local_rope;
use super::sliding_families::GEMMA_DEFAULTS;
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, AltUpConfig, NormNames, PerLayerInputs, QkNorm};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(2),
        vocab_size: Some(262_400),
        context_length: 32_768,
        intermediate_size: Some(16_384),
        ..GEMMA_DEFAULTS
    },
    norms: NormNames::SANDWICH,
    qk_norm: QkNorm::PerHead,
    adjust,
    ..Family::new("gemma3n", &["gemma3n", "gemma3n_text"], &["gemma3n"])
};

/// Every fifth layer is global by default.
const PATTERN: usize = 5;

/// Limit on residual streams, above that of any published model.
const MAX_STREAMS: usize = 64;

/// Layers with sparse gates if a file does not list them, and the part of the gates that is cut off.
const SPARSE_LAYERS: usize = 10;
const SPARSITY: f64 = 0.95;

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    let slides = reader.sliding_pattern(num_layers, PATTERN)?;
    let local = local_rope(reader, &description.config.ropes[0], 10_000.0)?;
    let config = &mut description.config;
    config.ropes.push(local);
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.final_softcap =
        Some(reader.number("final_logit_softcapping")?.unwrap_or(30.0)).filter(|cap| *cap > 0.0);
    config.layers.iter_mut().for_each(|layer| layer.post_norms = true);
    for (index, attention) in config.attentions_mut() {
        attention.scale = 1.0;
        attention.value_norm = true;
        attention.rope = Some(usize::from(slides[index]));
    }
    share_rows(description, reader, &slides, 15)?;
    set_widths(description, reader)?;
    let size = per_layer_size(reader)?;
    let vocab_size = description.config.vocab_size;
    let rows = reader.count("vocab_size_per_layer_input")?.unwrap_or(262_144).min(vocab_size);
    description.config.per_layer_inputs = Some(PerLayerInputs {
        size,
        padding: 0,
        num_rows: if reader.is_gguf() { vocab_size } else { rows },
        activation: Activation::GeluTanh,
    });
    description.config.altup = Some(altup(reader, num_layers)?);
    description.slide(Some(reader.window()?.unwrap_or(512)), |layer| slides[layer]);
    Ok(())
}

fn altup(reader: &ConfigReader, num_layers: usize) -> LoadResult<AltUpConfig> {
    let count_key = reader.pick("altup_num_inputs", "altup.num_inputs");
    let num_streams = reader.count(count_key)?.unwrap_or(4);
    if !(2..=MAX_STREAMS).contains(&num_streams) {
        return Err(reader.error(count_key, format!("{num_streams} is not between 2 and {MAX_STREAMS}")));
    }
    let active_key = reader.pick("altup_active_idx", "altup.active_idx");
    let active = reader.count(active_key)?.unwrap_or(0);
    if active >= num_streams {
        return Err(reader.error(active_key, format!("{active} is not one of {num_streams} streams")));
    }
    Ok(AltUpConfig {
        num_streams,
        active,
        scales_output: reader.flag("altup_correct_scale")?.unwrap_or(true),
        gate_cutoffs: gate_cutoffs(reader, num_layers)?,
    })
}

/// Returns for each layer the number of standard deviations above the mean at which gates are cut off; `None` for layers that
/// keep all gates. Hugging Face has the part of the gates that is cut off, GGUF the number itself.
fn gate_cutoffs(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<Option<f32>>> {
    let key = reader.pick("activation_sparsity_pattern", "activation_sparsity_scale");
    let cutoff = |part: f64| (part > 0.0).then(|| normal_quantile(part) as f32);
    match reader.value(key) {
        None => {
            let sparse = if num_layers > SPARSE_LAYERS { SPARSE_LAYERS } else { 0 };
            Ok((0..num_layers).map(|layer| cutoff(SPARSITY).filter(|_| layer < sparse)).collect())
        }
        Some(Value::Array(list)) if list.len() == num_layers => {
            let each = list.iter().map(|value| match (reader.is_gguf(), value.as_f64()) {
                // The converter writes minus infinity for layers that keep all gates.
                (true, scale) => Ok(scale.filter(|scale| scale.is_finite()).map(|scale| scale as f32)),
                (false, Some(part)) if (0.0..1.0).contains(&part) => Ok(cutoff(part)),
                (false, _) => Err(reader.error(key, format!("{value} is not a part of the gates"))),
            });
            each.collect()
        }
        Some(_) => Err(reader.error(key, format!("is not a list of {num_layers} numbers"))),
    }
}

/// Returns the value below which a part of the standard normal distribution lies. Newton's method on Marsaglia's series (2004)
/// for the distribution.
fn normal_quantile(part: f64) -> f64 {
    let mut x = 0f64;
    for _ in 0..50 {
        let density = libm::exp(-0.5 * x * x) / (2.0 * std::f64::consts::PI).sqrt();
        let (mut sum, mut term) = (x, x);
        for n in (3..400).step_by(2) {
            term *= x * x / f64::from(n);
            sum += term;
        }
        let below = 0.5 + sum * density;
        let step: f64 = (below - part) / density.max(1e-12);
        x -= step.clamp(-1.0, 1.0);
    }
    x
}

#[cfg(test)]
mod tests {
    use super::normal_quantile;

    #[test]
    fn quantiles_are_those_of_tables() {
        for (part, expected) in
            [(0.5, 0.0), (0.95, 1.644_853_626_951), (0.05, -1.644_853_626_951), (0.999, 3.090_232_306_168)]
        {
            assert!((normal_quantile(part) - expected).abs() < 1e-9, "{part}: {}", normal_quantile(part));
        }
    }
}
