//! `sessions show`: a conversation, turn by turn.

use serde_json::{Value, json};

use super::{counted_tokens, fork_json};
use crate::cli::terminal::report::{columns, counted};
use llmctl_engine::Finish;
use llmctl_engine::session::store::{Listed, SavedSession, SavedTurn, SessionName};
use llmctl_template::{Content, DateTime, ImageRef, Message};

pub fn show(name: &SessionName, saved: &SavedSession) -> (String, Value) {
    let fork = saved.fork_of.as_ref();
    let tokens = counted_tokens(saved.num_tokens(), saved.turns.len());
    let mut facts = vec![
        ["session".to_owned(), name.to_string()],
        ["model".to_owned(), saved.model.name.clone()],
        ["reference".to_owned(), saved.model.reference.clone().unwrap_or_else(|| "unknown".to_owned())],
        ["created".to_owned(), when(saved.created_ms)],
        ["last used".to_owned(), when(saved.last_used_ms)],
        ["turns".to_owned(), saved.turns.len().to_string()],
        ["tokens".to_owned(), tokens.map_or("not known".to_owned(), |tokens| tokens.to_string())],
    ];
    facts.extend(saved.owner.iter().map(|owner| ["owner".to_owned(), owner.clone()]));
    facts.extend(fork.map(|fork| {
        let kind = match &fork.branch {
            None => "fork of".to_owned(),
            Some(branch) => format!("branch ({}) of", branch.reason.as_str()),
        };
        [kind, format!("{}, {}", fork.name, counted(fork.turns, "turn"))]
    }));
    let mut text = columns(&facts.into_iter().map(Vec::from).collect::<Vec<_>>());
    for (at, turn) in saved.turns.iter().enumerate() {
        text.push_str(&turn_text(at + 1, turn));
    }
    let object = json!({
        "name": name.as_str(),
        "model": saved.model.name,
        "model_reference": saved.model.reference,
        "id": saved.id,
        "owner": saved.owner,
        "created_ms": saved.created_ms,
        "last_used_ms": saved.last_used_ms,
        "tokens": tokens,
        "fork_of": fork.map(fork_json),
        "turns": saved.turns.iter().map(|saved| turn_json(saved)).collect::<Vec<_>>(),
    });
    (text, object)
}

fn turn_text(number: usize, saved: &SavedTurn) -> String {
    let turn = &saved.turn;
    let finish = match &turn.finish {
        Finish::Cancelled => "cancelled",
        finish => finish.reason(),
    };
    let (prompt, answer) = (turn.usage.prompt_tokens, turn.usage.completion_tokens);
    let mut text =
        format!("\n-- turn {number}: {}, {prompt} + {answer} tokens, {finish}\n", when(turn.finished_ms));
    for message in &turn.messages {
        text.push_str(&format!("[{}] {}\n", message.role.as_str(), message_text(message)));
    }
    text
}

/// Formats a message for people: names its reasoning and calls, and prints its text unchanged.
pub fn message_text(message: &Message) -> String {
    let reasoning = message.reasoning.as_ref().map(|text| format!("(reasoning) {text}"));
    let content = match &message.content {
        Some(Content::Text(text)) => Some(text.clone()),
        Some(Content::Parts(parts)) => Some(parts.iter().map(part_text).collect::<Vec<_>>().join("\n")),
        None => None,
    };
    let calls = message.tool_calls.iter().map(|call| format!("(calls {}) {}", call.name, call.arguments));
    reasoning.into_iter().chain(content).chain(calls).collect::<Vec<_>>().join("\n")
}

/// Formats a part for people: a text unchanged, an image as a tag.
fn part_text(part: &Value) -> String {
    let text = || part.get("text").and_then(Value::as_str).map(str::to_owned);
    let image = ImageRef::of(part).map(|image| image.tag());
    image.or_else(text).unwrap_or_else(|| part.to_string())
}

fn turn_json(saved: &SavedTurn) -> Value {
    let turn = &saved.turn;
    json!({
        "messages": turn.messages.iter().map(message_json).collect::<Vec<_>>(),
        "model": saved.model.name,
        "finish_reason": turn.finish.reason(),
        "usage": crate::cli::terminal::report::usage_json(&turn.usage),
        "seed": turn.sampling.seed,
        "started_ms": turn.started_ms,
        "finished_ms": turn.finished_ms,
    })
}

/// OpenAI's message object; absent fields stay absent.
pub fn message_json(message: &Message) -> Value {
    let mut object = json!({"role": message.role.as_str(), "content": message.content});
    let texts = [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    for (field, text) in texts {
        if let Some(text) = text {
            object[field] = text.as_str().into();
        }
    }
    if !message.tool_calls.is_empty() {
        let call = |call: &llmctl_template::ToolCall| {
            let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
            json!({"id": call.id, "type": "function", "function": function})
        };
        object["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    object
}

fn when(ms: u64) -> String {
    DateTime::local(ms).strftime("%F %T")
}

/// Names the branches of the session that is shown, those of its session where it is a branch.
pub fn add_branches(branches: &[Listed], text: &mut String, object: &mut Value) {
    object["branches"] = branches.iter().map(|listed| listed.name.as_str()).collect();
    if !branches.is_empty() {
        let names: Vec<&str> = branches.iter().map(|listed| listed.name.as_str()).collect();
        text.push_str(&format!("\nbranches: {}\n", names.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use llmctl_template::{Role, ToolCall};

    #[test]
    fn messages_show_all_they_have() {
        let mut message = Message::assistant("see");
        message.reasoning = Some("hm".to_owned());
        message.tool_calls =
            vec![ToolCall { id: Some("c1".to_owned()), name: "f".to_owned(), arguments: json!({"a": 1}) }];
        assert_eq!(message_text(&message), "(reasoning) hm\nsee\n(calls f) {\"a\":1}");
        let expected = json!({
            "role": "assistant", "content": "see", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}],
        });
        assert_eq!(message_json(&message), expected);
        let result =
            Message { content: None, tool_call_id: Some("c1".to_owned()), ..Message::new(Role::Tool, "") };
        assert_eq!(message_json(&result), json!({"role": "tool", "content": null, "tool_call_id": "c1"}));
    }
}
