//! Promise: the pages of docs/ are true of the program. Their commands run or at least parse, their links lead somewhere, every
//! page is in the book, the messages of the troubleshooting page are in the source, and the configuration page is what clap says.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cli::Place;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn docs() -> PathBuf {
    repository().join("docs")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of the pages in docs/, without the table of contents.
fn pages() -> Vec<String> {
    let entries = fs::read_dir(docs()).expect("docs/ is readable");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".md") && name != "SUMMARY.md").collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    names
}

/// Fenced blocks of a page whose information string satisfies `is_wanted`.
fn blocks(page: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<(bool, String)> = None;
    for line in page.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => open = Some((is_wanted(info), String::new())),
            (Some((is_wanted, text)), Some("")) => {
                if *is_wanted {
                    found.push(std::mem::take(text));
                }
                open = None;
            }
            (Some((_, text)), _) => {
                text.push_str(line);
                text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block does not end");
    found
}

/// Pages whose `sh` blocks are commands to try; those of the others show settings and what other programs need.
const TRIED: [&str; 7] = ["chat.md", "index.md", "replay.md", "run.md", "server.md", "speed.md", "start.md"];

/// A shell that finds this build of llmctl, in the environment and folder of `place`.
fn shell(place: &Place, script: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_llmctl")).parent().expect("a folder").to_owned();
    let others = std::env::var_os("PATH").unwrap_or_default();
    let path =
        std::env::join_paths([program].into_iter().chain(std::env::split_paths(&others))).expect("a PATH");
    let mut command = Command::new("sh");
    command.env_clear().args(["-eu", "-c", script]).current_dir(place.folder.path()).stdin(Stdio::null());
    command.envs(place.command::<&str>(&[]).get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("PATH", path);
    command
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Each page is one visit to a shell: blocks see the files that earlier ones have written.
#[test]
fn the_commands_of_the_pages_run() {
    let mut num_blocks = 0;
    for page in TRIED {
        let scripts = blocks(&read(&docs().join(page)), |info| info == "sh");
        num_blocks += scripts.len();
        let place = Place::new();
        for script in scripts {
            if script.contains("curl") && Command::new("curl").arg("--version").output().is_err() {
                crate::common::skip(format!("{page} needs curl"));
                continue;
            }
            let ran =
                shell(&place, &script.replace("8499", &free_port().to_string())).output().expect("sh starts");
            let errors = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success(), "{page}: {script}\n{errors}");
            assert!(!ran.stdout.is_empty(), "{page} prints nothing: {script}\n{errors}");
        }
    }
    assert!(num_blocks >= 8, "{num_blocks}");
}

/// The arguments of the `llmctl` commands in shell text: up to a comment, a pipe, a redirection or the end of a command.
fn invocations(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n", " ");
    let mut found = Vec::new();
    for line in joined.lines() {
        let words = shell_words(line);
        let commands = words.split(|word| matches!(word.as_str(), "|" | "&" | "&&" | ";"));
        for command in commands {
            if command.first().is_some_and(|word| word == "llmctl") {
                let end = command.iter().position(|word| word.starts_with(['>', '<', '#']));
                found.push(command[..end.unwrap_or(command.len())].to_vec());
            }
        }
    }
    found
}

/// Words of a line as sh splits them, as far as the pages need it: quotes, comments, `;` and `|` at the end of a word.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None => match c {
                '\'' | '"' => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                '#' if word.is_none() => return words,
                ';' | '|' | '&' => {
                    words.extend(word.take());
                    words.push(c.to_string());
                }
                c if c.is_whitespace() => words.extend(word.take()),
                c => word.get_or_insert_default().push(c),
            },
        }
    }
    words.extend(word);
    words
}

#[test]
fn words_are_split_as_a_shell_does() {
    let found = invocations(
        "cat a | llmctl run 'a b' --x \"c;d\" > out # note\nllmctl chat; llmctl serve & wait\n# llmctl no\n",
    );
    let expected = [&["llmctl", "run", "a b", "--x", "c;d"][..], &["llmctl", "chat"], &["llmctl", "serve"]];
    assert_eq!(found, expected.map(|words| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>()));
}

/// Also those that need a network, a model or another program: flags and subcommands exist, values have the right form.
#[test]
fn each_command_of_the_pages_parses() {
    let mut num_commands = 0;
    for page in pages() {
        let text = read(&docs().join(&page));
        let shell = blocks(&text, |info| info.starts_with("sh") || info == "console").join("\n");
        let quoted = text
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|code| code.starts_with("llmctl "))
            .map(|code| code.replace("\\|", "|"));
        let quoted: Vec<String> =
            quoted.filter(|code| page == "migrating.md" && !code.contains('\n')).collect();
        for words in invocations(&(shell + "\n" + &quoted.join("\n"))) {
            num_commands += 1;
            let parsed = llmctl::cli::command().try_get_matches_from(&words);
            if let Err(error) = parsed {
                assert!(!error.use_stderr(), "{page}: {words:?}: {error}");
            }
        }
    }
    assert!(num_commands > 30, "{num_commands}");
}

/// The anchor that GitHub and mdBook give a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn broken_links(file: &Path) -> Vec<String> {
    let text = read(file);
    let mut broken = Vec::new();
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    for target in targets.filter(|target| !target.contains("://") && !target.contains(' ')) {
        let (path, heading) = target.split_once('#').unwrap_or((target, ""));
        let page =
            if path.is_empty() { file.to_owned() } else { file.parent().expect("a folder").join(path) };
        let is_there = page.exists()
            && (heading.is_empty()
                || read(&page)
                    .lines()
                    .any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#')) == heading));
        let leaves_the_site = file.starts_with(docs()) && path.starts_with("../");
        if !is_there || leaves_the_site {
            broken.push(format!("{}: {target}", file.display()));
        }
    }
    broken
}

#[test]
fn links_lead_somewhere() {
    let roots = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
    let files =
        pages().into_iter().map(|page| docs().join(page)).chain(roots.map(|name| repository().join(name)));
    let broken: Vec<String> = files.flat_map(|file| broken_links(&file)).collect();
    assert!(broken.is_empty(), "{broken:#?}");

    let place = tempfile::tempdir().expect("a folder");
    let page = place.path().join("a.md");
    fs::write(&page, "# Two words\n[a](#two-words) [b](b.md) [c](a.md#three)").expect("written");
    assert_eq!(broken_links(&page).len(), 2);
}

#[test]
fn every_page_is_in_the_book() {
    let summary = read(&docs().join("SUMMARY.md"));
    let listed: BTreeSet<String> = summary
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(page, _)| page.to_owned())
        .collect();
    assert_eq!(listed, pages().into_iter().collect());
}

/// All Rust source, with the line breaks that `\` takes out of strings.
fn source(folder: &Path, into: &mut String) {
    for entry in fs::read_dir(folder).expect("src/ is readable") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            source(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push_str(&read(&path));
        }
    }
}

#[test]
fn messages_of_the_troubleshooting_page_are_the_programs() {
    let mut text = String::new();
    source(&repository().join("src"), &mut text);
    let page = read(&docs().join("troubleshooting.md"));
    let messages =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(message, _)| message);
    let mut num_parts = 0;
    for part in messages.flat_map(|message| message.split(" ... ")) {
        num_parts += 1;
        assert!(text.contains(part), "no message has {part:?}");
    }
    assert!(num_parts > 15, "{num_parts}");
}

/// Rows of the configuration page: flag, variable and default of each option, by subcommand.
fn configuration_page() -> String {
    let mut page = String::from(
        "# Configuration\n\nEvery flag is a key of `llmctl.toml` and `~/.config/llmctl/config.toml` (its long name, in the table of its subcommand or at \
         the top for all) and a variable. `llmctl help config` says which value wins, `llmctl config show --origin` where each came from. \
         This page is written from the program's own definition.\n\n\
         A folder may come from another person. So a `llmctl.toml` in it may set only flags that choose models, shape answers and measurements, or bound \
         resources. Those with \u{2020} open, write or erase a file or a session, run a program, open a server to others, name a server or a key, or give \
         consent: they are refused there by name and line, and belong in your own file, a variable or the command line.\n",
    );
    let root = llmctl::cli::command();
    table_of("llmctl", &root, &mut page);
    page
}

fn table_of(name: &str, command: &clap::Command, page: &mut String) {
    let options: Vec<&clap::Arg> = command
        .get_arguments()
        .filter(|option| {
            option.get_long().is_some_and(|long| long != "help" && long != "version") && !option.is_hide_set()
        })
        .collect();
    if !options.is_empty() {
        let _ = write!(page, "\n## {name}\n\n| flag | default | |\n| --- | --- | --- |\n");
    }
    for option in options {
        let value = option.get_value_names().filter(|_| option.get_action().takes_values());
        let value = value.map_or(String::new(), |names| format!(" {}", names.join(" ").replace('|', "\\|")));
        let defaults: Vec<_> =
            option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = match defaults.is_empty() || !option.get_action().takes_values() {
            true => String::new(),
            false => format!("`{}`", defaults.join(",")),
        };
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ");
        let long = option.get_long().expect("filtered");
        let mark = if llmctl::cli::config::suits_project(long) { "" } else { " \u{2020}" };
        let _ = writeln!(page, "| `--{long}{value}`{mark} | {default} | {help} |");
    }
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help")
    {
        table_of(&format!("{name} {}", inner.get_name()), inner, page);
    }
}

/// The table of families between its marks in docs/models.md.
#[test]
fn the_families_on_the_page_are_those_of_the_program() {
    use llmctl_models::model::arch::FAMILIES;
    let mut families: Vec<_> = FAMILIES.iter().collect();
    families.sort_by_key(|family| family.published.to_lowercase());
    assert!(families.iter().all(|family| !family.published.is_empty()), "each family has its models");
    let mut table =
        String::from("| models | `model_type` in config.json | architecture in GGUF |\n|---|---|---|\n");
    for family in families {
        let names =
            |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(
            table,
            "| {} | {} | {} |",
            family.published,
            names(family.model_types),
            names(family.gguf_names)
        );
    }
    let path = docs().join("models.md");
    let page = read(&path);
    let (before, rest) = page.split_once("<!-- families -->\n").expect("the beginning is marked");
    let (_, after) = rest.split_once("<!-- end of families -->").expect("the end is marked");
    let whole = format!("{before}<!-- families -->\n{table}<!-- end of families -->{after}");
    if std::env::var("INSTA_UPDATE").as_deref() == Ok("always") {
        fs::write(&path, &whole).expect("docs/ is writable");
    }
    assert_eq!(read(&path), whole, "INSTA_UPDATE=always cargo test docs:: writes it anew");
}

#[test]
fn the_configuration_page_is_what_the_program_defines() {
    let path = docs().join("configuration.md");
    let page = configuration_page();
    if std::env::var("INSTA_UPDATE").as_deref() == Ok("always") {
        fs::write(&path, &page).expect("docs/ is writable");
    }
    assert_eq!(read(&path), page, "INSTA_UPDATE=always cargo test docs:: writes it anew");
}

/// Figures of README's table of speed, column by column, without the first and the last one (names, peak memory).
fn figures_of_speed(readme: &str) -> Vec<String> {
    let section = readme.split("\n## Speed\n").nth(1).expect("a section of speed");
    let lines =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<&str>> =
        lines.skip(2).map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect();
    let num_columns = rows.first().map_or(0, Vec::len);
    assert!(rows.len() > 3 && num_columns > 3, "{rows:?}");
    let column = |number: usize| rows.iter().map(move |row| row[number].to_owned());
    (1..num_columns - 1).flat_map(column).filter(|figure| !figure.is_empty()).collect()
}

/// Median of the rates or times of one side.
fn median(values: &Value) -> f64 {
    let mut values: Vec<f64> = match values {
        Value::Array(values) => values.iter().filter_map(Value::as_f64).collect(),
        single => single.as_f64().into_iter().collect(),
    };
    values.sort_by(f64::total_cmp);
    assert!(!values.is_empty());
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

/// llmctl's number over the best of the others', where they have one.
fn ratio_to_the_best(sides: &Value, more_is_better: bool) -> Option<f64> {
    let sides = sides.as_object().expect("numbers by side");
    let of = |name: &String| (name != "llmctl" && name != "kept").then(|| median(&sides[name]));
    let others = sides.keys().filter_map(of);
    let best = if more_is_better { others.reduce(f64::max) } else { others.reduce(f64::min) };
    best.map(|best| median(&sides["llmctl"]) / best)
}

#[test]
fn the_table_of_speed_is_that_of_the_run() {
    let run = read(&docs().join("speed/zen5.json"));
    let run: Value = serde_json::from_str(&run).expect("JSON of benches/side_by_side.py");
    let results = run["results"].as_array().expect("results");
    let mut figures = Vec::new();
    for test in ["pp512", "tg128", "tg32@2048", "8 seq"] {
        for result in results {
            let rows = result["rows"].as_array().expect("rows");
            let row = rows.iter().find(|row| row["test"] == test);
            let ratio = row.and_then(|row| ratio_to_the_best(&row["rates"], true));
            figures.extend(
                ratio.map(|ratio| if ratio < 1.0 { format!("{ratio:.2}") } else { format!("{ratio:.1}") }),
            );
        }
    }
    let remedy = "python benches/speed_page.py writes it";
    assert_eq!(figures_of_speed(&read(&repository().join("README.md"))), figures, "{remedy}");
    let page = read(&docs().join("speed.md"));
    for fact in [&run["processor"], &run["date"]] {
        assert!(page.contains(fact.as_str().expect("a text")), "{fact}: {remedy}");
    }
    let memory = ratio_to_the_best(&results[0]["facts"]["memory"], false).expect("memory of a peer");
    assert!(page.contains(&format!("| {memory:.2} |")), "{memory}: {remedy}");
}

#[test]
fn the_plot_of_speed_shows_the_table() {
    let plot = read(&docs().join("pictures/speed.svg"));
    let values = plot.split("class=\"value\"").skip(1).filter_map(|rest| rest.split(['<', '>']).nth(1));
    let shown: Vec<String> = values.map(str::to_owned).collect();
    assert_eq!(
        shown,
        figures_of_speed(&read(&repository().join("README.md"))),
        "python docs/pictures/plot.py draws it"
    );
}
