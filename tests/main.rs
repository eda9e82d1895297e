//! The one integration test binary: one module per promise.

mod architecture;
mod candle_backend;
mod common;

mod hub;
mod oracle;
mod parity;
