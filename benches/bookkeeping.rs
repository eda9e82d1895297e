//! Cost of a decode step beside the model: sampling and the page table. `cargo bench --bench bookkeeping -- [filter]`.
//!
//! Times are per token or per call; a step of a small model takes some 4 ms. Logits have the vocabulary of Qwen3
//! (151,936) and a Gaussian's shape; sequences hold 8,192 tokens.

use divan::{Bencher, black_box};
use llmctl_base::Sampling;
use llmctl_engine::sample::{Sampler, Turn};
use llmctl_models::kv::pool::PagePool;
use llmctl_models::kv::table::PageTable;
use llmctl_models::kv::{KvGroup, KvKind};

const VOCABULARY: usize = 151_936;
const SEQUENCE: usize = 8192;

fn main() {
    divan::main();
}

/// Sums of four draws from a generator with a fixed seed: near enough to a Gaussian.
fn logits() -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..VOCABULARY).map(|_| 6.0 * (draw() + draw() + draw() + draw())).collect()
}

fn tokens() -> Vec<u32> {
    (0..SEQUENCE as u32).map(|n| n * 7919 % VOCABULARY as u32).collect()
}

/// Returns the sampling parameters of a benchmark's name.
fn sampling(name: &str) -> Sampling {
    let plain = Sampling { temperature: 0.7, ..Sampling::default() };
    match name {
        "greedy" => Sampling::default(),
        "temperature" => plain,
        "top_k 40" => Sampling { top_k: Some(40), ..plain },
        "top_p 0.95" => Sampling { top_p: 0.95, ..plain },
        "min_p 0.05" => Sampling { min_p: 0.05, ..plain },
        "top_k 20, top_p 0.95" => Sampling { top_k: Some(20), top_p: 0.95, ..plain },
        "penalties" => Sampling { repetition_penalty: 1.1, presence_penalty: 0.5, ..plain },
        other => unreachable!("{other}"),
    }
}

#[divan::bench(args = ["greedy", "temperature", "top_k 40", "top_p 0.95", "min_p 0.05", "top_k 20, top_p 0.95", "penalties"])]
fn sample(bencher: Bencher<'_, '_>, name: &str) {
    let (logits, tokens, sampling) = (logits(), tokens(), sampling(name));
    let mut sampler = Sampler::default();
    let mut seed = 0;
    bencher.bench_local(|| {
        seed += 1;
        let turn = Turn { tokens: &tokens, generated_from: SEQUENCE - 512, seed, ..Turn::default() };
        sampler.sample(black_box(&logits), &sampling, &turn).expect("finite logits")
    });
}

#[divan::bench(args = [0, 20])]
fn logprobs(bencher: Bencher<'_, '_>, alternatives: usize) {
    let (logits, tokens, sampling) = (logits(), tokens(), Sampling::default());
    let mut sampler = Sampler::default();
    let turn = Turn { tokens: &tokens, seed: 1, logprobs: Some(alternatives), ..Turn::default() };
    bencher.bench_local(|| sampler.sample(black_box(&logits), &sampling, &turn).expect("finite logits"));
}

/// More room than any of these calls takes, so that none evicts.
fn pool() -> PagePool {
    PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], 3 * SEQUENCE)
}

/// A sequence whose pages are in the index.
fn published(pool: &PagePool, tokens: &[u32]) -> PageTable {
    let mut table = PageTable::new(pool);
    table.extend(tokens.len()).expect("room");
    table.publish(tokens);
    table
}

/// 512 tokens one by one, as decoding takes them: pages taken, named and put into the index.
#[divan::bench]
fn decode_512_tokens(bencher: Bencher<'_, '_>) {
    let tokens = tokens();
    bencher.with_inputs(|| PageTable::new(&pool())).bench_local_values(|mut table| {
        for len in 1..=512 {
            table.extend(1).expect("room");
            table.publish(&tokens[..len]);
        }
        table
    });
}

/// A prompt of 8,192 tokens that another sequence has computed.
#[divan::bench]
fn find_in_index(bencher: Bencher<'_, '_>) {
    let (pool, tokens) = (pool(), tokens());
    let _holder = published(&pool, &tokens);
    bencher.bench_local(|| PageTable::from_index(&pool, black_box(&tokens), SEQUENCE - 1));
}

#[divan::bench]
fn fork(bencher: Bencher<'_, '_>) {
    let (pool, tokens) = (pool(), tokens());
    let table = published(&pool, &tokens);
    bencher.bench_local(|| table.fork());
}

/// Half of a sequence taken back.
#[divan::bench]
fn truncate(bencher: Bencher<'_, '_>) {
    let tokens = tokens();
    let whole = || published(&pool(), &tokens);
    bencher.with_inputs(whole).bench_local_values(|mut table| {
        table.truncate(&tokens, SEQUENCE / 2);
        table
    });
}
