//! The bodies of requests: the fields that their readers ask for while they read `examples.json`.

use axum::extract::FromRef;
use serde_json::{Map, Value};

use super::super::body::Incoming;
use super::super::mcp::{self, ServedTools};
use super::super::ollama::pull::ServedDownloads;
use super::super::session_host::SessionHost;
use super::super::{embeddings, messages, ollama, request, responses, sessions, text};
use super::{object_of, schema};
use crate::App;
use crate::wire::record::{FieldRecord, recorded};

type Read = fn(&App, Map<String, Value>);

/// The name of a body's schema, and its reader.
const BODIES: [(&str, Read); 22] = [
    ("ChatCompletionRequest", |app, body| drop(request::chat(app, body, Incoming::anonymous()))),
    ("CompletionRequest", |app, body| drop(request::completion(app, body, Incoming::anonymous()))),
    ("ResponseRequest", |app, body| drop(responses::read(app, body, Incoming::anonymous()))),
    ("MessageRequest", |app, body| drop(messages::read(app, body, Incoming::anonymous()))),
    ("CountTokensRequest", |app, body| drop(text::read_fields(app, body, messages::counted_fields))),
    ("InfillRequest", |app, body| drop(request::infill(app, body, Incoming::anonymous()))),
    ("EmbeddingRequest", |app, body| drop(embeddings::read_fields(app, body, embeddings::embedding_body))),
    ("RerankRequest", |app, body| drop(embeddings::read_fields(app, body, embeddings::rerank_body))),
    ("TokenizeRequest", |app, body| drop(text::read_fields(app, body, text::tokenize_fields))),
    ("DetokenizeRequest", |app, body| drop(text::read_fields(app, body, text::detokenize_fields))),
    ("ApplyTemplateRequest", |app, body| drop(text::read_fields(app, body, request::conversation))),
    ("ForkRequest", |app, body| drop(sessions::fork_body(&SessionHost::from_ref(app), body))),
    ("RenameRequest", |app, body| drop(sessions::only_name(&SessionHost::from_ref(app), body, "to"))),
    ("RestoreRequest", |app, body| drop(sessions::only_name(&SessionHost::from_ref(app), body, "branch"))),
    ("ToolCallRequest", |app, body| drop(mcp::call_body(&ServedTools::from_ref(app), body))),
    ("NativeCompletionRequest", |app, body| drop(request::native(app, body, Incoming::anonymous()))),
    ("OllamaChatRequest", |app, body| drop(ollama::read_chat(app, body, Incoming::anonymous()))),
    ("OllamaGenerateRequest", |app, body| drop(ollama::read_generate(app, body, Incoming::anonymous()))),
    ("OllamaEmbedRequest", |app, body| drop(embeddings::read_fields(app, body, ollama::vectors::embed_body))),
    ("OllamaEmbeddingRequest", |app, body| {
        drop(embeddings::read_fields(app, body, ollama::vectors::embedding_body));
    }),
    ("OllamaShowRequest", |app, body| drop(ollama::models::read_name(app.settings().lenient, body))),
    ("OllamaPullRequest", |app, body| {
        drop(ollama::pull::pull_body(&ServedDownloads::from_ref(app), body));
    }),
];

/// Returns the schema of each body, with its first example.
pub fn schemas(app: &App) -> Map<String, Value> {
    let (mut examples, facts) =
        (object_of(include_str!("examples.json")), object_of(include_str!("fields.json")));
    let described = BODIES.into_iter().map(|(name, read)| {
        let examples =
            examples.get_mut(name).and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default();
        let record = observe(app, read, &examples);
        let mut schema = schema::schema(&record, &facts);
        schema["examples"] = examples.into_iter().take(1).collect();
        (name.to_owned(), schema)
    });
    described.collect()
}

/// Observes the reader of a body: with an empty one, in which all that is required is missing, and with each example, which leads
/// it into objects and lists.
fn observe(app: &App, read: Read, examples: &[Value]) -> FieldRecord {
    let mut all = recorded(|| read(app, Map::new()));
    for body in examples.iter().filter_map(Value::as_object) {
        let record = recorded(|| read(app, body.clone()));
        for (path, kind) in record.fields {
            if !all.fields.iter().any(|(known, _)| *known == path) {
                all.fields.push((path, kind));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_has_an_example() {
        let examples = object_of(include_str!("examples.json"));
        let names: Vec<&str> = BODIES.iter().map(|(name, _)| *name).collect();
        assert_eq!(examples.keys().map(String::as_str).collect::<Vec<_>>(), names);
        assert!(examples.values().all(|examples| examples[0].is_object()));
    }
}
