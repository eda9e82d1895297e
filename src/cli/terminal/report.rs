//! Output of the helper subcommands, and what reports share with them: text for people, or one JSON object.
//! Formats only.

use std::io::IsTerminal;
use std::path::Path;

use clap::ValueEnum;
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr;

use super::output::{Output, OutputError};
use crate::cli::error::{CommandError, Exit, Kind};
use llmctl_base::columns::aligned;
pub use llmctl_base::units::bytes;
use llmctl_engine::{DraftModelUsage, Usage};
use llmctl_serve::wire::answer::remote_json;

/// `--output` of helper subcommands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    #[default]
    Text,
    Json,
}

/// Refuses to replace a file without `--force`, and a path that cannot be one.
pub fn check_new_file(path: &Path, may_replace: bool) -> Result<(), CommandError> {
    let shown = path.display();
    if path.is_dir() || path.file_name().is_none() {
        return Err(CommandError::usage(format!("{shown} is a folder, not a file to write")));
    }
    match path.exists() && !may_replace {
        true => Err(CommandError::usage(format!("{shown} exists already")).hint("--force replaces it")),
        false => Ok(()),
    }
}

/// Returns whether both exist and are one file, whatever they are called.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Writes `text` to stdout. A closed pipe is not an error.
pub fn print(text: &str) -> Result<Exit, CommandError> {
    match Output::stdout().write(text) {
        Ok(()) | Err(OutputError::Closed) => Ok(Exit::Success),
        Err(OutputError::Failed(error)) => Err(error),
    }
}

/// Writes one JSON object, indented.
pub fn print_json(value: &Value) -> Result<Exit, CommandError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| CommandError::new(Kind::Bug, error))?;
    print(&(text + "\n"))
}

/// Returns JSON members behind their schema.
pub fn with_schema(schema: &str, members: Value) -> Value {
    let mut whole = json!({"schema": schema});
    if let (Value::Object(whole), Value::Object(members)) = (&mut whole, members) {
        whole.extend(members);
    }
    whole
}

/// Writes text, or one JSON object of these members.
pub fn print_either(
    format: ReportFormat,
    text: &str,
    schema: &str,
    members: Value,
) -> Result<Exit, CommandError> {
    match format {
        ReportFormat::Text => print(text),
        ReportFormat::Json => print_json(&with_schema(schema, members)),
    }
}

/// Formats a number with its noun: `1 turn`, `2 turns`, `1,000 rows`.
pub fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{} {noun}s", grouped(count)),
    }
}

/// Formats a number with commas between thousands.
pub fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let mut text = digits[..first].to_owned();
    for at in (first..digits.len()).step_by(3) {
        text.push_str(if text.is_empty() { "" } else { "," });
        text.push_str(&digits[at..at + 3]);
    }
    text
}

/// Describes how long ago it was, in the largest whole unit.
pub fn age(ms: u64) -> String {
    let seconds = ms / 1000;
    let units = [("day", 86_400), ("hour", 3_600), ("minute", 60)];
    let unit = units.iter().find(|(_, length)| seconds >= *length);
    match unit.map(|(name, length)| (name, seconds / length)) {
        None => "just now".to_owned(),
        Some((name, 1)) => format!("1 {name} ago"),
        Some((name, count)) => format!("{count} {name}s ago"),
    }
}

/// Returns as much of a text as `most` characters, on one line.
pub fn on_one_line(text: &str, most: usize) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(most) {
        Some((end, _)) => format!("{}\u{2026}", &words[..end]),
        None => words,
    }
}

/// Formats rows in columns, two spaces apart, without trailing spaces. On a terminal a line that is too long
/// is cut, with an ellipsis; elsewhere it is whole.
pub fn columns(rows: &[Vec<String>]) -> String {
    aligned(rows, stdout_width())
}

/// Returns the columns of stdout: all that a line needs where it is no terminal.
pub fn stdout_width() -> usize {
    std::io::stdout().is_terminal().then(super::columns).flatten().unwrap_or(usize::MAX)
}

/// Formats rows for a terminal: in columns if they fit, else each row as its first cell with the others below it, each after
/// its word of the head if there is one, in capitals.
pub fn table(rows: &[Vec<String>], width: usize) -> String {
    let text = aligned(rows, usize::MAX);
    if text.lines().all(|line| line.width() <= width) {
        return text;
    }
    let head = rows.first().filter(|row| row.iter().all(|cell| *cell == cell.to_uppercase()));
    let row = |row: &Vec<String>| {
        let (first, rest) = row.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
        let word = |at: usize| head.and_then(|head| head.get(at + 1)).map(|word| word.to_lowercase() + " ");
        let cells = rest.iter().enumerate().filter(|(_, cell)| !cell.trim().is_empty());
        let rest: Vec<_> = cells.map(|(at, cell)| word(at).unwrap_or_default() + cell.trim()).collect();
        let below = if rest.is_empty() { String::new() } else { format!("    {}\n", rest.join(" \u{b7} ")) };
        format!("{}\n{below}", first.trim_end())
    };
    rows[usize::from(head.is_some())..].iter().map(row).collect()
}

/// Returns the number as a user would write it: 0.6, not the nearest f32 in 17 digits. Infinities become null, because JSON
/// has none.
pub fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().ok().filter(|value| value.is_finite()).into()
}

/// Returns the tokens of the context that a turn used.
pub fn used(usage: &Usage) -> usize {
    usage.prompt_tokens.saturating_add(usage.completion_tokens)
}

/// Returns the part of `--stats` about drafts, which follows the number of tokens; `refuses_drafts` if the
/// model makes none.
pub fn drafts(usage: &Usage, refuses_drafts: bool) -> String {
    let Usage { drafted_tokens, accepted_tokens, .. } = usage;
    let all = match drafted_tokens {
        0 if refuses_drafts => ", no drafts: the model cannot drop rows".to_owned(),
        0 => String::new(),
        _ => format!(", {accepted_tokens} of {drafted_tokens} drafted accepted"),
    };
    all + &usage.draft_model.map_or(String::new(), by_draft_model)
}

fn by_draft_model(usage: DraftModelUsage) -> String {
    let DraftModelUsage { drafter, drafted_tokens, accepted_tokens, stop } = usage;
    let stop = stop.map_or(String::new(), |stop| format!(", then none: {stop}"));
    format!("; by {} {accepted_tokens} of {drafted_tokens}{stop}", drafter.name())
}

/// Returns OpenAI's usage object.
pub fn usage_json(usage: &Usage) -> Value {
    let mut json = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": used(usage),
        "cached_tokens": usage.cached_tokens,
    });
    if usage.drafted_tokens > 0 {
        json["drafted_tokens"] = usage.drafted_tokens.into();
        json["accepted_tokens"] = usage.accepted_tokens.into();
    }
    if let Some(remote) = usage.remote {
        json["engine"] = remote_json(remote);
    }
    if let Some(draft_model) = usage.draft_model {
        json["draft_model"] = json!(draft_model);
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_file_that_was_edited_cannot_overflow() {
        let usage = Usage { prompt_tokens: usize::MAX, completion_tokens: 2, ..Usage::default() };
        assert_eq!(used(&usage), usize::MAX);
    }

    #[test]
    fn ages_are_in_the_largest_whole_unit() {
        for (seconds, expected) in [
            (0, "just now"),
            (59, "just now"),
            (60, "1 minute ago"),
            (7_199, "1 hour ago"),
            (7_200, "2 hours ago"),
            (86_400 * 400, "400 days ago"),
        ] {
            assert_eq!(age(seconds * 1000), expected);
        }
    }

    #[test]
    fn a_table_that_is_too_wide_is_a_list() {
        let rows = [["NAME", "TURNS"], ["trip", "2"], ["a-long-name", ""]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, 20), columns(&rows));
        assert_eq!(table(&rows, 16), "trip\n    turns 2\na-long-name\n");
    }

    #[test]
    fn numbers_are_as_a_user_writes_them() {
        assert_eq!(decimal(0.6).to_string(), "0.6");
        assert_eq!(decimal(f32::NEG_INFINITY), Value::Null);
    }

    #[test]
    fn numbers_agree_with_their_nouns() {
        let said = [0, 1, 2, 999, 1000, 1_234_567].map(|count| counted(count, "row"));
        assert_eq!(said, ["0 rows", "1 row", "2 rows", "999 rows", "1,000 rows", "1,234,567 rows"]);
    }
}
