//! Promise: on every family, a request in the company of others, cut into other chunks, in pages that others have used before,
//! gets the same tokens with the same log-probabilities to the last bit as alone, beyond the sliding window too; and a
//! session driven by hand agrees.

use std::path::Path;

use llmctl::runtime::{Decoded, Engine, EngineConfig, Request, Sampling};

use crate::common::golden::{FAMILIES, exact, golden_prompts, load_model, parity_folder};
use crate::common::toy::{Answer, limited, run_all, run_one, seeded};

const NEW_TOKENS: usize = 24;

fn engine(checkpoint: &Path, step_tokens: usize) -> Engine {
    let loaded = load_model(checkpoint, &exact()).unwrap_or_else(|error| panic!("{checkpoint:?}: {error}"));
    let context = loaded.model.spec().context_length.min(256);
    let one = EngineConfig::new(context, Vec::new()); // no token ends anything: all runs are equally long
    let config =
        EngineConfig { step_tokens, max_running: 4, max_sessions: 3, num_pages: 4 * one.num_pages, ..one };
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
    for family in FAMILIES {
        let checkpoint = parity_folder().join(family);
        let mut engine_alone = engine(&checkpoint, 512);
        let alone = requests(&checkpoint).into_iter().map(|request| run_one(&mut engine_alone, request));
        let alone: Vec<_> = alone.map(|answer| answer.tokens()).collect();
        assert!(alone.iter().all(|tokens| tokens.len() == NEW_TOKENS), "{family}");
        let mut engine_shared = engine(&checkpoint, 13);
        for round in ["fresh pages", "used pages"] {
            let together = run_all(&mut engine_shared, requests(&checkpoint));
            let together: Vec<_> = together.iter().map(Answer::tokens).collect();
            assert_eq!(together, alone, "{family}, {round}");
        }
        let load = engine_shared.load();
        assert_eq!(load.free_pages, load.num_pages, "{family}");
    }
}

#[test]
fn sessions_interleaved_token_by_token_equal_requests_and_rewind_replays() {
    for family in FAMILIES {
        let checkpoint = parity_folder().join(family);
        let mut engine = engine(&checkpoint, 31);
        let greedy = Sampling::default();
        let requests = &requests(&checkpoint)[..3];
        let expected: Vec<_> =
            requests.iter().map(|request| run_one(&mut engine, request.clone()).ids()).collect();
        let sessions: Vec<_> = requests.iter().map(|_| engine.create_session().expect("room")).collect();
        for round in 0..2 {
            for (&session, request) in sessions.iter().zip(requests) {
                let keep = if round == 0 { 0 } else { request.prompt.len() / 2 };
                engine.seek(session, keep).expect("dense models rewind");
                engine.prefill_tokens(session, &request.prompt[keep..], &greedy).expect("fits");
            }
            let mut decoded = vec![Vec::new(); sessions.len()];
            for _ in 0..NEW_TOKENS {
                for (&session, ids) in sessions.iter().zip(&mut decoded) {
                    match engine.decode_one(session, &greedy).expect("room in the context") {
                        Decoded::Token { id, .. } => ids.push(id),
                        other => panic!("{family}: {other:?}"),
                    }
                }
            }
            assert_eq!(decoded, expected, "{family}, round {round}");
        }
    }
}

#[test]
fn the_engine_gives_the_reference_continuations() {
    for family in FAMILIES {
        let checkpoint = parity_folder().join(family);
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
