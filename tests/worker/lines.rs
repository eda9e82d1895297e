//! Lines that are no requests are answered with what is wrong, and survived.

use super::client::Process;
use crate::common::prelude::*;

/// Sends bytes, and takes the one line that answers them.
#[track_caller]
fn refuse(process: &mut Process, bytes: &[u8], code: &str, part: &str) -> Value {
    process.client.send_raw(bytes);
    let answer = process.client.answer();
    assert_eq!(answer.lines.len(), 1, "{answer:?}");
    answer.check_error(code, part);
    answer.lines[0].clone()
}

#[test]
fn whatever_comes_is_answered_and_survived() {
    let mut process = Process::start(&["--ctx", "256"]);
    let at = &mut process;
    let deep = [&b"{\"grammar\":"[..], &[b'['; 200_000], b"\n"].concat();
    let long = [&b"{\"prompt\":\""[..], &vec![b'x'; 64 << 20], b"\"}\n"].concat();
    for (bytes, part) in [
        (&b"nonsense\n"[..], "not a JSON object"),
        (b"{\n", "not a JSON object: EOF"),
        (b"[]\n", "not a JSON object"),
        (b"42\n", "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b"\xff\xff\n", "not a JSON object"),
        (b"\0\n", "not a JSON object"),
        (b"{} {}\n", "not a JSON object"),
        (&deep, "not a JSON object: recursion limit"),
        (&long, "a line of more than 67108864 bytes"),
        (b"{\"op\": 7, \"prompt\": \"x\"}\n", "op: 7 is not a string"),
        (b"{\"prompt\": \"x\", \"max_tokens\": 7}\n", "unknown field `max_tokens`"),
        (b"{\"prompt\": 7}\n", "prompt: invalid type"),
        (b"{\"op\": \"open\"}\n", "missing field `session_id`"),
        (b"{\"op\": \"open\", \"session_id\": \"\"}\n", "session_id: must not be empty"),
        (b"{\"id\": {}, \"prompt\": \"x\"}\n", "id: neither a string nor a whole number"),
    ] {
        refuse(at, bytes, "invalid_request", part);
    }
    for (line, code, part) in
        listed::<(Value, &str, &str)>("worker_lines", "whatever_comes_is_answered_and_survived")
    {
        refuse(at, format!("{line}\n").as_bytes(), code, part);
        let mut named = line.clone();
        named["id"] = "n".into();
        let refused = refuse(at, format!("{named}\n").as_bytes(), code, part);
        assert_eq!(refused["id"], "n");
        let is_of_the_engine = !matches!(code, "invalid_request" | "unknown_op");
        assert_eq!(refused.get("detail").is_some(), is_of_the_engine, "{refused}");
    }
    let answer = at.client.ask(&json!({"prompt": "still here", "max_new_tokens": 4}));
    assert!(answer.done()["completion_tokens"].as_u64() <= Some(4));
    process.finish();
}

#[test]
fn bytes_that_are_no_text_are_replaced() {
    let mut process = Process::start(&[]);
    let mut say = |prompt: &[u8]| {
        let line = [b"{\"max_new_tokens\":8,\"prompt\":\"a", prompt, b"b\"}\r\n"].concat();
        process.client.send_raw(&line);
        let answer = process.client.answer();
        (answer.done()["prompt_tokens"].clone(), answer.text())
    };
    assert_eq!(say(b"\xff"), say("\u{fffd}".as_bytes()));
    assert_eq!(say(b"\xe2\x82"), say("\u{fffd}".as_bytes()), "half a character");
    process.finish();
}
