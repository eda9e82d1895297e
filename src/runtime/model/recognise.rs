//! Chooses the implementation that computes a model: the decoder, or candle-transformers.

use super::arch::{self, ConfigReader, Description, ModelFormat};
#[cfg(feature = "candle-families")]
use super::candle_models;
use crate::runtime::error::LoadError;

/// The implementation that computes a model.
pub enum Recognised {
    /// Our decoder.
    Native(Description),
    /// candle-transformers.
    #[cfg(feature = "candle-families")]
    CandleModel(candle_models::CandlePlan),
}

/// Finds the model's family and the implementation that computes it.
///
/// # Errors
/// [`LoadError::UnknownArchitecture`] with the known names and the nearest one; errors of [`arch::parse_config`] and
/// `candle_models::find`.
pub fn recognise(reader: &ConfigReader) -> Result<Recognised, LoadError> {
    #[cfg(feature = "candle-families")]
    if let Some(plan) = candle_models::find(reader)? {
        return Ok(Recognised::CandleModel(plan));
    }
    match arch::parse_config(reader)? {
        Some(description) => Ok(Recognised::Native(description)),
        None => Err(unknown(reader.architecture()?, reader.format())),
    }
}

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
}
