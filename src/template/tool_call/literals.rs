//! Grammar rules for arguments as Gemma and Python write them: `{key:value}` and `key=value`, nested values included.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::ToolDefinition;
use super::arguments::{MAX_DEPTH, OTHER_NAME};
use super::coerce::ArgumentSchema;
use super::json_text;
use super::writer::{MemberForms, ValueStyle, Writer, quoted};

impl Writer<'_> {
    pub fn object_call(
        &mut self,
        tool: &ToolDefinition,
        style: ValueStyle,
        lead: &str,
        (open, close): (&str, &str),
    ) -> String {
        self.style = style;
        let members = self.members(ArgumentSchema::new(&tool.parameters), style == ValueStyle::Python, 0);
        format!("{} {members} {}", self.markup(&format!("{lead}{}{open}", tool.name)), self.markup(close))
    }

    /// The members of an object without its braces.
    fn members(&mut self, schema: ArgumentSchema<'_>, is_keywords: bool, depth: usize) -> String {
        let mut bodies = Vec::new();
        for shape in self.shapes(schema) {
            let in_quotes = self.style == ValueStyle::Python && !is_keywords;
            let member = |(key, part): &(String, Value)| {
                let key = if in_quotes { json_text::quoted(key) } else { key.clone() };
                let key = self.literal(&key);
                self.member(&key, schema.at(Some(part)), is_keywords, depth)
            };
            let items: Vec<MemberForms> = shape.members.iter().map(member).collect();
            let other = shape.others.as_ref().map(|part| {
                let name = self.other_name(&shape, OTHER_NAME);
                let key = if in_quotes { format!("\"\\\"\" {name} \"\\\"\"") } else { name };
                self.member(&key, schema.at(Some(part)), is_keywords, depth)
            });
            bodies.push(self.any_order(&shape, &items, other.as_ref()));
        }
        self.rule(&bodies.join(" | "))
    }

    fn member(
        &mut self,
        key: &str,
        schema: ArgumentSchema<'_>,
        is_keywords: bool,
        depth: usize,
    ) -> MemberForms {
        let value = self.value(schema, depth + 1);
        let mark = if self.style == ValueStyle::Python && is_keywords { "=" } else { ": " };
        let member = format!("{key} {} {value}", self.markup(mark));
        self.separated(&member)
    }

    fn value(&mut self, schema: ArgumentSchema<'_>, depth: usize) -> String {
        let types = schema.types();
        if types.is_unknown() || depth > MAX_DEPTH {
            return self.any_value();
        }
        let mut choices = Vec::new();
        if types.string {
            choices.push(self.string(schema));
        }
        if types.number || types.integer {
            let bounds = schema.node().filter(|_| types.is_only_number()).cloned();
            let kind = if types.number { "number" } else { "integer" };
            choices.push(self.json(&bounds.unwrap_or_else(|| json!({"type": kind}))));
        }
        if types.boolean {
            let words = if self.style == ValueStyle::Python {
                "(\"True\" | \"False\")"
            } else {
                "(\"true\" | \"false\")"
            };
            choices.push(words.to_owned());
        }
        if types.null {
            choices.push(if self.style == ValueStyle::Python { "\"None\"" } else { "\"null\"" }.to_owned());
        }
        if types.array {
            choices.push(self.array(schema, depth));
        }
        if types.object {
            let members = self.members(schema, false, depth);
            choices.push(format!("\"{{\" {members} \"}}\""));
        }
        self.rule(&choices.join(" | "))
    }

    fn array(&mut self, schema: ArgumentSchema<'_>, depth: usize) -> String {
        let item = self.value(schema.items(), depth + 1);
        let bound = |key: &str| schema.node().and_then(|node| node.get(key)).and_then(Value::as_u64);
        let (min, max) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        if max == Some(0) {
            return "\"[\" \"]\"".to_owned();
        }
        let more = max.map_or_else(String::new, |max| (max - 1).to_string());
        let items = format!("{item} ({} {item}){{{},{more}}}", self.markup(", "), min.saturating_sub(1));
        format!("\"[\" ({items}){} \"]\"", if min == 0 { "?" } else { "" })
    }

    fn string(&mut self, schema: ArgumentSchema<'_>) -> String {
        if self.style == ValueStyle::Gemma {
            let text = self.text_until(schema, "<|\"|>");
            return format!("{} {text}", self.literal("<|\"|>"));
        }
        if let Some(choices) = schema.strings() {
            let choices: Vec<String> =
                choices.iter().map(|choice| quoted(&json_text::quoted(choice))).collect();
            return format!("({})", choices.join(" | "));
        }
        self.text_in_json(schema).unwrap_or_else(|| {
            let bound = |key: &str| schema.node().and_then(|node| node.get(key)).and_then(Value::as_u64);
            let min = bound("minLength").unwrap_or(0);
            let max = bound("maxLength").map_or_else(String::new, |max| max.to_string());
            let of = |quote: char| {
                format!("{quote}([^{quote}\\\\\\x00-\\x1f]|\\\\[\\\\nrt\"']){{{min},{max}}}{quote}")
            };
            self.terminal(&format!("/{}/ | /{}/", of('"'), of('\'')))
        })
    }

    /// Any value: JSON reads as Python here; Gemma has its own quotes.
    fn any_value(&mut self) -> String {
        if self.style != ValueStyle::Gemma {
            return self.json(&json!({}));
        }
        let string = self.string(ArgumentSchema::new(&Value::Null));
        let number = self.json(&json!({"type": "number"}));
        let key = self.terminal("/[A-Za-z_][A-Za-z0-9_]{0,40}/");
        let any = self.new_name("r");
        writeln!(
            self.rules,
            "{any}: {string} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({any} (\",\" {any})*)? \"]\" \
             | \"{{\" ({key} \":\" {any} (\",\" {key} \":\" {any})*)? \"}}\""
        )
        .expect("a string takes everything");
        any
    }
}
