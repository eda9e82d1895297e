//! Chooses the implementation that computes a model: the decoder, or candle-transformers.

use super::arch::{self, ConfigReader, Description, ModelFormat};
#[cfg(feature = "candle-families")]
use super::candle_models;
use super::encoder::parse_encoder;
use llmctl_base::error::{LoadError, LoadResult};

/// The implementation that computes a model.
pub enum Recognised {
    /// Our decoder.
    Native(Description),
    /// candle-transformers.
    #[cfg(feature = "candle-families")]
    CandleModel(candle_models::CandlePlan),
}

impl Recognised {
    /// Returns the description of a model that our decoder runs.
    pub fn native(&self) -> Option<&Description> {
        match self {
            Recognised::Native(description) => Some(description),
            #[cfg(feature = "candle-families")]
            Recognised::CandleModel(_) => None,
        }
    }
}

/// Finds the model's family and the implementation that computes it.
///
/// # Errors
/// [`LoadError::UnknownArchitecture`] with the known names and the nearest one; errors of [`arch::parse_config`] and
/// `candle_models::find`.
pub fn recognise(reader: &ConfigReader) -> LoadResult<Recognised> {
    #[cfg(feature = "candle-families")]
    if let Some(plan) = candle_models::find(reader)? {
        return Ok(Recognised::CandleModel(plan));
    }
    let name = reader.architecture()?;
    if arch::is_assistant(reader) {
        return Err(reader.unsupported(ASSISTANT));
    }
    if is_bidirectional(reader) || parse_encoder(reader)?.is_some() {
        return Err(reader.unsupported(format!("architecture {name}: an encoder, {ENCODER}")));
    }
    if let Some(description) = arch::parse_config(reader)? {
        return Ok(Recognised::Native(description));
    }
    match REFUSED.iter().find(|(refused, _)| *refused == name) {
        Some((_, reason)) => Err(reader.unsupported(format!("architecture {name}: {reason}"))),
        None => Err(unknown(name, reader.format())),
    }
}

/// Reason for refusing an encoder where text is to be written.
const ENCODER: &str = "which writes no text; `llmctl embed` and `llmctl serve` compute embeddings with it";

/// Reason for refusing an assistant where a model is asked for.
const ASSISTANT: &str = "an assistant of Gemma 4, which drafts for a model and writes no text by itself; name the model with \
                         --model and the assistant with --draft-model";

/// Returns whether a decoder's tokens see those after them, so that it writes no text (EmbeddingGemma).
pub fn is_bidirectional(reader: &ConfigReader) -> bool {
    let flag = |key: &str| reader.flag(key).ok().flatten();
    flag("use_bidirectional_attention") == Some(true)
        || flag("attention.causal") == Some(false)
        || reader.architecture().is_ok_and(|name| name == "gemma-embedding")
}

/// Architectures whose names resemble others but whose files no family can run, each with the reason and what works.
const REFUSED: &[(&str, &str)] = &[
    (
        "phi4mm",
        "Phi-4-multimodal adds adapters (LoRA) for images and speech to every matrix of Phi-4-mini, which llmctl does not \
         apply; Phi-4-mini-instruct, its text model, runs as a folder or GGUF",
    ),
    (
        "smallthinker",
        "its router reads a layer's input before the attention, which no family here does; SmolLM3, Qwen 3 and LFM2 MoE \
         are of similar size and run",
    ),
];

fn unknown(name: String, format: ModelFormat) -> LoadError {
    let native = arch::FAMILIES.iter().flat_map(|family| family.names(format)).copied();
    let known: Vec<&str> = native.chain(candle_names(format)).collect();
    let similarity = |known: &&&str| (strsim::jaro_winkler(known, &name) * 1000.0) as u32;
    let nearest = known.iter().max_by_key(similarity).filter(|name| similarity(name) > 700);
    LoadError::UnknownArchitecture {
        nearest: nearest.map(|name| name.to_string()),
        known: known.iter().map(|name| name.to_string()).collect(),
        name,
    }
}

/// Returns the names of the families that candle-transformers computes from files of this format. It reads no GGUF.
#[cfg(feature = "candle-families")]
fn candle_names(format: ModelFormat) -> Vec<&'static str> {
    let families = candle_models::FAMILIES.iter().filter(|_| format == ModelFormat::HuggingFace);
    families.flat_map(|family| family.model_types.iter().copied()).collect()
}

#[cfg(not(feature = "candle-families"))]
fn candle_names(_format: ModelFormat) -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_architecture_lists_the_known_and_the_nearest() {
        let config = serde_json::json!({"model_type": "qwen4"});
        let error = recognise(&ConfigReader::hugging_face("config.json".into(), config)).err();
        let Some(LoadError::UnknownArchitecture { name, known, nearest }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(name, "qwen4");
        assert!(known.contains(&"llama".to_owned()));
        assert_eq!(known.contains(&"falcon".to_owned()), cfg!(feature = "candle-families"));
        assert!(nearest.is_some_and(|nearest| nearest.starts_with("qwen")));
    }

    #[test]
    fn encoders_are_refused_as_such() {
        let shape = serde_json::json!({"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 9});
        for (key, value) in [("model_type", "bert"), ("model_type", "modernbert")] {
            let mut config = shape.clone();
            config[key] = value.into();
            let error = recognise(&ConfigReader::hugging_face("config.json".into(), config)).err();
            let text = error.expect("refused").to_string();
            assert!(text.contains(value) && text.contains("llmctl embed"), "{text}");
        }
    }

    #[test]
    fn a_known_architecture_that_does_not_run_is_refused_with_what_does() {
        let config = serde_json::json!({"model_type": "phi4mm"});
        let error = recognise(&ConfigReader::hugging_face("config.json".into(), config)).err();
        let text = error.expect("refused").to_string();
        assert!(text.contains("phi4mm") && text.contains("Phi-4-mini-instruct"), "{text}");
    }
}
