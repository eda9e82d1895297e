//! Reads output constraints in the spellings of OpenAI, vLLM and llama.cpp.
//!
//! Invariants: an answer has one form, and two that are asked for are refused; an object of a schema has only
//! the members that the schema names, unless it opens it or the request asks for the standard's reading
//! ([`OPEN`]).

use serde_json::{Value, json};

use super::Fields;
use llmctl_engine::grammar::GrammarSource;
use llmctl_engine::turn::OutputConstraint;

/// The switch of a request that leaves objects of schemas open, as the standard has it.
pub const OPEN: &str = "schema_open";

/// Returns true if schemas allow members that they do not name: the request's own setting, else `default`.
pub fn is_open(fields: &mut Fields<'_>, default: bool) -> bool {
    fields.flag(OPEN).unwrap_or(default)
}

/// The form that the fields ask for. Objects of its schemas are closed unless `is_open`.
pub fn shape(fields: &mut Fields<'_>, is_open: bool) -> Option<OutputConstraint> {
    let mut constraints: Vec<OutputConstraint> = Vec::new();
    let mut add = |source: Option<GrammarSource>, param: &'static str| {
        constraints.extend(source.map(|source| OutputConstraint { source, param }));
    };
    add(response_format(fields), "response_format");
    for param in ["json_schema", "guided_json"] {
        let source = fields.take(param).and_then(|value| schema_value(fields, param, value));
        add(source, param);
    }
    for param in ["regex", "guided_regex"] {
        add(fields.text(param).map(GrammarSource::Regex), param);
    }
    add(fields.text("lark").map(GrammarSource::Lark), "lark");
    for param in ["grammar", "guided_grammar"] {
        // llama.cpp's clients send its default, an empty text.
        let text = fields.text(param).filter(|text| !text.is_empty());
        add(text.map(GrammarSource::grammar), param);
    }
    let choice = fields.list("guided_choice").and_then(|words| choice(fields, "guided_choice", &words));
    add(choice, "guided_choice");
    add(structured_outputs(fields), "structured_outputs");
    for name in ["guided_decoding_backend", "structured_outputs_backend"] {
        fields.hint(name);
    }
    if let [_, second, ..] = &constraints[..] {
        fields.out_of_range(second.param, "is a second form, and an answer has one");
    }
    constraints.into_iter().next().map(|constraint| closed(constraint, is_open))
}

/// Closes the objects of a constraint's schema unless `is_open`.
pub fn closed(constraint: OutputConstraint, is_open: bool) -> OutputConstraint {
    let source = if is_open { constraint.source } else { constraint.source.closed() };
    OutputConstraint { source, ..constraint }
}

/// OpenAI's three forms, and the schema within `json_object` that llama.cpp and Hugging Face write. A schema is enforced
/// whether it is called strict or not.
fn response_format(fields: &mut Fields<'_>) -> Option<GrammarSource> {
    let mut format = fields.nested("response_format")?;
    let source = match format.text("type").as_deref() {
        None | Some("text") => None,
        Some(kind @ ("json_object" | "json")) => {
            let name = format.spelled(&["schema", "value"]);
            match format.take(name) {
                None if kind == "json" => {
                    format.missing("value");
                    None
                }
                None => Some(GrammarSource::JsonObject),
                Some(schema) => Some(GrammarSource::JsonSchema(schema)),
            }
        }
        Some("json_schema") => json_schema(&mut format),
        Some("regex") => format.text("value").map(GrammarSource::Regex),
        Some(other) => {
            let known = format!(
                "= {:?} is not supported, only text, json_object, json_schema and regex",
                super::fields::shown(other)
            );
            format.unsupported("type", &known);
            None
        }
    };
    format.end();
    source
}

/// OpenAI wraps the schema; llama.cpp takes it beside the type as well.
fn json_schema(format: &mut Fields<'_>) -> Option<GrammarSource> {
    if !format.has("json_schema") && format.has("schema") {
        for label in ["name", "description"] {
            format.text(label);
        }
        format.flag("strict");
        return format.take("schema").map(GrammarSource::JsonSchema);
    }
    format.require("json_schema");
    let mut wrapped = format.nested("json_schema")?;
    wrapped.text("name");
    wrapped.text("description");
    wrapped.flag("strict");
    let schema = wrapped.take("schema");
    if schema.is_none() {
        wrapped.missing("schema");
    }
    wrapped.end();
    schema.map(GrammarSource::JsonSchema)
}

/// A schema, or the text of one, as vLLM takes it.
fn schema_value(fields: &mut Fields<'_>, param: &str, value: Value) -> Option<GrammarSource> {
    let Value::String(text) = value else { return Some(GrammarSource::JsonSchema(value)) };
    match serde_json::from_str(&text) {
        Ok(schema) => Some(GrammarSource::JsonSchema(schema)),
        Err(error) => {
            fields.wrong(param, &format!("is not JSON: {error}"));
            None
        }
    }
}

/// One of these texts.
fn choice(fields: &mut Fields<'_>, param: &str, words: &[Value]) -> Option<GrammarSource> {
    let texts: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
    let Some(texts) = texts.filter(|texts| !texts.is_empty()) else {
        return fields.none(param, "is not an array of strings with one at least");
    };
    let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
    Some(GrammarSource::Lark(format!("start: {}\n", texts.join(" | "))))
}

/// vLLM's newer name for all of them.
fn structured_outputs(fields: &mut Fields<'_>) -> Option<GrammarSource> {
    let mut asked = fields.nested("structured_outputs")?;
    let mut sources: Vec<GrammarSource> = Vec::new();
    sources.extend(asked.take("json").and_then(|value| schema_value(&mut asked, "json", value)));
    sources.extend(asked.text("regex").map(GrammarSource::Regex));
    sources.extend(asked.text("grammar").map(GrammarSource::grammar));
    sources.extend(asked.list("choice").and_then(|words| choice(&mut asked, "choice", &words)));
    if asked.flag("json_object") == Some(true) {
        sources.push(GrammarSource::JsonObject);
    }
    for (name, value) in [
        ("disable_fallback", None),
        ("disable_any_whitespace", None),
        ("disable_additional_properties", None),
        ("whitespace_pattern", Some(json!(""))),
        ("structural_tag", Some(json!(""))),
    ] {
        match value {
            None => asked.hint(name),
            Some(inert) => asked.only(name, &[inert]),
        }
    }
    if sources.len() > 1 {
        asked.out_of_range("json", "and others are several forms, and an answer has one");
    }
    asked.end();
    sources.into_iter().next()
}
