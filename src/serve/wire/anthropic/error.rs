//! Anthropic's error envelope.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::error::ApiError;

/// Returns the envelope, for a response body or a stream event. Our code is where the SDKs look for one.
pub fn body(error: &ApiError, request_id: &str) -> Value {
    let details = error.code.map(|code| json!({"error_code": code, "param": error.param}));
    let message = match error.context.as_deref() {
        // Claude Code reads both numbers out of this sentence before it makes its conversation shorter.
        Some((prompt, context)) => format!("prompt is too long: {prompt} tokens > {context} maximum"),
        None => error.message.clone(),
    };
    let mut object = json!({"type": kind(error.plain_status()), "message": message});
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

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_base::Error;

    #[test]
    fn every_error_has_a_type_that_clients_know() {
        let written = |error: ApiError| {
            let written = body(&error, "r");
            assert_eq!((&written["type"], &written["request_id"]), (&json!("error"), &json!("r")));
            (error.plain_status().as_u16(), written["error"]["type"].as_str().map(str::to_owned))
        };
        for (code, expected, kind) in [
            (400, 400, "invalid_request_error"),
            (401, 401, "authentication_error"),
            (403, 403, "permission_error"),
            (404, 404, "not_found_error"),
            (408, 408, "timeout_error"),
            (409, 409, "conflict_error"),
            (413, 413, "request_too_large"),
            (422, 400, "invalid_request_error"),
            (429, 429, "rate_limit_error"),
            (500, 500, "api_error"),
            (503, 503, "overloaded_error"),
        ] {
            let error = ApiError::new(StatusCode::from_u16(code).expect("a status"), None, "m");
            assert_eq!(written(error), (expected, Some(kind.to_owned())));
        }
    }

    /// Claude Code 2.1.197 looks for `prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)`.
    #[test]
    fn a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for() {
        let error = Error::PromptTooLong { prompt_tokens: 5000, context_tokens: 4096 };
        let written = body(&error.into(), "r");
        assert_eq!(written["error"]["message"], "prompt is too long: 5000 tokens > 4096 maximum");
        assert_eq!(written["error"]["details"]["error_code"], "context_length_exceeded");
    }
}
