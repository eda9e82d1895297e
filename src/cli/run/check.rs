//! Checks of a run before anything is read or loaded, and warnings about uses that the built-in model is not
//! made for.

use super::{OutputFormat, RunArgs, flag_error, prompt};
use crate::cli::error::CommandError;
use crate::cli::model::load;
use crate::cli::terminal::Terminal;
use llmctl_engine::MAX_LOGPROBS;

/// Checks the flags before anything is read or loaded.
pub fn flags(args: &RunArgs) -> Result<(), CommandError> {
    args.sampling.check().map_err(flag_error)?;
    stdin(args)?;
    let logprobs = args.output.logprobs;
    if logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
        return Err(CommandError::usage(format!("--logprobs: more than {MAX_LOGPROBS} alternatives")));
    }
    // Clap asks for --batch neither beside a prompt, which it excludes, nor for a value of a configuration file.
    for (is_set, flag) in [(args.batch.out.is_some(), "--out"), (args.batch.record.is_some(), "--record")] {
        if is_set && args.batch.batch.is_none() {
            return Err(CommandError::usage(format!("{flag} is for --batch")));
        }
    }
    let is_text = args.output.output.unwrap_or_default() == OutputFormat::Text;
    if logprobs.is_some() && is_text && args.batch.batch.is_none() && !args.prompt.dry_run {
        let hint = "add --output json or --output jsonl";
        return Err(CommandError::usage("--logprobs: plain text has no room for them").hint(hint));
    }
    Ok(())
}

/// Refuses images, also one that was piped in, where there is no message that they could be part of.
pub fn images(args: &RunArgs, has_images: bool) -> Result<(), CommandError> {
    match has_images && args.prompt.raw {
        true => Err(CommandError::usage("--raw: a plain text has no images").hint("leave --raw out")),
        false => Ok(()),
    }
}

/// Checks the use of the built-in model, and warns of a prompt that looks like the name of a model.
pub fn model(args: &RunArgs, terminal: &Terminal) -> Result<(), CommandError> {
    if args.endpoint.url().is_some() {
        return Ok(());
    }
    if let Some(word) = args.words.first().filter(|_| args.model.model.is_none())
        && (args.model.aliases.contains_key(word) || looks_like_a_model(word))
    {
        terminal.warn(format!(
            "{word:?} looks like a model, and is taken as part of the prompt; a model is named with --model {word}"
        ));
    }
    // A session has a model of its own, which is known when it is opened.
    match args.session.session.is_some() && !args.model.is_named {
        true => Ok(()),
        false => built_in(args, terminal),
    }
}

/// Refuses stored prompts with the built-in model, and warns of constraints: it knows only llmctl.
pub fn built_in(args: &RunArgs, terminal: &Terminal) -> Result<(), CommandError> {
    let asks_more = args.prompt.name.is_some() || args.constraint.is_given();
    if args.prompt.dry_run || !asks_more || !load::means_built_in(&args.model) {
        return Ok(());
    }
    if let Some(name) = &args.prompt.name {
        prompt::StoredPrompt::named(name)?;
        let message =
            format!("--prompt {name} needs another model: guide, the built-in one, knows only llmctl");
        return Err(
            CommandError::usage(message).hint("name one with --model REF; `llmctl help models` says how")
        );
    }
    terminal.warn(format!(
        "guide, the built-in model, knows only llmctl: its answer keeps to {}, and means nothing beyond that",
        args.constraint.flag()
    ));
    Ok(())
}

/// Returns whether other tools would take the word for a model: `llama3.2:1b`, `qwen3`, `org/repo:Q4_K_M`, `model.gguf`.
fn looks_like_a_model(word: &str) -> bool {
    const FAMILIES: [&str; 10] =
        ["llama", "qwen", "mistral", "mixtral", "gemma", "phi", "deepseek", "smollm", "tinyllama", "gpt-oss"];
    let is_name = |text: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
    };
    let (name, tag) = match word.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (word, None),
    };
    if !is_name(name) || tag.is_some_and(|tag| !is_name(tag)) || name.contains("//") {
        return false;
    }
    let lower = name.to_ascii_lowercase();
    let base = lower.rsplit('/').next().unwrap_or(&lower);
    let rest = FAMILIES.iter().find_map(|family| base.strip_prefix(family));
    let is_version = |rest: &str| rest.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
    let has_tag = tag.is_some_and(|tag| tag == "latest" || tag.contains(|c: char| c.is_ascii_digit()));
    let has_letters = name.contains(|c: char| c.is_ascii_alphabetic());
    lower.ends_with(".gguf") || rest.is_some_and(is_version) || (has_tag && has_letters && tag != Some("80"))
}

/// Refuses `--no-stdin` beside a flag that names stdin. Clap refuses `--batch -`.
fn stdin(args: &RunArgs) -> Result<(), CommandError> {
    let reader = match (&args.prompt.prompt_file, &args.constraint.schema) {
        _ if args.words == ["-"] => "the prompt -",
        (Some(path), _) if path.as_os_str() == "-" => "--prompt-file -",
        (_, Some(schema)) if schema == "-" => "--schema -",
        _ => return Ok(()),
    };
    if args.prompt.no_stdin {
        return Err(CommandError::usage(format!("{reader} reads stdin, and --no-stdin forbids it")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::BatchArgs;
    use super::*;

    #[test]
    fn who_names_stdin_wants_it_read() {
        let args = |file: Option<&str>, schema: Option<&str>, no_stdin| {
            let mut args = RunArgs::default();
            args.prompt.prompt_file = file.map(PathBuf::from);
            args.prompt.no_stdin = no_stdin;
            args.constraint.schema = schema.map(str::to_owned);
            flags(&args).map_err(|error| error.to_string())
        };
        let refusal = |reader: &str| Err(format!("{reader} reads stdin, and --no-stdin forbids it"));
        assert_eq!(args(Some("-"), None, true), refusal("--prompt-file -"));
        assert_eq!(args(Some("ask.txt"), Some("-"), true), refusal("--schema -"));
        assert_eq!(args(Some("ask.txt"), Some("{}"), true), Ok(()));
        assert_eq!(args(Some("-"), None, false), Ok(()));
    }

    #[test]
    fn a_files_defaults_for_batches_are_no_mistake_elsewhere_but_an_unwritten_file_is() {
        let checked =
            |batch| flags(&RunArgs { batch, ..RunArgs::default() }).map_err(|error| error.to_string());
        let (path, none) = (Some(PathBuf::from("x")), BatchArgs::default);
        assert_eq!(checked(BatchArgs { any_model: true, ..none() }), Ok(()));
        let refused = |flag: &str| Err(format!("{flag} is for --batch"));
        assert_eq!(checked(BatchArgs { out: path.clone(), ..none() }), refused("--out"));
        assert_eq!(checked(BatchArgs { record: path, ..none() }), refused("--record"));
        let is_taken = |words: &[&str]| crate::cli::command().try_get_matches_from(words).is_ok();
        assert!(!is_taken(&["llmctl", "run", "--any-model", "hi"]));
    }
}
