//! One answer, from what is asked to the turn on disk; and what follows when it calls tools.
//!
//! Invariant: the conversation changes when a turn is finished and saved, and not before. An interrupted answer is a turn,
//! marked as cancelled; one that was interrupted before its first token is none.

use std::io::IsTerminal;

use serde_json::{Map, Value};

use super::answer::{Manner, Screen};
use super::command::Next;
use super::talk::{Chat, Keeping};
use super::{counted, grouped};
use crate::cli::error::{CommandError, Exit};
use crate::cli::output::OutputError;
use crate::cli::run::answer::{Generated, Generation};
use crate::cli::run::report;
use crate::cli::think::Think;
use crate::runtime::session::store::BranchReason;
use crate::runtime::turn::{
    Answer, AnswerStart, Finished, OutputConstraint, PlannedTurn, PromptedTurn, ToolUse, TurnRequest,
};
use crate::runtime::{Error, Finish, Limits, Outcome, Sampling, Started};
use crate::template::{Content, Conversation, Message, Role};

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
            let (planned, generated) = self.generate(turn, &fitting)?;
            let ending = ending(&generated, self.is_interactive());
            let answer = generated.answer;
            let is_kept = self.keep(planned, &answer, &fitting)?;
            match ending {
                Some(Next::Prompt) => return Ok(self.unsent()),
                Some(next) => return Ok(next),
                None => {}
            }
            // Nobody would hear of the last round's results.
            if round == MAX_ROUNDS && is_kept && !answer.tool_calls.is_empty() {
                break;
            }
            let results = if is_kept { self.run_tools(&answer)? } else { None };
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
        Think { is_on, ..self.think }.variables(&self.thinking())
    }

    /// What the settings ask of an answer.
    fn turn_request(&self, asked: &Asked, prompt_tokens: usize) -> TurnRequest {
        let source = self.schema.as_ref().map(|schema| schema.source.clone());
        // A schema says what the whole answer is: there are no calls beside it.
        let definitions = if source.is_some() { Vec::new() } else { self.tool_definitions() };
        TurnRequest {
            answer_start: AnswerStart::Tokens(asked.begun.clone()),
            tools: ToolUse { definitions, is_parallel: true, ..ToolUse::default() },
            constraint: source.map(|source| OutputConstraint { source, param: "/json" }),
            is_streamed: true,
            reasoning_budget: self.think.budget,
            sampling: Sampling { seed: asked.seed.or(self.sampling().seed), ..self.sampling() },
            limits: self.limits(prompt_tokens, asked),
            ..TurnRequest::default()
        }
    }

    fn generate(
        &mut self,
        turn: PromptedTurn,
        asked: &Asked,
    ) -> Result<(PlannedTurn, Generated), CommandError> {
        let prompt_tokens = turn.tokens().len() + asked.begun.len();
        let (llm, request) = (self.llm(), self.turn_request(asked, prompt_tokens));
        let planned = PlannedTurn::new(llm.planner(), turn, &request)?;
        let manner = Manner {
            think: self.think,
            is_styled: (self.terminal.colors_output() || std::io::stdout().is_terminal())
                && !self.args.screen.plain,
            estimate: self.pace.time(prompt_tokens),
        };
        let mut screen = Screen::new(self.terminal, manner);
        let generation = Generation {
            engine: llm.engine(),
            planner: llm.planner(),
            turn: &request,
            plan: &planned.plan,
            session: Some(self.engine_name()),
            graceful: &self.graceful,
        };
        let mut generated = generation.run(&mut screen)?;
        generated.is_reader_gone |= closed(screen.finish())?;
        drop(screen);
        let Answer { started, outcome, .. } = &generated.answer;
        self.last = Some(LastTurn { started: started.clone(), outcome: Some(outcome.clone()) });
        Ok((planned, generated))
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

    /// Saves the turn and reports what became of it; returns whether there is one.
    fn keep(&mut self, turn: PlannedTurn, answer: &Answer, asked: &Asked) -> Result<bool, CommandError> {
        let outcome = &answer.outcome;
        let is_empty = outcome.finish == Finish::Cancelled && answer.tokens.is_empty();
        let branch = match asked.replaces.filter(|_| !is_empty) {
            Some(reason) => self.set_aside(reason)?,
            None => None,
        };
        let is_kept = self.session_chat.finish(turn, answer)? == Finished::Kept;
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
fn ending(generated: &Generated, is_interactive: bool) -> Option<Next> {
    match generated.signal {
        Some(number) if !is_interactive || i32::from(number) == super::SIGTERM => {
            Some(Next::Leave(Exit::Signal(number)))
        }
        _ if generated.is_reader_gone => Some(Next::Leave(Exit::Success)),
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
