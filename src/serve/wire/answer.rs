//! Parts of answers that all wire formats share: the chat message, counts and log-probabilities.

use serde_json::{Map, Value, json};

use super::message::tool_call_json;
use llmctl_engine::turn::{Answer, AnsweredCall};
use llmctl_engine::{Logprob, RemoteUsage, Token, Usage};
use llmctl_template::ToolCall;

/// OpenAI's log-probability of an impossible token.
const IMPOSSIBLE: f32 = -9999.0;

/// The bytes that a token stands for.
pub type TokenBytes<'a> = &'a dyn Fn(u32) -> Vec<u8>;

/// Writes an answer as a chat message. The content is a string, possibly empty, and null if there are only calls. With
/// `has_functions` a call has OpenAI's older form, which has place for one.
pub fn message_json(answer: &Answer, shows_reasoning: bool, has_functions: bool) -> Value {
    let Answer { content, reasoning, .. } = answer;
    let tool_calls: Vec<&AnsweredCall> = answer.whole_calls().collect();
    let is_call_only = content.is_empty() && !tool_calls.is_empty();
    let content = if is_call_only { Value::Null } else { content.as_str().into() };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if shows_reasoning && !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.as_str().into();
    }
    match tool_calls.first() {
        None => {}
        Some(call) if has_functions => {
            message["function_call"] = json!({"name": call.name, "arguments": call.arguments});
        }
        Some(_) => message["tool_calls"] = tool_calls.into_iter().map(call_json).collect(),
    }
    message
}

/// Writes a tool call of an answer.
pub fn call_json(call: &AnsweredCall) -> Value {
    let arguments = Value::String(call.arguments.clone());
    tool_call_json(&ToolCall { id: Some(call.id.clone()), name: call.name.clone(), arguments })
}

/// Writes the usage.
pub fn usage(usage: &Usage) -> Value {
    let mut json = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    });
    if let Some(remote) = usage.remote {
        json["engine"] = remote_json(remote);
    }
    let mut details = json!({});
    add_details(&mut details, usage);
    if details != json!({}) {
        json["completion_tokens_details"] = details;
    }
    json
}

/// Writes what a remote engine does not promise, and whether it reports what it had cached.
pub fn remote_json(RemoteUsage { reports_cached }: RemoteUsage) -> Value {
    json!({
        "remote": true, "same_bits": false, "restores_from_disk": false, "reports_cached_tokens": reports_cached,
    })
}

/// Adds OpenAI's counts of drafted tokens to the details of an answer's tokens, and `looped_reasoning` if reasoning was ended that
/// repeated itself. Without drafts there are no counts: clients of old know no such members, and a count that depends on
/// measured times stays out of answers without drafts.
pub fn add_details(details: &mut Value, usage: &Usage) {
    if usage.looped_reasoning {
        details["looped_reasoning"] = true.into();
    }
    if usage.drafted_tokens > 0 {
        details["accepted_prediction_tokens"] = usage.accepted_tokens.into();
        details["rejected_prediction_tokens"] =
            usage.drafted_tokens.saturating_sub(usage.accepted_tokens).into();
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// `choices[].logprobs` of a chat.
pub fn chat_logprobs(tokens: &[Token], bytes: TokenBytes<'_>) -> Value {
    let piece = |id: u32, logprob: f32| {
        let bytes = bytes(id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes})
    };
    let content = tokens.iter().filter_map(|token| {
        let Logprob { logprob, top } = token.logprob.as_ref()?;
        let mut entry = piece(token.id, *logprob);
        entry["top_logprobs"] = top.iter().map(|(id, logprob)| piece(*id, *logprob)).collect();
        Some(entry)
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// A token as text that names it: bytes that are no text on their own are written out, as OpenAI does, or tokens that are parts
/// of characters would all look alike.
fn token_text(bytes: &[u8]) -> String {
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{escaped}")
        }
    }
}

/// A character counts where it begins: the rest of it may be in other tokens.
fn num_chars(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count()
}

/// `choices[].logprobs` of a completion as it is put together.
#[derive(Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    logprobs: Vec<Value>,
    tops: Vec<Value>,
    offsets: Vec<usize>,
}

impl CompletionLogprobs {
    /// One more token, the text of which begins at character `offset`. The first token of a prompt has no log-probability.
    fn push(&mut self, id: u32, logprob: Option<&Logprob>, bytes: TokenBytes<'_>, offset: usize) {
        self.offsets.push(offset);
        self.tokens.push(token_text(&bytes(id)));
        self.logprobs.push(logprob.map_or(Value::Null, |logprob| finite(logprob.logprob).into()));
        self.tops.push(logprob.map_or(Value::Null, |logprob| {
            let mut top = Map::new();
            for (id, logprob) in &logprob.top {
                // Different tokens may have one text; the best comes first.
                top.entry(token_text(&bytes(*id))).or_insert_with(|| finite(*logprob).into());
            }
            Value::Object(top)
        }));
    }

    /// The tokens of a prompt, all but the first with what is said of them. The text has none of those that are `special`.
    pub fn add_prompt(
        &mut self,
        told: (&[u32], &[Logprob]),
        special: &dyn Fn(u32) -> bool,
        bytes: TokenBytes<'_>,
        offset: &mut usize,
    ) {
        let (ids, scores) = told;
        let scores = std::iter::once(None).chain(scores.iter().map(Some));
        for (&id, score) in ids.iter().zip(scores) {
            self.push(id, score, bytes, *offset);
            *offset += if special(id) { 0 } else { num_chars(&bytes(id)) };
        }
    }

    /// Those of an answer that have one.
    pub fn add_answer(&mut self, tokens: &[Token], bytes: TokenBytes<'_>, offset: &mut usize) {
        let with = tokens.iter().filter_map(|token| Some((token.id, token.logprob.as_ref()?)));
        for (id, logprob) in with {
            self.push(id, Some(logprob), bytes, *offset);
            *offset += num_chars(&bytes(id));
        }
    }

    pub fn into_json(self) -> Value {
        let Self { tokens, logprobs, tops, offsets } = self;
        json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }
}

/// `choices[].logprobs` of a completion; its text begins at character `offset`, which moves on behind these tokens.
pub fn completion_logprobs(tokens: &[Token], bytes: TokenBytes<'_>, offset: &mut usize) -> Value {
    let mut logprobs = CompletionLogprobs::default();
    logprobs.add_answer(tokens, bytes, offset);
    logprobs.into_json()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two bytes that begin characters, one that is a letter.
    fn bytes(id: u32) -> Vec<u8> {
        vec![[0xe2, 0xf0, b'a'][id as usize]]
    }

    #[test]
    fn details_tell_drafts_and_ended_reasoning_where_there_were_any() {
        assert_eq!(usage(&Usage::default()).get("completion_tokens_details"), None);
        let looped =
            Usage { looped_reasoning: true, drafted_tokens: 3, accepted_tokens: 2, ..Usage::default() };
        let expected = json!({"looped_reasoning": true, "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1});
        assert_eq!(usage(&looped)["completion_tokens_details"], expected);
    }

    #[test]
    fn tokens_that_are_no_text_have_names_of_their_own() {
        let logprob = Some(Logprob { logprob: -1.0, top: vec![(0, -1.0), (1, -2.0), (2, -3.0)] });
        let tokens = [Token { id: 0, logprob }];
        let logprobs = completion_logprobs(&tokens, &bytes, &mut 0);
        assert_eq!(logprobs["tokens"], json!(["bytes:\\xe2"]));
        let expected = json!({"bytes:\\xe2": -1.0, "bytes:\\xf0": -2.0, "a": -3.0});
        assert_eq!(logprobs["top_logprobs"][0], expected);
        let chat = chat_logprobs(&tokens, &bytes);
        assert_eq!(chat["content"][0]["top_logprobs"][1]["bytes"], json!([0xf0]));
        assert_eq!(chat.get("refusal"), Some(&Value::Null));
    }
}
