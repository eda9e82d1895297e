//! What a flag takes, as seen from a configuration file: which TOML types, and whether a value is valid.
//!
//! Everything is read from the clap definition, so that a new flag is a new key without another line of code.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction};

use crate::cli::args::MaxTokens;
use crate::cli::explain::reason;

/// How many values a key takes, and of which kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `--quiet`: a boolean.
    Switch,
    /// `-vv`: how often, as an integer.
    Count,
    One(Scalar),
    /// A repeatable flag: an array, or a single value.
    Many(Scalar),
}

/// The TOML types of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    Integer,
    /// Integer or float.
    Number,
    Text,
    /// A type of the flag's own, e.g. a number or a word.
    TextOrNumber,
}

impl Scalar {
    pub const fn name(self) -> &'static str {
        match self {
            Scalar::Integer => "an integer",
            Scalar::Number => "a number",
            Scalar::Text => "a string",
            Scalar::TextOrNumber => "a string or a number",
        }
    }
}

impl Shape {
    pub fn of(arg: &Arg) -> Shape {
        match arg.get_action() {
            ArgAction::SetTrue | ArgAction::SetFalse => Shape::Switch,
            ArgAction::Count => Shape::Count,
            ArgAction::Append => Shape::Many(scalar(arg)),
            _ if arg.get_num_args().is_some_and(|range| range.max_values() > 1) => Shape::Many(scalar(arg)),
            _ => Shape::One(scalar(arg)),
        }
    }
}

fn scalar(arg: &Arg) -> Scalar {
    let kind = arg.get_value_parser().type_id();
    let is_any = |types: &[TypeId]| types.iter().any(|id| kind == *id);
    if !arg.get_possible_values().is_empty() || is_any(&[of::<String>(), of::<OsString>(), of::<PathBuf>()]) {
        Scalar::Text
    } else if is_any(&[of::<f32>(), of::<f64>()]) {
        Scalar::Number
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
        Scalar::Integer
    } else {
        Scalar::TextOrNumber
    }
}

fn of<T: 'static>() -> TypeId {
    TypeId::of::<T>()
}

/// Flags that name or end a call instead of setting something.
const NOT_KEYS: [&str; 3] = ["config", "help", "version"];

/// The key of a flag in configuration files; `None` for positional arguments and for flags that are no settings.
pub fn key(arg: &Arg) -> Option<&str> {
    arg.get_long().filter(|long| !NOT_KEYS.contains(long))
}

/// Asks the flag's own parser whether it takes `value`; the error says what is wrong with it.
pub fn check(arg: &Arg, value: &str) -> Result<(), String> {
    let Some(long) = arg.get_long() else { return Ok(()) };
    let probe = Arg::new("value").long(long.to_owned()).value_parser(arg.get_value_parser().clone());
    let probe = match arg.get_value_delimiter() {
        Some(delimiter) => probe.value_delimiter(delimiter).num_args(1..),
        None => probe,
    };
    let command = clap::Command::new("value").no_binary_name(true).arg(probe).color(clap::ColorChoice::Never);
    match command.try_get_matches_from([format!("--{long}={value}")]) {
        Ok(_) => Ok(()),
        Err(error) => Err(reason(&error).unwrap_or_else(|| format!("{value:?} is not a value of --{long}"))),
    }
}

#[cfg(test)]
mod tests {
    use clap::value_parser;

    use super::*;

    #[test]
    fn shapes_come_from_the_definition() {
        let arg = || Arg::new("x").long("x");
        for (arg, expected) in [
            (arg().action(ArgAction::SetTrue), Shape::Switch),
            (arg().action(ArgAction::Count), Shape::Count),
            (arg().value_parser(value_parser!(f32)), Shape::One(Scalar::Number)),
            (arg().value_parser(value_parser!(u64)), Shape::One(Scalar::Integer)),
            (arg().value_parser(value_parser!(PathBuf)), Shape::One(Scalar::Text)),
            (arg().value_parser(["a", "b"]), Shape::One(Scalar::Text)),
            (arg().action(ArgAction::Append), Shape::Many(Scalar::Text)),
            (arg().value_parser(|s: &str| s.parse::<char>()), Shape::One(Scalar::TextOrNumber)),
        ] {
            assert_eq!(Shape::of(&arg), expected, "{arg:?}");
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
}
