//! Ollama's `options`: sampling and limits in an object of their own.
//!
//! Invariants: a field of the request itself counts before the same one within `options`; settings of the
//! machine are hints, because the server was started with its own; any other member is refused by its path.

use super::hints::OTHER_SERVERS;
use super::{Fields, params};
use llmctl_base::GivenSampling;
use llmctl_engine::Limits;

const NAME: &str = "options";

/// Reads how tokens are chosen and when an answer ends. The defaults count where neither the fields nor `options` say
/// anything; `may_be_none` as in [`params::limits`].
pub fn generation(
    fields: &mut Fields<'_>,
    sampling: &GivenSampling,
    limits: &Limits,
    may_be_none: bool,
) -> (GivenSampling, Limits) {
    let (sampling, limits) = options(fields, sampling, limits, may_be_none);
    (params::sampling(fields, &sampling), params::limits(fields, &limits, may_be_none))
}

/// As [`generation`], of `options` alone.
pub fn options(
    fields: &mut Fields<'_>,
    sampling: &GivenSampling,
    limits: &Limits,
    may_be_none: bool,
) -> (GivenSampling, Limits) {
    let members = fields.object(NAME).unwrap_or_default();
    let mut options = fields.inside(NAME, members);
    let sampling = params::sampling(&mut options, sampling);
    let limits = params::limits(&mut options, limits, may_be_none);
    OTHER_SERVERS.machine.iter().for_each(|name| options.hint(name));
    params::inert(&mut options);
    options.end();
    (sampling, limits)
}

/// Returns true if a request limits its answer itself, in one spelling or another.
pub fn has_limit(fields: &Fields<'_>) -> bool {
    params::LIMIT_NAMES.iter().any(|name| fields.has(name)) || fields.has(NAME)
}
