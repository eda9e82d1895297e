//! A compiled grammar. Invariant: it never changes, so answers under it do not affect each other.

use std::fmt;
use std::sync::Arc;

use llguidance::TokenParser;
use parking_lot::Mutex;

use super::GrammarSource;

/// A compiled grammar, the start state of every answer under it. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    inner: Arc<CompiledGrammar>,
}

struct CompiledGrammar {
    source: GrammarSource,
    vocab_size: usize,
    /// Only cloned, never advanced.
    start: Mutex<TokenParser>,
}

impl Grammar {
    /// Wraps a parser at the start of an answer.
    pub(super) fn new(source: GrammarSource, vocab_size: usize, start: TokenParser) -> Self {
        Self { inner: Arc::new(CompiledGrammar { source, vocab_size, start: Mutex::new(start) }) }
    }

    #[cfg(test)]
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns the source, e.g. to compile it in another process.
    pub fn source(&self) -> &GrammarSource {
        &self.inner.source
    }

    /// Returns the number of logits that it masks.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// Returns a parser with its own lexer: lexer tables grow with the text, and their limits must not depend
    /// on other answers.
    pub(super) fn start(&self) -> TokenParser {
        self.inner.start.lock().deep_clone()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}
