//! Addresses of servers: a remote engine's, and an endpoint's, which takes messages.

use std::fmt;
use std::str::FromStr;

use hyper::Uri;

const EXAMPLE: &str = "not an address like http://127.0.0.1:8000";

/// Address of a remote engine, e.g. `http://127.0.0.1:8000`, without `/v1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineUrl {
    pub is_https: bool,
    /// Without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
    /// Path before the path of a request; empty or beginning with a slash.
    pub base: String,
}

impl EngineUrl {
    /// Returns host and port as URLs write them.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.shown_host(), self.port)
    }

    /// Returns the host as URLs write it: an IPv6 address in brackets.
    fn shown_host(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }

    /// Parses an address and keeps its path.
    fn with_path(text: &str) -> Result<Self, String> {
        let (url, path) = Self::with_query(text)?;
        match path.contains('?') {
            true => Err(EXAMPLE.to_owned()),
            false => Ok(Self { base: path.trim_end_matches('/').to_owned(), ..url }),
        }
    }

    /// Parses an address of one resource. Returns the server, and the resource's path with its query.
    ///
    /// # Errors
    /// Why it is none, without the text, which may hold a key.
    pub fn with_query(text: &str) -> Result<(Self, String), String> {
        // It may be a key, so it is not repeated. The text is looked at first, because it may be no URI.
        let behind_scheme = text.split_once("://").map_or(text, |(_, behind)| behind);
        if behind_scheme.split(['/', '?', '#']).next().is_some_and(|authority| authority.contains('@')) {
            return Err("an address holds no user name, password or key".to_owned());
        }
        let uri: Uri = text.parse().map_err(|_| EXAMPLE.to_owned())?;
        let is_https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err("it does not begin with http:// or https://".to_owned()),
        };
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || text.contains('#') {
            return Err(EXAMPLE.to_owned());
        }
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok((Self { is_https, host: host.to_ascii_lowercase(), port, base: String::new() }, path))
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_https { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.base)
    }
}

impl FromStr for EngineUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut url = Self::with_path(text)?;
        url.base.truncate(url.base.strip_suffix("/v1").unwrap_or(&url.base).len());
        Ok(url)
    }
}

/// Address of a server that takes messages, as clients of OpenAI's API take it: with its path, which is `/v1` where none is
/// given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointUrl(EngineUrl);

impl EndpointUrl {
    pub fn address(&self) -> &EngineUrl {
        &self.0
    }

    /// Returns whether both are the same server: scheme, host and port.
    pub fn is_same_server(&self, other: &Self) -> bool {
        let parts = |url: &Self| (url.0.is_https, url.0.host.clone(), url.0.port);
        parts(self) == parts(other)
    }
}

/// Leaves out a port that the scheme implies.
impl fmt::Display for EndpointUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, usual) = if self.0.is_https { ("https", 443) } else { ("http", 80) };
        let authority = if self.0.port == usual { self.0.shown_host() } else { self.0.authority() };
        write!(f, "{scheme}://{authority}{}", self.0.base)
    }
}

impl FromStr for EndpointUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut url = EngineUrl::with_path(text)?;
        // The address of the request itself is a usual slip.
        let path = url.base.strip_suffix("/chat/completions").unwrap_or(&url.base);
        url.base = if path.is_empty() { "/v1".to_owned() } else { path.to_owned() };
        Ok(Self(url))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_with_and_without_the_path_of_the_interface() {
        let check = |text: &str, expected: &str| {
            assert_eq!(text.parse::<EngineUrl>().expect(text).to_string(), expected);
        };
        check("http://127.0.0.1:8000", "http://127.0.0.1:8000");
        check("http://gpu-1/v1/", "http://gpu-1:80");
        check("http://[::1]:30000/pool/v1", "http://[::1]:30000/pool");
        check("https://GPU-1", "https://gpu-1:443");
        for (wrong, why) in [
            ("gpu-1:8000", "http://"),
            ("ftp://gpu-1", "http://"),
            ("http://a/?x=1", "not an address"),
            ("http://a/#x", "not an address"),
            ("", "not an address"),
        ] {
            let error = wrong.parse::<EngineUrl>().expect_err(wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
        for wrong in ["https://me:secret@host/v1", "me:secret@host", "https://me:my secret@host"] {
            let error = wrong.parse::<EndpointUrl>().expect_err("a password");
            assert!(error.contains("password") && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn an_endpoint_keeps_its_path() {
        let check = |text: &str, expected: &str| {
            assert_eq!(text.parse::<EndpointUrl>().expect(text).to_string(), expected);
        };
        check("http://127.0.0.1:11434", "http://127.0.0.1:11434/v1");
        check("https://api.openai.com/v1/", "https://api.openai.com/v1");
        check("https://host:8443/v1beta/openai", "https://host:8443/v1beta/openai");
        check("http://host:80/v1/chat/completions", "http://host/v1");
        check("https://host:80", "https://host:80/v1");
        check("https://[::1]:443", "https://[::1]/v1");
        check("http://host/a@b", "http://host/a@b");
        let url = |text: &str| text.parse::<EndpointUrl>().expect(text);
        assert!(url("https://a/v1").is_same_server(&url("https://A:443/other")));
        assert!(!url("https://a").is_same_server(&url("http://a")));
    }
}
