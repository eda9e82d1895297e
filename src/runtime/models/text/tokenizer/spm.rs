//! SentencePiece's BPE from a vocabulary with scores, as in GGUF's `tokenizer.ggml.model = "llama"`.
//!
//! Starts with single characters and repeatedly merges the two neighbours whose union is the token with the
//! highest score (the leftmost of equals). What is no token is encoded as bytes, or as the unknown token.
//! (sentencepiece, bpe_model.cc; llama.cpp's llm_tokenizer_spm.) There are no words, but nothing can merge
//! across two characters that are adjacent in no token: the text is cut there, which changes no result and
//! keeps the queues short. The result never contains control tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::pieces::fallback_byte;
use super::vocab::{TokenKind, VocabSpec};

#[derive(Debug)]
pub(super) struct Spm {
    /// Tokens that merging may produce.
    ids: HashMap<Box<str>, u32>,
    scores: Vec<f32>,
    /// Pairs of characters that are adjacent within some token.
    neighbours: HashSet<(char, char)>,
    /// Token of each byte; `None` unless the vocabulary has all 256.
    bytes: Option<Box<[u32; 256]>>,
    unknown: Option<u32>,
    space_prefix: bool,
    collapse_spaces: bool,
}

/// A range of the text that is one token so far. A symbol merged into another has length 0.
struct Symbol {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Buffers of one call, and its result.
#[derive(Default)]
struct MergeState {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<MergeCandidate>,
    ids: Vec<u32>,
    after_unknown: bool,
}

/// Two neighbours that together are a token of `len` bytes.
struct MergeCandidate {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for MergeCandidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for MergeCandidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for MergeCandidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for MergeCandidate {}

impl Spm {
    /// Builds the model. `spec` must have as many scores as tokens.
    pub fn new(spec: &VocabSpec) -> Self {
        let mut ids = HashMap::with_capacity(spec.tokens.len());
        let mut neighbours = HashSet::new();
        let mut bytes = [None; 256];
        for (id, text) in (0u32..).zip(&spec.tokens) {
            match (spec.kind(id), fallback_byte(text)) {
                // By its text: some converters register byte tokens as normal ones.
                (TokenKind::Normal | TokenKind::Byte, Some(byte)) => bytes[usize::from(byte)] = Some(id),
                (TokenKind::Normal | TokenKind::UserDefined, _) => {
                    ids.insert(text.as_str().into(), id);
                    neighbours.extend(text.chars().zip(text.chars().skip(1)));
                }
                _ => {}
            }
        }
        let bytes: Option<Vec<u32>> = bytes.into_iter().collect();
        Spm {
            ids,
            scores: spec.scores.clone(),
            neighbours,
            bytes: bytes.and_then(|bytes| bytes.try_into().ok()).map(Box::new),
            unknown: spec.unk,
            space_prefix: spec.add_space_prefix.unwrap_or(true),
            collapse_spaces: spec.remove_extra_whitespaces.unwrap_or(false),
        }
    }

    /// Returns whether every text is encoded without dropping parts or using the unknown token.
    pub fn is_complete(&self) -> bool {
        self.bytes.is_some() && !self.collapse_spaces
    }

    /// Returns whether long texts may be cut at [`Spm::last_cut`].
    pub fn is_cut(&self) -> bool {
        !self.collapse_spaces
    }

    /// Returns the last position in the first `most` bytes, after the start, across which nothing merges.
    pub fn last_cut(&self, text: &str, most: usize) -> Option<usize> {
        let most = text.floor_char_boundary(most);
        let mut next = text[most..].chars().next().map(escaped);
        for (at, c) in text[..most].char_indices().rev() {
            let (c, end) = (escaped(c), at + c.len_utf8());
            if let Some(next) = next
                && !self.neighbours.contains(&(c, next))
                && self.spells(c)
                && self.spells(next)
            {
                return Some(end);
            }
            next = Some(c);
        }
        None
    }

    /// Returns whether the character has a token or is encoded as bytes. Adjacent unknown characters become one token.
    fn spells(&self, c: char) -> bool {
        self.bytes.is_some() || self.ids.contains_key(c.encode_utf8(&mut [0; 4]) as &str)
    }

    /// Encodes a text between added tokens, or the rest of one, which gets no leading space. Fails only if
    /// the vocabulary has neither bytes nor an unknown token.
    pub fn encode(&self, text: &str, is_rest: bool) -> Result<Vec<u32>, String> {
        let text = self.escape(text, is_rest);
        let mut work = MergeState { ids: Vec::with_capacity(text.len() / 3), ..MergeState::default() };
        let (mut start, mut previous) = (0, None);
        for (at, c) in text.char_indices() {
            if previous.is_some_and(|previous| !self.neighbours.contains(&(previous, c))) {
                self.encode_segment(&text[start..at], &mut work)?;
                start = at;
            }
            previous = Some(c);
        }
        self.encode_segment(&text[start..], &mut work)?;
        Ok(work.ids)
    }

    fn encode_segment(&self, text: &str, work: &mut MergeState) -> Result<(), String> {
        let MergeState { symbols, queue, .. } = &mut *work;
        split_characters(text, symbols);
        for left in 0..symbols.len() {
            self.offer(text, symbols, Some(left), symbols[left].next, queue);
        }
        while let Some(pair) = queue.pop() {
            let (left, right) = (&symbols[pair.left], &symbols[pair.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue; // one of them has been merged in the meantime
            }
            join(symbols, pair.left, pair.right);
            let Symbol { previous, next, .. } = symbols[pair.left];
            self.offer(text, symbols, previous, Some(pair.left), queue);
            self.offer(text, symbols, Some(pair.left), next, queue);
        }
        self.spell(text, work)
    }

    fn escape(&self, text: &str, is_rest: bool) -> String {
        if text.is_empty() {
            return String::new();
        }
        let collapsed;
        let text = if self.collapse_spaces {
            collapsed = text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
            collapsed.as_str()
        } else {
            text
        };
        let mut escaped = String::with_capacity(text.len() + text.len() / 2 + 3);
        if self.space_prefix && !is_rest {
            escaped.push('▁');
        }
        escaped.extend(text.chars().map(self::escaped));
        escaped
    }

    fn offer(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
        queue: &mut BinaryHeap<MergeCandidate>,
    ) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let start = symbols[left].start;
        let len = symbols[left].len + symbols[right].len;
        if let Some(&id) = self.ids.get(&text[start..start + len]) {
            queue.push(MergeCandidate { score: self.scores[id as usize], left, right, len });
        }
    }

    fn spell(&self, text: &str, work: &mut MergeState) -> Result<(), String> {
        let MergeState { symbols, ids, after_unknown, .. } = work;
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let piece = &text[symbol.start..symbol.start + symbol.len];
            let known = self.ids.get(piece);
            match (known, &self.bytes, self.unknown) {
                (Some(&id), ..) => ids.push(id),
                (None, Some(bytes), _) => ids.extend(piece.bytes().map(|byte| bytes[usize::from(byte)])),
                // A run of unknown characters is one unknown token, as in sentencepiece.
                (None, None, Some(unknown)) if !*after_unknown => ids.push(unknown),
                (None, None, Some(_)) => {}
                (None, None, None) => return Err(format!("the vocabulary cannot spell {piece:?}")),
            }
            *after_unknown = known.is_none() && self.bytes.is_none();
        }
        Ok(())
    }

    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        let byte = || Some(self.bytes.as_ref()?[usize::from(fallback_byte(text)?)]);
        self.ids.get(text).copied().or_else(byte)
    }
}

fn escaped(c: char) -> char {
    if c == ' ' { '▁' } else { c }
}

fn split_characters(text: &str, symbols: &mut Vec<Symbol>) {
    let symbol = |(index, (start, c)): (usize, (usize, char))| Symbol {
        start,
        len: c.len_utf8(),
        previous: index.checked_sub(1),
        next: Some(index + 1),
    };
    symbols.clear();
    symbols.extend(text.char_indices().enumerate().map(symbol));
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
}

fn join(symbols: &mut [Symbol], left: usize, right: usize) {
    symbols[left].len += symbols[right].len;
    symbols[left].next = symbols[right].next;
    symbols[right].len = 0;
    if let Some(next) = symbols[left].next {
        symbols[next].previous = Some(left);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Later tokens have lower scores, as in a trained vocabulary.
    fn spm(tokens: &[(&str, TokenKind)]) -> Spm {
        Spm::new(&VocabSpec {
            tokens: tokens.iter().map(|(text, _)| (*text).to_owned()).collect(),
            kinds: tokens.iter().map(|&(_, kind)| kind).collect(),
            scores: (0..tokens.len()).map(|rank| -(rank as f32)).collect(),
            unk: tokens.iter().position(|&(_, kind)| kind == TokenKind::Unknown).map(|id| id as u32),
            add_space_prefix: Some(false),
            ..VocabSpec::default()
        })
    }

    fn normal(texts: &[&'static str]) -> Vec<(&'static str, TokenKind)> {
        texts.iter().map(|&text| (text, TokenKind::Normal)).collect()
    }

    #[test]
    fn the_best_score_joins_first_and_of_equals_the_leftmost() {
        let spm = spm(&normal(&["bc", "ab", "a", "b", "c", "aa"]));
        assert_eq!(spm.encode("abc", false).unwrap(), [2, 0], "bc beats ab");
        assert_eq!(spm.encode("aaa", false).unwrap(), [5, 2], "leftmost first");
    }

    #[test]
    fn stale_pairs_are_skipped() {
        let spm = spm(&normal(&["ab", "bc", "cd", "abcd", "a", "b", "c", "d"]));
        assert_eq!(spm.encode("abcd", false).unwrap(), [3]);
    }

    /// The definition, without cuts or queues: merge the best (leftmost of equals) pair until none is left.
    fn reference(spm: &Spm, text: &str) -> Vec<u32> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        let score = |pair: &[String]| spm.ids.get(pair.concat().as_str()).map(|&id| spm.scores[id as usize]);
        loop {
            let scored = parts.windows(2).enumerate().filter_map(|(at, pair)| Some((at, score(pair)?)));
            let best = scored.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
            let Some((at, _)) = best else { break };
            let right = parts.remove(at + 1);
            parts[at].push_str(&right);
        }
        parts.iter().map(|part| spm.ids[part.as_str()]).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn cuts_and_queues_change_nothing(
            tokens in prop::collection::vec("[abc▁]{2,5}", 0..24),
            scores in prop::collection::vec(0u8..6, 28),
            text in "[abc▁]{0,24}",
        ) {
            let mut spec = VocabSpec { add_space_prefix: Some(false), ..VocabSpec::default() };
            spec.tokens = ["a", "b", "c", "▁"].map(str::to_owned).into_iter().chain(tokens).collect();
            spec.scores = scores[..spec.tokens.len()].iter().map(|&score| f32::from(score)).collect();
            let spm = Spm::new(&spec);
            prop_assert_eq!(spm.encode(&text, false).unwrap(), reference(&spm, &text));
        }
    }

    #[test]
    fn unknown_characters_fuse_and_control_tokens_are_never_spelled() {
        let mut tokens = normal(&["a", "<s", ">", "<", "s"]);
        tokens.extend([("<s>", TokenKind::Control), ("<unk>", TokenKind::Unknown)]);
        let spm = spm(&tokens);
        assert_eq!(spm.encode("aéüa", false).unwrap(), [0, 6, 0]);
        assert_eq!(spm.encode("<s>", false).unwrap(), [1, 2]);
    }

    #[test]
    fn no_bytes_and_no_unknown_token_is_an_error() {
        let message = spm(&normal(&["a"])).encode("aé", false).unwrap_err();
        assert!(message.contains("\"é\""), "{message}");
    }

    #[test]
    fn extra_spaces_collapse_only_when_asked() {
        let mut spm = spm(&normal(&["a", "▁"]));
        assert_eq!(spm.encode(" a  a", false).unwrap(), [1, 0, 1, 1, 0]);
        spm.collapse_spaces = true;
        assert_eq!(spm.encode(" a  a", false).unwrap(), [0, 1, 0]);
    }
}
