//! The same question gets the same answer as from `llmctl run`.

use super::client::{Process, ReplyBody, model};
use crate::cli::llmctl;
use crate::common::prelude::*;

const PROMPT: &str = "Once upon a time";

/// Flags of `run`, and what a worker is asked for the same.
fn cases() -> Vec<(Vec<&'static str>, Value)> {
    let schema = r#"{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}"#;
    vec![
        (vec![], json!({})),
        (vec!["--seed", "0", "--temperature", "1"], json!({"exact_seed": 0, "temperature": 1.0})),
        (
            vec!["--seed", "7", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01"],
            json!({"seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
        ),
        (
            vec!["--repetition-penalty", "1.3", "--presence-penalty", "0.4", "--frequency-penalty", "-0.2"],
            json!({"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2}),
        ),
        (vec!["--stop", "e"], json!({"stop": ["e"]})),
        (vec!["--logprobs", "3"], json!({"logprobs": 3})),
        (vec!["--regex", "[a-f]{5}"], json!({"grammar": {"type": "regex", "value": "[a-f]{5}"}})),
        (
            vec!["--schema", schema],
            json!({"grammar": {"type": "json_schema", "value": serde_json::from_str::<Value>(schema).expect("JSON")}}),
        ),
    ]
}

/// Returns the lines of `run --output jsonl`.
fn run(flags: &[&str]) -> Vec<Value> {
    let model = model();
    let args = ["run", "--model", &model, "--raw", PROMPT, "--max-tokens", "30", "--output", "jsonl"];
    let ran = llmctl(&[&args, flags].concat());
    assert!(matches!(ran.code, Some(0 | 3)), "{ran:?}");
    ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn prompt_ids() -> Value {
    let model = model();
    let args = ["run", "--model", &model, "--raw", PROMPT, "--dry-run", "--output", "json"];
    let told: Value = serde_json::from_str(&llmctl(&args).check(0, "").stdout).expect("JSON");
    told["tokens"].clone()
}

/// The model drafts for itself, if that pays.
#[test]
fn a_worker_with_a_draft_model_answers_as_run_does() {
    let mut process = Process::start(&["--speculate", "draft", "--draft-model", &model()]);
    let prompt = prompt_ids();
    let mut was_asked = false;
    for (flags, fields) in cases() {
        let events = run(&[&flags[..], &["--speculate", "off"]].concat());
        let mut line =
            json!({"id": 1, "prompt_segments": [{"ids": prompt}], "max_new_tokens": 30, "events": true});
        line.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let answer = process.client.ask(&line);
        assert_eq!(tokens_of_worker(&answer), tokens_of_run(&events), "{flags:?}");
        was_asked |= answer.done()["draft_model"].is_object();
    }
    assert!(was_asked, "the process has a draft model");
}

/// With drafts from a prediction that is right but for every fifth token. The first draft is made whatever steps cost.
#[test]
fn a_worker_that_drafts_answers_as_run_does() {
    let mut process = Process::start(&["--speculate", "auto"]);
    let prompt = prompt_ids();
    let mut num_drafted = 0;
    for (flags, fields) in cases() {
        let events = run(&[&flags[..], &["--speculate", "off"]].concat());
        let tokens = tokens_of_run(&events);
        let nearly = |(index, (id, ..)): (usize, &(u64, _, _))| if index % 5 == 4 { 9 } else { *id };
        let prediction: Vec<u64> = tokens.iter().enumerate().map(nearly).collect();
        let mut line = json!({"id": 1, "prompt_segments": [{"ids": prompt}], "max_new_tokens": 30, "events": true,
            "prediction": prediction});
        line.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let answer = process.client.ask(&line);
        assert_eq!(tokens_of_worker(&answer), tokens, "{flags:?}");
        let last = events.last().expect("an event");
        assert_eq!(answer.done()["finish"]["type"], last["finish"]["by"], "{flags:?}");
        num_drafted += answer.done()["drafted_tokens"].as_u64().unwrap_or_default();
    }
    assert!(num_drafted > 0, "the process drafts");
    process.finish();
}

/// Ids, and log-probabilities where there are any, as `run` and as a worker write them.
fn tokens_of_run(events: &[Value]) -> Vec<(u64, Option<f32>, Vec<u64>)> {
    let tokens = events.iter().filter_map(|event| event.get("tokens")?.as_array()).flatten();
    let number = |value: &Value| value.as_f64().map(|number| number as f32);
    let alternatives = |token: &Value| {
        let top = token["top"].as_array().into_iter().flatten();
        top.map(|token| token["id"].as_u64().expect("an id")).collect()
    };
    tokens
        .map(|token| (token["id"].as_u64().expect("an id"), number(&token["logprob"]), alternatives(token)))
        .collect()
}

fn tokens_of_worker(answer: &ReplyBody) -> Vec<(u64, Option<f32>, Vec<u64>)> {
    let tokens = answer.lines.iter().filter_map(|line| line.get("tokens")?.as_array()).flatten();
    let told = |token: &Value| {
        let logprob = &token["logprob"];
        let top = logprob["top"].as_array().into_iter().flatten();
        let number = logprob["logprob"].as_f64().map(|number| number as f32);
        let id = |token: &Value| token.as_u64().expect("an id");
        (id(&token["id"]), number, top.map(|pair| id(&pair[0])).collect())
    };
    tokens.map(told).collect()
}

#[test]
fn a_worker_answers_as_run_does() {
    let mut process = Process::start(&[]);
    let prompt = prompt_ids();
    for (flags, fields) in cases() {
        let events = run(&flags);
        let mut line =
            json!({"id": 1, "prompt_segments": [{"ids": prompt}], "max_new_tokens": 30, "events": true});
        line.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
        let answer = process.client.ask(&line);
        let text: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
        let last = events.last().expect("an event");
        assert_eq!(answer.text(), text, "{flags:?}");
        assert_eq!(tokens_of_worker(&answer), tokens_of_run(&events), "{flags:?}");
        assert_eq!(answer.done()["finish"]["type"], last["finish"]["by"], "{flags:?}");
        assert_eq!(answer.done()["completion_tokens"], last["usage"]["completion_tokens"], "{flags:?}");
        // Greedily, whatever seed was drawn.
        if flags.contains(&"--seed") {
            assert_eq!(answer.done()["seed"], last["seed"]);
        }
        let plain = {
            line.as_object_mut().expect("an object").retain(|name, _| name != "id" && name != "events");
            process.client.ask(&line)
        };
        assert_eq!(plain.text(), text, "the reference server's client hears the same: {flags:?}");
    }
    process.finish();
}
