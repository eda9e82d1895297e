//! Promise: speculation changes the speed of an answer and nothing else. With drafts of every length, right and wrong,
//! tokens, log-probabilities, logits, ends, sessions and pages are bit by bit those of an engine that drafts nothing.

use llmctl_engine::{DraftStop, GrammarSource};
use llmctl_models::text::{TokenKind, VocabSpec};
use proptest::prelude::*;

use crate::cli::llmctl;
use crate::common::golden::checkpoint;
use crate::common::prelude::*;
use crate::common::toy::{pages, request};
use crate::common::watched::Truth;

const NEW_TOKENS: usize = 20;
const DRAFTS: [usize; 3] = [1, 3, 7];

/// The ids with every fifth replaced by another: what follows such a token is drafted right, the token itself wrong.
fn nearly(ids: &[u32], vocab_size: u32) -> Vec<u32> {
    let change = |(index, &id): (usize, &u32)| if index % 5 == 4 { (id + 1) % vocab_size } else { id };
    ids.iter().enumerate().map(change).collect()
}

/// The request with a hint that is mostly right.
fn foreseen(truth: &Truth, vocab_size: usize) -> Request {
    Request { prediction: nearly(&truth.ids(), vocab_size as u32), ..truth.request.clone() }
}

fn drafting(config: &mut EngineConfig, len: usize) {
    config.speculation = Speculation::Always(len);
}

/// Counts of drafted and accepted tokens.
fn drafted(answer: &Answer) -> (usize, usize) {
    let Usage { drafted_tokens, accepted_tokens, .. } = answer.outcome().usage;
    (drafted_tokens, accepted_tokens)
}

/// A model under watch and the answers of two turns and a stranger's, drawn in every way.
struct Subject {
    name: String,
    model: Watched,
    truths: [Truth; 3],
}

impl Subject {
    fn family(family: &str, kv_type: KvType) -> Self {
        let path = checkpoint(family);
        let model = Watched::load(&path, &LoadOptions { dtype: None, kv_type, ..exact() });
        let long = golden_prompts(&path).pop().expect("the long prompt").tokens;
        let ask =
            |prompt: &[u32], sampling| Request { sampling, logprobs: Some(2), ..limited(prompt, NEW_TOKENS) };
        let penalised = Sampling { repetition_penalty: 1.2, frequency_penalty: 0.4, ..seeded(11) };
        let first = model.cold(&ask(&long[..70], Sampling::default()));
        let next = [&long[..70], &first.ids(), &[5, 6, 7]].concat();
        let second = model.cold(&ask(&next, Sampling { top_p: 0.95, ..seeded(17) }));
        let stranger = model.cold(&ask(&long[7..60], penalised));
        Self { name: format!("{family}, {}", kv_type.name()), model, truths: [first, second, stranger] }
    }

    fn foreseen(&self, truth: &Truth) -> Request {
        foreseen(truth, self.model.spec().vocab_size)
    }

    /// Drafts were accepted and refused.
    #[track_caller]
    fn check_drafts(&self, answers: &[Answer]) {
        let counts = answers.iter().map(drafted);
        let (drafted, accepted) = counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert!(0 < accepted && accepted < drafted, "{}: {accepted} of {drafted}", self.name);
    }

    /// Two turns of a session, then the second turn of another that takes over its pages.
    fn check_turns(&self, len: usize) -> Vec<Answer> {
        let [first, second, _] = &self.truths;
        let mut engine = self.model.engine(|config| drafting(config, len));
        let mut answers = Vec::new();
        for (name, truth) in [("a", first), ("a", second), ("b", second)] {
            self.model.forget();
            let answer = run_one(&mut engine, within(name, self.foreseen(truth)));
            self.model.check(&format!("{}: {name}, drafts of {len}", self.name), &answer, truth);
            let tokens = engine.inspect_session(&named(name)).expect("open").tokens;
            assert_eq!(tokens, truth.fed(), "{}: the session {name}", self.name);
            answers.push(answer);
        }
        assert_eq!(answers[1].reuse().cached_tokens, first.fed().len(), "{}", self.name);
        answers
    }

    fn check_together(&self, len: usize) {
        let mut engine = self.model.engine(|config| drafting(config, len));
        self.model.forget();
        let answers = run_all(&mut engine, self.truths.iter().map(|truth| self.foreseen(truth)).collect());
        for (answer, truth) in answers.iter().zip(&self.truths) {
            self.model.check(&format!("{}: together, drafts of {len}", self.name), answer, truth);
        }
    }
}

#[test]
fn every_family_answers_the_same_with_drafts() {
    for (family, kv_type) in families().zip(KvType::ALL.into_iter().cycle()) {
        let subject = Subject::family(family, kv_type);
        let answers: Vec<Answer> = DRAFTS.into_iter().flat_map(|len| subject.check_turns(len)).collect();
        subject.check_drafts(&answers);
        subject.check_together(4);
    }
}

/// A checkpoint as a draft model, with weights in `dtype`.
fn draft_model(family: &str, dtype: Dtype) -> Box<dyn Model> {
    let options = LoadOptions { dtype: Some(dtype), kv_type: KvType::F16, ..exact() };
    load_model(&checkpoint(family), &options).expect("a checkpoint").model
}

impl Subject {
    /// Two turns of a session, and three requests at once, with a draft model. Returns what that came to.
    fn check_draft_model(&self, draft_model: &dyn Fn() -> Box<dyn Model>, len: usize) -> DraftModelUsage {
        let mut sum = Usage::default();
        let engine = || {
            let mut engine = self.model.engine(|config| drafting(config, len));
            engine.set_draft_model(draft_model()).expect("a draft model");
            engine
        };
        let mut check = |way: &str, answer: &Answer, truth: &Truth| {
            self.model.check(
                &format!("{}: {way}, a draft model's drafts of {len}", self.name),
                answer,
                truth,
            );
            sum.add_drafts(&answer.outcome().usage);
        };
        let [first, second, _] = &self.truths;
        let mut alone = engine();
        for (name, truth) in [("a", first), ("a", second), ("b", second)] {
            self.model.forget();
            let answer = run_one(&mut alone, within(name, truth.request.clone()));
            check(name, &answer, truth);
            assert_eq!(alone.inspect_session(&named(name)).expect("open").tokens, truth.fed());
        }
        self.model.forget();
        let asked = self.truths.iter().map(|truth| truth.request.clone()).collect();
        let answers = run_all(&mut engine(), asked);
        answers.iter().zip(&self.truths).for_each(|(answer, truth)| check("together", answer, truth));
        sum.draft_model.expect("it was asked")
    }
}

/// Full attention, a window, and recurrent states, as model and as draft model.
#[test]
fn families_answer_the_same_with_a_draft_model() {
    for family in ["llama", "gemma3", "lfm2", "qwen3.5"] {
        let subject = Subject::family(family, KvType::F16);
        let vocab_size = subject.model.spec().vocab_size;
        for len in DRAFTS {
            let same = subject.check_draft_model(&|| draft_model(family, Dtype::F32), len);
            assert_eq!(same.stop, None, "{family}");
            // Most of the answers are drawn; only tokens that are the likeliest as well are drafted right.
            let DraftModelUsage { drafted_tokens, accepted_tokens, .. } = same;
            assert!(0 < accepted_tokens && accepted_tokens < drafted_tokens, "{family}: {same:?} of {len}");
        }
        for other in ["llama", "gemma3", "lfm2"] {
            let model = || draft_model(other, Dtype::Bf16);
            if other != family && model().spec().vocab_size == vocab_size {
                let usage = subject.check_draft_model(&model, 3);
                assert!(usage.accepted_tokens < usage.drafted_tokens, "{family}, {other}: {usage:?}");
            }
        }
    }
}

/// A model that drafts for itself and takes the likeliest token is right whenever the draft is not cut short.
#[test]
fn a_model_that_drafts_for_itself_is_right() {
    for family in ["llama", "gemma3", "lfm2"] {
        let subject = Subject::family(family, KvType::F16);
        let mut engine = subject.model.engine(|config| drafting(config, 4));
        engine.set_draft_model(draft_model(family, Dtype::F32)).expect("a draft model");
        let asked = Request { sampling: Sampling::default(), ..subject.truths[0].request.clone() };
        let usage = run_one(&mut engine, asked).outcome().usage.draft_model.expect("asked");
        assert!(
            usage.accepted_tokens >= 12 && usage.accepted_tokens + 2 >= usage.drafted_tokens,
            "{usage:?}"
        );
    }
}

/// What users get: drafts that depend on measured times.
#[test]
fn every_family_answers_the_same_with_drafts_by_measured_costs() {
    for family in families() {
        let subject = Subject::family(family, KvType::F16);
        for mode in [Speculation::Auto, Speculation::Ngram, Speculation::Draft] {
            let mut engine = subject.model.engine(|config| config.speculation = mode);
            if mode == Speculation::Draft {
                engine.set_draft_model(draft_model(family, Dtype::F32)).expect("a draft model");
            }
            for truth in &subject.truths {
                subject.model.forget();
                let answer = run_one(&mut engine, subject.foreseen(truth));
                subject.model.check(&format!("{family}: {mode:?}"), &answer, truth);
            }
        }
    }
}

/// Ids 0 to 2 are `<unk>`, `<s>` and `</s>`; then comes each byte.
fn letters() -> Arc<Tokenizer> {
    let tokens: Vec<String> = ["<unk>", "<s>", "</s>"]
        .map(str::to_owned)
        .into_iter()
        .chain((0..=255u8).map(|byte| format!("<0x{byte:02X}>")))
        .collect();
    let kinds = [TokenKind::Unknown, TokenKind::Control, TokenKind::Control].into_iter();
    let spec = VocabSpec {
        model: "llama".to_owned(),
        scores: vec![0.0; tokens.len()],
        kinds: kinds.chain([TokenKind::Byte; 256]).collect(),
        tokens,
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        add_space_prefix: Some(false),
        ..VocabSpec::default()
    };
    Arc::new(Tokenizer::from_vocab(&spec).expect("a vocabulary"))
}

const LETTERS: usize = 259;

/// The kinds of KV that toy models have.
const KINDS: [&[KvKind]; 4] = [
    &[KvKind::Full],
    &[KvKind::Full, KvKind::SlidingWindow(20)],
    &[KvKind::Full, KvKind::Recurrent],
    &[KvKind::Recurrent],
];

fn byte(letter: u8) -> u32 {
    3 + u32::from(letter)
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(byte).collect()
}

fn letters_engine(kinds: &[KvKind], speculation: Speculation) -> Engine {
    let setup =
        Setup { vocab_size: LETTERS, end_of_generation: vec![2], spare_pages: 64, ..Setup::default() };
    let config = EngineConfig { speculation, ..setup.config() };
    let model = ToyModel::new(LETTERS, hashing(LETTERS)).with_groups(kinds);
    Engine::new(Box::new(model), letters(), config).expect("valid")
}

/// All that a client receives but times and what drafts came to.
fn received(answer: &Answer) -> Vec<String> {
    let text = |event: &Event| match event {
        Event::Done(outcome) => {
            let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = outcome.usage;
            format!("{:?}, {prompt_tokens}, {cached_tokens}, {completion_tokens}", outcome.finish)
        }
        event => format!("{event:?}"),
    };
    answer.events.iter().map(text).collect()
}

/// The engine with a draft model that tells the true next token four times out of five, of the kinds of a toy model.
fn with_draft_model(mut engine: Engine, kinds: &[KvKind], context: usize) -> Engine {
    let mut rule = hashing(LETTERS);
    let nearly = move |history: &[u32]| {
        let mut logits = rule(history)?;
        let drop = if history.len() % 5 == 4 { LETTERS / 2 } else { 0 };
        logits.rotate_left(drop);
        Ok(logits)
    };
    let model = ToyModel::new(LETTERS, Box::new(nearly)).with_groups(kinds).with_context(context);
    engine.set_draft_model(Box::new(model)).expect("a draft model");
    engine
}

/// Runs a request in a session without drafts, then with those of draft models of all kinds; the session must be the same
/// too. Returns the last answer.
#[track_caller]
fn check_draft_models(asked: &Request, kinds: &[KvKind], len: usize) -> Answer {
    let run = |mut engine: Engine| {
        let answer = run_one(&mut engine, within("a", asked.clone()));
        let tokens = engine.inspect_session(&named("a")).expect("open").tokens;
        let next = limited(&[&tokens[..], &[9]].concat(), 8);
        let next = run_one(&mut engine, within("a", Request { sampling: seeded(3), ..next }));
        (answer, tokens, next)
    };
    let (plain, tokens, next) = run(letters_engine(kinds, Speculation::Off));
    let mut last = Answer::default();
    for draft_kinds in KINDS {
        let engine = letters_engine(kinds, Speculation::Always(len));
        let (answer, tokens_drafted, next_drafted) = run(with_draft_model(engine, draft_kinds, 256));
        assert_eq!(received(&answer), received(&plain), "drafts of {len} by {draft_kinds:?}");
        assert_eq!(tokens_drafted, tokens);
        assert_eq!(received(&next_drafted), received(&next), "the turn after");
        last = answer;
    }
    last
}

fn by_draft_model(answer: &Answer) -> DraftModelUsage {
    answer.outcome().usage.draft_model.expect("a draft model was asked")
}

#[test]
fn ends_and_limits_hold_within_a_draft_models_draft() {
    let base = greedy(&bytes("go on with it"), 26);
    for kinds in KINDS {
        let whole = check_draft_models(&base, kinds, 5);
        let usage = by_draft_model(&whole);
        assert!(0 < usage.accepted_tokens && usage.accepted_tokens < usage.drafted_tokens, "{usage:?}");
        for cut in (1..12).step_by(2) {
            check_draft_models(&greedy(&base.prompt, cut), kinds, 5);
            let mut ended = base.clone();
            ended.limits.stop_ids = vec![whole.ids()[cut]];
            check_draft_models(&ended, kinds, 5);
        }
    }
}

#[test]
fn a_full_context_or_pool_ends_drafts_and_nothing_else() {
    let asked = greedy(&bytes("a prompt of some length"), 60);
    let plain = run_one(&mut letters_engine(&[KvKind::Full], Speculation::Off), asked.clone());
    let drafted = |context| {
        let engine = letters_engine(&[KvKind::Full], Speculation::Always(4));
        run_one(&mut with_draft_model(engine, &[KvKind::Full], context), asked.clone())
    };
    let answer = drafted(48);
    assert_eq!(received(&answer), received(&plain));
    let usage = by_draft_model(&answer);
    assert!(usage.drafted_tokens > 8 && usage.stop == Some(DraftStop::Context), "{usage:?}");
    assert_eq!(by_draft_model(&drafted(256)).stop, None);
    assert_eq!(by_draft_model(&drafted(34)).stop, Some(DraftStop::Context));

    // Four requests share a pool of one context of the draft model, 64 tokens, because the model's own holds just one.
    let setup =
        Setup { vocab_size: LETTERS, context_length: 64, end_of_generation: vec![], ..Setup::default() };
    let config = EngineConfig { speculation: Speculation::Always(4), kv_memory: pages(16), ..setup.config() };
    let model = ToyModel::new(LETTERS, hashing(LETTERS)).with_groups(&[KvKind::Full]);
    let engine = Engine::new(Box::new(model), letters(), config).expect("valid");
    let mut engine = with_draft_model(engine, &[KvKind::Full, KvKind::Full], 64);
    let asked: Vec<Request> =
        (0..4).map(|seed| limited(&bytes(&format!("{seed} is a prompt")), 40)).collect();
    let alone =
        |asked: &Request| run_one(&mut letters_engine(&[KvKind::Full], Speculation::Off), asked.clone());
    let truths: Vec<Answer> = asked.iter().map(alone).collect();
    let answers = run_all(&mut engine, asked);
    for (answer, truth) in answers.iter().zip(&truths) {
        assert_eq!(answer.ids(), truth.ids());
    }
    assert!(answers.iter().all(|answer| by_draft_model(answer).drafted_tokens > 0));
}

#[test]
fn a_draft_model_that_fails_drafts_nothing_more_and_says_so() {
    let plain = run_one(&mut letters_engine(&[KvKind::Full], Speculation::Off), drawn(9));
    let mut engine = letters_engine(&[KvKind::Full], Speculation::Always(3));
    let mut num_left = 10;
    let hook = move || {
        num_left -= 1;
        if num_left > 0 { Ok(()) } else { Err(Error::Backend("out of luck".to_owned())) }
    };
    let model = ToyModel::new(LETTERS, hashing(LETTERS)).with_hook(Box::new(hook));
    engine.set_draft_model(Box::new(model)).expect("a draft model");
    for _ in 0..2 {
        let answer = run_one(&mut engine, drawn(9));
        assert_eq!(answer.ids(), plain.ids());
        assert_eq!(by_draft_model(&answer).stop, Some(DraftStop::Failed));
    }
    let notices: Vec<String> = engine.take_notices().iter().map(ToString::to_string).collect();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].contains("draft model") && notices[0].contains("out of luck"), "{notices:?}");
}

#[test]
fn a_draft_model_that_cannot_drop_rows_is_refused() {
    let mut engine = letters_engine(&[KvKind::Full], Speculation::Auto);
    let model = ToyModel::new(LETTERS, hashing(LETTERS)).without_rewind();
    let error = engine.set_draft_model(Box::new(model)).expect_err("refused");
    assert!(error.to_string().contains("draft model"), "{error}");
}

/// Runs a request in a session without drafts, then with them; the session must be the same too. Returns the answer
/// with drafts.
#[track_caller]
fn check(asked: &Request, kinds: &[KvKind], len: usize) -> Answer {
    let run = |asked: Request, speculation| {
        let mut engine = letters_engine(kinds, speculation);
        let answer = run_one(&mut engine, within("a", asked));
        let tokens = engine.inspect_session(&named("a")).expect("open").tokens;
        // What is in its pages shows when they are used again.
        let next = limited(&[&tokens[..], &[9]].concat(), 8);
        let next = run_one(&mut engine, within("a", Request { sampling: seeded(3), ..next }));
        (answer, tokens, next)
    };
    let (plain, tokens, next) = run(asked.clone(), Speculation::Off);
    let prediction = if asked.prediction.is_empty() {
        nearly(&plain.ids(), LETTERS as u32)
    } else {
        asked.prediction.clone()
    };
    let asked = Request { prediction, ..asked.clone() };
    let (answer, tokens_drafted, next_drafted) = run(asked, Speculation::Always(len));
    assert_eq!(received(&answer), received(&plain), "drafts of {len}");
    assert_eq!(tokens_drafted, tokens);
    assert_eq!(received(&next_drafted), received(&next), "the turn after");
    answer
}

#[test]
fn stop_strings_limits_and_ends_hold_within_a_draft() {
    let all = "abcdefghijklmnopqrstuvwxyz";
    let engine = letters_engine(&[KvKind::Full], Speculation::Off);
    let regex = |regex: &str| {
        let compiler = engine.spec().grammar_compiler(letters());
        Some(compiler.compile(&GrammarSource::Regex(regex.to_owned())).expect("compiles"))
    };
    // Nothing is forced: a letter or its capital may come.
    let choices: String = all.chars().map(|c| format!("[{c}{}]", c.to_ascii_uppercase())).collect();
    let base = Request { grammar: regex(&choices), sampling: seeded(5), ..request(&bytes("go")) };
    let text = check(&base, &[KvKind::Full], 7).text();
    assert_eq!(text.len(), 26);
    let exactly = Request { prediction: bytes(&text), ..base.clone() };
    for len in DRAFTS {
        let (_, accepted) = drafted(&check(&exactly, &[KvKind::Full], len));
        assert!(accepted >= 12, "{accepted} with drafts of {len}");
        for cut in 1..12 {
            let mut limited = exactly.clone();
            limited.limits.max_tokens = Some(cut);
            assert_eq!(check(&limited, &[KvKind::Full], len).finish(), &Finish::MaxTokens);
            let mut stopped = exactly.clone();
            stopped.limits.stop = vec![text[cut..cut + 3].to_owned()];
            let answer = check(&stopped, &[KvKind::Full], len);
            assert_eq!(answer.text(), text[..cut], "the stop string is no part of it");
            let mut ended = exactly.clone();
            ended.limits.stop_ids = vec![bytes(&text)[cut]];
            assert_eq!(check(&ended, &[KvKind::Full], len).text(), text[..cut]);
        }
    }
}

/// With log-probabilities, forced tokens are sampled one by one, and the grammar is the drafter.
#[test]
fn what_a_grammar_forces_is_drafted_if_each_token_needs_its_logits() {
    let engine = letters_engine(&[KvKind::Full], Speculation::Off);
    let compiler = engine.spec().grammar_compiler(letters());
    let grammar = compiler.compile(&GrammarSource::Regex("abcdefgh[xy]ijklmnop".to_owned()));
    let asked = Request {
        grammar: Some(grammar.expect("compiles")),
        logprobs: Some(2),
        sampling: seeded(4),
        ..request(&[70, 71])
    };
    // A hint that never holds, so that only the grammar can be right.
    let asked = Request { prediction: bytes("zz"), ..asked };
    let answer = check(&asked, &[KvKind::Full], 7);
    assert!(drafted(&answer).1 >= 12, "{:?}", drafted(&answer));
    assert!(answer.tokens().iter().all(|token| token.logprob.is_some()));
}

#[test]
fn a_repeating_text_is_drafted_from_itself() {
    let setup = Setup::default();
    let config = EngineConfig { speculation: Speculation::Always(6), ..setup.config() };
    let model = ToyModel::new(64, counting(64));
    let log = model.log();
    let mut engine = Engine::new(Box::new(model), ToyVocabulary::numbers(64), config).expect("valid");
    let prompt: Vec<u32> = (0..60).chain([0, 1]).collect();
    let answer = run_one(&mut engine, limited(&prompt, 40));
    assert_eq!(answer.ids(), (2..42).collect::<Vec<_>>());
    assert!(drafted(&answer).1 >= 32);
    let decoded =
        log.lock().expect("no panic").iter().filter(|rows| rows[0].position >= prompt.len()).count();
    assert!(decoded <= 7, "{decoded} steps for 40 tokens");
}

#[test]
fn a_request_cancelled_within_drafts_goes_on_the_same() {
    for kinds in KINDS {
        let whole = run_one(&mut letters_engine(kinds, Speculation::Off), drawn(9));
        for num_steps in 1..16 {
            let mut engine = letters_engine(kinds, Speculation::Always(5));
            let mut asked = drawn(9);
            if num_steps % 2 == 0 {
                asked.prediction = nearly(&whole.ids(), LETTERS as u32);
            } else {
                engine = with_draft_model(engine, kinds, 256);
            }
            let id = engine.submit(within("a", asked.clone())).expect("room");
            let mut cut = Answer::default();
            (0..num_steps).for_each(|_| cut.events.extend(engine.step().into_iter().map(|(_, event)| event)));
            assert!(engine.cancel(id));
            cut.events.extend(engine.step().into_iter().map(|(_, event)| event));
            assert!(whole.ids().starts_with(&cut.ids()) && cut.finish() == &Finish::Cancelled);
            let again = run_one(&mut engine, within("a", asked));
            assert_eq!(again.ids(), whole.ids(), "cancelled after {num_steps} steps");
        }
    }
}

fn drawn(seed: u64) -> Request {
    Request { sampling: seeded(seed), ..limited(&bytes("a prompt of some length, which fills a page"), 40) }
}

#[test]
fn a_prediction_beyond_the_vocabulary_is_refused() {
    let mut engine = letters_engine(&[KvKind::Full], Speculation::Off);
    let asked = Request { prediction: vec![LETTERS as u32], ..request(&[1]) };
    assert!(engine.submit(asked).expect_err("refused").to_string().contains("prediction"));
}

#[test]
fn stats_count_drafts_over_recurrent_states_too() {
    for family in ["lfm2", "qwen3"] {
        let model = checkpoint(family);
        let model = model.to_str().expect("a path of text");
        let args =
            ["run", "--model", model, "--raw", "a", "--max-tokens", "4", "--stats", "--speculate", "auto"];
        let ran = llmctl(&args);
        assert!(ran.stderr.contains("decode       "), "{ran:?}");
        assert!(!ran.stderr.contains("no drafts"), "{ran:?}");
    }
}

fn complete(family: &str, flags: &[&str]) -> Ran {
    let model = checkpoint(family);
    let model = model.to_str().expect("a path of text");
    llmctl(&[&["run", "--model", model, "--raw", "a", "--max-tokens", "20", "--stats"], flags].concat())
}

#[test]
fn stats_say_what_a_draft_model_came_to() {
    let model = checkpoint("llama");
    let draft = ["--draft-model", model.to_str().expect("a path of text"), "-v"];
    let ran = complete("qwen3", &draft);
    ran.check(0, "by the draft model ").check(0, " of weights, up to ");
    let plain = complete("qwen3", &["--speculate", "off"]);
    assert_eq!(ran.stdout, plain.stdout);
    let unused = complete("qwen3", &[&draft[..], &["--speculate", "ngram"]].concat());
    unused.check(0, "the draft model is not loaded");
    assert!(!unused.stderr.contains("by the draft model"), "{unused:?}");
    complete("qwen3", &["--speculate", "draft"]).check(2, "--draft-model");
}

#[test]
fn a_draft_model_with_other_tokens_is_refused_by_name() {
    let ran = complete("llama", &["--draft-model", "guide"]);
    ran.check(2, "draft model guide cannot draft for llama: token ").check(2, " in the one and ");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_answer_is_the_same_with_drafts(
        prompt_len in 1usize..70, seed in any::<u64>(), max_tokens in 1usize..50, len in 1usize..9,
        logprobs in prop::option::of(0usize..2), penalty in 0usize..2, kinds in prop::sample::select(&KINDS),
        has_grammar in any::<bool>(),
    ) {
        let compiler = letters_engine(kinds, Speculation::Off).spec().grammar_compiler(letters());
        let source = GrammarSource::Regex("([ab]{2}|some words|other things )*end".to_owned());
        let grammar = has_grammar.then(|| compiler.compile(&source).expect("compiles"));
        let sampling = Sampling { presence_penalty: penalty as f32 * 0.5, ..varied(seed) };
        let prompt: Vec<u32> = (0..prompt_len as u32).map(|n| 3 + n * n % 200).collect();
        let asked = Request { sampling, logprobs, grammar, ..limited(&prompt, max_tokens) };
        check(&asked, kinds, len);
        check_draft_models(&asked, kinds, len);
    }
}
