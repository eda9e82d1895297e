//! Promise: on every family, a request in the company of others, cut into other chunks, in pages that others have used before,
//! gets the same tokens with the same log-probabilities to the last bit as alone, beyond the sliding window too; a session
//! driven by hand agrees; and a turn that finds rows computed before, in whatever way, agrees with one that computes all.

use llmctl_engine::DecodeOutcome;
use llmctl_models::kv::KvGroup;

use crate::common::golden::{checkpoint, is_recurrent, reference_checkpoint};
use crate::common::prelude::*;

const NEW_TOKENS: usize = 24;

fn engine(checkpoint: &Path, step_tokens: usize) -> Engine {
    engine_with(checkpoint, |config| config.step_tokens = step_tokens)
}

fn engine_without_reuse(checkpoint: &Path) -> Engine {
    engine_with(checkpoint, |config| config.warm_resume = false)
}

fn engine_with(checkpoint: &Path, change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let loaded = load_model(checkpoint, &exact()).unwrap_or_else(|error| panic!("{checkpoint:?}: {error}"));
    let context = loaded.model.spec().context_length.min(256);
    let one = EngineConfig::new(context, Vec::new()); // no token ends anything: all runs are equally long
    let mut config = EngineConfig { step_tokens: 512, max_running: 4, max_sessions: 3, ..one };
    change(&mut config);
    Engine::new(loaded.model, loaded.texts.tokenizer, config).expect("a valid configuration")
}

/// The reference prompts, greedy and drawn.
fn requests(checkpoint: &Path) -> Vec<Request> {
    let prompts = golden_prompts(checkpoint);
    let with = |tokens: &[u32], sampling: Sampling| Request {
        sampling,
        logprobs: Some(3),
        ..limited(tokens, NEW_TOKENS)
    };
    let greedy = prompts.iter().map(|prompt| with(&prompt.tokens, Sampling::default()));
    let drawn = prompts.iter().map(|prompt| with(&prompt.tokens, Sampling { top_p: 0.95, ..seeded(17) }));
    greedy.chain(drawn).collect()
}

#[test]
fn company_chunks_and_used_pages_change_no_bit() {
    for family in families() {
        let checkpoint = checkpoint(family);
        let mut engine_alone = engine(&checkpoint, 512);
        let alone = requests(&checkpoint).into_iter().map(|request| run_one(&mut engine_alone, request));
        let alone: Vec<_> = alone.map(|answer| answer.tokens()).collect();
        assert!(alone.iter().all(|tokens| tokens.len() == NEW_TOKENS), "{family}");
        let mut engine_shared = engine(&checkpoint, 13);
        for round in ["fresh pages", "used pages, and some of the rows in them"] {
            let together = run_all(&mut engine_shared, requests(&checkpoint));
            let together: Vec<_> = together.iter().map(Answer::tokens).collect();
            assert_eq!(together, alone, "{family}, {round}");
        }
        let load = engine_shared.load();
        assert_eq!(load.kv_free, load.kv_capacity, "{family}");
    }
}

#[test]
fn sessions_interleaved_token_by_token_equal_requests_and_rewind_replays() {
    for family in families() {
        let checkpoint = checkpoint(family);
        let mut engine = engine(&checkpoint, 31);
        let greedy = Sampling::default();
        let requests = &requests(&checkpoint)[..3];
        let expected: Vec<_> =
            requests.iter().map(|request| run_one(&mut engine, request.clone()).ids()).collect();
        let sessions: Vec<_> = requests.iter().map(|_| engine.create_session().expect("room")).collect();
        for round in 0..2 {
            for (&session, request) in sessions.iter().zip(requests) {
                let mut keep = if round == 0 { 0 } else { request.prompt.len() / 2 };
                match engine.seek(session, keep) {
                    Ok(()) => {}
                    Err(Error::NotSupported(_)) if is_recurrent(family) => {
                        engine.reset(session).expect("open");
                        keep = 0;
                    }
                    Err(error) => panic!("{family}: {error}"),
                }
                engine.prefill_tokens(session, &request.prompt[keep..], &greedy).expect("fits");
            }
            let mut decoded = vec![Vec::new(); sessions.len()];
            for _ in 0..NEW_TOKENS {
                for (&session, ids) in sessions.iter().zip(&mut decoded) {
                    match engine.decode_one(session, &greedy).expect("room in the context") {
                        DecodeOutcome::Token { id, .. } => ids.push(id),
                        other => panic!("{family}: {other:?}"),
                    }
                }
            }
            assert_eq!(decoded, expected, "{family}, round {round}");
        }
    }
}

fn within(session: &str, request: &Request) -> Request {
    Request { session: Some(named(session)), ..request.clone() }
}

/// The prompt of 150 tokens is longer than every sliding window here (32); all turns go on from it.
#[test]
fn warm_cold_forked_edited_and_evicted_turns_agree_to_the_bit() {
    for family in families() {
        let checkpoint = checkpoint(family);
        let first = requests(&checkpoint).into_iter().nth(2).expect("the long prompt");
        let (mut engine_cold, mut engine) = (engine_without_reuse(&checkpoint), engine(&checkpoint, 29));
        let mut cold = |request: &Request| {
            let answer = run_one(&mut engine_cold, request.clone());
            assert_eq!(answer.outcome().usage.cached_tokens, 0, "{family}");
            answer.tokens()
        };
        let answer = run_one(&mut engine, within("a", &first));
        assert_eq!(answer.tokens(), cold(&first), "{family}, first turn");
        let said = [&first.prompt[..], &answer.ids()].concat();
        let turn = |keep: usize, more: &[u32], seed: Option<u64>| {
            let sampling = seed.map_or_else(Sampling::default, seeded);
            Request { sampling, prompt: [&said[..keep], more].concat(), ..first.clone() }
        };
        let all = said.len();
        let cases = [
            ("warm and forked", turn(all, &[5, 6, 7], None), turn(all, &[8], Some(3)), all - 1),
            ("edited and again", turn(71, &[9], Some(4)), turn(all, &[8], Some(3)), 71),
        ];
        engine.fork_session(&named("a"), &named("b")).expect("room");
        for (name, in_a, in_b, cached) in cases {
            let together = run_all(&mut engine, vec![within("a", &in_a), within("b", &in_b)]);
            // A recurrent layer goes back only to where a turn has left a state.
            let found = together[0].outcome().usage.cached_tokens;
            let goes_back = name.starts_with("edited") && is_recurrent(family);
            assert!(found == cached || goes_back && found < cached, "{family}, {name}: {found}");
            assert!(together[1].outcome().usage.cached_tokens >= cached, "{family}, {name}");
            let together: Vec<_> = together.iter().map(Answer::tokens).collect();
            assert_eq!(together, [cold(&in_a), cold(&in_b)], "{family}, {name}");
        }
        // Strangers take pages from both sessions: first all but one, which is the first of its chain, then all.
        for (lens, name, from) in [([230, 230, 230, 200], "b", 0), ([230; 4], "a", 10)] {
            let strangers = (from..).zip(lens).map(|(n, len)| limited(&vec![n; len], 20)).collect();
            run_all(&mut engine, strangers);
            // Windowed layers take less of the memory than four full contexts would: more strangers fit beside a session.
            let is_plain = matches!(engine.spec().model.groups[..], [KvGroup { kind: KvKind::Full, .. }]);
            let is_evicted = engine.list_sessions().iter().all(|info| info.num_resident == 0);
            assert!(is_evicted || !is_plain, "{family}");
            let back = turn(all, &[11, 12], Some(5));
            let answer = run_one(&mut engine, within(name, &back));
            let cached = answer.outcome().usage.cached_tokens;
            assert!(!is_plain || cached == if name == "b" { PAGE_TOKENS } else { 0 }, "{family}: {cached}");
            assert_eq!(answer.tokens(), cold(&back), "{family}, evicted");
        }
    }
}

#[test]
fn the_engine_gives_the_reference_continuations() {
    for family in families() {
        let (checkpoint, _copy) = reference_checkpoint(family);
        let mut engine = engine(&checkpoint, 64);
        let prompts = golden_prompts(&checkpoint);
        let answers = run_all(&mut engine, requests(&checkpoint));
        for (prompt, answer) in prompts.iter().zip(&answers) {
            let tokens = answer.tokens();
            let pairs = tokens.iter().zip(&prompt.greedy);
            for (token, &expected) in pairs {
                let top = &token.logprob.as_ref().expect("asked for").top;
                if token.id != expected {
                    let lead = top[0].1 - top[1].1;
                    assert!(lead < 1e-2, "{family} {}: {} not {expected}", prompt.name, token.id);
                    break; // a near tie went the other way
                }
            }
        }
    }
}

/// States are left at the end of the prompt and of the turn: the session goes on from the token, another question from the last
/// whole page of the prompt, and strangers from the end of what they have in common, once two have met there.
#[test]
fn hybrids_resume_from_the_states_that_turns_leave() {
    for family in families().filter(|family| is_recurrent(family)) {
        let checkpoint = checkpoint(family);
        let (mut engine_cold, mut engine) = (engine_without_reuse(&checkpoint), engine(&checkpoint, 29));
        let mut turn = |session: Option<&str>, prompt: &[u32]| {
            let request = limited(prompt, NEW_TOKENS);
            let cold = run_one(&mut engine_cold, request.clone());
            let answer = run_one(&mut engine, Request { session: session.map(named), ..request });
            assert_eq!(answer.ids(), cold.ids(), "{family}");
            (answer.reuse().cached_tokens, [prompt, &answer.ids()].concat())
        };
        let long = golden_prompts(&checkpoint).pop().expect("the long prompt").tokens;
        let system = &long[..100];
        let (cached, said) = turn(Some("a"), system);
        assert_eq!(cached, 0, "{family}");
        let (cached, _) = turn(Some("a"), &[&said[..], &[5, 6]].concat());
        assert_eq!(cached, said.len() - 1, "{family}: the last token of an answer is not fed");
        let (cached, _) = turn(Some("a"), &[&system[..99], &[7, 8]].concat());
        assert_eq!(cached, 96, "{family}: another question");
        let strangers =
            [9, 10, 11].map(|first| turn(None, &[&[first], &system[..70], &[first; 40]].concat()).0);
        assert_eq!(strangers, [0; 3], "{family}: nothing in common");
        let meet = [9, 10, 11].map(|last| turn(None, &[&[3], &system[..70], &[last; 40]].concat()).0);
        assert_eq!(meet, [0, 0, 64], "{family}: a system prompt");
    }
}
