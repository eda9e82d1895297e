//! An engine in a process of its own: the lines that go to it and come from it.
//!
//! `docs/worker-protocol.md` is the contract; [`protocol`] is the same in types, used by both ends, and [`service`] is the
//! worker's end. Knows no process, pipe or signal: whoever is a worker brings them.

pub mod protocol;
pub mod service;
