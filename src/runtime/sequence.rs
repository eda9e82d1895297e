//! One sequence: its tokens, the pages of their KV, and the pending token, which was sampled and comes next.
//!
//! Invariants: tokens, images and KV rows change together, in [`Resident`], by `extend` and `truncate` only. The
//! pending token becomes resident when it is fed; a token that ends the generation never does. A sequence
//! whose rows may not match its tokens, because a step failed, is poisoned until `reset`. Drafted tokens
//! have rows behind those of the known tokens, until `confirm` makes them known or `end_draft` removes
//! them; nothing is published before that, because recurrent states have taken in no drafted row by then.
//! This file knows neither sessions nor requests.

use super::request::{Difference, Reuse, Token};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;
use llmctl_models::kv::table::PoolExhausted;
use llmctl_models::kv::{PAGE_TOKENS, PageCopy, PagePool, PageTable, TokenBuf, Tokens};

/// Tokens with the images among them, and the pages of their KV rows, always equally many.
#[derive(Debug)]
pub struct Resident {
    tokens: TokenBuf,
    table: PageTable,
}

impl Resident {
    fn new(pool: &PagePool) -> Self {
        Self { tokens: TokenBuf::default(), table: PageTable::new(pool) }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens.ids
    }

    /// Returns the tokens with the images among them.
    pub fn content(&self) -> Tokens<'_> {
        self.tokens.as_tokens()
    }

    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Appends `tokens`, those of `images` that begin among them, and room for their rows. The copies returned must be made
    /// before the rows are written.
    ///
    /// # Errors
    /// [`PoolExhausted`], with nothing changed.
    pub fn extend(&mut self, tokens: &[u32], images: &[ImageSpan]) -> Result<Vec<PageCopy>, PoolExhausted> {
        let copies = self.table.extend(tokens.len())?;
        self.tokens.extend(tokens, images);
        Ok(copies)
    }

    /// Keeps the first `len` tokens. Returns false, with nothing changed, if the state needed to resume there
    /// is gone. Panics if there are fewer.
    pub fn truncate(&mut self, len: usize) -> bool {
        let can = self.table.truncate(&self.tokens, len);
        if can {
            self.tokens.truncate(len);
        }
        can
    }

    /// Keeps the first `len` tokens, where the others were drafted; see [`PageTable::drop_drafted`].
    fn drop_drafted(&mut self, len: usize) {
        self.table.drop_drafted(len);
        self.tokens.truncate(len);
    }

    /// Returns the largest length, at most `len`, that `truncate` accepts.
    pub fn resumable(&self, len: usize) -> usize {
        self.table.resumable(&self.tokens, len)
    }
}

/// A sequence between steps.
#[derive(Debug)]
pub struct Sequence {
    resident: Resident,
    /// Draft of this step; `None` between steps.
    draft: Option<StepDraft>,
    pending: Option<Token>,
    turn: TurnStart,
    /// Mirostat's bound after the last token of the turn.
    surprise_bound: Option<f32>,
    /// Length at which this turn's answer last saved a recurrent state.
    last_state: Option<usize>,
    poisoned: bool,
}

/// Progress of a step's drafted tokens, which were fed behind the known ones.
#[derive(Debug, Clone, Copy)]
struct StepDraft {
    /// Number of the last resident tokens that are still drafted.
    num_left: usize,
    num_confirmed: usize,
}

/// Parameters of a turn, fixed when its prompt starts.
#[derive(Debug, Clone, Default)]
pub struct TurnStart {
    /// Position of the first generated token.
    pub generated_from: usize,
    pub seed: u64,
    pub logprobs: Option<usize>,
    /// Ascending lengths, in whole pages, at which recurrent layers save a state.
    pub states_at: Vec<usize>,
}

/// Start of a request.
#[derive(Debug)]
pub struct Resumed {
    /// Holds a prefix of the prompt.
    pub sequence: Sequence,
    pub reuse: Reuse,
    /// See [`TurnStart::states_at`].
    pub states_at: Vec<usize>,
    /// First difference of session and prompt.
    pub difference: Option<Difference>,
    /// Leading tokens that a new session takes over from another one, or from disk.
    pub num_shared: usize,
}

impl Sequence {
    pub fn new(pool: &PagePool) -> Self {
        Self::over(Resident::new(pool))
    }

    /// Creates a sequence with rows in `table` of its first tokens. Panics if there are fewer tokens than rows.
    pub fn resume<'a>(tokens: impl Into<Tokens<'a>>, table: PageTable) -> Self {
        let Tokens { ids, images, adapters } = tokens.into();
        let mut resident = TokenBuf { adapters: adapters.to_vec(), ..TokenBuf::default() };
        resident.extend(&ids[..table.len()], images);
        Self::over(Resident { tokens: resident, table })
    }

    fn over(resident: Resident) -> Self {
        let turn = TurnStart::default();
        let (surprise_bound, last_state) = (None, None);
        Self { resident, draft: None, pending: None, turn, surprise_bound, last_state, poisoned: false }
    }

    /// Returns another sequence over the same pages, without a pending token. This one must not be poisoned.
    pub fn fork(&self) -> Self {
        debug_assert!(!self.poisoned);
        Self::resume(self.resident.content(), self.resident.table.fork())
    }

    /// Computes the rows with these adapters from here on. Rows of others must not be resident.
    pub fn adapt(&mut self, adapters: &[AdapterUse]) {
        debug_assert!(self.resident.tokens().is_empty() || self.resident.tokens.adapters == adapters);
        self.resident.tokens.adapters = adapters.to_vec();
    }

    /// Returns the number of resident tokens, without drafted ones.
    pub fn position(&self) -> usize {
        self.resident.tokens().len() - self.draft.map_or(0, |draft| draft.num_left)
    }

    /// Returns the resident tokens without drafted ones.
    pub fn known(&self) -> &[u32] {
        &self.resident.tokens()[..self.position()]
    }

    pub fn resident(&self) -> &Resident {
        &self.resident
    }

    /// Returns the token that was sampled last and is not yet fed.
    pub fn pending(&self) -> Option<&Token> {
        self.pending.as_ref()
    }

    pub fn turn(&self) -> &TurnStart {
        &self.turn
    }

    /// Returns Mirostat's bound; `None` before the first draw of a turn.
    pub fn surprise_bound(&self) -> Option<f32> {
        self.surprise_bound
    }

    pub fn set_surprise_bound(&mut self, bound: Option<f32>) {
        self.surprise_bound = bound;
    }

    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Starts a turn and drops the pending token.
    pub fn begin_turn(&mut self, turn: TurnStart) {
        self.pending = None;
        self.last_state = None;
        self.surprise_bound = None;
        self.turn = turn;
    }

    /// Returns how many of the next `rows` tokens one step may feed.
    pub fn rows_allowed(&self, rows: usize) -> usize {
        let position = self.position();
        let next = self.turn.states_at.iter().copied().find(|&len| len > position);
        // Within an answer, a state is saved at the end of each page, even if forced tokens come in chunks.
        let answers = self.resident.table.has_state() && position >= self.turn.generated_from;
        let page_end = answers.then_some((position / PAGE_TOKENS + 1) * PAGE_TOKENS);
        next.into_iter().chain(page_end).fold(rows, |rows, len| rows.min(len - position))
    }

    /// Takes over published pages of `prompt`, up to `most` tokens. Returns how many tokens were added.
    pub fn catch_up(&mut self, prompt: Tokens<'_>, most: usize) -> usize {
        let had = self.position();
        if !self.resident.table.catch_up(prompt, most) {
            return 0;
        }
        let len = self.resident.table.len();
        self.resident.tokens.extend(&prompt.ids[had..len], prompt.images);
        len - had
    }

    /// Drops the pending token at the end of a generation.
    pub fn clear_pending(&mut self) {
        self.pending = None;
    }

    /// Appends tokens whose rows are computed next, the last `num_drafted` of them drafted, and those of `images` that begin
    /// among them; the sequence is poisoned until `settle`. The copies returned must be made first.
    ///
    /// # Errors
    /// [`PoolExhausted`], with nothing changed.
    pub fn begin_feed(
        &mut self,
        tokens: &[u32],
        images: &[ImageSpan],
        num_drafted: usize,
    ) -> Result<Vec<PageCopy>, PoolExhausted> {
        debug_assert!(self.draft.is_none(), "the last step's draft has ended");
        let copies = self.resident.extend(tokens, images)?;
        self.draft = (num_drafted > 0).then_some(StepDraft { num_left: num_drafted, num_confirmed: 0 });
        self.pending = None;
        self.poisoned = true;
        Ok(copies)
    }

    /// Completes a feed: sets the token that was sampled, if any, and publishes full pages unless a draft is to be
    /// ended first.
    pub fn settle(&mut self, pending: Option<Token>) {
        if self.draft.is_none() {
            self.publish();
        }
        self.pending = pending;
        self.poisoned = false;
    }

    fn publish(&mut self) {
        self.resident.table.publish(&self.resident.tokens);
        if self.resident.table.has_state() {
            self.leave_state();
        }
    }

    /// Returns how many leading ones of `tokens` are the next drafted tokens.
    pub fn num_foreseen(&self, tokens: &[u32]) -> usize {
        let drafted = &self.resident.tokens()[self.position()..];
        drafted.iter().zip(tokens).take_while(|(drafted, token)| drafted == token).count()
    }

    /// Makes the next `count` drafted tokens known; the sequence is poisoned until `settle`. Panics if fewer
    /// are drafted.
    pub fn confirm(&mut self, count: usize) {
        let draft = self.draft.as_mut().filter(|draft| count <= draft.num_left);
        let draft = draft.expect("only drafted tokens can be confirmed");
        draft.num_left -= count;
        draft.num_confirmed += count;
        self.pending = None;
        self.poisoned = true;
    }

    /// Returns how many drafted tokens of this step were confirmed: so many the sequence's states must take in before
    /// `end_draft`.
    pub fn num_confirmed(&self) -> usize {
        self.draft.map_or(0, |draft| draft.num_confirmed)
    }

    /// Removes the drafted tokens that are left and their rows, and publishes what `settle` has not. Does nothing if the
    /// sequence is poisoned.
    pub fn end_draft(&mut self) {
        if self.draft.is_some() && !self.poisoned {
            self.resident.drop_drafted(self.position());
            self.draft = None;
            self.publish();
        }
    }

    /// Saves a recurrent state where the turn asks for one, and one within the answer, which replaces the
    /// previous one.
    fn leave_state(&mut self) {
        let Resident { tokens, table } = &mut self.resident;
        let (tokens, len) = (&*tokens, tokens.ids.len());
        if self.turn.states_at.contains(&len) {
            table.publish_state(tokens);
        } else if len >= self.turn.generated_from && len.is_multiple_of(PAGE_TOKENS) {
            // A state that another sequence published is not this one's to remove.
            let own = table.publish_state(tokens).then_some(len);
            if let Some(last) = std::mem::replace(&mut self.last_state, own) {
                table.forget_state(tokens, last);
            }
        }
    }

    /// Poisons the sequence; only `reset` is legal from here on.
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    /// Keeps the first `len` tokens and drops the pending one. Returns false, with nothing changed, if the
    /// sequence cannot resume there. Panics if fewer are resident.
    pub fn truncate(&mut self, len: usize) -> bool {
        let can = self.resident.truncate(len);
        if can {
            self.draft = None;
            self.pending = None;
            self.last_state = self.last_state.filter(|&last| last <= len);
        }
        can
    }

    /// Empties the sequence.
    pub fn reset(&mut self) {
        let is_empty = self.truncate(0);
        debug_assert!(is_empty, "nothing is needed to begin anew");
        self.turn = TurnStart::default();
        self.poisoned = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_models::kv::{KvGroup, KvKind};

    /// Pages of one byte.
    fn pool(capacity: usize) -> PagePool {
        PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], capacity)
    }

    #[test]
    fn tokens_and_rows_stay_equal_also_when_the_pool_is_exhausted() {
        let pool = pool(1);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1, 2, 3], &[], 0).expect("room");
        sequence.settle(Some(Token { id: 9, logprob: None }));
        assert!(sequence.begin_feed(&[4; PAGE_TOKENS], &[], 0).is_err());
        assert_eq!(sequence.resident().tokens(), [1, 2, 3]);
        assert_eq!(sequence.resident().table().len(), 3);
        assert_eq!(sequence.pending().map(|token| token.id), Some(9), "a refused feed changes nothing");
        assert!(!sequence.is_poisoned());
        assert!(sequence.truncate(1));
        assert_eq!((sequence.resident().tokens(), sequence.resident().table().len()), (&[1][..], 1));
        assert!(sequence.pending().is_none());
    }

    #[test]
    fn drafted_rows_are_published_only_when_they_are_confirmed() {
        let pool = pool(8);
        let mut sequence = Sequence::new(&pool);
        let tokens: Vec<u32> = (0..2 * PAGE_TOKENS as u32).collect();
        sequence.begin_feed(&tokens, &[], PAGE_TOKENS + 2).expect("room");
        sequence.settle(Some(Token { id: 30, logprob: None }));
        assert_eq!((sequence.position(), pool.num_indexed()), (PAGE_TOKENS - 2, 0));
        assert_eq!(sequence.num_foreseen(&[PAGE_TOKENS as u32 - 2, 0]), 1, "the second is another");
        sequence.confirm(3);
        sequence.settle(Some(Token { id: 33, logprob: None }));
        assert_eq!((sequence.position(), pool.num_indexed()), (PAGE_TOKENS + 1, 0));
        assert_eq!(sequence.num_confirmed(), 3);
        sequence.end_draft();
        assert_eq!((sequence.known(), pool.num_indexed()), (&tokens[..PAGE_TOKENS + 1], 1));
        assert_eq!(sequence.resident().tokens().len(), PAGE_TOKENS + 1);
        assert_eq!(sequence.pending().map(|token| token.id), Some(33));
        assert_eq!(pool.free_bytes(), 6);
    }

    #[test]
    fn a_feed_that_never_settles_poisons_until_reset() {
        let pool = pool(2);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1], &[], 0).expect("room");
        assert!(sequence.is_poisoned());
        sequence.reset();
        assert!(!sequence.is_poisoned());
        assert_eq!((sequence.position(), pool.free_bytes()), (0, 2));
    }
}
