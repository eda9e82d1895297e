//! Text to token ids and back, exactly as the publisher's tokenizer of the model does it.
//!
//! [`Tokenizer`] is immutable, shared by `Arc`, and built from tokenizer.json or from a [`VocabSpec`] (GGUF).
//! Invariants: the bytes of an encoded text's tokens are the text again (a SentencePiece vocabulary may add
//! one space before it; normalising tokenizers return the normalised text; an added token does not return
//! white space that it absorbed). A text never starts with two BOS. Knows no files, templates or models.

mod bound;
mod bpe;
mod cuts;
mod groups;
mod hf;
mod pieces;
mod pipeline;
mod pretokenize;
mod speller;
mod spm;
mod terminators;
mod vocab;
mod wordpiece;

use std::borrow::Cow;
use std::collections::HashMap;
use std::{fmt, str};

use tokenizers::AddedToken;

use self::bound::Bound;
use self::bpe::TokenizerParts;
use self::pieces::{Spelling, Table};
use self::pipeline::{Failure, Pipeline};
use self::speller::{Added, Speller};
pub use self::terminators::is_turn_end;
use self::terminators::turn_terminators;
use llmctl_base::error::{Error, LoadError, Result};

pub use self::hf::HfSettings;
pub use self::pieces::byte_level_spelling;
pub use self::pretokenize::candidates as pre_tokenizer_candidates;
pub use self::vocab::{TokenKind, VocabSpec};

/// Options of encoding. By default nothing is added and special tokens are plain text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Encode {
    /// Add BOS, EOS or whatever the model expects around the text. A BOS (EOS) that the text already starts
    /// (ends) with is not doubled.
    pub add_special: bool,
    /// Convert special tokens written in the text to their ids. Off for external text, which must not be able
    /// to end a turn. Added tokens that are not special always match.
    pub parse_special: bool,
}

/// Texts that hardly any token extends: text after them is encoded as in the middle of a text. Every
/// vocabulary with byte tokens encodes the first as bytes.
const ANCHORS: [&str; 2] = ["\u{1}", "\n"];

/// Bytes of text that the library processes at a time: many words, but little of a server's memory.
const WINDOW: usize = 64 << 10;

/// A prompt that does not fit is counted up to this many contexts, or this many tokens, so that the error can
/// tell how far it is beyond.
const COUNTED_CONTEXTS: usize = 4;
const COUNTED_TOKENS: usize = 1 << 16;

/// An immutable tokenizer, shared by all users of a model.
pub struct Tokenizer {
    pipeline: Pipeline,
    texts: Table,
    bytes: Table,
    /// Ids of added tokens by text.
    added: HashMap<String, u32>,
    /// Special ids, ascending.
    special: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// Ids before, between and behind a pair of texts.
    around_pair: Option<[Vec<u32>; 3]>,
    terminators: Vec<u32>,
    /// Encoding adds a space before the text, which decoding removes.
    space_prefix: bool,
    /// `None` if a text's size does not bound its number of tokens.
    bound: Option<Bound>,
}

/// Common parts of both file formats.
struct Ingredients {
    pipeline: Pipeline,
    tables: (Table, Table),
    added: Vec<Added>,
    bos: Option<u32>,
    eos: Option<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    around_pair: Option<[Vec<u32>; 3]>,
}

impl Tokenizer {
    /// Builds a tokenizer from the content of a tokenizer.json.
    ///
    /// # Errors
    /// [`LoadError::Tokenizer`] if it breaks its format or is of a kind that no decoder model uses.
    pub fn from_json(json: &[u8], settings: &HfSettings) -> Result<Self, LoadError> {
        Self::try_from_json(json, settings).map_err(LoadError::Tokenizer)
    }

    /// Builds a tokenizer from a GGUF vocabulary.
    ///
    /// # Errors
    /// [`LoadError::Tokenizer`] naming the wrong key, the unknown pre-tokenizer or the unsupported model.
    pub fn from_vocab(spec: &VocabSpec) -> Result<Self, LoadError> {
        Self::try_from_vocab(spec).map_err(LoadError::Tokenizer)
    }

    fn try_from_json(json: &[u8], settings: &HfSettings) -> Result<Self, String> {
        let file = hf::TokenizerJson::parse(json)?;
        let added = file.added(settings);
        let (mut prefix, mut suffix) = file.surroundings()?;
        let around_pair = file.pair_surroundings();
        let tables = file.tables(&added)?;
        let speller = Speller::Crate(Box::new(file.model));
        let pipeline = Pipeline::new(file.normalizer, file.pre_tokenizer, speller, &added)?;
        let id_of = |text: &Option<String>| {
            let text = text.as_deref()?;
            let added = added.iter().find(|added| added.token.content == text).map(|added| added.id);
            added.or_else(|| pipeline.speller.token_to_id(text))
        };
        let bos = id_of(&settings.bos).or_else(|| prefix.first().copied());
        let eos = id_of(&settings.eos);
        wrap(&mut prefix, bos, settings.add_bos, true);
        wrap(&mut suffix, eos, settings.add_eos, false);
        Self::assemble(Ingredients { pipeline, tables, added, bos, eos, prefix, suffix, around_pair })
    }

    fn try_from_vocab(spec: &VocabSpec) -> Result<Self, String> {
        spec.check()?;
        let parts = match spec.model.as_str() {
            "gpt2" => bpe::byte_level(spec)?,
            "gemma4" => bpe::gemma4(spec)?,
            "llama" => TokenizerParts {
                normalizer: None,
                pre_tokenizer: None,
                speller: Speller::Spm(spm::Spm::new(spec)),
                spelling: Spelling::SentencePiece,
                adds_bos: true,
            },
            "bert" => wordpiece::wordpiece(spec)?,
            "t5" => return Err("not supported: SentencePiece's unigram vocabulary in GGUF (t5)".to_owned()),
            other => return Err(format!("not supported: tokenizer.ggml.model {other:?}")),
        };
        let tables = spec.tables(parts.spelling)?;
        let added = added_tokens(spec);
        let pipeline = Pipeline::new(parts.normalizer, parts.pre_tokenizer, parts.speller, &added)?;
        let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
        let is_encoder = spec.model == "bert";
        let (mut bos, mut eos) = (spec.bos, spec.eos);
        if is_encoder {
            bos = Some(wordpiece::special_id(spec, bos, "[CLS]")?);
            eos = Some(wordpiece::special_id(spec, eos, "[SEP]")?);
        }
        wrap(&mut prefix, bos, Some(spec.add_bos.unwrap_or(parts.adds_bos)), true);
        wrap(&mut suffix, eos, Some(spec.add_eos.unwrap_or(is_encoder)), false);
        let around_pair = is_encoder.then(|| [prefix.clone(), suffix.clone(), suffix.clone()]);
        Self::assemble(Ingredients { pipeline, tables, added, bos, eos, prefix, suffix, around_pair })
    }

    fn assemble(from: Ingredients) -> Result<Self, String> {
        let bound = from.pipeline.bound(&from.added, (&from.tables.0, &from.tables.1));
        let (texts, bytes) = from.tables;
        // A post-processor's template names ids directly, so check them too.
        let around = from.prefix.iter().chain(&from.suffix);
        if let Some(id) = around.copied().find(|&id| id as usize >= texts.len()) {
            return Err(format!(
                "token {id}, to be put around texts, is beyond the vocabulary of {}",
                texts.len()
            ));
        }
        let is_special = |added: &&Added| added.token.special;
        let mut special: Vec<u32> = from.added.iter().filter(is_special).map(|added| added.id).collect();
        special.sort_unstable();
        special.dedup();
        let named = special.iter().filter_map(|&id| Some((id, str::from_utf8(texts.get(id)?).ok()?)));
        let terminators = turn_terminators(named);
        let mut tokenizer = Tokenizer {
            pipeline: from.pipeline,
            texts,
            bytes,
            added: from.added.into_iter().map(|added| (added.token.content, added.id)).collect(),
            special,
            bos: from.bos,
            eos: from.eos,
            prefix: from.prefix,
            suffix: from.suffix,
            around_pair: from.around_pair,
            terminators,
            space_prefix: false,
            bound,
        };
        let probe = tokenizer.pipeline.encode("a", false, WINDOW, usize::MAX).unwrap_or_default();
        tokenizer.space_prefix = tokenizer.concat(&probe, false).starts_with(b" ");
        Ok(tokenizer)
    }

    /// Encodes a text.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a text that this vocabulary cannot express.
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<u32>> {
        self.encode_in_windows(text, options, WINDOW, None)
    }

    /// Encodes a prompt for a context of `context_tokens`. A prompt far beyond it is refused as soon as that
    /// is certain, if possible by its size alone.
    ///
    /// # Errors
    /// [`Error::PromptOversized`]; those of [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str, options: Encode, context_tokens: usize) -> Result<Vec<u32>> {
        self.encode_in_windows(text, options, WINDOW, Some(context_tokens))
    }

    /// Encodes a prompt in windows of about `window` bytes, which changes no id; for tests of that property.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_prompt`].
    #[doc(hidden)]
    pub fn encode_in_windows(
        &self,
        text: &str,
        options: Encode,
        window: usize,
        context_tokens: Option<usize>,
    ) -> Result<Vec<u32>> {
        let most = context_tokens.map(|context| context.saturating_mul(COUNTED_CONTEXTS).max(COUNTED_TOKENS));
        let most = most.unwrap_or(usize::MAX);
        let oversized = |least_tokens| Error::PromptOversized {
            least_tokens,
            context_tokens: context_tokens.unwrap_or(usize::MAX),
        };
        let least =
            context_tokens.and_then(|context| self.least_tokens(text).filter(|&least| least > context));
        if let Some(least) = least {
            return Err(oversized(least));
        }
        let body = self.pipeline.encode(text, options.parse_special, window, most);
        let body = body.map_err(|failure| match failure {
            Failure::TooLong(least) => oversized(least),
            Failure::Unspeakable(message) => Error::InvalidParameter { name: "prompt", message },
        })?;
        Ok(if options.add_special { self.surround(body) } else { body })
    }

    /// Returns the least number of tokens of a text, by its size alone; `None` if unbounded.
    pub fn least_tokens(&self, text: &str) -> Option<usize> {
        self.bound.map(|bound| bound.least_tokens(text))
    }

    /// Returns whether long texts are encoded in parts, which bounds their memory.
    pub fn takes_long_texts_apart(&self) -> bool {
        self.pipeline.is_cut()
    }

    /// Encodes a rendered chat template: special tokens in it count, and a BOS is added only if the model
    /// expects one and the template did not write it. Nothing is added at the end, where the answer follows.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>> {
        self.encode_chat_for(rendered, None)
    }

    /// Encodes a rendered chat template for a context, if given; see [`Tokenizer::encode_prompt`].
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_prompt`].
    pub fn encode_chat_for(&self, rendered: &str, context_tokens: Option<usize>) -> Result<Vec<u32>> {
        let options = Encode { add_special: false, parse_special: true };
        let mut ids = self.encode_in_windows(rendered, options, WINDOW, context_tokens)?;
        if let Some(bos) = self.bos.filter(|&bos| self.adds_bos() && ids.first() != Some(&bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Encodes the rest of a rendered chat template, after a part that is ids already: special tokens in it
    /// count, and neither a BOS nor SentencePiece's leading space is added.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_chat_rest(&self, rest: &str) -> Result<Vec<u32>> {
        self.encode_behind(rest, true, None)
    }

    /// Encodes the rest of a rendered chat template for a context, if given.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_prompt`].
    pub fn encode_chat_rest_for(&self, rest: &str, context_tokens: Option<usize>) -> Result<Vec<u32>> {
        self.encode_behind(rest, true, context_tokens)
    }

    /// Encodes text that continues other text: special tokens in it are plain text, and nothing is added
    /// before it.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_plain_rest(&self, rest: &str) -> Result<Vec<u32>> {
        self.encode_behind(rest, false, None)
    }

    fn encode_behind(
        &self,
        rest: &str,
        parse_special: bool,
        context_tokens: Option<usize>,
    ) -> Result<Vec<u32>> {
        let options = Encode { add_special: false, parse_special };
        let encode = |text: &str| self.encode_in_windows(text, options, WINDOW, context_tokens);
        if !self.space_prefix || rest.is_empty() {
            return encode(rest);
        }
        // Encode after an anchor, which absorbs the leading space, and remove the anchor's ids.
        for anchor in ANCHORS {
            let before = encode(anchor)?;
            let mut ids = encode(&format!("{anchor}{rest}"))?;
            if self.concat(&before, false).ends_with(anchor.as_bytes()) && ids.starts_with(&before) {
                return Ok(ids.split_off(before.len()));
            }
        }
        encode(rest)
    }

    /// Joins the ids of two texts to those of a pair; also returns the index at which the second text begins. `None` if the
    /// model reads no pairs.
    pub fn join_pair(&self, first: &[u32], second: &[u32]) -> Option<(Vec<u32>, usize)> {
        let [before, between, behind] = self.around_pair.as_ref()?;
        let start = before.len() + first.len() + between.len();
        Some(([before, first, between, second, behind].concat(), start))
    }

    /// Puts what the model expects around a text's ids.
    pub fn surround(&self, body: Vec<u32>) -> Vec<u32> {
        let double_bos =
            self.bos.filter(|&bos| body.first() == Some(&bos) && self.prefix.last() == Some(&bos));
        let double_eos =
            self.eos.filter(|&eos| body.last() == Some(&eos) && self.suffix.first() == Some(&eos));
        let prefix = &self.prefix[..self.prefix.len() - usize::from(double_bos.is_some())];
        let suffix = &self.suffix[usize::from(double_eos.is_some())..];
        [prefix, &body, suffix].concat()
    }

    /// Returns the bytes that a token adds in the middle of a text: spaces as spaces, byte tokens as one
    /// byte, added and special tokens as their literal text. `None` for ids out of range and holes.
    pub fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        self.bytes.get(id).map(Cow::Borrowed)
    }

    /// Decodes ids to text. Invalid UTF-8 becomes U+FFFD, ids without a token nothing, and the space that
    /// encoding adds is removed. For streams use [`Tokenizer::token_bytes`] and
    /// [`Utf8Stream`](super::Utf8Stream).
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes = self.concat(ids, skip_special);
        let bytes = if self.space_prefix { bytes.strip_prefix(b" ").unwrap_or(&bytes) } else { &bytes };
        String::from_utf8_lossy(bytes).into_owned()
    }

    fn concat(&self, ids: &[u32], skip_special: bool) -> Vec<u8> {
        let kept = ids.iter().filter(|&&id| !(skip_special && self.is_special(id)));
        kept.filter_map(|&id| self.bytes.get(id)).collect::<Vec<_>>().concat()
    }

    /// Returns whether the token is a control token, which matches only on request.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Returns the id of a token by its text in the vocabulary ("Ġthe", "▁the", "<|im_end|>").
    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        self.added.get(text).copied().or_else(|| self.pipeline.speller.token_to_id(text))
    }

    /// Returns a token's text in the vocabulary; [`Tokenizer::token_bytes`] gives its meaning.
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        str::from_utf8(self.texts.get(id)?).ok()
    }

    /// Returns the largest id + 1, holes included. A model may have more rows of logits, never fewer.
    pub fn vocab_size(&self) -> usize {
        self.texts.len()
    }

    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Sets the BOS that is added before texts, replacing the files'; `None` adds none.
    pub fn set_bos(&mut self, bos: Option<u32>) {
        let old = self.bos;
        self.prefix.retain(|&id| Some(id) != old && Some(id) != bos);
        self.prefix.splice(0..0, bos);
        self.bos = bos;
    }

    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Returns whether `add_special` adds a BOS.
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some_and(|bos| self.prefix.contains(&bos))
    }

    /// Returns the most tokens that `add_special` adds.
    pub fn num_added_tokens(&self) -> usize {
        self.prefix.len() + self.suffix.len()
    }

    /// Returns all special tokens by ascending id.
    pub fn special_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.special.iter().filter_map(|&id| Some((id, self.id_to_token(id)?)))
    }

    /// Returns the special tokens that are known to end a turn (see `terminators.rs`), ascending. Contains
    /// the files' EOS only if it is one of them.
    pub fn turn_terminators(&self) -> &[u32] {
        &self.terminators
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// Applies an explicit setting to what is added before (or after) the text.
fn wrap(ids: &mut Vec<u32>, token: Option<u32>, add: Option<bool>, front: bool) {
    let (Some(token), Some(add)) = (token, add) else { return };
    match (add, ids.contains(&token)) {
        (true, false) => ids.insert(if front { 0 } else { ids.len() }, token),
        (false, true) => ids.retain(|&id| id != token),
        _ => {}
    }
}

/// Returns GGUF's control, unknown and user-defined tokens. Gemma 4's runs of newlines are tokens without
/// merges (llama.cpp pull request 21343), so they match like user-defined ones.
fn added_tokens(spec: &VocabSpec) -> Vec<Added> {
    let newlines = |text: &str| spec.model == "gemma4" && text.bytes().all(|byte| byte == b'\n');
    let added = |(id, text): (u32, &String)| {
        let kind = spec.kind(id);
        let matched = kind.is_special() || kind == TokenKind::UserDefined || newlines(text);
        let token = AddedToken::from(text.as_str(), kind.is_special())
            .normalized(false)
            .rstrip(spec.strip_right.contains(&id));
        (matched && !text.is_empty()).then_some(Added { id, token })
    };
    (0u32..).zip(&spec.tokens).filter_map(added).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    fn refused(json: &str) -> String {
        match Tokenizer::from_json(json.as_bytes(), &HfSettings::default()) {
            Err(LoadError::Tokenizer(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn bpe_json(model: &str, rest: &str) -> String {
        format!(r#"{{"model": {{"type": "BPE", {model}}}{rest}}}"#)
    }

    /// Found by tests/fuzzing.rs: every prompt started with an id without a row in the model.
    #[test]
    fn a_template_that_adds_an_id_beyond_the_vocabulary_is_refused() {
        let file = |id: u32| {
            let special = serde_json::json!({"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}});
            let single = serde_json::json!([
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ]);
            let post = serde_json::json!({
                "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special,
            });
            let model = serde_json::json!({"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []});
            serde_json::json!({"version": "1.0", "post_processor": post, "model": model}).to_string()
        };
        let read = |id| Tokenizer::from_json(file(id).as_bytes(), &HfSettings::default());
        let ids = read(1).expect("sound").encode("a", Encode { add_special: true, parse_special: false });
        assert_eq!(ids.expect("encodes"), [1, 0]);
        let Err(error) = read(2) else { panic!("it was not refused") };
        let error = error.to_string();
        assert!(error.contains("token 2") && error.contains("vocabulary of 2"), "{error}");
    }

    #[test]
    fn a_tokenizer_is_shared_by_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
    }

    #[test]
    fn broken_tokenizer_json_is_an_error() {
        assert!(refused("").contains("EOF"));
        assert!(refused("[]").contains("invalid"));
        // The joined token is longer than every entry: the crate's own loader indexes out of its buffer.
        refused(&bpe_json(r#""vocab": {"aa": 0, "bb": 1}, "merges": ["aa bb"]"#, ""));
        // Shorter than the prefix that is removed: the same.
        let prefix = r#""continuing_subword_prefix": "@@@@", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]"#;
        refused(&bpe_json(prefix, ""));
        let huge = bpe_json(r#""vocab": {"a": 4294967295}, "merges": []"#, "");
        assert!(refused(&huge).contains("token id 4294967295 in a vocabulary of 1"), "{}", refused(&huge));
        let regex = r#", "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}"#;
        refused(&bpe_json(r#""vocab": {"a": 0}, "merges": []"#, regex));
        refused(&bpe_json(r#""vocab": {"a": 0}, "merges": []"#, r#", "added_tokens": [{"id": -1}]"#));
    }

    #[test]
    fn a_regular_expression_over_its_limit_fails_the_request_only() {
        let regex = r#", "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": false}"#;
        let json = bpe_json(r#""vocab": {"x": 0}, "merges": []"#, regex);
        let tokenizer = Tokenizer::from_json(json.as_bytes(), &HfSettings::default()).unwrap();
        let error = tokenizer.encode(&"x".repeat(200), Encode::default()).unwrap_err();
        assert!(matches!(error, Error::InvalidParameter { name: "prompt", .. }), "{error}");
        assert_eq!(tokenizer.encode("xx", Encode::default()).unwrap(), [0, 0]);
    }

    /// `add_bos_token` of tokenizer_config.json overrides the post-processor, in both directions.
    #[test]
    fn settings_override_the_post_processor() {
        let json = bpe_json(
            r#""vocab": {"a": 0, "<s>": 1, "</s>": 2}, "merges": []"#,
            r#", "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}"#,
        );
        let full = Encode { add_special: true, parse_special: true };
        let encode = |add_bos, add_eos| {
            let (bos, eos) = (Some("<s>".to_owned()), Some("</s>".to_owned()));
            let settings = HfSettings { bos, eos, add_bos, add_eos, ..HfSettings::default() };
            let tokenizer = Tokenizer::from_json(json.as_bytes(), &settings).unwrap();
            assert!(tokenizer.is_special(1) && tokenizer.is_special(2), "named by the settings");
            assert_eq!(tokenizer.num_added_tokens(), tokenizer.encode("a", full).unwrap().len() - 1);
            (tokenizer.encode("a", full).unwrap(), tokenizer.encode("<s>a</s>", full).unwrap())
        };
        assert_eq!(encode(None, None), (vec![1, 0], vec![1, 0, 2]));
        assert_eq!(encode(Some(false), None), (vec![0], vec![1, 0, 2]));
        assert_eq!(encode(Some(true), Some(true)), (vec![1, 0, 2], vec![1, 0, 2]));
    }

    #[test]
    fn a_gguf_vocabulary_that_lies_is_an_error() {
        let spec = |change: fn(&mut VocabSpec)| {
            let mut spec = VocabSpec {
                model: "gpt2".to_owned(),
                tokens: owned(&["a", "b", "ab"]),
                merges: owned(&["a b"]),
                ..VocabSpec::default()
            };
            change(&mut spec);
            Tokenizer::from_vocab(&spec).map_err(|error| error.to_string())
        };
        assert_eq!(spec(|_| ()).unwrap().encode("ab", Encode::default()).unwrap(), [2]);
        let message = |change| spec(change).unwrap_err();
        assert!(message(|spec| spec.pre = Some("???".to_owned())).contains("unknown pre-tokenizer \"???\""));
        assert!(message(|spec| spec.model = "rwkv".to_owned()).contains("not supported"));
        assert!(message(|spec| spec.bos = Some(3)).contains("bos_token_id is 3"));
        assert!(message(|spec| spec.merges = owned(&["b a"])).contains("merges: entry 0"));
    }

    /// Gemma 4's kind: SentencePiece spelling with a merge list. No real vocabulary of it is available here.
    #[test]
    fn sentencepiece_spelling_with_merges() {
        let spec = VocabSpec {
            model: "gemma4".to_owned(),
            tokens: owned(&["<unk>", "<bos>", "a", "▁", "▁a", "\n", "\n\n", "<0xC3>", "<0xA9>"]),
            kinds: vec![
                TokenKind::Unknown,
                TokenKind::Control,
                TokenKind::Normal,
                TokenKind::Normal,
                TokenKind::Normal,
                TokenKind::Normal,
                TokenKind::Normal,
                TokenKind::Byte,
                TokenKind::Byte,
            ],
            merges: owned(&["▁ a"]),
            bos: Some(1),
            unk: Some(0),
            ..VocabSpec::default()
        };
        let tokenizer = Tokenizer::from_vocab(&spec).unwrap();
        let ids = tokenizer.encode("a a\n\né", Encode::default()).unwrap();
        assert_eq!(ids, [2, 4, 6, 7, 8], "newlines whole, é by bytes, no space before the text");
        assert_eq!(tokenizer.decode(&ids, false), "a a\n\né");
        assert_eq!(
            tokenizer.encode("<bos>x", Encode { add_special: true, parse_special: true }).unwrap(),
            [1, 0]
        );
    }
}
