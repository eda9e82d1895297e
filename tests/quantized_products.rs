//! Error of integer products: models with quantised matrices as stored, where activations are rounded to 8 bits, against the
//! same matrices widened to f32 on load. Chunks and batches give the same bits.

use crate::common::prelude::*;

/// Root mean square of the difference, relative to that of the exact logits, of one model's prompt. Set after measuring:
/// 2% to 6% (Llama's long prompt). Whether the products themselves are right is for the kernels' own tests.
const TOLERANCE: f64 = 0.1;

/// Part of the positions whose best token is the same; measured from 0.88. With random weights many leads are tiny.
const SAME_BEST: f64 = 0.8;

fn relative_distance(got: &[f32], exact: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let difference = got.iter().zip(exact).map(|(got, exact)| f64::from(got - exact));
    (squares(&mut difference.into_iter()) / squares(&mut exact.iter().map(|value| f64::from(*value)))).sqrt()
}

#[test]
fn integer_products_stay_close_to_exact_ones_and_keep_their_bits_in_any_chunks() {
    let mut compared = 0;
    for family in ["gemma3", "llama", "qwen3"] {
        for dtype in ["q8_0", "q4_0"] {
            let Some(path) = parity_gguf(&format!("{family}-{dtype}.gguf")) else { continue };
            let mut widened = load_model(&path, &exact()).expect("loads").model;
            let mut stored = load_model(&path, &LoadOptions { dtype: None, ..exact() }).expect("loads").model;
            for prompt in golden_prompts(&parity_folder().join(family)) {
                let exact = Fed::new(&mut *widened).feed(&prompt.tokens, usize::MAX);
                let got = Fed::new(&mut *stored).feed(&prompt.tokens, usize::MAX);
                let vocab = exact.len() / prompt.tokens.len();
                let distance = relative_distance(&got, &exact);
                let best = got.chunks(vocab).zip(exact.chunks(vocab));
                let same = best.filter(|(got, exact)| top_two(got).0 == top_two(exact).0).count();
                let same = same as f64 / prompt.tokens.len() as f64;
                eprintln!("{family} {dtype} {:6} {distance:.1e}, best token the same {same:.3}", prompt.name);
                assert!(
                    distance > 0.0 && distance < TOLERANCE,
                    "{family} {dtype} {}: {distance}",
                    prompt.name
                );
                assert!(same >= SAME_BEST, "{family} {dtype} {}: {same}", prompt.name);
                for chunk in [1, 7, 64] {
                    let cut = Fed::new(&mut *stored).feed(&prompt.tokens, chunk);
                    let same = cut.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same && cut.len() == got.len(), "{family} {dtype} {} by {chunk}", prompt.name);
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 0, "no quantised checkpoint at all");
}
