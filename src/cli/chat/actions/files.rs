//! Commands that bring files in, and the conversation out.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{Done, count, told};
use crate::cli::chat::command::EXPORT_FORMATS;
use crate::cli::chat::counted;
use crate::cli::chat::session::Chat;
use crate::cli::chat::state::{Attachment, Effect};
use crate::cli::error::{CommandError, Kind};
use crate::cli::images::GivenImage;
use crate::cli::model::load::Loaded;
use crate::cli::places::typed_path;
use crate::cli::run::next_turn::text;
use crate::cli::sessions as shared;
use crate::cli::terminal::input::read_file;
use llmctl_base::private_files::private_file;
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_template::Role;

/// Terminals drop clipboard sequences that are longer than about this.
const MAX_CLIPBOARD: usize = 74_000;

pub fn file(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        return Err(CommandError::usage("/file: expected a path"));
    }
    let path = typed_path(argument);
    let text = read_file(&path)?;
    let name = path.file_name().map_or(argument.to_owned(), |name| name.to_string_lossy().into_owned());
    let size = match chat.model.here() {
        Some(llm) => counted(llm.texts().chat_tokenizer().encode(&text)?.len(), "token"),
        None => counted(text.len(), "byte"),
    };
    chat.ui.terminal.report(&format!("{name} ({size}) goes with the next message"));
    chat.state.attached.push(Attachment { name, text });
    Ok(Effect::Prompt)
}

/// `/image [PATH|drop [N]]`: without an argument, lists what goes with the next message.
pub fn image(chat: &mut Chat<'_>, argument: &str) -> Done {
    if let Some(number) =
        argument.strip_prefix("drop").filter(|rest| rest.is_empty() || rest.starts_with(' '))
    {
        return drop_image(chat, number.trim());
    }
    if !argument.is_empty() {
        return attach(chat, &typed_path(argument));
    }
    let vision = chat.model.here().map(Loaded::vision).transpose()?;
    let tags = chat.state.images.iter().enumerate().map(|(at, given)| given.tag(at + 1, vision));
    let tags = tags.collect::<Result<Vec<_>, _>>()?;
    told(
        chat,
        if tags.is_empty() { "no image goes with the next message".to_owned() } else { tags.join("\n") },
    )
}

/// Lets an image go with the next message.
pub fn attach(chat: &mut Chat<'_>, path: &Path) -> Done {
    let vision = chat.model.here().map(Loaded::vision).transpose()?;
    let given = GivenImage::open(path)?;
    let tag = given.tag(chat.state.images.len() + 1, vision)?;
    chat.state.files.insert(Arc::clone(&given.file));
    chat.state.images.push(given);
    told(chat, format!("{tag} goes with the next message"))
}

fn drop_image(chat: &mut Chat<'_>, number: &str) -> Done {
    let last = chat.state.images.len();
    let number = count("image drop", number, last)?;
    if number == 0 || number > last {
        return Err(CommandError::usage(format!("/image drop: there are {}", counted(last, "image"))));
    }
    let given = chat.state.images.remove(number - 1);
    told(chat, format!("{} stays out", given.image.name.as_deref().unwrap_or("the image")))
}

pub fn export(chat: &mut Chat<'_>, argument: &str) -> Done {
    let usage = || CommandError::usage("/export: expected md|json|jsonl PATH");
    let (format, path) = argument.split_once(char::is_whitespace).ok_or_else(usage)?;
    if !EXPORT_FORMATS.contains(&format) {
        return Err(CommandError::usage(format!("/export: unknown format {format:?} (md, json, jsonl)")));
    }
    let path = typed_path(path.trim());
    let saved = chat.state.saved();
    let saved_turns = saved.turns.len();
    let text = match format {
        "md" => markdown(saved),
        "json" => whole(chat.state.name(), saved)?,
        _ => shared::whole_messages(saved)?.iter().map(|message| format!("{message}\n")).collect(),
    };
    if path.exists() && !may_replace(chat, &path)? {
        return told(chat, "nothing was written");
    }
    // The conversation is private, as the session's file is.
    let written = private_file(OpenOptions::new().write(true).create(true).truncate(true), &path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(CommandError::io(path.display()))?;
    told(chat, format!("wrote {} to {}", counted(saved_turns, "turn"), path.display()))
}

fn may_replace(chat: &mut Chat<'_>, path: &Path) -> Result<bool, CommandError> {
    match chat.ui.input.ask(&format!("{} exists; replace it? y(es), n(o): ", path.display()))?.as_deref() {
        None => Err(Kind::Io
            .error(format!("{} exists already", path.display()))
            .hint("use another name, or remove it first")),
        answer => Ok(matches!(answer, Some("y" | "yes"))),
    }
}

fn markdown(saved: &SavedSession) -> String {
    let section = |message: &llmctl_template::Message| {
        let title = match &message.role {
            Role::User => "You",
            Role::Assistant => "Assistant",
            other => other.as_str(),
        };
        format!("## {title}\n\n{}\n", shared::message_text(message).trim_end())
    };
    let model = format!("# Conversation with {}\n", saved.model.name);
    std::iter::once(model).chain(saved.messages().map(section)).collect::<Vec<_>>().join("\n")
}

/// Returns the same object as `llmctl sessions show --output json`, with the bytes of images.
fn whole(name: Option<&SessionName>, saved: &SavedSession) -> Result<String, CommandError> {
    let unnamed = SessionName::new("unsaved")?;
    let (_, mut object) = shared::show(name.unwrap_or(&unnamed), saved);
    let turns = object["turns"].as_array_mut().into_iter().flatten();
    let mut messages = turns.flat_map(|turn| turn["messages"].as_array_mut().into_iter().flatten());
    messages.try_for_each(|message| shared::put_images(message, &saved.blobs))?;
    if name.is_none() {
        object["name"] = serde_json::Value::Null;
    }
    Ok(format!("{object:#}\n"))
}

/// Copies to the terminal's own clipboard with the escape sequence OSC 52, which works over ssh too.
pub fn copy(chat: &mut Chat<'_>, argument: &str) -> Done {
    let Some(answer) =
        chat.state.session_chat.messages().filter(|message| message.role == Role::Assistant).last()
    else {
        return Err(CommandError::usage("there is no answer yet"));
    };
    let answer = text(answer);
    let wanted = match argument {
        "" => &*answer,
        "code" => {
            last_code(&answer).ok_or_else(|| CommandError::usage("the last answer has no block of code"))?
        }
        other => return Err(CommandError::usage(format!("/copy: unknown argument {other:?} (code)"))),
    };
    to_clipboard(wanted)?;
    let count = wanted.chars().count();
    told(chat, format!("copied {} to the terminal's clipboard", counted(count, "character")))
}

fn to_clipboard(text: &str) -> Result<(), CommandError> {
    if !std::io::stderr().is_terminal() {
        return Err(CommandError::usage("/copy needs a terminal: it uses the terminal's clipboard"));
    }
    let encoded = STANDARD.encode(text);
    if encoded.len() > MAX_CLIPBOARD {
        return Err(CommandError::usage("the answer is too long for the terminal's clipboard")
            .hint("/export writes it to a file"));
    }
    let mut stream = std::io::stderr();
    let _ = write!(stream, "\x1b]52;c;{encoded}\x07").and_then(|()| stream.flush());
    Ok(())
}

/// Returns the text of the last fenced block.
fn last_code(answer: &str) -> Option<&str> {
    let (mut open, mut last): (Option<(&str, usize)>, Option<&str>) = (None, None);
    let mut at = 0;
    for line in answer.split_inclusive('\n') {
        let trimmed = line.trim();
        let marks = trimmed.len() - trimmed.trim_start_matches(['`', '~']).len();
        let fence = &trimmed[..marks];
        match open {
            None if marks >= 3 => open = Some((fence, at + line.len())),
            Some((begun, begin)) if fence.starts_with(begun) && trimmed.len() == marks => {
                last = Some(&answer[begin..at]);
                open = None;
            }
            _ => {}
        }
        at += line.len();
    }
    // A block that was cut is code all the same.
    open.map(|(_, begin)| &answer[begin.min(answer.len())..]).or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_of_code_is_found() {
        assert_eq!(last_code("a\n```rust\nlet x;\n```\nb\n~~~\ny\n~~~\n"), Some("y\n"));
        assert_eq!(last_code("````\n```\n````"), Some("```\n"));
        assert_eq!(last_code("```\ncut"), Some("cut"));
        assert_eq!(last_code("none `x`"), None);
    }
}
