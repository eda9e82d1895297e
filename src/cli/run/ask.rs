//! A prompt before and after the model's template and tokenizer, the same for one prompt and for the rows of a batch.

use crate::cli::error::CommandError;
use crate::cli::load::LoadedTexts;
use crate::template::Conversation;

/// A prompt before the model's template and tokenizer.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// Text to complete as it is.
    Text(String),
    /// Messages to answer.
    Chat(Conversation),
}

/// A prompt as the model gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rendered {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Returns text and tokens of the prompt, followed by `prefill`, the beginning of the answer.
///
/// # Errors
/// The template's refusal or breakage, or that there is none; those of [`crate::runtime::ChatTokenizer::encode`].
pub fn render(texts: &LoadedTexts, ask: &Ask, prefill: &str) -> Result<Rendered, CommandError> {
    let prompt = match ask {
        Ask::Text(text) => text.clone(),
        Ask::Chat(conversation) => texts.render(conversation)?,
    };
    let text = prompt + prefill;
    let tokens = texts.chat_tokenizer().encode(&text)?;
    Ok(Rendered { text, tokens })
}
