//! `tools` and `tool_choice`, turned into the definitions that templates see.
//!
//! A tool without a schema of its own is one that Anthropic knows, most of them run by its servers: it is
//! left out with a notice, because agents send such tools to every server.

use serde_json::{Value, json};

use super::super::Fields;
use super::super::fields::shown;
use super::super::tools::check_choice;
use llmctl_engine::turn::ToolUse;
use llmctl_template::ToolChoice;

/// Members of a definition that say how Anthropic's servers handle the tool.
const HINTS: [&str; 5] =
    ["cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"];

/// Reads the fields that are about tools.
pub fn tools(fields: &mut Fields<'_>, schema_open: bool) -> ToolUse {
    let values = fields.list("tools").unwrap_or_default();
    let mut definitions = Vec::with_capacity(values.len());
    for (index, value) in values.into_iter().enumerate() {
        definitions.extend(definition(fields, &format!("tools.{index}"), value));
    }
    if fields.list("mcp_servers").is_some_and(|servers| !servers.is_empty()) {
        fields.problems().notice("mcp_servers are left out: this server calls no tools itself");
        fields.ignored("mcp_servers");
    }
    let (choice, is_parallel) = choice(fields);
    check_choice(fields, "tool_choice", &choice, &definitions);
    ToolUse { definitions, choice, is_parallel, schema_open, ..ToolUse::default() }
}

fn definition(fields: &mut Fields<'_>, at: &str, value: Value) -> Option<Value> {
    let mut tool = fields.within(at, value)?;
    let kind = tool.text("type");
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let notice = format!("the tool of type {} is left out: it has no input_schema", shown(&kind));
        tool.problems().notice(notice);
        fields.ignored(&format!("tools.{kind}"));
        return None;
    }
    HINTS.iter().for_each(|name| tool.hint(name));
    let name = tool.text("name");
    match &name {
        Some(name) if name.is_empty() => tool.out_of_range("name", "is empty"),
        Some(_) => {}
        None => tool.missing("name"),
    }
    let description = tool.text("description");
    tool.require("input_schema");
    let parameters = tool.object("input_schema");
    tool.flag("strict"); // a schema is enforced in any case
    tool.end();
    let mut function = json!({"name": name?});
    if let Some(description) = description {
        function["description"] = description.into();
    }
    function["parameters"] = Value::Object(parameters?);
    Some(json!({"type": "function", "function": function}))
}

/// Returns the choice, and whether an answer may have several calls.
fn choice(fields: &mut Fields<'_>) -> (ToolChoice, bool) {
    let Some(mut choice) = fields.nested("tool_choice") else { return (ToolChoice::Auto, true) };
    let is_parallel = choice.flag("disable_parallel_tool_use") != Some(true);
    let name = choice.text("name");
    let read = match choice.text("type").as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => match name {
            Some(name) => ToolChoice::Named(name),
            None => {
                choice.missing("name");
                ToolChoice::Auto
            }
        },
        _ => {
            choice.wrong("type", "is none of auto, any, tool and none");
            ToolChoice::Auto
        }
    };
    choice.end();
    (read, is_parallel)
}

#[cfg(test)]
mod tests {
    use super::super::super::Problems;
    use super::*;
    use crate::error::ApiError;

    fn read(body: Value) -> (ToolUse, Result<(), ApiError>, Vec<String>) {
        let Value::Object(members) = body else { panic!("an object") };
        let mut problems = Problems::default();
        let mut fields = Fields::new(members, &mut problems);
        let tools = tools(&mut fields, false);
        fields.end();
        let checked = problems.check();
        (tools, checked, problems.take_ignored())
    }

    #[test]
    fn definitions_become_those_that_templates_see() {
        let schema = json!({"type": "object", "properties": {}});
        let (tools, checked, ignored) = read(json!({"tools": [
            {"name": "f", "description": "d", "input_schema": schema, "type": "custom", "cache_control": {"type": "ephemeral"}},
            {"type": "bash_20250124", "name": "bash"},
            {"name": "g", "input_schema": schema, "strict": true, "eager_input_streaming": true},
        ]}));
        assert_eq!(checked, Ok(()));
        let expected = [
            json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}),
            json!({"type": "function", "function": {"name": "g", "parameters": schema}}),
        ];
        assert_eq!(tools.definitions, expected);
        assert!(tools.is_parallel && tools.choice == ToolChoice::Auto);
        assert_eq!(
            ignored,
            ["tools.bash_20250124", "tools[].cache_control", "tools[].eager_input_streaming"]
        );
    }

    #[test]
    fn choices_are_read_in_every_form() {
        let choice = |choice: Value| {
            let tool = json!({"name": "f", "input_schema": {"type": "object"}});
            let (tools, checked, _) = read(json!({"tools": [tool], "tool_choice": choice}));
            checked.map(|()| (tools.choice, tools.is_parallel)).map_err(|error| error.param)
        };
        assert_eq!(choice(json!({"type": "auto"})), Ok((ToolChoice::Auto, true)));
        let one = json!({"type": "any", "disable_parallel_tool_use": true});
        assert_eq!(choice(one), Ok((ToolChoice::Required, false)));
        assert_eq!(choice(json!({"type": "none"})), Ok((ToolChoice::None, true)));
        let named = ToolChoice::Named("f".to_owned());
        assert_eq!(choice(json!({"type": "tool", "name": "f"})), Ok((named, true)));
        assert_eq!(choice(json!({"type": "tool", "name": "g"})), Err(Some("tool_choice".to_owned())));
        assert_eq!(choice(json!({"type": "tool"})), Err(Some("tool_choice.name".to_owned())));
        assert_eq!(choice(json!("auto")), Err(Some("tool_choice".to_owned())));
    }
}
