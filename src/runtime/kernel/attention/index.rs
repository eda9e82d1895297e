//! Scores of an indexer, and the choice of the positions that have the highest. Sources: transformers `DeepseekV32Indexer`,
//! `MiniMaxM3VLIndexer` and `Qwen4ExpTextQSAIndexer`.
//!
//! Invariant, the definition of every score and choice, independent of other rows, the number of threads and the registers:
//!
//! ```text
//! score[j] = sum over heads, ascending, of weight[head] * max(q[head] . key[j], 0)    the product as in attention's scores
//! score[j] = q . key[j]                                                               of one head without weights
//! chosen = the positions with the highest scores; of equal scores the earlier position first
//! chosen blocks = the last ones, and those with the highest scores; a block's is its highest, of equal ones the earlier first
//! chosen whole blocks = those with the highest scores, and the unfinished one; a block's is that of its last position
//! ```
//!
//! Factors that all scores share are left out: they change no choice.

use super::lanes::VectorLanes;
use std::borrow::Cow;

use super::packed::{self, Unpacked};
use super::page::{KvPart, PAGE_TOKENS};
use super::stored::{F16, F32, KvType, Q8, Stored};
use super::tile::{KvBlock, score_page};
use super::{MOST_SCORED, tile, with_tile};
use crate::wide::dispatch_wide;

/// The heads of one row of an indexer, or one head that has no weight.
#[derive(Debug, Clone)]
pub struct IndexQuery<'a> {
    /// `[heads][head_dim]`, rotated as the keys are.
    q: Cow<'a, [f32]>,
    weights: Option<&'a [f32]>,
    kv_type: KvType,
}

impl<'a> IndexQuery<'a> {
    /// Takes `q`, `[heads][head_dim]`, and `weights`, `[heads]`; `None` for one head whose products are the scores.
    pub fn new(q: &'a [f32], weights: Option<&'a [f32]>, kv_type: KvType) -> Self {
        let mut query = IndexQuery { q: q.into(), weights, kv_type };
        if kv_type.packed().is_some() {
            let head_dim = query.head_dim();
            packed::rotate(query.q.to_mut(), packed::part_len(head_dim));
        }
        query
    }

    fn head_dim(&self) -> usize {
        self.q.len() / self.num_heads()
    }

    fn num_heads(&self) -> usize {
        self.weights.map_or(1, <[f32]>::len)
    }
}

dispatch_wide! {
    /// Computes the scores of a page's positions, [`PAGE_TOKENS`], from their keys, one block in the layout of keys.
    ///
    /// # Panics
    /// If the keys are no such block, or there is not a score for each position.
    pub fn index_page(query: &IndexQuery<'_>, keys: &[u8], unpacked: &mut Unpacked, scores: &mut [f32]) = index_any
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn index_any<V: VectorLanes>(
    query: &IndexQuery<'_>,
    keys: &[u8],
    unpacked: &mut Unpacked,
    scores: &mut [f32],
) {
    let head_dim = query.head_dim();
    // SAFETY: by this function's contract.
    unsafe {
        match (query.kv_type.packed(), query.kv_type) {
            (Some(form), _) => {
                let keys = KvBlock::unpacked(form, KvPart::Keys, keys, head_dim, unpacked);
                index_body::<V, Q8>(query, keys, scores);
            }
            (None, KvType::F32) => index_body::<V, F32>(query, KvBlock::new::<F32>(keys, head_dim), scores),
            (None, KvType::F16) => index_body::<V, F16>(query, KvBlock::new::<F16>(keys, head_dim), scores),
            (None, _) => index_body::<V, Q8>(query, KvBlock::new::<Q8>(keys, head_dim), scores),
        }
    }
}

/// # Safety
/// The processor has `V`'s instruction set; `keys` are of the query's width.
#[inline(always)]
unsafe fn index_body<V: VectorLanes, S: Stored>(
    query: &IndexQuery<'_>,
    keys: KvBlock<S::Element>,
    scores: &mut [f32],
) {
    let (num_heads, head_dim) = (query.num_heads(), query.head_dim());
    assert_eq!(scores.len(), PAGE_TOKENS, "a score for each position");
    let mut products = [0.0; MOST_SCORED * PAGE_TOKENS];
    scores.fill(0.0);
    let mut head = 0;
    while head < num_heads {
        let size = tile::<V>(num_heads - head, MOST_SCORED);
        let q = query.q[head * head_dim..][..size * head_dim].as_ptr();
        let to = (products.as_mut_ptr(), PAGE_TOKENS);
        // SAFETY: by this function's contract; `q` has `size` rows, and `products` as many as the largest tile.
        unsafe { with_tile!(size, score_page::<V, S>(head_dim, q, (keys, None), to)) };
        let Some(weights) = query.weights else { return scores.copy_from_slice(&products[..PAGE_TOKENS]) };
        for (products, weight) in products.chunks_exact(PAGE_TOKENS).zip(&weights[head..head + size]) {
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
fn choose_highest(scores: &[f32], keys: &mut Vec<u32>, chosen: &mut [u32]) {
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

/// Blocks of consecutive positions that rows see as a whole, up to their own position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyBlocks {
    /// Positions of a block; 1 where each is chosen by itself.
    pub size: usize,
    /// Number of last blocks, that of the row the last, which are chosen whatever their scores. If it is 0 and `size` is not 1, the
    /// key at a block's last position stands for the whole block: complete blocks are chosen, and an unfinished one is seen besides.
    pub num_local: usize,
}

impl KeyBlocks {
    pub const SINGLE: Self = Self { size: 1, num_local: 0 };

    /// Returns whether a block has one key, at its last position.
    pub fn are_whole(self) -> bool {
        self.size > 1 && self.num_local == 0
    }

    /// Returns the first position whose row does not see all positions up to its own, of choices of `top_k`. Of whole blocks, `top_k`
    /// counts the unfinished one.
    pub fn first_choosing(self, top_k: usize) -> usize {
        top_k - usize::from(self.are_whole())
    }

    /// Returns the number of positions that a row sees of the blocks that it chooses, which have `top_k`.
    pub fn num_seen(self, top_k: usize, position: usize) -> usize {
        let whole = top_k - self.size;
        if self.are_whole() { whole + (position + 1) % self.size } else { whole + position % self.size + 1 }
    }

    /// Writes the positions of the chosen blocks in ascending order, those behind the row's own too. `scores` are those of the
    /// positions up to the row's own; `[blocks, keys]` is memory that is kept between calls.
    ///
    /// # Panics
    /// If there are fewer blocks than `chosen` holds.
    pub fn choose(self, scores: &[f32], [blocks, keys]: [&mut Vec<u32>; 2], chosen: &mut [u32]) {
        if self == Self::SINGLE {
            return choose_highest(scores, keys, chosen);
        }
        blocks.clear();
        let num_chosen = chosen.len() / self.size;
        if self.are_whole() {
            blocks.extend(scores.chunks_exact(self.size).map(|block| block[self.size - 1].to_bits()));
            choose_highest(bytemuck::cast_slice(blocks), keys, &mut chosen[..num_chosen - 1]);
            chosen[num_chosen - 1] = blocks.len() as u32;
        } else {
            let highest = |block: &[f32]| block.iter().copied().fold(f32::NEG_INFINITY, f32::max).to_bits();
            blocks.extend(scores.chunks(self.size).map(highest));
            let first_local = blocks.len().saturating_sub(self.num_local);
            blocks[first_local..].fill(f32::INFINITY.to_bits());
            choose_highest(bytemuck::cast_slice(blocks), keys, &mut chosen[..num_chosen]);
        }
        // From the last on: the positions of a block lie behind the numbers of those before it.
        for index in (0..num_chosen).rev() {
            let first = chosen[index] * self.size as u32;
            let places = &mut chosen[index * self.size..][..self.size];
            places.iter_mut().zip(first..).for_each(|(place, position)| *place = position);
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
                write_row(Isa::Scalar, kv_type, KvPart::Keys, block, token, &row);
            }
            let q: Vec<f32> = (0..heads * head_dim).map(|n| number(n * 31 + 5)).collect();
            let weights: Vec<f32> = (0..heads).map(|n| number(n * 71 + 9)).collect();
            let query = IndexQuery::new(&q, Some(&weights), kv_type);
            let mut unpacked = Unpacked::new();
            let mut scalar = [f32::NAN; PAGE_TOKENS];
            index_page(Isa::Scalar, &query, block, &mut unpacked, &mut scalar);
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
            let head = IndexQuery::new(&q[..head_dim], None, kv_type);
            let one = IndexQuery { weights: Some(&[1.0]), ..head.clone() };
            let mut of_head = [[f32::NAN; PAGE_TOKENS]; 2];
            index_page(Isa::Scalar, &head, block, &mut unpacked, &mut of_head[0]);
            index_page(Isa::Scalar, &one, block, &mut unpacked, &mut of_head[1]);
            assert_eq!(of_head[0].map(|score| score.max(0.0)), of_head[1], "{head_dim}");
            assert!(of_head[0].iter().any(|score| *score < 0.0));
            for (isa, (query, expected)) in available()
                .into_iter()
                .flat_map(|isa| [(isa, (&query, &scalar)), (isa, (&head, &of_head[0]))])
            {
                let mut scores = [f32::NAN; PAGE_TOKENS];
                index_page(isa, query, block, &mut unpacked, &mut scores);
                assert_eq!(
                    scores.map(f32::to_bits),
                    expected.map(f32::to_bits),
                    "{isa:?} {head_dim} {heads}"
                );
            }
        }
    }

    #[test]
    fn blocks_are_chosen_by_their_highest_scores_and_the_last_ones_always() {
        let choose = |scores: &[f32], num_local: usize, count: usize| {
            let mut chosen = vec![u32::MAX; 2 * count];
            let blocks = KeyBlocks { size: 2, num_local };
            blocks.choose(scores, [&mut vec![9], &mut vec![7; 3]], &mut chosen);
            (chosen, blocks.num_seen(2 * count, scores.len() - 1))
        };
        let scores = [-5.0, 1.0, 3.0, -9.0, 2.0, 3.0, 0.5, -1.0, -7.0];
        assert_eq!(choose(&scores, 1, 2), (vec![2, 3, 8, 9], 3));
        assert_eq!(choose(&scores, 1, 3), (vec![2, 3, 4, 5, 8, 9], 5));
        assert_eq!(choose(&scores, 2, 3), (vec![2, 3, 6, 7, 8, 9], 5));
        assert_eq!(choose(&scores[..8], 1, 2), (vec![2, 3, 6, 7], 4));
        assert_eq!(choose(&[f32::NAN, f32::NAN, f32::NEG_INFINITY, -8.0, 0.0], 1, 2), (vec![2, 3, 4, 5], 3));
    }

    #[test]
    fn whole_blocks_are_chosen_by_their_last_scores_and_the_unfinished_one_is_seen() {
        let blocks = KeyBlocks { size: 3, num_local: 0 };
        // Room for two blocks and the unfinished one: rows from position 8 on choose.
        assert_eq!((blocks.first_choosing(9), KeyBlocks::SINGLE.first_choosing(9)), (8, 9));
        let scores = [9.0, 9.0, 0.5, 0.0, 0.0, 2.0, 9.0, 9.0, 0.5, 7.0, 8.0];
        for (end, expected) in [
            (9, vec![0, 1, 2, 3, 4, 5]),
            (10, vec![0, 1, 2, 3, 4, 5, 9]),
            (11, vec![0, 1, 2, 3, 4, 5, 9, 10]),
        ] {
            let mut chosen = vec![u32::MAX; 9];
            blocks.choose(&scores[..end], [&mut vec![9], &mut vec![7; 3]], &mut chosen);
            assert_eq!(chosen[..blocks.num_seen(9, end - 1)], expected, "of equal scores the earlier");
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
