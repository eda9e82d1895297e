//! Questions that a command asks on the terminal and a person answers with one line.
//!
//! The question goes to stderr, so that redirected output stays clean. Knows nothing of what is asked.

use std::io::{self, BufRead, IsTerminal, Write};

use super::output::visible;
use super::tty;
use crate::cli::error::{CommandError, Kind};

/// The answer to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypedAnswer {
    /// A line without its ends; empty for Enter.
    Line(String),
    /// End of input, or the check of [`ask`] ended the wait.
    None,
}

impl TypedAnswer {
    /// Returns whether the answer is yes; Enter counts as `on_enter`.
    pub fn is_yes(&self, on_enter: bool) -> bool {
        let Self::Line(line) = self else { return false };
        match line.to_ascii_lowercase().as_str() {
            "" => on_enter,
            word => matches!(word, "y" | "yes"),
        }
    }
}

/// Returns whether a person can read a question and answer it: stdin and stderr are terminals.
pub fn can_ask() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks and waits for a line. `is_cancelled` is checked at least five times a second and after every signal.
///
/// # Errors
/// The terminal cannot be read or written.
pub fn ask(question: &str, is_cancelled: impl Fn() -> bool) -> io::Result<TypedAnswer> {
    let _modes = tty::LineModes::begin();
    // Keys typed before the question do not answer it.
    tty::forget_typed();
    let mut stderr = io::stderr();
    write!(stderr, "{} ", visible(question)).and_then(|()| stderr.flush())?;
    while !tty::has_line()? {
        if is_cancelled() {
            writeln!(stderr)?;
            return Ok(TypedAnswer::None);
        }
    }
    let mut line = String::new();
    let num_read = io::stdin().lock().read_line(&mut line)?;
    Ok(if num_read == 0 { TypedAnswer::None } else { TypedAnswer::Line(line.trim().to_owned()) })
}

/// Asks whether something may be erased. Enter denies.
///
/// # Errors
/// A usage error without a terminal; the terminal cannot be read or written.
pub fn may_erase(question: &str) -> Result<bool, CommandError> {
    if !can_ask() {
        let message = format!("there is no terminal to ask on: {question}");
        return Err(Kind::Usage.error(message).hint("--yes erases without a question"));
    }
    let answer = ask(&format!("{question} y(es), n(o):"), || false);
    Ok(answer.map_err(|error| CommandError::new(Kind::Io, error))?.is_yes(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_and_a_default_agree() {
        let is_yes = |line: &str, on_enter| TypedAnswer::Line(line.to_owned()).is_yes(on_enter);
        assert!(is_yes("y", false) && is_yes("YES", false) && is_yes("", true));
        assert!(
            !is_yes("", false)
                && !is_yes("n", true)
                && !is_yes("yess", true)
                && !TypedAnswer::None.is_yes(true)
        );
    }
}
