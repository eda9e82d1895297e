//! One answer, from what is asked to the turn on disk; and what follows when it calls tools.
//!
//! Invariant: the conversation changes when a turn is finished and saved, and not before. An interrupted answer is a turn,
//! marked as cancelled; one that was interrupted before its first token is none.

use serde_json::{Map, Value};

use super::answer::{Manner, Parts, Screen};
use super::command::Next;
use super::grouped;
use super::talk::{Chat, Keeping};
use super::think::Think;
use crate::cli::error::{CommandError, Exit};
use crate::cli::output::OutputError;
use crate::cli::run::answer::{Ending, Heard, Said, Sink, generate};
use crate::cli::run::llm::Texts;
use crate::cli::run::report;
use crate::runtime::session::conversation::{self, Finished, PromptedTurn};
use crate::runtime::{Error, Finish, Limits, Outcome, Request, Sampling, Started, Usage};
use crate::template::{Content, Conversation, Message, OutputParser, ReasoningFormat, Role, ToolCall};

/// Answers in a row that may call tools before the user is asked again.
const MAX_ROUNDS: usize = 25;

/// What the engine said of the last request.
#[derive(Debug, Clone, Default)]
pub struct LastTurn {
    pub started: Option<Started>,
    /// Nothing when it was only looked up.
    pub outcome: Option<Outcome>,
}

/// What is to be answered.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Turns that stay before it; later ones it replaces.
    pub kept: usize,
    /// The messages after those.
    pub added: Vec<Message>,
    /// Attached files are part of it.
    pub has_files: bool,
    /// What of the answer is there already.
    pub begun: Vec<u32>,
    pub seed: Option<u64>,
}

/// What was answered.
struct Answered {
    parts: Parts,
    outcome: Outcome,
    generated: Vec<u32>,
    sampling: Sampling,
    signal: Option<u8>,
    is_reader_gone: bool,
}

impl Chat<'_> {
    /// Says this, with what is attached.
    pub fn say(&mut self, text: String) -> Result<Next, CommandError> {
        let kept = self.dialogue.saved().turns.len();
        self.say_instead(kept, text)
    }

    /// Says this after the first `kept` turns, in place of what came then.
    pub fn say_instead(&mut self, kept: usize, text: String) -> Result<Next, CommandError> {
        self.take_place()?;
        let system = match kept {
            0 => self.system.clone().or_else(|| self.dialogue.saved().system().map(str::to_owned)),
            _ => None,
        };
        let text = super::actions::with_attachments(&self.attached, text);
        let added = system.map(Message::system).into_iter().chain([Message::user(text)]).collect();
        self.answer(Asked { kept, added, has_files: true, ..Asked::default() })
    }

    /// Answers, runs what tools the answer calls, and answers again.
    pub fn answer(&mut self, asked: Asked) -> Result<Next, CommandError> {
        let mut asked = asked;
        for round in 1..=MAX_ROUNDS {
            let has_files = asked.has_files;
            let Some((turn, fitting)) = self.fit(asked)? else { return Ok(Next::Prompt) };
            let answered = self.generate(&turn, &fitting)?;
            let ending = ending(&answered, self.is_interactive());
            let calls = answered.parts.calls.clone();
            let is_kept = self.keep(turn, answered, has_files)?;
            if let Some(next) = ending {
                return Ok(next);
            }
            // Nobody would hear of the last round's results.
            if round == MAX_ROUNDS && is_kept && !calls.is_empty() {
                break;
            }
            let results = if is_kept { self.run_tools(&calls)? } else { None };
            let Some(results) = results else { return Ok(Next::Prompt) };
            asked = Asked { kept: self.dialogue.saved().turns.len(), added: results, ..Asked::default() };
        }
        self.terminal.warn(&format!("{MAX_ROUNDS} answers in a row have called tools: what now?"));
        Ok(Next::Prompt)
    }

    /// The prompt of what is asked.
    pub fn prompted(&self, asked: &Asked) -> Result<PromptedTurn, CommandError> {
        let kept = self.dialogue.saved().turns.iter().take(asked.kept);
        let before = kept.flat_map(|saved| &saved.turn.messages);
        let messages = before.chain(&asked.added).cloned().collect();
        let speech = self.llm().texts().speech();
        let kwargs = self.template_variables()?;
        let conversation =
            Conversation { messages, tools: self.tool_definitions(), kwargs, ..Conversation::default() };
        Ok(self.dialogue.prompt(speech, conversation)?)
    }

    /// What the template is told of thinking; a schema leaves no place for it.
    pub fn template_variables(&self) -> Result<Map<String, Value>, CommandError> {
        let template = self.llm().texts().speech().template_source().unwrap_or_default();
        match self.schema {
            Some(_) => Ok(Think { is_on: Some(false), ..self.think }.variables(template).unwrap_or_default()),
            None => self.think.variables(template),
        }
    }

    fn generate(&mut self, turn: &PromptedTurn, asked: &Asked) -> Result<Answered, CommandError> {
        let sampling = Sampling { seed: asked.seed.or(self.sampling().seed), ..self.sampling() };
        let prompt: Vec<u32> = turn.tokens().iter().chain(&asked.begun).copied().collect();
        let manner = Manner {
            think: self.think,
            is_styled: self.terminal.colors_output() && !self.args.screen.plain,
            estimate: self.pace.time(prompt.len()),
        };
        let parser = OutputParser::new(&self.dialect(), &self.tool_definitions(), turn.tail());
        let mut screen = Screen::new(self.terminal, parser, manner);
        screen.skip(&self.text_of(&asked.begun));
        let request = Request {
            prompt,
            sampling: sampling.clone(),
            limits: self.settings.limits(),
            session: Some(self.engine_name().to_owned()),
            markup: self.markup(),
            grammar: self.grammar(turn.tail())?,
            ..Request::default()
        };
        let (ending, said) = self.listen(request, &mut screen);
        let (outcome, signal, is_reader_gone) = match ending? {
            Ending::Done { outcome, signal } => (outcome, signal, false),
            Ending::ReaderGone { signal } => (said.cut_off(), signal, true),
        };
        let is_cut = outcome.finish.reason() != "stop";
        let is_reader_gone = closed(screen.finish(is_cut))? || is_reader_gone;
        let mut parts = std::mem::take(&mut screen.parts);
        drop(screen);
        if is_cut {
            parts
                .calls
                .iter_mut()
                .for_each(|call| call.is_whole &= !matches!(outcome.finish, Finish::Cancelled));
        }
        let generated = asked.begun.iter().chain(&said.ids).copied().collect();
        self.last = Some(LastTurn { started: said.started, outcome: Some(outcome.clone()) });
        Ok(Answered { parts, outcome, generated, sampling, signal, is_reader_gone })
    }

    /// One request, or two: when the reasoning has used up its budget, it is ended and the answer goes on behind it.
    fn listen(&self, request: Request, screen: &mut Screen<'_>) -> (Result<Ending, CommandError>, Said) {
        let (ending, mut said) = self.listen_once(request.clone(), screen);
        let (is_over_budget, first) = match &ending {
            Ok(Ending::Done { outcome, signal: None }) => {
                (outcome.finish == Finish::Cancelled && screen.is_enough(), outcome.clone())
            }
            _ => return (ending, said),
        };
        let markup = self.dialect().reasoning.and_then(ReasoningFormat::closing).filter(|_| is_over_budget);
        let Some(markup) = markup else { return (ending, said) };
        let forced = match self.llm().texts().speech().encode_rest(markup) {
            Ok(forced) => forced,
            Err(error) => return (Err(error.into()), said),
        };
        if let Err(error) = screen.end_reasoning(markup) {
            return (closed(Err(error)).map(|_| Ending::ReaderGone { signal: None }), said);
        }
        said.ids.extend(forced);
        let prompt = request.prompt.iter().chain(&said.ids).copied().collect();
        let left = request.limits.max_tokens.map(|most| most.saturating_sub(said.ids.len()).max(1));
        let limits = Limits { max_tokens: left, ..request.limits.clone() };
        let (ending, rest) = self.listen_once(Request { prompt, limits, ..request.clone() }, screen);
        said.ids.extend(rest.ids);
        let ending = ending.map(|ending| match ending {
            Ending::Done { outcome, signal } => {
                let usage = Usage { completion_tokens: said.ids.len(), ..first.usage };
                Ending::Done { outcome: Outcome { usage, ..outcome }, signal }
            }
            gone => gone,
        });
        (ending, said)
    }

    fn listen_once(&self, request: Request, screen: &mut Screen<'_>) -> (Result<Ending, CommandError>, Said) {
        let mut heard = Heard::new(screen);
        let ending = generate(self.llm(), request, &self.graceful, &mut heard);
        (ending, heard.said)
    }

    /// Saves the turn and says what is to be said of it; whether there is one.
    fn keep(
        &mut self,
        turn: PromptedTurn,
        answered: Answered,
        has_files: bool,
    ) -> Result<bool, CommandError> {
        let Answered { parts, outcome, generated, sampling, .. } = answered;
        let message = message_of(&parts);
        let answer = conversation::Answer { message, generated, outcome: outcome.clone(), sampling };
        let is_kept = self.dialogue.finish(turn, answer)? == Finished::Kept;
        if is_kept {
            if has_files {
                self.attached.clear();
            }
            if let Keeping::Saved { is_fresh, .. } = &mut self.keeping {
                *is_fresh = false;
            }
        }
        let terminal = self.terminal;
        match (&outcome.finish, is_kept) {
            (_, false) => terminal
                .note("(stopped before the answer began; your message is not part of the conversation)"),
            (Finish::Cancelled, _) => terminal.note("(stopped; what was said is kept, /continue goes on)"),
            (Finish::MaxTokens, _) => terminal.note("(cut at max_tokens; /continue goes on)"),
            (Finish::Deadline, _) => terminal.note("(cut at the deadline; /continue goes on)"),
            (Finish::ContextFull, _) => {
                self.has_warned = true; // this says it
                terminal.warn(&format!(
                    "the answer was cut: the context of {} tokens is full; /compact makes room, /undo takes the turn back",
                    grouped(self.context())
                ));
            }
            (Finish::Eos(_) | Finish::StopString(_) | Finish::Complete, _) => {}
        }
        self.pace.note(&outcome.usage, &outcome.timings);
        if let Some(started) = self.last.as_ref().and_then(|last| last.started.as_ref()) {
            terminal.detail(&report::reuse(started, self.llm()));
        }
        self.llm()
            .engine()
            .take_notices()
            .unwrap_or_default()
            .iter()
            .for_each(|notice| terminal.warn(notice));
        self.warn_of_context();
        Ok(is_kept)
    }

    /// The text of generated tokens, as the engine gives it: special ones have none, unless they are markup.
    pub fn text_of(&self, ids: &[u32]) -> String {
        let vocabulary = self.llm().vocabulary();
        let markup = self.markup();
        let ordinary = ids.iter().filter(|id| !vocabulary.is_special(**id) || markup.contains(id));
        let bytes: Vec<u8> =
            ordinary.filter_map(|&id| vocabulary.token_bytes(id)).flat_map(|b| b.into_owned()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last answer once more, or on from where it ended.
    pub fn answer_again(&mut self, begun: Vec<u32>, seed: Option<u64>) -> Result<Next, CommandError> {
        let turns = &self.dialogue.saved().turns;
        let Some(last) = turns.last() else { return Err(CommandError::usage("there is no answer yet")) };
        let added = last.turn.messages[..last.turn.messages.len() - 1].to_vec();
        self.answer(Asked { kept: turns.len() - 1, added, begun, seed, has_files: false })
    }

    /// A sentence for a prompt that is too long where nobody can be asked.
    pub fn too_long(&self, prompt_tokens: usize) -> CommandError {
        let error =
            CommandError::from(Error::PromptTooLong { prompt_tokens, context_tokens: self.context() });
        error.hint(
            "shorten the message, begin anew with /reset, or give a larger --ctx if the model allows it",
        )
    }
}

/// What an answer ends besides itself.
fn ending(answered: &Answered, is_interactive: bool) -> Option<Next> {
    match answered.signal {
        Some(number) if !is_interactive || i32::from(number) == super::SIGTERM => {
            Some(Next::Leave(Exit::Signal(number)))
        }
        _ if answered.is_reader_gone => Some(Next::Leave(Exit::Success)),
        Some(_) => Some(Next::Prompt),
        None => None,
    }
}

/// Whether the reader of stdout has gone away.
fn closed(written: Result<(), OutputError>) -> Result<bool, CommandError> {
    match written {
        Ok(()) => Ok(false),
        Err(OutputError::Closed) => Ok(true),
        Err(OutputError::Failed(error)) => Err(error),
    }
}

/// The answer as templates see it in later prompts. Calls that are not all whole are none.
fn message_of(parts: &Parts) -> Message {
    let mut message = Message::assistant(&parts.content);
    message.reasoning = Some(parts.reasoning.clone()).filter(|text| !text.is_empty());
    if parts.calls.iter().all(|call| call.is_whole) {
        let call = |(n, call): (usize, &super::answer::Call)| ToolCall {
            id: Some(format!("call_{}", n + 1)),
            name: call.name.clone(),
            arguments: serde_json::from_str(&call.arguments)
                .unwrap_or_else(|_| call.arguments.clone().into()),
        };
        message.tool_calls = parts.calls.iter().enumerate().map(call).collect();
    }
    message
}

/// The text of a message.
pub fn text(message: &Message) -> &str {
    match &message.content {
        Some(Content::Text(text)) => text,
        _ => "",
    }
}

/// The user's last message of these.
pub fn question(messages: &[Message]) -> Option<&Message> {
    messages.iter().rfind(|message| message.role == Role::User)
}
