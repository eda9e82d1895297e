//! Origins of flags' values, for error messages.
//!
//! Ranges are checked far from the command line, with a message that starts with the flag. This file replaces
//! the flag in the message by the file and line, or the variable, that set it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

use crate::cli::error::{CommandError, Kind};

/// Origin of a flag's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Variable(String),
    File { path: PathBuf, line: usize },
    BuiltIn,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag => f.write_str("flag"),
            Origin::Variable(name) => f.write_str(name),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::BuiltIn => f.write_str("built-in"),
        }
    }
}

/// Origins by long name, for flags that are not on the command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins(pub BTreeMap<String, Origin>);

impl Origins {
    /// Adds the flags of `command` that variables set in `matches`.
    pub fn add_variables(&mut self, command: &Command, matches: &ArgMatches) {
        for arg in command.get_arguments() {
            let id = arg.get_id().as_str();
            let is_known = matches.try_contains_id(id).is_ok();
            let is_variable = is_known && matches.value_source(id) == Some(ValueSource::EnvVariable);
            if let (true, Some(long), Some(name)) = (is_variable, arg.get_long(), arg.get_env()) {
                let name = Origin::Variable(name.to_string_lossy().into_owned());
                self.0.insert(long.to_owned(), name);
            }
        }
    }

    /// Replaces the flag at the start of the error's message by the origin of its value.
    pub fn name(&self, error: CommandError) -> CommandError {
        let message = error.to_string();
        let flag = message.strip_prefix("--").and_then(|rest| rest.split_once(": "));
        let Some((flag, wrong)) = flag else { return error };
        match self.0.get(flag) {
            None | Some(Origin::Flag | Origin::BuiltIn) => error,
            Some(Origin::Variable(name)) => error.replaced(Kind::Usage, format!("{name}: {wrong}")),
            Some(Origin::File { path, line }) => {
                let message = format!("{}:{line}: {flag}: {wrong}", path.display());
                error.replaced(Kind::Config, message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_takes_the_place_of_the_flag() {
        let file = Origin::File { path: "config.toml".into(), line: 3 };
        let variable = Origin::Variable("LLMCTL_TOP_P".to_owned());
        let origins =
            Origins(BTreeMap::from([("temperature".to_owned(), file), ("top-p".to_owned(), variable)]));
        let named = |message: &str| {
            let error = origins.name(CommandError::usage(message).hint("less"));
            assert_eq!(error.hint_text(), Some("less"));
            (error.kind, error.to_string())
        };
        let expected = (Kind::Config, "config.toml:3: temperature: 9 is not in [0, 2]".to_owned());
        assert_eq!(named("--temperature: 9 is not in [0, 2]"), expected);
        assert_eq!(
            named("--top-p: 0 is too small"),
            (Kind::Usage, "LLMCTL_TOP_P: 0 is too small".to_owned())
        );
        assert_eq!(named("--seed: no"), (Kind::Usage, "--seed: no".to_owned()), "from the command line");
        assert_eq!(named("no flag"), (Kind::Usage, "no flag".to_owned()));
    }
}
