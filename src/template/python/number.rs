//! Numbers as arithmetic and comparison see them.

use minijinja::Value;

use super::{Py, py};

/// A number for arithmetic; bool counts as 0 or 1.
pub enum Num {
    Int(i128),
    Float(f64),
}

pub fn num(value: &Value) -> Option<Num> {
    match py(value) {
        Py::Int(int) => Some(Num::Int(int)),
        Py::Bool(flag) => Some(Num::Int(flag.into())),
        Py::Float(float) => Some(Num::Float(float)),
        _ => None,
    }
}

impl Num {
    pub fn float(&self) -> f64 {
        match self {
            Num::Int(int) => *int as f64,
            Num::Float(float) => *float,
        }
    }
}
