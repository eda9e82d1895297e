//! The one integration test binary: one module per promise.

mod common;

mod architecture;
mod hub;
mod load_options;
mod loading;
mod parity_table;
mod real_models;
mod templates;
