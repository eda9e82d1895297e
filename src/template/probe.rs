//! Renders a few conversations with a template to find out which of their parts it shows.
//!
//! A call format is claimed on evidence: signs of it in the template, and where the template prints the calls of an earlier
//! answer, a call that parses back to the same call. Where it prints none, signs have to do. A format that shares a marker with
//! another, or a template that only speaks of one, is no evidence.

use serde_json::{Value, json};

use super::output::parse_answer;
use super::{
    Accommodation, CallIds, ChatTemplate, Content, Conversation, DateTime, ImageForm, ImageMarkup, Message,
    OutputMarkup, ReasoningFormat, RenderOptions, Role, SpecialTokens, TemplateError, ToolCall,
    ToolCallFormat, text_part,
};

/// The text in a template that a format is recognised by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sign {
    pub text: &'static str,
    /// Of the template, from 1; 0 where only what it prints has the text.
    pub line: usize,
}

/// Why a call format is taken to be the template's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallEvidence {
    pub sign: Sign,
    /// A call that it prints parses back; else it prints none.
    pub is_printed: bool,
}

/// A template's treatment of system messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SystemMessages {
    #[default]
    Printed,
    /// Left out without an error.
    Dropped,
    Refused,
}

/// The parts of a conversation that a template shows, and the formats it shows them in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shown {
    /// The markup of answers, as far as the template shows it.
    pub output_markup: OutputMarkup,
    pub reasoning: Option<Sign>,
    pub calls: Option<CallEvidence>,
    /// It tells the model of the tools of a conversation.
    pub tools: bool,
    pub system: SystemMessages,
    /// System messages behind the first message.
    pub later_system: SystemMessages,
    /// A developer's message at the start is printed as the system's or not at all, or the template does not know the role.
    pub developer_is_system: bool,
    /// It prints the texts of lists of parts, and none that is the whole content.
    pub wants_parts: bool,
    pub call_ids: CallIds,
}

const TOOL: &str = "probe_harbour";
const SYSTEM: &str = "Speak like a lighthouse keeper";
const LATER_SYSTEM: &str = "Now speak like a gull";
const CALL_ID: &str = "abcdefgh1";

impl Shown {
    pub fn of(template: &ChatTemplate) -> Self {
        let source = without_comments(template.source());
        let (reasoning, reasoning_sign) = reasoning_in(&source).unzip();
        let asked = conversation([Message::user("Where is a reef")], true);
        let prompt = rendered(template, &asked, true);
        let tools = prompt.as_ref().map_or_else(|_| template.reads("tools"), |text| text.contains(TOOL));
        let turns: Vec<PrintedTurn> = printed_calls(template, &asked, reasoning);
        let evidence = call_format(reasoning, &source, prompt.as_deref().unwrap_or_default(), &turns);
        Self {
            output_markup: OutputMarkup { reasoning, tool_calls: evidence.map(|(format, _)| format) },
            reasoning: reasoning_sign,
            calls: evidence.map(|(_, evidence)| evidence),
            tools,
            system: system_messages(template),
            later_system: later_system_messages(template),
            developer_is_system: developer_is_system(template),
            wants_parts: wants_parts(template),
            call_ids: call_ids(template, evidence.map(|(format, _)| format)),
        }
    }

    /// Returns the changes that conversations need so that this template shows all of them.
    pub fn accommodation(&self) -> Accommodation {
        Accommodation {
            merges_system: self.system != SystemMessages::Printed,
            merges_later_system: self.later_system != SystemMessages::Printed,
            spells_tools: !self.tools || self.output_markup.tool_calls.is_none(),
            merges_developer: self.developer_is_system,
            lists_parts: self.wants_parts,
            call_ids: self.call_ids,
        }
    }
}

impl OutputMarkup {
    /// Detects the formats in a chat template's source; none if the source does not compile.
    pub fn detect(template_source: &str) -> Self {
        let template = ChatTemplate::new(template_source, SpecialTokens::default());
        template.map_or_else(|_| Self::default(), |template| Shown::of(&template).output_markup)
    }
}

/// An answer alone, as history prints it, and the end of the prompt that it stands behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrintedTurn {
    pub tail: String,
    pub turn: String,
}

impl PrintedTurn {
    /// From renderings: of the conversation so far, of the prompt that asks for the answer, and of both with the answer.
    /// `None` when the answer is not printed.
    pub fn find(plain: &str, prompt: &str, full: &str, markup: &[&str]) -> Option<Self> {
        if let Some(turn) = full.strip_prefix(prompt) {
            return Some(Self { tail: prompt.to_owned(), turn: turn.to_owned() });
        }
        // The prompt opens reasoning that history does not print, or history closes turns in another way.
        let pairs = plain.chars().zip(full.chars());
        let common: usize = pairs.take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
        let turn = full.get(common..)?;
        let header = prompt.get(common..).unwrap_or_default();
        let open = markup.iter().filter_map(|mark| header.find(mark)).min();
        let header = header[..open.unwrap_or(header.len())].trim_end();
        Some(Self { tail: header.to_owned(), turn: turn.strip_prefix(header).unwrap_or(turn).to_owned() })
    }
}

fn conversation(messages: impl IntoIterator<Item = Message>, has_tools: bool) -> Conversation {
    let parameters = json!({"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "Which"}, "days": {"type": "integer", "description": "How many"}}});
    let function = json!({"name": TOOL, "description": "Tells of a harbour", "parameters": parameters});
    let tools = has_tools.then(|| json!({"type": "function", "function": function}));
    Conversation {
        messages: messages.into_iter().collect(),
        tools: tools.into_iter().collect(),
        ..Conversation::default()
    }
}

fn arguments() -> Value {
    json!({"city": "Bergen", "days": 3})
}

fn rendered(template: &ChatTemplate, asked: &Conversation, is_prompt: bool) -> Result<String, TemplateError> {
    let now = DateTime { year: 2026, month: 3, day: 14, hour: 9, minute: 26, second: 53 };
    template
        .render(asked, &RenderOptions { add_generation_prompt: is_prompt, now, ..RenderOptions::default() })
}

/// The turns that the template prints for an answer with a call, which has no content or an empty one.
fn printed_calls(
    template: &ChatTemplate,
    asked: &Conversation,
    reasoning: Option<ReasoningFormat>,
) -> Vec<PrintedTurn> {
    // Markers that may stand at the end of a prompt but not in history.
    let openings = OutputMarkup { reasoning, tool_calls: None }.markers();
    let (Ok(plain), Ok(prompt)) = (rendered(template, asked, false), rendered(template, asked, true)) else {
        return Vec::new();
    };
    let turn = |content: Option<Content>| {
        let mut called = asked.clone();
        called.messages.push(Message { content, ..call(CALL_ID) });
        let full = rendered(template, &called, false).ok()?;
        PrintedTurn::find(&plain, &prompt, &full, &openings).filter(|turn| turn.turn.contains(TOOL))
    };
    [None, Some(Content::Text(String::new()))].into_iter().filter_map(turn).collect()
}

fn call(id: &str) -> Message {
    let call = ToolCall { id: Some(id.to_owned()), name: TOOL.to_owned(), arguments: arguments() };
    Message { tool_calls: vec![call], ..Message::assistant("") }
}

/// Tries ids of calls and results.
fn call_ids(template: &ChatTemplate, format: Option<ToolCallFormat>) -> CallIds {
    if format == Some(ToolCallFormat::Kimi) {
        return CallIds::Numbered;
    }
    let takes = |id: &str| {
        let result = Message { tool_call_id: Some(id.to_owned()), ..Message::new(Role::Tool, "Yes") };
        let asked = conversation([Message::user("Where is a reef"), call(id), result], true);
        rendered(template, &asked, true).is_ok()
    };
    if !takes("call_0123456789") && takes(CALL_ID) { CallIds::Nine } else { CallIds::Any }
}

/// The first format with signs whose call parses back, or with signs where no call is printed.
fn call_format(
    reasoning: Option<ReasoningFormat>,
    source: &str,
    prompt: &str,
    turns: &[PrintedTurn],
) -> Option<(ToolCallFormat, CallEvidence)> {
    let tools = conversation([], true).tools;
    let reads_back = |format: ToolCallFormat| {
        turns.iter().any(|PrintedTurn { tail, turn }| {
            let output_markup = OutputMarkup { reasoning, tool_calls: Some(format) };
            let answer = parse_answer(&output_markup, &tools, tail, turn, false);
            let calls: Vec<(&str, Value)> = answer
                .calls
                .iter()
                .map(|call| (&*call.name, serde_json::from_str(&call.arguments).unwrap_or_default()))
                .collect();
            calls == [(TOOL, arguments())]
        })
    };
    let is_printed = !turns.is_empty();
    let printed = turns.iter().map(|turn| turn.turn.as_str()).chain([prompt]).collect::<Vec<_>>().join("\n");
    ToolCallFormat::ALL.iter().copied().find_map(|format| {
        let signs = format.row().signs;
        let in_source = sign_in(signs, source);
        let sign = in_source.or_else(|| sign_in(signs, &printed).filter(|_| is_printed))?;
        let is_shown = !is_printed || reads_back(format);
        is_shown.then(|| (format, CallEvidence { sign: Sign::find(sign, source), is_printed }))
    })
}

fn reasoning_in(source: &str) -> Option<(ReasoningFormat, Sign)> {
    ReasoningFormat::ALL.iter().copied().find_map(|format| {
        let sign = sign_in(format.row().signs, source)?;
        Some((format, Sign::find(sign, source)))
    })
}

/// The first text of the first set whose texts are all there.
fn sign_in(signs: &[&[&'static str]], text: &str) -> Option<&'static str> {
    signs.iter().find(|set| set.iter().all(|sign| text.contains(sign)))?.first().copied()
}

/// Tries a system message in a conversation that the template accepts without it.
fn system_messages(template: &ChatTemplate) -> SystemMessages {
    let question = || Message::user("Where is a reef");
    let with_tools = [false, true].into_iter();
    let mut takes =
        with_tools.filter(|&tools| rendered(template, &conversation([question()], tools), true).is_ok());
    let Some(has_tools) = takes.next() else { return SystemMessages::Printed };
    shows(template, &conversation([Message::system(SYSTEM), question()], has_tools), SYSTEM)
}

/// Returns the template's treatment of the system message of this text in a conversation.
fn shows(template: &ChatTemplate, asked: &Conversation, system: &str) -> SystemMessages {
    match rendered(template, asked, true) {
        Ok(text) if text.contains(system) => SystemMessages::Printed,
        Ok(_) => SystemMessages::Dropped,
        Err(_) => SystemMessages::Refused,
    }
}

fn developer_is_system(template: &ChatTemplate) -> bool {
    let opened = |role: Role| {
        let opening = [Message::new(role, SYSTEM), Message::user("Where is a reef")];
        rendered(template, &conversation(opening, false), true).ok()
    };
    let developer = opened(Role::Developer);
    let is_printed = developer.as_ref().is_some_and(|text| text.contains(SYSTEM));
    !is_printed || !template.has_literal("developer") || developer == opened(Role::System)
}

/// Tries system messages behind a question and behind an answer, in a conversation that the template accepts without them.
fn later_system_messages(template: &ChatTemplate) -> SystemMessages {
    let question = || Message::user("Where is a reef");
    let asked = vec![Message::system(SYSTEM), question(), Message::assistant("Ahead"), question()];
    if rendered(template, &conversation(asked.clone(), false), true).is_err() {
        return SystemMessages::Printed;
    }
    let tried = [2, 3, 4].map(|at| {
        let mut messages = asked.clone();
        messages.insert(at, Message::system(LATER_SYSTEM));
        shows(template, &conversation(messages, false), LATER_SYSTEM)
    });
    tried.into_iter().rfind(|system| *system != SystemMessages::Printed).unwrap_or_default()
}

fn wants_parts(template: &ChatTemplate) -> bool {
    let shows = |content: Content| {
        let asked = conversation([Message { content: Some(content), ..Message::user("") }], false);
        rendered(template, &asked, true).is_ok_and(|text| text.contains("Where is a reef"))
    };
    let question = "Where is a reef";
    !shows(Content::Text(question.to_owned())) && shows(Content::Parts(vec![text_part(question)]))
}

impl ImageMarkup {
    /// Finds out how `template` takes images.
    pub fn of(template: &ChatTemplate, printed: &str, placeholder: &str) -> Self {
        let (in_user, in_tool) = image_forms(template, printed);
        Self { in_user, in_tool, ..Self::of_text(printed, placeholder) }
    }
}

/// Tries images in a user message, and in a tool's result: the forms of which the template prints `printed` once, between the texts
/// around it. The form in results is `None` if images have to follow them in a user message.
fn image_forms(template: &ChatTemplate, printed: &str) -> (ImageForm, Option<ImageForm>) {
    let said = |form: ImageForm| {
        let texts = ["Where is a reef", "Where is a gull"].map(text_part);
        let [before, after] = texts;
        Some(Content::Parts(vec![before, form.part(), after]))
    };
    let prints = |messages: Vec<Message>, has_tools: bool| {
        let text = rendered(template, &conversation(messages, has_tools), true).unwrap_or_default();
        let between = text.split_once("a reef").and_then(|(_, rest)| rest.split_once("Where is a gull"));
        between.is_some_and(|(between, _)| between.contains(printed)) && text.matches(printed).count() == 1
    };
    let asked = |form| vec![Message { content: said(form), ..Message::user("") }];
    let parts = [ImageForm::Part, ImageForm::UrlPart].into_iter();
    let in_user = parts.clone().find(|&form| prints(asked(form), false)).unwrap_or(ImageForm::Text);
    let called = |content: Option<Content>| {
        let tool_call_id = Some(CALL_ID.to_owned());
        let result = Message { content, tool_call_id, ..Message::new(Role::Tool, "") };
        vec![Message::user("Where"), call(CALL_ID), result]
    };
    let in_tool = parts.clone().find(|&form| prints(called(said(form)), true));
    // Templates whose roles take turns refuse a question behind a result.
    let follows = || {
        let mut messages = called(Some(Content::Text("Yes".to_owned())));
        messages.push(Message::user("Where is a reef"));
        rendered(template, &conversation(messages, true), true).is_ok()
    };
    (in_user, in_tool.or_else(|| (!follows()).then_some(ImageForm::Text)))
}

/// Without Jinja's comments, which may speak of other formats; their line breaks stay.
fn without_comments(source: &str) -> String {
    let mut rest = source;
    let mut text = String::with_capacity(source.len());
    while let Some((before, comment)) = rest.split_once("{#") {
        text.push_str(before);
        let (comment, after) = comment.split_once("#}").unwrap_or((comment, ""));
        text.extend(comment.chars().filter(|&c| c == '\n'));
        rest = after;
    }
    text + rest
}

impl Sign {
    fn find(text: &'static str, source: &str) -> Self {
        let line = source.find(text).map_or(0, |at| source[..at].matches('\n').count() + 1);
        Self { text, line }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(source: &str) -> Shown {
        Shown::of(&ChatTemplate::new(source, SpecialTokens::default()).expect("a template"))
    }

    #[test]
    fn signs_stand_where_the_template_has_them() {
        let found = shown("{# <tool_call>\n <think> #}{{ tools }}\n{{ '</think>' }}\n<tool_call> arguments");
        assert_eq!(found.reasoning, Some(Sign { text: "</think>", line: 3 }));
        let sign = Sign { text: "<tool_call>", line: 4 };
        assert_eq!(found.calls, Some(CallEvidence { sign, is_printed: false }));
        let found = shown("{{ messages }}");
        assert_eq!((found.reasoning, found.calls), (None, None));
    }

    const CHATML: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    #[test]
    fn a_format_is_claimed_only_by_a_call_that_reads_back() {
        let hermes = "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>";
        let found = shown(&CHATML.replace("CALL", hermes));
        assert_eq!(found.output_markup.tool_calls, Some(ToolCallFormat::Hermes));
        assert!(found.tools && found.calls.is_some_and(|calls| calls.is_printed));
        // The same markers around something else.
        let other = "<tool_call>arguments {{ c.function.name }} tools</tool_call>";
        let found = shown(&CHATML.replace("CALL", other));
        assert_eq!((found.output_markup.tool_calls, found.tools), (None, true));
        assert!(found.accommodation().spells_tools);
    }

    #[test]
    fn what_becomes_of_system_messages_is_found_out() {
        assert_eq!(shown(CHATML).system, SystemMessages::Printed);
        let dropping = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}");
        assert_eq!(shown(&dropping).system, SystemMessages::Dropped);
        let refusal = "in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}";
        assert_eq!(shown(&CHATML.replace("in messages %}", refusal)).system, SystemMessages::Refused);
    }

    #[test]
    fn what_becomes_of_later_system_messages_is_found_out() {
        let found = shown(CHATML);
        assert_eq!(found.later_system, SystemMessages::Printed);
        assert!(!found.accommodation().merges_later_system);
        for (body, expected) in [
            (
                "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}",
                SystemMessages::Refused,
            ),
            (
                "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}",
                SystemMessages::Dropped,
            ),
        ] {
            let found = shown(&CHATML.replace("in messages %}", &format!("in messages %}}{body}")));
            assert_eq!((found.system, found.later_system), (SystemMessages::Printed, expected));
            assert!(found.accommodation().merges_later_system && !found.accommodation().merges_system);
        }
    }
}
