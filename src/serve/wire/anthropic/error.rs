//! Anthropic's error envelope.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::serve::error::ApiError;

/// Returns the status that Anthropic's clients expect: a body of the wrong form is a 400 like any other.
pub fn status(error: &ApiError) -> StatusCode {
    match error.status {
        StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
        status => status,
    }
}

/// Returns the envelope, for a response body or a stream event. Our code is where the SDKs look for one.
pub fn body(error: &ApiError, request_id: &str) -> Value {
    let details = error.code.map(|code| json!({"error_code": code, "param": error.param}));
    let message = match error.context {
        // Claude Code reads both numbers out of this sentence before it makes its conversation shorter.
        Some((prompt, context)) => format!("prompt is too long: {prompt} tokens > {context} maximum"),
        None => error.message.clone(),
    };
    let mut object = json!({"type": kind(status(error)), "message": message});
    if let Some(details) = details {
        object["details"] = details;
    }
    json!({"type": "error", "error": object, "request_id": request_id})
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::CONFLICT => "conflict_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}
