//! `llmctl config`: the values in force and their origins, and the files' paths.
//!
//! `show` prints TOML that works as a configuration file. A key is printed at the top if all subcommands with
//! the flag agree, as for variables and the top of a file, else in the subcommand's table.

use std::fmt::Write;

use clap::{Arg, Args, Command, Subcommand};
use serde_json::json;

use super::variables;
use crate::cli::config::{Chosen, Config, Explicit, FileRole, file};
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::flags::origin::Origin;
use crate::cli::flags::{FlagShape, ScalarType};
use crate::cli::places::Places;
use crate::cli::terminal::report::{ReportFormat, print, print_json};
use crate::cli::{CommandContext, flags};

/// Show the configuration in force, and where its files are
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ConfigCommand {
    /// Print what is set, as TOML that can be a configuration file
    Show(ShowArgs),
    /// Print the path of your configuration file, there or not
    Path(PathArgs),
}

#[derive(Debug, Clone, Args)]
pub struct ShowArgs {
    /// Print the origin of each value: flag, variable, file and line, or built in
    #[arg(long)]
    pub origin: bool,

    /// Also print keys that are not set, with their built-in values
    #[arg(long)]
    pub all: bool,

    /// Format of stdout: TOML, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

#[derive(Debug, Clone, Args)]
pub struct PathArgs {
    /// Format of stdout: the path, or one JSON object with all files looked for
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

const LONG_HELP: &str = include_str!("config_cmd_help.txt").trim_ascii_end();

/// Subcommands whose unset flags are not printed.
const HELPERS: [&str; 7] = ["models", "sessions", "template", "config", "doctor", "completions", "man"];

/// A flag of a subcommand with its value in force.
#[derive(Debug, Clone, PartialEq)]
struct ShownSetting {
    /// Table of the subcommand; `None` for the top.
    table: Option<String>,
    key: String,
    /// `None` if unset, so that the built-in behaviour applies. A number out of range for TOML is a string
    /// here.
    value: Option<toml::Value>,
    takes_integers: bool,
    origin: Origin,
}

impl ShownSetting {
    /// Returns whether a file, a variable or a flag sets it.
    fn is_set(&self) -> bool {
        self.origin != Origin::BuiltIn
    }
}

pub fn run(args: ConfigArgs, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { config, places, .. } = context;
    match args.command {
        ConfigCommand::Path(args) => path(&args, config),
        ConfigCommand::Show(args) => {
            config.check()?;
            let settings = settings(context)?;
            match args.output {
                ReportFormat::Text => {
                    let shown = settings.iter().filter(|setting| args.all || setting.is_set());
                    print(&to_toml(&shown.collect::<Vec<_>>(), config, places, args.origin))
                }
                ReportFormat::Json => print_json(&to_json(&settings, config)),
            }
        }
    }
}

/// Returns the value of `key` in force in `llmctl run`, if set.
///
/// # Errors
/// A usage error for a variable with a value that the flag does not accept.
pub fn value_of(key: &str, context: CommandContext<'_>) -> Result<Option<String>, CommandError> {
    let Some(run) = context.definition.find_subcommand("run") else { return Ok(None) };
    let Some(arg) = file::find(run, key) else { return Ok(None) };
    let setting = Scope::new(context, run, vec!["run".to_owned()])?.setting(key, arg)?;
    Ok(setting.value.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
}

fn path(args: &PathArgs, config: &Config) -> Result<Exit, CommandError> {
    let looked = config.looked();
    if args.output == ReportFormat::Json {
        let entry = |l: &crate::cli::config::Looked| json!({"role": l.role.name(), "path": l.path, "exists": l.exists});
        let files: Vec<_> = looked.iter().map(entry).collect();
        return print_json(&json!({"schema": "llmctl.config-path.v1", "files": files}));
    }
    match looked.iter().find(|l| l.role != FileRole::Project) {
        Some(file) => print(&format!("{}\n", file.path.display())),
        None => {
            Err(Kind::Config.error("neither XDG_CONFIG_HOME nor HOME is set, so there is no place for it"))
        }
    }
}

/// Returns every key with its value, first the top, then table by table.
fn settings(context: CommandContext<'_>) -> Result<Vec<ShownSetting>, CommandError> {
    let mut settings = Scope::new(context, context.definition, Vec::new())?.settings()?;
    for below in context.definition.get_subcommands() {
        collect(context, below, &[], &mut settings)?;
    }
    settings.sort_by_key(|setting| setting.table.is_some());
    Ok(settings)
}

/// Adds the flags of subcommand `below` and all below it. `parents` are its parents' tables, the nearest
/// first.
fn collect(
    context: CommandContext<'_>,
    below: &Command,
    parents: &[String],
    settings: &mut Vec<ShownSetting>,
) -> Result<(), CommandError> {
    let name = below.get_name();
    let own = parents.first().map_or(name.to_owned(), |parent| format!("{parent}.{name}"));
    let tables: Vec<String> = std::iter::once(own).chain(parents.iter().cloned()).collect();
    let is_helper = tables.last().is_some_and(|top| HELPERS.contains(&top.as_str()));
    for setting in of_subcommand(context, below, &tables)? {
        let known = settings.iter().any(|other| other.table == setting.table && other.key == setting.key);
        let is_idle = is_helper && setting.origin == Origin::BuiltIn;
        if !known && !is_idle {
            settings.push(setting);
        }
    }
    below.get_subcommands().try_for_each(|further| collect(context, further, &tables, settings))
}

/// Returns the settings of the subcommand `below`; its own table is the first of `tables`.
fn of_subcommand(
    context: CommandContext<'_>,
    below: &Command,
    tables: &[String],
) -> Result<Vec<ShownSetting>, CommandError> {
    let mut found = Scope::new(context, below, tables[..1].to_vec())?.settings()?;
    // A global flag may be set in a subcommand's table too.
    let global = Scope::new(context, context.definition, tables.to_vec())?.settings()?;
    let is_own = |s: &ShownSetting| s.table.is_some() && matches!(s.origin, Origin::File { .. });
    found.extend(global.into_iter().filter(is_own));
    Ok(found)
}

/// The flags of one command, with their values in files.
struct Scope<'a> {
    context: CommandContext<'a>,
    command: &'a Command,
    /// Tables in order of precedence; empty at the top.
    tables: Vec<String>,
    chosen: Chosen<'a>,
}

impl<'a> Scope<'a> {
    fn new(
        context: CommandContext<'a>,
        command: &'a Command,
        tables: Vec<String>,
    ) -> Result<Self, CommandError> {
        let config = context.config;
        let off = variables::switched_off(command);
        let is_given = |id: &str, arg: &Arg| {
            config.flag(id).is_some() || (variables::in_force(arg).is_some() && !off.contains(id))
        };
        let ids = command.get_arguments().map(|arg| (arg.get_id().as_str(), arg));
        let given = ids.filter(|(id, arg)| is_given(id, arg)).map(|(id, _)| id.to_owned()).collect();
        let chosen = config.chosen(command, &tables, &Explicit { given, off })?;
        Ok(Self { context, command, tables, chosen })
    }

    fn settings(&self) -> Result<Vec<ShownSetting>, CommandError> {
        let keyed = self.command.get_arguments().filter_map(|arg| Some((flags::key(arg)?, arg)));
        keyed.map(|(key, arg)| self.setting(key, arg)).collect()
    }

    fn setting(&self, key: &str, arg: &Arg) -> Result<ShownSetting, CommandError> {
        let id = arg.get_id().as_str();
        let (table, words, origin) =
            if let Some(words) = self.context.config.flag(id).filter(|_| self.tables.is_empty()) {
                (None, words.to_vec(), Origin::Flag)
            } else if let Some((name, value)) = variables::in_force(arg) {
                (None, variables::words(arg, &name, &value)?, Origin::Variable(name))
            } else if let Some((file, entry)) = self.chosen.get(id) {
                let path = self.context.places.shorten(&file.path).into();
                (entry.scope.clone(), entry.values.clone(), Origin::File { path, line: entry.line })
            } else {
                (self.tables.first().cloned(), built_in(arg), Origin::BuiltIn)
            };
        let takes_integers = matches!(
            FlagShape::of(arg),
            FlagShape::One(ScalarType::Integer) | FlagShape::Many(ScalarType::Integer)
        );
        Ok(ShownSetting { table, key: key.to_owned(), value: typed(arg, &words), takes_integers, origin })
    }
}

/// Returns clap's own default. The default of a switch (false) or a count (0) is not a setting.
fn built_in(arg: &Arg) -> Vec<String> {
    match FlagShape::of(arg) {
        FlagShape::Switch | FlagShape::Count => Vec::new(),
        _ => arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect(),
    }
}

/// Converts words to a TOML value of the flag's type; `None` without words.
fn typed(arg: &Arg, words: &[String]) -> Option<toml::Value> {
    let scalar = |kind: ScalarType, word: &String| {
        let integer = || word.parse().ok().map(toml::Value::Integer);
        let float = || word.parse().ok().map(toml::Value::Float);
        let number = match kind {
            ScalarType::Integer => integer(),
            ScalarType::Number | ScalarType::TextOrNumber => integer().or_else(float),
            ScalarType::Text => None,
        };
        number.unwrap_or_else(|| toml::Value::String(word.clone()))
    };
    match FlagShape::of(arg) {
        FlagShape::Switch => words.first().map(|word| toml::Value::Boolean(word == "true")),
        FlagShape::Count => words.first().map(|word| scalar(ScalarType::Integer, word)),
        FlagShape::One(kind) => words.first().map(|word| scalar(kind, word)),
        FlagShape::Many(_) if words.is_empty() => None,
        FlagShape::Many(kind) => {
            Some(toml::Value::Array(words.iter().map(|word| scalar(kind, word)).collect()))
        }
    }
}

fn to_toml(settings: &[&ShownSetting], config: &Config, places: &Places, origin: bool) -> String {
    let mut text = String::new();
    let mut table = None;
    for setting in settings {
        if setting.table != table {
            table.clone_from(&setting.table);
            text += &format!("\n[{}]\n", table.as_deref().unwrap_or_default());
        }
        let line = match &setting.value {
            Some(value) => format!("{} = {}", setting.key, literal(value, setting.takes_integers)),
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
        text += "# nothing is set: what the model recommends and built-in defaults apply (--all lists all keys)\n";
    }
    text
}

/// Formats the value as in a file.
fn literal(value: &toml::Value, takes_integers: bool) -> String {
    match value {
        toml::Value::String(digits) if takes_integers => digits.clone(),
        toml::Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| literal(item, takes_integers)).collect();
            format!("[{}]", items.join(", "))
        }
        other => other.to_string(),
    }
}

/// Formats the value as JSON, whose numbers have no limit.
fn json_value(value: &toml::Value, takes_integers: bool) -> serde_json::Value {
    match value {
        toml::Value::String(digits) if takes_integers => json!(digits.parse::<u64>().ok()),
        toml::Value::Array(items) => items.iter().map(|item| json_value(item, takes_integers)).collect(),
        other => json!(other),
    }
}

fn push_line(text: &mut String, line: &str, origin: Option<String>) {
    let written = match origin {
        // A comment for a multi-line string follows its last line.
        Some(origin) => writeln!(text, "{line:<39} # {origin}"),
        None => writeln!(text, "{line}"),
    };
    written.expect("a String takes all");
}

fn to_json(settings: &[ShownSetting], config: &Config) -> serde_json::Value {
    let values: Vec<_> = settings
        .iter()
        .map(|setting| {
            let origin = match &setting.origin {
                Origin::Flag => json!({"kind": "flag"}),
                Origin::Variable(name) => json!({"kind": "variable", "name": name}),
                Origin::File { path, line } => json!({"kind": "file", "path": path, "line": line}),
                Origin::BuiltIn => json!({"kind": "built-in"}),
            };
            let value = setting.value.as_ref().map(|value| json_value(value, setting.takes_integers));
            json!({"command": setting.table, "key": setting.key, "value": value, "origin": origin})
        })
        .collect();
    let alias = |(file, alias): (&file::ConfigFile, &file::Alias)| {
        let origin = json!({"kind": "file", "path": file.path, "line": alias.line});
        json!({"name": alias.name, "reference": alias.reference, "origin": origin})
    };
    let aliases: Vec<_> = config.alias_origins().map(alias).collect();
    json!({"schema": "llmctl.config.v1", "values": values, "aliases": aliases})
}
