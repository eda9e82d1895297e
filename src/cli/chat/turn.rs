//! One answer, from what is asked to the turn on disk; and what follows when it calls tools.
//!
//! Invariant: the conversation changes when a turn is finished and saved, and not before. An interrupted
//! answer is a turn, marked as cancelled; one that was interrupted before its first token is none.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::model::Answerer;
use super::renderer::{Renderer, RendererOptions};
use super::session::Chat;
use super::state::{
    AnswerRequest, CallResults, ChatState, Effect, LastTurn, SavePlace, question, with_attachments,
};
use super::{counted, grouped};
use crate::cli::endpoint::ChatEndpoint;
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::{CommandError, Exit};
use crate::cli::images;
use crate::cli::model::load::Loaded;
use crate::cli::run::answer::{AnswerGeneration, AnswerSink, Generated, LOOPED, STUCK, is_closed};
use crate::cli::run::message_answer::MessageGeneration;
use crate::cli::run::next_turn::unanswered;
use crate::cli::run::report;
use crate::cli::think::Think;
use llmctl_base::{GivenSampling, Sampling};
use llmctl_engine::session::store::BranchReason;
use llmctl_engine::turn::session_chat::RecordedAnswer;
use llmctl_engine::turn::{
    Answer, AnswerStart, Finished, OutputConstraint, PlannedTurn, PromptedTurn, ToolUse, TurnRequest,
};
use llmctl_engine::{Finish, Limits};
use llmctl_template::{Content, Message};

/// Tokens that an answer leaves for the next message and the beginning of its answer, unless the context is small.
const NEXT_MESSAGE: usize = 512;

impl Chat<'_> {
    /// Says this, with what is attached.
    pub fn say(&mut self, text: String) -> Result<Effect, CommandError> {
        let kept = self.state.turns().len();
        self.say_instead(kept, text)
    }

    /// Says this after the first `kept` turns, in place of what came then.
    pub fn say_instead(&mut self, kept: usize, text: String) -> Result<Effect, CommandError> {
        self.take_place()?;
        let system = match kept {
            0 => self.state.system.clone().or_else(|| self.state.saved().system().map(str::to_owned)),
            _ => None,
        };
        self.state.pending = Some((kept, text.clone()));
        let text = with_attachments(&self.state.attached, text);
        let content = self.with_images(kept, images::content(&self.state.images, text)?);
        let before = self.results_before(kept).into_iter().chain(system.map(Message::system));
        let added = before.chain([Message::user(content)]).collect();
        let replaces = (kept < self.state.turns().len()).then_some(BranchReason::Edit);
        self.answer(AnswerRequest { kept, added, has_files: true, replaces, ..AnswerRequest::default() })
    }

    /// Adds the images of the message that this one replaces.
    fn with_images(&self, kept: usize, content: Content) -> Content {
        let replaced = self.state.turns().get(kept).and_then(|saved| question(&saved.turn.messages));
        let mut parts = replaced.map(images::parts_of).unwrap_or_default();
        if parts.is_empty() {
            return content;
        }
        parts.extend(content.into_parts());
        parts.into()
    }

    /// Returns the results of the calls that the first `kept` turns end with, as far as this chat has them.
    fn results_before(&self, kept: usize) -> Vec<Message> {
        let turns = &self.state.turns()[..kept];
        let results = self.state.results.as_ref();
        match results.filter(|results| turns.last().is_some_and(|last| Arc::ptr_eq(last, &results.turn))) {
            Some(results) => results.messages.clone(),
            None => unanswered(turns),
        }
    }

    /// Answers, runs what tools the answer calls, and answers again.
    pub fn answer(&mut self, asked: AnswerRequest) -> Result<Effect, CommandError> {
        let mut asked = asked;
        if self.model.endpoint().is_some() {
            let ChatState { session_chat, files, .. } = &mut self.state;
            images::add_kept(files, session_chat.saved());
        }
        for round in 0.. {
            let Some((turn, fitting)) = self.fit(asked)? else { return Ok(self.unsent()) };
            let AnsweredTurn { prompted, sampling, generated } = self.generate(turn, &fitting)?;
            let ending = ending(&generated, self.ui.is_interactive());
            let answer = generated.answer;
            let is_kept = self.keep((prompted, sampling), &answer, &fitting)?;
            if let Some(failure) = generated.failure {
                return Err(failure);
            }
            match ending {
                Some(Effect::Prompt) => return Ok(self.unsent()),
                Some(next) => return Ok(next),
                None => {}
            }
            // The model would not see the results of the last round.
            if round == self.max_rounds && is_kept && !answer.tool_calls.is_empty() {
                break;
            }
            let results = if is_kept { self.run_tools(&answer)? } else { None };
            let Some(results) = results else { return Ok(Effect::Prompt) };
            let turn = self.state.turns().last().cloned();
            self.state.results = turn.map(|turn| CallResults { turn, messages: results.clone() });
            if let Some(number) = self.ui.graceful.received() {
                self.ui.terminal.note("(stopped; the results of the calls go with the next message)");
                return Ok(stopped(number, self.ui.is_interactive()));
            }
            asked =
                AnswerRequest { kept: self.state.turns().len(), added: results, ..AnswerRequest::default() };
        }
        let most = counted(self.max_rounds as usize, "answer");
        self.ui.terminal.warn(format!(
            "the calls of {most} in a row were run, and those of the next were not (--max-tool-rounds); type a message to continue"
        ));
        Ok(Effect::Prompt)
    }

    /// Returns the tools of the next answer. A schema says what the whole answer is: there are no calls beside it.
    pub fn offered_tools(&self) -> Vec<Value> {
        if self.state.schema.is_some() { Vec::new() } else { self.tool_definitions() }
    }

    /// Returns the request to a model that the settings make.
    pub fn turn_request(&self, llm: &Loaded, asked: &AnswerRequest, prompt_tokens: usize) -> TurnRequest {
        let given = GivenSampling { seed: asked.seed, ..GivenSampling::default() };
        let sampling = given.or(&self.state.settings.sampling.given).or(&llm.info().defaults);
        let source = self.state.schema.as_ref().map(|schema| schema.source.clone());
        TurnRequest {
            answer_start: AnswerStart::Tokens(asked.begun.clone()),
            tools: ToolUse { definitions: self.offered_tools(), is_parallel: true, ..ToolUse::default() },
            constraint: source.map(|source| OutputConstraint { source, param: "/json" }),
            is_streamed: true,
            reasoning_budget: self.state.think.budget,
            sampling,
            limits: self.limits(llm, prompt_tokens, asked),
            images: self.state.files.clone(),
            ..TurnRequest::default()
        }
    }

    fn generate(&self, turn: PromptedTurn, asked: &AnswerRequest) -> Result<AnsweredTurn, CommandError> {
        match self.model.answerer() {
            Answerer::Loaded(llm) => self.generate_here(llm, turn, asked),
            Answerer::Endpoint(endpoint) => self.generate_there(endpoint, turn, asked),
        }
    }

    /// Asks the endpoint.
    fn generate_there(
        &self,
        endpoint: &ChatEndpoint,
        prompted: PromptedTurn,
        asked: &AnswerRequest,
    ) -> Result<AnsweredTurn, CommandError> {
        let (tools, plain) = (self.offered_tools(), self.endpoint_request(prompted.messages()));
        let request = EndpointRequest { tools: &tools, seed: asked.seed, ..plain };
        let generation = MessageGeneration { endpoint, request: &request, graceful: &self.ui.graceful };
        let generated = self.on_screen(self.state.think, None, |screen| generation.run(screen))?;
        let sampling = Sampling { seed: request.seed(), ..self.sampling() };
        Ok(AnsweredTurn { prompted, sampling, generated })
    }

    fn generate_here(
        &self,
        llm: &Loaded,
        turn: PromptedTurn,
        asked: &AnswerRequest,
    ) -> Result<AnsweredTurn, CommandError> {
        let prompt_tokens = turn.tokens().len() + asked.begun.len();
        let turn_request = self.turn_request(llm, asked, prompt_tokens);
        let PlannedTurn { prompted, plan, .. } = PlannedTurn::new(llm.planner(), turn, &turn_request)?;
        let (session, graceful) = (&self.state.engine_name(), &self.ui.graceful);
        let session = Some(session);
        let generation = AnswerGeneration { llm, turn: &turn_request, plan: &plan, session, graceful };
        let estimate = self.model.throughput.time(prompt_tokens);
        let generated = self.on_screen(self.state.think, estimate, |screen| generation.run(screen))?;
        Ok(AnsweredTurn { prompted, sampling: turn_request.sampling(), generated })
    }

    /// Shows an answer while it is generated; `estimate` is the time for its prompt.
    pub fn on_screen(
        &self,
        think: Think,
        estimate: Option<Duration>,
        generate: impl FnOnce(&mut dyn AnswerSink) -> Result<Generated, CommandError>,
    ) -> Result<Generated, CommandError> {
        let options = RendererOptions { think, is_styled: self.ui.is_styled(), estimate };
        let mut screen = Renderer::new(self.ui.terminal, options);
        let mut generated = generate(&mut screen)?;
        generated.is_reader_gone |= is_closed(screen.finish())?;
        drop(screen);
        generated.notice.iter().for_each(|notice| self.ui.terminal.warn(notice));
        Ok(generated)
    }

    /// Unless the user or the model says how long an answer may be, it leaves room for the next message: one that never ends
    /// does not end the conversation. An answer that is continued may take what there is.
    fn limits(&self, llm: &Loaded, prompt_tokens: usize, asked: &AnswerRequest) -> Limits {
        let limits = self.state.settings.limits();
        let has_limit = limits.max_tokens.is_some() || own_limit(llm).is_some();
        if has_limit || !asked.begun.is_empty() {
            return limits;
        }
        let size = llm.info().context_tokens;
        let reserve = NEXT_MESSAGE.min(size / 8);
        let left = size.saturating_sub(prompt_tokens + reserve).max(self.room(size));
        Limits { max_tokens: Some(left), ..limits }
    }

    /// Saves the turn and reports what became of it; returns whether there is one.
    fn keep(
        &mut self,
        (turn, sampling): (PromptedTurn, Sampling),
        answer: &Answer,
        asked: &AnswerRequest,
    ) -> Result<bool, CommandError> {
        let (Answer { started, outcome, .. }, record) = (answer, RecordedAnswer::of(answer, sampling));
        let branch = match asked.replaces.filter(|_| !record.is_empty(&turn)) {
            Some(reason) => self.state.set_aside(reason)?,
            None => None,
        };
        let is_kept = self.state.session_chat.record(turn, record)? == Finished::Kept;
        if is_kept {
            self.state.last = Some(LastTurn { started: started.clone(), outcome: Some(outcome.clone()) });
            self.state.pending = None;
            if asked.has_files {
                self.state.attached.clear();
                self.state.images.clear();
            }
            if let SavePlace::Saved { is_fresh, .. } = &mut self.state.keeping {
                *is_fresh = false;
            }
        }
        if outcome.usage.looped_reasoning {
            self.ui.terminal.note(LOOPED);
        }
        self.note_finish(&outcome.finish, is_kept, self.model.context());
        if let Some(branch) = branch {
            self.ui.terminal.note(format!("(what this replaced is kept as {branch}; /redo brings it back)"));
        }
        let terminal = self.ui.terminal;
        if self.model.here().is_some() {
            self.model.throughput.note(&outcome.usage, &outcome.timings);
        }
        if let Some((started, llm)) = started.as_ref().zip(self.model.here()) {
            terminal.detail(&report::reuse(started, llm.texts()));
        }
        self.model.take_notices().iter().for_each(|notice| terminal.warn(notice));
        self.warn_of_context();
        Ok(is_kept)
    }

    /// Notes the reason for an answer that is not whole. The context has `size` tokens, unless an endpoint answers, which does not say.
    fn note_finish(&mut self, finish: &Finish, is_kept: bool, size: Option<usize>) {
        let (terminal, is_here) = (self.ui.terminal, size.is_some());
        let has_limit = self.state.settings.limits().max_tokens.is_some();
        let own_limit = self.model.here().and_then(own_limit);
        match (finish, own_limit) {
            _ if !is_kept && is_here => terminal.note("(stopped before the answer began; the message was not sent)"),
            _ if !is_kept => terminal
                .note("(stopped before the answer began; the message is not part of the conversation)"),
            (Finish::Cancelled, _) if is_here => {
                terminal.note("(stopped; the answer so far is kept, /continue resumes it)")
            }
            (Finish::Cancelled, _) => {
                terminal.note("(the answer so far is kept as a cancelled turn; /retry answers again)")
            }
            (Finish::MaxTokens, _) if !is_here => {
                terminal.note("(cut at max-tokens or at the endpoint's own limit; ask it to go on)")
            }
            (Finish::MaxTokens, _) if has_limit => terminal.note("(cut at max-tokens; /continue resumes it)"),
            (Finish::MaxTokens, Some(most)) => {
                let most = counted(most, "token");
                terminal.note(format!("(cut: this model's answers have at most {most}, and end when they repeat)"));
            }
            (Finish::MaxTokens, None) => terminal.warn(
                "the answer was cut to leave room for your next message; /continue resumes it, /compact makes room",
            ),
            (Finish::Repetition, _) => terminal.warn(format!(
                "{STUCK}; /retry answers again, with temperature 0 after /set temperature 0.8; /continue resumes it all the same"
            )),
            (Finish::Deadline, _) => terminal.note("(cut at the deadline; /continue resumes it)"),
            (Finish::ContextFull, _) => {
                self.state.has_warned = true; // this says it
                let size = grouped(size.unwrap_or_default());
                terminal.warn(format!(
                    "the answer was cut: the context of {size} tokens is full; /compact makes room, /undo takes the turn back"
                ));
            }
            (Finish::Eos(_) | Finish::StopString(_) | Finish::Complete, _) => {}
        }
    }

    /// Generates the last answer again, or continues it.
    pub fn answer_again(&mut self, begun: Vec<u32>, seed: Option<u64>) -> Result<Effect, CommandError> {
        let turns = self.state.turns();
        let Some(last) = turns.last() else { return Err(CommandError::usage("there is no answer yet")) };
        let added = last.turn.messages[..last.turn.messages.len() - 1].to_vec();
        // An answer that is continued is all there still.
        let replaces = begun.is_empty().then_some(BranchReason::Retry);
        self.answer(AnswerRequest { kept: turns.len() - 1, added, begun, seed, has_files: false, replaces })
    }
}

/// An answer that is not saved yet.
struct AnsweredTurn {
    prompted: PromptedTurn,
    /// As requested.
    sampling: Sampling,
    generated: Generated,
}

/// Returns the most tokens of a model's answer if the user sets no limit.
fn own_limit(llm: &Loaded) -> Option<usize> {
    llm.engine().spec().config.answer_tokens
}

/// Returns the effect of an answer's end on the chat.
pub fn ending(generated: &Generated, is_interactive: bool) -> Option<Effect> {
    match generated.signal.map(|number| stopped(number, is_interactive)) {
        Some(Effect::Prompt) | None if generated.is_reader_gone => Some(Effect::Leave(Exit::Success)),
        effect => effect,
    }
}

/// Returns the effect of a signal on the chat: Ctrl-C at a terminal stops the work only.
fn stopped(number: u8, is_interactive: bool) -> Effect {
    match is_interactive && number == super::SIGINT {
        true => Effect::Prompt,
        false => Effect::Leave(Exit::Signal(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_engine::turn::AnswerStream;

    #[test]
    fn a_signal_stops_the_answer_and_outside_a_terminal_the_chat() {
        let effect = |signal, is_reader_gone, is_interactive| {
            let answer = AnswerStream::default().finish(AnswerStream::default().cancelled()).1;
            let (failure, notice) = (None, None);
            ending(&Generated { answer, signal, is_reader_gone, failure, notice }, is_interactive)
        };
        let (hup, int, term) = (1, super::super::SIGINT, 15);
        let left = |exit| Some(Effect::Leave(exit));
        assert_eq!(effect(None, false, true), None);
        assert_eq!(effect(None, true, true), left(Exit::Success));
        assert_eq!(effect(Some(int), false, true), Some(Effect::Prompt));
        assert_eq!(effect(Some(int), true, true), left(Exit::Success));
        assert_eq!(effect(Some(int), false, false), left(Exit::Signal(int)));
        assert_eq!(effect(Some(term), true, true), left(Exit::Signal(term)));
        assert_eq!(effect(Some(hup), true, true), left(Exit::Signal(hup)));
    }
}
