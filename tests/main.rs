//! The one integration test binary: one module per promise.

mod architecture;
mod common;
mod engine;
mod engine_thread;

mod hub;
mod parity;
mod session;
