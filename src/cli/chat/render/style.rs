//! Text with attributes: written only where they change.

use crate::cli::output::visible;

/// What text looks like. The terminal's own sixteen colours, so that any theme stays readable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    pub strike: bool,
    /// SGR number, 31 to 37.
    pub color: Option<u8>,
}

impl Style {
    pub const PLAIN: Style = Style { bold: false, dim: false, italic: false, strike: false, color: None };
    pub const DIM: Style = Style { dim: true, ..Style::PLAIN };

    pub const fn colored(color: u8) -> Self {
        Style { color: Some(color), ..Style::PLAIN }
    }

    fn codes(self) -> String {
        let flags = [(self.bold, 1), (self.dim, 2), (self.italic, 3), (self.strike, 9)];
        let set = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, code)| code);
        let codes: Vec<String> = set.chain(self.color).map(|code| code.to_string()).collect();
        codes.join(";")
    }
}

/// Styled text under way to a terminal.
#[derive(Debug, Default)]
pub struct Styled {
    text: String,
    now: Style,
}

impl Styled {
    pub fn push(&mut self, text: &str, style: Style) {
        if text.is_empty() {
            return;
        }
        if style != self.now {
            self.text.push_str(if self.now == Style::PLAIN { "" } else { "\x1b[0m" });
            if style != Style::PLAIN {
                self.text.push_str(&format!("\x1b[{}m", style.codes()));
            }
            self.now = style;
        }
        self.text.push_str(&visible(text));
    }

    pub fn push_char(&mut self, c: char, style: Style) {
        self.push(c.encode_utf8(&mut [0; 4]), style);
    }

    /// What has come together, the attributes as they are.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    /// Attributes off.
    pub fn reset(&mut self) {
        if self.now != Style::PLAIN {
            self.text.push_str("\x1b[0m");
            self.now = Style::PLAIN;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_written_where_they_change_and_hostile_text_has_none() {
        let bold = Style { bold: true, ..Style::colored(36) };
        let mut styled = Styled::default();
        styled.push("a", Style::PLAIN);
        styled.push("b", bold);
        styled.push("c", bold);
        styled.push("", Style::PLAIN);
        styled.push("d\x1b[31m", Style::DIM);
        assert_eq!(styled.take(), "a\x1b[1;36mbc\x1b[0m\x1b[2md\u{241b}[31m");
        styled.reset();
        styled.reset();
        assert_eq!(styled.take(), "\x1b[0m");
    }
}
