//! Divergence of the predictions of one model from those of another with the same vocabulary, over a text.
//!
//! The models are asked one after the other, so that only one needs memory: the first leaves its logits.

use super::super::kv::{KvGroup, PagePool, PageTable};
use super::super::model::{Batch, Model, Row, STEP_TOKENS};
use llmctl_base::error::{Error, Result};

/// Tokens of a window; each begins without a past.
const WINDOW_TOKENS: usize = 256;

/// Most tokens that are compared, and most logits that are kept, a quarter of a GiB.
const MAX_TOKENS: usize = 1024;
const MAX_VALUES: usize = 1 << 26;

/// Logits of every token of a text, `[tokens, vocab_size]`.
pub struct Predictions {
    values: Vec<f32>,
    vocab_size: usize,
}

/// Distance between two models' predictions of the next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    pub num_tokens: usize,
    /// Mean Kullback-Leibler divergence in nats, from the first model's distribution to the second's.
    pub mean_kl: f64,
    pub largest_kl: f64,
    /// Fraction of tokens after which both find the same token the most likely.
    pub same_top: f64,
}

impl Predictions {
    /// Feeds a text to a model, in windows.
    ///
    /// # Errors
    /// [`Error::PromptEmpty`] without tokens, [`Error::InvalidParameter`] for a token that the model has no row for,
    /// errors of the backend.
    pub fn of(model: &mut dyn Model, tokens: &[u32]) -> Result<Self> {
        let spec = model.spec().clone();
        let most = MAX_TOKENS.min(MAX_VALUES / spec.vocab_size.max(1));
        let tokens = &tokens[..tokens.len().min(most)];
        if tokens.is_empty() {
            return Err(Error::PromptEmpty);
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= spec.vocab_size) {
            let message = format!("the model has no row for token {token}");
            return Err(Error::InvalidParameter { name: "text", message });
        }
        let len = WINDOW_TOKENS.min(spec.context_length);
        // The sequence publishes no page here, so that pages stay in their window until the end.
        let pages = |group: &KvGroup| group.bytes(len, len) + group.page_bytes;
        let pool = PagePool::new(&spec.groups, spec.groups.iter().map(pages).sum());
        let mut values = Vec::with_capacity(tokens.len() * spec.vocab_size);
        for window in tokens.chunks(len) {
            let mut table = PageTable::new(&pool);
            for step in window.chunks(STEP_TOKENS) {
                feed(model, &mut table, step, &mut values)?;
            }
        }
        Ok(Self { values, vocab_size: spec.vocab_size })
    }

    /// Compares with the predictions of another model for the same text.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the vocabularies or the texts have different sizes, [`Error::NotFinite`] if a
    /// logit is not a number.
    pub fn divergence(&self, other: &Self) -> Result<Divergence> {
        if (self.vocab_size, self.values.len()) != (other.vocab_size, other.values.len()) {
            let message = format!(
                "the models have {} and {} tokens in their vocabularies",
                self.vocab_size, other.vocab_size
            );
            return Err(Error::InvalidParameter { name: "text", message });
        }
        let rows = self.values.chunks_exact(self.vocab_size).zip(other.values.chunks_exact(self.vocab_size));
        let (mut sum, mut largest, mut same, mut num_tokens) = (0.0, 0.0f64, 0usize, 0usize);
        for (first, second) in rows {
            let kl = divergence_of(first, second);
            if !kl.is_finite() {
                return Err(Error::NotFinite("a value that is not a number"));
            }
            sum += kl;
            largest = largest.max(kl);
            same += usize::from(top(first) == top(second));
            num_tokens += 1;
        }
        let count = num_tokens.max(1) as f64;
        Ok(Divergence {
            num_tokens,
            mean_kl: sum / count,
            largest_kl: largest,
            same_top: same as f64 / count,
        })
    }
}

/// Appends the logits of all tokens of a step.
fn feed(model: &mut dyn Model, table: &mut PageTable, tokens: &[u32], values: &mut Vec<f32>) -> Result<()> {
    let start = table.len();
    let copies = table.extend(tokens.len());
    for copy in copies.map_err(|_| Error::InvalidState("no pages for a window"))? {
        model.copy_page(copy.from, copy.to)?;
    }
    let row = |(index, &token)| Row::known(token, start + index, 0, true);
    let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    let logits = model.forward(&Batch::new(&rows, &[table]))?;
    values.extend_from_slice(&logits.values);
    model.reuse(logits);
    Ok(())
}

/// Computes the divergence of two distributions in nats; never negative.
fn divergence_of(first: &[f32], second: &[f32]) -> f64 {
    let (first_sum, second_sum) = (log_sum_exp(first), log_sum_exp(second));
    let terms = first.iter().zip(second).map(|(&a, &b)| {
        let (a, b) = (f64::from(a) - first_sum, f64::from(b) - second_sum);
        if a == f64::NEG_INFINITY { 0.0 } else { a.exp() * (a - b) }
    });
    let kl: f64 = terms.sum();
    if kl.is_nan() { kl } else { kl.max(0.0) }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(most)).exp()).sum();
    f64::from(most) + sum.ln()
}

/// Returns the index of the largest logit, the first of equals.
fn top(logits: &[f32]) -> usize {
    let better = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
    (0..logits.len()).fold(0, better)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_predictions_have_no_divergence_and_others_have_the_formulas() {
        let of = |values: &[f32]| Predictions { values: values.to_vec(), vocab_size: 2 };
        let (even, uneven) = (of(&[0.0, 0.0, 1.0, 2.0]), of(&[0.0, 3f32.ln(), 1.0, 2.0]));
        let none = even.divergence(&even).unwrap();
        assert_eq!((none.mean_kl, none.same_top, none.num_tokens), (0.0, 1.0, 2));
        let some = even.divergence(&uneven).unwrap();
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((some.largest_kl - expected).abs() < 1e-6, "{some:?} instead of {expected}");
        assert_eq!(some.same_top, 0.5);
        let (nan, short) = (of(&[0.0, f32::NAN, 0.0, 0.0]), of(&[0.0, 0.0]));
        assert!(matches!(even.divergence(&nan), Err(Error::NotFinite(_))));
        assert!(matches!(even.divergence(&short), Err(Error::InvalidParameter { .. })));
    }
}
