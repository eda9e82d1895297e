//! Promise: a type name has one meaning in `src/`.
//!
//! Counts the structs, enums, unions, traits and type aliases of modules; those inside functions, implementations and test
//! modules may repeat a name. Two definitions in one file are alternatives for different systems.

use std::collections::{BTreeMap, BTreeSet};

use super::{Source, assert_clean, sources, tokens};

/// Names that may be defined more than once, and why.
const SHARED_NAMES: &[(&str, &str)] = &[("Result", "each crate's result, with its own error")];

/// Returns the names of the types that the module `source` defines.
fn type_names(source: &Source) -> BTreeSet<String> {
    let tokens = tokens(&source.code());
    let mut names = BTreeSet::new();
    // Whether each open brace belongs to a module.
    let mut open: Vec<bool> = Vec::new();
    for at in 0..tokens.len() {
        match tokens[at].as_str() {
            "{" => open.push(at >= 2 && tokens[at - 2] == "mod"),
            "}" => drop(open.pop()),
            "struct" | "enum" | "union" | "trait" | "type" if open.iter().all(|is_module| *is_module) => {
                let name = tokens.get(at + 1).filter(|name| name.starts_with(char::is_uppercase));
                names.extend(name.cloned());
            }
            _ => {}
        }
    }
    names
}

/// Returns one line for each name with several meanings, and for each exception that is not needed.
fn check_names(sources: &[Source], allowed: &[(&str, &str)]) -> Vec<String> {
    let mut defined: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for source in sources {
        for name in type_names(source) {
            defined.entry(name).or_default().push(&source.path);
        }
    }
    let is_allowed = |name: &str| allowed.iter().any(|(allowed, _)| *allowed == name);
    let is_shared = |name: &str| defined.get(name).is_some_and(|paths| paths.len() > 1);
    let shared = defined.iter().filter(|(name, _)| is_shared(name) && !is_allowed(name));
    let mut violations: Vec<String> =
        shared.map(|(name, paths)| format!("{name} is defined in {}", paths.join(", "))).collect();
    let unneeded = allowed.iter().filter(|(name, _)| !is_shared(name));
    violations.extend(unneeded.map(|(name, _)| format!("{name} needs no exception: remove it")));
    violations
}

#[test]
fn a_type_name_has_one_meaning() {
    assert_clean(check_names(&sources(), SHARED_NAMES));
}

#[test]
fn the_checker_finds_names_with_two_meanings() {
    let check = |one: &str, other: &str| {
        check_names(&[Source::new("src/a.rs", one), Source::new("src/b.rs", other)], &[]).len()
    };
    assert_eq!(check("struct A;", "pub enum A { X }"), 1);
    assert_eq!(check("trait A {}", "mod inner { type A = u8; }"), 1);
    assert_eq!(check("struct A; struct B;", "union A { x: u8 } type B = A;"), 2);
    assert_eq!(check("struct A;", "struct B; // struct A;"), 0);
    assert_eq!(check("struct A;", "impl Iterator for B { type A = u8; } fn f() { struct A; }"), 0);
    assert_eq!(check("struct A;", "#[cfg(test)] mod tests { struct A; }"), 0);
    assert_eq!(check("#[cfg(unix)] struct A; #[cfg(windows)] enum A {}", "struct B;"), 0);
}

#[test]
fn a_shared_name_that_is_not_shared_must_go() {
    let sources = [Source::new("src/a.rs", "struct A;"), Source::new("src/b.rs", "struct A; struct B;")];
    assert_clean(check_names(&sources, &[("A", "")]));
    assert_eq!(check_names(&sources, &[("A", ""), ("B", "")]).len(), 1);
}
