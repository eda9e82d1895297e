//! One generation, from the request to its end: events in, a sink fed, signals heeded.
//!
//! The loop waits for the engine in short steps, so that a signal is seen also while nothing is generated. A sink
//! that cannot go on (a closed pipe, a full disk) cancels the request at once.

use std::time::Duration;

use crate::cli::error::CommandError;
use crate::cli::output::OutputError;
use crate::cli::signal::Graceful;
use crate::runtime::{
    EngineClient, Error, Event, Finish, NotYet, Outcome, Request, Started, Timings, Token, Usage,
};

/// How often signals are looked for while the engine is silent.
const POLL: Duration = Duration::from_millis(25);

/// Where an answer goes while it is made.
pub trait Sink {
    fn started(&mut self, _started: &Started) -> Result<(), OutputError> {
        Ok(())
    }

    fn prefill(&mut self, _done: usize, _total: usize) -> Result<(), OutputError> {
        Ok(())
    }

    fn text(&mut self, text: &str, tokens: &[Token]) -> Result<(), OutputError>;

    /// Called while nothing comes, a few times a second or more.
    fn waiting(&mut self) {}

    /// Whether the answer has to end here, as if it had been cancelled.
    fn is_enough(&self) -> bool {
        false
    }
}

/// What was said on the way to a sink.
pub struct Heard<'a> {
    sink: &'a mut dyn Sink,
    pub said: Said,
}

/// An answer so far.
#[derive(Debug, Clone, Default)]
pub struct Said {
    pub started: Option<Started>,
    pub text: String,
    /// All generated tokens.
    pub ids: Vec<u32>,
}

impl<'a> Heard<'a> {
    pub fn new(sink: &'a mut dyn Sink) -> Self {
        Self { sink, said: Said::default() }
    }
}

impl Sink for Heard<'_> {
    fn started(&mut self, started: &Started) -> Result<(), OutputError> {
        self.said.started = Some(started.clone());
        self.sink.started(started)
    }

    fn prefill(&mut self, done: usize, total: usize) -> Result<(), OutputError> {
        self.sink.prefill(done, total)
    }

    fn text(&mut self, text: &str, tokens: &[Token]) -> Result<(), OutputError> {
        self.said.text.push_str(text);
        self.said.ids.extend(tokens.iter().map(|token| token.id));
        self.sink.text(text, tokens)
    }

    fn waiting(&mut self) {
        self.sink.waiting();
    }

    fn is_enough(&self) -> bool {
        self.sink.is_enough()
    }
}

impl Said {
    /// The outcome of an answer whose reader went away, as far as it is known.
    pub fn cut_off(&self) -> Outcome {
        let started = self.started.as_ref();
        let usage = Usage {
            prompt_tokens: started.map_or(0, |started| started.prompt_tokens),
            cached_tokens: started.map_or(0, |started| started.reuse.cached_tokens),
            completion_tokens: self.ids.len(),
        };
        let seed = started.map_or(0, |started| started.seed);
        Outcome { finish: Finish::Cancelled, usage, timings: Timings::default(), seed }
    }
}

/// How a generation came to its end.
#[derive(Debug)]
pub enum Ending {
    /// The engine finished it; `signal` is what asked it to, if one did.
    Done { outcome: Outcome, signal: Option<u8> },
    /// The reader of the answer went away.
    ReaderGone { signal: Option<u8> },
}

/// Runs one request to its end.
///
/// # Errors
/// The engine's refusal or failure, or that the sink cannot be written to.
pub fn generate(
    engine: &EngineClient,
    request: Request,
    graceful: &Graceful,
    sink: &mut dyn Sink,
) -> Result<Ending, CommandError> {
    let mut events = engine.submit(request)?;
    let (mut signal, mut has_enough) = (None, false);
    loop {
        if signal.is_none() && graceful.received().is_some() {
            signal = graceful.received();
            events.cancel();
        }
        if !has_enough && sink.is_enough() {
            has_enough = true;
            events.cancel();
        }
        let event = match events.next_timeout(POLL) {
            Ok(Some(event)) => event,
            Ok(None) => return Err(Error::EngineGone.into()),
            Err(NotYet) => {
                sink.waiting();
                continue;
            }
        };
        let fed = match event {
            Event::Queued { .. } => Ok(()), // the engine here has no other caller to wait for
            Event::Started(started) => sink.started(&started),
            Event::Prefill { done, total } => sink.prefill(done, total),
            Event::Prompt { .. } => Ok(()), // nobody here asks for it
            Event::Text { .. } if has_enough => Ok(()), // the engine has run ahead
            Event::Text { text, tokens } => sink.text(&text, &tokens),
            Event::Done(outcome) if has_enough => {
                return Ok(Ending::Done {
                    outcome: Outcome { finish: Finish::Cancelled, ..outcome },
                    signal,
                });
            }
            Event::Done(outcome) => return Ok(Ending::Done { outcome, signal }),
            Event::Failed(error) => return Err(error.into()),
        };
        // Leaving drops the events, which cancels the request.
        match fed {
            Ok(()) => {}
            Err(OutputError::Closed) => return Ok(Ending::ReaderGone { signal: graceful.received() }),
            Err(OutputError::Failed(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::Kind;
    use crate::runtime::client::script::{Script, saying};

    /// Takes this many texts, then fails.
    struct Narrow {
        text: String,
        room: usize,
        then: fn() -> OutputError,
    }

    impl Sink for Narrow {
        fn text(&mut self, text: &str, _tokens: &[Token]) -> Result<(), OutputError> {
            if self.room == 0 {
                return Err((self.then)());
            }
            self.room -= 1;
            self.text.push_str(text);
            Ok(())
        }
    }

    fn run(
        script: &Script,
        room: usize,
        then: fn() -> OutputError,
    ) -> (String, Result<Ending, CommandError>) {
        let mut sink = Narrow { text: String::new(), room, then };
        let request = Request { prompt: vec![1], ..Request::default() };
        let ending = generate(&EngineClient::new(script.clone()), request, &Graceful::begin(), &mut sink);
        (sink.text, ending)
    }

    fn script(events: Vec<Event>) -> Script {
        Script::default().answering(events)
    }

    #[test]
    fn text_comes_in_order_and_the_outcome_last() {
        let (text, ending) = run(&script(saying("hello", 1, Finish::MaxTokens)), 99, || unreachable!());
        assert_eq!(text, "hello");
        let Ok(Ending::Done { outcome, signal: None }) = ending else { panic!("{ending:?}") };
        assert_eq!((outcome.finish, outcome.usage.completion_tokens), (Finish::MaxTokens, 5));
    }

    #[test]
    fn a_reader_that_leaves_is_no_error_and_a_full_disk_is() {
        let (text, ending) = run(&script(saying("hello", 1, Finish::MaxTokens)), 2, || OutputError::Closed);
        assert_eq!(text, "he");
        assert!(matches!(ending, Ok(Ending::ReaderGone { signal: None })), "{ending:?}");

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
