//! Commands that change how answers are made.

use std::path::Path;

use serde_json::Value;

use super::Done;
use crate::cli::chat::command::Next;
use crate::cli::chat::talk::Chat;
use crate::cli::chat::tools::Toolbox;
use crate::cli::chat::{expand_home, grouped};
use crate::cli::error::CommandError;
use crate::cli::report::columns;
use crate::cli::run::llm::Texts;
use crate::cli::run::prompt::read_file;
use crate::runtime::GrammarSource;
use crate::template::ReasoningFormat;

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
            return Err(CommandError::usage("/set KEY VALUE").hint("/set alone shows what there is"));
        }
        chat.terminal.report(columns(&chat.settings.table(&chat.sampling())).trim_end());
        return Ok(Next::Prompt);
    };
    chat.settings.set(key, value)?;
    let rows = chat.settings.table(&chat.sampling());
    let key = key.replace('-', "_");
    let now = rows.iter().find(|row| row[0] == key).map(|row| row[1].clone()).unwrap_or_default();
    chat.terminal.report(&format!("{key} is {now}"));
    Ok(Next::Prompt)
}

pub fn think(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        chat.terminal.report(&format!("thinking is {}", chat.think.spoken()));
        return Ok(Next::Prompt);
    }
    let before = chat.think;
    chat.think.change(argument)?;
    chat.check_think().inspect_err(|_| chat.think = before)?;
    chat.terminal.report(&format!("thinking is {}", chat.think.spoken()));
    Ok(Next::Prompt)
}

impl Chat<'_> {
    /// Whether the model's template can do what is wanted of it.
    pub fn check_think(&self) -> Result<(), CommandError> {
        let template = self.llm().texts().speech().template_source().unwrap_or_default();
        self.think.variables(template)?;
        let closing = self.llm().texts().speech().dialect().reasoning.and_then(ReasoningFormat::closing);
        if self.think.budget.is_some() && closing.is_none() {
            return Err(CommandError::usage("the model's template has no thinking that could be ended"));
        }
        Ok(())
    }
}

pub fn model(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        let info = chat.llm().info();
        chat.terminal.report(&format!("{}, context {}", info.name, grouped(info.context_tokens)));
        return Ok(Next::Prompt);
    }
    chat.change_model(argument)?;
    let info = chat.llm().info();
    let (name, context) = (info.name.clone(), grouped(info.context_tokens));
    chat.terminal.report(&format!("model {name}, context {context}"));
    chat.dialogue.notices().iter().for_each(|notice| chat.terminal.note(notice));
    if let Some(Schema { name, source }) = chat.schema.take() {
        chat.schema = Some(compiled(chat, name, source)?);
    }
    Ok(Next::Prompt)
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
        true => ("a schema given here".to_owned(), given.to_owned()),
        false => (given.to_owned(), read_file(&expand_home(given))?),
    };
    let schema: Value = serde_json::from_str(&text)
        .map_err(|error| CommandError::bad_data(format!("{name} is not JSON: {error}")))?;
    Ok((name, GrammarSource::JsonSchema(schema).closed()))
}

fn compiled(chat: &Chat<'_>, name: String, source: GrammarSource) -> Result<Schema, CommandError> {
    chat.compile(&source)?; // refused now rather than at the next message; the compiler keeps it
    Ok(Schema { name, source })
}

pub fn tools(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => match &chat.toolbox {
            None => chat.terminal.report("there are no tools; /tools FILE declares some"),
            Some(toolbox) => chat.terminal.report(columns(&toolbox.rows()).trim_end()),
        },
        "off" => {
            chat.toolbox = None;
            chat.terminal.report("there are no tools any more");
        }
        path => {
            let toolbox = Toolbox::read(Path::new(&expand_home(path)))?;
            let names: Vec<&str> = toolbox.tools.iter().map(|tool| tool.name.as_str()).collect();
            chat.terminal.report(&format!("tools: {}; each asks before it runs", names.join(", ")));
            if let Some(notice) = chat.llm().texts().speech().notice_of_tools() {
                chat.terminal.warn(notice);
            }
            chat.toolbox = Some(toolbox);
        }
    }
    Ok(Next::Prompt)
}
