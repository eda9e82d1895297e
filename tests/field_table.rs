//! Promise: docs/http-fields.md says for each field of each endpoint whether it is honoured, a hint or refused. The tables are
//! made from what the server answers to each field; no name that the readers of requests know is missing.
//!
//! Examples of all fields, which are what clients send, lie in field_table/tables.json in the order of the page. A new endpoint is
//! one entry there; with INSTA_UPDATE=always the page is written.

use std::fmt::Write;
use std::fs;

use llmctl_serve::wire::hints::{hints, inert_settings};
use serde::Deserialize;

use crate::common::prelude::*;
use crate::common::server::{MODEL, Reply};

/// Endpoints whose bodies have most fields in common: one table with a column for each.
#[derive(Deserialize)]
struct Table {
    title: String,
    endpoints: Vec<Endpoint>,
    /// Rows, and the names of rows that several tables share.
    examples: Vec<Value>,
    /// Notes on hints and on settings that ask for nothing, whose names and values are the program's.
    notes: BTreeMap<String, String>,
}

/// Name of a field, example, note.
type Example = (String, Value, String);

#[derive(Deserialize)]
struct Endpoint {
    column: String,
    path: String,
    /// The least body that the endpoint accepts.
    body: Map<String, Value>,
}

/// The endpoint whose bodies rows of `run --batch` have too.
const BATCH_PATH: &str = "/v1/chat/completions";

/// Reads the tables, each with its examples.
fn tables() -> Vec<(Table, Vec<Example>)> {
    let mut file: Value = serde_json::from_str(include_str!("field_table/tables.json")).expect("tables");
    let tables: Vec<Table> = serde_json::from_value(file["tables"].take()).expect("tables");
    let rows = |part: &Value| match part.as_str() {
        Some(shared) => file[shared].as_array().expect("rows that tables share").clone(),
        None => vec![part.clone()],
    };
    let examples = |table: &Table| table.examples.iter().flat_map(rows).collect();
    let read = |table| (serde_json::from_value(examples(&table)).expect("examples"), table);
    tables.into_iter().map(read).map(|(examples, table)| (table, examples)).collect()
}

/// A server whose model has fill-in-the-middle tokens and answers the examples.
fn server() -> Server {
    let special_tokens = &["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
    Build { special_tokens, ..Build::answers(&[("hi", "Hello there."), ("Roses are", " red.")]) }.start()
}

/// A value that no field accepts, and that only hints do not look at.
fn odd() -> Value {
    json!({"?": [[12345]]})
}

/// What an endpoint does with a field that has the value of the example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Treatment {
    Honoured,
    Hint,
    Inert,
    Refused,
}

impl Treatment {
    fn name(self) -> &'static str {
        match self {
            Treatment::Honoured => "honoured",
            Treatment::Hint => "hint",
            Treatment::Inert => "inert",
            Treatment::Refused => "refused",
        }
    }
}

fn ignored(reply: &Reply) -> String {
    reply.headers.get("x-llmctl-ignored").map_or("", |value| value.to_str().expect("ASCII")).to_owned()
}

/// Returns the endpoint's least body with one more field.
fn body(endpoint: &Endpoint, name: &str, value: &Value) -> Value {
    let mut body = endpoint.body.clone();
    body.insert(name.to_owned(), value.clone());
    if name == "top_logprobs" {
        body.insert("logprobs".to_owned(), true.into());
    }
    body.into()
}

async fn send(server: &Server, endpoint: &Endpoint, name: &str, value: &Value) -> Reply {
    server.post(&endpoint.path, body(endpoint, name, value)).await
}

/// Whether the endpoint has no place for the field, whatever it says.
fn is_unknown(reply: &Reply, name: &str) -> bool {
    reply.status == StatusCode::BAD_REQUEST && reply.text.contains(&format!("{name} is not supported"))
}

async fn treatment(server: &Server, endpoint: &Endpoint, name: &str, value: &Value) -> Treatment {
    let reply = send(server, endpoint, name, value).await;
    let context = format!("{} {name} = {value}: {}", endpoint.column, reply.text);
    if reply.status != StatusCode::OK {
        // `top_logprobs` is sent with `logprobs`, which may be what is refused. Each API has an envelope of its own.
        let named = name.strip_prefix("top_").unwrap_or(name);
        assert!(reply.status == StatusCode::BAD_REQUEST && reply.text.contains(named), "{context}");
        return Treatment::Refused;
    }
    match ignored(&reply).as_str() {
        "" => {}
        same if same == name => return Treatment::Hint,
        other => panic!("{context}: {other} is ignored"),
    }
    let other = send(server, endpoint, name, &odd()).await;
    match other.text.contains("is not supported, only") {
        true => Treatment::Inert,
        false => Treatment::Honoured,
    }
}

/// The rows of a table: those with an example, then hints and inert settings as the program lists them.
fn rows((table, examples): &(Table, Vec<Example>)) -> Vec<Example> {
    let row = |name: &str, value: Value| {
        (name.to_owned(), value, table.notes.get(name).cloned().unwrap_or_default())
    };
    let mut rows = examples.clone();
    let is_new = |name: &&str| examples.iter().all(|(known, ..)| known != name);
    rows.extend(hints().filter(is_new).map(|name| row(name, json!("any"))));
    rows.extend(inert_settings().map(|(name, values)| row(name, values[0].clone())));
    rows
}

/// Writes a table. The last column of endpoints is that of batch rows, if they have the same fields.
async fn written(server: &Server, table: &(Table, Vec<Example>)) -> String {
    let (rows, table) = (rows(table), &table.0);
    let chat = table.endpoints.iter().find(|endpoint| endpoint.path == BATCH_PATH);
    let batch = chat.map(|chat| in_batch(chat, &rows));
    let mut columns: Vec<&str> = table.endpoints.iter().map(|endpoint| endpoint.column.as_str()).collect();
    columns.extend(batch.as_ref().map(|_| "batch"));
    let mut text = format!("### {}\n\n| field | example | {} | note |\n", table.title, columns.join(" | "));
    writeln!(text, "|---|---|{}---|", "---|".repeat(columns.len())).expect("memory");
    for (index, (name, value, note)) in rows.iter().enumerate() {
        let example = value.to_string().replace('|', "\\|");
        write!(text, "| `{name}` | `{example}` |").expect("memory");
        for endpoint in &table.endpoints {
            let treatment = treatment(server, endpoint, name, value).await;
            write!(text, " {} |", treatment.name()).expect("memory");
        }
        batch.iter().for_each(|batch| write!(text, " {} |", batch[index].name()).expect("memory"));
        writeln!(text, " {note} |").expect("memory");
    }
    text
}

/// Runs a batch that has each field twice: with its example, and with a value that no field accepts.
fn in_batch(endpoint: &Endpoint, rows: &[Example]) -> Vec<Treatment> {
    let folder = tempfile::tempdir().expect("a folder");
    let line = |id: String, name: &str, value: &Value| {
        let body = body(endpoint, name, value);
        format!("{}\n", json!({"custom_id": id, "method": "POST", "url": endpoint.path, "body": body}))
    };
    let input: String = (0..)
        .zip(rows)
        .flat_map(|(index, (name, value, _))| {
            [line(format!("{index}"), name, value), line(format!("{index} odd"), name, &odd())]
        })
        .collect();
    fs::write(folder.path().join("in.jsonl"), input).expect("a file");
    let model = parity_folder().join("llama");
    let flags =
        ["--any-model", "--ctx", "256", "--batch", "in.jsonl", "--out", "out.jsonl", "--quiet", "--model"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_llmctl"));
    command.arg("run").args(flags).arg(model).current_dir(folder.path()).env("HOME", folder.path());
    let ran = command.output().expect("llmctl runs");
    let out = fs::read_to_string(folder.path().join("out.jsonl"));
    let out = out.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&ran.stderr)));
    let results: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(results.len(), 2 * rows.len(), "{}", String::from_utf8_lossy(&ran.stderr));
    let pairs = results.chunks(2).zip(rows);
    pairs.map(|(pair, (name, ..))| batch_treatment(&pair[0], &pair[1], name)).collect()
}

fn batch_treatment(result: &Value, odd: &Value, name: &str) -> Treatment {
    let message = |result: &Value| result["error"]["message"].as_str().unwrap_or_default().to_owned();
    if !result["error"].is_null() {
        assert!(
            result["response"]["status_code"] == 400 && message(result).contains(name),
            "{name}: {result}"
        );
        return Treatment::Refused;
    }
    let warnings = &result["response"]["body"]["llmctl"]["warnings"];
    match warnings.as_array().is_some_and(|warnings| !warnings.is_empty()) {
        true => Treatment::Hint,
        false if message(odd).contains("is not supported, only") => Treatment::Inert,
        false => Treatment::Honoured,
    }
}

const BEGIN: &str = "<!-- The tables up to the next comment are written by tests/field_table.rs. -->\n";
const END: &str = "<!-- The end of the tables. -->\n";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_what_the_server_does_with_each_field() {
    let server = server();
    let mut tables = Vec::new();
    for table in self::tables() {
        tables.push(written(&server, &table).await);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/http-fields.md");
    let page = fs::read_to_string(&path).expect("the page");
    let (before, rest) = page.split_once(BEGIN).expect("where the tables begin");
    let (_, after) = rest.split_once(END).expect("where the tables end");
    let expected = format!("{before}{BEGIN}\n{}\n{END}{after}", tables.join("\n"));
    if std::env::var("INSTA_UPDATE").as_deref() == Ok("always") {
        return fs::write(&path, &expected).expect("a page");
    }
    for (found, expected) in page.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "INSTA_UPDATE=always writes {}", path.display());
    }
    assert_eq!(page.lines().count(), expected.lines().count(), "INSTA_UPDATE=always writes the page");
}

/// The files in which fields of requests are read.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).expect("a folder");
        entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.extension().is_some())
    };
    let folders = [
        "src/serve/wire",
        "src/serve/wire/anthropic",
        "src/serve/wire/responses",
        "src/serve/api",
        "src/serve/api/responses",
        "src/serve/api/ollama",
    ];
    let mut paths: Vec<PathBuf> = folders.into_iter().flat_map(files).collect();
    paths.push(root.join("src/base/sampling.rs"));
    paths
}

/// The texts in quotation marks that may be names of fields, without those of tests.
fn words(source: &str) -> impl Iterator<Item = &str> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let quoted = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let quoted = quoted.flat_map(|line| line.split('"').skip(1).step_by(2));
    quoted.filter(|word| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        (1..40).contains(&word.len()) && word.bytes().all(is_part)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_that_the_readers_know_is_missing() {
    let server = server();
    let sources: Vec<String> =
        sources().iter().map(|path| fs::read_to_string(path).expect("a source")).collect();
    let words: BTreeSet<&str> = sources.iter().flat_map(|source| words(source)).collect();
    assert!(words.contains("temperature") && words.contains("cache_prompt"), "{words:?}");
    let mut missing = Vec::new();
    for table in tables() {
        let rows = rows(&table);
        let known: BTreeSet<&str> = rows.iter().map(|(name, ..)| name.as_str()).collect();
        for word in words.difference(&known) {
            for endpoint in &table.0.endpoints {
                let reply = send(&server, endpoint, word, &odd()).await;
                if !is_unknown(&reply, word) {
                    missing.push(format!("{} knows {word}: {}", endpoint.column, reply.text));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn the_model_of_the_examples_is_the_one_that_is_served() {
    for (_, examples) in tables() {
        assert!(examples.iter().any(|(name, example, _)| name == "model" && example == MODEL));
    }
}
