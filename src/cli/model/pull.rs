//! `llmctl pull`: downloads models into the Hugging Face cache.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::download::{Downloads, size};
use super::hub_access::is_offline;
use super::models;
use crate::cli::CommandContext;
use crate::cli::error::{CommandError, Exit};
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::{bytes, columns, print};
use llmctl_base::LoadError;
use llmctl_hub::{Aliases, HubRef, ModelRef, PullEvent, PullExtent, PullPlan, remote_form};

/// Shortest time between two progress events of one download.
const EVENT_INTERVAL: Duration = Duration::from_millis(500);

/// Download models from the Hugging Face hub
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct PullArgs {
    /// Models: org/repo[:QUANT | :FILE.gguf][@REVISION] or aliases
    #[arg(value_name = "REF", required = true)]
    pub references: Vec<String>,

    /// Download only the texts of a safetensors repository: configuration, tokenizer, templates; no weights
    #[arg(long)]
    pub texts: bool,

    /// Leave out the vision tower (mmproj) of a GGUF model, which reads images
    #[arg(long, conflicts_with = "texts")]
    pub no_mmproj: bool,

    /// List the files and their sizes, and download nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Format of stdout: the path of each model, or one JSON event per line
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: PullFormat,
}

/// `--output` of `pull`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum PullFormat {
    #[default]
    Text,
    Jsonl,
}

const LONG_HELP: &str = include_str!("pull_help.txt").trim_ascii_end();

pub fn run(args: PullArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    let aliases = config.aliases();
    let parse = |text: &String| reference(text, &aliases);
    let references: Vec<HubRef> = args.references.iter().map(parse).collect::<Result<_, _>>()?;
    if is_offline() {
        return Err(CommandError::offline("HF_HUB_OFFLINE"));
    }
    let downloads = Downloads::new(places, terminal)?;
    let extent = match (args.texts, args.no_mmproj) {
        (true, _) => PullExtent::Texts,
        (false, true) => PullExtent::WithoutProjector,
        (false, false) => PullExtent::Whole,
    };
    for hub in &references {
        let plan = downloads.plan(hub, extent)?;
        match (args.dry_run, args.output) {
            (true, PullFormat::Text) => print(&listed(&plan))?,
            (true, PullFormat::Jsonl) => print_event(&plan_event(&plan))?,
            (false, PullFormat::Text) => pull_with_text(&downloads, &plan, places, terminal)?,
            (false, PullFormat::Jsonl) => pull_with_events(&downloads, &plan)?,
        };
    }
    Ok(Exit::Success)
}

/// Reads a reference to a repository.
///
/// # Errors
/// Another one: also a name without an owner, which is more likely a slip than a repository, as for `run`.
pub fn reference(text: &str, aliases: &Aliases) -> Result<HubRef, CommandError> {
    let is_hub = |text: &str| text.contains('/') || text.starts_with("hf:");
    match remote_form(&ModelRef::parse(text)?, aliases)? {
        _ if !is_hub(aliases.get(text).map_or(text, String::as_str)) => {
            let error = LoadError::UnknownModel { reference: text.to_owned(), candidates: Vec::new() };
            Err(models::not_found(error))
        }
        hub => Ok(hub),
    }
}

fn pull_with_text(
    downloads: &Downloads<'_>,
    plan: &PullPlan,
    places: &Places,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    match plan.missing_bytes() {
        0 => terminal.note(format!("{} is here already ({})", plan.reference, bytes(plan.total_bytes))),
        _ => {
            let cache = super::download::shown_cache(places);
            let from = downloads.host();
            terminal.note(format!("{} ({}) from {from} to {cache}", plan.reference, size(plan)));
        }
    }
    downloads.run(plan, None)?;
    print(&format!("{}\n", plan.path().display()))
}

fn pull_with_events(downloads: &Downloads<'_>, plan: &PullPlan) -> Result<Exit, CommandError> {
    print_event(&plan_event(plan))?;
    let start = Instant::now();
    let last = Mutex::new(None::<Instant>);
    let watch = |event: &PullEvent, here: u64| {
        let is_due = || {
            let mut last = last.lock();
            let is_due = last.is_none_or(|last| last.elapsed() >= EVENT_INTERVAL);
            if is_due {
                *last = Some(Instant::now());
            }
            is_due
        };
        if !matches!(event, PullEvent::Received { .. }) || is_due() {
            // A reader that has gone ends the command at the last event.
            let _ = print_event(&event_json(event, here, plan, start.elapsed()));
        }
    };
    downloads.run(plan, Some(&watch))?;
    print_event(&json!({
        "event": "done", "reference": plan.reference, "commit": plan.commit(), "path": plan.path(),
        "bytes": plan.total_bytes, "received_bytes": plan.missing_bytes(), "seconds": start.elapsed().as_secs_f64(),
    }))
}

fn print_event(event: &Value) -> Result<Exit, CommandError> {
    print(&format!("{event}\n"))
}

fn plan_event(plan: &PullPlan) -> Value {
    let file = |file: &llmctl_hub::RemoteFile| {
        let here = plan.present_bytes_of(file);
        json!({"path": file.path, "bytes": file.size, "present_bytes": here, "hash": file.hash.hex()})
    };
    let files: Vec<Value> = plan.files().iter().map(file).collect();
    json!({
        "event": "plan", "reference": plan.reference, "repo": plan.repo(), "commit": plan.commit(),
        "bytes": plan.total_bytes, "present_bytes": plan.present_bytes, "files": files,
    })
}

/// Returns the line for an event. The rate is in bytes per second since the download began.
fn event_json(event: &PullEvent, here: u64, plan: &PullPlan, elapsed: Duration) -> Value {
    match event {
        PullEvent::Received { .. } => {
            let received = here.saturating_sub(plan.present_bytes);
            let rate = received as f64 / elapsed.as_secs_f64().max(0.001);
            let left = plan.total_bytes.saturating_sub(here);
            let eta_s = if rate >= 1.0 { json!((left as f64 / rate).round()) } else { Value::Null };
            json!({"event": "progress", "bytes": here, "total_bytes": plan.total_bytes,
                "bytes_per_second": rate.round(), "eta_s": eta_s})
        }
        PullEvent::Started { path, have, total } => {
            json!({"event": "file_started", "path": path, "present_bytes": have, "bytes": total})
        }
        PullEvent::Finished { path, was_cached } => {
            json!({"event": "file_done", "path": path, "was_cached": was_cached})
        }
        PullEvent::Restarted { path, why } => json!({"event": "file_restarted", "path": path, "why": why}),
        PullEvent::Waiting { path } => json!({"event": "waiting", "path": path}),
        PullEvent::Retrying { what, why, seconds } => {
            json!({"event": "retrying", "what": what, "why": why, "seconds": seconds})
        }
    }
}

fn listed(plan: &PullPlan) -> String {
    let mut rows = vec![["FILE", "SIZE", "HERE"].map(str::to_owned).to_vec()];
    for file in plan.files() {
        let here = match plan.present_bytes_of(file) {
            0 => "no".to_owned(),
            all if all == file.size => "yes".to_owned(),
            some => bytes(some),
        };
        rows.push(vec![file.path.clone(), bytes(file.size), here]);
    }
    let total = format!("{}, to download: {}", bytes(plan.total_bytes), bytes(plan.missing_bytes()));
    format!("{} ({total})\n{}", plan.reference, columns(&rows))
}
