//! State of one answer under a grammar: the tokens that may or must come next.

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::SimpleVob;

use super::compiled::Grammar;
use llmctl_base::error::GrammarError;

/// Tokens that may come next.
#[derive(Debug)]
pub enum TokenMask {
    /// Only this token.
    Forced(u32),
    /// Any of these; includes end-of-generation tokens if the grammar is complete.
    Allowed(AllowedTokens),
}

impl TokenMask {
    pub fn allows(&self, id: u32) -> bool {
        match self {
            TokenMask::Forced(only) => *only == id,
            TokenMask::Allowed(tokens) => tokens.contains(id),
        }
    }
}

/// A set of token ids.
pub struct AllowedTokens(SimpleVob);

/// Follows an answer token by token.
pub struct GrammarState {
    parser: TokenParser,
    /// Forced tokens that the parser has not consumed yet.
    forced: VecDeque<u32>,
    /// Allow end-of-generation tokens only if no other token is allowed.
    ends_last: bool,
    /// True if the forced start of the grammar was computed.
    is_begun: bool,
}

impl GrammarState {
    /// Creates the state at the start of an answer. With `ends_last`, end-of-generation tokens are allowed
    /// only if no other is.
    pub fn new(grammar: &Grammar, ends_last: bool) -> Self {
        Self { parser: grammar.start(), forced: VecDeque::new(), ends_last, is_begun: false }
    }

    /// Returns whether the answer is complete and nothing may follow.
    pub fn is_complete(&self) -> bool {
        matches!(self.parser.stop_reason(), StopReason::NoExtension | StopReason::NoExtensionBias)
    }

    /// Returns the next token if only one is allowed.
    pub fn forced(&self) -> Option<u32> {
        self.forced.front().copied()
    }

    /// Iterates over the next tokens, as far as only one is allowed each time.
    pub fn forced_tokens(&self) -> impl Iterator<Item = u32> {
        self.forced.iter().copied()
    }

    /// Returns the tokens that may come next; `None` for a complete answer.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`] if it exceeds the work limit of a step, [`GrammarError::Failed`] for
    /// bugs.
    pub fn mask(&mut self) -> Result<Option<TokenMask>, GrammarError> {
        if !self.is_begun {
            self.look_ahead()?;
        }
        if let Some(id) = self.forced() {
            return Ok(Some(TokenMask::Forced(id)));
        }
        if self.is_complete() {
            return Ok(None);
        }
        let computed = self.guarded(|parser| parser.compute_mask().map_err(|e| e.to_string()));
        match computed {
            Ok(allowed) => Ok(Some(TokenMask::Allowed(AllowedTokens(self.without_ends(allowed))))),
            // The library reports a dead end only here. Without end-of-generation tokens nothing is allowed.
            Err(_)
                if self.parser.stop_reason() == StopReason::NoExtensionBias && self.parser.is_accepting() =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn without_ends(&self, allowed: SimpleVob) -> SimpleVob {
        if !self.ends_last {
            return allowed;
        }
        let mut others = allowed.clone();
        others.sub(&self.parser.token_env.tok_trie().eos_token_set());
        if others.is_zero() { allowed } else { others }
    }

    /// Consumes a token that `mask` allows and that does not end the generation.
    ///
    /// # Errors
    /// Those of [`GrammarState::mask`].
    pub fn accept(&mut self, id: u32) -> Result<(), GrammarError> {
        self.guarded(|parser| parser.consume_token(id).map_err(|e| e.to_string()))?;
        if self.forced.pop_front() != Some(id) || self.forced.is_empty() {
            self.look_ahead()?;
        }
        Ok(())
    }

    fn look_ahead(&mut self) -> Result<(), GrammarError> {
        self.is_begun = true;
        self.forced.clear();
        if !self.guarded(|parser| parser.check_stop().map_err(|e| e.to_string()))? {
            self.forced = self.guarded(|parser| Ok(parser.compute_ff_tokens()))?.into();
        }
        Ok(())
    }

    /// Turns an error or a panic of the library into a [`GrammarError`].
    fn guarded<T>(
        &mut self,
        call: impl FnOnce(&mut TokenParser) -> Result<T, String>,
    ) -> Result<T, GrammarError> {
        let parser = &mut self.parser;
        let result = catch_unwind(AssertUnwindSafe(|| Ok(call(parser))));
        result.unwrap_or_else(|panic| Err(panic.to_string())).map_err(|message| {
            match self.parser.stop_reason() {
                // The library has one reason for limits and for tokens that do not fit.
                StopReason::ParserTooComplex if message.contains("doesn't satisfy the grammar") => {
                    GrammarError::Invalid(message.trim_start_matches("Parser Error: ").to_owned())
                }
                StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                    GrammarError::TooComplex(message)
                }
                StopReason::NoExtension | StopReason::NoExtensionBias => unsatisfiable(),
                // Keep the first line: the library appends a backtrace to a panic's message.
                _ => GrammarError::Failed(message.lines().next().unwrap_or_default().to_owned()),
            }
        })
    }
}

/// Error for a grammar that reaches a dead end before it is complete.
pub(super) fn unsatisfiable() -> GrammarError {
    GrammarError::Invalid("nothing satisfies it: it reaches a point where no token is allowed".to_owned())
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").field("forced", &self.forced).finish_non_exhaustive()
    }
}

impl AllowedTokens {
    pub fn contains(&self, id: u32) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_zero()
    }

    #[cfg(test)]
    pub fn of(vocab_size: usize, ids: &[u32]) -> Self {
        let mut allowed = SimpleVob::alloc(vocab_size);
        ids.iter().for_each(|&id| allowed.allow_token(id));
        Self(allowed)
    }

    /// Calls `found` with each id in ascending order.
    pub fn for_each(&self, found: impl FnMut(usize)) {
        self.0.iter_set_entries(found);
    }
}

impl fmt::Debug for AllowedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} tokens", self.0.num_set(), self.0.len())
    }
}
