//! Text with attributes, written only where they change, and with the line breaks of its terminal.

use crate::cli::terminal::output::visible;
use crate::cli::terminal::wrap::Wrap;

/// Style of text. Uses the terminal's sixteen colours, so that any theme stays readable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextStyle {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    pub strike: bool,
    /// SGR number, 31 to 37.
    pub color: Option<u8>,
}

impl TextStyle {
    pub const PLAIN: TextStyle =
        TextStyle { bold: false, dim: false, italic: false, strike: false, color: None };
    pub const DIM: TextStyle = TextStyle { dim: true, ..TextStyle::PLAIN };

    pub const fn colored(color: u8) -> Self {
        TextStyle { color: Some(color), ..TextStyle::PLAIN }
    }

    fn codes(self) -> String {
        let flags = [(self.bold, 1), (self.dim, 2), (self.italic, 3), (self.strike, 9)];
        let set = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, code)| code);
        let codes: Vec<String> = set.chain(self.color).map(|code| code.to_string()).collect();
        codes.join(";")
    }
}

/// Styled text under way to a terminal.
#[derive(Debug)]
pub struct Styled {
    out: StyledText,
    wrap: Wrap<TextStyle>,
    /// No line is broken: code, tables.
    is_verbatim: bool,
}

/// Text with attributes, ready to print.
#[derive(Debug)]
struct StyledText {
    text: String,
    now: TextStyle,
    has_attributes: bool,
}

impl Styled {
    /// Without `has_attributes` the text is plain; lines are broken where there are `columns`.
    pub fn new(has_attributes: bool, columns: Option<usize>) -> Self {
        let out = StyledText { text: String::new(), now: TextStyle::PLAIN, has_attributes };
        Self { out, wrap: Wrap::new(columns), is_verbatim: false }
    }

    pub fn resize(&mut self, columns: Option<usize>) {
        self.wrap.resize(columns);
    }

    pub fn push(&mut self, text: &str, style: TextStyle) {
        let out = &mut self.out;
        for c in visible(text).chars() {
            match self.is_verbatim {
                true => self.wrap.push_verbatim(c, style, &mut |c, style| out.push(c, style)),
                false => self.wrap.push(c, style, &mut |c, style| out.push(c, style)),
            }
        }
    }

    pub fn push_char(&mut self, c: char, style: TextStyle) {
        self.push(c.encode_utf8(&mut [0; 4]), style);
    }

    /// Passes further text through unchanged, or no longer.
    pub fn set_verbatim(&mut self, is_verbatim: bool) {
        self.is_verbatim = is_verbatim;
    }

    /// Takes the collected text and keeps the attributes.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.out.text)
    }

    /// Writes the text that is held back, and turns the attributes off.
    pub fn reset(&mut self) {
        let out = &mut self.out;
        self.wrap.flush(&mut |c, style| out.push(c, style));
        self.out.change(TextStyle::PLAIN);
    }
}

impl StyledText {
    fn push(&mut self, c: char, style: TextStyle) {
        self.change(style);
        self.text.push(c);
    }

    fn change(&mut self, style: TextStyle) {
        if style != self.now && self.has_attributes {
            self.text.push_str(if self.now == TextStyle::PLAIN { "" } else { "\x1b[0m" });
            if style != TextStyle::PLAIN {
                self.text.push_str(&format!("\x1b[{}m", style.codes()));
            }
            self.now = style;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a text without its attributes.
    pub fn plain(text: &str) -> String {
        let (mut kept, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once("\x1b[") {
            kept.push_str(before);
            rest = after.split_once('m').map_or("", |(_, rest)| rest);
        }
        kept + rest
    }

    #[test]
    fn attributes_are_written_where_they_change_and_hostile_text_has_none() {
        let bold = TextStyle { bold: true, ..TextStyle::colored(36) };
        let mut styled = Styled::new(true, None);
        styled.push("a", TextStyle::PLAIN);
        styled.push("b", bold);
        styled.push("c", bold);
        styled.push("", TextStyle::PLAIN);
        styled.push("d\x1b[31m", TextStyle::DIM);
        assert_eq!(styled.take(), "a\x1b[1;36mbc\x1b[0m\x1b[2md\u{241b}[31m");
        styled.reset();
        styled.reset();
        assert_eq!(styled.take(), "\x1b[0m");
    }

    #[test]
    fn a_word_goes_to_the_next_line_with_its_attributes_and_verbatim_text_stays() {
        let mut styled = Styled::new(true, Some(8));
        styled.push("one t", TextStyle::PLAIN);
        assert_eq!(styled.take(), "one");
        styled.push("wo th", TextStyle::DIM);
        assert_eq!(styled.take(), " t\x1b[2mwo");
        styled.push("ree ", TextStyle::DIM);
        assert_eq!(styled.take(), "\nthree");
        styled.set_verbatim(true);
        styled.push("x y z x y z", TextStyle::DIM);
        assert_eq!(styled.take(), " x y z x y z");
        let mut plain = Styled::new(false, Some(8));
        plain.push("one two three", TextStyle::DIM);
        plain.reset();
        assert_eq!(plain.take(), "one two\nthree");
    }
}
