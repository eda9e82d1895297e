//! Splits a byte stream into server-sent events (WHATWG HTML, 9.2.6).
//!
//! Tolerant where servers differ: line ends, a missing space after the colon, comments. Pure.

/// Most bytes of an event.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// An event: what its lines say; at least one member is set.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    pub name: Option<String>,
    /// The lines of data, joined by line feeds.
    pub data: Option<String>,
    pub id: Option<String>,
    /// Milliseconds to wait before the next connection.
    pub retry: Option<u64>,
}

/// Splits a stream into its events.
#[derive(Debug, Default)]
pub struct SseParser {
    /// Bytes of the unfinished line.
    line: Vec<u8>,
    event: SseEvent,
    last_was_return: bool,
}

impl SseParser {
    /// Returns the events that these bytes complete.
    ///
    /// # Errors
    /// If one is longer than 16 MiB.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let is_second_half = byte == b'\n' && self.last_was_return;
            self.last_was_return = byte == b'\r';
            match byte {
                b'\n' if is_second_half => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.event.data.as_ref().map_or(0, String::len) > MAX_EVENT_BYTES {
                return Err("an event is longer than 16 MiB".to_owned());
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<SseEvent> {
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return (event != SseEvent::default()).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => match &mut self.event.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.event.data = Some(value.to_owned()),
            },
            "event" => self.event.name = Some(value.to_owned()),
            "id" => self.event.id = Some(value.to_owned()),
            "retry" => self.event.retry = value.parse().ok(),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": ping\r\n\r\nevent: x\r\ndata: {\"a\":1}\r\n\r\ndata:two\ndata: lines\n\nid: 3\rdata: ü\r\rdata: [DONE]\n\nid:7\nretry: 500\n\n";

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        for size in 1..STREAM.len() {
            let mut parser = SseParser::default();
            let mut events = Vec::new();
            for part in STREAM.as_bytes().chunks(size) {
                events.extend(parser.push(part).expect("short events"));
            }
            let data: Vec<&str> = events.iter().filter_map(|event| event.data.as_deref()).collect();
            assert_eq!(data, ["{\"a\":1}", "two\nlines", "ü", "[DONE]"], "in parts of {size}");
            assert_eq!((events[0].name.as_deref(), events[2].id.as_deref()), (Some("x"), Some("3")));
            let primer = SseEvent { id: Some("7".to_owned()), retry: Some(500), ..SseEvent::default() };
            assert_eq!(events[4], primer, "without data");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut parser = SseParser::default();
        assert!(parser.push(&vec![b'x'; MAX_EVENT_BYTES + 1]).is_err());
        let mut parser = SseParser::default();
        let line = [b"data: ", &vec![b'x'; MAX_EVENT_BYTES / 3][..], b"\n"].concat();
        for _ in 0..2 {
            assert!(parser.push(&line).is_ok() && parser.push(&line).is_ok(), "two thirds");
            assert!(parser.push(b"\n").is_ok(), "the next event begins anew");
        }
        assert!((0..3).any(|_| parser.push(&line).is_err()), "an event of many lines");
    }
}
