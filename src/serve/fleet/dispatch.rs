//! Gives each request to the model that it names.
//!
//! Invariant: a body is checked before a model is loaded for it.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::Value;

use super::waiting::{self, Waiting};
use super::{Fleet, listing, text_of};
use crate::serve::api;
use crate::serve::api::body::JsonBody;
use crate::serve::error::ApiError;
use crate::serve::ledger::Ledger;

/// Endpoints whose body names the model.
const BY_BODY: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/infill",
    "/apply-template",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/reranking",
    "/v1/reranking",
    "/tokenize",
    "/detokenize",
];

/// Endpoints whose query may name the model: `?model=ID`.
const BY_QUERY: [&str; 3] = ["/props", "/tokenizer_info", "/openapi.json"];

/// The endpoints of a server with several models, without the layers around them.
pub fn routes(fleet: Fleet) -> Router {
    let listed = Router::new()
        .route("/v1/models", get(listing::list))
        .route("/models", get(listing::list))
        .route("/v1/models/{*id}", get(listing::get).post(listing::change))
        .route("/models/{*id}", get(listing::get));
    let with_body = BY_BODY.iter().fold(listed, |routes, path| routes.route(path, post(by_body)));
    let all = BY_QUERY.iter().fold(with_body, |routes, path| routes.route(path, get(by_query)));
    all.merge(api::session_routes()).with_state(fleet)
}

async fn by_body(State(fleet): State<Fleet>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    // The guard has read the body, within its limits.
    let bytes = to_bytes(body, usize::MAX).await.map_err(|_| ApiError::internal("the body is gone"))?;
    let again = |bytes: Bytes| Request::from_parts(parts.clone(), Body::from(bytes));
    let JsonBody(object) = JsonBody::from_request(again(bytes.clone()), &()).await?;
    let path = parts.uri.path();
    let index = fleet.find(text_of(&object, "model"), path)?;
    let is_streamed = object.get("stream") == Some(&Value::Bool(true)) && waiting::streams(path);
    drop(object);
    let waiting = Waiting { fleet, index, request: again(bytes), ledger: Ledger::current() };
    match is_streamed {
        true => waiting.streamed().await,
        false => waiting.answered().await,
    }
}

async fn by_query(State(fleet): State<Fleet>, request: Request) -> Result<Response, ApiError> {
    let query = request.uri().query().unwrap_or_default();
    let index = match url_member(query, "model") {
        // Any model that is loaded knows the interface.
        None if request.uri().path() == "/openapi.json" => fleet.loaded_or_first(),
        named => fleet.find(named.as_deref(), "")?,
    };
    Waiting { fleet, index, request, ledger: Ledger::current() }.answered().await
}

/// Returns a member of a query, decoded.
fn url_member(query: &str, name: &str) -> Option<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).map(|(_, value)| percent_decoded(value)).next()
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut ahead = rest.clone();
        let hex = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match (byte, hex(ahead.next()), hex(ahead.next())) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = ahead;
            }
            (b'+', ..) => bytes.push(b' '),
            _ => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_a_model_as_browsers_write_it() {
        let check = |query: &str, expected: Option<&str>| {
            assert_eq!(url_member(query, "model").as_deref(), expected, "{query}");
        };
        check("model=org%2Fname:Q4_K_M", Some("org/name:Q4_K_M"));
        check("a=b&model=x+y%", Some("x y%"));
        check("modell=x", None);
        check("", None);
    }
}
