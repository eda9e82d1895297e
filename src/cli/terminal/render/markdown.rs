//! Markdown as it streams: markers stay, what they mark is styled.
//!
//! A line begins undecided and is held back until its first characters tell what it is (a heading, a list, a
//! fence); in it only a run of marker characters is held back, until the character behind it says whether it
//! opens or closes. An emphasis that is never closed ends with its line. The rules are those of CommonMark as
//! far as they can be applied without knowing the rest of the paragraph
//! (<https://spec.commonmark.org/0.31.2/>).

use super::code::Code;
use super::style::{Styled, TextStyle};

const HEADING: TextStyle = TextStyle { bold: true, ..TextStyle::PLAIN };
const MARKER: TextStyle = TextStyle::colored(36);
const SPAN: TextStyle = TextStyle::colored(36);

/// One answer.
pub struct Markdown {
    out: Styled,
    place: MarkdownPlace,
    /// Characters that are not decided yet: of a line's beginning, or a run of markers.
    held: String,
    line: MarkdownLine,
    code: Option<Fence>,
}

enum MarkdownPlace {
    /// At the start of a line, or behind its `>`.
    Start,
    /// Within a line of text.
    Text,
    /// Behind an opening fence, which has so many marks.
    Info { mark: char, count: usize, info: String },
    /// In a line of code.
    Code,
}

/// A block of code that is open.
struct Fence {
    mark: char,
    count: usize,
    code: Code,
}

/// Styles in force within a line.
#[derive(Default)]
struct MarkdownLine {
    base: TextStyle,
    strong: bool,
    emphasis: bool,
    strike: bool,
    /// Backticks that opened a span of code; 0 outside.
    span: usize,
    escaped: bool,
    previous: Option<char>,
}

impl MarkdownLine {
    fn style(&self) -> TextStyle {
        if self.span > 0 {
            return TextStyle { bold: self.base.bold, ..SPAN };
        }
        TextStyle {
            bold: self.base.bold || self.strong,
            italic: self.base.italic || self.emphasis,
            strike: self.strike,
            ..self.base
        }
    }
}

impl MarkdownLine {
    fn open(&mut self, mark: char, count: usize) {
        match mark {
            '`' => self.span = count,
            '~' => self.strike = true,
            _ => {
                self.strong |= count >= 2;
                self.emphasis |= count != 2;
            }
        }
    }

    fn close(&mut self, mark: char, count: usize) {
        match mark {
            '`' => self.span = 0,
            '~' => self.strike = false,
            _ => {
                self.strong &= count == 1;
                self.emphasis &= count == 2;
            }
        }
    }
}

/// Kind of a line.
#[derive(Debug, PartialEq, Eq)]
enum MarkdownBlock {
    Text,
    Heading,
    Quote,
    Item,
    Fence { mark: char, count: usize },
}

impl Markdown {
    /// With attributes or without; lines are broken between words where there are `columns`, but for code and tables.
    pub fn new(has_attributes: bool, columns: Option<usize>) -> Self {
        let (held, line) = Default::default();
        Self {
            out: Styled::new(has_attributes, columns),
            place: MarkdownPlace::Start,
            held,
            line,
            code: None,
        }
    }

    /// The terminal is this wide now.
    pub fn resize(&mut self, columns: Option<usize>) {
        self.out.resize(columns);
    }

    /// Takes the next text, split anywhere, and gives what can be printed.
    pub fn push(&mut self, text: &str) -> String {
        text.chars().for_each(|c| self.take(c));
        self.out.take()
    }

    /// Returns the rest, with all attributes off.
    pub fn finish(&mut self) -> String {
        match &self.place {
            MarkdownPlace::Start if self.closes_code() => {
                self.out.push(&std::mem::take(&mut self.held), TextStyle::DIM);
                self.end_code();
            }
            MarkdownPlace::Start if self.code.is_some() => self.begin_code(),
            MarkdownPlace::Start => self.begin_text(),
            MarkdownPlace::Text => self.resolve(None),
            MarkdownPlace::Info { .. } | MarkdownPlace::Code => {}
        }
        if let Some(fence) = &mut self.code {
            fence.code.finish(&mut self.out);
        }
        self.resolve(None);
        self.out.reset();
        self.out.take()
    }

    fn take(&mut self, c: char) {
        match &mut self.place {
            MarkdownPlace::Start => {
                self.held.push(c);
                if self.code.is_some() { self.decide_code() } else { self.decide() }
            }
            MarkdownPlace::Text => self.take_text(c),
            MarkdownPlace::Code => self.take_code(c),
            MarkdownPlace::Info { mark, info, .. } => {
                // Backticks may not follow in the line: it was a span of code.
                let is_span = *mark == '`' && c == '`';
                info.push(c);
                self.out.push_char(c, TextStyle::DIM);
                if c == '\n' || is_span {
                    self.end_info(is_span);
                }
            }
        }
    }

    fn end_info(&mut self, is_span: bool) {
        let place = std::mem::replace(
            &mut self.place,
            if is_span { MarkdownPlace::Text } else { MarkdownPlace::Start },
        );
        if let (MarkdownPlace::Info { mark, count, info }, false) = (place, is_span) {
            self.code = Some(Fence { mark, count, code: Code::new(info.trim()) });
            self.out.set_verbatim(true);
        }
    }

    fn decide(&mut self) {
        let Some(block) = block(&self.held) else { return };
        let held = std::mem::take(&mut self.held);
        let indent = held.len() - held.trim_start_matches(' ').len();
        match block {
            MarkdownBlock::Text => {
                self.held = held;
                self.begin_text();
            }
            MarkdownBlock::Heading => {
                self.line.base = HEADING;
                self.place = MarkdownPlace::Text;
                held.chars().for_each(|c| self.take_text(c));
            }
            MarkdownBlock::Quote => {
                self.out.push(&held, TextStyle::DIM);
                self.line.base.italic = true;
            }
            MarkdownBlock::Item => {
                // The last character is the blank behind the marker.
                self.out.push(&held, MARKER);
                self.line.previous = Some(' ');
                self.place = MarkdownPlace::Text;
            }
            MarkdownBlock::Fence { mark, count } => {
                let begins = indent + count * mark.len_utf8();
                self.out.push(&held[..begins], TextStyle::DIM);
                self.place = MarkdownPlace::Info { mark, count, info: String::new() };
                held[begins..].chars().for_each(|c| self.take(c));
            }
        }
    }

    fn begin_text(&mut self) {
        self.place = MarkdownPlace::Text;
        let held = std::mem::take(&mut self.held);
        // A row of a table makes no sense on two lines.
        self.out.set_verbatim(held.trim_start().starts_with('|'));
        held.chars().for_each(|c| self.take_text(c));
    }

    fn take_text(&mut self, c: char) {
        if self.held.chars().next().is_some_and(|mark| mark != c) {
            self.resolve(Some(c));
        }
        let is_mark = match self.line.span {
            0 => matches!(c, '*' | '_' | '`' | '~') && !self.line.escaped,
            _ => c == '`',
        };
        if is_mark {
            self.held.push(c);
            return;
        }
        if c == '\n' {
            self.out.push_char(c, TextStyle::PLAIN);
            self.out.set_verbatim(false);
            self.line = MarkdownLine::default();
            self.place = MarkdownPlace::Start;
            return;
        }
        self.line.escaped = c == '\\' && !self.line.escaped && self.line.span == 0;
        self.out.push_char(c, self.line.style());
        self.line.previous = Some(c);
    }

    /// Prints a run of markers: with what it opens or closes, now that it is known what follows.
    fn resolve(&mut self, next: Option<char>) {
        let run = std::mem::take(&mut self.held);
        let Some(mark) = run.chars().next() else { return };
        let (count, line) = (run.len(), &mut self.line);
        let blank = |c: Option<char>| c.is_none_or(char::is_whitespace);
        let word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let can_open = !blank(next) && !word(line.previous);
        let can_close = !blank(line.previous) && (mark != '_' || !word(next));
        let (is_open, is_right) = match mark {
            '`' => (line.span > 0, line.span == 0 || line.span == count),
            '~' => (line.strike, count == 2),
            _ => (if count == 2 { line.strong } else { line.emphasis }, true),
        };
        if is_right && is_open && (mark == '`' || can_close) {
            self.out.push(&run, line.style());
            line.close(mark, count);
        } else {
            // A strong text may begin inside a word, as it often does in text without blanks.
            let is_inside = mark == '*' && count >= 2 && !blank(next);
            if is_right && !is_open && (mark == '`' || can_open || is_inside) {
                line.open(mark, count);
            }
            self.out.push(&run, line.style());
        }
        self.line.previous = Some(mark);
    }

    /// Returns whether the line, if it ends here, closes the block of code.
    fn closes_code(&self) -> bool {
        let Some(fence) = &self.code else { return false };
        let marks = self.held.trim();
        marks.len() >= fence.count && marks.chars().all(|c| c == fence.mark)
    }

    /// In a block of code: whether the line closes it.
    fn decide_code(&mut self) {
        let Some(fence) = &self.code else { return };
        let body = self.held.trim_start_matches(' ');
        let count = body.chars().take_while(|c| *c == fence.mark).count();
        let rest = &body[count * fence.mark.len_utf8()..];
        let may_close = rest.is_empty() || (count >= fence.count && rest.trim().is_empty());
        if !may_close {
            self.begin_code();
        } else if rest.ends_with('\n') {
            self.out.push(&self.held, TextStyle::DIM);
            self.held.clear();
            self.end_code();
        }
    }

    fn end_code(&mut self) {
        self.code = None;
        self.out.set_verbatim(false);
    }

    fn begin_code(&mut self) {
        self.place = MarkdownPlace::Code;
        let held = std::mem::take(&mut self.held);
        held.chars().for_each(|c| self.take_code(c));
    }

    fn take_code(&mut self, c: char) {
        if let Some(fence) = &mut self.code {
            fence.code.push(c, &mut self.out);
        }
        if c == '\n' {
            self.place = MarkdownPlace::Start;
        }
    }
}

/// Returns the kind of the line; `None` if its beginning does not decide it.
fn block(line: &str) -> Option<MarkdownBlock> {
    let body = line.trim_start_matches(' ');
    let first = body.chars().next()?;
    let count = body.chars().take_while(|c| *c == first).count();
    let after = |bytes: usize| body[bytes..].chars().next();
    let blank = |c: char| c == ' ' || c == '\t';
    match first {
        '#' if count <= 6 => {
            after(count).map(|c| if c == ' ' { MarkdownBlock::Heading } else { MarkdownBlock::Text })
        }
        '`' | '~' => after(count).map(|_| match count >= 3 {
            true => MarkdownBlock::Fence { mark: first, count },
            false => MarkdownBlock::Text,
        }),
        '>' => Some(MarkdownBlock::Quote),
        '-' | '+' | '*' => after(1).map(|c| if blank(c) { MarkdownBlock::Item } else { MarkdownBlock::Text }),
        '0'..='9' => {
            let digits = body.bytes().take_while(u8::is_ascii_digit).count();
            if digits > 9 {
                return Some(MarkdownBlock::Text);
            }
            match after(digits)? {
                '.' | ')' => after(digits + 1)
                    .map(|c| if blank(c) { MarkdownBlock::Item } else { MarkdownBlock::Text }),
                _ => Some(MarkdownBlock::Text),
            }
        }
        _ => Some(MarkdownBlock::Text),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::style::tests::plain;
    use super::*;

    fn rendered(text: &str) -> String {
        let mut markdown = Markdown::new(true, None);
        markdown.push(text) + &markdown.finish()
    }

    #[test]
    fn what_is_marked_is_styled_and_the_marks_stay() {
        for (text, expected) in [
            ("plain", "plain"),
            ("a **b** c", "a \x1b[1m**b**\x1b[0m c"),
            ("a *b* c", "a \x1b[3m*b*\x1b[0m c"),
            ("***a***", "\x1b[1;3m***a***\x1b[0m"),
            ("a __b__ _c_", "a \x1b[1m__b__\x1b[0m \x1b[3m_c_\x1b[0m"),
            ("~~a~~", "\x1b[9m~~a~~\x1b[0m"),
            ("use `a*b*` now", "use \x1b[36m`a*b*`\x1b[0m now"),
            ("``a ` b`` c", "\x1b[36m``a ` b``\x1b[0m c"),
            ("# A *b*\nc", "\x1b[1m# A \x1b[0m\x1b[1;3m*b*\x1b[0m\nc"),
            ("- a\n  * b", "\x1b[36m- \x1b[0ma\n\x1b[36m  * \x1b[0mb"),
            ("12. a", "\x1b[36m12. \x1b[0ma"),
            ("> a", "\x1b[2m>\x1b[0m\x1b[3m a\x1b[0m"),
            ("**open\nnext", "\x1b[1m**open\x1b[0m\nnext"),
        ] {
            assert_eq!(rendered(text), expected, "{text:?}");
        }
    }

    #[test]
    fn what_looks_like_markup_and_is_none_stays_plain() {
        for text in [
            "2 * 3 * 4",
            "snake_case_name",
            "a\\*b\\*",
            "#hash",
            "-5",
            "3.14 is pi",
            "1234567890. x",
            "----",
            "a ~ b",
            "f(**",
            "**",
            "*",
            "_",
            "a b*",
            "- ",
        ] {
            assert_eq!(plain(&rendered(text)), text);
        }
        for text in ["2 * 3 * 4", "snake_case_name", "a\\*b\\*", "#hash", "-5", "3.14 is pi", "a ~ b"] {
            assert_eq!(rendered(text), text);
        }
    }

    #[test]
    fn code_is_coloured_between_its_fences_only() {
        let text = "x\n```rust\nlet a = 1; // *n*\n``\n```\n*b*";
        let out = rendered(text);
        assert_eq!(plain(&out), text);
        assert!(out.contains("\x1b[2m```rust\n"), "{out:?}");
        assert!(out.contains("\x1b[2m// *n*"), "{out:?}");
        assert!(out.ends_with("\x1b[2m```\n\x1b[0m\x1b[3m*b*\x1b[0m"), "{out:?}");
        let inline = rendered("```x``` y");
        assert_eq!(plain(&inline), "```x``` y");
        assert!(plain(&rendered("~~~\n```\n~~~\n# a")).ends_with("# a"));
        assert!(
            rendered("~~~\n```\n~~~\n# a").ends_with("\x1b[1m# a\x1b[0m"),
            "only its own fence closes a block"
        );
    }

    #[test]
    fn held_back_is_only_what_is_undecided() {
        let mut markdown = Markdown::new(true, None);
        assert_eq!(markdown.push("Hello wor"), "Hello wor");
        assert_eq!(markdown.push("ld *"), "ld ");
        assert_eq!(markdown.push("a"), "\x1b[3m*a");
    }

    #[test]
    fn lines_break_between_words_but_not_in_code_and_tables() {
        let broken = |text: &str| {
            let mut markdown = Markdown::new(false, Some(12));
            markdown.push(text) + &markdown.finish()
        };
        assert_eq!(broken("**one** two three"), "**one** two\nthree");
        assert_eq!(broken("- one two three"), "- one two\nthree");
        assert_eq!(
            broken("```\none two three\n```\none two three"),
            "```\none two three\n```\none two\nthree"
        );
        assert_eq!(broken("| one | two three |\none two three"), "| one | two three |\none two\nthree");
        let mut markdown = Markdown::new(false, Some(12));
        assert_eq!(markdown.push("one two thr"), "one two", "what may have to move is not printed yet");
        assert_eq!(markdown.push("ee"), "");
        markdown.resize(Some(20));
        assert_eq!(markdown.push(" four "), " three four");
        assert_eq!(markdown.finish(), " ");
    }

    #[test]
    fn a_terminal_is_never_controlled() {
        let hostile = "\x1b]0;t\x07 **\x1b[2J** `\x1b[H`\n```c\n\x1b[5m\n```\n";
        let out = rendered(hostile);
        assert_eq!(plain(&out), crate::cli::terminal::output::visible(hostile));
    }

    proptest! {
        #[test]
        fn splitting_the_stream_changes_no_byte(
            text in "([*_`~#>a-c \n\\\\é日]|```rust\n|```\n|let x = \"s\"; // c\n|fn f\\(\\) \\{\\}\n|\\*\\*|- |1\\. |🙂){0,60}",
            seed in any::<u64>(),
        ) {
            let whole = rendered(&text);
            let mut markdown = Markdown::new(true, None);
            let (mut parts, mut piece, mut random) = (String::new(), String::new(), seed);
            for c in text.chars() {
                piece.push(c);
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 62 == 0 {
                    parts.push_str(&markdown.push(&piece));
                    piece.clear();
                }
            }
            parts.push_str(&markdown.push(&piece));
            parts.push_str(&markdown.finish());
            prop_assert_eq!(&parts, &whole);
            prop_assert_eq!(plain(&whole), text);
        }
    }
}
