//! Promise: imports inside `src/` form no cycle, and go down the layers of a folder that has them.
//!
//! In every folder, each file and each subfolder (with all that it contains) is one node; an import between two nodes is an
//! edge. A folder's own file (`mod.rs`, or `serve.rs` for `serve/`) is no node of that folder: it may use its parts, and they may
//! use what it defines. A name that a module re-exports counts as an import from the file that defines it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Source, assert_clean, crate_paths, module_of, sources, tokens};

/// Cycles that are allowed: the folder, and the nodes of one cycle. Each would need a reason.
const CYCLES: &[(&str, &[&str])] = &[];

/// The nodes of one folder, each with the nodes it imports from and one import as an example.
type Graph = BTreeMap<String, BTreeMap<String, String>>;

/// Returns, for each module, the absolute path behind every name that it re-exports with `pub use`.
fn re_exports(sources: &[Source]) -> BTreeMap<String, BTreeMap<String, String>> {
    let re_exports_of = |source: &Source| {
        let module = source.module();
        let mut names = BTreeMap::new();
        for statement in pub_uses(&source.code()) {
            // `use pool::X` and `use self::pool::X` name a child of this module.
            let is_absolute =
                ["crate", "self", "super", "llmctl_"].iter().any(|word| statement.starts_with(word));
            let statement = if is_absolute { statement } else { format!("self::{statement}") };
            for path in crate_paths(&module, &statement) {
                let name = path.rsplit("::").next().unwrap_or(&path).to_owned();
                names.insert(name, path);
            }
        }
        (module, names)
    };
    sources.iter().map(re_exports_of).collect()
}

/// Returns the paths of all `pub use` statements of `code`, without the keywords.
fn pub_uses(code: &str) -> Vec<String> {
    let tokens = tokens(code);
    let mut found = Vec::new();
    for at in 1..tokens.len() {
        if tokens[at] == "use" && (tokens[at - 1] == "pub" || tokens[at - 1] == ")") {
            found.push(tokens[at + 1..].iter().take_while(|token| *token != ";").cloned().collect());
        }
    }
    found
}

/// Returns the module that defines what `path` names, re-exports followed.
fn defining_module(
    path: &str,
    modules: &BTreeSet<String>,
    re_exports: &BTreeMap<String, BTreeMap<String, String>>,
) -> String {
    let mut path = path.to_owned();
    for _ in 0..8 {
        let module = module_of(&path, modules).to_owned();
        let rest = path.strip_prefix(&module).unwrap_or_default().trim_start_matches("::");
        let name = rest.split("::").next().unwrap_or_default();
        match re_exports.get(&module).and_then(|names| names.get(name)) {
            Some(target) if *target != path => path = target.clone(),
            _ => return module,
        }
    }
    path
}

/// Returns one line for each import that does not go to a lower layer, and for each node without a layer.
///
/// Imports within a cycle of `allowed` are not judged.
fn check_layers(
    sources: &[Source],
    folders: &[(&str, &[&[&str]])],
    allowed: &[(&str, &[&str])],
) -> Vec<String> {
    let modules: BTreeSet<String> = sources.iter().map(Source::module).collect();
    let graphs = folder_graphs(sources);
    let mut violations = Vec::new();
    for (folder, layers) in folders {
        let rank = |name: &str| layers.iter().position(|group| group.contains(&name));
        let inside = modules.iter().filter_map(|module| module.strip_prefix(&format!("{folder}::")));
        let nodes: BTreeSet<&str> = inside.map(super::first).collect();
        let unplaced = nodes.iter().filter(|node| rank(node).is_none());
        violations.extend(unplaced.map(|node| format!("{folder}::{node} has no layer")));
        let gone = layers.iter().flat_map(|group| group.iter()).filter(|name| !nodes.contains(**name));
        violations.extend(gone.map(|name| format!("{folder}::{name} has a layer, but does not exist")));
        for (from, to, example) in edges(graphs.get(*folder)) {
            let in_cycle =
                |(at, nodes): &(&str, &[&str])| at == folder && nodes.contains(&from) && nodes.contains(&to);
            if rank(from) >= rank(to) && !allowed.iter().any(in_cycle) {
                violations.push(format!("{folder}::{from} must not know {to}: {example}"));
            }
        }
    }
    violations
}

fn edges(graph: Option<&Graph>) -> impl Iterator<Item = (&str, &str, &str)> {
    let nodes = graph.into_iter().flatten();
    nodes.flat_map(|(from, targets)| targets.iter().map(move |(to, example)| (&**from, &**to, &**example)))
}

/// Returns the import graph of every folder.
fn folder_graphs(sources: &[Source]) -> BTreeMap<String, Graph> {
    let modules: BTreeSet<String> = sources.iter().map(Source::module).collect();
    let re_exports = re_exports(sources);
    let mut graphs: BTreeMap<String, Graph> = BTreeMap::new();
    for source in sources {
        let from = source.module();
        for path in crate_paths(&from, &source.code()) {
            let to = defining_module(&path, &modules, &re_exports);
            if let Some((folder, a, b)) = siblings(&from, &to) {
                let example = format!("{from} imports {path}");
                graphs.entry(folder).or_default().entry(a).or_default().insert(b, example);
            }
        }
    }
    graphs
}

/// Returns the lowest folder that holds both modules, and the node of each in it; `None` if one lies within the other.
fn siblings(from: &str, to: &str) -> Option<(String, String, String)> {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split("::").collect(), to.split("::").collect());
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let (a, b) = (from.get(shared)?, to.get(shared)?);
    Some((from[..shared].join("::"), (*a).to_owned(), (*b).to_owned()))
}

/// Returns all nodes that can be reached from `start` by one edge or more.
fn reachable(graph: &Graph, start: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![start.to_owned()];
    while let Some(node) = open.pop() {
        for next in graph.get(&node).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    found
}

/// Returns every cycle of `graph`: the sets of nodes that all reach each other.
fn cycles_of(graph: &Graph) -> BTreeSet<Vec<String>> {
    let reach: BTreeMap<&String, BTreeSet<String>> =
        graph.keys().map(|node| (node, reachable(graph, node))).collect();
    let cycle = |node: &String| {
        let meets = |other: &&String| reach.get(other).is_some_and(|back| back.contains(node));
        reach[node].iter().filter(meets).cloned().collect::<Vec<_>>()
    };
    graph.keys().map(cycle).filter(|cycle| cycle.len() > 1).collect()
}

/// Returns one line for every cycle that `allowed` does not cover, and for every allowed node that is in no cycle any more.
fn check_cycles(sources: &[Source], allowed: &[(&str, &[&str])]) -> Vec<String> {
    let mut violations = Vec::new();
    let mut in_cycles: BTreeSet<(String, String)> = BTreeSet::new();
    for (folder, graph) in folder_graphs(sources) {
        for cycle in cycles_of(&graph) {
            let covers = |(at, nodes): &&(&str, &[&str])| {
                *at == folder && cycle.iter().all(|node| nodes.contains(&node.as_str()))
            };
            if !allowed.iter().any(|entry| covers(&entry)) {
                violations.push(describe(&folder, &graph, &cycle));
            }
            in_cycles.extend(cycle.into_iter().map(|node| (folder.clone(), node)));
        }
    }
    let pairs = allowed.iter().flat_map(|(folder, nodes)| nodes.iter().map(move |node| (*folder, *node)));
    let gone =
        pairs.filter(|(folder, node)| !in_cycles.contains(&((*folder).to_owned(), (*node).to_owned())));
    violations.extend(gone.map(|(folder, node)| format!("{folder}::{node} is in no cycle: shorten CYCLES")));
    violations
}

fn describe(folder: &str, graph: &Graph, cycle: &[String]) -> String {
    let edges = cycle.iter().flat_map(|node| &graph[node]);
    let inside = edges.filter(|(to, _)| cycle.contains(to)).map(|(_, example)| format!("\n    {example}"));
    format!("cycle in {folder}: {}{}", cycle.join(", "), inside.collect::<String>())
}

#[test]
fn imports_form_no_cycle() {
    assert_clean(check_cycles(&sources(), CYCLES));
}

#[test]
fn imports_go_down_the_layers() {
    let folders = [
        ("cli", super::CLI_LAYERS),
        ("cli::chat", super::CHAT_LAYERS),
        ("serve", super::SERVE_LAYERS),
        ("engine", super::ENGINE_LAYERS),
        ("models", super::MODELS_LAYERS),
        ("base", super::BASE_LAYERS),
        ("template", super::TEMPLATE_LAYERS),
    ];
    assert_clean(check_layers(&sources(), &folders, CYCLES));
}

fn tree(files: &[(&str, &str)]) -> Vec<Source> {
    files.iter().map(|(path, text)| Source::new(path, text)).collect()
}

#[test]
fn the_checker_finds_each_cycle() {
    let two = [("src/cli/a/x.rs", "use super::y::Y;"), ("src/cli/a/y.rs", "fn f() { super::x::g() }")];
    assert_eq!(check_cycles(&tree(&two), &[]).len(), 1, "two files");
    let folders =
        [("src/cli/a/x/p.rs", "use crate::cli::a::y;"), ("src/cli/a/y/q.rs", "use crate::cli::a::x::r;")];
    let folders = [folders.to_vec(), vec![("src/cli/a/x/r.rs", ""), ("src/cli/a/y/mod.rs", "")]].concat();
    assert_eq!(check_cycles(&tree(&folders), &[]).len(), 1, "two folders, by different files");
    let re_exported =
        [("src/cli/a/mod.rs", "pub use y::Y; mod x; mod y;"), ("src/cli/a/x.rs", "use super::Y;")];
    let re_exported = [re_exported.to_vec(), vec![("src/cli/a/y.rs", "use super::x::X;")]].concat();
    assert_eq!(check_cycles(&tree(&re_exported), &[]).len(), 1, "hidden by a re-export");
}

#[test]
fn the_checker_accepts_what_is_no_cycle() {
    let parent = [("src/cli/a/mod.rs", "pub struct A; use x::X;"), ("src/cli/a/x.rs", "use super::A;")];
    assert_clean(check_cycles(&tree(&parent), &[]));
    let line = [
        ("src/cli/a/x.rs", "use super::{y, z};"),
        ("src/cli/a/y.rs", "use super::z;"),
        ("src/cli/a/z.rs", ""),
    ];
    assert_clean(check_cycles(&tree(&line), &[]));
    let of_tests = [
        ("src/cli/a/x.rs", "use super::y::Y;"),
        ("src/cli/a/y.rs", "#[cfg(test)] mod tests { use super::super::x; }"),
    ];
    assert_clean(check_cycles(&tree(&of_tests), &[]));
}

#[test]
fn the_checker_finds_each_import_against_the_layers() {
    let layers: &[(&str, &[&[&str]])] = &[("cli::a", &[&["x", "w"], &["y"]])];
    let check = |files: &[(&str, &str)]| check_layers(&tree(files), layers, &[]).len();
    let (w, x) = (("src/cli/a/w.rs", ""), ("src/cli/a/x.rs", "use super::y::Y;"));
    assert_eq!(check(&[w, x, ("src/cli/a/y.rs", "")]), 0);
    assert_eq!(check(&[w, ("src/cli/a/x.rs", ""), ("src/cli/a/y.rs", "use super::x::X;")]), 1, "up");
    assert_eq!(check(&[w, ("src/cli/a/x.rs", "use super::w;"), ("src/cli/a/y.rs", "")]), 1, "within a layer");
    assert_eq!(check(&[w, x, ("src/cli/a/y.rs", ""), ("src/cli/a/z.rs", "")]), 1, "a node without a layer");
    assert_eq!(check(&[w, x]), 1, "a layer's node that is gone");
    let up = [w, ("src/cli/a/x.rs", "use super::y;"), ("src/cli/a/y.rs", "use super::x;")];
    assert_clean(check_layers(&tree(&up), layers, &[("cli::a", &["x", "y"])]));
}

#[test]
fn an_exception_that_is_not_needed_must_go() {
    let two = [("src/cli/a/x.rs", "use super::y::Y;"), ("src/cli/a/y.rs", "use super::x::X;")];
    assert_clean(check_cycles(&tree(&two), &[("cli::a", &["x", "y"])]));
    assert_eq!(check_cycles(&tree(&two), &[("cli::a", &["x", "y", "z"])]).len(), 1);
    assert_eq!(
        check_cycles(&tree(&two), &[("cli::a", &["x"])]).len(),
        1,
        "a cycle larger than the exception"
    );
}
