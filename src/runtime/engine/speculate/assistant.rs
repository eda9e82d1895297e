//! Drafts of the model's assistant, which computes with the model's own KV: it needs the last token of a text
//! and the hidden state of the one before it, and reads no text.
//!
//! Invariants: as for a draft model, what it costs is measured and spent only if the account allows it, and
//! it fails no request.

use super::costs::{MAX_ROWS, StepCosts};
use super::draft_model::{Followed, StepClock};
use super::{ComputingDrafter, DraftProgress};
use crate::request::{DraftStop, ModelDrafter, Token};
use crate::step::Executor;
use llmctl_base::error::Result;
use llmctl_base::notice::Notice;
use llmctl_models::kv::PageTable;

/// The assistant of the model in an [`Executor`], and what its steps cost.
pub struct AssistantDrafter {
    steps: StepCosts,
    clock: StepClock,
    /// True after a step has failed. The assistant drafts nothing more then.
    has_failed: bool,
    notice: Option<Notice>,
}

/// A draft that a generation gets.
struct AssistedDraft<'a> {
    table: &'a PageTable,
    tokens: &'a mut Vec<u32>,
    progress: DraftProgress,
    /// The last token, and the hidden state of the one before it.
    token: u32,
    hidden: Vec<f32>,
}

impl AssistantDrafter {
    /// Prepares the assistant of a model. What its steps cost is not known before the first draft.
    pub fn new(clock: StepClock) -> Self {
        Self { steps: StepCosts::default(), clock, has_failed: false, notice: None }
    }

    /// Runs one step, and learns what it costs. Returns each row's likeliest token with its log-probability.
    fn step(
        &mut self,
        executor: &mut Executor,
        rows: &[(u32, &PageTable)],
        hidden: &[f32],
    ) -> Result<Vec<(u32, f32)>> {
        let begun = (self.clock)();
        let told = executor.predict(rows, hidden)?;
        if rows.len() <= MAX_ROWS {
            self.steps.learn(rows.len(), rows.len(), (self.clock)().saturating_sub(begun));
        }
        let logprob = |token: &Token| token.logprob.as_ref().map_or(0.0, |of| of.logprob);
        Ok(told.iter().map(|token| (token.id, logprob(token))).collect())
    }

    /// Computes one token of every draft that continues.
    fn advance(
        &mut self,
        executor: &mut Executor,
        drafts: &mut [AssistedDraft<'_>],
        least: f64,
    ) -> Result<()> {
        let mut drafts: Vec<_> = drafts.iter_mut().filter(|draft| draft.progress.goes_on()).collect();
        let rows: Vec<_> = drafts.iter().map(|draft| (draft.token, draft.table)).collect();
        let hidden: Vec<f32> = drafts.iter().flat_map(|draft| &draft.hidden).copied().collect();
        let told = self.step(executor, &rows, &hidden)?;
        for (row, (draft, (token, logprob))) in drafts.iter_mut().zip(told).enumerate() {
            draft.hidden = executor.hidden(row..row + 1).to_vec();
            if draft.progress.takes(logprob, least) {
                draft.tokens.push(token);
            }
            draft.token = token;
        }
        Ok(())
    }
}

impl ComputingDrafter for AssistantDrafter {
    fn drafter(&self) -> ModelDrafter {
        ModelDrafter::Assistant
    }

    fn take_notice(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    fn cost(&self, num_rows: usize) -> f64 {
        self.steps.of(num_rows)
    }

    fn prepare(&mut self, followed: &mut Followed<'_>, _: &mut Option<f64>) -> Option<(usize, usize)> {
        if self.has_failed {
            followed.track.end(DraftStop::Failed);
        }
        let is_known = followed.track.align_block(followed.text) > 0
            && followed.table.is_some_and(|table| table.len() + 1 == followed.text.len());
        followed.track.skip_unread(1);
        (followed.track.stop().is_none() && followed.most > 0 && is_known).then_some((1, followed.most))
    }

    fn draft(&mut self, executor: &mut Executor, asked: Vec<(Followed<'_>, usize)>, least: f64) -> f64 {
        let begun = (self.clock)();
        let mut tracks = Vec::new();
        let mut drafts = Vec::new();
        for (followed, len) in asked {
            let Followed { track, text, table: Some(table), draft, .. } = followed else { continue };
            let (tokens, hidden) = track.unread(text, 1);
            tracks.push(track);
            let Some(&token) = tokens.first() else { continue };
            drafts.push(AssistedDraft {
                table,
                tokens: draft,
                progress: DraftProgress::new(len),
                token,
                hidden,
            });
        }
        while drafts.iter().any(|draft| draft.progress.goes_on()) {
            if let Err(error) = self.advance(executor, &mut drafts, least) {
                self.has_failed = true;
                self.notice = Some(Notice::DrafterFailed {
                    drafter: ModelDrafter::Assistant.name(),
                    reason: error.to_string(),
                });
                tracks.iter_mut().for_each(|track| track.end(DraftStop::Failed));
                break;
            }
        }
        (self.clock)().saturating_sub(begun).as_secs_f64()
    }
}
