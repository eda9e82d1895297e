//! A vocabulary as plain data, as in GGUF metadata, with its checks and the bytes of its tokens.
//!
//! Invariant after [`VocabSpec::check`]: every per-token list is empty or as long as `tokens`, and every id
//! is in range. The error for a file that breaks this names the list.

use super::pieces::{Spelling, Table};

/// Kind of a token (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenKind {
    #[default]
    Normal,
    Unknown,
    /// Special: matches in text only if special tokens are asked for.
    Control,
    /// Matches in text before anything else.
    UserDefined,
    /// A hole.
    Unused,
    /// `<0x00>` to `<0xFF>`.
    Byte,
}

impl TokenKind {
    /// Converts GGUF's number: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub fn from_number(number: u32) -> Option<Self> {
        use TokenKind::*;
        [Normal, Unknown, Control, UserDefined, Unused, Byte].get(number.checked_sub(1)? as usize).copied()
    }

    /// Returns GGUF's number, the reverse of [`TokenKind::from_number`].
    pub fn number(self) -> u32 {
        self as u32 + 1
    }

    pub fn is_special(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

/// Everything that GGUF stores about a vocabulary; field names follow `tokenizer.ggml.*`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VocabSpec {
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// Name of the pre-tokenizer of a byte-level vocabulary.
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    /// One per token, or empty: all normal.
    pub kinds: Vec<TokenKind>,
    /// One per token for `llama`; unused for `gpt2`.
    pub scores: Vec<f32>,
    /// `left right`, best first, for `gpt2`.
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// Add a space before the text and after each added token (`llama`; default true).
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
    /// Special tokens that absorb the white space after them. GGUF does not store this; see
    /// `load::tokenizer`.
    pub strip_right: Vec<u32>,
}

impl VocabSpec {
    /// Returns the kind of a token. Padding that a converter wrote as `[PAD<id>]` is a hole, whatever its
    /// registered kind. If the file lists no kinds, the tokens that it names by id are special.
    pub(super) fn kind(&self, id: u32) -> TokenKind {
        let index = id as usize;
        let kind = match self.kinds.get(index) {
            Some(&kind) => kind,
            None if self.unk == Some(id) => TokenKind::Unknown,
            None if [self.bos, self.eos].contains(&Some(id)) => TokenKind::Control,
            None => TokenKind::Normal,
        };
        let number = self.tokens.get(index).and_then(|text| text.strip_prefix("[PAD")?.strip_suffix(']'));
        if number.is_some_and(|number| number == id.to_string()) { TokenKind::Unused } else { kind }
    }

    /// Checks lengths and ids.
    ///
    /// # Errors
    /// A sentence that names the wrong list or key.
    pub(super) fn check(&self) -> Result<(), String> {
        let count = self.tokens.len();
        if count == 0 {
            return Err("the vocabulary is empty (tokenizer.ggml.tokens)".to_owned());
        }
        let full = |name: &str, len: usize| match len == count {
            true => Ok(()),
            false => Err(format!("tokenizer.ggml.{name} has {len} entries for {count} tokens")),
        };
        if !self.kinds.is_empty() {
            full("token_type", self.kinds.len())?;
        }
        if self.model == "llama" {
            full("scores", self.scores.len())?;
        }
        let named = [("bos", self.bos), ("eos", self.eos), ("unknown", self.unk)];
        for (name, id) in named {
            if let Some(id) = id.filter(|&id| id as usize >= count) {
                return Err(format!("tokenizer.ggml.{name}_token_id is {id}, but there are {count} tokens"));
            }
        }
        Ok(())
    }

    /// Returns texts and bytes of all tokens.
    pub(super) fn tables(&self, spelling: Spelling) -> Result<(Table, Table), String> {
        let (mut texts, mut bytes) = (Table::default(), Table::default());
        for (id, text) in (0u32..).zip(&self.tokens) {
            match self.kind(id) {
                TokenKind::Unused => {
                    texts.push(b"")?;
                    bytes.push(b"")?;
                }
                TokenKind::Normal | TokenKind::Byte => {
                    texts.push(text.as_bytes())?;
                    bytes.push(&spelling.bytes(text))?;
                }
                TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                    texts.push(text.as_bytes())?;
                    bytes.push(text.as_bytes())?;
                }
            }
        }
        Ok((texts, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converter_padding_is_a_hole() {
        let tokens = ["a", "[PAD1]", "[PAD1]"].map(str::to_owned).to_vec();
        let spec = VocabSpec { tokens, kinds: vec![TokenKind::UserDefined; 3], ..VocabSpec::default() };
        assert_eq!(spec.kind(1), TokenKind::Unused);
        assert_eq!(spec.kind(2), TokenKind::UserDefined, "the number must be its own");
    }

    #[test]
    fn without_kinds_the_named_tokens_are_special() {
        let tokens = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let spec = VocabSpec { tokens, bos: Some(1), eos: Some(2), unk: Some(3), ..VocabSpec::default() };
        let kinds = [0, 1, 2, 3].map(|id| spec.kind(id));
        assert_eq!(kinds, [TokenKind::Normal, TokenKind::Control, TokenKind::Control, TokenKind::Unknown]);
    }

    #[test]
    fn lists_of_another_length_and_ids_out_of_range_are_refused() {
        let spec = |change: fn(&mut VocabSpec)| {
            let tokens = vec!["a".to_owned(), "b".to_owned()];
            let scores = vec![0.0; 2];
            let mut spec = VocabSpec { model: "llama".to_owned(), tokens, scores, ..VocabSpec::default() };
            change(&mut spec);
            spec.check()
        };
        assert_eq!(spec(|_| ()), Ok(()));
        assert!(spec(|spec| spec.tokens.clear()).unwrap_err().contains("tokens"));
        assert!(spec(|spec| spec.scores.truncate(1)).unwrap_err().contains("scores"));
        assert!(spec(|spec| spec.kinds.push(TokenKind::Normal)).unwrap_err().contains("token_type"));
        assert!(spec(|spec| spec.eos = Some(2)).unwrap_err().contains("eos_token_id"));
    }

    #[test]
    fn kinds_by_number() {
        assert_eq!(TokenKind::from_number(1), Some(TokenKind::Normal));
        assert_eq!(TokenKind::from_number(6), Some(TokenKind::Byte));
        assert_eq!([0, 7].map(TokenKind::from_number), [None, None]);
    }
}
