//! `llmctl config`: the values in force and where each comes from; the files' paths.
//!
//! `show` prints TOML that can be saved as a configuration file again. A key is printed at the top when all
//! subcommands that have the flag agree, which is how variables and the top of a file work, else in the
//! subcommand's table.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;

use clap::{Arg, Args, Command, Subcommand};
use serde_json::json;

use super::config::shape::{self, Scalar, Shape};
use super::config::{Config, file};
use super::error::{CommandError, Exit, Kind};
use super::places::Places;
use super::report::{ReportFormat, print, print_json};

/// Show the configuration in force, and where its files are
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ConfigCommand {
    /// Print the values in force as TOML that can be a configuration file
    Show(ShowArgs),
    /// Print the path of your configuration file, there or not
    Path(PathArgs),
}

#[derive(Debug, Clone, Args)]
pub struct ShowArgs {
    /// Say of each value where it comes from: flag, variable, file and line, or built in
    #[arg(long)]
    pub origin: bool,

    /// What goes to stdout: TOML, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

#[derive(Debug, Clone, Args)]
pub struct PathArgs {
    /// What goes to stdout: the path, or one JSON object with all files looked for
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

const LONG_HELP: &str = "\
Files, the first wins:
  ./llmctl.toml                          the project's
  $XDG_CONFIG_HOME/llmctl/config.toml    yours (default ~/.config/llmctl/config.toml), or --config FILE

A value is taken from the flag, else its LLMCTL_ variable, the project's file, your file, what the model's
publisher recommends (generation_config.json), else the built-in one. Keys are long flag names:

  model = \"org/repo:Q4_K_M\"      # for every subcommand that has --model
  [run]
  max-tokens = 256               # for `llmctl run` only
  stop = [\"###\"]                 # a repeatable flag
  stats = true                   # a switch
  [aliases]
  small = \"org/small-model\"      # llmctl run --model small

An unknown key or a wrong type is an error with file, line and column (exit code 78), and so is a file named by
--config that is not there.";

/// Subcommands whose unset flags are not worth a line each.
const HELPERS: [&str; 6] = ["models", "template", "config", "doctor", "completions", "man"];

/// One flag of one subcommand with the value in force.
#[derive(Debug, Clone, PartialEq)]
struct Setting {
    /// The subcommand whose table it belongs to; `None` is the top.
    table: Option<String>,
    key: String,
    /// `None`: not set, the built-in behaviour applies.
    value: Option<toml::Value>,
    origin: Origin,
}

#[derive(Debug, Clone, PartialEq)]
enum Origin {
    Flag,
    Variable(String),
    File { path: String, line: usize },
    BuiltIn,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Variable(name) => f.write_str(name),
            Origin::File { path, line } => write!(f, "{path}:{line}"),
            Origin::BuiltIn => f.write_str("built-in"),
        }
    }
}

pub fn run(
    args: ConfigArgs,
    config: &Config,
    places: &Places,
    command: &Command,
) -> Result<Exit, CommandError> {
    match args.command {
        ConfigCommand::Path(args) => path(&args, config),
        ConfigCommand::Show(args) => {
            config.check()?;
            let settings = settings(config, places, command, &|name| std::env::var_os(name))?;
            match args.output {
                ReportFormat::Text => print(&to_toml(&settings, config, places, args.origin)),
                ReportFormat::Json => print_json(&to_json(&settings, config)),
            }
        }
    }
}

/// The text in force for `key` in `llmctl run`, where it is set and valid.
pub fn value_of(key: &str, config: &Config, places: &Places, command: &Command) -> Option<String> {
    let run = command.find_subcommand("run")?;
    let settings = command_settings(config, places, run, Some("run"), &|name| std::env::var_os(name)).ok()?;
    let setting = settings.into_iter().find(|setting| setting.key == key)?;
    let value = setting.value?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

fn path(args: &PathArgs, config: &Config) -> Result<Exit, CommandError> {
    let looked = config.looked();
    if args.output == ReportFormat::Json {
        let entry =
            |l: &super::config::Looked| json!({"role": l.role.name(), "path": l.path, "exists": l.exists});
        let files: Vec<_> = looked.iter().map(entry).collect();
        return print_json(&json!({"schema": "llmctl.config-path.v1", "files": files}));
    }
    match looked.iter().find(|l| l.role != super::config::Role::Project) {
        Some(file) => print(&format!("{}\n", file.path.display())),
        None => {
            let error =
                anyhow::anyhow!("neither XDG_CONFIG_HOME nor HOME is set, so there is no place for it");
            Err(CommandError::new(Kind::Config, error))
        }
    }
}

type Variables<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// Every key with its value, the top first, then table by table.
fn settings(
    config: &Config,
    places: &Places,
    command: &Command,
    variables: &Variables<'_>,
) -> Result<Vec<Setting>, CommandError> {
    let mut settings: Vec<Setting> = Vec::new();
    let root = command;
    let scopes = root.get_subcommands().map(|sub| (Some(sub.get_name()), sub));
    for (scope, command) in std::iter::once((None, root)).chain(scopes) {
        let mut found = command_settings(config, places, command, scope, variables)?;
        if scope.is_some() {
            // A global flag may be set in a subcommand's table too.
            let global = command_settings(config, places, root, scope, variables)?;
            let is_own = |s: &Setting| s.table.is_some() && matches!(s.origin, Origin::File { .. });
            found.extend(global.into_iter().filter(is_own));
        }
        for setting in found {
            let known = settings.iter().any(|other| other.table == setting.table && other.key == setting.key);
            let unset_helper =
                setting.origin == Origin::BuiltIn && scope.is_some_and(|name| HELPERS.contains(&name));
            if !known && !unset_helper {
                settings.push(setting);
            }
        }
    }
    settings.sort_by_key(|setting| setting.table.is_some());
    Ok(settings)
}

fn command_settings(
    config: &Config,
    places: &Places,
    command: &Command,
    scope: Option<&str>,
    variables: &Variables<'_>,
) -> Result<Vec<Setting>, CommandError> {
    let variable = |arg: &Arg| {
        let name = arg.get_env()?.to_str()?.to_owned();
        let value = variables(&name).filter(|value| !value.is_empty())?;
        Some((name, value.to_string_lossy().into_owned()))
    };
    let explicit: BTreeSet<String> = command
        .get_arguments()
        .map(|arg| (arg, arg.get_id().as_str()))
        .filter(|(arg, id)| variable(arg).is_some() || config.flag(id).is_some())
        .map(|(_, id)| id.to_owned())
        .collect();
    let chosen = config.chosen(command, scope, &explicit)?;
    let own = scope.map(str::to_owned);
    let keyed = command.get_arguments().filter_map(|arg| Some((shape::key(arg)?, arg)));
    keyed
        .map(|(key, arg)| {
            let id = arg.get_id().as_str();
            let (table, words, origin) = if let Some(words) = config.flag(id).filter(|_| scope.is_none()) {
                (None, words.to_vec(), Origin::Flag)
            } else if let Some((name, value)) = variable(arg) {
                (None, variable_words(arg, &name, &value)?, Origin::Variable(name))
            } else if let Some((file, entry)) = chosen.get(id) {
                let path = places.shorten(&file.path);
                (entry.scope.clone(), entry.values.clone(), Origin::File { path, line: entry.line })
            } else {
                (own.clone(), built_in(arg), Origin::BuiltIn)
            };
            let value = typed(arg, &words);
            Ok(Setting { table, key: key.to_owned(), value, origin })
        })
        .collect()
}

fn variable_words(arg: &Arg, name: &str, value: &str) -> Result<Vec<String>, CommandError> {
    let check = |word: &str| {
        shape::check(arg, word).map_err(|message| CommandError::usage(format!("{name}: {message}")))
    };
    match Shape::of(arg) {
        // The words that clap's BoolishValueParser takes.
        Shape::Switch => match &*value.to_ascii_lowercase() {
            "y" | "yes" | "t" | "true" | "on" | "1" => Ok(vec!["true".to_owned()]),
            "n" | "no" | "f" | "false" | "off" | "0" => Ok(vec!["false".to_owned()]),
            _ => Err(CommandError::usage(format!("{name}: {value:?} is neither true nor false"))),
        },
        _ => {
            let words: Vec<String> = match arg.get_value_delimiter() {
                Some(delimiter) => value.split(delimiter).map(str::to_owned).collect(),
                None => vec![value.to_owned()],
            };
            words.iter().try_for_each(|word| check(word))?;
            Ok(words)
        }
    }
}

/// clap's own default; that of a switch (false) or a count (0) is no setting.
fn built_in(arg: &Arg) -> Vec<String> {
    match Shape::of(arg) {
        Shape::Switch | Shape::Count => Vec::new(),
        _ => arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect(),
    }
}

/// Words as a TOML value of the flag's type; `None` when there are none.
fn typed(arg: &Arg, words: &[String]) -> Option<toml::Value> {
    let scalar = |kind: Scalar, word: &String| {
        let integer = || word.parse().ok().map(toml::Value::Integer);
        let float = || word.parse().ok().map(toml::Value::Float);
        let number = match kind {
            Scalar::Integer => integer(),
            Scalar::Number | Scalar::TextOrNumber => integer().or_else(float),
            Scalar::Text => None,
        };
        number.unwrap_or_else(|| toml::Value::String(word.clone()))
    };
    match Shape::of(arg) {
        Shape::Switch => words.first().map(|word| toml::Value::Boolean(word == "true")),
        Shape::Count => words.first().map(|word| scalar(Scalar::Integer, word)),
        Shape::One(kind) => words.first().map(|word| scalar(kind, word)),
        Shape::Many(_) if words.is_empty() => None,
        Shape::Many(kind) => Some(toml::Value::Array(words.iter().map(|word| scalar(kind, word)).collect())),
    }
}

fn to_toml(settings: &[Setting], config: &Config, places: &Places, origin: bool) -> String {
    let mut text = String::new();
    let mut table = None;
    // Unset keys are of interest to who asks where things come from.
    for setting in settings.iter().filter(|setting| origin || setting.value.is_some()) {
        if setting.table != table {
            table.clone_from(&setting.table);
            text += &format!("\n[{}]\n", table.as_deref().unwrap_or_default());
        }
        let line = match &setting.value {
            Some(value) => format!("{} = {value}", setting.key),
            None => format!("# {} is not set", setting.key),
        };
        push_line(&mut text, &line, origin.then(|| setting.origin.to_string()));
    }
    let mut aliases = config.alias_origins().peekable();
    if aliases.peek().is_some() {
        text += "\n[aliases]\n";
    }
    for (file, alias) in aliases {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let line = format!("{} = {}", quoted(&alias.name), quoted(&alias.reference));
        push_line(&mut text, &line, origin.then(|| format!("{}:{}", places.shorten(&file.path), alias.line)));
    }
    if text.is_empty() {
        text += "# nothing is set: what the model recommends and built-in defaults apply (--origin lists all keys)\n";
    }
    text
}

fn push_line(text: &mut String, line: &str, origin: Option<String>) {
    let written = match origin {
        // A multi-line string ends where it ends; the comment follows its last line.
        Some(origin) => writeln!(text, "{line:<39} # {origin}"),
        None => writeln!(text, "{line}"),
    };
    written.expect("a String takes all");
}

fn to_json(settings: &[Setting], config: &Config) -> serde_json::Value {
    let values: Vec<_> = settings
        .iter()
        .map(|setting| {
            let origin = match &setting.origin {
                Origin::Flag => json!({"kind": "flag"}),
                Origin::Variable(name) => json!({"kind": "variable", "name": name}),
                Origin::File { path, line } => json!({"kind": "file", "path": path, "line": line}),
                Origin::BuiltIn => json!({"kind": "built-in"}),
            };
            json!({"command": setting.table, "key": setting.key, "value": setting.value, "origin": origin})
        })
        .collect();
    let alias = |(file, alias): (&file::ConfigFile, &file::Alias)| {
        let origin = json!({"kind": "file", "path": file.path, "line": alias.line});
        json!({"name": alias.name, "reference": alias.reference, "origin": origin})
    };
    let aliases: Vec<_> = config.alias_origins().map(alias).collect();
    json!({"schema": "llmctl.config.v1", "values": values, "aliases": aliases})
}
