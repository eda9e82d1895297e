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

/// The crates of the workspace, as paths name them: the folder, and the crates that each may use. The compiler refuses a circle.
/// A file belongs to the first folder that holds it; `llmctl` is `cli`, `main` and `lib`.
const CRATES: &[(&str, &str, &[&str])] = &[
    ("base", "src/base/", &["template"]), // an error of a template is an error of a request
    ("kernel", "src/runtime/kernel/", &[]),
    ("image", "src/image/", &[]),
    ("models", "src/runtime/models/", &["base", "hub", "image", "kernel", "template"]), // template: hints change a conversation
    ("engine", "src/runtime/", &["base", "image", "models", "template"]),
    ("hub", "src/hub/", &["base"]),
    ("bench", "src/bench/", &["base", "engine", "kernel", "models"]),
    ("serve", "src/serve/", &["base", "engine", "image", "models", "template"]),
    ("template", "src/template/", &[]),
    ("llmctl", "src/", &["base", "bench", "engine", "hub", "image", "kernel", "models", "serve", "template"]),
];

/// Inside the engine: each group may import from those after it, and its members not from each other.
const ENGINE_LAYERS: &[&[&str]] = &[
    &["http_engine", "thread", "worker"], // the three kinds of engine behind a client
    &["embed"],
    &["client"],
    &["turn"],
    &["engine", "template_check"], // asks what sessions make of a template
    &["session"],
    &["step"],
    &["sequence"],
    &["chat_tokenizer"],
    &["images"],
    &["receipt"],
    &["sample"],
    &["request"],
    &["spec"],              // a request is checked against the limits of its engine
    &["grammar", "infill"], // a request carries its grammar, which is made from a tokenizer
    &["repetition"],
];

/// Inside models.
const MODELS_LAYERS: &[&[&str]] = &[
    &["tests"], // integration tests of the crate
    &["build"], // the build script
    &["load"],
    &["vision"],
    &["model"],
    &["kv", "text"],
    &["backend"],
    &["memory", "panels"],
    &["tensor"],
    &["adapters", "hints"],
    &["images"],
];

/// Inside base.
const BASE_LAYERS: &[&[&str]] = &[
    &["read", "sampling", "vault"],
    &["error", "notice"],
    &["columns", "machine", "private_files", "units"],
];

/// Inside cli.
const CLI_LAYERS: &[&[&str]] = &[
    &["guide_facts"], // tests only
    &["launch"],
    &["embed", "warm"],
    &["batch", "chat", "completions"],
    &["run"],
    &["declared_tools", "serve"],
    &["bench", "doctor", "endpoint", "mcp", "replay", "template_cmd"],
    &["model"],
    &["config", "man", "sessions", "think"],
    &["images"],
    &["terminal"],
    &["flags", "places"],
    &["error", "script"],
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
    &["command", "throughput", "typed_ahead"],
];

/// Inside serve.
const SERVE_LAYERS: &[&[&str]] = &[
    &["front"], // sockets, and the envelope around all errors
    &["fleet"],
    &["api"],
    &["shared"], // what all models of a server have in common
    &["sessions", "telemetry"],
    &["engines", "gate", "wire"],
    &["downloads", "error", "net", "page", "tools"],
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
    &["arrange", "environment", "images"],
    &["link", "variables"],
    &["python"],
    &["source"],
    &["clock", "error", "message", "named", "piece", "reasoning_switch"],
];

/// Modules that import nothing from the crate but their own parts: the ones to test to death.
const LEAVES: &[&str] = &[
    "bench::stats",
    "base::machine",
    "base::units",
    "engine::repetition",
    "models::text::stop",
    "models::text::utf8",
];

/// Leaves that may still use plain data.
const DATA_LEAVES: &[(&str, &[&str])] = &[
    ("engine::engine::schedule", &["engine::request"]),
    ("engine::session::prefill", &["engine::request", "models::kv::Tokens"]),
];

/// Outside of these nothing is printed and no variable, argument or terminal is read.
const LOUD: [&str; 2] = ["cli", "main"];
/// Speaks to cargo on stdout, and is no part of the program.
const BUILD_SCRIPT: &str = "src/runtime/models/build.rs";
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
    ("src/cli/terminal/descriptors.rs", "the limit on open files; stdout before `main`"),
    ("src/cli/terminal/signal.rs", "signal handlers"),
    ("src/cli/terminal/tty.rs", "terminal modes, also from a signal handler"),
    ("src/runtime/models/backend/cpu/kv.rs", "several threads write a page, each the blocks of its heads"),
    ("src/runtime/models/backend/candle/cuda/launch.rs", "launches of kernels, and memory that they fill"),
    ("src/runtime/kernel/", "instruction sets chosen at run time"),
    ("src/base/machine/cores.rs", "the call for the numbers of Apple's cores"),
    ("src/runtime/models/memory.rs", "the allocator's call to give memory back"),
    ("src/runtime/models/tensor.rs", "memory-mapped files"),
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

    /// `models::load::export` for src/runtime/models/load/export/mod.rs; `main` and `lib` for the roots of `llmctl`.
    fn module(&self) -> String {
        let (name, folder, _) = crate_of(&self.path);
        let path = self.path.strip_prefix(folder).unwrap_or("lib.rs"); // src/serve.rs lies beside its folder
        let path = path.strip_suffix(".rs").unwrap_or(path);
        let path = path.strip_suffix("/mod").unwrap_or(path).replace('/', "::");
        match (name, path.as_str()) {
            ("llmctl", _) => path,
            (_, "lib" | "mod") => name.to_owned(),
            _ => format!("{name}::{path}"),
        }
    }

    /// The text without comments, literals and test modules; nothing for a file of unit tests.
    fn code(&self) -> String {
        if self.is_tests() {
            return String::new();
        }
        without_test_modules(&without_comments_and_literals(&self.text))
    }

    /// True for files that are unit tests as a whole: `tests.rs`, `*_tests.rs`, `fixtures.rs` and those in a folder `tests`.
    fn is_tests(&self) -> bool {
        let path = &self.path;
        ["/tests.rs", "_tests.rs", "/fixtures.rs"].iter().any(|end| path.ends_with(end))
            || path.contains("/tests/")
    }
}

/// The row of [`CRATES`] that a file belongs to.
fn crate_of(path: &str) -> (&'static str, &'static str, &'static [&'static str]) {
    let holds =
        |folder: &str| path.starts_with(folder) || path == format!("{}.rs", folder.trim_end_matches('/'));
    *CRATES.iter().find(|(_, folder, _)| holds(folder)).expect("a file below src/")
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
            word if before != Some("::") && (is_relative(word) || word.starts_with("llmctl")) => {
                collect_path(&tokens, at, &here, &mut paths);
            }
            _ => {}
        }
    }
    paths
}

fn is_relative(word: &str) -> bool {
    matches!(word, "crate" | "self" | "super")
}

/// Reads the path (with its `{...}` tree) that starts at `at`, when it is one.
fn collect_path(tokens: &[String], at: usize, here: &[String], paths: &mut BTreeSet<String>) {
    if tokens.get(at + 1).map(String::as_str) != Some("::") {
        return;
    }
    let of_crate = |name: &str| if name.is_empty() { Vec::new() } else { vec![name.to_owned()] };
    let base = match tokens[at].as_str() {
        "crate" => of_crate(crate_root(here)),
        "self" => here.to_vec(),
        "super" => here[..here.len().saturating_sub(1)].to_vec(),
        name => of_crate(name.trim_start_matches("llmctl").trim_start_matches('_')),
    };
    collect_tree(tokens, at + 2, base, paths);
}

/// The module that `crate::` names in a file of `module`; empty in `llmctl`.
fn crate_root(module: &[String]) -> &str {
    let root = module.first().map_or("", String::as_str);
    if matches!(root, "cli" | "main" | "lib") { "" } else { root }
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

fn check_leaves(sources: &[Source]) -> Vec<String> {
    let of_file = |source: &Source| {
        let module = source.module();
        let paths = crate_paths(&module, &source.code()).into_iter();
        let found = paths.filter_map(|path| Some(format!("{path}: {}", leaf_violation(&module, &path)?)));
        found.map(|why| format!("{}: {why}", source.path)).collect::<Vec<_>>()
    };
    sources.iter().flat_map(of_file).collect()
}

/// Rows of the tables that fit no file.
fn stale_rows(sources: &[Source]) -> Vec<String> {
    let modules: BTreeSet<String> = sources.iter().map(Source::module).collect();
    let leaves = LEAVES.iter().chain(DATA_LEAVES.iter().map(|(leaf, _)| leaf));
    let leaves = leaves.filter(|leaf| !modules.contains(**leaf)).map(|leaf| (*leaf).to_owned());
    let files = UNSAFE_FILES.iter().map(|(path, _)| path).chain(CRATES.iter().map(|(_, folder, _)| folder));
    let files = files.filter(|path| !sources.iter().any(|source| source.path.starts_with(**path)));
    leaves.chain(files.map(|path| (*path).to_owned())).map(|row| format!("{row} is gone")).collect()
}

/// The crates of the workspace that a manifest names as dependencies of its crate.
fn used_crates(manifest: &str) -> Vec<String> {
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let section = section.split("\n[").next().unwrap_or_default();
    let names = section.lines().filter_map(|line| line.strip_prefix("llmctl-")?.split(['.', ' ']).next());
    names.map(str::to_owned).collect()
}

fn first(path: &str) -> &str {
    path.split("::").next().unwrap_or(path)
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
    let is_silent =
        |source: &&Source| source.path != BUILD_SCRIPT && !LOUD.contains(&first(&source.module()));
    let silent = sources.iter().filter(is_silent);
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
fn crates_use_those_that_the_table_names() {
    for (name, folder, uses) in CRATES {
        let folder = if *name == "llmctl" { "" } else { folder };
        let manifest = repository().join(folder).join("Cargo.toml");
        assert_eq!(used_crates(&fs::read_to_string(&manifest).expect("a manifest")), *uses, "{name}");
    }
}

#[test]
fn leaves_import_nothing() {
    assert_clean(check_leaves(&sources()));
}

#[test]
fn no_row_of_a_table_is_stale() {
    assert_clean(stale_rows(&sources()));
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
        Source::new("src/lib.rs", "pub mod cli;"),
        Source::new("src/cli/mod.rs", "use llmctl_base::Error; use llmctl_hub::resolve;"),
        Source::new("src/runtime/models/text/stop.rs", ""),
        Source::new("src/runtime/engine/schedule.rs", "use crate::request::Request;"),
        Source::new("src/runtime/request.rs", ""),
    ];
    sources.retain(|source| source.path != path);
    sources.push(Source::new(path, text));
    sources
}

#[test]
fn files_belong_to_the_modules_of_crates() {
    for (path, module) in [
        ("src/main.rs", "main"),
        ("src/cli/run/mod.rs", "cli::run"),
        ("src/serve.rs", "serve"),
        ("src/serve/api/chat.rs", "serve::api::chat"),
        ("src/hub/lib.rs", "hub"),
        ("src/runtime/mod.rs", "engine"),
        ("src/runtime/engine/mod.rs", "engine::engine"),
        ("src/runtime/models/kv/mod.rs", "models::kv"),
    ] {
        assert_eq!(Source::new(path, "").module(), module);
    }
}

#[test]
fn imports_are_read_from_every_form() {
    let paths =
        |module: &str, code: &str| crate_paths(module, code).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(paths("cli::run", "use crate::cli::args; use llmctl_base::Error;"), "base::Error cli::args");
    assert_eq!(
        paths("engine::sample", "use super::request::{self, Sampling as S};"),
        "engine::request engine::request::Sampling"
    );
    assert_eq!(
        paths("engine::kv", "mod inner { use super::super::engine::Engine; }"),
        "engine::engine::Engine"
    );
    assert_eq!(paths("models::kv", "fn f() { let _ = crate::load::x(); }"), "models::load::x");
    assert_eq!(paths("main", "fn main() { llmctl::cli::main() }"), "cli::main");
    let manifest = "[package]\n\n[dependencies]\nllmctl-base.workspace = true\nllmctl-hub = { path = \"\" }\nx = \"1\"\n\n[dev-dependencies]\nllmctl-serve = \"1\"\n";
    assert_eq!(used_crates(manifest), ["base", "hub"]);
}

#[test]
fn the_checker_finds_each_bad_edge() {
    assert_clean(check_leaves(&tree_with("src/runtime/sample.rs", "use super::request::Sampling;")));
    for (path, text) in [
        ("src/runtime/models/text/stop.rs", "use llmctl_base::error::Error;"),
        ("src/runtime/models/text/stop.rs", "use super::Tokenizer;"),
        ("src/runtime/engine/schedule.rs", "use crate::kv::PageTable;"),
        (
            "src/runtime/engine/schedule.rs",
            "const A: &str = r#\"\"}\"#; const B: char = '\"'; use crate::kv::PageTable;",
        ),
        ("src/runtime/engine/schedule.rs", "#[cfg(test)] use x; use crate::kv::PageTable;"),
    ] {
        assert_eq!(check_leaves(&tree_with(path, text)).len(), 1, "{path}: {text}");
    }
    assert!(!stale_rows(&tree_with("src/runtime/sample.rs", "")).is_empty());
}

#[test]
fn the_checker_reads_code_and_not_prose() {
    for text in [
        "// use crate::kv::X;",
        "/* crate::kv */ const A: &str = \"crate::kv::x \\\" crate::kv\";",
        "const A: &str = r#\"crate::kv \" crate::kv\"#;",
        "#[cfg(test)]\nmod tests { use crate::kv::X; fn f() { println!(\"}\") } }",
        "fn f<'a>(x: &'a str) -> char { '\"' } // crate::kv \"",
        "mod inner { use super::PageId; }",
    ] {
        let tree = tree_with("src/runtime/engine/schedule.rs", text);
        assert_clean(check_leaves(&tree));
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
        assert!(!check_silence(&tree_with("src/runtime/models/kv/mod.rs", text)).is_empty(), "{text}");
        assert_clean(check_silence(&tree_with("src/cli/mod.rs", text)));
    }
    assert_clean(check_silence(&tree_with(
        "src/runtime/models/kv/mod.rs",
        "fn f() { my_print!(env!(\"X\")) }",
    )));
}

#[test]
fn the_checker_finds_unsafe_and_missing_headers() {
    let block = "fn f() { unsafe { g() } }";
    assert_eq!(check_unsafe(&tree_with("src/runtime/models/kv/mod.rs", block)).len(), 1);
    assert_clean(check_unsafe(&tree_with("src/runtime/kernel/avx2.rs", block)));
    assert_clean(check_unsafe(&tree_with("src/runtime/models/kv/mod.rs", "#![deny(unsafe_code)] // unsafe")));
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
