//! The one integration test binary: one module per promise.

mod common;

mod architecture;
mod config;
mod hub;
mod parity_table;
