//! The `LLMCTL_<FLAG>` variable of every flag, added by rule so that none is forgotten.
//!
//! clap treats a set variable like a given flag, so only variables that should count are shown to clap. Not
//! shown: an empty one, which means "not set" in shell scripts; a switch or count set to off, which conflicts
//! with nothing and requires nothing, but still takes precedence over files; one whose value only a flag of
//! that name in another subcommand accepts; and one that a flag on the command line excludes, because the
//! flag takes precedence.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::cli::error::{CommandError, nearest};
use crate::cli::flags;
use crate::cli::flags::{FlagShape, conflict, is_off, variable};

/// Returns the flag's variable and its value, if set.
fn set(arg: &Arg) -> Option<(String, OsString)> {
    let name = variable(arg)?;
    let value = std::env::var_os(&name).filter(|value| !value.is_empty())?;
    Some((name, value))
}

/// Returns the variable in force for a flag of a command from [`with_variables`], and its value.
pub fn in_force(arg: &Arg) -> Option<(String, String)> {
    let (name, value) = set(arg)?;
    let counts = arg.get_env().is_some() || says_off(arg, &value);
    counts.then(|| (name, value.to_string_lossy().into_owned()))
}

/// Adds the variable to each flag of `command` and of all below it.
pub fn with_variables(command: Command) -> Command {
    let mut taken = BTreeSet::new();
    collect_taken(&command, &mut taken);
    attach(command, &taken)
}

/// Collects variables whose value some flag of that name accepts.
fn collect_taken(command: &Command, taken: &mut BTreeSet<String>) {
    let fitting = command.get_arguments().filter_map(|arg| set(arg).filter(|(_, value)| fits(arg, value)));
    taken.extend(fitting.map(|(name, _)| name));
    command.get_subcommands().for_each(|below| collect_taken(below, taken));
}

fn attach(command: Command, taken: &BTreeSet<String>) -> Command {
    let command = command.mut_args(|arg| {
        let Some(name) = variable(&arg) else { return arg };
        let is_empty = std::env::var_os(&name).is_some_and(|value| value.is_empty());
        let is_for_it = set(&arg).is_none_or(|(name, value)| {
            !says_off(&arg, &value) && (fits(&arg, &value) || !taken.contains(&name))
        });
        let arg = match arg.get_action() {
            // A switch's variable may say 1, yes, on, true, or the opposite.
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        };
        if is_empty || !is_for_it { arg } else { arg.env(name).hide_env(true) }
    });
    command.mut_subcommands(|below| attach(below, taken))
}

/// Returns whether the flag's own parser accepts the value.
fn fits(arg: &Arg, value: &OsStr) -> bool {
    match (FlagShape::of(arg), value.to_str()) {
        (_, None) => true, // only some parsers accept other than UTF-8, and they report it themselves
        (FlagShape::Switch, Some(word)) => truth(word).is_some(),
        (_, Some(word)) => flags::check(arg, word).is_ok(),
    }
}

fn says_off(arg: &Arg, value: &OsStr) -> bool {
    let word = value.to_str().unwrap_or_default();
    match FlagShape::of(arg) {
        FlagShape::Switch => truth(word) == Some(false),
        _ => is_off(arg, word),
    }
}

/// Parses the words that clap's `BoolishValueParser` accepts.
fn truth(word: &str) -> Option<bool> {
    match &*word.to_ascii_lowercase() {
        "y" | "yes" | "t" | "true" | "on" | "1" => Some(true),
        "n" | "no" | "f" | "false" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// Returns the ids of flags of `command` that a variable sets to off.
pub fn switched_off(command: &Command) -> BTreeSet<String> {
    let is_switched_off = |arg: &&Arg| set(arg).is_some_and(|(_, value)| says_off(arg, &value));
    command.get_arguments().filter(is_switched_off).map(|arg| arg.get_id().to_string()).collect()
}

/// Converts the variable's value to the flag's words.
///
/// # Errors
/// A usage error that names the variable.
pub fn words(arg: &Arg, name: &str, value: &str) -> Result<Vec<String>, CommandError> {
    let refusal = |message: String| CommandError::usage(format!("{name}: {message}"));
    if FlagShape::of(arg) == FlagShape::Switch {
        let truth = truth(value).ok_or_else(|| refusal(format!("{value:?} is neither true nor false")))?;
        return Ok(vec![truth.to_string()]);
    }
    let words: Vec<String> = match arg.get_value_delimiter() {
        Some(delimiter) => value.split(delimiter).map(str::to_owned).collect(),
        None => vec![value.to_owned()],
    };
    words.iter().try_for_each(|word| flags::check(arg, word)).map_err(refusal)?;
    Ok(words)
}

/// Returns the variables in force for flags of `command` and below, and those with errors.
pub fn survey(command: &Command) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut names, mut wrong) = (BTreeSet::new(), BTreeSet::new());
    for arg in command.get_arguments() {
        if let Some((name, value)) = in_force(arg) {
            wrong.extend(words(arg, &name, &value).err().map(|error| error.to_string()));
            names.insert(name);
        }
    }
    for (more, wrongs) in command.get_subcommands().map(survey) {
        names.extend(more);
        wrong.extend(wrongs);
    }
    (names, wrong)
}

/// Variables that hold keys, and are for llmctl alone.
pub const KEYS: [&str; 2] = ["LLMCTL_API_KEY", "LLMCTL_ENGINE_KEY"];

/// Variables that are not flags: the log's filter, and those of builds and tests.
const OTHERS: [&str; 3] = ["LLMCTL_LOG", "LLMCTL_COMMIT", "LLMCTL_FIXTURES"];

/// Returns a warning for each set `LLMCTL_` variable that nothing reads.
pub fn unknown(command: &Command) -> Vec<String> {
    let mut known: BTreeSet<String> = OTHERS.iter().chain(&KEYS).map(|name| (*name).to_owned()).collect();
    collect_known(command, &mut known);
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let mut set: Vec<String> = names.filter(|name| name.starts_with("LLMCTL_")).collect();
    set.sort();
    // Tests have variables of their own.
    let unread = set.into_iter().filter(|name| !known.contains(name) && !name.starts_with("LLMCTL_TEST_"));
    unread
        .map(|name| {
            let tail = |name: &str| name.trim_start_matches("LLMCTL_").to_owned();
            let tails: Vec<String> = known.iter().map(|name| tail(name)).collect();
            match nearest(&tail(&name), tails.iter().map(String::as_str)) {
                Some(near) => format!("{name} is not a variable of llmctl; did you mean LLMCTL_{near}?"),
                None => format!("{name} is not a variable of llmctl"),
            }
        })
        .collect()
}

fn collect_known(command: &Command, known: &mut BTreeSet<String>) {
    known.extend(command.get_arguments().filter_map(variable));
    command.get_subcommands().for_each(|below| collect_known(below, known));
}

/// Returns `command` without the variables that flags among `args` exclude.
pub fn yield_to(command: Command, args: &[OsString]) -> Command {
    // Other errors in the arguments are left to the real parse.
    match bare(command.clone()).ignore_errors(true).try_get_matches_from(args) {
        Ok(given) => without_excluded(command, &given),
        Err(_) => command,
    }
}

fn bare(command: Command) -> Command {
    command.mut_args(|arg| arg.env(None::<&'static str>)).mut_subcommands(bare)
}

fn without_excluded(command: Command, given: &ArgMatches) -> Command {
    let is_given = |arg: &&Arg| {
        let id = arg.get_id().as_str();
        given.try_contains_id(id).is_ok() && given.value_source(id) == Some(ValueSource::CommandLine)
    };
    let flags: Vec<&str> =
        command.get_arguments().filter(is_given).map(|arg| arg.get_id().as_str()).collect();
    let is_excluded = |arg: &&Arg| flags.iter().any(|flag| conflict(&command, arg.get_id().as_str(), flag));
    let excluded: BTreeSet<_> =
        command.get_arguments().filter(is_excluded).map(|arg| arg.get_id().clone()).collect();
    let command = command.mut_args(|arg| match excluded.contains(arg.get_id()) {
        true => arg.env(None::<&'static str>),
        false => arg,
    });
    match given.subcommand() {
        Some((name, below)) if command.find_subcommand(name).is_some() => {
            command.mut_subcommand(name, |sub| without_excluded(sub, below))
        }
        _ => command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command whose flags have variables that no environment sets.
    fn command() -> Command {
        let run = Command::new("run")
            .arg(Arg::new("dtype").long("dtype").env("LLMCTL_TEST_UNSET_DTYPE"))
            .arg(
                Arg::new("quantize")
                    .long("quantize")
                    .env("LLMCTL_TEST_UNSET_QUANTIZE")
                    .conflicts_with("dtype"),
            )
            .arg(Arg::new("seed").long("seed").env("LLMCTL_TEST_UNSET_SEED"))
            .arg(Arg::new("out").long("out").requires("seed"));
        let quiet = Arg::new("quiet").long("quiet").action(ArgAction::SetTrue).global(true);
        Command::new("llmctl")
            .arg(quiet.env("LLMCTL_TEST_UNSET_QUIET").conflicts_with("verbose"))
            .arg(Arg::new("verbose").long("verbose").action(ArgAction::Count).global(true))
            .subcommand(run)
    }

    /// The flags whose variable was removed.
    fn yielding(args: &[&str]) -> Vec<String> {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let command = yield_to(command(), &args);
        let run = command.find_subcommand("run").expect("run");
        let silent = command.get_arguments().chain(run.get_arguments());
        let silent = silent.filter(|arg| arg.get_env().is_none()).map(|arg| arg.get_id().to_string());
        silent.filter(|id| id != "verbose" && id != "out").collect()
    }

    #[test]
    fn variables_yield_to_the_flags_that_exclude_them_and_to_no_others() {
        assert_eq!(yielding(&["llmctl", "run", "--quantize", "q8_0"]), ["dtype"]);
        assert_eq!(yielding(&["llmctl", "run", "--dtype", "f16"]), ["quantize"], "whoever names the other");
        assert_eq!(yielding(&["llmctl", "run", "--verbose"]), ["quiet"], "a global flag");
        assert_eq!(yielding(&["llmctl", "run", "--seed", "1"]), [""; 0]);
        assert_eq!(
            yielding(&["llmctl", "run", "--out", "f", "--dtype", "f16"]),
            ["quantize"],
            "needs a variable"
        );
    }

    #[test]
    fn a_variable_off_is_told_from_one_that_is_wrong() {
        let switch = Arg::new("raw").long("raw").action(ArgAction::SetTrue);
        let count = Arg::new("verbose").long("verbose").action(ArgAction::Count);
        let text = Arg::new("stop").long("stop");
        for word in ["0", "no", "False", "off", "n", "f"] {
            assert!(says_off(&switch, OsStr::new(word)) && fits(&switch, OsStr::new(word)), "{word}");
            assert_eq!(words(&switch, "LLMCTL_RAW", word).expect("a word"), ["false"]);
        }
        for word in ["1", "yes", "perhaps", ""] {
            assert!(!says_off(&switch, OsStr::new(word)), "{word}");
        }
        let refusal = words(&switch, "LLMCTL_RAW", "perhaps").expect_err("no truth").to_string();
        assert_eq!(refusal, "LLMCTL_RAW: \"perhaps\" is neither true nor false");
        assert!(says_off(&count, OsStr::new("0")) && !says_off(&count, OsStr::new("2")));
        assert!(!says_off(&text, OsStr::new("0")), "a text may be 0");
    }
}
