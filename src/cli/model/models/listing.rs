//! `models list`: the built-in model, the cache, ollama's store and the aliases, as a table or JSON.

use std::path::Path;

use serde_json::{Value, json};

use super::{find, last_use};
use crate::cli::CommandContext;
use crate::cli::error::{CommandError, Exit};
use crate::cli::places::Places;
use crate::cli::terminal::report::{ReportFormat, bytes, columns, print, print_json};
use llmctl_hub::builtin::GUIDE;
use llmctl_hub::ollama::OllamaModel;
use llmctl_hub::{Aliases, CachedModel, ModelKind, ModelSource, ollama};
use llmctl_models::load::model_facts;

/// Lists all models.
pub fn list(context: CommandContext<'_>, format: ReportFormat) -> Result<Exit, CommandError> {
    let CommandContext { config, places, .. } = context;
    let cached = llmctl_hub::list(places.hub.as_deref());
    let of_ollama = ollama::list(&places.ollama);
    let aliases = config.aliases();
    if format == ReportFormat::Json {
        return print_json(&to_json(&cached, &of_ollama, &aliases, places));
    }
    let head = ["MODEL", "KIND", "TYPE", "SIZE", "CONTEXT", "LAST USED", "PATH"];
    let mut rows = vec![head.map(str::to_owned).to_vec(), built_in_row(places)];
    rows.extend(cached.iter().map(|model| cached_row(model, places)));
    rows.extend(of_ollama.iter().map(|model| ollama_row(model, places)));
    rows.extend(aliases.iter().map(|(name, reference)| alias_row(name, reference, places, &aliases)));
    let mut text = columns(&rows);
    if cached.is_empty() && of_ollama.is_empty() && aliases.is_empty() {
        text.push_str(&match places.hub.as_deref() {
            Some(path) => {
                format!("no models in {}, and no aliases: `llmctl help models`\n", places.shorten(path))
            }
            None => "no models found (HOME is not set, so there is no cache folder)\n".to_owned(),
        });
    }
    print(&text)
}

fn built_in_row(places: &Places) -> Vec<String> {
    let source = ModelSource::BuiltIn(&GUIDE);
    let summary = llmctl_hub::summary(&source);
    vec![
        GUIDE.name.to_owned(),
        summary.kind.name().to_owned(),
        summary.quantization.unwrap_or_default(),
        bytes(summary.bytes),
        context_text(context(&source)),
        last_use::describe(last_use::last_used_ms(source.path(), places)),
        "(inside llmctl)".to_owned(),
    ]
}

fn cached_row(model: &CachedModel, places: &Places) -> Vec<String> {
    let path = match &model.missing {
        Some(missing) => format!("incomplete: {} is missing", places.shorten(missing)),
        None => places.shorten(&model.path),
    };
    vec![
        model.reference.clone(),
        model.kind.name().to_owned(),
        model.quantization.clone().unwrap_or_else(|| "?".to_owned()),
        bytes(model.bytes),
        context_text(cached_context(model)),
        last_use::describe(last_use::last_used_ms(&model.path, places)),
        path,
    ]
}

fn ollama_row(model: &OllamaModel, places: &Places) -> Vec<String> {
    let path = match &model.file {
        Ok(path) => places.shorten(path),
        Err(reason) => format!("not usable: {reason}"),
    };
    let used = model.file.as_ref().ok().and_then(|path| last_use::last_used_ms(path, places));
    vec![
        model.reference.clone(),
        "ollama".to_owned(),
        model.quantization.clone().unwrap_or_else(|| "?".to_owned()),
        bytes(model.bytes),
        context_text(ollama_context(model)),
        last_use::describe(used),
        path,
    ]
}

fn alias_row(name: &str, reference: &str, places: &Places, aliases: &Aliases) -> Vec<String> {
    let target = match find(reference, places, aliases) {
        Ok(resolved) => places.shorten(resolved.source.path()),
        Err(error) => error.to_string(),
    };
    let mut row = vec![String::new(); 7];
    (row[0], row[1], row[6]) = (name.to_owned(), "alias".to_owned(), format!("{reference} -> {target}"));
    row
}

/// Returns the context that the model's files state, in tokens; `None` if llmctl cannot run it.
fn context(source: &ModelSource) -> Option<usize> {
    Some(model_facts(source).ok()?.decoder.ok()?.context_length)
}

fn cached_context(model: &CachedModel) -> Option<usize> {
    let source = |path: &Path| match model.kind {
        ModelKind::Gguf => ModelSource::Gguf(path.to_path_buf()),
        ModelKind::Safetensors => ModelSource::Folder(path.to_path_buf()),
    };
    if model.missing.is_some() { None } else { context(&source(&model.path)) }
}

fn ollama_context(model: &OllamaModel) -> Option<usize> {
    context(&ModelSource::Gguf(model.file.as_ref().ok()?.clone()))
}

fn context_text(tokens: Option<usize>) -> String {
    tokens.map_or_else(|| "?".to_owned(), |tokens| tokens.to_string())
}

fn to_json(cached: &[CachedModel], of_ollama: &[OllamaModel], aliases: &Aliases, places: &Places) -> Value {
    let source = ModelSource::BuiltIn(&GUIDE);
    let built_in = llmctl_hub::summary(&source);
    let alias = |(name, reference): (&String, &String)| {
        let found = find(reference, places, aliases);
        let path = found.as_ref().ok().map(|resolved| resolved.source.path());
        json!({"name": name, "reference": reference, "path": path, "error": found.as_ref().err().map(|e| e.to_string())})
    };
    json!({
        "schema": "llmctl.models.v1",
        "cache": places.hub,
        "models": cached.iter().map(|model| cached_json(model, places)).collect::<Vec<_>>(),
        "ollama": of_ollama.iter().map(|model| ollama_json(model, places)).collect::<Vec<_>>(),
        "aliases": aliases.iter().map(alias).collect::<Vec<_>>(),
        "built_in": [{
            "reference": GUIDE.name,
            "kind": built_in.kind.name(),
            "type": built_in.quantization,
            "bytes": built_in.bytes,
            "context_length": context(&source),
            "last_used_ms": last_use::last_used_ms(source.path(), places),
        }],
    })
}

fn cached_json(model: &CachedModel, places: &Places) -> Value {
    json!({
        "model": model.reference,
        "commit": model.commit,
        "kind": model.kind.name(),
        "type": model.quantization,
        "bytes": model.bytes,
        "context_length": cached_context(model),
        "last_used_ms": last_use::last_used_ms(&model.path, places),
        "complete": model.missing.is_none(),
        "path": model.path,
        "missing": model.missing,
    })
}

fn ollama_json(model: &OllamaModel, places: &Places) -> Value {
    let path = model.file.as_ref().ok();
    json!({
        "model": model.reference,
        "type": model.quantization,
        "bytes": model.bytes,
        "context_length": ollama_context(model),
        "last_used_ms": path.and_then(|path| last_use::last_used_ms(path, places)),
        "path": path,
        "error": model.file.as_ref().err(),
    })
}
