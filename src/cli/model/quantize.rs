//! `llmctl quantize`: writes a model as one GGUF file of another type.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::models;
use crate::cli::CommandContext;
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::places::free_bytes;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::report::{bytes, check_new_file, counted, is_same_file, print};
use crate::cli::terminal::signal::Graceful;
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::load;
use llmctl_models::load::divergence::{Divergence, Predictions};
use llmctl_models::load::export::{Export, ExportOptions, ExportSizes, Imatrix, MIXES, QuantMix, WriteEnd};
use llmctl_models::load::{ImageUse, KvType, LoadOptions, ModelFiles};
use llmctl_models::memory::{memory_limits, tightest};
use llmctl_models::text::Encode;

/// Text that both models continue with a plain `--check`.
const CHECK_TEXT: &str = include_str!("quantize_check.txt");

/// Time between two lines of progress where no line can be redrawn.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// Write a model as a GGUF file of another type
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct QuantizeArgs {
    /// Model: a .gguf file, a folder with safetensors, org/repo[:QUANT][@REVISION] or an alias
    #[arg(value_name = "IN")]
    pub model: String,

    /// GGUF file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,

    /// Type of the weights; a mix gives sensitive matrices more bits
    #[arg(long = "type", value_name = "TYPE", ignore_case = true, value_parser = mix_parser())]
    pub mix: QuantMix,

    /// Importance matrix of llama.cpp, GGUF or .dat: errors where the model is sensitive weigh more
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,

    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,

    /// Compare the predictions of IN and OUT over a text, that of FILE or a short one inside llmctl
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub check: Option<Option<PathBuf>>,
}

const LONG_HELP: &str = include_str!("quantize_help.txt").trim_ascii_end();

fn mix_parser() -> impl TypedValueParser<Value = QuantMix> {
    let find = |name: String| {
        let mix = MIXES.into_iter().find(|mix| mix.name.eq_ignore_ascii_case(&name));
        mix.ok_or_else(|| format!("no type {name:?}"))
    };
    PossibleValuesParser::new(MIXES.map(|mix| mix.name)).try_map(find)
}

pub fn run(args: QuantizeArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    check_new_file(&args.out, args.force)?;
    let resolved = models::find(&args.model, places, &config.aliases())?;
    if args.check.is_some() && is_same_file(resolved.source.path(), &args.out) {
        return Err(CommandError::usage(
            "--check compares IN with OUT, and both are one file, which OUT replaces",
        ));
    }
    resolved.notices.iter().for_each(|notice| terminal.note(notice));
    let files = ModelFiles::open(&resolved.source)?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let name = model_name(&resolved);
    let options = ExportOptions { mix: args.mix, imatrix: imatrix.as_ref(), name: &name };
    let export = Export::plan(&files, &options)?;
    let sizes = export.sizes();
    warn_of_losses(&sizes, terminal);
    export.types().for_each(|(tensor, dtype)| terminal.detail(&format!("{tensor}: {}", dtype.name())));
    check_space(&args.out, sizes.bytes_after)?;
    if let Some(stopped) = write(&export, &args.out, terminal)? {
        return Ok(stopped);
    }
    print(&summary(&args, &sizes))?;
    drop(files);
    if let Some(file) = &args.check {
        let text = match file {
            None => CHECK_TEXT.to_owned(),
            Some(file) => read_file(file)?,
        };
        let divergence = compare(&resolved, &args.out, &text, terminal)?;
        print(&agreement(&divergence))?;
    }
    Ok(Exit::Success)
}

/// Returns the name for `general.name`: the folder's own, or that of the repository.
fn model_name(resolved: &Resolved) -> String {
    let path = Path::new(&resolved.name);
    let stem = path.file_name().map(|name| name.to_string_lossy().into_owned());
    stem.unwrap_or_else(|| resolved.name.clone())
}

fn warn_of_losses(sizes: &ExportSizes, terminal: &Terminal) {
    if sizes.num_requantized > 0 {
        terminal.warn(format!(
            "{} matrices are quantised already and are rounded a second time; a float model as IN gives better results",
            sizes.num_requantized
        ));
    }
    if sizes.num_narrow > 0 {
        terminal.note(format!(
            "the rows of {} are not whole blocks of 256 values: they get a larger type with blocks of 32",
            counted(sizes.num_narrow, "tensor")
        ));
    }
    if sizes.num_without_importance > 0 {
        terminal.note(format!(
            "the importance matrix has nothing for {} matrices, which are quantised without it",
            sizes.num_without_importance
        ));
    }
}

/// Refuses to begin if the file system has too little space, if its free space is known.
fn check_space(out: &Path, needed: u64) -> Result<(), CommandError> {
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match free_bytes(folder) {
        Some(free) if free < needed => {
            let message = format!("{} needs {}, but {} are free", out.display(), bytes(needed), bytes(free));
            Err(Kind::Io.error(message))
        }
        _ => Ok(()),
    }
}

/// Writes the file with progress on stderr; returns how the program ends if a signal stopped it.
fn write(export: &Export<'_>, out: &Path, terminal: &Terminal) -> Result<Option<Exit>, CommandError> {
    let graceful = Graceful::begin();
    let mut last = Instant::now();
    let mut show = |done: u64, total: u64| {
        let line = format!("writing {}: {} of {}", out.display(), bytes(done), bytes(total));
        if terminal.shows_progress() {
            terminal.status(&line);
        } else if last.elapsed() >= PROGRESS_EVERY {
            terminal.note(line);
            last = Instant::now();
        }
        graceful.received().is_none()
    };
    let end = export.write(out, &mut show);
    terminal.status("");
    match end? {
        WriteEnd::Done => Ok(None),
        WriteEnd::Stopped => {
            terminal.note(format!("interrupted; {} is not written", out.display()));
            Ok(Some(Exit::Signal(graceful.received().unwrap_or_default())))
        }
    }
}

fn summary(args: &QuantizeArgs, sizes: &ExportSizes) -> String {
    let bits = |bytes: u64| bytes as f64 * 8.0 / sizes.num_values.max(1) as f64;
    format!(
        "{}: {}, weights {} -> {} ({:.2} -> {:.2} bits per weight)\n",
        args.out.display(),
        args.mix.name,
        bytes(sizes.bytes_before),
        bytes(sizes.bytes_after),
        bits(sizes.bytes_before),
        bits(sizes.bytes_after)
    )
}

fn agreement(divergence: &Divergence) -> String {
    format!(
        "over {} tokens: mean KL {:.6}, largest {:.6}; same top token {:.1}%\n",
        divergence.num_tokens,
        divergence.mean_kl,
        divergence.largest_kl,
        divergence.same_top * 100.0
    )
}

/// Loads one model after the other and compares their predictions.
fn compare(
    resolved: &Resolved,
    out: &Path,
    text: &str,
    terminal: &Terminal,
) -> Result<Divergence, CommandError> {
    let written = Resolved::new(out.display().to_string(), ModelSource::Gguf(out.to_owned()));
    let before = predictions(resolved, text, terminal)?;
    let after = predictions(&written, text, terminal)?;
    Ok(before.divergence(&after)?)
}

fn predictions(resolved: &Resolved, text: &str, terminal: &Terminal) -> Result<Predictions, CommandError> {
    let options = LoadOptions {
        images: ImageUse { is_off: true, ..ImageUse::default() },
        kv_type: KvType::F32,
        available_memory: tightest(&memory_limits(Path::new("/"))).map(|limit| limit.available),
        ..LoadOptions::default()
    };
    terminal.status(&format!("checking {}", resolved.name));
    let mut loaded = load::load(resolved, &options, &mut |_, _| ())?;
    let tokens = loaded.texts.tokenizer.encode(text, Encode { add_special: true, parse_special: false })?;
    let predictions = Predictions::of(&mut *loaded.model, &tokens);
    terminal.status("");
    Ok(predictions?)
}
