//! Groups of three digits, counted from the end of a number, in one pass. The published regular expressions
//! look from each group to the end of the number, so that one of 64,000 digits takes half a minute.

use tokenizers::pattern::Pattern;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    Offsets, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, Result, SplitDelimiterBehavior,
};

/// Between the digits of a number.
pub(super) const THOUSANDS: &str = r"(?=(\p{N}{3})+(?!\p{N}))";
/// The groups of a number that no letter, mark or connector follows.
pub(super) const TINY_AYA_NUMBERS: &str = r"\d{1,3}(?=(?:\d{3})*\b)";

/// Part of a pre-tokenizer; each works on the pieces of the previous one.
pub(super) enum SplitStage {
    Library(PreTokenizerWrapper),
    Groups(Groups),
}

pub(super) struct Groups {
    numbers: SysRegex,
    /// The number is a piece of its own, unless this follows.
    unless_before: Option<SysRegex>,
}

impl SplitStage {
    /// Lists the stages of a pre-tokenizer.
    ///
    /// # Errors
    /// Those of the regular expressions' compiler, which the constants here do not cause.
    pub fn all_of(rule: PreTokenizerWrapper) -> Result<Vec<Self>> {
        if let PreTokenizerWrapper::Sequence(parts) = rule {
            let stages: Result<Vec<_>> = parts.into_iter().map(Self::all_of).collect();
            return Ok(stages?.into_iter().flatten().collect());
        }
        Ok(vec![Groups::of(&rule)?.map_or(SplitStage::Library(rule), SplitStage::Groups)])
    }

    pub fn apply(&self, pieces: &mut PreTokenizedString) -> Result<()> {
        match self {
            SplitStage::Library(rule) => rule.pre_tokenize(pieces),
            SplitStage::Groups(groups) => {
                pieces.split(|_, text| text.split(groups, SplitDelimiterBehavior::Isolated))
            }
        }
    }
}

impl Groups {
    fn of(rule: &PreTokenizerWrapper) -> Result<Option<Self>> {
        let PreTokenizerWrapper::Split(split) = rule else { return Ok(None) };
        let is_isolated = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
        Ok(match &split.pattern {
            SplitPattern::Regex(pattern) if is_isolated && pattern == THOUSANDS => {
                Some(Self { numbers: SysRegex::new(r"\p{N}+")?, unless_before: None })
            }
            SplitPattern::Regex(pattern) if is_isolated && pattern == TINY_AYA_NUMBERS => {
                Some(Self { numbers: SysRegex::new(r"\d+")?, unless_before: Some(SysRegex::new(r"\w")?) })
            }
            _ => None,
        })
    }
}

impl Pattern for &Groups {
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        let mut pieces = Vec::new();
        let mut at = 0;
        let mut cut = |end| {
            if at < end {
                pieces.push(((at, end), true));
                at = end;
            }
        };
        for (start, end) in self.numbers.find_iter(inside) {
            if let Some(word) = &self.unless_before {
                let next = inside[end..].chars().next().map(String::from).unwrap_or_default();
                if word.find_iter(&next).next().is_some() {
                    continue;
                }
                cut(start);
            }
            let number = &inside[start..end];
            let num_digits = number.chars().count();
            let groups = number.char_indices().zip((1..=num_digits).rev()).filter(|(_, left)| left % 3 == 0);
            groups.for_each(|((digit, _), _)| cut(start + digit));
            if self.unless_before.is_some() {
                cut(end);
            }
        }
        cut(inside.len());
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::Split;
    use tokenizers::{OffsetReferential, OffsetType};

    use super::*;

    fn rule(pattern: &str) -> PreTokenizerWrapper {
        let split =
            Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false);
        PreTokenizerWrapper::Split(split.expect("compiles"))
    }

    fn pieces(text: &str, split: impl FnOnce(&mut PreTokenizedString) -> Result<()>) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        split(&mut pieces).expect("splits");
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    fn grouped(pattern: &str, text: &str) -> Vec<String> {
        let stages = SplitStage::all_of(rule(pattern)).expect("stages");
        assert!(matches!(stages[..], [SplitStage::Groups(_)]), "{pattern}");
        pieces(text, |pieces| stages[0].apply(pieces))
    }

    proptest! {
        #[test]
        fn groups_are_those_of_the_published_expressions(text in "[12٣½Ⅷa_ é.\u{301}\n]{0,24}|[1٣]{0,12}[a½_ ]?[12]{0,12}") {
            for pattern in [THOUSANDS, TINY_AYA_NUMBERS] {
                let published = pieces(&text, |pieces| rule(pattern).pre_tokenize(pieces));
                prop_assert_eq!(grouped(pattern, &text), published, "{}", pattern);
            }
        }
    }

    /// By the published expressions this takes minutes.
    #[test]
    fn a_number_is_read_once_however_long_it_is() {
        for (pattern, letter_joins) in [(THOUSANDS, false), (TINY_AYA_NUMBERS, true)] {
            let number = "1".repeat(300_000);
            assert_eq!(grouped(pattern, &number).len(), 100_000);
            let num_pieces = grouped(pattern, &format!("{number}a")).len();
            assert_eq!(num_pieces == 1, letter_joins, "{pattern}: {num_pieces}");
        }
    }
}
