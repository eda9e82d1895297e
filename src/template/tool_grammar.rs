//! Grammars for answers with tool calls: the calls, and the reasoning and text around them.
//!
//! The parsers of `tool_call` take apart whatever such a grammar lets through into calls of the given tools, with arguments
//! that parse. `tool_call/arguments.rs` says how far arguments follow a tool's schema.

use std::fmt::Write as _;

use crate::reasoning::ReasoningFormat;
use crate::tool_call::writer::{Writer, escaped, quoted};
use crate::tool_call::{Messages, ToolCallFormat, ToolCallSpec, ToolDefinition, ToolDefinitions};

/// The tools, the prompt and the freedoms that a grammar is written for.
pub struct GrammarRequest<'a> {
    pub reasoning: Option<ReasoningFormat>,
    pub format: ToolCallFormat,
    pub tools: &'a ToolDefinitions,
    /// True if an answer without calls is possible, and text around calls.
    pub is_optional: bool,
    /// True if calls are impossible; then `is_optional` is set.
    pub is_none: bool,
    pub is_parallel: bool,
    pub prompt_tail: &'a str,
}

/// Returns the grammar, as Lark text.
pub fn lark(request: &GrammarRequest<'_>, writer: Writer<'_>) -> String {
    let mut grammar = AnswerGrammar { request, writer };
    let call = if request.is_none { String::new() } else { grammar.any_call("") };
    let ToolCallSpec { messages, frame, .. } = grammar.format();
    let start = match (messages, frame.lead) {
        _ if request.format == ToolCallFormat::Harmony => grammar.harmony(&call),
        (Some(messages), _) => grammar.messages(messages, &call),
        (None, lead) if request.is_none || lead.is_empty() => grammar.answer(&call, &call),
        (None, lead) => {
            let first = grammar.any_call(lead);
            grammar.answer(&first, &call)
        }
    };
    format!("start: {start}\n{}", grammar.writer.rules)
}

/// Returns the tools whose schema has a keyword that no grammar of the format can express, by name, and that keyword.
pub fn unwritable(
    format: ToolCallFormat,
    tools: &ToolDefinitions,
    writer: &mut Writer<'_>,
) -> Vec<(String, String)> {
    let refused = |tool: &ToolDefinition| {
        (format.row().call)(format.row(), writer, tool, "");
        Some((tool.name.clone(), writer.refused.take()?))
    };
    tools.iter().filter_map(refused).collect()
}

struct AnswerGrammar<'a> {
    request: &'a GrammarRequest<'a>,
    writer: Writer<'a>,
}

impl AnswerGrammar<'_> {
    fn answer(&mut self, first: &str, call: &str) -> String {
        let body = self.body(first, call);
        let whole = match self.reasoning() {
            Some(reasoning) if self.is_reasoning_open() => format!("{reasoning} {body}"),
            Some(reasoning) => format!("({reasoning}{})? {body}", self.stray_end()),
            None => return body,
        };
        match self.calls_in_reasoning() {
            Some(calls) => format!("({whole} | {calls})"),
            None => whole,
        }
    }

    fn is_reasoning_open(&self) -> bool {
        self.request.reasoning.is_some_and(|format| format.is_open_in(self.request.prompt_tail))
    }

    /// The end of reasoning that nothing has opened, which some models (MiniMax M3) write where they do not reason. As ordinary text
    /// it would be text of the answer.
    fn stray_end(&mut self) -> String {
        let close = self.request.reasoning.map_or("", |format| format.row().close);
        let is_token = !close.is_empty() && self.writer.is_special(close);
        if is_token {
            format!(" | {} {}", self.writer.literal(close), self.writer.space())
        } else {
            String::new()
        }
    }

    /// The reasoning block, or the rest of one that the prompt has opened, with the space behind it.
    fn reasoning(&mut self) -> Option<String> {
        let marks = self.request.reasoning?.row();
        let opening = *marks.opens.first().filter(|_| marks.closing.is_some())?;
        let open = if self.is_reasoning_open() { String::new() } else { self.writer.literal(opening) };
        let inside = match self.writer.before_special(marks.close) {
            Some(_) => self.writer.text_to(marks.close),
            None => {
                let text = self.writer.terminal(&format!("/(?s:.*){}/", escaped(marks.close)));
                self.writer.named_rule("r", "[lazy]", &text)
            }
        };
        // The space is the template's; without a bound a model could go on with it for ever.
        let space = self.writer.terminal("/[ \\t\\r\\n]{1,4}/");
        Some(self.writer.rule(&format!("{open} {inside} {space}?")))
    }

    /// Reasoning that calls end before it is closed, as the reader takes it: what they say is not enforced.
    fn calls_in_reasoning(&mut self) -> Option<String> {
        let marks = self.request.reasoning?.row();
        let ToolCallSpec { end, openers, .. } = self.format();
        let (opening, call) = (*marks.opens.first()?, *openers.first()?);
        let may_call = self.request.is_optional && !self.request.is_none;
        let is_looked_for = may_call && !end.is_empty() && marks.closing.is_some();
        if !is_looked_for {
            return None;
        }
        let open = if self.is_reasoning_open() { String::new() } else { self.writer.literal(opening) };
        let tokens = [call, end, marks.close].map(|mark| self.writer.is_special(mark));
        let space = self.writer.terminal("/[ \\t\\r\\n]{1,4}/");
        let inside = match tokens {
            [true, true, true] => {
                let text = self.writer.terminal("/(?s:.+)/");
                let marks = self.request.format.markers().filter(|mark| ![call, end].contains(mark));
                let inside = self.text_around(&text, marks);
                format!("({text}? {} {inside} {})+", self.writer.literal(call), self.writer.literal(end))
            }
            // A lexeme is as long as it can be: the space behind it is its own.
            [false, false, _] => {
                let [call, end, close] = [call, end, marks.close].map(escaped);
                let inside = format!("/(?s:.*){call}(?s:.*){end}[ \\t\\r\\n]{{0,4}}/");
                self.writer.terminal(&format!("{inside} & ~/(?s:.*){close}(?s:.*)/"))
            }
            _ => return None,
        };
        Some(self.writer.rule(&format!("{open} {inside} {space}?")))
    }

    fn format(&self) -> &'static ToolCallSpec {
        self.request.format.row()
    }

    fn body(&mut self, first: &str, call: &str) -> String {
        let ToolCallSpec { frame, openers, bare_call, .. } = self.format();
        let calls = match frame.separator {
            Some(separator) if self.request.is_parallel => {
                format!("{first} ({} {call})*", self.writer.markup(separator))
            }
            _ => first.to_owned(),
        };
        let span = format!("{} {calls} {}", self.writer.markup(frame.open), self.writer.markup(frame.close));
        let span = self.writer.rule(&span);
        let opener = match (bare_call, openers.first()) {
            (None, Some(opener)) => *opener,
            _ if self.request.is_optional => return self.text_or(&span),
            _ => return span,
        };
        if self.request.is_optional {
            return self.text_with(opener, &span);
        }
        let first = format!("{} {span}", self.writer.literal(opener));
        if self.request.is_parallel && frame.separator.is_none() {
            return format!("{first} ({} {first})*", self.writer.markup(frame.between));
        }
        first
    }

    /// Text that does not begin like a call, or calls alone.
    fn text_or(&mut self, span: &str) -> String {
        let ToolCallSpec { bare_call, openers, .. } = self.format();
        let mut not = format!("~/{}/", bare_call.unwrap_or_default());
        for opener in openers.iter().filter(|opener| !self.writer.is_special(opener)) {
            write!(not, " & ~/(?s:.*){}(?s:.*)/", escaped(opener)).expect("a string takes everything");
        }
        let text = self.writer.terminal(&format!("/(?s:.*)/ & {not}{}", self.not_reasoning()));
        if self.request.is_none { text } else { format!("({text} | {span})") }
    }

    /// Text with calls in it.
    fn text_with(&mut self, opener: &'static str, span: &str) -> String {
        let not_reasoning = self.not_reasoning();
        let (head, tail) = match self.writer.before_special(opener) {
            Some("") => {
                let text = self.writer.terminal(&format!("/(?s:.+)/{not_reasoning}"));
                let text = self.text_around(&text, self.free_markers(opener));
                (format!("{text} {}", self.writer.literal(opener)), text)
            }
            Some(before) => {
                let tail = self.writer.terminal(&format!("/(?s:.+)/{not_reasoning}"));
                let head = self.writer.terminal(&format!("/(?s:.*){}/{not_reasoning}", escaped(before)));
                (format!("{head} {}", self.writer.literal(&opener[before.len()..])), format!("{tail}?"))
            }
            None => {
                let head = self.writer.terminal(&format!("/(?s:.*){}/{not_reasoning}", escaped(opener)));
                let others = self
                    .format()
                    .openers
                    .iter()
                    .map(|other| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(other)));
                let tail =
                    self.writer.terminal(&format!("/(?s:.+)/{}{not_reasoning}", others.collect::<String>()));
                (self.writer.named_rule("r", "[lazy]", &head), format!("{tail}?"))
            }
        };
        let tail = self.writer.rule(&tail);
        match self.request.is_parallel {
            _ if self.request.is_none => tail,
            true => format!("({head} {span})* {tail}"),
            false => format!("({tail} | {head} {span})"),
        }
    }

    /// Returns text, perhaps none, in which these markers may stand where they are special tokens.
    fn text_around(&self, text: &str, markers: impl Iterator<Item = &'static str>) -> String {
        let markers = markers.filter(|mark| self.writer.is_special(mark));
        let tokens = markers.map(|mark| self.writer.literal(mark)).collect::<Vec<_>>().join(" | ");
        if tokens.is_empty() { format!("{text}?") } else { format!("{text}? (({tokens}) {text}?)*") }
    }

    /// The markers that text may hold: those that are dropped, and those of calls that no grammar writes, of which there may be
    /// several.
    fn free_markers(&self, opener: &'static str) -> impl Iterator<Item = &'static str> + use<> {
        let ToolCallSpec { unwritten_openers, dropped, marks, .. } = self.format();
        let is_free = self.request.is_parallel && !self.request.is_none && !unwritten_openers.is_empty();
        let unwritten = if is_free { [*unwritten_openers, *marks] } else { [&[][..]; 2] };
        let of_reasoning = self.request.reasoning.map_or(&[][..], |format| format.row().dropped);
        let all = [of_reasoning, dropped].into_iter().chain(unwritten).flatten().copied();
        all.filter(move |mark| !opener.starts_with(mark))
    }

    /// Excludes text that begins with reasoning, which has a rule of its own.
    fn not_reasoning(&self) -> String {
        let marks = self.request.reasoning.map(ReasoningFormat::row);
        let open = marks.and_then(|marks| marks.opens.first()).filter(|open| !self.writer.is_special(open));
        open.map_or_else(String::new, |open| format!(" & ~/\\s*{}(?s:.*)/", escaped(open)))
    }

    fn harmony(&mut self, call: &str) -> String {
        let next = self.harmony_text("<|end|><|start|>assistant");
        let message = |grammar: &Self, head: &str| format!("{} {next}", grammar.writer.literal(head));
        let analysis = message(self, "<|channel|>analysis<|message|>");
        let preamble = message(self, "<|channel|>commentary<|message|>");
        let is_open = self.request.prompt_tail.trim_end().ends_with("<|message|>");
        let rest = if is_open { next.as_str() } else { "" };
        if !self.request.is_optional {
            return format!("{rest} ({analysis})* {call}");
        }
        let last = self.harmony_text("<|return|>");
        let open_end = self.writer.terminal("/(?s:.+)/ & ~/(?s:.*)<\\|(?s:.*)/");
        let head = self.writer.literal("<|channel|>final<|message|>");
        let call = if self.request.is_none { String::new() } else { format!("{call} | ") };
        format!("{rest} ({analysis} | {preamble})* ({call}{head} ({last} | {open_end})?)")
    }

    /// An answer of texts with markers, then calls or a text that nothing needs to end. The prompt may have begun a text.
    fn messages(&mut self, messages: &Messages, call: &str) -> String {
        let tail = self.request.prompt_tail;
        let begun = messages.texts.iter().find(|(head, _)| tail.ends_with(head));
        // Where markers are tokens, a model may go on to another text and leave out the end of the one that the prompt has begun.
        let begun = begun.map(|(head, close)| {
            let mark = if self.writer.is_special(head) { "?" } else { "" };
            format!("({}){mark}", self.writer.text_to(close))
        });
        let whole: Vec<String> = messages
            .texts
            .iter()
            .map(|(head, close)| format!("{} {}", self.writer.literal(head), self.writer.text_to(close)))
            .collect();
        let whole = self.writer.rule(&whole.join(" | "));
        let ToolCallSpec { frame, .. } = self.format();
        let more = match (self.request.is_parallel, frame.separator) {
            (true, Some(separator)) => format!("({} {call})*", self.writer.literal(separator)),
            _ => String::new(),
        };
        let calls =
            format!("{} {call} {more} {}", self.writer.literal(frame.open), self.writer.literal(frame.close));
        let [end, calls_end] = [messages.end, messages.calls_end].map(|end| match end {
            "" => String::new(),
            end => format!("({})?", self.writer.literal(end)),
        });
        let calls = format!("{calls} {calls_end}");
        let first = begun.clone().unwrap_or_default();
        if !self.request.is_optional {
            return format!("{first} {whole}* {calls}");
        }
        let heads: Vec<String> = messages.texts.iter().map(|(head, _)| self.writer.literal(head)).collect();
        let open_end = self.open_text(messages);
        let last = format!("({}) {open_end}? {end}", heads.join(" | "));
        let calls = if self.request.is_none { String::new() } else { format!("{calls} | ") };
        let rest = format!("{first} {whole}* ({calls}{last})?");
        match begun {
            Some(_) => format!("({rest} | {open_end}? {end})"),
            None => format!("({rest})"),
        }
    }

    /// Text that none of the messages' markers is in.
    fn open_text(&mut self, messages: &Messages) -> String {
        let marks = messages.texts.iter().map(|(_, close)| *close).chain([messages.end]);
        let marks: Vec<&str> = marks.filter(|mark| !mark.is_empty()).collect();
        if marks.iter().all(|mark| self.writer.is_special(mark)) {
            return self.writer.terminal("/(?s:.+)/");
        }
        let not: String = marks.iter().map(|mark| format!(" & ~/(?s:.*){}(?s:.*)/", escaped(mark))).collect();
        self.writer.terminal(&format!("/(?s:.+)/{not}"))
    }

    /// The text of a message and what follows it.
    fn harmony_text(&mut self, end: &str) -> String {
        if self.writer.is_special("<|end|>") {
            let text = self.writer.terminal("/(?s:.+)/");
            return self.writer.rule(&format!("{text}? {}", self.writer.literal(end)));
        }
        let text = self.writer.terminal("/(?s:.*)/ & ~/(?s:.*)<\\|(?s:.*)/");
        self.writer.terminal(&format!("{text} {}", quoted(end)))
    }

    /// A call of any of the tools; `lead` stands in front of its name.
    fn any_call(&mut self, lead: &str) -> String {
        let calls: Vec<String> = self.request.tools.iter().map(|tool| self.call(tool, lead)).collect();
        self.writer.rule(&calls.join(" | "))
    }

    fn call(&mut self, tool: &ToolDefinition, lead: &str) -> String {
        (self.format().call)(self.format(), &mut self.writer, tool, lead)
    }
}
