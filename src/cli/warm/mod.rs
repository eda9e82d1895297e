//! `llmctl warm`: prompts computed ahead, whose KV stays on disk. `prompt` reads what is to come before each question and computes it;
//! here are the flags, the list, and files for other machines.

mod prompt;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::CommandContext;
use super::error::{CommandError, Exit, Kind};
use super::flags::args::{ByteSize, DEFAULT_KV_DISK, EngineArgs, EngineOptions, ModelArgs};
use super::model::load::{Loaded, load};
use super::places::Places;
use super::sessions::{self, archive};
use super::terminal::Terminal;
use crate::cli::terminal::report::{
    ReportFormat, bytes, check_new_file, counted, grouped, print_either, stdout_width, table,
};
use llmctl_base::GivenSampling;
use llmctl_engine::session::store::SessionStore;
use llmctl_engine::turn::{TurnInput, TurnRequest};
use llmctl_models::kv::disk::WarmPrompt;
use llmctl_serve::engines::engine::EngineSlot;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServeSettings};
use prompt::{Ahead, read};

/// Compute prompts ahead: system prompts, documents and agents' requests, whose KV then stays on disk
///
/// A request that begins with such a prompt is answered as if the prompt had been asked before: its tokens are read from disk, not
/// computed. Without FILE it lists the prompts, with their size and the number of requests that began with them.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct WarmArgs {
    /// Prompts: texts, requests (*.json, *.jsonl), or files of --out; - is a text from stdin
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Place of a text in the conversation
    #[arg(long, value_enum, value_name = "ROLE", default_value_t)]
    pub role: TextRole,

    /// Name of the prompt (default: that of the file)
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Write the prompts and their KV to a file, for `llmctl warm FILE` and `llmctl serve --warm FILE` elsewhere
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Replace the file of --out if it exists
    #[arg(long, requires = "out")]
    pub force: bool,

    /// Forget these prompts: their KV may be evicted again
    #[arg(long, value_name = "NAME", num_args = 1.., conflicts_with_all = ["files", "out", "name"])]
    pub remove: Vec<String>,

    /// Disk for all KV (default: 4G); prompts may take seven eighths of it
    #[arg(long, value_name = "SIZE")]
    pub kv_disk: Option<ByteSize>,

    #[command(flatten)]
    pub model: ModelArgs,

    /// Format of stdout: text, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

/// `--role`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum TextRole {
    /// The system prompt
    #[default]
    System,
    /// The beginning of the user's first message
    User,
}

const LONG_HELP: &str = include_str!("help.txt").trim_ascii_end();

/// Runs `llmctl warm`.
///
/// # Errors
/// A file that cannot be read or is refused; the engine's failure; no room for the KV; a prompt that is not there.
pub fn run(args: &WarmArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { places, terminal, .. } = context;
    let store = sessions::store(places)?;
    let root = root(places)?;
    args.out.as_deref().map_or(Ok(()), |out| check_new_file(out, args.force))?;
    let mut report = WarmReport::default();
    if !args.remove.is_empty() {
        remove(&args.remove, &root, &mut report)?;
    } else if !args.files.is_empty() {
        warm(args, (&store, &root), terminal, &mut report)?;
    } else if args.out.is_none() {
        list(&root, terminal, &mut report)?;
    }
    if let Some(out) = &args.out {
        pack(&report.names(&root), out, &store, places, &mut report)?;
    }
    print_either(args.output, &report.text, "llmctl.warm.v1", report.object)
}

fn root(places: &Places) -> Result<PathBuf, CommandError> {
    places
        .kv()
        .ok_or_else(|| Kind::Config.error("HOME and XDG_CACHE_HOME are not set: there is no folder for KV"))
}

/// Report of the command, as text and as an object.
#[derive(Default)]
struct WarmReport {
    text: String,
    object: Value,
    /// Prompts that were computed or imported.
    warmed: Vec<WarmPrompt>,
}

impl WarmReport {
    /// Returns the prompts to pack: those of this command, or all.
    fn names(&self, root: &Path) -> Vec<WarmPrompt> {
        if self.warmed.is_empty() { WarmPrompt::read_all(root).0 } else { self.warmed.clone() }
    }
}

fn remove(names: &[String], root: &Path, report: &mut WarmReport) -> Result<(), CommandError> {
    let prompts = WarmPrompt::read_all(root).0;
    let found = names.iter().map(|name| prompts.iter().find(|prompt| prompt.name == *name).ok_or(name));
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|name| {
        let message = format!("no prompt named {name:?} is computed ahead");
        Kind::NotFound.error(message).hint("`llmctl warm` lists them")
    })?;
    for prompt in found {
        prompt.remove(root).map_err(CommandError::io(prompt.name.clone()))?;
        report.text.push_str(&format!("{} is forgotten: limits may evict its KV\n", prompt.name));
    }
    report.object = json!({"removed": names});
    Ok(())
}

/// Computes the prompts of the files, or imports them.
fn warm(
    args: &WarmArgs,
    (store, root): (&SessionStore, &Path),
    terminal: &Terminal,
    report: &mut WarmReport,
) -> Result<(), CommandError> {
    let kv_limit = args.kv_disk.map_or(DEFAULT_KV_DISK, |size| size.0);
    let (packed, asked): (Vec<&PathBuf>, Vec<&PathBuf>) =
        args.files.iter().partition(|file| archive::is_archive(file));
    for file in packed {
        let (prompts, text) = archive::import_prompts(file, store, kv_limit)?;
        report.text.push_str(&text);
        report.warmed.extend(prompts);
    }
    if !asked.is_empty() {
        if !args.model.remote.engine.is_empty() {
            return Err(CommandError::usage(
                "--engine: the KV is on the machine of the engine; warm it there",
            ));
        }
        let sources = read(&asked, args, terminal)?;
        let options = EngineOptions { kv_disk: Some(kv_limit), ..EngineArgs::default().resolve(true) };
        let app = app_of(load(&args.model, options, terminal)?);
        let ahead = Ahead::new(&app, root, kv_limit, terminal)?;
        for prompt in ahead.prompts(sources)? {
            let (prompt, text) = ahead.keep(prompt)?;
            report.text.push_str(&text);
            report.warmed.push(prompt);
        }
    }
    report.object = json!({"prompts": rows(&report.warmed, root)});
    Ok(())
}

/// Returns the model as requests of any name reach it.
fn app_of(llm: Loaded) -> App {
    let (texts, engine) = llm.into_parts();
    let served = texts.into_served(None, GivenSampling::default());
    let settings = ServeSettings { aliases: vec!["*".to_owned()], ..ServeSettings::default() };
    App::new(served, EngineSlot::new(engine), None, Observer::default(), settings)
}

/// Keeps the KV of an agent's own prompt, which a server has answered, under the agent's name. Returns what to say of it.
///
/// # Errors
/// As `llmctl warm`; no folder for KV.
pub fn keep_agent(
    app: &App,
    agent: &str,
    kv_limit: Option<ByteSize>,
    places: &Places,
    terminal: &Terminal,
) -> Result<String, CommandError> {
    let Some(prompt) = app.observer().agent_prompt() else {
        return Ok(format!("{agent} has sent no request with tools: there is no prompt to keep\n"));
    };
    let root = root(places)?;
    let ahead = Ahead::new(app, &root, kv_limit.map_or(DEFAULT_KV_DISK, |size| size.0), terminal)?;
    let input = TurnInput::Chat(prompt.clone());
    Ok(ahead.keep(ahead.rendered(agent.to_owned(), &input, &TurnRequest::default())?)?.1)
}

fn list(root: &Path, terminal: &Terminal, report: &mut WarmReport) -> Result<(), CommandError> {
    let (prompts, faults) = WarmPrompt::read_all(root);
    faults.iter().for_each(|fault| terminal.warn(fault));
    let rows = rows(&prompts, root);
    if rows.is_empty() {
        report.text = "no prompt is computed ahead; `llmctl warm FILE --model REF` computes one\n".to_owned();
    } else {
        let head = ["NAME", "TOKENS", "KV", "HITS", "MODEL"].map(str::to_owned).to_vec();
        let line = |row: &Value| {
            let size = row["bytes"].as_u64().map_or("not on disk".to_owned(), bytes);
            let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
            let number = |name: &str| grouped(row[name].as_u64().unwrap_or(0) as usize);
            vec![text("name"), number("tokens"), size, number("hits"), text("model")]
        };
        let lines: Vec<_> = std::iter::once(head).chain(rows.iter().map(line)).collect();
        report.text = table(&lines, stdout_width());
    }
    report.object = json!({"prompts": rows});
    Ok(())
}

/// Describes prompts; `bytes` is null if the KV of one is not on disk.
fn rows(prompts: &[WarmPrompt], root: &Path) -> Vec<Value> {
    let mut sizes = WarmPrompt::bytes_on_disk(prompts, root).unwrap_or_default().into_iter();
    let row = |prompt: &WarmPrompt| {
        json!({
            "name": prompt.name,
            "model": prompt.model,
            "tokens": prompt.num_tokens(),
            "bytes": sizes.next().flatten(),
            "hits": prompt.num_hits(root),
            "created_ms": prompt.created_ms,
        })
    };
    prompts.iter().map(row).collect()
}

/// Writes prompts to a file.
fn pack(
    prompts: &[WarmPrompt],
    out: &Path,
    store: &SessionStore,
    places: &Places,
    report: &mut WarmReport,
) -> Result<(), CommandError> {
    if prompts.is_empty() {
        return Err(CommandError::usage("--out: no prompt is computed ahead").hint("name a FILE"));
    }
    let hashes = |reference: &str, model: &_| archive::hashes_of(reference, model, places);
    let package = store.pack_prompts(prompts, hashes)?;
    let num_bytes = archive::write(&package, out).map_err(CommandError::io(out.display()))?;
    report.text.push_str(&format!(
        "{} in {}: {}, {} of KV\n",
        counted(prompts.len(), "prompt"),
        out.display(),
        bytes(num_bytes),
        counted(package.num_pages, "page")
    ));
    package.notices.iter().for_each(|notice| report.text.push_str(&format!("{notice}\n")));
    if !report.object.is_object() {
        report.object = json!({});
    }
    report.object["file"] =
        json!({"path": out, "bytes": num_bytes, "kv_pages": package.num_pages, "notices": package.notices});
    Ok(())
}
