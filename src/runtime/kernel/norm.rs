//! Layer norm (Ba et al. 2016), root-mean-square norm (Zhang and Sennrich 2019) and rotary positions (Su et
//! al. 2021) of single rows.

use super::dot::{dot, sum};
use super::isa::{Isa, dispatch};

#[inline(always)]
fn scale_body(x: &[f32], weight: &[f32], factor: f32, out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

dispatch! {
    /// Computes `out = x * factor * weight`, element by element.
    pub fn scale(x: &[f32], weight: &[f32], factor: f32, out: &mut [f32]) = scale_body
}

/// Computes `out = x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean_square = dot(isa, x, x) / x.len() as f32;
    scale(isa, x, weight, 1.0 / (mean_square + eps).sqrt(), out);
}

#[inline(always)]
fn shift_body(x: &[f32], by: f32, out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x + by;
    }
}

dispatch! {
    /// Computes `out = x + by`, element by element.
    pub fn shift(x: &[f32], by: f32, out: &mut [f32]) = shift_body
}

#[inline(always)]
fn scale_in_place_body(x: &mut [f32], weight: &[f32], bias: &[f32], factor: f32) {
    for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
        *x = (*x * factor).mul_add(*weight, *bias);
    }
}

dispatch! {
    /// Computes `x = x * factor * weight + bias`, element by element.
    pub fn scale_in_place(x: &mut [f32], weight: &[f32], bias: &[f32], factor: f32) = scale_in_place_body
}

/// Computes `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`. The mean is corrected by that of the differences
/// from it: in a row of nearly equal values its own rounding would stand for the deviation.
pub fn layer_norm(isa: Isa, x: &[f32], [weight, bias]: [&[f32]; 2], eps: f32, out: &mut [f32]) {
    let mean = sum(isa, x) / x.len() as f32;
    shift(isa, x, -mean, out);
    shift(isa, x, -(mean + sum(isa, out) / x.len() as f32), out);
    let variance = dot(isa, out, out) / x.len() as f32;
    scale_in_place(isa, out, weight, bias, 1.0 / (variance + eps).sqrt());
}

#[inline(always)]
fn rotate_body(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (a, b) = (*low, *high);
        *low = a.mul_add(*cos, -(b * sin));
        *high = b.mul_add(*cos, a * sin);
    }
}

dispatch! {
    /// Rotates the pairs (low[i], high[i]) by the angles with the given cosines and sines.
    pub fn rotate(low: &mut [f32], high: &mut [f32], cos: &[f32], sin: &[f32]) = rotate_body
}

#[cfg(test)]
mod tests {
    use super::super::isa::available;
    use super::*;

    #[test]
    fn norm_and_rotation_agree_on_every_instruction_set() {
        let x: Vec<f32> = (0..67).map(|i| (i as f32).sin()).collect();
        let weight: Vec<f32> = (0..67).map(|i| 1.0 + i as f32 / 100.0).collect();
        let mut expected = vec![0.0; 67];
        rms_norm(Isa::Scalar, &x, &weight, 1e-6, &mut expected);
        let mean: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 67.0;
        let third = f64::from(x[3]) / (mean + 1e-6).sqrt() * f64::from(weight[3]);
        assert!((f64::from(expected[3]) - third).abs() < 1e-6);
        for isa in available() {
            let mut out = vec![0.0; 67];
            rms_norm(isa, &x, &weight, 1e-6, &mut out);
            assert_eq!(out, expected, "{isa:?}");
            let (mut normed, mut by_scalar) = (vec![0.0; 67], vec![0.0; 67]);
            layer_norm(isa, &x, [&weight, &x], 1e-5, &mut normed);
            layer_norm(Isa::Scalar, &x, [&weight, &x], 1e-5, &mut by_scalar);
            assert_eq!(normed, by_scalar, "{isa:?}");
            let (mut low, mut high) = (x[..33].to_vec(), x[34..67].to_vec());
            rotate(isa, &mut low, &mut high, &x[..33], &weight[..33]);
            assert_eq!(low[5], x[5].mul_add(x[5], -(x[39] * weight[5])), "{isa:?}");
        }
    }

    #[test]
    fn a_layer_norm_subtracts_the_mean_and_divides_by_the_deviation() {
        let mut out = [0.0; 4];
        layer_norm(
            Isa::Scalar,
            &[1.0, 2.0, 3.0, 6.0],
            [&[1.0, 1.0, 2.0, 1.0], &[0.0, 0.5, 0.0, 0.0]],
            0.0,
            &mut out,
        );
        let deviation = 3.5f32.sqrt();
        let expected = [-2.0 / deviation, -1.0 / deviation + 0.5, 0.0, 3.0 / deviation];
        assert!(out.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-6), "{out:?}");
        let (x, one, mut flat) = ([0.3; 433], [1.0; 433], [0.0; 433]);
        layer_norm(Isa::Scalar, &x, [&one, &[0.5; 433]], 1e-12, &mut flat);
        assert_eq!(flat, [0.5; 433], "a row of one value has no deviation");
    }
}
