//! The bound on memory and work of one rendering.
//!
//! Every byte that a template produces, copies or scans is paid from one budget before it is spent; running out is
//! an error that [`Exhausted`] marks, which distinguishes it from the template's own faults. Steps of the virtual
//! machine are bounded separately by minijinja's fuel. Also carries the pinned clock, the other per-render fact.

use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr};
use minijinja::{Error, ErrorKind, State};

use super::super::clock::DateTime;

/// Name of the root variable that carries [`Inputs`]; not an identifier, so no template can spell it.
pub(crate) const INPUTS: &str = " render inputs";

/// The bounds of one rendering, passed in the root context; then what is left of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Inputs {
    pub bytes: u64,
    pub now: DateTime,
}

impl Object for Inputs {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Marks an error as "a bound was hit".
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Exhausted(pub String);

/// Marks an error as the template's own `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Raised(pub String);

fn left<'s>(state: &'s mut State) -> &'s mut Inputs {
    if state.get_extension::<Inputs>().is_none() {
        let inputs = state.lookup(INPUTS);
        let inputs = inputs.as_ref().and_then(|value| value.downcast_object_ref::<Inputs>());
        state.get_or_insert_extension(inputs.copied().unwrap_or_default());
    }
    state.get_or_insert_extension(Inputs::default())
}

/// Pays for `bytes` of text or items before they are made.
pub(super) fn spend(state: &mut State, bytes: usize) -> Result<(), Error> {
    let left = left(state);
    left.bytes =
        left.bytes.checked_sub(bytes as u64).ok_or_else(|| exhausted("it produces too much text"))?;
    Ok(())
}

pub(super) fn now(state: &mut State) -> DateTime {
    left(state).now
}

pub(super) fn exhausted(reason: &str) -> Error {
    Error::new(ErrorKind::OutOfFuel, reason.to_owned()).with_source(Exhausted(reason.to_owned()))
}
