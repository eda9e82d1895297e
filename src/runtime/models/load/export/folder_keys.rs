//! The metadata of a GGUF file made from a Hugging Face folder: keys as llama.cpp's converter writes them.
//!
//! The values come from the parsed description, so that both forms of a model describe the same decoder; what
//! GGUF cannot express is found by reading the keys back (see `super::check`). Source: llama.cpp's
//! `conversion/`.

use super::head::GgufHead;
use crate::model::arch::{ConfigReader, Description};
use crate::model::{AttentionConfig, DecoderConfig, RopeScaling};
use llmctl_base::error::LoadResult;

/// A family that can be written as GGUF.
pub(super) struct ExportFamily {
    /// Name in llmctl.
    name: &'static str,
    pub gguf_name: &'static str,
    /// True if rotary pairs of q and k lie side by side in GGUF.
    pub interleaves: bool,
    /// True if the sizes of heads and vocabulary are keys, as in all models that llama.cpp converts as a
    /// Llama.
    is_llama: bool,
    /// True if the head size is a key even if it follows from the width.
    has_head_dim: bool,
    own_keys: fn(&mut FolderKeys<'_>) -> LoadResult<()>,
}

const fn family(
    name: &'static str,
    gguf_name: &'static str,
    own_keys: fn(&mut FolderKeys<'_>) -> LoadResult<()>,
) -> ExportFamily {
    ExportFamily { name, gguf_name, interleaves: false, is_llama: false, has_head_dim: false, own_keys }
}

const fn llama(
    name: &'static str,
    gguf_name: &'static str,
    own_keys: fn(&mut FolderKeys<'_>) -> LoadResult<()>,
) -> ExportFamily {
    ExportFamily { interleaves: true, is_llama: true, ..family(name, gguf_name, own_keys) }
}

const FAMILIES: [ExportFamily; 11] = [
    llama("llama", "llama", window),
    llama("mistral", "llama", window),
    llama("granite", "granite", granite),
    llama("smollm3", "smollm3", none),
    family("qwen2", "qwen2", none),
    family("qwen3", "qwen3", none),
    family("qwen3-moe", "qwen3moe", experts),
    ExportFamily { has_head_dim: true, ..family("gemma2", "gemma2", gemma) },
    ExportFamily { has_head_dim: true, ..family("gemma3", "gemma3", gemma) },
    family("phi3", "phi3", phi3),
    family("olmo2", "olmo2", none),
];

impl ExportFamily {
    /// Finds the family of a description.
    ///
    /// # Errors
    /// `LoadError::Unsupported` naming the family and those that can be written.
    pub fn of(reader: &ConfigReader, config: &DecoderConfig) -> LoadResult<&'static Self> {
        FAMILIES.iter().find(|family| family.name == config.architecture).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            reader.unsupported(format!(
                "a folder of the family {:?} cannot be written as GGUF yet (these can: {}); a GGUF file of it can be requantised",
                config.architecture,
                known.join(", ")
            ))
        })
    }
}

/// Sources of the keys.
pub(super) struct FolderKeys<'a> {
    pub head: &'a mut GgufHead,
    reader: &'a ConfigReader,
    config: &'a DecoderConfig,
    attention: &'a AttentionConfig,
    family: &'static ExportFamily,
}

/// Writes all keys of the decoder.
///
/// # Errors
/// `LoadError::Unsupported` for what GGUF has no key for, `LoadError::Malformed` for a damaged configuration.
pub(super) fn write(
    head: &mut GgufHead,
    reader: &ConfigReader,
    description: &Description,
    family: &'static ExportFamily,
) -> LoadResult<()> {
    let config = &description.config;
    let attention = config.attentions().next().ok_or_else(|| reader.unsupported("has no attention layer"))?;
    let mut keys = FolderKeys { head, reader, config, attention, family };
    keys.common()?;
    keys.rope()?;
    (family.own_keys)(&mut keys)
}

impl FolderKeys<'_> {
    fn set(&mut self, key: &str, value: impl Into<super::head::GgufValue>) {
        self.head.set(format!("{}.{key}", self.family.gguf_name), value);
    }

    fn count(&mut self, key: &str, value: usize) -> LoadResult<()> {
        let value =
            u32::try_from(value).map_err(|_| self.reader.error(key, format!("{value} is too large")))?;
        self.set(key, value);
        Ok(())
    }

    fn common(&mut self) -> LoadResult<()> {
        let (config, attention) = (self.config, self.attention);
        let inner = config.layers.iter().map(|layer| layer.feed_forward.dense.as_ref());
        let inner = inner.flatten().map(|mlp| mlp.intermediate_size).max();
        let inner = match inner {
            Some(inner) => inner,
            None => self.reader.size("intermediate_size", usize::MAX)?,
        };
        self.count("block_count", config.layers.len())?;
        self.count("context_length", config.context_length)?;
        self.count("embedding_length", config.hidden_size)?;
        self.count("feed_forward_length", inner)?;
        self.count("attention.head_count", attention.num_heads)?;
        self.count("attention.head_count_kv", attention.num_kv_heads)?;
        self.set("attention.layer_norm_rms_epsilon", config.final_norm_eps);
        let derived = config.hidden_size / attention.num_heads;
        if self.family.has_head_dim || attention.head_dim != derived || self.names_head_dim() {
            self.count("attention.key_length", attention.head_dim)?;
            self.count("attention.value_length", attention.head_dim)?;
        }
        if self.family.is_llama {
            self.count("vocab_size", config.vocab_size)?;
        }
        if self.family.is_llama || config.ropes[0].dim != attention.head_dim {
            self.count("rope.dimension_count", config.ropes[0].dim)?;
        }
        Ok(())
    }

    /// Returns whether the configuration names the head size. llama.cpp ignores it for Granite.
    fn names_head_dim(&self) -> bool {
        self.reader.value("head_dim").is_some() && self.config.architecture != "granite"
    }

    fn rope(&mut self) -> LoadResult<()> {
        let rope = &self.config.ropes[0];
        self.set("rope.freq_base", rope.theta);
        match &rope.scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } => Ok(()),
            RopeScaling::Linear { factor } => {
                self.set("rope.scaling.type", "linear");
                self.set("rope.scaling.factor", *factor);
                Ok(())
            }
            RopeScaling::LongRope { original_context, attention_factor, .. } => {
                self.set("rope.scaling.attn_factor", *attention_factor);
                self.count("rope.scaling.original_context_length", *original_context)
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context,
                attention_factor,
                truncate: true,
            } => {
                self.set("rope.scaling.type", "yarn");
                self.set("rope.scaling.factor", *factor);
                self.set("rope.scaling.yarn_beta_fast", *beta_fast);
                self.set("rope.scaling.yarn_beta_slow", *beta_slow);
                if let Some(given) = attention_factor {
                    // llama.cpp multiplies YaRN's own magnitude by this.
                    self.set("rope.scaling.attn_factor", given / (0.1 * factor.max(1.0).ln() + 1.0));
                }
                self.count("rope.scaling.original_context_length", *original_context)
            }
            other => {
                Err(self.reader.unsupported(format!("GGUF has no keys for this rotary scaling: {other:?}")))
            }
        }
    }
}

fn none(_: &mut FolderKeys<'_>) -> LoadResult<()> {
    Ok(())
}

/// Writes the window of all layers. llama.cpp does not read it for a Llama; llmctl does.
fn window(keys: &mut FolderKeys<'_>) -> LoadResult<()> {
    match keys.attention.window {
        Some(window) => keys.count("attention.sliding_window", window),
        None => Ok(()),
    }
}

fn granite(keys: &mut FolderKeys<'_>) -> LoadResult<()> {
    keys.set("attention.scale", keys.attention.scale);
    keys.set("embedding_scale", keys.config.embedding_scale);
    keys.set("residual_scale", keys.config.layers[0].residual_scales[0]);
    let logits = keys.reader.number("logits_scaling")?.unwrap_or(1.0);
    keys.set("logit_scale", logits);
    Ok(())
}

fn experts(keys: &mut FolderKeys<'_>) -> LoadResult<()> {
    let experts = keys.config.layers.iter().find_map(|layer| layer.feed_forward.experts.as_ref());
    let Some(experts) = experts else { return Err(keys.reader.unsupported("has no experts")) };
    keys.count("expert_count", experts.count)?;
    keys.count("expert_used_count", experts.used)?;
    keys.count("expert_feed_forward_length", experts.mlp.intermediate_size)
}

fn gemma(keys: &mut FolderKeys<'_>) -> LoadResult<()> {
    if let Some(cap) = keys.attention.softcap {
        keys.set("attn_logit_softcapping", cap);
    }
    if let Some(cap) = keys.config.final_softcap {
        keys.set("final_logit_softcapping", cap);
    }
    if let Some(local) = keys.config.ropes.get(1) {
        keys.set("rope.freq_base_swa", local.theta);
    }
    match keys.config.attentions().find_map(|attention| attention.window) {
        Some(window) => keys.count("attention.sliding_window", window),
        None => Ok(()),
    }
}

/// A window of 0 tells Phi-4 from other models of the family.
fn phi3(keys: &mut FolderKeys<'_>) -> LoadResult<()> {
    keys.count("attention.sliding_window", keys.attention.window.unwrap_or(0))?;
    keys.count("rope.dimension_count", keys.config.ropes[0].dim)
}
