//! Room in the context: the warning before it ends, the question when it has, and the two ways to make some.
//!
//! Invariants: turns are never dropped silently; before a saved conversation loses turns, all of it is copied
//! to another session. Without a terminal, a message that does not fit is an error.

use std::sync::Arc;

use super::session::Chat;
use super::state::{AnswerRequest, SavePlace, opening, question};
use super::{counted, grouped};
use crate::cli::error::CommandError;
use crate::cli::run::answer::{AnswerCounter, AnswerGeneration};
use crate::cli::run::next_turn::text;
use llmctl_base::{Error, GivenSampling};
use llmctl_engine::session::store::SavedTurn;
use llmctl_engine::turn::session_chat::RecordedAnswer;
use llmctl_engine::turn::{Answer, PlannedTurn, PromptedTurn, TurnRequest};
use llmctl_engine::{Finish, Limits, Outcome, Overflow, Timings, Usage};
use llmctl_template::Message;

/// Share of the context at which there is a warning.
const WARN_PERCENT: usize = 80;

/// Least tokens left for an answer, unless the context is small.
const ROOM: usize = 256;

/// Most tokens of a summary, unless the context is small.
const SUMMARY: usize = 512;

const SUMMARY_QUESTION: &str = "Summarise our conversation so far for yourself: you will go on with the summary in place of \
the conversation. Keep names, numbers, decisions, open questions and what I asked of you. Write nothing else.";

/// The question that the summary answers in the conversation that continues.
const SUMMARY_TITLE: &str = "Summarise our conversation so far.";

/// The user's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OverflowChoice {
    Drop,
    Compact,
    Stop,
}

impl Chat<'_> {
    /// Says once that the context is nearly full.
    pub fn warn_of_context(&mut self) {
        let Some(size) = self.model.context() else { return };
        let used = self.state.saved().num_tokens();
        let is_near = used * 100 >= size * WARN_PERCENT;
        if is_near && !self.state.has_warned {
            self.ui.terminal.warn(format!(
                "{}% of the context is used ({} of {} tokens); /compact summarises it, /context shows what fills it",
                used * 100 / size,
                grouped(used),
                grouped(size)
            ));
        }
        self.state.has_warned = is_near;
    }

    /// Returns the prompt of a request, once it fits; `None` if the user stops.
    pub fn fit(
        &mut self,
        asked: AnswerRequest,
    ) -> Result<Option<(PromptedTurn, AnswerRequest)>, CommandError> {
        let mut asked = asked;
        let Some(size) = self.model.context() else {
            return Ok(Some((self.prompted(&asked)?, asked))); // an endpoint says itself what does not fit
        };
        loop {
            let (turn, needed) = self.measured(&asked)?;
            let has_room = needed + self.room(size) <= size;
            let free = self.free(asked.kept, &asked.added);
            let is_last_resort = free == 0 || !self.ui.is_interactive();
            if let Some(turn) = turn.filter(|_| has_room || (is_last_resort && needed < size)) {
                return Ok(Some((turn, asked)));
            }
            // No room can be made for a message that is too long by itself.
            let alone = self.tokens_alone(&asked)?;
            if alone >= size {
                return Err(message_too_long(alone, size));
            }
            if is_last_resort {
                return Err(too_long(needed, size));
            }
            let oldest = self.at_question(self.oldest(free, needed, size), free);
            match self.ask_for_room(needed, oldest, size)? {
                OverflowChoice::Drop => self.drop_oldest(oldest, &mut asked)?,
                OverflowChoice::Compact => self.compact_before(&mut asked, size)?,
                OverflowChoice::Stop => {
                    self.ui.terminal.note("(not sent)");
                    return Ok(None);
                }
            }
        }
    }

    /// Tokens of the prompt that is left when everything before the message goes; none where there is no message.
    fn tokens_alone(&self, asked: &AnswerRequest) -> Result<usize, CommandError> {
        if question(&asked.added).is_none() {
            return Ok(0);
        }
        let system = self.state.saved().system().filter(|_| asked.kept > 0).map(Message::system);
        let added = system.into_iter().chain(asked.added.iter().cloned()).collect();
        let (_, needed) =
            self.measured(&AnswerRequest { added, begun: asked.begun.clone(), ..AnswerRequest::default() })?;
        Ok(needed)
    }

    /// Returns the prompt and its number of tokens, those of a begun answer included. For a prompt that is refused by its size
    /// the first is `None` and the second a lower bound.
    fn measured(&self, asked: &AnswerRequest) -> Result<(Option<PromptedTurn>, usize), CommandError> {
        match self.prompted(asked) {
            Ok(turn) => {
                let needed = turn.tokens().len() + asked.begun.len();
                Ok((Some(turn), needed))
            }
            Err(error) => match error.runtime() {
                Some(
                    Error::PromptTooLong { prompt_tokens: least, .. }
                    | Error::PromptOversized { least_tokens: least, .. },
                ) => Ok((None, *least + asked.begun.len())),
                _ => Err(error),
            },
        }
    }

    /// Tokens that an answer should at least have in a context of `size`.
    pub fn room(&self, size: usize) -> usize {
        let most = self.state.settings.limits().max_tokens.unwrap_or(ROOM);
        ROOM.min(size / 8).min(most).max(1)
    }

    /// Returns how many of the first turns must go to free a quarter of the context, or the tokens that are missing for `needed`
    /// if these are more.
    fn oldest(&self, kept: usize, needed: usize, size: usize) -> usize {
        let missing = (needed + self.room(size)).saturating_sub(size).max(size / 4);
        let turns = &self.state.turns()[..kept];
        let frees = |saved: &Arc<SavedTurn>| saved.turn.num_tokens() >= missing;
        turns.iter().position(frees).map_or(kept, |at| at + 1)
    }

    /// Returns the first place from `count` on where a question begins: a tool's result does not stand without its call.
    fn at_question(&self, count: usize, kept: usize) -> usize {
        let turns = self.state.turns();
        (count..kept).find(|&at| question(&turns[at].turn.messages).is_some()).unwrap_or(kept)
    }

    /// Turns that may go: those before the question that `added` belongs to.
    fn free(&self, kept: usize, added: &[Message]) -> usize {
        if added.is_empty() || question(added).is_some() {
            return kept;
        }
        let turns = &self.state.turns()[..kept];
        turns.iter().rposition(|saved| question(&saved.turn.messages).is_some()).unwrap_or(0)
    }

    fn ask_for_room(
        &mut self,
        needed: usize,
        oldest: usize,
        size: usize,
    ) -> Result<OverflowChoice, CommandError> {
        let questions: Vec<String> =
            self.state.turns()[..oldest].iter().map(|saved| format!("    {}", opening(saved))).collect();
        self.ui.terminal.report(&format!(
            "The context is full: with this message the conversation takes {} of {} tokens, and the answer needs some.\n  d  \
             drop the oldest {}:\n{}\n  c  compact: the model summarises the older turns\n  s  stop: do not send the message",
            grouped(needed),
            grouped(size),
            if oldest == 1 { "turn".to_owned() } else { format!("{oldest} turns") },
            questions.join("\n")
        ));
        loop {
            let choice = match self.ui.input.ask("d, c or s? ")?.as_deref() {
                Some("d" | "drop") => OverflowChoice::Drop,
                Some("c" | "compact") => OverflowChoice::Compact,
                None | Some("" | "s" | "stop") => OverflowChoice::Stop,
                Some(_) => continue,
            };
            return Ok(choice);
        }
    }

    /// Forgets the first turns of the conversation.
    fn drop_oldest(&mut self, count: usize, asked: &mut AnswerRequest) -> Result<(), CommandError> {
        self.leave_copy()?;
        let system = self.state.saved().system().map(str::to_owned);
        let rest = self.state.turns()[count..asked.kept].to_vec();
        asked.kept = rest.len();
        asked.replaces = None; // the copy has it all
        match (rest.is_empty(), system) {
            (true, Some(system)) => asked.added.insert(0, Message::system(system)),
            (true, None) => {}
            (false, system) => self.replay(system, None, &rest)?,
        }
        Ok(())
    }

    /// `/compact`: all but the last turn becomes a summary.
    pub fn compact(&mut self) -> Result<(), CommandError> {
        let size = self.model.needed_for("/compact")?.info().context_tokens;
        let kept = self.state.turns().len();
        if kept < 2 {
            return Err(CommandError::usage("there is nothing to compact yet"));
        }
        let before = self.state.saved().num_tokens();
        let mut asked = AnswerRequest { kept, ..AnswerRequest::default() };
        self.compact_before(&mut asked, size)?;
        let after = self.state.saved().num_tokens();
        self.ui.terminal.report(&format!(
            "the conversation went from {} to {}",
            grouped(before),
            counted(after, "token")
        ));
        Ok(())
    }

    fn compact_before(&mut self, asked: &mut AnswerRequest, size: usize) -> Result<(), CommandError> {
        let summary_tokens = SUMMARY.min(size / 4).max(1);
        let free = self.free(asked.kept, &asked.added);
        let (count, turn) = self.summary_prompt(asked.kept, free, summary_tokens, size)?;
        let summary = self.summarise(&turn, summary_tokens)?;
        self.leave_copy()?;
        let system = self.state.saved().system().map(str::to_owned);
        let rest = self.state.turns()[count..asked.kept].to_vec();
        self.replay(system, Some(&summary), &rest)?;
        asked.kept = rest.len() + 1;
        asked.replaces = None; // the copy has it all
        let (turns, tokens) = (counted(count, "turn"), counted(summary.generated.len(), "token"));
        self.ui.terminal.note(format!("{turns} became a summary of {tokens}"));
        Ok(())
    }

    /// Returns the question for a summary of as many of the first `free` turns as fit with it; the last one of all is left as it is
    /// where there are others and it is short.
    fn summary_prompt(
        &self,
        kept: usize,
        free: usize,
        summary_tokens: usize,
        size: usize,
    ) -> Result<(usize, PromptedTurn), CommandError> {
        let turns = &self.state.turns()[..kept];
        let lengths: Vec<usize> = turns.iter().map(|saved| saved.turn.num_tokens()).collect();
        let is_short = match lengths[..] {
            [.., before, last] => last.saturating_sub(before) <= size / 4,
            _ => false,
        };
        let most = if is_short { free.min(kept - 1) } else { free };
        let mut needed = 0;
        for count in (1..=most).rev().filter(|&count| self.at_question(count, kept) == count) {
            let added = vec![Message::user(SUMMARY_QUESTION)];
            let turn = self.prompted(&AnswerRequest { kept: count, added, ..AnswerRequest::default() })?;
            needed = turn.tokens().len();
            let is_summary = count == 1
                && question(&turns[0].turn.messages).is_some_and(|asked| text(asked) == SUMMARY_TITLE);
            if is_summary {
                let error = CommandError::usage(
                    "the older turns are a summary already, and the last one leaves no room",
                );
                return Err(error.hint("/undo takes the last turn back, /new starts another conversation"));
            }
            if needed + summary_tokens <= size {
                return Ok((count, turn));
            }
        }
        if needed == 0 {
            return Err(CommandError::usage("there is no older turn to summarise"));
        }
        Err(too_long(needed, size))
    }

    fn summarise(&self, turn: &PromptedTurn, max_tokens: usize) -> Result<RecordedAnswer, CommandError> {
        let sampling = GivenSampling::GREEDY;
        let limits = Limits { max_tokens: Some(max_tokens), overflow: Overflow::Clamp, ..Limits::default() };
        let request = TurnRequest { sampling, limits, ..TurnRequest::default() };
        let llm = self.model.needed_for("/compact")?;
        let PlannedTurn { plan, .. } = PlannedTurn::new(llm.planner(), turn.clone(), &request)?;
        let (turn, graceful) = (&request, &self.ui.graceful);
        let generation = AnswerGeneration { llm, turn, plan: &plan, session: None, graceful };
        let (terminal, spoken) = (self.ui.terminal, |count| format!("compacting, {} tokens", grouped(count)));
        let generated = generation.run(&mut AnswerCounter { terminal, count: 0, spoken: &spoken });
        terminal.status("");
        let Answer { content, reasoning, tokens, outcome, .. } = generated?.answer;
        if outcome.finish == Finish::Cancelled || content.trim().is_empty() {
            let error = CommandError::usage("the model gave no summary; the conversation is unchanged");
            return Err(if reasoning.is_empty() { error } else { error.hint("/think off, then /compact") });
        }
        let (message, generated) =
            (Message::assistant(content.trim()), tokens.iter().map(|token| token.id).collect());
        Ok(RecordedAnswer { message, generated, outcome, sampling: request.sampling() })
    }

    /// Makes the conversation a summary, if there is one, and these turns.
    fn replay(
        &mut self,
        system: Option<String>,
        summary: Option<&RecordedAnswer>,
        turns: &[Arc<SavedTurn>],
    ) -> Result<(), CommandError> {
        let mut messages: Vec<Message> = system.into_iter().map(Message::system).collect();
        if let Some(summary) = summary {
            messages.push(Message::user(SUMMARY_TITLE));
            // The text goes back into prompts, not the ids: they answered another prompt, perhaps after reasoning.
            let generated = self.ids_of(&summary.message)?;
            self.replay_turn(&mut messages, RecordedAnswer { generated, ..summary.clone() })?;
        }
        for saved in turns {
            let turn = &saved.turn;
            let [added @ .., message] = turn.messages.as_slice() else { continue };
            let is_system = |message: &&Message| message.role != llmctl_template::Role::System;
            messages.extend(added.iter().filter(is_system).cloned());
            let generated = match saved.model.is_same(&self.model.fingerprint()) {
                true => turn.generated.clone(),
                false => self.ids_of(message)?,
            };
            let usage = Usage {
                prompt_tokens: 0,
                cached_tokens: 0,
                completion_tokens: generated.len(),
                ..Usage::default()
            };
            let seed = turn.sampling.seed.unwrap_or_default();
            let outcome = Outcome {
                finish: turn.finish.clone(),
                usage,
                timings: Timings::default(),
                seed,
                adapters: turn.adapters.clone(),
            };
            let sampling = turn.sampling.clone();
            self.replay_turn(
                &mut messages,
                RecordedAnswer { message: message.clone(), generated, outcome, sampling },
            )?;
        }
        self.state.last = None;
        Ok(())
    }

    fn replay_turn(
        &mut self,
        messages: &mut Vec<Message>,
        answer: RecordedAnswer,
    ) -> Result<(), CommandError> {
        let chat_tokenizer = self.model.needed_for("/compact")?.texts().chat_tokenizer();
        let conversation = self.conversation(messages.clone(), self.state.think, &self.model.thinking());
        let turn = self.state.session_chat.prompt(chat_tokenizer, conversation, &self.state.files)?;
        let usage = Usage { prompt_tokens: turn.tokens().len(), ..answer.outcome.usage };
        let message = answer.message.clone();
        self.state
            .session_chat
            .record(turn, RecordedAnswer { outcome: Outcome { usage, ..answer.outcome }, ..answer })?;
        messages.push(message);
        Ok(())
    }

    fn ids_of(&self, message: &Message) -> Result<Vec<u32>, CommandError> {
        Ok(self.model.needed_for("/compact")?.texts().chat_tokenizer().encode_rest(&text(message))?)
    }

    /// Leaves the whole conversation as another session, before it loses turns.
    fn leave_copy(&self) -> Result<(), CommandError> {
        let SavePlace::Saved { name, .. } = &self.state.keeping else { return Ok(()) };
        let copy = self.free_name(&format!("{name}-whole"))?;
        drop(self.store()?.fork(name, &copy, None)?);
        self.ui.terminal.note(format!("the whole conversation is kept as session {copy}"));
        Ok(())
    }
}

/// Returns the error of a prompt that is too long, when the user cannot be asked.
fn too_long(prompt_tokens: usize, context_tokens: usize) -> CommandError {
    CommandError::from(Error::PromptTooLong { prompt_tokens, context_tokens }).hint(
        "shorten the message, start over with /new, or restart with a larger --ctx if the model allows it",
    )
}

/// Returns the error of a message that is too long by itself.
fn message_too_long(prompt_tokens: usize, size: usize) -> CommandError {
    let (needed, size) = (counted(prompt_tokens, "token"), grouped(size));
    let error =
        CommandError::bad_data(format!("the message needs at least {needed}, the context holds {size}"));
    error.hint("shorten it, or restart with a larger --ctx if the model allows it")
}
