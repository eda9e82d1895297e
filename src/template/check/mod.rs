//! Checks whether a chat template does what chat, tools and the cache need of it: conversations of every shape are rendered, encoded
//! and judged, one finding per check. Needs a template; a tokenizer makes the checks exact, weights are not looked at.
//!
//! A check fails where a prompt would be wrong or silently lose something; it warns if a template
//! refuses a conversation, or if something costs time. What llmctl does about a template's ways (a role it maps, answers
//! that go back as ids) counts as done. Pure: knows no files and prints nothing.
//!
//! `matrix` is the conversations, `turns` the beginning and end of turns, `shapes` what is printed at all, `calls` tool calls
//! there and back, `resume` whether one prompt begins with the one before it.

mod calls;
mod matrix;
mod resume;
mod shapes;
mod turns;

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::{
    Accommodation, ChatTemplate, Conversation, DateTime, Message, OutputMarkup, ReasoningFormat,
    RenderOptions, Shown, SpecialTokens, THINKING_SWITCHES, TemplateError, ToolCallFormat,
};

/// The tokenizer of the model whose template is checked.
pub trait CheckTokenizer {
    /// Returns the ids of a rendering, or of its rest if it does not stand at the start of a prompt.
    ///
    /// # Errors
    /// Why the text cannot be encoded.
    fn encode(&self, text: &str, is_start: bool) -> Result<Vec<u32>, String>;
    /// Returns the bytes that an id stands for.
    fn bytes(&self, id: u32) -> Option<Vec<u8>>;
    /// Returns the name of an id in the vocabulary.
    fn name(&self, id: u32) -> Option<&str>;
    fn bos(&self) -> Option<u32>;
    /// True if the tokenizer itself puts the beginning-of-sequence token in front of a prompt.
    fn adds_bos(&self) -> bool;
    fn specials(&self) -> SpecialTokens;
}

/// Renders a conversation as a prompt.
pub type RenderPrompt<'a> = dyn Fn(&Conversation) -> Result<String, CheckError> + 'a;
/// Encodes a text; true if the text starts the prompt.
pub type EncodeText<'a> = dyn Fn(&str, bool) -> Result<Vec<u32>, CheckError> + 'a;

/// The prompts of one session, which holds earlier answers as the ids that were generated.
pub trait SessionPrompts {
    /// Returns the ids of the prompt for `asked`, with the recorded answers put back.
    ///
    /// # Errors
    /// Those of `render` and `encode`.
    fn prompt(
        &mut self,
        asked: &Conversation,
        render: &RenderPrompt<'_>,
        encode: &EncodeText<'_>,
    ) -> Result<Vec<u32>, CheckError>;
    /// Records the answer to the last prompt.
    fn record(&mut self, before: &[Message], answer: &Message, generated: &[u32]);
}

/// The template under test, with what is known of its model.
pub struct Subject {
    template: ChatTemplate,
    /// The parts of conversations that the template shows.
    shown: Shown,
    /// The formats of the template's answers.
    output_markup: OutputMarkup,
    /// The changes to conversations so that the template shows all of them.
    accommodation: Accommodation,
    tokenizer: Option<Arc<dyn CheckTokenizer>>,
    /// Starts a session.
    session: fn() -> Box<dyn SessionPrompts>,
    end_of_generation: Vec<u32>,
    /// The text of the beginning-of-sequence token.
    bos: Option<String>,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckVerdict {
    /// There was nothing to check, or no tokenizer to check with.
    Skipped,
    Ok,
    Warning,
    Fail,
}

impl CheckVerdict {
    pub fn word(self) -> &'static str {
        ["skipped", "ok", "warning", "fail"][self as usize]
    }
}

/// One check.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    pub name: &'static str,
    pub verdict: CheckVerdict,
    /// One line.
    pub reason: String,
    /// More, for programs; null where there is no more.
    pub detail: Value,
}

/// The outcome of a check with its reason.
#[derive(Debug, Clone, PartialEq)]
struct Finding {
    verdict: CheckVerdict,
    reason: String,
    detail: Value,
}

impl Finding {
    fn new(verdict: CheckVerdict, reason: impl Into<String>) -> Self {
        Self { verdict, reason: reason.into(), detail: Value::Null }
    }

    fn ok(reason: impl Into<String>) -> Self {
        Self::new(CheckVerdict::Ok, reason)
    }

    fn warning(reason: impl Into<String>) -> Self {
        Self::new(CheckVerdict::Warning, reason)
    }

    fn fail(reason: impl Into<String>) -> Self {
        Self::new(CheckVerdict::Fail, reason)
    }

    fn skipped(reason: impl Into<String>) -> Self {
        Self::new(CheckVerdict::Skipped, reason)
    }

    fn with(self, detail: Value) -> Self {
        Self { detail, ..self }
    }
}

/// Why a check came to no finding of its own.
#[derive(Debug)]
pub enum CheckError {
    Template(TemplateError),
    /// Why a text cannot be encoded.
    Encoding(String),
    /// Why there is nothing to check.
    Skipped(&'static str),
}

impl From<TemplateError> for CheckError {
    fn from(error: TemplateError) -> Self {
        Self::Template(error)
    }
}

impl From<CheckError> for Finding {
    fn from(trouble: CheckError) -> Self {
        match trouble {
            // The template's author refuses this on purpose, and a client gets the same message as an error.
            CheckError::Template(TemplateError::Raised { line, message }) => {
                Self::warning(format!("refused by template line {line}: {}", message.trim()))
            }
            CheckError::Template(error) => Self::fail(format!("cannot be rendered: {error}")),
            CheckError::Encoding(error) => Self::fail(format!("cannot be encoded: {error}")),
            CheckError::Skipped(why) => Self::skipped(why),
        }
    }
}

type CheckResult = Result<Finding, CheckError>;
type Judge = fn(&Subject) -> CheckResult;

/// All checks, in the order of a report.
const CHECKS: [(&str, Judge); 25] = [
    ("question", turns::plain_question),
    ("reasoning-format", shapes::reasoning_format),
    ("tool-format", shapes::tool_format),
    ("bos", turns::bos),
    ("generation-prompt", turns::generation_prompt),
    ("prompt-after-tools", turns::prompt_after_tools),
    ("turn-end", turns::turn_end),
    ("turn-end-of-calls", turns::turn_end_of_calls),
    ("system-prompt", shapes::system_prompt),
    ("developer-role", shapes::developer_role),
    ("late-system-prompt", shapes::late_system_prompt),
    ("two-questions", shapes::two_questions),
    ("answer-first", shapes::answer_first),
    ("empty-answer", shapes::empty_answer),
    ("text-parts", shapes::text_parts),
    ("tools", shapes::tools),
    ("tool-results", shapes::tool_results),
    ("call-with-text", shapes::call_with_text),
    ("round-trip", calls::one_call),
    ("round-trip-of-two", calls::two_calls),
    ("reasoning-in-history", shapes::reasoning_in_history),
    ("prefix", resume::plain),
    ("prefix-with-reasoning", resume::with_reasoning),
    ("prefix-after-tools", resume::after_tools),
    ("clock", turns::clock),
];

/// Checks a template, be it one that does not compile: then that is the only finding.
pub fn check(subject: Result<&Subject, &TemplateError>) -> Vec<Check> {
    let named = |name, Finding { verdict, reason, detail }| Check { name, verdict, reason, detail };
    let subject = match subject {
        Err(error) => return vec![named("syntax", Finding::fail(error.to_string()))],
        Ok(subject) => subject,
    };
    let run = |(name, judge): (_, Judge)| named(name, judge(subject).unwrap_or_else(Finding::from));
    [named("syntax", Finding::ok("compiles"))].into_iter().chain(CHECKS.into_iter().map(run)).collect()
}

/// The time that templates see, unless a check is about it.
const NOW: DateTime = DateTime { year: 2026, month: 3, day: 14, hour: 9, minute: 26, second: 53 };

/// The texts of the beginning-of-sequence and end-of-sequence tokens if there is no tokenizer.
const PLACEHOLDERS: [&str; 2] = ["<s>", "</s>"];

impl Subject {
    /// `output_markup` is what the template shows unless it is given. Without a tokenizer, texts are compared character by
    /// character, and what only ids can tell is skipped. `end_of_generation` are the ids that end a turn.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::new`].
    pub fn new(
        source: &str,
        tokenizer: Option<Arc<dyn CheckTokenizer>>,
        session: fn() -> Box<dyn SessionPrompts>,
        end_of_generation: Vec<u32>,
        output_markup: OutputMarkup,
    ) -> Result<Self, TemplateError> {
        let [bos, eos] = PLACEHOLDERS.map(|text| Some(text.to_owned()));
        let specials = match &tokenizer {
            Some(tokenizer) => tokenizer.specials(),
            None => SpecialTokens { bos, eos },
        };
        let bos = specials.bos.clone();
        let template = ChatTemplate::new(source, specials)?;
        let shown = Shown::of(&template);
        let accommodation = Accommodation {
            spells_tools: match output_markup.tool_calls {
                None => shown.accommodation().spells_tools,
                Some(format) => format == ToolCallFormat::Generic || !shown.tools,
            },
            ..shown.accommodation()
        };
        let generic = accommodation.spells_tools.then_some(ToolCallFormat::Generic);
        let output_markup = OutputMarkup {
            reasoning: output_markup.reasoning.or(shown.output_markup.reasoning),
            tool_calls: output_markup.tool_calls.or(generic).or(shown.output_markup.tool_calls),
        };
        Ok(Self { template, shown, output_markup, accommodation, tokenizer, session, end_of_generation, bos })
    }

    fn rendered(
        &self,
        conversation: &Conversation,
        is_prompt: bool,
        now: DateTime,
    ) -> Result<String, CheckError> {
        let options = RenderOptions { add_generation_prompt: is_prompt, now, ..RenderOptions::default() };
        Ok(self.template.render(&self.accommodation.apply(conversation, None), &options)?)
    }

    /// Ends with the header of an answer.
    fn prompt(&self, conversation: &Conversation) -> Result<String, CheckError> {
        self.rendered(conversation, true, NOW)
    }

    /// Without the header of an answer.
    fn history(&self, conversation: &Conversation) -> Result<String, CheckError> {
        self.rendered(conversation, false, NOW)
    }

    /// Returns the ids of a rendering as the engine gets them, or its characters; `is_start` if no text stands before it.
    fn encode(&self, text: &str, is_start: bool) -> Result<Vec<u32>, CheckError> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.encode(text, is_start).map_err(CheckError::Encoding),
            None => Ok(text.chars().map(u32::from).collect()),
        }
    }

    /// # Errors
    /// [`CheckError::Skipped`] without a format.
    fn calls(&self) -> Result<ToolCallFormat, CheckError> {
        self.output_markup.tool_calls.ok_or(CheckError::Skipped("the template shows no format for calls"))
    }

    /// # Errors
    /// [`CheckError::Skipped`] without a format.
    fn reasoning(&self) -> Result<ReasoningFormat, CheckError> {
        self.output_markup.reasoning.ok_or(CheckError::Skipped("the template shows no markup for reasoning"))
    }

    /// Returns the text of ids for messages.
    fn shown(&self, ids: &[u32]) -> String {
        let text = match &self.tokenizer {
            Some(tokenizer) => {
                let bytes = ids.iter().filter_map(|&id| tokenizer.bytes(id)).collect::<Vec<_>>().concat();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            None => ids.iter().filter_map(|&id| char::from_u32(id)).collect(),
        };
        quoted(&text)
    }

    /// Returns the name of the units of [`Self::encode`].
    fn unit(&self) -> &'static str {
        if self.tokenizer.is_some() { "token" } else { "character" }
    }

    /// The ways in which a template may be asked to think: as it likes, and switched on and off if it can be.
    fn modes(&self) -> Vec<(&'static str, Map<String, Value>)> {
        let mut modes = vec![("", Map::new())];
        if let Some(switch) = THINKING_SWITCHES.into_iter().find(|switch| self.template.reads(switch)) {
            for (name, thinks) in [(" (thinking on)", true), (" (thinking off)", false)] {
                modes.push((name, Map::from_iter([(switch.to_owned(), json!(thinks))])));
            }
        }
        modes
    }

    /// A text without the white space and the reasoning markers at its end.
    fn without_empty_think<'a>(&self, text: &'a str) -> &'a str {
        let mut bare = text.trim_end();
        let Some((open, close)) = self.output_markup.may_reason("") else { return bare };
        while let Some(rest) = bare.strip_suffix(close).or_else(|| bare.strip_suffix(open)) {
            bare = rest.trim_end();
        }
        bare
    }
}

/// A text between quotes, in one line and not too long.
fn quoted(text: &str) -> String {
    const MOST: usize = 60;
    let count = text.chars().count();
    if count <= MOST {
        return format!("{text:?}");
    }
    let head: String = text.chars().take(MOST / 2).collect();
    let tail: String = text.chars().skip(count - MOST / 2).collect();
    format!("{head:?} ... {tail:?}")
}

/// The worst of several findings; of equals the first.
fn worst(findings: impl IntoIterator<Item = Finding>) -> Option<Finding> {
    findings.into_iter().reduce(|worst, next| if next.verdict > worst.verdict { next } else { worst })
}
