//! The one integration test binary: one module per promise.

mod common;
mod tokenizers;
