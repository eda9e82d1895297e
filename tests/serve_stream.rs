//! Promise: a client that leaves costs one more step; what is refused is refused before the first byte; what fails later
//! says so within the stream, and a stream that has nothing to say yet tells that it lives.

use futures_util::StreamExt;

use crate::common::prelude::*;
use crate::common::server::{ask, both_kinds, pieces, request};

const PATH: &str = "/v1/chat/completions";

fn narrow() -> Build {
    Build {
        max_running: 1,
        max_waiting: 1,
        ..Build::answers(&[("hi", "Hello there."), ("stop", "abc EN and so on")])
    }
}

/// Waits until the engine has nothing to do.
async fn idle(server: &Server) {
    for _ in 0..3000 {
        let load = server.app.engine().expect("an engine").last_load();
        if load.num_running == 0 && load.num_waiting == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the engine does not come to rest");
}

async fn a_reader_that_leaves_stops_its_answer() {
    let server = narrow().start();
    let long = ask(FREE, json!({"stream": true, "max_tokens": 3000}));
    let response = server.send(request(Method::POST, PATH, &[], Some(long))).await;
    let mut body = pieces(response);
    for _ in 0..5 {
        body.next().await.expect("more");
    }
    server.gate.close();
    server.gate.reached().await;
    drop(body);
    let before = num_forwards(&server.log);
    // The task that answers notices while the model stands still; then the step that it is in is the last.
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.gate.open();
    let next = server.chat("hi", json!({})).await.ok();
    assert_eq!(next["choices"][0]["message"]["content"], "Hello there.");
    let steps = num_forwards(&server.log) - before;
    assert!(steps < 1500, "{steps} steps: the long answer went on to its 3000 tokens");
}

async fn a_caller_that_hangs_up_stops_its_answer() {
    let server = narrow().start();
    server.gate.close_after(20);
    let waiting = {
        let long = ask(FREE, json!({"max_tokens": 3000}));
        let response = server.send(request(Method::POST, PATH, &[], Some(long)));
        tokio::time::timeout(Duration::from_secs(1), response).await
    };
    assert!(waiting.is_err(), "it cannot have ended");
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.gate.open();
    assert_eq!(server.chat("hi", json!({})).await.status, 200);
    assert!(num_forwards(&server.log) < 1500, "the long answer went on");
}

async fn a_stream_tells_that_it_lives_while_its_prompt_is_computed() {
    let server = narrow().start();
    server.gate.close_after(1);
    let long = ask(&"word ".repeat(100), json!({"stream": true, "max_tokens": 1}));
    let mut body = pieces(server.send(request(Method::POST, PATH, &[], Some(long))).await);
    server.gate.reached().await;
    // The prompt takes several steps, and the second does not end: comments are all that can come. A test that waits for ever
    // for one is ended by the gate.
    let mut comments = Vec::new();
    while comments.len() < 2 {
        let piece = body.next().await.expect("more");
        let text = String::from_utf8(piece.to_vec()).expect("UTF-8");
        comments.extend(text.starts_with(": prompt: ").then_some(text));
    }
    assert!(comments.iter().all(|comment| comment.contains("64 of ")), "{comments:?}");
    let whole = server.spawn(request(Method::POST, "/v1/completions", &[], Some(json!({"prompt": "hi"}))));
    server.gate.open();
    assert!(whole.await.expect("no panic").text.starts_with('{'), "a whole answer has nothing before it");
}

async fn too_many_are_refused_before_the_first_byte() {
    let server = narrow().start();
    let long = server.spawn(request(Method::POST, PATH, &[], Some(ask(FREE, json!({"max_tokens": 3000})))));
    server.gate.close_after(5);
    server.gate.reached().await;
    // One of these waits, and the other is too many.
    let short = || server.spawn(request(Method::POST, PATH, &[], Some(ask("hi", json!({"stream": true})))));
    let both = [short(), short()];
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.gate.open();
    let mut statuses = Vec::new();
    for task in both {
        let reply = task.await.expect("no panic");
        statuses.push(reply.status.as_u16());
        if reply.status != 200 {
            assert_eq!((reply.error().0, reply.error().1.as_str()), (429, "queue_full"));
            let wait: u64 = reply.headers["retry-after"].to_str().expect("text").parse().expect("seconds");
            assert!(wait >= 1);
        }
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 429]);
    assert_eq!(long.await.expect("no panic").status, 200);
}

async fn a_failure_within_a_stream_is_an_event_and_the_end() {
    let server = narrow().start();
    server.gate.fail_after(10, Error::Backend("the lights went out".to_owned()));
    let reply = server.chat("stop", json!({"stream": true, "stop": "ENDE"})).await;
    let events = reply.events();
    let (error, before) = events.split_last().expect("events");
    assert_eq!(error["error"]["type"], "server_error");
    assert!(error["error"]["message"].as_str().expect("a message").contains("the lights went out"));
    assert!(before.iter().all(|event| event["choices"][0]["finish_reason"].is_null()), "no finish");
    let said: String =
        before.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert!("abc EN and so on".starts_with(&said) && !said.is_empty(), "{said:?}");
    server.gate.fail_after(3, Error::Backend("again".to_owned()));
    let reply = server.chat("hi", json!({})).await;
    assert_eq!(reply.error().0, 500);
    assert_eq!(server.chat("hi", json!({})).await.ok()["choices"][0]["message"]["content"], "Hello there.");
}

async fn what_is_held_back_comes_before_the_error() {
    let server = narrow().start();
    let tokens = server.tokenizer.encode_chat_rest("abc EN").expect("encodes").len();
    // One step computes the prompt and the first token.
    server.gate.fail_after(tokens, Error::Backend("gone".to_owned()));
    let events = server.chat("stop", json!({"stream": true, "stop": "EN and not so"})).await.events();
    let said: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "abc EN");
    assert!(events[events.len() - 1]["error"].is_object());
}

async fn a_long_prompt_tells_how_far_it_is() {
    let server = narrow().start();
    let question = "many words ".repeat(120);
    server.gate.close_after(2); // two chunks of the prompt
    let body = ask(&question, json!({"stream": true, "max_tokens": 2}));
    let response = server.send(request(Method::POST, PATH, &[], Some(body))).await;
    let mut body = pieces(response);
    let mut comment = None;
    for _ in 0..10 {
        let piece = body.next().await.expect("more");
        if piece.starts_with(b":") {
            comment = Some(String::from_utf8(piece.to_vec()).expect("UTF-8"));
            break;
        }
    }
    let comment = comment.expect("a comment");
    assert!(comment.starts_with(": prompt: 128 of ") && comment.ends_with(" tokens\n\n"), "{comment:?}");
    // How long it takes is said when enough of it is known.
    let mut comments = Vec::new();
    while !comments.last().is_some_and(|comment: &String| comment.ends_with("s left\n\n")) {
        assert!(comments.len() < 10, "{comments:?}");
        server.gate.step();
        let piece = body.next().await.expect("more");
        comments.push(String::from_utf8(piece.to_vec()).expect("UTF-8"));
    }
    server.gate.open();
    let rest: Vec<_> = body.collect().await;
    assert_eq!(rest.last().expect("an end"), "data: [DONE]\n\n");
    idle(&server).await;
}

async fn a_request_that_waits_tells_its_place() {
    let server = narrow().start();
    let first = server
        .send(request(Method::POST, PATH, &[], Some(ask(FREE, json!({"stream": true, "max_tokens": 3000})))))
        .await;
    let mut first = pieces(first);
    first.next().await.expect("it has begun");
    let second =
        server.send(request(Method::POST, PATH, &[], Some(ask("hi", json!({"stream": true}))))).await;
    server.gate.close();
    server.gate.reached().await;
    let mut second = pieces(second);
    let mut comments = Vec::new();
    for _ in 0..3 {
        let piece = second.next().await.expect("more");
        if piece.starts_with(b":") {
            comments.push(String::from_utf8(piece.to_vec()).expect("UTF-8"));
            break;
        }
    }
    assert_eq!(comments, [": waiting: 1 in the queue\n\n"]);
    server.gate.open();
    drop(first);
    let rest: Vec<_> = second.collect().await;
    assert_eq!(rest.last().expect("an end"), "data: [DONE]\n\n");
}

/// As the server's own end does when its time is over.
fn cut_short(server: &Server) {
    server.app.cut_short();
    server.app.engine().expect("an engine").cancel_all().expect("it lives");
    server.gate.open();
}

/// Waits until so many requests wait, a step at a time.
async fn queue_of(server: &Server, count: usize) {
    for _ in 0..3000 {
        if server.app.engine().expect("an engine").last_load().num_waiting == count {
            return;
        }
        server.gate.step();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("they do not come");
}

async fn an_answer_that_the_servers_end_cuts_is_no_answer() {
    let build = || Build { max_running: 1, max_waiting: 3, ..narrow() }.start();
    let long = |more| ask(FREE, more);
    let send = |server: &Server, body| server.spawn(request(Method::POST, PATH, &[], Some(body)));
    for is_streamed in [false, true] {
        let server = build();
        server.gate.close_after(30);
        let more = |tokens: u32| json!({"stream": is_streamed, "max_tokens": tokens});
        let running = send(&server, long(more(3000)));
        server.gate.reached().await;
        let queued = [send(&server, long(more(20))), send(&server, long(more(30)))];
        queue_of(&server, 2).await;
        cut_short(&server);
        let begun = running.await.expect("no panic");
        let [second, third] = queued.map(|reply| async { reply.await.expect("no panic") });
        let unbegun = "this request was begun";
        let replies = [(begun, "the answer was whole: "), (second.await, unbegun), (third.await, unbegun)];
        for (reply, how_far) in replies {
            assert!(reply.text.contains("shutting_down") && reply.text.contains(how_far), "{reply:?}");
            assert!(!reply.text.contains("finish_reason\":\"length"), "{reply:?}");
            if is_streamed {
                assert!(reply.text.ends_with("data: [DONE]\n\n"), "{reply:?}");
            } else {
                assert_eq!(
                    (reply.status.as_u16(), &reply.headers["retry-after"]),
                    (503, &"5".parse().expect("a value"))
                );
            }
        }
        let late = server.chat("hi", json!({})).await;
        assert_eq!(late.error(), (503, "shutting_down".to_owned(), String::new()));
    }
}

both_kinds! {
    a_stream_tells_that_it_lives_while_its_prompt_is_computed,
    an_answer_that_the_servers_end_cuts_is_no_answer,
    a_reader_that_leaves_stops_its_answer,
    a_caller_that_hangs_up_stops_its_answer,
    too_many_are_refused_before_the_first_byte,
    a_failure_within_a_stream_is_an_event_and_the_end,
    what_is_held_back_comes_before_the_error,
    a_long_prompt_tells_how_far_it_is,
    a_request_that_waits_tells_its_place,
}
