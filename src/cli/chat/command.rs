//! The table of commands: names, what they take, what they do in words and in fact.
//!
//! `/help`, completion, hints and dispatch all read it, so that a command that is here is whole. What a command does is in
//! `actions`.

use super::actions;
use super::talk::Chat;
use crate::cli::error::{CommandError, Exit, nearest};
use crate::cli::wrap;

/// What comes after a command or a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Prompt,
    /// The prompt, with this on the line.
    Edit(String),
    Leave(Exit),
}

/// What a command can be given, as far as completion knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    None,
    /// Anything.
    Text,
    Words(&'static [&'static str]),
    Command,
    Setting,
    Session,
    Path,
    Model,
    /// A format, then a path.
    Export,
}

/// What a command does.
pub type Action = for<'a> fn(&mut Chat<'a>, &str) -> Result<Next, CommandError>;

/// One command.
pub struct Command {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    /// How its argument is written.
    pub takes: Option<&'static str>,
    pub help: &'static str,
    pub argument: Argument,
    pub action: Action,
}

impl Command {
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }
}

pub const EXPORT_FORMATS: &[&str] = &["md", "json", "jsonl"];

const THINK: &[&str] = &["on", "off", "hide", "show", "budget"];
const SHOW: &[&str] = &["config", "model", "template", "prompt", "thinking"];

macro_rules! table {
    ($($name:literal [$($alias:literal),*] $takes:expr, $argument:expr, $action:path, $help:literal;)*) => {
        &[$(Command {
            name: $name, aliases: &[$($alias),*], takes: $takes, argument: $argument, action: $action, help: $help,
        }),*]
    };
}

/// All commands, in the order of `/help`.
pub const TABLE: &[Command] = table![
    "help" ["?"] Some("[COMMAND]"), Argument::Command, actions::help,
        "List the commands, or explain one";
    "exit" ["bye", "quit", "q"] None, Argument::None, actions::exit,
        "Leave; the session is saved already";
    "new" ["clear"] None, Argument::None, actions::new,
        "Start a new conversation; the old one stays as a session, and /load opens it";
    "reset" [] None, Argument::None, actions::reset,
        "Empty this session, after asking; /undo brings the conversation back";
    "system" [] Some("[TEXT]"), Argument::Text, actions::system,
        "Show or set the system prompt; after the first turn this starts a new session with it";
    "set" [] Some("[KEY VALUE]"), Argument::Setting, actions::set,
        "Show or change sampling and limits; VALUE `default` restores the default";
    "show" [] Some("[config|model|template|prompt|thinking]"), Argument::Words(SHOW), actions::show,
        "Show the conversation, the settings, or what the model gets";
    "save" [] Some("[NAME]"), Argument::Text, actions::save,
        "Name the session; one that you named before is copied under the new name";
    "load" [] Some("NAME"), Argument::Session, actions::load,
        "Continue another session or branch, with its own model unless you chose one";
    "sessions" ["ls"] None, Argument::None, actions::sessions,
        "List the saved sessions";
    "rename" [] Some("[OLD] NEW"), Argument::Session, actions::rename,
        "Give this session, or another, a new name";
    "delete" [] Some("[NAME]"), Argument::Session, actions::delete,
        "Remove this session, or another, with its KV";
    "undo" [] Some("[N]"), Argument::Text, actions::undo,
        "Take back the last turn, or the last N; after /reset, bring the conversation back";
    "redo" [] None, Argument::None, actions::redo,
        "Bring back what /undo, /retry, /edit or /reset took away last; again swaps them";
    "retry" ["regen"] Some("[seed=N]"), Argument::Words(&["seed="]), actions::retry,
        "Answer the last message again; the old answer stays as a branch";
    "edit" [] Some("[N] [TEXT]"), Argument::Text, actions::edit,
        "Change your last message, or that of turn N; what it replaces stays as a branch";
    "fork" [] Some("[NAME]"), Argument::Text, actions::fork,
        "Continue in a copy; this session stays as it is";
    "branches" [] None, Argument::None, actions::branches,
        "Show this session's branches and forks; /load opens one";
    "continue" [] None, Argument::None, actions::go_on,
        "Continue an answer that was interrupted or cut";
    "file" ["read"] Some("PATH"), Argument::Path, actions::file,
        "Send a file's text along with the next message";
    "think" [] Some("[on|off|hide|show|budget N]"), Argument::Words(THINK), actions::think,
        "Whether the model thinks before it answers, whether you see it, and how long it may";
    "context" [] None, Argument::None, actions::context,
        "Show what fills the context, turn by turn";
    "stats" [] None, Argument::None, actions::stats,
        "Show counts, rates and reuse of the last answer";
    "why" [] None, Argument::None, actions::why,
        "Why as much of the last prompt was reused as was, with the first token that differs";
    "compact" [] None, Argument::None, actions::compact,
        "Replace the older turns by a summary; the whole conversation stays as another session";
    "export" [] Some("md|json|jsonl PATH"), Argument::Export, actions::export,
        "Write the conversation to a file";
    "copy" [] Some("[code]"), Argument::Words(&["code"]), actions::copy,
        "Copy the last answer, or its last block of code, to the clipboard";
    "model" [] Some("[REF]"), Argument::Model, actions::model,
        "Show the model, or continue with another";
    "json" [] Some("[SCHEMA|off]"), Argument::Path, actions::json,
        "Make answers JSON that satisfies a schema: a file, the schema itself, or `object`";
    "tools" [] Some("[FILE|off]"), Argument::Path, actions::tools,
        "Show the tools, or declare them from a TOML file";
];

/// The command of this name, with or without its slash.
pub fn find(name: &str) -> Option<&'static Command> {
    let name = name.strip_prefix('/').unwrap_or(name);
    TABLE.iter().find(|command| command.names().any(|known| known == name))
}

/// The command that a line is, and what it is given.
pub fn of(line: &str) -> Option<(&'static Command, &str)> {
    let word = line.strip_prefix('/')?;
    let (name, argument) = word.split_once(char::is_whitespace).unwrap_or((word, ""));
    Some((find(name)?, argument.trim()))
}

/// Whether a line wants to be a command: `/ect/passwd` and `// a comment` do not.
pub fn is_meant(line: &str) -> bool {
    let Some(word) = line.strip_prefix('/') else { return false };
    let name = word.split(char::is_whitespace).next().unwrap_or_default();
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic() || c == '-' || c == '_')
}

/// The refusal of a command that there is not.
pub fn unknown(line: &str) -> CommandError {
    let name = line[1..].split(char::is_whitespace).next().unwrap_or_default();
    let near = nearest(name, TABLE.iter().flat_map(Command::names));
    let meant = near.map_or(String::new(), |near| format!("did you mean /{near}? "));
    CommandError::usage(format!("unknown command /{name}"))
        .hint(format!("{meant}/help lists the commands; a blank before the / makes it a message"))
}

/// `/help`, for a terminal of so many columns.
pub fn help(columns: usize) -> String {
    let indent = if columns < 72 { 4 } else { NAME_WIDTH };
    let mut text = String::new();
    for command in TABLE {
        let takes = command.takes.map_or(String::new(), |takes| format!(" {takes}"));
        let name = format!("  /{}{takes}", command.name);
        let lines = wrapped(command.help, columns.saturating_sub(indent).max(16));
        // A name that is too long for its column stands alone, and so do all where there is no column.
        let is_alone = name.chars().count() + 2 > indent;
        if is_alone {
            text.push_str(&format!("{name}\n"));
        }
        for (at, line) in lines.iter().enumerate() {
            let first = if at == 0 && !is_alone { name.as_str() } else { "" };
            text.push_str(&format!("{first:indent$}{line}\n"));
        }
    }
    text.push('\n');
    KEYS.iter().flat_map(|line| wrapped(line, columns)).for_each(|line| text.push_str(&format!("{line}\n")));
    text.trim_end().to_owned()
}

const NAME_WIDTH: usize = 26;

/// The text in lines of at most so many columns, broken between words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    wrap::wrapped(text, width, 0).lines().map(str::to_owned).collect()
}

const KEYS: [&str; 2] = [
    "Enter sends; Alt-Enter or Ctrl-J breaks a line, and so does Enter while ``` or \"\"\" is open.",
    "Ctrl-X Ctrl-E opens an editor. Ctrl-C stops an answer, twice on an empty line leaves. Ctrl-R searches.",
];

/// `/help COMMAND`.
pub fn explain(command: &Command) -> String {
    let takes = command.takes.map_or(String::new(), |takes| format!(" {takes}"));
    let aliases: Vec<_> = command.aliases.iter().map(|alias| format!("/{alias}")).collect();
    let also = if aliases.is_empty() { String::new() } else { format!("\nalso {}", aliases.join(", ")) };
    format!("/{}{takes}\n{}{also}", command.name, command.help)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_each_command_is_documented() {
        let names: Vec<_> = TABLE.iter().flat_map(Command::names).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        let help = help(1000);
        for command in TABLE {
            assert!(help.contains(&format!("  /{}", command.name)), "{}", command.name);
            assert!(help.contains(command.help), "{}", command.name);
            assert!(!command.help.ends_with('.') && command.help.len() > 10, "{}", command.name);
            let explained = explain(command);
            assert!(command.names().all(|name| explained.contains(&format!("/{name}"))), "{explained}");
            assert_eq!(command.takes.is_none(), command.argument == Argument::None, "{}", command.name);
        }
        insta::assert_snapshot!("help", super::help(100));
        insta::assert_snapshot!("help_narrow", super::help(40));
        for width in [20, 40, 72, 100] {
            let is_short = |line: &str| line.chars().count() <= width.max(48);
            assert!(super::help(width).lines().all(is_short), "{width}");
        }
    }

    #[test]
    fn a_line_is_a_command_or_a_message() {
        let name = |line: &str| of(line).map(|(command, argument)| (command.name, argument.to_owned()));
        assert_eq!(name("/undo  2 "), Some(("undo", "2".to_owned())));
        assert_eq!(name("/bye"), Some(("exit", String::new())));
        assert_eq!(name("/edit 2 a\nb"), Some(("edit", "2 a\nb".to_owned())));
        for message in ["undo", " /undo", "/etc/passwd says?", "// a comment", "/ 2"] {
            assert!(of(message).is_none() && !is_meant(message), "{message}");
        }
        assert!(of("/unod").is_none() && is_meant("/unod"));
        let error = unknown("/unod 2");
        assert!(
            error.to_string().contains("/unod") && error.hint_text().is_some_and(|h| h.contains("/undo"))
        );
    }

    /// tests/chat has one for each; here is that none is missing there.
    #[test]
    fn every_command_has_a_test_of_what_it_does() {
        let tests = include_str!("../../../tests/chat.rs");
        for command in TABLE {
            assert!(
                tests.contains(&format!("\"/{}", command.name)),
                "/{} is not in tests/chat.rs",
                command.name
            );
        }
    }
}
