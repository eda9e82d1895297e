//! The images that a model reads, from the headers of its files.

use serde_json::{Value, json};

use crate::cli::terminal::Terminal;
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::load::{ImageUse, VisionFacts, vision_facts};

/// Architectures of GGUF files whose models all have a vision tower, in a file of its own.
const SEEING: [&str; 8] =
    ["gemma4", "glm4v", "mistral3", "qwen2vl", "qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"];

/// The images that a model reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sight {
    Images(VisionFacts),
    /// Its mmproj file is not here.
    FileMissing,
    /// It reads text alone.
    Text,
    /// Why its tower cannot be used.
    Unusable(String),
}

impl Sight {
    /// Reads what the model of these files sees; `architecture` is the one that the files name.
    pub fn of(resolved: &Resolved, architecture: Option<&str>, images: ImageUse) -> Self {
        if resolved.source.built_in().is_some() {
            return Self::Text;
        }
        let is_gguf = matches!(resolved.source, ModelSource::Gguf(_));
        match vision_facts(&resolved.source, resolved.mmproj.as_deref(), images) {
            Ok(Some(facts)) => Self::Images(facts),
            Ok(None)
                if is_gguf
                    && resolved.mmproj.is_none()
                    && architecture.is_some_and(|name| SEEING.contains(&name)) =>
            {
                Self::FileMissing
            }
            Ok(None) => Self::Text,
            Err(error) => Self::Unusable(error.to_string()),
        }
    }

    pub fn is_there(&self) -> bool {
        matches!(self, Self::Images(_))
    }

    /// Returns what is wrong, and what to do.
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Images(_) | Self::Text => None,
            Self::FileMissing => Some(
                "its mmproj file, with which it reads images, is missing: `llmctl pull` downloads it with the model, \
                 --mmproj FILE names another"
                    .to_owned(),
            ),
            Self::Unusable(why) => Some(format!("it reads text alone: {why}")),
        }
    }

    /// Returns it in words: `yes (qwen3-vl tower, 64 to 1280 tokens each)`.
    pub fn words(&self) -> String {
        match self {
            Self::Images(VisionFacts { tower, tokens: [least, most] }) if least == most => {
                format!("yes ({tower} tower, {most} tokens each)")
            }
            Self::Images(VisionFacts { tower, tokens: [least, most] }) => {
                format!("yes ({tower} tower, {least} to {most} tokens each)")
            }
            Self::FileMissing => "no: mmproj file missing".to_owned(),
            Self::Text => "no".to_owned(),
            Self::Unusable(why) => format!("no: {why}"),
        }
    }

    pub fn json(&self) -> Value {
        match self {
            Self::Images(VisionFacts { tower, tokens }) => json!({"tower": tower, "tokens": tokens}),
            _ => Value::Bool(false),
        }
    }
}

/// Leaves out an mmproj file that was found beside the model and is another model's, so that the model is loaded for text.
pub fn drop_foreign(resolved: &mut Resolved, images: ImageUse, terminal: &Terminal) {
    let Some(path) = &resolved.mmproj else { return };
    if let Err(error) = vision_facts(&resolved.source, Some(path), images) {
        terminal.note(format!("{}: left out, the model reads text alone: {error}", path.display()));
        resolved.mmproj = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_tower_and_tokens_or_what_is_missing() {
        let sees = |tokens| Sight::Images(VisionFacts { tower: "qwen3-vl", tokens });
        assert_eq!(sees([64, 1280]).words(), "yes (qwen3-vl tower, 64 to 1280 tokens each)");
        assert_eq!(sees([256, 256]).words(), "yes (qwen3-vl tower, 256 tokens each)");
        assert!(sees([1, 2]).problem().is_none() && Sight::Text.problem().is_none());
        assert_eq!(Sight::FileMissing.words(), "no: mmproj file missing");
        assert!(Sight::FileMissing.problem().is_some_and(|problem| problem.contains("--mmproj FILE")));
    }
}
