//! What answers have in common on the wire: counts and log-probabilities.

use serde_json::{Map, Value, json};

use crate::runtime::{Logprob, Token, Usage};

/// What OpenAI's API gives for the log-probability of what cannot be.
const IMPOSSIBLE: f32 = -9999.0;

/// The bytes that a token stands for.
pub type TokenBytes<'a> = &'a dyn Fn(u32) -> Vec<u8>;

pub fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
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
    json!({"content": content.collect::<Vec<_>>()})
}

/// `choices[].logprobs` of a completion; its text begins at character `offset`, which moves on behind these tokens.
pub fn completion_logprobs(tokens: &[Token], bytes: TokenBytes<'_>, offset: &mut usize) -> Value {
    let text = |id: u32| String::from_utf8_lossy(&bytes(id)).into_owned();
    let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let Some(Logprob { logprob, top }) = &token.logprob else { continue };
        let piece = text(token.id);
        let top: Map<_, _> = top.iter().map(|(id, logprob)| (text(*id), finite(*logprob).into())).collect();
        offsets.push(*offset);
        // A character counts where it begins: the rest of it may be in other tokens.
        *offset += bytes(token.id).iter().filter(|byte| **byte & 0xC0 != 0x80).count();
        texts.push(piece);
        logprobs.push(finite(*logprob));
        tops.push(Value::Object(top));
    }
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}
