//! Sizes of a page, and the places of elements in a KV head's block of it.

/// Tokens per KV page. 32 keeps tables small while a partly filled page wastes little; fixed, so that attention's
/// blocking, and so its rounding, is the same everywhere.
pub const PAGE_TOKENS: usize = 32;

/// Values that share a scale.
pub const BLOCK: usize = 32;

/// One half of a KV row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvPart {
    Keys,
    Values,
}

impl KvPart {
    /// Returns the index of a token's value within the page's block.
    #[inline(always)]
    pub(super) fn index(self, head_dim: usize, token: usize, dim: usize) -> usize {
        match self {
            KvPart::Keys => dim * PAGE_TOKENS + token,
            KvPart::Values => token * head_dim + dim,
        }
    }
}
