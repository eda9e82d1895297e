//! What the user is told beside the answer: notices, errors, statistics, progress, the log. All on stderr.
//!
//! Owns the decision whether a stream may carry colours. A stderr that cannot be written to is never an error, and
//! nothing that a model or a file says reaches a terminal with its control characters intact.

use std::io::{IsTerminal, Write};

use super::args::ColorWhen;
use super::error::{CommandError, plain};
use super::output::visible;
use super::wrap::wrapped;

/// stderr, and how much to say there.
#[derive(Debug, Clone)]
pub struct Terminal {
    when: ColorWhen,
    color: bool,
    is_terminal: bool,
    verbose: u8,
    quiet: bool,
    /// Lines longer than the terminal's are broken between words.
    wraps: bool,
}

impl Terminal {
    pub fn new(when: ColorWhen, verbose: u8, quiet: bool) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        let color = colors_wanted(when, is_terminal, |name| std::env::var(name).ok());
        Self { when, color, is_terminal, verbose, quiet, wraps: false }
    }

    /// The same, for a conversation: long lines are broken between words.
    pub fn wrapping(&self) -> Self {
        Self { wraps: true, ..self.clone() }
    }

    /// The flag that has another llmctl say as much, where it takes one.
    pub fn verbosity(&self) -> Option<String> {
        match (self.quiet, self.verbose) {
            (true, _) => Some("--quiet".to_owned()),
            (false, 0) => None,
            (false, level) => Some(format!("-{}", "v".repeat(usize::from(level)))),
        }
    }

    /// The log of the engine: LLMCTL_LOG, else what -v asks for.
    pub fn start_log(&self) {
        let level = match (self.quiet, self.verbose) {
            (true, _) => "error",
            (_, 0) => "warn",
            (_, 1) => "llmctl=info,warn",
            (_, 2) => "llmctl=debug,info",
            _ => "trace",
        };
        let filter = std::env::var("LLMCTL_LOG").ok().filter(|filter| !filter.is_empty());
        let filter = filter.as_deref().unwrap_or(level);
        let Ok(filter) = tracing_subscriber::EnvFilter::try_new(filter) else {
            self.warn(&format!("LLMCTL_LOG: {filter:?} is not a log filter; ignored"));
            return;
        };
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(self.color);
        // By itself it would report a stderr that cannot be written to on stderr, and panic.
        let log = log.log_internal_errors(false);
        // Fails only when a log is already set up, as in tests.
        let _ = log.with_writer(std::io::stderr).compact().try_init();
    }

    /// Whether text on stdout may carry colours.
    pub fn colors_output(&self) -> bool {
        colors_wanted(self.when, std::io::stdout().is_terminal(), |name| std::env::var(name).ok())
    }

    /// Whether notices may carry colours.
    pub fn colors_notices(&self) -> bool {
        self.color
    }

    /// A line that the next one takes the place of; nothing where progress may not be drawn. At most `text` is shown, never
    /// more than a line of the terminal, and an empty one only clears.
    pub fn status(&self, text: &str) {
        if self.shows_progress() {
            let text = fitting(&visible(text), self.columns().saturating_sub(1));
            let mut stream = std::io::stderr();
            let _ = write!(stream, "\r\x1b[K{text}").and_then(|()| stream.flush());
        }
    }

    /// How wide the terminal is; 100 without one.
    pub fn columns(&self) -> usize {
        self.width().unwrap_or(100)
    }

    /// How wide the terminal is, where there is one.
    pub fn width(&self) -> Option<usize> {
        self.is_terminal.then(columns).flatten()
    }

    /// Whether progress may be drawn.
    pub fn shows_progress(&self) -> bool {
        self.is_terminal && !self.quiet
    }

    pub fn error(&self, error: &CommandError) {
        self.line("error", "1;31", &error.to_string());
        if let Some(hint) = error.hint_text() {
            self.line("hint", "1;36", hint);
        }
    }

    /// Something is wrong, and the work goes on. Said even when quiet, which is about notices.
    pub fn warn(&self, message: &str) {
        self.line("warning", "1;33", message);
    }

    /// Something the user should know, and nothing is wrong.
    pub fn note(&self, message: &str) {
        if !self.quiet {
            self.raw_line(message);
        }
    }

    /// What `-v` asks for.
    pub fn detail(&self, message: &str) {
        if self.verbose > 0 && !self.quiet {
            self.raw_line(message);
        }
    }

    /// What the user asked for explicitly (`--stats`): said even when quiet.
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
        let message = self.broken(&self.safe(&plain(message)), label.len() + 2);
        let label = if self.color { format!("\x1b[{style}m{label}:\x1b[0m") } else { format!("{label}:") };
        let _ = writeln!(std::io::stderr(), "{label} {message}");
    }

    fn raw_line(&self, message: &str) {
        let _ = writeln!(std::io::stderr(), "{}", self.broken(&self.safe(&plain(message)), 0));
    }

    /// The text as it stands on the terminal when its first line begins at column `indent`.
    fn broken(&self, text: &str, indent: usize) -> String {
        match self.width().filter(|_| self.wraps) {
            Some(columns) => wrapped(text, columns, indent),
            None => text.to_owned(),
        }
    }

    fn safe<'a>(&self, message: &'a str) -> std::borrow::Cow<'a, str> {
        if self.is_terminal { visible(message) } else { message.into() }
    }
}

/// How wide the process's terminal is, if it has one.
pub fn columns() -> Option<usize> {
    let size = crossterm::terminal::size().ok();
    size.map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Whether the terminal breaks its lines anew when it is resized: all do but the oldest.
pub fn moves_lines() -> bool {
    let variable = |name| std::env::var(name).unwrap_or_default();
    variable("XTERM_VERSION").is_empty() && !variable("TERM").starts_with("linux")
}

/// As much of the text as fits so many columns.
fn fitting(text: &str, columns: usize) -> String {
    let mut width = 0;
    let fits = |c: &char| {
        width += unicode_width::UnicodeWidthChar::width(*c).unwrap_or(0);
        width <= columns
    };
    text.chars().take_while(fits).collect()
}

/// Whether a stream gets colours: the flag, else NO_COLOR, CLICOLOR_FORCE, TERM, CLICOLOR, in this order, else
/// whether it is a terminal (<https://no-color.org>, <https://bixense.com/clicolors>).
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
