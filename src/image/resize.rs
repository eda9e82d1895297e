//! Resizing as Pillow 13 does it, bit by bit: integers with 22 fractional bits, a pass for each side, bytes in between.
//!
//! All sums are of integers, so they are the same on every processor. A sum fits an i32: the weights of a pixel are 2^22
//! together, and those of one sign are less than twice that.

use std::borrow::Cow;
use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::Picture;

/// Fractional bits of weights.
const BITS: u32 = 22;

/// Filters of Pillow, always with its antialiasing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResizeFilter {
    Bilinear,
    /// a = -0.5.
    Bicubic,
    Lanczos,
}

impl ResizeFilter {
    /// Pixels to each side of the centre that count.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    /// Weight at a distance from the centre.
    fn weight(self, at: f64) -> f64 {
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { libm::sin(x * PI) / (x * PI) };
        let x = at.abs();
        match self {
            Self::Bilinear if x < 1.0 => 1.0 - x,
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5,
            Self::Lanczos if x < 3.0 => sinc(at) * sinc(at / 3.0),
            _ => 0.0,
        }
    }
}

/// Resizes a picture to `width` and `height` pixels, which are not 0. A pass whose side stays is left out.
///
/// The horizontal pass comes first, as in all versions of Pillow, unless the height falls by more than twice what the width
/// does: there Pillow 13 begins with the vertical one.
pub fn resize(picture: &Picture, width: u32, height: u32, filter: ResizeFilter) -> Picture {
    let [fewer_columns, fewer_rows] =
        [(picture.width, width), (picture.height, height)].map(|(from, to)| i64::from(from) - i64::from(to));
    let is_flat = fewer_rows > 0 && fewer_rows > 2 * fewer_columns;
    let mut resized = Cow::Borrowed(picture);
    for is_across in [!is_flat, is_flat] {
        let Picture { width: columns, height: rows, rgb } = &*resized;
        if is_across && *columns != width {
            let rgb = across(rgb, *columns, &windows(*columns, width, filter));
            resized = Cow::Owned(Picture { width, height: *rows, rgb });
        } else if !is_across && *rows != height {
            let rgb = down(rgb, 3 * *columns as usize, &windows(*rows, height, filter));
            resized = Cow::Owned(Picture { width: *columns, height, rgb });
        }
    }
    resized.into_owned()
}

/// Returns the part of a picture that begins at `[x, y]`, of `[width, height]` pixels; it lies inside.
pub(super) fn crop(picture: &Picture, [x, y]: [u32; 2], [width, height]: [u32; 2]) -> Picture {
    let [at, len, stride] = [x, width, picture.width].map(|pixels| 3 * pixels as usize);
    let rows = picture.rgb.chunks_exact(stride.max(1)).skip(y as usize).take(height as usize);
    Picture { width, height, rgb: rows.flat_map(|row| &row[at..at + len]).copied().collect() }
}

/// The pixels that count for one output pixel: the first, and the weight of each.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

/// Pillow's `precompute_coeffs` and `normalize_coeffs_8bpc`.
fn windows(from: u32, to: u32, filter: ResizeFilter) -> Vec<Window> {
    let scale = f64::from(from) / f64::from(to);
    let wide = scale.max(1.0);
    let (support, narrow) = (filter.support() * wide, 1.0 / wide);
    let window = |at: u32| {
        let centre = (f64::from(at) + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from as usize);
        let weights: Vec<f64> =
            (first..end).map(|x| filter.weight((x as f64 - centre + 0.5) * narrow)).collect();
        // In this order, as in the reference.
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight);
        let fixed = |weight: &f64| {
            let share = if sum == 0.0 { *weight } else { weight / sum } * f64::from(1_u32 << BITS);
            (if share < 0.0 { share - 0.5 } else { share + 0.5 }) as i32
        };
        Window { first, weights: weights.iter().map(fixed).collect() }
    };
    (0..to).map(window).collect()
}

fn to_byte(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// Without a check of overflow, which would keep the compiler from vectors.
fn add(sum: &mut i32, value: u8, weight: i32) {
    *sum = sum.wrapping_add(i32::from(value).wrapping_mul(weight));
}

/// Resizes each row of `width` pixels.
fn across(rgb: &[u8], width: u32, windows: &[Window]) -> Vec<u8> {
    let mut resized = Vec::with_capacity(rgb.len() / (width as usize).max(1) * windows.len());
    for row in rgb.chunks_exact(3 * width as usize) {
        for window in windows {
            let pixels = row[3 * window.first..].as_chunks::<3>().0;
            let mut sums = [1 << (BITS - 1); 3];
            for (pixel, weight) in pixels.iter().zip(&window.weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    add(sum, *value, *weight);
                }
            }
            resized.extend(sums.map(to_byte));
        }
    }
    resized
}

/// Resizes each column, in rows of `stride` bytes.
fn down(rgb: &[u8], stride: usize, windows: &[Window]) -> Vec<u8> {
    let mut resized = Vec::with_capacity(stride * windows.len());
    let mut sums = vec![0; stride];
    for window in windows {
        sums.fill(1 << (BITS - 1));
        let rows = rgb[window.first * stride..].chunks_exact(stride);
        for (row, weight) in rows.zip(&window.weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                add(sum, *value, *weight);
            }
        }
        resized.extend(sums.iter().copied().map(to_byte));
    }
    resized
}
