//! Decides how much of a prompt has to be computed: a pure function of token ids and counts.
//!
//! Rules: ids and images are compared, never text. A session's own rows are reusable to the token, indexed pages to the
//! page; the longer prefix wins. At least one token is always left to compute, because its logits start the
//! answer. The reasons of append-only resume (`new`, `exact_prefix`, `mismatch`, `equal`, `dirty`) keep their
//! meaning; where more is kept than append-only allows, a finer reason says so. Imports only the types of the
//! answer.

use crate::request::{Reuse, ReuseReason};
use llmctl_models::kv::Tokens;

/// Facts about a prompt's possible prefixes.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The session's tokens; empty for a new session or without one.
    pub tokens: Tokens<'a>,
    /// Leading tokens with KV in memory: all, or 0 after the pages were evicted.
    pub num_resident: usize,
    /// Leading tokens common to prompt and session that the session can be truncated to. Less than the common
    /// prefix if the model cannot resume there.
    pub num_kept: usize,
    /// Leading prompt tokens covered by indexed pages.
    pub num_indexed: usize,
    /// Of these, tokens that came from disk.
    pub num_restored: usize,
    /// True if a step failed under the session, so that its own rows must not be used.
    pub dirty: bool,
}

/// Split of a prompt; `keep + feed` is its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillPlan {
    /// Leading tokens whose rows are kept.
    pub keep: usize,
    /// Tokens to compute after them; at least 1.
    pub feed: usize,
    /// True if the kept rows are indexed pages rather than the session's own.
    pub from_index: bool,
    /// Kept tokens that came from disk.
    pub restored: usize,
    pub reason: ReuseReason,
    /// First position at which the session's tokens and the prompt differ or one of them ends. `None` if the
    /// prompt continues the session, or its adapters are others.
    pub first_difference: Option<usize>,
}

impl PrefillPlan {
    pub fn reuse(&self) -> Reuse {
        Reuse {
            cached_tokens: self.keep,
            restored_tokens: self.restored,
            reason: self.reason,
            first_difference: self.first_difference,
        }
    }
}

/// Decides how much of a prompt is kept. Panics if the prompt is empty.
pub fn plan_prefill<'a>(known: Known<'_>, prompt: impl Into<Tokens<'a>>) -> PrefillPlan {
    let prompt = prompt.into();
    assert!(!prompt.is_empty(), "a prompt has tokens");
    let most = prompt.len() - 1;
    let common = known.tokens.common_prefix(prompt);
    let own = if known.dirty { 0 } else { known.num_kept.min(common).min(most) };
    let indexed = known.num_indexed.min(most);
    let from_index = indexed > own;
    let keep = own.max(indexed);
    let reason = match () {
        () if from_index && known.num_restored > 0 => ReuseReason::Restored,
        () if from_index => ReuseReason::PrefixCache,
        () => own_reason(known, common, own, prompt),
    };
    let is_alike = known.tokens.adapters == prompt.adapters;
    let first_difference = (is_alike && common < known.tokens.len()).then_some(common);
    let restored = if from_index { known.num_restored.min(keep) } else { 0 };
    PrefillPlan { keep, feed: prompt.len() - keep, from_index, restored, reason, first_difference }
}

fn own_reason(known: Known<'_>, common: usize, own: usize, prompt: Tokens<'_>) -> ReuseReason {
    let len = known.tokens.len();
    let is_adapted_otherwise = known.tokens.adapters != prompt.adapters;
    match () {
        () if known.dirty => ReuseReason::Dirty,
        () if len == 0 => ReuseReason::New,
        () if is_adapted_otherwise => ReuseReason::Adapters,
        () if known.num_resident == 0 => ReuseReason::Evicted,
        () if common == len && common == prompt.len() => ReuseReason::Equal,
        () if common == len => ReuseReason::ExactPrefix,
        () if own > 0 => ReuseReason::PartialPrefix,
        () => ReuseReason::Mismatch,
    }
}

#[cfg(test)]
mod tests {
    use super::ReuseReason::{
        Dirty, Equal, Evicted, ExactPrefix, Mismatch, New, PartialPrefix, PrefixCache, Restored,
    };
    use super::*;

    const PROMPT: [u32; 5] = [1, 2, 3, 4, 5];

    fn common_prefix(known: &[u32], prompt: &[u32]) -> usize {
        Tokens::from(known).common_prefix(prompt.into())
    }

    fn resident(tokens: &[u32]) -> Known<'_> {
        let num_kept = common_prefix(tokens, &PROMPT);
        let (tokens, num_resident) = (tokens.into(), tokens.len());
        Known { tokens, num_resident, num_kept, num_indexed: 0, num_restored: 0, dirty: false }
    }

    #[track_caller]
    fn check(known: Known<'_>, prompt: &[u32], keep: usize, reason: ReuseReason, difference: Option<usize>) {
        let plan = plan_prefill(known, prompt);
        assert_eq!((plan.keep, plan.reason, plan.first_difference), (keep, reason, difference));
        assert_eq!(plan.keep + plan.feed, prompt.len());
    }

    /// The eight checks of the reference's plan; `ours` where rewinding keeps more than its reset does.
    #[test]
    fn the_references_checks() {
        let dirty = |tokens| Known { dirty: true, ..resident(tokens) };
        check(resident(&[]), &PROMPT, 0, New, None);
        check(resident(&[1, 2, 3]), &PROMPT, 3, ExactPrefix, None); // a suffix of two
        check(resident(&[1, 2, 3, 4]), &PROMPT, 4, ExactPrefix, None); // a suffix of one
        check(resident(&[1, 2, 9, 4]), &PROMPT, 2, PartialPrefix, Some(2)); // ours; theirs: mismatch, 0
        check(resident(&[1, 2, 3, 4, 5, 6]), &PROMPT, 4, PartialPrefix, Some(5)); // ours; theirs: mismatch, 0
        check(dirty(&[1, 2, 3]), &PROMPT, 0, Dirty, None);
        check(resident(&PROMPT), &PROMPT, 4, Equal, None); // ours, one token again; theirs: equal, 0
        check(dirty(&[]), &PROMPT, 0, Dirty, None);
    }

    #[test]
    fn without_rewinding_it_is_append_only_as_in_the_reference() {
        let fixed = |tokens: &'static [u32]| {
            let common = common_prefix(tokens, &PROMPT).min(PROMPT.len() - 1);
            Known { num_kept: if common == tokens.len() { common } else { 0 }, ..resident(tokens) }
        };
        check(fixed(&[1, 2, 3]), &PROMPT, 3, ExactPrefix, None);
        check(fixed(&[1, 2, 9, 4]), &PROMPT, 0, Mismatch, Some(2));
        check(fixed(&[1, 2, 3, 4, 5, 6]), &PROMPT, 0, Mismatch, Some(5));
        check(fixed(&PROMPT), &PROMPT, 0, Equal, None);
    }

    #[test]
    fn nothing_in_common_is_a_mismatch() {
        check(resident(&[9, 2, 3]), &PROMPT, 0, Mismatch, Some(0));
        check(resident(&[1]), &[1], 0, Equal, None);
        check(resident(&[1, 2]), &[1], 0, Mismatch, Some(1));
    }

    #[test]
    fn where_the_model_cannot_go_on_the_rows_are_cut_further_back() {
        let windowed = |num_kept| Known { num_kept, ..resident(&[1, 2, 3, 9]) };
        check(windowed(2), &PROMPT, 2, PartialPrefix, Some(3));
        check(Known { num_kept: 0, ..resident(&[1, 2, 3]) }, &PROMPT, 0, ExactPrefix, None);
    }

    #[test]
    fn the_index_serves_where_it_reaches_further() {
        let indexed = |tokens, num_indexed| Known { num_indexed, ..resident(tokens) };
        check(indexed(&[], 4), &PROMPT, 4, PrefixCache, None);
        check(indexed(&[], 5), &PROMPT, 4, PrefixCache, None); // one is left to compute
        check(indexed(&[1, 9], 3), &PROMPT, 3, PrefixCache, Some(1));
        check(indexed(&[1, 2, 3], 3), &PROMPT, 3, ExactPrefix, None); // as good: the session's own
        check(Known { num_restored: 2, ..indexed(&[], 2) }, &PROMPT, 2, Restored, None);
        check(Known { dirty: true, ..indexed(&[1, 2, 3], 2) }, &PROMPT, 2, PrefixCache, None);
        check(Known { num_kept: 0, ..indexed(&[1, 2, 9], 2) }, &PROMPT, 2, PrefixCache, Some(2));
    }

    #[test]
    fn an_evicted_session_still_knows_where_its_prompt_differs() {
        let evicted =
            |tokens, num_indexed| Known { num_resident: 0, num_kept: 0, num_indexed, ..resident(tokens) };
        check(evicted(&[1, 2, 3], 0), &PROMPT, 0, Evicted, None);
        check(evicted(&[1, 9, 3], 0), &PROMPT, 0, Evicted, Some(1));
        check(evicted(&[1, 2, 3], 2), &PROMPT, 2, PrefixCache, None);
    }

    proptest::proptest! {
        #[test]
        fn what_is_kept_is_a_true_prefix_and_something_is_left(
            tokens in proptest::collection::vec(0u32..3, 0..12),
            prompt in proptest::collection::vec(0u32..3, 1..12),
            num_indexed in 0usize..12, flags in proptest::bits::u8::masked(7),
        ) {
            let num_indexed = num_indexed.min(prompt.len());
            let num_resident = if flags & 4 == 0 { tokens.len() } else { 0 };
            let common = common_prefix(&tokens, &prompt).min(num_resident);
            let num_kept = if flags & 2 == 0 { common } else { common / 2 };
            let known = Known {
                num_resident, num_kept, num_indexed, dirty: flags & 1 != 0, ..resident(&tokens)
            };
            let plan = plan_prefill(known, &prompt);
            assert!(plan.feed > 0 && plan.keep + plan.feed == prompt.len());
            if plan.from_index {
                assert!(plan.keep <= num_indexed);
            } else {
                assert!(plan.keep <= num_resident && tokens[..plan.keep] == prompt[..plan.keep]);
                assert!(plan.keep == 0 || (!known.dirty && plan.keep <= num_kept));
            }
        }
    }
}
