//! Tools and how they may be called, in OpenAI's form, its older one and those of other vendors for the
//! choice.
//!
//! Invariants: what comes out is OpenAI's present form; a choice names a tool that is there.

use serde_json::{Map, Value, json};

use super::Fields;
use super::fields::brief;
use llmctl_engine::turn::ToolUse;
use llmctl_template::ToolChoice;

/// Reads the fields that speak of tools.
pub fn tools(fields: &mut Fields<'_>, schema_open: bool) -> ToolUse {
    let mut definitions = fields.list("tools").unwrap_or_default();
    for (index, definition) in definitions.iter().enumerate() {
        check_tool(fields, &format!("tools[{index}]"), definition);
    }
    let parallel = fields.flag("parallel_tool_calls").unwrap_or(true);
    let has_functions = fields.has("functions") || fields.has("function_call");
    if has_functions && !definitions.is_empty() {
        fields.out_of_range("functions", "and tools are two forms of one field, and a request has one");
    }
    let functions = fields.list("functions").unwrap_or_default();
    for (index, function) in functions.into_iter().enumerate() {
        let definition = json!({"type": "function", "function": function});
        check_tool(fields, &format!("functions[{index}]"), &definition);
        definitions.push(definition);
    }
    let name = if fields.has("function_call") { "function_call" } else { "tool_choice" };
    let choice = choice(fields, name, &mut definitions);
    // The older form has place for one call.
    let is_parallel = parallel && !has_functions;
    ToolUse { definitions, choice, is_parallel, schema_open, ..ToolUse::default() }
}

fn check_tool(fields: &mut Fields<'_>, at: &str, definition: &Value) {
    let Value::Object(members) = definition else { return fields.wrong(at, "is not an object") };
    let other = members.get("type").filter(|kind| !kind.is_null() && *kind != "function");
    if let Some(kind) = other.filter(|_| !members.contains_key("function")) {
        let what = format!("= {} is not supported here, only function", brief(kind));
        return fields.unsupported(&format!("{at}.type"), &what);
    }
    let mut tool = fields.inside(at, members.clone());
    tool.only("type", &[json!("function")]);
    for name in ["cache_control", "providerOptions", "provider_options"] {
        tool.hint(name);
    }
    let Some(function) = tool.object("function") else { return tool.missing("function") };
    let mut function = tool.inside("function", function);
    match function.text("name") {
        Some(name) if !name.is_empty() => {}
        Some(_) => function.out_of_range("name", "is empty"),
        None => function.missing("name"),
    }
    function.text("description");
    function.object("parameters");
    function.flag("strict");
    function.end();
    tool.end();
}

/// A word or an object. A choice of some tools leaves only those.
fn choice(fields: &mut Fields<'_>, param: &str, definitions: &mut Vec<Value>) -> ToolChoice {
    let choice = match fields.take(param) {
        None => return ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => return ToolChoice::Auto,
            "none" => return ToolChoice::None,
            "required" | "any" => ToolChoice::Required,
            _ => {
                fields.out_of_range(param, "is none of none, auto, required and a function");
                return ToolChoice::Auto;
            }
        },
        Some(Value::Object(choice)) => object_choice(fields, param, choice, definitions),
        Some(_) => return not_a_choice(fields, param),
    };
    check_choice(fields, param, &choice, definitions);
    choice
}

/// Refuses a choice that no tool of the request fits.
pub fn check_choice(fields: &mut Fields<'_>, param: &str, choice: &ToolChoice, definitions: &[Value]) {
    let is_known = match choice {
        ToolChoice::Named(name) => definitions.iter().any(|tool| name_of(tool) == Some(name)),
        ToolChoice::Auto | ToolChoice::None => true,
        ToolChoice::Required => !definitions.is_empty(),
    };
    if !is_known {
        fields.out_of_range(param, "asks for a tool that is not among the tools");
    }
}

fn not_a_choice(fields: &mut Fields<'_>, param: &str) -> ToolChoice {
    let message = "is neither a word nor {\"type\": \"function\", \"function\": {\"name\": ...}}";
    fields.wrong(param, message);
    ToolChoice::Auto
}

fn object_choice(
    fields: &mut Fields<'_>,
    param: &str,
    choice: Map<String, Value>,
    definitions: &mut Vec<Value>,
) -> ToolChoice {
    let choice = Value::Object(choice);
    match choice["type"].as_str() {
        Some("auto") => return ToolChoice::Auto,
        Some("none") => return ToolChoice::None,
        Some("any" | "required") => return ToolChoice::Required,
        Some("allowed_tools") => return allowed(fields, param, &choice, definitions),
        Some("function" | "tool") | None => {}
        Some(_) => {
            fields
                .unsupported(param, "of this type is not supported, only of type function and allowed_tools");
            return ToolChoice::Auto;
        }
    }
    match name_of(&choice) {
        Some(name) => ToolChoice::Named(name.to_owned()),
        None => not_a_choice(fields, param),
    }
}

/// The name of a tool in either form: within its function, or beside its type.
fn name_of(tool: &Value) -> Option<&str> {
    tool["function"]["name"].as_str().or_else(|| tool["name"].as_str())
}

/// Only these may be called.
fn allowed(fields: &mut Fields<'_>, param: &str, choice: &Value, definitions: &mut Vec<Value>) -> ToolChoice {
    let inner = if choice["allowed_tools"].is_object() { &choice["allowed_tools"] } else { choice };
    let names: Option<Vec<&str>> =
        inner["tools"].as_array().and_then(|tools| tools.iter().map(name_of).collect());
    let Some(names) = names else {
        fields.wrong(param, ".tools is not an array of tools with names");
        return ToolChoice::Auto;
    };
    let is_known = |name: &&str| definitions.iter().any(|tool| name_of(tool) == Some(name));
    if !names.iter().all(is_known) {
        fields.out_of_range(param, "allows a tool that is not among the tools");
    }
    definitions.retain(|tool| name_of(tool).is_some_and(|name| names.contains(&name)));
    match inner["mode"].as_str() {
        Some("required") => ToolChoice::Required,
        Some("auto") | None => ToolChoice::Auto,
        Some(_) => {
            fields.out_of_range(param, ".mode is neither auto nor required");
            ToolChoice::Auto
        }
    }
}
