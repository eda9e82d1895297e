//! Anthropic's Messages format: bodies into the crate's vocabulary, answers and errors out of it.
//!
//! Invariants: as in `wire`, every field is taken by name and what is left over is refused; places in lists
//! are written with dots (`messages.3.content.1`), as Anthropic's API writes them. Knows no endpoint and no
//! model.

pub mod answer;
pub mod error;
pub mod messages;
pub mod output;
pub mod tools;

use super::Fields;

/// Fields on which no answer depends: labels, prices, places, and caches that are kept anyway.
const HINTS: [&str; 11] = [
    "anthropic_beta",
    "anthropic_version",
    "betas",
    "cache_control",
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
];

/// Takes the hints at the top level of a body, beside those that every API takes.
pub fn hints(fields: &mut Fields<'_>) {
    HINTS.iter().for_each(|name| fields.hint(name));
}
