//! Embeddings and reranking: texts to vectors, pairs of texts to scores.
//!
//! [`EmbedTexts`] turns texts into ids; one thread (`thread.rs`) owns the model and computes the texts of all
//! requests, many in one step.
//!
//! Invariant: a text's vector depends on that text alone, not on the texts computed with it.

mod no_text;
mod pair;
mod thread;

use std::sync::Arc;

pub use no_text::no_engine;
pub use pair::PairTexts;
pub use thread::{EmbedClient, EmbedJob, EmbedOutput};

use llmctl_base::error::{Error, Result};
use llmctl_models::load::{LoadedEmbedder, Prompts, TextTask};
use llmctl_models::model::{TextIds, TextModel, TextModelSpec};
use llmctl_models::text::{Encode, Tokenizer};

/// Most bytes per token of the context; a longer text is refused or cut before it is encoded.
const BYTES_PER_TOKEN: usize = 64;
/// Least limit of a text in bytes.
const LEAST_BYTES: usize = 64 << 10;

/// Result of an embedder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbedKind {
    /// Vectors of this many values.
    Vectors(usize),
    /// Scores of pairs.
    Scores,
}

/// A text as the model reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbedInput {
    ids: Vec<u32>,
    /// See [`TextIds::second`].
    second: usize,
    is_cut: bool,
}

impl EmbedInput {
    /// Returns whether the end of its text was cut off.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    pub fn num_tokens(&self) -> usize {
        self.ids.len()
    }

    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn as_text(&self) -> TextIds<'_> {
        TextIds { ids: &self.ids, second: self.second }
    }
}

/// Treatment of a text that is longer than the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LongText {
    #[default]
    Refuse,
    /// Cut its end off.
    Cut,
}

/// The text side of an embedder: from texts to ids. Shared by all requests.
pub struct EmbedTexts {
    pub name: String,
    pub kind: EmbedKind,
    pub spec: TextModelSpec,
    pub prompts: Prompts,
    tokenizer: Arc<Tokenizer>,
    asks_yes_or_no: bool,
}

impl EmbedTexts {
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the prompt of this name, or the model's default one.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a name that the model does not have.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str> {
        let Some(name) = name.or(self.prompts.default.as_deref()) else { return Ok("") };
        self.prompts.by_name.get(name).map(String::as_str).ok_or_else(|| {
            let known: Vec<&str> = self.prompts.by_name.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "it has none".to_owned() } else { known.join(", ") };
            let message = format!("the model has no prompt {name:?} ({known})");
            Error::InvalidParameter { name: "prompt_name", message }
        })
    }

    /// Encodes a text behind a prompt.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a text without tokens, or one longer than the context unless it may be cut.
    pub fn encode(&self, prompt: &str, text: &str, long: LongText) -> Result<EmbedInput> {
        let (text, mut is_cut) = self.bounded(text, long)?;
        // As in sentence-transformers, special tokens in a text count.
        let options = Encode { add_special: false, parse_special: true };
        let mut body = self.tokenizer.encode(&format!("{prompt}{text}"), options)?;
        let mut ids = self.tokenizer.surround(body.clone());
        let excess = |ids: &[u32]| ids.len().saturating_sub(self.spec.context_length);
        // Again if the cut text lacks an end of its own, and so gets one.
        while long == LongText::Cut && excess(&ids) > 0 && !body.is_empty() {
            is_cut = true;
            body.truncate(body.len().saturating_sub(excess(&ids)));
            ids = self.tokenizer.surround(body.clone());
        }
        self.check(EmbedInput { second: ids.len(), ids, is_cut })
    }

    /// Takes ids as they are.
    ///
    /// # Errors
    /// As [`Self::encode`], and for an id that the model lacks.
    pub fn ids(&self, mut ids: Vec<u32>, long: LongText) -> Result<EmbedInput> {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.spec.vocab_size) {
            let message = format!("the model has no token {id}");
            return Err(Error::InvalidParameter { name: "input", message });
        }
        let is_cut = long == LongText::Cut && ids.len() > self.spec.context_length;
        if is_cut {
            ids.truncate(self.spec.context_length);
        }
        self.check(EmbedInput { second: ids.len(), ids, is_cut })
    }

    /// Refuses or cuts a text that is too long to be encoded; also returns whether it was cut.
    fn bounded<'a>(&self, text: &'a str, long: LongText) -> Result<(&'a str, bool)> {
        let most = self.spec.context_length.saturating_mul(BYTES_PER_TOKEN).max(LEAST_BYTES);
        match long {
            _ if text.len() <= most => Ok((text, false)),
            LongText::Cut => Ok((&text[..text.floor_char_boundary(most)], true)),
            LongText::Refuse => Err(Error::InvalidParameter {
                name: "input",
                message: format!(
                    "a text of {} bytes is longer than the {} tokens that the model reads",
                    text.len(),
                    self.spec.context_length
                ),
            }),
        }
    }

    fn check(&self, input: EmbedInput) -> Result<EmbedInput> {
        let (len, most) = (input.ids.len(), self.spec.context_length);
        let message = match len {
            0 => "a text has no tokens".to_owned(),
            len if len > most => format!("a text has {len} tokens, but the model reads at most {most}"),
            _ => return Ok(input),
        };
        Err(Error::InvalidParameter { name: "input", message })
    }
}

/// The model of an embedder, and the way from its hidden states to results.
struct EmbedModel {
    model: Box<dyn TextModel>,
    task: TextTask,
    /// Hidden states of the last step.
    hidden: Vec<f32>,
}

impl EmbedModel {
    /// Computes one step: the vectors of the texts, each cut to its number of dimensions, or their scores.
    fn compute(&mut self, inputs: &[(&EmbedInput, Option<usize>)]) -> Result<Vec<EmbedOutput>> {
        let texts: Vec<TextIds<'_>> = inputs.iter().map(|(input, _)| input.as_text()).collect();
        self.model.encode(&texts, &mut self.hidden)?;
        let width = self.model.spec().hidden_size;
        let mut rest = &self.hidden[..];
        let hidden = |text: &TextIds<'_>| {
            let (hidden, behind) = rest.split_at(text.ids.len() * width);
            rest = behind;
            hidden
        };
        let hidden: Vec<&[f32]> = texts.iter().map(hidden).collect();
        let dimensions: Vec<Option<usize>> = inputs.iter().map(|(_, dimensions)| *dimensions).collect();
        Ok(match &self.task {
            TextTask::Embedding(head) => {
                head.apply(&hidden, width, &dimensions).into_iter().map(EmbedOutput::Vector).collect()
            }
            TextTask::Scores(head) => {
                head.apply(&hidden, width).into_iter().map(EmbedOutput::Score).collect()
            }
        })
    }
}

/// Takes a loaded embedder apart into its text side and its model.
fn split(loaded: LoadedEmbedder) -> (EmbedTexts, EmbedModel) {
    let LoadedEmbedder { name, model, tokenizer, task, prompts, asks_yes_or_no, .. } = loaded;
    let spec = model.spec().clone();
    let kind = match &task {
        TextTask::Embedding(head) => EmbedKind::Vectors(head.width(spec.hidden_size)),
        TextTask::Scores(_) => EmbedKind::Scores,
    };
    let texts = EmbedTexts { name, kind, spec, prompts, tokenizer, asks_yes_or_no };
    (texts, EmbedModel { model, task, hidden: Vec::new() })
}
