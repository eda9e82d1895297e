//! A loaded model under watch: whatever engine drives it, the logits of every row that wanted them are kept, to the bit. What an
//! engine reports is ids and log-probabilities; the promise is about logits.

use std::sync::MutexGuard;

use llmctl_base::Result;
use llmctl_models::model::Logits;

use crate::common::prelude::*;

/// Logits of one row, with where it stood.
struct Seen {
    position: usize,
    token: u32,
    logits: Vec<u32>,
}

struct Inner {
    model: Box<dyn Model>,
    seen: Vec<Seen>,
}

/// Clones are the same model: several engines, one after the other, find in its pages what others have left there.
#[derive(Clone)]
struct Watch {
    spec: ModelSpec,
    /// Of the last step.
    hidden: Vec<f32>,
    inner: Arc<Mutex<Inner>>,
}

impl Watch {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no test panics with it")
    }
}

impl Model for Watch {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        let mut inner = self.inner();
        let logits = inner.model.forward(batch)?;
        let wanted = batch.rows.iter().filter(|row| row.wants_logits);
        let seen = wanted.enumerate().map(|(index, row)| Seen {
            position: row.position,
            token: row.token,
            logits: bits(logits.row(index)),
        });
        inner.seen.extend(seen);
        let hidden = inner.model.hidden().to_vec();
        drop(inner);
        self.hidden = hidden;
        Ok(logits)
    }

    fn hidden_width(&self) -> Option<usize> {
        self.inner().model.hidden_width()
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits> {
        let mut inner = self.inner();
        let logits = inner.model.predict(batch, hidden)?;
        let hidden = inner.model.hidden().to_vec();
        drop(inner);
        self.hidden = hidden;
        Ok(logits)
    }

    fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    fn reuse(&mut self, logits: Logits) {
        self.inner().model.reuse(logits);
    }

    fn keep_drafted(&mut self, state: PageRef, count: usize) -> Result<()> {
        self.inner().model.keep_drafted(state, count)
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()> {
        self.inner().model.copy_page(from, to)
    }

    fn free_page(&mut self, place: PageRef) {
        self.inner().model.free_page(place);
    }

    fn prepare_page(&mut self, most: usize) -> bool {
        self.inner().model.prepare_page(most)
    }

    fn export_page(&self, place: PageRef, out: &mut Vec<u8>) -> Result<()> {
        self.inner().model.export_page(place, out)
    }

    fn import_page(&mut self, place: PageRef, bytes: SharedBytes) -> Result<()> {
        self.inner().model.import_page(place, bytes)
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A model and what an engine needs beside it.
pub struct Watched {
    watch: Watch,
    vocabulary: Arc<Tokenizer>,
    fingerprint: String,
}

/// A request with the answer of an engine that computed all of it, alone and at once.
pub struct Truth {
    pub request: Request,
    pub tokens: Vec<Token>,
    /// The logits that each token was sampled from.
    logits: Vec<Vec<u32>>,
}

impl Watched {
    #[track_caller]
    pub fn load(path: &Path, options: &LoadOptions) -> Self {
        Self::load_with_drafter(path, options).0
    }

    /// Loads a model with the block of its file that drafts for it.
    #[track_caller]
    pub fn load_with_drafter(path: &Path, options: &LoadOptions) -> (Self, Option<Box<dyn Model>>) {
        let loaded = load_model(path, options);
        Self::of(loaded.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// Watches a loaded model. Returns what drafts for it and is a model of its own.
    pub fn of(loaded: LoadedModel) -> (Self, Option<Box<dyn Model>>) {
        let (spec, inner) = (loaded.model.spec().clone(), Inner { model: loaded.model, seen: Vec::new() });
        let watched = Self {
            watch: Watch { spec, hidden: Vec::new(), inner: Arc::new(Mutex::new(inner)) },
            vocabulary: loaded.texts.tokenizer,
            fingerprint: loaded.fingerprint.hex,
        };
        (watched, loaded.draft.and_then(|draft| draft.model))
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.watch.spec
    }

    /// Encodes a rendered prompt.
    pub fn encode_chat(&self, text: &str) -> Vec<u32> {
        self.vocabulary.encode_chat(text).expect("encodes")
    }

    /// The model itself, for tests that drive it by hand.
    pub fn model(&self) -> impl Model + use<> {
        self.watch.clone()
    }

    /// An engine with a context of 256 tokens in which nothing ends an answer but its limit, so that all runs are equally long. Some of
    /// its pages are prepared.
    pub fn engine(&self, change: impl FnOnce(&mut EngineConfig)) -> Engine {
        let one = EngineConfig::new(256, Vec::new());
        let mut config = EngineConfig { step_tokens: 29, max_running: 4, max_sessions: 4, ..one };
        change(&mut config);
        let mut engine = Engine::new(Box::new(self.watch.clone()), self.vocabulary.clone(), config)
            .expect("a valid configuration");
        (0..3).for_each(|_| _ = engine.prepare_page());
        engine
    }

    /// Bytes of KV that a full context takes.
    pub fn context_bytes(&self, config: &EngineConfig) -> usize {
        let groups = self.spec().groups.iter();
        groups.map(|group| group.bytes(config.context_length, config.step_tokens)).sum()
    }

    /// KV below `root` as a process keeps it that has loaded this model.
    pub fn disk(&self, root: &Path) -> DiskStore {
        kv_store(root, &self.fingerprint)
    }

    /// The answer of an engine that reuses nothing and computes every prompt in one step.
    pub fn cold(&self, request: &Request) -> Truth {
        self.answer_of(request, |config| config.step_tokens = 512)
    }

    /// As `cold`, with another engine.
    pub fn answer_of(&self, request: &Request, change: impl FnOnce(&mut EngineConfig)) -> Truth {
        let request = Request { session: None, ..request.clone() };
        let mut engine = self.engine(|config| {
            config.warm_resume = false;
            change(config);
        });
        self.forget();
        let tokens = run_one(&mut engine, request.clone()).tokens();
        let logits = self.watch.inner().seen.drain(..).map(|seen| seen.logits).collect();
        Truth { request, tokens, logits }
    }

    /// Forgets the logits seen so far.
    pub fn forget(&self) {
        self.watch.inner().seen.clear();
    }

    /// The answer is the true one, and since `forget` it was sampled from the true logits, bit by bit.
    #[track_caller]
    pub fn check(&self, way: &str, answer: &Answer, truth: &Truth) {
        assert_eq!(answer.tokens(), truth.tokens, "{way}");
        self.check_logits(way, truth);
    }

    /// Rows of strangers may stand at the same position: one of all that do has the true logits.
    #[track_caller]
    pub fn check_logits(&self, way: &str, truth: &Truth) {
        let inner = self.watch.inner();
        for (index, (position, token, logits)) in truth.rows().enumerate() {
            let mut there = inner.seen.iter().filter(|seen| (seen.position, seen.token) == (position, token));
            assert!(there.any(|seen| seen.logits == *logits), "{way}: logits of generated token {index}");
        }
    }
}

impl Truth {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// All that a session holds after it but the last token, which is not fed.
    pub fn fed(&self) -> Vec<u32> {
        let mut tokens = [&self.request.prompt[..], &self.ids()].concat();
        tokens.pop();
        tokens
    }

    /// Position, token and logits of the rows that were sampled after.
    pub fn rows(&self) -> impl Iterator<Item = (usize, u32, &Vec<u32>)> {
        let (fed, first) = (self.fed(), self.request.prompt.len() - 1);
        assert_eq!(fed.len() - first, self.logits.len(), "one row of logits for each token");
        (first..).zip(&self.logits).map(move |(position, logits)| (position, fed[position], logits))
    }

    pub fn is_same(&self, other: &Self) -> bool {
        self.tokens == other.tokens && self.logits == other.logits
    }
}
