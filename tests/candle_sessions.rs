//! Promise: sessions on candle's devices are isolated, go back, come back from disk and outlive failures as on the CPU backend, to
//! rounding. Run on candle's CPU device; the engine is the same code as everywhere.

use llmctl_engine::DecodeOutcome;
use llmctl_models::backend::candle::DeviceKind;
use llmctl_models::model::Logits;

use crate::candle_backend::bound;
use crate::common::golden::{checkpoint, is_recurrent};
use crate::common::prelude::*;

const NEW_TOKENS: usize = 16;

/// A decision whose two best tokens are closer than this may go either way.
const NEAR_TIE: f32 = 1e-3;

/// One of each kind of mixer: plain attention, windows, delta nets, Kimi delta attention beside latent attention, Mamba-2, short
/// convolutions, latent attention with and without an indexer, blocks that have one key, narrow values, lightning attention.
const MIXERS: [&str; 11] = [
    "llama",
    "gemma3",
    "qwen3.5",
    "qwen4-exp",
    "kimi-linear",
    "nemotron-h-moe",
    "lfm2",
    "mistral4",
    "deepseek3.2",
    "mimo-v2",
    "bailing-moe2.5",
];

fn model(family: &str) -> LoadedModel {
    let options = LoadOptions { device: Device::Candle(DeviceKind::Cpu), ..exact() };
    load_model(&checkpoint(family), &options).unwrap_or_else(|error| panic!("{family}: {error}"))
}

fn engine_of(model: Box<dyn Model>, tokenizer: Arc<Tokenizer>, speculation: Speculation) -> Engine {
    let one = EngineConfig::new(model.spec().context_length.min(256), Vec::new());
    let config = EngineConfig { step_tokens: 31, max_running: 4, max_sessions: 3, speculation, ..one };
    Engine::new(model, tokenizer, config).expect("a valid configuration")
}

fn engine(family: &str) -> Engine {
    drafting(family, Speculation::Off)
}

fn drafting(family: &str, speculation: Speculation) -> Engine {
    let loaded = model(family);
    engine_of(loaded.model, loaded.texts.tokenizer, speculation)
}

fn requests(family: &str) -> Vec<Request> {
    let prompts = golden_prompts(&checkpoint(family)).into_iter();
    prompts.map(|prompt| Request { logprobs: Some(2), ..limited(&prompt.tokens, NEW_TOKENS) }).collect()
}

/// The same tokens with the same log-probabilities, as far apart as each may be from the reference, up to a decision that either
/// token could win. Returns the largest difference.
fn agree(family: &str, got: &Answer, expected: &Answer, what: &str) -> f32 {
    let (got, expected) = (got.tokens(), expected.tokens());
    assert_eq!((got.len(), expected.len()), (NEW_TOKENS, NEW_TOKENS), "{family}{what}");
    let mut worst = 0f32;
    for (got, expected) in got.iter().zip(&expected) {
        let [got_top, top] = [got, expected].map(|token| &token.logprob.as_ref().expect("asked for").top);
        if got.id != expected.id {
            assert!(top[0].1 - top[1].1 < NEAR_TIE, "{family}{what}: {} not {}", got.id, expected.id);
            break;
        }
        let difference = (got_top[0].1 - top[0].1).abs();
        assert!(difference <= 2.0 * bound(family), "{family}{what}: {difference:e}");
        worst = worst.max(difference);
    }
    worst
}

#[test]
fn requests_in_company_and_sessions_equal_each_alone() {
    for family in families() {
        let (mut engine, mut others) = (engine(family), engine(family));
        let alone: Vec<Answer> =
            requests(family).into_iter().map(|request| run_one(&mut engine, request)).collect();
        let mut worst = 0f32;
        for round in [", fresh pages", ", used pages"] {
            for (got, expected) in run_all(&mut others, requests(family)).iter().zip(&alone) {
                worst = worst.max(agree(family, got, expected, round));
            }
        }
        assert_eq!(others.load().kv_free, others.load().kv_capacity, "{family}");
        eprintln!("{family:<16} {worst:.1e}");
    }
}

/// Every step drafts from a hint in which every fifth token is wrong, so that states take in all drafted rows, some or none.
#[test]
fn drafts_change_no_answer() {
    for family in MIXERS {
        let mut plain = engine(family);
        let alone: Vec<Answer> =
            requests(family).into_iter().map(|request| run_one(&mut plain, request)).collect();
        let foreseen = |(request, answer): (Request, &Answer)| {
            let wrong = |(at, id): (usize, u32)| if at % 5 == 4 { id ^ 1 } else { id };
            Request { prediction: answer.ids().into_iter().enumerate().map(wrong).collect(), ..request }
        };
        let hinted = requests(family).into_iter().zip(&alone).map(foreseen).collect();
        let drafted = run_all(&mut drafting(family, Speculation::Always(4)), hinted);
        let usage = drafted.iter().map(|answer| &answer.outcome().usage);
        let (all, right) =
            usage.fold((0, 0), |sum, usage| (sum.0 + usage.drafted_tokens, sum.1 + usage.accepted_tokens));
        assert!(0 < right && right < all, "{family}: {right} of {all}");
        for (got, expected) in drafted.iter().zip(&alone) {
            agree(family, got, expected, ", drafted");
        }
    }
}

/// Token by token in turns, which is one sequence per step as alone; the second time from the middle of the prompt where states allow.
#[test]
fn sessions_driven_in_turns_equal_requests_and_rewind_replays() {
    for family in MIXERS {
        let mut engine = engine(family);
        let (greedy, requests) = (Sampling::default(), requests(family));
        let alone: Vec<_> =
            requests.iter().map(|request| run_one(&mut engine, request.clone()).ids()).collect();
        let sessions: Vec<_> = requests.iter().map(|_| engine.create_session().expect("room")).collect();
        for round in 0..2 {
            for (&session, request) in sessions.iter().zip(&requests) {
                let mut keep = if round == 0 { 0 } else { request.prompt.len() / 2 };
                match engine.seek(session, keep) {
                    Err(Error::NotSupported(_)) if is_recurrent(family) => {
                        engine.reset(session).expect("open");
                        keep = 0;
                    }
                    sought => sought.expect("open"),
                }
                engine.prefill_tokens(session, &request.prompt[keep..], &greedy).expect("fits");
            }
            let mut decoded = vec![Vec::new(); sessions.len()];
            for _ in 0..NEW_TOKENS {
                for (&session, ids) in sessions.iter().zip(&mut decoded) {
                    let outcome = engine.decode_one(session, &greedy).expect("room in the context");
                    let DecodeOutcome::Token { id, .. } = outcome else { panic!("{family}: {outcome:?}") };
                    ids.push(id);
                }
            }
            assert_eq!(decoded, alone, "{family}, round {round}");
        }
    }
}

/// A session's pages and states are read by another engine, as by another process, and the turn that goes on from them agrees with
/// one that computes everything.
#[test]
fn sessions_come_back_from_disk() {
    for family in MIXERS {
        let root = tempfile::tempdir().expect("tempdir");
        let on_disk = || {
            let mut engine = engine(family);
            let config = DiskConfig {
                root: root.path().to_owned(),
                limit_bytes: u64::MAX,
                fingerprint: "candle".to_owned(),
                description: json!({}),
                queue_bytes: DEFAULT_QUEUE_BYTES,
                vault: None,
            };
            engine.set_disk(DiskStore::open(config).expect("a store"));
            engine
        };
        let long = requests(family).pop().expect("the long prompt");
        let mut first = on_disk();
        run_one(&mut first, within("a", long.clone()));
        assert!(first.flush_disk(Duration::from_secs(60)), "{family}");
        let tokens = first.inspect_session(&named("a")).expect("open").tokens;
        drop(first);
        let mut second = on_disk();
        second.restore_session(&named("a"), tokens.clone()).expect("a new engine");
        let next = Request { prompt: [&tokens[..], &[5, 6, 7]].concat(), ..long };
        let warm = run_one(&mut second, within("a", next.clone()));
        let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
        assert_eq!(
            (warm.reuse().reason, warm.reuse().restored_tokens),
            (ReuseReason::Restored, whole),
            "{family}"
        );
        agree(family, &warm, &run_one(&mut engine(family), next), ", from disk");
    }
}

/// Fails one step as a device without memory does, once that step's rows and states have been written.
struct FailsOnce {
    model: Box<dyn Model>,
    steps_left: usize,
}

impl Model for FailsOnce {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        let logits = self.model.forward(batch)?;
        self.steps_left = self.steps_left.wrapping_sub(1);
        match self.steps_left {
            0 => Err(Error::Backend("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".to_owned())),
            _ => Ok(logits),
        }
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<(), Error> {
        self.model.copy_page(from, to)
    }

    fn free_page(&mut self, page: PageRef) {
        self.model.free_page(page);
    }

    fn export_page(&self, page: PageRef, out: &mut Vec<u8>) -> Result<(), Error> {
        self.model.export_page(page, out)
    }

    fn import_page(&mut self, page: PageRef, bytes: SharedBytes) -> Result<(), Error> {
        self.model.import_page(page, bytes)
    }
}

#[test]
fn a_device_out_of_memory_fails_the_requests_of_the_step_and_leaves_nothing_behind() {
    for family in MIXERS {
        let expected: Vec<Answer> = {
            let mut engine = engine(family);
            requests(family).into_iter().map(|request| run_one(&mut engine, request)).collect()
        };
        for steps_left in [1, 9] {
            let loaded = model(family);
            let failing = FailsOnce { model: loaded.model, steps_left };
            let mut engine = engine_of(Box::new(failing), loaded.texts.tokenizer, Speculation::Off);
            let session = within("a", requests(family).remove(2));
            let failed = run_one(&mut engine, session.clone());
            assert!(
                matches!(failed.error(), Error::Backend(message) if message.contains("OUT_OF_MEMORY")),
                "{family}"
            );
            assert_eq!(engine.load().num_running, 0, "{family}");
            agree(family, &run_one(&mut engine, session), &expected[2], ", again");
            for (got, expected) in run_all(&mut engine, requests(family)).iter().zip(&expected) {
                agree(family, got, expected, ", after a failure");
            }
        }
    }
}
