//! `serve --isolate` and `--workers`: from flags to worker processes, each with the model and without
//! secrets.
//!
//! Decides which flags a worker gets: all that it knows, with the values in force here from any file or variable. The server's own
//! flags stay here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Args, Command};

use super::ServeArgs;
use super::worker::WorkerArgs;
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags;
use crate::cli::flags::args::{ByteSize, GlobalArgs, TimeSpan, count};
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::bytes;
use llmctl_base::Error;
use llmctl_base::machine::default_threads;
use llmctl_engine::EngineClient;
use llmctl_engine::session::store::ModelFingerprint;
use llmctl_engine::worker::process::{Launch, tells_of_no_memory};
use llmctl_engine::worker::remote::{StartError, Timeouts};
use llmctl_models::memory::{memory_limits, tightest};
use llmctl_serve::engines::engine::{EngineSlot, LONGEST_PAUSE, Recovery};

/// Attempts to reload the model after the engine was lost, and the first pause between two attempts.
pub const RELOAD_ATTEMPTS: u32 = 6;
pub const RELOAD_PAUSE: Duration = Duration::from_secs(2);

/// Time limits for a worker to load its model, and to answer while idle.
const DEFAULT_START: Duration = Duration::from_secs(600);
const DEFAULT_ANSWER: Duration = Duration::from_secs(30);

/// Least memory limit in bytes: the program and its threads need this much without any model.
const LEAST_MEMORY: u64 = 16 << 20;

/// Replaces the worker's program, for tests of misbehaving workers.
const PROGRAM_VARIABLE: &str = "LLMCTL_WORKER_PROGRAM";

/// The model in processes of its own.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Isolation")]
pub struct IsolationArgs {
    /// Compute in a process of its own: the server survives whatever happens there
    ///
    /// A worker that dies or hangs is started again. Requests whose clients have received nothing are repeated, others end with
    /// an error, and sessions continue with their finished turns.
    #[arg(long)]
    pub isolate: bool,

    /// Compute in N processes, each with the model and --parallel requests at a time (default: 1; implies --isolate)
    ///
    /// A session stays with one process; other requests go to the process with the fewest. Weights that are used as they lie
    /// in the file are in memory once. --kv-memory and --threads hold for each process; without --threads, the processor's
    /// threads are divided among them.
    #[arg(long, value_name = "N", value_parser = count(1..=64))]
    pub workers: Option<usize>,

    /// Memory that a worker may reserve for itself, e.g. 8G (default: no limit; Linux)
    ///
    /// Counts KV, packed weights, buffers and stacks (RLIMIT_DATA), not the model's file, which is mapped. KV keeps to it; a worker
    /// that goes beyond it otherwise ends, and is started again. Workers that are limited run with RUST_BACKTRACE=0, because a
    /// backtrace takes memory. The least is 16M, which only the smallest models can do with.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub worker_memory: Option<ByteSize>,

    /// Priority of the workers, -20 to 19, higher gives way (default: the server's)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-20..=19), hide_short_help = true)]
    pub worker_nice: Option<i32>,

    /// Give a worker up that neither answers nor computes for this long (default: 30s)
    ///
    /// One that computes without an answer has ten times as long: it answers between two steps.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub worker_timeout: Option<TimeSpan>,

    /// Give a worker up that has not loaded its model in this time (default: 10m)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub worker_start_timeout: Option<TimeSpan>,

    /// Flags that workers get, too, as they were given; set after parsing.
    #[arg(skip)]
    pub passed: Vec<OsString>,
}

impl IsolationArgs {
    /// Returns the number of workers; `None` if the engine is a thread of the server.
    ///
    /// # Errors
    /// A usage error for flags without effect.
    pub fn num_workers(&self) -> Result<Option<usize>, CommandError> {
        if self.isolate || self.workers.is_some() {
            self.check_limits()?;
            return Ok(Some(self.workers.unwrap_or(1)));
        }
        let others = [
            (self.worker_memory.is_some(), "--worker-memory"),
            (self.worker_nice.is_some(), "--worker-nice"),
            (self.worker_timeout.is_some(), "--worker-timeout"),
            (self.worker_start_timeout.is_some(), "--worker-start-timeout"),
        ];
        match others.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, flag)) => {
                let message = format!("{flag} is for worker processes, and there are none");
                Err(CommandError::usage(message).hint("give --isolate or --workers too"))
            }
            None => Ok(None),
        }
    }

    /// Refuses limits that this system does not have, or that no worker starts with.
    fn check_limits(&self) -> Result<(), CommandError> {
        if self.worker_memory.is_some() && !cfg!(target_os = "linux") {
            return Err(CommandError::usage("--worker-memory: this system has no such limit"));
        }
        if self.worker_nice.is_some() && !cfg!(unix) {
            return Err(CommandError::usage("--worker-nice: this system has no such priorities"));
        }
        match self.worker_memory.filter(|size| size.0 < LEAST_MEMORY) {
            Some(size) => {
                let message = format!("--worker-memory: no worker starts with {}", bytes(size.0));
                Err(CommandError::usage(message).hint(format!("the least is {}", bytes(LEAST_MEMORY))))
            }
            None => Ok(()),
        }
    }
}

/// Starts all workers in parallel and waits until they are ready. Calls `gave_up` when the last of them
/// cannot be restarted.
///
/// # Errors
/// The reason why one of them cannot load; the system's if it cannot start a thread or process.
pub fn start(
    args: &ServeArgs,
    count: usize,
    model: &ModelFingerprint,
    terminal: &Terminal,
    gave_up: impl Fn(String) + Send + Clone + 'static,
) -> Result<Vec<EngineSlot>, CommandError> {
    let begun = Instant::now();
    let launches = launches(args, count, terminal)?;
    let engines: Vec<Result<EngineClient, StartError>> = thread::scope(|scope| {
        let starting: Vec<_> = launches.iter().map(|launch| scope.spawn(|| started(launch, model))).collect();
        let panicked = || StartError::Lost("starting it failed".to_owned());
        starting.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    let num_left = Arc::new(AtomicUsize::new(count));
    let mut slots = Vec::new();
    let mut kv_memory = 0_u64;
    for (number, (engine, launch)) in engines.into_iter().zip(launches).enumerate() {
        let memory = args.isolation.worker_memory;
        let engine = engine.map_err(|error| command_error(number, error, memory))?;
        kv_memory = kv_memory.saturating_add(engine.spec().kv_memory as u64);
        let (model, num_left, gave_up) = (model.clone(), Arc::clone(&num_left), gave_up.clone());
        let terminal = terminal.clone();
        let recovery = Recovery {
            name: format!("worker {number}"),
            rebuild: Box::new(move || {
                started(&launch, &model).map_err(|error| command_error(number, error, memory).to_string())
            }),
            build_time: begun.elapsed(),
            pause: RELOAD_PAUSE,
            longest_pause: LONGEST_PAUSE,
            max_attempts: RELOAD_ATTEMPTS,
            gave_up: Box::new(move |why| match num_left.fetch_sub(1, Ordering::SeqCst) {
                1 => gave_up(why),
                _ => terminal.warn(format!("{why}; the others continue without it")),
            }),
        };
        let slot = EngineSlot::with_recovery(engine, recovery);
        slots.push(slot.map_err(CommandError::io("watching a worker"))?);
    }
    warn_of_kv(kv_memory, args, count, terminal);
    Ok(slots)
}

/// Warns if the workers' KV does not fit together, because each assumes that all free memory is its own.
fn warn_of_kv(kv_memory: u64, args: &ServeArgs, count: usize, terminal: &Terminal) {
    let is_on_cpu = !cfg!(feature = "cuda") && !cfg!(feature = "metal");
    let available = tightest(&memory_limits(Path::new("/"))).map(|limit| limit.available);
    let is_chosen = args.engine.kv_memory.is_some() || args.isolation.worker_memory.is_some();
    if let Some(available) = available.filter(|&available| kv_memory > available)
        && is_on_cpu
        && !is_chosen
        && count > 1
    {
        terminal.warn(format!(
            "the KV of {count} workers may come to {}, and {} are free: --kv-memory limits that of each",
            bytes(kv_memory),
            bytes(available)
        ));
    }
}

/// Starts a worker and checks that it serves this process's model.
fn started(launch: &Launch, model: &ModelFingerprint) -> Result<EngineClient, StartError> {
    let engine = launch.start()?;
    match engine.model().fingerprint == model.fingerprint {
        true => Ok(EngineClient::new(engine)),
        false => {
            Err(StartError::Lost("the files of the model have changed; start the server anew".to_owned()))
        }
    }
}

fn command_error(number: usize, error: StartError, memory: Option<ByteSize>) -> CommandError {
    let error = match (memory.filter(|_| has_run_out(&error)), error) {
        (Some(ByteSize(memory)), error) => {
            let why = format!("{} of --worker-memory are too little to start with: {error}", bytes(memory));
            let hint = "raise --worker-memory, or lower --ctx, --parallel or --threads";
            Kind::Temporary.error(why).hint(hint)
        }
        (None, StartError::Refused(error)) => CommandError::from(error),
        (None, lost @ StartError::Lost(_)) => CommandError::new(Kind::Failure, lost),
    };
    error.context(format!("worker {number}"))
}

/// Returns whether a worker with a memory limit failed for lack of memory. One that died at once could not
/// even report it.
fn has_run_out(error: &StartError) -> bool {
    matches!(error, StartError::Refused(Error::EngineGone)) || tells_of_no_memory(&error.to_string())
}

fn launches(args: &ServeArgs, count: usize, terminal: &Terminal) -> Result<Vec<Launch>, CommandError> {
    let isolation = &args.isolation;
    let program = match std::env::var_os(PROGRAM_VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe().map_err(|error| {
            CommandError::new(Kind::Failure, error).context("finding the program of this process")
        })?,
    };
    let time = |given: Option<TimeSpan>, default: Duration| given.map_or(default, |span| span.0);
    let launch = |number: usize| {
        let terminal = terminal.clone();
        Launch {
            program: program.clone(),
            args: arguments(args, count),
            secrets: std::env::vars_os()
                .map(|(name, _)| name)
                .filter(|name| is_secret(&name.to_string_lossy()))
                .collect(),
            memory: isolation.worker_memory.map(|size| size.0),
            nice: isolation.worker_nice,
            timeouts: Timeouts {
                start: time(isolation.worker_start_timeout, DEFAULT_START),
                answer: time(isolation.worker_timeout, DEFAULT_ANSWER),
            },
            on_stderr_line: Arc::new(move |line| terminal.note(format!("worker {number}: {line}"))),
        }
    };
    Ok((0..count).map(launch).collect())
}

/// Returns whether a variable's name suggests a secret, which no worker needs.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["KEY", "TOKEN", "SECRET", "PASSWORD"]
        .iter()
        .any(|word| name == *word || name.ends_with(&format!("_{word}")))
}

/// Returns the arguments of a worker. What the server changes after the parse comes from `args`, the rest as it was given.
fn arguments(args: &ServeArgs, count: usize) -> Vec<OsString> {
    let share = (count > 1).then(|| (default_threads() / count).max(1));
    let changed = [
        ("model", args.model.model.clone()),
        ("ctx", args.model.ctx.map(|tokens| tokens.to_string())),
        ("threads", args.model.threads.or(share).map(|threads| threads.to_string())),
        ("kv-memory", args.engine.kv_memory.map(|size| size.0.to_string())),
    ];
    let changed = changed.into_iter().filter_map(|(long, value)| Some(flags::word(long, value?)));
    let fixed = ["worker", "--color", "never"].map(OsString::from);
    fixed.into_iter().chain(args.isolation.passed.iter().cloned()).chain(changed).collect()
}

/// Returns the words of all flags that a worker gets as they were given, from the whole command line.
pub fn passed(matches: &ArgMatches) -> Vec<OsString> {
    let own = GlobalArgs::augment_args(WorkerArgs::augment_args(Command::new("worker")));
    let changed = ["color", "model", "ctx", "threads", "kv_memory"];
    let is_same = |arg: &&Arg| !changed.contains(&arg.get_id().as_str());
    own.get_arguments().filter(is_same).flat_map(|arg| flags::words(arg, matches)).collect()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::cli::config::Config;
    use crate::cli::{Cli, CliCommand, complete};

    /// Returns the command that a whole command line is.
    fn command(words: Vec<OsString>) -> CliCommand {
        let matches = Cli::command().try_get_matches_from(words).expect("a good command line");
        let mut cli = Cli::from_arg_matches(&matches).expect("a good command line");
        complete(&mut cli, &matches, &Config::default());
        cli.command
    }

    fn serve(words: &[&str]) -> ServeArgs {
        match command([&["llmctl", "serve"], words].concat().into_iter().map(OsString::from).collect()) {
            CliCommand::Serve(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    /// Returns what the worker parses from the flags that it gets.
    fn worker(words: &[&str], count: usize) -> WorkerArgs {
        let arguments = arguments(&serve(words), count);
        match command([vec![OsString::from("llmctl")], arguments].concat()) {
            CliCommand::Worker(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_worker_is_told_all_that_concerns_it() {
        let words = [
            "--model=-odd name",
            "--draft-model=-smaller one",
            "--speculate=draft",
            "--quantize=q4_k",
            "--ctx=512",
            "--threads=3",
            "--threads-batch=4",
            "--cpu=scalar",
            "--kv-type=q8_0",
            "--device=cpu",
            "--chat-template=a b.jinja",
            "--bos-id=none",
            "--eos-id=3,5",
            "--mmproj=a b.gguf",
            "--image-tokens=64..128",
            "--lora=a b.gguf=0.5",
            "--lora=c",
            "--no-warm-resume",
            "--kv-memory=3M",
            "--kv-disk=0",
            "--packed-disk=5M",
            "--parallel=7",
            "--max-waiting=9",
            "--max-sessions=11",
            "--session-ttl=1500ms",
        ];
        let (told, meant) = (worker(&words, 1), serve(&words));
        assert_eq!(format!("{:?}", told.model), format!("{:?}", meant.model));
        assert_eq!(format!("{:?}", told.engine), format!("{:?}", meant.engine));
        let (told, meant) = (told.capacity.options(&told.engine), meant.capacity.options(&meant.engine));
        assert_eq!(format!("{told:?}"), format!("{meant:?}"));
        assert_eq!(
            format!("{:?}", worker(&["--dtype=bf16"], 1).model),
            format!("{:?}", serve(&["--dtype=bf16"]).model)
        );
        let nothing = worker(&["--port", "0", "--request-timeout", "3s"], 1);
        assert_eq!(format!("{nothing:?}"), format!("{:?}", WorkerArgs::default()));
    }

    #[test]
    fn a_worker_gets_the_flags_of_the_process() {
        let words =
            ["--quiet", "--color=always", "--config=-a b", "--encrypt=~/keys", "--no-mmproj", "--offline"];
        let passed =
            ["--quiet", "--config=-a b", "--encrypt=~/keys", "--no-mmproj", "--offline"].map(OsString::from);
        let mut told = serve(&words).isolation.passed;
        told.sort();
        let mut expected = passed.to_vec();
        expected.sort();
        assert_eq!(told, expected);
        assert_eq!(serve(&["-vvv"]).isolation.passed, ["--verbose"; 3]);
    }

    #[test]
    fn workers_share_the_processor() {
        assert_eq!(worker(&[], 1000).model.threads, Some(1));
        assert_eq!(worker(&[], 1).model.threads, None);
        assert_eq!(worker(&["--threads", "5"], 2).model.threads, Some(5));
    }

    #[test]
    fn flags_without_effect_are_refused() {
        let count = |words: &[&str]| serve(words).isolation.num_workers().map_err(|error| error.to_string());
        assert_eq!(count(&[]), Ok(None));
        assert_eq!(count(&["--isolate"]), Ok(Some(1)));
        assert_eq!(count(&["--workers", "3", "--worker-nice", "-5"]), Ok(Some(3)));
        assert_eq!(count(&["--isolate", "--worker-memory=16M"]), Ok(Some(1)));
        for little in ["--worker-memory=1", "--worker-memory=15M"] {
            let error = count(&["--isolate", little]).expect_err(little);
            assert!(error.starts_with("--worker-memory: no worker starts with"), "{error}");
        }
        for flag in
            ["--worker-memory=1G", "--worker-nice=1", "--worker-timeout=1s", "--worker-start-timeout=1s"]
        {
            let error = count(&[flag]).expect_err(flag);
            assert!(error.starts_with(flag.split('=').next().expect("a name")), "{error}");
        }
    }

    #[test]
    fn too_little_memory_is_told_from_other_failures() {
        let told = |error: StartError, memory: Option<u64>| command_error(3, error, memory.map(ByteSize));
        let backend = |message: &str| StartError::Refused(Error::Backend(message.to_owned()));
        for error in [
            StartError::Refused(Error::EngineGone),
            backend("Resource temporarily unavailable (os error 11)"),
            backend("no memory to pack it: Cannot allocate memory (os error 12)"),
            StartError::Lost("it has ended; memory allocation of 9 bytes failed".to_owned()),
        ] {
            let limited = told(error.clone(), Some(40 << 20));
            assert!(limited.to_string().contains("40.0 MiB of --worker-memory are too little"), "{limited}");
            assert_eq!(limited.kind.code(), 75);
            assert!(!told(error, None).to_string().contains("--worker-memory"));
        }
        let damaged = told(backend("no such tensor"), Some(40 << 20));
        assert!(!damaged.to_string().contains("--worker-memory"), "{damaged}");
    }

    #[test]
    fn secrets_are_known_by_their_names() {
        for name in
            ["LLMCTL_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET", "Db_Password", "token"]
        {
            assert!(is_secret(name), "{name}");
        }
        for name in ["PATH", "HOME", "LLMCTL_MAX_TOKENS", "KEYBOARD", "HF_HOME"] {
            assert!(!is_secret(name), "{name}");
        }
    }
}
