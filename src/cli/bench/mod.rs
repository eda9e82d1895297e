//! `llmctl bench`: how fast, by the way that users take, with how much doubt.
//!
//! Flags, wiring and printing; what is measured, and what is made of it, is `llmctl_bench`. `engine` loads
//! models, `compare` and `serve` are the subcommands.

mod compare;
mod engine;
pub mod serve;

use std::collections::{BTreeSet, HashSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use clap::{Args, Subcommand};
use indicatif::ProgressBar;

use super::error::{CommandError, Exit, Kind};
use super::terminal::Terminal;
use crate::cli::flags::args::{
    DEVICES, DTYPES, DeviceArg, FetchArgs, FlagValue, INSTRUCTION_SETS, KV_TYPES, LoraFile, ModelArgs,
    QUANTIZED, RemoteArgs, SPECULATIONS, count, one_of,
};
use crate::cli::model::load;
use crate::cli::terminal::output::{Output, OutputError};
use crate::cli::terminal::report::{print, stdout_width};
use crate::cli::terminal::signal::Graceful;
use engine::Recipe;
use llmctl_bench::engine::{Around, EngineSubject};
use llmctl_bench::plan::{self, Case, CaseSweep, SessionTest};
use llmctl_bench::record::{BenchSetting, Build, CaseResult, Document, SCHEMA};
use llmctl_bench::report::{self, BenchFormat};
use llmctl_bench::runner::{self, BenchObserver, BenchSubject, Halt, Rounds};
use llmctl_bench::{BenchError, machine, plot, validity};
use llmctl_engine::Speculation;
use llmctl_hub::Aliases;
use llmctl_models::load::{Dtype, Isa, KvType, model_facts};

/// Measure speed, and how far to trust the figures
///
/// Through the same engine that `run` uses. Names and definitions of tests are llama-bench's: pp512 is a prompt of 512
/// tokens, tg128 generates 128 tokens one by one, @d2048 has 2048 tokens before it, x8 is eight sequences at once.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP, args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,

    /// Models: .gguf files, folders, org/repo[:QUANT][@REVISION] or aliases
    #[arg(long, short, value_name = "REF", value_delimiter = ',')]
    pub model: Vec<String>,

    #[command(flatten)]
    pub remote: RemoteArgs,

    #[command(flatten)]
    pub fetch: FetchArgs,

    #[command(flatten)]
    pub tests: TestArgs,

    #[command(flatten)]
    pub engine: EngineSweepArgs,

    #[command(flatten)]
    pub output: BenchOutputArgs,

    /// Model aliases of the configuration files; set after parsing.
    #[arg(skip)]
    pub aliases: Aliases,
}

const SESSION_TESTS: [FlagValue<SessionTest>; 5] = [
    ("warm", SessionTest::Warm, "The second turn of a session that is in memory"),
    ("restore", SessionTest::Restore, "The second turn after a restart, from KV on disk"),
    ("fork", SessionTest::Fork, "Sessions forked from one that is in memory, all at once"),
    ("shared", SessionTest::Shared, "Sessions that begin with the same system prompt, all at once"),
    (
        "agent",
        SessionTest::Agent,
        "A coding agent's first question after a restart: 20,000 tokens of system prompt and tools from KV on disk",
    ),
];

const FORMATS: [FlagValue<BenchFormat>; 5] = [
    ("table", BenchFormat::Table, "For people"),
    ("json", BenchFormat::Json, "One object with every measured value, at the end"),
    ("jsonl", BenchFormat::Jsonl, "A line for each measurement as it comes"),
    ("csv", BenchFormat::Csv, "A row per case"),
    ("md", BenchFormat::Md, "A Markdown table in the form of llama-bench"),
];

/// Other actions of `bench`.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    Serve(Box<serve::BenchServeArgs>),
    Compare(compare::CompareArgs),
}

/// Flags that choose the measurements; lists are separated by commas.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tests")]
pub struct TestArgs {
    /// Prompt lengths; 0 measures none
    #[arg(long, short = 'p', value_name = "N", value_delimiter = ',', default_value = "512")]
    pub n_prompt: Vec<usize>,

    /// Numbers of tokens to generate; 0 measures none
    #[arg(long, short = 'n', value_name = "N", value_delimiter = ',', default_value = "128")]
    pub n_gen: Vec<usize>,

    /// A prompt of P tokens and G generated ones as one test; may be repeated
    #[arg(long, value_name = "P,G", value_parser = plan::pair)]
    pub pg: Vec<(usize, usize)>,

    /// Depths: tokens that lie in the KV cache before a test begins
    #[arg(long, short = 'd', value_name = "N", value_delimiter = ',', default_value = "0")]
    pub n_depth: Vec<usize>,

    /// Sequences at once
    #[arg(long, short = 'b', value_name = "N", value_delimiter = ',', default_value = "1",
          value_parser = count(1..=1024))]
    pub sequences: Vec<usize>,

    /// Savings by sessions: time to the first token of a turn behind -p tokens that are in memory or on disk
    #[arg(long, value_name = "TEST", value_delimiter = ',', value_parser = one_of(&SESSION_TESTS))]
    pub sessions: Vec<SessionTest>,

    /// New tokens of that turn
    #[arg(long, value_name = "N", default_value = "32", hide_short_help = true, value_parser = count(1..))]
    pub turn: usize,

    /// Repetitions of every test
    #[arg(long, short = 'r', value_name = "N", default_value = "5", value_parser = count(1..=10_000))]
    pub repetitions: usize,

    /// Count the first run of every test too
    #[arg(long, hide_short_help = true)]
    pub no_warmup: bool,

    /// Do not measure what the machine can do at most, which takes two seconds before and after
    #[arg(long, hide_short_help = true)]
    pub no_probe: bool,

    /// Seed of the random prompts
    #[arg(long, value_name = "N", default_value = "1", hide_short_help = true)]
    pub seed: u64,
}

/// Flags of loading models; lists are separated by commas, and every combination is measured.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineSweepArgs {
    /// Threads to compute with (default: one for each performance core)
    #[arg(long, short = 't', value_name = "N", value_delimiter = ',', value_parser = count(1..=1024))]
    pub threads: Vec<usize>,

    /// Threads for prompts and large batches (default: as --threads)
    #[arg(long, value_name = "N", value_delimiter = ',', hide_short_help = true,
          value_parser = count(1..=1024))]
    pub threads_batch: Vec<usize>,

    /// Type of the KV cache (default: f16)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', value_parser = one_of(&KV_TYPES))]
    pub kv_type: Vec<KvType>,

    /// Quantise the weights while loading
    #[arg(long, value_name = "TYPE", value_delimiter = ',', value_parser = one_of(&QUANTIZED), conflicts_with = "dtype")]
    pub quantize: Vec<Dtype>,

    /// Type of the weights in memory (default: as they are in the file)
    #[arg(long, value_name = "TYPE", value_delimiter = ',', value_parser = one_of(&DTYPES), hide_short_help = true)]
    pub dtype: Vec<Dtype>,

    /// Instruction set of the CPU kernels (default: the best that the processor has)
    #[arg(long, value_name = "SET", value_delimiter = ',', value_parser = one_of(&INSTRUCTION_SETS), hide_short_help = true)]
    pub cpu: Vec<Isa>,

    /// Device to compute on (default: auto)
    #[arg(long, value_name = "DEVICE", value_parser = one_of(&DEVICES), hide_short_help = true)]
    pub device: Option<DeviceArg>,

    /// Most tokens in one step (default: as for `run`)
    #[arg(long, value_name = "N", value_delimiter = ',', hide_short_help = true,
          value_parser = count(1..=65_536))]
    pub step_tokens: Vec<usize>,

    /// Speculative decoding: where draft tokens come from (default: off, because a test's text is made up; auto with
    /// --draft-model)
    #[arg(long, value_name = "FROM", value_parser = one_of(&SPECULATIONS), hide_short_help = true)]
    pub speculate: Option<Speculation>,

    /// Draft model for speculative decoding, with the vocabulary of each --model
    #[arg(long, value_name = "REF", hide_short_help = true)]
    pub draft_model: Option<String>,

    /// LoRA adapter to measure each --model with, beside the model alone (repeatable: one at a time)
    #[arg(long, value_name = "FILE[=SCALE]", hide_short_help = true)]
    pub lora: Vec<LoraFile>,

    /// Context size in tokens (default: what the largest test needs)
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = count(2..))]
    pub ctx: Option<usize>,
}

impl EngineSweepArgs {
    fn speculation(&self) -> Speculation {
        let usual = if self.draft_model.is_some() { Speculation::Auto } else { Speculation::Off };
        self.speculate.unwrap_or(usual)
    }
}

/// Destinations of results.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub struct BenchOutputArgs {
    /// Format of stdout
    #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = one_of(&FORMATS))]
    pub output: BenchFormat,

    /// Write all results to this JSON file too, after every measurement
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,

    /// Draw charts (SVG) into this folder
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,

    /// Compare with this result, and exit with 1 if something is slower beyond noise
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,

    /// Largest change that is no regression, however certain, in percent
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = compare::not_negative, requires = "baseline", hide_short_help = true)]
    pub threshold: f64,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

/// Runs the subcommand.
pub fn run(args: BenchArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    match &args.command {
        None => run_engines(&args, terminal),
        Some(BenchCommand::Compare(compare)) => compare::run(compare),
        Some(BenchCommand::Serve(given)) => {
            let mut given = given.clone();
            given.aliases = args.aliases.clone();
            // Only the parent command knows the configuration's model.
            if given.target.own {
                given.target.model = given.target.model.or_else(|| args.model.first().cloned());
            }
            serve::run(&given, terminal)
        }
    }
}

fn run_engines(args: &BenchArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    let tests = &args.tests;
    check_machine(&args.engine)?;
    let cases = plan::cases(&CaseSweep {
        prompts: tests.n_prompt.clone(),
        generated: tests.n_gen.clone(),
        pairs: tests.pg.clone(),
        depths: tests.n_depth.clone(),
        sequences: tests.sequences.clone(),
        sessions: tests.sessions.clone(),
        turn: tests.turn,
    })?;
    let recipes = recipes(args, &cases, terminal)?;
    let outlook = Outlook::new(&args.output, terminal)?;
    let graceful = Graceful::begin();
    let mut document = new_document();
    let mut output = Output::stdout();
    let threads = probed_threads(args, &recipes);
    // The bar has nothing to show before the first case, and this takes seconds.
    terminal.status("measuring what the machine can do");
    for &threads in &threads {
        document.machine.probes.push(machine::probe(threads)?);
    }
    terminal.status("");
    machine::forget_peak(Path::new("/"));
    let before = machine::Counters::read(Path::new("/"));
    let around = Around {
        interrupted: &|| graceful.received(),
        scratch: std::env::temp_dir(),
        start: Instant::now(),
        rounds: tests.repetitions + usize::from(!tests.no_warmup),
        seed: tests.seed,
    };
    let bar = terminal.bar(0, "{bar:30} {pos}/{len} {eta} left, {msg}");
    let mut run = BenchRun { args, terminal, document: &mut document, output: &mut output, bar };
    let ended = run.measure(&recipes, &cases, &around);
    run.bar.finish_and_clear();
    document.complete = matches!(ended, Ok(None));
    document.machine.peak_memory = machine::peak_memory(Path::new("/"));
    let after = machine::Counters::read(Path::new("/"));
    document.machine.load = before.zip(after).map(|(before, after)| before.until(&after));
    if document.complete {
        terminal.status("measuring what the machine can do, once more");
        for &threads in &threads {
            document.machine.probes.push(machine::probe(threads)?);
        }
        terminal.status("");
    }
    drop(output);
    // Report a failure after what was measured before it.
    let judged = outlook.conclude(&mut document);
    let signal = ended?;
    Ok(signal.map_or(judged?, Exit::Signal))
}

/// Applies [`load::check_machine`] to all combinations of the sweep.
fn check_machine(sweep: &EngineSweepArgs) -> Result<(), CommandError> {
    let asked = |cpu| ModelArgs { cpu, device: sweep.device, ..ModelArgs::default() };
    load::check_machine(&asked(None))?;
    sweep.cpu.iter().try_for_each(|&cpu| load::check_machine(&asked(Some(cpu))))
}

/// Output of a document: judges, saves, prints, draws and compares it.
struct Outlook<'a> {
    args: &'a BenchOutputArgs,
    terminal: &'a Terminal,
    baseline: Option<Document>,
}

impl<'a> Outlook<'a> {
    /// Reads the baseline before anything is measured.
    ///
    /// # Errors
    /// Those of reading the baseline.
    fn new(args: &'a BenchOutputArgs, terminal: &'a Terminal) -> Result<Self, CommandError> {
        let baseline = args.baseline.as_deref().map(llmctl_bench::compare::read).transpose()?;
        Ok(Self { args, terminal, baseline })
    }

    /// Returns `Failure` if the baseline was better beyond noise.
    fn conclude(&self, document: &mut Document) -> Result<Exit, CommandError> {
        validity::conclude(document);
        if let Some(path) = &self.args.save {
            document.save(path)?;
        }
        print(&report::render(document, self.args.output, stdout_width()))?;
        if matches!(self.args.output, BenchFormat::Csv | BenchFormat::Md) {
            document.warnings.iter().for_each(|warning| self.terminal.warn(warning)); // they have no place for them
        }
        if let Some(folder) = &self.args.plot {
            for name in plot::write(document, folder)? {
                self.terminal.note(format!("wrote {name}"));
            }
        }
        match &self.baseline {
            Some(baseline) if document.complete => self.judge(baseline, document),
            _ => Ok(Exit::Success),
        }
    }

    /// Prints the verdict, to stderr if stdout is for programs.
    fn judge(&self, baseline: &Document, document: &Document) -> Result<Exit, CommandError> {
        let first = self.args.baseline.as_deref().unwrap_or(Path::new("")).display().to_string();
        let threshold = self.args.threshold / 100.0;
        let compared = llmctl_bench::compare::compared(baseline, document, "this run", threshold)?;
        let text = llmctl_bench::compare::text(&first, &compared, stdout_width());
        match self.args.output {
            BenchFormat::Table | BenchFormat::Md => drop(print(&format!("\n{text}"))?),
            BenchFormat::Json | BenchFormat::Jsonl | BenchFormat::Csv => {
                self.terminal.report(text.trim_end())
            }
        }
        Ok(compare::exit(&[compared]))
    }
}

/// Returns the engines of a sweep.
///
/// # Errors
/// A usage error if a case needs more context than the model has; those of finding a model.
fn recipes(args: &BenchArgs, cases: &[Case], terminal: &Terminal) -> Result<Vec<Recipe>, CommandError> {
    let is_remote = !args.remote.engine.is_empty();
    check_remote(args, is_remote)?;
    let mut models: Vec<(ModelArgs, String, usize)> = Vec::new();
    let nothing_given = [None];
    let given: Vec<_> = args.model.iter().cloned().map(Some).collect();
    for reference in if given.is_empty() { &nothing_given[..] } else { &given } {
        let model = ModelArgs {
            model: reference.clone(),
            draft_model: args.engine.draft_model.clone(),
            remote: args.remote.clone(),
            fetch: args.fetch.clone(),
            aliases: args.aliases.clone(),
            ..ModelArgs::default()
        };
        let resolved = load::resolve(&model, terminal)?;
        let most = match is_remote {
            true => engine::remote_context(&model, terminal)?,
            false => model_facts(&resolved.source)?.decoder?.context_length,
        };
        let context = context(args, cases, &resolved.name, most)?;
        // Files with equal names are labelled by their full argument.
        let is_taken = models.iter().any(|(_, name, _)| *name == resolved.name);
        let name = if is_taken { reference.clone().unwrap_or_default() } else { resolved.name };
        models.push((model, name, context));
    }
    let depths: HashSet<_> = cases.iter().map(|case| case.depth).filter(|&depth| depth > 0).collect();
    let recipe = |(model, name, context)| Recipe {
        model: ModelArgs { ctx: Some(context), device: args.engine.device, ..model },
        name,
        step_tokens: None,
        speculation: args.engine.speculation(),
        context,
        sequences: cases.iter().map(|case| case.sequences).max().unwrap_or(1),
        depths: depths.len(),
    };
    let sweep = &args.engine;
    let recipes = models.into_iter().map(recipe).collect();
    let alone = (!sweep.lora.is_empty()).then_some(None);
    let adapters: Vec<_> = alone.into_iter().chain(sweep.lora.iter().cloned().map(Some)).collect();
    let recipes = each(recipes, &adapters, |recipe, adapter| {
        let names = adapter.iter().filter_map(|LoraFile(file)| file.path.file_stem());
        names.for_each(|name| recipe.name += &format!(" + {}", name.display()));
        recipe.model.lora = adapter.into_iter().collect();
    });
    let recipes = each(recipes, &sweep.quantize, |recipe, value| recipe.model.quantize = Some(value));
    let recipes = each(recipes, &sweep.dtype, |recipe, value| recipe.model.dtype = Some(value));
    let recipes = each(recipes, &sweep.kv_type, |recipe, value| recipe.model.kv_type = Some(value));
    let recipes = each(recipes, &sweep.cpu, |recipe, value| recipe.model.cpu = Some(value));
    let recipes = each(recipes, &sweep.threads, |recipe, value| recipe.model.threads = Some(value));
    let recipes =
        each(recipes, &sweep.threads_batch, |recipe, value| recipe.model.threads_batch = Some(value));
    Ok(each(recipes, &sweep.step_tokens, |recipe, value| recipe.step_tokens = Some(value)))
}

/// Refuses what cannot be measured of an engine elsewhere.
fn check_remote(args: &BenchArgs, is_remote: bool) -> Result<(), CommandError> {
    if is_remote && !args.tests.sessions.is_empty() {
        let message = "--sessions measures KV in memory and on disk here, and --engine has its own elsewhere";
        return Err(CommandError::usage(message));
    }
    if is_remote && !args.engine.step_tokens.is_empty() {
        return Err(CommandError::usage("--step-tokens: the remote engine of --engine decides that"));
    }
    Ok(())
}

/// Combines every recipe with every value; without values the recipes stay as they are.
fn each<V: Clone>(recipes: Vec<Recipe>, values: &[V], set: impl Fn(&mut Recipe, V)) -> Vec<Recipe> {
    if values.is_empty() {
        return recipes;
    }
    let with = |recipe: &Recipe, value: &V| {
        let mut recipe = recipe.clone();
        set(&mut recipe, value.clone());
        recipe
    };
    recipes.iter().flat_map(|recipe| values.iter().map(move |value| with(recipe, value))).collect()
}

/// Returns the tokens that a sequence has room for.
fn context(args: &BenchArgs, cases: &[Case], model: &str, most: usize) -> Result<usize, CommandError> {
    let largest = cases.iter().max_by_key(|case| case.context()).expect("there is a case");
    let needed = largest.context();
    let (limit, whose) = match args.engine.ctx {
        Some(ctx) if ctx < needed => (ctx, "--ctx is".to_owned()),
        _ if needed > most => (most, format!("{model} was made for")),
        asked => return Ok(asked.unwrap_or(needed)),
    };
    let message = format!("{} needs a context of {needed} tokens, and {whose} {limit}", largest.name());
    Err(CommandError::usage(message).hint("measure at a smaller depth (-d), or shorter prompts (-p)"))
}

/// Returns the numbers of threads to probe.
fn probed_threads(args: &BenchArgs, recipes: &[Recipe]) -> Vec<usize> {
    if args.tests.no_probe || !args.remote.engine.is_empty() {
        return Vec::new();
    }
    let default = llmctl_base::machine::default_threads();
    let threads: BTreeSet<_> = recipes.iter().map(|recipe| recipe.model.threads.unwrap_or(default)).collect();
    threads.into_iter().collect()
}

/// Describes this program.
fn build() -> Build {
    Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        // Set by the release recipe; a plain `cargo build` does not know it.
        commit: option_env!("LLMCTL_COMMIT").map(str::to_owned),
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
    }
}

fn new_document() -> Document {
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Document {
        schema: SCHEMA.to_owned(),
        build: build(),
        command: std::env::args().skip(1).collect(),
        started: started.as_secs(),
        machine: machine::facts(Path::new("/")),
        ..Document::default()
    }
}

/// A run in progress.
struct BenchRun<'a> {
    args: &'a BenchArgs,
    terminal: &'a Terminal,
    document: &'a mut Document,
    output: &'a mut Output<std::io::StdoutLock<'static>>,
    bar: ProgressBar,
}

impl BenchRun<'_> {
    /// Measures all cases on all engines, in turns if they fit into memory together. Returns the signal that ended it early, if any.
    fn measure(
        &mut self,
        recipes: &[Recipe],
        cases: &[Case],
        around: &Around<'_>,
    ) -> Result<Option<u8>, CommandError> {
        let error = match open(recipes, around, self.terminal) {
            Ok(engines) => return Ok(self.take_turns(engines, cases)?),
            Err(Halt::Interrupted(signal)) => return Ok(Some(signal)),
            Err(Halt::Failed(error)) => CommandError::from(error),
        };
        if error.kind != Kind::Temporary || recipes.len() == 1 {
            return Err(error);
        }
        self.terminal.note(format!(
            "the engines do not fit into memory together ({error}): they are measured one after the other"
        ));
        for recipe in recipes {
            if let Some(signal) = self.measure(std::slice::from_ref(recipe), cases, around)? {
                return Ok(Some(signal));
            }
        }
        Ok(None)
    }

    fn take_turns(
        &mut self,
        mut engines: Vec<EngineSubject<'_>>,
        cases: &[Case],
    ) -> Result<Option<u8>, BenchError> {
        self.document.models.extend(engines.iter().map(|engine| engine.facts().clone()));
        if self.args.output.output == BenchFormat::Jsonl {
            let _ = self.say(&report::first_line(self.document))?; // a closed stdout is noticed at the first sample
        }
        let mut subjects: Vec<&mut dyn BenchSubject> =
            engines.iter_mut().map(|engine| engine as &mut dyn BenchSubject).collect();
        let rounds = Rounds { repetitions: self.args.tests.repetitions, warm_up: !self.args.tests.no_warmup };
        let mut results = std::mem::take(&mut self.document.cases);
        let ended = runner::run(&mut subjects, cases, rounds, &mut results, self);
        self.document.cases = results;
        ended
    }

    /// Prints a line. Breaks if stdout was closed, unless the run is saved.
    fn say(&mut self, line: &str) -> Result<ControlFlow<()>, CommandError> {
        match self.output.write(line) {
            Err(OutputError::Closed) if self.args.output.save.is_none() => Ok(ControlFlow::Break(())),
            Ok(()) | Err(OutputError::Closed) => Ok(ControlFlow::Continue(())),
            Err(OutputError::Failed(error)) => Err(error),
        }
    }
}

impl BenchObserver for BenchRun<'_> {
    fn next(&mut self, case: &Case, setting: &BenchSetting, done: usize, total: usize) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(format!("{} with {} threads", case.name(), setting.threads));
    }

    fn measured(&mut self, results: &[CaseResult], index: usize) -> Result<ControlFlow<()>, BenchError> {
        if let Some(path) = &self.args.output.save {
            let so_far = Document { cases: results.to_vec(), ..self.document.clone() };
            so_far.save(path)?;
        }
        match self.args.output.output {
            BenchFormat::Jsonl => Ok(self.say(&report::sample_line(&results[index]))?),
            _ => Ok(ControlFlow::Continue(())),
        }
    }
}

/// Loads all models. A signal ends it between two of them.
fn open<'a>(
    recipes: &'a [Recipe],
    around: &'a Around<'a>,
    terminal: &'a Terminal,
) -> Result<Vec<EngineSubject<'a>>, Halt> {
    let mut engines = Vec::new();
    for recipe in recipes {
        if let Some(signal) = (around.interrupted)() {
            return Err(Halt::Interrupted(signal));
        }
        let start = move |disk: Option<&Path>| Ok(engine::start(recipe, disk, terminal)?);
        engines.push(EngineSubject::open(Box::new(start), around)?);
    }
    Ok(engines)
}
