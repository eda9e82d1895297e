//! The greeting before the first message: what is saved of the conversation, and what of it is in the cache.

use std::time::Instant;

use super::{Chat, TRIFLE, planned_name};
use crate::cli::chat::model::Answerer;
use crate::cli::chat::state::{LastTurn, SavePlace};
use crate::cli::chat::{counted, grouped, spoken};
use crate::cli::error::CommandError;
use crate::cli::mcp::ToolServers;
use crate::cli::model::load::Loaded;
use llmctl_base::Error;
use llmctl_engine::turn::saved_images;
use llmctl_engine::{Event, Limits, Overflow, PromptImage, Request, ReuseReason, Started};

impl Chat<'_> {
    /// Brings the session's KV back before the first message: the conversation is asked for as a prompt, outside of its
    /// session, and left when work on it would begin. Its pages stay where the first message finds them.
    pub(super) fn warm_up(&mut self) -> Result<Option<String>, CommandError> {
        let Some(llm) = self.model.here() else { return Ok(None) };
        let saved = self.state.saved();
        let is_ours = saved.turns.last().is_some_and(|turn| turn.model.is_same(llm.texts().fingerprint()));
        let tokens = saved.tokens();
        let num_tokens = tokens.len();
        if llm.engine().remote().is_some() {
            return Ok(None); // asking would make the engine compute, and it says nothing before its answer
        }
        if !is_ours || num_tokens == 0 {
            return Ok(None);
        }
        if num_tokens >= llm.info().context_tokens {
            let said = format!("{}, more than the context holds", counted(num_tokens, "token"));
            return Ok(Some(said));
        }
        let start = Instant::now();
        let images = saved_images(llm.texts().chat_tokenizer(), saved);
        let found = images.map_err(Into::into).and_then(|images| look_for(llm, tokens, images));
        let mut started = match found {
            Ok(started) => started,
            // The first message will say it, if it is still so.
            Err(error) => return Ok(Some(format!("not resumed: {error}"))),
        };
        // AnswerRequest for outside of its session, a conversation seems new; it is saved, so its KV was there once.
        if started.reuse.reason == ReuseReason::New {
            started.reuse.reason = ReuseReason::Evicted;
        }
        let cached = started.reuse.cached_tokens;
        self.state.last = Some(LastTurn { started: Some(started), outcome: None });
        let estimate = |count| self.model.throughput.time(count).map(spoken);
        if num_tokens - cached < TRIFLE && cached * 2 < num_tokens {
            return Ok(None);
        }
        let said = if cached * 2 < num_tokens {
            // Report the rest, which is computed with the first message.
            let time = estimate(num_tokens - cached).map_or(String::new(), |time| format!(", about {time}"));
            let missing = grouped(num_tokens - cached);
            match cached {
                0 => format!(
                    "cache missing: the conversation ({}) will be recomputed{time}",
                    counted(num_tokens, "token")
                ),
                _ => format!(
                    "cache incomplete: {missing} of {} will be recomputed{time}",
                    counted(num_tokens, "token")
                ),
            }
        } else {
            let cost = estimate(num_tokens)
                .map_or(String::new(), |time| format!(", recomputing would take about {time}"));
            format!("resumed {} in {}{cost}", counted(cached, "token"), spoken(start.elapsed()))
        };
        Ok(Some(said))
    }

    pub(super) fn banner(&self, resumed: Option<&str>) {
        let session = match &self.state.keeping {
            SavePlace::Nowhere => "not saved".to_owned(),
            SavePlace::Planned => format!("session {}", planned_name()),
            SavePlace::Saved { name, .. } => match self.state.turns().len() {
                0 => format!("session {name}, new"),
                count => format!("session {name}, {}", counted(count, "turn")),
            },
        };
        let place = match self.model.answerer() {
            Answerer::Loaded(llm) => format!("context {}", grouped(llm.info().context_tokens)),
            Answerer::Endpoint(endpoint) => format!("at {}", endpoint.url()),
        };
        let help = self.ui.is_interactive().then(|| "/help".to_owned());
        let parts = [self.model.name().to_owned(), place, session]
            .into_iter()
            .chain(self.servers.as_ref().map(ToolServers::spoken))
            .chain(resumed.map(str::to_owned))
            .chain(help);
        self.ui.terminal.note(parts.collect::<Vec<_>>().join(" \u{b7} "));
        if self.model.endpoint().is_some() {
            self.ui
                .terminal
                .note("(messages go there as text: no context meter, /context, /why, /continue or /compact)");
        }
    }
}

/// Asks the engine how many of these tokens it can reuse.
fn look_for(llm: &Loaded, prompt: Vec<u32>, images: Vec<PromptImage>) -> Result<Started, CommandError> {
    let limits = Limits { max_tokens: Some(1), overflow: Overflow::Clamp, ..Limits::default() };
    let mut events = llm.engine().submit(Request { prompt, images, limits, ..Request::default() })?;
    let mut found = None;
    while let Some(event) = events.next() {
        match event {
            Event::Started(started) => {
                found = Some(started);
                events.cancel();
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    found.ok_or_else(|| Error::EngineGone.into())
}
