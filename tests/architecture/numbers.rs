//! Promise: a model's numbers do not depend on the system's mathematical functions, whose last bits differ between
//! systems; so sessions and pages may move between processors (src/runtime/models/load/fingerprint.rs).

use super::{Source, assert_clean, sources};

/// Where weights, logits and pages are computed.
const COMPUTED: [&str; 6] = [
    "src/runtime/models/backend/cpu/",
    "src/runtime/kernel/",
    "src/runtime/models/load/blocks.rs",
    "src/runtime/models/load/packed/",
    "src/runtime/models/model/",
    "src/runtime/sample.rs",
];

/// Functions that std takes from the system. Square roots and fused multiply-adds are exact everywhere.
const FROM_SYSTEM: [&str; 22] = [
    "acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "exp", "exp2", "exp_m1", "hypot", "ln", "ln_1p",
    "log", "log10", "log2", "powf", "sin", "sin_cos", "sinh", "tan", "tanh",
];

/// Calls of the system's functions, as methods or by their path.
fn system_functions(source: &Source) -> Vec<String> {
    let is_computed = COMPUTED.iter().any(|path| source.path.starts_with(path));
    if !is_computed || source.path.ends_with("/tests.rs") {
        return Vec::new();
    }
    let code = source.code();
    let is_called = |name: &&str| {
        code.contains(&format!(".{name}("))
            || ["f32", "f64"].iter().any(|float| {
                let path = format!("{float}::{name}");
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                code.match_indices(&path).any(|(at, _)| !code[at + path.len()..].starts_with(is_name))
            })
    };
    let found = FROM_SYSTEM.iter().filter(|name| is_called(name));
    found.map(|name| format!("{} calls the system's {name}; call libm's", source.path)).collect()
}

#[test]
fn numbers_do_not_come_from_the_systems_functions() {
    assert_clean(sources().iter().flat_map(system_functions).collect());
}

#[test]
fn the_systems_functions_are_found() {
    let found = |code: &str| system_functions(&Source::new("src/runtime/models/model/rope.rs", code)).len();
    assert_eq!(found("let y = x.exp(); each(f64::cos, out); x.sin_cos()"), 3);
    assert_eq!(found("libm::exp(x); x.exponent(); x.sqrt(); f32::lnx; // x.ln()"), 0);
    assert_eq!(system_functions(&Source::new("src/bench/stats.rs", "x.ln()")).len(), 0);
}
