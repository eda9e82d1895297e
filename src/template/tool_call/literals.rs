//! Grammar rules for arguments as Gemma and Python write them: `{key:value}` and `key=value`, nested values included.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::ToolDefinition;
use super::arguments::{MAX_DEPTH, members};
use super::coerce::ArgumentSchema;
use super::json_text;
use super::writer::{ValueStyle, Writer, quoted};

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
        format!("{} {members} {}", self.literal(&format!("{lead}{}{open}", tool.name)), self.literal(close))
    }

    fn separator(&self) -> &'static str {
        if self.style == ValueStyle::Python { ", " } else { "," }
    }

    /// The members of an object without its braces: the required ones, then any of the others, in the schema's order.
    fn members(&mut self, schema: ArgumentSchema<'_>, is_keywords: bool, depth: usize) -> String {
        let separator = self.literal(self.separator());
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for (key, is_required) in members(schema) {
            let value = self.value(schema.property(&key), depth + 1);
            let key = match (self.style, is_keywords) {
                (ValueStyle::Python, true) => format!("{key}="),
                (ValueStyle::Python, false) => format!("{}: ", json_text::quoted(&key)),
                _ => format!("{key}:"),
            };
            let member = format!("{} {value}", self.literal(&key));
            let member = self.rule(&member);
            if is_required { required.push(member) } else { optional.push(member) }
        }
        let follow = |members: &[String]| -> String {
            members.iter().map(|member| format!(" ({separator} {member})?")).collect()
        };
        if !required.is_empty() {
            return self.rule(&format!("{}{}", required.join(&format!(" {separator} ")), follow(&optional)));
        }
        // The first member that is there has no separator in front of it.
        let starts =
            optional.iter().enumerate().map(|(at, first)| format!("{first}{}", follow(&optional[at + 1..])));
        let starts: Vec<String> = starts.collect();
        if starts.is_empty() { "\"\"".to_owned() } else { self.rule(&format!("({})?", starts.join(" | "))) }
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
        let items =
            format!("{item} ({} {item}){{{},{more}}}", self.literal(self.separator()), min.saturating_sub(1));
        format!("\"[\" ({items}){} \"]\"", if min == 0 { "?" } else { "" })
    }

    fn string(&mut self, schema: ArgumentSchema<'_>) -> String {
        if let Some(choices) = schema.strings() {
            let quote = |choice: &String| match self.style {
                ValueStyle::Python => quoted(&json_text::quoted(choice)),
                _ => self.literal(&format!("<|\"|>{choice}<|\"|>")),
            };
            return format!("({})", choices.iter().map(quote).collect::<Vec<_>>().join(" | "));
        }
        if let Some(text) = self.text_in_json(schema).filter(|_| self.style == ValueStyle::Python) {
            return text;
        }
        match self.style {
            ValueStyle::Python => {
                let bound = |key: &str| schema.node().and_then(|node| node.get(key)).and_then(Value::as_u64);
                let min = bound("minLength").unwrap_or(0);
                let max = bound("maxLength").map_or_else(String::new, |max| max.to_string());
                let of = |quote: char| {
                    format!("{quote}([^{quote}\\\\\\x00-\\x1f]|\\\\[\\\\nrt\"']){{{min},{max}}}{quote}")
                };
                self.terminal(&format!("/{}/ | /{}/", of('"'), of('\'')))
            }
            _ => {
                let text = self.text_until(schema, "<|\"|>");
                format!("{} {text}", self.literal("<|\"|>"))
            }
        }
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
