//! An engine in a process of its own: the lines that go to it and come from it.
//!
//! `docs/worker-protocol.md` is the contract; [`protocol`] is the same in types, used by both ends. [`service`] is the worker's end,
//! [`remote`] the parent's, both on any two streams; [`process`] is the process that they lead to, `unix` what it takes from the
//! system.

pub mod process;
pub mod protocol;
pub mod remote;
pub mod service;
#[cfg(unix)]
mod unix;
