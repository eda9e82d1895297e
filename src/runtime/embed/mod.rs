//! Embeddings and reranking: texts to vectors, pairs of texts to scores.
//!
//! [`EmbedTexts`] turns texts into ids; one thread (`thread.rs`) owns the model and computes the texts of all requests, many
//! in one step.
//!
//! Invariant: a text's vector depends on that text alone, not on the texts computed with it.

mod no_engine;
mod thread;

use std::sync::Arc;

pub use no_engine::NoEngine;
pub use thread::{EmbedClient, EmbedJob, EmbedOutput};

use super::error::{Error, Result};
use super::load::{LoadedEmbedder, Prompts, TextTask};
use super::model::{TextIds, TextModel, TextModelSpec};
use super::text::{Encode, Tokenizer};

/// Bytes of text per token of the context beyond which a text is not read: no tokenizer makes so few tokens of a real one,
/// and its memory would be many times the text.
const BYTES_PER_TOKEN: usize = 64;
/// Least limit of a text in bytes.
const LEAST_BYTES: usize = 64 << 10;

/// The dialogue in which Qwen3-Reranker answers yes or no, as its model card has it.
const DIALOGUE: [&str; 2] = [
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. \
     Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
];
/// Its instruction unless another is given.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// What an embedder computes.
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
}

impl EmbedInput {
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

/// What to do with a text that is longer than the context.
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
        let text = self.bounded(text, long)?;
        // As in sentence-transformers, special tokens in a text count.
        let options = Encode { add_special: true, parse_special: true };
        let whole = format!("{prompt}{text}");
        let mut ids = self.tokenizer.encode(&whole, options)?;
        if ids.len() > self.spec.context_length && long == LongText::Cut {
            let mut body = self.tokenizer.encode(&whole, Encode { add_special: false, ..options })?;
            let around = ids.len() - body.len();
            body.truncate(self.spec.context_length.saturating_sub(around));
            ids = self.tokenizer.surround(body);
        }
        self.check(EmbedInput { second: ids.len(), ids })
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
        if long == LongText::Cut {
            ids.truncate(self.spec.context_length);
        }
        self.check(EmbedInput { second: ids.len(), ids })
    }

    /// Encodes a query and a document to be scored. A document may be cut, a query not.
    ///
    /// # Errors
    /// As [`Self::encode`]; [`Error::NotSupported`] if the model reads no pairs.
    pub fn pair(
        &self,
        instruction: Option<&str>,
        query: &str,
        document: &str,
        long: LongText,
    ) -> Result<EmbedInput> {
        let document = self.bounded(document, long)?;
        self.bounded(query, LongText::Refuse)?;
        let options = Encode { add_special: false, parse_special: false };
        if self.asks_yes_or_no {
            return self.dialogue(instruction.unwrap_or(INSTRUCTION), query, document, long);
        }
        if instruction.is_some() {
            return Err(Error::NotSupported("an instruction for a reranker that is no language model"));
        }
        let [query, mut document] =
            [self.tokenizer.encode(query, options)?, self.tokenizer.encode(document, options)?];
        let join = |document: &[u32]| {
            let pair = self.tokenizer.join_pair(&query, document);
            pair.ok_or(Error::NotSupported("its tokenizer joins no pairs of texts"))
        };
        let (mut ids, mut second) = join(&document)?;
        if ids.len() > self.spec.context_length && long == LongText::Cut {
            document.truncate(document.len().saturating_sub(ids.len() - self.spec.context_length));
            (ids, second) = join(&document)?;
        }
        self.check(EmbedInput { ids, second })
    }

    /// Encodes a pair as a dialogue whose next token answers; texts in it hold no special tokens.
    fn dialogue(&self, instruction: &str, query: &str, document: &str, long: LongText) -> Result<EmbedInput> {
        let encode = |text: &str, parse_special| {
            self.tokenizer.encode(text, Encode { add_special: false, parse_special })
        };
        let [before, behind] = [encode(DIALOGUE[0], true)?, encode(DIALOGUE[1], true)?];
        let text = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
        let mut text = encode(&text, false)?;
        if long == LongText::Cut {
            text.truncate(self.spec.context_length.saturating_sub(before.len() + behind.len()));
        }
        let ids = [before, text, behind].concat();
        self.check(EmbedInput { second: ids.len(), ids })
    }

    /// Refuses or cuts a text that is too long to be encoded.
    fn bounded<'a>(&self, text: &'a str, long: LongText) -> Result<&'a str> {
        let most = self.spec.context_length.saturating_mul(BYTES_PER_TOKEN).max(LEAST_BYTES);
        match long {
            _ if text.len() <= most => Ok(text),
            LongText::Cut => Ok(&text[..text.floor_char_boundary(most)]),
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

/// The model of an embedder, and what is made of its hidden states.
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
        let output = |(input, dimensions): &(&EmbedInput, Option<usize>)| {
            let (hidden, behind) = rest.split_at(input.ids.len() * width);
            rest = behind;
            match &self.task {
                TextTask::Embedding(head) => EmbedOutput::Vector(head.apply(hidden, width, *dimensions)),
                TextTask::Scores(head) => EmbedOutput::Score(head.apply(hidden, width)),
            }
        };
        Ok(inputs.iter().map(output).collect())
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
