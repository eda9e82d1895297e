//! Promise: the module tree keeps the shape that ARCHITECTURE.md draws. Imports go one way, leaves import
//! nothing, the engine knows neither terminal nor environment, `unsafe` stays in listed files, and no test file
//! is forgotten. Each rule is a function from sources to violations and is itself tested on small strings.
//!
//! The tables below are the architecture; a change there is a decision and wants a reason in ARCHITECTURE.md.

mod cycles;
mod names;
mod numbers;
mod size;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Top-level modules; each may import from those after it. `lib` only declares them. `template` and `runtime::kernel` are
/// crates, which all of them may use and which cannot import from any.
const LAYERS: [&str; 4] = ["main", "cli", "serve", "runtime"];

/// The crates of the workspace that lie inside `src/`: `crate::` in their files means the member itself.
const MEMBERS: [&str; 2] = ["template", "runtime::kernel"];

/// Inside runtime: each group may import from those after it, and its members not from each other.
const RUNTIME_LAYERS: &[&[&str]] = &[
    &["http_engine", "thread", "worker"], // the three kinds of engine behind a client
    &["embed"],
    &["client"],
    &["turn"],
    &["engine", "template_check"], // asks what sessions make of a template
    &["session"],
    &["step"],
    &["sequence"],
    &["form"],
    &["spec", "chat_tokenizer"],
    &["load"],
    &["model", "sample"],
    &["request"],
    &["grammar", "infill"], // a request carries its grammar, which is made from a tokenizer
    &["text", "kv"],
    &["backend"],
    &["memory", "panels"],
    &["tensor"],
    &["error", "hints", "kernel", "machine", "notice", "private_files", "repetition"],
    &["units"],
];

/// Inside cli, as inside runtime.
const CLI_LAYERS: &[&[&str]] = &[
    &["guide_facts"], // tests only
    &["launch"],      // runs a server, and asks one with the client of `bench serve`
    &["bench", "chat", "completions", "embed", "serve", "template_cmd", "worker"],
    &["batch"],
    &["run"],
    &["sessions"],
    &["declared_tools", "load"],
    &["doctor", "endpoint", "mcp", "pull", "resume", "running", "starter"],
    &["quantize"],
    &["download"],
    &["config_cmd", "man", "models", "workers"],
    &["config"],
    &["explain", "input", "think", "variables"],
    &["capacity", "flags", "question", "render", "report", "slow_cpu", "terminal"],
    &["args", "hub_access", "origin", "output", "signal"],
    &["places"],
    &["clock", "descriptors", "error", "tty", "wrap"],
];

/// Inside cli::chat.
const CHAT_LAYERS: &[&[&str]] = &[
    &["actions"],
    &["compare"],
    &["turn"],
    &["context_limit", "tool_calls"],
    &["session"],
    &["ui"],
    &["input"],
    &["complete", "model", "renderer", "state"],
    &["command", "settings", "throughput", "typed_ahead"],
];

/// Inside serve.
const SERVE_LAYERS: &[&[&str]] = &[
    &["listen"],
    &["router"],
    &["access"], // outside of all handlers, and the envelope around their errors
    &["guard"],
    &["lifecycle"],
    &["fleet"],
    &["api"],
    &["ledger"],
    &["observe", "traces"],
    &["spans"],
    &["metrics"],
    &["engines"],
    &["connection", "engine", "policy", "preparing", "wire"],
    &["access_log", "error", "half_open", "owner", "page", "request_id", "tools", "uploads"],
];

/// Inside template.
const TEMPLATE_LAYERS: &[&[&str]] = &[
    &["check"],
    &["probe"],
    &["begun", "output"],
    &["marked"],
    &["output_markup"],
    &["tool_grammar"],
    &["reasoning"],
    &["tool_call"],
    &["accommodate", "jinja", "prompt"],
    &["arrange", "environment", "variables"],
    &["link"],
    &["python"],
    &["source"],
    &["clock", "error", "message", "named", "piece", "reasoning_switch"],
];

/// Modules below `runtime::` that the rest of the crate may name, besides the re-exports of runtime/mod.rs.
const RUNTIME_FACADES: &[&str] = &[
    "embed",
    "engine",
    "grammar",
    "http_engine",
    "kernel::limits", // bench lays its rates beside them
    "kv",
    "kv::disk",
    "load",
    "load::builtin",
    "load::divergence",
    "load::embedder",
    "load::export",
    "load::hub",
    "load::hub::ollama",
    "load::hub::upkeep",
    "machine",
    "machine::cores", // doctor shows what the defaults come from
    "memory",
    "model",
    "private_files",
    "request",
    "turn",
    "turn::session_chat",
    "session::store",
    "spec",
    "template_check",
    "tensor",
    "text",
    "thread",
    "turn",
    "turn::session_chat",
    "units",
    "worker::process",
    "worker::protocol",
    "worker::remote",
    "worker::service",
];

/// Modules that import nothing from the crate but their own parts: the ones to test to death.
const LEAVES: &[&str] = &[
    "cli::bench::stats",
    "runtime::machine",
    "runtime::repetition",
    "runtime::text::stop",
    "runtime::text::utf8",
    "runtime::units",
];

/// Leaves that may still use plain data.
const DATA_LEAVES: &[(&str, &[&str])] = &[
    ("runtime::engine::schedule", &["runtime::request"]),
    ("runtime::session::prefill", &["runtime::request"]),
];

/// Below these nothing is printed and no variable, argument or terminal is read.
const SILENT: [&str; 3] = ["runtime", "template", "serve"];
const NOISE: [&str; 11] = [
    "println!",
    "print!",
    "eprintln!",
    "eprint!",
    "dbg!",
    "std::env",
    "env::var",
    "env::args",
    "io::stdout",
    "io::stderr",
    "IsTerminal",
];

/// Files (or, with a slash at the end, folders) where `unsafe` may occur, and why.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("src/cli/descriptors.rs", "the limit on open files; stdout before `main`"),
    ("src/cli/signal.rs", "signal handlers"),
    ("src/cli/tty.rs", "terminal modes, also from a signal handler"),
    ("src/runtime/backend/cpu/kv.rs", "several threads write a page, each the blocks of its heads"),
    ("src/runtime/kernel/", "instruction sets chosen at run time"),
    ("src/runtime/machine/cores.rs", "the call for the numbers of Apple's cores"),
    ("src/runtime/memory.rs", "the allocator's call to give memory back"),
    ("src/runtime/tensor.rs", "memory-mapped files"),
    ("src/runtime/worker/unix.rs", "what a child process begins with, and the end of its group"),
];

/// A source file: its path in the repository and its text.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// `runtime::load::hub` for src/runtime/load/hub/mod.rs; `main` and `lib` for the two roots.
    fn module(&self) -> String {
        let path = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let path = path.strip_suffix(".rs").unwrap_or(path);
        path.strip_suffix("/mod").unwrap_or(path).replace('/', "::")
    }

    /// The text without comments, literals and test modules.
    fn code(&self) -> String {
        without_test_modules(&without_comments_and_literals(&self.text))
    }
}

/// Blanks comments and the insides of string and character literals, so that braces and words in them do not count.
fn without_comments_and_literals(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skip_opaque(&chars, at);
        if end > at {
            code.push(' ');
            at = end;
        } else {
            code.push(chars[at]);
            at += 1;
        }
    }
    code
}

/// The end of the comment or literal that begins at `at`; `at` itself when none does.
fn skip_opaque(chars: &[char], at: usize) -> usize {
    let starts = |text: &str| text.chars().enumerate().all(|(n, c)| chars.get(at + n) == Some(&c));
    if starts("//") {
        return (at..chars.len()).find(|&n| chars[n] == '\n').unwrap_or(chars.len());
    }
    if starts("/*") {
        let closed = (at + 2..chars.len()).find(|&n| chars[n] == '*' && chars.get(n + 1) == Some(&'/'));
        return closed.map_or(chars.len(), |n| n + 2);
    }
    let word_before = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    let raw = (starts("r\"") || starts("r#")) && !word_before;
    if raw || (starts("br") && !word_before && matches!(chars.get(at + 2), Some('"' | '#'))) {
        return skip_raw_string(chars, at);
    }
    match chars[at] {
        '"' => skip_quoted(chars, at, '"'),
        // A lifetime has no closing quote after one character (or escape).
        '\'' if chars.get(at + 1) == Some(&'\\') || chars.get(at + 2) == Some(&'\'') => {
            skip_quoted(chars, at, '\'')
        }
        _ => at,
    }
}

fn skip_quoted(chars: &[char], at: usize, quote: char) -> usize {
    let mut n = at + 1;
    while n < chars.len() && chars[n] != quote {
        n += if chars[n] == '\\' { 2 } else { 1 };
    }
    (n + 1).min(chars.len())
}

fn skip_raw_string(chars: &[char], at: usize) -> usize {
    let open = at + if chars[at] == 'b' { 2 } else { 1 };
    let hashes = chars[open..].iter().take_while(|&&c| c == '#').count();
    if chars.get(open + hashes) != Some(&'"') {
        return at; // r#identifier
    }
    let closes = |n: usize| chars[n] == '"' && (1..=hashes).all(|h| chars.get(n + h) == Some(&'#'));
    (open + hashes + 1..chars.len()).find(|&n| closes(n)).map_or(chars.len(), |n| n + hashes + 1)
}

/// Cuts `#[cfg(test)] mod name { ... }`: tests may print, read the environment and use whatever they test.
fn without_test_modules(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        let (before, after) = rest.split_at(start);
        kept.push_str(before);
        let item = &after["#[cfg(test)]".len()..];
        let block = item.find('{').filter(|&open| !item[..open].contains(';'));
        rest = match block.filter(|&open| item[..open].contains("mod ")) {
            Some(open) => &item[matching_brace(item, open)..],
            None => item,
        };
    }
    kept + rest
}

/// The position after the brace that closes the one at `open`.
fn matching_brace(text: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, c) in text[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return open + at + 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

fn tokens(code: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut chars = code.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_alphanumeric() || c == '_' {
            let mut word = c.to_string();
            while let Some(&next) = chars.peek().filter(|c| c.is_alphanumeric() || **c == '_') {
                word.push(next);
                chars.next();
            }
            tokens.push(word);
        } else if c == ':' && chars.peek() == Some(&':') {
            chars.next();
            tokens.push("::".to_owned());
        } else if !c.is_whitespace() {
            tokens.push(c.to_string());
        }
    }
    tokens
}

/// Every path of the crate that `code` in `module` names, from `use` trees and inline, absolute.
fn crate_paths(module: &str, code: &str) -> BTreeSet<String> {
    let tokens = tokens(code);
    let mut paths = BTreeSet::new();
    let mut here: Vec<String> = module.split("::").map(str::to_owned).collect();
    let mut inline_modules: Vec<usize> = Vec::new();
    let mut depth = 0;
    for at in 0..tokens.len() {
        let before = at.checked_sub(1).map(|n| tokens[n].as_str());
        match tokens[at].as_str() {
            "{" => {
                depth += 1;
                if at >= 2 && tokens[at - 2] == "mod" {
                    here.push(tokens[at - 1].clone());
                    inline_modules.push(depth);
                }
            }
            "}" => {
                if inline_modules.last() == Some(&depth) {
                    inline_modules.pop();
                    here.pop();
                }
                depth -= 1;
            }
            "crate" | "super" | "self" | "llmctl" if before != Some("::") => {
                collect_path(&tokens, at, &here, &mut paths);
            }
            _ => {}
        }
    }
    paths
}

/// Reads the path (with its `{...}` tree) that starts at `at`, when it is one.
fn collect_path(tokens: &[String], at: usize, here: &[String], paths: &mut BTreeSet<String>) {
    if tokens.get(at + 1).map(String::as_str) != Some("::") {
        return;
    }
    let in_main = here == ["main"];
    let base = match tokens[at].as_str() {
        "crate" => crate_root(&here.join("::")),
        "llmctl" if in_main => Vec::new(),
        "llmctl" => return,
        "self" => here.to_vec(),
        _ => here[..here.len().saturating_sub(1)].to_vec(),
    };
    collect_tree(tokens, at + 2, base, paths);
}

/// The module that `crate::` names in a file of `module`.
fn crate_root(module: &str) -> Vec<String> {
    let member = MEMBERS.iter().find(|member| is_within(module, member));
    member.map_or_else(Vec::new, |member| member.split("::").map(str::to_owned).collect())
}

/// Continues `path` from token `at`; returns the position after it.
fn collect_tree(tokens: &[String], at: usize, mut path: Vec<String>, paths: &mut BTreeSet<String>) -> usize {
    let mut at = at;
    loop {
        match tokens.get(at).map(String::as_str) {
            Some("super") => drop(path.pop()),
            Some("self") => {}
            Some("{") => {
                at += 1;
                while !matches!(tokens.get(at).map(String::as_str), Some("}") | None) {
                    at = collect_tree(tokens, at, path.clone(), paths).max(at + 1);
                    while tokens.get(at).is_some_and(|t| t != "," && t != "}") {
                        at += 1; // `as name`
                    }
                    at += usize::from(tokens.get(at).is_some_and(|t| t == ","));
                }
                return at + 1;
            }
            Some(word) => path.push(word.to_owned()),
            None => break,
        }
        at += 1;
        if tokens.get(at).map(String::as_str) != Some("::") {
            break;
        }
        at += 1;
    }
    paths.insert(path.join("::"));
    at
}

fn is_within(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The longest prefix of `path` that is a module.
fn module_of<'a>(path: &'a str, modules: &BTreeSet<String>) -> &'a str {
    let mut prefix = path;
    while !modules.contains(prefix) {
        match prefix.rsplit_once("::") {
            Some((shorter, _)) => prefix = shorter,
            None => return prefix,
        }
    }
    prefix
}

fn check_edges(sources: &[Source]) -> Vec<String> {
    let modules: BTreeSet<String> = sources.iter().map(Source::module).collect();
    let mut violations = Vec::new();
    for source in sources {
        let module = source.module();
        for path in crate_paths(&module, &source.code()) {
            let why = layer_violation(&module, &path)
                .or_else(|| runtime_violation(&module, &path, &modules))
                .or_else(|| facade_violation(&module, &path, &modules))
                .or_else(|| leaf_violation(&module, &path));
            violations.extend(why.map(|why| format!("{}: {path}: {why}", source.path)));
        }
    }
    violations
}

fn first(path: &str) -> &str {
    path.split("::").next().unwrap_or(path)
}

fn layer_violation(module: &str, path: &str) -> Option<String> {
    let rank = |name: &str| LAYERS.iter().position(|layer| *layer == first(name));
    match (rank(module), rank(path)) {
        (Some(from), Some(to)) if from > to => {
            Some(format!("{} must not know {}", first(module), first(path)))
        }
        _ => None,
    }
}

fn runtime_violation(module: &str, path: &str, modules: &BTreeSet<String>) -> Option<String> {
    let from = first(module.strip_prefix("runtime::")?);
    let target = module_of(path, modules);
    let to = match path.strip_prefix("runtime::") {
        // Re-exports of runtime/mod.rs would hide the edge.
        Some(_) if target == "runtime" => return Some("import from the module that defines it".to_owned()),
        Some(rest) => first(rest),
        None if path == "runtime" => return Some("import from the module that defines it".to_owned()),
        None => return None,
    };
    let rank = |name: &str| RUNTIME_LAYERS.iter().position(|group| group.contains(&name));
    match (rank(from), rank(to)) {
        (None, _) => Some(format!("{from} has no place in RUNTIME_LAYERS")),
        (_, None) => Some(format!("{to} has no place in RUNTIME_LAYERS")),
        (Some(a), Some(b)) if from != to && a >= b => {
            Some(format!("runtime::{from} must not know runtime::{to}"))
        }
        _ => None,
    }
}

fn facade_violation(module: &str, path: &str, modules: &BTreeSet<String>) -> Option<String> {
    if first(module) == "runtime" || first(path) != "runtime" {
        return None;
    }
    let inner = module_of(path, modules).strip_prefix("runtime::")?;
    (!RUNTIME_FACADES.contains(&inner)).then(|| format!("runtime::{inner} is not a facade (RUNTIME_FACADES)"))
}

fn leaf_violation(module: &str, path: &str) -> Option<String> {
    let leaf = LEAVES.iter().find(|leaf| is_within(module, leaf)).copied();
    let (leaf, allowed) = match leaf {
        Some(leaf) => (leaf, &[][..]),
        None => *DATA_LEAVES.iter().find(|(leaf, _)| is_within(module, leaf))?,
    };
    let fine = is_within(path, leaf) || allowed.iter().any(|data| is_within(path, data));
    (!fine).then(|| format!("{leaf} is a leaf"))
}

fn check_silence(sources: &[Source]) -> Vec<String> {
    let silent = sources.iter().filter(|source| SILENT.contains(&first(&source.module())));
    let noise = |source: &Source| {
        let code = source.code();
        let found = NOISE.iter().filter(|word| contains_word(&code, word));
        found.map(|word| format!("{}: {word}", source.path)).collect::<Vec<_>>()
    };
    silent.flat_map(noise).collect()
}

/// Whether `word` occurs and is not the end of a longer name (`print!` in `eprint!`).
fn contains_word(code: &str, word: &str) -> bool {
    let starts_clean = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices(word).any(|(at, _)| starts_clean(at))
}

fn check_unsafe(sources: &[Source]) -> Vec<String> {
    let listed = |path: &str| {
        UNSAFE_FILES.iter().any(|(p, _)| path == *p || (p.ends_with('/') && path.starts_with(p)))
    };
    let has_unsafe = |source: &&Source| tokens(&source.code()).iter().any(|token| token == "unsafe");
    let unlisted = sources.iter().filter(has_unsafe).filter(|source| !listed(&source.path));
    unlisted.map(|source| format!("{}: unsafe outside UNSAFE_FILES", source.path)).collect()
}

fn check_anyhow(sources: &[Source]) -> Vec<String> {
    let outside = sources.iter().filter(|s| !matches!(first(&s.module()), "cli" | "main"));
    let users = outside.filter(|source| tokens(&source.code()).iter().any(|token| token == "anyhow"));
    users.map(|source| format!("{}: anyhow outside cli", source.path)).collect()
}

fn check_headers(sources: &[Source]) -> Vec<String> {
    let headless = sources.iter().filter(|source| !source.text.starts_with("//!"));
    headless.map(|source| format!("{}: no //! header that says what it owns", source.path)).collect()
}

/// Test files (names in tests/, `common/mod.rs` for a folder) that main.rs does not declare.
fn check_wired(main: &str, files: &[String]) -> Vec<String> {
    let code = without_comments_and_literals(main);
    let declared: BTreeSet<&str> = code
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';'))
        .collect();
    let name = |file: &String| file.strip_suffix("/mod.rs").or(file.strip_suffix(".rs")).map(str::to_owned);
    let missing =
        files.iter().filter_map(name).filter(|name| name != "main" && !declared.contains(name.as_str()));
    missing.map(|name| format!("tests/{name} is not wired: add `mod {name};` to tests/main.rs")).collect()
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read_sources(folder: &Path, found: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("src/ is readable") {
        let path = entry.expect("a directory entry").path();
        if path.is_dir() {
            read_sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let relative = path.strip_prefix(repository()).expect("inside the repository");
            let name = relative.to_str().expect("UTF-8 names").replace('\\', "/");
            found.push(Source::new(&name, &fs::read_to_string(&path).expect("source is UTF-8")));
        }
    }
}

fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    read_sources(&repository().join("src"), &mut found);
    assert!(found.len() > 10, "the walk found only {} files", found.len());
    found
}

#[track_caller]
fn assert_clean(violations: Vec<String>) {
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

#[test]
fn imports_go_one_way() {
    assert_clean(check_edges(&sources()));
}

#[test]
fn the_engine_is_silent() {
    assert_clean(check_silence(&sources()));
}

#[test]
fn unsafe_stays_in_listed_files() {
    assert_clean(check_unsafe(&sources()));
}

#[test]
fn anyhow_stays_in_cli() {
    assert_clean(check_anyhow(&sources()));
}

#[test]
fn every_file_says_what_it_owns() {
    assert_clean(check_headers(&sources()));
}

#[test]
fn every_test_file_is_wired() {
    let tests = repository().join("tests");
    let names = fs::read_dir(&tests).expect("tests/ is readable").map(|e| e.expect("an entry").path());
    let files: Vec<String> = names
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.to_owned();
            if path.is_dir() {
                path.join("mod.rs").is_file().then(|| format!("{name}/mod.rs"))
            } else {
                Some(name)
            }
        })
        .filter(|name| name.ends_with(".rs"))
        .collect();
    assert!(files.contains(&"architecture.rs".to_owned()));
    assert_clean(check_wired(&fs::read_to_string(tests.join("main.rs")).expect("tests/main.rs"), &files));
}

/// The lines of the first `count` fenced shell blocks of a Markdown text.
fn shell_commands(markdown: &str, count: usize) -> Vec<String> {
    let blocks = markdown.split("```sh\n").skip(1).take(count);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
    lines.map(str::to_owned).collect()
}

/// Commands that are not a line of their own in `script`, indented or not.
fn check_commands(commands: &[String], script: &str) -> Vec<String> {
    let is_run = |command: &&String| script.lines().any(|line| line.trim() == command.as_str());
    commands.iter().filter(|command| !is_run(command)).cloned().collect()
}

#[test]
fn the_readmes_commands_are_those_of_ci_and_justfile() {
    let read = |name: &str| fs::read_to_string(repository().join(name)).expect(name);
    let commands = shell_commands(&read("README.md"), 2);
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands[0].starts_with("cargo run") && commands[1].starts_with("cargo test"), "{commands:?}");
    for script in [".ci/run", "justfile"] {
        assert_clean(check_commands(&commands, &read(script)));
    }
}

#[test]
fn the_checker_finds_commands_that_are_not_run() {
    let commands =
        shell_commands("a\n```sh\nx --y\n```\n```toml\nno\n```\n```sh\nz\n```\n```sh\nlater\n```", 2);
    assert_eq!(commands, ["x --y", "z"]);
    assert_clean(check_commands(&commands, "  x --y\nz\n"));
    assert_eq!(check_commands(&commands, "x --y 2\n# z\n"), ["x --y", "z"]);
}

/// A small tree that keeps every rule, with one file replaced or added.
fn tree_with(path: &str, text: &str) -> Vec<Source> {
    let mut sources = vec![
        Source::new("src/main.rs", "fn main() { llmctl::cli::main() }"),
        Source::new("src/lib.rs", "pub mod cli; pub mod runtime; pub use llmctl_template as template;"),
        Source::new("src/cli/mod.rs", "use crate::runtime::Error; use crate::runtime::load::hub::resolve;"),
        Source::new("src/runtime/mod.rs", "pub mod error; pub use error::Error;"),
        Source::new("src/runtime/error.rs", ""),
        Source::new("src/runtime/engine.rs", "use super::model::Model; use super::{kv, text::{self, stop}};"),
        Source::new("src/runtime/model/mod.rs", "use super::error::Error; use super::kv::PageTable;"),
        Source::new("src/runtime/model/decoder.rs", "use super::super::kernel::Dtype; use super::Model;"),
        Source::new("src/runtime/kv/mod.rs", "mod pool; pub use pool::PageId;"),
        Source::new("src/runtime/text/mod.rs", ""),
        Source::new("src/runtime/text/stop.rs", ""),
        Source::new("src/runtime/load/mod.rs", "use super::model::Model;"),
        Source::new("src/runtime/load/hub/mod.rs", "use super::super::error::Error;"),
        Source::new("src/runtime/kernel/mod.rs", "mod dtype; use self::dtype::Dtype;"),
        Source::new("src/runtime/engine/schedule.rs", "use crate::runtime::request::Request;"),
        Source::new("src/runtime/request.rs", ""),
        Source::new("src/template/mod.rs", "use self::message::Message;"),
    ];
    sources.retain(|source| source.path != path);
    sources.push(Source::new(path, text));
    sources
}

#[test]
fn the_checker_accepts_a_good_tree() {
    assert_clean(check_edges(&tree_with("src/runtime/sample.rs", "use super::request::Sampling;")));
}

#[test]
fn the_checker_finds_each_bad_edge() {
    for (path, text) in [
        ("src/runtime/sample.rs", "use crate::cli::args;"),
        ("src/runtime/sample.rs", "fn f() { let _ = crate::serve::listen; }"),
        ("src/runtime/model/mod.rs", "use super::engine::Engine;"),
        ("src/runtime/model/decoder.rs", "use super::super::{error::Error, load::hub};"),
        ("src/runtime/model/arch/llama.rs", "use super::super::super::load::Metadata;"),
        ("src/runtime/kv/mod.rs", "use crate::runtime::{text::stop, error};"),
        ("src/runtime/sample.rs", "use super::model::Model;"),
        ("src/runtime/unplaced.rs", "use super::error::Error;"),
        ("src/runtime/engine.rs", "use crate::runtime::Error;"),
        ("src/runtime/engine.rs", "use super::Error;"),
        ("src/runtime/text/stop.rs", "use super::super::error::Error;"),
        ("src/runtime/text/stop.rs", "use super::Tokenizer;"),
        ("src/runtime/engine/schedule.rs", "use crate::runtime::kv::PageTable;"),
        ("src/cli/run.rs", "use crate::runtime::kernel::Dtype;"),
        ("src/cli/run.rs", "use crate::{runtime::model::decoder::Decoder as D, template};"),
        ("src/runtime/kv/mod.rs", "mod inner { use super::super::engine::Engine; }"),
        ("src/cli/run.rs", "#[cfg(test)] use x; use crate::runtime::kernel::Dtype;"),
        (
            "src/cli/run.rs",
            "const A: &str = r#\"\"}\"#; const B: char = '\"'; use crate::runtime::kernel::Dtype;",
        ),
    ] {
        assert_eq!(check_edges(&tree_with(path, text)).len(), 1, "{path}: {text}");
    }
}

#[test]
fn the_checker_reads_code_and_not_prose() {
    for text in [
        "// use crate::cli::args;",
        "/* crate::cli */ const A: &str = \"crate::cli::x \\\" crate::cli\";",
        "const A: &str = r#\"crate::cli \" crate::cli\"#;",
        "#[cfg(test)]\nmod tests { use crate::cli::args; fn f() { println!(\"}\") } }",
        "fn f<'a>(x: &'a str) -> char { '\"' } // crate::cli \"",
        "mod inner { use super::PageId; }",
    ] {
        let tree = tree_with("src/runtime/kv/mod.rs", text);
        assert_clean(check_edges(&tree));
        assert_clean(check_silence(&tree));
    }
}

#[test]
fn the_checker_finds_noise() {
    for text in [
        "fn f() { println!(\"x\") }",
        "fn f() { eprintln!(\"x\") }",
        "use std::env;",
        "fn f() { std::env::var(\"HOME\"); }",
        "use std::io::IsTerminal;",
        "fn f() { std::io::stdout(); }",
    ] {
        assert!(!check_silence(&tree_with("src/runtime/kv/mod.rs", text)).is_empty(), "{text}");
        assert_clean(check_silence(&tree_with("src/cli/mod.rs", text)));
    }
    assert_clean(check_silence(&tree_with("src/runtime/kv/mod.rs", "fn f() { my_print!(env!(\"X\")) }")));
}

#[test]
fn the_checker_finds_unsafe_and_anyhow_and_missing_headers() {
    let block = "fn f() { unsafe { g() } }";
    assert_eq!(check_unsafe(&tree_with("src/runtime/kv/mod.rs", block)).len(), 1);
    assert_clean(check_unsafe(&tree_with("src/runtime/kernel/avx2.rs", block)));
    assert_clean(check_unsafe(&tree_with("src/runtime/kv/mod.rs", "#![deny(unsafe_code)] // unsafe")));
    assert_eq!(check_anyhow(&tree_with("src/runtime/kv/mod.rs", "use anyhow::Context;")).len(), 1);
    assert_clean(check_anyhow(&tree_with("src/cli/mod.rs", "use anyhow::Context;")));
    assert_eq!(
        check_headers(&[Source::new("src/a.rs", "//! Owns a."), Source::new("src/b.rs", "// b")]).len(),
        1
    );
}

#[test]
fn the_checker_finds_unwired_tests() {
    let files = ["main.rs", "a.rs", "b.rs", "common/mod.rs"].map(str::to_owned);
    assert_clean(check_wired("mod a;\nmod b;\nmod common;\n", &files));
    assert_eq!(check_wired("mod a;\n// mod b;\nmod common;\n", &files).len(), 1);
    assert_eq!(check_wired("mod a;\nmod b;\n", &files).len(), 1);
}
