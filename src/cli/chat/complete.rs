//! Help of the line editor while a line is typed: completions, hints, whether a message is finished, colours.
//!
//! Reads the command table and a [`Catalog`] of names; the file system only for paths. Keeps what is typed,
//! for when the editor fails, and where the cursor is, because after a resize the editor does not know.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use rustyline::Context;
use rustyline::completion::{Completer, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

use super::command::{self, ArgumentKind, ChatCommand};
use crate::cli::{places, terminal};

/// Names that can be completed, as they are when a line begins.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    pub sessions: Rc<[String]>,
    pub models: Rc<[String]>,
}

/// The line as it stands, before and after the cursor.
#[derive(Debug, Clone, Default)]
pub struct Typed(Rc<RefCell<(String, String)>>);

impl Typed {
    pub fn take(&self) -> (String, String) {
        self.0.take()
    }

    fn keep(&self, line: &str, pos: usize) {
        let (before, after) = line.split_at_checked(pos).unwrap_or((line, ""));
        *self.0.borrow_mut() = (before.to_owned(), after.to_owned());
    }
}

/// The editor's helper.
pub struct Helper {
    catalog: Catalog,
    /// Completes, hints and holds back nothing, for plain questions.
    is_silent: bool,
    has_colors: bool,
    prompt: String,
    typed: Typed,
    /// Of the terminal when the line was drawn last.
    columns: Cell<Option<usize>>,
}

impl Helper {
    pub fn new(catalog: Catalog, has_colors: bool, prompt: &str, typed: Typed) -> Self {
        let (prompt, columns) = (prompt.to_owned(), Cell::default());
        Self { catalog, is_silent: false, has_colors, prompt, typed, columns }
    }

    pub fn silent(has_colors: bool) -> Self {
        Self { is_silent: true, ..Self::new(Catalog::default(), has_colors, "", Typed::default()) }
    }

    /// After a resize the terminal has moved the lines that were drawn, and the editor has gone up as many as there were
    /// before: this goes to the first one and clears what is below.
    fn redraw_from(&self) -> String {
        let now = terminal::columns();
        let before = self.columns.replace(now);
        let (Some(before), Some(now)) = (before, now) else { return String::new() };
        if before == now || self.is_silent || !terminal::moves_lines() {
            return String::new();
        }
        let (typed, _) = &*self.typed.0.borrow();
        let text = format!("{}{typed}", self.prompt);
        let (old, new) = (row_of_end(&text, before), row_of_end(&text, now));
        match new.checked_sub(old) {
            Some(0) => "\x1b[J".to_owned(),
            Some(up) => format!("\x1b[{up}A\r\x1b[J"),
            None => format!("\x1b[{}B\r\x1b[J", old - new),
        }
    }

    /// Returns the start of the word under the cursor, and its completions.
    fn candidates(&self, line: &str, pos: usize) -> (usize, Vec<Pair>) {
        let before = &line[..pos];
        if self.is_silent || !before.starts_with('/') {
            return (pos, Vec::new());
        }
        let Some((word, argument)) = before.split_once(' ') else {
            let names = command::TABLE
                .iter()
                .flat_map(ChatCommand::names)
                .filter(|name| name.starts_with(&before[1..]));
            let pair = |name: &str| Pair { display: format!("/{name}"), replacement: format!("/{name} ") };
            return (0, names.map(pair).collect());
        };
        let Some(command) = command::find(word) else { return (pos, Vec::new()) };
        let start = pos - argument.len();
        let words = |words: &mut dyn Iterator<Item = &str>| {
            let last = start + argument.rfind(' ').map_or(0, |at| at + 1);
            let typed = &line[last..pos];
            let pair = |word: &str| Pair { display: word.to_owned(), replacement: word.to_owned() };
            (last, words.filter(|word| word.starts_with(typed)).map(pair).collect())
        };
        match command.argument {
            ArgumentKind::None | ArgumentKind::Text => (pos, Vec::new()),
            ArgumentKind::Words(list) => words(&mut list.iter().copied()),
            ArgumentKind::Command => words(&mut command::TABLE.iter().map(|command| command.name)),
            ArgumentKind::Setting => words(&mut crate::cli::run::settings::keys().iter().map(String::as_str)),
            ArgumentKind::Session => words(&mut self.catalog.sessions.iter().map(String::as_str)),
            ArgumentKind::Path => paths(argument, start),
            ArgumentKind::Model => {
                let names = words(&mut self.catalog.models.iter().map(String::as_str));
                let files = paths(argument, start);
                // A name and a path may begin at different places: of `org/m` and `./m` only one has candidates.
                if names.1.is_empty() { files } else { names }
            }
            ArgumentKind::Export => match argument.split_once(' ') {
                None => words(&mut command::EXPORT_FORMATS.iter().copied()),
                Some((format, path)) => paths(path, start + format.len() + 1),
            },
        }
    }
}

/// Returns the row, from 0, in which a text ends on a terminal of so many columns.
fn row_of_end(text: &str, columns: usize) -> usize {
    let (mut row, mut column) = (0, 0);
    for grapheme in text.graphemes(true) {
        if grapheme == "\n" {
            (row, column) = (row + 1, 0);
            continue;
        }
        column += grapheme.width();
        if column > columns {
            (row, column) = (row + 1, grapheme.width());
        }
    }
    if column == columns { row + 1 } else { row }
}

/// Files and folders that the path may become; `~` is home.
fn paths(typed: &str, start: usize) -> (usize, Vec<Pair>) {
    let (folder, prefix) = typed.rsplit_once('/').map_or(("", typed), |(folder, rest)| (folder, rest));
    let at = start + typed.len() - prefix.len();
    let place = match (folder, typed.starts_with('/')) {
        ("", true) => "/".into(),
        ("", false) => ".".into(),
        (folder, _) => places::expand_home(folder),
    };
    let mut found: Vec<Pair> = std::fs::read_dir(Path::new(&place))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_wanted = name.starts_with(prefix) && (!name.starts_with('.') || prefix.starts_with('.'));
            let end = if entry.path().is_dir() { "/" } else { "" };
            is_wanted.then(|| Pair { display: format!("{name}{end}"), replacement: format!("{name}{end}") })
        })
        .collect();
    found.sort_by(|a, b| a.display.cmp(&b.display));
    (at, found)
}

impl Completer for Helper {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        Ok(self.candidates(line, pos))
    }
}

/// The rest of a command's name, or what it takes.
impl Hinter for Helper {
    type Hint = Hint;

    fn hint(&self, line: &str, pos: usize, _: &Context<'_>) -> Option<Hint> {
        self.typed.keep(line, pos);
        if self.is_silent || pos < line.len() {
            return None;
        }
        let typed = line.strip_prefix('/')?;
        if let Some(command) = command::find(line.trim_end()) {
            let takes = command.takes.filter(|_| !typed.trim_end().contains(' '))?;
            let gap = if typed.ends_with(' ') { "" } else { " " };
            return Some(Hint { display: format!("{gap}{takes}"), completion: None });
        }
        let mut found =
            command::TABLE.iter().flat_map(ChatCommand::names).filter(|name| name.starts_with(typed));
        let rest = found.next().filter(|_| !typed.is_empty())?.strip_prefix(typed)?.to_owned();
        Some(Hint { display: rest.clone(), completion: Some(rest) })
    }
}

pub struct Hint {
    display: String,
    completion: Option<String>,
}

impl rustyline::hint::Hint for Hint {
    fn display(&self) -> &str {
        &self.display
    }

    fn completion(&self) -> Option<&str> {
        self.completion.as_deref()
    }
}

impl Highlighter for Helper {
    fn highlight_prompt<'b, 's: 'b, 'p: 'b>(&'s self, prompt: &'p str, default: bool) -> Cow<'b, str> {
        let moved = if default { self.redraw_from() } else { String::new() };
        match default && self.has_colors {
            true => format!("{moved}\x1b[1;36m{prompt}\x1b[0m").into(),
            false => format!("{moved}{prompt}").into(),
        }
    }

    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        if self.has_colors { format!("\x1b[2m{hint}\x1b[0m").into() } else { hint.into() }
    }
}

impl Validator for Helper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let is_open = !self.is_silent && is_unfinished(context.input());
        Ok(if is_open { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl rustyline::Helper for Helper {}

/// Marks a message of several lines.
pub const QUOTES: &str = "\"\"\"";

/// Returns whether a fence is still open: a line that begins with ```, or a `"""` that the message begins with.
pub fn is_unfinished(text: &str) -> bool {
    if let Some(rest) = text.trim_start().strip_prefix(QUOTES) {
        return !rest.contains(QUOTES);
    }
    let mut open: Option<&str> = None;
    for line in text.split('\n') {
        let line = line.trim_start();
        let fence = &line[..line.len() - line.trim_start_matches('`').len()];
        match open {
            None if fence.len() >= 3 && !line[fence.len()..].contains('`') => open = Some(fence),
            Some(begun) if fence.len() >= begun.len() && line[fence.len()..].trim().is_empty() => open = None,
            _ => {}
        }
    }
    open.is_some()
}

#[cfg(test)]
mod tests {
    use rustyline::hint::Hint as _;
    use rustyline::history::MemHistory;

    use super::*;

    fn helper() -> Helper {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let catalog = Catalog { sessions: names(&["trip", "work"]), models: names(&["org/model"]) };
        Helper::new(catalog, true, "> ", Typed::default())
    }

    fn completed(line: &str) -> Vec<String> {
        let (start, found) = helper().candidates(line, line.len());
        found.into_iter().map(|pair| format!("{}{}", &line[..start], pair.replacement)).collect()
    }

    #[test]
    fn every_command_completes_by_each_of_its_names() {
        for name in command::TABLE.iter().flat_map(ChatCommand::names) {
            let typed = format!("/{name}");
            assert!(completed(&typed).contains(&format!("/{name} ")), "{typed}");
        }
        assert_eq!(completed("/expo"), ["/export "]);
        assert!(completed("hello").is_empty() && completed("").is_empty());
    }

    #[test]
    fn arguments_complete_by_their_kind() {
        assert_eq!(completed("/load t"), ["/load trip"]);
        assert_eq!(completed("/rename trip w"), ["/rename trip work"]);
        assert_eq!(completed("/model org"), ["/model org/model"]);
        assert_eq!(completed("/think o"), ["/think on", "/think off"]);
        assert_eq!(completed("/set temp"), ["/set temperature"]);
        assert_eq!(completed("/help expo"), ["/help export"]);
        assert_eq!(completed("/export jsonl"), ["/export jsonl"]);
        assert!(completed("/nothing x").is_empty() && completed("/stats x").is_empty());
    }

    #[test]
    fn paths_complete_where_they_are_wanted() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("notes")).expect("a folder");
        for name in ["note.md", ".hidden"] {
            std::fs::write(folder.path().join(name), "").expect("a file");
        }
        let path = folder.path().display();
        let both = [format!("/file {path}/note.md"), format!("/file {path}/notes/")];
        assert_eq!(completed(&format!("/file {path}/no")), both);
        assert_eq!(completed(&format!("/file {path}/.h")), [format!("/file {path}/.hidden")]);
        assert_eq!(completed(&format!("/export md {path}/notes")), [format!("/export md {path}/notes/")]);
        assert_eq!(completed(&format!("/model {path}/note.")), [format!("/model {path}/note.md")]);
    }

    #[test]
    fn hints_say_the_rest_of_a_name_and_what_it_takes() {
        let history = MemHistory::new();
        let hint = |line: &str| helper().hint(line, line.len(), &Context::new(&history));
        assert_eq!(
            hint("/exp").and_then(|hint| hint.completion().map(str::to_owned)),
            Some("ort".to_owned())
        );
        let takes = hint("/undo").expect("a hint");
        assert_eq!((takes.display(), takes.completion()), (" [N]", None));
        assert!(hint("/").is_none() && hint("hello").is_none() && hint("/undo 2").is_none());
        assert!(helper().hint("/exp", 1, &Context::new(&history)).is_none(), "in the middle of a line");
    }

    #[test]
    fn what_is_typed_is_kept_with_the_place_of_the_cursor() {
        let (history, helper) = (MemHistory::new(), helper());
        let _ = helper.hint("h\u{e9}llo", 3, &Context::new(&history));
        assert_eq!(helper.typed.take(), ("h\u{e9}".to_owned(), "llo".to_owned()));
    }

    #[test]
    fn rows_are_counted_as_the_terminal_breaks_them() {
        for (text, columns, row) in [
            ("> abc", 10, 0),
            ("> abcdefgh", 10, 1),
            ("> abcdefghi", 10, 1),
            ("> a\nb", 10, 1),
            ("> \u{65e5}\u{672c}\u{8a9e}", 5, 1),
            ("", 10, 0),
        ] {
            assert_eq!(row_of_end(text, columns), row, "{text:?}");
        }
    }
}
