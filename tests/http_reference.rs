//! Promise: docs/http.md is true of the program: its routes are the router's, its flags are those of `serve`, and every code of
//! an error is in it.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

fn read(path: &str) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// `METHOD /path` as a router's source says them.
fn routes_of(source: &str) -> BTreeSet<String> {
    let mut routes = BTreeSet::new();
    for route in source.split(".route(\"").skip(1) {
        let path = route.split('"').next().expect("a path");
        let path = path.replace("{*id}", "{id}");
        let handlers = route.split('"').nth(1).expect("handlers").split("\n        ").next().expect("a line");
        for (word, method) in [("get(", "GET"), ("post(", "POST"), ("delete(", "DELETE")] {
            if handlers.contains(word) {
                routes.insert(format!("{method} {path}"));
            }
        }
    }
    routes
}

/// Those of the table of routes.
fn documented_routes(page: &str) -> BTreeSet<String> {
    let table = page.split("## Routes").nth(1).expect("a table").split("\n## ").next().expect("a section");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().expect("a route").to_owned()).collect()
}

/// Returns the flags of a page, from `--` on, in code and in plain text.
fn flags_in(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let words = text.split(|c: char| !is_part(c));
    let flags = words.filter(|word| word.starts_with("--") && word.len() > 3 && !word.starts_with("---"));
    flags.map(|flag| flag.trim_end_matches('-').to_owned()).collect()
}

#[test]
fn every_route_is_documented_and_every_documented_route_is_there() {
    let mut routes = routes_of(&read("src/serve/api/mod.rs"));
    routes.extend(routes_of(&read("src/serve/front/router.rs")));
    // An id may contain slashes, so that one pattern of the router is two routes.
    assert!(routes.remove("POST /v1/models/{id}"), "{routes:?}");
    routes.extend(["load", "unload"].map(|change| format!("POST /v1/models/{{id}}/{change}")));
    assert!(routes.contains("DELETE /v1/sessions/{id}") && routes.contains("GET /metrics"), "{routes:?}");
    assert_eq!(documented_routes(&read("docs/http.md")), routes);
}

#[test]
fn every_flag_that_is_named_is_one_of_serve() {
    let help = Command::new(env!("CARGO_BIN_EXE_llmctl")).args(["serve", "--help"]).output().expect("runs");
    let known = flags_in(&String::from_utf8_lossy(&help.stdout));
    let named = flags_in(&read("docs/http.md"));
    assert!(named.len() > 20 && named.contains("--session-wait"), "{named:?}");
    let unknown: Vec<&String> = named.difference(&known).filter(|flag| *flag != "--session").collect();
    assert!(unknown.is_empty(), "{unknown:?} are no flags of serve");
    for flag in ["--session-wait", "--share-sessions", "--max-sessions", "--session-ttl", "--api-key-file"] {
        assert!(named.contains(flag), "{flag} is not explained");
    }
}

#[test]
fn every_code_of_an_error_is_documented() {
    let page = read("docs/http.md");
    for path in
        ["error.rs", "front/guard.rs", "sessions/mod.rs", "api/sessions.rs", "api/patience.rs", "api/body.rs"]
    {
        let source = read(&format!("src/serve/{path}"));
        let source = source.split("#[cfg(test)]").next().expect("a source");
        let quoted = source.split("Some(\"").skip(1).filter_map(|rest| rest.split_once('"'));
        for (code, _) in quoted.filter(|(_, rest)| rest.starts_with(')')) {
            assert!(page.contains(&format!("`{code}`")), "{path}: {code}");
        }
    }
}
