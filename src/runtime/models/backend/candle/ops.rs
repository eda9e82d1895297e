//! Operations on `[rows, width]` tensors that need neither weights nor KV. Uses candle-nn's fused kernels if
//! it has them.

use candle_core::{Result, Tensor};
use candle_nn::{ops, rotary_emb};

use super::Activation;
use super::cuda::{Kernel, NormRope, is_used};

/// Computes `x * scale`.
pub fn scaled(x: &Tensor, scale: f32) -> Result<Tensor> {
    if scale == 1.0 { Ok(x.clone()) } else { x.affine(f64::from(scale), 0.0) }
}

/// Normalises each run of `weight.len()` values of a row by its root mean square, then multiplies by `weight`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let ((rows, width), len) = (x.dims2()?, weight.dims1()?);
    if len == 0 || !width.is_multiple_of(len) {
        candle_core::bail!("norm over {len} values of rows of {width}");
    }
    let runs = x.reshape((rows * (width / len), len))?;
    ops::rms_norm(&runs, weight, eps)?.reshape((rows, width))
}

/// Normalises each run of `weight.len()` values of a row, then rotates every head.
pub fn norm_rope(
    x: &Tensor,
    (weight, eps): (&Tensor, f32),
    head_dim: usize,
    angles: &[Tensor; 2],
) -> Result<Tensor> {
    if is_used(Kernel::NormRope, x) && weight.dims1()? == head_dim {
        return NormRope::apply(x, Some((weight, eps)), head_dim, angles);
    }
    rope(&rms_norm(x, weight, eps)?, head_dim, angles)
}

/// Rotates the first `2 * half` values of every head, pairing i with i + half; the angles' cosines and sines are `[rows, half]`.
pub fn rope(x: &Tensor, head_dim: usize, angles: &[Tensor; 2]) -> Result<Tensor> {
    if is_used(Kernel::NormRope, x) {
        return NormRope::apply(x, None, head_dim, angles);
    }
    let [cos, sin] = angles;
    let ((rows, width), rotated) = (x.dims2()?, 2 * cos.dim(1)?);
    if rotated > head_dim || head_dim == 0 || !width.is_multiple_of(head_dim) {
        candle_core::bail!("rotation of {rotated} values of heads of {head_dim} in rows of {width}");
    }
    let heads = x.reshape((1, rows, width / head_dim, head_dim))?;
    let turned = if rotated == head_dim {
        rotary_emb::rope_thd(&heads, cos, sin)?
    } else {
        let first = heads.narrow(3, 0, rotated)?.contiguous()?;
        let rest = heads.narrow(3, rotated, head_dim - rotated)?;
        Tensor::cat(&[&rotary_emb::rope_thd(&first, cos, sin)?, &rest], 3)?
    };
    turned.reshape((rows, width))
}

/// Computes `activation(gate) * up`.
pub fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if let Activation::ClampedSwish { alpha, limit } = activation {
        let (alpha, limit) = (f64::from(alpha), f64::from(limit));
        let gate = gate.minimum(limit)?;
        let swish = (&gate * ops::sigmoid(&(&gate * alpha)?)?)?;
        return swish * (up.clamp(-limit, limit)? + 1.0)?;
    }
    let gate = activated(activation, gate)?;
    match activation {
        Activation::LimitedSilu { limit } => gate * up.clamp(-limit, limit)?,
        _ => gate * up,
    }
}

/// Computes `activation(x)`.
pub fn activated(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::None => Ok(x.clone()),
        Activation::Sigmoid => ops::sigmoid(x),
        Activation::Softplus => x.minimum(20.0)?.exp()?.affine(1.0, 1.0)?.log()?.maximum(x),
        Activation::Silu => ops::silu(x),
        Activation::LimitedSilu { limit } => ops::silu(x)?.minimum(f64::from(limit)),
        Activation::ScaledSilu { factor } => ops::silu(&scaled(x, factor)?),
        Activation::SquaredRelu => x.relu()?.sqr(),
        Activation::ClampedSwish { .. } => gated(activation, x, &x.ones_like()?),
        Activation::Xielu { positive, negative, slope, limit } => {
            let below = (x.minimum(f64::from(limit))?.exp()? - 1.0)? - x;
            let bent = x.gt(0.0)?.where_cond(&scaled(&x.sqr()?, positive)?, &scaled(&below?, negative)?)?;
            bent + scaled(x, slope)?
        }
        Activation::GeluErf => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(), // candle's plain name is the tanh form; the exact one is gelu_erf
    }
}

/// Computes a gate of each group from the product of its values in `x` and `y`.
pub fn gate_groups(x: &Tensor, y: &Tensor, groups: usize) -> Result<Tensor> {
    let products = (x * y)?.reshape((x.dim(0)?, groups, ()))?;
    let score = (products.sum(2)? / (products.dim(2)? as f64).sqrt())?;
    ops::sigmoid(&(score.abs()?.maximum(1e-6)?.sqrt()? * score.sign()?)?)
}

/// Scales each row of `x` to the root mean square of the same row of `reference`.
pub fn match_magnitude(x: &Tensor, reference: &Tensor, least: f32) -> Result<Tensor> {
    let target = reference.sqr()?.mean_keepdim(1)?.sqrt()?;
    let own = x.sqr()?.mean_keepdim(1)?.maximum(f64::from(least))?.sqrt()?;
    x.broadcast_mul(&target.div(&own)?)
}

/// Computes `max(x - cutoff, 0)`, where a row's cutoff lies `deviations` standard deviations above its mean.
pub fn cut_off(x: &Tensor, deviations: f32) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(1)?)?;
    let deviation = centred.sqr()?.mean_keepdim(1)?.sqrt()?;
    centred.broadcast_sub(&(deviation * f64::from(deviations))?)?.relu()
}
