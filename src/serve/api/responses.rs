//! `/v1/responses`: OpenAI's Responses API.
//!
//! A stored response is a turn of a stored session. Its id is `SESSION_TURN` (`resp_SESSION_TURN` for a
//! session with another name than this API gives), where TURN is random and stands in the note that the
//! session keeps beside the turn, together with the response object. So a response outlives the server,
//! belongs to the session's owner, and is found without an index. A request with `previous_response_id`
//! repeats the conversation up to that turn: at the session's end it appends a turn, anywhere else it begins
//! a branch, so that a response can be continued any number of times.
//!
//! Invariants: a refusal comes before the first byte, except that a stream whose prompt is too long begins
//! and fails, because agents compact their conversation only then; `store: false` stores nothing; deleting a
//! response erases no other one.

mod body;
mod events;
mod stored;
mod writer;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::blocking::blocking;
use super::body::PostedBody;
use super::generate::Prompt;
use super::reply::Ignored;
use super::session_host::SessionHost;
use super::{sse, text};
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::Caller;
pub use body::read;

use body::ResponsesBody;
use events::ResponseEvents;

pub async fn post(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let ResponsesBody { request, writer } = posted.read(&app, read).await?;
    sse::answer(&app, request, |_| ResponseEvents::new(writer)).await
}

/// Counts the tokens of a request's prompt.
pub async fn input_tokens(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let ResponsesBody { request, .. } = posted.read(&app, read).await?;
    let Prompt::Chat(conversation) = request.prompt else {
        return Err(ApiError::internal("a response without a conversation"));
    };
    let count = text::count_of(&app, conversation, request.turn.answer_start).await?;
    let object = json!({"object": "response.input_tokens", "input_tokens": count});
    Ok((Ignored(request.ignored), Json(object)).into_response())
}

/// Returns a stored response.
pub async fn get(
    State(host): State<SessionHost>,
    caller: Caller,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    if uri.query().unwrap_or_default().split('&').any(|pair| pair == "stream=true") {
        return Err(ApiError::unsupported("stream", "stream: a stored response is not streamed again"));
    }
    let object = blocking(&host, move |host| {
        let found = stored::find(host.sessions(), &caller, &id)?;
        found.map(|response| response.object().clone()).ok_or_else(|| not_found(&id))
    });
    Ok(Json(object.await?))
}

/// Removes a stored response.
pub async fn delete(
    State(host): State<SessionHost>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let deleted = blocking(&host, move |host| {
        let found = stored::find(host.sessions(), &caller, &id)?.ok_or_else(|| not_found(&id))?;
        stored::delete(host, found)?;
        Ok(json!({"id": id, "object": "response", "deleted": true}))
    });
    Ok(Json(deleted.await?))
}

fn not_found(id: &str) -> ApiError {
    let message = format!("there is no response {id:?} here");
    ApiError::new(StatusCode::NOT_FOUND, Some("response_not_found"), message).param("response_id")
}
