//! `llmctl completions SHELL`: prints a completion script. The script asks llmctl for candidates, so that
//! names of sessions, models and prompts are completed like flags and files.
//!
//! A script calls `llmctl -- WORDS` with [`VARIABLE`] set, and [`answer`] prints the candidates. bash splits
//! words at `:` and `=`, which model references contain, so its script passes the line, and this file splits
//! it.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, Args, Command, ValueHint};
use clap_complete::Shell;
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter, complete,
};
use clap_complete::env::{CompleteEnv, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};

use super::config::Config;
use super::error::{CommandError, Exit, Kind};
use super::places::Places;
use super::run::prompt::STORED;
use crate::cli::terminal::report::print;
use llmctl_engine::session::store::SessionName;
use llmctl_hub::builtin::GUIDE;

/// Print a completion script for a shell
#[derive(Debug, Clone, Args)]
#[command(after_long_help = "\
Examples:
  llmctl completions bash > ~/.local/share/bash-completion/completions/llmctl
  llmctl completions zsh > \"${fpath[1]}/_llmctl\"
  llmctl completions fish > ~/.config/fish/completions/llmctl.fish

Names:
  Sessions, models, aliases and prompts are completed too: the script asks the llmctl in PATH. Make it again after an update.")]
pub struct CompletionsArgs {
    /// Shell to print the script for
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

/// Variable that is set to the shell's name when a script asks.
const VARIABLE: &str = "_LLMCTL_COMPLETE";

const SHELLS: Shells<'static> = Shells(&[&Bash, &Elvish, &Fish, &Powershell, &Zsh]);

pub fn run(args: CompletionsArgs, _command: Command) -> Result<Exit, CommandError> {
    let shell = args.shell.to_string();
    let mut script = Vec::new();
    if let Some(completer) = SHELLS.completer(&shell) {
        let written = completer.write_registration(VARIABLE, "llmctl", "llmctl", "llmctl", &mut script);
        written.map_err(|error| CommandError::new(Kind::Bug, error))?;
    }
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if args.shell == Shell::Zsh {
        // zsh loads the file as the completion function at its first use, so the script must also answer that
        // first call.
        script.push_str(
            "\nif [ \"$funcstack[1]\" = \"_llmctl\" ]; then\n    _clap_dynamic_completer_llmctl \"$@\"\nfi\n",
        );
    }
    print(&script)
}

/// Answers a completion script. Returns false in an ordinary run.
pub fn answer(args: &[OsString]) -> bool {
    if std::env::var_os(VARIABLE).is_none_or(|shell| shell.is_empty()) {
        return false;
    }
    let folder = std::env::current_dir().ok();
    let asked = CompleteEnv::with_factory(|| named(super::command())).var(VARIABLE).shells(SHELLS);
    // Print no error, which the shell would show within the line being typed.
    asked.try_complete(args.to_vec(), folder.as_deref()).unwrap_or(true)
}

/// Adds completers for names to the definition.
fn named(command: Command) -> Command {
    let is_models = command.get_name() == "models";
    let is_template = command.get_name() == "template";
    let command = match command.get_name() {
        "sessions" => command.mut_subcommands(|below| {
            below.mut_args(|arg| match arg.get_id().as_str() {
                "to" => arg, // a name that no session has yet
                _ if arg.is_positional() => with(arg, sessions),
                _ => arg,
            })
        }),
        _ => command,
    };
    let command = command.mut_args(|arg| match arg.get_long() {
        Some("session") => with(arg, sessions),
        Some("model") => with(arg, models),
        Some("prompt") => with(arg, prompts),
        Some("schema") => arg.value_hint(ValueHint::AnyPath),
        _ => arg,
    });
    command.mut_subcommands(|below| {
        let below = named(below);
        below.mut_args(|arg| match arg.is_positional() && (is_models || is_template) {
            true => with(arg, models),
            false => arg,
        })
    })
}

fn with(arg: Arg, names: fn(&OsStr) -> Vec<CompletionCandidate>) -> Arg {
    arg.add(ArgValueCompleter::new(names))
}

/// Returns those of `names` that start with `current`.
fn beginning(current: &OsStr, names: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    names.into_iter().filter(|name| name.starts_with(current)).map(CompletionCandidate::new).collect()
}

/// Returns the names of sessions' folders, without reading a transcript.
fn sessions(current: &OsStr) -> Vec<CompletionCandidate> {
    let folder = Places::from_environment().sessions();
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let name = |folder: OsString| Some(SessionName::from_folder(folder.to_str()?)?.as_str().to_owned());
    let mut names: Vec<String> = entries.filter_map(|entry| name(entry.file_name())).collect();
    names.sort();
    beginning(current, names)
}

/// Returns aliases, cached repositories, the built-in model, and files.
fn models(current: &OsStr) -> Vec<CompletionCandidate> {
    let places = Places::from_environment();
    let aliases = Config::read(None, &places, &super::command()).aliases();
    let cached = llmctl_hub::list(places.hub.as_deref()).into_iter().map(|model| model.reference);
    let names = aliases.keys().cloned().chain(cached).chain([GUIDE.name.to_owned()]);
    let mut found = beginning(current, names);
    found.extend(PathCompleter::any().complete(current));
    found
}

fn prompts(current: &OsStr) -> Vec<CompletionCandidate> {
    let described = |prompt: &super::run::prompt::StoredPrompt| {
        CompletionCandidate::new(prompt.name).help(Some(prompt.description().into()))
    };
    let fits = |name: &str| current.to_str().is_some_and(|current| name.starts_with(current));
    STORED.iter().filter(|prompt| fits(prompt.name)).map(described).collect()
}

/// bash, by the line instead of by its words.
struct Bash;

const BASH: &str = r#"_llmctl() {
    local IFS=$'\013'
    COMPREPLY=( $( _LLMCTL_LINE="${COMP_LINE:0:COMP_POINT}" _LLMCTL_WORD="$2" VARIABLE="bash" COMPLETER -- "$1" 2>/dev/null ) )
    if [[ $? != 0 ]]; then
        unset COMPREPLY
    elif [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" =~ [=/:]$ ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o bashdefault -o nosort -F _llmctl BINARY 2>/dev/null || complete -o bashdefault -F _llmctl BINARY
"#;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == "bash"
    }

    fn write_registration(
        &self,
        variable: &str,
        _name: &str,
        binary: &str,
        completer: &str,
        script: &mut dyn Write,
    ) -> io::Result<()> {
        let text = BASH.replace("VARIABLE", variable).replace("BINARY", binary);
        script.write_all(text.replace("COMPLETER", completer).as_bytes())
    }

    fn write_complete(
        &self,
        command: &mut Command,
        _args: Vec<OsString>,
        folder: Option<&Path>,
        answer: &mut dyn Write,
    ) -> io::Result<()> {
        let variable = |name| std::env::var_os(name).unwrap_or_default().to_string_lossy().into_owned();
        let words = words(&variable("_LLMCTL_LINE"));
        let typed = words.last().cloned().unwrap_or_default();
        let index = words.len().saturating_sub(1);
        let found = complete(command, words.into_iter().map(OsString::from).collect(), index, folder)?;
        // bash replaces what it takes for the word by the answer.
        let kept =
            typed.strip_suffix(variable("_LLMCTL_WORD").trim_start_matches(['"', '\''])).unwrap_or_default();
        let values = found.iter().filter_map(|candidate| {
            candidate.get_value().to_str().and_then(|value| value.strip_prefix(kept)).map(str::to_owned)
        });
        answer.write_all(values.collect::<Vec<_>>().join("\u{b}").as_bytes())
    }
}

/// Splits an unfinished command line into words without quotes and backslashes. The last word is being typed.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut is_word) = (Vec::new(), String::new(), false);
    let mut quote = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (None, ' ' | '\t') => {
                if std::mem::take(&mut is_word) {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), _) if letter == open => quote = None,
            (None | Some('"'), '\\') => word.extend(letters.next()),
            // Another command starts: `a | llmctl run`.
            (None, '|' | ';' | '&' | '(') => {
                words.clear();
                word.clear();
                is_word = false;
                continue;
            }
            _ => word.push(letter),
        }
        is_word = true;
    }
    words.push(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart_as_the_shell_will() {
        let check = |line: &str, expected: &[&str]| assert_eq!(words(line), expected, "{line:?}");
        check("llmctl run -m org/repo:Q", &["llmctl", "run", "-m", "org/repo:Q"]);
        check("llmctl run --model=a", &["llmctl", "run", "--model=a"]);
        check("llmctl run ", &["llmctl", "run", ""]);
        check("llmctl run \"two words\" 'it''s' a\\ b", &["llmctl", "run", "two words", "its", "a b"]);
        check("llmctl run \"two wo", &["llmctl", "run", "two wo"]);
        check("git diff | llmctl run --pro", &["llmctl", "run", "--pro"]);
        check("", &[""]);
    }

    #[test]
    fn every_place_for_a_name_has_its_names() {
        let command = named(super::super::command());
        let completes = |path: &[&str], id: &str| {
            let below = path
                .iter()
                .fold(&command, |command, name| command.find_subcommand(name).expect("a subcommand"));
            let arg = below.get_arguments().find(|arg| arg.get_id() == id || arg.get_long() == Some(id));
            arg.unwrap_or_else(|| panic!("{path:?} has no {id}")).get::<ArgValueCompleter>().is_some()
        };
        for (path, id) in [
            (&["run"][..], "session"),
            (&["chat"], "session"),
            (&["run"], "model"),
            (&["chat"], "model"),
            (&["serve"], "model"),
            (&["bench"], "model"),
            (&["bench", "serve"], "model"),
            (&["run"], "prompt"),
            (&["sessions", "show"], "name"),
            (&["sessions", "rename"], "from"),
            (&["models", "show"], "reference"),
            (&["models", "rm"], "references"),
            (&["models", "verify"], "references"),
        ] {
            assert!(completes(path, id), "{path:?} {id}");
        }
        let sessions = command.find_subcommand("sessions").expect("a subcommand");
        for below in sessions.get_subcommands().filter(|below| below.get_name() != "rename") {
            let names = below.get_positionals().next();
            let is_completed = names.is_none_or(|names| names.get::<ArgValueCompleter>().is_some());
            assert!(is_completed, "{}", below.get_name());
        }
        assert!(!completes(&["sessions", "rename"], "to"));
        assert!(!completes(&["run"], "words"));
    }
}
