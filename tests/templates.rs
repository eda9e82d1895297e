//! Chat templates render as Python's Jinja2 renders them: every stored reference, and every published template over a
//! matrix of conversations.

use std::collections::BTreeMap;
use std::path::Path;

use llmctl::template::{ChatTemplate, DateTime, SpecialTokens, TemplateError};
use serde_json::{Map, Value as Json};

use crate::common::fixtures;

/// 2025-07-10 12:00:00, the clock of every stored reference.
fn pinned() -> DateTime {
    DateTime::from_unix(1_752_148_800)
}

fn read_json(path: &Path) -> Json {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn render(source: &str, variables: &Map<String, Json>) -> Result<String, TemplateError> {
    ChatTemplate::new(source, SpecialTokens::default())?.render_variables(variables, pinned())
}

/// What a reference says: a text, the template's own refusal, or another error.
enum Expected<'j> {
    Text(&'j str),
    Raised(&'j str),
    Error,
}

fn check(expected: &Expected<'_>, got: &Result<String, TemplateError>) -> Result<(), String> {
    let same = match (expected, got) {
        (Expected::Text(text), Ok(got)) => text == got,
        (Expected::Raised(message), Err(TemplateError::Raised(got))) => message == got,
        (Expected::Error, Err(TemplateError::Render { .. } | TemplateError::Syntax { .. })) => true,
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(match (expected, got) {
        (Expected::Text(text), Ok(got)) => {
            let at = text.bytes().zip(got.bytes()).take_while(|(a, b)| a == b).count();
            let from = |s: &str| String::from_utf8_lossy(&s.as_bytes()[at.saturating_sub(20)..]).chars().take(90).collect::<String>();
            format!("differs at byte {at}:\n    want {:?}\n    got  {:?}", from(text), from(got))
        }
        (Expected::Text(_), Err(error)) => format!("want text, got {error}"),
        (Expected::Raised(message), got) => format!("want raise {message:?}, got {got:?}"),
        (Expected::Error, got) => format!("want an error, got {got:?}"),
    })
}

fn report(name: &str, total: usize, failures: &BTreeMap<String, String>) {
    eprintln!("{name}: {} of {total} equal", total - failures.len());
    let shown: Vec<String> = failures.iter().take(40).map(|(key, why)| format!("{key}: {why}")).collect();
    assert!(failures.is_empty(), "{name}: {} differ\n{}", failures.len(), shown.join("\n"));
}

#[test]
fn jinja2_goldens() {
    let Some(root) = fixtures() else { return };
    let folder = root.join("vectors/chat-templates");
    let contexts = read_json(&folder.join("jinja2-goldens.contexts.json"));
    let rows = std::fs::read_to_string(folder.join("jinja2-goldens.jsonl")).expect("goldens beside their contexts");
    let mut total = 0;
    let mut failures = BTreeMap::new();
    for row in rows.lines() {
        let row: Json = serde_json::from_str(row).expect("a golden row is JSON");
        let file = row["files"][0].as_str().expect("a golden names its template");
        let source = std::fs::read_to_string(root.join(file)).expect("the template of a golden");
        for (name, expected) in row["renders"].as_object().expect("renders") {
            let mut variables = contexts["contexts"][name].as_object().expect("context of a render").clone();
            for token in ["bos_token", "eos_token"] {
                variables.insert(token.to_owned(), contexts[token].clone());
            }
            let expected = match (expected["ok"].as_str(), expected["error"].as_str()) {
                (Some(text), _) => Expected::Text(text),
                (_, Some(error)) => error.strip_prefix("TemplateError: ").map_or(Expected::Error, Expected::Raised),
                _ => panic!("{file} {name}: neither ok nor error"),
            };
            total += 1;
            if let Err(why) = check(&expected, &render(&source, &variables)) {
                failures.insert(format!("{file} {name}"), why);
            }
        }
    }
    report("jinja2 goldens", total, &failures);
}

#[test]
fn huggingface_js_syntax() {
    let Some(root) = fixtures() else { return };
    let cases = read_json(&root.join("vectors/chat-templates/huggingface.js-syntax.json"));
    let mut total = 0;
    let mut failures = BTreeMap::new();
    for case in cases.as_array().expect("a list of cases") {
        if !case["functions_in_context"].as_array().is_none_or(Vec::is_empty) {
            continue; // JavaScript functions among the variables have no counterpart
        }
        let wanted = case["jinja2_output"].as_str().or(case["expected"].as_str()).expect("an output");
        let expected = if wanted.starts_with("EXC ") { Expected::Error } else { Expected::Text(wanted) };
        let variables = case["context"].as_object().expect("a context");
        total += 1;
        let source = case["template"].as_str().expect("a template");
        if let Err(why) = check(&expected, &render(source, variables)) {
            failures.insert(case["name"].as_str().unwrap_or_default().to_owned(), format!("{source:?} {why}"));
        }
    }
    report("huggingface.js syntax", total, &failures);
}

#[test]
fn huggingface_js_end_to_end() {
    let Some(root) = fixtures() else { return };
    let vectors = read_json(&root.join("vectors/chat-templates/huggingface.js-e2e.json"));
    let mut failures = BTreeMap::new();
    let cases = vectors["cases"].as_array().expect("a list of cases");
    for (at, case) in cases.iter().enumerate() {
        let wanted = case["jinja2_output"].as_str().or(case["target"].as_str()).expect("a target");
        let expected = if wanted.starts_with("EXC ") { Expected::Error } else { Expected::Text(wanted) };
        let source = case["chat_template"].as_str().expect("a template");
        let variables = case["data"].as_object().expect("data");
        if let Err(why) = check(&expected, &render(source, variables)) {
            failures.insert(format!("{at} {}/{}", case["group"], case["name"]), why);
        }
    }
    report("huggingface.js e2e", cases.len(), &failures);
}
