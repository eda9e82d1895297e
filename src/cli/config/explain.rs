//! Helpful errors of the command line: the value and what is expected, the variable that set it, and the
//! equivalents of other tools' names.
//!
//! Works on clap's errors and definitions. A test checks that every suggestion exists.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

use crate::cli::flags::{reason, text, variable};

/// Rewrites the error of parsing `args`.
pub fn explain(error: clap::Error, command: &Command, args: &[OsString]) -> clap::Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => subcommand(error, command, args),
        ErrorKind::UnknownArgument => argument(error, command, args),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => value(error, command, args),
        _ => error,
    }
}

/// Rewrites the error of a value that a flag does not accept, naming its variable if it came from one.
fn value(error: clap::Error, command: &Command, args: &[OsString]) -> clap::Error {
    let Some(name) = text(&error, ContextKind::InvalidArg) else { return error };
    let Some(long) = name.split_whitespace().next().and_then(|name| name.strip_prefix("--")) else {
        return error;
    };
    let long = long.trim_end_matches("...");
    let Some(reason) = reason(&error) else { return error };
    let used = used(command, args);
    let arg = find(used, long).or_else(|| find(command, long));
    let from = arg.filter(|arg| !is_on_line(arg, args)).and_then(variable);
    let is_set = |name: &String| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match from.filter(is_set) {
        Some(name) => raw(&error, used, format!("{name}: {reason}")),
        // clap already lists the values and suggests one.
        None if error.kind() == ErrorKind::InvalidValue => error,
        None => raw(&error, used, format!("--{long}: {reason}")),
    }
}

/// Finds a flag in the command or below; a global flag stands above the named subcommand.
fn find<'a>(command: &'a Command, long: &str) -> Option<&'a Arg> {
    let own = command.get_arguments().find(|arg| arg.get_long() == Some(long));
    own.or_else(|| command.get_subcommands().find_map(|below| find(below, long)))
}

fn raw(error: &clap::Error, used: &Command, message: String) -> clap::Error {
    let whole = format!("{message}\n\nFor more information, try '--help'.\n");
    clap::Error::raw(error.kind(), whole).with_cmd(used)
}

fn is_on_line(arg: &Arg, args: &[OsString]) -> bool {
    let long = arg.get_long().map(|long| format!("--{long}"));
    let short = arg.get_short().map(|short| format!("-{short}"));
    let words = args.iter().skip(1).map(|arg| arg.to_string_lossy()).take_while(|word| word != "--");
    let is_it = |word: &str| {
        let is_long = long.as_ref().is_some_and(|long| {
            word.strip_prefix(long.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        });
        is_long
            || short.as_ref().is_some_and(|short| !word.starts_with("--") && word.starts_with(short.as_str()))
    };
    words.into_iter().any(|word| is_it(&word))
}

/// Returns the subcommand that the arguments name, as far as they do.
fn used<'a>(command: &'a Command, args: &[OsString]) -> &'a Command {
    let mut found = command;
    for word in args.iter().skip(1) {
        let Some(word) = word.to_str() else { continue };
        if let Some(below) = found.find_subcommand(word) {
            found = below;
        }
    }
    found
}

/// Subcommands of other tools, and the equivalent here.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["update", "upgrade", "self-update"], "llmctl does not update itself: install the new version"),
    (&["version"], "'llmctl --version'"),
    (&["ls"], "'llmctl models' lists models, 'llmctl sessions' saved conversations"),
    (&["ps", "stop"], "there is no background service: a model is loaded as long as its run, chat or serve"),
    (
        &["rm", "delete", "remove"],
        "'llmctl models rm REF' erases a model, 'llmctl sessions remove NAME' a session",
    ),
    (&["show", "info"], "'llmctl models show REF'"),
    (&["generate", "ask", "complete", "prompt"], "'llmctl run PROMPT'"),
    (&["server", "start"], "'llmctl serve'"),
    (
        &["create", "push", "cp", "convert"],
        "'llmctl quantize IN OUT' writes a GGUF file of another type; [aliases] in the configuration give names",
    ),
];

const FETCHING: [&str; 4] = ["download", "fetch", "get", "install"];

fn subcommand(mut error: clap::Error, command: &Command, args: &[OsString]) -> clap::Error {
    let Some(given) = text(&error, ContextKind::InvalidSubcommand) else { return error };
    // `models pull` is a subcommand elsewhere.
    let tip = if given == "pull" || FETCHING.contains(&given.as_str()) {
        let after = args.iter().skip_while(|arg| arg.to_str() != Some(given.as_str())).nth(1);
        Some(download(after.and_then(|arg| arg.to_str())))
    } else {
        COMMANDS.iter().find(|(names, _)| names.contains(&given.as_str())).map(|(_, tip)| (*tip).to_owned())
    };
    if let Some(tip) = tip {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
        return error;
    }
    if error.get(ContextKind::SuggestedSubcommand).is_some() {
        return error;
    }
    // clap's similarity misses swapped letters in short names (`rnu`).
    let near = |name: &&str| strsim::damerau_levenshtein(&given, name) <= 1;
    let names = used(command, args).get_subcommands().map(Command::get_name);
    let meant: Vec<String> = names.filter(near).map(str::to_owned).collect();
    if !meant.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(meant));
    }
    error
}

/// Explains how to download the model, as far as its source is known.
pub fn download(named: Option<&str>) -> String {
    let plain = |name: &&str| !name.starts_with('-');
    match named.filter(plain).map(|name| name.trim_start_matches("hf.co/").trim_start_matches("hf:")) {
        Some(name) if name.matches('/').count() == 1 => {
            format!("'llmctl pull {name}' downloads it; 'llmctl chat --model {name}' does so, too")
        }
        _ => {
            "'llmctl pull ORG/REPO' downloads a model, e.g. Qwen/Qwen2.5-0.5B-Instruct-GGUF, and 'llmctl chat --model \
             ORG/REPO' does so, too; any .gguf file works"
                .to_owned()
        }
    }
}

/// Flags of other tools, the equivalent flags here, and a hint if those exist.
const FLAGS: &[(&[&str], &[&str], &str)] = &[
    (&["listen", "bind", "address", "addr"], &["host"], "'--host ADDRESS' and '--port N'"),
    (&["json"], &["output"], "'--output json'"),
    (&["json-schema", "format", "json-schema-file"], &["schema"], "'--schema FILE'"),
    (
        &["attach", "file", "input", "context-file"],
        &["prompt-file"],
        "'--prompt-file FILE', or pipe the text in",
    ),
    (&["temp"], &["temperature"], "'--temperature T'"),
    (
        &["n-predict", "num-predict", "predict", "max-new-tokens", "max_tokens"],
        &["max-tokens"],
        "'--max-tokens N'",
    ),
    (&["ctx-size", "num-ctx", "context", "context-size", "max-model-len", "n-ctx"], &["ctx"], "'--ctx N'"),
    (&["system-prompt", "sys"], &["system"], "'--system TEXT'"),
    (&["repeat-penalty"], &["repetition-penalty"], "'--repetition-penalty R'"),
    (&["hf-repo", "hf", "repo"], &["model"], "'--model ORG/REPO'"),
    (
        &["n-gpu-layers", "gpu-layers", "ngl", "gpu"],
        &["device"],
        "'--device cuda' or '--device metal', for the whole model",
    ),
    (
        &["api-key", "key"],
        &["api-key-file"],
        "'--api-key-file FILE', or the variable LLMCTL_API_KEY: a flag is seen by others",
    ),
    (
        &["api-key", "key"],
        &["endpoint-key-env"],
        "'--endpoint-key-env VARIABLE' or '--endpoint-key-file FILE': a flag is seen by others",
    ),
    (&["np", "n-parallel", "max-num-seqs"], &["parallel"], "'--parallel N'"),
    (&["cache-type-k", "cache-type-v", "kv-cache-dtype"], &["kv-type"], "'--kv-type TYPE'"),
    (&["images", "img", "picture", "vision"], &["image"], "'--image FILE'"),
    (&["image", "images", "img", "picture"], &["continue"], "'/image FILE' in the chat"),
    (&["image", "images", "img", "picture"], &["pooling"], "embed reads texts, no images"),
    (&["clip", "projector", "mmproj-path"], &["mmproj"], "'--mmproj FILE'"),
    (&["image-min-tokens", "image-max-tokens"], &["image-tokens"], "'--image-tokens MIN..MAX'"),
    (&["audio", "video"], &[], "llmctl reads text and images, no audio or video yet"),
    (&["adapter", "lora-modules"], &["lora"], "'--lora FILE' or '--lora FILE=SCALE'"),
    (&["lora-scaled"], &["lora"], "'--lora FILE=SCALE'"),
    (&["lora-init-without-apply"], &["lora"], "'--lora FILE=0'"),
    (&["stream"], &["no-stream"], "answers are streamed unless there is '--no-stream'"),
];

fn argument(mut error: clap::Error, command: &Command, args: &[OsString]) -> clap::Error {
    let Some(given) = text(&error, ContextKind::InvalidArg) else { return error };
    let name = given.trim_start_matches('-').split('=').next().unwrap_or_default();
    let used = used(command, args);
    let has = |flag: &&str| used.get_arguments().any(|arg| arg.get_long() == Some(*flag));
    let entry = FLAGS.iter().find(|(names, flags, _)| names.contains(&name) && flags.iter().all(has));
    let Some((_, _, tip)) = entry else { return error };
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(*tip)]));
    // clap's usage shows the flag that it would have suggested.
    let usage = used.clone().render_usage();
    error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> String {
        let mut command = crate::cli::command();
        let args: Vec<OsString> = ["llmctl"].iter().chain(words).map(OsString::from).collect();
        let error = command.try_get_matches_from_mut(&args).expect_err("wrong");
        explain(error, &command, &args).to_string()
    }

    #[test]
    fn values_are_named_with_what_they_should_be() {
        let check = |words: &[&str], expected: &str| {
            let said = parse(&[&["run"], words].concat());
            assert!(said.starts_with(&format!("error: {expected}\n")), "{said:?}");
        };
        check(&["--seed", "abc"], "--seed: \"abc\" is not a whole number");
        check(&["--seed", "-1"], "--seed: -1 is negative");
        check(&["--seed", "99999999999999999999"], "--seed: 99999999999999999999 is too large");
        check(&["--temperature", "hot"], "--temperature: \"hot\" is not a number");
        check(&["--max-tokens", "0"], "--max-tokens: must be at least 1; -1 is no limit");
        check(&["--threads", "2000"], "--threads: must be from 1 to 1024, not 2000");
        check(
            &["--kv-memory", "lots"],
            "--kv-memory: invalid value \"lots\": not a size like 512M, 4G or a number of bytes (units: K, M, G, T)",
        );
    }

    #[test]
    fn names_of_other_tools_lead_somewhere() {
        let check = |words: &[&str], expected: &str| {
            let said = parse(words);
            assert!(said.contains(&format!("tip: {expected}")), "{words:?}: {said}");
        };
        check(
            &["download", "org/repo:Q4_K_M"],
            "'llmctl pull org/repo:Q4_K_M' downloads it; 'llmctl chat --model org/repo:Q4_K_M' does so, too",
        );
        check(&["install", "llama3"], "'llmctl pull ORG/REPO' downloads a model");
        check(&["models", "pull", "o/m"], "'llmctl pull o/m' downloads it");
        check(&["rm", "llama3"], "'llmctl models rm REF' erases a model, 'llmctl sessions remove NAME'");
        check(&["ps"], "there is no background service");
        check(&["version"], "'llmctl --version'");
        check(&["update"], "llmctl does not update itself");
        check(&["serve", "--listen", "x"], "'--host ADDRESS' and '--port N'");
        check(&["run", "--attach", "x"], "'--prompt-file FILE'");
        check(&["run", "--json", "x"], "'--output json'");
        check(&["run", "--images", "x"], "'--image FILE'");
        check(&["chat", "--image", "x"], "'/image FILE' in the chat");
        check(&["embed", "--image", "x"], "embed reads texts, no images");
        check(&["chat", "--lora-scaled", "x", "2"], "'--lora FILE=SCALE'");
        assert!(!parse(&["serve", "--listen", "x"]).contains("--lenient"), "no other flag is suggested");
        check(&["run", "--temprature", "1"], "a similar argument exists: '--temperature'");
        check(&["rnu"], "a similar subcommand exists: 'run'");
    }

    #[test]
    fn every_flag_that_is_pointed_to_exists() {
        let command = crate::cli::command();
        for (names, flags, tip) in FLAGS {
            for flag in *flags {
                let has = |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(flag));
                assert!(command.get_subcommands().any(has), "--{flag} for {names:?}");
                // A tip without a flag is for the commands that have this one.
                assert!(!tip.contains("--") || tip.contains(&format!("--{flag}")), "{tip}");
            }
            for name in *names {
                let has = |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(name));
                let both = command.get_subcommands().find(|below| {
                    has(below)
                        && flags
                            .iter()
                            .all(|flag| below.get_arguments().any(|arg| arg.get_long() == Some(flag)))
                });
                assert!(both.is_none(), "--{name} is a flag of {:?}", both.map(Command::get_name));
            }
        }
        for name in COMMANDS.iter().flat_map(|(names, _)| *names).chain(&FETCHING) {
            assert!(command.find_subcommand(name).is_none(), "{name} is a subcommand");
        }
    }
}
