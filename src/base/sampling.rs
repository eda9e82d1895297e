//! The one definition of the sampling parameters, from which validation, flags, `/set`, request fields,
//! worker lines, session records and reports derive.
//!
//! A new number is one entry of [`SAMPLING`], its use in `sample.rs` and a test.

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
    spellings: &[],
    config_key: None,
    gguf_key: None,
    is_optional: false,
    support: Support::Everywhere,
};

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
                let (top_k, logit_bias, seed) = Default::default();
                Self { $($name: { const FACTS: ParameterFacts = $facts; FACTS.default },)* top_k, logit_bias, seed }
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
}

/// A sampling parameter of any type.
#[derive(Debug, Clone, Copy)]
pub enum SamplingParameter {
    Number(&'static SamplingNumber),
    TopK,
    LogitBias,
    Seed,
}

impl SamplingParameter {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Number(number) => number.name,
            Self::TopK => "top_k",
            Self::LogitBias => "logit_bias",
            Self::Seed => "seed",
        }
    }

    /// Returns all parameters in the order of help texts, tables and reports: `top_k` stands after the temperature.
    pub fn all() -> impl Iterator<Item = Self> {
        let (first, rest) = SAMPLING.split_at(1);
        let numbers = |numbers: &'static [SamplingNumber]| numbers.iter().map(Self::Number);
        numbers(first).chain([Self::TopK]).chain(numbers(rest)).chain([Self::LogitBias, Self::Seed])
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
        SAMPLING.iter().try_for_each(|number| number.facts.range.check(number.name, number.get(self)))?;
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
}

/// Sampling of free text where nothing gives a temperature: the defaults of llama.cpp and LM Studio, close to Ollama's (top_p
/// 0.9). Greedy answers of small models often repeat themselves to the end of the context; with these values 9 of 10 end. A
/// repetition penalty would end more of them, but it also makes code, tables and tool calls wrong, which must repeat names.
pub const FREE_TEXT: GivenSampling = GivenSampling {
    numbers: SamplingNumbers { temperature: Some(0.8), top_p: Some(0.95), ..SamplingNumbers::NONE },
    top_k: Some(TopK::Best(40)),
    logit_bias: None,
    seed: None,
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
        let mut sampling = Sampling { top_k, logit_bias, seed: given.seed, ..Sampling::default() };
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
        assert!(!text.contains("typical_p") && !text.contains("top_n_sigma"), "{text}");
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
            for (key, value) in facts.into_iter().chain([("default", json!(number.facts.default as i64))]) {
                assert_eq!(property[key], value, "worker-protocol.schema.json: {}.{key}", number.name);
            }
        }
    }
}
