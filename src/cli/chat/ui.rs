//! The terminal side of a chat: notices, the line editor, signals.

use std::io::IsTerminal;

use super::input::LineInput;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::table;
use crate::cli::terminal::signal::Graceful;

/// Input and output of a chat.
pub struct Ui<'a> {
    pub terminal: &'a Terminal,
    pub input: LineInput,
    pub graceful: Graceful,
    /// Answers are written without styles.
    pub is_plain: bool,
}

impl Ui<'_> {
    /// Returns whether the user types at a terminal.
    pub fn is_interactive(&self) -> bool {
        self.input.is_terminal()
    }

    /// Returns the signal that ends the chat: any but Ctrl-C's.
    pub fn terminated(&self) -> Option<u8> {
        self.graceful.received().filter(|number| *number != super::SIGINT)
    }

    /// Returns whether answers are styled.
    pub fn is_styled(&self) -> bool {
        (self.terminal.colors_output() || std::io::stdout().is_terminal()) && !self.is_plain
    }

    /// Writes a table as wide as the terminal.
    pub fn report_table(&self, rows: &[Vec<String>]) {
        self.terminal.report(table(rows, self.terminal.columns()).trim_end());
    }
}
