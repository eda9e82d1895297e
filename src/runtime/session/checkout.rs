//! The content of a session that a request takes over, and how much of it the request's prompt can reuse.

use super::prefill::{Known, PrefillPlan, plan_prefill};
use crate::request::{Difference, Reuse};
use crate::sequence::{Resumed, Sequence};
use crate::spec::EngineSpec;
use llmctl_models::kv::{PAGE_TOKENS, PagePool, PageTable, TokenBuf, Tokens};

/// Content of a session while a request runs in it.
#[derive(Debug)]
pub struct CheckedOut {
    pub(super) sequence: Sequence,
    pub(super) evicted: TokenBuf,
    pub(super) dirty: bool,
}

impl CheckedOut {
    /// Returns empty content, for a request without a session.
    pub fn nothing(pool: &PagePool) -> Self {
        Self { sequence: Sequence::new(pool), evicted: TokenBuf::default(), dirty: false }
    }

    /// Returns a sequence with the longest reusable prefix of the prompt, from the session's rows or from
    /// indexed pages. If `without_disk` is given, indexed pages beyond so many tokens came from disk.
    pub fn resume(
        self,
        pool: &PagePool,
        spec: &EngineSpec,
        prompt: Tokens<'_>,
        without_disk: Option<usize>,
    ) -> Resumed {
        if !spec.config.warm_resume {
            let (mut sequence, reuse) = (Sequence::new(pool), Reuse::default());
            sequence.adapt(prompt.adapters);
            return Resumed { sequence, reuse, states_at: Vec::new(), difference: None, num_shared: 0 };
        }
        let most = prompt.len() - 1;
        // State that cannot be truncated is not in pages alone.
        let indexable = if spec.model.can_rewind { prompt } else { Tokens::default() };
        let (indexed, num_known) = PageTable::from_index(pool, indexable, most);
        let num_resident = self.sequence.position();
        let own = self.sequence.resident().content();
        let tokens = if num_resident > 0 { own } else { self.evicted.as_tokens() };
        let known = Known {
            tokens,
            num_resident,
            num_kept: self.num_kept(spec, tokens.common_prefix(prompt).min(most)),
            num_indexed: indexed.len(),
            num_restored: without_disk.map_or(0, |without| indexed.len().saturating_sub(without)),
            dirty: self.dirty,
        };
        let plan = plan_prefill(known, prompt);
        let difference = Difference::between(tokens, prompt);
        let num_shared = if tokens.is_empty() && plan.from_index { plan.keep } else { 0 };
        let mut sequence = self.cut_to(plan, indexed, prompt);
        sequence.adapt(prompt.adapters);
        // Only if needed: chunks of the prompt end at these positions, and fewer chunks are faster.
        let has_state = sequence.resident().table().has_state();
        let states_at = if has_state { states_at(num_known, most, plan.keep) } else { Vec::new() };
        Resumed { sequence, reuse: plan.reuse(), states_at, difference, num_shared }
    }

    /// Returns how many of the `common` tokens the session can be truncated to.
    fn num_kept(&self, spec: &EngineSpec, common: usize) -> usize {
        let num_resident = self.sequence.position();
        match common.min(num_resident) {
            all if all == num_resident => all,
            part if spec.model.can_rewind => self.sequence.resident().resumable(part),
            _ => 0,
        }
    }

    fn cut_to(mut self, plan: PrefillPlan, mut indexed: PageTable, prompt: Tokens<'_>) -> Sequence {
        if plan.from_index {
            debug_assert_eq!(indexed.len(), plan.keep, "no more was asked of the index than may be kept");
            indexed.truncate(prompt, plan.keep);
            return Sequence::resume(prompt, indexed);
        }
        if !self.sequence.truncate(plan.keep) {
            self.sequence.reset();
        }
        self.sequence
    }
}

/// Returns where recurrent layers save states for later prompts: at the prompt's end, which the next turn
/// extends, and where it parts from indexed prompts, which had no state there.
fn states_at(num_known: usize, most: usize, keep: usize) -> Vec<usize> {
    let [branch, end] = [num_known, most].map(|len| len / PAGE_TOKENS * PAGE_TOKENS);
    let mut lens: Vec<usize> = [branch, end].into_iter().filter(|&len| len > keep).collect();
    lens.dedup();
    lens
}
