//! `llmctl man`: manual pages in roff, made from the command line's definition.
//!
//! clap_mangen formats the options. This file formats the sections after the options in `--help`, with their
//! titles, examples and columns. *A page explains everything that `--help` does (a test reads every page).*

use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;
use roff::{Roff, roman};

use super::error::{CommandError, Exit};
use crate::cli::terminal::report::print;

/// Print the manual page for `man -l -`, or write one for each subcommand
#[derive(Debug, Clone, Args)]
#[command(after_long_help = "\
Examples:
  llmctl man | man -l -
  llmctl man --out ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Write llmctl.1, llmctl-run.1 and so on into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

pub fn run(args: ManArgs, command: Command) -> Result<Exit, CommandError> {
    let pages = pages(command);
    match args.out {
        Some(folder) => {
            write_all(&pages, &folder).map_err(CommandError::io(folder.display()))?;
            Ok(Exit::Success)
        }
        None if io::stdout().is_terminal() => {
            let error = CommandError::usage("a manual page is for `man`, and no text for a terminal");
            Err(error.hint("`llmctl man | man -l -` shows it; --out DIR writes all pages"))
        }
        None => print(pages.last().map_or("", |page| &page.text)),
    }
}

/// A manual page and its file name.
struct Page {
    name: String,
    text: String,
}

fn write_all(pages: &[Page], folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    pages.iter().try_for_each(|page| fs::write(folder.join(&page.name), &page.text))
}

/// Returns the pages of all subcommands, and last the program's.
fn pages(command: Command) -> Vec<Page> {
    // A page of `help` would have no content of its own.
    let mut command = explained(command).disable_help_subcommand(true);
    command.build();
    let mut pages = Vec::new();
    collect(&command, &mut pages);
    pages
}

fn collect(command: &Command, pages: &mut Vec<Page>) {
    command.get_subcommands().filter(|below| !below.is_hide_set()).for_each(|below| collect(below, pages));
    pages.push(page(command));
}

/// Unhides options and adds long help: clap_mangen skips those that `-h` hides or that have one line of help.
fn explained(command: Command) -> Command {
    command.mut_args(|arg| arg.hide_short_help(false)).mut_subcommands(explained)
}

fn page(command: &Command) -> Page {
    let after = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    let bare = command.clone().after_help(None::<&str>).after_long_help(None::<&str>);
    let man = Man::new(bare);
    let mut text = Vec::new();
    let mut roff = Roff::new();
    after.iter().for_each(|after| set_sections(after, &mut roff));
    // Writing to a Vec cannot fail.
    let _ = man.render(&mut text).and_then(|()| roff.to_writer(&mut text));
    Page { name: man.get_filename(), text: String::from_utf8_lossy(&text).into_owned() }
}

/// Formats the text after the options in `--help`: titles that end with a colon, and indented lines below
/// them.
fn set_sections(text: &str, roff: &mut Roff) {
    let mut is_preformatted = false;
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let is_indented = line.starts_with(' ');
        let next_is_indented = lines.get(at + 1).is_some_and(|next| next.starts_with(' '));
        let wants = keeps_its_form(line);
        if !line.is_empty() && wants != is_preformatted {
            roff.control(if wants { "nf" } else { "fi" }, []);
            is_preformatted = wants;
        }
        if line.is_empty() {
            continue;
        } else if !is_indented && next_is_indented && line.ends_with(':') {
            roff.control("SH", [line.trim_end_matches(':').to_uppercase().as_str()]);
        } else if is_preformatted {
            roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
        } else {
            roff.control("PP", []);
            roff.text([roman(line.trim_start())]);
        }
    }
    if is_preformatted {
        roff.control("fi", []);
    }
}

/// Returns whether a line's layout matters: columns, commands and file contents.
fn keeps_its_form(line: &str) -> bool {
    let text = line.trim_start();
    let indent = line.len() - text.len();
    let is_command = ["llmctl ", "hf ", "git ", "curl ", "printf ", "echo ", "LLMCTL_API_KEY="]
        .iter()
        .any(|start| text.starts_with(start));
    let is_toml = text.starts_with('[') || text.contains(" = ");
    indent > 0 && (indent > 2 || text.contains("  ") || is_toml || is_command)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the page without roff's escapes and font changes.
    fn plain(page: &Page) -> String {
        let text = page.text.replace("\\-", "-").replace("\\\\", "\\").replace("\\*(Aq", "'");
        ["\\fB", "\\fR", "\\fI", "\\&", "\\e"].iter().fold(text, |text, mark| text.replace(mark, ""))
    }

    fn all() -> Vec<(Command, String)> {
        let mut command = crate::cli::command().disable_help_subcommand(true);
        command.build();
        fn flatten(command: &Command, found: &mut Vec<Command>) {
            command.get_subcommands().for_each(|below| flatten(below, found));
            found.push(command.clone());
        }
        let mut commands = Vec::new();
        flatten(&command, &mut commands);
        let pages = pages(crate::cli::command());
        assert_eq!(commands.len(), pages.len());
        commands.into_iter().zip(pages.iter().map(plain)).collect()
    }

    #[test]
    fn every_option_and_argument_is_explained_on_its_page() {
        for (command, page) in all() {
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let (name, id) = (command.get_name(), arg.get_id());
                if ["help", "version"].contains(&id.as_str()) {
                    continue; // clap's own, whose text varies
                }
                let help = arg.get_help().unwrap_or_else(|| panic!("{name}: {id} has no help")).to_string();
                // The text must follow its option, not be anywhere on the page.
                let head = match arg.get_long() {
                    Some(long) => format!("--{long}"),
                    None => arg.get_value_names().map_or(id.to_string(), |names| names[0].to_string()),
                };
                let options = page.find(".TP").map_or("", |at| &page[at..]);
                let explained = options.split(".TP").any(|entry| {
                    let mut lines = entry.trim_start().lines();
                    let heading = lines.next().unwrap_or_default();
                    heading.contains(&head) && lines.any(|line| line.contains(help.trim()))
                });
                assert!(explained, "{name}: {id} ({head}): {help}\n{options}");
            }
        }
    }

    #[test]
    fn sections_have_names_and_columns_stay() {
        for (command, page) in all() {
            assert!(!page.contains(".SH EXTRA"), "{}", command.get_name());
            let count = |request: &str| page.lines().filter(|line| *line == request).count();
            assert_eq!(count(".nf"), count(".fi"), "{}", command.get_name());
        }
        let pages = pages(crate::cli::command());
        let run = pages.iter().find(|page| page.name == "llmctl-run.1").map(plain).expect("a page");
        for section in ["EXAMPLES", "STRUCTURED OUTPUT", "STANDARD INPUT", "EXIT CODES"] {
            assert!(
                run.contains(&format!(".SH \"{section}\"")) || run.contains(&format!(".SH {section}")),
                "{section}"
            );
        }
        assert!(run.contains("0    success, also when"), "columns are as written");
        let main = pages.last().map(plain).expect("a page");
        assert!(main.contains(".nf\n$XDG_CONFIG_HOME/llmctl/config.toml    your defaults"), "{main}");
    }
}
