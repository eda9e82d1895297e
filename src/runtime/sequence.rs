//! One sequence: the tokens it holds, the pages their KV lies in, and the token that was sampled to come next.
//!
//! Invariants: tokens and KV rows change together, in [`Resident`], by `extend` and `truncate` only. The pending token
//! is not resident: it becomes so when it is fed, and a token that ends a generation never is. A sequence whose rows
//! may not match its tokens (a step failed under it) is poisoned until `reset`.
//! Sessions and requests both are sequences; this file knows neither.

use super::kv::table::PoolExhausted;
use super::kv::{PageCopy, PagePool, PageTable};
use super::request::Token;

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

    /// Appends `tokens` and the places for their rows. A copy returned is to be made before they are written.
    ///
    /// # Errors
    /// [`PoolExhausted`]; nothing has changed then.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Option<PageCopy>, PoolExhausted> {
        let copy = self.table.extend(tokens.len())?;
        self.tokens.extend_from_slice(tokens);
        Ok(copy)
    }

    /// Keeps the first `len` tokens. Panics when there are fewer.
    pub fn truncate(&mut self, len: usize) {
        self.table.truncate(len);
        self.tokens.truncate(len);
    }
}

/// A sequence between steps.
#[derive(Debug)]
pub struct Sequence {
    resident: Resident,
    pending: Option<Token>,
    turn: TurnStart,
    poisoned: bool,
}

/// What is fixed when a prompt is put to a sequence, and holds for the tokens generated after it.
#[derive(Debug, Clone, Default)]
pub struct TurnStart {
    /// Position of the first generated token.
    pub generated_from: usize,
    pub seed: u64,
    pub logprobs: Option<usize>,
}

impl Sequence {
    pub fn new(pool: &PagePool) -> Self {
        Self { resident: Resident::new(pool), pending: None, turn: TurnStart::default(), poisoned: false }
    }

    /// Holds `tokens`, whose rows lie in `table`. Panics when they are not equally many.
    pub fn resume(tokens: &[u32], table: PageTable) -> Self {
        assert_eq!(tokens.len(), table.len(), "tokens and rows must agree");
        let resident = Resident { tokens: tokens.to_vec(), table };
        Self { resident, pending: None, turn: TurnStart::default(), poisoned: false }
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
        self.turn = turn;
    }

    /// Forgets the pending token: the generation ends here.
    pub fn clear_pending(&mut self) {
        self.pending = None;
    }

    /// Appends tokens whose rows are about to be computed; until `settle` the sequence counts as poisoned. A copy
    /// returned is to be made first.
    ///
    /// # Errors
    /// [`PoolExhausted`]; nothing has changed then.
    pub fn begin_feed(&mut self, tokens: &[u32]) -> Result<Option<PageCopy>, PoolExhausted> {
        let copy = self.resident.extend(tokens)?;
        self.pending = None;
        self.poisoned = true;
        Ok(copy)
    }

    /// The rows of the last feed are computed, so their full pages may be shared; `pending` is what was sampled after
    /// them, if anything.
    pub fn settle(&mut self, pending: Option<Token>) {
        self.resident.table.publish(&self.resident.tokens);
        self.pending = pending;
        self.poisoned = false;
    }

    /// Only `reset` is legal from here on.
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    /// Keeps the first `len` tokens and forgets the pending one. Panics when fewer are resident.
    pub fn truncate(&mut self, len: usize) {
        self.resident.truncate(len);
        self.pending = None;
    }

    /// Holds nothing, as new.
    pub fn reset(&mut self) {
        self.truncate(0);
        self.turn = TurnStart::default();
        self.poisoned = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::kv::PAGE_TOKENS;

    #[test]
    fn tokens_and_rows_stay_equal_also_when_the_pool_is_exhausted() {
        let pool = PagePool::new(1);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1, 2, 3]).expect("room");
        sequence.settle(Some(Token { id: 9, logprob: None }));
        assert!(sequence.begin_feed(&[4; PAGE_TOKENS]).is_err());
        assert_eq!(sequence.resident().tokens(), [1, 2, 3]);
        assert_eq!(sequence.resident().table().len(), 3);
        assert_eq!(sequence.pending().map(|token| token.id), Some(9), "a refused feed changes nothing");
        assert!(!sequence.is_poisoned());
        sequence.truncate(1);
        assert_eq!((sequence.resident().tokens(), sequence.resident().table().len()), (&[1][..], 1));
        assert!(sequence.pending().is_none());
    }

    #[test]
    fn a_feed_that_never_settles_poisons_until_reset() {
        let pool = PagePool::new(2);
        let mut sequence = Sequence::new(&pool);
        sequence.begin_feed(&[1]).expect("room");
        assert!(sequence.is_poisoned());
        sequence.reset();
        assert!(!sequence.is_poisoned());
        assert_eq!((sequence.position(), pool.num_free()), (0, 2));
    }
}
