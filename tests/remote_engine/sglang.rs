//! SGLang as the engine, after recorded answers of the real one (`fake.rs`).

use llmctl_engine::grammar::GrammarSource;

use super::fake::sglang::{JSON, LENGTH, LOGPROBS, REFUSED, STOP};
use super::fake::{Deed, FakeEngine};
use super::{ask, connect, grammar, request};
use crate::common::prelude::*;

/// The tokens of the recorded greedy answer to [5, 6, 7].
const GREEDY: [u32; 8] = [210, 344, 344, 24, 367, 212, 344, 56];

#[test]
fn an_answer_has_its_tokens_and_what_it_reports() {
    let fake = FakeEngine::sglang([Deed::Stream(LENGTH)]);
    let engine = connect(&[&fake]);
    assert_eq!(engine.spec().context_length(), 512);
    let facts = engine.remote().expect("remote");
    assert!(facts.engines[0].starts_with("SGLang 0.5.23 at http://127.0.0.1:"), "{facts:?}");
    let seen = ask(&engine, request(8));
    assert_eq!((seen.ids().as_slice(), &seen.outcome().finish), (&GREEDY[..], &Finish::MaxTokens));
    assert!(seen.outcome().usage.remote.is_some_and(|remote| remote.reports_cached), "{seen:?}");
    let asked = &fake.asked()[0];
    assert_eq!((&asked["input_ids"], &asked["stream"]), (&json!([5, 6, 7]), &json!(true)));
    // Every parameter, because the engine has defaults of its own.
    for (name, value) in [
        ("temperature", json!(0.0)),
        ("top_p", json!(1.0)),
        ("min_p", json!(0.0)),
        ("top_k", json!(-1)),
        ("max_new_tokens", json!(8)),
        ("ignore_eos", json!(false)),
    ] {
        assert_eq!(asked["sampling_params"][name], value, "{name}");
    }
}

#[test]
fn log_probabilities_and_ends_are_its_own() {
    let fake = FakeEngine::sglang([Deed::Stream(LOGPROBS), Deed::Stream(STOP)]);
    let engine = connect(&[&fake]);
    let seen = ask(&engine, Request { logprobs: Some(2), ..request(8) });
    let all: Vec<_> = seen.tokens.iter().map(|token| token.logprob.as_ref().expect("asked for")).collect();
    assert_eq!((seen.ids().as_slice(), all[0].logprob), (&GREEDY[..], -4.608_685_5));
    assert_eq!(all[3].top, [(24, -5.090_086_5), (180, -5.090_46)]);
    let limits = Limits { stop_ids: vec![24], max_tokens: Some(8), ..Limits::default() };
    let seen = ask(&engine, Request { limits, ..request(8) });
    assert_eq!((seen.ids().as_slice(), &seen.outcome().finish), (&GREEDY[..3], &Finish::Eos(24)));
}

#[test]
fn its_refusal_in_a_stream_is_no_loss() {
    let aborted = r#"data: {"output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"too many","status_code":400}}}

"#;
    let lost = r#"data: {"output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"full","status_code":503}}}

"#;
    for (refusal, why) in
        [(REFUSED, "logit_bias must has keys in [0, 383], got 99999."), (aborted, "too many")]
    {
        let fakes = [0, 1].map(|_| FakeEngine::sglang([Deed::Stream(refusal)]));
        let seen = ask(&connect(&[&fakes[0], &fakes[1]]), request(8));
        assert!(seen.error().ends_with(&format!(" refuses: {why}")), "{}", seen.error());
        assert_eq!(fakes[0].asked().len() + fakes[1].asked().len(), 1);
    }
    // An engine whose queue is full has failed the request: llmctl sends it to the other engine.
    let fakes = [0, 1].map(|_| FakeEngine::sglang([Deed::Stream(lost), Deed::Stream(LENGTH)]));
    let engine = connect(&[&fakes[0], &fakes[1]]);
    ask(&engine, request(8));
    assert_eq!((fakes[0].asked().len(), fakes[1].asked().len()), (1, 1));
}

#[test]
fn constraints_are_compiled_there_by_the_same_library_or_refused() {
    let lark = GrammarSource::Lark("start: \"ab\" | \"cd\"\n".to_owned());
    let schema = GrammarSource::JsonSchema(json!({"enum": ["yes", "no"]}));
    // The first request of each asks whether the library is there.
    let fake = FakeEngine::sglang([Deed::Stream("{}"), Deed::Stream(JSON), Deed::Stream(LENGTH)]);
    let engine = connect(&[&fake]);
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &schema)), ..request(60) });
    assert_eq!((seen.text.as_str(), &seen.outcome().finish), ("\"yes\"", &Finish::Eos(1)));
    ask(&engine, Request { grammar: Some(grammar(&engine, &lark)), ..request(8) });
    let asked = fake.asked();
    let sent = |nth: usize| asked[nth]["sampling_params"]["ebnf"].as_str().unwrap_or_default();
    assert!(sent(1).starts_with("%llguidance {}\nstart: %json {"), "{}", sent(1));
    assert_eq!(sent(2), "%llguidance {}\nstart: \"ab\" | \"cd\"\n");
    // Another library takes JSON Schema and regular expressions, and no Lark.
    let refusal = r#"{"error":{"message":"Failed to compile ebnf grammar"}}"#;
    let fake = FakeEngine::sglang([Deed::Refuse(400, refusal), Deed::Stream(JSON)]);
    let engine = connect(&[&fake]);
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &lark)), ..request(60) });
    assert!(seen.error().contains("start it with --grammar-backend llguidance"), "{seen:?}");
    ask(&engine, Request { grammar: Some(grammar(&engine, &schema)), ..request(60) });
    let sent = &fake.asked()[1]["sampling_params"];
    assert_eq!((&sent["json_schema"], sent.get("ebnf")), (&json!(r#"{"enum":["yes","no"]}"#), None));
}

#[test]
fn a_request_may_end_while_the_engine_loads_its_grammar_library() {
    let silent = Deed::Wait("{}", 0);
    let fake = FakeEngine::sglang([silent.clone(), silent, Deed::Stream("{}"), Deed::Stream(JSON)]);
    let engine = connect(&[&fake]);
    let asked = |limits| {
        let schema = GrammarSource::JsonSchema(json!({"enum": ["yes", "no"]}));
        Request { limits, grammar: Some(grammar(&engine, &schema)), ..request(60) }
    };
    let deadline = Some(Duration::from_millis(300));
    let seen = ask(&engine, asked(Limits { deadline, ..request(60).limits }));
    assert!(matches!(seen.error, Some(Error::DeadlineExceeded { .. })), "{seen:?}");
    fake.wait_for_closed(1);
    let events = engine.submit(asked(request(60).limits)).expect("valid");
    fake.wait_for_asked(2);
    engine.cancel_all().expect("alive");
    let last = events.last().expect("an end");
    assert!(matches!(&last, Event::Done(outcome) if outcome.finish == Finish::Cancelled), "{last:?}");
    fake.wait_for_closed(2);
    // Neither has counted as an answer, or as a lost engine.
    assert_eq!(ask(&engine, asked(request(60).limits)).text, "\"yes\"");
    assert_eq!(fake.asked().len(), 4);
}

#[test]
fn what_it_cannot_honour_is_refused_by_name_before_it_is_asked() {
    let fake = FakeEngine::sglang([]);
    let engine = connect(&[&fake]);
    let with = |sampling: Sampling| Request { sampling, ..request(8) };
    let warm = || Sampling { temperature: 0.5, ..Sampling::default() };
    for (name, asked) in [
        ("typical_p", with(Sampling { typical_p: 0.5, ..warm() })),
        ("top_n_sigma", with(Sampling { top_n_sigma: 1.0, ..warm() })),
        ("seed", with(Sampling { seed: Some(1), ..warm() })),
        ("top_p", with(Sampling { top_k: Some(20), top_p: 0.9, ..warm() })),
        ("repetition_penalty", with(Sampling { repetition_penalty: 1.1, ..Sampling::default() })),
        ("logprobs", Request { logprobs: Some(1), ..with(warm()) }),
        (
            "logprobs",
            Request {
                logprobs: Some(1),
                grammar: Some(grammar(&engine, &GrammarSource::JsonObject)),
                ..request(8)
            },
        ),
        ("prompt_logprobs", Request { prompt_logprobs: Some(1), ..request(8) }),
    ] {
        let error = ask(&engine, asked).error();
        assert!(error.starts_with(&format!("{name}: SGLang ")), "{name}: {error:?}");
    }
    assert_eq!(fake.asked().len(), 0);
}
