//! The grammar that keeps tool calls well-formed: arguments follow their schemas as far as a grammar can
//! enforce that.

use serde_json::{Map, Value, json};

use super::constraint::AnswerForm;
use super::{OutputConstraint, ToolUse, TurnError};
use crate::grammar;
use crate::grammar::{Grammar, GrammarCompiler, GrammarSource, TextGrammar};
use llmctl_base::error::{Error, GrammarError, Result};
use llmctl_template::{OutputMarkup, ReasoningFormat, TEXT_GRAMMAR, ToolChoice};

/// The grammar of an answer with tools.
#[derive(Default)]
pub struct ToolGrammar {
    /// `None` if nothing constrains the answer.
    pub grammar: Option<Grammar>,
    /// Keywords of the tools' schemas that the grammar does not enforce, as paths into the request.
    pub relaxed: Vec<String>,
}

/// Most keywords that are taken out of the tools' schemas, one after the other.
const MAX_RELAXED: usize = 64;

/// Returns the grammar of an answer with tools. With a constraint, an answer that may leave the calls out satisfies the constraint
/// instead.
pub fn tool_grammar(
    compiler: &GrammarCompiler,
    form: AnswerForm<'_>,
    tools: &ToolUse,
    constraint: Option<&OutputConstraint>,
) -> Result<ToolGrammar, TurnError> {
    let AnswerForm { chat_tokenizer, output_markup, end } = form;
    let special = |text: &str| chat_tokenizer.special(text);
    let constraint = constraint.filter(|_| tools.choice == ToolChoice::Auto);
    let choice = if constraint.is_some() { &ToolChoice::Required } else { &tools.choice };
    let lark = |constraint: &OutputConstraint| form.lark(&constraint.source).map_err(constraint.blamed());
    let otherwise = constraint.map(lark).transpose()?;
    let markup = OutputMarkup { reasoning: may_reason(form, choice), ..*output_markup };
    let compile = |definitions: &[Value]| {
        let unwritable = markup.unwritable_tools(definitions).pop();
        if let Some((name, keyword)) = unwritable {
            let message = format!("calls of {name} in this model's format");
            return Err(Error::Grammar(GrammarError::Unsupported { keyword, message }));
        }
        let calls = markup.tool_grammar(definitions, choice, tools.is_parallel, end.text, &special);
        let whole = calls.map(|calls| match &otherwise {
            Some(form) => either(&calls, form),
            None => calls,
        });
        for tool in definitions.iter().filter(|_| whole.is_some()) {
            grammar::check_repeats(&tool["function"]["parameters"]).map_err(Error::Grammar)?;
        }
        whole.map(|lark| compiler.compile(&GrammarSource::Lark(lark))).transpose()
    };
    let blamed = |error| TurnError::Param { param: "tools", error };
    let simplified: Result<Vec<Value>> = tools.offered().iter().map(|tool| simplified(tool, tools)).collect();
    let mut simplified = simplified.map_err(blamed)?;
    let mut relaxed = Vec::new();
    loop {
        match compile(&simplified) {
            Ok(None) => match not_enforced(tools, constraint.is_some()) {
                Some(error) => return Err(error),
                None => return Ok(ToolGrammar::default()),
            },
            Ok(grammar) => return Ok(ToolGrammar { grammar, relaxed }),
            Err(error) => {
                let found = if relaxed.len() < MAX_RELAXED {
                    relax(&mut simplified, &error, &compile)
                } else {
                    Vec::new()
                };
                if found.is_empty() {
                    return Err(blamed(error));
                }
                relaxed.extend(found);
            }
        }
    }
}

/// Returns the format of the reasoning in front of an answer. Calls that are asked for come at once if reasoning is switched off or
/// the prompt has ended it.
fn may_reason(form: AnswerForm<'_>, choice: &ToolChoice) -> Option<ReasoningFormat> {
    let AnswerForm { output_markup, end, .. } = form;
    let is_over = end.is_reasoning_off || output_markup.may_reason(end.text).is_none();
    let is_left_out =
        *choice != ToolChoice::Auto && is_over && output_markup.open_reasoning(end.text).is_none();
    output_markup.reasoning.filter(|_| !is_left_out)
}

/// Returns a tool with less to enforce, and the name of what is left out.
type Loosening<'a> = &'a dyn Fn(&Value) -> Option<(Value, String)>;

/// Takes what a grammar cannot enforce out of the tools, as little as possible, and returns what it was. OpenAI promises arguments
/// that follow their schema for strict tools alone, so those stay.
fn relax(
    tools: &mut [Value],
    error: &Error,
    compile: &dyn Fn(&[Value]) -> Result<Option<Grammar>>,
) -> Vec<String> {
    let Error::Grammar(error) = error else { return Vec::new() };
    let keyword = |tool: &Value| loosened(tool, error);
    let schema = |tool: &Value| Some((relaxed(tool), "parameters".to_owned()));
    // The keyword, else the schema, of each tool that is refused by itself; all schemas if they are too much together.
    let steps: [(Loosening<'_>, bool); 3] = [(&keyword, false), (&schema, false), (&schema, true)];
    for (loosen, is_all) in steps {
        let mut found = Vec::new();
        for at in 0..tools.len() {
            let loose = loosen(&tools[at]).filter(|(loose, _)| *loose != tools[at]);
            if let Some((loose, what)) = loose.filter(|_| is_all || compile(&tools[at..=at]).is_err()) {
                tools[at] = loose;
                found.push(format!(
                    "tools.{}.{what}",
                    tools[at]["function"]["name"].as_str().unwrap_or_default()
                ));
            }
        }
        if !found.is_empty() {
            return found;
        }
    }
    Vec::new()
}

/// Returns a tool without what is refused, and the keyword; `None` if the tool is strict or has no such keyword.
fn loosened(tool: &Value, error: &GrammarError) -> Option<(Value, String)> {
    let (keyword, message) = match error {
        GrammarError::Unsupported { keyword, message } => (keyword.as_str(), message.as_str()),
        // The library does not say which expression it does not understand.
        GrammarError::Invalid(message) if message.contains("regex") => ("pattern", message.as_str()),
        _ => return None,
    };
    let mut loose = tool.clone();
    let parameters = loose.pointer_mut("/function/parameters")?;
    (!is_strict(tool) && grammar::without(parameters, keyword, message)).then(|| (loose, keyword.to_owned()))
}

/// Returns what a request asks for that takes a grammar, if calls in this model's format have none.
fn not_enforced(tools: &ToolUse, has_constraint: bool) -> Option<TurnError> {
    let (param, message) = match tools {
        ToolUse { choice: ToolChoice::None, .. } => return None,
        ToolUse { inputs, .. } if !inputs.is_empty() => (
            "tools",
            "tools: the grammar of a custom tool cannot be enforced, because calls in this model's format have none",
        ),
        _ if has_constraint => (
            "response_format",
            "response_format beside tools: calls in this model's format cannot be enforced; tool_choice \"none\" \
             switches them off",
        ),
        ToolUse { choice, .. } if *choice != ToolChoice::Auto => (
            "tool_choice",
            "tool_choice: calls in this model's format cannot be enforced, only \"auto\" and \"none\"",
        ),
        ToolUse { is_parallel: false, .. } => (
            "parallel_tool_calls",
            "parallel_tool_calls: calls in this model's format cannot be limited to one",
        ),
        _ => return None,
    };
    Some(TurnError::Unsupported { param, message })
}

/// Returns a grammar that allows what either of two allows. Their rules have different names, except `start`.
fn either(calls: &str, form: &str) -> String {
    let renamed = |lark: &str, name: &str| {
        let rest = lark.strip_prefix("start:").unwrap_or(lark);
        format!("{name}:{rest}")
    };
    format!("start: calls | form\n{}\n{}\n", renamed(calls, "calls"), renamed(form, "form"))
}

fn is_strict(definition: &Value) -> bool {
    definition["function"]["strict"] == true
}

/// Removes from a tool's parameters what constrains nothing, and closes their objects unless they open them or the request leaves
/// them open. Puts the grammar of the tool's text where the template crate looks for it.
fn simplified(definition: &Value, tools: &ToolUse) -> Result<Value> {
    let mut definition = definition.clone();
    if let Some(parameters) = definition.pointer_mut("/function/parameters") {
        let simple = grammar::simplified(parameters);
        *parameters = if tools.schema_open { simple } else { grammar::closed(&simple) };
    }
    let name = definition["function"]["name"].as_str().unwrap_or_default();
    if let Some(source) = tools.inputs.get(name) {
        let TextGrammar { in_json, between_tags } = TextGrammar::new(source).map_err(Error::Grammar)?;
        let text = json!({"in_json": in_json, "between_tags": between_tags});
        definition["function"]["parameters"]["properties"]["input"][TEXT_GRAMMAR] = text;
        definition["function"]["strict"] = true.into(); // it is never relaxed
    }
    Ok(definition)
}

/// Reduces a tool's parameters to their names and types, unless the tool is strict. The names stay because some call formats
/// write only known members.
fn relaxed(definition: &Value) -> Value {
    let mut definition = definition.clone();
    if is_strict(&definition) {
        return definition;
    }
    let given = definition["function"]["parameters"].take();
    let loose = |value: &Value| value.get("type").map_or_else(|| json!({}), |kind| json!({"type": kind}));
    let members = given["properties"].as_object().into_iter().flatten();
    let members: Map<String, Value> = members.map(|(name, value)| (name.clone(), loose(value))).collect();
    let mut parameters = json!({"type": "object"});
    if !members.is_empty() {
        parameters["properties"] = members.into();
        if given["required"].is_array() {
            parameters["required"] = given["required"].clone();
        }
        if given["additionalProperties"] == false {
            parameters["additionalProperties"] = false.into();
        }
    }
    definition["function"]["parameters"] = parameters;
    definition
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_whose_schema_cannot_be_enforced_keeps_its_names_and_types() {
        let tool = |strict: bool| {
            json!({"type": "function", "function": {"name": "f", "strict": strict, "parameters": {
                "type": "object", "required": ["tags"], "additionalProperties": false,
                "properties": {"tags": {"type": "array", "uniqueItems": true}, "any": {"minimum": 3}},
            }}})
        };
        assert_eq!(relaxed(&tool(true)), tool(true));
        let expected = json!({
            "type": "object", "properties": {"tags": {"type": "array"}, "any": {}}, "required": ["tags"],
            "additionalProperties": false,
        });
        assert_eq!(relaxed(&tool(false))["function"]["parameters"], expected);
    }
}
