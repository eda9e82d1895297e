//! Output constraints: `--schema`, `--grammar` and `--regex`, read before a model is loaded.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{BatchArgs, PromptArgs};
use crate::cli::error::CommandError;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::{read_all_stdin, read_file};
use llmctl_engine::grammar::GrammarSource;
use llmctl_engine::turn::OutputConstraint;

/// Flags that constrain the answer.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Structured output")]
pub struct ConstraintArgs {
    /// Answer in JSON that satisfies this JSON Schema: a file, the schema itself, or `-` for stdin
    ///
    /// Enforced while the answer is generated. A keyword that cannot be enforced is refused by name. An object with `properties`
    /// has only those, unless `additionalProperties` says otherwise (the standard lets it have any others: --schema-open).
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["grammar", "regex", "prefill_response"])]
    pub schema: Option<String>,

    /// Read schemas as their standard does: objects may have members that the schema does not name
    #[arg(long, hide_short_help = true)]
    pub schema_open: bool,

    /// Answer in the language of this grammar: Lark in llguidance's variant, or llama.cpp's GBNF
    ///
    /// The form tells them apart: GBNF has rules with `::=`, and begins at the rule `root`.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["regex", "prefill_response"],
        hide_short_help = true,
    )]
    pub grammar: Option<PathBuf>,

    /// Answer with a text that matches this regular expression from its beginning to its end
    #[arg(long, value_name = "REGEX", conflicts_with = "prefill_response", hide_short_help = true)]
    pub regex: Option<String>,

    /// The constraint that they name; set after the parse.
    #[arg(skip)]
    pub source: Option<GrammarSource>,
}

impl ConstraintArgs {
    /// Reads what is named. A schema on stdin leaves none for the prompt.
    ///
    /// # Errors
    /// `NotFound` for a file, `BadData` for what is no JSON, `Usage` when two things are to be read from stdin.
    pub fn read(
        &mut self,
        prompt: &mut PromptArgs,
        batch: &BatchArgs,
        terminal: &Terminal,
    ) -> Result<(), CommandError> {
        if self.schema.as_deref() == Some("-") {
            let is_stdin = |path: &Option<PathBuf>| path.as_deref() == Some(Path::new("-"));
            if is_stdin(&prompt.prompt_file) || is_stdin(&batch.batch) {
                return Err(CommandError::usage("--schema and the prompt cannot both be read from stdin"));
            }
            prompt.no_stdin = true;
        }
        self.source = self.parse(terminal)?;
        Ok(())
    }

    fn parse(&self, terminal: &Terminal) -> Result<Option<GrammarSource>, CommandError> {
        if let Some(schema) = &self.schema {
            let source = schema_source(schema, terminal)?;
            return Ok(Some(if self.schema_open { source } else { source.closed() }));
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(GrammarSource::grammar(read_file(path)?)));
        }
        Ok(self.regex.clone().map(GrammarSource::Regex))
    }

    pub fn is_given(&self) -> bool {
        self.schema.is_some() || self.grammar.is_some() || self.regex.is_some()
    }

    /// Returns the constraint of the flags, if any.
    pub fn constraint(&self) -> Option<OutputConstraint> {
        let source = self.source.clone()?;
        Some(OutputConstraint { source, param: self.flag() })
    }

    /// Returns the flag that was given.
    pub fn flag(&self) -> &'static str {
        match (&self.grammar, &self.regex) {
            (Some(_), _) => "--grammar",
            (_, Some(_)) => "--regex",
            _ => "--schema",
        }
    }
}

fn schema_source(given: &str, terminal: &Terminal) -> Result<GrammarSource, CommandError> {
    let (name, text) = match given {
        "-" => ("standard input", read_all_stdin(terminal)?.unwrap_or_default()),
        json if json.trim_start().starts_with('{') => ("--schema", json.to_owned()),
        path => (path, read_file(Path::new(path))?),
    };
    let schema = serde_json::from_str(&text)
        .map_err(|error| CommandError::bad_data(format!("not JSON: {error}")).context(name.to_owned()))?;
    Ok(GrammarSource::JsonSchema(schema))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::error::Kind;
    use crate::cli::flags::args::ColorWhen;

    fn parse(args: ConstraintArgs) -> Result<Option<GrammarSource>, CommandError> {
        args.parse(&Terminal::new(ColorWhen::Never, 0, true))
    }

    fn schema(given: &str) -> ConstraintArgs {
        ConstraintArgs { schema: Some(given.to_owned()), ..ConstraintArgs::default() }
    }

    #[test]
    fn a_schema_is_a_file_or_what_begins_with_a_brace() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("schema.json");
        std::fs::write(&path, "{\"type\": \"string\"}\n").expect("written");
        let expected = Some(GrammarSource::JsonSchema(json!({"type": "string"})));
        assert_eq!(parse(schema(path.to_str().expect("UTF-8"))).expect("reads"), expected);
        assert_eq!(parse(schema(" {\"type\": \"string\"}")).expect("parses"), expected);
        assert_eq!(parse(ConstraintArgs::default()).expect("nothing"), None);
        let error = parse(schema("{\"type\": ")).expect_err("no JSON");
        assert_eq!(error.kind, Kind::BadData);
        assert!(error.to_string().starts_with("--schema: not JSON: "), "{error}");
        assert_eq!(parse(schema("missing.json")).expect_err("no file").kind, Kind::NotFound);
    }

    #[test]
    fn stdin_is_read_once() {
        let mut prompt = PromptArgs { prompt_file: Some("-".into()), ..PromptArgs::default() };
        let error =
            schema("-").read(&mut prompt, &BatchArgs::default(), &Terminal::new(ColorWhen::Never, 0, true));
        assert_eq!(error.expect_err("two readers").kind, Kind::Usage);
    }
}
