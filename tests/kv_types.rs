//! Error of each KV type: rounded keys and values stay close to exact ones. In every type, chunks, company, copied pages and
//! exported and imported pages change no bit.

use llmctl_models::kv::NO_PAGE;

use crate::common::golden::{checkpoint, feed, has_experts, in_repository};
use crate::common::prelude::*;

/// Root mean square of the difference, relative to that of the logits with f32 KV, of one prompt. Set after measuring. With
/// rows of 8 to 32 random values these models are harder on rounding than trained ones.
const TOLERANCE: [(KvType, f64); 2] = [(KvType::F16, 5e-3), (KvType::Q8_0, 5e-2)];

/// Large scores let keys count for more: Gemma 4's are not scaled down, and LongRoPE multiplies those of phi4-mini by 5.5.
const TOLERANCE_SHARP: [(KvType, f64); 2] = [(KvType::F16, 1e-2), (KvType::Q8_0, 1.5e-1)];

/// Where a rounding sends a token to another expert, its logits are others.
const TOLERANCE_EXPERTS: [(KvType, f64); 2] = [(KvType::F16, 2e-1), (KvType::Q8_0, 4e-1)];

/// Where a rounding lets an indexer choose other tokens, of which these checkpoints take 8, the attention is another one.
const TOLERANCE_CHOICES: [(KvType, f64); 2] = [(KvType::F16, 2e-1), (KvType::Q8_0, 8e-1)];

fn with(kv_type: KvType) -> LoadOptions {
    LoadOptions { kv_type, ..exact() }
}

fn relative_distance(got: &[f32], exact: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    assert_eq!(got.len(), exact.len());
    let difference = squares(&mut got.iter().zip(exact).map(|(got, exact)| f64::from(got - exact)));
    (difference / squares(&mut exact.iter().map(|value| f64::from(*value)))).sqrt()
}

#[test]
fn rounded_kv_stays_close_to_exact() {
    for family in in_repository() {
        let folder = checkpoint(family);
        let mut exact = load_model(&folder, &with(KvType::F32)).expect("loads").model;
        let tolerance = match family {
            "deepseek3.2" | "glm-dsa" | "minimax-m3" | "qwen4-exp" => TOLERANCE_CHOICES,
            _ if has_experts(family) => TOLERANCE_EXPERTS,
            "gemma4" | "gemma4-e" | "gemma4-unified" | "phi4-mini" => TOLERANCE_SHARP,
            _ => TOLERANCE,
        };
        for (kv_type, tolerance) in tolerance {
            let mut rounded = load_model(&folder, &with(kv_type)).expect("loads").model;
            for prompt in golden_prompts(&folder) {
                let expected = Fed::new(&mut *exact).feed(&prompt.tokens, usize::MAX);
                let got = Fed::new(&mut *rounded).feed(&prompt.tokens, usize::MAX);
                let distance = relative_distance(&got, &expected);
                let name = kv_type.name();
                eprintln!("{family:<13} {name:<4} {:6} {distance:.1e}", prompt.name);
                assert!(
                    distance > 0.0 && distance < tolerance,
                    "{family} {name} {}: {distance}",
                    prompt.name
                );
            }
        }
    }
}

/// One step of chunks of several sequences; logits of all rows by sequence.
fn step_together(model: &mut dyn Model, tables: &mut [PageTable], chunks: &[&[u32]]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    for (sequence, (table, chunk)) in tables.iter_mut().zip(chunks).enumerate() {
        let start = table.len();
        table.extend(chunk.len()).expect("pages");
        let row = |(index, &token)| Row::known(token, start + index, sequence, true);
        rows.extend(chunk.iter().enumerate().map(row));
    }
    let tables: Vec<&PageTable> = tables.iter().collect();
    let logits = model.forward(&Batch::new(&rows, &tables)).expect("forward");
    let mut by_sequence = vec![Vec::new(); chunks.len()];
    for (index, row) in rows.iter().enumerate() {
        by_sequence[row.sequence].extend_from_slice(logits.row(index));
    }
    by_sequence
}

/// All pages of a sequence, out of one model and into another.
fn moved(from: &dyn Model, to: &mut dyn Model, table: &PageTable, pool: &PagePool) -> PageTable {
    // Another sequence lies in the first page, so that numbers differ.
    let mut other = PageTable::new(pool);
    other.extend(PAGE_TOKENS).expect("pages");
    let mut moved = PageTable::new(pool);
    moved.extend(table.len()).expect("pages");
    for group in 0..from.spec().groups.len() {
        let pairs: Vec<_> = table.page_ids(group).zip(moved.page_ids(group)).collect();
        for (source, target) in pairs.into_iter().filter(|pair| pair.0 != NO_PAGE) {
            let mut bytes = Vec::new();
            from.export_page(PageRef { group, page: source }, &mut bytes).expect("export");
            assert_eq!(bytes.len(), from.spec().groups[group].page_bytes);
            to.import_page(PageRef { group, page: target }, bytes.clone().into()).expect("import");
            bytes.push(0);
            assert!(
                to.import_page(PageRef { group, page: target }, bytes.into()).is_err(),
                "one byte too many"
            );
        }
    }
    moved
}

#[test]
fn chunks_company_copies_and_moves_change_no_bit_in_any_type() {
    for (family, kv_type) in
        ["gemma3", "llama", "qwen2"].into_iter().flat_map(|family| KvType::ALL.map(|kv| (family, kv)))
    {
        let name = format!("{family} {}", kv_type.name());
        let folder = parity_folder().join(family);
        let load = || load_model(&folder, &with(kv_type)).expect("loads").model;
        let (mut model, mut other) = (load(), load());
        let tokens = golden_prompts(&folder).pop().expect("the long prompt").tokens;
        let whole = Fed::new(&mut *model).feed(&tokens, usize::MAX);
        let vocab = whole.len() / tokens.len();
        for chunk in [1, 7, 64] {
            assert!(same_bits(&Fed::new(&mut *model).feed(&tokens, chunk), &whole), "{name} by {chunk}");
        }

        let pool = page_pool(&*model, 64);
        let mut tables: Vec<PageTable> = (0..3).map(|_| PageTable::new(&pool)).collect();
        let reversed: Vec<u32> = tokens.iter().rev().copied().collect();
        let mut together = Vec::new();
        for (start, end) in [(0, 50), (50, 51), (51, 97), (97, tokens.len())] {
            let chunks = [&reversed[start..end], &tokens[start..end], &reversed[end - 1..end]];
            together.extend(step_together(&mut *model, &mut tables, &chunks).swap_remove(1));
        }
        assert!(same_bits(&together, &whole), "{name} in company");

        let (shared, rest) = tokens.split_at(50);
        let mut table = PageTable::new(&pool);
        feed(&mut *model, &mut table, shared);
        let mut fork = table.fork();
        let forked = feed(&mut *model, &mut fork, &reversed);
        let mut alone = Fed::new(&mut *model);
        alone.feed(shared, usize::MAX);
        assert!(same_bits(&alone.feed(&reversed, 64), &forked), "{name} in the fork");
        assert!(same_bits(&feed(&mut *model, &mut table, rest), &whole[50 * vocab..]), "{name} forked");

        let mut table = PageTable::new(&pool);
        feed(&mut *model, &mut table, shared);
        let elsewhere = page_pool(&*other, 64);
        let mut arrived = moved(&*model, &mut *other, &table, &elsewhere);
        assert!(same_bits(&feed(&mut *other, &mut arrived, rest), &whole[50 * vocab..]), "{name} moved");
    }
}
