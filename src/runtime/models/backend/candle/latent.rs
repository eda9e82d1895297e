//! Latent attention: products by head, and the choice of an indexer, which is made on the host from scores of the device.

use candle_core::{Result, Tensor};

use super::attention::gather;
use super::kv::CandleKv;
use super::step::ReadShape;
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
        for (row, position) in group.positions(spans) {
            if position >= top_k {
                let chosen = &mut out.positions[row * top_k..][..top_k];
                choose_highest(&scores[row - first][..=position], &mut order, chosen);
            }
        }
    }
    Ok(())
}
