//! Every variant against the scalar twin, bit for bit, and the twin against the definition.

use super::super::tests::GemmRandom;
use super::*;
use crate::isa;
use crate::quant::dequantize_row;

/// Generates values of very different magnitudes, some of them zero or tiny.
fn weights(dtype: Dtype, count: usize, random: &mut GemmRandom) -> Vec<u8> {
    let value = |random: &mut GemmRandom| {
        let size = [1e-7, 1e-4, 0.01, 0.02, 0.1, 1.0, 30.0, 0.0][random.below(8)];
        (random.below(20001) as f32 / 10000.0 - 1.0) * size
    };
    let bits = |value: f32| match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_bits(),
        _ => half::bf16::from_f32(value).to_bits(),
    };
    (0..count).flat_map(|_| bits(value(random)).to_le_bytes()).collect()
}

fn packed_by(isa: Isa, dtype: Dtype, shape: [usize; 2], bytes: &[u8], pool: &Pool) -> FixedWeights {
    let source = MatrixSource::new(dtype, shape, bytes);
    FixedWeights::pack(isa, &source, &Arena::default(), pool).unwrap().unwrap()
}

fn packed(dtype: Dtype, shape: [usize; 2], bytes: &[u8], pool: &Pool) -> FixedWeights {
    packed_by(Isa::Scalar, dtype, shape, bytes, pool)
}

fn in_place(isa: Isa, dtype: Dtype, shape: [usize; 2], bytes: &[u8]) -> FixedWeights {
    FixedWeights::in_place(isa, dtype, shape, Arc::new(bytes.to_vec())).unwrap()
}

fn product(variant: Variant, w: &FixedWeights, x: &[f32], pool: &Pool) -> Vec<f32> {
    let mut activations = FixedActivations::default();
    activations.quantize(isa::isa(), x, w.cols, pool);
    let mut out = vec![f32::NAN; w.rows * activations.rows];
    matmul_by(variant, &activations, [(w, &mut out[..])], pool);
    out
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn every_variant_gives_the_bits_of_the_scalar_twin_for_any_batch() {
    let pools = [1, 2].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(41);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for [n, k] in [[1, 1], [16, 32], [17, 31], [33, 100], [50, 544], [5, 33], [64, 288]] {
            let bytes = weights(dtype, n * k, &mut random);
            let w = packed(dtype, [n, k], &bytes, &pools[0]);
            for m in if cfg!(miri) { vec![1, 7] } else { (1..=17).chain([40]).collect() } {
                let x = random.values(m * k);
                let expected = product(Variant::Scalar, &w, &x, &pools[0]);
                for variant in Variant::within(isa::isa()) {
                    for pool in &pools {
                        let got = product(variant, &w, &x, pool);
                        assert!(same_bits(&got, &expected), "{dtype:?} {n} x {k}, m {m} {variant:?}");
                    }
                    for row in [0, m / 2, m - 1] {
                        let got = product(variant, &w, &x[row * k..][..k], &pools[0]);
                        assert!(same_bits(&got, &expected[row * n..][..n]), "{n} x {k} alone {variant:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn rows_in_a_file_give_the_bits_of_packed_ones() {
    let pools = [1, 2].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(17);
    for (dtype, spoil) in [(Dtype::F16, 0x7c00u16), (Dtype::Bf16, 0xffc1)] {
        for [n, k] in [[1, 1], [16, 32], [17, 31], [33, 100], [50, 544], [64, 288], [48, 4160], [16, 8224]] {
            let mut bytes = weights(dtype, n * k, &mut random);
            for broken in [false, true] {
                if broken {
                    bytes[2 * (n * k / 2)..][..2].copy_from_slice(&spoil.to_le_bytes());
                }
                let packed = packed(dtype, [n, k], &bytes, &pools[0]);
                for m in if cfg!(miri) { vec![2] } else { vec![1, 2, 6, 7, 40] } {
                    let x = random.values(m * k);
                    let expected = product(Variant::Scalar, &packed, &x, &pools[0]);
                    let variants =
                        Isa::available().flat_map(|isa| Variant::within(isa).map(move |v| (isa, v)));
                    for ((isa, variant), pool) in variants.zip(pools.iter().cycle()) {
                        let w = in_place(isa, dtype, [n, k], &bytes);
                        let got = product(variant, &w, &x, pool);
                        assert!(
                            same_bits(&got, &expected),
                            "{dtype:?} {n} x {k}, m {m} {variant:?} {broken}"
                        );
                    }
                }
                let w = in_place(isa::isa(), dtype, [n, k], &bytes);
                for row in [0, n / 2, n - 1] {
                    let mut looked_up = [&w, &packed].map(|w| {
                        let mut out = vec![0.0; k];
                        w.unpack_row(row, &mut out);
                        out
                    });
                    for values in &mut looked_up {
                        values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = f32::NAN);
                    }
                    assert!(same_bits(&looked_up[0], &looked_up[1]), "{dtype:?} {n} x {k}, row {row}");
                }
            }
        }
    }
}

#[test]
fn weights_give_together_what_each_gives_alone() {
    let pools = [1, 2].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(13);
    let [k, m] = [70, 3];
    let weights: Vec<FixedWeights> = [50, 1, 33, 64, 17]
        .iter()
        .map(|&n| {
            let bytes = weights(Dtype::F16, n * k, &mut random);
            packed(Dtype::F16, [n, k], &bytes, &pools[0])
        })
        .collect();
    let x = random.values(m * k);
    let mut activations = FixedActivations::default();
    activations.quantize(Isa::Scalar, &x, k, &pools[0]);
    for variant in Variant::within(isa::isa()) {
        for pool in &pools {
            let mut together: Vec<Vec<f32>> = weights.iter().map(|w| vec![f32::NAN; m * w.rows]).collect();
            let products = weights.iter().zip(together.iter_mut().map(|out| &mut out[..]));
            matmul_by(variant, &activations, products, pool);
            for (w, together) in weights.iter().zip(&together) {
                assert!(same_bits(together, &product(Variant::Scalar, w, &x, &pools[0])), "{variant:?}");
            }
        }
    }
}

#[test]
fn packing_and_quantising_give_the_same_on_every_instruction_set_and_number_of_threads() {
    let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(8);
    let [n, k] = if cfg!(miri) { [20, 40] } else { [333, 300] };
    let (bytes, x) = (weights(Dtype::F16, n * k, &mut random), random.values(n * k));
    let twin = packed(Dtype::F16, [n, k], &bytes, &pools[0]);
    let mut twin_x = FixedActivations::default();
    twin_x.quantize(Isa::Scalar, &x, k, &pools[0]);
    for isa in isa::available() {
        for pool in &pools {
            let w = packed_by(isa, Dtype::F16, [n, k], &bytes, pool);
            let [w, twin] = [&w, &twin].map(|w| w.memory().expect("packed"));
            assert!(**w == **twin, "{isa:?}");
            let mut got = FixedActivations::default();
            got.quantize(isa, &x, k, pool);
            assert!(got.blocks == twin_x.blocks, "{isa:?}");
        }
    }
}

/// The error is within what 14 bits of the largest value of every block allow.
#[test]
fn the_error_is_that_of_fourteen_bits() {
    let pool = Pool::new(1).unwrap();
    let mut random = GemmRandom(5);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let [n, k, m] = [9, 320, 3];
        let bytes = weights(dtype, n * k, &mut random);
        let w = packed(dtype, [n, k], &bytes, &pool);
        let x = random.values(m * k);
        let out = product(Variant::Scalar, &w, &x, &pool);
        let mut wide = vec![0.0; n * k];
        dequantize_row(dtype, &bytes, &mut wide);
        for (row, w) in wide.chunks(k).enumerate() {
            for (token, x) in x.chunks(k).enumerate() {
                let exact: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let largest = |v: &[f32]| f64::from(v.iter().fold(0f32, |max, v| max.max(v.abs())));
                let blocks = w.chunks(BLOCK).zip(x.chunks(BLOCK));
                let size: f64 = blocks.map(|(w, x)| 32.0 * largest(w) * largest(x)).sum();
                let error = (f64::from(out[token * n + row]) - exact).abs();
                assert!(error < 1.3e-4 * size, "{dtype:?} {error} of {size}");
            }
        }
    }
}

#[test]
fn weights_near_the_largest_of_their_block_are_exact() {
    let pool = Pool::new(1).unwrap();
    for (dtype, smallest) in [(Dtype::F16, 0.25f32), (Dtype::Bf16, 1.0 / 32.0)] {
        for size in [1e-4f32, 1.0, 900.0] {
            let value = |i: usize| size * (smallest + (1.0 - smallest) * i as f32 / 31.0);
            let bits = |value: f32| match dtype {
                Dtype::F16 => half::f16::from_f32(value).to_bits(),
                _ => half::bf16::from_f32(value).to_bits(),
            };
            let bytes: Vec<u8> = (0..BLOCK).flat_map(|i| bits(value(i)).to_le_bytes()).collect();
            let mut wide = [0.0; BLOCK];
            dequantize_row(dtype, &bytes, &mut wide);
            let w = packed(dtype, [1, BLOCK], &bytes, &pool);
            let mut got = [0.0; BLOCK];
            w.unpack_row(0, &mut got);
            assert_eq!(got, wide, "{dtype:?} {size}");
        }
    }
}

#[test]
fn rows_are_looked_up_in_every_panel_and_tail() {
    let pool = Pool::new(1).unwrap();
    let (n, k) = (35, 75);
    let bytes: Vec<u8> =
        (0..n * k).flat_map(|i| half::f16::from_f32(1.0 + (i % 997) as f32 / 512.0).to_le_bytes()).collect();
    let w = packed(Dtype::F16, [n, k], &bytes, &pool);
    for row in 0..n {
        let (mut got, mut expected) = (vec![0.0; k], vec![0.0; k]);
        w.unpack_row(row, &mut got);
        dequantize_row(Dtype::F16, &bytes[2 * row * k..][..2 * k], &mut expected);
        assert_eq!(got, expected, "row {row}");
    }
}

#[test]
fn codes_and_their_products_keep_within_their_range() {
    let pool = Pool::new(1).unwrap();
    for (dtype, bits) in [(Dtype::F16, 0x7bffu16), (Dtype::Bf16, 0x7f7f)] {
        let bytes: Vec<u8> = (0..BLOCK).flat_map(|_| bits.to_le_bytes()).collect();
        let w = packed(dtype, [1, BLOCK], &bytes, &pool);
        let largest = w.packed_panel(w.memory().expect("packed"), 0, 0..1).codes[0];
        assert!((8000..=8191).contains(&largest), "{dtype:?} {largest}");
        for variant in Variant::within(isa::isa()) {
            let out = product(variant, &w, &[-3.0; BLOCK], &pool)[0];
            let mut value = [0.0];
            dequantize_row(dtype, &bits.to_le_bytes(), &mut value);
            let exact = f64::from(value[0]) * -96.0;
            assert!(
                (f64::from(out) / exact - 1.0).abs() < 1e-6 || exact < f64::from(f32::MIN),
                "{out} {exact}"
            );
        }
    }
}

#[test]
fn broken_values_spoil_their_own_outputs_only() {
    let pool = Pool::new(1).unwrap();
    let (n, k, m) = (20, 70, 8);
    for broken in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut bytes: Vec<u8> = half::f16::ONE.to_le_bytes().repeat(n * k);
        bytes[2 * (3 * k + 69)..][..2].copy_from_slice(&half::f16::from_f32(broken).to_le_bytes());
        let w = packed(Dtype::F16, [n, k], &bytes, &pool);
        let mut x = vec![1.0; m * k];
        x[2 * k + 40] = broken;
        for variant in Variant::within(isa::isa()) {
            for (at, out) in product(variant, &w, &x, &pool).iter().enumerate() {
                assert_eq!(out.is_nan(), at / n == 2 || at % n == 3, "{variant:?} {at}");
            }
        }
    }
}

#[test]
fn other_types_have_no_such_form() {
    let pool = Pool::new(1).unwrap();
    for dtype in [Dtype::F32, Dtype::Q8_0] {
        assert!(
            FixedWeights::pack(
                Isa::Scalar,
                &MatrixSource::new(dtype, [0, 32], &[]),
                &Arena::default(),
                &pool
            )
            .unwrap()
            .is_none()
        );
    }
}
