//! Speed of a model through the engine, for `benches/side_by_side.py`: commands on stdin, a JSON line for each on stdout.
//!
//! `cargo run --release --example throughput -- MODEL.gguf [threads=N] [threads-batch=N] [cpu=SET] [ctx=N] [packed=FOLDER]`, then
//!
//! ```text
//! prefill N         one prompt of N random tokens
//! decode N D        N tokens after about D; the first call for a D computes them, later ones go on from there
//! batch N B         B sequences of 128 tokens that generate N each together
//! memory            peak resident memory so far
//! ```
//!
//! `throughput limits [threads=N]` prints read bandwidth and int8 peak of this minute instead, in a process of its own,
//! because it takes memory. Rates are tokens per second as llama-bench defines them. `llmctl bench` measures the same; this stays
//! for the script, which has both programs take turns command by command without loading a model for each.
#![allow(clippy::print_stdout, reason = "a benchmark's product is its numbers")]

#[path = "../benches/common/limits.rs"]
#[allow(dead_code, reason = "shared with benches/kernels.rs")]
mod limits;

use std::collections::HashMap;
use std::io::BufRead;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc;
use std::time::Instant;

use llmctl_engine::{Engine, EngineClient, EngineConfig, EngineSessionName, Event, Limits, Outcome, Request};
use llmctl_hub::{ModelSource, Resolved};
use llmctl_kernel::pool::Pool;
use llmctl_models::load;
use llmctl_models::load::{
    CpuOptions, Device, Isa, KvType, LoadOptions, PanelPlace, PredictionUse, kernels_name,
};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

/// Prompt tokens of a sequence in a batch.
const BATCH_PROMPT: usize = 128;

/// Sequences of a batch, at most.
const MAX_SEQUENCES: usize = 32;

struct Options {
    model: String,
    cpu: CpuOptions,
    context: usize,
    packed: Option<PanelPlace>,
}

fn options() -> Result<Options, Failure> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("which model?")?;
    let mut options = Options { model, cpu: CpuOptions::new(2), context: 4096, packed: None };
    let mut threads_batch = None;
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or("KEY=VALUE")?;
        match key {
            "threads" => options.cpu.threads = value.parse()?,
            "threads-batch" => threads_batch = Some(value.parse()?),
            "ctx" => options.context = value.parse()?,
            "packed" => {
                let folder = value.into();
                options.packed = Some(PanelPlace { folder, limit_bytes: u64::MAX, least_bytes: 0 });
            }
            "cpu" => {
                let named = Isa::available().find(|isa| isa.name() == value);
                options.cpu.isa = named.ok_or("this processor has no such instruction set")?;
            }
            _ => return Err(format!("{key} is no option").into()),
        }
    }
    options.cpu.threads_batch = threads_batch.unwrap_or(options.cpu.threads);
    Ok(options)
}

/// A loaded model and what is known of it between commands.
struct Bench {
    engine: EngineClient,
    random: u64,
    /// Tokens so far of the sequence at each depth.
    depths: HashMap<usize, Vec<u32>>,
}

impl Bench {
    fn load(options: &Options) -> Result<Bench, Failure> {
        let source = ModelSource::Gguf(Path::new(&options.model).into());
        let resolved = Resolved::new(options.model.clone(), source);
        let load_options = LoadOptions {
            images: load::ImageUse::default(),
            device: Device::Cpu(options.cpu),
            dtype: None,
            quantize: None,
            context: Some(options.context),
            kv_type: KvType::F16,
            kv_memory: None,
            available_memory: None,
            packed: options.packed.clone(),
            adapters: Vec::new(),
            prediction: PredictionUse::Never,
        };
        let loaded = load::load(&resolved, &load_options, &mut |_, _| ())?;
        let mut config = EngineConfig::new(options.context, Vec::new());
        // As llama.cpp's micro-batch, so that both see the same shapes.
        config.step_tokens = 512;
        config.max_running = MAX_SEQUENCES;
        config.max_sessions = MAX_SEQUENCES;
        let (model, vocabulary) = (loaded.model, loaded.texts.tokenizer);
        let engine = EngineClient::spawn(move || Engine::new(model, vocabulary, config))?;
        Ok(Bench { engine, random: 0x9e37_79b9, depths: HashMap::new() })
    }

    /// Other tokens at every call: the same ones would find their rows again.
    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let vocab = self.engine.spec().vocab_size() as u64;
        let mut next = || {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((self.random >> 33) % vocab) as u32
        };
        (0..count).map(|_| next()).collect()
    }

    /// Runs one request to its end; gives what was generated too.
    fn finish(
        &self,
        prompt: Vec<u32>,
        count: usize,
        session: Option<EngineSessionName>,
    ) -> Result<(Outcome, Vec<u32>), Failure> {
        let stream = self.engine.submit(request(prompt, count, session))?;
        let mut generated = Vec::new();
        for event in stream {
            match event {
                Event::Text { tokens, .. } => generated.extend(tokens.iter().map(|token| token.id)),
                Event::Done(outcome) => return Ok((outcome, generated)),
                Event::Failed(error) => return Err(error.into()),
                Event::Queued { .. }
                | Event::Started(_)
                | Event::Encoding { .. }
                | Event::Prefill { .. }
                | Event::Prompt { .. } => {}
            }
        }
        Err("the engine went away".into())
    }

    fn prefill(&mut self, count: usize) -> Result<Value, Failure> {
        let prompt = self.tokens(count);
        let (outcome, _) = self.finish(prompt, 1, None)?;
        Ok(json!({"rate": outcome.timings.prefill_rate(&outcome.usage)}))
    }

    fn decode(&mut self, count: usize, depth: usize) -> Result<Value, Failure> {
        let session = Some(EngineSessionName::scoped("depth", depth));
        let mut prompt = match self.depths.remove(&depth) {
            Some(tokens) => tokens,
            None => {
                let prompt = self.tokens(depth.max(1));
                self.finish(prompt.clone(), 1, session.clone())?;
                prompt
            }
        };
        prompt.extend(self.tokens(1));
        // The first token belongs to the prompt.
        let (outcome, generated) = self.finish(prompt.clone(), count + 1, session)?;
        let reused = outcome.usage.cached_tokens;
        if reused + 4 < prompt.len() {
            return Err(format!("only {reused} of {} tokens were kept", prompt.len()).into());
        }
        prompt.extend(generated);
        self.depths.insert(depth, prompt);
        Ok(json!({"rate": outcome.timings.decode_rate(&outcome.usage)}))
    }

    /// Counts tokens from when the last sequence has its first one to when the first sequence has its last one.
    fn batch(&mut self, count: usize, sequences: usize) -> Result<Value, Failure> {
        let (sender, events) = mpsc::channel();
        for index in 0..sequences {
            let request = request(self.tokens(BATCH_PROMPT), count + 8, None);
            let sender = sender.clone();
            self.engine.submit_to(
                request,
                Box::new(move |event| {
                    let tokens = if let Event::Text { tokens, .. } = &event { tokens.len() } else { 0 };
                    let failed = if let Event::Failed(error) = event { Some(error) } else { None };
                    let _ = sender.send((Instant::now(), index, tokens, failed));
                    ControlFlow::Continue(())
                }),
            )?;
        }
        drop(sender);
        let mut times: Vec<Vec<Instant>> = vec![Vec::new(); sequences];
        for (time, index, tokens, failed) in events {
            if let Some(error) = failed {
                return Err(error.into());
            }
            times[index].extend(std::iter::repeat_n(time, tokens));
        }
        let start = times.iter().filter_map(|times| times.first()).max().ok_or("no tokens")?;
        let end = times.iter().filter_map(|times| times.last()).min().ok_or("no tokens")?;
        let counted = times.iter().flatten().filter(|time| *time > start && *time <= end).count();
        Ok(json!({"rate": counted as f64 / (*end - *start).as_secs_f64()}))
    }

    fn run(&mut self, command: &str) -> Result<Value, Failure> {
        let mut words = command.split_whitespace();
        let name = words.next().unwrap_or_default();
        let numbers = words.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        match (name, &numbers[..]) {
            ("prefill", &[count]) => self.prefill(count),
            ("decode", &[count, depth]) => self.decode(count, depth),
            ("batch", &[count, sequences @ 1..=MAX_SEQUENCES]) => self.batch(count, sequences),
            ("memory", []) => Ok(json!({"peak_rss_mib": peak_rss_mib()?})),
            _ => Err(format!("{command:?} is no command").into()),
        }
    }
}

fn request(prompt: Vec<u32>, count: usize, session: Option<EngineSessionName>) -> Request {
    let limits = Limits { max_tokens: Some(count), ignore_eos: true, ..Limits::default() };
    Request { prompt, limits, session, ..Request::default() }
}

fn limits(threads: usize) -> Result<Value, Failure> {
    let pool = Pool::new(threads)?;
    let buffer = vec![1u64; 32 << 20];
    let middle = |measure: &dyn Fn() -> f64| {
        let mut values: Vec<f64> = (0..5).map(|_| measure()).collect();
        values.sort_by(f64::total_cmp);
        values[2]
    };
    let read = middle(&|| limits::read_bandwidth(&pool, &buffer));
    Ok(json!({"read_gb_s": read, "int8_gop_s": middle(&|| limits::int8_peak(&pool))}))
}

fn peak_rss_mib() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
}

fn main() -> Result<(), Failure> {
    let start = Instant::now();
    let options = options()?;
    if options.model == "limits" {
        println!("{}", limits(options.cpu.threads)?);
        return Ok(());
    }
    let mut bench = Bench::load(&options)?;
    let prompt = bench.tokens(8);
    bench.finish(prompt, 1, None)?;
    let ready = json!({
        "ready_s": start.elapsed().as_secs_f64(),
        "peak_rss_mib": peak_rss_mib()?,
        "instruction_set": options.cpu.isa.name(),
        "products": kernels_name(options.cpu.isa),
    });
    println!("{ready}");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = bench.run(&line).unwrap_or_else(|error| json!({"error": error.to_string()}));
        println!("{answer}");
    }
    Ok(())
}
