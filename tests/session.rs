//! Promise: a session behaves as the contract says, call by call: positions, stops, ends of generation, rewinds, the edge of
//! the context, what is refused and what poisons; and sessions do not touch each other.

use llmctl_base::Result;
use llmctl_engine::{DecodeOutcome, SessionId};
use proptest::prelude::*;

use crate::common::prelude::*;
use crate::common::toy::{TOY_PAGE_BYTES, pages, request};

fn greedy() -> Sampling {
    Sampling::default()
}

fn open(setup: &Setup, rule: Rule) -> (Engine, Log, SessionId) {
    let (mut engine, log) = setup.engine_and_log(rule);
    let id = engine.create_session().expect("room for one");
    (engine, log, id)
}

/// Everything about a session that a refused call must leave alone.
fn state(engine: &Engine, log: &Log, id: SessionId) -> (usize, Vec<u32>, usize, usize) {
    let tokens = engine.session_tokens(id).expect("open").to_vec();
    (engine.position(id).expect("open"), tokens, engine.load().kv_free, num_forwards(log))
}

/// Decodes up to `count` tokens, to the first terminal step.
fn decode(engine: &mut Engine, id: SessionId, sampling: &Sampling, count: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..count {
        match engine.decode_one(id, sampling).expect("a pending token") {
            DecodeOutcome::Token { id, .. } => ids.push(id),
            DecodeOutcome::Eos { .. } | DecodeOutcome::Stopped => break,
        }
    }
    ids
}

#[test]
fn decode_returns_the_pending_token_and_advances_by_one() {
    let (mut engine, log, id) = open(&Setup::default(), counting(64));
    engine.prefill_tokens(id, &[5, 6], &greedy()).expect("valid");
    assert_eq!((engine.position(id).expect("open"), num_forwards(&log)), (2, 1));
    let step = engine.decode_one(id, &greedy()).expect("pending");
    assert_eq!(step, DecodeOutcome::Token { id: 7, piece: b"7 ".to_vec() });
    assert!(!step.is_terminal() && !step.is_eos());
    assert_eq!(engine.session_tokens(id).expect("open"), [5, 6, 7]);
    assert_eq!(decode(&mut engine, id, &greedy(), 2), [8, 9]);
    assert_eq!((engine.position(id).expect("open"), fed_tokens(&log)), (5, vec![5, 6, 7, 8, 9]));
}

#[test]
fn refused_prefills_leave_the_session_untouched() {
    let setup = Setup { context_length: 8, ..Setup::default() };
    let (mut engine, log, id) = open(&setup, counting(64));
    let too_long = engine.prefill_tokens(id, &[1; 8], &greedy());
    assert!(matches!(too_long, Err(Error::PromptTooLong { prompt_tokens: 8, context_tokens: 8 })));
    assert_eq!(num_forwards(&log), 0);
    engine.prefill_tokens(id, &[1, 2, 3], &greedy()).expect("valid");
    let before = state(&engine, &log, id);
    let hot = Sampling { temperature: 2.01, ..greedy() };
    type Expected = fn(&Error) -> bool;
    let cases: [(&[u32], &Sampling, Expected); 4] = [
        (&[4; 5], &greedy(), |e| matches!(e, Error::PromptTooLong { prompt_tokens: 8, .. })),
        (&[], &greedy(), |e| matches!(e, Error::PromptEmpty)),
        (&[64], &greedy(), |e| matches!(e, Error::InvalidParameter { name: "prompt", .. })),
        (&[4], &hot, |e| matches!(e, Error::InvalidParameter { name: "temperature", .. })),
    ];
    for (tokens, sampling, expected) in cases {
        let error = engine.prefill_tokens(id, tokens, sampling).expect_err("refused");
        assert!(expected(&error), "{error:?}");
        assert_eq!(state(&engine, &log, id), before);
    }
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [4], "the pending token survived");
}

#[test]
fn a_refused_decode_leaves_the_session_untouched() {
    let (mut engine, log, id) = open(&Setup::default(), counting(64));
    assert!(matches!(engine.decode_one(id, &greedy()), Err(Error::InvalidState(_))), "nothing prefilled");
    engine.prefill_tokens(id, &[1], &greedy()).expect("valid");
    let before = state(&engine, &log, id);
    let hot = Sampling { temperature: -0.5, ..greedy() };
    assert!(matches!(engine.decode_one(id, &hot), Err(Error::InvalidParameter { name: "temperature", .. })));
    assert_eq!(state(&engine, &log, id), before);
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [2]);
}

#[test]
fn an_end_of_generation_is_returned_once_and_never_resident() {
    for (prompt, resident) in [(61, vec![61, 62]), (62, vec![62])] {
        let (mut engine, log, id) = open(&Setup::default(), counting(64));
        engine.prefill_tokens(id, &[prompt], &greedy()).expect("valid");
        decode(&mut engine, id, &greedy(), (62 - prompt) as usize);
        let step = engine.decode_one(id, &greedy()).expect("pending");
        assert_eq!((step.clone(), step.token()), (DecodeOutcome::Eos { id: 63 }, Some(63)));
        assert!(step.is_eos() && step.is_terminal());
        assert_eq!(
            (engine.session_tokens(id).expect("open"), fed_tokens(&log)),
            (&resident[..], resident.clone())
        );
        assert!(matches!(engine.decode_one(id, &greedy()), Err(Error::InvalidState(_))));
        engine.prefill_tokens(id, &[20], &greedy()).expect("the session goes on");
        assert_eq!(decode(&mut engine, id, &greedy(), 1), [21]);
    }
}

#[test]
fn the_last_slot_is_usable_and_then_the_context_is_full() {
    let setup = Setup { context_length: 8, ..Setup::default() };
    let (mut engine, log, id) = open(&setup, counting(64));
    engine.prefill_tokens(id, &[1; 7], &greedy()).expect("leaves one place");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [2]);
    let before = state(&engine, &log, id);
    assert_eq!(before.0, 8);
    for _ in 0..2 {
        assert!(matches!(engine.decode_one(id, &greedy()), Err(Error::InvalidState("the context is full"))));
        assert_eq!(state(&engine, &log, id), before);
    }
    engine.seek(id, 3).expect("not poisoned");
}

#[test]
fn an_end_of_generation_is_seen_at_a_full_context() {
    let setup = Setup { context_length: 8, end_of_generation: vec![3], ..Setup::default() };
    let (mut engine, _, id) = open(&setup, counting(64));
    engine.prefill_tokens(id, &[1; 7], &greedy()).expect("leaves one place");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [2]);
    assert_eq!(
        engine.decode_one(id, &greedy()).expect("before the capacity check"),
        DecodeOutcome::Eos { id: 3 }
    );
    assert_eq!(engine.position(id).expect("open"), 8);
}

#[test]
fn stop_is_a_step_without_a_token_until_the_next_prefill_or_reset() {
    let (mut engine, log, id) = open(&Setup::default(), counting(64));
    engine.prefill_tokens(id, &[1], &greedy()).expect("valid");
    let stop = engine.stop_handle(id).expect("open");
    std::thread::spawn(move || stop.stop()).join().expect("no panic");
    let before = state(&engine, &log, id);
    for _ in 0..2 {
        let step = engine.decode_one(id, &greedy()).expect("a step, not an error");
        assert_eq!((step.clone(), step.token()), (DecodeOutcome::Stopped, None));
        assert!(step.is_terminal() && !step.is_eos());
        assert_eq!(state(&engine, &log, id), before);
    }
    assert!(engine.prefill_tokens(id, &[], &greedy()).is_err());
    assert!(engine.stop_handle(id).expect("open").is_stopped(), "a refused prefill clears nothing");
    engine.prefill_tokens(id, &[10], &greedy()).expect("valid");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [11]);
    assert_eq!(engine.session_tokens(id).expect("open"), [1, 10, 11], "the token before the stop is gone");
    engine.stop_handle(id).expect("open").stop();
    engine.reset(id).expect("open");
    engine.prefill_tokens(id, &[4], &greedy()).expect("valid");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [5]);
}

#[test]
fn a_stop_comes_before_an_end_of_generation() {
    let (mut engine, _, id) = open(&Setup::default(), counting(64));
    engine.prefill_tokens(id, &[62], &greedy()).expect("valid");
    engine.stop_handle(id).expect("open").stop();
    assert_eq!(engine.decode_one(id, &greedy()).expect("pending"), DecodeOutcome::Stopped);
}

#[test]
fn seek_rewinds_so_that_a_replay_gives_the_same() {
    let (mut engine, _, id) = open(&Setup::default(), hashing(64));
    let prompt: Vec<u32> = (0..50).collect();
    engine.prefill_tokens(id, &prompt, &seeded(3)).expect("valid");
    let first = decode(&mut engine, id, &seeded(3), 30);
    let free_before = engine.load().kv_free;
    engine.seek(id, 20).expect("supported");
    assert!(engine.load().kv_free > free_before, "pages beyond the position are free");
    assert_eq!(engine.session_tokens(id).expect("open"), &prompt[..20]);
    assert!(matches!(engine.decode_one(id, &seeded(3)), Err(Error::InvalidState(_))), "nothing is pending");
    engine.prefill_tokens(id, &prompt[20..], &seeded(3)).expect("valid");
    assert_eq!(decode(&mut engine, id, &seeded(3), 30), first);
    engine.seek(id, 0).expect("all the way");
    assert_eq!(engine.position(id).expect("open"), 0);
}

#[test]
fn seek_names_what_is_wrong() {
    let (mut engine, log, id) = open(&Setup::default(), counting(64));
    engine.prefill_tokens(id, &[1, 2], &greedy()).expect("valid");
    let before = state(&engine, &log, id);
    assert!(matches!(engine.seek(id, 3), Err(Error::InvalidParameter { name: "position", .. })));
    assert_eq!(state(&engine, &log, id), before);
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [3], "a refused seek keeps the pending token");

    let model = ToyModel::new(64, counting(64)).without_rewind();
    let (mut engine, log) = Setup::default().engine_with(model, ToyVocabulary::numbers(64));
    let id = engine.create_session().expect("room");
    engine.prefill_tokens(id, &[1, 2], &greedy()).expect("valid");
    let before = state(&engine, &log, id);
    assert!(matches!(engine.seek(id, 3), Err(Error::InvalidParameter { .. })));
    for position in [0, 1, 2] {
        assert!(matches!(engine.seek(id, position), Err(Error::NotSupported(_))), "{position}");
    }
    assert_eq!(state(&engine, &log, id), before);
    engine.reset(id).expect("what to do instead");
    engine.prefill_tokens(id, &[1], &greedy()).expect("valid");
}

#[test]
fn a_long_prompt_goes_in_chunks_and_only_the_last_samples() {
    let (mut engine, log, id) = open(&Setup { step_tokens: 4, ..Setup::default() }, counting(64));
    let prompt: Vec<u32> = (10..20).collect();
    engine.prefill_tokens(id, &prompt, &greedy()).expect("valid");
    let shape: Vec<(usize, usize)> = log
        .lock()
        .expect("unpoisoned")
        .iter()
        .map(|rows| (rows.len(), rows.iter().filter(|row| row.wants_logits).count()))
        .collect();
    assert_eq!(shape, [(4, 0), (4, 0), (2, 1)]);
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [20]);
}

#[test]
fn parameters_reach_the_first_token_and_every_later_one() {
    let (mut engine, _, id) = open(&Setup::default(), counting(64));
    let biased = |id| Sampling { logit_bias: BTreeMap::from([(id, 100.0)]), ..greedy() };
    engine.prefill_tokens(id, &[1], &biased(40)).expect("valid");
    assert_eq!(decode(&mut engine, id, &biased(41), 1), [40], "sampled in prefill");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [41], "sampled in the decode before");
    assert_eq!(decode(&mut engine, id, &greedy(), 1), [42]);

    let (mut engine, _, id) = open(&Setup::default(), hashing(64));
    let mut first_at = |sampling: &Sampling| {
        engine.reset(id).expect("open");
        engine.prefill_tokens(id, &[7, 7], sampling).expect("valid");
        decode(&mut engine, id, sampling, 1)
    };
    let cold = first_at(&greedy());
    assert!((0..20).any(|seed| first_at(&Sampling { temperature: 2.0, ..seeded(seed) }) != cold));
}

#[test]
fn a_session_and_a_request_generate_the_same() {
    let sampling = Sampling { top_p: 0.9, frequency_penalty: 0.5, repetition_penalty: 1.2, ..seeded(99) };
    let prompt: Vec<u32> = (3..45).collect();
    let (mut engine, _, id) = open(&Setup::default(), hashing(64));
    engine.prefill_tokens(id, &prompt, &sampling).expect("valid");
    let session = decode(&mut engine, id, &sampling, 50);
    let mut request = limited(&prompt, 50);
    request.sampling = sampling;
    assert_eq!(run_one(&mut engine, request).ids(), session);
}

#[test]
fn pieces_are_bytes_and_control_tokens_have_none() {
    let llama = "🦙".as_bytes();
    let setup = Setup { vocab_size: 5, end_of_generation: vec![4], ..Setup::default() };
    let vocabulary = ToyVocabulary::new(&[b"", &llama[..2], &llama[2..], b"<|x|>", b""], &[3]);
    let (mut engine, _) = setup.engine_with(ToyModel::new(5, counting(5)), vocabulary);
    let id = engine.create_session().expect("room");
    engine.prefill_tokens(id, &[0], &greedy()).expect("valid");
    let mut piece = || match engine.decode_one(id, &greedy()).expect("pending") {
        DecodeOutcome::Token { piece, .. } => piece,
        other => panic!("{other:?}"),
    };
    assert_eq!([piece(), piece(), piece()], [llama[..2].to_vec(), llama[2..].to_vec(), Vec::new()]);
}

// ---- poisoning

/// Counts, but fails after a history of `len` tokens, in the way given, as long as `armed`.
fn failing_at(len: usize, fail: fn() -> Result<Vec<f32>>) -> Rule {
    let mut count = counting(64);
    let mut armed = true;
    Box::new(move |history| {
        if armed && history.len() == len {
            armed = false;
            return fail();
        }
        count(history)
    })
}

#[test]
fn a_failure_after_state_changed_poisons_until_reset() {
    let failures: [fn() -> Result<Vec<f32>>; 4] = [
        || Err(Error::Backend("device lost".to_owned())),
        || panic!("in the model"),
        || Ok(vec![f32::NAN; 64]),
        || Ok(vec![f32::NEG_INFINITY; 64]),
    ];
    for fail in failures {
        for fails_at in [3, 5] {
            let (mut engine, _, id) = open(&Setup::default(), failing_at(fails_at, fail));
            let other = engine.create_session().expect("room");
            let mut failed = engine.prefill_tokens(id, &[1, 2, 3], &greedy());
            while failed.is_ok() {
                failed = engine.decode_one(id, &greedy()).map(drop);
            }
            assert!(matches!(failed, Err(Error::Backend(_) | Error::NotFinite(_))), "{failed:?}");
            assert!(matches!(engine.decode_one(id, &greedy()), Err(Error::Poisoned)));
            assert!(matches!(engine.prefill_tokens(id, &[1], &greedy()), Err(Error::Poisoned)));
            assert!(matches!(engine.seek(id, 0), Err(Error::Poisoned)));
            engine.prefill_tokens(other, &[7], &greedy()).expect("other sessions are well");
            assert_eq!(decode(&mut engine, other, &greedy(), 2), [8, 9]);
            engine.reset(id).expect("always legal");
            assert_eq!(engine.position(id).expect("open"), 0);
            engine.prefill_tokens(id, &[1, 2, 3], &greedy()).expect("as new");
            assert_eq!(decode(&mut engine, id, &greedy(), 4), [4, 5, 6, 7]);
        }
    }
}

/// Fails in the middle of a prompt, where no logits are wanted.
#[test]
fn a_failure_in_a_later_chunk_poisons_too() {
    let mut num_steps = 0;
    let fail_second = move || {
        num_steps += 1;
        if num_steps == 2 { Err(Error::Backend("second chunk".to_owned())) } else { Ok(()) }
    };
    let setup = Setup { step_tokens: 4, ..Setup::default() };
    let model = Box::new(ToyModel::new(64, counting(64)).with_hook(Box::new(fail_second)));
    let mut engine = Engine::new(model, ToyVocabulary::numbers(64), setup.config()).expect("valid");
    let id = engine.create_session().expect("room");
    let failed = engine.prefill_tokens(id, &[1; 10], &greedy());
    assert!(matches!(failed, Err(Error::Backend(message)) if message == "second chunk"));
    assert!(matches!(engine.prefill_tokens(id, &[1], &greedy()), Err(Error::Poisoned)));
    engine.reset(id).expect("legal");
    engine.prefill_tokens(id, &[1; 10], &greedy()).expect("as new");
}

// ---- admission

#[test]
fn one_session_by_default_and_capacity_is_what_fits() {
    let model = || Box::new(ToyModel::new(64, counting(64)));
    let default = EngineConfig::new(256, vec![63]);
    let mut engine = Engine::new(model(), ToyVocabulary::numbers(64), default.clone()).expect("valid");
    assert_eq!(engine.serving_capacity().sessions, 1);
    assert_eq!(engine.serving_capacity().bytes_per_session, 256 * 8);
    let only = engine.create_session().expect("room");
    assert!(matches!(engine.create_session(), Err(Error::SessionsFull { capacity: 1 })));
    assert!(engine.close(only));
    assert!(!engine.close(only), "closed already");
    engine.create_session().expect("the place is free again");

    // Asked for 9, but the pages hold 3: the capacity is the authority, not the wish.
    let config = EngineConfig { max_sessions: 9, kv_memory: pages(3 * 256 / PAGE_TOKENS + 1), ..default };
    let mut engine = Engine::new(model(), ToyVocabulary::numbers(64), config).expect("valid");
    let capacity = engine.serving_capacity().sessions;
    assert_eq!(capacity, 3);
    let created: Vec<_> = std::iter::from_fn(|| engine.create_session().ok()).collect();
    assert_eq!(created.len(), capacity);
    // All of them can be filled.
    for &id in &created {
        engine.prefill_tokens(id, &[1; 255], &greedy()).expect("promised");
    }
}

#[test]
fn sessions_and_requests_never_promise_the_same_page_twice() {
    let setup = Setup { max_running: 2, max_sessions: 2, ..Setup::default() };
    let (mut engine, _) = setup.engine_and_log(counting(64));
    let waiting = engine.submit(request(&[1])).expect("room for a full context");
    let session = engine.create_session().expect("room for another");
    assert!(matches!(engine.create_session(), Err(Error::SessionsFull { .. })), "the request needs the rest");
    engine.cancel(waiting);
    engine.step();
    engine.create_session().expect("the request is gone");
    assert!(
        matches!(engine.submit(request(&[1])), Err(Error::SessionsFull { capacity: 2 })),
        "it would wait for ever"
    );
    assert!(engine.close(session));
    assert_eq!(run_one(&mut engine, limited(&[1], 2)).ids(), [2, 3]);
}

#[test]
fn a_closed_session_is_not_found() {
    let (mut engine, _, id) = open(&Setup::default(), counting(64));
    engine.prefill_tokens(id, &[1; 100], &greedy()).expect("valid");
    assert!(engine.close(id));
    assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
    assert!(matches!(engine.decode_one(id, &greedy()), Err(Error::SessionNotFound(_))));
    assert!(matches!(engine.reset(id), Err(Error::SessionNotFound(_))));
    assert_ne!(engine.create_session().expect("room"), id, "ids are not used twice");
}

// ---- isolation

#[test]
fn sessions_interleaved_token_by_token_equal_themselves_alone() {
    let prompts: [Vec<u32>; 3] = [(0..40).collect(), (1..41).collect(), vec![9]];
    let alone = |prompt: &[u32]| {
        let (mut engine, _, id) = open(&Setup::default(), hashing(64));
        engine.prefill_tokens(id, prompt, &greedy()).expect("valid");
        decode(&mut engine, id, &greedy(), 60)
    };
    let expected = prompts.each_ref().map(|prompt| alone(prompt));
    assert_ne!(expected[0], expected[1]);
    let mut engine = Setup::default().engine(hashing(64));
    let ids = [(); 3].map(|()| engine.create_session().expect("room"));
    for (id, prompt) in ids.iter().zip(&prompts) {
        engine.prefill_tokens(*id, prompt, &greedy()).expect("valid");
    }
    let mut decoded = [const { Vec::new() }; 3];
    for _ in 0..60 {
        for (id, decoded) in ids.iter().zip(&mut decoded) {
            match engine.decode_one(*id, &greedy()) {
                Ok(DecodeOutcome::Token { id, .. }) => decoded.push(id),
                Ok(_) | Err(Error::InvalidState(_)) => {} // its generation is over
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!(decoded, expected);
}

#[derive(Debug, Clone)]
enum Call {
    Prefill(usize, Vec<u32>),
    Decode(usize, usize),
    Seek(usize, prop::sample::Index),
    Reset(usize),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let session = 0usize..3;
    let call = prop_oneof![
        3 => (session.clone(), prop::collection::vec(0u32..64, 0..70)).prop_map(|(s, t)| Call::Prefill(s, t)),
        4 => (session.clone(), 1usize..20).prop_map(|(s, n)| Call::Decode(s, n)),
        2 => (session.clone(), any::<prop::sample::Index>()).prop_map(|(s, at)| Call::Seek(s, at)),
        1 => session.prop_map(Call::Reset),
    ];
    prop::collection::vec(call, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// The toy model checks every row it reads; here each session's tokens are followed by hand as well.
    #[test]
    fn random_calls_keep_tokens_rows_and_pages_in_step(calls in calls(), step_tokens in 1usize..80) {
        let setup = Setup { step_tokens, context_length: 128, end_of_generation: vec![63, 7], ..Setup::default() };
        let mut engine = setup.engine(hashing(64));
        let ids = [(); 3].map(|()| engine.create_session().expect("room"));
        let mut expected: [Vec<u32>; 3] = Default::default();
        for call in calls {
            match call {
                Call::Prefill(s, tokens) => {
                    let fits = expected[s].len() + tokens.len() < 128 && !tokens.is_empty();
                    prop_assert_eq!(engine.prefill_tokens(ids[s], &tokens, &seeded(s as u64)).is_ok(), fits);
                    if fits {
                        expected[s].extend(tokens);
                    }
                }
                Call::Decode(s, count) => {
                    for _ in 0..count {
                        let Ok(DecodeOutcome::Token { id, .. }) = engine.decode_one(ids[s], &seeded(s as u64)) else { break };
                        expected[s].push(id);
                    }
                }
                Call::Seek(s, at) => {
                    let position = at.index(expected[s].len() + 1);
                    engine.seek(ids[s], position).expect("within the resident tokens");
                    expected[s].truncate(position);
                }
                Call::Reset(s) => {
                    engine.reset(ids[s]).expect("open");
                    expected[s].clear();
                }
            }
            for (id, expected) in ids.iter().zip(&expected) {
                prop_assert_eq!(engine.session_tokens(*id).expect("open"), &expected[..]);
            }
            let held: usize = expected.iter().map(|tokens| tokens.len().div_ceil(PAGE_TOKENS)).sum();
            prop_assert_eq!(engine.load().kv_capacity - engine.load().kv_free, held * TOY_PAGE_BYTES);
        }
        ids.iter().for_each(|id| assert!(engine.close(*id)));
        prop_assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
    }
}
