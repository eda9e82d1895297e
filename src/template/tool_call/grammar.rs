//! Grammars for answers with tool calls, as Lark text for llguidance.
//!
//! What such a grammar lets through, the readers of this folder take apart into calls of the given tools, with arguments
//! that parse. JSON arguments follow the tool's schema in full (llguidance's `%json`). Forms that are not JSON follow
//! types, enums, lengths and required members, and the patterns of strings that stand unquoted; numbers follow all that
//! JSON Schema says of them.
//!
//! A marker that is a special token is that token, which no text can contain; any other marker ends the text in front
//! of it by a lazy lexeme, so that from there on only a call is possible.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::coerce::{Schema, Types};
use super::{Notation, Tool, ToolCallFormat, Tools};
use crate::dialect::Dialect;
use crate::reasoning::ReasoningFormat;

/// Schemas nest deeper than this only by pointing at themselves: below, any value will do.
const MAX_DEPTH: usize = 6;

/// Keywords by which an object has, or may have, members beside its `properties`.
const OPEN_ENDED: [&str; 7] =
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"];

/// What a grammar is for.
pub struct Request<'a> {
    pub dialect: &'a Dialect,
    pub format: ToolCallFormat,
    pub tools: &'a Tools,
    /// Whether an answer without calls is possible, and text around calls.
    pub is_optional: bool,
    pub is_parallel: bool,
    pub prompt_tail: &'a str,
    pub special: &'a dyn Fn(&str) -> Option<u32>,
}

/// The grammar, as Lark text.
pub fn lark(request: &Request<'_>) -> String {
    let markup = request.dialect.markup();
    let mut writer = Writer { request, markup, rules: String::new(), num_rules: 0, style: Style::Json };
    let call = writer.any_call("");
    let Notation { messages, frame, .. } = request.format.row();
    let start = match (messages, frame.lead) {
        _ if request.format == ToolCallFormat::Harmony => writer.harmony(&call),
        (Some(messages), _) => writer.messages(messages, &call),
        (None, "") => writer.answer(&call, &call),
        (None, lead) => {
            let first = writer.any_call(lead);
            writer.answer(&first, &call)
        }
    };
    format!("start: {start}\n{}", writer.rules)
}

/// What stands around calls in answers whose text has markers too.
#[derive(Debug)]
pub struct Messages {
    /// What begins a text, and what ends it when something follows.
    pub texts: &'static [(&'static str, &'static str)],
    /// May end the answer behind a text.
    pub end: &'static str,
    /// The same behind calls.
    pub calls_end: &'static str,
}

/// How a call in tags is written.
pub struct Tagging {
    pub behind_name: &'static str,
    pub before_key: &'static str,
    /// Any of these, by the types of the value.
    pub behind_key: fn(Types) -> &'static [&'static str],
    pub behind_value: &'static str,
    pub end: &'static str,
}

/// How values other than JSON are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Json,
    Python,
    Gemma,
}

pub struct Writer<'a> {
    request: &'a Request<'a>,
    markup: Vec<&'static str>,
    rules: String,
    num_rules: usize,
    style: Style,
}

impl Writer<'_> {
    fn rule(&mut self, body: &str) -> String {
        self.named_rule("r", "", body)
    }

    pub fn terminal(&mut self, body: &str) -> String {
        self.named_rule("T", "", body)
    }

    fn named_rule(&mut self, letter: &str, options: &str, body: &str) -> String {
        self.num_rules += 1;
        let name = format!("{letter}{}", self.num_rules);
        writeln!(self.rules, "{name}{options}: {body}").expect("a string takes everything");
        name
    }

    /// A literal text in which special tokens stand as such.
    pub fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let tokens = self.markup.iter().filter_map(|mark| {
                let id = (self.request.special)(mark)?;
                Some((rest.find(mark)?, *mark, id))
            });
            let Some((at, mark, id)) =
                tokens.min_by_key(|(at, mark, _)| (*at, std::cmp::Reverse(mark.len())))
            else {
                parts.push(quoted(rest));
                break;
            };
            if at > 0 {
                parts.push(quoted(&rest[..at]));
            }
            parts.push(format!("<[{id}]>"));
            rest = &rest[at + mark.len()..];
        }
        if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") }
    }

    /// What stands in front of the first special token of a text, if it has any.
    fn before_special<'t>(&self, text: &'t str) -> Option<&'t str> {
        let is_token = |mark: &&&str| (self.request.special)(mark).is_some();
        let first = self.markup.iter().filter(is_token).filter_map(|mark| text.find(mark)).min()?;
        Some(&text[..first])
    }

    fn is_special(&self, mark: &str) -> bool {
        self.before_special(mark) == Some("")
    }

    /// Any text of a length, and the mark that ends it: where that holds a special token, the text cannot contain it; else the
    /// text has the mark nowhere else.
    fn text_to(&mut self, (min, max): (u64, &str), pattern: &str, end: &str) -> String {
        let Some(before) = self.before_special(end) else {
            let mark = escaped(end.trim());
            let text = format!("/(?s:.{{{min},{max}}})/ & ~/(?s:.*){mark}(?s:.*)/{pattern}");
            let text = self.terminal(&text);
            return self.terminal(&format!("{text} {}", quoted(end)));
        };
        let rest = self.literal(&end[before.len()..]);
        if before.is_empty() {
            let text = self.terminal(&format!("/(?s:.{{{},{max}}})/{pattern}", min.max(1)));
            return format!("{text}{} {rest}", if min == 0 { "?" } else { "" });
        }
        // A lexeme is as long as it can be, so what stands in front of the token is part of the text's.
        let text = format!("/(?s:.{{{min},{max}}})/{pattern}");
        let text = self.terminal(&text);
        let text = self.terminal(&format!("{text} {}", quoted(before)));
        format!("{text} {rest}")
    }

    // -- The answer around the calls.

    fn answer(&mut self, first: &str, call: &str) -> String {
        let body = self.body(first, call);
        let whole = match self.reasoning() {
            Some(reasoning) if self.is_reasoning_open() => format!("{reasoning} {body}"),
            Some(reasoning) => format!("{reasoning}? {body}"),
            None => return body,
        };
        match self.calls_in_reasoning() {
            Some(calls) => format!("({whole} | {calls})"),
            None => whole,
        }
    }

    fn is_reasoning_open(&self) -> bool {
        self.request.dialect.reasoning.is_some_and(|format| format.is_open_in(self.request.prompt_tail))
    }

    /// The reasoning block, or the rest of one that the prompt has opened, with the space behind it.
    fn reasoning(&mut self) -> Option<String> {
        let marks = self.request.dialect.reasoning?.marks();
        let opening = *marks.opens.first().filter(|_| marks.closing.is_some())?;
        let open = if self.is_reasoning_open() { String::new() } else { self.literal(opening) };
        let inside = match self.before_special(marks.close) {
            Some(_) => self.text_to((0, ""), "", marks.close),
            None => {
                let text = self.terminal(&format!("/(?s:.*){}/", escaped(marks.close)));
                self.named_rule("r", "[lazy]", &text)
            }
        };
        // The space is the template's; without a bound a model could go on with it for ever.
        let space = self.terminal("/[ \\t\\r\\n]{1,4}/");
        Some(self.rule(&format!("{open} {inside} {space}?")))
    }

    /// Reasoning that calls end before it is closed, as the reader takes it: what they say is not enforced.
    fn calls_in_reasoning(&mut self) -> Option<String> {
        let marks = self.request.dialect.reasoning?.marks();
        let Notation { end, openers, .. } = self.notation();
        let (opening, call) = (*marks.opens.first()?, *openers.first()?);
        let is_looked_for = self.request.is_optional && !end.is_empty() && marks.closing.is_some();
        if !is_looked_for {
            return None;
        }
        let open = if self.is_reasoning_open() { String::new() } else { self.literal(opening) };
        let tokens = [call, end, marks.close].map(|mark| self.is_special(mark));
        let space = self.terminal("/[ \\t\\r\\n]{1,4}/");
        let inside = match tokens {
            [true, true, true] => {
                let text = self.terminal("/(?s:.+)/");
                format!("({text}? {} {text}? {})+", self.literal(call), self.literal(end))
            }
            [false, false, _] => {
                let [call, end, close] = [call, end, marks.close].map(escaped);
                self.terminal(&format!("/(?s:.*){call}(?s:.*){end}/ & ~/(?s:.*){close}(?s:.*)/"))
            }
            _ => return None,
        };
        Some(self.rule(&format!("{open} {inside} {space}?")))
    }

    fn notation(&self) -> &'static Notation {
        self.request.format.row()
    }

    fn body(&mut self, first: &str, call: &str) -> String {
        let Notation { frame, openers, bare_call, .. } = self.notation();
        let calls = match frame.separator {
            Some(separator) if self.request.is_parallel => {
                format!("{first} ({} {call})*", self.literal(separator))
            }
            _ => first.to_owned(),
        };
        let span = format!("{} {calls} {}", self.literal(frame.open), self.literal(frame.close));
        let span = self.rule(&span);
        let opener = match (bare_call, openers.first()) {
            (None, Some(opener)) => *opener,
            _ if self.request.is_optional => return self.text_or(&span),
            _ => return span,
        };
        if self.request.is_optional {
            return self.text_with(opener, &span);
        }
        let first = format!("{} {span}", self.literal(opener));
        if self.request.is_parallel && frame.separator.is_none() {
            return format!("{first} ({} {first})*", self.literal(frame.between));
        }
        first
    }

    /// Text that does not begin like a call, or calls alone.
    fn text_or(&mut self, span: &str) -> String {
        let Notation { bare_call, openers, .. } = self.notation();
        let mut not = format!("~/{}/", bare_call.unwrap_or_default());
        for opener in openers.iter().filter(|opener| !self.is_special(opener)) {
            write!(not, " & ~/(?s:.*){}(?s:.*)/", escaped(opener)).expect("a string takes everything");
        }
        let text = self.terminal(&format!("/(?s:.*)/ & {not}{}", self.not_reasoning()));
        format!("({text} | {span})")
    }

    /// Text with calls in it.
    fn text_with(&mut self, opener: &'static str, span: &str) -> String {
        let not_reasoning = self.not_reasoning();
        let (head, tail) = match self.before_special(opener) {
            Some("") => {
                let text = self.terminal(&format!("/(?s:.+)/{not_reasoning}"));
                (format!("{text}? {}", self.literal(opener)), format!("{text}?"))
            }
            Some(before) => {
                let tail = self.terminal(&format!("/(?s:.+)/{not_reasoning}"));
                let head = self.terminal(&format!("/(?s:.*){}/{not_reasoning}", escaped(before)));
                (format!("{head} {}", self.literal(&opener[before.len()..])), format!("{tail}?"))
            }
            None => {
                let head = self.terminal(&format!("/(?s:.*){}/{not_reasoning}", escaped(opener)));
                let others = self
                    .notation()
                    .openers
                    .iter()
                    .map(|other| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(other)));
                let tail = self.terminal(&format!("/(?s:.+)/{}{not_reasoning}", others.collect::<String>()));
                (self.named_rule("r", "[lazy]", &head), format!("{tail}?"))
            }
        };
        let tail = self.rule(&tail);
        match self.request.is_parallel {
            true => format!("({head} {span})* {tail}"),
            false => format!("({tail} | {head} {span})"),
        }
    }

    /// Excludes text that begins with reasoning, which has a rule of its own.
    fn not_reasoning(&self) -> String {
        let marks = self.request.dialect.reasoning.map(ReasoningFormat::marks);
        let open = marks.and_then(|marks| marks.opens.first()).filter(|open| !self.is_special(open));
        open.map_or_else(String::new, |open| format!(" & ~/\\s*{}(?s:.*)/", escaped(open)))
    }

    fn harmony(&mut self, call: &str) -> String {
        let next = self.harmony_text("<|end|><|start|>assistant");
        let message = |writer: &Self, head: &str| format!("{} {next}", writer.literal(head));
        let analysis = message(self, "<|channel|>analysis<|message|>");
        let preamble = message(self, "<|channel|>commentary<|message|>");
        let is_open = self.request.prompt_tail.trim_end().ends_with("<|message|>");
        let rest = if is_open { next.as_str() } else { "" };
        if !self.request.is_optional {
            return format!("{rest} ({analysis})* {call}");
        }
        let last = self.harmony_text("<|return|>");
        let open_end = self.terminal("/(?s:.+)/ & ~/(?s:.*)<\\|(?s:.*)/");
        let head = self.literal("<|channel|>final<|message|>");
        format!("{rest} ({analysis} | {preamble})* ({call} | {head} ({last} | {open_end})?)")
    }

    /// An answer of texts with markers, then calls or a text that nothing needs to end. The prompt may have begun a text.
    fn messages(&mut self, messages: &Messages, call: &str) -> String {
        let tail = self.request.prompt_tail;
        let begun = messages.texts.iter().find(|(head, _)| tail.ends_with(head));
        let begun = begun.map(|(_, close)| self.text_to((0, ""), "", close));
        let whole: Vec<String> = messages
            .texts
            .iter()
            .map(|(head, close)| format!("{} {}", self.literal(head), self.text_to((0, ""), "", close)))
            .collect();
        let whole = self.rule(&whole.join(" | "));
        let Notation { frame, .. } = self.notation();
        let more = match (self.request.is_parallel, frame.separator) {
            (true, Some(separator)) => format!("({} {call})*", self.literal(separator)),
            _ => String::new(),
        };
        let calls = format!("{} {call} {more} {}", self.literal(frame.open), self.literal(frame.close));
        let [end, calls_end] = [messages.end, messages.calls_end].map(|end| match end {
            "" => String::new(),
            end => format!("({})?", self.literal(end)),
        });
        let calls = format!("{calls} {calls_end}");
        let first = begun.clone().unwrap_or_default();
        if !self.request.is_optional {
            return format!("{first} {whole}* {calls}");
        }
        let heads: Vec<String> = messages.texts.iter().map(|(head, _)| self.literal(head)).collect();
        let open_end = self.open_text(messages);
        let last = format!("({}) {open_end}? {end}", heads.join(" | "));
        let rest = format!("{first} {whole}* ({calls} | {last})?");
        match begun {
            Some(_) => format!("({rest} | {open_end}? {end})"),
            None => format!("({rest})"),
        }
    }

    /// Text that none of the messages' markers is in.
    fn open_text(&mut self, messages: &Messages) -> String {
        let marks = messages.texts.iter().map(|(_, close)| *close).chain([messages.end]);
        let marks: Vec<&str> = marks.filter(|mark| !mark.is_empty()).collect();
        if marks.iter().all(|mark| self.is_special(mark)) {
            return self.terminal("/(?s:.+)/");
        }
        let not: String = marks.iter().map(|mark| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(mark))).collect();
        self.terminal(&format!("/(?s:.+)/{not}"))
    }

    /// The text of a message and what follows it.
    fn harmony_text(&mut self, end: &str) -> String {
        if self.is_special("<|end|>") {
            let text = self.terminal("/(?s:.+)/");
            return self.rule(&format!("{text}? {}", self.literal(end)));
        }
        let text = self.terminal("/(?s:.*)/ & ~/(?s:.*)<\\|(?s:.*)/");
        self.terminal(&format!("{text} {}", quoted(end)))
    }

    // -- One call.

    /// A call of any of the tools; `lead` stands in front of its name.
    fn any_call(&mut self, lead: &str) -> String {
        let calls: Vec<String> = self.request.tools.iter().map(|tool| self.call(tool, lead)).collect();
        self.rule(&calls.join(" | "))
    }

    fn call(&mut self, tool: &Tool, lead: &str) -> String {
        (self.notation().call)(self, tool, lead)
    }

    /// A call as a text, its arguments as JSON, and a text.
    pub fn json_call(&mut self, before: &str, tool: &Tool, after: &str) -> String {
        let arguments = self.json_arguments(tool);
        format!("{} {arguments} {}", self.literal(before), self.literal(after))
    }

    /// A call with a number in front of its arguments.
    pub fn numbered(&mut self, before: &str, between: &str, after: &str, tool: &Tool) -> String {
        let number = self.terminal("/[0-9]{1,4}/");
        let arguments = self.json_arguments(tool);
        format!(
            "{} {number} {} {arguments} {}",
            self.literal(before),
            self.literal(between),
            self.literal(after)
        )
    }

    pub fn json_arguments(&mut self, tool: &Tool) -> String {
        let mut schema = tool.parameters.clone();
        if let Some(object) = schema.as_object_mut() {
            object.entry("type").or_insert_with(|| json!("object"));
            // Where the schema is silent about other members, a model is not invited to make some up.
            let is_plain =
                object.contains_key("properties") && OPEN_ENDED.iter().all(|key| !object.contains_key(*key));
            if is_plain {
                object.insert("additionalProperties".to_owned(), json!(false));
            }
        }
        self.json(&schema)
    }

    /// A JSON value, spaced as templates print it.
    fn json(&mut self, schema: &Value) -> String {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            let spacing =
                json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
            object.insert("x-guidance".to_owned(), spacing);
        }
        self.rule(&format!("%json {schema}"))
    }

    /// A part of a tool's schema, as JSON.
    fn json_part(&mut self, schema: Schema<'_>) -> String {
        let mut part = schema.node().cloned().unwrap_or_else(|| json!({}));
        for key in ["$defs", "definitions"] {
            if let (Some(part), Some(definitions)) = (part.as_object_mut(), schema.root().get(key)) {
                part.insert(key.to_owned(), definitions.clone());
            }
        }
        self.json(&part)
    }

    // -- Arguments in tags.

    pub fn tagged(&mut self, tool: &Tool, tagging: &Tagging) -> String {
        format!("{} {}", self.literal(&tool.name), self.tagged_body(tool, tagging))
    }

    /// What follows the tool's name.
    pub fn tagged_body(&mut self, tool: &Tool, tagging: &Tagging) -> String {
        let mut call = self.literal(tagging.behind_name);
        let root = Schema::new(&tool.parameters);
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
    fn tagged_value(&mut self, schema: Schema<'_>, end: &str) -> String {
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

    /// Text with the lengths and the pattern of a schema, and the mark that ends it, which the text cannot contain.
    fn text_until(&mut self, schema: Schema<'_>, end: &str) -> String {
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
        self.element_members(Schema::new(parameters), token, 0)
    }

    fn element_members(&mut self, schema: Schema<'_>, token: &str, depth: usize) -> String {
        let mut all = String::new();
        for (key, is_required) in members(schema) {
            let element = self.element(&key, schema.property(&key), token, depth);
            write!(all, " {element}{}", if is_required { "" } else { "?" })
                .expect("a string takes everything");
        }
        if all.is_empty() { "\"\"".to_owned() } else { all }
    }

    fn element(&mut self, tag: &str, schema: Schema<'_>, token: &str, depth: usize) -> String {
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

    // -- Arguments in Gemma's and Python's notation.

    pub fn object_call(
        &mut self,
        tool: &Tool,
        style: Style,
        lead: &str,
        (open, close): (&str, &str),
    ) -> String {
        self.style = style;
        let members = self.members(Schema::new(&tool.parameters), style == Style::Python, 0);
        format!("{} {members} {}", self.literal(&format!("{lead}{}{open}", tool.name)), self.literal(close))
    }

    fn separator(&self) -> &'static str {
        if self.style == Style::Python { ", " } else { "," }
    }

    /// The members of an object without its braces: the required ones, then any of the others, in the schema's order.
    fn members(&mut self, schema: Schema<'_>, is_keywords: bool, depth: usize) -> String {
        let separator = self.literal(self.separator());
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for (key, is_required) in members(schema) {
            let value = self.value(schema.property(&key), depth + 1);
            let key = match (self.style, is_keywords) {
                (Style::Python, true) => format!("{key}="),
                (Style::Python, false) => format!("{}: ", super::json_text::quoted(&key)),
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

    fn value(&mut self, schema: Schema<'_>, depth: usize) -> String {
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
            let words =
                if self.style == Style::Python { "(\"True\" | \"False\")" } else { "(\"true\" | \"false\")" };
            choices.push(words.to_owned());
        }
        if types.null {
            choices.push(if self.style == Style::Python { "\"None\"" } else { "\"null\"" }.to_owned());
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

    fn array(&mut self, schema: Schema<'_>, depth: usize) -> String {
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

    fn string(&mut self, schema: Schema<'_>) -> String {
        if let Some(choices) = schema.strings() {
            let quote = |choice: &String| match self.style {
                Style::Python => quoted(&super::json_text::quoted(choice)),
                _ => self.literal(&format!("<|\"|>{choice}<|\"|>")),
            };
            return format!("({})", choices.iter().map(quote).collect::<Vec<_>>().join(" | "));
        }
        match self.style {
            Style::Python => {
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
        if self.style != Style::Gemma {
            return self.json(&json!({}));
        }
        let string = self.string(Schema::new(&Value::Null));
        let number = self.json(&json!({"type": "number"}));
        let key = self.terminal("/[A-Za-z_][A-Za-z0-9_]{0,40}/");
        self.num_rules += 1;
        let any = format!("r{}", self.num_rules);
        writeln!(
            self.rules,
            "{any}: {string} | {number} | \"true\" | \"false\" | \"null\" | \"[\" ({any} (\",\" {any})*)? \"]\" \
             | \"{{\" ({key} \":\" {any} (\",\" {key} \":\" {any})*)? \"}}\""
        )
        .expect("a string takes everything");
        any
    }
}

/// The members of an object schema, and whether each is required.
fn members(schema: Schema<'_>) -> Vec<(String, bool)> {
    let Some(node) = schema.node() else { return Vec::new() };
    let required = node.get("required").and_then(Value::as_array);
    let is_required = |key: &String| required.is_some_and(|keys| keys.iter().any(|one| one == key));
    let properties = node.get("properties").and_then(Value::as_object);
    properties.into_iter().flat_map(|all| all.keys()).map(|key| (key.clone(), is_required(key))).collect()
}

/// A Lark string.
fn quoted(text: &str) -> String {
    super::json_text::quoted(text).replace('\u{7f}', "\\u007f")
}

/// A text as a regular expression between slashes.
fn escaped(text: &str) -> String {
    let is_meta = |c: char| "\\.+*?()|[]{}^$#&-~/".contains(c);
    text.chars().flat_map(|c| is_meta(c).then_some('\\').into_iter().chain([c])).collect()
}

/// JSON Schema looks for a pattern anywhere in a string; a lexeme must match as a whole.
fn unanchored(pattern: &str) -> String {
    let (start, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
    let is_anchored = rest.ends_with('$') && !rest.ends_with("\\$");
    let (rest, end) = if is_anchored { (&rest[..rest.len() - 1], "") } else { (rest, "(?s:.*)") };
    format!("{start}(?:{}){end}", rest.replace('/', "\\/").replace("\\\\/", "\\/"))
}
