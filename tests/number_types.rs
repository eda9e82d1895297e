//! Promise: no type of weights or of KV is further from f32 than docs/numbers.md says.
//!
//! The parity checkpoints are small, random and stored as BF16: a rounding shows more in them than in a trained model.

use std::fmt::Write;

use crate::common::golden::{GoldenPrompt, checkpoint};
use crate::common::prelude::*;

/// The checkpoints of the page's table.
const DENSE: [&str; 4] = ["llama", "qwen3", "gemma3", "granite"];
const WITH_EXPERTS: [&str; 4] = ["gemma4-moe", "gpt-oss", "qwen3-moe", "qwen3.5-moe"];

/// A way to load, and the largest difference of a log probability to f32 that the page allows: of a dense model, of one with experts.
struct Way {
    name: &'static str,
    options: LoadOptions,
    bounds: [f32; 2],
}

fn ways() -> Vec<Way> {
    let stored = LoadOptions { dtype: None, ..exact() };
    let quantized = |dtype| LoadOptions { quantize: Some(dtype), ..stored.clone() };
    let way = |name, options, bounds| Way { name, options, bounds };
    vec![
        way("BF16, KV f32", stored.clone(), [0.01, 1.0]),
        way("F16, KV f32", LoadOptions { dtype: Some(Dtype::F16), ..stored.clone() }, [0.01, 1.0]),
        way("BF16, KV f16", LoadOptions { kv_type: KvType::F16, ..stored.clone() }, [0.01, 1.5]),
        way("BF16, KV q8_0", LoadOptions { kv_type: KvType::Q8_0, ..stored.clone() }, [0.2, 6.0]),
        way("BF16, KV q6_0", LoadOptions { kv_type: KvType::Q6_0, ..stored.clone() }, [0.8, 12.0]),
        way("BF16, KV q5_1", LoadOptions { kv_type: KvType::Q5_1, ..stored.clone() }, [1.5, 15.0]),
        way("Q8_0, KV f32", quantized(Dtype::Q8_0), [0.5, 8.0]),
        way("Q4_0, KV f32", quantized(Dtype::Q4_0), [3.0, 15.0]),
    ]
}

/// Log probabilities of every token at every position, `[tokens, vocab]`.
fn logprobs(name: &str, prompt: &GoldenPrompt, options: &LoadOptions) -> Vec<Vec<f32>> {
    let mut model = load_model(&checkpoint(name), options).expect("loads").model;
    let logits = Fed::new(&mut *model).feed(&prompt.tokens, 64);
    let row = |logits: &[f32]| {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f32 = logits.iter().map(|logit| (logit - highest).exp()).sum();
        logits.iter().map(|logit| logit - highest - total.ln()).collect()
    };
    logits.chunks(logits.len() / prompt.tokens.len()).map(row).collect()
}

fn best(row: &[f32]) -> usize {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a vocabulary")
}

#[test]
fn no_type_is_further_from_f32_than_the_page_says() {
    let mut table = String::new();
    let mut too_far = Vec::new();
    for name in DENSE.into_iter().chain(WITH_EXPERTS) {
        let prompt = golden_prompts(&checkpoint(name)).swap_remove(1);
        let exact = logprobs(name, &prompt, &exact());
        for way in ways() {
            let rows = logprobs(name, &prompt, &way.options);
            let differences = rows
                .iter()
                .zip(&exact)
                .flat_map(|(row, exact)| row.iter().zip(exact))
                .map(|(a, b)| (a - b).abs());
            let worst = differences.fold(0.0, |worst: f32, difference| {
                if difference.is_nan() { f32::INFINITY } else { worst.max(difference) }
            });
            let others = rows.iter().zip(&exact).filter(|(row, exact)| best(row) != best(exact)).count();
            writeln!(
                table,
                "{name:14} {:14} {worst:.1e}  another best token at {others} of {}",
                way.name,
                rows.len()
            )
            .expect("memory");
            let bound = way.bounds[usize::from(WITH_EXPERTS.contains(&name))];
            if worst > bound {
                too_far.push(format!("{name}, {}: {worst} instead of {bound}", way.name));
            }
        }
    }
    eprintln!("{table}");
    assert!(too_far.is_empty(), "{too_far:#?}");
}
