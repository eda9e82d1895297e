//! Grammar rules for the arguments of one call: JSON, and values in tags.
//!
//! JSON arguments follow the tool's schema in full (llguidance's `%json`). Forms that are not JSON follow types, enums,
//! lengths and required members, and the patterns of strings that stand unquoted; numbers follow all that JSON Schema
//! demands.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::coerce::{ArgumentSchema, Types};
use super::writer::{Writer, escaped};
use super::{TAGGED_TEXT, ToolDefinition};

/// Schemas nest deeper than this only by pointing at themselves: below, any value will do.
pub const MAX_DEPTH: usize = 6;

/// Keywords by which an object has, or may have, members beside its `properties`.
const OPEN_ENDED: [&str; 7] =
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"];

/// The texts around the parts of a call in tags.
pub struct Tagging {
    pub behind_name: &'static str,
    pub before_key: &'static str,
    /// Any of these, by the types of the value.
    pub behind_key: fn(Types) -> &'static [&'static str],
    pub behind_value: &'static str,
    pub end: &'static str,
}

impl Writer<'_> {
    /// A call as a text, its arguments as JSON, and a text.
    pub fn json_call(&mut self, before: &str, tool: &ToolDefinition, after: &str) -> String {
        let arguments = self.json_arguments(tool);
        format!("{} {arguments} {}", self.literal(before), self.literal(after))
    }

    /// A call with a number in front of its arguments.
    pub fn numbered(&mut self, before: &str, between: &str, after: &str, tool: &ToolDefinition) -> String {
        let number = self.terminal("/[0-9]{1,4}/");
        let arguments = self.json_arguments(tool);
        format!(
            "{} {number} {} {arguments} {}",
            self.literal(before),
            self.literal(between),
            self.literal(after)
        )
    }

    pub fn json_arguments(&mut self, tool: &ToolDefinition) -> String {
        let text = ArgumentSchema::new(&tool.parameters).property("input");
        if let Some(text) = self.text_in_json(text) {
            return self.rule(&format!("\"{{\\\"input\\\": \" {text} \"}}\""));
        }
        let mut schema = tool.parameters.clone();
        if let Some(object) = schema.as_object_mut() {
            object.entry("type").or_insert_with(|| json!("object"));
            // If the schema does not mention other members, the model must not invent any.
            let is_plain =
                object.contains_key("properties") && OPEN_ENDED.iter().all(|key| !object.contains_key(*key));
            if is_plain {
                object.insert("additionalProperties".to_owned(), json!(false));
            }
        }
        self.json(&schema)
    }

    /// A JSON value, spaced as templates print it.
    pub fn json(&mut self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            let spacing =
                json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
            object.insert("x-guidance".to_owned(), spacing);
        }
        self.rule(&format!("%json {schema}"))
    }

    /// A part of a tool's schema, as JSON.
    fn json_part(&mut self, schema: ArgumentSchema<'_>) -> String {
        let mut part = schema.node().cloned().unwrap_or_else(|| json!({}));
        for key in ["$defs", "definitions"] {
            if let (Some(part), Some(definitions)) = (part.as_object_mut(), schema.root().get(key)) {
                part.insert(key.to_owned(), definitions.clone());
            }
        }
        self.json(&part)
    }

    // -- Arguments in tags.

    pub fn tagged(&mut self, tool: &ToolDefinition, tagging: &Tagging) -> String {
        format!("{} {}", self.literal(&tool.name), self.tagged_body(tool, tagging))
    }

    /// Writes what follows the tool's name.
    pub fn tagged_body(&mut self, tool: &ToolDefinition, tagging: &Tagging) -> String {
        let mut call = self.literal(tagging.behind_name);
        let root = ArgumentSchema::new(&tool.parameters);
        for (key, is_required) in members(root) {
            let schema = root.property(&key);
            let value = self.tagged_value(schema, tagging.behind_value);
            let heads = (tagging.behind_key)(schema.types());
            let heads = heads.iter().map(|head| self.literal(&format!("{}{key}{head}", tagging.before_key)));
            let heads = heads.collect::<Vec<_>>().join(" | ");
            let member = self.rule(&format!("({heads}) {value}"));
            write!(call, " {member}{}", if is_required { "" } else { "?" })
                .expect("a string takes everything");
        }
        format!("{call} {}", self.literal(tagging.end))
    }

    /// A plain value with the mark that ends it.
    fn tagged_value(&mut self, schema: ArgumentSchema<'_>, end: &str) -> String {
        let types = schema.types();
        if types.is_text() {
            if let Some(choices) = schema.strings() {
                let choices: Vec<String> = choices.iter().map(|choice| self.literal(choice)).collect();
                return format!("({}) {}", choices.join(" | "), self.literal(end));
            }
            return self.text_until(schema, end);
        }
        let value = if types.is_only_boolean() {
            "(\"true\" | \"false\" | \"True\" | \"False\")".to_owned()
        } else {
            self.json_part(schema)
        };
        format!("{value} {}", self.literal(end))
    }

    /// A JSON string whose text follows the schema's grammar; `None` if it has none.
    pub fn text_in_json(&mut self, schema: ArgumentSchema<'_>) -> Option<String> {
        let grammar = schema.text_grammar("in_json")?;
        Some(format!("\"\\\"\" %lark {{\n{grammar}}} \"\\\"\""))
    }

    /// Text with the lengths and the pattern of a schema, or with its grammar, and the mark that ends it, which the text cannot
    /// contain.
    pub fn text_until(&mut self, schema: ArgumentSchema<'_>, end: &str) -> String {
        if let Some(grammar) = schema.text_grammar("between_tags") {
            let text = match self.before_special(end) {
                Some("") => "/(?s:.*)/".to_owned(),
                _ => format!("/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/", escaped(end.trim())),
            };
            return format!("%lark {{\n{TAGGED_TEXT}: {text}\n{grammar}}} {}", self.literal(end));
        }
        let node = schema.node();
        let length = |key: &str| node.and_then(|node| node.get(key)).and_then(Value::as_u64);
        let min = length("minLength").unwrap_or(0);
        let max = length("maxLength").map_or_else(String::new, |max| max.to_string());
        let pattern = node.and_then(|node| node.get("pattern")).and_then(Value::as_str);
        let pattern = pattern.map_or_else(String::new, |pattern| format!(" & /{}/", unanchored(pattern)));
        self.text_to((min, &max), &pattern, end)
    }

    /// Members as tags of their names, each behind `token`, for a schema and what lies in it.
    pub fn elements(&mut self, parameters: &Value, token: &str) -> String {
        self.element_members(ArgumentSchema::new(parameters), token, 0)
    }

    fn element_members(&mut self, schema: ArgumentSchema<'_>, token: &str, depth: usize) -> String {
        let mut all = String::new();
        for (key, is_required) in members(schema) {
            let element = self.element(&key, schema.property(&key), token, depth);
            write!(all, " {element}{}", if is_required { "" } else { "?" })
                .expect("a string takes everything");
        }
        if all.is_empty() { "\"\"".to_owned() } else { all }
    }

    fn element(&mut self, tag: &str, schema: ArgumentSchema<'_>, token: &str, depth: usize) -> String {
        let open = self.literal(&format!("{token}<{tag}>"));
        let close = format!("{token}</{tag}>");
        let types = schema.types();
        let inside = match types {
            _ if types.is_text() || depth > MAX_DEPTH => self.tagged_value(schema, &close),
            Types { array: true, .. } => {
                let item = self.element("item", schema.items(), token, depth + 1);
                let bound = |key: &str| schema.node().and_then(|node| node.get(key)).and_then(Value::as_u64);
                let max = bound("maxItems").map_or_else(String::new, |max| max.to_string());
                format!("{item}{{{},{max}}} {}", bound("minItems").unwrap_or(0), self.literal(&close))
            }
            Types { object: true, .. } => {
                format!("{} {}", self.element_members(schema, token, depth + 1), self.literal(&close))
            }
            _ => self.tagged_value(schema, &close),
        };
        self.rule(&format!("{open} {inside}"))
    }
}

/// The members of an object schema, and whether each is required.
pub fn members(schema: ArgumentSchema<'_>) -> Vec<(String, bool)> {
    let Some(node) = schema.node() else { return Vec::new() };
    let required = node.get("required").and_then(Value::as_array);
    let is_required = |key: &String| required.is_some_and(|keys| keys.iter().any(|one| one == key));
    let properties = node.get("properties").and_then(Value::as_object);
    properties.into_iter().flat_map(|all| all.keys()).map(|key| (key.clone(), is_required(key))).collect()
}

/// JSON Schema looks for a pattern anywhere in a string; a lexeme must match as a whole.
fn unanchored(pattern: &str) -> String {
    let (start, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
    let is_anchored = rest.ends_with('$') && !rest.ends_with("\\$");
    let (rest, end) = if is_anchored { (&rest[..rest.len() - 1], "") } else { (rest, "(?s:.*)") };
    format!("{start}(?:{}){end}", rest.replace('/', "\\/").replace("\\\\/", "\\/"))
}
