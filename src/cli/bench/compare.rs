//! `llmctl bench compare`.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::terminal::report::{ReportFormat, print, print_json, stdout_width};
use llmctl_bench::compare::{self, Compared};

/// Compare results with the first of them
///
/// Exits with 1 when a case is slower beyond noise: the 95% interval of the ratio lies on the wrong side of 1, and the
/// change is larger than --threshold.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct CompareArgs {
    /// Results of `llmctl bench --save` (or of `llama-bench -o json`), the one to compare with first
    #[arg(value_name = "FILE", required = true, num_args = 2..)]
    pub files: Vec<PathBuf>,

    /// Largest change that is no regression, however certain, in percent
    #[arg(long, value_name = "PERCENT", default_value = "2", value_parser = not_negative, hide_short_help = true)]
    pub threshold: f64,

    /// Format of stdout: a table, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

const LONG_HELP: &str = include_str!("compare_help.txt").trim_ascii_end();

pub fn not_negative(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value >= 0.0 && value.is_finite() { Ok(value) } else { Err("must not be negative".to_owned()) }
}

/// Runs the subcommand.
pub fn run(args: &CompareArgs) -> Result<Exit, CommandError> {
    let documents = args.files.iter().map(|path| compare::read(path)).collect::<Result<Vec<_>, _>>()?;
    let (first, others) = documents.split_first().expect("clap wants two");
    let threshold = args.threshold / 100.0;
    let mut all = Vec::new();
    for (path, document) in args.files[1..].iter().zip(others) {
        all.push(compare::compared(first, document, &path.display().to_string(), threshold)?);
    }
    match args.output {
        ReportFormat::Text => {
            let tables: Vec<_> = all
                .iter()
                .map(|one| compare::text(&args.files[0].display().to_string(), one, stdout_width()))
                .collect();
            print(&tables.join("\n"))?;
        }
        ReportFormat::Json => {
            let results: Vec<_> = all.iter().map(compare::to_json).collect();
            print_json(&json!({"schema": "llmctl.bench-compare.v1", "results": results}))?;
        }
    }
    Ok(exit(&all))
}

/// Returns exit code 1 for a regression.
pub fn exit(all: &[Compared]) -> Exit {
    if all.iter().any(Compared::is_worse) { Exit::from(Kind::Failure) } else { Exit::Success }
}
