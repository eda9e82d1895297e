//! `/compare MODEL`: the last message answered by another model, beside the first answer.
//!
//! Invariants: the conversation does not change, on disk or in memory; nothing is called; the model of the
//! chat stays as it is.

use serde_json::Value;
use unicode_width::UnicodeWidthStr;

use super::context_limit::AnswerCounter;
use super::counted;
use super::model::NextModel;
use super::session::Chat;
use super::state::{AnswerRequest, Effect, SavePlace, text};
use super::turn::ending;
use crate::cli::endpoint::ChatEndpoint;
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::CommandError;
use crate::cli::images;
use crate::cli::model::load::Loaded;
use crate::cli::run::answer::{AnswerGeneration, AnswerSink, Generated};
use crate::cli::run::message_answer::MessageGeneration;
use crate::cli::terminal::wrap;
use crate::cli::think::{Think, Thinking};
use llmctl_engine::turn::{PlannedTurn, SessionChat, TurnRequest};
use llmctl_engine::{Outcome, Usage};
use llmctl_template::Message;

/// Columns of a terminal on which two answers stand side by side.
const WIDE: usize = 100;

/// Between the two.
const GAP: &str = " \u{2502} ";

/// The message that both models answer.
struct Question {
    /// The conversation before the first answer.
    messages: Vec<Message>,
    /// The first answer, and who gave it.
    first: Message,
    model: String,
    facts: String,
}

impl Chat<'_> {
    /// Answers the last message with another model.
    ///
    /// # Errors
    /// There is no answer yet, or the model cannot be loaded or reached, or refuses the conversation.
    pub fn compare(&mut self, next: &NextModel) -> Result<Effect, CommandError> {
        let question = self.question()?;
        let is_saved = self.state.keeping != SavePlace::Nowhere;
        let is_beside =
            self.ui.is_interactive() && self.ui.terminal.width().is_some_and(|columns| columns >= WIDE);
        let (name, answered) = match next {
            NextModel::There(choice) => {
                let endpoint = self.model.connect(choice)?;
                (endpoint.model().to_owned(), self.ask_there(&endpoint, &question, is_beside)?)
            }
            NextModel::Here(reference) => {
                self.model.load_beside(reference, is_saved)?;
                let llm = self.model.beside().expect("it was loaded above");
                (llm.info().name.clone(), self.ask_here(llm, &question, is_beside)?)
            }
        };
        self.show_both(&question, &name, &answered, is_beside);
        Ok(ending(&answered, self.ui.is_interactive()).unwrap_or(Effect::Prompt))
    }

    fn question(&self) -> Result<Question, CommandError> {
        let turns = self.state.turns();
        let Some(last) = turns.last() else {
            return Err(CommandError::usage("/compare: there is no answer yet"));
        };
        let (first, asked) = last.turn.messages.split_last().expect("a turn ends with its answer");
        let before = turns[..turns.len() - 1].iter().flat_map(|saved| &saved.turn.messages);
        let measured = self.state.last.as_ref().and_then(|last| last.outcome.as_ref());
        Ok(Question {
            messages: before.chain(asked).cloned().collect(),
            first: first.clone(),
            model: last.model.name.clone(),
            facts: measured.map_or_else(|| tokens_of(&last.turn.usage), facts_of),
        })
    }

    /// Asks a model that is loaded beside the chat's.
    fn ask_here(
        &self,
        llm: &Loaded,
        question: &Question,
        is_beside: bool,
    ) -> Result<Generated, CommandError> {
        let thinking = Thinking::of(llm.texts().chat_tokenizer());
        let think = self.think_of(&thinking);
        let conversation = self.conversation(question.messages.clone(), think, &thinking);
        let mut session_chat = SessionChat::new(llm.texts().fingerprint().clone());
        session_chat.lend(self.state.session_chat.saved());
        let prompted = session_chat.prompt(llm.texts().chat_tokenizer(), conversation, &self.state.files)?;
        let turn = TurnRequest {
            reasoning_budget: think.budget,
            ..self.turn_request(llm, &AnswerRequest::default(), prompted.tokens().len())
        };
        let planned = PlannedTurn::new(llm.planner(), prompted, &turn)?;
        let (plan, graceful) = (&planned.plan, &self.ui.graceful);
        let generation = AnswerGeneration { llm, turn: &turn, plan, session: None, graceful };
        self.generated(think, is_beside, &llm.info().name, |sink| generation.run(sink))
    }

    fn ask_there(
        &self,
        endpoint: &ChatEndpoint,
        question: &Question,
        is_beside: bool,
    ) -> Result<Generated, CommandError> {
        let tools = self.offered_tools();
        let mut images = self.state.files.clone();
        images::add_kept(&mut images, self.state.session_chat.saved());
        let request =
            EndpointRequest { tools: &tools, images: &images, ..self.endpoint_request(&question.messages) };
        let generation = MessageGeneration { endpoint, request: &request, graceful: &self.ui.graceful };
        let answered =
            self.generated(self.state.think, is_beside, endpoint.model(), |sink| generation.run(sink))?;
        match answered.failure {
            Some(failure) => Err(failure),
            None => Ok(answered),
        }
    }

    /// Returns the setting for thinking, as far as the other model knows it.
    fn think_of(&self, thinking: &Thinking) -> Think {
        match self.state.think.check(thinking) {
            Ok(()) => self.state.think,
            Err(reason) => {
                self.ui.terminal.note(format!("({reason}: it answers as it does by itself)"));
                Think { is_shown: self.state.think.is_shown, ..Think::default() }
            }
        }
    }

    /// Runs a generation: in silence where both answers are shown side by side at its end, else onto the screen.
    fn generated(
        &self,
        think: Think,
        is_beside: bool,
        name: &str,
        run: impl FnOnce(&mut dyn AnswerSink) -> Result<Generated, CommandError>,
    ) -> Result<Generated, CommandError> {
        if !is_beside {
            self.ui.terminal.report(&format!("{name}:"));
            return self.on_screen(think, None, run);
        }
        let terminal = self.ui.terminal;
        let spoken = |count| format!("{name} answers ({})", counted(count, "token"));
        let generated = run(&mut AnswerCounter { terminal, count: 0, spoken: &spoken });
        terminal.status("");
        generated.iter().flat_map(|answered| &answered.notice).for_each(|notice| terminal.warn(notice));
        generated
    }

    fn show_both(&self, question: &Question, name: &str, generated: &Generated, is_beside: bool) {
        let facts = facts_of(&generated.answer.outcome);
        let terminal = self.ui.terminal;
        if is_beside {
            let left = Column {
                title: format!("{} ({})", question.model, question.facts),
                text: shown(&question.first),
            };
            let second = generated.answer.to_message();
            let right = Column { title: format!("{name} ({facts})"), text: shown(&second) };
            terminal.report(&side_by_side(&left, &right, terminal.columns()));
        } else {
            terminal.report(&format!("{}: {}; {name}: {facts}", question.model, question.facts));
        }
        if generated.signal.is_some() {
            terminal.note("(stopped)");
        }
        terminal.note("(not part of the conversation; /model and /retry take it over)");
    }
}

/// An answer with what stands above it.
struct Column {
    title: String,
    text: String,
}

/// Returns an answer's text and its calls.
fn shown(message: &Message) -> String {
    let call = |call: &llmctl_template::ToolCall| {
        let arguments = match &call.arguments {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        format!("calls {} {arguments}", call.name)
    };
    let parts = std::iter::once(text(message).trim_end().to_owned()).filter(|text| !text.is_empty());
    parts.chain(message.tool_calls.iter().map(call)).collect::<Vec<_>>().join("\n")
}

/// `12 tokens, 34.5 tok/s`.
fn facts_of(outcome: &Outcome) -> String {
    let rate = outcome.timings.decode_rate(&outcome.usage);
    let rate = rate.map_or(String::new(), |rate| format!(", {rate:.1} tok/s"));
    format!("{}{rate}", tokens_of(&outcome.usage))
}

fn tokens_of(usage: &Usage) -> String {
    match usage.completion_tokens {
        0 => "tokens not reported".to_owned(),
        count => counted(count, "token"),
    }
}

/// Returns two texts in two columns of a terminal.
fn side_by_side(left: &Column, right: &Column, columns: usize) -> String {
    let width = columns.saturating_sub(GAP.width() + 1) / 2;
    let lines = |column: &Column| -> Vec<String> {
        let rule = "\u{2500}".repeat(width);
        let whole = format!("{}\n{rule}\n{}", column.title, column.text.replace('\t', "    "));
        let wrapped = wrap::wrapped(&crate::cli::terminal::output::visible(&whole), width, 0);
        wrapped.lines().flat_map(|line| pieces(line, width)).collect()
    };
    let (left, right) = (lines(left), lines(right));
    let row = |at: usize| {
        let text = |lines: &[String]| lines.get(at).cloned().unwrap_or_default();
        let (left, right) = (text(&left), text(&right));
        let blanks = " ".repeat(width.saturating_sub(left.width()));
        format!("{left}{blanks}{GAP}{right}").trim_end().to_owned()
    };
    (0..left.len().max(right.len())).map(row).collect::<Vec<_>>().join("\n")
}

/// Cuts a line that could not be broken between words.
fn pieces(line: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for c in line.chars() {
        let last = pieces.last_mut().expect("there is one");
        let is_full = last.width() + c.to_string().width() > width.max(2);
        match is_full {
            true => pieces.push(c.to_string()),
            false => last.push(c),
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_answers_stand_side_by_side_and_nothing_of_them_is_lost() {
        let column = |title: &str, text: &str| Column { title: title.to_owned(), text: text.to_owned() };
        let left = column("one (2 tokens)", "short");
        let right = column("two", &format!("several words in a line\n{}", "x".repeat(25)));
        let shown = side_by_side(&left, &right, 44);
        let expected = "\
one (2 tokens)       \u{2502} two
\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500} \u{2502} \u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}
short                \u{2502} several words in a
                     \u{2502} line
                     \u{2502} xxxxxxxxxxxxxxxxxxxx
                     \u{2502} xxxxx";
        assert_eq!(shown, expected);
        let wide = side_by_side(&column("\u{65e5}\u{672c}", "a"), &column("b", "c"), 24);
        assert_eq!(wide.lines().next(), Some("\u{65e5}\u{672c}       \u{2502} b"));
    }

    #[test]
    fn calls_are_part_of_what_is_compared() {
        let mut message = Message::assistant("Wait.\n");
        let arguments = serde_json::json!({"a": 1});
        message.tool_calls = vec![llmctl_template::ToolCall { id: None, name: "f".to_owned(), arguments }];
        assert_eq!(shown(&message), "Wait.\ncalls f {\"a\":1}");
    }
}
