//! `models show`: facts about one model, as text or JSON.

use serde_json::{Value, json};

use super::{find, last_use};
use crate::cli::CommandContext;
use crate::cli::error::{CommandError, Exit};
use crate::cli::model::sight;
use crate::cli::terminal::report::{ReportFormat, bytes, columns, print, print_json};
use llmctl_hub::Resolved;
use llmctl_models::load::{ImageUse, model_facts};

/// Describes one model from the headers of its files.
pub fn show(
    reference: &str,
    context: CommandContext<'_>,
    format: ReportFormat,
) -> Result<Exit, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    let resolved = find(reference, places, &config.aliases())?;
    resolved.notices.iter().for_each(|notice| terminal.note(notice));
    let mut facts = facts(&resolved)?;
    let seen = sight::sight(&resolved, ImageUse::default());
    facts.push(("reads_images", sight::json(&seen)));
    let last_used = last_use::last_used_ms(resolved.source.path(), places);
    facts.push(("last_used_ms", last_used.into()));
    facts.push(("complete", true.into())); // `find` refuses a model with a missing part
    if format == ReportFormat::Json {
        let mut object =
            json!({"schema": "llmctl.model.v1", "model": resolved.name, "path": resolved.source.path()});
        for (name, value) in facts {
            object[name] = value;
        }
        return print_json(&object);
    }
    let plain = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Null => "?".to_owned(),
        other => other.to_string(),
    };
    let mut rows = vec![
        vec!["model".to_owned(), resolved.name.clone()],
        vec!["path".to_owned(), places.shorten(resolved.source.path())],
    ];
    rows.extend(facts.iter().map(|(name, value)| match (*name, value.as_u64()) {
        ("bytes", Some(count)) => vec!["size".to_owned(), bytes(count)],
        ("reads_images", _) => vec!["reads images".to_owned(), sight::words(&seen)],
        ("last_used_ms", at) => vec!["last used".to_owned(), last_use::describe(at)],
        _ => vec![name.replace('_', " "), plain(value)],
    }));
    print(&columns(&rows))
}

/// Returns the facts in the files, in printing order.
fn facts(resolved: &Resolved) -> Result<Vec<(&'static str, Value)>, CommandError> {
    let facts = model_facts(&resolved.source)?;
    let mut list: Vec<(&'static str, Value)> = vec![
        ("kind", facts.kind.name().into()),
        ("architecture", facts.architecture.into()),
        ("parameters", facts.parameters.into()),
        ("type", facts.quantization.into()),
        ("bytes", facts.bytes.into()),
        ("chat_template", facts.has_chat_template.into()),
    ];
    let is_for_texts = facts.text_task.is_some();
    list.extend(facts.text_task.map(|task| ("computes", task.into())));
    match facts.decoder {
        Err(_) if is_for_texts => list.push(("runs", true.into())),
        Ok(decoder) => list.extend([
            ("models", decoder.models.into()),
            ("context_length", decoder.context_length.into()),
            ("layers", decoder.num_layers.into()),
            ("hidden_size", decoder.hidden_size.into()),
            ("vocab_size", decoder.vocab_size.into()),
            ("kv_bytes_per_token", decoder.kv_bytes_per_token.into()),
            ("runs", true.into()),
        ]),
        Err(error) => list.extend([("runs", false.into()), ("why_not", error.to_string().into())]),
    }
    Ok(list)
}
