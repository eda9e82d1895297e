//! Toy models and vocabularies for engine tests. A toy model keeps real content: each KV slot holds the position and the
//! token that were written there, and logits are a function of the history read back through the page tables, so a row
//! that lands in the wrong place, or a page shared by mistake, changes the answer.

use std::borrow::Cow;

use llmctl_base::SamplerStep;
use llmctl_engine::RequestId;
use llmctl_models::kv::KvGroup;
use llmctl_models::model::Logits;
use llmctl_models::text::Vocabulary;

use crate::common::prelude::*;

/// The logits after a history.
pub type Rule = Box<dyn FnMut(&[u32]) -> Result<Vec<f32>, Error> + Send>;

/// The rows of every forward pass so far, with the tests' side able to look on.
pub type Log = Arc<Mutex<Vec<Vec<Row>>>>;

/// Rows and states lie in the pages of their groups, as in a real model. A model of several groups checks that all of them
/// tell the same history.
pub struct ToyModel {
    spec: ModelSpec,
    rows: HashMap<(PageRef, usize), (usize, u32)>,
    /// Tokens that a recurrent state stands for.
    states: HashMap<PageRef, Vec<u32>>,
    /// Drafted tokens of the last step that a state has not taken in.
    drafted: HashMap<PageRef, Vec<u32>>,
    rule: Rule,
    log: Log,
    before_forward: Hook,
    prepare: Box<dyn FnMut(usize) -> bool + Send>,
}

/// Bytes of a toy page.
pub const TOY_PAGE_BYTES: usize = 8 * PAGE_TOKENS;

/// `--kv-memory` for so many pages.
pub const fn pages(count: usize) -> Option<usize> {
    Some(count * TOY_PAGE_BYTES)
}

/// Called before every forward pass, which fails when it does.
pub type Hook = Box<dyn FnMut() -> Result<(), Error> + Send>;

impl ToyModel {
    pub fn new(vocab_size: usize, rule: Rule) -> Self {
        let spec = ModelSpec {
            architecture: "toy".to_owned(),
            vocab_size,
            context_length: 1 << 20,
            groups: vec![KvGroup { kind: KvKind::Full, page_bytes: TOY_PAGE_BYTES }],
            can_rewind: true,
            adapters: Vec::new(),
        };
        let before_forward: Hook = Box::new(|| Ok(()));
        let (rows, states, drafted) = (HashMap::new(), HashMap::new(), HashMap::new());
        let prepare = Box::new(|_| false);
        Self { spec, rows, states, drafted, rule, log: Log::default(), before_forward, prepare }
    }

    pub fn without_rewind(mut self) -> Self {
        self.spec.can_rewind = false;
        self
    }

    /// Each group's pages are of [`TOY_PAGE_BYTES`]; all tokens must be told by one of them.
    pub fn with_groups(mut self, kinds: &[KvKind]) -> Self {
        let group = |&kind| KvGroup { kind, page_bytes: TOY_PAGE_BYTES };
        self.spec.groups = kinds.iter().map(group).collect();
        self
    }

    pub fn with_context(mut self, context_length: usize) -> Self {
        self.spec.context_length = context_length;
        self
    }

    pub fn with_hook(mut self, hook: Hook) -> Self {
        self.before_forward = hook;
        self
    }

    /// Sets the answer of [`Model::prepare_page`].
    pub fn with_preparation(mut self, prepare: impl FnMut(usize) -> bool + Send + 'static) -> Self {
        self.prepare = Box::new(prepare);
        self
    }

    pub fn log(&self) -> Log {
        self.log.clone()
    }

    fn write(&mut self, batch: &Batch<'_>, row: &Row) {
        let table = batch.tables[row.sequence];
        for (group, spec) in self.spec.groups.iter().enumerate() {
            if spec.kind == KvKind::Recurrent {
                let place = PageRef { group, page: table.state(group).expect("a state's page") };
                let state = self.states.entry(place).or_default();
                if row.position == 0 {
                    state.clear();
                }
                let drafted = self.drafted.entry(place).or_default();
                assert_eq!(state.len() + drafted.len(), row.position, "a state of another position");
                if row.is_drafted { drafted } else { state }.push(row.token);
            } else {
                let (page, offset) = table.slot(group, row.position);
                self.rows.insert((PageRef { group, page }, offset), (row.position, row.token));
            }
        }
    }

    /// Returns the tokens that a row attends to. All groups must agree on them.
    pub fn history(&self, batch: &Batch<'_>, row: &Row) -> Vec<u32> {
        let table = batch.tables[row.sequence];
        let told = self.spec.groups.iter().enumerate().map(|(group, spec)| match spec.kind {
            KvKind::Recurrent => {
                let place = PageRef { group, page: table.state(group).expect("a state's page") };
                [&self.states[&place][..], &self.drafted[&place]].concat()[..=row.position].to_vec()
            }
            KvKind::Full => self.read(table, group, 0, row.position),
            KvKind::SlidingWindow(window) => {
                self.read(table, group, (row.position + 1).saturating_sub(window), row.position)
            }
        });
        let told: Vec<Vec<u32>> = told.collect();
        let longest = told.iter().max_by_key(|tokens| tokens.len()).expect("a group").clone();
        assert!(told.iter().all(|tokens| longest.ends_with(tokens)), "groups disagree: {told:?}");
        longest
    }

    fn read(&self, table: &PageTable, group: usize, from: usize, to: usize) -> Vec<u32> {
        let token_at = |position| {
            let (page, offset) = table.slot(group, position);
            let (written_at, token) = self.rows[&(PageRef { group, page }, offset)];
            assert_eq!(written_at, position, "a slot holds another position's row");
            token
        };
        (from..=to).map(token_at).collect()
    }
}

/// Rows of one sequence are gapless and ascending, and their table covers exactly them.
fn check_batch(batch: &Batch<'_>) {
    for (index, table) in batch.tables.iter().enumerate() {
        let positions: Vec<usize> =
            batch.rows.iter().filter(|row| row.sequence == index).map(|row| row.position).collect();
        let first = positions[0];
        assert!(positions.iter().enumerate().all(|(offset, &position)| position == first + offset));
        assert_eq!(first + positions.len(), table.len());
    }
}

impl Model for ToyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        (self.before_forward)()?;
        check_batch(batch);
        self.log.lock().expect("no test panics with it").push(batch.rows.to_vec());
        self.drafted.clear();
        batch.rows.iter().for_each(|row| self.write(batch, row));
        let mut logits = Logits { values: Vec::new(), vocab_size: self.spec.vocab_size };
        for row in batch.rows.iter().filter(|row| row.wants_logits) {
            let history = self.history(batch, row);
            logits.values.extend((self.rule)(&history)?);
        }
        Ok(logits)
    }

    fn keep_drafted(&mut self, place: PageRef, count: usize) -> Result<(), Error> {
        let kept = &self.drafted.remove(&place).expect("drafted tokens")[..count];
        self.states.entry(place).or_default().extend_from_slice(kept);
        Ok(())
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<(), Error> {
        assert_eq!(from.group, to.group);
        for offset in 0..PAGE_TOKENS {
            match self.rows.get(&(from, offset)).copied() {
                Some(row) => self.rows.insert((to, offset), row),
                None => self.rows.remove(&(to, offset)),
            };
        }
        if let Some(state) = self.states.get(&from).cloned() {
            self.states.insert(to, state);
        }
        Ok(())
    }

    fn free_page(&mut self, place: PageRef) {
        self.rows.retain(|(at, _), _| *at != place);
        self.states.remove(&place);
    }

    fn prepare_page(&mut self, most: usize) -> bool {
        (self.prepare)(most)
    }

    /// A state of up to 255 tokens, all below 256: their number and a byte each.
    fn export_page(&self, place: PageRef, out: &mut Vec<u8>) -> Result<(), Error> {
        let end = out.len() + TOY_PAGE_BYTES;
        if let Some(state) = self.states.get(&place) {
            out.push(u8::try_from(state.len()).expect("a short history"));
            out.extend(state.iter().map(|&token| u8::try_from(token).expect("a small vocabulary")));
        }
        let rows = (0..PAGE_TOKENS).filter_map(|offset| self.rows.get(&(place, offset)));
        for number in rows.flat_map(|&(position, token)| [position as u32, token]) {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.resize(end, 0);
        Ok(())
    }

    fn import_page(&mut self, place: PageRef, bytes: SharedBytes) -> Result<(), Error> {
        self.free_page(place);
        if self.spec.groups[place.group].kind == KvKind::Recurrent {
            let state = bytes[1..][..bytes[0].into()].iter().map(|&token| token.into());
            self.states.insert(place, state.collect());
            return Ok(());
        }
        for (offset, row) in bytes.chunks_exact(8).enumerate() {
            let number = |at: usize| u32::from_le_bytes(row[at..at + 4].try_into().expect("four bytes"));
            self.rows.insert((place, offset), (number(0) as usize, number(4)));
        }
        Ok(())
    }
}

/// All weight on one token.
pub fn one_hot(vocab_size: usize, id: u32) -> Vec<f32> {
    let mut logits = vec![0.0; vocab_size];
    logits[id as usize] = 20.0;
    logits
}

/// After token n comes n + 1: the prompt's last token decides where the chain begins.
pub fn counting(vocab_size: usize) -> Rule {
    Box::new(move |history| Ok(one_hot(vocab_size, (history[history.len() - 1] + 1) % vocab_size as u32)))
}

/// Logits that depend on every token of the history and its place.
pub fn hashing(vocab_size: usize) -> Rule {
    Box::new(move |history| Ok(hashed_logits(history, vocab_size)))
}

pub fn hashed_logits(history: &[u32], vocab_size: usize) -> Vec<f32> {
    let seed = history.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
    });
    let logit = |id: u64| {
        let mixed = (seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f32 / (1 << 22) as f32
    };
    (0..vocab_size as u64).map(logit).collect()
}

/// Token ids as pieces of text, by index.
pub struct ToyVocabulary {
    pieces: Vec<Vec<u8>>,
    special: BTreeSet<u32>,
}

impl ToyVocabulary {
    pub fn new<P: AsRef<[u8]>>(pieces: &[P], special: &[u32]) -> Arc<Self> {
        let pieces = pieces.iter().map(|piece| piece.as_ref().to_vec()).collect();
        Arc::new(Self { pieces, special: special.iter().copied().collect() })
    }

    /// Token n is `n` and a space.
    pub fn numbers(count: usize) -> Arc<Self> {
        Self::new(&(0..count).map(|id| format!("{id} ")).collect::<Vec<_>>(), &[])
    }
}

impl Vocabulary for ToyVocabulary {
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        self.pieces.get(id as usize).map(|piece| Cow::Borrowed(&piece[..]))
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }
}

/// An engine on a toy model over `vocab_size` numbers, with room for `max_running` full contexts.
pub struct Setup {
    pub vocab_size: usize,
    pub context_length: usize,
    pub step_tokens: usize,
    pub max_running: usize,
    pub max_sessions: usize,
    /// Pages beyond one full context for each running request.
    pub spare_pages: usize,
    pub end_of_generation: Vec<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            vocab_size: 64,
            context_length: 256,
            step_tokens: 16,
            max_running: 4,
            max_sessions: 4,
            spare_pages: 0,
            end_of_generation: vec![63],
        }
    }
}

impl Setup {
    pub fn config(&self) -> EngineConfig {
        let one = EngineConfig::new(self.context_length, self.end_of_generation.clone());
        EngineConfig {
            step_tokens: self.step_tokens,
            max_running: self.max_running,
            max_sessions: self.max_sessions,
            kv_memory: pages(self.context_length.div_ceil(PAGE_TOKENS) * self.max_running + self.spare_pages),
            ..one
        }
    }

    pub fn engine(&self, rule: Rule) -> Engine {
        self.engine_and_log(rule).0
    }

    pub fn engine_and_log(&self, rule: Rule) -> (Engine, Log) {
        self.engine_with(ToyModel::new(self.vocab_size, rule), ToyVocabulary::numbers(self.vocab_size))
    }

    pub fn engine_with(&self, model: ToyModel, vocabulary: Arc<ToyVocabulary>) -> (Engine, Log) {
        let log = model.log();
        let engine = Engine::new(Box::new(model), vocabulary, self.config()).expect("a valid configuration");
        (engine, log)
    }
}

pub fn request(prompt: &[u32]) -> Request {
    Request { prompt: prompt.to_vec(), ..Request::default() }
}

pub fn limited(prompt: &[u32], max_tokens: usize) -> Request {
    let mut request = request(prompt);
    request.limits.max_tokens = Some(max_tokens);
    request
}

pub fn seeded(seed: u64) -> Sampling {
    Sampling { temperature: 1.0, seed: Some(seed), ..Sampling::default() }
}

/// A seeded sampling with what keeps a history or a state: none, DRY, Mirostat 1 and 2, and an order with XTC and dynamic
/// temperature.
pub fn varied(seed: u64) -> Sampling {
    let plain = seeded(seed);
    let dry = Sampling { dry_multiplier: 2.0, dry_allowed_length: 1.0, ..plain.clone() };
    match seed % 5 {
        0 => plain,
        1 => dry,
        2 => Sampling { mirostat: 1.0, mirostat_tau: 3.0, mirostat_eta: 0.5, ..plain },
        3 => Sampling { mirostat: 2.0, mirostat_tau: 3.0, mirostat_eta: 0.5, ..dry },
        _ => Sampling {
            samplers: Some(SamplerStep::list(["xtc", "dry", "temperature", "min_p"]).expect("known")),
            xtc_probability: 0.5,
            dynatemp_range: 0.5,
            min_p: 0.05,
            ..dry
        },
    }
}

/// All that a request said.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub events: Vec<Event>,
}

impl Answer {
    pub fn text(&self) -> String {
        let text = |event: &Event| match event {
            Event::Text { text, .. } => text.clone(),
            _ => String::new(),
        };
        self.events.iter().map(text).collect()
    }

    pub fn tokens(&self) -> Vec<Token> {
        let tokens = |event: &Event| match event {
            Event::Text { tokens, .. } => tokens.clone(),
            _ => Vec::new(),
        };
        self.events.iter().flat_map(tokens).collect()
    }

    pub fn ids(&self) -> Vec<u32> {
        self.tokens().iter().map(|token| token.id).collect()
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.events.last(), Some(Event::Done(_) | Event::Failed(_)))
    }

    #[track_caller]
    pub fn reuse(&self) -> Reuse {
        let started = self.events.iter().find_map(|event| match event {
            Event::Started(started) => Some(started.reuse),
            _ => None,
        });
        started.expect("it started")
    }

    pub fn outcome(&self) -> &Outcome {
        match self.events.last() {
            Some(Event::Done(outcome)) => outcome,
            other => panic!("not done but {other:?}"),
        }
    }

    #[track_caller]
    pub fn finish(&self) -> &Finish {
        &self.outcome().finish
    }

    #[track_caller]
    pub fn error(&self) -> &Error {
        match self.events.last() {
            Some(Event::Failed(error)) => error,
            other => panic!("not failed but {other:?}"),
        }
    }

    /// Queued, then Started, then Prefill, then Text, then one end; whatever is missing, the order holds.
    #[track_caller]
    pub fn check_order(&self) {
        let rank = |event: &Event| match event {
            Event::Queued { .. } => 0,
            Event::Started(_) => 1,
            Event::Encoding { .. } | Event::Prefill { .. } | Event::Prompt { .. } => 2,
            Event::Text { .. } => 3,
            Event::Done(_) | Event::Failed(_) => 4,
        };
        let ranks: Vec<u8> = self.events.iter().map(rank).collect();
        assert!(ranks.is_sorted(), "{:?}", self.events);
        assert_eq!(ranks.iter().filter(|&&rank| rank == 4).count(), 1, "one end: {:?}", self.events);
        assert!(ranks.iter().filter(|&&rank| rank == 1).count() <= 1, "{:?}", self.events);
    }
}

/// Steps until nothing is left, adding each event to its answer.
pub fn drain(engine: &mut Engine, answers: &mut HashMap<RequestId, Answer>) {
    while !engine.is_idle() {
        step(engine, answers);
    }
}

pub fn step(engine: &mut Engine, answers: &mut HashMap<RequestId, Answer>) {
    for (id, event) in engine.step() {
        answers.entry(id).or_default().events.push(event);
    }
}

/// Runs the requests together, to the end of all; answers in the order of the requests.
pub fn run_all(engine: &mut Engine, requests: Vec<Request>) -> Vec<Answer> {
    let submit = |request| engine.submit(request).expect("a valid request");
    let ids: Vec<RequestId> = requests.into_iter().map(submit).collect();
    let mut answers = HashMap::new();
    drain(engine, &mut answers);
    let answer = |id| answers.remove(id).expect("every request is answered");
    let answers: Vec<Answer> = ids.iter().map(answer).collect();
    answers.iter().for_each(Answer::check_order);
    answers
}

pub fn run_one(engine: &mut Engine, request: Request) -> Answer {
    run_all(engine, vec![request]).remove(0)
}

/// Tokens that the model has computed, over all forward passes.
pub fn fed_tokens(log: &Log) -> Vec<u32> {
    log.lock().expect("no test panics with it").iter().flatten().map(|row| row.token).collect()
}

pub fn num_forwards(log: &Log) -> usize {
    log.lock().expect("no test panics with it").len()
}

/// Returns the request as one of a session.
pub fn within(session: &str, request: Request) -> Request {
    Request { session: Some(named(session)), ..request }
}

/// The ids that a seeded request must generate, by recomputing everything from its whole history each time.
pub fn recomputed(request: &Request, vocab_size: usize, end: u32) -> Vec<u32> {
    use llmctl_engine::sample::{Sampler, Turn};
    let (mut history, generated_from) = (request.prompt.clone(), request.prompt.len());
    let mut surprise_bound = None;
    for _ in 0..request.limits.max_tokens.expect("limited") {
        let seed = request.sampling.seed.expect("seeded");
        let turn = Turn { tokens: &history, generated_from, seed, surprise_bound, ..Turn::default() };
        let logits = hashed_logits(&history, vocab_size);
        let mut sampler = Sampler::default();
        sampler.set_vocabulary(ToyVocabulary::numbers(vocab_size));
        let token = sampler.sample(&logits, &request.sampling, &turn).expect("finite logits");
        surprise_bound = sampler.surprise_bound();
        if token.id == end {
            break;
        }
        history.push(token.id);
    }
    history.split_off(generated_from)
}
