//! Promise: /openapi.json is true of the server: its routes are those of docs/http.md, the fields of its bodies those of
//! docs/http-fields.md, and real answers are as its schemas say.

use std::fs;

use crate::common::prelude::*;
use crate::common::server::{MODEL, Reply, ask, both_kinds};

fn server() -> Server {
    let special_tokens = &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
    let answers = &[("sky blue?", "It scatters."), ("Once upon a time", " there was"), ("add", "a + b")];
    Build { special_tokens, ..Build::answers(answers) }.start()
}

fn read(path: &str) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Cells of the rows of Markdown tables, without the code marks around them.
fn rows(table: &str) -> impl Iterator<Item = Vec<&str>> {
    let rows = table.lines().filter(|line| line.starts_with("| "));
    rows.map(|row| row.split('|').skip(1).map(|cell| cell.trim().trim_matches('`')).collect())
}

fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().unwrap_or_else(|| panic!("{value} is no object"))
}

async fn document(server: &Server) -> Value {
    server.get("/openapi.json").await.ok()
}

/// A validator of one of the document's schemas.
fn validator(document: &Value, name: &str) -> jsonschema::Validator {
    let schemas = &document["components"]["schemas"];
    assert!(schemas[name].is_object(), "there is no schema {name}");
    let schema = json!({"$ref": format!("#/components/schemas/{name}"), "components": {"schemas": schemas}});
    jsonschema::draft202012::new(&schema).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Checks a value against one of the document's schemas.
pub fn check(document: &Value, name: &str, value: &Value) {
    let errors: Vec<String> = validator(document, name)
        .iter_errors(value)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{name}: {value}\n{}", errors.join("\n"));
}

async fn its_routes_are_those_of_the_page() {
    let document = document(&server()).await;
    let paths = object(&document["paths"]).iter();
    let routes: BTreeSet<String> = paths
        .flat_map(|(path, methods)| {
            object(methods).keys().map(move |method| format!("{} {path}", method.to_uppercase()))
        })
        .collect();
    let page = read("docs/http.md");
    let table = page.split("## Routes").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a table");
    let documented: BTreeSet<String> = rows(table)
        .filter_map(|cells| cells.first().map(|cell| (*cell).to_owned()))
        .filter(|cell| cell.contains(" /"))
        .collect();
    assert_eq!(routes, documented);
}

/// Columns of docs/http-fields.md, and the body of each.
const COLUMNS: [(&str, &str); 10] = [
    ("chat", "ChatCompletionRequest"),
    ("completions", "CompletionRequest"),
    ("infill", "InfillRequest"),
    ("completion", "NativeCompletionRequest"),
    ("api/chat", "OllamaChatRequest"),
    ("api/generate", "OllamaGenerateRequest"),
    ("responses", "ResponseRequest"),
    ("input_tokens", "ResponseRequest"),
    ("messages", "MessageRequest"),
    ("count_tokens", "CountTokensRequest"),
];

async fn its_fields_are_those_of_the_page() {
    let document = document(&server()).await;
    let page = read("docs/http-fields.md");
    let mut num_fields = 0;
    for table in page.split("\n### ").skip(1).filter(|table| table.contains("| field | example |")) {
        let mut rows = rows(table);
        let header = rows.next().expect("a header");
        let rows: Vec<Vec<&str>> = rows.collect();
        for (at, body) in header.iter().enumerate().filter_map(|(at, name)| {
            COLUMNS.iter().find(|(column, _)| column == name).map(|(_, body)| (at, *body))
        }) {
            let properties = object(&document["components"]["schemas"][body]["properties"]);
            let named = |only_taken: bool| -> BTreeSet<&str> {
                let rows = rows.iter().filter(|row| !only_taken || row[at] != "refused");
                rows.map(|row| row[0]).collect()
            };
            let described: BTreeSet<&str> = properties.keys().map(String::as_str).collect();
            let missing: Vec<_> = named(true).difference(&described).copied().collect();
            assert!(missing.is_empty(), "{body}: {missing:?} are taken and not described");
            let unknown: Vec<_> = described.difference(&named(false)).copied().collect();
            assert!(unknown.is_empty(), "{body}: {unknown:?} are described and not on the page");
            num_fields += described.len();
        }
    }
    assert!(num_fields > 300, "{num_fields}");
}

/// Returns the schema at a path like `messages[].content`; `None` if there is no such property.
fn property<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(schema, |schema, part| {
        let name = part.trim_end_matches("[]");
        let field = schema["properties"].get(name)?;
        if name == part {
            return Some(field);
        }
        let lists = field["anyOf"].as_array().into_iter().flatten().chain([field]);
        lists.filter_map(|list| list.get("items")).next()
    })
}

async fn its_statuses_are_those_of_the_page() {
    let document = document(&server()).await;
    let page = read("docs/http.md");
    let statuses: BTreeSet<String> = rows(&page)
        .filter_map(|cells| cells.first().map(|cell| (*cell).to_owned()))
        .filter(|cell| cell.len() == 3 && cell.parse::<u16>().is_ok())
        .collect();
    let described = object(&document["components"]["responses"]).keys();
    let described: BTreeSet<String> =
        described.map(|name| name.trim_start_matches("Error").to_owned()).collect();
    assert!(statuses.len() > 10, "{statuses:?}");
    assert_eq!(described, statuses);
}

async fn every_fact_is_of_a_field_that_is_read() {
    let document = document(&server()).await;
    let schemas = object(&document["components"]["schemas"]);
    let facts: Value = serde_json::from_str(&read("src/serve/api/openapi/fields.json")).expect("JSON");
    for path in object(&facts).keys() {
        let bodies = schemas.iter().filter(|(name, _)| name.ends_with("Request"));
        let found = bodies.filter_map(|(_, schema)| property(schema, path)).next();
        let field = found.unwrap_or_else(|| panic!("{path} is in no body"));
        assert!(field["description"].is_string(), "{path}");
    }
    let temperature = property(&schemas["ChatCompletionRequest"], "temperature").expect("a field");
    assert_eq!((&temperature["minimum"], &temperature["maximum"]), (&json!(0.0), &json!(2.0)));
    let top_p = property(&schemas["MessageRequest"], "top_p").expect("a field");
    assert_eq!(top_p["exclusiveMinimum"], json!(0.0));
    assert_eq!(schemas["ChatCompletionRequest"]["required"], json!(["messages"]));
    assert_eq!(schemas["InfillRequest"]["required"], json!(["input_prefix", "input_suffix"]));
}

async fn examples_are_as_their_schemas_say() {
    let server = server();
    let document = document(&server).await;
    let mut num_examples = 0;
    for (name, schema) in object(&document["components"]["schemas"]) {
        for example in schema["examples"].as_array().into_iter().flatten() {
            check(&document, name, example);
            num_examples += 1;
        }
    }
    assert!(num_examples > 25, "{num_examples}");
    let strict = validator(&document, "ChatCompletionRequest");
    for wrong in
        [json!({}), json!({"messages": []}), ask("x", json!({"temperature": 3})), ask("x", json!({"x": 1}))]
    {
        assert!(!strict.is_valid(&wrong), "{wrong}");
        let reply = server.post("/v1/chat/completions", wrong).await;
        assert!(reply.status.is_client_error(), "{}", reply.text);
        check(&document, "Error", &reply.json());
    }
}

/// Checks an answer against what the document says of its route and status.
fn check_reply(document: &Value, route: (&str, &str), reply: &Reply) {
    let (method, path) = route;
    let responses = &document["paths"][path][method]["responses"];
    assert!(!reply.status.is_server_error(), "{method} {path}: {}", reply.text);
    let status = reply.status.as_u16().to_string();
    let response = &responses[&status];
    assert!(response.is_object(), "{method} {path}: {status} is not described: {}", reply.text);
    let response = match response["$ref"].as_str() {
        Some(reference) => document.pointer(reference.trim_start_matches('#')).expect("a component"),
        None => response,
    };
    let content = object(&response["content"]);
    let schema = &content["application/json"]["schema"];
    match schema["$ref"].as_str() {
        Some(name) => check(document, name.rsplit('/').next().expect("a name"), &reply.json()),
        None => check(
            document,
            if reply.text.contains("\"type\":\"error\"") { "AnthropicError" } else { "Error" },
            &reply.json(),
        ),
    }
}

async fn answers_are_as_the_document_says() {
    let server = server();
    let document = document(&server).await;
    let example = |name: &str| document["components"]["schemas"][name]["examples"][0].clone();
    let ids = "{id}";
    let mut stored = String::new();
    for (path, body) in [
        ("/v1/chat/completions", "ChatCompletionRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/v1/responses", "ResponseRequest"),
        ("/v1/responses/input_tokens", "ResponseRequest"),
        ("/v1/messages", "MessageRequest"),
        ("/v1/messages/count_tokens", "CountTokensRequest"),
        ("/infill", "InfillRequest"),
        ("/completion", "NativeCompletionRequest"),
        ("/api/show", "OllamaShowRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
        ("/apply-template", "ApplyTemplateRequest"),
    ] {
        let asked = if path == "/api/show" { json!({"model": MODEL}) } else { example(body) };
        let reply = server.post(path, asked).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.text);
        check_reply(&document, ("post", path), &reply);
        let empty = server.post(path, json!({})).await;
        assert!(empty.status.is_client_error(), "{path}: {}", empty.text);
        check_reply(&document, ("post", path), &empty);
        if path == "/v1/responses" {
            stored = reply.json()["id"].as_str().expect("an id").to_owned();
        }
    }
    let told = json!({"session_id": "s", "n": null});
    server.chat("Why is the sky blue?", told).await.ok();
    for (path, body) in [("/api/chat", "OllamaChatRequest"), ("/api/generate", "OllamaGenerateRequest")] {
        let reply = server.post(path, example(body)).await;
        assert_eq!(reply.status, StatusCode::OK, "{path}: {}", reply.text);
        check_reply(&document, ("post", path), &reply);
    }
    for (path, body) in [
        ("/v1/embeddings", "EmbeddingRequest"),
        ("/v1/rerank", "RerankRequest"),
        ("/api/embed", "OllamaEmbedRequest"),
        ("/api/embeddings", "OllamaEmbeddingRequest"),
    ] {
        let refused = server.post(path, example(body)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{path}: {}", refused.text);
        check_reply(&document, ("post", path), &refused);
    }
    let model = server.get("/v1/models").await.ok()["data"][0]["id"].as_str().expect("an id").to_owned();
    for (path, id) in [
        ("/v1/models", ""),
        ("/models", ""),
        ("/v1/models/{id}", &*model),
        ("/models/{id}", "nothing"),
        ("/props", ""),
        ("/slots", ""),
        ("/lora-adapters", ""),
        ("/api/tags", ""),
        ("/api/ps", ""),
        ("/api/version", ""),
        ("/tokenizer_info", ""),
        ("/v1/responses/{id}", &*stored),
        ("/v1/responses/{id}", "resp_x"),
        ("/v1/sessions", ""),
        ("/v1/sessions/{id}", "s"),
        ("/v1/sessions/{id}", "nothing"),
        ("/v1/sessions/{id}/explain", "s"),
        ("/v1/sessions/{id}/receipt", "s"),
        ("/openapi.json", ""),
    ] {
        let reply = server.get(&path.replace(ids, id)).await;
        check_reply(&document, ("get", path), &reply);
    }
    for (method, path, id, body) in [
        (Method::POST, "/v1/sessions/{id}/fork", "s", json!({"to": "t"})),
        (Method::POST, "/v1/sessions/{id}/fork", "s", json!({"to": "t"})),
        (Method::POST, "/v1/sessions/{id}/rename", "t", json!({"to": "u"})),
        (Method::POST, "/v1/sessions/{id}/rename", "u", json!({"to": "s"})),
        (Method::POST, "/v1/sessions/{id}/reset", "s", Value::Null),
        (Method::POST, "/v1/sessions/{id}/restore", "s", json!({"branch": "none"})),
        (Method::DELETE, "/v1/sessions/{id}", "s", Value::Null),
        (Method::DELETE, "/v1/responses/{id}", &*stored, Value::Null),
    ] {
        let body = Some(body).filter(|body| !body.is_null());
        let reply = server.call(method.clone(), &path.replace(ids, id), &[], body).await;
        check_reply(&document, (&method.as_str().to_lowercase(), path), &reply);
    }
}

both_kinds! {
    its_routes_are_those_of_the_page,
    its_fields_are_those_of_the_page,
    its_statuses_are_those_of_the_page,
    every_fact_is_of_a_field_that_is_read,
    examples_are_as_their_schemas_say,
    answers_are_as_the_document_says,
}
