//! Commands that change how answers are made.

use serde_json::Value;

use super::{Done, told};
use crate::cli::chat::counted;
use crate::cli::chat::session::Chat;
use crate::cli::chat::state::{AnswerRequest, Effect};
use crate::cli::declared_tools::Toolbox;
use crate::cli::error::CommandError;
use crate::cli::places::typed_path;
use crate::cli::run::compare::Variation;
use crate::cli::run::settings::spelled;
use crate::cli::terminal::input::read_file;
use llmctl_engine::GrammarSource;
use llmctl_template::Message;

pub fn set(chat: &mut Chat<'_>, argument: &str) -> Done {
    let Some((key, value)) = argument.split_once(char::is_whitespace) else {
        if !argument.is_empty() {
            let error = CommandError::usage("/set: expected KEY VALUE");
            return Err(error.hint("/set alone shows the keys and their values"));
        }
        chat.ui.report_table(&chat.settings_table());
        return Ok(Effect::Prompt);
    };
    let before = chat.state.settings.clone();
    chat.state.settings.set("/set", key, value.trim())?;
    if let Err(refusal) = chat.check_endpoint() {
        chat.state.settings = before;
        return Err(refusal);
    }
    let rows = chat.settings_table();
    let key = spelled(key);
    let now = rows.iter().find(|row| row[0] == key).map(|row| row[1].clone()).unwrap_or_default();
    told(chat, format!("{key}: {now}"))
}

pub fn think(chat: &mut Chat<'_>, argument: &str) -> Done {
    if !argument.is_empty() {
        let refused = |reason: String| CommandError::usage(format!("/think: {reason}"));
        let mut changed = chat.state.think;
        changed.change(argument).map_err(refused)?;
        changed.check(&chat.model.thinking()).map_err(refused)?;
        let before = std::mem::replace(&mut chat.state.think, changed);
        if let Err(refusal) = chat.check_endpoint() {
            chat.state.think = before;
            return Err(refusal);
        }
    }
    told(chat, chat.state.think.spoken(&chat.model.thinking()))
}

pub fn model(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        return told(chat, chat.model.spoken());
    }
    let next = chat.model.meant(argument);
    chat.change_model(&next).map_err(|error| match error.hint_text() {
        Some(hint) if hint.contains("--model ") => {
            let hint = hint.replace("--model ", "/model ");
            error.hint(hint)
        }
        _ => error,
    })?;
    chat.model.note_named(next);
    chat.ui.terminal.report(&format!("model {}", chat.model.spoken()));
    if chat.model.here().is_some() {
        chat.note_conversation();
    }
    Ok(Effect::Prompt)
}

pub fn compare(chat: &mut Chat<'_>, argument: &str) -> Done {
    if argument.is_empty() {
        return Err(CommandError::usage("/compare: expected a model, or KEY=VALUE (several apart by |)")
            .hint(
                "e.g. /compare temperature=0.2 | temperature=1 seed=7 | prompt=\"Explain it to a child\"",
            ));
    }
    chat.compare(&Variation::parse_all("/compare", &[argument.to_owned()])?)
}

pub fn json(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => {
            let schema = chat.state.schema.as_ref();
            told(chat, schema.map_or("answers are text", |schema| &schema.name))
        }
        "off" => {
            chat.state.schema = None;
            told(chat, "answers are text")
        }
        given => {
            let (name, source) = source(given)?;
            chat.state.schema = Some(chat.compiled(name, source)?);
            told(chat, "answers are JSON; /json off makes them text again")
        }
    }
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

pub fn tools(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => match &chat.state.toolbox {
            None => return told(chat, "no tools; /tools FILE declares some"),
            Some(toolbox) => chat.ui.report_table(&toolbox.rows()),
        },
        "off" => {
            chat.state.toolbox = None;
            return told(chat, "tools: off");
        }
        path => {
            let toolbox = Toolbox::read(&typed_path(path).display().to_string())?;
            toolbox.check_names(chat.servers.as_ref())?;
            let names: Vec<&str> = toolbox.names().collect();
            chat.ui.terminal.report(&format!("tools: {}; each asks before it runs", names.join(", ")));
            chat.warn_of_tools();
            chat.state.toolbox = Some(toolbox);
            note_recomputed(chat)?;
        }
    }
    Ok(Effect::Prompt)
}

pub fn mcp(chat: &mut Chat<'_>, argument: &str) -> Done {
    let terminal = chat.ui.terminal;
    let Some(servers) = &mut chat.servers else {
        return told(chat, "no MCP servers; --mcp-config FILE names some when the chat is started");
    };
    match argument.split_once(char::is_whitespace).map(|(verb, name)| (verb, name.trim())) {
        None if argument.is_empty() => {
            let rows = servers.rows();
            chat.ui.report_table(&rows);
        }
        Some(("restart", name)) => {
            servers.restart(name, terminal)?;
            terminal.report(&format!("MCP server {name} runs; {}", servers.spoken()));
            note_recomputed(chat)?;
        }
        _ => return Err(CommandError::usage("/mcp: expected nothing or restart NAME")),
    }
    Ok(Effect::Prompt)
}

/// Most templates put tools before the conversation: then none of its KV is of use any more.
fn note_recomputed(chat: &Chat<'_>) -> Result<(), CommandError> {
    let saved = chat.state.saved();
    let (kept, before) = (saved.turns.len(), saved.tokens());
    if kept == 0 || chat.model.here().is_none() {
        return Ok(());
    }
    let added = vec![Message::user("")];
    let turn = chat.prompted(&AnswerRequest { kept, added, ..AnswerRequest::default() })?;
    let same = turn.tokens().iter().zip(&before).take_while(|(a, b)| a == b).count();
    if same * 2 < before.len() {
        let tokens = counted(before.len(), "token");
        chat.ui.terminal.note(format!(
            "(this template puts tools before the conversation: its {tokens} will be recomputed with the next message)"
        ));
    }
    Ok(())
}
