//! Splits a byte stream into server-sent events (WHATWG HTML, 9.2.6).
//!
//! Tolerant where servers differ: line ends, a missing space after the colon, comments. Pure.

/// Most bytes of an event.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Splits a stream into the data of its events.
#[derive(Debug, Default)]
pub struct SseParser {
    /// Bytes of the unfinished line.
    line: Vec<u8>,
    data: String,
    has_data: bool,
    last_was_return: bool,
}

impl SseParser {
    /// Returns the events that these bytes complete.
    ///
    /// # Errors
    /// If one is longer than 16 MiB.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let is_second_half = byte == b'\n' && self.last_was_return;
            self.last_was_return = byte == b'\r';
            match byte {
                b'\n' if is_second_half => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err("an event is longer than 16 MiB".to_owned());
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<String> {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return std::mem::take(&mut self.has_data).then_some(data);
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        if field == "data" {
            if self.has_data {
                self.data.push('\n');
            }
            self.data.push_str(value.strip_prefix(' ').unwrap_or(value));
            self.has_data = true;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": ping\r\n\r\nevent: x\r\ndata: {\"a\":1}\r\n\r\ndata:two\ndata: lines\n\nid: 3\rdata: ü\r\rdata: [DONE]\n\n";

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        for size in 1..STREAM.len() {
            let mut parser = SseParser::default();
            let mut events = Vec::new();
            for part in STREAM.as_bytes().chunks(size) {
                events.extend(parser.push(part).expect("short events"));
            }
            assert_eq!(events, ["{\"a\":1}", "two\nlines", "ü", "[DONE]"], "in parts of {size}");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut parser = SseParser::default();
        assert!(parser.push(&vec![b'x'; MAX_EVENT_BYTES + 1]).is_err());
    }
}
