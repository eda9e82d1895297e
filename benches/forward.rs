//! Steps of a whole model on the CPU: `cargo bench --bench forward -- MODEL.gguf [threads=N] [pp=N,N] [depth=N,N] [kv=TYPE] [steps=N]`.
//!
//! `pp` computes a prompt of that many tokens in steps of 512, `depth` generates behind that many tokens of KV, which are
//! imported rather than computed. Medians over `steps` steps (a fifth as many prompts). Speed does not depend on values, so
//! a model with random weights serves. Machines differ from minute to minute: compare runs that took turns.
#![allow(clippy::print_stdout, reason = "a benchmark's product is its table")]

use std::time::Instant;

use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::kv::{NO_PAGE, PAGE_TOKENS, PagePool, PageRef, PageTable};
use llmctl_models::load;
use llmctl_models::load::{CpuOptions, Device, ImageUse, KvType, LoadOptions, PredictionUse};
use llmctl_models::model::{Batch, Model, Row};

/// Rows of a step of a prompt.
const STEP: usize = 512;

struct Options {
    model: String,
    threads: usize,
    prompts: Vec<usize>,
    depths: Vec<usize>,
    kv_type: KvType,
    steps: usize,
}

fn options() -> Options {
    let mut options = Options {
        model: String::new(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        prompts: vec![512],
        depths: vec![0, 2048, 8192],
        kv_type: KvType::F16,
        steps: 20,
    };
    let numbers = |list: &str| -> Vec<usize> {
        list.split(',').filter(|n| !n.is_empty()).map(|n| n.parse().expect("a number")).collect()
    };
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        match arg.split_once('=') {
            Some(("threads", n)) => options.threads = n.parse().expect("threads=N"),
            Some(("pp", list)) => options.prompts = numbers(list),
            Some(("depth", list)) => options.depths = numbers(list),
            Some(("steps", n)) => options.steps = n.parse().expect("steps=N"),
            Some(("kv", name)) => {
                options.kv_type = KvType::ALL.into_iter().find(|kv| kv.name() == name).expect("kv=TYPE");
            }
            _ => options.model = arg,
        }
    }
    options
}

/// Appends tokens in one step, with logits of the last; the time it took in seconds.
fn feed(model: &mut dyn Model, table: &mut PageTable, count: usize) -> f64 {
    let start = table.len();
    table.extend(count).expect("pages");
    let row = |index: usize| {
        let position = start + index;
        let token = (position * 7919 % 997) as u32;
        Row::known(token, position, 0, index + 1 == count)
    };
    let rows: Vec<Row> = (0..count).map(row).collect();
    let began = Instant::now();
    let logits = model.forward(&Batch::new(&rows, &[table])).expect("forward");
    model.reuse(logits);
    began.elapsed().as_secs_f64()
}

/// A table of `depth` tokens whose keys and values came from nowhere: f16 or f32 numbers of moderate size.
fn filled(model: &mut dyn Model, pool: &PagePool, depth: usize) -> PageTable {
    let mut table = PageTable::new(pool);
    table.extend(depth).expect("pages");
    let groups = model.spec().groups.clone();
    for (group, facts) in groups.iter().enumerate() {
        // Bytes that are numbers below 1 in f16, f32 and 8-bit blocks alike.
        let bytes: Vec<u8> =
            (0..facts.page_bytes).map(|at| if at % 2 == 1 { 0x2c } else { (at * 37 / 2) as u8 }).collect();
        let pages: Vec<_> = table.page_ids(group).filter(|page| *page != NO_PAGE).collect();
        for page in pages {
            model.import_page(PageRef { group, page }, bytes.clone().into()).expect("import");
        }
    }
    table
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let Options { model, threads, prompts, depths, kv_type, steps } = options();
    let options = LoadOptions {
        device: Device::Cpu(CpuOptions::new(threads)),
        dtype: None,
        quantize: None,
        context: None,
        kv_type,
        kv_memory: None,
        available_memory: None,
        packed: None,
        prediction: PredictionUse::Never,
        images: ImageUse::default(),
        adapters: Vec::new(),
    };
    let source = ModelSource::Gguf(model.clone().into());
    let resolved = Resolved::new(model.clone(), source);
    let mut loaded = load::load(&resolved, &options, &mut |_, _| ()).expect("loads");
    let model = &mut *loaded.model;
    let deepest = depths.iter().chain(&prompts).max().copied().unwrap_or(0) + 2 * steps + STEP;
    let groups = model.spec().groups.clone();
    let page_bytes: usize = groups.iter().map(|group| group.page_bytes).sum();
    let pool = PagePool::new(&groups, deepest.div_ceil(PAGE_TOKENS) * page_bytes);
    for depth in depths {
        let mut table = filled(model, &pool, depth);
        feed(model, &mut table, 1);
        let times: Vec<f64> = (0..steps).map(|_| feed(model, &mut table, 1)).collect();
        println!("tg@{depth} {:.2}", 1.0 / median(times));
    }
    for prompt in prompts {
        let whole = |model: &mut dyn Model| {
            let mut table = PageTable::new(&pool);
            let chunks = (0..prompt).step_by(STEP).map(|start| STEP.min(prompt - start));
            chunks.map(|count| feed(model, &mut table, count)).sum::<f64>()
        };
        let times: Vec<f64> = (0..steps.div_ceil(5)).map(|_| whole(model)).collect();
        println!("pp{prompt} {:.1}", prompt as f64 / median(times));
    }
}
