//! Errors of the command for the HTTP failures of an endpoint, with hints.

use crate::cli::error::{CommandError, Kind};
use llmctl_engine::http_engine::HttpFailure;

/// Returns the error of a command for a request without an answer.
pub fn explained(failure: &HttpFailure, url: &str, has_key: bool) -> CommandError {
    match failure {
        HttpFailure::Unreachable(why) => unreachable(url, why),
        HttpFailure::Status { code, message, retry_after } => {
            let said = if message.is_empty() { String::new() } else { format!(": {message}") };
            let error = |kind: Kind, what: &str| kind.error(format!("{url} {what} ({code}){said}"));
            match code {
                401 | 403 if has_key => error(Kind::Auth, "rejects the key")
                    .hint("check the variable of --endpoint-key-env or the file of --endpoint-key-file"),
                401 | 403 => error(Kind::Auth, "asks for a key").hint(
                    "--endpoint-key-env NAME names the variable that holds it, --endpoint-key-file FILE the file",
                ),
                404 => error(Kind::NotFound, "has no such model or path")
                    .hint("check --model, and that the address ends like that of the server's documentation, e.g. in /v1"),
                429 => {
                    let wait = retry_after.map(|pause| format!("try again in {} s", pause.as_secs_f64().ceil()));
                    error(Kind::Temporary, "takes no more requests for now")
                        .hint(wait.unwrap_or_else(|| "try again later".to_owned()))
                }
                500.. => error(Kind::Unavailable, "has failed"),
                300..=399 => error(Kind::Unavailable, "sends elsewhere").hint("give the address that it really has"),
                _ if is_too_long(message) => error(Kind::BadData, "refuses the request")
                    .hint("the conversation is longer than the model's context: shorten it, or begin another"),
                _ => error(Kind::Failure, "refuses the request"),
            }
        }
        HttpFailure::Broken(_) | HttpFailure::Malformed(_) | HttpFailure::Timeout => {
            Kind::Unavailable.error(format!("{url}: {failure}"))
        }
    }
}

fn unreachable(url: &str, why: &str) -> CommandError {
    let error = Kind::Unavailable.error(format!("{url} cannot be reached: {why}"));
    let says = |words: &[&str]| words.iter().any(|word| why.contains(word));
    error.hint(match why {
        _ if says(&["certificate", "Issuer"]) => {
            "SSL_CERT_FILE names a PEM file with the authority that signs there, e.g. a company's"
        }
        _ if says(&["corrupt message", "InvalidContentType"]) => {
            "this port does not speak TLS: begin the address with http://"
        }
        _ => "check the address, and whether the server runs",
    })
}

fn is_too_long(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    message.contains("context")
        && ["length", "exceed", "holds", "too long"].iter().any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let check = |code, message: &str, has_key, kind, said: &str| {
            let retry_after = Some(Duration::from_millis(6500));
            let failure = HttpFailure::Status { code, message: message.to_owned(), retry_after };
            let error = explained(&failure, "http://x/v1", has_key);
            let text = format!("{error}; {}", error.hint_text().unwrap_or_default());
            assert!(error.kind == kind && text.contains(said), "{code}: {text}");
        };
        check(401, "no", true, Kind::Auth, "http://x/v1 rejects the key (401): no");
        check(401, "", false, Kind::Auth, "asks for a key (401); --endpoint-key-env NAME");
        check(404, "no m", true, Kind::NotFound, "no such model or path (404): no m");
        check(429, "slow", true, Kind::Temporary, "try again in 7 s");
        check(400, "maximum context length is 5", true, Kind::BadData, "longer than the model's context");
        check(400, "top_k is unknown", true, Kind::Failure, "refuses the request (400): top_k");
        check(503, "", true, Kind::Unavailable, "has failed (503)");
        check(307, "", true, Kind::Unavailable, "sends elsewhere");
        let untrusted = HttpFailure::Unreachable("invalid peer certificate: UnknownIssuer".to_owned());
        let error = explained(&untrusted, "https://x", false);
        assert!(error.hint_text().is_some_and(|hint| hint.contains("SSL_CERT_FILE")), "{error:?}");
        let plain =
            HttpFailure::Unreachable("received corrupt message of type InvalidContentType".to_owned());
        let error = explained(&plain, "https://x", false);
        assert!(error.hint_text().is_some_and(|hint| hint.contains("http://")), "{error:?}");
    }
}
