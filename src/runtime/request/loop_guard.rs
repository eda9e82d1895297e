//! The guard against generations that repeat themselves without an end.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Ends reasoning, or an answer, whose last tokens are one cycle over and over: at least this many tokens and four cycles of at
/// most 1,024 tokens. `None` ends nothing. Reasoning continues with the answer, and an answer ends with
/// [`Finish::Repetition`](super::Finish::Repetition). Only the ids of the generation's own tokens count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoopGuard {
    pub reasoning: Option<usize>,
    pub answer: Option<usize>,
}

impl LoopGuard {
    /// Tokens of repetition that are beyond doubt: tables, lists of zeros and refrains have fewer.
    pub const USUAL: usize = 1000;
    /// The fewest and the most that can be asked for.
    pub const LEAST: usize = 16;
    pub const MOST: usize = 100_000;

    pub const OFF: Self = Self { reasoning: None, answer: None };

    /// Guards reasoning and answers.
    pub const fn both(tokens: usize) -> Self {
        Self { reasoning: Some(tokens), answer: Some(tokens) }
    }

    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the first threshold that cannot be asked for.
    pub fn out_of_range(&self) -> Option<usize> {
        let given = [self.reasoning, self.answer].into_iter().flatten();
        given.into_iter().find(|tokens| !(Self::LEAST..=Self::MOST).contains(tokens))
    }
}

/// Reasoning only: an answer may repeat itself because it was asked to.
impl Default for LoopGuard {
    fn default() -> Self {
        Self { reasoning: Some(Self::USUAL), answer: None }
    }
}

/// As flags and fields write it: `on`, `off`, or the tokens of a repetition, for reasoning and answers.
impl FromStr for LoopGuard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let guard = match text {
            "on" => Some(Self::both(Self::USUAL)),
            "off" => Some(Self::OFF),
            number => number.parse().ok().map(Self::both).filter(|guard| guard.out_of_range().is_none()),
        };
        guard.ok_or_else(|| {
            format!("unknown value {text:?} (on, off, or {} to {} tokens)", Self::LEAST, Self::MOST)
        })
    }
}

impl fmt::Display for LoopGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { reasoning: None, answer: None } => f.write_str("off"),
            Self { reasoning: Some(tokens), answer: None } => write!(f, "{tokens} (reasoning only)"),
            Self { answer: Some(tokens), .. } => write!(f, "{tokens}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_users_write_it() {
        for (text, expected, shown) in [
            ("on", LoopGuard::both(1000), "1000"),
            ("off", LoopGuard::OFF, "off"),
            ("16", LoopGuard::both(16), "16"),
            ("100000", LoopGuard::both(100_000), "100000"),
        ] {
            assert_eq!((text.parse(), expected.to_string().as_str()), (Ok(expected), shown));
        }
        assert_eq!(LoopGuard::default().to_string(), "1000 (reasoning only)");
        for text in ["", "15", "100001", "-1", "yes"] {
            let error = text.parse::<LoopGuard>().expect_err(text);
            assert_eq!(error, format!("unknown value {text:?} (on, off, or 16 to 100000 tokens)"));
        }
    }
}
