//! Parses the payload of OpenAI-compatible servers' events.
//!
//! Tolerant where servers differ: fields that are null or absent. Pure.

use serde_json::Value;

/// Content of one event of a completion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamChunk {
    /// Text of the answer, of its reasoning, or of a tool call.
    pub text: String,
    pub finish: Option<String>,
    pub usage: Option<ChunkUsage>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChunkUsage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
}

/// Parses an event's data, of chat or text completions, or a whole response that is not streamed.
///
/// # Errors
/// If it is not a JSON object.
pub fn chunk(data: &str) -> Result<StreamChunk, String> {
    let value: Value = serde_json::from_str(data).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("no JSON object".to_owned());
    }
    let choice = &value["choices"][0];
    let delta = if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
    let mut text = String::new();
    for part in [&delta["content"], &delta["reasoning_content"], &delta["reasoning"], &choice["text"]] {
        text.push_str(part.as_str().unwrap_or_default());
    }
    for call in delta["tool_calls"].as_array().into_iter().flatten() {
        for part in [&call["function"]["name"], &call["function"]["arguments"]] {
            text.push_str(part.as_str().unwrap_or_default());
        }
    }
    Ok(StreamChunk {
        text,
        finish: choice["finish_reason"].as_str().map(str::to_owned),
        usage: usage(&value["usage"]),
        error: error(&value["error"]),
    })
}

fn usage(value: &Value) -> Option<ChunkUsage> {
    let count = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
    Some(ChunkUsage {
        prompt_tokens: count(&value["prompt_tokens"])?,
        completion_tokens: count(&value["completion_tokens"]).unwrap_or(0),
        cached_tokens: count(&value["prompt_tokens_details"]["cached_tokens"]).unwrap_or(0),
    })
}

fn error(value: &Value) -> Option<String> {
    if value.is_null() {
        return None;
    }
    let message = value["message"].as_str().or_else(|| value.as_str());
    Some(message.map_or_else(|| value.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_different_servers() {
        let check = |data: &str, text: &str, finish: Option<&str>| {
            let chunk = chunk(data).expect("a chunk");
            assert_eq!((chunk.text.as_str(), chunk.finish.as_deref()), (text, finish), "{data}");
        };
        check(
            r#"{"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}]}"#,
            "",
            None,
        );
        check(r#"{"choices":[{"delta":{"content":"hi"}}]}"#, "hi", None);
        check(r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, "hm", None);
        check(r#"{"choices":[{"text":"go","finish_reason":"stop"}]}"#, "go", Some("stop"));
        check(
            r#"{"choices":[{"message":{"content":"all"},"finish_reason":"length"}]}"#,
            "all",
            Some("length"),
        );
        check(
            r#"{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}}]}"#,
            "f{}",
            None,
        );
        check(r#"{"choices":[],"usage":null}"#, "", None);
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}}"#;
        let expected = ChunkUsage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 8 };
        assert_eq!(chunk(usage).expect("a chunk").usage, Some(expected));
        let error = r#"{"error":{"message":"too late","code":"x"}}"#;
        assert_eq!(chunk(error).expect("a chunk").error.as_deref(), Some("too late"));
        assert!(chunk("not json").is_err() && chunk("[]").is_err());
    }
}
