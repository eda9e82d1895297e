//! What the helper subcommands print: text for people, or one JSON object. Formats; knows no subject.

use clap::ValueEnum;
use unicode_width::UnicodeWidthStr;

use super::error::{CommandError, Exit, Kind};
use super::output::{Output, OutputError};

/// `--output` of helper subcommands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    #[default]
    Text,
    Json,
}

/// Writes `text` to stdout. A reader that has gone away is not an error.
pub fn print(text: &str) -> Result<Exit, CommandError> {
    match Output::stdout().write(text) {
        Ok(()) | Err(OutputError::Closed) => Ok(Exit::Success),
        Err(OutputError::Failed(error)) => Err(error),
    }
}

/// Writes one JSON object, indented.
pub fn print_json(value: &serde_json::Value) -> Result<Exit, CommandError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| CommandError::new(Kind::Bug, error))?;
    print(&(text + "\n"))
}

/// `1.5 GiB`: binary units, as the tools that show memory do.
pub fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

/// Rows in aligned columns, two spaces apart, none at the line's end.
pub fn columns(rows: &[Vec<String>]) -> String {
    let width = |n: usize| rows.iter().filter_map(|row| row.get(n)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Rows with a head, for a terminal: in columns where these fit, else each row as its first cell with the others below it.
pub fn table(rows: &[Vec<String>], width: usize) -> String {
    let aligned = columns(rows);
    if aligned.lines().all(|line| line.width() <= width) {
        return aligned;
    }
    let row = |row: &Vec<String>| {
        let (first, rest) = row.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
        let rest: Vec<&str> = rest.iter().map(|cell| cell.trim()).filter(|cell| !cell.is_empty()).collect();
        let below = if rest.is_empty() { String::new() } else { format!("    {}\n", rest.join(" \u{b7} ")) };
        format!("{}\n{below}", first.trim_end())
    };
    rows.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (count, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536 << 20, "1.5 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), expected);
        }
    }

    #[test]
    fn a_table_that_is_too_wide_is_a_list() {
        let rows = [["NAME", "TURNS"], ["trip", "2"], ["a-long-name", ""]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, 20), columns(&rows));
        assert_eq!(table(&rows, 16), "NAME\n    TURNS\ntrip\n    2\na-long-name\n");
    }

    #[test]
    fn columns_line_up() {
        let rows =
            [["a", "bb", "c"], ["\u{e9}\u{e9}\u{e9}", "b", ""]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), "a    bb  c\n\u{e9}\u{e9}\u{e9}  b\n");
        assert_eq!(columns(&[]), "");
    }
}
