//! Configuration files: found, read, and put under the command line.
//!
//! Precedence: flag > `LLMCTL_*` > project file > user file > (the model's own defaults) > built-in. The
//! first two and the last are clap's; the files come between them as clap default values, so that there is
//! one rule and one parser. Within a file a subcommand's table wins over the top. A value from a file yields
//! to a flag or variable that it conflicts with, and to a conflicting value of a file that wins over it. A
//! switch that is off excludes nothing.

pub mod config_cmd;
pub mod explain;
pub mod file;
pub mod variables;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use super::error::{CommandError, Kind, plain};
use super::flags::{self, FlagShape, conflict, is_off};
use super::places::Places;
use crate::cli::flags::origin::{Origin, Origins};
use file::{ConfigEntry, ConfigFile, ConfigProblem};
use llmctl_hub::Aliases;

/// The project's file, in the working directory.
const PROJECT_FILE: &str = "llmctl.toml";

/// A configuration file is written by hand; more than this is something else.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Place at which a configuration file was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    pub role: FileRole,
    pub path: PathBuf,
    pub exists: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    Project,
    User,
    /// Named by `--config` or LLMCTL_CONFIG, in place of the user's.
    Named,
}

impl FileRole {
    pub const fn name(self) -> &'static str {
        match self {
            FileRole::Project => "project",
            FileRole::User => "user",
            FileRole::Named => "named",
        }
    }
}

/// All configuration files of this call.
#[derive(Debug, Default)]
pub struct Config {
    /// The one that wins first.
    files: Vec<ConfigFile>,
    looked: Vec<Looked>,
    /// Why the files cannot be used.
    problem: Option<String>,
    /// Global flags of this command line, by id.
    flags: BTreeMap<String, Vec<String>>,
}

/// Values of the flags of one command that the command line and the variables give, by id.
#[derive(Debug, Default)]
pub struct Explicit {
    /// Given, with whatever value.
    pub given: BTreeSet<String>,
    /// Switched off by a variable: no file turns them on.
    pub off: BTreeSet<String>,
}

/// Values that files give to the flags of one command, by the flags' ids.
pub type Chosen<'a> = BTreeMap<String, (&'a ConfigFile, &'a ConfigEntry)>;

impl Config {
    /// Reads the files of this call. Their errors are kept for [`Config::check`], because a command such as
    /// `doctor` continues without them.
    pub fn read(named: Option<&Path>, places: &Places, command: &Command) -> Config {
        let user = places.config.as_ref().map(|dir| dir.join("config.toml"));
        let second = match named {
            Some(path) => Some((FileRole::Named, path.to_path_buf())),
            None => user.map(|path| (FileRole::User, path)),
        };
        let mut config = Config::default();
        let mut problems = Vec::new();
        for (role, path) in std::iter::once((FileRole::Project, PathBuf::from(PROJECT_FILE))).chain(second) {
            let exists = path.exists();
            if exists || role == FileRole::Named {
                match read_file(&path, role, command).and_then(|file| allowed(file, role)) {
                    Ok(file) => config.files.push(file),
                    Err(found) => problems.extend(found),
                }
            }
            config.looked.push(Looked { role, path, exists });
        }
        config.problem = (!problems.is_empty()).then(|| problems.join("\n"));
        config
    }

    /// # Errors
    /// [`Kind::Config`] with everything that is wrong in the files, or with a file that was named but is not there.
    pub fn check(&self) -> Result<(), CommandError> {
        match &self.problem {
            Some(problem) => Err(Kind::Config.error(problem)),
            None => Ok(()),
        }
    }

    /// Keeps the global flags that `matches` has from the command line, for `config show`.
    fn remember_flags(&mut self, matches: &ArgMatches, command: &Command) {
        for arg in command.get_arguments().filter(|arg| flags::key(arg).is_some()) {
            let id = arg.get_id().as_str();
            if matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let words = match FlagShape::of(arg) {
                FlagShape::Count => vec![matches.get_count(id).to_string()],
                _ => matches
                    .get_raw(id)
                    .into_iter()
                    .flatten()
                    .map(|w| w.to_string_lossy().into_owned())
                    .collect(),
            };
            self.flags.insert(id.to_owned(), words);
        }
    }

    /// Returns the words of a global flag given on the command line.
    pub fn flag(&self, id: &str) -> Option<&[String]> {
        self.flags.get(id).map(Vec::as_slice)
    }

    pub fn looked(&self) -> &[Looked] {
        &self.looked
    }

    /// Model names, the winning file's first choice.
    pub fn aliases(&self) -> Aliases {
        self.alias_origins().map(|(_, alias)| (alias.name.clone(), alias.reference.clone())).collect()
    }

    /// Returns the aliases in force with the files they are from.
    pub fn alias_origins(&self) -> impl Iterator<Item = (&ConfigFile, &file::Alias)> {
        let mut seen = BTreeSet::new();
        let all = self.files.iter().flat_map(|file| file.aliases.iter().map(move |alias| (file, alias)));
        all.filter(move |(_, alias)| seen.insert(alias.name.clone()))
    }

    /// `command` with the files' values as default values of the subcommand that `matches` found. Files that
    /// cannot be used, also because one gives values that exclude each other, leave it as it is.
    pub fn apply(mut self, command: Command, matches: &ArgMatches) -> (Config, Command) {
        self.remember_flags(matches, &command);
        if self.problem.is_some() {
            return (self, command);
        }
        match self.with_defaults(command.clone(), matches) {
            Ok(configured) => (self, configured),
            Err(error) => {
                self.problem = Some(error.to_string());
                (self, command)
            }
        }
    }

    fn with_defaults(&self, command: Command, matches: &ArgMatches) -> Result<Command, CommandError> {
        let Some((name, below)) = matches.subcommand() else { return Ok(command) };
        let on_root = Explicit::of(matches, &command);
        let root = self.chosen(&command, &tables(matches), &on_root)?;
        let command = self.below(command, name, below, "", &on_root)?;
        Ok(command.mut_args(|arg| with_default(arg, &root)))
    }

    /// Returns the subcommand `name` of `command`, and those below it that `matches` found, with the defaults from their own tables.
    fn below(
        &self,
        command: Command,
        name: &str,
        matches: &ArgMatches,
        parents: &str,
        on_root: &Explicit,
    ) -> Result<Command, CommandError> {
        let Some(found) = command.find_subcommand(name) else { return Ok(command) };
        let table = format!("{parents}{name}");
        let mut explicit = Explicit::of(matches, found);
        explicit.given.extend(on_root.given.iter().cloned());
        let values = self.chosen(found, std::slice::from_ref(&table), &explicit)?;
        let mut found = found.clone().mut_args(|arg| with_default(arg, &values));
        if let Some((name, below)) = matches.subcommand() {
            found = self.below(found, name, below, &format!("{table}."), on_root)?;
        }
        Ok(command.mut_subcommand(name, |_| found))
    }

    /// Returns the origins of flags that are not on the command line: variables, and these files.
    pub fn origins(&self, command: &Command, given: &ArgMatches) -> Origins {
        let mut origins = Origins::default();
        self.collect_origins(command, given, &tables(given), &mut origins);
        let (mut command, mut matches, mut path) = (command, given, String::new());
        while let Some((name, below)) = matches.subcommand()
            && let Some(found) = command.find_subcommand(name)
        {
            path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            self.collect_origins(found, below, std::slice::from_ref(&path), &mut origins);
            (command, matches) = (found, below);
        }
        origins
    }

    fn collect_origins(
        &self,
        command: &Command,
        matches: &ArgMatches,
        tables: &[String],
        origins: &mut Origins,
    ) {
        origins.add_variables(command, matches);
        // Exclusions between flags were checked before: a clash here is not one of the value.
        let chosen = self.chosen(command, tables, &Explicit::of(matches, command)).unwrap_or_default();
        for (id, (file, entry)) in chosen {
            let long = command.get_arguments().find(|arg| *arg.get_id() == id).and_then(Arg::get_long);
            let origin = Origin::File { path: file.path.clone(), line: entry.line };
            origins.0.extend(long.map(|long| (long.to_owned(), origin)));
        }
    }

    /// Returns the values of the files for the flags of `command`, from `tables` (the winning one first) or the top level.
    ///
    /// # Errors
    /// [`Kind::Config`] when one file gives values that exclude each other.
    pub fn chosen(
        &self,
        command: &Command,
        tables: &[String],
        explicit: &Explicit,
    ) -> Result<Chosen<'_>, CommandError> {
        let mut chosen = Chosen::new();
        let mut excluding = explicit.given.clone();
        for layer in self.layers(tables) {
            let mut fresh: Vec<(&Arg, &ConfigFile, &ConfigEntry)> = Vec::new();
            for (file, entry) in layer {
                let Some(arg) = file::find(command, &entry.key) else { continue };
                let id = arg.get_id().as_str();
                let is_decided =
                    explicit.given.contains(id) || explicit.off.contains(id) || chosen.contains_key(id);
                let is_list = matches!(FlagShape::of(arg), FlagShape::Many(_));
                let fits = entry.values.iter().all(|value| flags::check(arg, value).is_ok())
                    && (is_list || entry.values.len() <= 1);
                let excludes = |other: &str| !is_off_in(arg, entry) && conflict(command, id, other);
                if is_decided || !fits || excluding.iter().any(|other| excludes(other)) {
                    continue;
                }
                let clash = fresh.iter().find(|(a, _, e)| !is_off_in(a, e) && excludes(a.get_id().as_str()));
                if let Some((_, _, other)) = clash {
                    return Err(excluded(file, entry, other));
                }
                fresh.push((arg, file, entry));
            }
            let on = fresh.iter().filter(|(arg, _, entry)| !is_off_in(arg, entry));
            excluding.extend(on.map(|(arg, ..)| arg.get_id().to_string()));
            chosen.extend(
                fresh.into_iter().map(|(arg, file, entry)| (arg.get_id().to_string(), (file, entry))),
            );
        }
        Ok(chosen)
    }

    /// Entries in groups of equal precedence, the winning group first.
    fn layers(&self, tables: &[String]) -> Vec<Vec<(&ConfigFile, &ConfigEntry)>> {
        let of = |file, wanted: Option<&str>| -> Vec<(&ConfigFile, &ConfigEntry)> {
            let file: &ConfigFile = file;
            file.entries.iter().filter(|e| e.scope.as_deref() == wanted).map(|e| (file, e)).collect()
        };
        let scopes = || tables.iter().map(|table| Some(table.as_str())).chain([None]);
        self.files.iter().flat_map(|file| scopes().map(move |scope| of(file, scope))).collect()
    }
}

impl Explicit {
    fn of(matches: &ArgMatches, command: &Command) -> Self {
        Self { given: explicit_ids(matches), off: variables::switched_off(command) }
    }
}

/// Returns the tables of the subcommands that `matches` found: `bench.serve`, then `bench`.
fn tables(matches: &ArgMatches) -> Vec<String> {
    let (mut tables, mut matches) = (Vec::<String>::new(), matches);
    while let Some((name, below)) = matches.subcommand() {
        tables.push(tables.last().map_or(name.to_owned(), |parents| format!("{parents}.{name}")));
        matches = below;
    }
    tables.reverse();
    tables
}

/// Returns the file, unless it is a project's and sets what only the user's own may set.
fn allowed(file: ConfigFile, role: FileRole) -> Result<ConfigFile, Vec<String>> {
    let refusal = |ConfigEntry { key, line, .. }: &ConfigEntry| {
        format!("{}:{line}: {key}: only your own configuration file may set it", file.path.display())
    };
    let refused = file.entries.iter().filter(|entry| role == FileRole::Project && !suits_project(&entry.key));
    let refusals: Vec<String> = refused.map(refusal).collect();
    if refusals.is_empty() { Ok(file) } else { Err(refusals) }
}

/// Keys that a project's file may set: they choose models, shape answers and measurements, and bound resources. All others are
/// refused, because a folder may come from another person: those that open, write or erase a file or session, run a program, open a
/// server to others, name a server or a key, or give consent. `tests/config.rs` lists these, so that each flag has its decision.
const PROJECT_KEYS: &str = "\
    alias all any-model api as bos-id body-timeout color concurrency cpu ctx device dimensions draft-model drain-timeout dry-allowed-length dry-base \
    dry-multiplier dry-penalty-last-n dry-run dry-sequence-breakers dtype duration dynatemp-exponent dynatemp-range embedding-model eos-id fail-on-length field format frequency-penalty header-timeout idle-timeout ignore-eos image-tokens isolate jsonl \
    keep-alive kv-memory kv-type lenient list-prompts logit-bias logprobs loop-guard max-body max-connections max-sessions max-slow-bodies max-tokens \
    max-tool-rounds max-waiting min-p mirostat mirostat-eta mirostat-tau model model-id model-memory n-depth n-gen n-prompt no-mmproj no-page no-probe no-stdin no-stream no-think \
    no-warm-resume no-warmup origin output overflow parallel pg pin plain pooling port prefill-response prefix presence-penalty print prompt \
    prompt-name quantize quiet rate raw reasoning-format regex repeat-last-n repetition-penalty repetitions request-timeout requests samplers schema-open seed \
    sequences served-model session-ttl session-wait sessions slo spacing speculate speed stats step-tokens stop strict-limits system task \
    temperature texts think think-time threads threads-batch threshold timeout tool-format tool-timeout top-k top-n-sigma top-p truncate \
    turn turns type typical-p verbose worker-memory worker-nice worker-start-timeout worker-timeout workers xtc-probability xtc-threshold";

/// Returns whether a project's file may set `key`.
pub fn suits_project(key: &str) -> bool {
    PROJECT_KEYS.split_whitespace().any(|name| name == key)
}

fn is_off_in(arg: &Arg, entry: &ConfigEntry) -> bool {
    entry.values.iter().all(|value| is_off(arg, value))
}

fn read_file(path: &Path, role: FileRole, command: &Command) -> Result<ConfigFile, Vec<String>> {
    let failed =
        |error: &dyn std::fmt::Display| vec![format!("{}: {}", path.display(), plain(&error.to_string()))];
    // A pipe may be named, but one that lies in a folder would let every command wait for its writer.
    if role != FileRole::Named && path.metadata().is_ok_and(|facts| !facts.is_file()) {
        return Err(failed(&"is not a regular file"));
    }
    // Not by its size, which pipes and devices do not have.
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| failed(&error))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(&"more than 1 MiB is not a configuration file"));
    }
    let text = String::from_utf8(bytes).map_err(|_| failed(&"is not UTF-8 text"))?;
    let strings = |problems: Vec<ConfigProblem>| problems.iter().map(ConfigProblem::to_string).collect();
    file::parse(path, &text, command).map_err(strings)
}

/// Ids of the arguments that the command line or a variable sets.
fn explicit_ids(matches: &ArgMatches) -> BTreeSet<String> {
    // clap hands global arguments of a subcommand up to its parent, and then does not know them there.
    let is_known = |id: &str| matches.try_contains_id(id).is_ok();
    let is_explicit = |id: &str| {
        matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let ids = matches.ids().map(|id| id.as_str());
    ids.filter(|id| is_known(id) && is_explicit(id)).map(str::to_owned).collect()
}

fn excluded(file: &ConfigFile, entry: &ConfigEntry, other: &ConfigEntry) -> CommandError {
    let (path, line) = (file.path.display(), entry.line.max(other.line));
    let (a, b) = (&other.key, &entry.key);
    Kind::Config.error(format!("{path}:{line}:1: {a:?} and {b:?} exclude each other"))
}

fn with_default(arg: Arg, chosen: &Chosen<'_>) -> Arg {
    match chosen.get(arg.get_id().as_str()) {
        Some((_, entry)) => arg.default_values(entry.values.clone()),
        None => arg,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::{ArgAction, value_parser};

    use super::*;

    fn command() -> Command {
        let run = Command::new("run")
            .arg(Arg::new("temperature").long("temperature").value_parser(value_parser!(f32)))
            .arg(Arg::new("dtype").long("dtype").conflicts_with("quantize"))
            .arg(Arg::new("quantize").long("quantize"))
            .arg(Arg::new("stop").long("stop").action(ArgAction::Append))
            .arg(Arg::new("raw").long("raw").action(ArgAction::SetTrue))
            .arg(Arg::new("inner").long("inner").global(true))
            .subcommand(
                Command::new("show").arg(Arg::new("level").long("level").value_parser(value_parser!(u8))),
            );
        Command::new("llmctl")
            .arg(
                Arg::new("quiet")
                    .long("quiet")
                    .action(ArgAction::SetTrue)
                    .global(true)
                    .conflicts_with("verbose"),
            )
            .arg(Arg::new("verbose").long("verbose").action(ArgAction::Count).global(true))
            .subcommand(run)
    }

    /// Files as given, the winning one first.
    fn config(files: &[&str]) -> Config {
        let parse = |(n, text): (usize, &&str)| {
            file::parse(Path::new(&format!("{n}.toml")), text, &command()).unwrap_or_else(|p| panic!("{p:?}"))
        };
        Config { files: files.iter().enumerate().map(parse).collect(), ..Config::default() }
    }

    fn parse(files: &[&str], words: &[&str]) -> Result<ArgMatches, CommandError> {
        let words: Vec<OsString> = ["llmctl", "run"].iter().chain(words).map(OsString::from).collect();
        let first = command().try_get_matches_from(&words).expect("valid without files");
        let (config, command) = config(files).apply(command(), &first);
        config.check()?;
        Ok(command.try_get_matches_from(&words).expect("valid with files"))
    }

    fn temperature(files: &[&str], words: &[&str]) -> Option<f32> {
        let matches = parse(files, words).expect("no conflict");
        matches.subcommand_matches("run").and_then(|run| run.get_one::<f32>("temperature").copied())
    }

    fn text(files: &[&str], words: &[&str], id: &str) -> Vec<String> {
        let matches = parse(files, words).expect("no conflict");
        let run = matches.subcommand_matches("run").expect("run");
        run.get_many::<String>(id).map(|values| values.cloned().collect()).unwrap_or_default()
    }

    #[test]
    fn precedence() {
        let project = "temperature = 0.1\n[run]\ntemperature = 0.2";
        let user = "temperature = 0.3\n[run]\ntemperature = 0.4";
        assert_eq!(temperature(&[], &[]), None);
        assert_eq!(temperature(&[user], &[]), Some(0.4));
        assert_eq!(temperature(&["temperature = 0.1", user], &[]), Some(0.1));
        assert_eq!(temperature(&[project, user], &[]), Some(0.2));
        assert_eq!(temperature(&[project, user], &["--temperature", "0.5"]), Some(0.5));
    }

    #[test]
    fn a_flag_replaces_a_files_list() {
        assert_eq!(text(&["stop = [\"a\", \"b\"]"], &[], "stop"), ["a", "b"]);
        assert_eq!(text(&["stop = [\"a\", \"b\"]"], &["--stop", "c"], "stop"), ["c"]);
    }

    #[test]
    fn switches_and_counts() {
        let matches = parse(&["verbose = 2\n[run]\nraw = true"], &[]).expect("no conflict");
        assert_eq!(matches.get_count("verbose"), 2);
        let run = matches.subcommand_matches("run").expect("run");
        assert!(run.get_flag("raw") && run.get_count("verbose") == 2);
    }

    #[test]
    fn a_subcommands_own_global_flag_is_no_stumbling_block() {
        let matches = parse(&["quiet = true"], &["show", "--inner", "x"]).expect("no conflict");
        assert!(matches.get_flag("quiet"));
        assert_eq!(text(&["inner = \"y\""], &["show"], "inner"), ["y"]);
    }

    #[test]
    fn a_files_value_yields_to_a_conflicting_flag() {
        let file = "dtype = \"f16\"\nquiet = true";
        assert_eq!(text(&[file], &[], "dtype"), ["f16"]);
        assert_eq!(text(&[file], &["--quantize", "q8_0"], "dtype"), [""; 0]);
        let matches = parse(&[file], &["--verbose"]).expect("no conflict");
        assert!(!matches.get_flag("quiet") && matches.get_count("verbose") == 1);
    }

    #[test]
    fn between_files_the_winning_one_decides_a_conflict() {
        let files = ["quantize = \"q8_0\"", "dtype = \"f16\""];
        assert_eq!(
            (text(&files, &[], "quantize"), text(&files, &[], "dtype")),
            (vec!["q8_0".into()], vec![])
        );
        let files = ["[run]\nquantize = \"q8_0\"\n", "quantize = \"q4_0\"\ndtype = \"f16\""];
        assert_eq!(text(&files, &[], "quantize"), ["q8_0"]);
    }

    #[test]
    fn what_is_off_excludes_nothing() {
        let file = "quiet = false\nverbose = 1";
        assert_eq!(parse(&[file], &[]).expect("no conflict").get_count("verbose"), 1);
        let matches = parse(&["quiet = false", "verbose = 1"], &[]).expect("no conflict");
        assert_eq!(matches.get_count("verbose"), 1);
        let matches = parse(&["quiet = false", "quiet = true"], &[]).expect("no conflict");
        assert!(!matches.get_flag("quiet"), "it still decides its own flag");
        let off = Explicit { off: ["quiet".to_owned()].into(), ..Explicit::default() };
        let config = config(&["quiet = true\n[run]\nverbose = 1"]);
        let chosen = config.chosen(&command(), &["run".to_owned()], &off).expect("no conflict");
        assert_eq!(chosen.keys().collect::<Vec<_>>(), ["verbose"]);
    }

    #[test]
    fn a_nested_subcommand_has_a_table_of_its_own() {
        let level = |files: &[&str], words: &[&str]| {
            let matches = parse(files, words).expect("no conflict");
            let show = matches.subcommand_matches("run").and_then(|run| run.subcommand_matches("show"));
            show.and_then(|show| show.get_one::<u8>("level").copied())
        };
        let tables = "level = 1\n[run]\ntemperature = 2\n[run.show]\nlevel = 3";
        assert_eq!(level(&[tables], &["show"]), Some(3));
        assert_eq!(level(&[tables], &["show", "--level", "4"]), Some(4));
        assert_eq!(level(&["level = 1"], &["show"]), Some(1));
        assert_eq!(
            level(&["level = 1", tables], &["show"]),
            Some(1),
            "the winning file's top before another's table"
        );
        assert_eq!(level(&[], &["show"]), None);
        let quiet = |file| parse(&[file], &["show"]).expect("no conflict").get_flag("quiet");
        assert!(quiet("quiet = false\n[run]\nquiet = true"), "a global flag is also set by the tables above");
        assert!(!quiet("[run]\nquiet = true\n[run.show]\nquiet = false"));
    }

    #[test]
    fn one_file_must_not_contradict_itself() {
        let error = parse(&["dtype = \"f16\"\nquantize = \"q8_0\""], &[]).expect_err("a conflict");
        assert_eq!(error.kind, Kind::Config);
        assert_eq!(error.to_string(), "0.toml:2:1: \"dtype\" and \"quantize\" exclude each other");
    }

    #[test]
    fn the_winning_files_alias_counts() {
        let files = ["[aliases]\na = \"x\"", "[aliases]\na = \"y\"\nb = \"z\""];
        let expected = [("a", "x"), ("b", "z")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        assert_eq!(config(&files).aliases(), Aliases::from(expected));
    }

    #[test]
    fn files_are_found_and_a_named_one_must_be_there() {
        let home = tempfile::tempdir().expect("tempdir");
        let places = Places { config: Some(home.path().join("llmctl")), ..Places::default() };
        let none = Config::read(None, &places, &command());
        assert!(none.check().is_ok() && none.files.is_empty());
        assert_eq!(none.looked().iter().map(|l| l.exists).collect::<Vec<_>>(), [false, false]);

        fs::create_dir_all(home.path().join("llmctl")).expect("mkdir");
        fs::write(home.path().join("llmctl/config.toml"), "temperature = 1").expect("write");
        assert_eq!(Config::read(None, &places, &command()).files.len(), 1);

        let missing = home.path().join("missing.toml");
        let named = Config::read(Some(&missing), &places, &command());
        let error = named.check().expect_err("it is not there");
        assert_eq!(error.kind, Kind::Config);
        assert!(error.to_string().contains("missing.toml"), "{error}");
        assert!(named.files.is_empty(), "the user's file is not read beside a named one");
    }
}
