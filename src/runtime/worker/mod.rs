//! An engine in a process of its own, and the protocol between the two processes.
//!
//! [`protocol`] is `docs/worker-protocol.md` as types, used by both ends. [`service`] is the worker's end and
//! [`remote`] the parent's; both work on any two streams. [`process`] starts and watches the child process,
//! `unix` makes the system calls for it.

pub mod process;
pub mod protocol;
pub mod remote;
pub mod service;
#[cfg(unix)]
mod unix;
