//! The routes of the document, each with its body, its answer and its statuses; `operations.json` lists
//! them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::sse::LINES;

/// The lists of `operations.json`.
#[derive(Deserialize)]
struct Operations {
    operations: Vec<Operation>,
    /// Statuses of errors, and what they mean.
    errors: BTreeMap<u16, String>,
}

static ALL: LazyLock<Operations> = LazyLock::new(|| {
    serde_json::from_str(include_str!("operations.json")).expect("a file of the source, which tests read")
});

/// A route and method.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Operation {
    /// As in the router, e.g. `GET /v1/models/{id}`.
    route: String,
    summary: String,
    /// The group for people.
    tag: String,
    /// Schema of the body; empty without one.
    body: String,
    /// Schema of the answer in JSON; empty without one.
    answer: String,
    /// Names and types of parameters in the query.
    query: Vec<(String, String)>,
    /// Types of an answer that is no JSON: a stream, a page, counters.
    text: Vec<String>,
    /// Statuses beside those of every route: nothing of that name, one that is busy, a remote engine that
    /// refuses.
    errors: Vec<u16>,
}

/// Statuses of every route: the request's form, key, Host and Origin, time and size of the body, overload,
/// a bug, no engine.
const COMMON_ERRORS: [u16; 8] = [400, 401, 403, 408, 413, 429, 500, 503];
/// Statuses of routes with a body: not JSON, fields of a wrong type.
const BODY_ERRORS: [u16; 2] = [415, 422];

/// Returns all endpoints, e.g. `GET /v1/models/{id}`.
pub fn endpoints() -> impl Iterator<Item = &'static str> {
    ALL.operations.iter().map(|operation| operation.route.as_str())
}

/// Returns the paths of endpoints whose body may name the model: all with a body and without a name in the
/// path.
pub fn paths_with_model() -> impl Iterator<Item = &'static str> {
    let with_body = ALL.operations.iter().filter(|operation| !operation.body.is_empty());
    with_body.filter_map(|operation| operation.route.strip_prefix("POST ")).filter(|path| !path.contains('{'))
}

/// Returns whether the answers of a path may be streams.
pub fn streams(path: &str) -> bool {
    let is_stream = |kind: &String| kind == "text/event-stream" || kind == LINES;
    let mut operations = ALL.operations.iter();
    operations.any(|operation| operation.parts().1 == path && operation.text.iter().any(is_stream))
}

/// Returns `paths` of the document.
pub fn paths() -> Value {
    let mut paths = Map::new();
    for operation in &ALL.operations {
        let (method, path) = operation.parts();
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method.to_ascii_lowercase()] = operation.json(method, path);
    }
    paths.into()
}

impl Operation {
    /// Returns the method and the path.
    fn parts(&self) -> (&str, &str) {
        self.route.split_once(' ').expect("a method and a path")
    }

    fn json(&self, method: &str, path: &str) -> Value {
        let mut operation = json!({
            "summary": self.summary,
            "operationId": operation_id(method, path),
            "tags": [self.tag],
            "parameters": self.parameters(path),
            "responses": self.responses(),
        });
        if !self.body.is_empty() {
            let schema = schema_ref(&self.body);
            operation["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        operation
    }

    fn parameters(&self, path: &str) -> Value {
        let in_path = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| {
            json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}})
        });
        let in_query = self.query.iter().map(
            |(name, kind)| json!({"name": name, "in": "query", "required": false, "schema": {"type": kind}}),
        );
        in_path.chain(in_query).collect()
    }

    fn responses(&self) -> Value {
        let mut content = Map::new();
        if !self.answer.is_empty() {
            content.insert("application/json".to_owned(), json!({"schema": schema_ref(&self.answer)}));
        }
        let texts = self.text.iter();
        content.extend(texts.map(|kind| (kind.clone(), json!({"schema": {"type": "string"}}))));
        let mut responses =
            Map::from_iter([("200".to_owned(), json!({"description": "OK", "content": content}))]);
        let of_body: &[u16] = if self.body.is_empty() { &[] } else { &BODY_ERRORS };
        let statuses = COMMON_ERRORS.iter().chain(of_body).chain(&self.errors);
        responses.extend(statuses.map(|status| {
            (status.to_string(), json!({"$ref": format!("#/components/responses/{}", error_name(*status))}))
        }));
        responses.sort_keys();
        responses.into()
    }
}

/// Returns the components that `responses` of operations refer to: one for each status of an error.
pub fn error_responses() -> Value {
    let response = |(status, description): (&u16, &String)| {
        let schema =
            json!({"anyOf": [schema_ref("Error"), schema_ref("AnthropicError"), schema_ref("OllamaError")]});
        let mut response =
            json!({"description": description, "content": {"application/json": {"schema": schema}}});
        if matches!(status, 409 | 429 | 503) {
            let seconds = json!({"description": "Seconds until another attempt is of use", "schema": {"type": "integer", "minimum": 0}});
            response["headers"] = json!({"Retry-After": seconds});
        }
        (error_name(*status), response)
    };
    ALL.errors.iter().map(response).collect::<Map<_, _>>().into()
}

fn error_name(status: u16) -> String {
    format!("Error{status}")
}

fn schema_ref(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// E.g. `get_v1_sessions_id_explain`.
fn operation_id(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    std::iter::once(method.to_ascii_lowercase()).chain(words.map(str::to_owned)).collect::<Vec<_>>().join("_")
}
