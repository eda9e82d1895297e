//! Causal attention over pages, as batched products.
//!
//! Query heads that share a KV head are rows of one product with its keys, so keys and values are never
//! repeated. Scores and sums are f32, whatever the KV type.

use candle_core::{DType, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

use super::cuda::{Kernel, PagedAttention, is_used};
use super::kv::CandleKv;
use super::step::{ReadShape, RowGroup, Slots};
use super::{AttentionSpec, RowSpan};

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
