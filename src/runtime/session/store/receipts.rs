//! Receipts of a session's turns: what the file has of them, and the whole.
//!
//! A turn's line has the prompt, the sampling and the answer already, so that it adds the recipe, where that is another than the turn's
//! before, and the hash. The hash of a receipt includes that of the turn before, and of the turn's messages: a text that was edited
//! does not match it.

use super::record::{TurnReceipt, messages_sha256};
use super::{SavedSession, StoredTurn};
use crate::receipt::{AnswerRecipe, RECEIPT_SCHEMA, Receipt, tokens_sha256};
use llmctl_models::kv::{TokenBuf, Tokens};

/// Returns the receipt of a turn, whose prompt is `prompt` and whose own part is `own`. `previous` is the hash of the turn's before.
pub fn receipt_of(
    turn: &StoredTurn,
    own: &TurnReceipt,
    prompt: Tokens<'_>,
    previous: Option<&str>,
) -> Receipt {
    Receipt {
        schema: RECEIPT_SCHEMA.to_owned(),
        previous: previous.map(str::to_owned),
        recipe: AnswerRecipe::clone(&own.recipe),
        adapters: turn.adapters.clone(),
        images: prompt.images.to_vec(),
        messages_sha256: Some(messages_sha256(&turn.messages)),
        prompt_tokens: prompt.len(),
        prompt_sha256: tokens_sha256(prompt.ids),
        sampling: (&turn.sampling).into(),
        given: own.given,
        answer: turn.generated.clone(),
        finish: turn.finish.clone(),
    }
}

impl SavedSession {
    /// Returns the session as it was after the first `turns` turns.
    pub fn up_to(&self, turns: usize) -> Self {
        Self { turns: self.turns.iter().take(turns).cloned().collect(), ..self.clone() }
    }

    /// Returns the prompt of the last turn; empty without turns.
    pub fn last_prompt(&self) -> TokenBuf {
        let Some(last) = self.turns.last() else { return TokenBuf::default() };
        let mut ids = self.tokens();
        ids.truncate(last.turn.num_tokens() - last.turn.generated.len());
        TokenBuf { ids, images: self.spans(), adapters: last.turn.adapters.clone() }
    }

    /// Returns the hash of a turn's receipt, as recorded. Turns count from 1.
    pub fn receipt_hash(&self, number: usize) -> Option<&str> {
        Some(&self.turns.get(number.checked_sub(1)?)?.turn.receipt.as_ref()?.hash)
    }

    /// As [`Self::receipt_hash`], of the last turn.
    pub fn last_receipt_hash(&self) -> Option<&str> {
        self.receipt_hash(self.turns.len())
    }

    /// Returns the receipt of the last turn, computed from what the file says of it; `None` without one.
    pub fn last_receipt(&self) -> Option<Receipt> {
        let turn = &self.turns.last()?.turn;
        let (prompt, previous) = (self.last_prompt(), self.receipt_hash(self.turns.len() - 1));
        Some(receipt_of(turn, turn.receipt.as_ref()?, prompt.as_tokens(), previous))
    }
}
