//! Element-wise functions of f32, computed by the same operations on every machine.
//!
//! The C library's `expf` and `tanhf` differ between systems and cannot be vectorised; these are the same
//! everywhere and vectorise.

use super::isa::{Isa, dispatch};

/// Activation of the gate in `down(act(gate(x)) * up(x))`, or of `up(x)` in `down(act(up(x)))`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Activation {
    /// Identity.
    #[default]
    None,
    /// SiLU: x times its sigmoid.
    Silu,
    /// SiLU of `factor` times the gate (Falcon-H1).
    ScaledSilu { factor: f32 },
    /// The square of what is above 0 (Primer, So et al. 2021).
    SquaredRelu,
    /// GELU in the tanh form (`gelu_pytorch_tanh`).
    GeluTanh,
    /// GELU by the error function (`gelu`).
    GeluErf,
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// ln(1 + e^x), and x above 20 (Laguna).
    Softplus,
    /// gpt-oss: the gate is limited to `limit` and multiplied by sigmoid(alpha x); the other side is clamped to
    /// `limit` and increased by 1.
    ClampedSwish { alpha: f32, limit: f32 },
    /// SiLU, limited to `limit`; the other side is clamped to `limit` (Step 3.5).
    LimitedSilu { limit: f32 },
    /// xIELU (Huang and Schlag 2024, Apertus): `positive x^2 + slope x` above 0, below it
    /// `negative (e^min(x, limit) - 1 - x) + slope x`.
    Xielu { positive: f32, negative: f32, slope: f32, limit: f32 },
}

impl Activation {
    /// Returns xIELU by its parameters as files store them, logarithms of an exponential and 1.
    pub fn xielu([alpha_p, alpha_n, beta, eps]: [f32; 4]) -> Self {
        let softplus = |x: f32| libm::log1p(libm::exp(x.into())) as f32;
        let negative = beta + softplus(alpha_n);
        Activation::Xielu { positive: softplus(alpha_p), negative, slope: beta, limit: eps }
    }
}

/// Computes e^x to about 1 ulp; denormal below -87.3, 0 below -104, infinity above 88.7.
///
/// Method: Cody and Waite. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; e^r by its Taylor series to r^7,
/// whose remainder is below 2^-25 there; 2^n by building the exponent, in two halves so that it cannot overflow early.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer in the default rounding mode.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-104.0, 89.0);
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_HIGH, clamped);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = 1.0 / 5040.0;
    p = r.mul_add(p, 1.0 / 720.0);
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    // The integer is in the low bits; `n as i32` would saturate, which no vector instruction does.
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let result = p * power_of_two(half) * power_of_two(n - half);
    if x.is_nan() { x } else { result }
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// Computes the hyperbolic tangent by [`exp`]; absolute error below 2e-7.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Computes GELU in the tanh form (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    let inner = SQRT_2_OVER_PI * (0.044_715 * x * x).mul_add(x, x);
    0.5 * x * (1.0 + tanh(inner))
}

/// Computes the error function; absolute error below 5e-7: 1.5e-7 of the method, the rest of rounding.
///
/// Method: Abramowitz and Stegun 7.1.26, a polynomial of t = 1 / (1 + p |x|) times e^(-x^2).
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let size = x.abs();
    let t = 1.0 / 0.327_591_1f32.mul_add(size, 1.0);
    let mut p = 1.061_405_4;
    p = t.mul_add(p, -1.453_152);
    p = t.mul_add(p, 1.421_413_8);
    p = t.mul_add(p, -0.284_496_74);
    p = t.mul_add(p, 0.254_829_6);
    let rest = t * p * exp(-size * size);
    (1.0 - rest).copysign(x)
}

/// Computes GELU: x times the normal distribution's integral up to x.
#[inline(always)]
pub fn gelu_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// Keeps NaN, which `max` would drop.
#[inline(always)]
fn squared_relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x * x }
}

/// Computes 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Computes ln(1 + e^x) in f64, and x where the two are equal to f32.
pub fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { libm::log1p(libm::exp(x)) }
}

/// Replaces each element of a slice by the value for it and for the element of another.
macro_rules! each {
    ($gate:ident, $up:ident, |$x:ident, $y:ident| $value:expr) => {
        for (gate, &$y) in $gate.iter_mut().zip($up) {
            let $x = *gate;
            *gate = $value;
        }
    };
}

#[inline(always)]
fn activate_body(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::None => each!(gate, up, |x, y| x * y),
        Activation::Silu => each!(gate, up, |x, y| silu(x) * y),
        Activation::ScaledSilu { factor } => each!(gate, up, |x, y| silu(factor * x) * y),
        Activation::SquaredRelu => each!(gate, up, |x, y| squared_relu(x) * y),
        Activation::Sigmoid => each!(gate, up, |x, y| sigmoid(x) * y),
        Activation::Softplus => each!(gate, up, |x, y| softplus(x.into()) as f32 * y),
        Activation::ClampedSwish { alpha, limit } => each!(gate, up, |x, y| {
            let kept = if x > limit { limit } else { x }; // not `min`, which drops NaN
            kept / (1.0 + exp(-alpha * kept)) * (y.clamp(-limit, limit) + 1.0)
        }),
        Activation::LimitedSilu { limit } => each!(gate, up, |x, y| {
            let silu = silu(x);
            (if silu > limit { limit } else { silu }) * y.clamp(-limit, limit)
        }),
        Activation::GeluTanh => each!(gate, up, |x, y| gelu_tanh(x) * y),
        Activation::GeluErf => each!(gate, up, |x, y| gelu_erf(x) * y),
        // NaN takes the second branch, whose `- x` keeps it.
        Activation::Xielu { positive, negative, slope, limit } => each!(gate, up, |x, y| {
            let bent = if x > 0.0 { positive * x * x } else { (exp(x.min(limit)) - 1.0 - x) * negative };
            slope.mul_add(x, bent) * y
        }),
    }
}

#[inline(always)]
pub(super) fn softcap_body(x: &mut [f32], cap: f32) {
    for x in x {
        *x = cap * tanh(*x / cap);
    }
}

#[inline(always)]
pub(super) fn exp_minus_body(x: &mut [f32], offset: f32) {
    for x in x {
        *x = exp(*x - offset);
    }
}

/// Computes `x = activation(x)`, element by element: the bits of [`activate`] with ones.
pub fn activate_alone(isa: Isa, activation: Activation, x: &mut [f32]) {
    const ONES: [f32; 256] = [1.0; 256];
    for x in x.chunks_mut(ONES.len()) {
        activate(isa, activation, x, &ONES[..x.len()]);
    }
}

dispatch! {
    /// Computes `gate = activation(gate) * up`, element by element.
    pub fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) = activate_body
}
dispatch! {
    /// Computes `x = cap * tanh(x / cap)`.
    pub fn softcap(x: &mut [f32], cap: f32) = softcap_body
}
dispatch! {
    /// Computes `x = exp(x - offset)`.
    pub fn exp_minus(x: &mut [f32], offset: f32) = exp_minus_body
}

/// Returns the largest value; -infinity for an empty slice. The order of comparison cannot change the result unless a
/// value is NaN.
pub fn max(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for step in -87_000..88_000 {
            let x = step as f32 / 1000.0;
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((tanh(50.0), tanh(-50.0), tanh(0.0)), (1.0, -1.0, 0.0));
    }

    #[test]
    fn the_error_function_is_within_its_bound() {
        for step in -6000..6000 {
            let x = step as f32 / 1000.0;
            assert!((f64::from(erf(x)) - libm::erf(x.into())).abs() < 5e-7, "erf({x}) is {}", erf(x));
        }
        assert!(erf(f32::NAN).is_nan());
        assert_eq!((erf(f32::INFINITY), erf(f32::NEG_INFINITY)), (1.0, -1.0));
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) / 37.0).collect();
        let up: Vec<f32> = x.iter().map(|x| x * 0.3 + 0.1).collect();
        type Kernel = dyn Fn(Isa, &mut [f32], &[f32]);
        let activations = [
            Activation::None,
            Activation::Silu,
            Activation::ScaledSilu { factor: 0.7 },
            Activation::SquaredRelu,
            Activation::GeluTanh,
            Activation::GeluErf,
            Activation::Sigmoid,
            Activation::Softplus,
            Activation::ClampedSwish { alpha: 1.7, limit: 2.0 },
            Activation::LimitedSilu { limit: 2.0 },
            Activation::Xielu { positive: 0.8, negative: 1.3, slope: 0.5, limit: -1e-6 },
        ];
        let activated = activations.map(|activation| -> Box<Kernel> {
            Box::new(move |isa, x, up| activate(isa, activation, x, up))
        });
        let others: [Box<Kernel>; 3] = [
            Box::new(|isa, x, _| activate_alone(isa, Activation::GeluTanh, x)),
            Box::new(|isa, x, _| softcap(isa, x, 30.0)),
            Box::new(|isa, x, _| exp_minus(isa, x, 1.5)),
        ];
        for kernel in activated.into_iter().chain(others) {
            let mut expected = x.clone();
            kernel(Isa::Scalar, &mut expected, &up);
            for isa in available() {
                let mut got = x.clone();
                kernel(isa, &mut got, &up);
                assert!(got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
            }
        }
    }

    #[test]
    fn activations_have_their_known_values() {
        let mut gate = [0.0, 30.0, -40.0];
        activate(Isa::Scalar, Activation::Softplus, &mut gate, &[2.0, 1.0, 1.0]);
        assert!((gate[0] - 1.386_294_4).abs() < 1e-6 && gate[1] == 30.0 && (0.0..1e-17).contains(&gate[2]));
        let mut gate = [1.0, -2.0];
        activate(Isa::Scalar, Activation::Silu, &mut gate, &[1.0, 2.0]);
        assert!((gate[0] - 0.731_058_6).abs() < 1e-6 && (gate[1] + 0.476_811_7).abs() < 1e-6);
        let mut gate = [2.0, -4.0];
        activate(Isa::Scalar, Activation::ScaledSilu { factor: 0.5 }, &mut gate, &[1.0, 2.0]);
        assert!((gate[0] - 0.731_058_6).abs() < 1e-6 && (gate[1] + 0.476_811_7).abs() < 1e-6);
        let mut gate = [3.0, -2.0, f32::NAN];
        activate(Isa::Scalar, Activation::SquaredRelu, &mut gate, &[2.0, 5.0, 1.0]);
        assert!(gate[..2] == [18.0, 0.0] && gate[2].is_nan(), "{gate:?}");
        let mut long: Vec<f32> = (0..600).map(|x| x as f32 - 300.0).collect();
        activate_alone(Isa::Scalar, Activation::SquaredRelu, &mut long);
        assert_eq!((long[10], long[301], long[599]), (0.0, 1.0, 299.0 * 299.0));
        let mut gate = [3.0, -2.0, f32::NAN];
        let clamped = Activation::ClampedSwish { alpha: 0.5, limit: 2.0 };
        activate(Isa::Scalar, clamped, &mut gate, &[1.0, -9.0, 1.0]);
        assert!((gate[0] - 2.0 * 0.731_058_6 * 2.0).abs() < 1e-5, "{gate:?}");
        assert!((gate[1] - 2.0 * 0.268_941_4).abs() < 1e-5 && gate[2].is_nan(), "{gate:?}");
        // alpha = ln(e^0.8 - 1) stands for the factor 0.8; below 0: (e^-2 - 1 + 2) (0.5 + 0.8) - 1.
        let alpha = 0.203_382_32;
        let mut gate = [2.0, -2.0, f32::NAN];
        activate(Isa::Scalar, Activation::xielu([alpha, alpha, 0.5, -1e-6]), &mut gate, &[1.0, 2.0, 1.0]);
        assert!((gate[0] - 4.2).abs() < 1e-5 && (gate[1] - 2.0 * 0.475_935_8).abs() < 1e-5, "{gate:?}");
        assert!(gate[2].is_nan());
        let mut gate = [1.0, -2.0];
        activate(Isa::Scalar, Activation::GeluTanh, &mut gate, &[1.0, 1.0]);
        assert!((gate[0] - 0.841_192).abs() < 1e-5 && (gate[1] + 0.045_402_3).abs() < 1e-5);
    }
}
