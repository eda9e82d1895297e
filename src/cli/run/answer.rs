//! One answer, from the request to its end: the engine's events become deltas for a sink, and signals are
//! heeded.
//!
//! The loop waits for the engine in short steps, so that it sees a signal also while nothing is generated. A
//! sink that cannot be written to (a closed pipe, a full disk) cancels the request at once.

use std::time::Duration;

use crate::cli::error::CommandError;
use crate::cli::model::load::Loaded;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::output::OutputError;
use crate::cli::terminal::signal::Graceful;
use llmctl_base::Error;
use llmctl_engine::turn::{Answer, AnswerStream, Delta, TurnPlan, TurnRequest};
use llmctl_engine::{
    EngineSessionName, Event, EventStream, LoopGuard, NotYet, Outcome, Request, Started, Token,
};

/// Interval at which signals are checked while the engine is silent.
pub(in crate::cli) const POLL: Duration = Duration::from_millis(25);

/// Receiver of an answer while it is generated.
pub trait AnswerSink {
    /// `deltas` are the beginning of the answer that the request gave.
    fn started(&mut self, _started: &Started, _deltas: &[Delta]) -> Result<(), OutputError> {
        Ok(())
    }

    fn prefill(&mut self, _done: usize, _total: usize) -> Result<(), OutputError> {
        Ok(())
    }

    /// `done` of `total` slices of the prompt's images are computed.
    fn encoding(&mut self, _done: usize, _total: usize) -> Result<(), OutputError> {
        Ok(())
    }

    /// More of the answer. Called for every step of the engine, with no deltas while the parser holds text back.
    /// `num_reasoning_tokens` counts the reasoning so far.
    fn answer(
        &mut self,
        _deltas: &[Delta],
        _tokens: &[Token],
        _num_reasoning_tokens: usize,
    ) -> Result<(), OutputError> {
        Ok(())
    }

    /// Returns true if a person watches, for whom an answer that repeats itself is stopped.
    fn is_watched(&self) -> bool {
        false
    }

    /// Called while nothing comes, a few times a second or more.
    fn waiting(&mut self) {}
}

/// Discards what comes, for callers that need the finished answer only.
impl AnswerSink for () {}

/// Counts the tokens of an answer that is not shown yet, on the status line.
pub struct AnswerCounter<'a> {
    pub terminal: &'a Terminal,
    pub count: usize,
    pub spoken: &'a dyn Fn(usize) -> String,
}

impl AnswerSink for AnswerCounter<'_> {
    fn answer(&mut self, deltas: &[Delta], tokens: &[Token], _: usize) -> Result<(), OutputError> {
        self.count += tokens.len().max(usize::from(!deltas.is_empty())); // an endpoint counts none
        self.terminal.status(&(self.spoken)(self.count));
        Ok(())
    }
}

/// Inputs of generating one answer.
#[derive(Clone, Copy)]
pub struct AnswerGeneration<'a> {
    pub llm: &'a Loaded,
    pub turn: &'a TurnRequest,
    pub plan: &'a TurnPlan,
    /// The engine's session that the request is in.
    pub session: Option<&'a EngineSessionName>,
    pub graceful: &'a Graceful,
}

/// A finished answer, and why it ended.
#[derive(Debug)]
pub struct Generated {
    pub answer: Answer,
    /// The signal that ended it.
    pub signal: Option<u8>,
    /// The reader of the answer has left; the engine was not waited for.
    pub is_reader_gone: bool,
    /// Why an endpoint was lost in the middle of the answer.
    pub failure: Option<CommandError>,
    /// An endpoint's word for the end, if it is an unusual one.
    pub notice: Option<String>,
}

/// End of one engine request.
enum Ending {
    Done { outcome: Outcome, signal: Option<u8> },
    ReaderGone { signal: Option<u8> },
}

impl AnswerGeneration<'_> {
    /// Generates the answer.
    ///
    /// # Errors
    /// The engine's refusal or failure, or that the sink cannot be written to.
    pub fn run(self, sink: &mut dyn AnswerSink) -> Result<Generated, CommandError> {
        let events = self.llm.engine().submit(self.request(sink.is_watched()))?;
        self.read(events, sink)
    }

    /// Reads the answer of a request that the engine has.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub fn read(self, events: EventStream, sink: &mut dyn AnswerSink) -> Result<Generated, CommandError> {
        let (stream, start) = self.plan.parser.stream();
        let mut run = Run { generation: self, stream, start, sink };
        let ending = run.events(events).inspect_err(|_| {
            // The error itself is what the caller reports; one of the sink would hide it.
            let deltas = run.stream.flush(true);
            let _ = run.sink.answer(&deltas, &[], run.stream.num_reasoning_tokens());
        })?;
        let (outcome, signal, is_gone) = match ending {
            Ending::Done { outcome, signal } => (outcome, signal, false),
            Ending::ReaderGone { signal } => (run.stream.cancelled(), signal, true),
        };
        let (deltas, answer) = run.stream.finish(outcome);
        let is_reader_gone =
            is_gone || is_closed(run.sink.answer(&deltas, &[], answer.num_reasoning_tokens))?;
        Ok(Generated { answer, signal, is_reader_gone, failure: None, notice: None })
    }

    fn request(&self, is_watched: bool) -> Request {
        let mut request = Request { session: self.session.cloned(), ..self.plan.request(self.turn) };
        let guard = &mut request.limits.loop_guard;
        if is_watched && guard.is_default() {
            *guard = WATCHED_LOOP_GUARD;
        }
        request
    }
}

/// An answer while it is generated.
struct Run<'a> {
    generation: AnswerGeneration<'a>,
    stream: AnswerStream,
    /// The deltas of the given beginning, until they are passed on.
    start: Vec<Delta>,
    sink: &'a mut dyn AnswerSink,
}

impl Run<'_> {
    /// Reads the events of one engine request to their end.
    fn events(&mut self, mut events: EventStream) -> Result<Ending, CommandError> {
        let mut signal = None;
        loop {
            if signal.is_none() && self.generation.graceful.received().is_some() {
                signal = self.generation.graceful.received();
                events.cancel();
            }
            let Some(event) = self.next_event(&mut events)? else { continue };
            let passed_on = match event {
                Event::Queued { .. } => Ok(()), // behind other rows of a batch
                Event::Started(started) => self.started(started),
                Event::Prefill { done, total } => self.sink.prefill(done, total),
                Event::Encoding { done, total } => self.sink.encoding(done, total),
                Event::Prompt { .. } => Ok(()), // not asked for here
                Event::Text { text, tokens } => {
                    let deltas = self.stream.push(&text, &tokens);
                    self.sink.answer(&deltas, &tokens, self.stream.num_reasoning_tokens())
                }
                Event::Done(outcome) => return Ok(Ending::Done { outcome, signal }),
                Event::Failed(error) => return Err(error.into()),
            };
            // Leaving drops the events, which cancels the request.
            if is_closed(passed_on)? {
                return Ok(Ending::ReaderGone { signal: self.generation.graceful.received() });
            }
        }
    }

    /// Waits a little for the next event.
    fn next_event(&mut self, events: &mut EventStream) -> Result<Option<Event>, CommandError> {
        match events.next_timeout(POLL) {
            Ok(Some(event)) => Ok(Some(event)),
            Ok(None) => Err(Error::EngineGone.into()),
            Err(NotYet) => {
                self.sink.waiting();
                Ok(None)
            }
        }
    }

    fn started(&mut self, started: Started) -> Result<(), OutputError> {
        let start = std::mem::take(&mut self.start);
        self.sink.started(self.stream.started.insert(started), &start)
    }
}

/// The guard of answers that a person watches, who has not chosen another.
pub const WATCHED_LOOP_GUARD: LoopGuard = LoopGuard::both(LoopGuard::USUAL);

/// Beginning of what users are told of an answer that was stopped because it repeats itself.
pub const STUCK: &str = "stopped: the last tokens are the same text over and over (--loop-guard)";

/// The notice about reasoning that the guard ended because it repeats itself.
pub const LOOPED: &str = "(the reasoning repeated itself and was ended; --loop-guard off lets it go on)";

/// Returns whether the reader has left.
pub(in crate::cli) fn is_closed(written: Result<(), OutputError>) -> Result<bool, CommandError> {
    match written {
        Ok(()) => Ok(false),
        Err(OutputError::Closed) => Ok(true),
        Err(OutputError::Failed(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::Kind;
    use crate::cli::script::{Script, saying};
    use llmctl_engine::Finish;
    use llmctl_engine::turn::TextPrompt;

    /// Takes this many texts, then fails.
    struct Narrow {
        text: String,
        room: usize,
        then: fn() -> OutputError,
    }

    impl AnswerSink for Narrow {
        fn answer(&mut self, deltas: &[Delta], _: &[Token], _: usize) -> Result<(), OutputError> {
            for delta in deltas {
                let Delta::Content(text) = delta else { panic!("{delta:?}") };
                self.room = self.room.checked_sub(1).ok_or_else(self.then)?;
                self.text.push_str(text);
            }
            Ok(())
        }
    }

    fn run(
        script: &Script,
        room: usize,
        then: fn() -> OutputError,
    ) -> (String, Result<Generated, CommandError>) {
        let llm = Loaded::scripted(script);
        let (turn, graceful) = (TurnRequest::default(), Graceful::begin());
        let plan =
            llm.planner().plan_text(&TextPrompt::Ids(vec![(vec![1], String::new())]), &turn).expect("a plan");
        let generation =
            AnswerGeneration { llm: &llm, turn: &turn, plan: &plan, session: None, graceful: &graceful };
        let mut sink = Narrow { text: String::new(), room, then };
        let generated = generation.run(&mut sink);
        (sink.text, generated)
    }

    fn script(events: Vec<Event>) -> Script {
        Script::default().answering(events)
    }

    #[test]
    fn text_comes_in_order_and_the_outcome_last() {
        let (text, ending) = run(&script(saying("hello", 1, Finish::MaxTokens)), 99, || unreachable!());
        assert_eq!(text, "hello");
        let Generated { answer, signal, is_reader_gone, .. } = ending.expect("an answer");
        assert_eq!((answer.content.as_str(), signal, is_reader_gone), ("hello", None, false));
        assert_eq!((answer.outcome.finish, answer.outcome.usage.completion_tokens), (Finish::MaxTokens, 5));
    }

    #[test]
    fn a_reader_that_leaves_is_no_error_and_a_full_disk_is() {
        let (text, ending) = run(&script(saying("hello", 1, Finish::MaxTokens)), 2, || OutputError::Closed);
        assert_eq!(text, "he");
        let generated = ending.expect("no error");
        assert!(generated.is_reader_gone && generated.signal.is_none(), "{generated:?}");

        let full = || OutputError::new("standard output", std::io::ErrorKind::StorageFull.into());
        let (_, ending) = run(&script(saying("hello", 1, Finish::MaxTokens)), 2, full);
        assert_eq!(ending.unwrap_err().kind, Kind::Io);
    }

    #[test]
    fn a_failure_and_a_silent_death_are_errors() {
        let (_, ending) =
            run(&script(vec![Event::Failed(Error::Backend("nan".into()))]), 9, || unreachable!());
        assert_eq!(ending.unwrap_err().kind, Kind::Failure);
        let (_, ending) = run(&script(vec![]), 9, || unreachable!());
        assert_eq!(ending.unwrap_err().kind, Kind::Bug);
    }
}
