//! `llmctl chat`: a conversation in the terminal, saved after every turn and warm when it continues.
//!
//! `state` is plain data, `ui` the terminal, `model` the loaded model; `session` puts them together and opens
//! and leaves sessions. `turn` takes one answer from the prompt to the disk, `tool_calls` runs the calls of
//! an answer, `context_limit` makes room when the context is full. `command` is the table of what can be
//! typed behind a slash, `actions` what it does; `input` and `complete` are the line editor, `typed_ahead` is
//! what was typed before it reads, `renderer` writes answers. stdout gets answers and nothing else; notices
//! go to stderr.

mod actions;
pub(in crate::cli) mod command;
mod compare;
mod complete;
mod context_limit;
mod input;
mod model;
mod renderer;
mod session;
mod state;
mod throughput;
mod tool_calls;
mod turn;
mod typed_ahead;
mod ui;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::error::{CommandError, Exit};
use super::images;
use super::mcp::McpArgs;
use super::places::Places;
use super::run::prompt::read_prompt_file;
use super::terminal::Terminal;
use crate::cli::flags::args::{ConnectArgs, EndpointArgs, EngineArgs, LimitArgs, ModelArgs, SamplingArgs};
use crate::cli::terminal::report::{counted, grouped, on_one_line};
use crate::cli::terminal::tty;
use crate::cli::terminal::tty::Silence;
use input::InputLine;
use session::Chat;
use state::Effect;

/// Talk with a model, in sessions that survive a restart
///
/// Every finished turn is saved without asking, with its KV, so that a conversation continues warm. `/help` in the chat lists its
/// commands. What is piped in is answered line by line.
#[derive(Debug, Clone, Default, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ChatArgs {
    #[command(flatten)]
    pub session: ChatSessionArgs,

    #[command(flatten)]
    pub prompt: ChatPromptArgs,

    #[command(flatten)]
    pub screen: ScreenArgs,

    #[command(flatten)]
    pub mcp: McpArgs,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub connect: ConnectArgs,

    #[command(flatten)]
    pub endpoint: EndpointArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub limits: LimitArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags that choose the conversation.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Session")]
pub struct ChatSessionArgs {
    /// Continue the saved session NAME with its own model, or start it
    #[arg(long, value_name = "NAME", conflicts_with_all = ["continue", "new", "ephemeral"])]
    pub session: Option<String>,

    /// Continue the session that was used last, with its own model
    #[arg(long = "continue", short = 'c', conflicts_with_all = ["new", "ephemeral"])]
    pub r#continue: bool,

    /// Start a session, named after the time (the default)
    #[arg(long, conflicts_with = "ephemeral")]
    pub new: bool,

    /// Save nothing, unless /save is given
    #[arg(long, alias = "no-save")]
    pub ephemeral: bool,
}

/// Flags for the beginning of the conversation.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub struct ChatPromptArgs {
    /// System prompt of a new session
    #[arg(long, short, value_name = "TEXT", conflicts_with = "system_file")]
    pub system: Option<String>,

    /// Read the system prompt from a file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub system_file: Option<PathBuf>,

    /// As [`crate::cli::run::PromptArgs::is_system_given`].
    #[arg(skip)]
    pub is_system_given: bool,

    /// Say this file's text as the first message
    #[arg(long, value_name = "FILE", conflicts_with = "message")]
    pub prompt_file: Option<PathBuf>,

    /// Say this first
    #[arg(value_name = "MESSAGE")]
    pub message: Option<String>,

    /// Run these commands, declared in TOML, when the model calls them and you agree (as /tools); JSON as in `run` has no commands
    #[arg(long, value_name = "FILE|JSON")]
    pub tools: Option<String>,

    /// Reasoning before the answer, as /think: on, off, hide, or a budget in tokens, e.g. 500 (default: as the chat template
    /// does)
    #[arg(long, value_name = "HOW")]
    pub think: Option<String>,
}

/// Flags for the display.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Screen")]
pub struct ScreenArgs {
    /// Write answers as they come: no colours for Markdown and code, no line breaks between words
    #[arg(long)]
    pub plain: bool,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

/// Runs the subcommand.
pub fn run(args: ChatArgs, terminal: &Terminal, places: &Places) -> Result<Exit, CommandError> {
    tty::remember();
    let file = args.prompt.prompt_file.as_deref().map(read_prompt_file).transpose()?;
    let opening = file.or_else(|| args.prompt.message.clone());
    let silence = Silence::begin();
    let mut chat = Chat::begin(args, terminal, places)?;
    drop(silence);
    let ended = converse(&mut chat, opening);
    chat.end();
    ended
}

/// Reads and answers until there is nothing more to read.
fn converse(chat: &mut Chat<'_>, opening: Option<String>) -> Result<Exit, CommandError> {
    let mut next = match opening {
        Some(text) => guarded(chat, |chat| chat.say(text))?,
        None => Effect::Prompt,
    };
    let mut is_leaving = false;
    loop {
        let initial = match next {
            Effect::Leave(exit) => return Ok(exit),
            Effect::Edit(text) => text,
            Effect::Prompt => String::new(),
        };
        chat.tell_news();
        chat.ui.graceful.wait(chat.ui.is_interactive());
        let line = chat.read(&initial)?;
        let was_leaving = std::mem::take(&mut is_leaving);
        next = match line {
            InputLine::End => Effect::Leave(Exit::Success),
            InputLine::Interrupted { was_empty: true } if was_leaving => Effect::Leave(Exit::Success),
            InputLine::Interrupted { was_empty } => {
                is_leaving = was_empty;
                if was_empty {
                    chat.ui.terminal.note("(Ctrl-C again or Ctrl-D leaves)");
                }
                chat.state.forget_edit();
                Effect::Prompt
            }
            InputLine::Text(text) => guarded(chat, |chat| take(chat, &text))?,
        };
    }
}

/// Takes a line: a command or a message.
fn take(chat: &mut Chat<'_>, line: &str) -> Result<Effect, CommandError> {
    if line.trim().is_empty() {
        chat.state.forget_edit();
        return Ok(Effect::Prompt);
    }
    chat.ui.input.remember(line, chat.ui.terminal);
    if chat.ui.is_interactive() && matches!(line.trim_end(), "exit" | "quit") {
        let word = line.trim_end();
        chat.ui.terminal.note(format!(
            "(/exit or Ctrl-D leaves the chat; a blank before \u{201c}{word}\u{201d} sends it to the model)"
        ));
        return Ok(Effect::Prompt);
    }
    match command::of(line) {
        Some((command, argument)) => {
            let (editing, last) = (chat.state.editing.take(), chat.state.turns().last().cloned());
            let done = actions::run(chat, command, argument);
            let is_same =
                last.zip(chat.state.turns().last()).is_some_and(|(old, now)| Arc::ptr_eq(&old, now));
            if let (Some(kept), None, true) = (editing, chat.state.editing, is_same) {
                chat.state.editing = Some(kept);
                let turn = kept + 1;
                chat.ui
                    .terminal
                    .note(format!("(the next message still replaces turn {turn}; Ctrl-C ends that)"));
            }
            done
        }
        None if command::is_meant(line) => Err(command::unknown(line)),
        None => match chat.state.editing.take() {
            Some(kept) => chat.say_instead(kept, input::unquoted(line).to_owned()),
            None => say(chat, input::unquoted(line)),
        },
    }
}

/// Says a message. Lines of it that are paths of images, as a terminal writes dropped files, are images for it.
fn say(chat: &mut Chat<'_>, message: &str) -> Result<Effect, CommandError> {
    let (paths, text) = images::take_paths(message);
    let sees = chat.model.here().is_none_or(|llm| llm.vision().is_ok());
    if paths.is_empty() || !sees {
        if !paths.is_empty() {
            chat.ui.terminal.note("(the model reads no images: it gets the path as text)");
        }
        return chat.say(message.to_owned());
    }
    for path in paths {
        actions::attach(chat, &path)?;
    }
    if text.is_empty() { Ok(Effect::Prompt) } else { chat.say(text) }
}

/// Runs an action that SIGINT stops without ending the chat. On a terminal, an error is reported and the chat continues.
fn guarded<'a>(
    chat: &mut Chat<'a>,
    work: impl FnOnce(&mut Chat<'a>) -> Result<Effect, CommandError>,
) -> Result<Effect, CommandError> {
    chat.ui.graceful.work();
    let silence = Silence::begin();
    let done = work(chat);
    drop(silence);
    if let Some(number) = chat.ui.terminated() {
        return Ok(Effect::Leave(Exit::Signal(number)));
    }
    match done {
        Err(error) if chat.ui.is_interactive() && !chat.is_lost(&error) => {
            chat.ui.terminal.error(&error);
            Ok(chat.unsent())
        }
        done => done,
    }
}

/// The same number on all systems.
const SIGINT: u8 = 2;

/// Returns the beginning of a text on one line, in quotes.
fn shortened(text: &str, most: usize) -> String {
    format!("\u{201c}{}\u{201d}", on_one_line(text, most))
}

/// Formats a time for people: `0.2 s`, `54 s`, `3 min 20 s`.
fn spoken(time: std::time::Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        _ if seconds < 119.5 => format!("{seconds:.0} s"),
        _ => format!("{} min {:02} s", time.as_secs() / 60, time.as_secs() % 60),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_for_people() {
        for (ms, text) in
            [(0, "0.0 s"), (240, "0.2 s"), (9_949, "9.9 s"), (54_000, "54 s"), (200_000, "3 min 20 s")]
        {
            assert_eq!(spoken(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn long_questions_are_shortened_at_a_character() {
        assert_eq!(shortened("a\n b", 60), "\u{201c}a b\u{201d}");
        assert_eq!(shortened("日本語です", 3), "\u{201c}日本語\u{2026}\u{201d}");
    }
}
