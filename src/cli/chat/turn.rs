//! One answer, from what is asked to the turn on disk; and what follows when it calls tools.
//!
//! Invariant: the conversation changes when a turn is finished and saved, and not before. An interrupted answer is a turn,
//! marked as cancelled; one that was interrupted before its first token is none.

use std::io::IsTerminal;

use serde_json::{Map, Value};

use super::answer::{Manner, Parts, Screen};
use super::command::Next;
use super::talk::{Chat, Keeping};
use super::think::Think;
use super::{counted, grouped};
use crate::cli::error::{CommandError, Exit};
use crate::cli::output::OutputError;
use crate::cli::run::answer::{Ending, Heard, Said, Sink, generate};
use crate::cli::run::report;
use crate::runtime::session::store::BranchReason;
use crate::runtime::turn::session_chat::{self, Finished, PromptedTurn};
use crate::runtime::{Error, Finish, Limits, Outcome, Request, Sampling, Started, Usage};
use crate::template::{Content, Conversation, Message, OutputParser, ReasoningFormat, Role, ToolCall};

/// Answers in a row that may call tools before the user is asked again.
const MAX_ROUNDS: usize = 25;

/// Tokens that an answer leaves for the next message and the beginning of its answer, unless the context is small.
const NEXT_MESSAGE: usize = 512;

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
    /// Why turns are replaced: they stay as a branch for it.
    pub replaces: Option<BranchReason>,
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
        let kept = self.session_chat.saved().turns.len();
        self.say_instead(kept, text)
    }

    /// Says this after the first `kept` turns, in place of what came then.
    pub fn say_instead(&mut self, kept: usize, text: String) -> Result<Next, CommandError> {
        self.take_place()?;
        let system = match kept {
            0 => self.system.clone().or_else(|| self.session_chat.saved().system().map(str::to_owned)),
            _ => None,
        };
        self.pending = Some((kept, text.clone()));
        let text = super::actions::with_attachments(&self.attached, text);
        let added = system.map(Message::system).into_iter().chain([Message::user(text)]).collect();
        let replaces = (kept < self.session_chat.saved().turns.len()).then_some(BranchReason::Edit);
        self.answer(Asked { kept, added, has_files: true, replaces, ..Asked::default() })
    }

    /// Answers, runs what tools the answer calls, and answers again.
    pub fn answer(&mut self, asked: Asked) -> Result<Next, CommandError> {
        let mut asked = asked;
        for round in 1..=MAX_ROUNDS {
            let Some((turn, fitting)) = self.fit(asked)? else { return Ok(self.unsent()) };
            let answered = self.generate(&turn, &fitting)?;
            let ending = ending(&answered, self.is_interactive());
            let calls = answered.parts.calls.clone();
            let is_kept = self.keep(turn, answered, &fitting)?;
            match ending {
                Some(Next::Prompt) => return Ok(self.unsent()),
                Some(next) => return Ok(next),
                None => {}
            }
            // Nobody would hear of the last round's results.
            if round == MAX_ROUNDS && is_kept && !calls.is_empty() {
                break;
            }
            let results = if is_kept { self.run_tools(&calls)? } else { None };
            let Some(results) = results else { return Ok(Next::Prompt) };
            asked = Asked { kept: self.session_chat.saved().turns.len(), added: results, ..Asked::default() };
        }
        self.terminal
            .warn(&format!("Stopped after {MAX_ROUNDS} consecutive tool calls. Type a message to continue."));
        Ok(Next::Prompt)
    }

    /// The prompt of what is asked.
    pub fn prompted(&self, asked: &Asked) -> Result<PromptedTurn, CommandError> {
        let kept = self.session_chat.saved().turns.iter().take(asked.kept);
        let before = kept.flat_map(|saved| &saved.turn.messages);
        let messages = before.chain(&asked.added).cloned().collect();
        let chat_tokenizer = self.llm().texts().chat_tokenizer();
        let kwargs = self.template_variables();
        let conversation =
            Conversation { messages, tools: self.tool_definitions(), kwargs, ..Conversation::default() };
        Ok(self.session_chat.prompt(chat_tokenizer, conversation)?)
    }

    /// What the template is told of thinking; a schema leaves no place for it.
    pub fn template_variables(&self) -> Map<String, Value> {
        let is_on = if self.schema.is_some() { Some(false) } else { self.think.is_on };
        Think { is_on, ..self.think }.variables(self.thinking())
    }

    fn generate(&mut self, turn: &PromptedTurn, asked: &Asked) -> Result<Answered, CommandError> {
        let sampling = Sampling { seed: asked.seed.or(self.sampling().seed), ..self.sampling() };
        let prompt: Vec<u32> = turn.tokens().iter().chain(&asked.begun).copied().collect();
        let prompt_tokens = prompt.len();
        let manner = Manner {
            think: self.think,
            is_styled: (self.terminal.colors_output() || std::io::stdout().is_terminal())
                && !self.args.screen.plain,
            estimate: self.pace.time(prompt.len()),
        };
        let parser = OutputParser::new(&self.output_markup(), &self.tool_definitions(), turn.tail());
        let mut screen = Screen::new(self.terminal, parser, manner);
        screen.skip(&self.text_of(&asked.begun));
        let request = Request {
            prompt,
            sampling: sampling.clone(),
            limits: self.limits(prompt_tokens, asked),
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

    /// Unless the user or the model says how long an answer may be, it leaves room for the next message: one that never ends
    /// does not end the conversation. An answer that is continued may take what there is.
    fn limits(&self, prompt_tokens: usize, asked: &Asked) -> Limits {
        let limits = self.settings.limits();
        let has_limit = limits.max_tokens.is_some() || self.own_limit().is_some();
        if has_limit || !asked.begun.is_empty() {
            return limits;
        }
        let reserve = NEXT_MESSAGE.min(self.context() / 8);
        let left = self.context().saturating_sub(prompt_tokens + reserve).max(self.room());
        Limits { max_tokens: Some(left), ..limits }
    }

    /// How long the model's answers are at most, where the user has not said anything.
    fn own_limit(&self) -> Option<usize> {
        self.llm().engine().spec().config.answer_tokens
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
        let markup =
            self.output_markup().reasoning.and_then(ReasoningFormat::closing).filter(|_| is_over_budget);
        let Some(markup) = markup else { return (ending, said) };
        let forced = match self.llm().texts().chat_tokenizer().encode_rest(markup) {
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
        let ending = generate(self.llm().engine(), request, &self.graceful, &mut heard);
        (ending, heard.said)
    }

    /// Saves the turn and says what is to be said of it; whether there is one.
    fn keep(&mut self, turn: PromptedTurn, answered: Answered, asked: &Asked) -> Result<bool, CommandError> {
        let Answered { parts, outcome, generated, sampling, .. } = answered;
        let message = message_of(&parts);
        let is_empty = outcome.finish == Finish::Cancelled && generated.is_empty();
        let branch = match asked.replaces.filter(|_| !is_empty) {
            Some(reason) => self.set_aside(reason)?,
            None => None,
        };
        let answer = session_chat::RecordedAnswer { message, generated, outcome: outcome.clone(), sampling };
        let is_kept = self.session_chat.record(turn, answer)? == Finished::Kept;
        if is_kept {
            self.pending = None;
            if asked.has_files {
                self.attached.clear();
            }
            if let Keeping::Saved { is_fresh, .. } = &mut self.keeping {
                *is_fresh = false;
            }
        }
        self.note_finish(&outcome.finish, is_kept);
        if let Some(branch) = branch {
            self.terminal.note(&format!("(what this replaced is kept as {branch}; /redo brings it back)"));
        }
        let terminal = self.terminal;
        self.pace.note(&outcome.usage, &outcome.timings);
        if let Some(started) = self.last.as_ref().and_then(|last| last.started.as_ref()) {
            terminal.detail(&report::reuse(started, self.llm().texts()));
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

    /// Why the answer is not whole, if it is not.
    fn note_finish(&mut self, finish: &Finish, is_kept: bool) {
        let terminal = self.terminal;
        let has_limit = self.settings.limits().max_tokens.is_some();
        match (finish, is_kept) {
            (_, false) => terminal.note("(stopped before the answer began; the message was not sent)"),
            (Finish::Cancelled, _) => terminal.note("(stopped; the answer so far is kept, /continue resumes it)"),
            (Finish::MaxTokens, _) if has_limit => terminal.note("(cut at max-tokens; /continue resumes it)"),
            (Finish::MaxTokens, _) if self.own_limit().is_some() => {
                let most = counted(self.own_limit().unwrap_or_default(), "token");
                terminal.note(&format!("(cut: this model's answers have at most {most}, and end when they repeat)"));
            }
            (Finish::MaxTokens, _) => terminal.warn(
                "the answer was cut to leave room for your next message; /continue resumes it, /compact makes room",
            ),
            (Finish::Deadline, _) => terminal.note("(cut at the deadline; /continue resumes it)"),
            (Finish::ContextFull, _) => {
                self.has_warned = true; // this says it
                let size = grouped(self.context());
                terminal.warn(&format!(
                    "the answer was cut: the context of {size} tokens is full; /compact makes room, /undo takes the turn back"
                ));
            }
            (Finish::Eos(_) | Finish::StopString(_) | Finish::Complete, _) => {}
        }
    }

    /// The text of generated tokens, as the engine gives it: special ones have none, unless they are markup.
    pub fn text_of(&self, ids: &[u32]) -> String {
        let vocabulary = self.llm().texts().vocabulary();
        let markup = self.markup();
        let ordinary = ids.iter().filter(|id| !vocabulary.is_special(**id) || markup.contains(id));
        let bytes: Vec<u8> =
            ordinary.filter_map(|&id| vocabulary.token_bytes(id)).flat_map(|b| b.into_owned()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last answer once more, or on from where it ended.
    pub fn answer_again(&mut self, begun: Vec<u32>, seed: Option<u64>) -> Result<Next, CommandError> {
        let turns = &self.session_chat.saved().turns;
        let Some(last) = turns.last() else { return Err(CommandError::usage("there is no answer yet")) };
        let added = last.turn.messages[..last.turn.messages.len() - 1].to_vec();
        // An answer that is continued is all there still.
        let replaces = begun.is_empty().then_some(BranchReason::Retry);
        self.answer(Asked { kept: turns.len() - 1, added, begun, seed, has_files: false, replaces })
    }

    /// A sentence for a prompt that is too long where nobody can be asked.
    pub fn too_long(&self, prompt_tokens: usize) -> CommandError {
        let error =
            CommandError::from(Error::PromptTooLong { prompt_tokens, context_tokens: self.context() });
        error.hint("shorten the message, start over with /new, or restart with a larger --ctx if the model allows it")
    }

    /// The same for a message that is too long by itself.
    pub fn message_too_long(&self, prompt_tokens: usize) -> CommandError {
        let (needed, size) = (counted(prompt_tokens, "token"), grouped(self.context()));
        let error =
            CommandError::bad_data(format!("the message needs at least {needed}, the context holds {size}"));
        error.hint("shorten it, or restart with a larger --ctx if the model allows it")
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
