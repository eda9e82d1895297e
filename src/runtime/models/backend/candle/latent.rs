//! Latent attention: products by head, and the choice of an indexer, which is made on the host from scores of the device.

use candle_core::{Result, Tensor};

use super::attention::gather;
use super::kv::CandleKv;
use super::step::ReadShape;
use super::weight::CandleWeight;
use super::{IndexerSpec, RowSpan, SelectedKeys};

/// Computes a product of each head's part of `x`, `[rows, heads * in]`, with its matrix. Returns `[rows, heads * out]`.
pub fn product_by_head(x: &Tensor, weights: &CandleWeight) -> Result<Tensor> {
    let ((rows, _), heads) = (x.dims2()?, weights.num_heads()?);
    let x = x.reshape((rows, heads, ()))?.transpose(0, 1)?.contiguous()?;
    weights.product(&x)?.transpose(0, 1)?.contiguous()?.flatten_from(1)
}

/// Joins the parts of each head, in their order.
pub fn join_heads(parts: &[&Tensor], num_heads: usize) -> Result<Tensor> {
    let parts = parts.iter().map(|part| part.reshape((part.dim(0)?, num_heads, ())));
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 2)?.flatten_from(1)
}

/// Fills `out` for all rows of a step by an indexer's scores: `[q, weights]` are `[rows, heads * head_dim]` and `[rows,
/// heads]`; where each head chooses, `weights` are not read.
pub fn select_keys(
    kv: &CandleKv,
    IndexerSpec { store, top_k, blocks, is_per_head }: IndexerSpec,
    [q, weights]: [&Tensor; 2],
    spans: &[RowSpan],
    out: &mut SelectedKeys,
) -> Result<()> {
    let (all, head_dim) = (q.dim(0)?, kv.shape(store).head_dim);
    let heads = q.dim(1)? / head_dim;
    let num_choices = if is_per_head { heads } else { 1 };
    let shape = ReadShape { num_heads: heads, num_kv_heads: 1, head_dim, window: None, is_two_way: false };
    (out.top_k, out.blocks, out.num_choices) = (top_k, blocks, num_choices);
    out.positions.resize(all * num_choices * top_k, 0);
    let groups = kv.step(store, spans).reads(kv.device(), shape)?;
    let mut memory = [Vec::new(), Vec::new()];
    for group in groups.iter() {
        let (first, batch, rows) = (group.rows.start, group.batch, group.rows.len() / group.batch);
        let q = q.narrow(0, first, batch * rows)?.reshape((batch, rows * heads, head_dim))?;
        let keys = gather(&kv.stores(store)?[0], group, batch)?;
        let products = q.matmul(&keys.t()?)?.reshape((batch * rows, heads, group.seen))?;
        let scores = if is_per_head {
            products.flatten_to(1)?
        } else {
            let weights = weights.narrow(0, first, batch * rows)?.unsqueeze(2)?;
            products.relu()?.broadcast_mul(&weights)?.sum(1)?
        };
        let scores = scores.to_vec2::<f32>()?;
        let choosing =
            group.positions(spans).filter(|(_, position)| *position >= blocks.first_choosing(top_k));
        for ((row, position), choice) in
            choosing.flat_map(|row| (0..num_choices).map(move |choice| (row, choice)))
        {
            let scores = &scores[(row - first) * num_choices + choice][..=position];
            let chosen = &mut out.positions[(row * num_choices + choice) * top_k..][..top_k];
            blocks.choose(scores, memory.each_mut(), chosen);
        }
    }
    Ok(())
}
