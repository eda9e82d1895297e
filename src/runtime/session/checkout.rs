//! What a session hands to the request that runs in it, and how much of it the request's prompt can use.

use super::prefill::{Known, PrefillPlan, common_prefix, plan_prefill};
use crate::runtime::kv::{PAGE_TOKENS, PagePool, PageTable};
use crate::runtime::request::{Difference, Reuse};
use crate::runtime::sequence::{Resumed, Sequence};
use crate::runtime::spec::EngineSpec;

/// What a session brings to a request.
#[derive(Debug)]
pub struct CheckedOut {
    pub(super) sequence: Sequence,
    pub(super) evicted: Vec<u32>,
    pub(super) dirty: bool,
}

impl CheckedOut {
    /// For a request without a session.
    pub fn nothing(pool: &PagePool) -> Self {
        Self { sequence: Sequence::new(pool), evicted: Vec::new(), dirty: false }
    }

    /// A sequence that holds as much of the prompt as is to be had, from the session's rows or from indexed pages; of
    /// those, all beyond the first `without_disk` tokens came from disk, when that is given.
    pub fn resume(
        self,
        pool: &PagePool,
        spec: &EngineSpec,
        prompt: &[u32],
        without_disk: Option<usize>,
    ) -> Resumed {
        if !spec.config.warm_resume {
            let (sequence, reuse) = (Sequence::new(pool), Reuse::default());
            return Resumed { sequence, reuse, states_at: Vec::new(), difference: None };
        }
        let most = prompt.len() - 1;
        // State that cannot be cut back does not lie in pages alone.
        let indexable = if spec.model.can_rewind { prompt } else { &[] };
        let (indexed, num_known) = PageTable::from_index(pool, indexable, most);
        let num_resident = self.sequence.position();
        let own = self.sequence.resident().tokens();
        let tokens = if num_resident > 0 { own } else { &self.evicted };
        let known = Known {
            tokens,
            num_resident,
            num_kept: self.num_kept(spec, common_prefix(tokens, prompt).min(most)),
            num_indexed: indexed.len(),
            num_restored: without_disk.map_or(0, |without| indexed.len().saturating_sub(without)),
            dirty: self.dirty,
        };
        let plan = plan_prefill(known, prompt);
        let difference = Difference::between(tokens, prompt);
        let sequence = self.cut_to(plan, indexed, prompt);
        // Only for what needs states: a prompt's chunks end there, and the fewer there are the faster.
        let has_state = sequence.resident().table().has_state();
        let states_at = if has_state { states_at(num_known, most, plan.keep) } else { Vec::new() };
        Resumed { sequence, reuse: plan.reuse(), states_at, difference }
    }

    /// How many of the `common` tokens the session's rows can be cut back to.
    fn num_kept(&self, spec: &EngineSpec, common: usize) -> usize {
        let num_resident = self.sequence.position();
        match common.min(num_resident) {
            all if all == num_resident => all,
            part if spec.model.can_rewind => self.sequence.resident().resumable(part),
            _ => 0,
        }
    }

    fn cut_to(mut self, plan: PrefillPlan, mut indexed: PageTable, prompt: &[u32]) -> Sequence {
        if plan.from_index {
            debug_assert_eq!(indexed.len(), plan.keep, "no more was asked of the index than may be kept");
            indexed.truncate(prompt, plan.keep);
            return Sequence::resume(&prompt[..plan.keep], indexed);
        }
        if !self.sequence.truncate(plan.keep) {
            self.sequence.reset();
        }
        self.sequence
    }
}

/// Where recurrent layers leave states for later prompts: at the end of this prompt, which the next turn begins with, and
/// where it parts from what others have asked, which they had no state for.
fn states_at(num_known: usize, most: usize, keep: usize) -> Vec<usize> {
    let [branch, end] = [num_known, most].map(|len| len / PAGE_TOKENS * PAGE_TOKENS);
    let mut lens: Vec<usize> = [branch, end].into_iter().filter(|&len| len > keep).collect();
    lens.dedup();
    lens
}
