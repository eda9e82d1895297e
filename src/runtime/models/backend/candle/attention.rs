//! Causal attention over pages, as batched products.
//!
//! Query heads that share a KV head are rows of one product with its keys, so keys and values are never
//! repeated. Scores and sums are f32, whatever the KV type.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

use super::cuda::{Kernel, PagedAttention, is_used};
use super::kv::CandleKv;
use super::step::{GROUP_VALUES, ReadShape, RowGroup, Slots};
use super::{AttentionSpec, Reach, RowSpan, TextHeads};

/// The most rows of texts in one product: the keys that none of them sees are not read.
const TEXT_ROWS: usize = 512;

/// Computes the attention of all rows of `q`, `[rows, num_heads * head_dim]`.
pub fn attend(
    kv: &CandleKv,
    spec: &AttentionSpec<'_, Tensor>,
    q: &Tensor,
    spans: &[RowSpan],
) -> Result<Tensor> {
    if let Some(mixed) = attend_in_place(kv, spec, q, spans)? {
        return Ok(mixed);
    }
    let stored = kv.shape(spec.store);
    let (num_kv_heads, head_dim) = (stored.num_kv_heads, stored.head_dim);
    let AttentionSpec { num_heads, window, is_two_way, .. } = *spec;
    let shape = ReadShape { num_heads, num_kv_heads, head_dim, window, is_two_way };
    let groups = kv.step(spec.store, spans).reads(kv.device(), shape)?;
    let stores = kv.stores(spec.store)?;
    let chosen = |group: &RowGroup| match spec.selected {
        None => Ok(group.mask.clone()),
        Some(selected) => group.chosen(selected, spans, kv.device()).map(Some),
    };
    let parts = groups
        .iter()
        .map(|group| attend_group(stores, spec, (shape, stored.value_dim()), q, (group, chosen(group)?)));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    match parts.as_slice() {
        [whole] => Ok(whole.clone()),
        parts => Tensor::cat(parts, 0),
    }
}

/// Computes the attention of few rows of each sequence by its kernel; `None` where there is none.
fn attend_in_place(
    kv: &CandleKv,
    spec: &AttentionSpec<'_, Tensor>,
    q: &Tensor,
    spans: &[RowSpan],
) -> Result<Option<Tensor>> {
    let has_kernel = PagedAttention::takes(kv.shape(spec.store), spans) && spec.selected.is_none();
    let (true, [keys, values]) = (has_kernel, kv.stores(spec.store)?) else { return Ok(None) };
    if !is_used(Kernel::Attention(keys.dtype(), keys.dim(2)?), q) {
        return Ok(None);
    }
    let table = kv.step(spec.store, spans).table(kv.device(), spec.window, spec.is_two_way)?;
    let AttentionSpec { num_heads, rule, sinks, .. } = *spec;
    let kernel = PagedAttention { stores: [keys, values], table: &table, num_heads, rule, sinks };
    kernel.apply(q).map(Some)
}

/// Computes attention within texts, whose rows lie one after another: `[q, k, v]` are `[rows, num_heads * head_dim]` and twice
/// `[rows, num_kv_heads * head_dim]`. Rows of several texts share a product, and see their own by a mask.
pub fn attend_texts(heads: &TextHeads, [q, k, v]: [&Tensor; 3], texts: &[Range<usize>]) -> Result<Tensor> {
    let TextHeads { num_heads, num_kv_heads, head_dim, rule, reach } = *heads;
    let shape = ReadShape { num_heads, num_kv_heads, head_dim, window: None, is_two_way: false };
    let (store, window, sinks, selected) = (0, None, None, None);
    let spec = AttentionSpec { store, num_heads, rule, window, is_two_way: false, sinks, selected };
    let by_head = |x: &Tensor| x.reshape(((), num_kv_heads, head_dim))?.transpose(0, 1)?.contiguous();
    let stores = [by_head(k)?, by_head(v)?];
    let seen: Vec<Range<usize>> = texts.iter().flat_map(|text| seen_in(text, reach)).collect();
    let most = (GROUP_VALUES / (num_heads * seen.len()).max(1)).clamp(1, TEXT_ROWS);
    let block = |(index, seen): (usize, &[Range<usize>])| {
        let rows = index * most..index * most + seen.len();
        let all = seen[0].start..seen[seen.len() - 1].end;
        let mask = text_mask(seen, &all, q)?;
        let group = RowGroup { rows, batch: 1, seen: all.len(), slots: Slots::From(all.start), mask: None };
        attend_group(&stores, &spec, (shape, head_dim), q, (&group, mask))
    };
    Tensor::cat(&seen.chunks(most).enumerate().map(block).collect::<Result<Vec<_>>>()?, 0)
}

/// Iterates over the rows that each row of a text sees.
fn seen_in(
    text: &Range<usize>,
    Reach { before, after }: Reach,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *text;
    text.clone()
        .map(move |row| row.saturating_sub(before).max(start)..(row + 1).saturating_add(after).min(end))
}

/// Returns 0 where a row sees one of the rows `all`, else minus infinity, `[1, 1, 1, rows, all]`; `None` if each sees all. Made on
/// the device, from two numbers a row.
fn text_mask(seen: &[Range<usize>], all: &Range<usize>, q: &Tensor) -> Result<Option<Tensor>> {
    if seen.iter().all(|seen| seen == all) {
        return Ok(None);
    }
    let column = |ends: Vec<u32>| Tensor::from_vec(ends, (seen.len(), 1), q.device());
    let starts = column(seen.iter().map(|seen| seen.start as u32).collect())?;
    let ends = column(seen.iter().map(|seen| seen.end as u32).collect())?;
    let keys = Tensor::arange(all.start as u32, all.end as u32, q.device())?.unsqueeze(0)?;
    let is_seen = (keys.broadcast_ge(&starts)? * keys.broadcast_lt(&ends)?)?;
    is_seen.to_dtype(DType::F32)?.log()?.reshape((1, 1, 1, seen.len(), all.len())).map(Some)
}

fn attend_group(
    stores: &[Tensor],
    spec: &AttentionSpec<'_, Tensor>,
    (shape, value_dim): (ReadShape, usize),
    q: &Tensor,
    (group, mask): (&RowGroup, Option<Tensor>),
) -> Result<Tensor> {
    let ReadShape { num_heads, num_kv_heads, head_dim, .. } = shape;
    let (batch, shared) = (group.batch, num_heads / num_kv_heads);
    let rows = group.rows.len() / batch;
    let products = num_kv_heads * batch;
    let by_head = [num_kv_heads, batch, shared, rows];

    let q = q.narrow(0, group.rows.start, group.rows.len())?;
    let q = q.reshape((batch, rows, num_kv_heads, shared, head_dim))?.permute((2, 0, 3, 1, 4))?;
    let q = q.contiguous()?.reshape((products, shared * rows, head_dim))?;
    let keys = gather(&stores[0], group, products)?;
    let scores = (q.matmul(&keys.t()?)? * f64::from(spec.rule.scale))?;
    let scores = match spec.rule.softcap.map(f64::from) {
        None => scores,
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
    };
    let scores = match &mask {
        None => scores,
        Some(mask) => {
            let scores = scores.reshape([&by_head[..], &[group.seen]].concat())?;
            scores.broadcast_add(mask)?.reshape((products, shared * rows, group.seen))?
        }
    };
    let weights = match spec.sinks {
        None => softmax_last_dim(&scores)?,
        Some(sinks) => {
            let sinks = sinks.reshape((num_kv_heads, 1, shared, 1, 1))?;
            let sinks = sinks.broadcast_as([&by_head[..], &[1]].concat())?;
            let sinks = sinks.contiguous()?.reshape((products, shared * rows, 1))?;
            softmax_last_dim(&Tensor::cat(&[&scores, &sinks], 2)?)?.narrow(2, 0, group.seen)?.contiguous()?
        }
    };
    // Values within keys are the first columns of the mixed keys: less to compute than a copy would cost.
    let mixed = match stores.get(1) {
        None => weights.matmul(&keys)?,
        Some(values) => weights.matmul(&gather(values, group, products)?)?,
    };
    let mixed = mixed.reshape([&by_head[..], &[mixed.dim(2)?]].concat())?.narrow(4, 0, value_dim)?;
    mixed.permute((1, 3, 0, 2, 4))?.contiguous()?.reshape((batch * rows, num_heads * value_dim))
}

/// Gathers the slots of a store that a group sees, `[kv_heads * batch, seen, head_dim]` in f32.
pub fn gather(store: &Tensor, group: &RowGroup, products: usize) -> Result<Tensor> {
    let seen = match &group.slots {
        Slots::From(slot) => store.narrow(1, *slot, group.seen)?,
        Slots::Listed(slots) => {
            store.index_select(slots, 1)?.reshape((products, group.seen, store.dim(2)?))?
        }
    };
    seen.to_dtype(DType::F32)
}
