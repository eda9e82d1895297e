//! Latent attention: products by head, and the choice of an indexer, which is made on the host from scores of the device.

use candle_core::{Device, Result, Tensor};

use super::attention::gather;
use super::kv::CandleKv;
use super::step::{ReadShape, RowGroup};
use super::weight::CandleWeight;
use super::{IndexerSpec, RowSpan, SelectedKeys};
use llmctl_kernel::attention::choose_highest;

/// Computes a product of each head's part of `x`, `[rows, heads * in]`, with its matrix. Returns `[rows, heads * out]`.
pub fn product_by_head(x: &Tensor, weights: &CandleWeight) -> Result<Tensor> {
    let ((rows, _), heads) = (x.dims2()?, weights.num_heads()?);
    let x = x.reshape((rows, heads, ()))?.transpose(0, 1)?.contiguous()?;
    weights.product(&x)?.transpose(0, 1)?.contiguous()?.flatten_from(1)
}

/// Joins the parts of each head, the first before the second.
pub fn join_heads(parts: [&Tensor; 2], num_heads: usize) -> Result<Tensor> {
    let [first, second] = parts.map(|part| part.reshape((part.dim(0)?, num_heads, ())));
    Tensor::cat(&[first?, second?], 2)?.flatten_from(1)
}

/// Fills `out` for all rows of a step by an indexer's scores: `[q, weights]` are `[rows, heads * head_dim]` and `[rows,
/// heads]`.
pub fn select_keys(
    kv: &CandleKv,
    IndexerSpec { store, top_k }: IndexerSpec,
    [q, weights]: [&Tensor; 2],
    spans: &[RowSpan],
    out: &mut SelectedKeys,
) -> Result<()> {
    let (heads, head_dim) = (weights.dim(1)?, kv.shape(store).head_dim);
    let shape = ReadShape { num_heads: heads, num_kv_heads: 1, head_dim, window: None, is_two_way: false };
    out.top_k = top_k;
    out.positions.resize(q.dim(0)? * top_k, 0);
    let groups = kv.step(store, spans).reads(kv.device(), shape)?;
    let mut order = Vec::new();
    for group in groups.iter() {
        let (first, batch, rows) = (group.rows.start, group.batch, group.rows.len() / group.batch);
        let q = q.narrow(0, first, batch * rows)?.reshape((batch, rows * heads, head_dim))?;
        let keys = gather(&kv.stores(store)?[0], group, batch)?;
        let products = q.matmul(&keys.t()?)?.relu()?.reshape((batch * rows, heads, group.seen))?;
        let weights = weights.narrow(0, first, batch * rows)?.unsqueeze(2)?;
        let scores = products.broadcast_mul(&weights)?.sum(1)?.to_vec2::<f32>()?;
        for (row, position) in positions(group, spans) {
            if position >= top_k {
                let chosen = &mut out.positions[row * top_k..][..top_k];
                choose_highest(&scores[row - first][..=position], &mut order, chosen);
            }
        }
    }
    Ok(())
}

/// Returns a group's mask, `[1, batch, 1, rows, seen]`: 0 for the positions that a row has chosen, minus infinity for the
/// others.
pub fn mask(selected: &SelectedKeys, group: &RowGroup, spans: &[RowSpan], device: &Device) -> Result<Tensor> {
    let mut mask = vec![f32::NEG_INFINITY; group.rows.len() * group.seen];
    for ((row, position), mask) in positions(group, spans).zip(mask.chunks_exact_mut(group.seen)) {
        match selected.of_row(row, position) {
            None => mask[..=position].fill(0.0),
            Some(chosen) => chosen.iter().for_each(|chosen| mask[*chosen as usize] = 0.0),
        }
    }
    Tensor::from_vec(mask, (1, group.batch, 1, group.rows.len() / group.batch, group.seen), device)
}

/// Iterates over a group's rows with their positions. A group without a window sees all positions from 0 on.
fn positions<'a>(group: &RowGroup, spans: &'a [RowSpan]) -> impl Iterator<Item = (usize, usize)> + use<'a> {
    let rows = group.rows.clone();
    let of_span = |span: &'a RowSpan| span.rows.clone().map(|row| (row, span.start + row - span.rows.start));
    spans.iter().flat_map(of_span).filter(move |(row, _)| rows.contains(row))
}
