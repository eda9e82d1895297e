//! Prompts of about a number of tokens for a server with an unknown tokenizer: random words, calibrated with
//! two requests.
//!
//! Pure. Prompts never repeat, unless a trace repeats a block.

use crate::stats::SplitMix64;

/// Common words, one token each in most vocabularies.
const WORDS: &str = "\
    time year people way day man thing woman life child world school state family student group country \
    problem hand part place case week company system program question work government number night point \
    home water room mother area money story fact month lot right study book eye job word business issue \
    side kind head house service friend father power hour game line end member law";

/// A server's ratio of tokens to words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ruler {
    pub tokens_per_word: f64,
    /// Tokens that the chat template adds to a prompt.
    pub overhead: f64,
}

impl Default for Ruler {
    /// For servers without counts: English prose has about four tokens to three words, these words a little
    /// fewer.
    fn default() -> Self {
        Self { tokens_per_word: 1.1, overhead: 0.0 }
    }
}

impl Ruler {
    /// Fits two prompts: words, and tokens counted by the server. `None` if the counts are implausible.
    pub fn of(short: (usize, usize), long: (usize, usize)) -> Option<Self> {
        let words = long.0.checked_sub(short.0).filter(|&words| words > 0)?;
        let tokens = long.1.checked_sub(short.1)?;
        let tokens_per_word = tokens as f64 / words as f64;
        let overhead = (short.1 as f64 - tokens_per_word * short.0 as f64).max(0.0);
        (0.5..20.0).contains(&tokens_per_word).then_some(Self { tokens_per_word, overhead })
    }

    /// Returns the words for a prompt of `tokens`; at least one.
    pub fn words(&self, tokens: usize) -> usize {
        (((tokens as f64 - self.overhead) / self.tokens_per_word).round() as usize).max(1)
    }
}

/// Returns random words.
pub fn words(count: usize, random: &mut SplitMix64) -> String {
    let known: Vec<&str> = WORDS.split(' ').collect();
    let drawn: Vec<&str> = (0..count).map(|_| known[random.below(known.len())]).collect();
    drawn.join(" ")
}

/// Returns the text of a trace's blocks: equal names give equal words, cut to `tokens` in total.
pub fn blocks(names: &[u64], block_tokens: usize, tokens: usize, ruler: &Ruler, seed: u64) -> String {
    let total = ruler.words(tokens);
    let per_block = ((block_tokens as f64 / ruler.tokens_per_word).round() as usize).max(1);
    let mut left = total;
    let mut parts = Vec::new();
    for name in names {
        let count = per_block.min(left);
        if count == 0 {
            break;
        }
        parts.push(words(count, &mut SplitMix64::new(seed ^ name.wrapping_mul(0x9e37_79b9_7f4a_7c15))));
        left -= count;
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ruler_measures_words_in_tokens() {
        let ruler = Ruler::of((32, 58), (160, 250)).expect("a ruler");
        assert_eq!(ruler, Ruler { tokens_per_word: 1.5, overhead: 10.0 });
        assert_eq!((ruler.words(160), ruler.words(0)), (100, 1));
        assert_eq!(Ruler::of((32, 58), (32, 60)), None);
        assert_eq!(Ruler::of((32, 58), (160, 58)), None, "a server that counts nothing");
    }

    #[test]
    fn prompts_differ_and_blocks_repeat() {
        let mut random = SplitMix64::new(1);
        let (one, two) = (words(50, &mut random), words(50, &mut random));
        assert_ne!(one, two);
        assert_eq!(one.split(' ').count(), 50);
        let ruler = Ruler { tokens_per_word: 1.0, overhead: 0.0 };
        let (a, b) = (blocks(&[7, 8], 10, 15, &ruler, 1), blocks(&[7, 9], 10, 20, &ruler, 1));
        let first = |text: &str| text.split(' ').take(10).collect::<Vec<_>>().join(" ");
        assert_eq!(first(&a), first(&b));
        assert_ne!(a, b);
        assert_eq!((a.split(' ').count(), b.split(' ').count()), (15, 20));
    }
}
