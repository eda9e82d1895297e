//! Model of the speed on many cores: what this machine measures, and what 8, 16 and 64 cores would reach.
//!
//! `cargo run --release --example cores -- [GB/S PER CORE] [GB/S PER NODE] [NODES] [GOP/S PER CORE]`;
//! without numbers it uses those that it measures here with one thread. docs/cores.md has the formula.
#![allow(clippy::print_stdout, reason = "the product of an example is its table")]

use std::time::{Duration, Instant};

use llmctl_kernel::limits;
use llmctl_kernel::pool::Pool;

/// A model of Q4_K_M weights: `[billion weights, bytes per token, layers, hidden size]`, bytes in GB.
const MODELS: [(&str, [f64; 4]); 2] =
    [("0.6B", [0.60, 0.40, 28.0, 1024.0]), ("8B", [8.0, 4.9, 36.0, 4096.0])];

/// Parallel regions of a layer in a decode step: q/k/v, attention, output, gate/up, down.
const REGIONS: f64 = 5.0;

/// Serial nanoseconds of a layer per value of the hidden size: norms, quantisation, rotary embedding, residuals. About
/// ten passes over the row, at 8 values a nanosecond.
const SERIAL_NS: f64 = 10.0 / 8.0;

/// Nanoseconds of a cache line's way to another core: what a region costs more for each worker.
const LINE_NS: f64 = 60.0;

/// Share of the integer peak that the products of a prompt reach.
const EFFICIENCY: f64 = 0.5;

/// Limits of a machine.
struct CoreLimits {
    /// Gigabytes per second that one core reads, and all cores of a node together.
    core_gb: f64,
    node_gb: f64,
    nodes: f64,
    /// 8-bit operations of a core in 10^9 per second.
    core_gop: f64,
}

impl CoreLimits {
    /// Returns the tokens per second of decoding and of a prompt.
    fn predict(&self, [weights, bytes, layers, hidden]: [f64; 4], cores: f64) -> [f64; 2] {
        let bandwidth = (self.core_gb * cores).min(self.node_gb * self.nodes);
        let region_ns = 100.0 + LINE_NS * (cores - 1.0);
        let serial_ns = layers * (REGIONS * region_ns + SERIAL_NS * hidden);
        let decode_ns = bytes / bandwidth * 1e9 + serial_ns;
        let prompt = EFFICIENCY * self.core_gop * cores / (2.0 * weights);
        [1e9 / decode_ns, prompt]
    }
}

/// Returns the median nanoseconds of an empty region.
fn region_ns(threads: usize) -> f64 {
    let pool = Pool::new(threads).expect("threads start");
    let mut times: Vec<f64> = (0..50)
        .map(|_| {
            let start = Instant::now();
            (0..20).for_each(|_| pool.for_each(threads, |_| ()));
            start.elapsed().as_nanos() as f64 / 20.0
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in [1, processors] {
        let found = limits::probe(threads, Duration::from_secs(1)).expect("threads start");
        let (gb, gop) = (found.read_gb, found.int8_gop.unwrap_or(0.0));
        println!("{threads} threads here: {gb:.1} GB/s read, {gop:.0} Gop/s of int8");
    }
    for threads in [2, 4, 8, 16, 64] {
        println!(
            "{threads} threads on {processors} CPUs: {:.1} us per empty region",
            region_ns(threads) / 1e3
        );
    }
    let one = limits::probe(1, Duration::from_secs(1)).expect("threads start");
    let given: Vec<f64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let at = |index: usize, default: f64| given.get(index).copied().unwrap_or(default);
    let machine = CoreLimits {
        core_gb: at(0, one.read_gb),
        node_gb: at(1, one.read_gb * processors as f64),
        nodes: at(2, 1.0),
        core_gop: at(3, one.int8_gop.unwrap_or(one.f32_gop.unwrap_or(0.0))),
    };
    println!(
        "\n{:.0} GB/s per node, {:.0} nodes, {:.0} Gop/s per core",
        machine.node_gb, machine.nodes, machine.core_gop
    );
    println!("| model | cores | decode, tokens/s | prompt, tokens/s |\n| --- | --- | --- | --- |");
    for (name, model) in MODELS {
        for cores in [1.0, 2.0, 8.0, 16.0, 64.0] {
            let [decode, prompt] = machine.predict(model, cores);
            println!("| {name} | {cores} | {decode:.0} | {prompt:.0} |");
        }
    }
}
