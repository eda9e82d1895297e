//! Text for a terminal's columns: rows that line up, and characters that a terminal must not interpret.

use std::borrow::Cow;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Formats rows in columns, two spaces apart, without trailing spaces; a cell has `widest` columns at most.
pub fn aligned(rows: &[Vec<String>], widest: usize) -> String {
    let rows: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| shortened(cell, widest)).collect()).collect();
    let width = |n: usize| rows.iter().filter_map(|row| row.get(n)).map(|cell| cell.width()).max();
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let line = |row: &Vec<Cow<'_, str>>| {
        // Padded by hand, because `{cell:<width$}` panics beyond 65,535 columns.
        let pad = |(cell, width): (&Cow<'_, str>, &usize)| {
            format!("{cell}{}", " ".repeat(width.saturating_sub(cell.width())))
        };
        let cells: Vec<_> = row.iter().zip(&widths).map(pad).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Cuts the text to at most `columns` columns.
fn shortened(text: &str, columns: usize) -> Cow<'_, str> {
    let text = visible(text);
    if text.width() <= columns {
        return text;
    }
    let mut width = 1; // of the ellipsis
    let fits = |c: &char| {
        width += c.width().unwrap_or(0);
        width <= columns
    };
    let mut cut: String = text.chars().take_while(fits).collect();
    cut.push('\u{2026}');
    cut.into()
}

/// Replaces control characters other than line feed and tab by symbols: ESC becomes U+241B, and so on.
///
/// C1 controls have no symbol; U+009B alone would start an escape sequence, so they become U+FFFD. So do
/// controls that reorder the text after them (U+202A to U+202E, U+2066 to U+2069), which would make it read
/// as something else. Right-to-left scripts need none of them.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_hostile) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match c {
        '\x7f' => '\u{2421}',
        _ if !is_hostile(c) => c,
        _ => char::from_u32(c as u32 + 0x2400).filter(|_| c < ' ').unwrap_or(char::REPLACEMENT_CHARACTER),
    };
    text.chars().map(symbol).collect::<String>().into()
}

fn is_hostile(c: char) -> bool {
    let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || c.is_control() && c != '\n' && c != '\t'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_text_is_untouched() {
        assert!(matches!(visible("Grüße 🙂 \u{5e9}\u{5dc}\u{200f}\n\t"), Cow::Borrowed(_)));
    }

    #[test]
    fn columns_line_up() {
        let rows =
            [["a", "bb", "c"], ["\u{e9}\u{e9}\u{e9}", "b", ""]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(aligned(&rows, usize::MAX), "a    bb  c\n\u{e9}\u{e9}\u{e9}  b\n");
        assert_eq!(aligned(&[], usize::MAX), "");
        let wide = ["\u{65e5}\u{672c}", "b"].map(str::to_owned).to_vec();
        assert_eq!(
            aligned(&[wide, vec!["a".to_owned(), "b".to_owned()]], usize::MAX),
            "\u{65e5}\u{672c}  b\na     b\n"
        );
    }

    #[test]
    fn a_cell_may_be_longer_than_a_format_width() {
        let long = "a".repeat(70_000);
        let rows = [vec![long.clone(), "b".to_owned()], vec!["c".to_owned(), "d".to_owned()]];
        let text = aligned(&rows, usize::MAX);
        assert!(text.starts_with(&format!("{long}  b\nc")) && text.ends_with(" d\n"));
        assert_eq!(aligned(&rows, 5), "aaaa\u{2026}  b\nc      d\n");
        assert_eq!(
            shortened("\u{65e5}\u{672c}\u{8a9e}", 4),
            "\u{65e5}\u{2026}",
            "half a wide character is none"
        );
    }
}
