//! Toy models that keep hidden states, each of which stands for a text, and toys that draft from them: a prediction block and an
//! assistant. If rows and hidden states were out of step, their drafts would be wrong throughout.

use std::sync::{Arc, Mutex, MutexGuard};

use llmctl::runtime::Error;
use llmctl::runtime::kv::{KvKind, PageRef};
use llmctl::runtime::model::{Batch, Logits, Model, ModelSpec, Row};
use llmctl::runtime::tensor::SharedBytes;

use super::toy::{ToyModel, hashed_logits, hashing};

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
