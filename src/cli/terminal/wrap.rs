//! Breaks lines between words, for a terminal.
//!
//! Text comes in pieces, split anywhere, and is written piece by piece; written text is never moved. So a
//! word is held back until the blank after it, and the blanks before it until the word is known to fit the
//! line; if not, a line break replaces the blanks. Ideographs are words by themselves, with punctuation that
//! must stay with them. A word longer than a line (an address, a path) starts a new line and is left to the
//! terminal, which keeps it whole for copying. Verbatim text is never broken. Knows no colours: a piece
//! carries a mark `M` that is passed through.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Columns between tab stops.
const TAB: usize = 8;

/// Punctuation that must not start a line.
const CLOSING: &str =
    "、。，．・：；？！）］｝〉》」』】〕〗〙〛”’ーぁぃぅぇぉっゃゅょァィゥェォッャュョ々…％";
/// Punctuation that must not end a line.
const OPENING: &str = "（［｛〈《「『【〔〖〘〚“‘";

/// State of line breaking in one text.
#[derive(Debug)]
pub struct Wrap<M> {
    /// Width of the terminal; `None` breaks no line.
    columns: Option<usize>,
    /// Column of the next character.
    column: usize,
    /// Blanks held back; written with the next word if it fits.
    blanks: Vec<(char, M)>,
    word: Vec<(char, M)>,
    /// The word as one string: its width is not the sum of its characters' widths.
    word_text: String,
    /// The word is longer than a line, and is written as it comes.
    is_long: bool,
}

impl<M: Copy> Wrap<M> {
    pub fn new(columns: Option<usize>) -> Self {
        let (blanks, word, word_text) = Default::default();
        Self { columns, column: 0, blanks, word, word_text, is_long: false }
    }

    /// Changes the terminal's width. A terminal that became narrower has broken the line itself.
    pub fn resize(&mut self, columns: Option<usize>) {
        if columns == self.columns {
            return; // a line that is full stays full
        }
        self.columns = columns;
        self.column = columns.map_or(self.column, |columns| self.column % columns.max(1));
    }

    /// Adds a character. Calls `write` for characters that can be written.
    pub fn push(&mut self, c: char, mark: M, write: &mut impl FnMut(char, M)) {
        let Some(columns) = self.columns else { return write(c, mark) };
        match c {
            '\n' => {
                self.flush(write);
                write(c, mark);
                self.column = 0;
            }
            ' ' | '\t' => {
                self.place_word(columns, write);
                self.is_long = false;
                self.blanks.push((c, mark));
            }
            _ => {
                if self.may_break_before(c) {
                    self.place_word(columns, write);
                    self.is_long = false;
                }
                self.word.push((c, mark));
                self.word_text.push(c);
                if self.is_long || self.word_text.width() > columns {
                    self.place_word(columns, write);
                    self.is_long = true;
                }
            }
        }
    }

    /// Adds a character that is never moved, as in code.
    pub fn push_verbatim(&mut self, c: char, mark: M, write: &mut impl FnMut(char, M)) {
        self.flush(write);
        write(c, mark);
        if c == '\n' {
            self.column = 0;
        } else {
            self.advance(c);
        }
    }

    /// Writes what is held back.
    pub fn flush(&mut self, write: &mut impl FnMut(char, M)) {
        if let Some(columns) = self.columns {
            self.place_word(columns, write);
            self.place_blanks(columns, write);
        }
        self.is_long = false;
    }

    fn may_break_before(&self, c: char) -> bool {
        let Some(&(last, _)) = self.word.last() else { return false };
        let is_bound = c.width() == Some(0) || CLOSING.contains(c) || OPENING.contains(last);
        !is_bound && (is_ideograph(c) || is_ideograph(last))
    }

    fn place_word(&mut self, columns: usize, write: &mut impl FnMut(char, M)) {
        if self.word.is_empty() {
            return;
        }
        let before = self.blanks.iter().fold(self.column, |column, (c, _)| column + width_at(*c, column));
        let fits = before + self.word_text.width() <= columns;
        if fits || self.is_long {
            self.place_blanks(usize::MAX, write);
        } else if self.column == 0 {
            self.blanks.clear(); // the margin makes room for the word
        } else {
            let mark = self.word[0].1;
            self.blanks.clear();
            write('\n', mark);
            self.column = 0;
        }
        for (c, mark) in std::mem::take(&mut self.word) {
            write(c, mark);
        }
        self.column += std::mem::take(&mut self.word_text).width();
        if self.column > columns {
            self.column %= columns.max(1);
        }
    }

    /// Writes trailing blanks as far as the line goes.
    fn place_blanks(&mut self, columns: usize, write: &mut impl FnMut(char, M)) {
        for (c, mark) in std::mem::take(&mut self.blanks) {
            let width = width_at(c, self.column);
            if self.column.saturating_add(width) <= columns {
                write(c, mark);
                self.column += width;
            }
        }
    }

    fn advance(&mut self, c: char) {
        self.column += width_at(c, self.column);
        if let Some(columns) = self.columns.filter(|columns| self.column > *columns) {
            self.column %= columns.max(1);
        }
    }
}

fn width_at(c: char, column: usize) -> usize {
    if c == '\t' { TAB - column % TAB } else { c.width().unwrap_or(0) }
}

/// Returns whether the character is written without blanks between words.
fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{2e80}'..='\u{9fff}' | '\u{a000}'..='\u{a4cf}' | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ff60}' | '\u{20000}'..='\u{3ffff}')
}

/// Returns the text with long lines broken. Its first line starts at column `indent`. Lines after a break are
/// indented like the line that was broken.
pub fn wrapped(text: &str, columns: usize, indent: usize) -> String {
    let mut lines = Vec::new();
    for (at, line) in text.split('\n').enumerate() {
        let margin = line.len() - line.trim_start_matches(' ').len();
        let margin = if margin * 2 > columns { 0 } else { margin };
        let first = if at == 0 { indent } else { margin };
        let mut wrap = Wrap::new(Some(columns.saturating_sub(margin).max(1)));
        wrap.column = first.saturating_sub(margin);
        let mut out = " ".repeat(margin);
        let mut write = |c, ()| {
            out.push(c);
            if c == '\n' {
                out.push_str(&" ".repeat(margin));
            }
        };
        line[margin..].chars().for_each(|c| wrap.push(c, (), &mut write));
        wrap.flush(&mut write);
        lines.push(out);
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn broken(text: &str, columns: usize) -> String {
        let (mut wrap, mut out) = (Wrap::new(Some(columns)), String::new());
        text.chars().for_each(|c| wrap.push(c, (), &mut |c, ()| out.push(c)));
        wrap.flush(&mut |c, ()| out.push(c));
        out
    }

    #[test]
    fn lines_break_between_words() {
        for (text, expected) in [
            ("one two three", "one two\nthree"),
            ("one two  three", "one two\nthree"),
            ("one two\nthree", "one two\nthree"),
            ("12345678 x", "12345678\nx"),
            ("1234567 x", "1234567\nx"),
            ("123456 x", "123456 x"),
            ("  in two", "  in two"),
            ("  indent two", "  indent\ntwo"),
            ("  indented two", "indented\ntwo"),
            ("\ta b", "a b"),
            ("a  ", "a  "),
            ("12345678  ", "12345678"),
        ] {
            assert_eq!(broken(text, 8), expected, "{text:?}");
        }
    }

    #[test]
    fn what_is_longer_than_a_line_stays_in_one_piece() {
        assert_eq!(broken("see https://a.example/b and c", 8), "see\nhttps://a.example/b and\nc");
        assert_eq!(broken("https://a.example/b", 8), "https://a.example/b");
    }

    #[test]
    fn wide_characters_take_two_columns_and_break_anywhere_but_before_punctuation() {
        assert_eq!(broken("日本語です", 6), "日本語\nです");
        assert_eq!(broken("日本語。", 6), "日本\n語。");
        assert_eq!(broken("a日本「語」", 7), "a日本\n「語」");
        assert_eq!(broken("e\u{301}e\u{301} e\u{301}", 4), "e\u{301}e\u{301} e\u{301}");
        assert_eq!(broken("ab 👩‍👩‍👧 c", 5), "ab 👩‍👩‍👧\nc");
    }

    #[test]
    fn code_is_not_broken_and_what_follows_it_knows_its_column() {
        let (mut wrap, mut out) = (Wrap::new(Some(8)), String::new());
        let mut write = |c, ()| out.push(c);
        "see ".chars().for_each(|c| wrap.push(c, (), &mut write));
        "let x = 1".chars().for_each(|c| wrap.push_verbatim(c, (), &mut write));
        " ok 1234".chars().for_each(|c| wrap.push(c, (), &mut write));
        wrap.flush(&mut write);
        assert_eq!(out, "see let x = 1 ok\n1234");
    }

    #[test]
    fn a_full_line_is_full_however_often_the_width_is_asked_for() {
        let (mut wrap, mut out) = (Wrap::new(Some(8)), String::new());
        for c in "one four two".chars() {
            wrap.resize(Some(8));
            wrap.push(c, (), &mut |c, ()| out.push(c));
        }
        wrap.resize(Some(3));
        wrap.push('x', (), &mut |c, ()| out.push(c));
        wrap.flush(&mut |c, ()| out.push(c));
        assert_eq!(out, "one four\ntwox");
    }

    #[test]
    fn whole_texts_keep_their_margin() {
        assert_eq!(wrapped("one two three", 8, 0), "one two\nthree");
        assert_eq!(wrapped("one two three", 8, 6), "\none two\nthree");
        assert_eq!(wrapped("  a bb ccc dd", 8, 0), "  a bb\n  ccc dd");
        assert_eq!(wrapped("a\n\n  b", 8, 0), "a\n\n  b");
    }

    proptest! {
        #[test]
        fn no_character_is_lost_and_no_line_is_longer_than_its_words(text in "[a-d日。 \n]{0,80}", columns in 2usize..20) {
            let out = broken(&text, columns);
            let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            prop_assert_eq!(letters(&out), letters(&text));
            for line in out.lines() {
                prop_assert!(line.width() <= columns || !line.trim().contains(' ') || text.lines().any(|l| l.split(' ').any(|w| w.width() > columns)), "{:?}", line);
            }
        }
    }
}
