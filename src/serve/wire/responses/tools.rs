//! Tools of the Responses API: flat functions, functions in the form of chat completions, custom tools that
//! take free text, and namespaces of both.
//!
//! The model sees functions. A custom tool is shown as a function with the one argument `input`, and a tool
//! of a namespace by a name that holds both names; [`ToolNames`] turns calls of the model back into what the
//! client knows.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::wire::Fields;
use crate::wire::fields::shown;
use llmctl_engine::grammar::GrammarSource;

/// The argument of a custom tool that holds its text.
pub const INPUT: &str = "input";

/// Most tools of a request, those of namespaces included.
const MAX_TOOLS: usize = 1024;

/// Tools of a request.
#[derive(Debug, Default)]
pub struct ResponseTools {
    /// In the form of chat completions.
    pub definitions: Vec<Value>,
    /// As the response repeats them.
    pub repeated: Vec<Value>,
    pub names: ToolNames,
    /// Grammars of the text of custom tools, by the name that the model sees.
    pub inputs: BTreeMap<String, GrammarSource>,
}

/// The client's names of the tools, by the names that the model sees.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolNames {
    tools: BTreeMap<String, ToolName>,
}

/// A tool as the client names it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolName {
    pub name: String,
    pub namespace: Option<String>,
    /// It takes text instead of arguments.
    pub is_custom: bool,
}

impl ToolNames {
    /// Returns the tool of a call. A name that no tool has stands for itself.
    pub fn called(&self, name: &str) -> ToolName {
        let unknown = || ToolName { name: name.to_owned(), namespace: None, is_custom: false };
        self.tools.get(name).cloned().unwrap_or_else(unknown)
    }
}

/// Returns the name that the model sees.
pub fn shown_name(name: &str, namespace: Option<&str>) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

/// Reads `tools`, and puts `tools` and `tool_choice` in the form of chat completions in their places.
pub fn tools(fields: &mut Fields<'_>) -> ResponseTools {
    let mut read = ResponseTools::default();
    for (index, value) in fields.list("tools").unwrap_or_default().into_iter().enumerate() {
        read.repeated.push(value.clone());
        add_tool(fields, &mut read, &format!("tools[{index}]"), value, None);
    }
    if read.definitions.len() > MAX_TOOLS {
        fields.out_of_range("tools", &format!("are more than {MAX_TOOLS}"));
    }
    read.repeated.retain(|tool| tool.is_object());
    read.repeated.iter_mut().for_each(complete);
    if !read.definitions.is_empty() {
        fields.put("tools", Value::Array(read.definitions.clone()));
    }
    if let Some(choice) = fields.take("tool_choice") {
        let choice = choice_of_chat(fields, choice);
        fields.put("tool_choice", choice);
    }
    read
}

/// The namespace that a tool is in, as far as it is needed.
#[derive(Clone, Copy)]
struct ToolNamespace<'a> {
    name: &'a str,
    /// `None` behind the first tool, which carries it.
    description: Option<&'a str>,
}

fn add_tool(
    fields: &mut Fields<'_>,
    read: &mut ResponseTools,
    at: &str,
    value: Value,
    namespace: Option<ToolNamespace<'_>>,
) {
    let Value::Object(members) = value else { return fields.wrong(at, "is not an object") };
    let mut tool = fields.inside(at, members);
    match tool.text("type").as_deref() {
        Some("function") => add_function(tool, read, namespace),
        Some("custom") => add_named(tool, read, namespace, true),
        Some("namespace") if namespace.is_none() => add_namespace(tool, read),
        Some(other) => fields.ignored(&format!("{at}.{}", shown(other))),
        None => tool.missing("type"),
    }
}

/// A function, its members flat or within `function`.
fn add_function(mut tool: Fields<'_>, read: &mut ResponseTools, namespace: Option<ToolNamespace<'_>>) {
    if let Some(nested) = tool.nested("function") {
        add_named(nested, read, namespace, false);
        return tool.ignore_rest();
    }
    add_named(tool, read, namespace, false);
}

/// Adds a tool from the members that all forms share.
fn add_named(
    mut tool: Fields<'_>,
    read: &mut ResponseTools,
    namespace: Option<ToolNamespace<'_>>,
    is_custom: bool,
) {
    let Some(name) = name(&mut tool) else { return };
    let shown_name = shown_name(&name, namespace.map(|namespace| namespace.name));
    let own = tool.text("description");
    let of_namespace = namespace.and_then(|namespace| namespace.description);
    let described: Vec<&str> = of_namespace.into_iter().chain(own.as_deref()).collect();
    let mut function = Map::from_iter([("name".to_owned(), Value::from(shown_name.as_str()))]);
    let mut description = described.join("\n");
    if is_custom {
        let format = input_format(&mut tool);
        description.push_str(&instruction(format.as_ref()));
        function.insert("parameters".to_owned(), input_schema());
        read.inputs.extend(format.map(|source| (shown_name.clone(), source)));
    } else {
        let parameters = tool.object("parameters");
        function.extend(parameters.map(|schema| ("parameters".to_owned(), Value::Object(schema))));
        let strict = tool.flag("strict").filter(|strict| *strict);
        function.extend(strict.map(|strict| ("strict".to_owned(), strict.into())));
    }
    if !description.is_empty() {
        function.insert("description".to_owned(), description.into());
    }
    let namespace = namespace.map(|namespace| namespace.name.to_owned());
    let known = read.names.tools.insert(shown_name, ToolName { name, namespace, is_custom });
    if known.is_some() {
        tool.out_of_range("name", "is that of another tool");
    }
    tool.ignore_rest();
    read.definitions.push(json!({"type": "function", "function": function}));
}

fn name(tool: &mut Fields<'_>) -> Option<String> {
    tool.require("name");
    let name = tool.text("name")?;
    if name.is_empty() {
        tool.out_of_range("name", "is empty");
    }
    Some(name).filter(|name| !name.is_empty())
}

fn add_namespace(mut tool: Fields<'_>, read: &mut ResponseTools) {
    let Some(name) = name(&mut tool) else { return };
    let description = tool.text("description").filter(|text| !text.is_empty());
    let members = tool.list("tools").unwrap_or_default();
    for (index, member) in members.into_iter().enumerate() {
        let description = description.as_deref().filter(|_| index == 0);
        let namespace = ToolNamespace { name: &name, description };
        add_tool(&mut tool, read, &format!("tools[{index}]"), member, Some(namespace));
    }
    tool.ignore_rest();
}

/// Returns what the model reads of a format behind the description.
fn instruction(format: Option<&GrammarSource>) -> String {
    let what = match format {
        Some(GrammarSource::Lark(grammar)) => format!("text that follows this Lark grammar:\n{grammar}"),
        Some(GrammarSource::Regex(regex)) => format!("text that matches this regular expression: {regex}"),
        _ => "free text.".to_owned(),
    };
    format!("\n`{INPUT}` is {what}")
}

fn input_schema() -> Value {
    json!({
        "type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT],
        "additionalProperties": false,
    })
}

/// Returns the grammar of a custom tool's text; `None` for any text.
fn input_format(tool: &mut Fields<'_>) -> Option<GrammarSource> {
    let mut format = tool.nested("format")?;
    match format.text("type").as_deref() {
        Some("grammar") => {}
        Some("text") | None => return None,
        Some(_) => {
            format.unsupported("type", "is neither text nor grammar");
            return None;
        }
    }
    for name in ["definition", "syntax"] {
        format.require(name);
    }
    let definition = format.text("definition");
    let source = match format.text("syntax").as_deref() {
        Some("lark") => definition.map(GrammarSource::Lark),
        Some("regex") => definition.map(GrammarSource::Regex),
        Some(_) => {
            format.unsupported("syntax", "is neither lark nor regex");
            None
        }
        None => None,
    };
    format.end();
    source
}

/// Returns a choice in the form of chat completions.
fn choice_of_chat(fields: &mut Fields<'_>, choice: Value) -> Value {
    let Value::Object(members) = &choice else { return choice };
    match members.get("type").and_then(Value::as_str) {
        Some("function" | "custom") if members.contains_key("name") => chosen(members),
        Some("allowed_tools") => {
            let mut choice = choice.clone();
            if let Some(tools) = choice.get_mut("tools").and_then(Value::as_array_mut) {
                // Tools of other types are not shown to the model, so that nothing has to keep it from calling them.
                tools.retain(|tool| matches!(tool["type"].as_str(), Some("function" | "custom") | None));
                for tool in tools {
                    if let Some(members) = tool.as_object().filter(|members| members.contains_key("name")) {
                        *tool = chosen(members);
                    }
                }
            }
            choice
        }
        Some("function" | "auto" | "none" | "required") | None => choice,
        Some(other) => {
            let what = format!("of type {:?} is not supported: this server has no such tool", shown(other));
            fields.unsupported("tool_choice", &what);
            "auto".into()
        }
    }
}

fn chosen(members: &Map<String, Value>) -> Value {
    let text = |name: &str| members.get(name).and_then(Value::as_str);
    json!({"type": "function", "name": shown_name(text("name").unwrap_or_default(), text("namespace"))})
}

/// Adds the members that a function of a response always has.
fn complete(tool: &mut Value) {
    if tool["type"] != "function" {
        return;
    }
    if let Some(Value::Object(function)) = tool.get("function").cloned() {
        *tool = Value::Object(function);
        tool["type"] = "function".into();
    }
    for name in ["description", "parameters", "strict"] {
        if tool.get(name).is_none() {
            tool[name] = Value::Null;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;
    use crate::wire::Problems;

    struct Outcome {
        read: ResponseTools,
        choice: Option<Value>,
        ignored: Vec<String>,
        checked: Result<(), ApiError>,
    }

    fn read(body: Value) -> Outcome {
        let Value::Object(body) = body else { panic!("an object") };
        let mut problems = Problems::new(false);
        let mut fields = Fields::new(body, &mut problems);
        let read = tools(&mut fields);
        let choice = fields.take("tool_choice");
        fields.take("tools");
        fields.end();
        let checked = problems.check();
        Outcome { read, choice, ignored: problems.take_ignored(), checked }
    }

    #[test]
    fn both_forms_of_a_function_are_one() {
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        let mut flat = function.clone();
        (flat["type"], flat["strict"]) = ("function".into(), false.into());
        let nested = json!({"type": "function", "function": function});
        let [flat, nested] = [flat, nested].map(|tool| read(json!({"tools": [tool]})));
        assert_eq!((&flat.checked, &nested.checked), (&Ok(()), &Ok(())));
        assert_eq!(flat.read.definitions, nested.read.definitions);
        assert_eq!(nested.read.repeated[0]["name"], "f");
        assert_eq!(nested.read.repeated[0].get("strict"), Some(&Value::Null));
    }

    #[test]
    fn custom_tools_and_namespaces_are_functions_to_the_model() {
        let outcome = read(json!({
            "tools": [
                {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [
                    {"type": "function", "name": "spawn", "description": "Starts one.", "strict": true},
                    {"type": "custom", "name": "say"},
                ]},
                {"type": "custom", "name": "patch", "description": "Edits.",
                 "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
                {"type": "web_search", "external_web_access": false},
            ],
            "tool_choice": {"type": "custom", "name": "say", "namespace": "agents"},
        }));
        assert_eq!(outcome.checked, Ok(()));
        assert_eq!(outcome.ignored, ["tools[].web_search"]);
        let names: Vec<&Value> =
            outcome.read.definitions.iter().map(|tool| &tool["function"]["name"]).collect();
        assert_eq!(names, ["agents__spawn", "agents__say", "patch"]);
        let spawn = &outcome.read.definitions[0]["function"];
        assert_eq!(
            (&spawn["description"], &spawn["strict"]),
            (&json!("Helpers.\nStarts one."), &json!(true))
        );
        let called = outcome.read.names.called("agents__say");
        assert_eq!(
            (&*called.name, called.namespace.as_deref(), called.is_custom),
            ("say", Some("agents"), true)
        );
        assert_eq!(outcome.read.inputs["patch"], GrammarSource::Lark("start: \"a\"".to_owned()));
        assert_eq!(outcome.choice, Some(json!({"type": "function", "name": "agents__say"})));
    }

    #[test]
    fn a_malformed_tool_is_named_by_its_index() {
        let refused = |body: Value| {
            let error = read(body).checked.expect_err("refused");
            (error.status.as_u16(), error.param.expect("a parameter"))
        };
        let function = json!({"type": "function", "name": "f"});
        for (tool, status, param) in [
            (json!(1), 422, "tools[1]"),
            (json!({"name": "g"}), 422, "tools[1].type"),
            (json!({"type": "function"}), 422, "tools[1].name"),
            (json!({"type": "function", "name": "g", "parameters": 1}), 422, "tools[1].parameters"),
            (json!({"type": "function", "name": "f"}), 400, "tools[1].name"),
            (
                json!({"type": "custom", "name": "g", "format": {"type": "grammar"}}),
                422,
                "tools[1].format.definition",
            ),
            (
                json!({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}),
                422,
                "tools[1].tools[0].name",
            ),
        ] {
            assert_eq!(refused(json!({"tools": [function, tool]})), (status, param.to_owned()), "{tool}");
        }
        assert_eq!(refused(json!({"tool_choice": {"type": "web_search"}})).1, "tool_choice");
    }
}
