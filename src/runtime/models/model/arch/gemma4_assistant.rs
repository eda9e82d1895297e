//! Gemma 4's assistant: a few layers that draft for a Gemma 4. They have no KV of their own, and read that of
//! the model's last layer of their kind, local or global. Source: transformers `Gemma4AssistantConfig`;
//! llama.cpp's converter for GGUF's keys.

use super::dense::MAX_WIDTH;
use super::{ConfigReader, Description, Family, gemma4};
use crate::model::config::{AttentionConfig, DecoderConfig, KvSource};
use llmctl_base::error::LoadResult;

/// Its name in GGUF, and in llmctl.
const NAME: &str = "gemma4-assistant";

/// Hugging Face's key of the model's width, which no other family has.
const WIDTH: [&str; 2] = ["backbone_hidden_size", "embedding_length_out"];

/// Returns whether the file is an assistant, which writes no text by itself.
pub fn is_assistant(reader: &ConfigReader) -> bool {
    match reader.is_gguf() {
        true => reader.architecture().is_ok_and(|name| name == NAME),
        false => reader.value(WIDTH[0]).is_some(),
    }
}

/// An assistant as its file describes it.
pub struct ParsedAssistant {
    description: Description,
    slides: Vec<bool>,
    /// Width of the hidden states of the models that it drafts for.
    width: usize,
}

/// # Errors
/// `LoadError::Malformed` naming a key that is missing or has a value out of range.
pub fn parse_assistant(reader: &ConfigReader) -> LoadResult<ParsedAssistant> {
    let (mut description, slides) = gemma4::layers(&Family { name: NAME, ..gemma4::FAMILY }, reader)?;
    if gemma4::per_layer_size(reader)? > 0 {
        return Err(reader.error("hidden_size_per_layer_input", "an assistant has no per-layer inputs"));
    }
    // Its logits choose the likeliest token, which a cap does not change.
    description.config.final_softcap = None;
    let width = reader.size(reader.pick(WIDTH[0], WIDTH[1]), MAX_WIDTH)?;
    Ok(ParsedAssistant { description, slides, width })
}

impl ParsedAssistant {
    /// Returns the assistant for a model: the sources of its KV are the model's last layers of either kind.
    ///
    /// # Errors
    /// Why it is one for another model.
    pub fn of_model(self, model: &DecoderConfig) -> Result<Description, String> {
        let Self { mut description, slides, width } = self;
        if model.architecture != gemma4::FAMILY.name {
            return Err(format!("it is an assistant of Gemma 4, not of {}", model.architecture));
        }
        if width != model.hidden_size {
            let of_model = model.hidden_size;
            return Err(format!(
                "it drafts for hidden states of {width} values, the model's have {of_model}"
            ));
        }
        let (own, of_model) = (description.config.vocab_size, model.vocab_size);
        if own != of_model {
            return Err(format!("it has {own} tokens, the model {of_model}"));
        }
        for (index, attention) in description.config.attentions_mut() {
            read_rows_of(attention, index, slides[index], model)?;
        }
        Ok(description)
    }
}

/// Lets a layer read the rows of the model's last layer of its kind.
fn read_rows_of(
    attention: &mut AttentionConfig,
    index: usize,
    is_local: bool,
    model: &DecoderConfig,
) -> Result<(), String> {
    let has_rows = |(_, attention): &(usize, &AttentionConfig)| {
        attention.window.is_some() == is_local && !matches!(attention.kv, KvSource::Layer(_))
    };
    let owner = model.attentions().enumerate().filter(has_rows).last();
    let (layer, rows) = owner.ok_or("the model has no layer of a kind that it reads")?;
    let AttentionConfig { num_heads, head_dim, .. } = *attention;
    if head_dim != rows.head_dim || !num_heads.is_multiple_of(rows.num_kv_heads) {
        let (num_kv_heads, kv_dim) = (rows.num_kv_heads, rows.head_dim);
        return Err(format!(
            "its layer {index} has {num_heads} heads of {head_dim}, the model's KV {num_kv_heads} of {kv_dim}"
        ));
    }
    (attention.kv, attention.num_kv_heads) = (KvSource::Layer(layer), rows.num_kv_heads);
    // It stands behind the last row, as the model's next row will. Pages of rows that the next row does not see may be gone.
    attention.window = rows.window.map(|window| window.saturating_sub(1).max(1));
    Ok(())
}
