//! The answer of an endpoint, put together from the parts that it sends.
//!
//! Takes the dialects of OpenAI, vLLM, llama.cpp, Ollama and others: reasoning under two names, calls without
//! an index, a whole message in place of a stream.
//!
//! Invariant: a call that is cut is never reported as whole.

use std::time::{Duration, Instant};

use serde_json::Value;

use llmctl_engine::turn::{Answer, AnsweredCall, Delta};
use llmctl_engine::{Finish, Outcome, Timings, Usage};

/// Longest wait for the counts that follow the end of an answer.
const COUNTS_TIME: Duration = Duration::from_secs(5);

/// Most bytes of an answer.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// Most calls of an answer.
const MAX_CALLS: usize = 1024;

/// End of an answer's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartsEnd {
    /// The endpoint ended it, for this reason in its own words.
    Ended(Option<String>),
    /// The reader or the user left, or the endpoint was lost.
    Cut,
}

/// An answer while it comes.
pub struct EndpointAnswer {
    content: String,
    reasoning: String,
    calls: Vec<AnsweredCall>,
    usage: Option<Usage>,
    num_reasoning_tokens: usize,
    /// The endpoint's word for the end, and when it came.
    finish: Option<(String, Instant)>,
    began: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl EndpointAnswer {
    /// Begins an answer now.
    pub fn begin() -> Self {
        Self {
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            usage: None,
            num_reasoning_tokens: 0,
            finish: None,
            began: Instant::now(),
            first: None,
            last: None,
        }
    }

    /// Returns whether anything of the answer has come.
    pub fn is_begun(&self) -> bool {
        self.first.is_some()
    }

    /// Returns whether the endpoint has said why the answer ends.
    pub fn is_ended(&self) -> bool {
        self.finish.is_some()
    }

    /// Returns whether so much time has passed since the end that its counts will not come.
    pub fn is_overdue(&self) -> bool {
        self.finish.as_ref().is_some_and(|(_, at)| at.elapsed() > COUNTS_TIME)
    }

    /// Returns the tokens of reasoning, if the endpoint has counted them.
    pub fn num_reasoning_tokens(&self) -> usize {
        self.num_reasoning_tokens
    }

    /// Takes an event, or the whole answer of an endpoint that does not stream.
    ///
    /// # Errors
    /// The endpoint's own error, or what cannot be read.
    pub fn take(&mut self, text: &str) -> Result<Vec<Delta>, String> {
        let unreadable = || format!("its answer cannot be read: {text}");
        let value: Value = serde_json::from_str(text).map_err(|_| unreadable())?;
        if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
            let message = error["message"].as_str().or(error.as_str()).map(str::to_owned);
            return Err(format!("it reports an error: {}", message.unwrap_or_else(|| error.to_string())));
        }
        if !value["choices"].is_array() {
            return Err(unreadable());
        }
        self.count(&value["usage"]);
        let choice = &value["choices"][0];
        let part = if choice["message"].is_object() { &choice["message"] } else { &choice["delta"] };
        let deltas = self.part(part);
        let is_whole = choice["message"].is_object();
        // Some endpoints send an empty word with each part.
        let word = choice["finish_reason"].as_str().filter(|word| !word.is_empty());
        if let Some(finish) = word.or(is_whole.then_some("stop")) {
            self.finish = Some((finish.to_owned(), Instant::now()));
        }
        if !deltas.is_empty() {
            self.note_time();
        }
        if self.calls.len() > MAX_CALLS {
            return Err(format!("its answer has more than {MAX_CALLS} calls"));
        }
        let bytes_of = |call: &AnsweredCall| call.id.len() + call.name.len() + call.arguments.len();
        let calls: usize = self.calls.iter().map(bytes_of).sum();
        match self.content.len() + self.reasoning.len() + calls > MAX_TEXT_BYTES {
            true => Err("its answer is longer than 16 MiB".to_owned()),
            false => Ok(deltas),
        }
    }

    /// Notes that a part of the answer has come.
    fn note_time(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    fn count(&mut self, usage: &Value) {
        let count = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
        let Some(prompt_tokens) = count(&usage["prompt_tokens"]) else { return };
        self.usage = Some(Usage {
            prompt_tokens,
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"])
                .unwrap_or(0)
                .min(prompt_tokens),
            completion_tokens: count(&usage["completion_tokens"]).unwrap_or(0),
            ..Usage::default()
        });
        let reasoning = count(&usage["completion_tokens_details"]["reasoning_tokens"]);
        self.num_reasoning_tokens = reasoning.unwrap_or(self.num_reasoning_tokens);
    }

    fn part(&mut self, part: &Value) -> Vec<Delta> {
        let text = |name: &str| part[name].as_str().filter(|text| !text.is_empty());
        let mut deltas = Vec::new();
        if let Some(text) = text("reasoning_content").or(text("reasoning")) {
            self.reasoning.push_str(text);
            deltas.push(Delta::Reasoning(text.to_owned()));
        }
        for text in [text("content"), text("refusal")].into_iter().flatten() {
            self.content.push_str(text);
            deltas.push(Delta::Content(text.to_owned()));
        }
        for call in part["tool_calls"].as_array().into_iter().flatten() {
            self.call(call, &mut deltas);
        }
        deltas
    }

    /// Takes a part of a call. One with another id than the call of its index, or without an index, begins a call.
    fn call(&mut self, part: &Value, deltas: &mut Vec<Delta>) {
        let (id, name) = (part["id"].as_str().unwrap_or_default(), part["function"]["name"].as_str());
        let name = name.filter(|name| !name.is_empty());
        let given = part["index"].as_u64().and_then(|index| usize::try_from(index).ok());
        let known = given.filter(|&index| index < self.calls.len()).filter(|&index| {
            // Some endpoints give each of several calls the index 0.
            name.is_none() || id.is_empty() || id == self.calls[index].id
        });
        let last = self.calls.len().checked_sub(1).filter(|_| given.is_none() && name.is_none());
        let index = match (known.or(last), name) {
            (Some(index), _) => index,
            (None, None) => return, // arguments of no call
            (None, Some(name)) => {
                let index = self.calls.len();
                let id = if id.is_empty() { format!("call_{index}") } else { id.to_owned() };
                deltas.push(Delta::Call { index, id: id.clone(), name: name.to_owned() });
                let arguments = String::new();
                self.calls.push(AnsweredCall { id, name: name.to_owned(), arguments, is_whole: false });
                index
            }
        };
        let fragment = match &part["function"]["arguments"] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            object => object.to_string(),
        };
        if !fragment.is_empty() {
            self.calls[index].arguments.push_str(&fragment);
            deltas.push(Delta::Arguments { index, fragment });
        }
    }

    /// Returns how the answer ended, if the endpoint has ended it.
    pub fn end(&self) -> PartsEnd {
        PartsEnd::Ended(self.finish.as_ref().map(|(word, _)| word.clone()))
    }

    /// Ends the answer; returns the deltas that end its calls, too. `seed` is the one that was asked for.
    pub fn finish(mut self, end: &PartsEnd, seed: Option<u64>) -> (Vec<Delta>, Answer) {
        let finish = match end {
            PartsEnd::Cut => Finish::Cancelled,
            PartsEnd::Ended(Some(word)) if word == "length" => Finish::MaxTokens,
            PartsEnd::Ended(Some(word)) if word == "repetition" => Finish::Repetition,
            PartsEnd::Ended(_) => Finish::Complete,
        };
        let mut deltas = Vec::new();
        for (index, call) in self.calls.iter_mut().enumerate() {
            if call.arguments.trim().is_empty() && finish == Finish::Complete {
                call.arguments = "{}".to_owned();
            }
            let is_object =
                serde_json::from_str::<Value>(&call.arguments).is_ok_and(|value| value.is_object());
            call.is_whole = is_object && finish == Finish::Complete;
            if call.is_whole {
                deltas.push(Delta::CallEnd { index });
            }
        }
        let outcome = Outcome {
            finish,
            timings: self.timings(),
            usage: self.usage.unwrap_or_default(),
            seed: seed.unwrap_or_default(),
            adapters: Vec::new(),
        };
        let answer = Answer {
            content: self.content,
            reasoning: self.reasoning,
            tool_calls: self.calls,
            num_reasoning_tokens: self.num_reasoning_tokens,
            tokens: Vec::new(),
            content_tokens: Vec::new(),
            outcome,
            started: None,
        };
        (deltas, answer)
    }

    fn timings(&self) -> Timings {
        let since = |from: Instant| move |to: Instant| to.saturating_duration_since(from);
        let decode = self.first.zip(self.last).map(|(first, last)| since(first)(last));
        Timings {
            queue: Duration::ZERO,
            encode: Duration::ZERO,
            prefill: Duration::ZERO, // the endpoint does not say
            decode: decode.unwrap_or_default(),
            time_to_first_token: self.first.map(since(self.began)),
            total: self.began.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(parts: &[Value]) -> (Vec<Delta>, Answer) {
        let mut answer = EndpointAnswer::begin();
        let mut deltas = Vec::new();
        for part in parts {
            deltas.extend(answer.take(&part.to_string()).expect("readable"));
        }
        let end = answer.end();
        let (last, answer) = answer.finish(&end, None);
        (deltas.into_iter().chain(last).collect(), answer)
    }

    fn delta(delta: Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
    }

    fn calls(parts: &[Value]) -> Vec<(String, String, String, bool)> {
        let parts: Vec<Value> = parts.iter().map(|part| delta(json!({"tool_calls": part}))).collect();
        let (_, answer) = answer(&parts);
        let call = |call: AnsweredCall| (call.id, call.name, call.arguments, call.is_whole);
        answer.tool_calls.into_iter().map(call).collect()
    }

    #[test]
    fn text_and_reasoning_of_all_dialects() {
        let (deltas, answer) = answer(&[
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning_content": "h"})),
            delta(json!({"reasoning": "m", "content": null})),
            delta(json!({"content": "a", "refusal": null})),
            json!({"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
                "prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 2}}}),
        ]);
        assert_eq!((answer.content.as_str(), answer.reasoning.as_str()), ("ab", "hm"));
        assert_eq!(deltas.len(), 4);
        let usage = &answer.outcome.usage;
        assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens), (9, 5, 4));
        assert_eq!((answer.num_reasoning_tokens, answer.outcome.finish.clone()), (2, Finish::Complete));
        assert!(answer.outcome.timings.time_to_first_token.is_some());
    }

    #[test]
    fn a_whole_message_is_an_answer_too() {
        let (_, answer) =
            answer(&[json!({"choices": [{"message": {"content": "hi"}, "finish_reason": "length"}]})]);
        assert_eq!((answer.content.as_str(), answer.outcome.finish), ("hi", Finish::MaxTokens));
    }

    #[test]
    fn calls_are_told_apart_with_and_without_an_index() {
        let call = |id: &str, name: &str, arguments: &str, is_whole| {
            (id.to_owned(), name.to_owned(), arguments.to_owned(), is_whole)
        };
        let streamed = calls(&[
            json!([{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]),
            json!([{"index": 0, "function": {"arguments": "{\"x\":"}}]),
            json!([{"index": 0, "function": {"arguments": "1}"}}]),
            json!([{"index": 1, "id": "b", "function": {"name": "g", "arguments": ""}}]),
        ]);
        assert_eq!(streamed, [call("a", "f", "{\"x\":1}", true), call("b", "g", "{}", true)]);
        let same_index = calls(&[
            json!([{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]),
            json!([{"index": 0, "id": "b", "function": {"name": "f", "arguments": "{\"y\":2}"}}]),
        ]);
        assert_eq!(same_index, [call("a", "f", "{}", true), call("b", "f", "{\"y\":2}", true)]);
        let no_index = calls(&[
            json!([{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}}]),
        ]);
        assert_eq!(no_index, [call("a", "f", "{\"x\":1}", true), call("call_1", "g", "{}", true)]);
    }

    #[test]
    fn an_answer_without_end_is_cut() {
        let part = delta(json!({"content": "x".repeat(MAX_TEXT_BYTES / 2)})).to_string();
        let mut answer = EndpointAnswer::begin();
        assert!(answer.take(&part).is_ok() && answer.take(&part).is_ok());
        assert!(answer.take(&part).is_err_and(|why| why.contains("longer than 16 MiB")));
        let calls = |name: &str| delta(json!({"tool_calls": [{"function": {"name": name}}]})).to_string();
        let taken = |part: &str| {
            let mut answer = EndpointAnswer::begin();
            (0..=MAX_CALLS).find_map(|_| answer.take(part).err()).expect("it has no end")
        };
        assert!(taken(&calls("f")).contains("more than 1024 calls"));
        assert!(taken(&calls(&"f".repeat(1 << 20))).contains("longer than 16 MiB"), "names count, too");
    }

    #[test]
    fn an_empty_word_ends_no_answer() {
        let part = |word: &str| json!({"choices": [{"delta": {"content": "a"}, "finish_reason": word}]});
        let mut answer = EndpointAnswer::begin();
        answer.take(&part("").to_string()).expect("readable");
        assert!(answer.is_begun() && !answer.is_ended());
        answer.take(&part("stop").to_string()).expect("readable");
        assert!(answer.is_ended());
    }

    #[test]
    fn a_cut_call_is_not_whole() {
        let part = delta(
            json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}),
        );
        let mut answer = EndpointAnswer::begin();
        answer.take(&part.to_string()).expect("readable");
        let (_, cut) = answer.finish(&PartsEnd::Cut, None);
        assert!(!cut.tool_calls[0].is_whole && cut.outcome.finish == Finish::Cancelled);
        let half =
            calls(&[json!([{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{\"x\":"}}])]);
        assert!(!half[0].3);
    }

    #[test]
    fn errors_in_the_stream_are_the_endpoints_words() {
        let take = |text: &str| EndpointAnswer::begin().take(text).expect_err(text);
        assert_eq!(take(r#"{"error":{"message":"overloaded"}}"#), "it reports an error: overloaded");
        assert_eq!(take(r#"{"error":"bad"}"#), "it reports an error: bad");
        assert!(take("<html>").contains("cannot be read: <html>"));
        assert!(take(r#"{"object":"x"}"#).contains("cannot be read"));
    }
}
