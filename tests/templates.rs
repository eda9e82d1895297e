//! Chat templates render as Python's Jinja2 renders them: every stored reference, and every published template over a
//! matrix of conversations.

use llmctl_template::{DateTime, TemplateError};
use serde_json::Value as Json;

use crate::common::prelude::*;

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

/// A reference's result: a text, the template's own `raise_exception`, or another error.
enum Expected<'j> {
    Text(&'j str),
    Raised(&'j str),
    Error,
}

fn check(expected: &Expected<'_>, got: &Result<String, TemplateError>) -> Result<(), String> {
    let same = match (expected, got) {
        (Expected::Text(text), Ok(got)) => text == got,
        (Expected::Raised(message), Err(TemplateError::Raised { message: got, .. })) => message == got,
        (Expected::Error, Err(TemplateError::Render { .. } | TemplateError::Syntax { .. })) => true,
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(match (expected, got) {
        (Expected::Text(text), Ok(got)) => {
            let at = text.bytes().zip(got.bytes()).take_while(|(a, b)| a == b).count();
            let from = |s: &str| {
                String::from_utf8_lossy(&s.as_bytes()[at.saturating_sub(20)..])
                    .chars()
                    .take(90)
                    .collect::<String>()
            };
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
    let rows =
        std::fs::read_to_string(folder.join("jinja2-goldens.jsonl")).expect("goldens beside their contexts");
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
                (_, Some(error)) => {
                    error.strip_prefix("TemplateError: ").map_or(Expected::Error, Expected::Raised)
                }
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

/// The one known difference: `{% if if in in %}` uses keywords as variables, which minijinja's parser does not read.
/// No template does that.
const KEYWORDS_AS_NAMES: &str = "CONTEXT_KEYWORDS";

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
        let name = case["name"].as_str().unwrap_or_default().to_owned();
        let wanted = case["jinja2_output"].as_str().or(case["expected"].as_str()).expect("an output");
        let expected = if wanted.starts_with("EXC ") { Expected::Error } else { Expected::Text(wanted) };
        let variables = case["context"].as_object().expect("a context");
        total += 1;
        let source = case["template"].as_str().expect("a template");
        let outcome = check(&expected, &render(source, variables));
        if name == KEYWORDS_AS_NAMES {
            assert!(outcome.is_err(), "{name} passes now: take it off the list");
            total -= 1; // known, so neither equal nor a failure
        } else if let Err(why) = outcome {
            failures.insert(name, format!("{source:?} {why}"));
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

/// A conversation from its JSON form, as the front doors build it.
fn conversation(messages: &Json, tools: &[Json]) -> Conversation {
    let text = |message: &Json, key: &str| message[key].as_str().map(str::to_owned);
    let messages = messages.as_array().expect("a list of messages").iter().map(|message| Message {
        role: Role::from(message["role"].as_str().expect("a role")),
        content: match &message["content"] {
            Json::String(text) => Some(Content::Text(text.clone())),
            Json::Array(parts) => Some(Content::Parts(parts.clone())),
            _ => None,
        },
        reasoning: text(message, "reasoning_content"),
        tool_calls: message["tool_calls"].as_array().into_iter().flatten().map(tool_call).collect(),
        tool_call_id: text(message, "tool_call_id"),
        name: text(message, "name"),
    });
    Conversation { messages: messages.collect(), tools: tools.to_vec(), ..Conversation::default() }
}

fn tool_call(call: &Json) -> ToolCall {
    ToolCall {
        id: call["id"].as_str().map(str::to_owned),
        name: call["function"]["name"].as_str().expect("a function name").to_owned(),
        arguments: call["function"]["arguments"].clone(),
    }
}

fn weather_tool() -> Json {
    json!({"type": "function", "function": {"name": "get_weather", "description": "The \"weather\" of a city.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "City, e.g. Zürich"},
            "days": {"type": "integer", "default": 3},
            "units": {"type": "string", "enum": ["celsius", "fahrenheit"]}}}}})
}

/// The conversations of the matrix: name, messages, whether a tool is defined.
fn matrix() -> Vec<(&'static str, Json, bool)> {
    let call = json!([{"id": "abcdefghi", "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}]);
    let result =
        json!({"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "{\"t\": 20}"});
    let user = json!({"role": "user", "content": "Hi <b>there</b>\n  你好"});
    let system = json!({"role": "system", "content": "Be brief."});
    let answer = json!({"role": "assistant", "content": " Hello. "});
    let thought = json!({"role": "assistant", "content": "Hello.", "reasoning_content": "They greet."});
    let calling = json!({"role": "assistant", "content": "", "tool_calls": call});
    let planned =
        json!({"role": "assistant", "content": "", "tool_calls": call, "reasoning_content": "Ask it."});
    vec![
        ("user", json!([user]), false),
        ("system", json!([system, user]), false),
        ("turns", json!([user, answer, user, answer, user]), false),
        ("system turns", json!([system, user, answer, user]), false),
        ("ends with answer", json!([user, answer]), false),
        ("reasoning", json!([user, thought, user]), false),
        ("tools", json!([user]), true),
        ("system tools", json!([system, user]), true),
        ("call", json!([user, calling, result]), true),
        ("call answered", json!([system, user, calling, result, answer, user]), true),
        ("call reasoned", json!([user, planned, result]), true),
    ]
}

/// Files under templates/ in Jinja. The Go templates beside them are another language.
fn jinja_files(root: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for folder in std::fs::read_dir(root.join("templates")).expect("templates").flatten() {
        if folder.file_name() == "ollama-go" {
            continue;
        }
        for file in std::fs::read_dir(folder.path()).expect("a folder of templates").flatten() {
            files.push(format!("{}/{}", folder.file_name().display(), file.file_name().display()));
        }
    }
    files.sort();
    files
}

/// A template file's source; some are wrapped in JSON.
fn template_source(path: &Path) -> String {
    if path.extension().is_some_and(|extension| extension == "json") {
        return read_json(path)["chat_template"].as_str().expect("a chat_template member").to_owned();
    }
    std::fs::read_to_string(path).expect("a template is UTF-8")
}

/// Templates that fail on a conversation without a `raise_exception` of their own, in Python just as here: file,
/// conversations, reason. Must stay exact.
const FAULTS: &[(&str, &[&str], &str)] = &[
    ("llama.cpp/Kimi-K2-Instruct.jinja", CALLS, "calls list.append, which the sandbox refuses"),
    ("llama.cpp/Kimi-K2-Thinking.jinja", CALLS, "calls list.append, which the sandbox refuses"),
    ("llama.cpp/MiroThinker.jinja", ANSWERED, "assigns to a member of a message"),
    ("llama.cpp/MiroThinker.jinja", TOOLS, "wants tools by MCP server"),
    ("llama.cpp/llama-cpp-deepseek-r1.jinja", TOOLS, "prints a generator as JSON"),
    ("mistral.rs/idefics3.json", CALLS, "wants content in parts"),
    ("trl/idefics3.jinja", CALLS, "wants content in parts"),
    ("trl/llava_next.jinja", MORE_THAN_USER, "wants content in parts"),
];
const TOOLS: &[&str] = &["tools", "system tools", "call", "call answered", "call reasoned"];
const CALLS: &[&str] = &["call", "call answered", "call reasoned"];
const ANSWERED: &[&str] = &["turns", "system turns", "ends with answer", "reasoning"];
const MORE_THAN_USER: &[&str] = &[
    "system",
    "turns",
    "system turns",
    "ends with answer",
    "reasoning",
    "system tools",
    "call",
    "call answered",
    "call reasoned",
];

#[test]
fn every_template_renders_every_conversation_or_refuses_it() {
    let Some(root) = fixtures() else { return };
    let mut known: BTreeSet<(String, String)> = BTreeSet::new();
    for (file, names, _) in FAULTS {
        known.extend(names.iter().map(|name| (file.to_string(), name.to_string())));
    }
    let (mut files, mut texts, mut refusals) = (0, 0, 0);
    let mut faults: BTreeMap<(String, String), TemplateError> = BTreeMap::new();
    for file in jinja_files(&root) {
        files += 1;
        let source = template_source(&root.join("templates").join(&file));
        let template =
            ChatTemplate::new(&source, specials()).unwrap_or_else(|error| panic!("{file}: {error}"));
        for (name, messages, with_tools) in matrix() {
            let conversation =
                conversation(&messages, &if with_tools { vec![weather_tool()] } else { Vec::new() });
            for add_generation_prompt in [false, true] {
                let options =
                    RenderOptions { add_generation_prompt, now: pinned(), ..RenderOptions::default() };
                match template.render(&conversation, &options) {
                    Ok(_) => texts += 1,
                    Err(TemplateError::Raised { message, .. }) => {
                        assert!(!message.is_empty(), "{file} {name}: a refusal without a reason");
                        refusals += 1;
                    }
                    Err(error) => drop(faults.insert((file.clone(), name.to_owned()), error)),
                }
            }
        }
    }
    eprintln!(
        "template matrix: {files} templates, {texts} texts, {refusals} refusals, {} faults",
        faults.len()
    );
    let new: Vec<String> = faults
        .iter()
        .filter(|(at, error)| !known.contains(*at) || !matches!(error, TemplateError::Render { .. }))
        .map(|((file, name), error)| format!("{file}, {name}: {error}"))
        .collect();
    assert!(new.is_empty(), "faults that are not listed:\n{}", new.join("\n"));
    let gone: Vec<_> = known.iter().filter(|at| !faults.contains_key(*at)).collect();
    assert!(gone.is_empty(), "listed faults that render now, take them off the list: {gone:?}");
}

/// Reasoning by both of its names, as transformers 5 gives it.
fn with_both_names(messages: &Json) -> Json {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().expect("a list of messages") {
        if let Some(thought) = message.get("reasoning_content").cloned() {
            message["thinking"] = thought;
        }
    }
    messages
}

fn specials() -> SpecialTokens {
    SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()) }
}

/// The neutral vocabulary loses nothing that a template sees: rendering a conversation equals rendering the JSON that
/// transformers would be given.
#[test]
fn conversations_render_as_their_json_does() {
    let Some(root) = fixtures() else { return };
    let mut compared = 0;
    for file in jinja_files(&root) {
        let source = template_source(&root.join("templates").join(&file));
        let template =
            ChatTemplate::new(&source, specials()).unwrap_or_else(|error| panic!("{file}: {error}"));
        for (name, messages, with_tools) in matrix() {
            let tools = if with_tools { json!([weather_tool()]) } else { Json::Null };
            let messages_with_both = with_both_names(&messages);
            let variables = json!({"messages": messages_with_both, "tools": tools, "documents": null, "add_generation_prompt": true});
            let variables = variables.as_object().expect("an object");
            let Ok(wanted) = template.render_variables(variables, pinned()) else { continue };
            let conversation = conversation(&messages, tools.as_array().map_or(&[], Vec::as_slice));
            let options =
                RenderOptions { add_generation_prompt: true, now: pinned(), ..RenderOptions::default() };
            let rendered = template.render(&conversation, &options);
            // Not what the model was trained on: a template that escapes arguments for HTML gets them as text.
            let num_escapes = |text: &String| text.matches("&#34;").count();
            if rendered.as_ref().is_ok_and(|text| num_escapes(text) < num_escapes(&wanted)) {
                continue;
            }
            assert_eq!(rendered, Ok(wanted), "{file} {name}");
            compared += 1;
        }
    }
    assert!(compared > 1500, "only {compared} renderings compared");
}

/// minja's contexts have no expected texts; every template must take them all the same.
#[test]
fn minja_contexts_render_or_are_refused() {
    let Some(root) = fixtures() else { return };
    let chatml = template_source(&root.join("templates/axolotl/chatml.jinja"));
    for name in ["simple", "system", "tool_use"] {
        let context = read_json(&root.join(format!("vectors/minja/contexts/{name}.json")));
        let text = render(&chatml, context.as_object().expect("a context"));
        assert!(text.as_ref().is_ok_and(|text| text.contains("<|im_start|>user")), "{name}: {text:?}");
    }
}
