//! The keys that were pressed while an answer was written, as the text of the next line.
//!
//! The text stays unsent: Enter breaks the line, as in a paste. Of the keys that edit, those that erase
//! backwards count; others, such as arrows, are left out. Knows no terminal.

/// Returns the text that the keys make.
pub fn text(keys: &[u8]) -> String {
    let keys = String::from_utf8_lossy(keys).replace("\r\n", "\r");
    let (mut line, mut rest) = (String::new(), keys.chars());
    while let Some(key) = rest.next() {
        match key {
            '\x1b' => skip_sequence(&mut rest),
            '\r' | '\n' => line.push('\n'),
            '\x08' | '\x7f' => drop(line.pop()),
            '\x15' => line.truncate(line.rfind('\n').map_or(0, |at| at + 1)),
            _ if key.is_control() && key != '\t' => {}
            _ => line.push(key),
        }
    }
    line.trim_matches('\n').to_owned()
}

/// Skips what follows an escape: `[200~`, `[1;5C`, `OP`. Any other key after it counts by itself, because the key Esc may have
/// been pressed alone.
fn skip_sequence(rest: &mut std::str::Chars<'_>) {
    let after = rest.as_str();
    let count = match after.strip_prefix('[') {
        Some(parameters) => parameters.find(|c| ('@'..='~').contains(&c)).map_or(after.len(), |at| at + 2),
        None if after.starts_with('O') => 2,
        None => 0,
    };
    *rest = after.get(count..).unwrap_or_default().chars();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_is_text_with_its_lines_and_without_its_keys() {
        for (keys, expected) in [
            ("FIRST\rSECOND\rTHIRD\r", "FIRST\nSECOND\nTHIRD"),
            ("\x1b[200~a\r\nb\r\tc\x1b[201~", "a\nb\n\tc"),
            ("\u{65e5}\u{672c}x\x7f\x08\u{8a9e}", "\u{65e5}\u{8a9e}"),
            ("a\rwrong\x15b", "a\nb"),
            ("\x1b[A\x1b[1;5Cx\x1bOPy\x1bz\x03\x04", "xyz"),
            ("\x1b\rx\x1b[1", "x"),
            ("\x7f\x15\r\r", ""),
        ] {
            assert_eq!(text(keys.as_bytes()), expected, "{keys:?}");
        }
        assert_eq!(text(b"a\xffb"), "a\u{fffd}b");
    }
}
