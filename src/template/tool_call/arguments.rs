//! Grammar rules for the arguments of one call: JSON, and values in tags.
//!
//! JSON arguments follow the tool's schema in full (llguidance's `%json`). Forms that are not JSON follow types, enums,
//! lengths and required members, and the patterns of strings that stand unquoted; numbers follow all that JSON Schema
//! demands.
//! The literals of Gemma and Python follow alternatives, too, and name what else they do not follow.

use serde_json::{Value, json};

use super::coerce::{ArgumentSchema, Types};
use super::shape::{Shape, shapes};
use super::writer::{MAX_MEMBERS, MemberForms, NOTHING, Writer, escaped, quoted};
use super::{TAGGED_TEXT, ToolDefinition, json_text};

/// Schemas nest deeper than this only by pointing at themselves: below, any value will do.
pub const MAX_DEPTH: usize = 6;

/// Keywords by which an object has, or may have, members beside its `properties`.
const OPEN_ENDED: [&str; 7] =
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"];

/// Most bytes of an object's member schemas that stand by themselves, so that the members may come in any order.
const MAX_PARTS: usize = 1 << 16;

/// Names of members that a schema does not name.
pub const OTHER_NAME: &str = "[A-Za-z_][A-Za-z0-9_.\\-]{0,63}";

/// The texts around the parts of a call in tags. White space between tags is free.
#[derive(Debug, Clone, Copy)]
pub struct Tagging {
    pub behind_name: &'static str,
    pub before_key: &'static str,
    /// Any of these, by the types of the value. A line break at the end means that values stand on lines of their own.
    pub behind_key: fn(Types) -> &'static [&'static str],
    pub behind_value: &'static str,
    pub end: &'static str,
}

impl Tagging {
    /// Tags whose names stand between quotes, as in `<parameter name="KEY">`.
    pub const fn named(before_key: &'static str, behind_value: &'static str, end: &'static str) -> Self {
        Self { behind_name: "\">", before_key, behind_key: |_| &["\">"], behind_value, end }
    }
}

/// End of a value.
#[derive(Clone, Copy)]
struct ValueEnd<'a> {
    close: &'a str,
    /// Text after the closing tag.
    next: &'a str,
    /// The texts behind a closing tag at which the reader takes the value for ended; none if the tag suffices.
    nexts: &'a [&'a str],
    has_lines: bool,
}

impl Writer<'_> {
    /// A call as texts around a name, as it stands there, and the tool's arguments as JSON.
    pub fn json_call(&mut self, tool: &ToolDefinition, name: &str, texts: [&str; 3]) -> String {
        let arguments = self.json_arguments(tool);
        let [before, between, after] = texts;
        format!("{} {arguments} {}", self.markup(&format!("{before}{name}{between}")), self.markup(after))
    }

    /// As [`Self::json_call`], with the tool's name as a JSON string.
    pub fn object_call(&mut self, tool: &ToolDefinition, texts: [&str; 3]) -> String {
        self.json_call(tool, &json_text::quoted(&tool.name), texts)
    }

    /// A call with a number in front of its arguments.
    pub fn numbered(&mut self, before: &str, between: &str, after: &str, tool: &ToolDefinition) -> String {
        let number = self.terminal("/[0-9]{1,4}/");
        let arguments = self.json_arguments(tool);
        let [before, between, after] = [before, between, after].map(|text| self.markup(text));
        format!("{before} {number} {between} {arguments} {after}")
    }

    pub fn json_arguments(&mut self, tool: &ToolDefinition) -> String {
        let schema = ArgumentSchema::new(&tool.parameters);
        if let Some(text) = self.text_in_json(schema.property("input")) {
            return self.rule(&format!("\"{{\\\"input\\\": \" {text} \"}}\""));
        }
        if let Some(members) = self.json_members(schema) {
            return self.rule(&format!("\"{{\" {members} \"}}\""));
        }
        let mut schema = tool.parameters.clone();
        if let Some(object) = schema.as_object_mut() {
            object.entry("type").or_insert_with(|| json!("object"));
            // If the schema does not mention other members, the model must not invent any.
            if object.contains_key("properties") && OPEN_ENDED.iter().all(|key| !object.contains_key(*key)) {
                object.insert("additionalProperties".to_owned(), json!(false));
            }
        }
        self.json(&schema)
    }

    /// The members of an object without its braces, each as JSON of its own, so that they may come in any order. `None` for objects
    /// that need more, or whose parts would be too large.
    fn json_members(&mut self, schema: ArgumentSchema<'_>) -> Option<String> {
        let shapes = shapes(schema).ok()?;
        let num_members: usize = shapes.iter().map(|shape| shape.members.len()).sum();
        let num_copies = if has_references(schema.root()) { num_members } else { 1 };
        let is_known = |shape: &Shape| shape.others.is_none() && shape.members.len() <= MAX_MEMBERS;
        if !shapes.iter().all(is_known) || schema.root().to_string().len() * num_copies > MAX_PARTS {
            return None;
        }
        Some(self.object(shapes, |writer, shape| {
            writer.members_of(schema, shape, |writer, name, part| {
                let key = writer.literal(&json_text::quoted(name.unwrap_or_default()));
                let (colon, value) = (writer.markup(": "), writer.json_part(part));
                writer.separated(&format!("{key} {colon} {value}"))
            })
        }))
    }

    /// An object as one of its shapes, each by a body.
    pub fn object(
        &mut self,
        shapes: Vec<Shape>,
        mut body: impl FnMut(&mut Self, &Shape) -> String,
    ) -> String {
        let bodies: Vec<String> = shapes.iter().map(|shape| body(self, shape)).collect();
        self.rule(&bodies.join(" | "))
    }

    /// The members of a shape in any order. `member` writes one by its name and schema, and one of another name where there is none.
    pub fn members_of(
        &mut self,
        schema: ArgumentSchema<'_>,
        shape: &Shape,
        mut member: impl FnMut(&mut Self, Option<&str>, ArgumentSchema<'_>) -> MemberForms,
    ) -> String {
        let items = shape.members.iter().map(|(name, part)| member(self, Some(name), schema.at(Some(part))));
        let items: Vec<MemberForms> = items.collect();
        let other = shape.others.as_ref().map(|part| member(self, None, schema.at(Some(part))));
        self.any_order(shape, &items, other.as_ref())
    }

    /// A member that a comma parts from the next one.
    pub fn separated(&mut self, member: &str) -> MemberForms {
        let member = self.rule(member);
        MemberForms { before_more: format!("{member} {}", self.markup(", ")), last: member }
    }

    /// A JSON value, spaced as templates print it or closer.
    pub fn json(&mut self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            let spacing =
                json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
            object.insert("x-guidance".to_owned(), spacing);
        }
        self.rule(&format!("%json {schema}"))
    }

    /// A part of a tool's schema, as JSON.
    fn json_part(&mut self, schema: ArgumentSchema<'_>) -> String {
        let mut part = schema.node().cloned().unwrap_or_else(|| json!({}));
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = schema.root().get(key).filter(|_| has_references(&part)) {
                part[key] = definitions.clone();
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
        let root = ArgumentSchema::new(&tool.parameters);
        let (head, end) = (self.markup(&format!("{} ", tagging.behind_name)), self.literal(tagging.end));
        let first = self.literal(tagging.before_key);
        let shapes = self.shapes(root);
        let body = self.object(shapes, |writer, shape| {
            let members = writer.members_of(root, shape, |writer, name, part| {
                let key = name.map(|name| writer.literal(name));
                let key = key.unwrap_or_else(|| writer.other_name(shape, OTHER_NAME));
                writer.tag(&key, part, tagging)
            });
            // The last member ends the call, too.
            match members.strip_suffix('?') {
                _ if members == NOTHING => end.clone(),
                Some(members) => format!("{first} {members} | {end}"),
                None => format!("{first} {members}"),
            }
        });
        format!("{head} {body}")
    }

    /// A parameter behind the beginning of its tag, with what begins the next one or ends the call.
    fn tag(&mut self, key: &str, schema: ArgumentSchema<'_>, tagging: &Tagging) -> MemberForms {
        let heads = (tagging.behind_key)(schema.types());
        let has_lines = heads[0].ends_with('\n');
        let heads: Vec<String> =
            heads.iter().map(|head| format!("{key} {}", self.markup(head.trim_end()))).collect();
        let head = self.rule(&heads.join(" | "));
        let nexts = [tagging.before_key, tagging.end];
        let [before_more, last] = nexts.map(|next| {
            let ending = ValueEnd { close: tagging.behind_value, next, nexts: &nexts, has_lines };
            let value = self.tagged_value(schema, ending);
            self.rule(&format!("{head} {value}"))
        });
        MemberForms { before_more, last }
    }

    /// A name that none of an object's own members has.
    pub fn other_name(&mut self, shape: &Shape, name: &str) -> String {
        let taken: Vec<String> = shape.members.iter().map(|(name, _)| escaped(name)).collect();
        let not = if taken.is_empty() { String::new() } else { format!(" & ~/{}/", taken.join("|")) };
        self.terminal(&format!("/{name}/{not}"))
    }

    /// The alternatives of an object's schema; one of any members where a keyword cannot be expressed.
    pub fn shapes(&mut self, schema: ArgumentSchema<'_>) -> Vec<Shape> {
        shapes(schema).unwrap_or_else(|keyword| {
            self.refused.get_or_insert(keyword);
            vec![Shape { others: Some(json!({})), ..Shape::default() }]
        })
    }

    /// A plain value with what ends it.
    fn tagged_value(&mut self, schema: ArgumentSchema<'_>, ending: ValueEnd<'_>) -> String {
        let types = schema.types();
        if types.is_text() {
            return self.tagged_text(schema, ending);
        }
        let value = match schema.strings() {
            None if types == (Types { boolean: true, ..Types::default() }) => {
                "(\"true\" | \"false\" | \"True\" | \"False\")".to_owned()
            }
            _ => self.json_part(schema),
        };
        let ValueEnd { close, next, .. } = ending;
        format!("{} {value} {}", self.space(), self.markup(&format!(" {close} {next}")))
    }

    /// A text up to a mark, which it cannot contain.
    pub fn text_until(&mut self, schema: ArgumentSchema<'_>, close: &str) -> String {
        self.tagged_text(schema, ValueEnd { close, next: "", nexts: &[], has_lines: false })
    }

    /// A text with what ends it, of the choices, the grammar, or the lengths and the pattern of a schema.
    fn tagged_text(&mut self, schema: ArgumentSchema<'_>, ending: ValueEnd<'_>) -> String {
        let ValueEnd { close, next, has_lines, .. } = ending;
        let end = self.markup(&format!("{close} {next}"));
        let line = if has_lines { "\"\\n\"?" } else { "" };
        if let Some(choices) = schema.strings() {
            let choices: Vec<String> = choices.iter().map(|choice| self.literal(choice)).collect();
            return format!("{line} ({}) {line} {end}", choices.join(" | "));
        }
        if let Some(grammar) = schema.text_grammar("between_tags") {
            let line = line.trim_end_matches('?');
            return format!("{line} {} {line} {end}", self.text_grammar(grammar, close));
        }
        let range = schema.range("minLength", "maxLength");
        let pattern = schema.node().and_then(|node| node.get("pattern")).and_then(Value::as_str);
        let pattern = pattern.map_or_else(String::new, |pattern| format!(" & /{}/", unanchored(pattern)));
        let is_free = range == "0," && pattern.is_empty();
        let mut text = self.terminal(&format!("/(?s:.{{{range}}})/{pattern}"));
        if has_lines && !is_free {
            // The reader takes one line break off either end, so that only a text with both or with none is as long as it seems.
            let bare = format!("{text} & ~/[\\r\\n](?s:.*)/ & ~/(?s:.*)[\\r\\n]/");
            text = self.terminal(&format!("\"\\n\" {text} \"\\n\" | {bare}"));
        }
        match self.before_special(close) {
            None => self.text_before(&text, ending),
            Some("") => {
                let text = self.terminal(&format!("{text} & /(?s:.+)/"));
                format!(
                    "{text}{} {end}",
                    if range.starts_with("0,") && pattern.is_empty() { "?" } else { "" }
                )
            }
            Some(before) => {
                // A lexeme is as long as it can be, so what stands in front of the token is part of the text's.
                let text = self.terminal(&format!("{text} {}", quoted(before)));
                format!("{text} {}", self.markup(&format!("{} {next}", &close[before.len()..])))
            }
        }
    }

    /// A text and what ends it, where that is ordinary text: the first closing tag behind which the reader takes the value for ended.
    fn text_before(&mut self, text: &str, ending: ValueEnd<'_>) -> String {
        let ValueEnd { close, next, nexts, .. } = ending;
        let close = escaped(close);
        if nexts.is_empty() || nexts.iter().any(|next| self.before_special(next).is_some()) {
            let text = self.terminal(&format!("{text} & ~/(?s:.*){close}(?s:.*)/"));
            return format!(
                "{} {}",
                self.terminal(&format!("{text} /{close}/")),
                self.markup(&format!(" {next}"))
            );
        }
        let nexts: Vec<String> = nexts.iter().map(|next| escaped(next)).collect();
        let text = self.terminal(&format!("{text} & ~/(?s:.*){close}\\s*({})(?s:.*)/", nexts.join("|")));
        self.terminal(&format!("{text} /{close}[ \\t\\r\\n]{{0,16}}{}/", escaped(next)))
    }

    /// A text that follows a grammar and does not contain the mark that ends it.
    fn text_grammar(&self, grammar: &str, end: &str) -> String {
        let text = match self.before_special(end) {
            Some("") => "/(?s:.*)/".to_owned(),
            _ => format!("/(?s:.*)/ & ~/(?s:.*){}(?s:.*)/", escaped(end)),
        };
        format!("%lark {{\n{TAGGED_TEXT}: {text}\n{grammar}}}")
    }

    /// A JSON string whose text follows the schema's grammar; `None` if it has none.
    pub fn text_in_json(&mut self, schema: ArgumentSchema<'_>) -> Option<String> {
        let grammar = schema.text_grammar("in_json")?;
        Some(format!("\"\\\"\" %lark {{\n{grammar}}} \"\\\"\""))
    }

    /// Members as tags of their names, each behind `token`, for a schema and what lies in it.
    pub fn elements(&mut self, parameters: &Value, token: &str) -> String {
        self.element_members(ArgumentSchema::new(parameters), token, 0)
    }

    fn element_members(&mut self, schema: ArgumentSchema<'_>, token: &str, depth: usize) -> String {
        let mut shapes = self.shapes(schema);
        for shape in &mut shapes {
            // An end tag repeats the name of its element, which no grammar can demand of a name that it does not know.
            if shape.others.take().is_some_and(|others| others != json!({})) {
                self.refused.get_or_insert_with(|| "additionalProperties".to_owned());
            }
        }
        self.object(shapes, |writer, shape| {
            writer.members_of(schema, shape, |writer, name, part| {
                let element = writer.element(name.unwrap_or_default(), part, token, depth);
                MemberForms { before_more: format!("{element} {}", writer.space()), last: element }
            })
        })
    }

    fn element(&mut self, tag: &str, schema: ArgumentSchema<'_>, token: &str, depth: usize) -> String {
        let open = self.literal(&format!("{token}<{tag}>"));
        let close = format!("{token}</{tag}>");
        let ending = ValueEnd { close: &close, next: "", nexts: &[], has_lines: false };
        let (types, mut inside) = (schema.types(), Vec::new());
        let has_elements = !types.is_text() && depth <= MAX_DEPTH;
        if has_elements && types.array {
            let item = self.element("item", schema.items(), token, depth + 1);
            inside.push(format!(
                "{item}{{{}}} {}",
                schema.range("minItems", "maxItems"),
                self.literal(&close)
            ));
        }
        if has_elements && types.object {
            let members = self.element_members(schema, token, depth + 1);
            inside.push(format!("{members} {}", self.literal(&close)));
        }
        if !has_elements || types != (Types { array: types.array, object: types.object, ..Types::default() })
        {
            inside.push(self.tagged_value(schema, ending));
        }
        self.rule(&format!("{open} ({})", inside.join(" | ")))
    }
}

fn has_references(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_references),
        Value::Object(members) => {
            members.get("$ref").is_some_and(Value::is_string) || members.values().any(has_references)
        }
        _ => false,
    }
}

/// JSON Schema looks for a pattern anywhere in a string; a lexeme must match as a whole.
fn unanchored(pattern: &str) -> String {
    let (start, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
    let is_anchored = rest.ends_with('$') && !rest.ends_with("\\$");
    let (rest, end) = if is_anchored { (&rest[..rest.len() - 1], "") } else { (rest, "(?s:.*)") };
    format!("{start}(?:{}){end}", rest.replace('/', "\\/").replace("\\\\/", "\\/"))
}
