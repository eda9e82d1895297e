//! The images that a model reads, in words.

use serde_json::{Value, json};

use crate::cli::terminal::Terminal;
use llmctl_hub::Resolved;
use llmctl_models::load::{ImageUse, Sight, VisionFacts};

/// Reads what a model sees; files that cannot be read are a reason to see nothing.
pub fn sight(resolved: &Resolved, images: ImageUse) -> Sight {
    Sight::of(resolved, images).unwrap_or_else(|error| Sight::Unusable(error.to_string()))
}

/// Returns what is wrong, and what to do.
pub fn problem(sight: &Sight) -> Option<String> {
    match sight {
        Sight::Images(_) | Sight::Text => None,
        Sight::FileMissing => Some(
            "its mmproj file, with which it reads images, is missing: `llmctl pull` downloads it with the model, \
             --mmproj FILE names another"
                .to_owned(),
        ),
        Sight::Unusable(why) => Some(format!("it reads text alone: {why}")),
    }
}

/// Returns it in words: `yes (qwen3-vl tower, 64 to 1280 tokens each)`.
pub fn words(sight: &Sight) -> String {
    match sight {
        Sight::Images(VisionFacts { tower, tokens: [least, most] }) if least == most => {
            format!("yes ({tower} tower, {most} tokens each)")
        }
        Sight::Images(VisionFacts { tower, tokens: [least, most] }) => {
            format!("yes ({tower} tower, {least} to {most} tokens each)")
        }
        Sight::FileMissing => "no: mmproj file missing".to_owned(),
        Sight::Text => "no".to_owned(),
        Sight::Unusable(why) => format!("no: {why}"),
    }
}

pub fn json(sight: &Sight) -> Value {
    match sight {
        Sight::Images(VisionFacts { tower, tokens }) => json!({"tower": tower, "tokens": tokens}),
        _ => Value::Bool(false),
    }
}

/// Leaves out an mmproj file that was found beside the model and is another model's, so that the model is loaded for text.
pub fn drop_foreign(resolved: &mut Resolved, images: ImageUse, terminal: &Terminal) {
    let Some(path) = &resolved.mmproj else { return };
    if let Err(error) = Sight::of(resolved, images) {
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
        assert_eq!(words(&sees([64, 1280])), "yes (qwen3-vl tower, 64 to 1280 tokens each)");
        assert_eq!(words(&sees([256, 256])), "yes (qwen3-vl tower, 256 tokens each)");
        assert!(problem(&sees([1, 2])).is_none() && problem(&Sight::Text).is_none());
        assert_eq!(words(&Sight::FileMissing), "no: mmproj file missing");
        assert!(problem(&Sight::FileMissing).is_some_and(|problem| problem.contains("--mmproj FILE")));
    }
}
