//! Every token sequence that a transcript ever held, also in undone turns, damaged files and later schemas:
//! the pages of KV that its session may have left or still use.
//!
//! Lenient where `record` is strict, because missing a turn is worse here than counting one twice: checksums
//! and fields without tokens are ignored. Pure.

use serde::Deserialize;

use super::record::{SpanRecord, knows_schema};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;
use llmctl_models::kv::Tokens;

#[derive(Deserialize)]
struct HistoryLine {
    record: HistoryRecord,
}

/// Fields of any record that concern tokens.
#[derive(Deserialize)]
struct HistoryRecord {
    r#type: String,
    schema: Option<String>,
    number: Option<usize>,
    turn: Option<HistoryTurn>,
    turns: Option<usize>,
}

#[derive(Deserialize)]
struct HistoryTurn {
    kept_tokens: usize,
    prompt_tail: Vec<u32>,
    generated: Vec<u32>,
    #[serde(default)]
    spans: Vec<SpanRecord>,
    #[serde(default)]
    adapters: Vec<AdapterUse>,
}

/// Calls `each` with sequences, and their image rows, whose prefixes are all that the session ever held. Returns true if every
/// line was understood.
pub fn each_sequence(transcript: &[u8], mut each: impl FnMut(Tokens<'_>)) -> bool {
    let mut history = TokenHistory::default();
    let mut is_whole = transcript.contains(&b'\n');
    for line in transcript.split_inclusive(|byte| *byte == b'\n') {
        let is_torn = !line.ends_with(b"\n"); // a torn line was never acknowledged
        match serde_json::from_slice::<HistoryLine>(line) {
            Ok(HistoryLine { record }) => is_whole &= history.take(record, &mut each),
            Err(_) => is_whole &= is_torn,
        }
    }
    each(history.tokens());
    is_whole
}

/// The conversation so far.
#[derive(Default)]
struct TokenHistory {
    tokens: Vec<u32>,
    spans: Vec<ImageSpan>,
    adapters: Vec<AdapterUse>,
    turns: Vec<AddedTokens>,
}

/// What a turn added.
struct AddedTokens {
    /// Tokens before it.
    kept: usize,
    tokens: Vec<u32>,
    spans: Vec<ImageSpan>,
    adapters: Vec<AdapterUse>,
}

impl TokenHistory {
    fn tokens(&self) -> Tokens<'_> {
        Tokens { ids: &self.tokens, images: &self.spans, adapters: &self.adapters }
    }

    /// Applies a record. Returns false if it is not understood.
    fn take(&mut self, history: HistoryRecord, each: &mut impl FnMut(Tokens<'_>)) -> bool {
        let HistoryRecord { r#type, schema, number, turn, turns } = history;
        match (r#type.as_str(), number, turn, turns) {
            ("header", ..) => schema.is_some_and(|schema| knows_schema(&schema)),
            ("turn", Some(number), Some(turn), _) => self.add(number, turn, each),
            ("truncate", _, _, Some(turns)) => self.rewind(turns, each),
            ("model" | "note" | "rename" | "fork_of", ..) => true,
            _ => false,
        }
    }

    fn add(&mut self, number: usize, turn: HistoryTurn, each: &mut impl FnMut(Tokens<'_>)) -> bool {
        let is_known = number.checked_sub(1).is_some_and(|kept| self.rewind(kept, each));
        if !is_known || turn.kept_tokens > self.tokens.len() {
            return false; // an earlier turn is missing
        }
        // With other adapters, rows of the same tokens are others.
        if turn.kept_tokens < self.tokens.len() || turn.adapters != self.adapters {
            each(self.tokens());
        }
        let tokens = [turn.prompt_tail, turn.generated].concat();
        let spans = turn.spans.into_iter().map(ImageSpan::from).collect();
        let added = AddedTokens { kept: turn.kept_tokens, tokens, spans, adapters: turn.adapters };
        self.append(&added);
        self.turns.push(added);
        true
    }

    fn append(&mut self, added: &AddedTokens) {
        self.tokens.truncate(added.kept);
        self.tokens.extend_from_slice(&added.tokens);
        self.spans.retain(|span| span.rows.end <= added.kept);
        self.spans.extend_from_slice(&added.spans);
        self.adapters.clone_from(&added.adapters);
    }

    fn rewind(&mut self, turns: usize, each: &mut impl FnMut(Tokens<'_>)) -> bool {
        if turns >= self.turns.len() {
            return turns == self.turns.len();
        }
        each(self.tokens());
        self.turns.truncate(turns);
        (self.tokens, self.spans) = (Vec::new(), Vec::new());
        let kept = std::mem::take(&mut self.turns);
        kept.iter().for_each(|added| self.append(added));
        self.turns = kept;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r#"{"type":"header","schema":"llmctl.session.v1"}"#;

    fn turn(number: usize, kept: usize, tokens: &[u32]) -> String {
        let (tail, generated) = tokens.split_at(tokens.len() / 2);
        format!(
            r#"{{"type":"turn","number":{number},"turn":{{"kept_tokens":{kept},"prompt_tail":{tail:?},"generated":{generated:?},"x":1}}}}"#
        )
    }

    fn history(records: &[&str]) -> (Vec<Vec<u32>>, bool) {
        let lines = records.iter().map(|record| format!("{{\"crc32\":\"any\",\"record\":{record}}}\n"));
        let mut sequences = Vec::new();
        let is_whole =
            each_sequence(lines.collect::<String>().as_bytes(), |tokens| sequences.push(tokens.ids.to_vec()));
        (sequences, is_whole)
    }

    #[test]
    fn undone_edited_and_rewritten_turns_are_told_too() {
        let first = turn(1, 0, &[1, 2]);
        let (sequences, is_whole) = history(&[
            HEADER,
            &first,
            &turn(2, 2, &[3, 4]),
            r#"{"type":"truncate","turns":1,"time_ms":0}"#,
            &turn(2, 2, &[5]),
            &turn(1, 0, &[6, 7]),
            &turn(2, 1, &[8]),
        ]);
        assert_eq!(sequences, [vec![1, 2, 3, 4], vec![1, 2, 5], vec![6, 7], vec![6, 8]]);
        assert!(is_whole);
    }

    #[test]
    fn what_cannot_be_read_is_said_and_the_rest_is_told() {
        let (first, second) = (turn(1, 0, &[1, 2]), turn(2, 2, &[3]));
        assert_eq!(history(&[HEADER, "garbage", &first]), (vec![vec![1, 2]], false));
        assert_eq!(history(&[HEADER, &second]), (vec![vec![]], false), "a turn is missing");
        assert_eq!(history(&[HEADER, &first, r#"{"type":"telepathy"}"#]), (vec![vec![1, 2]], false));
        let later = HEADER.replace("v1", "v9");
        assert_eq!(history(&[&later, &first, &second]), (vec![vec![1, 2, 3]], false));
        assert!(!each_sequence(b"", |_| {}) && !each_sequence(b"\0\xff", |_| {}));
        let torn = format!("{{\"record\":{HEADER}}}\n{{\"record\":{}", &first[..20]);
        assert!(each_sequence(torn.as_bytes(), |tokens| assert!(tokens.is_empty())));
    }
}
