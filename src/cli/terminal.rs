//! Messages beside the answer: notices, errors, statistics, progress, the log. All on stderr.
//!
//! Decides whether a stream may carry colours. A stderr that cannot be written is never an error. Text from a
//! model or a file never gets there with control characters: also a log or a pipe may be shown on a terminal.

pub mod descriptors;
pub mod input;
pub mod output;
pub mod question;
pub mod render;
pub mod report;
pub mod signal;
pub mod slow_cpu;
pub mod tty;
pub mod wrap;

use std::fmt::Display;
use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::error::{CommandError, plain};
use crate::cli::flags::args::ColorWhen;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::wrap::wrapped;

/// stderr and its verbosity.
#[derive(Debug, Clone)]
pub struct Terminal {
    when: ColorWhen,
    color: bool,
    is_terminal: bool,
    verbose: u8,
    quiet: bool,
}

impl Terminal {
    pub fn new(when: ColorWhen, verbose: u8, quiet: bool) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        let color = colors_wanted(when, is_terminal, |name| std::env::var(name).ok());
        Self { when, color, is_terminal, verbose, quiet }
    }

    /// Returns a bar of this form, on a terminal that shows progress.
    pub fn bar(&self, total: u64, template: &str) -> ProgressBar {
        let bar = if self.shows_progress() { ProgressBar::new(total) } else { ProgressBar::hidden() };
        bar.with_style(ProgressStyle::with_template(template).expect("templates are constant and valid"))
    }

    /// Returns the progress of `total` things that `noun` names in the plural, on a terminal that shows it.
    pub fn progress(&self, total: Option<u64>, noun: &str) -> ProgressBar {
        if !self.shows_progress() {
            return ProgressBar::hidden();
        }
        let unit = noun.split(' ').next().unwrap_or(noun).to_owned();
        let template = match total {
            Some(_) => format!("{{pos}}/{{len}} {noun}, {{rate}}, ETA {{eta}} {{wide_bar}} {{msg}}"),
            None => format!("{{spinner}} {{pos}} {noun}, {{rate}} {{msg}}"),
        };
        let style = ProgressStyle::with_template(&template).expect("the template is valid with any noun");
        let style = style.with_key("rate", move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let digits = usize::from(state.per_sec() < 10.0);
            let _ = write!(out, "{:.digits$} {unit}/s", state.per_sec());
        });
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr()).with_style(style);
        bar.tick(); // the first may take long
        bar
    }

    /// Starts the engine's log, filtered by LLMCTL_LOG or else `-v`.
    pub fn start_log(&self) {
        // llmctl reports the failures of MCP servers itself.
        let level = match (self.quiet, self.verbose) {
            (true, _) => "error,rmcp=off",
            (_, 0) => "warn,rmcp=off",
            (_, 1) => "llmctl=info,warn,rmcp=off",
            (_, 2) => "llmctl=debug,info",
            _ => "trace",
        };
        let filter = std::env::var("LLMCTL_LOG").ok().filter(|filter| !filter.is_empty());
        let filter = filter.as_deref().unwrap_or(level);
        let Ok(filter) = tracing_subscriber::EnvFilter::try_new(filter) else {
            self.warn(format!("LLMCTL_LOG: {filter:?} is not a log filter; ignored"));
            return;
        };
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(self.color);
        // By default it would report a failing stderr on stderr, and panic.
        let log = log.log_internal_errors(false);
        // Fails only if a log exists already, as in tests.
        let _ = log.with_writer(std::io::stderr).compact().try_init();
    }

    /// Returns whether text on stdout may carry colours.
    pub fn colors_output(&self) -> bool {
        colors_wanted(self.when, std::io::stdout().is_terminal(), |name| std::env::var(name).ok())
    }

    /// Returns whether notices may carry colours.
    pub fn colors_notices(&self) -> bool {
        self.color
    }

    /// Draws a line that the next status replaces, unless progress must not be drawn. At most one
    /// terminal line of `text` is shown; an empty text clears it.
    pub fn status(&self, text: &str) {
        if self.shows_progress() {
            let text = fitting(&visible(text), self.columns().saturating_sub(1));
            let mut stream = std::io::stderr();
            let _ = write!(stream, "\r\x1b[K{text}").and_then(|()| stream.flush());
        }
    }

    /// Returns the terminal's width; 100 without one.
    pub fn columns(&self) -> usize {
        self.width().unwrap_or(100)
    }

    /// Returns the terminal's width; `None` without one.
    pub fn width(&self) -> Option<usize> {
        self.is_terminal.then(columns).flatten()
    }

    /// Returns whether progress may be drawn.
    pub fn shows_progress(&self) -> bool {
        self.is_terminal && !self.quiet
    }

    pub fn error(&self, error: &CommandError) {
        self.line("error", "1;31", &error.to_string());
        if let Some(hint) = error.hint_text() {
            self.line("hint", "1;36", hint);
        }
    }

    /// Reports a problem that does not stop the work, even with `--quiet`.
    pub fn warn(&self, message: impl Display) {
        self.line("warning", "1;33", &message.to_string());
    }

    /// Reports a fact that is no problem.
    pub fn note(&self, message: impl Display) {
        if !self.quiet {
            self.raw_line(&message.to_string());
        }
    }

    /// Reports a detail, with `-v`.
    pub fn detail(&self, message: &str) {
        if self.verbose > 0 && !self.quiet {
            self.raw_line(message);
        }
    }

    /// Reports what the user asked for (`--stats`), even with `--quiet`.
    pub fn report(&self, message: &str) {
        self.raw_line(message);
    }

    /// Writes text that stands beside the answer, such as reasoning: dim if notices have colours, and without a line end.
    pub fn aside(&self, text: &str) {
        let text = visible(text);
        let (dim, plain) = if self.color { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
        let mut stream = std::io::stderr();
        let _ = write!(stream, "{dim}{text}{plain}").and_then(|()| stream.flush());
    }

    fn line(&self, label: &str, style: &str, message: &str) {
        let message = self.broken(&visible(&plain(message)), label.len() + 2);
        let label = if self.color { format!("\x1b[{style}m{label}:\x1b[0m") } else { format!("{label}:") };
        let _ = writeln!(std::io::stderr(), "{label} {message}");
    }

    fn raw_line(&self, message: &str) {
        let _ = writeln!(std::io::stderr(), "{}", self.broken(&visible(&plain(message)), 0));
    }

    /// Breaks the text between words for a terminal, with its first line starting at column `indent`.
    fn broken(&self, text: &str, indent: usize) -> String {
        match self.width() {
            Some(columns) => wrapped(text, columns, indent),
            None => text.to_owned(),
        }
    }
}

/// Returns the width of the process's terminal, if it has one.
pub fn columns() -> Option<usize> {
    let size = crossterm::terminal::size().ok();
    size.map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Returns whether the terminal reflows lines when it is resized; all but the oldest do.
pub fn moves_lines() -> bool {
    let variable = |name| std::env::var(name).unwrap_or_default();
    variable("XTERM_VERSION").is_empty() && !variable("TERM").starts_with("linux")
}

/// Cuts the text to so many columns.
fn fitting(text: &str, columns: usize) -> String {
    let mut width = 0;
    let fits = |c: &char| {
        width += unicode_width::UnicodeWidthChar::width(*c).unwrap_or(0);
        width <= columns
    };
    text.chars().take_while(fits).collect()
}

/// Returns whether a stream gets colours: decided by the flag, NO_COLOR, CLICOLOR_FORCE, TERM, CLICOLOR, in
/// this order, else by whether it is a terminal (<https://no-color.org>, <https://bixense.com/clicolors>).
pub fn colors_wanted(when: ColorWhen, is_terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    match when {
        ColorWhen::Always => true,
        ColorWhen::Never => false,
        ColorWhen::Auto if set("NO_COLOR").is_some() => false,
        ColorWhen::Auto if set("CLICOLOR_FORCE").is_some_and(|value| value != "0") => true,
        ColorWhen::Auto if set("TERM").as_deref() == Some("dumb") => false,
        ColorWhen::Auto if set("CLICOLOR").as_deref() == Some("0") => false,
        ColorWhen::Auto => is_terminal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_never_wraps() {
        assert_eq!(fitting("prompt 1", 20), "prompt 1");
        assert_eq!(fitting("prompt 1", 4), "prom");
        assert_eq!(fitting("\u{65e5}\u{672c}", 3), "\u{65e5}", "half a wide character is none");
        assert_eq!(fitting("x", 0), "");
    }

    #[test]
    fn colours_follow_flag_variables_and_stream() {
        let check = |when, is_terminal, variables: &[(&str, &str)], expected| {
            let lookup = |name: &str| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(colors_wanted(when, is_terminal, lookup), expected, "{when:?} {variables:?}");
        };
        use ColorWhen::{Always, Auto, Never};
        check(Auto, true, &[], true);
        check(Auto, false, &[], false);
        check(Always, false, &[("NO_COLOR", "1"), ("TERM", "dumb")], true);
        check(Never, true, &[("CLICOLOR_FORCE", "1")], false);
        check(Auto, true, &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")], false);
        check(Auto, true, &[("NO_COLOR", "")], true);
        check(Auto, false, &[("CLICOLOR_FORCE", "1")], true);
        check(Auto, false, &[("CLICOLOR_FORCE", "0")], false);
        check(Auto, true, &[("TERM", "dumb")], false);
        check(Auto, true, &[("CLICOLOR", "0")], false);
    }
}
