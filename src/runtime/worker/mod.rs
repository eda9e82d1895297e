//! An engine in a process of its own: the lines that go to it and come from it.
//!
//! `docs/worker-protocol.md` is the contract; [`protocol`] is the same in types, used by both ends. Knows no process, pipe or
//! signal: whoever starts a worker, or is one, brings them.

pub mod protocol;
