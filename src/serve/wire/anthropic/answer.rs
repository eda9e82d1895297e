//! Parts of answers: content blocks, usage, and why the answer ended.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::wire::answer::add_details;
use llmctl_engine::turn::Answer;
use llmctl_engine::{Finish, Usage};

/// Returns the signature of a thinking block: the same for the same text, and of no meaning to its reader.
pub fn signature(thinking: &str) -> String {
    let digest = Sha256::new().chain_update("llmctl thinking\n").chain_update(thinking).finalize();
    STANDARD_NO_PAD.encode(digest)
}

/// Returns a whole thinking block, without its text unless `is_shown`.
pub fn thinking_block(thinking: &str, is_shown: bool) -> Value {
    let shown = if is_shown { thinking } else { "" };
    json!({"type": "thinking", "thinking": shown, "signature": signature(thinking)})
}

/// Returns a text block.
pub fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Returns a call.
pub fn call_block(id: &str, name: &str, input: &Value) -> Value {
    json!({"type": "tool_use", "id": id, "name": name, "input": input, "caller": {"type": "direct"}})
}

/// Returns the blocks of a whole answer. A call that is cut is none.
pub fn content(answer: &Answer, shows_thinking: bool) -> Vec<Value> {
    let thinking = (!answer.reasoning.is_empty()).then(|| thinking_block(&answer.reasoning, shows_thinking));
    let text = (!answer.content.is_empty()).then(|| text_block(&answer.content));
    let calls = answer.whole_calls().filter_map(|call| {
        let input: Map<String, Value> = serde_json::from_str(&call.arguments).ok()?;
        Some(call_block(&call.id, &call.name, &Value::Object(input)))
    });
    thinking.into_iter().chain(text).chain(calls).collect()
}

/// Returns the stop reason of an answer, and the stop string that ended it.
pub fn stop(answer: &Answer) -> (&'static str, Option<&str>) {
    match &answer.outcome.finish {
        _ if answer.finish_reason() == "tool_calls" => ("tool_use", None),
        Finish::Eos(_) | Finish::Complete => ("end_turn", None),
        Finish::StopString(text) => ("stop_sequence", Some(text)),
        Finish::ContextFull => ("model_context_window_exceeded", None),
        Finish::MaxTokens | Finish::Deadline | Finish::Cancelled | Finish::Repetition => ("max_tokens", None),
    }
}

/// Returns the counts. Tokens that were reused are not among the input tokens, as Anthropic counts.
pub fn usage(usage: &Usage, num_reasoning_tokens: usize) -> Value {
    let mut details = json!({"thinking_tokens": num_reasoning_tokens});
    add_details(&mut details, usage);
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
    })
}

/// Returns a message, whole or as a stream begins it. Members for what this server has not are left out, as Anthropic's API leaves
/// them out: some clients refuse a null there.
pub fn message(
    id: &str,
    model: &str,
    content: Vec<Value>,
    stop: Option<(&str, Option<&str>)>,
    usage: Value,
) -> Value {
    let (stop_reason, stop_sequence) = stop.unzip();
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence.flatten(),
        "usage": usage,
    })
}
