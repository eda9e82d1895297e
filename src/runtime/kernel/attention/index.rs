//! Scores of an indexer, and the choice of the positions that have the highest. Source: transformers `DeepseekV32Indexer`.
//!
//! Invariant, the definition of every score and choice, independent of other rows, the number of threads and the registers:
//!
//! ```text
//! score[j] = sum over heads, ascending, of weight[head] * max(q[head] . key[j], 0)    the product as in attention's scores
//! chosen = the positions with the highest scores; of equal scores the earlier position first
//! ```
//!
//! Factors that all scores share are left out: they change no choice.

use super::lanes::VectorLanes;
use super::stored::{F16, F32, KvType, PAGE_TOKENS, Q8, Stored};
use super::tile::{KvBlock, score_page};
use super::{MOST_SCORED, tile, with_tile};
use crate::wide::dispatch_wide;

/// The heads of one row of an indexer.
#[derive(Debug, Clone, Copy)]
pub struct IndexQuery<'a> {
    /// `[heads][head_dim]`.
    pub q: &'a [f32],
    /// `[heads]`.
    pub weights: &'a [f32],
    pub kv_type: KvType,
}

impl IndexQuery<'_> {
    fn head_dim(&self) -> usize {
        self.q.len() / self.weights.len()
    }
}

dispatch_wide! {
    /// Computes the scores of a page's positions, [`PAGE_TOKENS`], from their keys, one block in the layout of keys.
    ///
    /// # Panics
    /// If the keys are no such block, or there is not a score for each position.
    pub fn index_page(query: &IndexQuery<'_>, keys: &[u8], scores: &mut [f32]) = index_any
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn index_any<V: VectorLanes>(query: &IndexQuery<'_>, keys: &[u8], scores: &mut [f32]) {
    // SAFETY: by this function's contract.
    unsafe {
        match query.kv_type {
            KvType::F32 => index_body::<V, F32>(query, keys, scores),
            KvType::F16 => index_body::<V, F16>(query, keys, scores),
            KvType::Q8_0 => index_body::<V, Q8>(query, keys, scores),
        }
    }
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn index_body<V: VectorLanes, S: Stored>(query: &IndexQuery<'_>, keys: &[u8], scores: &mut [f32]) {
    let head_dim = query.head_dim();
    let keys = KvBlock::new::<S>(keys, head_dim);
    assert_eq!(scores.len(), PAGE_TOKENS, "a score for each position");
    let mut products = [0.0; MOST_SCORED * PAGE_TOKENS];
    scores.fill(0.0);
    let mut head = 0;
    while head < query.weights.len() {
        let size = tile::<V>(query.weights.len() - head, MOST_SCORED);
        let q = query.q[head * head_dim..][..size * head_dim].as_ptr();
        let to = (products.as_mut_ptr(), PAGE_TOKENS);
        // SAFETY: by this function's contract; `q` has `size` rows, and `products` as many as the largest tile.
        unsafe { with_tile!(size, score_page::<V, S>(head_dim, q, (keys, None), to)) };
        for (products, weight) in products.chunks_exact(PAGE_TOKENS).zip(&query.weights[head..head + size]) {
            for (score, product) in scores.iter_mut().zip(products) {
                *score = weight.mul_add(product.max(0.0), *score);
            }
        }
        head += size;
    }
}

/// Writes the positions of the `chosen.len()` highest scores in ascending order; of equal scores the earlier position is taken, and
/// NaN is below all. `keys` is memory that is kept between calls.
///
/// # Panics
/// If there are fewer scores.
pub fn choose_highest(scores: &[f32], keys: &mut Vec<u32>, chosen: &mut [u32]) {
    let Some(last) = chosen.len().checked_sub(1) else { return };
    keys.clear();
    keys.extend(scores.iter().copied().map(order_key));
    let least = *keys.select_nth_unstable_by(last, |a, b| b.cmp(a)).1;
    let above = scores.iter().filter(|score| order_key(**score) > least).count();
    let mut ties = chosen.len() - above;
    let mut places = chosen.iter_mut();
    for (position, score) in scores.iter().enumerate() {
        let key = order_key(*score);
        let is_tie = key == least && ties > 0;
        ties -= usize::from(is_tie);
        if (key > least || is_tie)
            && let Some(place) = places.next()
        {
            *place = position as u32;
        }
    }
}

/// Returns a number that orders as the score does; both zeros have the same.
fn order_key(score: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    match (score + 0.0).to_bits() {
        _ if score.is_nan() => 0,
        bits if bits & SIGN == 0 => bits | SIGN,
        bits => !bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{KvPart, read_row, write_row};
    use crate::isa::{Isa, available};

    fn number(n: usize) -> f32 {
        ((n * 2654435761 % 1009) as f32 - 504.0) / 300.0
    }

    #[test]
    fn scores_are_those_of_double_precision_with_every_instruction_set() {
        for (kv_type, head_dim, heads) in KvType::ALL.into_iter().flat_map(|kv_type| {
            [(128, 64), (16, 4), (40, 5), (33, 1), (8, 9)].map(|(head_dim, heads)| (kv_type, head_dim, heads))
        }) {
            let mut memory = vec![0u64; (PAGE_TOKENS * kv_type.row_bytes(head_dim)).div_ceil(8)];
            let block =
                &mut bytemuck::cast_slice_mut(&mut memory)[..PAGE_TOKENS * kv_type.row_bytes(head_dim)];
            for token in 0..PAGE_TOKENS {
                let row: Vec<f32> = (0..head_dim).map(|dim| number(token * 211 + dim * 17)).collect();
                write_row(kv_type, KvPart::Keys, block, token, &row);
            }
            let q: Vec<f32> = (0..heads * head_dim).map(|n| number(n * 31 + 5)).collect();
            let weights: Vec<f32> = (0..heads).map(|n| number(n * 71 + 9)).collect();
            let query = IndexQuery { q: &q, weights: &weights, kv_type };
            let mut scalar = [f32::NAN; PAGE_TOKENS];
            index_page(Isa::Scalar, &query, block, &mut scalar);
            for (token, score) in scalar.iter().enumerate() {
                let mut key = vec![0.0; head_dim];
                read_row(kv_type, KvPart::Keys, block, token, &mut key);
                let product = |head: usize| -> f64 {
                    let q = &q[head * head_dim..][..head_dim];
                    q.iter().zip(&key).map(|(q, key)| f64::from(*q) * f64::from(*key)).sum()
                };
                let exact: f64 =
                    (0..heads).map(|head| f64::from(weights[head]) * product(head).max(0.0)).sum();
                assert!((exact - f64::from(*score)).abs() < 2e-3, "{head_dim} {heads}: {score}, not {exact}");
            }
            for isa in available() {
                let mut scores = [f32::NAN; PAGE_TOKENS];
                index_page(isa, &query, block, &mut scores);
                assert_eq!(scores.map(f32::to_bits), scalar.map(f32::to_bits), "{isa:?} {head_dim} {heads}");
            }
        }
    }

    #[test]
    fn the_highest_scores_are_chosen_and_of_equal_ones_the_earlier() {
        let choose = |scores: &[f32], count: usize| {
            let mut chosen = vec![u32::MAX; count];
            choose_highest(scores, &mut vec![7; 3], &mut chosen);
            chosen
        };
        assert_eq!(choose(&[1.0, 3.0, -2.0, 3.0, 0.5], 2), [1, 3]);
        assert_eq!(choose(&[0.0, -0.0, 0.0, -1.0, 2.0, 0.0], 3), [0, 1, 4]);
        assert_eq!(choose(&[-0.0, 0.0, -1.0], 1), [0]);
        assert_eq!(choose(&[f32::NAN, f32::NEG_INFINITY, -3.0], 2), [1, 2]);
        assert_eq!(choose(&[f32::NAN; 3], 2), [0, 1]);
        assert_eq!(choose(&[5.0, 4.0], 2), [0, 1]);
        assert!(choose(&[5.0, 4.0], 0).is_empty());
        // Against a sort that keeps the order of equals; scores with many ties.
        for (len, count) in [(1, 1), (40, 7), (300, 64), (1000, 999)] {
            let scores: Vec<f32> = (0..len).map(|n| (number(n) * 4.0).round()).collect();
            let mut sorted: Vec<u32> = (0..len as u32).collect();
            sorted.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            sorted.truncate(count);
            sorted.sort_unstable();
            assert_eq!(choose(&scores.iter().map(|x| x + 0.0).collect::<Vec<_>>(), count), sorted, "{len}");
        }
    }
}
