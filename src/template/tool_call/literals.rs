//! Grammar rules for arguments as Gemma and Python write them: `{key:value}` and `key=value`, nested values included.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::arguments::{MAX_DEPTH, OTHER_NAME};
use super::coerce::{ArgumentSchema, Types};
use super::writer::{ValueStyle, Writer, quoted};
use super::{ToolDefinition, json_text};

impl Writer<'_> {
    pub fn literal_call(
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
        let shapes = self.shapes(schema);
        self.object(shapes, |writer, shape| {
            let in_quotes = writer.style == ValueStyle::Python && !is_keywords;
            writer.members_of(schema, shape, |writer, name, part| {
                let key = match name {
                    Some(name) if in_quotes => writer.literal(&json_text::quoted(name)),
                    Some(name) => writer.literal(name),
                    None => {
                        let name = writer.other_name(shape, OTHER_NAME);
                        if in_quotes { format!("\"\\\"\" {name} \"\\\"\"") } else { name }
                    }
                };
                let value = writer.value(part, depth + 1);
                let mark = if writer.style == ValueStyle::Python && is_keywords { "=" } else { ": " };
                let member = format!("{key} {} {value}", writer.markup(mark));
                writer.separated(&member)
            })
        })
    }

    fn value(&mut self, schema: ArgumentSchema<'_>, depth: usize) -> String {
        let types = schema.types();
        if types.is_unknown() || depth > MAX_DEPTH {
            return self.any_value();
        }
        let (is_python, mut choices) = (self.style == ValueStyle::Python, Vec::new());
        if types.string {
            choices.push(self.string(schema));
        }
        if types.number || types.integer {
            let numbers = Types { integer: types.integer, number: types.number, ..Types::default() };
            let bounds = schema.node().filter(|_| types == numbers).cloned();
            let kind = if types.number { "number" } else { "integer" };
            choices.push(self.json(&bounds.unwrap_or_else(|| json!({"type": kind}))));
        }
        if types.boolean {
            choices
                .push(if is_python { "(\"True\" | \"False\")" } else { "(\"true\" | \"false\")" }.to_owned());
        }
        if types.null {
            choices.push(if is_python { "\"None\"" } else { "\"null\"" }.to_owned());
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
        let (min, max) = (schema.number("minItems").unwrap_or(0), schema.number("maxItems"));
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
            let range = schema.range("minLength", "maxLength");
            let of = |quote: char| {
                format!("{quote}([^{quote}\\\\\\x00-\\x1f]|\\\\[\\\\nrt\"']){{{range}}}{quote}")
            };
            self.terminal(&format!("/{}/ | /{}/", of('"'), of('\'')))
        })
    }

    /// Any value. Python's words may be JSON's, too.
    fn any_value(&mut self) -> String {
        let string = self.string(ArgumentSchema::new(&Value::Null));
        let number = self.json(&json!({"type": "number"}));
        let (key, words) = match self.style {
            ValueStyle::Gemma => (self.terminal("/[A-Za-z_][A-Za-z0-9_]{0,40}/"), ""),
            _ => (string.clone(), "| \"True\" | \"False\" | \"None\""),
        };
        let [comma, colon] = [", ", ": "].map(|mark| self.markup(mark));
        let any = self.new_name("r");
        writeln!(
            self.rules,
            "{any}: {string} | {number} | \"true\" | \"false\" | \"null\" {words} | \"[\" ({any} ({comma} {any})*)? \"]\" \
             | \"{{\" ({key} {colon} {any} ({comma} {key} {colon} {any})*)? \"}}\""
        )
        .expect("a string takes everything");
        any
    }
}
