//! Prompts of requests that are computed and not answered, for `llmctl warm`.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::body::Incoming;
use super::generate::Prompt;
use super::{messages, request, responses};
use crate::App;
use crate::error::ApiError;
use llmctl_engine::turn::{TurnInput, TurnRequest};

/// Reads the prompts of a body of `/v1/chat/completions`, `/v1/completions`, `/v1/messages` or `/v1/responses`, with the parameters
/// that each of them is planned with.
///
/// # Errors
/// All that is wrong with the body, the first kind of it; another path; 503 without an engine.
pub fn prompts_of(
    app: &App,
    path: &str,
    body: Map<String, Value>,
) -> Result<(Vec<TurnInput>, TurnRequest), ApiError> {
    let incoming = Incoming::anonymous();
    let request = match path {
        "/v1/chat/completions" => request::chat(app, body, incoming)?.request,
        "/v1/completions" => request::completion(app, body, incoming)?.request,
        "/v1/messages" => messages::read(app, body, incoming)?.request,
        "/v1/responses" => responses::read(app, body, incoming)?.request,
        other => {
            let message = format!(
                "url: {other:?} is none of /v1/chat/completions, /v1/completions, /v1/messages and /v1/responses"
            );
            return Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message).param("url"));
        }
    };
    let inputs = match request.prompt {
        Prompt::Chat(conversation) => vec![TurnInput::Chat(conversation)],
        Prompt::Texts(texts) => texts.into_iter().map(TurnInput::Text).collect(),
    };
    Ok((inputs, request.turn))
}
