//! `llmctl models`: lists, shows, checks and erases models. Also resolves `--model` to files, for all
//! commands.
//!
//! `listing` and `show` make tables, `last_use` records when a model was loaded, `check` compares files with
//! their names, `removal` erases what was asked for, after a question.

mod check;
mod last_use;
mod listing;
pub mod removal;
mod show;

use std::path::Path;

use clap::{Args, Subcommand};

use self::removal::Consent;
use crate::cli::CommandContext;
use crate::cli::config::explain;
use crate::cli::error::{CommandError, Exit, nearest};
use crate::cli::places::Places;
use crate::cli::terminal::report::ReportFormat;
use llmctl_base::LoadError;
use llmctl_hub::builtin::GUIDE;
use llmctl_hub::{Aliases, HubRef, ModelRef, Resolved};
use llmctl_models::load::TextFiles;

pub use self::last_use::record as record_use;

/// List, check and erase the models of the Hugging Face cache, and list ollama's
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ModelsArgs {
    #[command(subcommand)]
    pub command: Option<ModelsCommand>,

    /// Format of stdout: a table, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t, global = true)]
    pub output: ReportFormat,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ModelsCommand {
    /// List the models (the default)
    List,
    /// Show what is known of one model without loading it
    Show {
        /// Model: a .gguf file, a folder, org/repo[:QUANT][@REVISION] or an alias
        #[arg(value_name = "REF")]
        reference: String,
    },
    /// Erase models of the cache, with all files that no other revision needs; asks first
    ///
    /// org/repo is the whole repository with all its revisions, org/repo@REVISION one revision, org/repo:QUANT one model.
    #[command(visible_aliases = ["remove", "delete"])]
    Rm {
        /// Models of the Hugging Face cache
        #[arg(value_name = "REF", required = true)]
        references: Vec<String>,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Compare every file in the cache with its hash, and report damaged and missing ones
    Verify {
        /// Repositories to check; all without one
        #[arg(value_name = "REF")]
        references: Vec<String>,
    },
    /// Erase what no model needs: files without a revision, given-up downloads, replaced revisions; asks first
    Prune {
        /// List the files, and erase nothing
        #[arg(long, short = 'n')]
        dry_run: bool,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
}

const LONG_HELP: &str = include_str!("models_help.txt").trim_ascii_end();

pub fn run(args: ModelsArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let format = args.output;
    match args.command.unwrap_or(ModelsCommand::List) {
        ModelsCommand::List => listing::list(context, format),
        ModelsCommand::Show { reference } => show::show(&reference, context, format),
        ModelsCommand::Rm { references, yes } => {
            let consent = if yes { Consent::Given } else { Consent::Ask };
            removal::remove(&references, consent, context, format)
        }
        ModelsCommand::Verify { references } => check::verify(&references, context, format),
        ModelsCommand::Prune { dry_run, yes } => {
            let consent = match (dry_run, yes) {
                (true, _) => Consent::DryRun,
                (false, true) => Consent::Given,
                (false, false) => Consent::Ask,
            };
            removal::prune(consent, context, format)
        }
    }
}

/// Resolves `reference` to files.
///
/// # Errors
/// See [`llmctl_hub::resolve`].
pub fn find(reference: &str, places: &Places, aliases: &Aliases) -> Result<Resolved, CommandError> {
    look_up(reference, places, aliases).map_err(not_found)
}

/// Resolves `reference` to files.
///
/// # Errors
/// See [`llmctl_hub::resolve`].
pub fn look_up(reference: &str, places: &Places, aliases: &Aliases) -> Result<Resolved, LoadError> {
    ModelRef::parse(reference).and_then(|r| llmctl_hub::resolve(&r, &places.hub_paths(), aliases))
}

/// Resolves `reference` to the texts of a model, whose weights need not be here.
///
/// # Errors
/// See [`llmctl_hub::resolve_texts`].
pub fn look_up_texts(reference: &str, places: &Places, aliases: &Aliases) -> Result<Resolved, LoadError> {
    ModelRef::parse(reference)
        .and_then(|r| llmctl_hub::resolve_texts(&r, &places.hub_paths(), aliases, TextFiles::are_in))
}

/// Returns the repository to download if `reference` was not found because of `error`. A name without an owner is
/// more likely a slip than a repository.
pub fn downloadable(
    reference: &str,
    error: &LoadError,
    places: &Places,
    aliases: &Aliases,
) -> Option<HubRef> {
    let is_cached = |path: &Path| places.hub.as_ref().is_some_and(|cache| path.starts_with(cache));
    let is_missing = match error {
        LoadError::UnknownModel { .. } => true,
        // A repository of which only a part was downloaded.
        LoadError::NotFound(path) | LoadError::Unsupported { path, .. } => is_cached(path),
        _ => false,
    };
    let hub = llmctl_hub::remote_form(&ModelRef::parse(reference).ok()?, aliases).ok()?;
    (is_missing && (hub.org.is_some() || reference.starts_with("hf:"))).then_some(hub)
}

/// Adds advice to an error of [`look_up`].
pub fn not_found(error: LoadError) -> CommandError {
    let hint = match &error {
        LoadError::UnknownModel { reference, candidates } => Some(not_cached(reference, candidates)),
        LoadError::AmbiguousModel { candidates, .. } => candidates
            .first()
            .map(|first| format!("name one of them exactly, e.g. --model {}", first.reference)),
        _ => None,
    };
    CommandError::from(error).hint_if(hint)
}

fn not_cached(reference: &str, candidates: &[String]) -> String {
    let slip = nearest(&reference.to_lowercase(), [GUIDE.name]).map(str::to_owned);
    let meant: Vec<String> = candidates.iter().cloned().chain(slip).collect();
    let meant = match &*meant {
        [] => String::new(),
        meant if !reference.contains('/') => {
            return format!("did you mean {}? `llmctl models` lists what you have", meant.join(" or "));
        }
        meant => format!("did you mean {}? ", meant.join(" or ")),
    };
    format!(
        "{meant}it is not a file, an alias or a cached repository. {}; `llmctl models` lists what you have",
        explain::download(Some(reference))
    )
}
