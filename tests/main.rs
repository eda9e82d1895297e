//! The one integration test binary: one module per promise.

mod common;

mod architecture;
mod candle_backend;
mod hub;
mod loading;
mod oracle;
mod parity_table;
mod templates;
