//! Promise: a request to the engine gets exactly the tokens that its prompt, parameters and seed determine, whatever runs
//! beside it, and always an orderly end; refusals cost nothing and no page is ever lost.

use llmctl_engine::{Logprob, MAX_LOGPROBS, Overflow};
use llmctl_models::model::Logits;
use proptest::prelude::*;

use crate::common::prelude::*;
use crate::common::toy::{drain, hashed_logits, one_hot, pages, request, step};

#[track_caller]
fn check_all_free(engine: &Engine) {
    let load = engine.load();
    assert_eq!((load.num_waiting, load.num_running), (0, 0));
    assert_eq!(load.kv_free, load.kv_capacity, "pages leaked");
}

/// An engine whose vocabulary is `pieces`; the prompt `[0]` makes it generate 1, 2, 3 ...
fn speaking<P: AsRef<[u8]>>(pieces: &[P], special: &[u32], end_of_generation: &[u32]) -> (Engine, Log) {
    let setup =
        Setup { vocab_size: pieces.len(), end_of_generation: end_of_generation.to_vec(), ..Setup::default() };
    let model = ToyModel::new(pieces.len(), counting(pieces.len()));
    setup.engine_with(model, ToyVocabulary::new(pieces, special))
}

// ---- the course of a request

#[test]
fn events_come_in_order_with_usage_and_seed() {
    let setup = Setup { step_tokens: 4, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    let prompt: Vec<u32> = (0..10).collect();
    let answer = run_one(&mut engine, Request { sampling: seeded(5), ..limited(&prompt, 3) });
    assert!(matches!(&answer.events[0], Event::Started(started)
        if (started.prompt_tokens, started.max_tokens, started.seed) == (10, 3, 5)));
    let prefill: Vec<_> = answer
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Prefill { done, total } => Some((*done, *total)),
            _ => None,
        })
        .collect();
    assert_eq!(prefill, [(4, 10), (8, 10), (10, 10)]);
    assert_eq!(answer.ids(), [10, 11, 12]);
    assert_eq!(answer.text(), "10 11 12 ");
    let outcome = answer.outcome();
    assert_eq!(outcome.finish, Finish::MaxTokens);
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.cached_tokens), (10, 0));
    assert_eq!((outcome.usage.completion_tokens, outcome.seed), (3, 5));
    let timings = &outcome.timings;
    assert!(timings.time_to_first_token.expect("a token came") <= timings.total);
    assert!(timings.queue + timings.prefill + timings.decode <= timings.total);
    assert_eq!(fed_tokens(&log).len(), 12, "the last token needs no forward pass");
    check_all_free(&engine);
}

#[test]
fn a_prompt_within_the_budget_is_one_step() {
    let setup = Setup { step_tokens: 128, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    run_one(&mut engine, limited(&[1; 100], 1));
    assert_eq!(num_forwards(&log), 1, "chunks end where states are left only for models that have states");
}

#[test]
fn a_missing_seed_is_drawn_and_repeats_the_run() {
    let mut engine = Setup::default().engine(hashing(64));
    let drawn = Sampling { seed: None, ..seeded(0) };
    let first = run_one(&mut engine, Request { sampling: drawn, ..limited(&[1, 2, 3], 40) });
    let seed = first.outcome().seed;
    assert!(matches!(first.events[0], Event::Started(ref started) if started.seed == seed));
    let again = run_one(&mut engine, Request { sampling: seeded(seed), ..limited(&[1, 2, 3], 40) });
    assert_eq!(first.ids(), again.ids());
    let other = run_one(&mut engine, Request { sampling: seeded(seed ^ 1), ..limited(&[1, 2, 3], 40) });
    assert_ne!(first.ids(), other.ids());
}

#[test]
fn an_end_of_generation_is_not_counted_forwarded_or_shown() {
    let (mut engine, log) = Setup::default().engine_and_log(counting(64));
    let answer = run_one(&mut engine, request(&[59]));
    assert_eq!(answer.finish(), &Finish::Eos(63));
    assert_eq!(answer.text(), "60 61 62 ");
    assert_eq!(answer.outcome().usage.completion_tokens, 3);
    assert!(!fed_tokens(&log).contains(&63));
}

#[test]
fn an_end_of_generation_as_the_first_token_ends_with_nothing() {
    let (mut engine, log) = Setup::default().engine_and_log(counting(64));
    let answer = run_one(&mut engine, request(&[62]));
    assert_eq!((answer.finish(), answer.text().as_str()), (&Finish::Eos(63), ""));
    assert_eq!(answer.outcome().usage.completion_tokens, 0);
    assert_eq!(fed_tokens(&log), [62]);
}

#[test]
fn ignore_eos_makes_it_an_ordinary_token() {
    let mut engine = Setup::default().engine(counting(64));
    let mut request = limited(&[61], 4);
    request.limits.ignore_eos = true;
    let answer = run_one(&mut engine, request);
    assert_eq!((answer.ids(), answer.finish()), (vec![62, 63, 0, 1], &Finish::MaxTokens));
}

#[test]
fn every_listed_end_of_generation_counts() {
    let setup = Setup { end_of_generation: vec![40, 7, 40], ..Setup::default() };
    let mut engine = setup.engine(counting(64));
    assert_eq!(run_one(&mut engine, request(&[5])).finish(), &Finish::Eos(7));
    assert_eq!(run_one(&mut engine, request(&[38])).finish(), &Finish::Eos(40));
}

// ---- limits

fn small_context() -> Setup {
    Setup { context_length: 8, ..Setup::default() }
}

#[test]
fn a_prompt_that_fills_the_context_is_refused_before_any_work() {
    let (mut engine, log) = small_context().engine_and_log(counting(64));
    for prompt_tokens in [8, 9] {
        let refused = engine.submit(request(&vec![1; prompt_tokens]));
        assert!(
            matches!(refused, Err(Error::PromptTooLong { prompt_tokens: n, context_tokens: 8 }) if n == prompt_tokens)
        );
    }
    assert!(engine.is_idle());
    assert_eq!(num_forwards(&log), 0);
    assert_eq!(run_one(&mut engine, request(&[1; 7])).ids(), [2], "the last slot is usable");
}

#[test]
fn a_full_context_ends_the_generation_and_says_so() {
    let mut engine = small_context().engine(counting(64));
    let answer = run_one(&mut engine, request(&[1, 2, 3]));
    assert_eq!((answer.ids(), answer.finish()), (vec![4, 5, 6, 7, 8], &Finish::ContextFull));
    assert!(matches!(answer.events[0], Event::Started(ref started) if started.max_tokens == 5));
}

#[test]
fn an_end_of_generation_is_seen_at_a_full_context() {
    let setup = Setup { end_of_generation: vec![9], ..small_context() };
    let mut engine = setup.engine(counting(64));
    let answer = run_one(&mut engine, request(&[1, 2, 3]));
    assert_eq!((answer.ids(), answer.finish()), (vec![4, 5, 6, 7, 8], &Finish::Eos(9)));
}

#[test]
fn more_tokens_than_fit_are_refused_or_clamped_as_the_request_says() {
    let (mut engine, log) = small_context().engine_and_log(counting(64));
    let refused = engine.submit(limited(&[1, 2, 3], 6));
    let expected = (3, 6, 8);
    assert!(matches!(refused, Err(Error::ContextExceeded { prompt_tokens, max_tokens, context_tokens })
        if (prompt_tokens, max_tokens, context_tokens) == expected));
    assert_eq!(num_forwards(&log), 0);
    assert_eq!(run_one(&mut engine, limited(&[1, 2, 3], 5)).finish(), &Finish::MaxTokens, "fits exactly");
    let mut clamped = limited(&[1, 2, 3], 6);
    clamped.limits.overflow = Overflow::Clamp;
    let answer = run_one(&mut engine, clamped);
    assert_eq!((answer.ids().len(), answer.finish()), (5, &Finish::ContextFull));
    assert!(matches!(answer.events[0], Event::Started(ref started) if started.max_tokens == 5));
}

#[test]
fn bad_requests_are_refused_by_name_before_any_work() {
    let (mut engine, log) = Setup::default().engine_and_log(counting(64));
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(&[1]);
        change(&mut request);
        request
    };
    let cases: [(&str, Request); 12] = [
        ("temperature", with(&|r| r.sampling.temperature = 2.01)),
        ("temperature", with(&|r| r.sampling.temperature = -1.0)),
        ("temperature", with(&|r| r.sampling.temperature = f32::NAN)),
        ("top_p", with(&|r| r.sampling.top_p = 0.0)),
        ("top_k", with(&|r| r.sampling.top_k = Some(0))),
        ("min_p", with(&|r| r.sampling.min_p = 1.5)),
        ("repetition_penalty", with(&|r| r.sampling.repetition_penalty = 0.0)),
        ("presence_penalty", with(&|r| r.sampling.presence_penalty = 3.0)),
        ("logit_bias", with(&|r| r.sampling.logit_bias = BTreeMap::from([(64, 1.0)]))),
        ("logprobs", with(&|r| r.logprobs = Some(MAX_LOGPROBS + 1))),
        ("max_tokens", with(&|r| r.limits.max_tokens = Some(0))),
        ("prompt", with(&|r| r.prompt = vec![1, 64])),
    ];
    for (field, request) in cases {
        let refused = engine.submit(request);
        assert!(
            matches!(refused, Err(Error::InvalidParameter { name, .. }) if name == field),
            "{field}: {refused:?}"
        );
    }
    assert!(matches!(engine.submit(request(&[])), Err(Error::PromptEmpty)));
    assert!(engine.is_idle());
    assert_eq!(num_forwards(&log), 0);
    for temperature in [0.0, 1.0, 2.0] {
        let sampling = Sampling { temperature, ..seeded(1) };
        let answer = run_one(&mut engine, Request { sampling, ..limited(&[1], 2) });
        assert!(answer.outcome().usage.completion_tokens > 0, "{temperature}");
    }
}

#[test]
fn an_engine_that_cannot_serve_its_configuration_is_refused_by_name() {
    let good = Setup::default().config();
    let cases = [
        ("context_length", EngineConfig { context_length: 1, ..good.clone() }),
        ("context_length", EngineConfig { context_length: usize::MAX, ..good.clone() }),
        ("step_tokens", EngineConfig { step_tokens: 0, ..good.clone() }),
        ("max_running", EngineConfig { max_running: 0, ..good.clone() }),
        ("kv_memory", EngineConfig { kv_memory: pages(256 / PAGE_TOKENS - 1), ..good.clone() }),
    ];
    for (field, config) in cases {
        let model = Box::new(ToyModel::new(64, counting(64)));
        let result = Engine::new(model, ToyVocabulary::numbers(64), config);
        assert!(matches!(result, Err(Error::InvalidParameter { name, .. }) if name == field), "{field}");
    }
}

#[test]
fn a_models_own_limit_is_for_requests_without_one() {
    let engine = |answer_tokens: Option<usize>, period: u32| {
        let rule: Rule = Box::new(move |history| Ok(one_hot(64, (history[history.len() - 1] + 1) % period)));
        let config = EngineConfig { answer_tokens, ..Setup::default().config() };
        let model = Box::new(ToyModel::new(64, rule));
        Engine::new(model, ToyVocabulary::numbers(64), config).expect("a valid configuration")
    };
    let ended = |answer_tokens, period, request: Request| {
        let answer = run_one(&mut engine(answer_tokens, period), request);
        (answer.ids().len(), answer.finish().clone())
    };
    let (long, short) = (32, 4);
    assert_eq!(ended(Some(100), long, request(&[0])), (100, Finish::MaxTokens));
    assert_eq!(ended(None, long, request(&[0])), (255, Finish::ContextFull), "other models have none");
    assert_eq!(ended(Some(1000), long, request(&[0])), (255, Finish::ContextFull));
    // An answer that goes round in circles ends before that.
    assert_eq!(ended(Some(100), short, request(&[0])), (48, Finish::MaxTokens));
    assert_eq!(ended(None, short, request(&[0])), (255, Finish::ContextFull));
    // Who names a number, or wants no end, gets it.
    assert_eq!(ended(Some(100), short, limited(&[0], 120)), (120, Finish::MaxTokens));
    let mut endless = request(&[0]);
    endless.limits.ignore_eos = true;
    assert_eq!(ended(Some(100), short, endless), (255, Finish::ContextFull));
}

// ---- text

#[test]
fn characters_split_over_tokens_come_out_whole() {
    let llama = "🦙".as_bytes();
    let (mut engine, _) = speaking(&[b"", &llama[..1], &llama[1..3], &llama[3..], b"!"], &[], &[4]);
    let answer = run_one(&mut engine, request(&[0]));
    assert_eq!(answer.text(), "🦙");
    let texts: Vec<_> = answer
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Text { text, tokens } => Some((text.as_str(), tokens.len())),
            _ => None,
        })
        .collect();
    assert_eq!(texts, [("", 1), ("", 1), ("🦙", 1)], "each token at once, its text when it is complete");
}

#[test]
fn an_unfinished_character_at_the_end_is_replaced() {
    let (mut engine, _) = speaking(&[&b""[..], b"a", b"\xf0\x9f", b"x"], &[], &[3]);
    assert_eq!(run_one(&mut engine, request(&[0])).text(), "a\u{fffd}");
}

#[test]
fn control_tokens_are_silent_unless_wanted() {
    let pieces = ["", "a", "<|tool|>", "b", "</s>"];
    let (mut engine, _) = speaking(&pieces, &[2, 4], &[4]);
    let answer = run_one(&mut engine, request(&[0]));
    assert_eq!((answer.text().as_str(), answer.ids()), ("ab", vec![1, 2, 3]));
    let shown = run_one(&mut engine, Request { render_special: true, ..request(&[0]) });
    assert_eq!(shown.text(), "a<|tool|>b", "but never the one that ended it");
}

fn stopping(stop: &[&str]) -> Request {
    let stop = stop.iter().map(|&stop| stop.to_owned()).collect();
    Request { limits: Limits { stop, ..Limits::default() }, ..request(&[0]) }
}

#[test]
fn stop_strings_end_the_generation_in_the_token_that_completes_them() {
    let pieces = ["", "one ", "tw", "o th", "ree ", "four", "</s>"];
    // (stop strings, text, tokens generated, stop string found)
    let cases: [(&[&str], &str, usize, Option<&str>); 8] = [
        (&["two"], "one ", 3, Some("two")),
        (&["th"], "one two ", 3, Some("th")),
        (&["o t", "ree"], "one tw", 3, Some("o t")),
        (&["ree", "two"], "one ", 3, Some("two")),
        (&["", "four"], "one two three ", 5, Some("four")),
        (&["fourth"], "one two three four", 5, None),
        (&["never"], "one two three four", 5, None),
        (&["one two three four five", "r"], "one two th", 5, Some("r")),
    ];
    for (stop, text, num_tokens, found) in cases {
        let (mut engine, _) = speaking(&pieces, &[], &[6]);
        let answer = run_one(&mut engine, stopping(stop));
        assert_eq!((answer.text().as_str(), answer.ids().len()), (text, num_tokens), "{stop:?}");
        let expected = found.map_or(Finish::Eos(6), |stop| Finish::StopString(stop.to_owned()));
        assert_eq!(answer.finish(), &expected, "{stop:?}");
        assert_eq!(answer.outcome().usage.completion_tokens, num_tokens);
        check_all_free(&engine);
    }
}

#[test]
fn no_text_of_a_stop_string_is_ever_shown() {
    let (mut engine, _) = speaking(&["", "x", "<e", "nd", ">y", "</s>"], &[], &[5]);
    let answer = run_one(&mut engine, stopping(&["<end>"]));
    assert_eq!((answer.text().as_str(), answer.ids().len()), ("x", 4));
}

#[test]
fn text_held_back_is_flushed_at_the_limit() {
    let (mut engine, _) = speaking(&["", "x", "<e", "nd", ">y", "</s>"], &[], &[5]);
    let mut request = stopping(&["<end>"]);
    request.limits.max_tokens = Some(3);
    let answer = run_one(&mut engine, request);
    assert_eq!((answer.text().as_str(), answer.finish()), ("x<end", &Finish::MaxTokens));
}

#[test]
fn a_stop_string_completed_by_the_last_token_allowed_is_a_stop() {
    let (mut engine, _) = speaking(&["", "x", "<e", "nd", ">y", "</s>"], &[], &[5]);
    let mut request = stopping(&["<end>"]);
    request.limits.max_tokens = Some(4);
    assert_eq!(run_one(&mut engine, request).finish(), &Finish::StopString("<end>".to_owned()));
}

// ---- sampling through the engine

#[test]
fn every_token_passes_the_same_processors_the_first_included() {
    let mut engine = Setup::default().engine(counting(64));
    let sampling = Sampling { logit_bias: BTreeMap::from([(50, 100.0)]), ..Sampling::default() };
    let answer = run_one(&mut engine, Request { sampling, ..limited(&[1], 3) });
    assert_eq!(answer.ids(), [50, 50, 50]);
    // Prompt and generated tokens are penalised: nothing repeats until all have been seen.
    let flat: Rule = Box::new(|_| Ok(vec![1.0; 8]));
    let mut engine = Setup { vocab_size: 8, end_of_generation: vec![], ..Setup::default() }.engine(flat);
    let sampling = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
    let answer = run_one(&mut engine, Request { sampling, ..limited(&[0, 3], 6) });
    assert_eq!(answer.ids(), [1, 2, 4, 5, 6, 7]);
    let sampling = Sampling { presence_penalty: 1.0, ..Sampling::default() };
    let answer = run_one(&mut engine, Request { sampling, ..limited(&[0, 3], 8) });
    assert_eq!(answer.ids(), [0, 1, 2, 3, 4, 5, 6, 7], "the prompt is not penalised");
}

#[test]
fn the_first_token_follows_the_requests_temperature() {
    let mut engine = Setup::default().engine(hashing(64));
    let greedy = run_one(&mut engine, limited(&[9, 8], 1)).ids();
    let hot =
        |seed| Request { sampling: Sampling { temperature: 2.0, ..seeded(seed) }, ..limited(&[9, 8], 1) };
    assert!((0..20).any(|seed| run_one(&mut engine, hot(seed)).ids() != greedy));
}

#[test]
fn logprobs_come_with_every_token() {
    let mut engine = Setup::default().engine(hashing(64));
    let answer = run_one(&mut engine, Request { logprobs: Some(2), ..limited(&[1, 2], 5) });
    for token in answer.tokens() {
        let logprob = token.logprob.expect("asked for");
        assert_eq!(logprob.top[0], (token.id, logprob.logprob), "greedy takes the best");
        assert!(logprob.top[1].1 <= logprob.logprob && logprob.logprob < 0.0);
    }
    let plain = run_one(&mut engine, limited(&[1, 2], 5));
    assert!(plain.tokens().iter().all(|token| token.logprob.is_none()));
}

// ---- batching and scheduling

fn mixed_requests() -> Vec<Request> {
    let prompt = |start: u32, len: u32| (0..len).map(|i| (start + i * 7) % 62).collect::<Vec<_>>();
    vec![
        limited(&prompt(1, 3), 30),
        Request { sampling: seeded(11), ..limited(&prompt(2, 70), 45) },
        Request { sampling: Sampling { top_p: 0.7, ..seeded(12) }, ..limited(&prompt(2, 70), 20) },
        Request {
            sampling: Sampling { frequency_penalty: 0.9, ..seeded(13) },
            ..limited(&prompt(5, 33), 64)
        },
        Request { logprobs: Some(3), ..limited(&prompt(9, 1), 90) },
    ]
}

#[test]
fn requests_together_answer_as_they_do_alone() {
    let alone: Vec<_> =
        mixed_requests().into_iter().map(|r| run_one(&mut Setup::default().engine(hashing(64)), r)).collect();
    let (mut engine, log) = Setup::default().engine_and_log(hashing(64));
    let together = run_all(&mut engine, mixed_requests());
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone.tokens(), together.tokens());
        assert_eq!(alone.text(), together.text());
    }
    let log = log.lock().expect("unpoisoned");
    let sequences = |rows: &Vec<_>| rows.iter().map(|row: &Row| row.sequence).max();
    assert!(log.iter().any(|rows| sequences(rows) == Some(3)), "four at once in one forward pass");
    check_all_free(&engine);
}

#[test]
fn chunk_size_changes_nothing() {
    let run = |step_tokens| {
        let setup = Setup { step_tokens, ..Setup::default() };
        let answers = run_all(&mut setup.engine(hashing(64)), mixed_requests());
        answers.iter().map(Answer::tokens).collect::<Vec<_>>()
    };
    let whole = run(512);
    for step_tokens in [1, 7, 64] {
        assert_eq!(run(step_tokens), whole, "chunks of {step_tokens}");
    }
}

#[test]
fn a_long_prompt_does_not_stall_a_running_generation() {
    let setup = Setup { step_tokens: 8, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    let short = engine.submit(limited(&[1], 20)).expect("valid");
    let mut answers = HashMap::new();
    step(&mut engine, &mut answers);
    engine.submit(limited(&[2; 100], 1)).expect("valid");
    for generated in 2..=12 {
        step(&mut engine, &mut answers);
        assert_eq!(answers[&short].ids().len(), generated, "one token in every step");
    }
    drain(&mut engine, &mut answers);
    assert!(log.lock().expect("unpoisoned").iter().all(|rows| rows.len() <= 8));
}

#[test]
fn only_rows_that_sample_ask_for_logits() {
    let setup = Setup { step_tokens: 4, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    run_one(&mut engine, limited(&[1; 10], 3));
    let wants: Vec<usize> = log
        .lock()
        .expect("unpoisoned")
        .iter()
        .map(|rows| rows.iter().filter(|row| row.wants_logits).count())
        .collect();
    assert_eq!(wants, [0, 0, 1, 1, 1]);
}

/// Returns the log-probabilities of a request's prompt.
fn scores(answer: &Answer) -> Vec<Logprob> {
    let told = answer.events.iter().filter_map(|event| match event {
        Event::Prompt { logprobs } => Some(logprobs.clone()),
        _ => None,
    });
    told.flatten().collect()
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_its_tokens_as_answers() {
    let prompt: Vec<u32> = (0..200).map(|n| (n * 7) % 50).collect();
    let scored = |max_tokens: usize| Request { prompt_logprobs: Some(2), ..limited(&prompt, max_tokens) };
    let truth = |at: usize| {
        let mut engine = Setup::default().engine(hashing(64));
        let request = Request { logprobs: Some(2), ..limited(&prompt[..at], 1) };
        run_one(&mut engine, request).tokens()[0].logprob.clone().expect("asked for")
    };
    let alone = run_one(&mut Setup::default().engine(hashing(64)), scored(4));
    let told = scores(&alone);
    assert_eq!(told.len(), prompt.len() - 1);
    for at in [1, 15, 16, 17, 128, 199] {
        assert_eq!(told[at - 1].top, truth(at).top, "token {at}");
    }
    for step_tokens in [1, 7, 64] {
        let setup = Setup { step_tokens, ..Setup::default() };
        let (mut engine, log) = setup.engine_and_log(hashing(64));
        // What others have computed is of no use to it, and of its pages they take what they like.
        let first = run_one(&mut engine, limited(&prompt, 4));
        let company = run_all(&mut engine, vec![scored(4), limited(&prompt, 4), scored(0)]);
        for answer in [&company[0], &company[2]] {
            assert_eq!(scores(answer), told, "steps of {step_tokens}");
            assert_eq!(answer.reuse().reason, ReuseReason::PromptLogprobs);
            assert_eq!(answer.reuse().cached_tokens, 0);
        }
        assert_eq!(company[0].ids(), first.ids(), "the answer is the same");
        assert_eq!(company[1].ids(), first.ids());
        assert_eq!((company[2].ids().len(), company[2].finish()), (0, &Finish::MaxTokens));
        let most = log
            .lock()
            .expect("unpoisoned")
            .iter()
            .map(|rows| rows.iter().filter(|row| row.wants_logits).count())
            .max();
        assert!(most <= Some(2 * 16 + 1), "logits of few rows at a time: {most:?}");
        check_all_free(&engine);
    }
}

#[test]
fn tokens_of_a_request_end_its_answer() {
    let mut engine = Setup::default().engine(counting(64));
    let limits = Limits { stop_ids: vec![7], max_tokens: Some(20), ..Limits::default() };
    let answer = run_one(&mut engine, Request { limits, ..request(&[3]) });
    assert_eq!((answer.ids(), answer.finish()), (vec![4, 5, 6], &Finish::Eos(7)));
}

// ---- failures

/// Counts, but panics when the history ends in `token`.
fn panicking_on(token: u32) -> Rule {
    let mut count = counting(64);
    Box::new(move |history| {
        assert_ne!(history[history.len() - 1], token, "the chosen token");
        count(history)
    })
}

#[test]
fn a_panic_fails_its_batch_and_the_next_request_works() {
    let mut engine = Setup::default().engine(panicking_on(33));
    let answers = run_all(&mut engine, vec![limited(&[30], 9), limited(&[1], 60)]);
    for answer in &answers {
        assert!(matches!(answer.error(), Error::Backend(message) if message.contains("the chosen token")));
    }
    assert_eq!(answers[0].text(), "31 32 33 ", "what had been said stays said");
    check_all_free(&engine);
    assert_eq!(run_one(&mut engine, limited(&[1], 9)).ids(), [2, 3, 4, 5, 6, 7, 8, 9, 10]);
}

#[test]
fn text_held_back_is_flushed_on_failure() {
    let rule: Rule = Box::new(|history| match history.last() {
        Some(2) => Err(Error::Backend("out of order".to_owned())),
        _ => Ok(one_hot(4, history[history.len() - 1] + 1)),
    });
    let setup = Setup { vocab_size: 4, end_of_generation: vec![3], ..Setup::default() };
    let (mut engine, _) =
        setup.engine_with(ToyModel::new(4, rule), ToyVocabulary::new(&["", "x", "<e", ""], &[]));
    let answer = run_one(&mut engine, stopping(&["<end>"]));
    assert_eq!(answer.text(), "x<e");
    assert!(matches!(answer.error(), Error::Backend(message) if message == "out of order"));
    check_all_free(&engine);
}

#[test]
fn one_rows_broken_logits_fail_that_request_alone() {
    let mut count = counting(64);
    let rule: Rule = Box::new(move |history| match history {
        [30, ..] if history.len() == 4 => Ok(vec![f32::NAN; 64]),
        [40, ..] if history.len() == 3 => Ok(vec![f32::NEG_INFINITY; 64]),
        _ => count(history),
    });
    let mut engine = Setup::default().engine(rule);
    let answers = run_all(&mut engine, vec![limited(&[30], 9), limited(&[40], 9), limited(&[1], 5)]);
    assert!(matches!(answers[0].error(), Error::NotFinite("NaN")));
    assert!(matches!(answers[1].error(), Error::Backend(message) if message.contains("masked")));
    assert_eq!((answers[0].ids(), answers[1].ids()), (vec![31, 32, 33], vec![41, 42]));
    assert_eq!(answers[2].ids(), [2, 3, 4, 5, 6]);
    check_all_free(&engine);
}

#[test]
fn a_model_that_returns_the_wrong_number_of_logits_is_an_error() {
    let rule: Rule = Box::new(|_| Ok(vec![0.0; 65]));
    let mut engine = Setup::default().engine(rule);
    assert!(matches!(run_one(&mut engine, limited(&[1], 2)).error(), Error::Backend(_)));
    assert_eq!(Logits::default().len(), 0);
    check_all_free(&engine);
}

// ---- cancellation

#[test]
fn cancel_ends_a_request_wherever_it_stands() {
    let setup = Setup { step_tokens: 4, max_running: 1, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    let mut answers: HashMap<_, Answer> = HashMap::new();
    let running = engine.submit(limited(&[1; 10], 40)).expect("valid");
    let waiting = engine.submit(limited(&[2; 10], 40)).expect("valid");
    step(&mut engine, &mut answers);
    assert!(engine.cancel(running), "between two chunks of its prompt");
    assert!(engine.cancel(waiting), "before it started");
    assert!(!engine.cancel(running), "only once");
    assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
    assert!(!engine.is_idle(), "the ends are still to be reported");
    drain(&mut engine, &mut answers);
    assert_eq!(fed_tokens(&log).len(), 4);
    for (id, computed) in [(running, 4), (waiting, 0)] {
        answers[&id].check_order();
        let outcome = answers[&id].outcome();
        assert_eq!((&outcome.finish, outcome.usage.prompt_tokens), (&Finish::Cancelled, computed));
        assert_eq!((outcome.usage.completion_tokens, outcome.timings.time_to_first_token), (0, None));
    }
    assert!(!answers[&waiting].events.iter().any(|event| matches!(event, Event::Started(_))));
}

#[test]
fn cancel_while_generating_flushes_the_text_held_back() {
    let (mut engine, _) = speaking(&["", "x", "<e", "nd", ">y", "</s>"], &[], &[5]);
    let id = engine.submit(stopping(&["<end>"])).expect("valid");
    let mut answers: HashMap<_, Answer> = HashMap::new();
    step(&mut engine, &mut answers);
    step(&mut engine, &mut answers);
    assert_eq!(answers[&id].text(), "x");
    engine.cancel(id);
    drain(&mut engine, &mut answers);
    assert_eq!((answers[&id].text().as_str(), answers[&id].finish()), ("x<e", &Finish::Cancelled));
    assert_eq!(answers[&id].outcome().usage.completion_tokens, 2);
    assert!(!engine.cancel(id));
    check_all_free(&engine);
}

// ---- properties

#[derive(Debug, Clone)]
enum Action {
    Submit { prompt: Vec<u32>, max_tokens: usize, seed: u64 },
    Cancel(prop::sample::Index),
    Step,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let submit = (prop::collection::vec(0u32..60, 1..80), 1usize..60, any::<u64>())
        .prop_map(|(prompt, max_tokens, seed)| Action::Submit { prompt, max_tokens, seed });
    let cancel = any::<prop::sample::Index>().prop_map(Action::Cancel);
    prop::collection::vec(prop_oneof![2 => submit, 1 => cancel, 6 => Just(Action::Step)], 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn whatever_is_submitted_and_cancelled_no_page_leaks_and_no_answer_is_touched(
        actions in actions(), step_tokens in 1usize..40, max_running in 1usize..5, num_pages in 8usize..20,
        panics in prop::bool::weighted(0.3),
    ) {
        let setup = Setup { step_tokens, max_running, max_sessions: 0, ..Setup::default() };
        let config = EngineConfig { kv_memory: pages(num_pages), ..setup.config() };
        let rule: Rule = Box::new(move |history| {
            let hash = history.iter().fold(7u32, |hash, token| hash.wrapping_mul(31).wrapping_add(*token));
            if panics && hash % 400 == 0 {
                return Err(Error::Backend("by chance".to_owned()));
            }
            Ok(hashed_logits(history, 64))
        });
        let model = Box::new(ToyModel::new(64, rule));
        let mut engine = Engine::new(model, ToyVocabulary::numbers(64), config).expect("valid");
        let (mut answers, mut submitted) = (HashMap::new(), Vec::new());
        for action in actions {
            match action {
                Action::Submit { prompt, max_tokens, seed } => {
                    let request = Request { sampling: varied(seed), ..limited(&prompt, max_tokens) };
                    submitted.push((engine.submit(request.clone()).expect("valid"), request));
                }
                Action::Cancel(which) if !submitted.is_empty() => {
                    engine.cancel(which.get(&submitted).0);
                }
                Action::Cancel(_) => {}
                Action::Step => step(&mut engine, &mut answers),
            }
        }
        drain(&mut engine, &mut answers);
        check_all_free(&engine);
        for (id, request) in &submitted {
            let answer = &answers[id];
            answer.check_order();
            let expected = recomputed(request, 64, 63);
            match answer.events.last() {
                Some(Event::Done(outcome)) if outcome.finish != Finish::Cancelled => {
                    prop_assert_eq!(answer.ids(), expected);
                }
                Some(Event::Failed(_)) => prop_assert!(panics && expected.starts_with(&answer.ids())),
                _ => prop_assert!(expected.starts_with(&answer.ids())),
            }
        }
    }

    #[test]
    fn a_cancelled_request_tried_again_is_as_fresh(
        prompt in prop::collection::vec(0u32..60, 1..90), steps in 0usize..20, seed in any::<u64>(),
    ) {
        let request = Request { sampling: seeded(seed), ..limited(&prompt, 30) };
        let fresh = run_one(&mut Setup::default().engine(hashing(64)), request.clone());
        let mut engine = Setup::default().engine(hashing(64));
        let id = engine.submit(request.clone()).expect("valid");
        let mut answers = HashMap::new();
        (0..steps).for_each(|_| step(&mut engine, &mut answers));
        engine.cancel(id);
        let again = run_one(&mut engine, request);
        prop_assert_eq!(again.ids(), fresh.ids());
        prop_assert_eq!(again.text(), fresh.text());
    }
}
