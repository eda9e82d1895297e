//! Cost of the process boundary per token: the same requests, alternating, to an engine in this process and to one in a worker
//! process, through the same code.
//!
//! `cargo run --release --example boundary -- MODEL [llmctl=PATH] [threads=N] [ctx=N] [prompt=N] [tokens=N] [streams=N] [rounds=N]`
//!
//! A round is here, there, here; its cost is what "there" takes more than the mean of the two beside it, and what these two differ
//! by is the noise. Time counts where an answer arrives: from its first token to its last, at the sink of its events. One JSON
//! object on stdout has the medians over all rounds, in microseconds per token. `streams` requests run together, and a token is
//! one of any of them. Both engines hold the model; its file is mapped, so that they share its pages.
#![allow(clippy::print_stdout, reason = "a benchmark's product is its numbers")]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use llmctl_engine::worker::process::Launch;
use llmctl_engine::worker::remote::Timeouts;
use llmctl_engine::{Engine, EngineClient, EngineConfig, Event, Limits, Request};
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::load;
use llmctl_models::load::{CpuOptions, Device, KvType, LoadOptions, PredictionUse, kernels_name};
use serde_json::json;

type Failure = Box<dyn std::error::Error>;

struct Options {
    model: PathBuf,
    llmctl: PathBuf,
    threads: usize,
    context: usize,
    num_prompt: usize,
    num_tokens: usize,
    num_streams: usize,
    num_rounds: usize,
}

fn options() -> Result<Options, Failure> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("which model?")?.into();
    // Examples lie beside the program that they are built with.
    let beside = std::env::current_exe()?.parent().and_then(Path::parent).map(|folder| folder.join("llmctl"));
    let mut options = Options {
        model,
        llmctl: beside.ok_or("where is llmctl?")?,
        threads: 2,
        context: 2048,
        num_prompt: 64,
        num_tokens: 128,
        num_streams: 1,
        num_rounds: 9,
    };
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or("KEY=VALUE")?;
        match key {
            "llmctl" => options.llmctl = value.into(),
            "threads" => options.threads = value.parse()?,
            "ctx" => options.context = value.parse()?,
            "prompt" => options.num_prompt = value.parse()?,
            "tokens" => options.num_tokens = value.parse()?,
            "streams" => options.num_streams = value.parse()?,
            "rounds" => options.num_rounds = value.parse()?,
            _ => return Err(format!("{key} is no option").into()),
        }
    }
    if options.num_tokens < 2
        || options.num_rounds == 0
        || options.num_streams == 0
        || options.num_prompt == 0
    {
        return Err("nothing to measure".into());
    }
    Ok(options)
}

fn here(options: &Options) -> Result<EngineClient, Failure> {
    let path = options.model.clone();
    let source = if path.is_dir() { ModelSource::Folder(path) } else { ModelSource::Gguf(path) };
    let resolved = Resolved::new(options.model.display().to_string(), source);
    let load_options = LoadOptions {
        images: load::ImageUse::default(),
        device: Device::Cpu(CpuOptions::new(options.threads)),
        dtype: None,
        quantize: None,
        context: Some(options.context),
        kv_type: KvType::default(),
        kv_memory: None,
        available_memory: None,
        packed: None,
        adapters: Vec::new(),
        prediction: PredictionUse::Never,
    };
    let loaded = load::load(&resolved, &load_options, &mut |_, _| ())?;
    let alone = EngineConfig::new(options.context, Vec::new());
    let config = EngineConfig {
        max_running: options.num_streams,
        max_sessions: options.num_streams,
        step_tokens: alone.step_tokens.max(8 * options.num_streams), // as a worker's
        ..alone
    };
    let (model, vocabulary) = (loaded.model, loaded.texts.tokenizer);
    Ok(EngineClient::spawn(move || Engine::new(model, vocabulary, config))?)
}

fn there(options: &Options) -> Result<EngineClient, Failure> {
    let (threads, context) = (options.threads.to_string(), options.context.to_string());
    let parallel = options.num_streams.to_string();
    let flags = ["--threads", &threads, "--ctx", &context, "--parallel", &parallel, "--kv-disk", "0", "-q"];
    let model = ["worker".into(), "--model".into(), options.model.clone().into_os_string()];
    let minute = Duration::from_secs(60);
    let launch = Launch {
        program: options.llmctl.clone(),
        args: model.into_iter().chain(flags.map(Into::into)).collect(),
        secrets: Vec::new(),
        memory: None,
        nice: None,
        timeouts: Timeouts { start: 5 * minute, answer: minute },
        on_stderr_line: Arc::new(|_| ()),
    };
    Ok(EngineClient::new(launch.start()?))
}

/// Microseconds per token.
fn measure(engine: &EngineClient, options: &Options, round: usize) -> Result<f64, Failure> {
    let (sender, events) = mpsc::channel();
    for stream in 0..options.num_streams {
        let sender = sender.clone();
        let deliver = move |event| match sender.send((Instant::now(), stream, event)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        engine.submit_to(request(engine, options, round, stream), Box::new(deliver))?;
    }
    drop(sender);
    let mut times: Vec<Vec<Instant>> = vec![Vec::new(); options.num_streams];
    for (time, stream, event) in events {
        match event {
            Event::Text { tokens, .. } => times[stream].extend(tokens.iter().map(|_| time)),
            Event::Failed(error) => return Err(error.into()),
            Event::Queued { .. }
            | Event::Started(_)
            | Event::Encoding { .. }
            | Event::Prefill { .. }
            | Event::Prompt { .. }
            | Event::Done(_) => {}
        }
    }
    // While all of them run.
    let start = times.iter().filter_map(|times| times.first()).max().ok_or("no tokens")?;
    let end = times.iter().filter_map(|times| times.last()).min().ok_or("no tokens")?;
    let count = times.iter().flatten().filter(|time| *time > start && *time <= end).count();
    if count == 0 {
        return Err("the requests did not run together".into());
    }
    Ok((*end - *start).as_secs_f64() * 1e6 / count as f64)
}

/// Another prompt for each, so that none finds the rows of one before it; the same in both engines.
fn request(engine: &EngineClient, options: &Options, round: usize, stream: usize) -> Request {
    let num_known = engine.spec().vocab_size() as u64;
    let mut random = (round * options.num_streams + stream + 1) as u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((random >> 33) % num_known) as u32
    };
    let prompt = (0..options.num_prompt).map(|_| next()).collect();
    let limits = Limits { max_tokens: Some(options.num_tokens), ignore_eos: true, ..Limits::default() };
    Request { prompt, limits, ..Request::default() }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

fn main() -> Result<(), Failure> {
    let options = options()?;
    let (here, there) = (here(&options)?, there(&options)?);
    for engine in [&here, &there] {
        measure(engine, &options, options.num_rounds * 2)?; // what is slow once
    }
    let (mut inside, mut outside, mut costs, mut noise) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.num_rounds {
        let before = measure(&here, &options, 2 * round)?;
        let worker = measure(&there, &options, 2 * round)?;
        let after = measure(&here, &options, 2 * round + 1)?;
        let beside = (before + after) / 2.0;
        inside.push(beside);
        outside.push(worker);
        costs.push(worker - beside);
        noise.push((after - before).abs());
    }
    let (beside, cost) = (median(&inside), median(&costs));
    println!(
        "{}",
        json!({
            "model": options.model, "kernels": kernels_name(CpuOptions::new(options.threads).isa), "threads": options.threads,
            "streams": options.num_streams, "tokens": options.num_tokens, "rounds": options.num_rounds,
            "in_process_us": beside, "worker_us": median(&outside), "cost_us": cost,
            "cost_percent": 100.0 * cost / beside, "noise_us": median(&noise),
        })
    );
    Ok(())
}
