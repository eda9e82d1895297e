//! Toy models that keep hidden states, each of which stands for a text, and toys that draft from them: a prediction block and an
//! assistant. If rows and hidden states were out of step, their drafts would be wrong throughout.

use std::sync::MutexGuard;

use llmctl_engine::ModelDrafter;
use llmctl_models::model::Logits;

use super::toy::hashed_logits;
use crate::common::prelude::*;

pub const VOCAB: usize = 259;

/// Texts that hidden states stand for: a hidden state is a number, the index of the text it was computed from. The first text is
/// empty: drafters are measured with it.
#[derive(Clone)]
pub struct Texts(Arc<Mutex<Vec<Vec<u32>>>>);

impl Default for Texts {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(vec![Vec::new()])))
    }
}

impl Texts {
    fn all(&self) -> MutexGuard<'_, Vec<Vec<u32>>> {
        self.0.lock().expect("no panic")
    }
}

/// A toy model that keeps hidden states.
pub struct Telling {
    toy: ToyModel,
    texts: Texts,
    hidden: Vec<f32>,
}

/// A toy block: it expects what follows the text that a hidden state stands for and the token after it, but for every fifth
/// token.
pub struct ToyBlock(pub Telling);

impl Telling {
    pub fn new(kinds: &[KvKind], texts: &Texts) -> Self {
        let toy = ToyModel::new(VOCAB, hashing(VOCAB)).with_groups(kinds);
        Self { toy, texts: texts.clone(), hidden: Vec::new() }
    }

    fn tell(&mut self, texts: Vec<Vec<u32>>) {
        let mut known = self.texts.all();
        self.hidden = (known.len()..known.len() + texts.len()).map(|index| index as f32).collect();
        known.extend(texts);
    }

    /// The logits after the texts that hidden states stand for and the rows' tokens: what comes next, but for every fifth token.
    fn predicted(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Logits {
        let follow = |(row, &hidden): (&Row, &f32)| {
            let mut text = self.texts.all()[hidden as usize].clone();
            text.push(row.token);
            text
        };
        let texts: Vec<Vec<u32>> = batch.rows.iter().zip(hidden).map(follow).collect();
        let mut logits = Logits { values: Vec::new(), vocab_size: VOCAB };
        for (_, text) in batch.rows.iter().zip(&texts).filter(|(row, _)| row.wants_logits) {
            let mut values = hashed_logits(text, VOCAB);
            values.rotate_left(if text.len() % 5 == 4 { VOCAB / 2 } else { 0 });
            logits.values.extend(values);
        }
        self.tell(texts);
        logits
    }
}

macro_rules! pages_of {
    ($($toy:tt)+) => {
        fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<(), Error> {
            self.$($toy)+.copy_page(from, to)
        }

        fn free_page(&mut self, place: PageRef) {
            self.$($toy)+.free_page(place);
        }

        fn export_page(&self, place: PageRef, out: &mut Vec<u8>) -> Result<(), Error> {
            self.$($toy)+.export_page(place, out)
        }

        fn import_page(&mut self, place: PageRef, bytes: SharedBytes) -> Result<(), Error> {
            self.$($toy)+.import_page(place, bytes)
        }
    };
}

impl Model for Telling {
    fn spec(&self) -> &ModelSpec {
        self.toy.spec()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        let logits = self.toy.forward(batch)?;
        let texts = batch.rows.iter().map(|row| self.toy.history(batch, row)).collect();
        self.tell(texts);
        Ok(logits)
    }

    fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    fn keep_drafted(&mut self, place: PageRef, count: usize) -> Result<(), Error> {
        self.toy.keep_drafted(place, count)
    }

    pages_of!(toy);
}

impl Model for ToyBlock {
    fn spec(&self) -> &ModelSpec {
        self.0.toy.spec()
    }

    fn forward(&mut self, _: &Batch<'_>) -> Result<Logits, Error> {
        unreachable!("a block predicts")
    }

    fn hidden_width(&self) -> Option<usize> {
        Some(1)
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits, Error> {
        assert_eq!(hidden.len(), batch.rows.len());
        self.0.toy.forward(batch)?; // keeps and checks rows
        Ok(self.0.predicted(batch, hidden))
    }

    fn hidden(&self) -> &[f32] {
        &self.0.hidden
    }

    pages_of!(0.toy);
}

/// A toy model with an assistant, which fails when it has computed so many steps.
pub struct ToyAssisted {
    model: Telling,
    steps_left: usize,
}

impl ToyAssisted {
    pub fn new(model: Telling) -> Self {
        Self { model, steps_left: usize::MAX }
    }

    pub fn failing_after(self, steps: usize) -> Self {
        Self { steps_left: steps, ..self }
    }
}

impl Model for ToyAssisted {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits, Error> {
        self.model.forward(batch)
    }

    fn hidden_width(&self) -> Option<usize> {
        Some(1)
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits, Error> {
        assert_eq!(hidden.len(), batch.rows.len());
        let left = self.steps_left.checked_sub(1);
        self.steps_left = left.ok_or_else(|| Error::Backend("no step is left".to_owned()))?;
        for (row, &hidden) in batch.rows.iter().zip(hidden) {
            assert_eq!(row.position + 1, batch.tables[row.sequence].len(), "it reads all rows there are");
            let text = self.model.texts.all()[hidden as usize].clone();
            if !text.is_empty() && self.spec().groups.len() == 1 {
                // A hidden state of its own stands for drafted tokens, too.
                let known = self.model.toy.history(batch, row);
                assert!(text.starts_with(&known), "{text:?} after {known:?}");
            }
        }
        Ok(self.model.predicted(batch, hidden))
    }

    fn hidden(&self) -> &[f32] {
        self.model.hidden()
    }

    fn keep_drafted(&mut self, place: PageRef, count: usize) -> Result<(), Error> {
        self.model.keep_drafted(place, count)
    }

    pages_of!(model.toy);
}

/// The configuration of an engine with a toy model.
pub fn toy_config(speculation: Speculation) -> EngineConfig {
    let setup = Setup { vocab_size: VOCAB, end_of_generation: vec![2], spare_pages: 64, ..Setup::default() };
    EngineConfig { speculation, ..setup.config() }
}

/// A request for the likeliest tokens, with a seed that its report names.
pub fn greedy(prompt: &[u32], max_tokens: usize) -> Request {
    Request { sampling: Sampling { seed: Some(1), ..Sampling::default() }, ..limited(prompt, max_tokens) }
}

/// Makes an engine with a toy model of these kinds of KV and its drafter.
type MakeEngine<'a> = &'a dyn Fn(&[KvKind], EngineConfig) -> Engine;

fn drafts_of(answer: &Answer, drafter: ModelDrafter) -> DraftModelUsage {
    let usage = answer.outcome().usage.draft_model.expect("the drafter was asked");
    assert_eq!(usage.drafter, drafter);
    usage
}

/// Checks the answers and drafts of three turns of a session, with prompts in chunks of several sizes.
pub fn check_turns(kinds: &[KvKind], engine: MakeEngine<'_>, drafter: ModelDrafter) {
    let prompt: Vec<u32> = (0..90).map(|n| 3 + n * n % 200).collect();
    for (step_tokens, len) in [(7, 1), (64, 3), (128, 4)] {
        let [mut plain, mut drafting] = [Speculation::Off, Speculation::Always(len)]
            .map(|mode| engine(kinds, EngineConfig { step_tokens, ..toy_config(mode) }));
        let mut asked = prompt.clone();
        for turn in 0..3 {
            let request = Request { session: Some(named("a")), ..greedy(&asked, 40) };
            let truth = run_one(&mut plain, request.clone());
            let answer = run_one(&mut drafting, request);
            assert_eq!(answer.ids(), truth.ids(), "{kinds:?}, turn {turn}");
            let DraftModelUsage { drafted_tokens, accepted_tokens, stop, .. } = drafts_of(&answer, drafter);
            assert_eq!(stop, None);
            // Every fifth token is told wrong, and what comes after it in the same draft is not taken.
            let least = if len == 3 { 0.4 } else { 0.6 };
            assert!(
                accepted_tokens as f64 >= least * drafted_tokens as f64 && drafted_tokens > 10,
                "{accepted_tokens} of {drafted_tokens}, {kinds:?}, drafts of {len}, turn {turn}"
            );
            asked = [&asked[..], &answer.ids(), &[9, 8, 7]].concat();
        }
    }
}

/// Checks the answers and drafts of `count` requests that run together.
pub fn check_together(kinds: &[KvKind], engine: MakeEngine<'_>, drafter: ModelDrafter, count: u32) {
    let asked: Vec<Request> = (1..=count).map(|n| greedy(&[n, 70, n * 9], 30)).collect();
    let [truths, answers] = [Speculation::Off, Speculation::Always(3)].map(|mode| {
        let config = toy_config(mode);
        let (max_running, step_tokens) = (count as usize, config.step_tokens.max(6 * count as usize));
        run_all(&mut engine(kinds, EngineConfig { max_running, step_tokens, ..config }), asked.clone())
    });
    for (answer, truth) in answers.iter().zip(&truths) {
        assert_eq!(answer.ids(), truth.ids());
        let usage = drafts_of(answer, drafter);
        assert!(usage.accepted_tokens >= 10, "{usage:?}");
    }
}
