//! Splits text into words for byte-level BPE vocabularies: a table from GGUF's `tokenizer.ggml.pre` to rules.
//!
//! GGUF stores only a name. The rules are those of the publishers' tokenizer.json files if known, else those
//! of llama.cpp (src/llama-vocab.cpp), which defines the names. They differ in details that llama.cpp's regex
//! engine cannot express; ids must equal the publisher's, so those take precedence. Merges never cross a
//! split, so a wrong rule changes ids without an error: an unknown name is refused.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::groups::{THOUSANDS, TINY_AYA_NUMBERS};

/// One split; each works on the pieces of the previous one.
#[derive(Debug, Clone, Copy)]
enum SplitRule {
    /// Matches of a regular expression, and the text between them.
    Regex(&'static str),
    /// Single digits.
    EachDigit,
    /// Runs of digits.
    DigitRuns,
    /// Runs of punctuation.
    PunctuationRuns,
    /// Single punctuation marks.
    EachPunctuation,
    /// GPT-2's words, then bytes as GPT-2's 256 printable characters.
    Gpt2Words,
    /// Bytes as GPT-2's 256 printable characters.
    Bytes,
}

use SplitRule::{Bytes, DigitRuns, EachDigit, EachPunctuation, Gpt2Words, PunctuationRuns, Regex};

/// Rules of a `tokenizer.ggml.pre` name.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreRule {
    names: &'static [&'static str],
    cuts: &'static [SplitRule],
    /// A word that is a token becomes that token, whatever the merges say (tiktoken's way).
    pub ignore_merges: bool,
    /// The publisher's tokenizer composes characters first (llama.cpp does not).
    nfc: bool,
    /// Default of `tokenizer.ggml.add_bos_token`.
    pub adds_bos: bool,
}

const PLAIN: PreRule = PreRule { names: &[], cuts: &[], ignore_merges: false, nfc: false, adds_bos: false };

const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
const ASCII_DIGIT_TRIPLES: &str = "[0-9][0-9][0-9]";
const NUMBERS: &str = r"\p{N}+";
const LINES: &str = r"[^\n]+|\n+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
/// Qwen2's without contractions: in Turkish an apostrophe joins a name and its ending.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// [`DEEPSEEK_WORDS`], with line breaks always words of their own.
const SPARK25_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
/// [`O200K`] with single digits.
const YOUTU_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU_SCRIPTS: &str = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// The third range begins with a compatibility ideograph, which a normalising editor has made U+8C48 in some
/// copies.
const AFMOE_SCRIPTS: &str = r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+";

/// Cased letters as deepseek-llm lists them (an expansion of an older Unicode's Lu, Ll and Lt), as code
/// points, because several would not survive a normalising editor.
const DEEPSEEK_LLM_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const DEEPSEEK_LLM_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const DEEPSEEK_V3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";

/// Rules with all the names that share them.
const RULES: &[PreRule] = &[
    // llama.cpp's fallback for files without a name.
    PreRule {
        names: &["default"],
        cuts: &[
            Regex(r"[\p{P}\$\+<=>\^~\|]+"),
            Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            Regex(r"\p{N}+"),
            Regex(ASCII_DIGIT_TRIPLES),
            Bytes,
        ],
        ..PLAIN
    },
    PreRule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        cuts: &[Regex(CL100K), Bytes],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreRule { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], cuts: &[Regex(CL100K), Bytes], ..PLAIN },
    PreRule { names: &["glm5"], cuts: &[Regex(CL100K), Bytes], ignore_merges: true, ..PLAIN },
    PreRule { names: &["jais-2"], cuts: &[Regex(JAIS2), Bytes], ..PLAIN },
    PreRule {
        names: &["minicpm5"],
        cuts: &[Regex(r"\p{N}{1,3}"), Regex(CL100K), Bytes],
        ignore_merges: true,
        ..PLAIN
    },
    PreRule {
        names: &["qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"],
        cuts: &[Regex(QWEN2), Bytes],
        nfc: true,
        ..PLAIN
    },
    PreRule {
        names: &["stablelm2", "hunyuan", "solar-open", "grok-2"],
        cuts: &[Regex(QWEN2), Bytes],
        ..PLAIN
    },
    PreRule { names: &["qwen35"], cuts: &[Regex(QWEN35), Bytes], nfc: true, ..PLAIN },
    PreRule {
        names: &[
            "gpt-2",
            "phi-2",
            "jais",
            "trillion",
            "granite-docling",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "roberta-bpe",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
        ],
        cuts: &[Gpt2Words],
        ..PLAIN
    },
    // The GPT-NeoX tokenizer and its descendants.
    PreRule { names: &["olmo", "mpt", "modern-bert"], cuts: &[Gpt2Words], nfc: true, ..PLAIN },
    PreRule {
        names: &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        cuts: &[EachDigit, Gpt2Words],
        ..PLAIN
    },
    PreRule {
        names: &["falcon"],
        cuts: &[PunctuationRuns, Gpt2Words, DigitRuns, Regex(ASCII_DIGIT_TRIPLES)],
        ..PLAIN
    },
    PreRule {
        names: &["deepseek-llm"],
        cuts: &[
            Regex(r"[\r\n]"),
            Regex(DEEPSEEK_LLM_LETTERS),
            Regex(DEEPSEEK_LLM_PUNCTUATION),
            Regex(r"\s+$"),
            Regex(DEEPSEEK_CJK),
            EachDigit,
            Bytes,
        ],
        ..PLAIN
    },
    PreRule {
        names: &["deepseek-coder"],
        cuts: &[
            Regex(r"[\r\n]"),
            Regex(r"\s?\p{L}+"),
            Regex(r"\s?\p{P}+"),
            Regex(DEEPSEEK_CJK),
            EachDigit,
            Bytes,
        ],
        ..PLAIN
    },
    PreRule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        cuts: &[Regex(r"\p{N}{1,3}"), Regex(DEEPSEEK_V3_CJK), Regex(DEEPSEEK_WORDS), Bytes],
        ..PLAIN
    },
    PreRule {
        names: &["spark2_5"],
        cuts: &[Regex(r"\p{N}{1,3}"), Regex(DEEPSEEK_V3_CJK), Regex(SPARK25_WORDS), Regex(r"\p{N}"), Bytes],
        ..PLAIN
    },
    PreRule {
        names: &["afmoe"],
        cuts: &[Regex(NUMBERS), Regex(THOUSANDS), Regex(AFMOE_SCRIPTS), Regex(DEEPSEEK_WORDS), Bytes],
        ..PLAIN
    },
    PreRule {
        names: &["tekken"],
        cuts: &[Regex(TEKKEN), Bytes],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    // gpt-oss, llama 4, phi-4-mini. tiktoken's vocabularies are complete under their merges, so ignoring
    // merges changes no id.
    PreRule {
        names: &["gpt-4o", "gpt-oss", "llama4", "kanana2", "talkie", "minimax-m2"],
        cuts: &[Regex(O200K), Bytes],
        ..PLAIN
    },
    PreRule {
        names: &["granite-embed-multi-97m"],
        cuts: &[Regex(O200K), Bytes],
        ignore_merges: true,
        ..PLAIN
    },
    PreRule {
        names: &["tiny_aya", "cohere2moe"],
        cuts: &[Regex(TINY_AYA_NUMBERS), Regex(O200K), Bytes],
        ..PLAIN
    },
    PreRule {
        names: &["youtu"],
        cuts: &[Regex(YOUTU_SCRIPTS), Regex(YOUTU_WORDS), Bytes],
        ignore_merges: true,
        ..PLAIN
    },
    // Words may extend across spaces; only numbers are split.
    PreRule { names: &["superbpe"], cuts: &[Regex(NUMBERS), Regex(THOUSANDS), Bytes], ..PLAIN },
    PreRule { names: &["laguna"], cuts: &[Regex(LINES), Regex(QWEN2), Bytes], ..PLAIN },
    PreRule { names: &["ufakzeka"], cuts: &[Regex(UFAKZEKA), Bytes], ..PLAIN },
    PreRule {
        names: &["chameleon"],
        cuts: &[
            Regex(r"<sentinel:[0-9]+>"),
            Regex(r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            Regex(r"([\t\n]|    |  )"),
            EachDigit,
            EachPunctuation,
            Gpt2Words,
        ],
        adds_bos: true,
        ..PLAIN
    },
    PreRule { names: &["kimi-k2"], cuts: &[Regex(KIMI_K2), Bytes], ..PLAIN },
    PreRule { names: &["bailingmoe", "bailingmoe2", "llada-moe"], cuts: &[Regex(BAILING), Bytes], ..PLAIN },
    PreRule { names: &["seed-coder"], cuts: &[Regex(SEED_CODER), Bytes], ..PLAIN },
    PreRule { names: &["exaone-moe"], cuts: &[Regex(EXAONE_MOE), Bytes], ..PLAIN },
    PreRule { names: &["bloom", "gpt3-finnish", "poro-chat"], cuts: &[Regex(BLOOM), Bytes], ..PLAIN },
    PreRule { names: &["viking"], cuts: &[Regex(BLOOM), EachDigit, Bytes], ..PLAIN },
];

/// Names without a split rule; their tokenizer is [`super::bpe::gemma4`].
const SENTENCE_PIECE: [&str; 2] = ["sarvam-moe", "granite-embed-multi-311m"];

/// Returns whether a regular expression is in the table. Those look at no text before their match, and at little after the
/// run of characters that they match, unless they [look far](looks_far).
pub(super) fn is_known(pattern: &str) -> bool {
    let mut cuts = RULES.iter().flat_map(|rule| rule.cuts);
    cuts.any(|cut| matches!(cut, Regex(known) if *known == pattern))
}

/// Returns whether any number of words depend on what follows a run of digits or of white space.
pub(super) fn looks_far(pattern: &str) -> bool {
    [THOUSANDS, TINY_AYA_NUMBERS, JAIS2].contains(&pattern)
}

/// Lists a name of each rule, those first that the `pre_tokenizer` of a tokenizer.json is most likely to mean: rules
/// whose regular expressions it all has, then GPT-2's words if it has no other, then the rest.
pub fn candidates(pre_tokenizer: &serde_json::Value) -> Vec<&'static str> {
    let text = pre_tokenizer.to_string();
    let has = |pattern: &str| text.contains(&serde_json::Value::from(pattern).to_string());
    let fit = |rule: &PreRule| {
        let patterns =
            rule.cuts.iter().filter_map(|cut| if let Regex(pattern) = cut { Some(*pattern) } else { None });
        let (mut known, mut unknown) = (0, 0);
        patterns.for_each(|pattern| if has(pattern) { known += 1 } else { unknown += 1 });
        let splits_words = matches!(rule.cuts, [Gpt2Words]) && !text.contains("\"Regex\"");
        std::cmp::Reverse(if unknown > 0 { 0 } else { known + usize::from(splits_words) })
    };
    let mut rules: Vec<&PreRule> = RULES.iter().collect();
    rules.sort_by_key(|rule| fit(rule));
    rules.into_iter().map(|rule| rule.names[0]).collect()
}

/// Returns one name of each rule.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|rule| rule.names[0])
}

impl PreRule {
    /// Returns whether the name's vocabulary has SentencePiece spelling, with '\u{2581}' for a space, and
    /// splits at line breaks only.
    pub fn is_sentence_piece(name: &str) -> bool {
        SENTENCE_PIECE.contains(&name)
    }

    /// Returns the rule of a name.
    ///
    /// # Errors
    /// A sentence with the unknown name and the known ones.
    pub fn named(name: &str) -> Result<&'static PreRule, String> {
        RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
            let mut known: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
            known.extend(SENTENCE_PIECE);
            known.sort_unstable();
            format!("unknown pre-tokenizer {name:?} (tokenizer.ggml.pre); known: {}", known.join(", "))
        })
    }

    pub fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.nfc.then_some(NormalizerWrapper::NFC(NFC))
    }

    /// Builds the pre-tokenizer.
    ///
    /// # Errors
    /// A regular expression that does not compile: an error in the table, found by its test.
    pub fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, String> {
        let cuts: Result<Vec<_>, String> = self.cuts.iter().map(|cut| cut.build()).collect();
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(cuts?)))
    }
}

impl SplitRule {
    fn build(self) -> Result<PreTokenizerWrapper, String> {
        Ok(match self {
            Regex(pattern) => {
                let pattern = SplitPattern::Regex(pattern.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                PreTokenizerWrapper::Split(split.map_err(|error| error.to_string())?)
            }
            EachDigit => PreTokenizerWrapper::Digits(Digits::new(true)),
            DigitRuns => PreTokenizerWrapper::Digits(Digits::new(false)),
            PunctuationRuns => {
                PreTokenizerWrapper::Punctuation(Punctuation::new(SplitDelimiterBehavior::Contiguous))
            }
            EachPunctuation => {
                PreTokenizerWrapper::Punctuation(Punctuation::new(SplitDelimiterBehavior::Isolated))
            }
            Gpt2Words => PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true)),
            Bytes => PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)),
        })
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::super::pieces::Spelling;
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let rule = PreRule::named(name).unwrap().pre_tokenizer().unwrap();
        let mut pieces = PreTokenizedString::from(text);
        rule.pre_tokenize(&mut pieces).unwrap();
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "I'LL say: naïve 漢字 かな 12345 x=1;\r\n\t  🦙 \u{301}a K ΐ  ";
        for name in RULES.iter().flat_map(|rule| rule.names) {
            let rule = PreRule::named(name).unwrap().pre_tokenizer().unwrap();
            let mut pieces = PreTokenizedString::from(text);
            rule.pre_tokenize(&mut pieces).unwrap();
            // In byte spelling: falcon's digit split comes after it and may split a character.
            let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
            let spelled: String = splits.into_iter().map(|(word, ..)| word).collect();
            assert_eq!(Spelling::ByteLevel.bytes(&spelled), text.as_bytes(), "{name}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn rules_differ_where_the_families_do() {
        assert_eq!(words("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(words("qwen2", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(words("gpt-2", "a 12345"), ["a", " 12345"]);
        assert_eq!(words("starcoder", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(words("gpt-4o", "HelloWorld's"), ["Hello", "World's"]);
        assert_eq!(words("tekken", "it's/\n"), ["it", "'s", "/\n"]);
        assert_eq!(words("llama-bpe", "x'LL"), ["x", "'LL"]);
        assert_eq!(words("qwen35", "e\u{301}t"), ["e\u{301}t"]);
        assert_eq!(words("kimi-k2", "中文abc"), ["中文", "abc"]);
    }

    /// Worked out by hand from the patterns.
    #[test]
    fn newer_rules_cut_as_their_patterns_say() {
        #[track_caller]
        fn cuts(name: &str, text: &str, expected: &[&str]) {
            assert_eq!(words(name, text), expected, "{name}: {text:?}");
        }
        // Three digits to a word, counted from the end of the number or from its start, or one.
        for name in ["afmoe", "superbpe", "tiny_aya", "cohere2moe"] {
            let found = words(name, "x1234567");
            assert_eq!(found[found.len() - 3..], ["1", "234", "567"], "{name}");
        }
        cuts("superbpe", "by the way 1234, 5", &["by the way ", "1", "234", ", ", "5"]);
        cuts("tiny_aya", "a 1234 b", &["a", " ", "1", "234", " b"]);
        cuts("tiny_aya", "HelloWorld's", &["Hello", "World's"]);
        cuts("afmoe", "abc\u{F900}\u{E40} !x\n\n", &["abc", "\u{F900}\u{E40}", " !", "x", "\n\n"]);
        cuts("hy_v4", "12345 漢字a.", &["123", "45", " ", "漢字", "a", "."]);
        cuts("spark2_5", "12345 x!\r\n\n", &["1", "2", "3", "4", "5", " x", "!", "\r", "\n", "\n"]);
        cuts("glm5", "it's 12345", &["it", "'s", " ", "123", "45"]);
        cuts("jais-2", "a       b", &["a", "    ", "  ", " b"]);
        cuts("granite-embed-multi-97m", "ABcd 12345/\n", &["ABcd", " ", "123", "45", "/\n"]);
        cuts("laguna", "a 12\n\n b's", &["a", " ", "1", "2", "\n\n", " b", "'s"]);
        cuts("ufakzeka", "Ali'nin 12", &["Ali", "'nin", " ", "1", "2"]);
        cuts("ufakzeka", "it's", &["it", "'s"]);
        cuts("ufakzeka", "I'LLx", &["I", "'LLx"]); // with contractions it would be 'LL and x
        cuts("qwen2", "I'LLx", &["I", "'LL", "x"]);
        cuts("youtu", "한글漢字、DataSet's 12", &["한글", "漢字", "、", "Data", "Set's", " ", "1", "2"]);
        // Each split works on the pieces of the previous one, including a sentinel's digits and marks.
        cuts("chameleon", "IMGIMGABZ  a.b 12", &["IMGIMGABZ", "  ", "a", ".", "b", " ", "1", "2"]);
        cuts("chameleon", "<sentinel:12>", &["<", "sentinel", ":", "1", "2", ">"]);
    }

    #[test]
    fn sentence_piece_names_are_listed_and_have_no_cuts() {
        for name in SENTENCE_PIECE {
            assert!(PreRule::is_sentence_piece(name) && PreRule::named(name).is_err());
            assert!(PreRule::named("whitespace").unwrap_err().contains(name));
        }
        assert!(!PreRule::is_sentence_piece("gpt-2"));
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = PreRule::named("nonsense").unwrap_err();
        assert!(message.contains("\"nonsense\"") && message.contains("llama-bpe, llama-v3"), "{message}");
    }
}
