//! Bounds how much text is rendered and tokenised at the same time: both take ten times the memory of a text,
//! and clients choose the number of requests.
//!
//! Small texts are limited by number and large ones by size, separately, so that large texts do not delay
//! small ones. A request that waits longer than [`LONGEST_WAIT`] is refused.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::ApiError;
use llmctl_base::Error;
use llmctl_template::{Content, Conversation, Message};

/// Texts that count by their number.
const SMALL: usize = 64 << 10;
const SMALL_AT_ONCE: usize = 256;
/// Bytes of large texts; one that is larger than all of it goes alone. A text of one word takes more than a hundred times its size.
const LARGE_BYTES_AT_ONCE: usize = 4 << 20;
const UNIT: usize = 1 << 10;

const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// The limits on texts being prepared; clones share them.
#[derive(Debug, Clone)]
pub struct Preparing {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    longest_wait: Duration,
}

impl Default for Preparing {
    fn default() -> Self {
        Self {
            small: Arc::new(Semaphore::new(SMALL_AT_ONCE)),
            large: Arc::new(Semaphore::new(LARGE_BYTES_AT_ONCE / UNIT)),
            longest_wait: LONGEST_WAIT,
        }
    }
}

impl Preparing {
    /// Waits until `num_bytes` of text may be prepared; dropping the value ends the preparation.
    ///
    /// # Errors
    /// 503 after [`LONGEST_WAIT`].
    pub async fn enter(&self, num_bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let (places, count) = match num_bytes {
            0..=SMALL => (&self.small, 1),
            _ => (&self.large, num_bytes.min(LARGE_BYTES_AT_ONCE).div_ceil(UNIT)),
        };
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let entered = timeout(self.longest_wait, Arc::clone(places).acquire_many_owned(count)).await;
        // The semaphores are never closed.
        entered.ok().and_then(Result::ok).ok_or_else(|| {
            let message = "too many large prompts are being read at once";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("overloaded"), message)
        })
    }
}

/// Requests to an embedder that are under way: each holds one of the threads that all requests share.
const MAX_REQUESTS: usize = 64;
/// Wait that a refused client is told.
const REFUSED_WAIT: Duration = Duration::from_secs(2);

/// The places of requests to an embedder; clones share them.
#[derive(Debug, Clone)]
pub struct EmbedPlaces(Arc<Semaphore>);

impl Default for EmbedPlaces {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_REQUESTS)))
    }
}

impl EmbedPlaces {
    /// Takes a place until the result is dropped.
    ///
    /// # Errors
    /// 429 if all are taken.
    pub fn enter(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let refused =
            |_| ApiError::from(Error::QueueFull { waiting: MAX_REQUESTS }).retry_after(REFUSED_WAIT);
        Arc::clone(&self.0).try_acquire_owned().map_err(refused)
    }
}

/// Returns the approximate bytes of text in a conversation.
pub fn bytes_of(conversation: &Conversation) -> usize {
    let Conversation { messages, tools, documents, kwargs } = conversation;
    let messages: usize = messages.iter().map(bytes_of_message).sum();
    let values = tools.iter().chain(documents).chain(kwargs.values());
    messages + values.map(bytes_of_value).sum::<usize>()
}

fn bytes_of_message(message: &Message) -> usize {
    let content = match &message.content {
        None => 0,
        Some(Content::Text(text)) => text.len(),
        Some(Content::Parts(parts)) => parts.iter().map(bytes_of_value).sum(),
    };
    let calls = message.tool_calls.iter().map(|call| call.name.len() + bytes_of_value(&call.arguments));
    UNIT / 16 + content + message.reasoning.as_ref().map_or(0, String::len) + calls.sum::<usize>()
}

fn bytes_of_value(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(bytes_of_value).sum(),
        Value::Object(members) => {
            members.iter().map(|(name, value)| name.len() + bytes_of_value(value)).sum()
        }
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use llmctl_template::ToolCall;

    fn impatient() -> Preparing {
        Preparing { longest_wait: Duration::from_millis(20), ..Preparing::default() }
    }

    #[tokio::test]
    async fn large_texts_wait_for_each_other_and_for_no_small_one() {
        let preparing = impatient();
        let half = preparing.enter(LARGE_BYTES_AT_ONCE / 2).await.expect("room");
        let rest = preparing.enter(LARGE_BYTES_AT_ONCE / 2).await.expect("room");
        let refused = preparing.enter(SMALL + 1).await.expect_err("no room");
        assert_eq!((refused.status.as_u16(), refused.code), (503, Some("overloaded")));
        let small = preparing.enter(SMALL).await;
        assert!(small.is_ok());
        drop(half);
        assert!(preparing.enter(SMALL + 1).await.is_ok());
        assert!(preparing.enter(usize::MAX).await.is_err(), "one beyond all measure goes alone");
        drop(rest);
        assert!(preparing.enter(usize::MAX).await.is_ok());
    }

    #[tokio::test]
    async fn small_ones_are_bounded_by_their_number() {
        let preparing = impatient();
        let mut held = Vec::new();
        for _ in 0..SMALL_AT_ONCE {
            held.push(preparing.enter(1).await.expect("room"));
        }
        assert!(preparing.enter(1).await.is_err());
        assert!(preparing.enter(SMALL + 1).await.is_ok());
    }

    #[test]
    fn all_text_of_a_conversation_counts() {
        let text = "x".repeat(1000);
        let call = ToolCall { id: None, name: "f".to_owned(), arguments: json!({"a": [text]}) };
        let parts = Content::Parts(vec![json!({"type": "text", "text": text})]);
        let messages = vec![
            Message { reasoning: Some(text.clone()), tool_calls: vec![call], ..Message::user(text.clone()) },
            Message { content: Some(parts), ..Message::user("") },
        ];
        let tools = vec![json!({"function": {"description": text}})];
        let kwargs = json!({"more": text}).as_object().expect("an object").clone();
        let whole = Conversation { messages, tools, kwargs, documents: vec![json!(text)] };
        let bytes = bytes_of(&whole);
        assert!((7000..7400).contains(&bytes), "{bytes}");
    }

    #[test]
    fn requests_beyond_the_limit_are_refused_until_others_have_ended() {
        let places = EmbedPlaces::default();
        let mut taken: Vec<_> = (0..MAX_REQUESTS).map(|_| places.enter().expect("a place")).collect();
        let refused = places.clone().enter().expect_err("all are taken");
        let found = (refused.status.as_u16(), refused.code, refused.retry_after);
        assert_eq!(found, (429, Some("queue_full"), Some(REFUSED_WAIT)));
        taken.pop();
        assert!(places.enter().is_ok());
    }
}
