//! Drafts of one generation: where their tokens come from, how many were accepted, and how likely the next
//! are.

use super::allotment::DraftOffer;
use super::draft_model::Followed;
use super::ngram::NgramDrafter;
use super::track::{DraftTrack, KnownText};
use crate::request::{DraftModelUsage, ModelDrafter};
use crate::spec::Speculation;
use llmctl_models::kv::PageTable;

/// Kinds of drafts whose acceptance is estimated apart: by the number of tokens that agree with an earlier
/// place, tokens that the request itself foresees, and those of a draft model.
const NUM_KINDS: usize = 6;
const FORESEEN: usize = 4;
const MODEL: usize = 5;

/// Accepted and refused tokens that an estimate begins with, by kind.
const PRIORS: [(f64, f64); NUM_KINDS] =
    [(1.0, 3.0), (2.0, 2.0), (3.0, 1.5), (4.0, 1.0), (99.0, 1.0), (2.0, 1.5)];

/// Weight that each earlier draft keeps when another one was judged.
const DECAY: f64 = 0.9;

/// Part of the way back to where it began that the draft model's estimate goes whenever its draft was not worth its cost,
/// so that it is tried again.
const FORGIVENESS: f64 = 1.0 / 64.0;

/// Returns the kind of a draft that so many tokens before it agree with; `None` if there is none.
fn kind_of(num_equal: usize) -> Option<usize> {
    match num_equal {
        0 => None,
        1..=2 => Some(0),
        3..=4 => Some(1),
        5..=11 => Some(2),
        _ => Some(3),
    }
}

/// The draft of the next step and what became of those before.
#[derive(Debug)]
pub struct Drafts {
    tokens: Vec<u32>,
    kind: usize,
    ngram: Option<NgramDrafter>,
    /// Tokens of the sequence that the n-gram index has.
    num_indexed: usize,
    /// Accepted and refused tokens by kind, decayed.
    judged: [(f64, f64); NUM_KINDS],
    num_drafted: usize,
    num_accepted: usize,
    track: DraftTrack,
    /// Drafts of the draft model; `None` if it was never asked.
    by_model: Option<DraftModelUsage>,
}

impl Default for Drafts {
    fn default() -> Self {
        Self {
            tokens: Vec::new(),
            kind: 0,
            ngram: None,
            num_indexed: 0,
            judged: PRIORS,
            num_drafted: 0,
            num_accepted: 0,
            track: DraftTrack::default(),
            by_model: None,
        }
    }
}

impl Drafts {
    /// Returns the draft of the next step.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns how many tokens were drafted, and how many of them were accepted.
    pub fn totals(&self) -> (usize, usize) {
        (self.num_drafted, self.num_accepted)
    }

    /// Returns what the draft model came to.
    pub fn by_model(&self) -> Option<DraftModelUsage> {
        self.by_model.map(|usage| DraftModelUsage { stop: self.track.stop(), ..usage })
    }

    /// Drafts at most `most` tokens: from `foreseen`, else from the text, which is `prediction`, then the
    /// sequence: `resident`, then `following`. `prompt_len` tokens of it are the prompt.
    pub fn propose(
        &mut self,
        mode: Speculation,
        most: usize,
        foreseen: impl Iterator<Item = u32>,
        text: DraftText<'_>,
    ) -> Option<DraftOffer> {
        self.tokens.clear();
        match mode {
            Speculation::Draft | Speculation::Mtp => return None,
            Speculation::Ngram => {}
            _ => self.tokens.extend(foreseen.take(most)),
        }
        self.kind = FORESEEN;
        if self.tokens.is_empty() {
            self.catch_up(text);
            self.kind = kind_of(self.ngram.as_ref()?.draft(most, &mut self.tokens))?;
        }
        if let Some(end) = self.tokens.iter().position(|id| Some(*id) == text.placeholder) {
            self.tokens.truncate(end);
        }
        if self.tokens.is_empty() {
            return None;
        }
        let acceptance = self.acceptance(self.kind);
        Some(DraftOffer { len: self.tokens.len(), acceptance, num_lacking: 0 })
    }

    /// Returns what a drafter that computes needs for a draft of at most `most` tokens after `text`, whose KV is in `table`, in
    /// place of the one proposed.
    pub fn follow<'a>(
        &'a mut self,
        drafter: ModelDrafter,
        (text, table): (KnownText<'a>, Option<&'a PageTable>),
        most: usize,
    ) -> Followed<'a> {
        self.by_model.get_or_insert(DraftModelUsage { drafter, ..DraftModelUsage::default() });
        self.tokens.clear();
        self.kind = MODEL;
        let acceptance = self.acceptance(MODEL);
        Followed { track: &mut self.track, text, table, draft: &mut self.tokens, most, acceptance }
    }

    /// Takes the hidden states of `count` known tokens from `position` on, if the model keeps any for a block.
    pub fn note_hidden(&mut self, position: usize, count: usize, hidden: &[f32]) {
        self.track.note_hidden(position, count, hidden);
    }

    /// Notes that a draft of the draft model was not worth its cost.
    pub fn pass(&mut self) {
        let (accepted, refused) = &mut self.judged[MODEL];
        let (first_accepted, first_refused) = PRIORS[MODEL];
        *accepted += (first_accepted - *accepted) * FORGIVENESS;
        *refused += (first_refused - *refused) * FORGIVENESS;
    }

    /// Notes that the draft model was too unsure to draft: as if its first token had been refused.
    pub fn decline(&mut self) {
        self.judge(MODEL, 0, true);
    }

    fn acceptance(&self, kind: usize) -> f64 {
        let (accepted, refused) = self.judged[kind];
        accepted / (accepted + refused)
    }

    /// Returns the acceptance of the draft model's tokens; `None` if it has stopped.
    pub fn model_acceptance(&self) -> Option<f64> {
        self.track.stop().is_none().then(|| self.acceptance(MODEL))
    }

    fn judge(&mut self, kind: usize, num_accepted: usize, is_refused: bool) {
        let (accepted, refused) = &mut self.judged[kind];
        *accepted = *accepted * DECAY + num_accepted as f64;
        *refused = *refused * DECAY + f64::from(u8::from(is_refused));
    }

    /// Adds all tokens to the n-gram index.
    fn catch_up(&mut self, text: DraftText<'_>) {
        let DraftText { prediction, prompt_len, resident, following, .. } = text;
        let prompt = &resident[..prompt_len.min(resident.len())];
        let ngram = self.ngram.get_or_insert_with(|| NgramDrafter::new(prediction, prompt));
        let num_resident = resident.len();
        ngram.extend(&resident[self.num_indexed.min(num_resident)..]);
        ngram.extend(&following[self.num_indexed.saturating_sub(num_resident).min(following.len())..]);
        self.num_indexed = num_resident + following.len();
    }

    /// Keeps the first `len` tokens of the draft.
    pub fn keep(&mut self, len: usize) {
        self.tokens.truncate(len);
    }

    /// Ends the draft: its first `num_accepted` tokens were accepted. `is_judged` says whether the token after
    /// them was refused, not left open by an end of the answer.
    pub fn end(&mut self, num_accepted: usize, is_judged: bool) {
        let num_drafted = std::mem::take(&mut self.tokens).len();
        if num_drafted == 0 {
            return;
        }
        self.num_drafted += num_drafted;
        self.num_accepted += num_accepted;
        if let Some(usage) = self.by_model.as_mut().filter(|_| self.kind == MODEL) {
            usage.drafted_tokens += num_drafted;
            usage.accepted_tokens += num_accepted;
        }
        self.judge(self.kind, num_accepted, is_judged && num_accepted < num_drafted);
    }
}

/// The text that n-grams are looked up in.
#[derive(Debug, Clone, Copy)]
pub struct DraftText<'a> {
    pub prediction: &'a [u32],
    pub prompt_len: usize,
    /// Stands for an image's row, so that it is never drafted.
    pub placeholder: Option<u32>,
    /// Tokens of the sequence with rows.
    pub resident: &'a [u32],
    /// Known tokens after them.
    pub following: &'a [u32],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text<'a>(resident: &'a [u32], following: &'a [u32]) -> DraftText<'a> {
        DraftText { prediction: &[], prompt_len: 4, placeholder: Some(99), resident, following }
    }

    #[test]
    fn each_token_of_the_sequence_is_indexed_once() {
        let mut drafts = Drafts::default();
        let none = || std::iter::empty();
        assert!(drafts.propose(Speculation::Auto, 4, none(), text(&[1, 2, 3, 4], &[9])).is_none());
        assert!(drafts.propose(Speculation::Auto, 4, none(), text(&[1, 2, 3, 4, 9], &[1, 2])).is_some());
        assert_eq!(drafts.tokens(), [3, 4, 9, 1]);
        assert!(drafts.propose(Speculation::Auto, 4, none(), text(&[1, 2, 3, 4, 9, 1, 2], &[3])).is_some());
        assert_eq!(drafts.tokens(), [4, 9, 1, 2]);
    }

    #[test]
    fn an_images_rows_are_not_drafted() {
        let mut drafts = Drafts::default();
        let mut drafted = |resident: &[u32]| {
            let offer = drafts.propose(Speculation::Ngram, 4, std::iter::empty(), text(resident, &[]));
            (offer.map(|offer| offer.len), drafts.tokens().to_vec())
        };
        let seen = [1, 2, 3, 99, 99, 99, 4, 1, 2];
        assert_eq!(drafted(&seen), (Some(1), vec![3]));
        assert_eq!(drafted(&[&seen[..], &[3]].concat()), (None, vec![]));
    }

    #[test]
    fn the_estimate_follows_what_is_accepted() {
        let mut drafts = Drafts::default();
        let mut acceptance = |num_accepted| {
            let resident = [1, 2, 3, 4, 5, 6, 1, 2];
            let found = drafts.propose(Speculation::Ngram, 4, [7].into_iter(), text(&resident, &[]));
            assert_eq!(drafts.tokens(), [3, 4, 5, 6], "foreseen tokens are another source");
            drafts.end(num_accepted, true);
            found.expect("a match").acceptance
        };
        let start = acceptance(4);
        let good: Vec<f64> = (0..20).map(|_| acceptance(4)).collect();
        let bad: Vec<f64> = (0..40).map(|_| acceptance(0)).collect();
        assert!(start < good[19] && good[19] > 0.9 && bad[39] < 0.1, "{start} {good:?} {bad:?}");
        assert_eq!(drafts.totals(), (61 * 4, 21 * 4));
    }

    #[test]
    fn foreseen_tokens_come_first() {
        let mut drafts = Drafts::default();
        let found = drafts.propose(Speculation::Auto, 2, [7, 8, 9].into_iter(), text(&[1, 2], &[]));
        assert!(found.is_some_and(|found| found.acceptance > 0.9));
        assert_eq!(drafts.tokens(), [7, 8]);
    }
}
