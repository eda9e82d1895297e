//! Checks and measures a GPU, for `.ci/cuda device-run`: one section per run, one line of JSON on stdout.
//!
//! ```text
//! device parity DEVICE      the checkpoints of tests/parity against their references, the quantised ones against the CPU
//! device models DEVICE      small models with heads and types of the kernels against the CPU
//! device sessions DEVICE    interleaved sequences against each alone, and sequences of one step
//! device restore DEVICE     pages that are saved and read by another model
//! device kernels DEVICE     kernels against their references
//! device products DEVICE    speed of products, beside candle's
//! device speed DEVICE SHAPE prompts and decoding of 0.6b, 8b or 30b-a3b
//! ```
//!
//! DEVICE is `cuda` or `cpu`, which is candle's CPU device: a rehearsal, with small shapes. The exit code is 1 if a check fails.
#![allow(clippy::print_stdout, reason = "the results are this program's product")]

mod kernels;
mod shapes;

use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use llmctl_hub::{ModelSource, Resolved};
use llmctl_kernel::Dtype;
use llmctl_models::backend::KvType;
use llmctl_models::backend::candle::{Candle, DeviceKind, open_device};
use llmctl_models::backend::cpu::Cpu;
use llmctl_models::kv::{NO_PAGE, PagePool, PageRef, PageTable};
use llmctl_models::load::{self, AskedTask, CpuOptions, LoadOptions, Pooling, PredictionUse};
use llmctl_models::model::{Batch, Model, Row, TextIds};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use shapes::{SHAPES, SMALL, Shape};

type Failure = Box<dyn std::error::Error>;

/// Logits of float models, absolute: ten times the bound of the parity table, for a GPU's order of sums.
const LOGITS: f32 = 1e-3;
/// Logits of quantised models relative to the CPU backend's: candle rounds the input of products of more than eight rows.
const BLOCK_LOGITS: f32 = 8e-2;

const NO_PAGES: &str = "no page is free";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = run(&args).unwrap_or_else(|error| json!({ "ok": false, "error": error.to_string() }));
    let mut line = json!({ "section": args.join(" ") });
    result.as_object().into_iter().flatten().for_each(|(key, value)| line[key] = value.clone());
    println!("{line}");
    std::process::exit(i32::from(line["ok"] != json!(true)));
}

fn run(args: &[&str]) -> Result<Value, Failure> {
    let [section, device, rest @ ..] = args else { return Err("device SECTION cuda|cpu [SHAPE]".into()) };
    let kind = match *device {
        "cuda" => DeviceKind::Cuda(0),
        "cpu" => DeviceKind::Cpu,
        _ => return Err(format!("no device {device} (cuda, cpu)").into()),
    };
    let (device, is_rehearsal) = (open_device(kind)?, kind == DeviceKind::Cpu);
    match (*section, rest) {
        ("parity", []) => parity(kind),
        ("models", []) => models(&device),
        ("sessions", []) => sessions(&device),
        ("restore", []) => restore(&device),
        ("kernels", []) => kernels::check(&device),
        ("products", []) if is_rehearsal => kernels::measure(&device, [64, 512], 1),
        ("products", []) => kernels::measure(&device, [4096, 14_336], 20),
        ("speed", [name]) => {
            let shape = SHAPES.into_iter().find(|shape| shape.name == *name).ok_or("0.6b, 8b or 30b-a3b")?;
            let small = SMALL[usize::from(shape.name == "30b-a3b")];
            speed(&device, if is_rehearsal { small } else { shape }, is_rehearsal)
        }
        _ => Err(format!("no section {section} {rest:?}").into()),
    }
}

fn cpu() -> Result<Cpu, Failure> {
    Ok(Cpu::new(std::thread::available_parallelism().map_or(2, usize::from))?)
}

/// Returns room for sequences of `num_pages` pages together.
fn pool(model: &dyn Model, num_pages: usize) -> PagePool {
    let groups = &model.spec().groups;
    PagePool::new(groups, groups.iter().map(|group| num_pages * group.page_bytes).sum())
}

/// Appends tokens to sequences in one step; returns the logits of every row, or of each sequence's last.
fn step(
    model: &mut dyn Model,
    sequences: &mut [(&mut PageTable, &[u32])],
    wants_all: bool,
) -> Result<Vec<Vec<f32>>, Failure> {
    let mut rows = Vec::new();
    for (sequence, (table, tokens)) in sequences.iter_mut().enumerate() {
        let start = table.len();
        for copy in table.extend(tokens.len()).map_err(|_| NO_PAGES)? {
            model.copy_page(copy.from, copy.to)?;
        }
        let row = |(index, token): (usize, &u32)| {
            Row::known(*token, start + index, sequence, wants_all || index + 1 == tokens.len())
        };
        rows.extend(tokens.iter().enumerate().map(row));
    }
    let tables: Vec<&PageTable> = sequences.iter().map(|(table, _)| &**table).collect();
    let logits = model.forward(&Batch::new(&rows, &tables))?;
    Ok((0..logits.len()).map(|row| logits.row(row).to_vec()).collect())
}

/// Feeds one sequence in chunks; returns the logits of every token.
fn feed(model: &mut dyn Model, tokens: &[u32], chunk: usize) -> Result<Vec<f32>, Failure> {
    let mut table = PageTable::new(&pool(model, 64));
    let mut all = Vec::new();
    for chunk in tokens.chunks(chunk) {
        all.extend(step(model, &mut [(&mut table, chunk)], true)?.concat());
    }
    Ok(all)
}

/// Returns the larger difference; a NaN stays the result, where `f32::max` would drop it.
fn worse(worst: f32, one: f32) -> f32 {
    if one <= worst || worst.is_nan() { worst } else { one }
}

/// Returns the largest difference; not a number if one is.
fn largest(got: &[f32], expected: &[f32]) -> f32 {
    let differences = got.iter().zip(expected).map(|(got, expected)| (got - expected).abs());
    let most = differences.fold(0.0, worse);
    if got.len() == expected.len() { most } else { f32::NAN }
}

/// Returns the root mean square of the difference, relative to that of what was expected.
fn relative(got: &[f32], expected: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>();
    let difference = squares(&mut got.iter().zip(expected).map(|(got, expected)| got - expected));
    let own = squares(&mut expected.iter().copied());
    if got.len() == expected.len() { (difference / own).sqrt() } else { f32::NAN }
}

fn resolved(path: &Path) -> Resolved {
    let source =
        if path.is_dir() { ModelSource::Folder(path.into()) } else { ModelSource::Gguf(path.into()) };
    Resolved::new(path.display().to_string(), source)
}

fn options(device: load::Device, dtype: Option<Dtype>) -> LoadOptions {
    let prediction = PredictionUse::Never;
    LoadOptions { device, dtype, kv_type: KvType::F32, prediction, ..LoadOptions::default() }
}

fn load_file(path: &Path, device: load::Device, dtype: Option<Dtype>) -> Result<Box<dyn Model>, Failure> {
    Ok(load::load(&resolved(path), &options(device, dtype), &mut |_, _| ())?.model)
}

fn paths_in(folder: &str) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>()?;
    paths.sort();
    Ok(paths)
}

fn parity(kind: DeviceKind) -> Result<Value, Failure> {
    let (mut differences, mut refused, mut wrong) = (json!({}), json!({}), Vec::new());
    for path in paths_in("tests/parity")?.into_iter().filter(|path| path.join("golden.safetensors").exists())
    {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match load_file(&path, load::Device::Candle(kind), Some(Dtype::F32)) {
            Err(error) => refused[&name] = json!(error.to_string().lines().next()),
            Ok(mut model) => match golden_difference(&mut *model, &path) {
                Ok(worst) if worst <= LOGITS => differences[&name] = json!(worst),
                Ok(worst) => wrong.push(format!("{name}: {worst:e}")),
                Err(error) => wrong.push(format!("{name}: {error}")),
            },
        }
    }
    for path in paths_in("tests/parity-gguf")? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with("-q8_0.gguf") && !name.ends_with("-q4_0.gguf") {
            continue;
        }
        let Ok(mut model) = load_file(&path, load::Device::Candle(kind), None) else { continue };
        let mut own = load_file(&path, load::Device::Cpu(CpuOptions::new(2)), Some(Dtype::F32))?;
        let tokens: Vec<u32> = (0..60).map(|index| index * 7 % 300 + 3).collect();
        let expected = feed(&mut *own, &tokens, 60)?;
        let found =
            [1, 60].map(|chunk| feed(&mut *model, &tokens, chunk).map(|got| relative(&got, &expected)));
        let [single, whole] = found;
        let (single, whole) = (single?, whole?);
        differences[&name] = json!([single, whole]);
        if !(single <= BLOCK_LOGITS && whole <= BLOCK_LOGITS) {
            wrong.push(format!("{name}: {single:e} row by row, {whole:e} at once"));
        }
    }
    // `.ci/cuda device` puts encoders there if it has some; decoders read texts too.
    let mut readers = paths_in("target/device/encoders").unwrap_or_default();
    readers.extend(["qwen3", "gemma3"].map(|name| Path::new("tests/parity").join(name)));
    for path in readers {
        let name = format!("texts by {}", path.file_name().unwrap_or_default().to_string_lossy());
        match text_difference(kind, &path) {
            Ok(difference) if difference <= LOGITS => differences[&name] = json!(difference),
            Ok(difference) => wrong.push(format!("{name}: {difference:e}")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    let ok = wrong.is_empty() && differences.as_object().is_some_and(|all| all.len() > 20);
    Ok(json!({ "ok": ok, "wrong": wrong, "refused": refused, "differences": differences }))
}

/// Returns the difference of the hidden states of texts, some of them pairs, from the CPU backend's.
fn text_difference(kind: DeviceKind, path: &Path) -> Result<f32, Failure> {
    let encode = |device| -> Result<Vec<f32>, Failure> {
        let (asked, options) = (Some(AskedTask::Pooling(Pooling::Mean)), options(device, Some(Dtype::F32)));
        let mut model = load::load_embedder(&resolved(path), asked, &options, &mut |_, _| ())?.model;
        let texts = [1, 9, 60, 200].map(|len| tokens(len, model.spec().vocab_size, len));
        let texts: Vec<TextIds<'_>> =
            texts.iter().map(|ids| TextIds { ids, second: ids.len().div_ceil(2) }).collect();
        let mut hidden = Vec::new();
        model.encode(&texts, &mut hidden)?;
        Ok(hidden)
    };
    Ok(relative(&encode(load::Device::Candle(kind))?, &encode(load::Device::Cpu(CpuOptions::new(2)))?))
}

/// Returns the largest difference of logits from the stored ones, of all prompts in one step, in chunks, and row by row.
fn golden_difference(model: &mut dyn Model, folder: &Path) -> Result<f32, Failure> {
    let bytes = std::fs::read(folder.join("golden.safetensors"))?;
    let tensors = SafeTensors::deserialize(&bytes)?;
    let integers = |name: &str| -> Result<Vec<usize>, Failure> {
        let tensor = tensors.tensor(name)?;
        let width = tensor.data().len() / tensor.shape()[0];
        let integer =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte));
        Ok(tensor.data().chunks(width).map(integer).collect())
    };
    let mut worst = 0f32;
    for prompt in ["short", "medium", "long"] {
        let tokens: Vec<u32> =
            integers(&format!("{prompt}.tokens"))?.into_iter().map(|token| token as u32).collect();
        let positions = integers(&format!("{prompt}.positions"))?;
        let stored = tensors.tensor(&format!("{prompt}.logits"))?.data().to_vec();
        let stored: Vec<f32> =
            stored.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        for chunk in [usize::MAX, 7, 1] {
            let logits = feed(model, &tokens, chunk)?;
            let vocab = logits.len() / tokens.len();
            let got: Vec<f32> =
                positions.iter().flat_map(|at| logits[at * vocab..][..vocab].to_vec()).collect();
            let difference = largest(&got, &stored);
            worst = worse(worst, difference);
        }
    }
    Ok(worst)
}

fn tokens(count: usize, vocab: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|index| ((index + seed) * 7919 % (vocab - 7)) as u32).collect()
}

fn models(device: &Device) -> Result<Value, Failure> {
    let (mut differences, mut ok) = (json!({}), true);
    for shape in SMALL {
        let tokens = tokens(150, shape.vocab, 0);
        let expected = feed(&mut shape.load(cpu()?, KvType::F32)?, &tokens, 150)?;
        for (chunk, kv_type) in [(150, KvType::F32), (8, KvType::F32), (1, KvType::F32), (1, KvType::F16)] {
            let got = feed(&mut shape.load(Candle::new(device.clone())?, kv_type)?, &tokens, chunk)?;
            let difference = relative(&got, &expected);
            ok &= difference <= BLOCK_LOGITS;
            differences[format!("{} {chunk} rows a step, KV {}", shape.name, kv_type.name())] =
                json!(difference);
        }
    }
    Ok(json!({ "ok": ok, "differences": differences }))
}

/// Compares three sequences that take turns, and that share steps, with each alone.
fn sessions(device: &Device) -> Result<Value, Failure> {
    let (mut ok, mut differences) = (true, json!({}));
    for shape in SMALL {
        let mut model = shape.load(Candle::new(device.clone())?, KvType::F16)?;
        let prompts = [0, 11, 29].map(|seed| tokens(90 + seed, shape.vocab, seed));
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.push(feed(&mut model, prompt, 10)?);
        }
        let pool = pool(&model, 64);
        let mut tables = [(); 3].map(|()| PageTable::new(&pool));
        let mut turns = vec![Vec::new(); 3];
        for at in (0..prompts[2].len()).step_by(10) {
            for (index, prompt) in prompts.iter().enumerate() {
                let chunk = &prompt[at.min(prompt.len())..(at + 10).min(prompt.len())];
                if !chunk.is_empty() {
                    turns[index].extend(step(&mut model, &mut [(&mut tables[index], chunk)], true)?.concat());
                }
            }
        }
        let are_same = alone.iter().zip(&turns).all(|(alone, turns)| largest(alone, turns) == 0.0);
        let mut tables = [(); 3].map(|()| PageTable::new(&pool));
        let mut together = vec![Vec::new(); 3];
        for at in 0..90 {
            let chunks = prompts.iter().map(|prompt| &prompt[at..=at]);
            let mut sequences: Vec<_> = tables.iter_mut().zip(chunks).collect();
            let logits = step(&mut model, &mut sequences, true)?;
            together.iter_mut().zip(logits).for_each(|(all, row)| all.extend(row));
        }
        let worst = alone.iter().zip(&together).map(|(alone, got)| relative(got, &alone[..got.len()]));
        let worst = worst.fold(0.0, worse);
        ok &= are_same && worst <= BLOCK_LOGITS;
        differences[shape.name] = json!({ "turns are the same bits": are_same, "shared steps": worst });
    }
    Ok(json!({ "ok": ok, "differences": differences }))
}

/// Saves the pages of a prompt, reads them into a model loaded anew, and goes on.
fn restore(device: &Device) -> Result<Value, Failure> {
    let mut are_same = true;
    for shape in SMALL {
        let tokens = tokens(100, shape.vocab, 3);
        let (prompt, rest) = tokens.split_at(77);
        let mut model = shape.load(Candle::new(device.clone())?, KvType::F16)?;
        let mut table = PageTable::new(&pool(&model, 64));
        step(&mut model, &mut [(&mut table, prompt)], false)?;
        let mut saved = Vec::new();
        for page in table.page_ids(0).filter(|page| *page != NO_PAGE) {
            let mut bytes = Vec::new();
            model.export_page(PageRef { group: 0, page }, &mut bytes)?;
            saved.push(bytes);
        }
        let expected = step(&mut model, &mut [(&mut table, rest)], true)?;
        drop((table, model));
        let mut model = shape.load(Candle::new(device.clone())?, KvType::F16)?;
        let pool = pool(&model, 64);
        let mut other = PageTable::new(&pool); // so that pages have other numbers than before
        other.extend(40).map_err(|_| NO_PAGES)?;
        let mut table = PageTable::new(&pool);
        table.extend(prompt.len()).map_err(|_| NO_PAGES)?;
        let pages: Vec<u32> = table.page_ids(0).collect();
        for (page, bytes) in pages.into_iter().zip(saved) {
            model.import_page(PageRef { group: 0, page }, bytes.into())?;
        }
        are_same &= step(&mut model, &mut [(&mut table, rest)], true)? == expected;
    }
    Ok(json!({ "ok": are_same }))
}

/// Returns the bytes per second, read and written, of a copy within the device's memory.
fn copy_rate(device: &Device, megabytes: usize) -> Result<f64, Failure> {
    let source = Tensor::zeros(megabytes << 18, DType::F32, device)?;
    let copy = || -> Result<(), Failure> {
        drop(source.force_contiguous()?);
        Ok(())
    };
    copy()?;
    device.synchronize()?;
    let began = Instant::now();
    (0..10).try_for_each(|_| copy())?;
    device.synchronize()?;
    Ok(((20 * megabytes) << 20) as f64 / began.elapsed().as_secs_f64())
}

fn speed(device: &Device, shape: Shape, is_rehearsal: bool) -> Result<Value, Failure> {
    let (prompt, steps, megabytes): (usize, usize, usize) =
        if is_rehearsal { (64, 4, 16) } else { (512, 64, 2048) };
    let copied = copy_rate(device, megabytes)?;
    let began = Instant::now();
    let mut model = shape.load(Candle::new(device.clone())?, KvType::F16)?;
    let loaded = began.elapsed().as_secs_f64();
    let pool = pool(&model, 8 * (prompt + steps).div_ceil(32) + 64);
    let mut tables = [(); 8].map(|()| PageTable::new(&pool));
    let mut prefill = Vec::new();
    for (index, table) in tables.iter_mut().enumerate() {
        let tokens = tokens(prompt, shape.vocab, index);
        let began = Instant::now();
        step(&mut model, &mut [(table, &tokens)], false)?;
        prefill.push(prompt as f64 / began.elapsed().as_secs_f64());
    }
    let mut decode = |count: usize| -> Result<f64, Failure> {
        let mut times = Vec::new();
        for index in 0..steps {
            let token = [(index * 31 % 300) as u32];
            let mut sequences: Vec<_> = tables[..count].iter_mut().map(|table| (table, &token[..])).collect();
            let began = Instant::now();
            step(&mut model, &mut sequences, false)?;
            times.push(began.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(count as f64 / times[times.len() / 2])
    };
    let (one, eight) = (decode(1)?, decode(8)?);
    prefill.sort_by(f64::total_cmp);
    let bytes = shape.bytes_per_token();
    Ok(json!({
        "ok": true, "shape": shape.name, "layers": shape.layers, "load_seconds": loaded, "bytes_per_token": bytes,
        "copy_gigabytes_per_second": copied / 1e9, "prompt_tokens": prompt,
        "prefill_tokens_per_second": prefill[prefill.len() / 2], "decode_1_tokens_per_second": one,
        "decode_8_tokens_per_second": eight, "decode_1_share_of_copy_rate": one * bytes as f64 / copied,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_the_kernels_agree_with_candle() {
        let found = kernels::check(&Device::Cpu).unwrap();
        assert_eq!(found["ok"], json!(true), "{}", found["wrong"]);
        assert_eq!(found["differences"].as_object().unwrap().len(), 54);
        assert!(largest(&[1.0, f32::NAN, 1.0], &[1.0; 3]).is_nan());
    }
}
