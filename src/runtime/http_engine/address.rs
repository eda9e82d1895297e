//! The address of a remote engine.

use std::fmt;
use std::str::FromStr;

use hyper::Uri;

/// Address of a remote engine, e.g. `http://127.0.0.1:8000`, without `/v1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineUrl {
    /// Without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
    /// Path before `/v1`; empty or beginning with a slash.
    pub base: String,
}

impl EngineUrl {
    /// Returns host and port as URLs write them.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.base)
    }
}

impl FromStr for EngineUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|_| "not an address like http://127.0.0.1:8000".to_owned())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(
                    "https is not supported: give the engine's own port, or a tunnel to it".to_owned()
                );
            }
            _ => return Err("an address begins with http://".to_owned()),
        }
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || uri.query().is_some() {
            return Err("not an address like http://127.0.0.1:8000".to_owned());
        }
        let path = uri.path().trim_end_matches('/');
        let base = path.strip_suffix("/v1").unwrap_or(path);
        Ok(Self { host: host.to_owned(), port: uri.port_u16().unwrap_or(80), base: base.to_owned() })
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
        for (wrong, why) in [
            ("https://gpu-1", "https is not supported"),
            ("gpu-1:8000", "http://"),
            ("http://a/?x=1", "not an address"),
            ("", "not an address"),
        ] {
            let error = wrong.parse::<EngineUrl>().expect_err(wrong);
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
