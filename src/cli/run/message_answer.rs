//! One answer of an endpoint, from the request to its end: as [`super::answer`], for a server that takes
//! messages.
//!
//! Invariant: an answer that has begun is never begun anew; what came before the endpoint was lost is the
//! answer so far.

use serde_json::{Map, Value};

use super::answer::{AnswerSink, Generated, POLL, is_closed};
use crate::cli::endpoint::ChatEndpoint;
use crate::cli::endpoint::answer::{EndpointAnswer, PartsEnd};
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::CommandError;
use crate::cli::terminal::signal::Graceful;
use llmctl_engine::NotYet;
use llmctl_engine::http_engine::{HttpFailure, MessagePart, MessageStream};
use llmctl_engine::turn::Delta;

const CUT_OFF: &str = "the connection ended in the middle of the answer";

/// Inputs of one answer.
#[derive(Clone, Copy)]
pub struct MessageGeneration<'a> {
    pub endpoint: &'a ChatEndpoint,
    pub request: &'a EndpointRequest<'a>,
    pub graceful: &'a Graceful,
}

/// Why no more parts are read.
enum ReadEnd {
    /// The endpoint has ended the answer.
    Ended,
    Signal(u8),
    ReaderGone,
    Failed(CommandError),
}

impl MessageGeneration<'_> {
    /// Generates the answer.
    ///
    /// # Errors
    /// The endpoint refuses the request or fails before the answer begins, or the sink cannot be written to.
    pub fn run(self, sink: &mut dyn AnswerSink) -> Result<Generated, CommandError> {
        let mut body = self.endpoint.body(self.request)?;
        let mut answer = EndpointAnswer::begin();
        let stop = self.read(&mut body, &mut answer, sink)?;
        let (end, signal, mut is_reader_gone, failure) = match stop {
            ReadEnd::Ended => (answer.end(), None, false, None),
            ReadEnd::Signal(number) => (PartsEnd::Cut, Some(number), false, None),
            ReadEnd::ReaderGone => (PartsEnd::Cut, self.graceful.received(), true, None),
            ReadEnd::Failed(error) if answer.is_begun() => (PartsEnd::Cut, None, false, Some(error)),
            ReadEnd::Failed(error) => return Err(error),
        };
        let notice = notice_of(&end);
        let (deltas, answer) = answer.finish(&end, self.request.seed());
        if !is_reader_gone {
            is_reader_gone = is_closed(sink.answer(&deltas, &[], answer.num_reasoning_tokens))?;
        }
        Ok(Generated { answer, signal, is_reader_gone, failure, notice })
    }

    /// Reads the answer to its end. A refusal that says how the request should be put is followed: each habit of a server is learned
    /// once, so that there is an end.
    fn read(
        &self,
        body: &mut Map<String, Value>,
        answer: &mut EndpointAnswer,
        sink: &mut dyn AnswerSink,
    ) -> Result<ReadEnd, CommandError> {
        loop {
            let stream = self.endpoint.send(body);
            match self.read_stream(&stream, answer, sink)? {
                Ok(stop) => return Ok(stop),
                Err(failure) if !answer.is_begun() && self.endpoint.adapt(&failure, body) => {}
                Err(HttpFailure::Broken(_)) if answer.is_begun() => return Ok(self.cut_off()),
                Err(failure) => return Ok(ReadEnd::Failed(self.endpoint.failure(&failure))),
            }
        }
    }

    fn cut_off(&self) -> ReadEnd {
        ReadEnd::Failed(self.endpoint.broken(CUT_OFF))
    }

    fn read_stream(
        &self,
        stream: &MessageStream,
        answer: &mut EndpointAnswer,
        sink: &mut dyn AnswerSink,
    ) -> Result<Result<ReadEnd, HttpFailure>, CommandError> {
        loop {
            if let Some(number) = self.graceful.received() {
                return Ok(Ok(ReadEnd::Signal(number)));
            }
            let part = match stream.next_timeout(POLL) {
                Err(NotYet) if answer.is_overdue() => return Ok(Ok(ReadEnd::Ended)),
                Err(NotYet) => {
                    sink.waiting();
                    continue;
                }
                // A connection that breaks behind the end of the answer has lost the counts only.
                Ok(Err(_)) if answer.is_ended() => return Ok(Ok(ReadEnd::Ended)),
                Ok(Err(failure)) => return Ok(Err(failure)),
                Ok(Ok(part)) => part,
            };
            let deltas = match self.take(part, answer) {
                Ok(Some(deltas)) => deltas,
                Ok(None) => return Ok(Ok(ReadEnd::Ended)),
                Err(why) => return Ok(Ok(ReadEnd::Failed(self.endpoint.broken(&why)))),
            };
            if is_closed(sink.answer(&deltas, &[], answer.num_reasoning_tokens()))? {
                return Ok(Ok(ReadEnd::ReaderGone));
            }
        }
    }

    /// Returns the deltas of a part; `None` at the end of the answer.
    fn take(&self, part: MessagePart, answer: &mut EndpointAnswer) -> Result<Option<Vec<Delta>>, String> {
        match part {
            MessagePart::Event(text) if text.trim() == "[DONE]" => Ok(None),
            MessagePart::Event(text) => answer.take(&text).map(Some),
            MessagePart::Whole { content_type, text } => match content_type.starts_with("text/html") {
                true => {
                    Err("it answers with a web page: is the address that of the API, with /v1?".to_owned())
                }
                false => answer.take(&text).map(Some),
            },
            MessagePart::End if answer.is_ended() => Ok(None),
            MessagePart::End if answer.is_begun() => Err(CUT_OFF.to_owned()),
            MessagePart::End => Err("it answers without the events of a stream".to_owned()),
        }
    }
}

fn notice_of(end: &PartsEnd) -> Option<String> {
    match end {
        PartsEnd::Ended(Some(word))
            if !matches!(word.as_str(), "stop" | "length" | "tool_calls" | "function_call") =>
        {
            Some(format!("the endpoint ended the answer: {}", word.escape_debug()))
        }
        _ => None,
    }
}
