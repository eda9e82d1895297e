//! `/compare`: the last message answered by other models, or with other settings and texts, beside the first answer.
//!
//! Invariants: the conversation does not change, on disk or in memory; nothing is called; the model and the settings of the chat
//! stay as they are.

use std::iter;

use super::counted;
use super::model::{Answerer, NextModel};
use super::session::Chat;
use super::state::{AnswerRequest, Effect, SavePlace};
use super::turn::ending;
use crate::cli::endpoint::ChatEndpoint;
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::CommandError;
use crate::cli::images;
use crate::cli::model::load::Loaded;
use crate::cli::run::answer::{AnswerCounter, AnswerGeneration, AnswerSink, Generated};
use crate::cli::run::compare::{Column, ComparedFacts, Variation, shown, side_by_side};
use crate::cli::run::message_answer::MessageGeneration;
use crate::cli::think::{Think, Thinking};
use llmctl_engine::session::store::SavedTurn;
use llmctl_engine::turn::{PlannedTurn, SessionChat, TurnRequest};
use llmctl_template::Message;

/// The message that is answered again.
struct Question {
    /// The conversation before the first answer.
    messages: Vec<Message>,
    /// The turn with the first answer.
    first: std::sync::Arc<SavedTurn>,
}

/// One more answer, and its model.
struct OtherAnswer {
    name: String,
    model: String,
    generated: Generated,
}

impl Chat<'_> {
    /// Answers the last message under each variation.
    ///
    /// # Errors
    /// There is no answer yet, or a model cannot be loaded or reached, or refuses the conversation.
    pub fn compare(&mut self, variations: &[Variation]) -> Result<Effect, CommandError> {
        let question = self.question()?;
        let width = self.ui.terminal.width().filter(|_| self.ui.is_interactive());
        let is_beside = Column::fit(variations.len() + 1, width);
        let mut answers = Vec::new();
        for variation in variations {
            let (settings, think) = (self.state.settings.clone(), self.state.think);
            let answered = self.answer_varied(variation, &question, is_beside);
            (self.state.settings, self.state.think) = (settings, think);
            answers.push(answered?);
            if answers.last().is_some_and(|answer| answer.generated.signal.is_some()) {
                break;
            }
        }
        self.show_all(&question, &answers, is_beside);
        let endings = answers.iter().find_map(|answer| ending(&answer.generated, self.ui.is_interactive()));
        Ok(endings.unwrap_or(Effect::Prompt))
    }

    fn question(&self) -> Result<Question, CommandError> {
        let turns = self.state.turns();
        let Some(last) = turns.last() else {
            return Err(CommandError::usage("/compare: there is no answer yet"));
        };
        let (_, asked) = last.turn.messages.split_last().expect("a turn ends with its answer");
        let before = turns[..turns.len() - 1].iter().flat_map(|saved| &saved.turn.messages);
        Ok(Question { messages: before.chain(asked).cloned().collect(), first: last.clone() })
    }

    /// Answers under a variation, whose settings the chat has afterwards.
    fn answer_varied(
        &mut self,
        variation: &Variation,
        question: &Question,
        is_beside: bool,
    ) -> Result<OtherAnswer, CommandError> {
        variation.change("/compare", &mut self.state.settings, &mut self.state.think)?;
        let mut messages = question.messages.clone();
        variation.change_messages(&mut messages)?;
        let is_saved = self.state.keeping != SavePlace::Nowhere;
        let next = variation.model.as_ref().map(|reference| self.model.meant(reference));
        if let Some(NextModel::Here(reference)) = &next {
            self.model.load_beside(reference, is_saved)?;
        }
        let connected = match &next {
            Some(NextModel::There(choice)) => Some(self.model.connect(choice)?),
            _ => None,
        };
        let beside = self.model.beside().filter(|_| matches!(next, Some(NextModel::Here(_))));
        let ask = (messages.as_slice(), variation.name(""), is_beside);
        let (model, generated) = match (connected.as_ref(), beside, self.model.answerer()) {
            (Some(endpoint), ..) => (endpoint.model(), self.ask_there(endpoint, ask)?),
            (None, Some(llm), _) => (llm.info().name.as_str(), self.ask_here(llm, ask)?),
            (None, None, Answerer::Loaded(llm)) => (llm.info().name.as_str(), self.ask_here(llm, ask)?),
            (None, None, Answerer::Endpoint(endpoint)) => (endpoint.model(), self.ask_there(endpoint, ask)?),
        };
        let name = variation.name("").to_owned();
        Ok(OtherAnswer { name, model: model.to_owned(), generated })
    }

    /// Asks a model that is loaded here.
    fn ask_here(
        &self,
        llm: &Loaded,
        (messages, name, is_beside): (&[Message], &str, bool),
    ) -> Result<Generated, CommandError> {
        let thinking = Thinking::of(llm.texts().chat_tokenizer());
        let think = self.think_of(&thinking);
        let conversation = self.conversation(messages.to_vec(), think, &thinking);
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
        self.generated(think, is_beside, name, |sink| generation.run(sink))
    }

    fn ask_there(
        &self,
        endpoint: &ChatEndpoint,
        (messages, name, is_beside): (&[Message], &str, bool),
    ) -> Result<Generated, CommandError> {
        let tools = self.offered_tools();
        let mut images = self.state.files.clone();
        images::add_kept(&mut images, self.state.session_chat.saved());
        let request = EndpointRequest { tools: &tools, images: &images, ..self.endpoint_request(messages) };
        let generation = MessageGeneration { endpoint, request: &request, graceful: &self.ui.graceful };
        let answered = self.generated(self.state.think, is_beside, name, |sink| generation.run(sink))?;
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

    fn show_all(&self, question: &Question, answers: &[OtherAnswer], is_beside: bool) {
        let terminal = self.ui.terminal;
        let first = &question.first;
        let model = first.model.name.as_str();
        if is_beside {
            let message = first.turn.messages.last().expect("a turn ends with its answer");
            let column =
                |name: &str, message: &Message| Column { title: name.to_owned(), text: shown(message) };
            let others =
                answers.iter().map(|answer| column(&answer.name, &answer.generated.answer.to_message()));
            let columns: Vec<_> = iter::once(column(model, message)).chain(others).collect();
            terminal.report(&side_by_side(&columns, terminal.columns()));
        }
        let measured = self.state.last.as_ref().and_then(|last| last.outcome.as_ref());
        let before = ComparedFacts {
            name: "the answer",
            model,
            usage: &first.turn.usage,
            timings: measured.map(|outcome| &outcome.timings),
            finish: &first.turn.finish,
        };
        let facts = answers.iter().map(|OtherAnswer { name, model, generated }| {
            ComparedFacts::of(name, model, &generated.answer.outcome)
        });
        terminal.report(ComparedFacts::table(iter::once(before).chain(facts), terminal.columns()).trim_end());
        if answers.iter().any(|answer| answer.generated.signal.is_some()) {
            terminal.note("(stopped)");
        }
        terminal.note("(not part of the conversation; /model, /set and /retry take one over)");
    }
}
