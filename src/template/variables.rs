//! The variables that a chat template reads, and the other forms of them that some templates expect.

use serde_json::{Map, Value as Json, json};

use super::clock::DateTime;
use super::{Conversation, Message, ToolCall, python};

/// The variables of a rendering by name.
pub type Variables = Map<String, Json>;

/// The variables that transformers passes: absent tools and documents are `None`, not missing.
pub fn conversation_variables(conversation: &Conversation, reasoning_names: &[&str]) -> Variables {
    let or_none = |items: &[Json]| if items.is_empty() { Json::Null } else { Json::Array(items.to_vec()) };
    let mut variables = conversation.kwargs.clone();
    let messages =
        conversation.messages.iter().map(|message| message_json(message, reasoning_names)).collect();
    variables.insert("messages".to_owned(), Json::Array(messages));
    variables.insert("tools".to_owned(), or_none(&conversation.tools));
    variables.insert("documents".to_owned(), or_none(&conversation.documents));
    variables
}

/// Adds what Firefunction's template reads in place of the tools: their functions as text, and the time.
pub fn add_functions(variables: &mut Variables, now: DateTime) {
    let functions: Vec<Json> = functions(variables).map(|function| Json::Object(function.clone())).collect();
    let text = python::dumps(&Json::Array(functions)).unwrap_or_default();
    variables.entry("functions").or_insert(Json::String(text));
    variables.entry("datetime").or_insert_with(|| now.strftime("%Y-%m-%d, %H:%M:%S").into());
}

/// Templates read `reasoning_content` or `thinking`, and transformers gives them both. A few know it as `reasoning` alone.
pub fn reasoning_names(source: &str) -> &'static [&'static str] {
    let reads =
        |name: &str| [".", "'", "\""].iter().any(|before| source.contains(&format!("{before}{name}")));
    let is_other = !reads("reasoning_content") && !reads("thinking") && reads("reasoning");
    &["reasoning_content", "thinking", "reasoning"][..if is_other { 3 } else { 2 }]
}

fn message_json(message: &Message, reasoning_names: &[&str]) -> Json {
    let mut members = Map::new();
    members.insert("role".to_owned(), json!(message.role.as_str()));
    members.extend(message.content.iter().map(|content| ("content".to_owned(), json!(content))));
    if let Some(reasoning) = &message.reasoning {
        members.extend(reasoning_names.iter().map(|name| ((*name).to_owned(), json!(reasoning))));
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(tool_call_json).collect();
        members.insert("tool_calls".to_owned(), Json::Array(calls));
    }
    for (name, value) in [("tool_call_id", &message.tool_call_id), ("name", &message.name)] {
        if let Some(value) = value {
            members.insert(name.to_owned(), json!(value));
        }
    }
    Json::Object(members)
}

fn tool_call_json(call: &ToolCall) -> Json {
    let mut members = Map::new();
    if let Some(id) = &call.id {
        members.insert("id".to_owned(), json!(id));
    }
    members.insert("type".to_owned(), json!("function"));
    members.insert("function".to_owned(), json!({"name": call.name, "arguments": call.arguments}));
    Json::Object(members)
}

/// A change of a conversation's form. Returns whether it changed anything.
pub type Adaptation = fn(&mut Variables) -> bool;

/// Forms of a conversation that published templates want in place of the documented one, in the order they are tried.
pub const ADAPTATIONS: [&[Adaptation]; 6] = [
    &[],
    &[spell_arguments_out],
    &[set_null_content],
    &[spell_arguments_out, set_null_content],
    // Last: a template that recognises calls by content that is `None` would print no call beside an empty content.
    &[set_empty_content],
    &[spell_arguments_out, set_empty_content],
];

/// Gives templates that fail without tools (Hermes 3's and Command R+'s for tools) an empty list.
pub fn list_no_tools(variables: &mut Variables) -> bool {
    let tools = variables.get_mut("tools").filter(|tools| tools.is_null());
    tools.map(|tools| *tools = json!([])).is_some()
}

/// Gives tools an empty description and a schema of no parameters where they have none: both are optional at OpenAI, and some
/// templates (Hermes', gpt-oss', Command R's) read them all the same.
pub fn complete_tools(variables: &mut Variables) -> bool {
    let completed = functions(variables).map(|function| described(function) | parametrised(function));
    completed.filter(|&is_new| is_new).count() > 0
}

/// Adds what the schema of a function's parameters lacks of an empty object's; returns whether it did.
fn parametrised(function: &mut Map<String, Json>) -> bool {
    let parameters = function.entry("parameters").or_insert(Json::Null);
    if parameters.is_null() {
        *parameters = json!({"type": "object"});
    }
    let Some(schema) = parameters.as_object_mut().filter(|schema| !schema.contains_key("properties")) else {
        return false;
    };
    schema.insert("properties".to_owned(), json!({}));
    true
}

/// Gives parameters without a description an empty one.
pub fn describe_parameters(variables: &mut Variables) -> bool {
    let properties = functions(variables)
        .filter_map(|function| function.get_mut("parameters")?.get_mut("properties")?.as_object_mut())
        .flat_map(|properties| properties.values_mut().filter_map(Json::as_object_mut));
    properties.map(described).filter(|&is_new| is_new).count() > 0
}

/// Adds an empty description if there is none; returns whether it did.
fn described(members: &mut Map<String, Json>) -> bool {
    let is_missing = !members.get("description").is_some_and(Json::is_string);
    if is_missing {
        members.insert("description".to_owned(), json!(""));
    }
    is_missing
}

/// Iterates over the definitions of tools, with or without their `function` wrapping.
fn functions(variables: &mut Variables) -> impl Iterator<Item = &mut Map<String, Json>> {
    let tools = variables.get_mut("tools").and_then(Json::as_array_mut).into_iter().flatten();
    tools.filter_map(|tool| match tool.get("function") {
        Some(_) => tool.get_mut("function")?.as_object_mut(),
        None => tool.as_object_mut(),
    })
}

/// Makes one text of the reasoning and the content of answers with calls, for gpt-oss' template: it prints either as
/// reasoning and refuses both.
pub fn move_content_to_reasoning(variables: &mut Variables) -> bool {
    let mut changed = false;
    for members in messages(variables).filter(|members| members.contains_key("tool_calls")) {
        let text = |name: &str| members.get(name).and_then(Json::as_str).filter(|text| !text.is_empty());
        if let (Some(thought), Some(content)) = (text("thinking"), text("content")) {
            let whole = json!(format!("{thought}\n\n{content}"));
            members.insert("thinking".to_owned(), whole.clone());
            members.insert("reasoning_content".to_owned(), whole);
            members.remove("content");
            changed = true;
        }
    }
    changed
}

fn messages(variables: &mut Variables) -> impl Iterator<Item = &mut Map<String, Json>> {
    let messages = variables.get_mut("messages").and_then(Json::as_array_mut);
    messages.into_iter().flatten().filter_map(Json::as_object_mut)
}

/// Sets absent content to `None`, as in OpenAI's answers with calls. Some templates (DeepSeek R1's Llama distillations) test
/// for `None` and fail if the member is absent.
fn set_null_content(variables: &mut Variables) -> bool {
    fill_contents(variables, &Json::Null)
}

/// Sets absent content to the empty string. Some templates (Qwen 3's first, Granite's, Devstral's) accept texts only.
fn set_empty_content(variables: &mut Variables) -> bool {
    fill_contents(variables, &Json::String(String::new()))
}

fn fill_contents(variables: &mut Variables, content: &Json) -> bool {
    let empty = messages(variables).filter(|members| !members.contains_key("content"));
    empty.map(|members| members.insert("content".to_owned(), content.clone())).count() > 0
}

/// Turns the arguments of tool calls into JSON text, the form of OpenAI's wire format. Some templates (DeepSeek's,
/// Functionary's) append them to a string and fail on the mapping that transformers asks for. Returns whether it changed any.
pub fn spell_arguments_out(variables: &mut Variables) -> bool {
    let mut changed = false;
    for message in messages(variables) {
        for call in message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|value| value.is_object())
                && let Ok(text) = python::dumps(arguments)
            {
                *arguments = Json::String(text);
                changed = true;
            }
        }
    }
    changed
}
