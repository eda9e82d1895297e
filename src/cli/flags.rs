//! Properties of a flag, from its clap definition: its key in files, its variable, its TOML types, whether a
//! value is valid and why not, and which flags exclude each other.
//!
//! Everything is read from the definition, so that a new flag is a new key and a new variable without another
//! line of code.

pub mod args;
pub mod origin;

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::cli::flags::args::MaxTokens;

/// Number and type of a flag's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagShape {
    /// A boolean, e.g. `--quiet`.
    Switch,
    /// The number of occurrences, e.g. `-vv`.
    Count,
    One(ScalarType),
    /// A repeatable flag; in TOML an array, or a single value.
    Many(ScalarType),
}

/// The TOML types of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalarType {
    Integer,
    /// Integer or float.
    Number,
    Text,
    /// For a flag with a parser of its own, e.g. for a number or a word.
    TextOrNumber,
}

impl ScalarType {
    pub const fn name(self) -> &'static str {
        match self {
            ScalarType::Integer => "an integer",
            ScalarType::Number => "a number",
            ScalarType::Text => "a string",
            ScalarType::TextOrNumber => "a string or a number",
        }
    }
}

impl FlagShape {
    pub fn of(arg: &Arg) -> FlagShape {
        match arg.get_action() {
            ArgAction::SetTrue | ArgAction::SetFalse => FlagShape::Switch,
            ArgAction::Count => FlagShape::Count,
            ArgAction::Append => FlagShape::Many(scalar(arg)),
            _ if arg.get_num_args().is_some_and(|range| range.max_values() > 1) => {
                FlagShape::Many(scalar(arg))
            }
            _ => FlagShape::One(scalar(arg)),
        }
    }
}

fn scalar(arg: &Arg) -> ScalarType {
    let kind = arg.get_value_parser().type_id();
    let is_any = |types: &[TypeId]| types.iter().any(|id| kind == *id);
    if !arg.get_possible_values().is_empty() || is_any(&[of::<String>(), of::<OsString>(), of::<PathBuf>()]) {
        ScalarType::Text
    } else if is_any(&[of::<f32>(), of::<f64>()]) {
        ScalarType::Number
    } else if is_any(&[
        of::<u8>(),
        of::<u16>(),
        of::<u32>(),
        of::<u64>(),
        of::<usize>(),
        of::<i32>(),
        of::<i64>(),
        of::<isize>(),
        of::<MaxTokens>(),
    ]) {
        ScalarType::Integer
    } else {
        ScalarType::TextOrNumber
    }
}

fn of<T: 'static>() -> TypeId {
    TypeId::of::<T>()
}

/// Flags that are no settings.
const NOT_KEYS: [&str; 3] = ["config", "help", "version"];

/// Returns the key of a flag in configuration files; `None` for positional arguments and for flags that are no settings.
pub fn key(arg: &Arg) -> Option<&str> {
    arg.get_long().filter(|long| !NOT_KEYS.contains(long))
}

/// Checks `value` with the flag's own parser.
///
/// # Errors
/// Validates a value; the error says what is wrong.
pub fn check(arg: &Arg, value: &str) -> Result<(), String> {
    let Some(long) = arg.get_long() else { return Ok(()) };
    let probe = Arg::new("value").long(long.to_owned()).value_parser(arg.get_value_parser().clone());
    let probe = match arg.get_value_delimiter() {
        Some(delimiter) => probe.value_delimiter(delimiter).num_args(1..),
        None => probe,
    };
    let command = Command::new("value").no_binary_name(true).arg(probe).color(clap::ColorChoice::Never);
    match command.try_get_matches_from([format!("--{long}={value}")]) {
        Ok(_) => Ok(()),
        Err(error) => Err(reason(&error).unwrap_or_else(|| format!("{value:?} is not a value of --{long}"))),
    }
}

/// Returns what is wrong with one value, e.g. `"abc" is not a whole number`; `None` if the error is not about a value.
pub fn reason(error: &clap::Error) -> Option<String> {
    let given = text(error, ContextKind::InvalidValue)?;
    if error.kind() == ErrorKind::InvalidValue {
        let known = match error.get(ContextKind::ValidValue) {
            Some(ContextValue::Strings(known)) => known.join(", "),
            _ => String::new(),
        };
        return Some(match (given.as_str(), known.as_str()) {
            ("", "") => "a value is missing".to_owned(),
            ("", _) => format!("a value is missing ({known})"),
            (_, "") => format!("unknown value {given:?}"),
            _ => format!("unknown value {given:?} ({known})"),
        });
    }
    let source = std::error::Error::source(error)?;
    if let Some(wrong) = source.downcast_ref::<ParseIntError>() {
        return Some(match wrong.kind() {
            _ if given.is_empty() => "a value is missing".to_owned(),
            IntErrorKind::PosOverflow => format!("{given} is too large"),
            _ if given.parse::<i128>().is_ok() => format!("{given} is negative"),
            _ => format!("{given:?} is not a whole number"),
        });
    }
    if source.is::<ParseFloatError>() {
        return Some(format!("{given:?} is not a number"));
    }
    let message = source.to_string();
    Some(match message.as_str() {
        "value was not a boolean" => format!("{given:?} is neither true nor false"),
        text if text.starts_with("must be ") => text.to_owned(),
        // The value may hold a password or a key.
        text if text.starts_with("an address holds") && given.contains('@') => text.to_owned(),
        text => within(&given, text).unwrap_or_else(|| format!("invalid value {given:?}: {text}")),
    })
}

/// Rewrites clap's `9 is not in 1..=5` in words; `None` if the text has another form.
fn within(given: &str, message: &str) -> Option<String> {
    let bounds = message.strip_prefix(given)?.strip_prefix(" is not in ")?;
    let (low, high) = bounds.split_once("..")?;
    let is_huge = |high: &str| high.parse::<u64>().is_ok_and(|high| high >= u64::from(u32::MAX));
    Some(match high.trim_start_matches('=') {
        high if high.is_empty() || is_huge(high) => format!("must be at least {low}, not {given}"),
        _ => format!("must be from {low} to {}, not {given}", high.trim_start_matches('=')),
    })
}

/// Returns one text of the context of a clap error.
pub fn text(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    }
}

/// Returns the flag's variable, e.g. `LLMCTL_MAX_TOKENS` for `--max-tokens`; `None` for positional arguments, help and version.
pub fn variable(arg: &Arg) -> Option<String> {
    let acts = matches!(
        arg.get_action(),
        ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
    );
    let name = arg.get_long().filter(|_| !acts)?;
    Some(format!("LLMCTL_{}", name.replace('-', "_").to_uppercase()))
}

/// Returns the words that give the flag the values that it has in `matches`, wherever they are from.
pub fn words(arg: &Arg, matches: &ArgMatches) -> Vec<OsString> {
    let (id, long) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
    let times = |times: u8| vec![format!("--{long}").into(); times.into()];
    match FlagShape::of(arg) {
        FlagShape::Switch => times(matches.get_flag(id).into()),
        FlagShape::Count => times(matches.get_count(id)),
        _ => matches.get_raw(id).into_iter().flatten().map(|value| word(long, value)).collect(),
    }
}

/// Returns `--LONG=VALUE`: behind `=`, a value may start with a dash.
pub fn word(long: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut word = OsString::from(format!("--{long}="));
    word.push(value);
    word
}

/// Returns whether `word` switches a switch off or is a count of 0.
pub fn is_off(arg: &Arg, word: &str) -> bool {
    match FlagShape::of(arg) {
        FlagShape::Switch => word == "false",
        FlagShape::Count => word.parse() == Ok(0_u8),
        FlagShape::One(_) | FlagShape::Many(_) => false,
    }
}

/// Returns whether clap refuses both flags (by id) together on the command line.
pub fn conflict(command: &Command, a: &str, b: &str) -> bool {
    let arg = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id);
    let (Some(arg_a), Some(arg_b)) = (arg(a), arg(b)) else { return false };
    let excludes =
        |x: &Arg, y: &Arg| command.get_arg_conflicts_with(x).iter().any(|z| z.get_id() == y.get_id());
    a != b && (excludes(arg_a, arg_b) || excludes(arg_b, arg_a))
}

#[cfg(test)]
mod tests {
    use clap::value_parser;

    use super::*;

    #[test]
    fn shapes_come_from_the_definition() {
        let arg = || Arg::new("x").long("x");
        for (arg, expected) in [
            (arg().action(ArgAction::SetTrue), FlagShape::Switch),
            (arg().action(ArgAction::Count), FlagShape::Count),
            (arg().value_parser(value_parser!(f32)), FlagShape::One(ScalarType::Number)),
            (arg().value_parser(value_parser!(u64)), FlagShape::One(ScalarType::Integer)),
            (arg().value_parser(value_parser!(PathBuf)), FlagShape::One(ScalarType::Text)),
            (arg().value_parser(["a", "b"]), FlagShape::One(ScalarType::Text)),
            (arg().action(ArgAction::Append), FlagShape::Many(ScalarType::Text)),
            (arg().value_parser(|s: &str| s.parse::<char>()), FlagShape::One(ScalarType::TextOrNumber)),
        ] {
            assert_eq!(FlagShape::of(&arg), expected, "{arg:?}");
        }
    }

    #[test]
    fn values_are_checked_by_the_flags_own_parser() {
        let number = Arg::new("n").long("number").value_parser(value_parser!(u8).range(1..=9));
        assert_eq!(check(&number, "9"), Ok(()));
        assert_eq!(check(&number, "10").unwrap_err(), "must be from 1 to 9, not 10");
        assert!(check(&number, "-1").is_err());
        let word = Arg::new("w").long("word").value_parser(["yes", "no"]);
        assert_eq!(check(&word, "maybe").unwrap_err(), "unknown value \"maybe\" (yes, no)");
    }

    #[test]
    fn a_flags_own_parser_says_why() {
        let reason_of = |arg: Arg, value: &str| {
            let command = Command::new("x").arg(arg.long("flag"));
            let error = command.try_get_matches_from(["x", &format!("--flag={value}")]).expect_err("wrong");
            reason(&error).expect("a reason")
        };
        let byte = || Arg::new("x").value_parser(value_parser!(u8).range(1..=9));
        assert_eq!(reason_of(byte(), "10"), "must be from 1 to 9, not 10");
        assert_eq!(
            reason_of(Arg::new("x").value_parser(["yes", "no"]), "maybe"),
            "unknown value \"maybe\" (yes, no)"
        );
        assert_eq!(reason_of(Arg::new("x").value_parser(value_parser!(f32)), ""), "\"\" is not a number");
        let address = || Arg::new("x").value_parser(args::endpoint_text);
        for secret in ["https://me:secret@host", "me:secret@host", "https://me:se\u{7f}secret@host/v1"] {
            let said = reason_of(address(), secret);
            assert_eq!(said, "an address holds no user name, password or key", "{secret}");
        }
        assert!(reason_of(address(), "ftp://host").contains("\"ftp://host\""));
    }
}
