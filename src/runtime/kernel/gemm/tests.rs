//! Every variant against the scalar twin, bit for bit, and the twin against the definition.

use super::format::ALL;
use super::*;
use crate::Dtype;
use crate::isa;
use crate::memory::Arena;
use crate::quant::dequantize_row;

/// Random generator, xorshift64*.
pub struct GemmRandom(pub u64);

impl GemmRandom {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }

    pub fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.next() % 20001) as f32 / 5000.0 - 2.0).collect()
    }
}

/// Generates random codes, with scales of both signs near 0.01.
pub fn random_weights(dtype: Dtype, values: usize, seed: u64) -> Vec<u8> {
    let mut random = GemmRandom(seed + 1);
    let scales: &[usize] = match dtype {
        Dtype::Q4_0 | Dtype::Q5_0 | Dtype::Q8_0 => &[0],
        Dtype::Q4_1 | Dtype::Q5_1 | Dtype::Q4K | Dtype::Q5K => &[0, 2],
        Dtype::Q2K => &[80, 82],
        Dtype::Q3K => &[108],
        Dtype::Q6K => &[208],
        Dtype::Iq4Nl | Dtype::Iq4Xs | Dtype::Iq3S | Dtype::Iq3Xxs | Dtype::Q2_0 | Dtype::Q1_0 => &[0],
        Dtype::Iq2S | Dtype::Iq2Xs | Dtype::Iq2Xxs | Dtype::Iq1S => &[0],
        Dtype::Tq1_0 => &[52],
        Dtype::Tq2_0 => &[64],
        Dtype::Mxfp4 | Dtype::Nvfp4 | Dtype::Iq1M => &[],
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => unreachable!("quantised types only"),
    };
    let mut bytes: Vec<u8> = (0..dtype.row_bytes(values).unwrap()).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        match dtype {
            Dtype::Mxfp4 => block[0] = 119 + random.below(4) as u8,
            Dtype::Nvfp4 => block[..4].copy_from_slice(&0.0003f32.to_le_bytes()),
            // The scale's nibbles are the upper ones of every second byte: its exponent is near that of 0.01.
            Dtype::Iq1M => block[55] = block[55] & 0x8f | 0x20,
            _ => {}
        }
        for &at in scales {
            let scale = (random.next() % 1000) as f32 / 50_000.0 - 0.008;
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
        }
    }
    bytes
}

thread_local! {
    /// Memory for the packed weights of a test. An arena for each would map 128 MiB for each, and qemu keeps
    /// a record of every page that was ever mapped.
    static ARENA: Arena = Arena::default();
}

struct GemmCase {
    dtype: Dtype,
    shape: [usize; 2],
    weights: Vec<u8>,
    x: Vec<f32>,
}

impl GemmCase {
    fn new(dtype: Dtype, [n, k]: [usize; 2], m: usize, random: &mut GemmRandom) -> GemmCase {
        let weights = random_weights(dtype, n * k, random.next());
        GemmCase { dtype, shape: [n, k], weights, x: random.values(m * k) }
    }

    fn packed(&self, pool: &Pool) -> Packed {
        let source = MatrixSource::new(self.dtype, self.shape, &self.weights);
        ARENA.with(|arena| Packed::pack(&source, arena, pool)).unwrap().unwrap()
    }

    fn product(&self, packed: &Packed, variant: Variant, rows: Range<usize>, pool: &Pool) -> Vec<f32> {
        let [n, k] = self.shape;
        let mut x = Activations::default();
        x.quantize(isa::isa(), &self.x[rows.start * k..rows.end * k], k, pool);
        let mut out = vec![f32::NAN; n * rows.len()];
        matmul_by(variant, &x, [(packed, &mut out[..])], pool);
        out
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns lengths K that a type can have, including odd numbers of blocks.
fn lengths(dtype: Dtype) -> &'static [usize] {
    match dtype.block_len() {
        32 => &[32, 64, 96, 544],
        64 => &[64, 192, 576],
        128 => &[128, 640],
        _ => &[256, 768],
    }
}

#[test]
fn the_scalar_twin_agrees_with_double_precision() {
    let pool = Pool::new(1).unwrap();
    let mut random = GemmRandom(5);
    for dtype in ALL {
        for &k in lengths(dtype) {
            let case = GemmCase::new(dtype, [19, k], 3, &mut random);
            let out = case.product(&case.packed(&pool), Variant::Scalar, 0..3, &pool);
            let mut w = vec![0.0; 19 * k];
            dequantize_row(dtype, &case.weights, &mut w);
            let mut x = Activations::default();
            x.quantize(Isa::Scalar, &case.x, k, &pool);
            for (row, w) in w.chunks(k).enumerate() {
                for token in 0..3 {
                    let blocks = x.row(token).iter();
                    let x = blocks.flat_map(|block| block.codes.map(|code| f32::from(code) * block.scale));
                    let terms: Vec<f64> =
                        w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(x)).collect();
                    let exact: f64 = terms.iter().sum();
                    let size: f64 = terms.iter().map(|term| term.abs()).sum();
                    let got = f64::from(out[token * 19 + row]);
                    assert!((got - exact).abs() < 1e-6 * size, "{dtype:?} {k}: {got} for {exact}");
                }
            }
        }
    }
}

/// Checks all variants and thread counts against the twin, for all rows together and each row alone.
fn check(case: &GemmCase, m: usize, pools: &[Pool]) {
    let n = case.shape[0];
    let packed = case.packed(&pools[0]);
    let expected = bits(&case.product(&packed, Variant::Scalar, 0..m, &pools[0]));
    for variant in Variant::within(isa::isa()) {
        for pool in pools {
            let got = bits(&case.product(&packed, variant, 0..m, pool));
            assert!(
                got == expected,
                "{:?} {:?} m {m} {variant:?} {}",
                case.dtype,
                case.shape,
                pool.threads()
            );
        }
        for row in [0, m / 2, m - 1] {
            let got = bits(&case.product(&packed, variant, row..row + 1, &pools[0]));
            assert!(
                got == expected[row * n..(row + 1) * n],
                "{:?} {:?} alone {variant:?}",
                case.dtype,
                case.shape
            );
        }
    }
}

#[test]
fn every_variant_gives_the_bits_of_the_scalar_twin() {
    let pools = [1, 2].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(77);
    for dtype in ALL {
        for &k in lengths(dtype) {
            for n in [1, 16, 33, 50] {
                if cfg!(miri) && (n > 33 || k > 256) {
                    continue;
                }
                for m in if cfg!(miri) { vec![1, 5] } else { (1..=17).chain([64, 100]).collect() } {
                    check(&GemmCase::new(dtype, [n, k], m, &mut random), m, &pools);
                }
            }
        }
    }
}

#[test]
fn rows_longer_than_a_panel_and_random_shapes_agree_too() {
    if cfg!(miri) {
        return;
    }
    // Usually more threads than processors.
    let pools = [1, 64].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(99);
    for dtype in ALL {
        // More blocks than are unpacked together, and more panels than are multiplied in turn.
        let long = 128 * BLOCK + dtype.block_len();
        for (shape, m) in [([21, long], 11), ([21, long], 101), ([150, 3 * dtype.block_len()], 40)] {
            check(&GemmCase::new(dtype, shape, m, &mut random), m, &pools);
        }
        for _ in 0..3 {
            let shape = [1 + random.below(130), dtype.block_len() * (1 + random.below(7))];
            let m = 1 + random.below(40);
            check(&GemmCase::new(dtype, shape, m, &mut random), m, &pools);
        }
    }
}

#[test]
fn weights_of_any_formats_give_together_what_each_gives_alone() {
    let pools = [1, 2].map(|threads| Pool::new(threads).unwrap());
    let mut random = GemmRandom(31);
    for m in [1, 3, 100] {
        let cases: Vec<GemmCase> = ALL
            .iter()
            .map(|&dtype| GemmCase::new(dtype, [1 + random.below(90), 256], m, &mut random))
            .collect();
        let mut x = Activations::default();
        x.quantize(Isa::Scalar, &cases[0].x, 256, &pools[0]);
        let weights: Vec<Packed> = cases.iter().map(|case| case.packed(&pools[0])).collect();
        let outputs = || cases.iter().map(|case| vec![f32::NAN; m * case.shape[0]]).collect::<Vec<_>>();
        let mut alone = outputs();
        for (w, out) in weights.iter().zip(&mut alone) {
            matmul_by(Variant::Scalar, &x, [(w, &mut out[..])], &pools[0]);
        }
        for variant in Variant::within(isa::isa()) {
            for pool in &pools {
                let mut together = outputs();
                let products = weights.iter().zip(together.iter_mut().map(|out| &mut out[..]));
                matmul_by(variant, &x, products, pool);
                for (together, alone) in together.iter().zip(&alone) {
                    assert!(bits(together) == bits(alone), "m {m} {variant:?}");
                }
            }
        }
    }
}

#[test]
fn a_broken_activation_spoils_its_own_row_only() {
    let pool = Pool::new(1).unwrap();
    let mut case = GemmCase::new(Dtype::Q4K, [16, 256], 9, &mut GemmRandom(3));
    case.x[256 + 40] = f32::INFINITY;
    let packed = case.packed(&pool);
    for variant in Variant::within(isa::isa()) {
        let out = case.product(&packed, variant, 0..9, &pool);
        for (row, out) in out.chunks(16).enumerate() {
            assert!(out.iter().all(|value| value.is_nan() == (row == 1)), "{variant:?} row {row}");
        }
    }
}

/// candle's kernels configure the tiles of a thread once, and rely on it.
#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_stay_as_others_have_configured_them() {
    if isa::isa() != Isa::Amx {
        eprintln!("skipped: this processor has no AMX");
        return;
    }
    let pool = Pool::new(1).unwrap();
    let case = GemmCase::new(Dtype::Q4K, [32, 512], 40, &mut GemmRandom(5));
    let packed = case.packed(&pool);
    let product = || bits(&case.product(&packed, Variant::Amx, 0..40, &pool));
    let alone = product();
    let others = TileConfig::of([(7, 36), (5, 20)]);
    // SAFETY: the processor has tiles; the configurations are valid.
    unsafe {
        assert_eq!(TileConfig::current(), TileConfig::NONE);
        others.load();
        assert_eq!(product(), alone);
        crate::limits::int8_pass(&pool);
        assert_eq!(TileConfig::current(), others);
        TileConfig::NONE.load();
    }
}

#[test]
fn an_instruction_set_uses_nothing_beyond_itself() {
    assert_eq!(kernels_name(Isa::Scalar), "scalar");
    for isa in isa::available() {
        assert!(kernels_name(isa).starts_with(match isa {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx",
            Isa::Amx => "amx-int8",
            Isa::Neon => "neon",
            Isa::Dotprod | Isa::I8mm => "neon-",
        }));
    }
}
