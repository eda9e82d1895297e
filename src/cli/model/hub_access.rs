//! Settings of the hub client from the environment, by the names that huggingface_hub, curl and OpenSSL use.
//!
//! The only reader of these variables. An empty variable counts as unset.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::places::Places;
use llmctl_base::read::read_optional;
use llmctl_hub::{HubProxies, HubSettings, HubToken};

/// Most bytes of a token file; a token has about forty.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// Returns whether `HF_HUB_OFFLINE` forbids downloading.
pub fn is_offline() -> bool {
    is_on("HF_HUB_OFFLINE", &|name| std::env::var(name).ok())
}

/// Returns the settings of the hub client.
pub fn hub_settings(places: &Places) -> HubSettings {
    let saved = places.hub_token.as_deref().and_then(saved_token);
    settings(&|name| std::env::var(name).ok(), saved)
}

/// Returns the content of the token file; none if it cannot be read or is longer than any token.
fn saved_token(path: &Path) -> Option<String> {
    String::from_utf8(read_optional(path, MAX_TOKEN_BYTES).ok()??).ok()
}

/// Returns the PEM file with the certificate authorities to trust, if one is named.
pub fn ca_file() -> Option<PathBuf> {
    ca_file_of(&|name| std::env::var(name).ok())
}

fn ca_file_of(lookup: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let names = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
    names.iter().find_map(|name| lookup(name).filter(|value| !value.is_empty())).map(PathBuf::from)
}

fn is_on(variable: &str, lookup: &dyn Fn(&str) -> Option<String>) -> bool {
    let value = lookup(variable).unwrap_or_default().to_ascii_uppercase();
    matches!(value.as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// Returns the settings; `saved_token` is the content of the token file.
fn settings(lookup: &dyn Fn(&str) -> Option<String>, saved_token: Option<String>) -> HubSettings {
    let first = |names: &[&str]| names.iter().find_map(|name| lookup(name).filter(|value| !value.is_empty()));
    let seconds =
        |name: &str| Some(Duration::from_secs(first(&[name])?.trim().parse().ok().filter(|s| *s > 0)?));
    let default = HubSettings::default();
    let token = first(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]).or(saved_token);
    let is_sent = !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN", lookup);
    HubSettings {
        endpoint: first(&["HF_ENDPOINT"])
            .map_or(default.endpoint, |endpoint| endpoint.trim_end_matches('/').to_owned()),
        token: token.filter(|_| is_sent).and_then(|token| HubToken::new(&token)),
        proxies: HubProxies {
            https: first(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
            http: first(&["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]),
            except: first(&["NO_PROXY", "no_proxy"]),
        },
        ca_file: ca_file_of(lookup),
        answer_timeout: seconds("HF_HUB_ETAG_TIMEOUT").unwrap_or(default.answer_timeout),
        read_timeout: seconds("HF_HUB_DOWNLOAD_TIMEOUT").unwrap_or(default.read_timeout),
        ..HubSettings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings_of(variables: &[(&str, &str)], saved: Option<&str>) -> HubSettings {
        let lookup =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        settings(&lookup, saved.map(str::to_owned))
    }

    #[test]
    fn a_token_comes_from_a_variable_or_a_file_and_may_be_held_back() {
        let token = |variables: &[(&str, &str)], saved| settings_of(variables, saved).token;
        let of = HubToken::new;
        assert_eq!(token(&[("HF_TOKEN", " a\n"), ("HUGGING_FACE_HUB_TOKEN", "b")], Some("c")), of("a"));
        assert_eq!(token(&[("HUGGING_FACE_HUB_TOKEN", "b")], Some("c")), of("b"));
        assert_eq!(token(&[("HF_TOKEN", "")], Some("c\n")), of("c"));
        assert_eq!(token(&[], Some("\n")), None);
        assert_eq!(token(&[("HF_TOKEN", "a"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")], Some("c")), None);
        assert!(!format!("{:?}", token(&[("HF_TOKEN", "secret")], None)).contains("secret"));
    }

    #[test]
    fn a_token_file_is_read_within_a_bound() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        std::fs::write(&path, "hf_a\n").expect("a file");
        assert_eq!(saved_token(&path).as_deref(), Some("hf_a\n"));
        std::fs::write(&path, vec![b'a'; MAX_TOKEN_BYTES as usize + 1]).expect("a file");
        assert_eq!(saved_token(&path), None);
        assert_eq!(saved_token(folder.path()), None);
        assert_eq!(saved_token(Path::new("/dev/zero")), None);
    }

    #[test]
    fn addresses_and_limits() {
        assert_eq!(settings_of(&[], None), HubSettings::default());
        let mirror = [("HF_ENDPOINT", "https://hf-mirror.com/"), ("HF_HUB_DOWNLOAD_TIMEOUT", "60")];
        let settings = settings_of(&mirror, None);
        assert_eq!(settings.endpoint, "https://hf-mirror.com");
        assert_eq!(settings.read_timeout, Duration::from_secs(60));
        let proxy = [("https_proxy", "http://p:1"), ("ALL_PROXY", "socks5://q:2"), ("NO_PROXY", "localhost")];
        let proxies = settings_of(&proxy, None).proxies;
        assert_eq!(
            (proxies.https.as_deref(), proxies.http.as_deref()),
            (Some("http://p:1"), Some("socks5://q:2"))
        );
        assert_eq!(proxies.except.as_deref(), Some("localhost"));
        let ca = settings_of(&[("REQUESTS_CA_BUNDLE", "/r"), ("SSL_CERT_FILE", "/s")], None).ca_file;
        assert_eq!(ca, Some(PathBuf::from("/s")));
    }

    #[test]
    fn offline_takes_the_words_of_huggingface_hub() {
        let offline = |value: &str| is_on("HF_HUB_OFFLINE", &|_| Some(value.to_owned()));
        assert!(offline("1") && offline("true") && offline("YES") && !offline("0") && !offline(""));
    }
}
