//! Gives the checks of a chat template ([`crate::template::check`]) the engine's tokenizers, and sessions
//! that put answers back as the ids that were generated.

use std::sync::Arc;

use super::chat_tokenizer::special_tokens;
use super::session::transcript::Transcript;
use llmctl_models::text::Tokenizer;
use llmctl_template::check::{CheckError, CheckTokenizer, EncodeText, RenderPrompt, SessionPrompts, Subject};
use llmctl_template::{Conversation, Message, OutputMarkup, SpecialTokens, TemplateError};

/// Compiles a template for the check. Without a tokenizer, it compares texts character by character.
///
/// # Errors
/// Those of [`Subject::new`].
pub fn subject(
    source: &str,
    tokenizer: Option<Arc<Tokenizer>>,
    end_of_generation: Vec<u32>,
    output_markup: OutputMarkup,
) -> Result<Subject, TemplateError> {
    let tokenizer =
        tokenizer.map(|tokenizer| Arc::new(EngineTokenizer(tokenizer)) as Arc<dyn CheckTokenizer>);
    Subject::new(source, tokenizer, || Box::<SplicedSession>::default(), end_of_generation, output_markup)
}

/// Neither the trait nor the type is this crate's.
struct EngineTokenizer(Arc<Tokenizer>);

impl CheckTokenizer for EngineTokenizer {
    fn encode(&self, text: &str, is_start: bool) -> Result<Vec<u32>, String> {
        let ids = if is_start { self.0.encode_chat(text) } else { self.0.encode_chat_rest(text) };
        ids.map_err(|error| error.to_string())
    }

    fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.0.token_bytes(id).map(Into::into)
    }

    fn name(&self, id: u32) -> Option<&str> {
        self.0.id_to_token(id)
    }

    fn bos(&self) -> Option<u32> {
        self.0.bos()
    }

    fn adds_bos(&self) -> bool {
        self.0.adds_bos()
    }

    fn specials(&self) -> SpecialTokens {
        special_tokens(&self.0)
    }
}

#[derive(Default)]
struct SplicedSession {
    transcript: Transcript,
    /// The end of the last prompt; see `SplicedPrompt::splice_after`.
    splice_after: String,
}

impl SessionPrompts for SplicedSession {
    fn prompt(
        &mut self,
        asked: &Conversation,
        render: &RenderPrompt<'_>,
        encode: &EncodeText<'_>,
    ) -> Result<Vec<u32>, CheckError> {
        let prompt = self.transcript.splice(asked, render)?;
        self.splice_after = prompt.splice_after().to_owned();
        prompt.ids(|text, start| encode(text, start == 0))
    }

    fn record(&mut self, before: &[Message], answer: &Message, generated: &[u32]) {
        self.transcript.record(before, answer, &self.splice_after, Some(generated));
    }
}

#[cfg(test)]
mod tests;
