//! Puts the calls and results of a conversation into the one form that every template can show.
//!
//! Most templates print no ids, so that a model knows a result by its place alone; some take only ids of one form; many fail on
//! arguments that are no object. What is done here keeps the number of messages and depends on nothing but the messages before the next
//! answer, and doing it twice changes nothing more.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{Message, Role};

/// The ids that a template takes for calls and results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallIds {
    #[default]
    Any,
    /// Nine letters and digits (Mistral).
    Nine,
    /// `functions.NAME:NUMBER`, counted through the conversation (Kimi K2).
    Numbered,
}

/// Arranges the messages of a conversation, which stay as many.
pub fn arrange(messages: &mut [Message], ids: CallIds) {
    let mut num_calls = 0;
    for round in messages.chunk_by_mut(is_in_round) {
        let (answers, rest) = round.split_at_mut(num_answers(round));
        for call in answers.iter_mut().flat_map(|answer| &mut answer.tool_calls) {
            call.arguments = as_object(call.arguments.take());
        }
        if answers.iter().any(|answer| !answer.tool_calls.is_empty()) {
            order_results(answers, rest);
        }
        if ids != CallIds::Any {
            ids.set(answers, rest, &mut num_calls);
        }
    }
}

/// Sorts results by the order of their calls, in front of what else stands before the next answer.
fn order_results(answers: &[Message], rest: &mut [Message]) {
    let ids: Vec<&str> = call_ids(answers).collect();
    rest.sort_by_key(|message| match (&message.role, message.tool_call_id.as_deref()) {
        (Role::Tool, Some(id)) => ids.iter().position(|call| *call == id).unwrap_or(ids.len()),
        (Role::Tool, None) => ids.len(),
        _ => usize::MAX,
    });
}

fn call_ids(answers: &[Message]) -> impl Iterator<Item = &str> {
    answers.iter().flat_map(|answer| &answer.tool_calls).filter_map(|call| call.id.as_deref())
}

/// Returns a message for each result that is missing in front of a later one, which would be taken for it, with the index that it
/// goes in front of. `messages` are arranged.
pub fn missing_results(messages: &[Message]) -> Vec<(usize, Message)> {
    let mut missing = Vec::new();
    let mut start = 0;
    for round in messages.chunk_by(is_in_round) {
        let num_answers = num_answers(round);
        let (answers, rest) = round.split_at(num_answers);
        let ids: Vec<&str> = call_ids(answers).collect();
        let place = |result: &Message| ids.iter().position(|id| result.tool_call_id.as_deref() == Some(*id));
        for (call, id) in ids.iter().enumerate() {
            let is_given = rest.iter().any(|result| result.tool_call_id.as_deref() == Some(*id));
            let later = rest.iter().position(|result| place(result).is_some_and(|place| place > call));
            if let Some(at) = later.filter(|_| !is_given) {
                let tool_call_id = Some((*id).to_owned());
                let message = Message { tool_call_id, ..Message::new(Role::Tool, "(no result)") };
                missing.push((start + num_answers + at, message));
            }
        }
        start += round.len();
    }
    missing
}

/// Returns true if two neighbours belong to one round: answers, and all that stands before the next answer.
fn is_in_round(message: &Message, next: &Message) -> bool {
    message.role == Role::Assistant || next.role != Role::Assistant
}

fn num_answers(round: &[Message]) -> usize {
    round.iter().take_while(|message| message.role == Role::Assistant).count()
}

/// Returns arguments as an object: no text and `null` say an empty one, and a text may hold one. Anything else, as a call that was
/// cut, becomes its one member.
fn as_object(arguments: Value) -> Value {
    let text = match arguments {
        Value::Object(_) => return arguments,
        Value::Null => return Value::Object(Map::new()),
        Value::String(text) => text,
        other => other.to_string(),
    };
    let inner = if text.trim().is_empty() { Ok(Value::Null) } else { serde_json::from_str(&text) };
    match inner {
        Ok(inner @ (Value::Object(_) | Value::Null | Value::String(_))) => as_object(inner),
        _ => json!({ "arguments": text }),
    }
}

impl CallIds {
    /// Gives the calls of `answers` and the results in `rest` ids of this form, the same to a call and its result. `num_calls` stand
    /// in front of them.
    fn set(self, answers: &mut [Message], rest: &mut [Message], num_calls: &mut usize) {
        let mut new_ids: HashMap<String, String> = HashMap::new();
        let mut in_order: Vec<String> = Vec::new();
        for answer in answers {
            for (index, call) in answer.tool_calls.iter_mut().enumerate() {
                let id = match (self, &call.id) {
                    (Self::Numbered, _) => format!("functions.{}:{num_calls}", call.name),
                    (_, Some(id)) => nine(id),
                    (_, None) => nine(&format!("call {index}")),
                };
                *num_calls += 1;
                in_order.push(id.clone());
                if let Some(old) = call.id.replace(id.clone()) {
                    new_ids.entry(old).or_insert(id);
                }
            }
        }
        for (index, result) in rest.iter_mut().filter(|message| message.role == Role::Tool).enumerate() {
            let id = match &result.tool_call_id {
                Some(old) => new_ids.get(old).cloned().or_else(|| (self == Self::Nine).then(|| nine(old))),
                None => in_order.get(index).cloned(),
            };
            result.tool_call_id = id.or(result.tool_call_id.take());
        }
    }
}

/// Returns the id itself if it has nine letters and digits, else nine that depend on it alone.
fn nine(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a.
    let hashed = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325, hashed);
    let digit = |_| {
        let digit = char::from_digit((hash % 36) as u32, 36).unwrap_or('0');
        hash /= 36;
        digit
    };
    (0..9).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolCall;

    fn calls(calls: &[(&str, &str)]) -> Message {
        let call = |(id, name): &(&str, &str)| ToolCall {
            id: Some((*id).to_owned()).filter(|id| !id.is_empty()),
            name: (*name).to_owned(),
            arguments: json!({}),
        };
        Message { content: None, tool_calls: calls.iter().map(call).collect(), ..Message::assistant("") }
    }

    fn result(id: &str, text: &str) -> Message {
        let tool_call_id = Some(id.to_owned()).filter(|id| !id.is_empty());
        Message { tool_call_id, ..Message::new(Role::Tool, text) }
    }

    fn arranged(messages: &[Message], ids: CallIds) -> Vec<Message> {
        let mut arranged = messages.to_vec();
        arrange(&mut arranged, ids);
        let mut twice = arranged.clone();
        arrange(&mut twice, ids);
        assert_eq!(twice, arranged, "once is enough");
        arranged
    }

    #[test]
    fn results_stand_in_the_order_of_their_calls() {
        let (asked, both) = (Message::user("q"), calls(&[("a", "f"), ("b", "g"), ("c", "h")]));
        let (a, b, c) = (result("a", "1"), result("b", "2"), result("c", "3"));
        let (text, answer) = (Message::user("and"), Message::assistant("done"));
        let given = [&asked, &both, &c, &text, &a, &b, &answer, &b, &a].map(Clone::clone);
        let expected = [&asked, &both, &a, &b, &c, &text, &answer, &b, &a].map(Clone::clone);
        assert_eq!(arranged(&given, CallIds::Any), expected);
        // Calls of one round in two messages, and ids that are none of theirs.
        let (first, second) = (calls(&[("a", "f")]), calls(&[("b", "g")]));
        let given = [&first, &second, &result("x", "?"), &b, &a].map(Clone::clone);
        let expected = [&first, &second, &a, &b, &result("x", "?")].map(Clone::clone);
        assert_eq!(arranged(&given, CallIds::Any), expected);
        let without = [both.clone(), result("", "1"), result("", "2")];
        assert_eq!(arranged(&without, CallIds::Any), without);
        // One that is missing in front of another would be taken for it.
        let missing = |results: &[&Message]| {
            let given: Vec<Message> = [&both].into_iter().chain(results.iter().copied()).cloned().collect();
            let at = |(index, message): (usize, Message)| (index, message.tool_call_id.unwrap_or_default());
            missing_results(&given).into_iter().map(at).collect::<Vec<_>>()
        };
        assert_eq!(missing(&[&c]), [(1, "a".to_owned()), (1, "b".to_owned())]);
        assert_eq!(missing(&[&a, &c]), [(2, "b".to_owned())]);
        assert_eq!(missing(&[&a, &b]), []);
    }

    #[test]
    fn ids_have_the_form_that_the_template_takes() {
        let ids = |messages: &[Message], ids: CallIds| -> Vec<String> {
            let of = |message: Message| {
                let calls = message.tool_calls.into_iter().map(|call| call.id);
                calls.chain([message.tool_call_id]).flatten().collect::<Vec<_>>()
            };
            arranged(messages, ids).into_iter().flat_map(of).collect()
        };
        let round = [
            calls(&[("toolu_01", "f"), ("abcdefgh1", "g")]),
            result("toolu_01", ""),
            result("abcdefgh1", ""),
        ];
        let both = [&round[..], &[Message::assistant("x"), calls(&[("c", "f")]), result("c", "")]].concat();
        let nine = ids(&both, CallIds::Nine);
        assert_eq!([&nine[0], &nine[1], &nine[4]], [&nine[2], "abcdefgh1", &nine[5]]);
        assert!(
            nine.iter().all(|id| id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric())),
            "{nine:?}"
        );
        let numbered = ["f:0", "g:1", "f:0", "g:1", "f:2", "f:2"].map(|id| format!("functions.{id}"));
        assert_eq!(ids(&both, CallIds::Numbered), numbered);
        // OpenAI's older calls have no ids: their results follow by place.
        let none = ids(&[calls(&[("", "f"), ("", "g")]), result("", ""), result("", "")], CallIds::Nine);
        assert_eq!((&none[..2], none[0] == none[1]), (&none[2..], false));
        assert_eq!(ids(&round, CallIds::Any), ["toolu_01", "abcdefgh1", "toolu_01", "abcdefgh1"]);
    }

    #[test]
    fn arguments_are_an_object() {
        for (given, expected) in [
            (json!(null), json!({})),
            (json!(""), json!({})),
            (json!(" \n"), json!({})),
            (json!("null"), json!({})),
            (json!("{}"), json!({})),
            (json!("\"{\\\"a\\\": 1}\""), json!({"a": 1})),
            (json!("{\"a\": \"b"), json!({"arguments": "{\"a\": \"b"})),
            (json!("[]"), json!({"arguments": "[]"})),
            (json!("\"text\""), json!({"arguments": "text"})),
            (json!([1]), json!({"arguments": "[1]"})),
        ] {
            assert_eq!(as_object(given.clone()), expected, "{given}");
        }
    }
}
