//! The API key of an endpoint, from a variable or a file.
//!
//! Invariant: the key goes to the server that it was given for, and no message shows it, also where it was
//! given in place of a name.

use crate::cli::error::CommandError;
use crate::cli::flags::args::EndpointArgs;
use crate::cli::terminal::input::read_file;
use llmctl_engine::http_engine::{EndpointUrl, ServerKey};

/// Returns the key for `url`; `None` without one, or if it is for another server. Without `--endpoint`, a key is for the server of
/// the conversation only if the command line names it: one from a variable or a configuration file is for no server then.
///
/// # Errors
/// A variable that is not set, a file that cannot be read, a text that is no key.
pub fn key_for(url: &EndpointUrl, args: &EndpointArgs) -> Result<Option<ServerKey>, CommandError> {
    let is_for_it = args.url().map_or(args.is_key_named, |given| given.is_same_server(url));
    if !is_for_it {
        return Ok(None);
    }
    if let Some(name) = &args.endpoint_key_env {
        return from_variable(name, std::env::var(name).ok()).map(Some);
    }
    let Some(path) = &args.endpoint_key_file else { return Ok(None) };
    let text = read_file(path)?;
    let wrong = |why| CommandError::usage(format!("--endpoint-key-file {}: the key {why}", path.display()));
    ServerKey::new(&text).map(Some).map_err(wrong)
}

fn from_variable(name: &str, value: Option<String>) -> Result<ServerKey, CommandError> {
    let is_word = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    // A name in other letters may be the key itself, given by mistake.
    let shown = if name.chars().all(is_word) && name.len() <= 40 { name } else { "(the name given)" };
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        let error = CommandError::usage(format!("--endpoint-key-env: the variable {shown} is not set"));
        return Err(error.hint("it takes the name of the variable that holds the key, e.g. OPENAI_API_KEY"));
    };
    ServerKey::new(&value)
        .map_err(|why| CommandError::usage(format!("--endpoint-key-env {shown}: the key {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_place_of_a_name_is_not_repeated() {
        for key in ["sk-abc123", "gsk_abcdef", "A1B2C3D4A1B2C3D4A1B2C3D4A1B2C3D4A1B2C3D4A1B2C3D4"] {
            let error = from_variable(key, None).expect_err("not set");
            assert!(!format!("{error} {:?}", error.hint_text()).contains(key), "{error}");
        }
        let error = from_variable("MY_KEY", Some(String::new())).expect_err("empty");
        assert!(error.to_string().contains("MY_KEY is not set"), "{error}");
        let error = from_variable("MY_KEY", Some("a b".to_owned())).expect_err("no key");
        assert!(!error.to_string().contains("a b"), "{error}");
        assert!(from_variable("MY_KEY", Some(" k\n".to_owned())).is_ok());
    }

    #[test]
    fn a_key_goes_to_its_own_server_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        std::fs::write(&path, "sk-1\n").expect("written");
        let url = |text: &str| text.parse::<EndpointUrl>().expect("an address");
        let args = |endpoint: Option<&str>, is_key_named| EndpointArgs {
            endpoint: endpoint.map(|text| text.parse().expect("an endpoint")),
            endpoint_key_file: Some(path.clone()),
            is_key_named,
            ..EndpointArgs::default()
        };
        let has_key = |at: &str, args: &EndpointArgs| key_for(&url(at), args).expect("readable").is_some();
        for is_key_named in [false, true] {
            let args = args(Some("https://a/other"), is_key_named);
            assert!(
                has_key("https://a/v1", &args) && !has_key("https://b", &args) && !has_key("http://a", &args)
            );
        }
        for none in [None, Some("none")] {
            assert!(has_key("https://a", &args(none, true)), "of the session that is continued");
            assert!(!has_key("https://a", &args(none, false)), "from a file or a variable");
        }
    }
}
