//! Promise: the same answer, always. What a request is answered depends on its tokens alone: not on what of it was computed
//! before, in which chunks, beside whom, in which pages, by how many threads, with which instructions, or in which process.
//! Real models, the logits behind every token compared bit by bit: each family of the parity table as its file stores it, and
//! what files store otherwise, with each type of KV.

use llmctl_engine::{DecodeOutcome, RequestId, SessionId};
use llmctl_models::load::{AdapterFile, Isa};

use crate::common::golden::{checkpoint, last_logits};
use crate::common::k_quants::{VOCAB, write_k_quants};
use crate::common::prelude::*;
use crate::common::toy::{drain, step};
use crate::common::watched::{Truth, bits};

const NEW_TOKENS: usize = 6;
/// Three pages and more than two windows.
const PROMPT_TOKENS: usize = 107;
const WINDOWED: [&str; 4] = ["gemma2", "gemma3", "mistral", "muse-glimmer"];
const PLENTY: Duration = Duration::from_secs(60);

/// A model file and how to load it.
struct Subject {
    name: String,
    path: PathBuf,
    options: LoadOptions,
    prompt: Vec<u32>,
}

/// Two turns of one conversation.
struct Conversation {
    first: Truth,
    second: Truth,
}

impl Subject {
    fn family(family: &str) -> Self {
        let path = checkpoint(family);
        let long = golden_prompts(&path).pop().expect("the long prompt").tokens;
        let prompt = long[..PROMPT_TOKENS].to_vec();
        // As the file has it: bf16, multiplied in integers.
        Self { name: family.to_owned(), path, options: LoadOptions { dtype: None, ..exact() }, prompt }
    }

    fn with(mut self, kv_type: KvType, dtype: Option<Dtype>) -> Self {
        self.options = LoadOptions { kv_type, dtype, ..self.options };
        let dtype = dtype.map_or("stored", Dtype::name);
        self.name = format!("{}, {dtype}, {} KV", self.name, kv_type.name());
        self
    }

    fn gguf(family: &str, dtype: &str) -> Option<Self> {
        let file = format!("{family}-{dtype}.gguf");
        let path = parity_gguf(&file)?;
        Some(Self { path, ..Self::family(family) }.with(KvType::F16, None).named(&file))
    }

    /// A family with an adapter of PEFT's.
    fn adapted(family: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lora").join(family).join("one");
        let mut subject =
            Self::family(family).with(KvType::F16, None).named(&format!("{family} with an adapter"));
        subject.options.adapters.push(AdapterFile { path, scale: 0.75 });
        subject
    }

    fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// A GGUF in K-quants, written below `folder`.
    fn k_quants(folder: &TempDir) -> Self {
        let path = folder.path().join("q4_k.gguf");
        write_k_quants(&path);
        let prompt = (0..PROMPT_TOKENS).map(|n| (n * n * 7 + n) as u32 % VOCAB as u32).collect();
        let options = LoadOptions { dtype: None, kv_type: KvType::F16, ..exact() };
        Self { name: "q4_k.gguf".to_owned(), path, options, prompt }
    }

    fn load(&self) -> Watched {
        Watched::load(&self.path, &self.options)
    }

    fn load_on(&self, cpu: CpuOptions) -> Watched {
        Watched::load(&self.path, &LoadOptions { device: Device::Cpu(cpu), ..self.options.clone() })
    }

    fn greedy(&self, prompt: &[u32]) -> Request {
        Request { logprobs: Some(3), ..limited(prompt, NEW_TOKENS) }
    }

    fn drawn(&self, prompt: &[u32], seed: u64) -> Request {
        Request { sampling: Sampling { top_p: 0.95, ..seeded(seed) }, ..self.greedy(prompt) }
    }

    /// A greedy turn, and one drawn after it.
    fn conversation(&self, model: &Watched) -> Conversation {
        let first = model.cold(&self.greedy(&self.prompt));
        let next = [&self.prompt[..], &first.ids(), &[5, 6, 7]].concat();
        let second = model.cold(&self.drawn(&next, 17));
        Conversation { first, second }
    }

    /// `len` tokens that begin unlike those of any other `who`.
    fn stranger(&self, who: usize, len: usize) -> Vec<u32> {
        let ids = self.prompt.iter().cycle().skip(who).take(len - 1);
        [who as u32 + 9].into_iter().chain(ids.copied()).collect()
    }
}

fn within(session: &str, truth: &Truth) -> Request {
    Request { session: Some(named(session)), ..truth.request.clone() }
}

/// All ways but those of another load, which `loaded_otherwise` goes.
fn check_all_ways(subject: &Subject) {
    let model = subject.load();
    let Subject { name, .. } = subject;
    let turns = subject.conversation(&model);
    in_chunks(name, &model, &turns);
    second_turns(name, &model, &turns);
    cancelled(name, &model, &turns);
    in_company(subject, &model, &turns);
    rewound(name, &model, &turns);
    evicted(subject, &model, &turns);
    from_disk(subject, &model, &turns);
}

fn in_chunks(name: &str, model: &Watched, turns: &Conversation) {
    let tokens = turns.second.fed();
    let whole = bits(&Fed::new(&mut model.model()).feed(&tokens, usize::MAX));
    let vocab = model.spec().vocab_size;
    for truth in [&turns.first, &turns.second] {
        for (position, _, logits) in truth.rows() {
            assert_eq!(
                whole[position * vocab..][..vocab],
                **logits,
                "{name}: position {position} in one step"
            );
        }
    }
    for chunk in [1, 7, 32, 128] {
        let chunked = bits(&Fed::new(&mut model.model()).feed(&tokens, chunk));
        assert!(chunked == whole, "{name}: all positions by {chunk}");
        let chunked = model.answer_of(&turns.second.request, |config| config.step_tokens = chunk);
        assert!(chunked.is_same(&turns.second), "{name}: the engine by {chunk}");
    }
}

/// Warm and forked.
fn second_turns(name: &str, model: &Watched, turns: &Conversation) {
    for step_tokens in [7, 128] {
        let mut engine = model.engine(|config| config.step_tokens = step_tokens);
        run_one(&mut engine, within("a", &turns.first));
        engine.fork_session(&named("a"), &named("fork")).expect("room");
        for session in ["a", "fork"] {
            model.forget();
            let answer = run_one(&mut engine, within(session, &turns.second));
            assert_eq!(answer.outcome().usage.cached_tokens, turns.first.fed().len(), "{name}, {session}");
            model.check(&format!("{name}: {session} by {step_tokens}"), &answer, &turns.second);
        }
    }
}

/// Given up in the prompt or in the answer, and asked again.
fn cancelled(name: &str, model: &Watched, turns: &Conversation) {
    let mut engine = model.engine(|_| ());
    for (truth, num_steps) in [(&turns.first, 2), (&turns.first, 4), (&turns.second, 3), (&turns.second, 1)] {
        let id = engine.submit(within("a", truth)).expect("room");
        (0..num_steps).for_each(|_| drop(engine.step()));
        assert!(engine.cancel(id), "{name}: it has ended already");
        engine.step();
        model.forget();
        let answer = run_one(&mut engine, within("a", truth));
        model.check(&format!("{name}: cancelled after {num_steps} steps"), &answer, truth);
    }
}

/// Seven strangers, who join and leave while it runs; one is cancelled, and some begin as it does.
fn in_company(subject: &Subject, model: &Watched, turns: &Conversation) {
    let mut engine = model.engine(|config| (config.max_running, config.step_tokens) = (8, 40));
    let mut answers: HashMap<RequestId, Answer> = HashMap::new();
    let mut ours = Vec::new();
    model.forget();
    for who in 0..7 {
        let prompt = match who % 3 {
            0 => [&subject.prompt[..40], &subject.stranger(who, 20)].concat(),
            _ => subject.stranger(who, 5 + 23 * who),
        };
        let mut request = subject.drawn(&prompt, who as u64);
        request.limits.max_tokens = Some(3 + 4 * (who % 4));
        let stranger = engine.submit(request).expect("room");
        match who {
            1 => ours.push((engine.submit(turns.first.request.clone()).expect("room"), &turns.first)),
            3 => ours.push((engine.submit(turns.second.request.clone()).expect("room"), &turns.second)),
            _ => {}
        }
        step(&mut engine, &mut answers);
        if who == 4 {
            assert!(engine.cancel(stranger), "it has just come");
        }
    }
    drain(&mut engine, &mut answers);
    for (id, truth) in ours {
        model.check(&format!("{}: in company", subject.name), &answers[&id], truth);
    }
}

/// A session driven by hand goes back and says the same again, and so does a conversation whose turn is asked once more, or was
/// another in between.
fn rewound(name: &str, model: &Watched, turns: &Conversation) {
    let truth = &turns.first;
    let forgets = model.spec().groups.iter().any(|group| group.kind != KvKind::Full);
    for warm_resume in [true, false] {
        let mut engine = model.engine(|config| config.warm_resume = warm_resume);
        let session = engine.create_session().expect("room");
        for keep in [0, truth.request.prompt.len() - 1, 97, 96, 61, 33, 1] {
            let way = format!("{name}: after going back to {keep}");
            let keep = match engine.seek(session, keep) {
                Ok(()) => keep,
                // What a window has left is gone, and so are states: it is said, and everything computed again.
                Err(Error::NotSupported(_)) if forgets => {
                    assert_eq!(engine.session_tokens(session).expect("open"), truth.fed(), "{way}");
                    engine.reset(session).expect("open");
                    0
                }
                Err(error) => panic!("{way}: {error}"),
            };
            model.forget();
            replay(&mut engine, session, keep, truth, &way);
            model.check_logits(&way, truth);
        }
    }
    let mut engine = model.engine(|_| ());
    for truth in [&turns.first, &turns.second, &turns.first, &turns.second, &turns.second] {
        model.forget();
        let answer = run_one(&mut engine, within("a", truth));
        model.check(&format!("{name}: a conversation that goes back"), &answer, truth);
    }
}

fn replay(engine: &mut Engine, session: SessionId, keep: usize, truth: &Truth, way: &str) {
    let sampling = &truth.request.sampling;
    engine.prefill_tokens(session, &truth.request.prompt[keep..], sampling).expect("fits");
    let ids = truth.ids();
    for &expected in &ids[..ids.len() - 1] {
        match engine.decode_one(session, sampling).expect("room in the context") {
            DecodeOutcome::Token { id, .. } => assert_eq!(id, expected, "{way}"),
            other => panic!("{way}: {other:?}"),
        }
    }
}

/// An engine with memory for one full context, and for one state to come back to: who takes all of it evicts everybody.
fn small_engine(model: &Watched) -> Engine {
    let states = model.spec().groups.iter().filter(|group| group.kind == KvKind::Recurrent);
    let spare: usize = states.map(|group| group.page_bytes).sum();
    model.engine(|config| config.kv_memory = Some(model.context_bytes(config) + spare))
}

/// A stranger fills its context.
fn crowd(subject: &Subject, engine: &mut Engine, who: usize) {
    let prompt = subject.stranger(who, engine.spec().context_length() - NEW_TOKENS);
    run_one(engine, subject.greedy(&prompt));
}

/// A stranger takes the pages of an idle session.
fn evict(subject: &Subject, engine: &mut Engine, session: &str) {
    crowd(subject, engine, 20);
    let info = engine.inspect_session(&named(session)).expect("open").info;
    assert_eq!(info.num_resident, 0, "{}", subject.name);
}

fn evicted(subject: &Subject, model: &Watched, turns: &Conversation) {
    let mut engine = small_engine(model);
    run_one(&mut engine, within("a", &turns.first));
    evict(subject, &mut engine, "a");
    model.forget();
    let answer = run_one(&mut engine, within("a", &turns.second));
    model.check(&format!("{}: evicted and back", subject.name), &answer, &turns.second);
}

/// Kept on disk by one process, brought back by the same after eviction, and by another that has loaded the model for other
/// instructions.
fn from_disk(subject: &Subject, model: &Watched, turns: &Conversation) {
    let root = tempfile::tempdir().expect("tempdir");
    let whole = turns.first.fed().len() / PAGE_TOKENS * PAGE_TOKENS;
    let mut engine = small_engine(model);
    engine.set_disk(model.disk(root.path()));
    run_one(&mut engine, within("a", &turns.first));
    assert!(engine.flush_disk(PLENTY));
    let tokens = engine.inspect_session(&named("a")).expect("open").tokens;
    evict(subject, &mut engine, "a");
    model.forget();
    let answer = run_one(&mut engine, within("a", &turns.second));
    assert_eq!(answer.outcome().usage.cached_tokens, whole, "{}", subject.name);
    model.check(&format!("{}: evicted and read from disk", subject.name), &answer, &turns.second);
    drop(engine);

    let other = subject.load_on(CpuOptions { isa: Isa::Scalar, ..cpu(1) });
    let mut engine = other.engine(|_| ());
    engine.set_disk(other.disk(root.path()));
    engine.restore_session(&named("a"), tokens).expect("a new engine");
    let answer = run_one(&mut engine, within("a", &turns.second));
    let reuse = answer.reuse();
    // Of a window, only what can still be seen is read.
    assert!(reuse.cached_tokens == whole && reuse.restored_tokens > 0, "{}: {reuse:?}", subject.name);
    other.check(&format!("{}: in another process", subject.name), &answer, &turns.second);
    assert!(engine.take_notices().is_empty(), "{}", subject.name);
}

/// Every number of threads and every instruction set, in steps of one kind and of the other.
fn check_other_loads(subject: &Subject) {
    let turns = subject.conversation(&subject.load());
    let threads = [(1, 1), (2, 2), (3, 3), (1, 3)];
    let threads = threads.map(|(threads, threads_batch)| CpuOptions { threads, threads_batch, ..cpu(1) });
    let sets = Isa::available().map(|isa| CpuOptions { isa, ..cpu(2) });
    for cpu in threads.into_iter().chain(sets) {
        let model = subject.load_on(cpu);
        for (truth, step_tokens) in [(&turns.first, 9), (&turns.second, 64)] {
            let answer = model.answer_of(&truth.request, |config| config.step_tokens = step_tokens);
            assert!(answer.is_same(truth), "{}: {cpu:?}", subject.name);
        }
    }
}

#[test]
fn every_family_as_stored_in_every_way() {
    for family in families() {
        for kv_type in KvType::ALL {
            check_all_ways(&Subject::family(family).with(kv_type, None));
        }
    }
}

#[test]
fn adapters_in_every_way_and_with_any_instructions() {
    for family in ["llama", "gemma3", "phi3", "qwen3-moe"] {
        let subject = Subject::adapted(family);
        check_all_ways(&subject);
        check_other_loads(&subject);
    }
}

#[test]
fn every_family_on_any_threads_with_any_instructions() {
    for (family, kv_type) in families().zip(KvType::ALL.into_iter().cycle()) {
        check_other_loads(&Subject::family(family).with(kv_type, None));
    }
}

/// The types that the parity checkpoints are not stored in.
#[test]
fn every_type_of_weights_in_every_way() {
    let folder = tempfile::tempdir().expect("tempdir");
    let mut subjects = vec![Subject::k_quants(&folder)];
    for dtype in [Dtype::F16, Dtype::F32] {
        subjects.push(Subject::family("gemma3").with(KvType::F16, Some(dtype)));
        subjects.push(Subject::family("llama").with(KvType::Q8_0, Some(dtype)));
    }
    for dtype in ["q4_0", "q8_0"] {
        let required = Subject::gguf("llama", dtype).expect("in the repository");
        subjects.push(required);
        subjects.extend(["gemma3", "qwen3"].into_iter().filter_map(|family| Subject::gguf(family, dtype)));
    }
    for subject in &subjects {
        check_all_ways(subject);
        check_other_loads(subject);
    }
}

/// Three sessions that take turns token by token, one of which loses its pages in between.
fn check_no_bleed(subject: &Subject, step_tokens: usize) {
    let model = subject.load();
    let begin = |prompt: &[u32]| model.cold(&subject.greedy(prompt));
    let first = [begin(&subject.prompt), begin(&subject.stranger(3, 120)), begin(&subject.stranger(5, 70))];
    let go_on = |truth: &Truth| {
        model.cold(&subject.greedy(&[&truth.request.prompt[..], &truth.ids(), &[8, 9]].concat()))
    };
    let second = first.each_ref().map(go_on);
    let mut engine = model.engine(|config| {
        (config.max_running, config.step_tokens, config.max_sessions) = (3, step_tokens, 6);
        config.kv_memory = Some(3 * model.context_bytes(config));
    });
    for (turn, truths) in [("first turn", &first), ("second turn", &second)] {
        if turn == "second turn" {
            evict_one(subject, &mut engine);
        }
        model.forget();
        let sessions = ["a", "b", "c"].into_iter().zip(truths);
        let answers = run_all(&mut engine, sessions.map(|(name, truth)| within(name, truth)).collect());
        for (answer, truth) in answers.iter().zip(truths) {
            model.check(&format!("{}: {turn} in steps of {step_tokens}", subject.name), answer, truth);
        }
    }
}

/// Sessions driven by hand, which keep their pages, grow until one of the named has lost its own; then they go.
fn evict_one(subject: &Subject, engine: &mut Engine) {
    let num_evicted =
        |engine: &Engine| engine.list_sessions().iter().filter(|info| info.num_resident == 0).count();
    let tokens = subject.stranger(30, 220);
    let by_hand = [(); 3].map(|()| engine.create_session().expect("room"));
    let parts =
        by_hand.into_iter().flat_map(|session| tokens.chunks(PAGE_TOKENS).map(move |part| (session, part)));
    for (session, part) in parts {
        if num_evicted(engine) == 0 {
            engine.prefill_tokens(session, part, &Sampling::default()).expect("room");
        }
    }
    assert_eq!(num_evicted(engine), 1, "{}", subject.name);
    assert!(by_hand.into_iter().all(|session| engine.close(session)));
}

#[test]
fn no_session_bleeds_into_another() {
    for family in families() {
        for step_tokens in [1, 3] {
            check_no_bleed(&Subject::family(family).with(KvType::F16, None), step_tokens);
        }
    }
}

/// The session still holds its pages, and so all that layers without a window see; what windowed layers have left behind is
/// gone, because others have used its memory. An edit there finds too little to go on from, and computes it again.
#[test]
fn an_edit_where_a_window_has_left_no_trace_is_computed_again() {
    for family in WINDOWED {
        let subject = Subject::family(family).with(KvType::F16, None);
        let model = subject.load();
        let long = subject.stranger(1, 200);
        let first = model.cold(&subject.greedy(&long));
        let said = first.fed();
        for cut in [199, 191, 190, 161, 160, 159, 128, 97, 64, 40, 33, 32, 31, 1] {
            let edited = [&said[..cut], &[9, 4]].concat();
            let truth = model.cold(&subject.drawn(&edited, 5));
            let mut engine = model.engine(|config| config.kv_memory = Some(2 * model.context_bytes(config)));
            run_one(&mut engine, within("a", &first));
            for who in 40..43 {
                run_one(&mut engine, subject.greedy(&subject.stranger(who, 100)));
            }
            assert_eq!(
                engine.inspect_session(&named("a")).expect("open").info.num_resident,
                said.len(),
                "{family}"
            );
            model.forget();
            let answer = run_one(&mut engine, within("a", &truth));
            let cached = answer.reuse().cached_tokens;
            // What the token at 191 sees begins with a page, the last but one of those still held.
            assert_eq!(cached, if cut >= 191 { cut } else { 0 }, "{family}: cut at {cut}");
            model.check(&format!("{family}: cut at {cut}, {cached} cached"), &answer, &truth);
        }
    }
}

/// Numbers for a walk, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }
}

/// Returns a prompt for the next turn of a session that holds `own`, beside one that holds `other`.
fn next_prompt(subject: &Subject, dice: &mut Dice, own: &[u32], other: &[u32]) -> Vec<u32> {
    let more = subject.stranger(dice.below(60), 1 + dice.below(50));
    let kept = match dice.below(6) {
        0 | 1 => own,
        2 | 3 => &own[..dice.below(own.len() + 1)],
        4 => &other[..dice.below(other.len() + 1)],
        _ => &subject.prompt[..dice.below(subject.prompt.len())],
    };
    let prompt = [&kept[..kept.len().min(190)], &more].concat();
    prompt[..prompt.len().min(230)].to_vec()
}

/// Two conversations in little memory go on, back, into each other's words, out of memory and into another process.
fn walk(subject: &Subject, seed: u64) {
    const NAMES: [&str; 2] = ["a", "b"];
    let root = tempfile::tempdir().expect("tempdir");
    let (mut model, cold, mut dice) = (subject.load(), subject.load(), Dice(seed));
    let step_tokens = [3, 20, 64][dice.below(3)];
    let start = |model: &Watched| {
        let mut engine = model.engine(|config| {
            config.step_tokens = step_tokens;
            config.kv_memory = Some(2 * model.context_bytes(config));
        });
        engine.set_disk(model.disk(root.path()));
        engine
    };
    let mut engine = start(&model);
    NAMES.iter().for_each(|name| engine.restore_session(&named(name), Vec::new()).expect("new"));
    for turn in 0..12 {
        let held = NAMES.map(|name| engine.inspect_session(&named(name)).expect("open").tokens);
        match dice.below(6) {
            0 => (20..23).for_each(|who| crowd(subject, &mut engine, who)),
            1 => {
                assert!(engine.flush_disk(PLENTY));
                drop(engine);
                model = subject.load();
                engine = start(&model);
                for (name, tokens) in NAMES.iter().zip(&held) {
                    engine.restore_session(&named(name), tokens.clone()).expect("new");
                }
            }
            _ => {}
        }
        let prompts =
            [(0, 1), (1, 0)].map(|(own, other)| next_prompt(subject, &mut dice, &held[own], &held[other]));
        let truths = prompts.map(|prompt| cold.cold(&subject.drawn(&prompt, turn as u64)));
        model.forget();
        let requests = NAMES.into_iter().zip(&truths).map(|(name, truth)| within(name, truth)).collect();
        for (answer, truth) in run_all(&mut engine, requests).iter().zip(&truths) {
            let way = format!("{}: seed {seed}, turn {turn}, {:?}", subject.name, answer.reuse());
            model.check(&way, answer, truth);
        }
    }
}

#[test]
fn conversations_that_jump_about_are_answered_as_if_new() {
    for family in ["gemma2", "gemma3", "gemma4-e", "gpt-oss", "lfm2", "mistral", "qwen3", "qwen3.5-moe"] {
        for (seed, kv_type) in (1..).zip(KvType::ALL) {
            walk(&Subject::family(family).with(kv_type, None), seed);
        }
    }
}

/// Rows leave the layers once nothing needs them: KV, states and logits are those of a step in which every row stays.
#[test]
fn rows_that_are_not_wanted_are_not_missed() {
    for (family, kv_type) in families().zip(KvType::ALL.into_iter().cycle()) {
        let subject = Subject::family(family).with(kv_type, None);
        let computed = [true, false].map(|all| {
            let mut model = load_model(&subject.path, &subject.options).expect("loads").model;
            let pool = page_pool(&*model, 64);
            let mut table = PageTable::new(&pool);
            let [first, second] = [&subject.prompt[..], &subject.prompt[..40]]
                .map(|tokens| bits(&last_logits(&mut *model, &mut table, tokens, all)));
            let mut pages = Vec::new();
            table.page_refs().for_each(|page| model.export_page(page, &mut pages).expect("exported"));
            (first, second, pages)
        });
        assert!(!computed[0].0.is_empty() && !computed[0].2.is_empty());
        assert!(computed[0] == computed[1], "{}", subject.name);
    }
}

/// Attention reduces positions in runs of 256: contexts of several, cut elsewhere, in company, on other threads.
#[test]
fn long_contexts_are_answered_alike() {
    const CONTEXT: usize = 700;
    let families = [
        ("gemma3", KvType::F16),
        ("llama", KvType::Q8_0),
        ("qwen3", KvType::F32),
        ("gemma3", KvType::Q6_0),
        ("llama", KvType::Q5_1),
    ];
    for (family, kv_type) in families {
        let subject = Subject::family(family).with(kv_type, None);
        let name = &subject.name;
        let cold = subject.load_on(cpu(1));
        let prompt = subject.stranger(1, 600);
        let truth = |request| {
            cold.answer_of(&request, |config| {
                (config.context_length, config.step_tokens) = (CONTEXT, CONTEXT)
            })
        };
        let first = truth(subject.greedy(&prompt));
        let second = truth(subject.drawn(&[&prompt[..], &first.ids(), &[4; 30]].concat(), 2));
        let model = subject.load_on(cpu(3));
        for step_tokens in [1, 77, 256] {
            let mut engine = model.engine(|config| {
                (config.context_length, config.step_tokens) = (CONTEXT, step_tokens);
                config.kv_memory = Some(3 * model.context_bytes(config));
            });
            model.forget();
            let answer = run_one(&mut engine, within("a", &first));
            model.check(&format!("{name}: a long prompt by {step_tokens}"), &answer, &first);
            let strangers = [500, 257].map(|len| subject.drawn(&subject.stranger(len % 50, len), 3));
            let together = [vec![within("a", &second)], strangers.to_vec()].concat();
            model.forget();
            let answers = run_all(&mut engine, together);
            assert_eq!(answers[0].reuse().cached_tokens, first.fed().len(), "{name}");
            model.check(&format!("{name}: a long second turn by {step_tokens}"), &answers[0], &second);
        }
    }
}

/// A process that finds a page damaged, or pages of the same weights under other rules, answers by its own.
#[test]
fn what_others_left_on_disk_changes_no_answer() {
    let stored = |kv_type, dtype| Subject::family("gemma2").with(kv_type, dtype);
    let writer = stored(KvType::F16, None);
    let model = writer.load();
    let turns = writer.conversation(&model);
    let root = tempfile::tempdir().expect("tempdir");
    let mut engine = model.engine(|_| ());
    engine.set_disk(model.disk(root.path()));
    run_one(&mut engine, within("a", &turns.first));
    assert!(engine.flush_disk(PLENTY));
    drop(engine);
    let restart = |subject: &Subject, truth: &Truth| {
        let model = subject.load();
        let mut engine = model.engine(|_| ());
        engine.set_disk(model.disk(root.path()));
        engine.restore_session(&named("a"), turns.first.fed()).expect("a new engine");
        let answer = run_one(&mut engine, within("a", truth));
        model.check(&format!("{}: {:?}", subject.name, answer.reuse()), &answer, truth);
        assert!(engine.flush_disk(PLENTY));
        answer.reuse().restored_tokens
    };
    for other in [
        stored(KvType::Q8_0, None),
        stored(KvType::F32, None),
        stored(KvType::Q6_0, None),
        stored(KvType::F16, Some(Dtype::F32)),
        stored(KvType::F16, Some(Dtype::F16)),
    ] {
        let truth = other.load().cold(&turns.second.request);
        assert_eq!(restart(&other, &truth), 0, "{}", other.name);
    }
    let whole = restart(&writer, &turns.second);
    for file in files_below(root.path()) {
        let intact = std::fs::read(&file).expect("readable");
        for at in [0, intact.len() / 3, intact.len() - 1] {
            let mut bytes = intact.clone();
            bytes[at] ^= 1;
            std::fs::write(&file, bytes).expect("writable");
            assert!(restart(&writer, &turns.second) <= whole);
        }
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let (folders, mut files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    files.extend(folders.iter().flat_map(|folder| files_below(folder)));
    files
}
