//! A client written for the reference server's worker: one request at a time, no ids, its fields and lines and no others.

use super::client::{Process, ReplyBody, check, some_ids, validator};
use crate::common::prelude::*;

/// Fails on any line that the reference server's worker would not write.
struct Strict {
    process: Process,
    reply: jsonschema::Validator,
}

impl Strict {
    fn start(args: &[&str]) -> Self {
        Self { process: Process::start(args), reply: validator("reference_reply") }
    }

    #[track_caller]
    fn ask(&mut self, line: &Value) -> ReplyBody {
        let answer = self.process.client.ask(line);
        answer.lines.iter().for_each(|line| check(&self.reply, line));
        answer
    }

    #[track_caller]
    fn op(&mut self, op: &str, session: &str) -> Value {
        let answer = self.ask(&json!({"op": op, "session_id": session}));
        assert_eq!(answer.lines.len(), 1, "{answer:?}");
        answer.lines[0].clone()
    }

    /// A turn of twelve tokens, which ends with its length.
    #[track_caller]
    fn turn(&mut self, session: &str, segments: &Value) -> ReplyBody {
        let mut line =
            json!({"prompt_segments": segments, "max_new_tokens": 12, "temperature": 0.0, "stop": []});
        if !session.is_empty() {
            line["session_id"] = session.into();
        }
        let answer = self.ask(&line);
        let done = answer.done();
        let count = |name: &str| done[name].as_u64().unwrap_or_else(|| panic!("{name}: {done}"));
        assert_eq!(count("reused_prompt_tokens") + count("prefilled_prompt_tokens"), count("prompt_tokens"));
        assert!(count("completion_tokens") <= 12);
        assert_eq!(
            done["generated_token_ids"].as_array().map(Vec::len),
            Some(count("completion_tokens") as usize)
        );
        answer
    }
}

fn count(answer: &ReplyBody, name: &str) -> u64 {
    answer.done()[name].as_u64().expect("a number")
}

fn reason(answer: &ReplyBody) -> &str {
    answer.done()["session_reset_reason"].as_str().expect("a word")
}

#[test]
fn it_generates_and_streams() {
    let mut strict = Strict::start(&[]);
    let ready = &strict.process.ready;
    assert_eq!(ready["protocol"], 1);
    assert_eq!((&ready["max_sessions"], &ready["max_named_sessions"]), (&json!(257), &json!(256)));
    let answer = strict.ask(&json!({"prompt": "Once upon a time", "max_new_tokens": 20, "temperature": 0}));
    assert!(answer.lines.len() > 5, "a line per piece of text: {answer:?}");
    assert_eq!(reason(&answer), "new");
    let again = strict.ask(&json!({"op": "generate", "prompt": "Once upon a time", "max_new_tokens": 20}));
    assert_eq!(again.text(), answer.text());
    assert_eq!(count(&again, "completion_tokens"), count(&answer, "completion_tokens"));
    let long = strict.ask(&json!({"prompt": "x", "max_new_tokens": 1_000_000, "stop": [" "]}));
    assert!(!long.text().contains(' '));
    strict.process.finish();
}

#[test]
fn a_session_goes_on_where_it_was() {
    let mut strict = Strict::start(&[]);
    assert_eq!(strict.op("open", "s"), json!({"opened": true, "session_id": "s"}));
    assert_eq!(strict.op("open", "s"), json!({"opened": true, "session_id": "s"}), "again");
    let mut prompt = some_ids(40, 1);
    let first = strict.turn("s", &json!([{"ids": prompt}]));
    assert_eq!((reason(&first), count(&first, "prompt_tokens")), ("new", 40));
    let said: Vec<usize> = serde_json::from_value(first.done()["generated_token_ids"].clone()).expect("ids");
    let second = strict.turn("s", &json!([{"ids": prompt}, {"ids": said}, {"ids": [50, 51, 52]}]));
    prompt.extend(&said);
    assert_eq!(reason(&second), "exact_prefix");
    assert!(count(&second, "reused_prompt_tokens") as usize >= prompt.len() - 1, "{second:?}");
    prompt.extend([50, 51, 52]);
    let cold = strict.turn("", &json!([{"ids": prompt}]));
    assert_eq!(cold.text(), second.text(), "warm and cold are the same");

    assert_eq!(strict.op("reset", "s"), json!({"reset": true, "session_id": "s"}));
    let anew = strict.turn("s", &json!([{"ids": some_ids(30, 9)}]));
    assert_eq!((reason(&anew), count(&anew, "reused_prompt_tokens")), ("new", 0));
    assert_eq!(strict.op("close", "s"), json!({"closed": true, "session_id": "s"}));
    assert_eq!(strict.op("close", "s"), json!({"closed": true, "session_id": "s"}), "again");
    assert_eq!(strict.op("reset", "never"), json!({"reset": true, "session_id": "never"}));
    strict.process.finish();
}

#[test]
fn places_for_sessions_are_counted() {
    let mut strict = Strict::start(&["--max-sessions", "1"]);
    assert_eq!(strict.process.ready["max_named_sessions"], 1);
    let prompt = json!([{"ids": some_ids(40, 3)}]);
    assert_eq!(reason(&strict.turn("a", &prompt)), "new");
    assert_eq!(strict.op("open", "b")["opened"], true, "an idle session gives its slot up");
    assert_eq!(reason(&strict.turn("a", &prompt)), "prefix_cache", "its pages are found again");
    strict.op("close", "a");
    assert_eq!(strict.op("open", "b")["opened"], true, "the slot is free again");
    strict.process.finish();

    let mut none = Strict::start(&["--max-sessions", "0"]);
    let ready = &none.process.ready;
    assert_eq!((&ready["max_sessions"], &ready["max_named_sessions"]), (&json!(1), &json!(0)));
    assert_eq!(none.op("open", "a")["code"], "unsupported_session");
    none.turn("", &json!([{"ids": [11, 12]}]));
    none.process.finish();
}

#[test]
fn lines_sent_ahead_are_answered_in_their_order() {
    let mut strict = Strict::start(&[]);
    let client = &mut strict.process.client;
    client.send(&json!({"prompt": "one", "max_new_tokens": 30}));
    client.send(&json!({"op": "open", "session_id": "s"}));
    client.send_raw(b"\n   \r\n{\"prompt\"\n");
    client.send(&json!({"prompt": "two", "max_new_tokens": 3, "session_id": "s"}));
    let answers: Vec<ReplyBody> = (0..4).map(|_| client.answer()).collect();
    answers.iter().flat_map(|answer| &answer.lines).for_each(|line| check(&strict.reply, line));
    assert!(answers[0].done()["completion_tokens"].as_u64() > Some(3));
    assert_eq!(answers[1].lines[0]["opened"], true);
    answers[2].check_error("invalid_request", "not a JSON object");
    assert!(answers[3].done()["completion_tokens"].as_u64() <= Some(3));
    strict.process.finish();
}

#[test]
fn errors_leave_it_as_it_was() {
    let mut strict = Strict::start(&["--ctx", "64"]);
    let first = strict.turn("s", &json!([{"ids": some_ids(20, 2)}]));
    let too_long = strict.ask(&json!({"prompt_segments": [{"ids": some_ids(64, 1)}], "session_id": "s"}));
    too_long.check_error("context_length_exceeded", "64");
    strict.ask(&json!({"prompt": ""})).check_error("invalid_value", "empty");
    strict.ask(&json!({"prompt_segments": [{"ids": [400]}]})).check_error("invalid_value", "400");
    let mut more = some_ids(20, 2);
    more.extend(
        first.done()["generated_token_ids"]
            .as_array()
            .expect("ids")
            .iter()
            .map(|id| id.as_u64().expect("id") as usize),
    );
    more.push(77);
    assert_eq!(reason(&strict.turn("s", &json!([{"ids": more}]))), "exact_prefix");
    let filled = strict.ask(&json!({"prompt_segments": [{"ids": some_ids(60, 3)}], "max_new_tokens": 100}));
    assert!(count(&filled, "completion_tokens") <= 4, "lowered to what is left");
    strict.process.finish();
}
