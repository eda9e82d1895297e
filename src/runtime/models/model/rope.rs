//! Rotary frequencies: the angle per position of each pair of a head, and the scale of the result.
//!
//! Sources: RoPE, Su et al. 2021; linear interpolation, Chen et al. 2023; Llama 3.1's ramp, Meta's model card
//! and transformers' `rope_type: llama3`; YaRN, Peng et al. 2023; LongRoPE, Ding et al. 2024.

use super::config::{RopeConfig, RopeScaling, RopeSections};

/// One rotary table, resolved for a context length.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Radians per position of each pair.
    inv_freq: Vec<f32>,
    /// Factor of cosines and sines (YaRN's and LongRoPE's attention factor).
    magnitude: f32,
    sections: Option<RopeSections>,
    lag: u32,
}

impl Rope {
    /// Resolves a rotary table. `context` selects LongRoPE's divisors once, so that a position's key does not depend
    /// on the sequence's later length.
    pub fn new(config: &RopeConfig, context: usize) -> Self {
        let base: Vec<f32> = (0..config.dim / 2)
            .map(|pair| 1.0 / power(config.theta, 2.0 * pair as f32 / config.dim as f32))
            .collect();
        let RopeConfig { sections, lag, .. } = *config;
        let plain = |inv_freq| Self { inv_freq, magnitude: 1.0, sections, lag };
        let divided = |divisors: &[f32]| base.iter().zip(divisors).map(|(freq, by)| freq / by).collect();
        match &config.scaling {
            RopeScaling::None => plain(base),
            RopeScaling::Linear { factor } => plain(base.iter().map(|freq| freq / factor).collect()),
            RopeScaling::Divisors(divisors) => plain(divided(divisors)),
            RopeScaling::Llama3 { .. } => {
                plain(base.iter().map(|freq| llama3(*freq, &config.scaling)).collect())
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                let divisors = if context > *original_context { long } else { short };
                Self { inv_freq: divided(divisors), magnitude: *attention_factor, sections, lag }
            }
            RopeScaling::Yarn { factor, attention_factor, .. } => Self {
                inv_freq: yarn(&base, config),
                magnitude: attention_factor.unwrap_or(if *factor > 1.0 {
                    0.1 * ln(*factor) + 1.0
                } else {
                    1.0
                }),
                sections,
                lag,
            },
        }
    }

    /// Computes cosines and sines, `[rows, dim / 2]` each, of rows with these numbers (time, row, column), replacing the
    /// content of `cos` and `sin`. The angle is rounded to f32 as in the reference; cosine and sine are computed in f64, so that
    /// they are exact to f32.
    pub fn angles(&self, numbers: &[[u32; 3]], cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        let axis = |pair| self.sections.map_or(0, |sections| sections.axis(pair));
        let angle = |number: u32, freq: f32| f64::from(number.saturating_sub(self.lag) as f32 * freq);
        let each = |function: fn(f64) -> f64, out: &mut Vec<f32>| {
            out.clear();
            let pairs = || self.inv_freq.iter().enumerate();
            let angles = numbers
                .iter()
                .flat_map(|numbers| pairs().map(move |(pair, &freq)| angle(numbers[axis(pair)], freq)));
            out.extend(angles.map(|angle| (function(angle) * f64::from(self.magnitude)) as f32));
        };
        each(libm::cos, cos);
        each(libm::sin, sin);
    }
}

/// Computes a power in f64, rounded once: the same bits on every system.
fn power(base: f32, exponent: f32) -> f32 {
    libm::pow(base.into(), exponent.into()) as f32
}

/// Computes the natural logarithm in f64, rounded once: the same bits on every system.
pub fn ln(x: f32) -> f32 {
    libm::log(x.into()) as f32
}

/// Scales a frequency: wavelengths beyond the original context are stretched by `factor`, short ones kept, those
/// between blended.
fn llama3(freq: f32, scaling: &RopeScaling) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = scaling else {
        return freq;
    };
    let context = *original_context as f32;
    let wavelength = 2.0 * std::f32::consts::PI / freq;
    if wavelength < context / high_freq_factor {
        freq
    } else if wavelength > context / low_freq_factor {
        freq / factor
    } else {
        let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

/// Blends interpolated and original frequencies by the number of turns a pair makes within the original context.
fn yarn(base: &[f32], config: &RopeConfig) -> Vec<f32> {
    let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } = &config.scaling
    else {
        return base.to_vec();
    };
    let dim = config.dim as f32;
    let pair_with_turns = |turns: f32| {
        dim * ln(*original_context as f32 / (turns * 2.0 * std::f32::consts::PI)) / (2.0 * ln(config.theta))
    };
    let (mut low, mut high) = (pair_with_turns(*beta_fast), pair_with_turns(*beta_slow));
    if *truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, high) = (low.max(0.0), high.min(dim - 1.0));
    let span = if high > low { high - low } else { 0.001 };
    base.iter()
        .enumerate()
        .map(|(pair, freq)| {
            let interpolate = ((pair as f32 - low) / span).clamp(0.0, 1.0);
            freq / factor * interpolate + freq * (1.0 - interpolate)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope::new(&RopeConfig::new(8, 10_000.0, scaling), 4096)
    }

    fn angles(rope: &Rope, positions: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let (mut cos, mut sin) = (vec![9.0], Vec::new());
        let numbers: Vec<_> = positions.iter().map(|&position| [position as u32; 3]).collect();
        rope.angles(&numbers, &mut cos, &mut sin);
        (cos, sin)
    }

    #[test]
    fn plain_frequencies_are_powers_of_theta() {
        assert_eq!(rope(RopeScaling::None).inv_freq, [1.0, 0.1, 0.01, 0.001]);
        let (cos, sin) = angles(&rope(RopeScaling::None), &[0, 2]);
        assert_eq!((cos[0], sin[0]), (1.0, 0.0));
        assert!((cos[4] - 2f32.cos()).abs() < 1e-6 && (sin[5] - 0.2f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn pairs_rotate_by_the_number_of_their_section() {
        let axes = |counts, interleaved, pairs| {
            let sections = RopeSections { counts, interleaved };
            (0..pairs).map(|pair| sections.axis(pair)).collect::<Vec<_>>()
        };
        assert_eq!(axes([4, 2, 3], true, 9), [0, 1, 2, 0, 1, 2, 0, 0, 2]);
        assert_eq!(axes([2, 1, 3], false, 6), [0, 0, 1, 2, 2, 2]);
        let sections = Some(RopeSections { counts: [2, 1, 1], interleaved: true });
        let rope = Rope::new(&RopeConfig { sections, ..RopeConfig::new(8, 1e4, RopeScaling::None) }, 64);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        rope.angles(&[[5, 6, 7]], &mut cos, &mut sin);
        let by = |number| angles(&rope, &[number]).1;
        assert_eq!(sin, [by(5)[0], by(6)[1], by(7)[2], by(5)[3]]);
    }

    #[test]
    fn long_rope_takes_its_set_by_the_context_and_scales_the_magnitude() {
        let scaling = |original_context| RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![2.0; 4],
            original_context,
            attention_factor: 1.5,
        };
        assert_eq!(rope(scaling(4096)).inv_freq[1], 0.1);
        assert_eq!(rope(scaling(2048)).inv_freq[1], 0.05);
        assert_eq!(angles(&rope(scaling(2048)), &[0]).0[0], 1.5);
    }

    #[test]
    fn llama3_keeps_fast_pairs_and_divides_slow_ones() {
        let scaled = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 512,
        });
        assert_eq!((scaled.inv_freq[0], scaled.inv_freq[3]), (1.0, 0.001 / 8.0));
    }

    #[test]
    fn yarn_leaves_fast_pairs_alone_and_interpolates_slow_ones() {
        let scaled = rope(RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: 512,
            attention_factor: None,
            truncate: true,
        });
        assert_eq!((scaled.inv_freq[0], scaled.inv_freq[3]), (1.0, 0.001 / 4.0));
        assert!((scaled.magnitude - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-7);
    }
}
