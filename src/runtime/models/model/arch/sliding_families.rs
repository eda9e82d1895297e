//! Dense families whose layers differ: in windows, in rotary positions.

use serde_json::Value;

use super::dense::ConfigDefaults;
use super::rope::local_rope;
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, AttentionConfig, NormNames, QkNorm, TwoWay};
use llmctl_base::error::LoadResult;

/// Interval of the layers that see the whole context, or have no positions, in several families.
const EVERY_FOURTH: usize = 4;

/// SmolLM 3: a Llama in which every fourth layer has no positions.
/// Source: transformers `SmolLM3Config`; llama.cpp fixes the interval, which GGUF does not carry.
pub const SMOLLM3: Family = Family {
    defaults: ConfigDefaults {
        context_length: 32_768,
        rope_theta: 2e6,
        tied: Some(true),
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [false, true],
    adjust: |description, reader| {
        let listed = rope_layers(reader, description.config.layers.len())?;
        let interval = reader.interval("no_rope_layer_interval", EVERY_FOURTH)?;
        for (index, attention) in description.config.attentions_mut() {
            let by_interval = !(index + 1).is_multiple_of(interval);
            attention.rope = listed.as_ref().map_or(by_interval, |listed| listed[index]).then_some(0);
        }
        slide_smollm3(description, reader)
    },
    ..Family::new("smollm3", &["smollm3"], &["smollm3"])
};

/// Applies `use_sliding_window`, which turns windows on for the layers in `layer_types`, or else for those without
/// positions.
fn slide_smollm3(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    if reader.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = reader.count("sliding_window")?;
    let without_rope: Vec<bool> =
        description.config.attentions().map(|attention| attention.rope.is_none()).collect();
    let slides = reader.sliding_or(without_rope.len(), |layer| without_rope[layer])?;
    description.slide(window, |layer| slides[layer]);
    Ok(())
}

/// Reads `no_rope_layers`: despite its name, 1 for layers that have rotary positions.
fn rope_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Option<Vec<bool>>> {
    const KEY: &str = "no_rope_layers";
    let Some(value) = reader.value(KEY) else { return Ok(None) };
    let list = value.as_array().filter(|list| list.len() == num_layers);
    let list = list.ok_or_else(|| reader.error(KEY, format!("is not a list of {num_layers} layers")))?;
    let flags = list.iter().map(|flag| flag.as_u64().filter(|flag| *flag < 2).map(|flag| flag == 1));
    flags.collect::<Option<_>>().map(Some).ok_or_else(|| reader.error(KEY, "holds values other than 0 and 1"))
}

/// EXAONE 4: norms only after each part, q and k normalised per head. The larger one has a sliding window and positions on
/// three of four layers, and neither on the others. Source: transformers `Exaone4Config`.
pub const EXAONE4: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::CLASS },
    adjust: |description, reader| {
        description.normalize_outputs(QkNorm::PerHead);
        slide_exaone(description, reader)
    },
    ..Family::new("exaone4", &["exaone4"], &["exaone4"])
};

/// Sets windows and positions.
pub fn slide_exaone(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    // The class's own window is the default of config.json; `null` means none.
    let default = (!reader.is_gguf() && reader.is_absent("sliding_window")).then_some(4096);
    if let Some(window) = reader.window()?.or(default).filter(|window| *window > 0) {
        let slides = exaone4_layers(reader, description.config.layers.len())?;
        description.slide_with_positions(window, &slides);
    }
    Ok(())
}

/// Returns which layers have a window: as listed, or by a pattern such as "LLLG" or 4.
fn exaone4_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    const KEY: &str = "sliding_window_pattern";
    if reader.is_gguf() || reader.value("layer_types").is_some() {
        return reader.sliding_pattern(num_layers, EVERY_FOURTH);
    }
    match reader.value(KEY) {
        Some(Value::String(letters)) if !letters.is_empty() => {
            Ok(letters.chars().cycle().take(num_layers).map(|letter| letter == 'L').collect())
        }
        _ => reader.sliding_pattern(num_layers, reader.count(KEY)?.unwrap_or(EVERY_FOURTH)),
    }
}

/// OLMo 3: OLMo 2 with a sliding window on three of four layers; YaRN is for the others only. llama.cpp's converter writes it
/// as `olmo2` with a window. Source: transformers `Olmo3Config`; llama.cpp's `olmo2` for GGUF.
pub const OLMO3: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, rope_theta: 500_000.0, ..ConfigDefaults::CLASS },
    adjust: |description, reader| {
        description.normalize_outputs(QkNorm::Whole);
        let theta = description.config.ropes[0].theta;
        let slides = reader.sliding_pattern(description.config.layers.len(), EVERY_FOURTH)?;
        set_local(description, reader, theta, |layer| slides[layer])
    },
    ..Family::new("olmo3", &["olmo3"], &[])
};

impl Description {
    /// Gives a window to the layers that slide, and takes the positions from the others.
    pub fn slide_with_positions(&mut self, window: usize, slides: &[bool]) {
        self.slide(Some(window), |layer| slides[layer]);
        for (layer, attention) in self.config.attentions_mut() {
            attention.rope = slides[layer].then_some(0);
        }
    }
}

/// Gives the local layers a window and a rotary table of their own.
fn set_local(
    description: &mut Description,
    reader: &ConfigReader,
    theta: f32,
    is_local: impl Fn(usize) -> bool,
) -> LoadResult<()> {
    let local = local_rope(reader, &description.config.ropes[0], theta)?;
    description.config.ropes.push(local);
    description.slide(Some(reader.window()?.unwrap_or(4096)), &is_local);
    for (index, attention) in description.config.attentions_mut() {
        attention.rope = Some(usize::from(is_local(index)));
    }
    Ok(())
}

/// Facts that the classes of all Gemmas from the second on share.
pub const GEMMA_DEFAULTS: ConfigDefaults = ConfigDefaults {
    num_heads: Some(8),
    num_kv_heads: Some(4),
    head_dim: Some(256),
    hold_in_gguf: true,
    context_length: 131_072,
    rope_theta: 1e6,
    activation: Activation::GeluTanh,
    tied: Some(true),
    ..ConfigDefaults::CLASS
};

/// Gemma 2: norms before and after each part, scaled embeddings, GeGLU, soft-capped scores and logits, a window on every
/// other layer. Source: transformers `Gemma2Config`; llama.cpp for the 27B's query scale, which GGUF does not carry.
pub const GEMMA2: Family = Family {
    defaults: ConfigDefaults {
        vocab_size: Some(256_000),
        context_length: 8192,
        rope_theta: 10_000.0,
        ..GEMMA_DEFAULTS
    },
    norms: NormNames::SANDWICH,
    adjust: |description, reader| {
        scale_gemma(description, reader, 46)?;
        default_caps(description, reader);
        let slides = reader.sliding_or(description.config.layers.len(), |layer| layer.is_multiple_of(2))?;
        description.slide(Some(reader.window()?.unwrap_or(4096)), |layer| slides[layer]);
        Ok(())
    },
    ..Family::new("gemma2", &["gemma2"], &["gemma2"])
};

/// Sets the class's caps if the file lacks the keys; `null` means no caps.
fn default_caps(description: &mut Description, reader: &ConfigReader) {
    if reader.is_absent("final_logit_softcapping") {
        description.config.final_softcap = Some(30.0);
    }
    if reader.is_absent("attn_logit_softcapping") {
        for (_, attention) in description.config.attentions_mut() {
            attention.softcap = Some(50.0);
        }
    }
}

/// Sets embedding scale, query scale and caps.
fn scale_gemma(description: &mut Description, reader: &ConfigReader, layers_27b: usize) -> LoadResult<()> {
    let config = &mut description.config;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.final_softcap = reader.number("final_logit_softcapping")?.filter(|cap| *cap > 0.0);
    let softcap = reader.number("attn_logit_softcapping")?.filter(|cap| *cap > 0.0);
    let query_scalar = if reader.is_gguf() {
        let is_27b = config.layers.len() == layers_27b;
        let derived =
            |head: &AttentionConfig| if is_27b { config.hidden_size / head.num_heads } else { head.head_dim };
        config.attentions().next().map_or(0, derived) as f32
    } else {
        reader.number("query_pre_attn_scalar")?.unwrap_or(256.0)
    };
    for (_, attention) in config.attentions_mut() {
        attention.scale = 1.0 / query_scalar.sqrt();
        attention.softcap = softcap;
    }
    config.layers.iter_mut().for_each(|layer| layer.post_norms = true);
    let offset = if reader.is_gguf() { 0.0 } else { 1.0 };
    (description.naming.norm_offset, description.naming.last_norm_offset) = (offset, offset);
    Ok(())
}

/// Gemma 3, text: Gemma 2 with q and k norms instead of soft-capped scores, five local layers to each global one, and a
/// rotary table of their own for the local ones. Source: transformers `Gemma3TextConfig`.
pub const GEMMA3: Family = Family {
    defaults: ConfigDefaults { vocab_size: Some(262_208), ..GEMMA_DEFAULTS },
    norms: NormNames::SANDWICH,
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        scale_gemma(description, reader, 62)?;
        description.config.two_way = TwoWay::All;
        let key = reader.pick("sliding_window_pattern", "attention.sliding_window_pattern");
        let own_key = if reader.value(key).is_some() { key } else { "_sliding_window_pattern" };
        let pattern = reader.interval(own_key, 6)?;
        let num_layers = description.config.layers.len();
        let slides = reader.sliding_or(num_layers, |layer| !(layer + 1).is_multiple_of(pattern))?;
        set_local(description, reader, 10_000.0, |layer| slides[layer])
    },
    ..Family::new("gemma3", &["gemma3", "gemma3_text"], &["gemma3", "gemma-embedding"])
};
