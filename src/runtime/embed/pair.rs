//! Pairs of a query and a document, to be scored. The texts around a document are encoded once for all
//! documents of a query.

use super::{EmbedInput, EmbedTexts, LongText};
use llmctl_base::error::{Error, Result};
use llmctl_models::text::Encode;

/// The dialogue in which Qwen3-Reranker answers yes or no, as its model card has it.
const DIALOGUE: [&str; 2] = [
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. \
     Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
];
/// Its instruction unless another is given.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

const PLAIN: Encode = Encode { add_special: false, parse_special: false };

/// A query whose documents are still to come.
pub struct PairTexts<'a> {
    texts: &'a EmbedTexts,
    form: PairForm,
}

enum PairForm {
    /// Two texts, one behind the other.
    Joined { query: Vec<u32> },
    /// A dialogue whose next token answers. Its texts hold no special tokens.
    Dialogue { before: Vec<u32>, head: String, behind: Vec<u32> },
}

impl EmbedTexts {
    /// Encodes a query that documents are scored by.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming `query` if it leaves no room for a document, because a query is never cut;
    /// [`Error::NotSupported`] if the model reads no pairs, or no instruction.
    pub fn pairs(&self, instruction: Option<&str>, query: &str) -> Result<PairTexts<'_>> {
        let (query, _) = self.bounded(query, LongText::Refuse).map_err(of_query)?;
        let encode = |text: &str, options| self.tokenizer.encode(text, options).map_err(of_query);
        let (form, num_tokens) = if self.asks_yes_or_no {
            let special = Encode { parse_special: true, ..PLAIN };
            let [before, behind] = [encode(DIALOGUE[0], special)?, encode(DIALOGUE[1], special)?];
            let instruction = instruction.unwrap_or(INSTRUCTION);
            let head = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: ");
            let num_tokens = before.len() + encode(&head, PLAIN)?.len() + behind.len();
            (PairForm::Dialogue { before, head, behind }, num_tokens)
        } else if instruction.is_some() {
            return Err(Error::NotSupported("an instruction for a reranker that is no language model"));
        } else {
            let query = encode(query, PLAIN)?;
            let num_tokens = self.join(&query, &[])?.0.len();
            (PairForm::Joined { query }, num_tokens)
        };
        let most = self.spec.context_length;
        if num_tokens >= most {
            let message = format!(
                "{num_tokens} tokens with the text around it leave no room for a document: the model reads {most}"
            );
            return Err(Error::InvalidParameter { name: "query", message });
        }
        Ok(PairTexts { texts: self, form })
    }

    fn join(&self, query: &[u32], document: &[u32]) -> Result<(Vec<u32>, usize)> {
        let pair = self.tokenizer.join_pair(query, document);
        pair.ok_or(Error::NotSupported("its tokenizer joins no pairs of texts"))
    }
}

impl PairTexts<'_> {
    /// Encodes the pair with a document.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a pair longer than the context unless the document may be cut.
    pub fn with(&self, document: &str, long: LongText) -> Result<EmbedInput> {
        let texts = self.texts;
        let (document, is_cut) = texts.bounded(document, long)?;
        let excess = |num_tokens: usize| match long {
            LongText::Cut => num_tokens.saturating_sub(texts.spec.context_length),
            LongText::Refuse => 0,
        };
        let (ids, second, excess) = match &self.form {
            PairForm::Joined { query } => {
                let mut document = texts.tokenizer.encode(document, PLAIN)?;
                let (ids, second) = texts.join(query, &document)?;
                let excess = excess(ids.len());
                document.truncate(document.len() - excess);
                let (ids, second) = if excess > 0 { texts.join(query, &document)? } else { (ids, second) };
                (ids, second, excess)
            }
            PairForm::Dialogue { before, head, behind } => {
                let mut text = texts.tokenizer.encode(&format!("{head}{document}"), PLAIN)?;
                let excess = excess(before.len() + text.len() + behind.len());
                text.truncate(text.len() - excess);
                let ids = [&before[..], &text, behind].concat();
                (ids, usize::MAX, excess)
            }
        };
        texts.check(EmbedInput { second: second.min(ids.len()), ids, is_cut: is_cut || excess > 0 })
    }
}

/// Names the query as the parameter at fault.
fn of_query(error: Error) -> Error {
    match error {
        Error::InvalidParameter { message, .. } => Error::InvalidParameter { name: "query", message },
        other => other,
    }
}
