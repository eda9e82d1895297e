//! Grammar rules for arguments as Gemma and Python write them: `{key:value}` and `key=value`, nested values included.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::arguments::{MAX_DEPTH, OTHER_NAME};
use super::coerce::{ArgumentSchema, COUNT_KEYWORDS, Types};
use super::writer::{ValueStyle, Writer, quoted};
use super::{ToolDefinition, json_text};

/// Keywords that literals cannot follow.
const UNWRITTEN: [&str; 8] =
    ["allOf", "oneOf", "not", "if", "prefixItems", "uniqueItems", "contains", "unevaluatedItems"];

/// Keywords that they follow only where the type is known, beside those of counts and bounds.
const TYPED: &str =
    "type enum const anyOf pattern format items properties required additionalProperties patternProperties";

const BOUNDS: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

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
        if depth > MAX_DEPTH {
            return self.any_value();
        }
        let found = |keyword: &&str| schema.node().is_some_and(|node| node.get(*keyword).is_some());
        let typed = || TYPED.split(' ').chain(COUNT_KEYWORDS.split(' ')).chain(BOUNDS);
        let unwritten = UNWRITTEN.into_iter().find(found);
        if let Some(keyword) = unwritten.or_else(|| typed().find(found).filter(|_| types.is_unknown())) {
            return self.refuse(keyword);
        }
        let list = |keyword: &str| schema.node()?.get(keyword)?.as_array();
        let is_object = types == Types { object: true, ..Types::default() };
        if let Some(options) = list("anyOf").filter(|_| !is_object) {
            if typed().any(|keyword| keyword != "anyOf" && found(&keyword)) {
                return self.refuse("anyOf");
            }
            // A schema that refers to itself ends at the limit, too.
            let below = |option: &Value| depth + usize::from(option.get("$ref").is_some());
            let options = options.iter().map(|option| self.value(schema.at(Some(option)), below(option)));
            let options: Vec<String> = options.collect();
            return self.rule(&options.join(" | "));
        }
        let constant = schema.node().and_then(|node| node.get("const")).map(std::slice::from_ref);
        if let Some(values) = constant.or_else(|| list("enum").map(Vec::as_slice)) {
            let values = values.iter().filter(|value| types.allows(value));
            let written: Option<Vec<String>> = values.map(|value| self.constant(value)).collect();
            return match written.filter(|written| !written.is_empty()) {
                Some(written) => self.rule(&written.join(" | ")),
                None => self.refuse(if constant.is_some() { "const" } else { "enum" }),
            };
        }
        if types.is_unknown() { self.any_value() } else { self.typed_value(schema, types, depth) }
    }

    /// Any value, because the schema has a keyword that cannot be followed.
    fn refuse(&mut self, keyword: &str) -> String {
        self.refused.get_or_insert_with(|| keyword.to_owned());
        self.any_value()
    }

    /// One value; `None` for lists and objects.
    fn constant(&self, value: &Value) -> Option<String> {
        let is_python = self.style == ValueStyle::Python;
        Some(match value {
            Value::Array(_) | Value::Object(_) => return None,
            Value::String(text) if !is_python => self.literal(&format!("<|\"|>{text}<|\"|>")),
            Value::Bool(value) if is_python => quoted(if *value { "True" } else { "False" }),
            Value::Null if is_python => quoted("None"),
            Value::String(text) => quoted(&json_text::quoted(text)),
            other => quoted(&other.to_string()),
        })
    }

    fn typed_value(&mut self, schema: ArgumentSchema<'_>, types: Types, depth: usize) -> String {
        let mut choices = Vec::new();
        if types.string {
            choices.push(self.string(schema));
        }
        if types.number || types.integer {
            let bounds = schema.part(if types.number { "number" } else { "integer" }, &BOUNDS);
            choices.push(if bounds == json!({"type": "number"}) {
                self.number()
            } else {
                self.json(&bounds)
            });
        }
        if types.boolean {
            choices.extend([true, false].iter().filter_map(|value| self.constant(&json!(value))));
        }
        if types.null {
            choices.extend(self.constant(&Value::Null));
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

    /// A number that a double holds.
    fn number(&mut self) -> String {
        self.terminal("/-?(0|[1-9][0-9]{0,99})(\\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/")
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
            if schema.node().is_some_and(|node| node.get("format").is_some()) {
                self.refused.get_or_insert_with(|| "format".to_owned());
            }
            let text = self.text_until(schema, "<|\"|>");
            return format!("{} {text}", self.literal("<|\"|>"));
        }
        let part = schema.part("string", &["pattern", "format", "minLength", "maxLength"]);
        if ["pattern", "format"].iter().any(|keyword| part.get(keyword).is_some()) {
            return self.json(&part);
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
        let number = self.number();
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
