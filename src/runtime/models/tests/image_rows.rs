//! Decoders over image rows: the reference's own rows, positions and logits, of the checkpoints in `vision` of the shared fixtures.

use std::ops::Range;
use std::path::Path;

use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::images::{ImageKey, ImageRows, ImageSpan, angles_of};
use llmctl_models::kv::{PagePool, PageTable};
use llmctl_models::load::{self, CpuOptions, Device, Dtype, Isa, KvType, LoadOptions};
use llmctl_models::model::{Batch, BatchImage, Model, Row};
use serde_json::Value;

#[path = "../vision/fixtures.rs"]
mod fixtures;

use fixtures::{Golden, folder, largest_difference};

/// Checkpoints, and whether the rows of an image see each other.
const FAMILIES: [(&str, bool); 17] = [
    ("gemma3", true),
    ("gemma4", true),
    ("gemma4-e", false),
    ("gemma4-moe", true),
    ("gemma4-unified", true),
    ("glm4.1v", false),
    ("idefics3", false),
    ("internvl3", false),
    ("lfm2-vl", false),
    ("ministral3", false),
    ("mistral3", false),
    ("qwen2.5-vl", false),
    ("qwen3-vl", false),
    ("qwen3-vl-moe", false),
    ("qwen3.5", false),
    ("qwen3.5-moe", false),
    ("smolvlm", false),
];

/// A prompt with what the reference computed.
struct Prompt {
    name: String,
    ids: Vec<u32>,
    spans: Vec<ImageSpan>,
    /// The rows of all its images.
    rows: ImageRows,
    is_mrope: bool,
    /// Position numbers, `[3, ids]`; empty for other families.
    numbers: Vec<u32>,
    positions: Vec<usize>,
    /// `[positions, vocab]`.
    logits: Vec<f32>,
}

fn prompt(golden: &Golden, name: &str, facts: &Value) -> Prompt {
    let tensor = |part: &str| format!("prompt/{name}/{part}");
    let numbers = golden.integers(&tensor("position_ids"));
    let is_mrope = !numbers.is_empty();
    let width = golden.shape(&tensor("image_rows")).map_or(1, |shape| shape[1]);
    let embeddings = golden.floats(&tensor("image_rows"));
    let deep = golden.floats(&tensor("deepstack"));
    let deep = deep.chunks(embeddings.len().max(1)).map(<[f32]>::to_vec).collect();
    let mut first = 0;
    let ranges: Vec<[usize; 2]> = serde_json::from_value(facts["image_spans"].clone()).unwrap();
    let span = |(index, [start, end]): (usize, [usize; 2])| {
        let image = facts["images"][index].as_str().unwrap_or_default();
        let grid = match golden.integers(&format!("image/{image}/image_grid_thw")).as_slice() {
            [1, rows, columns] if is_mrope => [rows / 2, columns / 2],
            _ => [1, (end - start) as u32],
        };
        first += end - start;
        ImageSpan { rows: start..end, key: ImageKey([0; 32]), first: first + start - end, grid }
    };
    Prompt {
        name: name.to_owned(),
        ids: golden.integers(&tensor("ids")),
        spans: ranges.into_iter().enumerate().map(span).collect(),
        rows: ImageRows { width, embeddings, deep },
        is_mrope,
        numbers,
        positions: golden.integers(&tensor("positions")).into_iter().map(|at| at as usize).collect(),
        logits: golden.floats(&tensor("logits")),
    }
}

fn prompts(folder: &Path) -> Vec<Prompt> {
    let golden = Golden::read(folder);
    let prompts = fixtures::prompts(folder);
    let has_logits = |(name, _): &(&String, &Value)| golden.shape(&format!("prompt/{name}/logits")).is_some();
    prompts.iter().filter(has_logits).map(|(name, facts)| prompt(&golden, name, facts)).collect()
}

fn loaded(resolved: Resolved, threads: usize, isa: Isa) -> Box<dyn Model> {
    let options = LoadOptions {
        device: Device::Cpu(CpuOptions { isa, ..CpuOptions::new(threads) }),
        dtype: Some(Dtype::F32),
        kv_type: KvType::F32,
        ..LoadOptions::default()
    };
    load::load(&resolved, &options, &mut |_, _| ()).unwrap().model
}

fn model(folder: &Path, threads: usize, isa: Isa) -> Box<dyn Model> {
    loaded(Resolved::new("tiny".to_owned(), ModelSource::Folder(folder.to_owned())), threads, isa)
}

/// Loads the GGUF form of a checkpoint with its mmproj file, both by llama.cpp's converter.
fn gguf_model(folder: &Path) -> Box<dyn Model> {
    let family = folder.file_name().unwrap().to_str().unwrap();
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/vision-gguf");
    let mmproj = [folder.join("mmproj-F32.gguf"), ours.join(format!("{family}-mmproj-f32.gguf"))];
    let source = ModelSource::Gguf(ours.join(format!("{family}-bf16.gguf")));
    let mmproj = mmproj.into_iter().find(|path| path.exists());
    loaded(Resolved { mmproj, ..Resolved::new(family.to_owned(), source) }, 2, llmctl_kernel::isa::isa())
}

/// Whether logits of all rows are wanted, or of those whose logits are stored.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    All,
    Stored,
}

/// A way to feed a prompt.
#[derive(Clone, Copy)]
struct Feed {
    is_two_way: bool,
    /// Rows per step; spans of two-way images stay whole.
    chunk: usize,
    wanted: Wanted,
    /// True if each step also has a row of another sequence.
    has_company: bool,
}

impl Prompt {
    /// Returns the steps' positions.
    fn steps(&self, feed: Feed) -> Vec<Range<usize>> {
        let (mut steps, mut start) = (Vec::new(), 0);
        while start < self.ids.len() {
            let mut end = (start + feed.chunk).min(self.ids.len());
            let cut = |span: &&ImageSpan| feed.is_two_way && span.rows.start < end && end < span.rows.end;
            end = self.spans.iter().find(cut).map_or(end, |span| span.rows.end);
            steps.push(start..end);
            start = end;
        }
        steps
    }

    fn row(&self, feed: Feed, position: usize, angles: [u32; 3]) -> Row {
        let wants = feed.wanted == Wanted::All || self.positions.contains(&position);
        let span = self.spans.iter().find(|span| feed.is_two_way && span.rows.contains(&position));
        // No placeholder need have an embedding.
        let is_image = self.spans.iter().any(|span| span.rows.contains(&position));
        let token = if is_image { u32::MAX } else { self.ids[position] };
        let visible = span.map_or(position + 1, |span| span.rows.end);
        Row { angles, visible, ..Row::known(token, position, 0, wants) }
    }

    /// Returns the images of a step.
    fn images(&self, step: &Range<usize>) -> Vec<BatchImage<'_>> {
        let part = |span: &ImageSpan| {
            let rows = span.rows.start.max(step.start)..span.rows.end.min(step.end);
            (rows.start < rows.end).then(|| BatchImage {
                first: span.first + rows.start - span.rows.start,
                rows: rows.start - step.start..rows.end - step.start,
                embeddings: &self.rows,
            })
        };
        self.spans.iter().filter_map(part).collect()
    }

    /// Returns the logits at the stored positions.
    fn compute(&self, model: &mut dyn Model, feed: Feed) -> Vec<f32> {
        let groups = &model.spec().groups;
        let pool = PagePool::new(groups, groups.iter().map(|group| 64 * group.page_bytes).sum());
        let [mut table, mut company] = [(); 2].map(|()| PageTable::new(&pool));
        let mut logits = Vec::new();
        for step in self.steps(feed) {
            extend(model, &mut table, step.len());
            let angles = angles_of(&self.spans, self.is_mrope, step.clone());
            let mut rows: Vec<Row> =
                step.clone().zip(angles).map(|(at, angles)| self.row(feed, at, angles)).collect();
            if feed.has_company {
                extend(model, &mut company, 1);
                rows.push(Row::known(7, company.len() - 1, 1, true));
            }
            let batch = Batch {
                rows: &rows,
                tables: &[&table, &company],
                images: &self.images(&step),
                adapters: &[],
            };
            let computed = model.forward(&batch).unwrap();
            let wanted = rows.iter().filter(|row| row.wants_logits).enumerate();
            for (index, row) in wanted.filter(|(_, row)| row.sequence == 0) {
                if self.positions.contains(&row.position) {
                    logits.extend_from_slice(computed.row(index));
                }
            }
        }
        logits
    }
}

fn extend(model: &mut dyn Model, table: &mut PageTable, count: usize) {
    for copy in table.extend(count).expect("enough pages") {
        model.copy_page(copy.from, copy.to).unwrap();
    }
}

#[test]
fn logits_are_the_references() {
    let Some(folder) = folder() else { return };
    let mut wrong = Vec::new();
    for (family, is_two_way) in FAMILIES {
        let folder = folder.join(family);
        let models = [model(&folder, 2, llmctl_kernel::isa::isa()), gguf_model(&folder)];
        for (form, mut model) in ["folder", "gguf"].into_iter().zip(models) {
            for prompt in prompts(&folder) {
                let feed = Feed { is_two_way, chunk: 128, wanted: Wanted::All, has_company: false };
                let worst = largest_difference(&prompt.compute(&mut *model, feed), &prompt.logits);
                if worst >= 1e-3 {
                    wrong.push(format!("{family} {form} {}: {worst}", prompt.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn position_numbers_are_the_references() {
    let Some(folder) = folder() else { return };
    for family in ["qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "qwen2.5-vl", "glm4.1v"] {
        let prompts = prompts(&folder.join(family));
        assert!(prompts.iter().any(|prompt| prompt.is_mrope && prompt.spans.len() > 1), "{family}");
        for prompt in prompts.iter().filter(|prompt| prompt.is_mrope) {
            let len = prompt.ids.len();
            for (at, numbers) in angles_of(&prompt.spans, true, 0..len).enumerate() {
                let stored = [0, 1, 2].map(|axis| prompt.numbers[axis * len + at]);
                assert_eq!(numbers, stored, "{family} {} at {at}", prompt.name);
            }
        }
    }
}

#[test]
fn steps_company_threads_and_instruction_sets_change_no_bit() {
    let Some(folder) = folder() else { return };
    for (family, is_two_way) in FAMILIES {
        let folder = folder.join(family);
        let whole = Feed { is_two_way, chunk: usize::MAX, wanted: Wanted::All, has_company: false };
        let chosen = |prompt: &Prompt| ["two", "adjacent", "second_turn"].contains(&prompt.name.as_str());
        let prompts: Vec<Prompt> = prompts(&folder).into_iter().filter(chosen).collect();
        let mut models = vec![model(&folder, 2, Isa::Scalar), model(&folder, 1, llmctl_kernel::isa::isa())];
        models.extend(Isa::available().filter(|isa| *isa != Isa::Scalar).map(|isa| model(&folder, 2, isa)));
        for prompt in prompts {
            let expected = prompt.compute(&mut *models[0], whole);
            let same = |model: &mut Box<dyn Model>, feed: Feed, what: &str| {
                let got = prompt.compute(&mut **model, feed);
                let are_same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(got.len() == expected.len() && are_same, "{family} {}: {what}", prompt.name);
            };
            for model in &mut models {
                same(model, Feed { wanted: Wanted::Stored, ..whole }, "narrowed");
            }
            let model = &mut models[1];
            for chunk in [1, 5, 17] {
                same(model, Feed { chunk, ..whole }, "in steps");
                same(model, Feed { chunk, wanted: Wanted::Stored, ..whole }, "narrowed in steps");
                same(model, Feed { chunk, wanted: Wanted::Stored, has_company: true, ..whole }, "in company");
            }
        }
    }
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let Some(folder) = folder() else { return };
    let folder = folder.join("qwen3-vl");
    let mut model = model(&folder, 1, llmctl_kernel::isa::isa());
    let groups = &model.spec().groups;
    let pool = PagePool::new(groups, groups.iter().map(|group| 4 * group.page_bytes).sum());
    let mut table = PageTable::new(&pool);
    extend(&mut *model, &mut table, 4);
    let rows: Vec<Row> = (0..4).map(|position| Row::known(1, position, 0, true)).collect();
    let image =
        |width: usize, count: usize| ImageRows { width, embeddings: vec![0.5; width * count], deep: vec![] };
    let width = prompts(&folder).iter().map(|prompt| prompt.rows.width).max().unwrap();
    let mut refused = |embeddings: &ImageRows, rows_of_image: Range<usize>, first| {
        let images = [BatchImage { rows: rows_of_image, embeddings, first }];
        model.forward(&Batch { rows: &rows, tables: &[&table], images: &images, adapters: &[] }).is_err()
    };
    assert!(!refused(&image(width, 2), 1..3, 0));
    assert!(refused(&image(width + 1, 2), 1..3, 0), "another width");
    assert!(refused(&image(width, 2), 1..3, 1), "too few rows");
    assert!(refused(&image(width, 2), 3..5, 0), "outside the step");
    assert!(
        refused(&ImageRows { deep: vec![vec![0.0; width]], ..image(width, 2) }, 1..3, 0),
        "deep rows lack"
    );
}
