//! OpenAI's messages to the crate's vocabulary and back.

use serde_json::{Map, Value, json};

use super::Fields;
use crate::template::{Content, Message, Role, ToolCall};

/// The member `messages`: at least one.
pub fn messages(fields: &mut Fields<'_>) -> Vec<Message> {
    if !fields.has("messages") {
        fields.wrong("messages", "is missing");
        return Vec::new();
    }
    let Some(values) = fields.list("messages") else { return Vec::new() };
    if values.is_empty() {
        fields.out_of_range("messages", "is empty");
    }
    let read = |(index, value)| {
        let at = format!("messages[{index}]");
        match value {
            Value::Object(object) => message(fields.inside(&at, object)),
            _ => {
                fields.wrong(&at, "is not an object");
                None
            }
        }
    };
    values.into_iter().enumerate().filter_map(read).collect()
}

fn message(mut fields: Fields<'_>) -> Option<Message> {
    if !fields.has("role") {
        fields.wrong("role", "is missing");
    }
    let role = fields.text("role");
    let content = content(&mut fields);
    let reasoning = fields.text("reasoning_content");
    // The other names of it; a client that sends several sends one text.
    let others = ["reasoning", "thinking"].map(|name| fields.text(name));
    let reasoning = others.into_iter().fold(reasoning, Option::or);
    let tool_calls = tool_calls(&mut fields);
    let tool_call_id = fields.text("tool_call_id");
    let name = fields.text("name");
    // What OpenAI's answers hold and its clients send back: nothing is asked for by it.
    fields.only("annotations", &[json!([])]);
    fields.end();
    Some(Message { role: Role::from(role?.as_str()), content, reasoning, tool_calls, tool_call_id, name })
}

/// A string, or parts that are all text: several parts are one text, line by line.
fn content(fields: &mut Fields<'_>) -> Option<Content> {
    let parts = match fields.take("content")? {
        Value::String(text) => return Some(Content::Text(text)),
        Value::Array(parts) => parts,
        _ => {
            fields.wrong("content", "is neither a string nor an array of parts");
            return None;
        }
    };
    let text = |(index, part)| text_part(fields, &format!("content[{index}]"), part);
    let texts: Vec<String> = parts.into_iter().enumerate().filter_map(text).collect();
    Some(Content::Text(texts.join("\n")))
}

fn text_part(fields: &mut Fields<'_>, at: &str, part: Value) -> Option<String> {
    let Value::Object(members) = part else {
        fields.wrong(at, "is not an object");
        return None;
    };
    let mut part = fields.inside(at, members);
    match part.text("type") {
        Some(kind) if kind == "text" => {}
        Some(kind) => {
            fields
                .unsupported("content", &format!("has a part of type {kind:?}, and only text is supported"));
            return None;
        }
        None => {
            part.wrong("type", "is missing");
            return None;
        }
    }
    if !part.has("text") {
        part.wrong("text", "is missing");
    }
    let text = part.text("text");
    part.take("cache_control"); // a hint: what a prompt begins with is kept anyway
    part.end();
    text
}

fn tool_calls(fields: &mut Fields<'_>) -> Vec<ToolCall> {
    let calls = fields.list("tool_calls").unwrap_or_default();
    let read = |(index, value)| {
        let at = format!("tool_calls[{index}]");
        match value {
            Value::Object(object) => tool_call(fields.inside(&at, object)),
            _ => {
                fields.wrong(&at, "is not an object");
                None
            }
        }
    };
    calls.into_iter().enumerate().filter_map(read).collect()
}

/// Levels of arguments that are read as JSON, as of a model's own calls; deeper ones stay text, since what they become part of
/// has to be read back too.
const MAX_DEPTH: usize = 100;

/// Whether no array or object lies in this many others.
fn is_within(value: &Value, levels: usize) -> bool {
    let below = |value| levels.checked_sub(1).is_some_and(|levels| is_within(value, levels));
    match value {
        Value::Array(items) => levels > 0 && items.iter().all(below),
        Value::Object(members) => levels > 0 && members.values().all(below),
        _ => true,
    }
}

fn tool_call(mut fields: Fields<'_>) -> Option<ToolCall> {
    let id = fields.text("id");
    fields.only("type", &[json!("function")]);
    fields.take("index"); // of a call that was put together from a stream
    let Some(function) = fields.object("function") else {
        fields.wrong("function", "is missing");
        return None;
    };
    let mut function = fields.inside("function", function);
    if !function.has("name") {
        function.wrong("name", "is missing");
    }
    let name = function.text("name");
    // OpenAI sends arguments as a string of JSON; templates want the value.
    let arguments = match function.take("arguments") {
        None => Value::Object(Map::new()),
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(value) if is_within(&value, MAX_DEPTH) => value,
            _ => Value::String(text),
        },
        Some(other) => other,
    };
    function.end();
    fields.end();
    Some(ToolCall { id, name: name?, arguments })
}

/// A message as OpenAI's API shows it.
pub fn message_json(message: &Message) -> Value {
    let mut members = Map::new();
    members.insert("role".to_owned(), message.role.as_str().into());
    let content = match &message.content {
        None => Value::Null,
        Some(Content::Text(text)) if text.is_empty() && !message.tool_calls.is_empty() => Value::Null,
        Some(Content::Text(text)) => text.as_str().into(),
        Some(Content::Parts(parts)) => Value::Array(parts.clone()),
    };
    members.insert("content".to_owned(), content);
    for (name, value) in [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ] {
        if let Some(value) = value {
            members.insert(name.to_owned(), value.as_str().into());
        }
    }
    if !message.tool_calls.is_empty() {
        members.insert("tool_calls".to_owned(), message.tool_calls.iter().map(tool_call_json).collect());
    }
    Value::Object(members)
}

/// A call with its arguments as text, as OpenAI's API shows it.
pub fn tool_call_json(call: &ToolCall) -> Value {
    let arguments = match &call.arguments {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::super::Problems;
    use super::*;
    use crate::serve::error::ApiError;

    fn read(values: Value) -> (Vec<Message>, Result<(), ApiError>) {
        let mut problems = Problems::default();
        let body = Map::from_iter([("messages".to_owned(), values)]);
        let mut fields = Fields::new(body, &mut problems);
        let messages = messages(&mut fields);
        fields.end();
        (messages, problems.check(Ok(())))
    }

    #[test]
    fn a_message_goes_there_and_back() {
        let sent = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q", "name": "me"},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\":[1,null]}"}},
                {"id": "d", "type": "function", "function": {"name": "g", "arguments": "not json"}},
            ]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ]);
        let (messages, checked) = read(sent.clone());
        assert_eq!(checked, Ok(()));
        assert_eq!(messages[2].tool_calls[0].arguments, json!({"a": [1, null]}));
        assert_eq!(messages.iter().map(message_json).collect::<Value>(), sent);
    }

    /// What is read from text lies deeper in the record of a turn, which must be read back too.
    #[test]
    fn arguments_that_lie_too_deep_stay_text() {
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        let read = |arguments: String| {
            let call =
                json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
            let (messages, checked) =
                read(json!([{"role": "assistant", "content": null, "tool_calls": [call]}]));
            assert_eq!(checked, Ok(()));
            messages[0].tool_calls[0].arguments.clone()
        };
        assert!(read(nested(MAX_DEPTH)).is_array());
        for levels in [MAX_DEPTH + 1, 127] {
            assert_eq!(read(nested(levels)), Value::String(nested(levels)));
        }
    }

    #[test]
    fn what_clients_send_back_of_answers_is_taken() {
        let (messages, checked) = read(json!([{
            "role": "assistant", "content": "x", "refusal": null, "annotations": [], "audio": null,
            "function_call": null, "tool_calls": null,
        }, {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]));
        assert_eq!((checked, messages), (Ok(()), vec![Message::assistant("x"), Message::user("a")]));
    }

    #[test]
    fn what_is_wrong_is_named_by_its_place() {
        let refused = |message: Value| {
            let error = read(json!([{"role": "user", "content": "a"}, message])).1.expect_err("refused");
            (error.status.as_u16(), error.param.expect("a parameter"))
        };
        for (message, status, param) in [
            (json!("x"), 422, "messages[1]"),
            (json!({"content": "x"}), 422, "messages[1].role"),
            (json!({"role": 1, "content": "x"}), 422, "messages[1].role"),
            (json!({"role": "user", "content": 1}), 422, "messages[1].content"),
            (json!({"role": "user", "content": [{"type": "text"}]}), 422, "messages[1].content[0].text"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), 400, "messages[1].content"),
            (json!({"role": "user", "content": "x", "cached": true}), 400, "messages[1].cached"),
            (json!({"role": "assistant", "tool_calls": [{}]}), 422, "messages[1].tool_calls[0].function"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
                422,
                "messages[1].tool_calls[0].function.name",
            ),
        ] {
            assert_eq!(refused(message), (status, param.to_owned()));
        }
        assert_eq!(read(json!([])).1.expect_err("refused").status, 400);
        assert_eq!(read(json!({})).1.expect_err("refused").status, 422);
    }
}
