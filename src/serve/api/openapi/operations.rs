//! The routes of the document, each with its body, its answer and its statuses.

use serde_json::{Map, Value, json};

/// A route and method.
struct Operation {
    /// As in the router, e.g. `GET /v1/models/{id}`.
    route: &'static str,
    summary: &'static str,
    /// Schema of the body; empty without one.
    body: &'static str,
    /// Schema of the answer in JSON; empty without one.
    answer: &'static str,
    /// Names and types of parameters in the query.
    query: &'static [(&'static str, &'static str)],
}

const fn get(route: &'static str, summary: &'static str, answer: &'static str) -> Operation {
    post(route, summary, "", answer)
}

const fn post(
    route: &'static str,
    summary: &'static str,
    body: &'static str,
    answer: &'static str,
) -> Operation {
    Operation { route, summary, body, answer, query: &[] }
}

impl Operation {
    const fn query(self, query: &'static [(&'static str, &'static str)]) -> Self {
        Self { query, ..self }
    }

    /// Returns the statuses beside those of every route: nothing of that name, one that is busy, a remote engine that refuses.
    fn errors(&self) -> &'static [u16] {
        let (_, path) = self.method_and_path();
        let is_kept = |path: &str| path.starts_with("/v1/sessions/") || path.starts_with("/v1/responses/{");
        match path {
            "/v1/responses/input_tokens" => &[404, 409, 502],
            _ if streams(path) => &[404, 409, 502],
            _ if is_kept(path) || path.ends_with("load") => &[404, 409],
            _ if path.contains('{') || !self.body.is_empty() => &[404],
            _ => &[],
        }
    }

    fn method_and_path(&self) -> (&'static str, &'static str) {
        self.route.split_once(' ').expect("a method and a path")
    }
}

/// Statuses of every route: the request's form, key, Host and Origin, time and size of the body, overload, a bug, no engine.
const COMMON_ERRORS: [u16; 8] = [400, 401, 403, 408, 413, 429, 500, 503];
/// Statuses of routes with a body: not JSON, fields of a wrong type.
const BODY_ERRORS: [u16; 2] = [415, 422];

const TRANSIENT: (&str, &str) = ("transient", "boolean");

const OPERATIONS: [Operation; 43] = [
    post("POST /v1/chat/completions", "Answer a conversation", "ChatCompletionRequest", "ChatCompletion"),
    post("POST /v1/completions", "Continue texts as they are", "CompletionRequest", "Completion"),
    post(
        "POST /v1/responses",
        "Answer a conversation, in the form of OpenAI's Responses",
        "ResponseRequest",
        "Response",
    ),
    post("POST /v1/responses/input_tokens", "Count the tokens of a prompt", "ResponseRequest", "InputTokens"),
    get("GET /v1/responses/{id}", "A stored response", "Response"),
    get("DELETE /v1/responses/{id}", "Remove a stored response", "DeletedResponse"),
    post("POST /v1/messages", "Answer a conversation, in Anthropic's form", "MessageRequest", "Message"),
    post(
        "POST /v1/messages/count_tokens",
        "Count the tokens of a prompt",
        "CountTokensRequest",
        "InputTokens",
    ),
    post("POST /infill", "The text between two others, in llama.cpp's form", "InfillRequest", "Infill"),
    post("POST /v1/embeddings", "Vectors of texts", "EmbeddingRequest", "Embeddings"),
    post("POST /v1/rerank", "Scores of documents for a query", "RerankRequest", "Ranking"),
    post("POST /rerank", "The same as /v1/rerank", "RerankRequest", "Ranking"),
    post("POST /v2/rerank", "The same as /v1/rerank", "RerankRequest", "Ranking"),
    post("POST /reranking", "The same as /v1/rerank", "RerankRequest", "Ranking"),
    post("POST /v1/reranking", "The same as /v1/rerank", "RerankRequest", "Ranking"),
    post("POST /tokenize", "Text or messages to token ids", "TokenizeRequest", "Tokens"),
    post("POST /detokenize", "Token ids to text", "DetokenizeRequest", "Text"),
    get("GET /tokenizer_info", "The tokenizer's configuration, in vLLM's words", "TokenizerInfo"),
    post("POST /apply-template", "The prompt of a conversation", "ApplyTemplateRequest", "Prompt"),
    get("GET /v1/models", "The models that are served", "ModelList"),
    get("GET /v1/models/{id}", "A model by its id", "Model"),
    post("POST /v1/models/{id}/load", "Load a model now", "", "Model"),
    post("POST /v1/models/{id}/unload", "Free the memory of a model", "", "Model"),
    get("GET /models", "The same as /v1/models", "ModelList"),
    get("GET /models/{id}", "The same as /v1/models/{id}", "Model"),
    get("GET /props", "llama.cpp's properties of a server", "Properties"),
    get("GET /v1/sessions", "The sessions of the key's owner, by id, in pages", "SessionList")
        .query(&[("limit", "integer"), ("after", "string")]),
    get("GET /v1/sessions/{id}", "A session and its branches", "Session")
        .query(&[("messages", "boolean"), TRANSIENT]),
    get("DELETE /v1/sessions/{id}", "Remove a session with its branches", "SessionClosed")
        .query(&[TRANSIENT]),
    post("POST /v1/sessions/{id}/reset", "Empty a session; a branch keeps its turns", "", "SessionReset"),
    post(
        "POST /v1/sessions/{id}/fork",
        "Begin a session with the turns of another",
        "ForkRequest",
        "SessionForked",
    ),
    post("POST /v1/sessions/{id}/rename", "Give a session another id", "RenameRequest", "SessionRenamed"),
    post(
        "POST /v1/sessions/{id}/restore",
        "Put a branch in its session's place",
        "RestoreRequest",
        "SessionRestored",
    ),
    get("GET /v1/sessions/{id}/explain", "Why the last prompt was not resumed further", "SessionExplained")
        .query(&[TRANSIENT]),
    get("GET /v1/mcp", "The MCP servers and their tools", "McpServers"),
    post(
        "POST /v1/mcp/tools/{name}",
        "Call a tool of an MCP server, and wait for its result",
        "ToolCallRequest",
        "ToolCallResult",
    ),
    get("GET /openapi.json", "This document", "Document"),
    get("GET /page/{file}", "The page's scripts, style and icon", ""),
    get("GET /", "Name, version, stage, model and endpoints", "Index"),
    get("GET /health", "The process lives", "Status"),
    get("GET /v1/health", "The process lives", "Status"),
    get("GET /ready", "A request would be taken", "Status"),
    get("GET /metrics", "Counters for Prometheus", ""),
];

/// Returns the types of an answer that is no JSON: a stream, a page, counters.
fn text_types(path: &str) -> &'static [&'static str] {
    match path {
        "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages" | "/infill" => {
            &["text/event-stream"]
        }
        "/" => &["text/html"],
        "/page/{file}" => &["image/svg+xml", "text/css", "text/javascript"],
        "/metrics" => &["text/plain", "application/openmetrics-text"],
        _ => &[],
    }
}

/// Returns all endpoints, e.g. `GET /v1/models/{id}`.
pub fn endpoints() -> impl Iterator<Item = &'static str> {
    OPERATIONS.iter().map(|operation| operation.route)
}

/// Returns the paths of endpoints whose body may name the model: all with a body and without a name in the path.
pub fn paths_with_model() -> impl Iterator<Item = &'static str> {
    let with_body = OPERATIONS.iter().filter(|operation| !operation.body.is_empty());
    with_body.filter_map(|operation| operation.route.strip_prefix("POST ")).filter(|path| !path.contains('{'))
}

/// Returns whether the answers of a path may be streams.
pub fn streams(path: &str) -> bool {
    text_types(path).contains(&"text/event-stream")
}

/// Returns `paths` of the document.
pub fn paths() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let (method, path) = operation.method_and_path();
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method.to_ascii_lowercase()] = operation.json(method, path);
    }
    paths.into()
}

impl Operation {
    fn json(&self, method: &str, path: &str) -> Value {
        let mut operation = json!({
            "summary": self.summary,
            "operationId": operation_id(method, path),
            "tags": [tag(path)],
            "parameters": self.parameters(path),
            "responses": self.responses(path),
        });
        if !self.body.is_empty() {
            let schema = schema_ref(self.body);
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

    fn responses(&self, path: &str) -> Value {
        let mut content = Map::new();
        if !self.answer.is_empty() {
            content.insert("application/json".to_owned(), json!({"schema": schema_ref(self.answer)}));
        }
        let texts = text_types(path).iter();
        content.extend(texts.map(|kind| ((*kind).to_owned(), json!({"schema": {"type": "string"}}))));
        let mut responses =
            Map::from_iter([("200".to_owned(), json!({"description": "OK", "content": content}))]);
        let of_body: &[u16] = if self.body.is_empty() { &[] } else { &BODY_ERRORS };
        let statuses = COMMON_ERRORS.iter().chain(of_body).chain(self.errors());
        responses.extend(statuses.map(|status| {
            (status.to_string(), json!({"$ref": format!("#/components/responses/{}", error_name(*status))}))
        }));
        responses.sort_keys();
        responses.into()
    }
}

/// Returns the components that `responses` of operations refer to: one for each status of an error.
pub fn error_responses() -> Value {
    let mut statuses: Vec<u16> = COMMON_ERRORS.iter().chain(&BODY_ERRORS).copied().collect();
    statuses.extend(OPERATIONS.iter().flat_map(|operation| operation.errors()));
    statuses.sort_unstable();
    statuses.dedup();
    let response = |status: u16| {
        let schema = json!({"anyOf": [schema_ref("Error"), schema_ref("AnthropicError")]});
        let mut response =
            json!({"description": description(status), "content": {"application/json": {"schema": schema}}});
        if matches!(status, 409 | 429 | 503) {
            let seconds = json!({"description": "Seconds until another attempt is of use", "schema": {"type": "integer", "minimum": 0}});
            response["headers"] = json!({"Retry-After": seconds});
        }
        (error_name(status), response)
    };
    statuses.into_iter().map(response).collect::<Map<_, _>>().into()
}

fn error_name(status: u16) -> String {
    format!("Error{status}")
}

fn description(status: u16) -> &'static str {
    match status {
        400 => "A value, a field or the form of the request is refused by name",
        401 => "A key is missing or wrong",
        403 => "The name in Host or the Origin is not allowed",
        404 => "The model, session, branch, response, item or tool does not exist",
        408 => "The body did not arrive in time",
        409 => "The session is busy, or exists already; the model is in use or pinned",
        413 => "The body is too large",
        415 => "The body is not JSON, or compressed",
        422 => "A field is missing or of a wrong type",
        429 => "The queue is full, or the client sends too many slow bodies",
        500 => "A bug of the server",
        502 => "A remote engine has refused the request, or its answer breaks the constraint",
        _ => "The model is loading, the engine is being brought back, or the server stops",
    }
}

fn schema_ref(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// E.g. `get_v1_sessions_id_explain`.
fn operation_id(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    std::iter::once(method.to_ascii_lowercase()).chain(words.map(str::to_owned)).collect::<Vec<_>>().join("_")
}

/// The group of a path for people.
fn tag(path: &str) -> &'static str {
    match path {
        path if path.starts_with("/v1/sessions") => "sessions",
        path if path.starts_with("/v1/mcp") => "tools",
        path if path.contains("models") || path == "/props" => "models",
        path if path.contains("/rerank") || path == "/v1/embeddings" => "vectors",
        "/tokenize" | "/detokenize" | "/tokenizer_info" | "/apply-template" => "text",
        "/" | "/health" | "/v1/health" | "/ready" | "/metrics" | "/openapi.json" => "server",
        _ => "answers",
    }
}
