//! Matrix products and attention against the machine's limits: `cargo bench --bench kernels -- [types] [threads=N] [rounds=N] [isa=NAME]`.
//!
//! Every figure is a median over rounds; a round measures the limits and all kernels one after the other, so that a
//! busy minute meets all of them; with one thread it is processor time. GEMM is `[512, 1024] x [3072, 1024]^T`, GEMV reads 256 MiB of packed weights.
//! Attention is one row behind 2,048 positions, and a prompt of 512.
//! `f32` is the path without integer arithmetic: dequantise 16 rows, multiply in f32.
#![allow(clippy::print_stdout, reason = "a benchmark's product is its table")]

#[path = "kernels/attention.rs"]
mod attention;
#[path = "common/limits.rs"]
mod limits;

use std::sync::atomic::Ordering;

use limits::{PROCESSOR_TIME, f32_peak, int8_peak, read_bandwidth, seconds};
use llmctl_kernel::gemm;
use llmctl_kernel::gemm::{Activations, MatrixSource, Packed};
use llmctl_kernel::matmul;
use llmctl_kernel::matmul::MatmulShape;
use llmctl_kernel::memory::Arena;
use llmctl_kernel::pool::Pool;
use llmctl_kernel::{Dtype, Isa, dequantize_row, isa};
use llmctl_models::backend::KvType;
use llmctl_models::backend::cpu::Cpu;

const TYPES: [Dtype; 14] = [
    Dtype::Q4_0,
    Dtype::Q8_0,
    Dtype::Q4K,
    Dtype::Q6K,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q2K,
    Dtype::Q3K,
    Dtype::Q5K,
    Dtype::Iq4Xs,
    Dtype::Iq4Nl,
    Dtype::Iq3S,
    Dtype::Iq2S,
];

/// Bytes of weights that a GEMV sweep reads: more than any cache holds.
const SWEEP_BYTES: usize = 256 << 20;

struct Options {
    types: Vec<Dtype>,
    threads: usize,
    rounds: usize,
    isa: Isa,
    shape: [usize; 3],
}

fn options() -> Options {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options =
        Options { types: Vec::new(), threads, rounds: 7, isa: isa::isa(), shape: [512, 3072, 1024] };
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        match arg.split_once('=') {
            Some(("threads", n)) => options.threads = n.parse().expect("threads=N"),
            Some(("rounds", n)) => options.rounds = n.parse().expect("rounds=N"),
            Some(("isa", name)) => {
                options.isa = Isa::available().find(|isa| isa.name() == name).expect("isa=NAME");
            }
            Some(("shape", s)) => {
                let mut parts = s.split('x').map(|n| n.parse().expect("shape=MxNxK"));
                options.shape = std::array::from_fn(|_| parts.next().expect("three numbers"));
            }
            _ => options.types.extend(TYPES.iter().filter(|dtype| dtype.name() == arg)),
        }
    }
    if options.types.is_empty() {
        options.types = TYPES.to_vec();
    }
    options
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Random codes under scales near 0.01.
fn weights(dtype: Dtype, values: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes: Vec<u8> = (0..dtype.row_bytes(values).expect("whole blocks"))
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    let scale = half::f16::from_f32(0.01).to_le_bytes();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let len = block.len();
        match dtype {
            Dtype::Q6K | Dtype::Q3K => block[len - 2..].copy_from_slice(&scale),
            Dtype::Q2K => block[len - 4..].as_chunks_mut::<2>().0.fill(scale),
            Dtype::Q4_0
            | Dtype::Q5_0
            | Dtype::Q8_0
            | Dtype::Iq4Xs
            | Dtype::Iq4Nl
            | Dtype::Iq3S
            | Dtype::Iq2S => {
                block[..2].copy_from_slice(&scale);
            }
            _ => block[..4].as_chunks_mut::<2>().0.fill(scale),
        }
    }
    bytes
}

/// One type's weights and times.
struct Subject {
    dtype: Dtype,
    file: Vec<u8>,
    packed: Vec<Packed>,
    pack_gb: Vec<f64>,
    gemm: Vec<f64>,
    gemm_f32: Vec<f64>,
    gemv: Vec<f64>,
    gemv_f32: Vec<f64>,
    few: [Vec<f64>; 3],
}

/// Rows of the batched decode columns.
const FEW: [usize; 3] = [2, 4, 8];

impl Subject {
    fn new(dtype: Dtype, [_, n, k]: [usize; 3], pool: &Pool) -> Subject {
        let file = weights(dtype, n * k);
        let copies = SWEEP_BYTES.div_ceil(file.len());
        let mut pack_gb = Vec::new();
        let pack = || {
            let mut packed = None;
            let time = seconds(|| {
                packed = Packed::pack(&MatrixSource::new(dtype, [n, k], &file), &Arena::default(), pool)
                    .expect("memory")
            });
            pack_gb.push(file.len() as f64 / time / 1e9);
            packed.expect("a quantised type")
        };
        let packed = std::iter::repeat_with(pack).take(copies).collect();
        let [gemm, gemm_f32, gemv, gemv_f32] = [const { Vec::new() }; 4];
        Subject {
            dtype,
            file,
            packed,
            pack_gb,
            gemm,
            gemm_f32,
            gemv,
            gemv_f32,
            few: [const { Vec::new() }; 3],
        }
    }

    fn measure(&mut self, isa: Isa, [m, n, k]: [usize; 3], x: &[f32], pool: &Pool) {
        let mut quantized = Activations::default();
        let mut out = vec![0.0; m * n];
        let ops = 2.0 * (m * n * k) as f64 / 1e9;
        self.gemm.push(
            ops / seconds(|| {
                quantized.quantize(isa, x, k, pool);
                gemm::matmul(isa, &self.packed[0], &quantized, &mut out, pool);
            }),
        );
        self.gemm_f32
            .push(ops / seconds(|| f32_product(isa, self.dtype, &self.file, [m, k], x, &mut out, pool)));
        let bytes = self.packed.iter().map(Packed::bytes).sum::<usize>() as f64 / 1e9;
        let mut sweep = |rows: usize| {
            bytes
                / seconds(|| {
                    for packed in &self.packed {
                        quantized.quantize(isa, &x[..rows * k], k, pool);
                        gemm::matmul(isa, packed, &quantized, &mut out[..rows * n], pool);
                    }
                })
        };
        self.gemv.push(sweep(1));
        for (rows, times) in FEW.into_iter().zip(&mut self.few) {
            times.push(sweep(rows));
        }
        // The same bytes for every matrix would sit in the cache: that is in this path's favour.
        self.gemv_f32.push(
            self.file.len() as f64
                / 1e9
                / seconds(|| {
                    f32_product(isa, self.dtype, &self.file, [1, k], &x[..k], &mut out[..n], pool);
                }),
        );
    }
}

fn f32_product(
    isa: Isa,
    dtype: Dtype,
    file: &[u8],
    [m, k]: [usize; 2],
    x: &[f32],
    out: &mut [f32],
    pool: &Pool,
) {
    let row_bytes = dtype.row_bytes(k).expect("whole blocks");
    pool.chunks_mut(out, 16 * m, |task, out| {
        let rows = out.len() / m;
        let mut wide = vec![0.0; rows * k];
        dequantize_row(dtype, &file[task * 16 * row_bytes..][..rows * row_bytes], &mut wide);
        matmul::block(isa, MatmulShape { k, m }, &wide, x, out);
    });
}

fn main() {
    let Options { types, threads, rounds, isa, shape } = options();
    PROCESSOR_TIME.store(threads == 1, Ordering::Relaxed);
    let pool = Pool::new(threads).expect("threads");
    let [m, _, k] = shape;
    let x: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.37).sin()).collect();
    let buffer = vec![1u64; SWEEP_BYTES / 8];
    let mut subjects: Vec<Subject> = types.iter().map(|&dtype| Subject::new(dtype, shape, &pool)).collect();
    let cpu = Cpu::new(threads).expect("threads");
    let mut attention = KvType::ALL.map(|kv_type| attention::Subject::new(&cpu, kv_type));
    let [mut bandwidth, mut peak, mut peak_f32] = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        bandwidth.push(read_bandwidth(&pool, &buffer));
        peak.push(int8_peak(&pool));
        peak_f32.push(f32_peak(&pool));
        attention.iter_mut().for_each(|subject| subject.measure(&cpu));
        for subject in &mut subjects {
            subject.measure(isa, shape, &x, &pool);
        }
    }
    let [bandwidth, peak, peak_f32] = [bandwidth, peak, peak_f32].map(median);
    println!(
        "{threads} threads, {}, gemm {shape:?}: read {bandwidth:.1} GB/s, int8 {peak:.0} GOP/s, f32 {peak_f32:.0} GFLOP/s",
        gemm::kernels_name(isa)
    );
    report(&subjects, bandwidth, peak);
    println!("{}", attention::HEADER);
    attention.iter().for_each(|subject| println!("{}", subject.line(bandwidth, peak_f32)));
}

fn report(subjects: &[Subject], bandwidth: f64, peak: f64) {
    println!(
        "type   gemm GOP/s  % peak   x f32 | gemv GB/s  % read   x f32 | GB/s with 2, 4, 8 rows | pack GB/s"
    );
    for subject in subjects {
        let [gemm, gemm_f32, gemv, gemv_f32, pack] =
            [&subject.gemm, &subject.gemm_f32, &subject.gemv, &subject.gemv_f32, &subject.pack_gb]
                .map(|values| median(values.clone()));
        let few = subject.few.each_ref().map(|values| median(values.clone()));
        println!(
            "{:5}  {gemm:10.0}  {:5.0}%  {:6.1} | {gemv:9.1}  {:5.0}%  {:6.1} | {:6.1} {:6.1} {:6.1}   | {pack:.2}",
            subject.dtype.name(),
            100.0 * gemm / peak,
            gemm / gemm_f32,
            100.0 * gemv / bandwidth,
            gemv / gemv_f32,
            few[0],
            few[1],
            few[2],
        );
    }
}
