//! Commands that change how answers are made.

use serde_json::Value;

use super::Done;
use crate::cli::chat::command::Next;
use crate::cli::chat::settings::spelled;
use crate::cli::chat::talk::Chat;
use crate::cli::chat::tools::Toolbox;
use crate::cli::chat::turn::Asked;
use crate::cli::chat::{counted, grouped, typed_path};
use crate::cli::error::CommandError;
use crate::cli::input::read_file;
use crate::cli::think::{Think, Thinking};
use crate::runtime::GrammarSource;
use crate::template::Message;

/// What answers are held to.
pub struct Schema {
    /// As the user gave it.
    pub name: String,
    pub source: GrammarSource,
}

pub fn set(chat: &mut Chat<'_>, argument: &str) -> Done {
    let Some((key, value)) = argument.split_once(char::is_whitespace).map(|(key, value)| (key, value.trim()))
    else {
        if !argument.is_empty() {
            let error = CommandError::usage("/set: expected KEY VALUE");
            return Err(error.hint("/set alone shows the keys and their values"));
        }
        chat.report_table(&chat.settings.table(&chat.sampling()));
        return Ok(Next::Prompt);
    };
    chat.settings.set(key, value)?;
    let rows = chat.settings.table(&chat.sampling());
    let key = spelled(key);
    let now = rows.iter().find(|row| row[0] == key).map(|row| row[1].clone()).unwrap_or_default();
    chat.terminal.report(&format!("{key}: {now}"));
    Ok(Next::Prompt)
}

pub fn think(chat: &mut Chat<'_>, argument: &str) -> Done {
    if !argument.is_empty() {
        let refused = |reason: String| CommandError::usage(format!("/think: {reason}"));
        let mut changed = chat.think;
        changed.change(argument).map_err(refused)?;
        // Showing what is not there changes nothing, and is a wish all the same.
        match chat.thinking().is_there() {
            true => changed.check(&chat.thinking()),
            false => Err(chat.think.spoken(&chat.thinking())),
        }
        .map_err(refused)?;
        chat.think = changed;
    }
    chat.terminal.report(&chat.think.spoken(&chat.thinking()));
    Ok(Next::Prompt)
}

impl Chat<'_> {
    /// What the model's template can do about thinking.
    pub fn thinking(&self) -> Thinking {
        Thinking::of(self.llm().texts().chat_tokenizer())
    }
}

pub fn model(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        let info = chat.llm().info();
        chat.terminal.report(&format!("{}, context {}", info.name, grouped(info.context_tokens)));
        return Ok(Next::Prompt);
    }
    chat.change_model(argument).map_err(|error| match error.hint_text() {
        Some(hint) if hint.contains("--model ") => {
            let hint = hint.replace("--model ", "/model ");
            error.hint(hint)
        }
        _ => error,
    })?;
    chat.args.model.is_named = true;
    let info = chat.llm().info();
    let (name, context) = (info.name.clone(), grouped(info.context_tokens));
    chat.terminal.report(&format!("model {name}, context {context}"));
    chat.session_chat.notices().iter().for_each(|notice| chat.terminal.note(notice));
    Ok(Next::Prompt)
}

impl Chat<'_> {
    /// What was set for another model is set for this one, as far as it can be.
    pub fn carry_over(&mut self) -> Result<(), CommandError> {
        if let Err(reason) = self.think.check(&self.thinking()) {
            self.think = Think::default();
            self.terminal.warn(&format!("{reason}: /think is as it was at the beginning"));
        }
        if let Some(Schema { name, source }) = self.schema.take() {
            self.schema = Some(compiled(self, name, source)?);
        }
        Ok(())
    }
}

pub fn json(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => {
            let now =
                chat.schema.as_ref().map_or("answers are text", |schema| schema.name.as_str()).to_owned();
            chat.terminal.report(&now);
        }
        "off" => {
            chat.schema = None;
            chat.terminal.report("answers are text");
        }
        given => {
            let (name, source) = source(given)?;
            chat.schema = Some(compiled(chat, name, source)?);
            chat.terminal.report("answers are JSON; /json off makes them text again");
        }
    }
    Ok(Next::Prompt)
}

/// `object`, a schema as it is written, or a file with one.
fn source(given: &str) -> Result<(String, GrammarSource), CommandError> {
    if given == "object" {
        return Ok(("any JSON object".to_owned(), GrammarSource::JsonObject));
    }
    let (name, text) = match given.starts_with(['{', '[']) {
        true => ("the schema typed here".to_owned(), given.to_owned()),
        false => (given.to_owned(), read_file(&typed_path(given))?),
    };
    let schema: Value = serde_json::from_str(&text)
        .map_err(|error| CommandError::bad_data(format!("{name}: not JSON: {error}")))?;
    Ok((name, GrammarSource::JsonSchema(schema).closed()))
}

fn compiled(chat: &Chat<'_>, name: String, source: GrammarSource) -> Result<Schema, CommandError> {
    chat.compile(&source)?; // refused now rather than at the next message; the compiler keeps it
    Ok(Schema { name, source })
}

pub fn tools(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => match &chat.toolbox {
            None => chat.terminal.report("no tools; /tools FILE declares some"),
            Some(toolbox) => chat.report_table(&toolbox.rows()),
        },
        "off" => {
            chat.toolbox = None;
            chat.terminal.report("tools: off");
        }
        path => {
            let toolbox = Toolbox::read(&typed_path(path))?;
            let names: Vec<&str> = toolbox.tools.iter().map(|tool| tool.name.as_str()).collect();
            chat.terminal.report(&format!("tools: {}; each asks before it runs", names.join(", ")));
            if let Some(notice) = chat.llm().texts().chat_tokenizer().notice_of_tools() {
                chat.terminal.warn(notice);
            }
            chat.toolbox = Some(toolbox);
            note_recomputed(chat)?;
        }
    }
    Ok(Next::Prompt)
}

/// Most templates put tools before the conversation: then none of its KV is of use any more.
fn note_recomputed(chat: &Chat<'_>) -> Result<(), CommandError> {
    let saved = chat.session_chat.saved();
    let (kept, before) = (saved.turns.len(), saved.tokens());
    if kept == 0 {
        return Ok(());
    }
    let added = vec![Message::user("")];
    let turn = chat.prompted(&Asked { kept, added, ..Asked::default() })?;
    let same = turn.tokens().iter().zip(&before).take_while(|(a, b)| a == b).count();
    if same * 2 < before.len() {
        let tokens = counted(before.len(), "token");
        chat.terminal.note(&format!(
            "(this template puts tools before the conversation: its {tokens} will be recomputed with the next message)"
        ));
    }
    Ok(())
}
