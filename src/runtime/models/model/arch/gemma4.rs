//! Gemma 4, text, in its kinds. All: five local layers to each global one, whose heads are wider and partly
//! rotated; norms of q, k and v; a factor that multiplies each layer's output. 31B: keys serve as values on
//! global layers. E2B and E4B: per-layer inputs, and last layers that read the rows of earlier ones and have
//! wider feed-forward parts. 26B-A4B: experts beside the dense part. Source: transformers `Gemma4TextConfig`;
//! llama.cpp's converter for GGUF's keys.

use super::dense::{ConfigDefaults, MAX_WIDTH};
use super::experts::{ExpertKeys, experts};
use super::rope::rope;
use super::sliding_families::GEMMA_DEFAULTS;
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    Activation, AttentionConfig, ExpertWeights, KvSource, NormNames, PartNames, PerLayerInputs, QkNorm,
    RopeConfig, RopeScaling, TwoWay,
};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults { vocab_size: Some(262_144), experts: true, ..GEMMA_DEFAULTS },
    norms: NormNames::SANDWICH,
    parts: PartNames {
        router: ["router.proj", "ffn_gate_inp"],
        experts: ["experts", "ffn"],
        ..PartNames::LLAMA
    },
    parse: |family, reader| {
        let (mut description, slides) = layers(family, reader)?;
        let first_shared = share_rows(&mut description, reader, &slides, 0)?;
        set_widths(&mut description, reader)?;
        if !reader.is_gguf() && reader.flag("use_double_wide_mlp")? == Some(true) {
            let shared = description.networks_mut().filter(|(layer, _)| *layer >= first_shared);
            shared.for_each(|(_, network)| network.intermediate_size *= 2);
        }
        set_experts(&mut description, reader)?;
        set_per_layer_inputs(&mut description, reader)?;
        description.config.two_way = two_way(&description, reader)?;
        Ok(description)
    },
    ..Family::new("gemma4", &["gemma4", "gemma4_text", UNIFIED, UNIFIED_TEXT], &["gemma4"])
};

/// Names of the 12B model, whose text part has neither experts nor per-layer inputs.
const UNIFIED: &str = "gemma4_unified";
const UNIFIED_TEXT: &str = "gemma4_unified_text";

/// Every sixth layer is global by default.
const PATTERN: usize = 6;

/// Indices of the rotary tables.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

/// Parses what the models and their assistants share. Returns which layers are local, too.
pub fn layers(family: &Family, reader: &ConfigReader) -> LoadResult<(Description, Vec<bool>)> {
    let mut description = family.dense(family.defaults, reader)?;
    if reader.string("use_bidirectional_attention")?.as_deref() == Some("all") {
        return Err(reader.error("use_bidirectional_attention", "attention to later tokens is not supported"));
    }
    let config = &mut description.config;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.final_softcap = reader.number("final_logit_softcapping")?.filter(|cap| *cap > 0.0);
    for layer in &mut config.layers {
        (layer.post_norms, layer.has_output_scale) = (true, true);
    }
    let mut slides = reader.sliding_pattern(config.layers.len(), PATTERN)?;
    if let Some(last) = slides.last_mut().filter(|_| !reader.is_gguf()) {
        *last = false; // the class ignores the list here
    }
    set_heads(&mut description, reader, &slides)?;
    description.slide(Some(reader.window()?.unwrap_or(512)), |layer| slides[layer]);
    Ok((description, slides))
}

/// Sets heads and rotary tables of local and global layers, which differ in number and width.
fn set_heads(description: &mut Description, reader: &ConfigReader, slides: &[bool]) -> LoadResult<()> {
    let config = &mut description.config;
    let first = config.attentions().next().map_or((0, 0), |first| (first.head_dim, first.num_kv_heads));
    let [local_dim, global_dim] = head_dims(reader, slides, first.0)?;
    config.ropes = vec![
        rope(reader, "full_attention", global_dim, 1e6)?,
        match reader.is_gguf() {
            false => rope(reader, "sliding_attention", local_dim, 1e4)?,
            true => {
                let theta = reader.number("rope.freq_base_swa")?.unwrap_or(1e4);
                RopeConfig::new(local_dim, theta, RopeScaling::None)
            }
        },
    ];
    let reuses_keys = reader.is_gguf() || reader.flag("attention_k_eq_v")? == Some(true);
    let kv_heads = kv_heads(reader, slides, first.1, reuses_keys)?;
    for (index, attention) in config.attentions_mut() {
        let is_local = slides[index];
        *attention = AttentionConfig {
            num_kv_heads: kv_heads[index],
            head_dim: if is_local { local_dim } else { global_dim },
            scale: 1.0,
            rope: Some(if is_local { LOCAL } else { GLOBAL }),
            qk_norm: QkNorm::PerHead,
            kv: if reuses_keys && !is_local { KvSource::OwnOrKeys } else { KvSource::Own },
            value_norm: true,
            ..attention.clone()
        };
    }
    Ok(())
}

/// Returns the head sizes of local and of global layers; `read` is the one that both formats name.
fn head_dims(reader: &ConfigReader, slides: &[bool], read: usize) -> LoadResult<[usize; 2]> {
    let first_global = slides.iter().position(|is_local| !is_local).unwrap_or(0);
    let (key, dim) = match reader.is_gguf() {
        true => ("attention.key_length_swa", reader.count("attention.key_length_swa")?),
        false if reader.is_absent("per_layer_config") => {
            ("global_head_dim", Some(reader.count("global_head_dim")?.unwrap_or(512)))
        }
        false => ("per_layer_config", reader.count_of_layer(first_global, "head_dim")),
    };
    let dim = dim.unwrap_or(read);
    if dim == 0 || dim > MAX_WIDTH || !dim.is_multiple_of(2) {
        return Err(reader.error(key, format!("{dim} is not a possible head size")));
    }
    Ok(if reader.is_gguf() { [dim, read] } else { [read, dim] })
}

fn kv_heads(
    reader: &ConfigReader,
    slides: &[bool],
    of_all: usize,
    reuses_keys: bool,
) -> LoadResult<Vec<usize>> {
    let num_heads = reader.count(reader.pick("num_attention_heads", "attention.head_count"))?.unwrap_or(8);
    let key = reader.pick("num_global_key_value_heads", "attention.head_count_kv");
    let counts = if reader.is_gguf() {
        reader.counts(key, slides.len())?.unwrap_or_else(|| vec![of_all; slides.len()])
    } else {
        let global = reader.count(key)?.filter(|_| reuses_keys).unwrap_or(of_all);
        let of_kind = |is_local| if is_local { of_all } else { global };
        let own = |layer| reader.count_of_layer(layer, "num_key_value_heads");
        slides.iter().enumerate().map(|(layer, &local)| own(layer).unwrap_or(of_kind(local))).collect()
    };
    match counts.iter().find(|count| **count == 0 || !num_heads.is_multiple_of(**count)) {
        Some(count) => Err(reader.error(key, format!("{num_heads} query heads cannot share {count} evenly"))),
        None => Ok(counts),
    }
}

/// Lets the last layers, `default` of them if the file names no number, read the rows of the last earlier layer of their kind.
/// Returns the first such layer.
pub fn share_rows(
    description: &mut Description,
    reader: &ConfigReader,
    slides: &[bool],
    default: usize,
) -> LoadResult<usize> {
    let key = reader.pick("num_kv_shared_layers", "attention.shared_kv_layers");
    let num_layers = slides.len();
    let shared = reader.count(key)?.unwrap_or(default);
    let first_shared = num_layers.checked_sub(shared).filter(|first| *first > 0);
    let first_shared = first_shared.ok_or_else(|| {
        reader.error(key, format!("{shared} of {num_layers} layers leaves no layer with KV rows"))
    })?;
    for (index, attention) in description.config.attentions_mut() {
        if index >= first_shared {
            let owner = slides[..first_shared].iter().rposition(|is_local| *is_local == slides[index]);
            let owner =
                owner.ok_or_else(|| reader.error(key, format!("no layer has rows for layer {index}")))?;
            attention.kv = KvSource::Layer(owner);
        }
    }
    Ok(first_shared)
}

/// Sets the widths of the layers' networks, which a file may list.
pub fn set_widths(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let key = reader.pick("intermediate_size", "feed_forward_length");
    let Some(widths) = reader.counts(key, description.config.layers.len())? else { return Ok(()) };
    for (layer, network) in description.networks_mut() {
        if widths[layer] == 0 {
            return Err(reader.error(key, format!("layer {layer} has none")));
        }
        network.intermediate_size = widths[layer];
    }
    Ok(())
}

fn set_experts(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    const KEYS: ExpertKeys = ExpertKeys { used: "top_k_experts", ..ExpertKeys::QWEN };
    let has_experts = match reader.is_gguf() {
        true => reader.count("expert_count")?.is_some_and(|count| count > 0),
        false => reader.flag("enable_moe_block")? == Some(true),
    };
    for layer in description.config.layers.iter_mut().filter(|_| has_experts) {
        if let Some(dense) = &layer.feed_forward.dense {
            let mut experts = experts(reader, &KEYS, dense, ExpertWeights::OfUsed)?;
            experts.has_norms = true;
            layer.feed_forward.experts = Some(experts);
        }
    }
    Ok(())
}

/// Returns the layers in which images are two-way. GGUF does not say: they are in all models but those with per-layer inputs.
fn two_way(description: &Description, reader: &ConfigReader) -> LoadResult<TwoWay> {
    if [UNIFIED, UNIFIED_TEXT].contains(&reader.architecture()?.as_str()) {
        return Ok(TwoWay::Whole);
    }
    let is_sliding = match reader.is_gguf() {
        true => description.config.per_layer_inputs.is_none(),
        false => reader.string("use_bidirectional_attention")?.as_deref() == Some("vision"),
    };
    Ok(if is_sliding { TwoWay::Sliding } else { TwoWay::Never })
}

fn set_per_layer_inputs(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let size = per_layer_size(reader)?;
    let rows = reader.count("vocab_size_per_layer_input")?.unwrap_or(description.config.vocab_size);
    if size > 0 && !reader.is_gguf() && rows != description.config.vocab_size {
        return Err(reader.error("vocab_size_per_layer_input", "differs from vocab_size"));
    }
    let activation = description.config.layers.iter().find_map(|layer| layer.feed_forward.dense.as_ref());
    let activation = activation.map_or(Activation::GeluTanh, |dense| dense.activation);
    let num_rows = description.config.vocab_size;
    let padding = reader.count(reader.pick("pad_token_id", "tokenizer.ggml.padding_token_id"))?;
    let padding = padding.filter(|&token| token < num_rows).unwrap_or(0) as u32;
    let inputs = PerLayerInputs { size, num_rows, padding, activation };
    description.config.per_layer_inputs = (size > 0).then_some(inputs);
    Ok(())
}

/// Returns the number of values per layer of the per-layer inputs; 0 if the model has none.
pub fn per_layer_size(reader: &ConfigReader) -> LoadResult<usize> {
    let key = reader.pick("hidden_size_per_layer_input", "embedding_length_per_layer_input");
    let is_unified = [UNIFIED, UNIFIED_TEXT].contains(&reader.architecture()?.as_str());
    // The class of the others has per-layer inputs by default.
    let size = reader.count(key)?.unwrap_or(if reader.is_gguf() || is_unified { 0 } else { 256 });
    match size > MAX_WIDTH {
        true => Err(reader.error(key, format!("{size} is more than {MAX_WIDTH}"))),
        false => Ok(size),
    }
}
