//! The one integration test binary: one module per promise.

mod common;

mod architecture;
mod config;
mod hub;
mod loading;
mod parity_table;
mod templates;
