//! `llmctl template check`: tests a model's chat template without loading the model.
//!
//! Finds template and tokenizer and prints the result of [`template_check`]; judges nothing itself.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use super::CommandContext;
use super::error::{CommandError, Exit, Kind};
use crate::cli::model::models;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::report::{ReportFormat, columns, counted, print, print_json};
use llmctl_engine::template_check::subject;
use llmctl_hub::ModelSource;
use llmctl_models::load::TextFiles;
use llmctl_template::check::{Check, CheckVerdict, check};
use llmctl_template::{OutputMarkup, ReasoningFormat, TemplateError, ToolCallFormat};

/// Look into chat templates
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    #[command(subcommand)]
    pub command: TemplateCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum TemplateCommand {
    Check(CheckArgs),
}

/// Check what a chat template makes of chat, tools and the cache
///
/// Conversations of every shape are rendered and encoded with the model's own template and tokenizer; weights are not read.
/// One line per check: is each prompt the beginning of the next, do calls parse back, do turns end where generation ends, is
/// there one beginning-of-sequence token, which messages are refused or left out.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct CheckArgs {
    /// Model: as for --model; a folder with only a tokenizer, or a .jinja file, will do
    #[arg(value_name = "MODEL")]
    pub model: String,

    /// Check this Jinja template with the model's tokenizer instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// Format of the model's tool calls (default: as the template shows)
    #[arg(long, value_name = "FORMAT")]
    pub tool_format: Option<ToolCallFormat>,

    /// Format of the model's reasoning (default: as the template shows)
    #[arg(long, value_name = "FORMAT")]
    pub reasoning_format: Option<ReasoningFormat>,

    /// Format of stdout: text, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

const LONG_HELP: &str = include_str!("template_cmd_help.txt").trim_ascii_end();

/// File name extensions of templates.
const TEMPLATE_ENDINGS: [&str; 3] = ["jinja", "jinja2", "j2"];

/// Template and tokenizer to check.
struct FoundTemplate {
    name: String,
    /// Origin of the template.
    origin: String,
    template: String,
    files: Option<TextFiles>,
}

pub fn run(args: TemplateArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let TemplateCommand::Check(args) = args.command;
    let found = find(&args, context)?;
    let output_markup = OutputMarkup { reasoning: args.reasoning_format, tool_calls: args.tool_format };
    let (tokenizer, ends) = match &found.files {
        Some(files) => (files.tokenizer.clone(), files.end_of_generation.clone()),
        None => (None, Vec::new()),
    };
    let subject = subject(&found.template, tokenizer, ends, output_markup);
    let checks = check(subject.as_ref());
    let printed = match args.output {
        ReportFormat::Text => print(&text(&found, &checks)),
        ReportFormat::Json => print_json(&json(&found, &checks)),
    }?;
    let fails = checks.iter().any(|check| check.verdict == CheckVerdict::Fail);
    Ok(if fails { Exit::from(Kind::Failure) } else { printed })
}

fn find(args: &CheckArgs, context: CommandContext<'_>) -> Result<FoundTemplate, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    let path = Path::new(&args.model);
    let is_template = path.extension().and_then(|ending| ending.to_str());
    if is_template.is_some_and(|ending| TEMPLATE_ENDINGS.contains(&ending)) && !path.is_dir() {
        if args.chat_template.is_some() {
            let message = "--chat-template goes with a model, and this is a template itself";
            return Err(CommandError::usage(message));
        }
        let (name, origin) = (args.model.clone(), args.model.clone());
        return Ok(FoundTemplate { name, origin, template: read_file(path)?, files: None });
    }
    let (name, source) = match models::find(&args.model, places, &config.aliases()) {
        Ok(resolved) => (resolved.name, resolved.source),
        Err(_) if TextFiles::are_in(path) => (args.model.clone(), ModelSource::Folder(path.to_owned())),
        Err(error) => return Err(error),
    };
    let files = TextFiles::open(&source)?;
    let (origin, template) = match &args.chat_template {
        Some(file) => (file.display().to_string(), read_file(file)?),
        None => {
            files.chat_templates.notice().iter().for_each(|notice| terminal.note(notice));
            let template = files.chat_templates.default.clone().ok_or(TemplateError::Missing)?;
            (places.shorten(source.path()), template)
        }
    };
    Ok(FoundTemplate { name, origin, template, files: Some(files) })
}

/// Returns the number of tokens of the tokenizer; `None` without one.
fn num_tokens(found: &FoundTemplate) -> Option<usize> {
    Some(found.files.as_ref()?.tokenizer.as_ref()?.vocab_size())
}

fn count(checks: &[Check], verdict: CheckVerdict) -> usize {
    checks.iter().filter(|check| check.verdict == verdict).count()
}

fn text(found: &FoundTemplate, checks: &[Check]) -> String {
    let tokenizer = match num_tokens(found) {
        Some(count) => format!("{count} tokens"),
        None => "none: texts are compared character by character".to_owned(),
    };
    let head = [["model", &found.name], ["template", &found.origin], ["tokenizer", &tokenizer]];
    let head: Vec<Vec<String>> = head.iter().map(|row| row.map(str::to_owned).to_vec()).collect();
    let row = |check: &Check| {
        vec![check.verdict.word().to_owned(), check.name.to_owned(), check.reason.replace('\n', " ")]
    };
    let rows: Vec<Vec<String>> = checks.iter().map(row).collect();
    let counts = [
        format!("{} ok", count(checks, CheckVerdict::Ok)),
        counted(count(checks, CheckVerdict::Warning), "warning"),
        format!("{} failed", count(checks, CheckVerdict::Fail)),
        format!("{} skipped", count(checks, CheckVerdict::Skipped)),
    ];
    format!("{}\n{}\n{}\n", columns(&head), columns(&rows), counts.join(", "))
}

fn json(found: &FoundTemplate, checks: &[Check]) -> serde_json::Value {
    let check = |check: &Check| {
        json!({
            "check": check.name,
            "verdict": check.verdict.word(),
            "reason": check.reason,
            "detail": check.detail,
        })
    };
    json!({
        "schema": "llmctl.template_check.v1",
        "model": found.name,
        "template": found.origin,
        "tokenizer_tokens": num_tokens(found),
        "checks": checks.iter().map(check).collect::<Vec<_>>(),
        "num_ok": count(checks, CheckVerdict::Ok),
        "num_warnings": count(checks, CheckVerdict::Warning),
        "num_failed": count(checks, CheckVerdict::Fail),
        "num_skipped": count(checks, CheckVerdict::Skipped),
    })
}
