//! The conversations that templates are checked with, in words that no template contains.

use serde_json::{Value, json};

use crate::{Conversation, Message, Role, ToolCall, text_part};

pub const SYSTEM: &str = "Speak like a lighthouse keeper";
pub const QUESTIONS: [&str; 3] = ["What is a tide", "Where is a reef", "When does a gale end"];
pub const ANSWERS: [&str; 3] = ["Water that rises", "Below the surface", "After a night"];
pub const THOUGHTS: [&str; 3] = ["The moon pulls", "Charts show it", "Winds turn at dawn"];
pub const RESULT: &str = "eighteen knots";
pub const TOOL: &str = "get_weather";
pub const DESCRIPTION: &str = "Weather at a harbour";
/// Nine letters and digits, which is what Mistral's templates ask of an id.
const IDS: [&str; 2] = ["abcdefgh1", "abcdefgh2"];

pub fn question(n: usize) -> Message {
    Message::user(QUESTIONS[n])
}

pub fn answer(n: usize) -> Message {
    Message::assistant(ANSWERS[n])
}

/// An answer with the thought before it.
pub fn thoughtful(n: usize) -> Message {
    Message { reasoning: Some(THOUGHTS[n].to_owned()), ..answer(n) }
}

pub fn talk(messages: impl IntoIterator<Item = Message>) -> Conversation {
    Conversation { messages: messages.into_iter().collect(), ..Conversation::default() }
}

/// As [`talk`], with tools.
pub fn talk_with_tools(messages: impl IntoIterator<Item = Message>) -> Conversation {
    Conversation { tools: tools(), ..talk(messages) }
}

pub fn tools() -> Vec<Value> {
    let function = |name: &str, description: &str, required: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties, "required": [required]});
        json!({"type": "function", "function": {
            "name": name, "description": description, "parameters": parameters}})
    };
    let forecast = json!({
        "city": {"type": "string", "description": "Name of the harbour"},
        "days": {"type": "integer", "description": "How many"},
        "exact": {"type": "boolean", "description": "Or rounded"},
    });
    let log = json!({
        "text": {"type": "string", "description": "What to write"},
        "share": {"type": "number", "description": "Of the page"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Words"},
    });
    vec![
        function(TOOL, DESCRIPTION, "city", forecast),
        function("write_log", "Writes into the log", "text", log),
    ]
}

/// The `n`th call of an answer.
pub fn call(n: usize, name: &str, arguments: Value) -> ToolCall {
    ToolCall { id: Some(IDS[n].to_owned()), name: name.to_owned(), arguments }
}

/// An answer that is nothing but calls.
pub fn calls(calls: impl IntoIterator<Item = ToolCall>) -> Message {
    Message { content: None, tool_calls: calls.into_iter().collect(), ..Message::assistant("") }
}

/// One call of the weather.
pub fn weather_call() -> Message {
    calls([call(0, TOOL, json!({"city": "Bergen", "days": 3}))])
}

/// Returns the result of the `n`th call.
pub fn result(n: usize, name: &str, text: &str) -> Message {
    Message {
        tool_call_id: Some(IDS[n].to_owned()),
        name: Some(name.to_owned()),
        ..Message::new(Role::Tool, text)
    }
}

pub fn weather_result() -> Message {
    result(0, TOOL, RESULT)
}

/// A message whose text is in two parts.
pub fn in_parts(texts: [&str; 2]) -> Message {
    Message::user(texts.map(text_part).to_vec())
}
