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

use super::coerce::Schema;
use super::{Tool, Tools, openers};
use crate::template::dialect::{Dialect, ReasoningFormat, ToolCallFormat};

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

/// How the calls of a format stand to each other, around what is written for each of them.
struct Frame {
    /// Between the marker and the first call.
    open: &'static str,
    /// Between calls that share a marker; `None` where each call has its own.
    separator: Option<&'static str>,
    close: &'static str,
    /// Between spans with a marker each.
    between: &'static str,
}

fn frame(format: ToolCallFormat) -> Frame {
    use ToolCallFormat as F;
    let (open, separator, close, between) = match format {
        F::Hermes => ("\n", None, "\n</tool_call>", "\n"),
        F::QwenXml => ("\n<function=", None, "\n</tool_call>", "\n"),
        F::SeedXml => ("\n<function=", None, "\n</seed:tool_call>", "\n"),
        F::Gemma => ("call:", None, "<tool_call|>", ""),
        F::Llama3 => ("", Some("; "), "", ""),
        F::Mistral | F::Granite => ("[", Some(", "), "]", ""),
        F::MistralArgs => ("", None, "", ""),
        // Its bracket belongs to the first call, see `lark`.
        F::Pythonic => ("", Some(", "), "]", ""),
        F::Lfm2 => ("[", Some(", "), "]<|tool_call_end|>", ""),
        F::Glm => ("", None, "</tool_call>", "\n"),
        F::DeepSeekV3 => ("", Some("\n"), "<｜tool▁calls▁end｜>", ""),
        F::DeepSeekV31 => ("", Some(""), "<｜tool▁calls▁end｜>", ""),
        F::Kimi => ("", Some(""), "<|tool_calls_section_end|>", ""),
        F::FunctionTag => ("", None, "</function>", ""),
        F::ToolCallsTag => ("[", Some(", "), "]</tool_calls>", ""),
        F::CommandAction => ("[\n    ", Some(",\n    "), "\n]<|END_ACTION|>", ""),
        F::Functools => ("", Some(", "), "]", ""),
        F::Harmony => ("", None, "", ""),
    };
    Frame { open, separator, close, between }
}

/// The grammar, as Lark text.
pub fn lark(request: &Request<'_>) -> String {
    let markup = request.dialect.markup();
    let mut writer = Writer { request, markup, rules: String::new(), num_rules: 0, style: Style::Json };
    let call = writer.any_call("");
    let start = match request.format {
        ToolCallFormat::Harmony => writer.harmony(&call),
        // Text may begin with a bracket as well. A lexeme is as long as it can be, so what tells the two apart must lie
        // within one: the bracket, the name and the parenthesis.
        ToolCallFormat::Pythonic => {
            let first = writer.any_call("[");
            writer.answer(&first, &call)
        }
        _ => writer.answer(&call, &call),
    };
    format!("start: {start}\n{}", writer.rules)
}

/// How values other than JSON are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Json,
    Python,
    Gemma,
}

struct Writer<'a> {
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

    fn terminal(&mut self, body: &str) -> String {
        self.named_rule("T", "", body)
    }

    fn named_rule(&mut self, letter: &str, options: &str, body: &str) -> String {
        self.num_rules += 1;
        let name = format!("{letter}{}", self.num_rules);
        writeln!(self.rules, "{name}{options}: {body}").expect("a string takes everything");
        name
    }

    /// A literal text in which special tokens stand as such.
    fn literal(&self, text: &str) -> String {
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

    fn is_special(&self, mark: &str) -> bool {
        (self.request.special)(mark).is_some()
    }

    // -- The answer around the calls.

    fn answer(&mut self, first: &str, call: &str) -> String {
        let body = self.body(first, call);
        match self.reasoning() {
            Some(reasoning) if self.is_reasoning_open() => format!("{reasoning} {body}"),
            Some(reasoning) => format!("{reasoning}? {body}"),
            None => body,
        }
    }

    fn is_reasoning_open(&self) -> bool {
        self.request.dialect.reasoning.is_some_and(|format| format.is_open_in(self.request.prompt_tail))
    }

    /// The reasoning block, or the rest of one that the prompt has opened, with the space behind it.
    fn reasoning(&mut self) -> Option<String> {
        let format = self.request.dialect.reasoning.filter(|format| *format != ReasoningFormat::Harmony)?;
        let marks = format.marks();
        let open = if self.is_reasoning_open() { String::new() } else { self.literal(marks.opens[0]) };
        let inside = if self.is_special(marks.close) {
            let text = self.terminal("/(?s:.+)/");
            format!("{text}? {}", self.literal(marks.close))
        } else {
            let text = self.terminal(&format!("/(?s:.*){}/", escaped(marks.close)));
            self.named_rule("r", "[lazy]", &text)
        };
        // The space is the template's; without a bound a model could go on with it for ever.
        let space = self.terminal("/[ \\t\\r\\n]{1,4}/");
        Some(self.rule(&format!("{open} {inside} {space}?")))
    }

    fn body(&mut self, first: &str, call: &str) -> String {
        let frame = frame(self.request.format);
        let calls = match frame.separator {
            Some(separator) if self.request.is_parallel => {
                format!("{first} ({} {call})*", self.literal(separator))
            }
            _ => first.to_owned(),
        };
        let span = format!("{} {calls} {}", self.literal(frame.open), self.literal(frame.close));
        let span = self.rule(&span);
        let Some(opener) = openers(self.request.format).first().copied().filter(|_| !self.is_bare()) else {
            return if self.request.is_optional { self.text_or(&span) } else { span };
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

    /// Whether calls come without a marker: Llama 3 writes its own only for built-in tools.
    fn is_bare(&self) -> bool {
        matches!(self.request.format, ToolCallFormat::Llama3 | ToolCallFormat::Pythonic)
    }

    /// Text that does not begin like a call, or calls alone.
    fn text_or(&mut self, span: &str) -> String {
        let begin = match self.request.format {
            ToolCallFormat::Pythonic => "\\s*\\[\\s*[A-Za-z_][A-Za-z0-9_.\\-]*\\s*\\((?s:.*)",
            _ => "\\s*\\{\\s*\"(?s:.*)",
        };
        let mut not = format!("~/{begin}/");
        for opener in openers(self.request.format).iter().filter(|opener| !self.is_special(opener)) {
            write!(not, " & ~/(?s:.*){}(?s:.*)/", escaped(opener)).expect("a string takes everything");
        }
        let text = self.terminal(&format!("/(?s:.*)/ & {not}{}", self.not_reasoning()));
        format!("({text} | {span})")
    }

    /// Text with calls in it.
    fn text_with(&mut self, opener: &'static str, span: &str) -> String {
        let not_reasoning = self.not_reasoning();
        let (head, tail) = if self.is_special(opener) {
            let text = self.terminal(&format!("/(?s:.+)/{not_reasoning}"));
            (format!("{text}? {}", self.literal(opener)), format!("{text}?"))
        } else {
            let head = self.terminal(&format!("/(?s:.*){}/{not_reasoning}", escaped(opener)));
            let others = openers(self.request.format)
                .iter()
                .map(|other| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(other)));
            let tail = self.terminal(&format!("/(?s:.+)/{}{not_reasoning}", others.collect::<String>()));
            (self.named_rule("r", "[lazy]", &head), format!("{tail}?"))
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
        let open = marks.map(|marks| marks.opens[0]).filter(|open| !self.is_special(open));
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
        use ToolCallFormat as F;
        let name = tool.name.as_str();
        let json_name = super::json_text::quoted(name);
        let (before, after) = match self.request.format {
            F::Hermes | F::Mistral | F::Granite | F::ToolCallsTag | F::Functools => {
                (format!("{{\"name\": {json_name}, \"arguments\": "), "}")
            }
            F::Llama3 => (format!("{{\"name\": {json_name}, \"parameters\": "), "}"),
            F::CommandAction => {
                return self.numbered(
                    "{\"tool_call_id\": \"",
                    &format!("\", \"tool_name\": {json_name}, \"parameters\": "),
                    "}",
                    tool,
                );
            }
            F::Kimi => {
                let head = format!("<|tool_call_begin|>functions.{name}:");
                return self.numbered(&head, "<|tool_call_argument_begin|>", "<|tool_call_end|>", tool);
            }
            F::MistralArgs => {
                let id = self.terminal("/[a-zA-Z0-9]{9}/");
                let id = format!("({} {id})?", self.literal("[CALL_ID]"));
                let arguments = self.json_arguments(tool);
                return format!("{} {id} {} {arguments}", self.literal(name), self.literal("[ARGS]"));
            }
            F::DeepSeekV3 => (
                format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                "\n```<｜tool▁call▁end｜>",
            ),
            F::DeepSeekV31 => (format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"), "<｜tool▁call▁end｜>"),
            F::FunctionTag => (format!("{name}>"), ""),
            F::Harmony => {
                let json = format!("({} | {})", self.literal(" <|constrain|>json"), self.literal(" json"));
                let to = format!(
                    "({} | {})",
                    self.literal(&format!("<|channel|>commentary to=functions.{name}")),
                    self.literal(&format!(" to=functions.{name}<|channel|>commentary")),
                );
                let arguments = self.json_arguments(tool);
                let end = self.literal("<|call|>");
                return format!("{to} {json} {} {arguments} ({end})?", self.literal("<|message|>"));
            }
            F::QwenXml => {
                return self.tagged(tool, ">\n", ("<parameter=", ">\n", "\n</parameter>\n"), "</function>");
            }
            F::SeedXml => {
                return self.tagged(tool, ">\n", ("<parameter=", ">", "</parameter>\n"), "</function>");
            }
            F::Glm => {
                let marks = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n");
                return self.tagged(tool, "\n", marks, "");
            }
            F::Gemma => return self.object_call(tool, Style::Gemma, lead, ("{", "}")),
            F::Pythonic | F::Lfm2 => return self.object_call(tool, Style::Python, lead, ("(", ")")),
        };
        let arguments = self.json_arguments(tool);
        format!("{} {arguments} {}", self.literal(&before), self.literal(after))
    }

    /// A call with a number in front of its arguments.
    fn numbered(&mut self, before: &str, between: &str, after: &str, tool: &Tool) -> String {
        let number = self.terminal("/[0-9]{1,4}/");
        let arguments = self.json_arguments(tool);
        format!(
            "{} {number} {} {arguments} {}",
            self.literal(before),
            self.literal(between),
            self.literal(after)
        )
    }

    fn json_arguments(&mut self, tool: &Tool) -> String {
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

    fn tagged(&mut self, tool: &Tool, behind_name: &str, marks: (&str, &str, &str), end: &str) -> String {
        let (before_key, behind_key, behind_value) = marks;
        let mut call = self.literal(&format!("{}{behind_name}", tool.name));
        let root = Schema::new(&tool.parameters);
        for (key, is_required) in members(root) {
            let value = self.tagged_value(root.property(&key), behind_value);
            let head = self.literal(&format!("{before_key}{key}{behind_key}"));
            let member = self.rule(&format!("{head} {value}"));
            write!(call, " {member}{}", if is_required { "" } else { "?" })
                .expect("a string takes everything");
        }
        format!("{call} {}", self.literal(end))
    }

    /// A plain value with the mark that ends it.
    fn tagged_value(&mut self, schema: Schema<'_>, end: &str) -> String {
        let types = schema.types();
        if types.string || types.is_unknown() {
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
        let mark = end.trim();
        if self.is_special(mark) {
            let text = self.terminal(&format!("/(?s:.{{{},{max}}})/{pattern}", min.max(1)));
            return format!("{text}{} {}", if min == 0 { "?" } else { "" }, self.literal(end));
        }
        let text = format!("/(?s:.{{{min},{max}}})/ & ~/(?s:.*){}(?s:.*)/{pattern}", escaped(mark));
        let text = self.terminal(&text);
        self.terminal(&format!("{text} {}", quoted(end)))
    }

    // -- Arguments in Gemma's and Python's notation.

    fn object_call(&mut self, tool: &Tool, style: Style, lead: &str, (open, close): (&str, &str)) -> String {
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
