//! Promise: once a model is warm, a decode step asks the allocator for nothing.

use crate::common::alloc::allocations;
use crate::common::prelude::*;

/// One step of two sequences: `count` tokens of the first, one of the second.
fn step(model: &mut dyn Model, tables: &mut [PageTable; 2], count: usize) -> usize {
    let starts = [tables[0].len(), tables[1].len()];
    tables[0].extend(count).expect("pages");
    tables[1].extend(1).expect("pages");
    let row = |sequence: usize, index: usize, of: usize| {
        let position = starts[sequence] + index;
        Row::known((position % 50) as u32, position, sequence, index + 1 == of)
    };
    let rows: Vec<Row> = (0..count).map(|index| row(0, index, count)).chain([row(1, 0, 1)]).collect();
    let tables = [&tables[0], &tables[1]];
    let batch = Batch::new(&rows, &tables);
    let (logits, count) = allocations(|| model.forward(&batch).expect("forward"));
    assert_eq!(logits.len(), 2);
    model.reuse(logits);
    count
}

#[test]
fn a_warm_decode_step_allocates_nothing() {
    let folder = parity_folder();
    let mut models = vec![folder.join("qwen3"), folder.join("gemma3")];
    models.extend(parity_gguf("qwen3-q4_0.gguf")); // it says that it is skipped without fixtures
    for (path, kv_type) in models.iter().flat_map(|path| KvType::ALL.map(|kv_type| (path, kv_type))) {
        // With one thread all of the work is this thread's, whose allocations are counted.
        let options = LoadOptions { device: Device::Cpu(cpu(1)), dtype: None, kv_type, ..exact() };
        let mut model = load_model(path, &options).expect("loads").model;
        let pool = page_pool(&*model, 16);
        let mut tables = [PageTable::new(&pool), PageTable::new(&pool)];
        let first = step(&mut *model, &mut tables, 2 * PAGE_TOKENS + 1);
        assert!(first > 0, "the first step has memory to make");
        step(&mut *model, &mut tables, 1);
        for _ in 0..20 {
            assert_eq!(step(&mut *model, &mut tables, 1), 0, "{path:?} {}", kv_type.name());
        }
    }
}
