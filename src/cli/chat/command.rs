//! The table of commands: names, arguments, help.
//!
//! `/help`, completion, hints and dispatch all read it. Its [`CommandId`]s are matched in `actions`, so that
//! a command without an action does not compile.

use crate::cli::error::{CommandError, nearest};
use crate::cli::terminal::wrap;

/// Kind of a command's argument, for completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentKind {
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

/// One command.
pub struct ChatCommand {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    /// Placeholder of the argument in help.
    pub takes: Option<&'static str>,
    pub help: &'static str,
    pub argument: ArgumentKind,
    pub id: CommandId,
}

impl ChatCommand {
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }
}

pub const EXPORT_FORMATS: &[&str] = &["md", "json", "jsonl"];

const THINK: &[&str] = &["on", "off", "hide", "show", "budget"];
const SHOW: &[&str] = &["config", "model", "template", "prompt", "thinking"];

/// Makes the commands' ids, for each of which `actions::run` has a function, and the table, from its rows.
macro_rules! table {
    ($($name:literal [$($alias:literal),*] $takes:expr, $argument:expr, $id:ident, $help:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum CommandId {
            $($id),*
        }

        /// All commands, those used most first.
        pub const TABLE: &[ChatCommand] = &[$(ChatCommand {
            name: $name, aliases: &[$($alias),*], takes: $takes, argument: $argument, id: CommandId::$id, help: $help,
        }),*];
    };
}

/// Commands that `/help` explains: the first of the table, which fit on a small screen.
const NUM_USUAL: usize = 10;

table! {
    "undo" [] Some("[N]"), ArgumentKind::Text, Undo,
        "Take back the last turn, or the last N; after /reset, bring the conversation back";
    "retry" ["regen"] Some("[seed=N]"), ArgumentKind::Words(&["seed="]), Retry,
        "Answer the last message again; the old answer stays as a branch";
    "edit" [] Some("[N] [TEXT]"), ArgumentKind::Text, Edit,
        "Change your last message, or that of turn N; what it replaces stays as a branch";
    "continue" [] None, ArgumentKind::None, GoOn,
        "Continue an answer that was interrupted or cut";
    "new" ["clear"] None, ArgumentKind::None, New,
        "Start a new conversation; the old one stays as a session, and /load opens it";
    "load" [] Some("NAME"), ArgumentKind::Session, Load,
        "Continue another session or branch, with its own model unless you chose one";
    "file" ["read"] Some("PATH"), ArgumentKind::Path, File,
        "Send a file's text along with the next message";
    "model" [] Some("[REF]"), ArgumentKind::Model, Model,
        "Show the model, or continue with another";
    "set" [] Some("[KEY VALUE]"), ArgumentKind::Setting, Set,
        "Show or change sampling and limits; VALUE `default` restores the default";
    "exit" ["bye", "quit", "q"] None, ArgumentKind::None, Exit,
        "Leave; the session is saved already";
    "help" ["?"] Some("[all|COMMAND]"), ArgumentKind::Command, Help,
        "List the commands used most, or all; or explain one";
    "image" [] Some("[PATH|drop]"), ArgumentKind::Path, Image,
        "Show the model an image with the next message; `drop` takes it back";
    "reset" [] None, ArgumentKind::None, Reset,
        "Empty this session, after asking; /undo brings the conversation back";
    "system" [] Some("[TEXT]"), ArgumentKind::Text, System,
        "Show or set the system prompt; after the first turn this starts a new session with it";
    "show" [] Some("[config|model|template|prompt|thinking]"), ArgumentKind::Words(SHOW), Show,
        "Show the conversation, the settings, or what the model gets";
    "save" [] Some("[NAME]"), ArgumentKind::Text, Save,
        "Name the session; one that you named before is copied under the new name";
    "sessions" ["ls"] None, ArgumentKind::None, Sessions,
        "List the saved sessions";
    "rename" [] Some("[OLD] NEW"), ArgumentKind::Session, Rename,
        "Give this session, or another, a new name";
    "delete" [] Some("[NAME]"), ArgumentKind::Session, Delete,
        "Remove this session, or another, with its KV";
    "redo" [] None, ArgumentKind::None, Redo,
        "Bring back what /undo, /retry, /edit or /reset took away last; again swaps them";
    "fork" [] Some("[NAME]"), ArgumentKind::Text, Fork,
        "Continue in a copy; this session stays as it is";
    "branches" [] None, ArgumentKind::None, Branches,
        "Show this session's branches and forks; /load opens one";
    "think" [] Some("[on|off|hide|show|N]"), ArgumentKind::Words(THINK), Think,
        "Turn reasoning on or off, hide or show it, or limit it to N tokens";
    "context" [] None, ArgumentKind::None, Context,
        "Show what fills the context, turn by turn";
    "stats" [] None, ArgumentKind::None, Stats,
        "Show counts, rates and reuse of the last answer";
    "why" [] None, ArgumentKind::None, Why,
        "Why as much of the last prompt was reused as was, with the first token that differs";
    "compact" [] None, ArgumentKind::None, Compact,
        "Replace the older turns by a summary; the whole conversation stays as another session";
    "export" [] Some("md|json|jsonl PATH"), ArgumentKind::Export, Export,
        "Write the conversation to a file";
    "copy" [] Some("[code]"), ArgumentKind::Words(&["code"]), Copy,
        "Copy the last answer, or its last block of code, to the clipboard";
    "compare" [] Some("VARIATION"), ArgumentKind::Model, Compare,
        "Answer the last message with another model or KEY=VALUE settings too (several apart by |); nothing of it is kept";
    "json" [] Some("[SCHEMA|off]"), ArgumentKind::Path, Json,
        "Make answers JSON that satisfies a schema: a file, the schema itself, or `object`";
    "tools" [] Some("[FILE|off]"), ArgumentKind::Path, Tools,
        "Show the tools, or declare them from a file of TOML or JSON";
    "mcp" [] Some("[restart NAME]"), ArgumentKind::Words(&["restart"]), Mcp,
        "Show the MCP servers and their tools, or start a server anew";
}

/// Returns the command of this name, with or without its slash.
pub fn find(name: &str) -> Option<&'static ChatCommand> {
    let name = name.strip_prefix('/').unwrap_or(name);
    TABLE.iter().find(|command| command.names().any(|known| known == name))
}

/// Parses a line as a command and its argument.
pub fn of(line: &str) -> Option<(&'static ChatCommand, &str)> {
    let word = line.strip_prefix('/')?;
    let (name, argument) = word.split_once(char::is_whitespace).unwrap_or((word, ""));
    Some((find(name)?, argument.trim()))
}

/// Returns whether a line is meant as a command: `/ect/passwd` and `// a comment` are not.
pub fn is_meant(line: &str) -> bool {
    let Some(word) = line.strip_prefix('/') else { return false };
    let name = word.split(char::is_whitespace).next().unwrap_or_default();
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic() || c == '-' || c == '_')
}

/// Returns the error for an unknown command.
pub fn unknown(line: &str) -> CommandError {
    let name = line[1..].split(char::is_whitespace).next().unwrap_or_default();
    let near = nearest(name, TABLE.iter().flat_map(ChatCommand::names));
    let meant = near.map_or(String::new(), |near| format!("did you mean /{near}? "));
    CommandError::usage(format!("unknown command /{name}"))
        .hint(format!("{meant}/help lists the commands; a blank before the / makes it a message"))
}

/// `/help`, or `/help all` with all commands, for a terminal of so many columns.
pub fn help(columns: usize, is_whole: bool) -> String {
    let indent = if columns < 72 { 4 } else { NAME_WIDTH };
    let (explained, others) = TABLE.split_at(if is_whole { TABLE.len() } else { NUM_USUAL });
    let mut text = String::new();
    for command in explained {
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
    if !others.is_empty() {
        let names: String = others.iter().map(|command| format!(" /{}", command.name)).collect();
        let also = format!("Also{names}. `/help all` explains them.");
        wrapped(&also, columns).iter().for_each(|line| text.push_str(&format!("{line}\n")));
    }
    KEYS.iter().flat_map(|line| wrapped(line, columns)).for_each(|line| text.push_str(&format!("{line}\n")));
    text.trim_end().to_owned()
}

const NAME_WIDTH: usize = 26;

/// Breaks the text between words into lines of at most so many columns.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    wrap::wrapped(text, width, 0).lines().map(str::to_owned).collect()
}

const KEYS: [&str; 2] = [
    "Enter sends; Alt-Enter or Ctrl-J breaks a line, and so does Enter while ``` or \"\"\" is open.",
    "Ctrl-X Ctrl-E opens an editor. Ctrl-C stops an answer, twice on an empty line leaves. Ctrl-R searches.",
];

/// `/help COMMAND`.
pub fn explain(command: &ChatCommand) -> String {
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
        let names: Vec<_> = TABLE.iter().flat_map(ChatCommand::names).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        let help = help(1000, true);
        for command in TABLE {
            assert!(help.contains(&format!("  /{}", command.name)), "{}", command.name);
            assert!(help.contains(command.help), "{}", command.name);
            assert!(!command.help.ends_with('.') && command.help.len() > 10, "{}", command.name);
            let explained = explain(command);
            assert!(command.names().all(|name| explained.contains(&format!("/{name}"))), "{explained}");
            assert_eq!(command.takes.is_none(), command.argument == ArgumentKind::None, "{}", command.name);
        }
        insta::assert_snapshot!("help", super::help(80, false));
        assert!(super::help(80, false).lines().count() <= 24, "it fits a small screen");
        insta::assert_snapshot!("help_narrow", super::help(40, true));
        for width in [20, 40, 72, 100] {
            let is_short = |line: &str| line.chars().count() <= width.max(48);
            assert!(super::help(width, true).lines().all(is_short), "{width}");
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
        let tests = include_str!("../../../tests/chat.rs").to_owned()
            + include_str!("../../../tests/chat/transcripts.txt");
        for command in TABLE {
            let is_sent = |before| tests.contains(&format!("{before}/{}", command.name));
            let found = ["\"", "> ", "~ ", "<< "].into_iter().any(is_sent);
            assert!(found, "/{} is not in tests/chat", command.name);
        }
    }
}
