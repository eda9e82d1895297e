//! One sequence: the tokens it holds, the pages their KV lies in, and the token that was sampled to come next.
//!
//! Invariants: tokens and KV rows change together, in [`Resident`], by `extend` and `truncate` only. The pending token
//! is not resident: it becomes so when it is fed, and a token that ends a generation never is. A sequence whose rows
//! may not match its tokens (a step failed under it) is poisoned until `reset`.
//! Sessions and requests both are sequences; this file knows neither.

use super::kv::table::PoolExhausted;
use super::kv::{PAGE_TOKENS, PageCopy, PagePool, PageTable};
use super::request::{Difference, Reuse, Token};

/// Tokens and the pages that hold their KV rows, always equally many.
#[derive(Debug)]
pub struct Resident {
    tokens: Vec<u32>,
    table: PageTable,
}

impl Resident {
    fn new(pool: &PagePool) -> Self {
        Self { tokens: Vec::new(), table: PageTable::new(pool) }
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Appends `tokens` and the places for their rows. Copies returned are to be made before they are written.
    ///
    /// # Errors
    /// [`PoolExhausted`]; nothing has changed then.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Vec<PageCopy>, PoolExhausted> {
        let copies = self.table.extend(tokens.len())?;
        self.tokens.extend_from_slice(tokens);
        Ok(copies)
    }

    /// Keeps the first `len` tokens, if what is needed to go on from there is still to be had. Panics when there are fewer.
    pub fn truncate(&mut self, len: usize) -> bool {
        let can = self.table.truncate(&self.tokens, len);
        if can {
            self.tokens.truncate(len);
        }
        can
    }

    /// The largest length, at most `len`, that `truncate` can cut to.
    pub fn resumable(&self, len: usize) -> usize {
        self.table.resumable(&self.tokens, len)
    }
}

/// A sequence between steps.
#[derive(Debug)]
pub struct Sequence {
    resident: Resident,
    pending: Option<Token>,
    turn: TurnStart,
    /// Where this turn's answer last left a state to come back to.
    last_state: Option<usize>,
    poisoned: bool,
}

/// What is fixed when a prompt is put to a sequence, and holds for the tokens generated after it.
#[derive(Debug, Clone, Default)]
pub struct TurnStart {
    /// Position of the first generated token.
    pub generated_from: usize,
    pub seed: u64,
    pub logprobs: Option<usize>,
    /// Lengths, of whole pages, at which recurrent layers leave a state to come back to; ascending.
    pub states_at: Vec<usize>,
}

/// What a request begins with.
#[derive(Debug)]
pub struct Resumed {
    /// Holds the beginning of the prompt.
    pub sequence: Sequence,
    pub reuse: Reuse,
    /// As in [`TurnStart`].
    pub states_at: Vec<usize>,
    /// Where the session and the prompt part.
    pub difference: Option<Difference>,
}

impl Sequence {
    pub fn new(pool: &PagePool) -> Self {
        Self::over(Resident::new(pool))
    }

    /// Holds `tokens`, whose rows lie in `table`. Panics when they are not equally many.
    pub fn resume(tokens: &[u32], table: PageTable) -> Self {
        assert_eq!(tokens.len(), table.len(), "tokens and rows must agree");
        Self::over(Resident { tokens: tokens.to_vec(), table })
    }

    fn over(resident: Resident) -> Self {
        let turn = TurnStart::default();
        Self { resident, pending: None, turn, last_state: None, poisoned: false }
    }

    /// Another sequence over the same pages, with nothing pending. The original must not be poisoned.
    pub fn fork(&self) -> Self {
        debug_assert!(!self.poisoned);
        Self::resume(self.resident.tokens(), self.resident.table.fork())
    }

    /// Tokens resident.
    pub fn position(&self) -> usize {
        self.resident.tokens.len()
    }

    pub fn resident(&self) -> &Resident {
        &self.resident
    }

    /// The token sampled last and not yet fed.
    pub fn pending(&self) -> Option<&Token> {
        self.pending.as_ref()
    }

    pub fn turn(&self) -> &TurnStart {
        &self.turn
    }

    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Announces a prompt: a pending token of the turn before is forgotten.
    pub fn begin_turn(&mut self, turn: TurnStart) {
        self.pending = None;
        self.last_state = None;
        self.turn = turn;
    }

    /// As many of the next `rows` tokens as may be fed in one step.
    pub fn rows_allowed(&self, rows: usize) -> usize {
        let position = self.position();
        let next = self.turn.states_at.iter().copied().find(|&len| len > position);
        // Within an answer a state is left at the end of each page, also where forced tokens come in chunks.
        let answers = self.resident.table.has_state() && position >= self.turn.generated_from;
        let page_end = answers.then_some((position / PAGE_TOKENS + 1) * PAGE_TOKENS);
        next.into_iter().chain(page_end).fold(rows, |rows, len| rows.min(len - position))
    }

    /// Takes over what others have computed of `prompt`, at most `most` tokens of it; how many more are resident now.
    pub fn catch_up(&mut self, prompt: &[u32], most: usize) -> usize {
        let had = self.position();
        if !self.resident.table.catch_up(prompt, most) {
            return 0;
        }
        let len = self.resident.table.len();
        self.resident.tokens.extend_from_slice(&prompt[had..len]);
        len - had
    }

    /// Forgets the pending token: the generation ends here.
    pub fn clear_pending(&mut self) {
        self.pending = None;
    }

    /// Appends tokens whose rows are about to be computed; until `settle` the sequence counts as poisoned. Copies
    /// returned are to be made first.
    ///
    /// # Errors
    /// [`PoolExhausted`]; nothing has changed then.
    pub fn begin_feed(&mut self, tokens: &[u32]) -> Result<Vec<PageCopy>, PoolExhausted> {
        let copies = self.resident.extend(tokens)?;
        self.pending = None;
        self.poisoned = true;
        Ok(copies)
    }

    /// The rows of the last feed are computed, so their full pages may be shared; `pending` is what was sampled after
    /// them, if anything.
    pub fn settle(&mut self, pending: Option<Token>) {
        self.resident.table.publish(&self.resident.tokens);
        if self.resident.table.has_state() {
            self.leave_state();
        }
        self.pending = pending;
        self.poisoned = false;
    }

    /// A state to come back to: where the turn asks for one, and one within the answer, which moves on with it.
    fn leave_state(&mut self) {
        let Resident { tokens, table } = &mut self.resident;
        let len = tokens.len();
        if self.turn.states_at.contains(&len) {
            table.publish_state(tokens);
        } else if len >= self.turn.generated_from && len.is_multiple_of(PAGE_TOKENS) {
            // What others have announced is theirs to take back.
            let own = table.publish_state(tokens).then_some(len);
            if let Some(last) = std::mem::replace(&mut self.last_state, own) {
                table.forget_state(tokens, last);
            }
        }
    }

    /// Only `reset` is legal from here on.
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    /// Keeps the first `len` tokens and forgets the pending one; false, and nothing has changed, when there is no going on
    /// from there. Panics when fewer are resident.
    pub fn truncate(&mut self, len: usize) -> bool {
        let can = self.resident.truncate(len);
        if can {
            self.pending = None;
            self.last_state = self.last_state.filter(|&last| last <= len);
        }
        can
    }

    /// Holds nothing, as new.
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
    use crate::runtime::kv::{KvGroup, KvKind};

    /// Pages of one byte.
    fn pool(capacity: usize) -> PagePool {
        PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], capacity)
    }

    #[test]
    fn tokens_and_rows_stay_equal_also_when_the_pool_is_exhausted() {
        let pool = pool(1);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1, 2, 3]).expect("room");
        sequence.settle(Some(Token { id: 9, logprob: None }));
        assert!(sequence.begin_feed(&[4; PAGE_TOKENS]).is_err());
        assert_eq!(sequence.resident().tokens(), [1, 2, 3]);
        assert_eq!(sequence.resident().table().len(), 3);
        assert_eq!(sequence.pending().map(|token| token.id), Some(9), "a refused feed changes nothing");
        assert!(!sequence.is_poisoned());
        assert!(sequence.truncate(1));
        assert_eq!((sequence.resident().tokens(), sequence.resident().table().len()), (&[1][..], 1));
        assert!(sequence.pending().is_none());
    }

    #[test]
    fn a_feed_that_never_settles_poisons_until_reset() {
        let pool = pool(2);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1]).expect("room");
        assert!(sequence.is_poisoned());
        sequence.reset();
        assert!(!sequence.is_poisoned());
        assert_eq!((sequence.position(), pool.free_bytes()), (0, 2));
    }
}
