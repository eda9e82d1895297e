//! Promise: what only a window sees is kept only so long, and recurrent layers resume and rewind warm from the states that
//! turns leave behind; the answers are those of an engine that computes everything.

use crate::common::prelude::*;
use crate::common::toy::TOY_PAGE_BYTES;

const RECURRENT: &[KvKind] = &[KvKind::Recurrent, KvKind::Full];

fn engine(kinds: &[KvKind]) -> Engine {
    let (context_length, end_of_generation) = (512, Vec::new());
    let setup = Setup {
        step_tokens: 50,
        max_running: 1,
        spare_pages: 8,
        context_length,
        end_of_generation,
        ..Setup::default()
    };
    setup.engine_with(ToyModel::new(64, hashing(64)).with_groups(kinds), ToyVocabulary::numbers(64)).0
}

fn within(session: &str, prompt: &[u32], max_tokens: usize) -> Request {
    Request { session: Some(named(session)), ..limited(prompt, max_tokens) }
}

/// Runs a request on the engine at hand and on one that knows nothing; they must agree.
fn run(engine: &mut Engine, kinds: &[KvKind], request: Request) -> (Answer, Reuse) {
    let answer = run_one(engine, request.clone());
    let cold = run_one(&mut self::engine(kinds), Request { session: None, ..request });
    assert_eq!(answer.ids(), cold.ids());
    let reuse = answer.reuse();
    (answer, reuse)
}

fn numbers(len: usize) -> Vec<u32> {
    (0..len).map(|n| (n * 7 % 60) as u32).collect()
}

fn held_pages(engine: &Engine) -> usize {
    (engine.load().kv_capacity - engine.load().kv_free) / TOY_PAGE_BYTES
}

#[test]
fn a_windowed_layer_keeps_what_it_sees_and_no_more() {
    let kinds = &[KvKind::Full, KvKind::SlidingWindow(40)];
    let mut engine = engine(kinds);
    let prompt = numbers(300);
    let (answer, _) = run(&mut engine, kinds, within("a", &prompt, 20));
    // 320 tokens, the last not resident: 10 pages for all; tokens 280 to 318 on 2 pages.
    assert_eq!(held_pages(&engine), 10 + 2);
    let next = [&prompt[..], &answer.ids(), &[1, 2, 3]].concat();
    let (_, reuse) = run(&mut engine, kinds, within("a", &next, 5));
    assert_eq!((reuse.cached_tokens, reuse.reason), (319, ReuseReason::ExactPrefix));
    let edited = [&prompt[..200], &[9, 9, 9]].concat();
    let (_, reuse) = run(&mut engine, kinds, within("a", &edited, 5));
    assert_eq!(
        (reuse.cached_tokens, reuse.reason),
        (200, ReuseReason::PartialPrefix),
        "nobody needed its memory"
    );
    let promised = engine.serving_capacity().bytes_per_session / TOY_PAGE_BYTES;
    assert_eq!(promised, 512 / PAGE_TOKENS + 4, "a window of 40 and a step of 50 lie on at most 4 pages");
}

#[test]
fn a_rewind_beyond_what_the_window_left_computes_again() {
    let kinds = &[KvKind::Full, KvKind::SlidingWindow(40)];
    let mut engine = engine(kinds);
    let prompt = numbers(300);
    run(&mut engine, kinds, within("a", &prompt, 4));
    // Others use all memory that the session does not hold.
    for seed in 0..4 {
        let other: Vec<u32> = (0..480).map(|n| (n * 11 + seed * 13 + 5) % 60).collect();
        run(&mut engine, kinds, limited(&other, 4));
    }
    let edited = [&prompt[..150], &[9, 9, 9]].concat();
    let (_, reuse) = run(&mut engine, kinds, within("a", &edited, 5));
    assert!(reuse.cached_tokens < 150, "{reuse:?}");
}

#[test]
fn a_recurrent_model_goes_on_where_its_session_ended() {
    let mut engine = engine(RECURRENT);
    let prompt = numbers(100);
    let (answer, first) = run(&mut engine, RECURRENT, within("a", &prompt, 30));
    assert_eq!(first.reason, ReuseReason::New);
    let next = [&prompt[..], &answer.ids(), &[1, 2, 3]].concat();
    let (_, reuse) = run(&mut engine, RECURRENT, within("a", &next, 5));
    assert_eq!(
        (reuse.cached_tokens, reuse.reason),
        (129, ReuseReason::ExactPrefix),
        "to the token, not to the page"
    );
}

#[test]
fn a_recurrent_model_rewinds_to_the_state_that_a_turn_left() {
    let mut engine = engine(RECURRENT);
    let prompt = numbers(100);
    let (answer, _) = run(&mut engine, RECURRENT, within("a", &prompt, 70));
    let said = [&prompt[..], &answer.ids()].concat();
    // Regenerated with another question: the state before the answer, at the last whole page of the prompt.
    let (_, reuse) = run(&mut engine, RECURRENT, within("a", &[&prompt[..99], &[5, 6]].concat(), 5));
    assert_eq!((reuse.cached_tokens, reuse.reason), (96, ReuseReason::PartialPrefix));
    // A fork does not care what became of the original.
    run(&mut engine, RECURRENT, within("a", &said, 1));
    engine.fork_session(&named("a"), &named("b")).expect("room");
    run(&mut engine, RECURRENT, within("a", &[&said[..], &[3]].concat(), 40));
    let (_, reuse) = run(&mut engine, RECURRENT, within("b", &[&said[..], &[4]].concat(), 5));
    assert_eq!(reuse.cached_tokens, 170);
    // The end of the answer is not kept exactly, but the last whole page within it is.
    let mut engine = self::engine(RECURRENT);
    run(&mut engine, RECURRENT, within("a", &prompt, 70));
    let (_, reuse) = run(&mut engine, RECURRENT, within("a", &[&said[..165], &[8]].concat(), 5));
    assert_eq!(reuse.cached_tokens, 160, "pages 96 and 128 were passed, 160 is the last");
}

/// The first to share a beginning finds rows but no state; it leaves one, and those after it find both.
#[test]
fn strangers_share_a_system_prompt_from_the_second_meeting_on() {
    let mut engine = engine(RECURRENT);
    let system = numbers(140);
    let mut cached = |question: u32| {
        let prompt = [&system[..], &[question; 50]].concat();
        run(&mut engine, RECURRENT, limited(&prompt, 3)).1.cached_tokens
    };
    assert_eq!([cached(1), cached(2), cached(3)], [0, 0, 128]);
}

#[test]
fn an_evicted_recurrent_session_comes_back_from_what_is_left() {
    let mut engine = engine(RECURRENT);
    let prompt = numbers(100);
    let (answer, _) = run(&mut engine, RECURRENT, within("a", &prompt, 30));
    let next = [&prompt[..], &answer.ids(), &[1, 2, 3]].concat();
    for seed in 0..5 {
        let other: Vec<u32> = (0..480).map(|n| (n * 11 + seed * 13 + 5) % 60).collect();
        run(&mut engine, RECURRENT, within(&format!("s{}", seed % 2), &other, 20));
    }
    let (_, reuse) = run(&mut engine, RECURRENT, within("a", &next, 5));
    assert!([0, 96, 128].contains(&reuse.cached_tokens), "{reuse:?}");
}
