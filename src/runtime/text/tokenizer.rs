//! Text <-> token ids, exactly as the model's publisher's tokenizer does it.

/// One immutable tokenizer, shared by everything that runs the model.
#[derive(Debug)]
pub struct Tokenizer {}
