//! The one definition of the sampling parameters, from which validation, flags, `/set`, request fields,
//! worker lines, session records and reports derive.
//!
//! A new number is one entry of [`SAMPLING`], its use in `sample.rs` and a test.
//! Definitions of the newer ones: dynamic temperature (llama.cpp PR 4972), DRY (text-generation-webui PR 5677), XTC (PR 6335 there),
//! Mirostat (Basu et al. 2021, arXiv 2007.14966), all as llama.cpp's samplers compute them.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;

/// Values that a parameter may have: from `low` to `high`, both included unless `excludes_low`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    pub low: f32,
    pub excludes_low: bool,
    pub high: f32,
}

const fn from(low: f32, high: f32) -> Range {
    Range { low, excludes_low: false, high }
}

const fn above(low: f32, high: f32) -> Range {
    Range { low, excludes_low: true, high }
}

/// As mathematics writes it, e.g. `(0, 1]`.
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bracket = if self.excludes_low { '(' } else { '[' };
        write!(f, "{bracket}{}, {}]", self.low, self.high)
    }
}

impl Range {
    fn contains(&self, value: f32) -> bool {
        (self.low..=self.high).contains(&value) && !(self.excludes_low && value == self.low)
    }

    /// # Errors
    /// [`Error::InvalidParameter`] if `value` is outside or NaN.
    fn check(&self, name: &'static str, value: f32) -> Result<(), Error> {
        match self.contains(value) {
            true => Ok(()),
            false => Err(Error::InvalidParameter { name, message: format!("{value} is not in {self}") }),
        }
    }
}

/// The servers other than llmctl that honour a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// All with OpenAI's interface.
    Everywhere,
    /// vLLM, SGLang and llama.cpp.
    OpenEngines,
    LlamaCpp,
}

/// Facts about a parameter that do not depend on its type.
#[derive(Debug, Clone, Copy)]
pub struct ParameterFacts {
    pub default: f32,
    pub range: Range,
    /// Letter of the value in `--help`.
    pub value_name: &'static str,
    /// True if the short help shows it.
    pub is_common: bool,
    /// True if its values are whole numbers.
    pub is_whole: bool,
    /// Names in request fields; the first is the parameter's own.
    pub spellings: &'static [&'static str],
    /// The key in a model's generation_config.json, if publishers recommend values of it.
    pub config_key: Option<&'static str>,
    /// The key in a GGUF file.
    pub gguf_key: Option<&'static str>,
    /// True if records and worker lines leave it out at its default, because readers older than it refuse it.
    pub is_optional: bool,
    pub support: Support,
}

const RARE: ParameterFacts = ParameterFacts {
    default: 0.0,
    range: from(0.0, 1.0),
    value_name: "X",
    is_common: false,
    is_whole: false,
    spellings: &[],
    config_key: None,
    gguf_key: None,
    is_optional: false,
    support: Support::Everywhere,
};

const LLAMA_CPP: ParameterFacts = ParameterFacts { is_optional: true, support: Support::LlamaCpp, ..RARE };

/// The highest number of tokens that a parameter takes.
const MOST_TOKENS: f32 = 4_194_304.0;

const WHOLE: ParameterFacts = ParameterFacts { is_whole: true, range: from(0.0, MOST_TOKENS), ..LLAMA_CPP };

/// A sampling parameter that is a number.
#[derive(Debug, Clone, Copy)]
pub struct SamplingNumber {
    pub name: &'static str,
    /// One line for `--help`.
    pub help: &'static str,
    pub facts: ParameterFacts,
    get: fn(&Sampling) -> f32,
    set: fn(&mut Sampling, f32),
    given: fn(&SamplingNumbers) -> Option<f32>,
    give: fn(&mut SamplingNumbers, Option<f32>),
}

macro_rules! numbers {
    ($(#[doc = $help:literal] $name:ident: $facts:expr,)*) => {
        /// Parameters of the choice of the next token. The default is greedy.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Sampling {
            $(#[doc = $help] pub $name: f32,)*
            /// Keep the k most likely tokens; `None` keeps all.
            pub top_k: Option<usize>,
            /// Added to the logits of these ids; each in [-100, 100].
            pub logit_bias: BTreeMap<u32, f32>,
            /// `None` draws a seed, which is reported so that the run can be repeated.
            pub seed: Option<u64>,
            /// The samplers that apply, in this order, and no others; `None` is the order of `sample.rs`.
            pub samplers: Option<Vec<SamplerStep>>,
            /// Texts that a repetition which DRY penalises does not go across; `None` is [`DRY_SEQUENCE_BREAKERS`].
            pub dry_sequence_breakers: Option<Vec<String>>,
        }

        /// Values for some of the numbers.
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct SamplingNumbers {
            $(#[doc = $help] pub $name: Option<f32>,)*
        }

        impl SamplingNumbers {
            const NONE: Self = Self { $($name: None,)* };
        }

        impl Default for Sampling {
            fn default() -> Self {
                let (top_k, logit_bias, seed, samplers, dry_sequence_breakers) = Default::default();
                Self {
                    $($name: { const FACTS: ParameterFacts = $facts; FACTS.default },)*
                    top_k, logit_bias, seed, samplers, dry_sequence_breakers,
                }
            }
        }

        /// All sampling parameters that are numbers, in the order of help texts, tables and reports.
        pub static SAMPLING: &[SamplingNumber] = &[$(SamplingNumber {
            name: stringify!($name),
            help: $help,
            facts: $facts,
            get: |sampling| sampling.$name,
            set: |sampling, value| sampling.$name = value,
            given: |numbers| numbers.$name,
            give: |numbers, value| numbers.$name = value,
        },)*];
    };
}

numbers! {
    /// Randomness, 0 to 2; 0 always takes the most likely token
    temperature: ParameterFacts {
        range: from(0.0, 2.0), value_name: "T", is_common: true,
        config_key: Some("temperature"), gguf_key: Some("general.sampling.temp"), ..RARE
    },
    /// Choose among the most likely tokens that together have probability P, above 0 up to 1
    top_p: ParameterFacts {
        default: 1.0, range: above(0.0, 1.0), value_name: "P", is_common: true,
        config_key: Some("top_p"), gguf_key: Some("general.sampling.top_p"), ..RARE
    },
    /// Drop tokens less than P times as likely as the most likely one, 0 to 1
    min_p: ParameterFacts {
        value_name: "P", support: Support::OpenEngines,
        config_key: Some("min_p"), gguf_key: Some("general.sampling.min_p"), ..RARE
    },
    /// Choose among the tokens nearest to the average surprise that together have probability P, above 0 up to 1; 1 is off
    typical_p: ParameterFacts {
        default: 1.0, range: above(0.0, 1.0), value_name: "P", spellings: &["typical_p", "typ_p"],
        config_key: Some("typical_p"), is_optional: true, support: Support::LlamaCpp, ..RARE
    },
    /// Drop tokens whose logit is more than N standard deviations below the highest; 0 and less is off
    top_n_sigma: ParameterFacts {
        default: -1.0, range: from(-1.0, 100.0), value_name: "N", is_optional: true, support: Support::LlamaCpp, ..RARE
    },
    /// Make tokens seen before less likely, above 0 up to 2; 1 is off
    repetition_penalty: ParameterFacts {
        default: 1.0, range: above(0.0, 2.0), value_name: "R", spellings: &["repetition_penalty", "repeat_penalty"],
        config_key: Some("repetition_penalty"), gguf_key: Some("general.sampling.penalty_repeat"),
        support: Support::OpenEngines, ..RARE
    },
    /// Subtract from the logit of every token generated before, -2 to 2
    presence_penalty: ParameterFacts { range: from(-2.0, 2.0), ..RARE },
    /// Subtract once for each time a token was generated before, -2 to 2
    frequency_penalty: ParameterFacts { range: from(-2.0, 2.0), ..RARE },
    /// The last tokens of prompt and answer that all three penalties count; -1 is off (default): all tokens, those of the prompt for the repetition penalty only
    repeat_last_n: ParameterFacts { default: -1.0, range: from(-1.0, MOST_TOKENS), value_name: "N", ..WHOLE },
    /// DRY: make a token that continues a repetition less likely: subtract M times the base to the power of the tokens beyond the allowed length; 0 is off
    dry_multiplier: ParameterFacts { range: from(0.0, 100.0), value_name: "M", ..LLAMA_CPP },
    /// DRY: the base of the power, 1 to 100 (default 1.75); below 1 is off
    dry_base: ParameterFacts { default: 1.75, range: from(0.0, 100.0), value_name: "B", ..LLAMA_CPP },
    /// DRY: tokens that may be repeated without a penalty (default 2)
    dry_allowed_length: ParameterFacts { default: 2.0, value_name: "N", ..WHOLE },
    /// DRY: the last tokens of prompt and answer that are searched for repetitions; -1 is all (default), 0 is off
    dry_penalty_last_n: ParameterFacts { default: -1.0, range: from(-1.0, MOST_TOKENS), value_name: "N", ..WHOLE },
    /// XTC: the probability of leaving out the most likely tokens at a draw, 0 to 1; 0 is off
    xtc_probability: ParameterFacts { value_name: "P", ..LLAMA_CPP },
    /// XTC: leave out all tokens of at least probability P but the least likely of them (default 0.1); above 0.5 is off
    xtc_threshold: ParameterFacts { default: 0.1, value_name: "P", ..LLAMA_CPP },
    /// Dynamic temperature: between the temperature less R, where the choice is clear, and the temperature plus R, where it is open, 0 to 2; 0 is off
    dynatemp_range: ParameterFacts { range: from(0.0, 2.0), value_name: "R", ..LLAMA_CPP },
    /// Dynamic temperature: the exponent of the normalised entropy that it follows, 0 to 10 (default 1)
    dynatemp_exponent: ParameterFacts { default: 1.0, range: from(0.0, 10.0), ..LLAMA_CPP },
    /// Mirostat 1 or 2, in place of top-k, top-p and the other cuts; 0 is off
    mirostat: ParameterFacts { range: from(0.0, 2.0), value_name: "N", ..WHOLE },
    /// Mirostat: the surprise of a token to aim at, in bits, 0 to 100 (default 5)
    mirostat_tau: ParameterFacts { default: 5.0, range: from(0.0, 100.0), value_name: "BITS", ..LLAMA_CPP },
    /// Mirostat: the learning rate, 0 to 1 (default 0.1)
    mirostat_eta: ParameterFacts { default: 0.1, ..LLAMA_CPP },
}

/// A step from logits to the tokens of a draw. Serialised under llama.cpp's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerStep {
    /// Repetition, presence and frequency penalties.
    Penalties,
    Dry,
    TopNSigma,
    TopK,
    #[serde(rename = "typ_p", alias = "typical_p")]
    TypicalP,
    TopP,
    MinP,
    Xtc,
    /// Dynamic or not.
    Temperature,
}

/// The texts that end what DRY takes for a repetition unless others are given: llama.cpp's.
pub const DRY_SEQUENCE_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// The most steps of an order, the most sequence breakers and the most bytes of one (llama.cpp's limit).
const MAX_STEPS: usize = 32;
const MAX_BREAKERS: usize = 64;
const MAX_BREAKER_BYTES: usize = 40;

impl SamplerStep {
    /// The names of all, as they are shown.
    pub const NAMES: [(&'static str, Self); 9] = [
        ("penalties", Self::Penalties),
        ("dry", Self::Dry),
        ("top_n_sigma", Self::TopNSigma),
        ("top_k", Self::TopK),
        ("typ_p", Self::TypicalP),
        ("top_p", Self::TopP),
        ("min_p", Self::MinP),
        ("xtc", Self::Xtc),
        ("temperature", Self::Temperature),
    ];

    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, step)| *step == self).map_or("", |(name, _)| name)
    }

    /// Reads an order of llama.cpp's names, short ones too. Leaves out names whose samplers other fields switch on, which are
    /// refused.
    ///
    /// # Errors
    /// A message that names the first unknown one, or says that there are too many.
    pub fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Vec<Self>, String> {
        let bare = |name: &str| name.trim().replace(['-', '_'], "").to_ascii_lowercase();
        let mut steps = Vec::new();
        for name in names {
            let full = match bare(name).as_str() {
                "tfsz" | "adaptivep" => continue,
                "typ" | "typical" | "typicalp" => "typp".to_owned(),
                "temp" => "temperature".to_owned(),
                "nucleus" => "topp".to_owned(),
                full => full.to_owned(),
            };
            let Some((_, step)) = Self::NAMES.iter().find(|(known, _)| bare(known) == full) else {
                let name: String = name.trim().chars().take(40).collect();
                let known = Self::NAMES.map(|(name, _)| name).join(", ");
                return Err(format!("unknown sampler {name:?} ({known})"));
            };
            if steps.len() == MAX_STEPS {
                return Err(format!("more than {MAX_STEPS} samplers"));
            }
            steps.push(*step);
        }
        Ok(steps)
    }
}

/// A sampling parameter of any type.
#[derive(Debug, Clone, Copy)]
pub enum SamplingParameter {
    Number(&'static SamplingNumber),
    TopK,
    LogitBias,
    Seed,
    Samplers,
    DrySequenceBreakers,
}

impl SamplingParameter {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Number(number) => number.name,
            Self::TopK => "top_k",
            Self::LogitBias => "logit_bias",
            Self::Seed => "seed",
            Self::Samplers => "samplers",
            Self::DrySequenceBreakers => "dry_sequence_breakers",
        }
    }

    /// Returns all parameters in the order of help texts, tables and reports: `top_k` stands after the temperature.
    pub fn all() -> impl Iterator<Item = Self> {
        let (first, rest) = SAMPLING.split_at(1);
        let numbers = |numbers: &'static [SamplingNumber]| numbers.iter().map(Self::Number);
        let last = [Self::DrySequenceBreakers, Self::Samplers, Self::LogitBias, Self::Seed];
        numbers(first).chain([Self::TopK]).chain(numbers(rest)).chain(last)
    }
}

impl SamplingNumber {
    pub fn get(&self, sampling: &Sampling) -> f32 {
        (self.get)(sampling)
    }

    pub fn set(&self, sampling: &mut Sampling, value: f32) {
        (self.set)(sampling, value);
    }

    pub fn given(&self, numbers: &SamplingNumbers) -> Option<f32> {
        (self.given)(numbers)
    }

    pub fn give(&self, numbers: &mut SamplingNumbers, value: Option<f32>) {
        (self.give)(numbers, value);
    }

    /// Returns its names in request fields, its own first.
    pub fn spellings(&'static self) -> &'static [&'static str] {
        match self.facts.spellings {
            [] => std::slice::from_ref(&self.name),
            spellings => spellings,
        }
    }
}

impl Sampling {
    /// Checks every range; `vocab_size` bounds the ids in `logit_bias`.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming the first parameter out of range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), Error> {
        for number in SAMPLING {
            let value = number.get(self);
            number.facts.range.check(number.name, value)?;
            if number.facts.is_whole && value.fract() != 0.0 {
                let message = format!("{value} is not a whole number");
                return Err(Error::InvalidParameter { name: number.name, message });
            }
        }
        self.check_lists()?;
        if self.top_k == Some(0) {
            let message = "must be at least 1; leave it out to keep all tokens".to_owned();
            return Err(Error::InvalidParameter { name: "top_k", message });
        }
        for (&id, &bias) in &self.logit_bias {
            from(-100.0, 100.0).check("logit_bias", bias)?;
            if id as usize >= vocab_size {
                let message = format!("token id {id} is not in the vocabulary of {vocab_size}");
                return Err(Error::InvalidParameter { name: "logit_bias", message });
            }
        }
        Ok(())
    }
}

impl Sampling {
    /// # Errors
    /// [`Error::InvalidParameter`] naming a list that is too long or has a text without characters or with too many.
    fn check_lists(&self) -> Result<(), Error> {
        if self.samplers.as_ref().is_some_and(|steps| steps.len() > MAX_STEPS) {
            let message = format!("more than {MAX_STEPS} samplers");
            return Err(Error::InvalidParameter { name: "samplers", message });
        }
        let breakers = self.dry_sequence_breakers.as_deref().unwrap_or_default();
        let is_wrong = |text: &String| text.is_empty() || text.len() > MAX_BREAKER_BYTES;
        if breakers.len() > MAX_BREAKERS || breakers.iter().any(is_wrong) {
            let message = format!("not up to {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_BYTES} bytes");
            return Err(Error::InvalidParameter { name: "dry_sequence_breakers", message });
        }
        Ok(())
    }

    /// Returns whether DRY changes anything.
    pub fn uses_dry(&self) -> bool {
        self.dry_multiplier > 0.0 && self.dry_base >= 1.0 && self.dry_penalty_last_n != 0.0
    }

    /// Returns whether one of the repetition, presence and frequency penalties changes anything.
    pub fn uses_penalties(&self) -> bool {
        let is_on =
            self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        is_on && self.repeat_last_n != 0.0
    }
}

/// `top_k` as it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopK {
    All,
    Best(usize),
}

/// Sampling parameters as far as they are given.
///
/// The one order of precedence: a request or a flag, then configuration (clap merges the two), then what the model's publisher
/// recommends ([`Self::or`] joins two of them), and last the built-in values of [`Self::sampling`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GivenSampling {
    pub numbers: SamplingNumbers,
    pub top_k: Option<TopK>,
    pub logit_bias: Option<BTreeMap<u32, f32>>,
    pub seed: Option<u64>,
    pub samplers: Option<Vec<SamplerStep>>,
    pub dry_sequence_breakers: Option<Vec<String>>,
}

/// Sampling of free text where nothing gives a temperature: the defaults of llama.cpp and LM Studio, close to Ollama's (top_p
/// 0.9). Greedy answers of small models often repeat themselves to the end of the context; with these values 9 of 10 end. A
/// repetition penalty would end more of them, but it also makes code, tables and tool calls wrong, which must repeat names.
pub const FREE_TEXT: GivenSampling = GivenSampling {
    numbers: SamplingNumbers { temperature: Some(0.8), top_p: Some(0.95), ..SamplingNumbers::NONE },
    top_k: Some(TopK::Best(40)),
    logit_bias: None,
    seed: None,
    samplers: None,
    dry_sequence_breakers: None,
};

impl GivenSampling {
    /// Greedy sampling, as far as nothing else is given.
    pub const GREEDY: Self = Self {
        numbers: SamplingNumbers { temperature: Some(0.0), ..SamplingNumbers::NONE },
        top_k: None,
        ..FREE_TEXT
    };

    /// Adds what `other` gives where nothing is given here.
    pub fn or(mut self, other: &Self) -> Self {
        for number in SAMPLING {
            let value = number.given(&self.numbers).or(number.given(&other.numbers));
            number.give(&mut self.numbers, value);
        }
        let logit_bias = self.logit_bias.or_else(|| other.logit_bias.clone());
        self.samplers = self.samplers.or_else(|| other.samplers.clone());
        self.dry_sequence_breakers =
            self.dry_sequence_breakers.or_else(|| other.dry_sequence_breakers.clone());
        Self { logit_bias, top_k: self.top_k.or(other.top_k), seed: self.seed.or(other.seed), ..self }
    }

    /// Returns the sampling in force. Where no temperature is given, free text gets [`FREE_TEXT`] for all that is not given, and
    /// other answers are greedy. With a temperature nothing is added, so that temperature 1 is the model's own distribution.
    pub fn sampling(&self, is_free_text: bool) -> Sampling {
        let takes_defaults = is_free_text && self.numbers.temperature.is_none();
        let given = if takes_defaults { &self.clone().or(&FREE_TEXT) } else { self };
        let top_k = match given.top_k {
            Some(TopK::Best(count)) => Some(count),
            Some(TopK::All) | None => None,
        };
        let logit_bias = given.logit_bias.clone().unwrap_or_default();
        let (samplers, dry_sequence_breakers) = (given.samplers.clone(), given.dry_sequence_breakers.clone());
        let mut sampling = Sampling {
            top_k,
            logit_bias,
            seed: given.seed,
            samplers,
            dry_sequence_breakers,
            ..Sampling::default()
        };
        given.numbers.apply(&mut sampling);
        sampling
    }
}

impl SamplingNumbers {
    /// Returns the numbers of `sampling` that records and worker lines hold.
    pub fn of(sampling: &Sampling) -> Self {
        let mut numbers = Self::default();
        for number in SAMPLING {
            let value = number.get(sampling);
            number.give(
                &mut numbers,
                Some(value).filter(|_| !number.facts.is_optional || value != number.facts.default),
            );
        }
        numbers
    }

    /// Overwrites the numbers of `sampling` that are given here.
    pub fn apply(&self, sampling: &mut Sampling) {
        for number in SAMPLING {
            number.given(self).into_iter().for_each(|value| number.set(sampling, value));
        }
    }
}

impl Serialize for SamplingNumbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for number in SAMPLING {
            if let Some(value) = number.given(self) {
                map.serialize_entry(number.name, &value)?;
            }
        }
        map.end()
    }
}

/// For `#[serde(flatten)]`: gets the fields that the struct around it does not have, and refuses those that are no number of
/// [`SAMPLING`], as `deny_unknown_fields` would.
impl<'de> Deserialize<'de> for SamplingNumbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NumbersVisitor)
    }
}

struct NumbersVisitor;

impl<'de> Visitor<'de> for NumbersVisitor {
    type Value = SamplingNumbers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sampling parameters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SamplingNumbers, A::Error> {
        let mut numbers = SamplingNumbers::default();
        while let Some(name) = map.next_key::<String>()? {
            let Some(number) = SAMPLING.iter().find(|number| number.name == name) else {
                return Err(A::Error::custom(format!("unknown field `{name}`")));
            };
            number.give(&mut numbers, Some(map.next_value()?));
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn defaults_are_in_range_and_beyond_the_ends_is_refused_by_name() {
        Sampling::default().validate(0).expect("the defaults");
        for number in SAMPLING {
            let Range { low, excludes_low, high } = number.facts.range;
            for (value, is_valid) in [
                (high, true),
                (low, !excludes_low),
                (high + 0.5, false),
                (low - 0.5, false),
                (f32::NAN, false),
                (f32::INFINITY, false),
            ] {
                let mut sampling = Sampling::default();
                number.set(&mut sampling, value);
                let checked = sampling.validate(0);
                assert_eq!(checked.is_ok(), is_valid, "{} = {value}", number.name);
                if let Err(error) = checked {
                    assert!(matches!(error, Error::InvalidParameter { name, .. } if name == number.name));
                    assert!(
                        error.to_string().ends_with(&format!("is not in {}", number.facts.range)),
                        "{error}"
                    );
                }
            }
        }
    }

    #[test]
    fn numbers_are_written_and_read_back_and_other_fields_are_refused() {
        for number in SAMPLING {
            let mut sampling = Sampling::default();
            number.set(&mut sampling, 0.25);
            let written = serde_json::to_value(SamplingNumbers::of(&sampling)).expect("a map");
            assert_eq!(written[number.name], json!(0.25));
            let read: SamplingNumbers = serde_json::from_value(written).expect(number.name);
            let mut back = Sampling::default();
            read.apply(&mut back);
            assert_eq!(back, sampling);
        }
        assert!(serde_json::from_value::<SamplingNumbers>(json!({"temprature": 1})).is_err());
        let text = serde_json::to_string(&SamplingNumbers::of(&Sampling::default())).expect("a map");
        assert!(!text.contains("typical_p") && !text.contains("mirostat"), "{text}");
    }

    #[test]
    fn orders_are_read_by_all_their_names_and_lists_are_bounded() {
        let read = |text: &str| SamplerStep::list(text.split(';'));
        let all = SamplerStep::NAMES.map(|(_, step)| step).to_vec();
        assert_eq!(
            read("penalties;dry;top_n_sigma;topk;typical-p;nucleus;min-p;XTC; temp "),
            Ok(all.clone())
        );
        let written = serde_json::to_string(&all).expect("a list");
        assert_eq!(serde_json::from_str::<Vec<SamplerStep>>(&written).expect("written"), all);
        assert!(all.iter().all(|step| written.contains(&format!("\"{}\"", step.name()))), "{written}");
        assert_eq!(read("tfs_z;adaptive_p"), Ok(Vec::new()), "off, because their fields are refused");
        let error = read("top_k;infill").expect_err("unknown");
        assert!(error.starts_with("unknown sampler \"infill\" (penalties, dry,"), "{error}");
        assert!(SamplerStep::list(["dry"; 32]).is_ok() && SamplerStep::list(["dry"; 33]).is_err());
        for wrong in [vec![String::new()], vec!["x".repeat(41)], vec!["x".to_owned(); 65]] {
            let sampling = Sampling { dry_sequence_breakers: Some(wrong), ..Sampling::default() };
            let name = |error| matches!(error, Error::InvalidParameter { name: "dry_sequence_breakers", .. });
            assert!(sampling.validate(0).is_err_and(name));
        }
        let half = Sampling { mirostat: 1.5, ..Sampling::default() };
        let error = half.validate(0).expect_err("not whole").to_string();
        assert!(error.ends_with("1.5 is not a whole number"), "{error}");
    }

    #[test]
    fn a_temperature_is_left_alone_and_free_text_without_one_is_sampled() {
        let given = |temperature, top_p, top_k| GivenSampling {
            numbers: SamplingNumbers { temperature, top_p, ..SamplingNumbers::NONE },
            top_k,
            ..GivenSampling::default()
        };
        let check = |given: &GivenSampling, expected| {
            let Sampling { temperature, top_k, top_p, repetition_penalty, .. } = given.sampling(true);
            assert_eq!((temperature, top_k, top_p, repetition_penalty), expected);
        };
        let cut = given(None, Some(0.5), Some(TopK::All));
        check(&GivenSampling::default(), (0.8, Some(40), 0.95, 1.0));
        check(&cut, (0.8, None, 0.5, 1.0));
        for temperature in [0.0, 1.0] {
            let asked = given(Some(temperature), None, None);
            check(&asked, (temperature, None, 1.0, 1.0));
            check(&cut.clone().or(&asked), (temperature, None, 0.5, 1.0));
        }
        assert_eq!(GivenSampling::default().sampling(false), Sampling::default());
        let page = include_str!("../../docs/run.md");
        assert!(page.contains("temperature 0.8, top-k 40 and top-p 0.95"));
    }

    /// The documents name every parameter, with its range and default.
    #[test]
    fn documents_agree_with_the_definition() {
        let fields = include_str!("../../docs/http-fields.md");
        let protocol = include_str!("../../docs/worker-protocol.md");
        let schema: Value =
            serde_json::from_str(include_str!("../../docs/worker-protocol.schema.json")).expect("JSON");
        for number in SAMPLING {
            for spelling in number.spellings() {
                let row = fields.lines().find(|line| line.starts_with(&format!("| `{spelling}` |")));
                assert!(row.is_some_and(|row| row.contains("| honoured |")), "http-fields.md: {spelling}");
            }
            assert!(protocol.contains(&format!("`{}`", number.name)), "worker-protocol.md: {}", number.name);
            let Range { low, excludes_low, high } = number.facts.range;
            let minimum = if excludes_low { "exclusiveMinimum" } else { "minimum" };
            let property = &schema["$defs"]["generate"]["properties"][number.name];
            let facts =
                [("type", json!("number")), (minimum, json!(low as i64)), ("maximum", json!(high as i64))];
            let default: Value = number.facts.default.to_string().parse().expect("a number");
            for (key, value) in facts.into_iter().chain([("default", default)]) {
                assert_eq!(property[key], value, "worker-protocol.schema.json: {}.{key}", number.name);
            }
        }
    }
}
