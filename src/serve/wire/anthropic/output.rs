//! `thinking` and `output_config`: how much the model is to reason, and the form of its answer.

use serde_json::{Map, Value};

use super::super::Fields;
use super::super::shape::closed;
use super::super::switches::{Wish, effort};
use llmctl_engine::grammar::GrammarSource;
use llmctl_engine::turn::OutputConstraint;

/// Wishes for the answer besides the sampling.
#[derive(Debug, Default)]
pub struct OutputWishes {
    pub wish: Wish,
    /// Thinking blocks hold their text. Otherwise they are empty.
    pub shows_thinking: bool,
    pub constraint: Option<OutputConstraint>,
}

/// Reads the fields. Objects of a schema are closed unless `schema_open`.
pub fn output(fields: &mut Fields<'_>, schema_open: bool) -> OutputWishes {
    let mut output = OutputWishes { shows_thinking: true, ..OutputWishes::default() };
    if let Some(fields) = fields.nested("thinking") {
        thinking(fields, &mut output);
    }
    // The name of the format before it was released.
    let mut format = fields.nested("output_format").and_then(schema).map(|source| (source, "output_format"));
    if let Some(mut config) = fields.nested("output_config") {
        output.wish.effort = effort(&mut config, "effort").map(|effort| (effort, "output_config.effort"));
        if let Some(members) = config.nested("format") {
            let source = schema(members);
            format = source.map(|source| (source, "output_config.format")).or(format);
        }
        config.hint("task_budget");
        config.end();
    }
    let constraint = format.map(|(source, param)| OutputConstraint { source, param });
    output.constraint = constraint.map(|constraint| closed(constraint, schema_open));
    output
}

fn thinking(mut fields: Fields<'_>, output: &mut OutputWishes) {
    match fields.text("type").as_deref() {
        Some("enabled") => output.wish.thinks = Some((true, "thinking")),
        Some("disabled") => output.wish.thinks = Some((false, "thinking")),
        // The model decides, as it does where nothing is asked.
        Some("adaptive" | "between_tools") => {}
        _ => fields.wrong("type", "is none of enabled, adaptive, between_tools and disabled"),
    }
    let budget = fields.count("budget_tokens").map(|count| (count, "thinking.budget_tokens"));
    output.wish.budget = budget.filter(|_| output.wish.thinks != Some((false, "thinking")));
    match fields.text("display").as_deref() {
        None | Some("summarized") => {}
        Some("omitted") => output.shows_thinking = false,
        Some(_) => fields.out_of_range("display", "is neither summarized nor omitted"),
    }
    fields.end();
}

/// Reads the one kind of format.
fn schema(mut format: Fields<'_>) -> Option<GrammarSource> {
    match format.text("type").as_deref() {
        Some("json_schema") => {}
        _ => format.wrong("type", "is not json_schema"),
    }
    format.require("schema");
    let schema: Option<Map<String, Value>> = format.object("schema");
    format.end();
    schema.map(|schema| GrammarSource::JsonSchema(Value::Object(schema)))
}
