//! The one integration test binary: one module per promise.

mod architecture;
mod common;

mod hub;
mod parity;
