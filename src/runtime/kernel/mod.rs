//! Numeric kernels on plain slices. Imports nothing from the crate.
//!
//! Invariant: every reduction runs in one fixed order per output, independent of the number of rows, threads
//! and the instruction set, so that a row's result never depends on other rows. `unsafe` stays in leaf files.

pub mod attention;
mod blocks;
pub mod conv;
pub mod delta;
pub mod dot;
pub mod dtype;
pub mod gemm;
mod grids;
pub mod isa;
pub mod limits;
pub mod math;
pub mod matmul;
pub mod memory;
pub mod norm;
pub mod pool;
pub mod quant;
mod region;
pub mod ssm;
pub mod texts;
pub mod wide;

pub use dtype::Dtype;
pub use isa::Isa;
pub use quant::dequantize_row;
