//! Promise: drafts change no response but its counts, at every API; a predicted output is a source of drafts, and one that
//! cannot be read is a hint without effect.

use crate::common::prelude::*;
use crate::common::server::{Reply, both_kinds};

const TEXT: &str = "one two three four five six seven eight nine ten";
const REFRAIN: &str = "la la la la la la la la la la la la";

fn server(speculation: Speculation) -> Server {
    Build { speculation, ..Build::answers(&[("count", TEXT), ("sing", REFRAIN)]) }.start()
}

fn ignored(reply: &Reply) -> Option<&str> {
    reply.headers.get("x-llmctl-ignored").map(|value| value.to_str().expect("ASCII"))
}

/// Tokens that were drafted and accepted, from the details of an answer's tokens.
fn accepted(details: &Value) -> u64 {
    assert!(details["rejected_prediction_tokens"].is_u64(), "{details}");
    details["accepted_prediction_tokens"].as_u64().unwrap_or_else(|| panic!("no drafts: {details}"))
}

async fn a_predicted_output_is_drafted_from() {
    let server = server(Speculation::Always(4));
    for prediction in [
        json!({"type": "content", "content": TEXT}),
        json!({"type": "content", "content": [{"type": "text", "text": "one two three four five"},
            {"type": "text", "text": " six seven eight nine ten"}]}),
    ] {
        let reply = server.chat("count", json!({"prediction": prediction})).await;
        assert_eq!(ignored(&reply), None);
        let reply = reply.ok();
        assert_eq!(content(&reply), TEXT);
        let usage = &reply["usage"];
        let num_tokens = usage["completion_tokens"].as_u64().expect("a count");
        assert!(accepted(&usage["completion_tokens_details"]) > num_tokens / 2, "{usage}");
    }
}

async fn a_prediction_of_another_form_is_a_hint() {
    let server = server(Speculation::Always(4));
    for prediction in [json!("text"), json!({"type": "content", "content": 5}), json!({"content": TEXT})] {
        let reply = server.chat("count", json!({"prediction": prediction})).await;
        assert_eq!(ignored(&reply), Some("prediction"), "{prediction}");
        assert_eq!(content(&reply.ok()), TEXT);
    }
}

/// A body that asks for the refrain, where its usage counts drafts, and what else the usage counts.
fn apis() -> [(&'static str, Value, &'static str, [&'static str; 2]); 3] {
    let messages = json!([{"role": "user", "content": "sing"}]);
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages}),
            "completion_tokens_details",
            ["prompt_tokens", "completion_tokens"],
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 400}),
            "output_tokens_details",
            ["input_tokens", "output_tokens"],
        ),
        (
            "/v1/responses",
            json!({"input": "sing", "store": false}),
            "output_tokens_details",
            ["input_tokens", "output_tokens"],
        ),
    ]
}

async fn every_api_counts_drafts_where_there_are_any() {
    let (plain, drafting) = (server(Speculation::Off), server(Speculation::Always(4)));
    for (path, body, details, counts) in apis() {
        let without = plain.post(path, body.clone()).await.ok();
        assert!(without["usage"][details].get("accepted_prediction_tokens").is_none(), "{path}: {without}");
        let with = drafting.post(path, body).await;
        assert!(with.text.contains(REFRAIN), "{path}: {}", with.text);
        let with = with.ok();
        assert!(accepted(&with["usage"][details]) > 4, "{path}: {with}");
        for name in counts {
            assert_eq!(with["usage"][name], without["usage"][name], "{path}");
        }
    }
}

both_kinds! {
    a_predicted_output_is_drafted_from,
    a_prediction_of_another_form_is_a_hint,
    every_api_counts_drafts_where_there_are_any,
}
