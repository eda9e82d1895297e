//! Source of chat's lines: an editor on a terminal, or the lines of a pipe.
//!
//! A message may have several lines: a fence of ``` or `"""` keeps it open until it is closed, Alt-Enter and
//! Ctrl-J break a line, a paste comes in whole, and Ctrl-X Ctrl-E opens it in $EDITOR. While the editor
//! reads, SIGINT is rustyline's (as the key Ctrl-C, because the terminal is raw, or as a signal from
//! elsewhere); at all other times it is `cli/signal.rs`'s. Knows no command's meaning: what completes is the
//! helper's.
//!
//! Up finds every message of this chat; the history file holds no entry longer than [`MAX_ENTRY_BYTES`].

use std::fs::OpenOptions;
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustyline::error::ReadlineError;
use rustyline::history::{FileHistory, History};
use rustyline::{
    Behavior, Cmd, ColorMode, CompletionType, ConditionalEventHandler, Config, Editor, Event, EventContext,
    EventHandler, KeyCode, KeyEvent, Modifiers, RepeatCount,
};

use super::complete::{Catalog, Helper, QUOTES, Typed, is_unfinished};
use super::typed_ahead;
use crate::cli::error::{CommandError, Kind};
use crate::cli::sessions::encryption;
use crate::cli::terminal::report::bytes;
use crate::cli::terminal::signal::at_question;
use crate::cli::terminal::{Terminal, tty};
use llmctl_base::private_files::{private_file, private_folder};

/// Entries kept in the history file.
const MAX_HISTORY: usize = 2000;

/// Bytes of one entry of the history file.
const MAX_ENTRY_BYTES: usize = 32 << 10;

/// Bytes of one message from a pipe.
const MAX_MESSAGE_BYTES: u64 = 64 << 20;

/// Result of reading a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InputLine {
    /// A message or a command.
    Text(String),
    /// Ctrl-C, and whether there was nothing on the line.
    Interrupted { was_empty: bool },
    /// The end of the input.
    End,
}

/// The source of lines.
pub enum LineInput {
    Terminal(Box<LineEditor>),
    Pipe,
}

/// A terminal's line editor with its history.
pub struct LineEditor {
    editor: Editor<Helper, FileHistory>,
    history: Option<HistoryFile>,
    /// End of a line by a key of llmctl's own.
    ending: LineEnding,
    typed: Typed,
    has_colors: bool,
}

/// The part of the history that is saved.
struct HistoryFile {
    path: PathBuf,
    /// Entries that this chat adds to the file. The editor's own history also has the file's entries and longer ones.
    added: FileHistory,
}

/// The end of a line by a key of ours: an interruption, or the text to open in the editor.
type LineEnding = Arc<Mutex<Option<InputLine>>>;

/// A key of ours: leaves its note, and ends the line as an interruption.
struct Key {
    ending: LineEnding,
    opens_editor: bool,
}

impl ConditionalEventHandler for Key {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        *self.ending.lock() = Some(match self.opens_editor {
            true => InputLine::Text(context.line().to_owned()),
            false => InputLine::Interrupted { was_empty: context.line().is_empty() },
        });
        Some(Cmd::Interrupt)
    }
}

impl LineInput {
    /// Returns the terminal on stdin, else its lines.
    ///
    /// # Errors
    /// The terminal cannot be driven.
    pub fn open(terminal: &Terminal, state: Option<&Path>) -> Result<Self, CommandError> {
        if !io::stdin().is_terminal() {
            return Ok(LineInput::Pipe);
        }
        // The prompt must not go to the file that stdout may be: then it is drawn on the controlling
        // terminal.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)
            .and_then(|builder| builder.history_ignore_dups(true))
            .map_err(failed)?
            .history_ignore_space(true)
            .completion_type(CompletionType::List)
            .completion_show_all_if_ambiguous(true)
            .color_mode(ColorMode::Forced) // the helper is always asked, and knows whether there are any
            .behavior(behavior)
            .bracketed_paste(true)
            .build();
        let mut added = FileHistory::with_config(&config);
        let mut editor: Editor<Helper, FileHistory> = Editor::with_config(config).map_err(failed)?;
        let ending = LineEnding::default();
        bind(&mut editor, &ending);
        let state = state.filter(|_| !encryption::is_on());
        if encryption::is_on() {
            terminal.detail("--encrypt: no history is kept of the lines typed");
        }
        let path = state.and_then(|folder| history_file(folder, terminal));
        if let Some(path) = &path
            && let Err(error) = editor.load_history(path).and_then(|()| added.load(path))
        {
            terminal.warn(format!("{}: cannot read the history: {error}", path.display()));
        }
        let history = path.map(|path| HistoryFile { path, added });
        let (typed, has_colors) = (Typed::default(), terminal.colors_notices());
        Ok(LineInput::Terminal(Box::new(LineEditor { editor, history, ending, typed, has_colors })))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, LineInput::Terminal(_))
    }

    /// Reads the next message or command. `initial` is a text to edit, before what was typed during the answer.
    ///
    /// # Errors
    /// `Io` when stdin cannot be read; `BadData` when a pipe brings no text.
    pub fn read(
        &mut self,
        prompt: &str,
        initial: &str,
        catalog: &Catalog,
        terminal: &Terminal,
    ) -> Result<InputLine, CommandError> {
        match self {
            LineInput::Pipe => read_pipe(&mut io::stdin().lock()),
            LineInput::Terminal(editor) => editor.read(prompt, initial, catalog, terminal),
        }
    }

    /// Reads the answer to a question: one line, without history, completion and fences. `None` without a terminal.
    ///
    /// # Errors
    /// `Io` when stdin cannot be read.
    pub fn ask(&mut self, question: &str) -> Result<Option<String>, CommandError> {
        let LineInput::Terminal(line) = self else { return Ok(None) };
        // Keys typed before the question do not answer it; those of the answer before it are kept for the next line.
        let _modes = tty::LineModes::begin();
        tty::forget_typed();
        let silent = Helper::silent(line.has_colors);
        let helper = line.editor.helper_mut().map(|helper| std::mem::replace(helper, silent));
        let read = at_question(|| line.editor.readline(question));
        line.editor.set_helper(helper);
        *line.ending.lock() = None;
        match read {
            Ok(answer) => Ok(Some(answer.trim().to_owned())),
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(Some(String::new())),
            Err(error) if is_bad_text(&error) => {
                tty::drain_typed();
                Ok(Some(String::new()))
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Keeps what was typed; failing to is no harm.
    pub fn remember(&mut self, entry: &str, terminal: &Terminal) {
        let LineInput::Terminal(line) = self else { return };
        let _ = line.editor.add_history_entry(entry);
        let Some(HistoryFile { path, added }) = &mut line.history else { return };
        if entry.len() > MAX_ENTRY_BYTES {
            let most = bytes(MAX_ENTRY_BYTES as u64);
            terminal
                .note(format!("(longer than {most}: in the history of this chat, not in the history file)"));
        } else {
            let _ = added.add(entry).and_then(|_| added.append(path));
        }
    }
}

fn bind(editor: &mut Editor<Helper, FileHistory>, ending: &LineEnding) {
    let own =
        |opens_editor| EventHandler::Conditional(Box::new(Key { ending: ending.clone(), opens_editor }));
    for key in [KeyEvent(KeyCode::Enter, Modifiers::ALT), KeyEvent::ctrl('J'), KeyEvent::alt('\r')] {
        editor.bind_sequence(key, Cmd::Newline);
    }
    editor.bind_sequence(KeyEvent::ctrl('C'), own(false));
    editor.bind_sequence(Event::KeySeq(vec![KeyEvent::ctrl('X'), KeyEvent::ctrl('E')]), own(true));
}

/// Creates the history file for its owner only, and returns its path.
fn history_file(folder: &Path, terminal: &Terminal) -> Option<PathBuf> {
    let path = folder.join("history");
    if path.is_symlink() {
        // Messages are private, and another user may have created the link.
        terminal.warn(format!("{}: is a symbolic link; no history is kept", path.display()));
        return None;
    }
    let made = private_folder(folder, true)
        .and_then(|()| private_file(OpenOptions::new().append(true).create(true), &path));
    match made {
        Ok(_) => Some(path),
        Err(error) => {
            terminal.warn(format!("{}: {error}; no history is kept", path.display()));
            None
        }
    }
}

/// Handles input that is not UTF-8, which the editor has dropped.
fn is_bad_text(error: &ReadlineError) -> bool {
    matches!(error, ReadlineError::Io(error) if error.kind() == io::ErrorKind::InvalidData)
}

fn failed(error: ReadlineError) -> CommandError {
    Kind::Io.error(error).context("reading the terminal")
}

const NOT_TEXT: &str = "the paste is not UTF-8 text and was left out; the line before it is kept";

impl LineEditor {
    fn read(
        &mut self,
        prompt: &str,
        initial: &str,
        catalog: &Catalog,
        terminal: &Terminal,
    ) -> Result<InputLine, CommandError> {
        let helper = Helper::new(catalog.clone(), self.has_colors, prompt, self.typed.clone());
        self.editor.set_helper(Some(helper));
        let typed = typed_ahead::text(&tty::take_typed());
        let both = if initial.is_empty() || typed.is_empty() { "" } else { "\n" };
        let (mut text, mut after) = (format!("{initial}{both}{typed}"), String::new());
        loop {
            *self.ending.lock() = None;
            match self.editor.readline_with_initial(prompt, (&text, &after)) {
                Ok(line) => return Ok(InputLine::Text(line)),
                Err(ReadlineError::Eof) => return Ok(InputLine::End),
                Err(ReadlineError::Interrupted) => {}
                Err(error) if is_bad_text(&error) => {
                    tty::drain_typed();
                    terminal.warn(NOT_TEXT);
                    (text, after) = self.typed.take();
                    continue;
                }
                Err(error) => return Err(failed(error)),
            }
            let line = match self.ending.lock().take() {
                Some(InputLine::Text(line)) => line,
                Some(ending) => return Ok(ending),
                None => return Ok(InputLine::Interrupted { was_empty: false }),
            };
            text = match edit(&line) {
                Ok(edited) => edited,
                Err(error) => {
                    terminal.error(&error);
                    line
                }
            };
            after.clear();
        }
    }
}

/// Lets the user change a text in $VISUAL or $EDITOR.
///
/// # Errors
/// `Failure` when the editor does not start or says that it failed; `Io` for the file between the two.
pub fn edit(text: &str) -> Result<String, CommandError> {
    let set = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let editor = set("VISUAL").or_else(|| set("EDITOR")).unwrap_or_else(|| "vi".to_owned());
    let draft = Draft::new(text)?;
    // $EDITOR may hold arguments; as in git, the shell takes it apart.
    let status = std::process::Command::new("sh")
        .args(["-c", &format!("{editor} \"$1\""), "sh"])
        .arg(&draft.path)
        .status()
        .map_err(|error| CommandError::new(Kind::Failure, error).context(editor.clone()))?;
    if !status.success() {
        return Err(Kind::Failure.error(format!("{editor}: {status}; the message is unchanged")));
    }
    let edited = std::fs::read(&draft.path).map_err(CommandError::io("reading the edited message"))?;
    let edited = String::from_utf8_lossy(&edited);
    Ok(edited.strip_suffix('\n').unwrap_or(&edited).to_owned())
}

/// A file for an editor, private and gone afterwards.
struct Draft {
    path: PathBuf,
}

impl Draft {
    fn new(text: &str) -> Result<Self, CommandError> {
        let io_error = CommandError::io("writing a draft");
        let now = llmctl_engine::session::store::now_ms();
        let name = format!("llmctl-{}-{now}.md", std::process::id());
        let path = encryption::draft_folder().join(name);
        let mut file =
            private_file(OpenOptions::new().write(true).create_new(true), &path).map_err(&io_error)?;
        let draft = Self { path };
        file.write_all(text.as_bytes()).map_err(&io_error)?;
        Ok(draft)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reads the next message of a pipe: a line, or more while a fence is open. Skips empty lines.
fn read_pipe(stream: &mut dyn BufRead) -> Result<InputLine, CommandError> {
    let mut message = String::new();
    loop {
        let mut bytes = Vec::new();
        let read = stream.take(MAX_MESSAGE_BYTES + 1).read_until(b'\n', &mut bytes);
        let count = read.map_err(CommandError::io("reading standard input"))?;
        if count as u64 > MAX_MESSAGE_BYTES || message.len() as u64 > MAX_MESSAGE_BYTES {
            return Err(CommandError::bad_data("standard input: a message of more than 64 MiB"));
        }
        if count == 0 {
            return Ok(if message.is_empty() { InputLine::End } else { InputLine::Text(message) });
        }
        let line = std::str::from_utf8(&bytes)
            .map_err(|_| CommandError::bad_data("standard input: not UTF-8 text"))?
            .trim_end_matches(['\n', '\r']);
        if message.is_empty() && line.trim().is_empty() {
            continue;
        }
        message.push_str(line);
        if !is_unfinished(&message) {
            return Ok(InputLine::Text(message));
        }
        message.push('\n');
    }
}

/// Returns the message without the `"""` around it. If they do not enclose all of it, they are part of the message, as fences
/// of ``` always are.
pub fn unquoted(text: &str) -> &str {
    let trimmed = text.trim();
    let inner = trimmed.strip_prefix(QUOTES).and_then(|rest| match rest.split_once(QUOTES) {
        Some((inner, after)) => after.trim().is_empty().then_some(inner),
        None => Some(rest),
    });
    inner.map_or(text, |inner| inner.trim_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_keep_a_message_open() {
        for open in ["```", "```rust\nfn", "a\n```\nb", "\"\"\"", "\"\"\"a\nb", "````\n```", "  ```\nx\n``"] {
            assert!(is_unfinished(open), "{open:?}");
        }
        for whole in [
            "",
            "a",
            "`x`",
            "```x```",
            "```\na\n```",
            "\"\"\"a\"\"\"",
            "say \"\"\"",
            "````\n```\n````",
            "a ``` b",
        ] {
            assert!(!is_unfinished(whole), "{whole:?}");
        }
    }

    #[test]
    fn quotes_around_a_message_are_not_part_of_it() {
        assert_eq!(unquoted("\"\"\"\na\n\nb\n\"\"\""), "a\n\nb");
        assert_eq!(unquoted("\"\"\"a\"\"\""), "a");
        assert_eq!(unquoted("say \"\"\"a\"\"\""), "say \"\"\"a\"\"\"");
        assert_eq!(unquoted("```\na\n```"), "```\na\n```");
        let whole = "\"\"\"A module.\"\"\"\nimport os\n";
        assert_eq!(unquoted(whole), whole, "nothing behind the quotes is lost");
    }

    #[test]
    fn a_pipe_is_read_message_by_message() {
        let mut pipe = io::Cursor::new("one\n\n  \ntwo\r\n```\na\n\nb\n```\n\"\"\"x\ny\"\"\"\nlast");
        let mut messages = Vec::new();
        loop {
            match read_pipe(&mut pipe).expect("text") {
                InputLine::Text(text) => messages.push(text),
                InputLine::End => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(messages, ["one", "two", "```\na\n\nb\n```", "\"\"\"x\ny\"\"\"", "last"]);
        let open = read_pipe(&mut io::Cursor::new("```\nnever closed")).expect("text");
        assert_eq!(
            open,
            InputLine::Text("```\nnever closed\n".to_owned()),
            "the end of input closes all fences"
        );
        assert_eq!(read_pipe(&mut io::Cursor::new([0xff, b'\n'])).unwrap_err().kind, Kind::BadData);
    }
}
