//! `llmctl models`: lists the cache and the aliases. Also resolves `--model` to files, for all commands.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::config::Config;
use super::error::{CommandError, Exit, nearest};
use super::explain;
use super::places::Places;
use super::report::{ReportFormat, bytes, columns, print, print_json};
use crate::runtime::LoadError;
use crate::runtime::load::builtin::GUIDE;
use crate::runtime::load::hub::{self, Aliases, CachedModel, ModelRef, ModelSource, Resolved};
use crate::runtime::load::model_facts;

/// List the models: the built-in one, those in the Hugging Face cache, and the aliases
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ModelsArgs {
    #[command(subcommand)]
    pub command: Option<ModelsCommand>,

    /// What goes to stdout: a table, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t, global = true)]
    pub output: ReportFormat,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ModelsCommand {
    /// List the models (the default)
    List,
    /// Show what is known of one model without loading it
    Show {
        /// Model: a .gguf file, a folder, org/repo[:QUANT][@REVISION] or an alias
        #[arg(value_name = "REF")]
        reference: String,
    },
}

const LONG_HELP: &str = "\
Examples:
  llmctl models
  llmctl models show org/repo:Q4_K_M
  hf download org/repo && llmctl chat --model org/repo

Naming a model (REF of --model, LLMCTL_MODEL, or `model = \"REF\"` in the configuration):
  ./model.gguf, ./folder       a GGUF file, whatever its name; a folder with config.json and safetensors files
  org/repo, org/repo:Q4_K_M    from the Hugging Face cache; @REVISION may follow
  NAME                         an alias: `NAME = \"REF\"` under [aliases] in the configuration
  guide                        the demo model inside llmctl, which knows only llmctl; also without --model

Getting a model:
  llmctl does not download yet: `hf download ORG/REPO` (from `pip install huggingface_hub`) or any other tool that fills the \
cache does. For a first try, a small one:
    hf download Qwen/Qwen2.5-0.5B-Instruct-GGUF qwen2.5-0.5b-instruct-q4_k_m.gguf
    llmctl chat --model Qwen/Qwen2.5-0.5B-Instruct-GGUF
  What ollama has on disk are GGUF files without the ending, too: --model ~/.ollama/models/blobs/sha256-... (the largest ones).

Exit codes:
  0    success
  65   bad input: a damaged model
  66   no such model

Files:
  $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub: the cache";

pub fn run(args: ModelsArgs, config: &Config, places: &Places) -> Result<Exit, CommandError> {
    match args.command {
        Some(ModelsCommand::Show { reference }) => show(&reference, config, places, args.output),
        Some(ModelsCommand::List) | None => list(config, places, args.output),
    }
}

/// Resolves `reference` to files.
///
/// # Errors
/// See [`hub::resolve`]. The error for a missing model says that this build does not download.
pub fn find(reference: &str, places: &Places, aliases: &Aliases) -> Result<Resolved, CommandError> {
    let resolved = ModelRef::parse(reference).and_then(|r| hub::resolve(&r, &places.hub_paths(), aliases));
    resolved.map_err(|error| {
        let hint = match &error {
            LoadError::UnknownModel { reference, candidates } => Some(not_cached(reference, candidates)),
            LoadError::AmbiguousModel { candidates, .. } => candidates
                .first()
                .map(|first| format!("name one of them exactly, e.g. --model {}", first.reference)),
            _ => None,
        };
        match hint {
            Some(hint) => CommandError::from(error).hint(hint),
            None => CommandError::from(error),
        }
    })
}

fn not_cached(reference: &str, candidates: &[String]) -> String {
    let slip = nearest(&reference.to_lowercase(), [GUIDE.name]).map(str::to_owned);
    let meant: Vec<String> = candidates.iter().cloned().chain(slip).collect();
    let meant = match &*meant {
        [] => String::new(),
        meant if !reference.contains('/') => {
            return format!("did you mean {}? `llmctl models` lists what you have", meant.join(" or "));
        }
        meant => format!("did you mean {}? ", meant.join(" or ")),
    };
    format!(
        "{meant}it is not a file, an alias or a cached repository. {}; `llmctl models` lists what you have",
        explain::download(Some(reference))
    )
}

fn list(config: &Config, places: &Places, format: ReportFormat) -> Result<Exit, CommandError> {
    let models = hub::list(places.hub.as_deref());
    let aliases = config.aliases();
    let built_in = hub::summary(&ModelSource::BuiltIn(&GUIDE));
    let (kind, quantization) = (built_in.kind.name(), built_in.quantization.unwrap_or_default());
    if format == ReportFormat::Json {
        let models: Vec<_> = models.iter().map(model_json).collect();
        let alias = |(name, reference): (&String, &String)| {
            let found = find(reference, places, &aliases);
            let path = found.as_ref().ok().map(|resolved| resolved.source.path());
            json!({"name": name, "reference": reference, "path": path, "error": found.as_ref().err().map(|e| e.to_string())})
        };
        let aliases: Vec<_> = aliases.iter().map(alias).collect();
        return print_json(&json!({
            "schema": "llmctl.models.v1", "cache": places.hub, "models": models, "aliases": aliases,
            "built_in": [{"reference": GUIDE.name, "kind": kind, "type": quantization, "bytes": built_in.bytes}],
        }));
    }
    let built_in = [GUIDE.name, kind, &quantization, &bytes(built_in.bytes), "(inside llmctl)"];
    let mut rows = vec![
        ["MODEL", "KIND", "TYPE", "SIZE", "PATH"].map(str::to_owned).to_vec(),
        built_in.map(str::to_owned).to_vec(),
    ];
    rows.extend(models.iter().map(|model| model_row(model, places)));
    rows.extend(aliases.iter().map(|(name, reference)| {
        let target = match find(reference, places, &aliases) {
            Ok(resolved) => places.shorten(resolved.source.path()),
            Err(error) => error.to_string(),
        };
        vec![
            name.clone(),
            "alias".to_owned(),
            String::new(),
            String::new(),
            format!("{reference} -> {target}"),
        ]
    }));
    let mut text = columns(&rows);
    if models.is_empty() && aliases.is_empty() {
        text.push_str(&match places.hub.as_deref() {
            Some(path) => {
                format!("no models in {}, and no aliases: `llmctl help models`\n", places.shorten(path))
            }
            None => "no models found (HOME is not set, so there is no cache folder)\n".to_owned(),
        });
    }
    print(&text)
}

fn model_row(model: &CachedModel, places: &Places) -> Vec<String> {
    let path = match &model.missing {
        Some(missing) => format!("incomplete: {} is missing", places.shorten(missing)),
        None => places.shorten(&model.path),
    };
    let quantization = model.quantization.clone().unwrap_or_else(|| "?".to_owned());
    vec![model.reference.clone(), model.kind.name().to_owned(), quantization, bytes(model.bytes), path]
}

fn model_json(model: &CachedModel) -> Value {
    json!({
        "model": model.reference,
        "commit": model.commit,
        "kind": model.kind.name(),
        "type": model.quantization,
        "bytes": model.bytes,
        "path": model.path,
        "missing": model.missing,
    })
}

fn show(
    reference: &str,
    config: &Config,
    places: &Places,
    format: ReportFormat,
) -> Result<Exit, CommandError> {
    let resolved = find(reference, places, &config.aliases())?;
    let facts = facts(&resolved)?;
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
    match facts.decoder {
        Ok(decoder) => list.extend([
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
