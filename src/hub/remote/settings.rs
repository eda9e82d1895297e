//! Settings of the hub client, which the caller reads from its environment.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use ureq::Proxy;

use super::error::HubError;

/// Connections of one download at the same time.
const DEFAULT_CONNECTIONS: usize = 8;

/// Bytes that one connection requests at a time from a large file.
const DEFAULT_PART_BYTES: u64 = 8 << 20;

/// An access token, which no debug output shows.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl HubToken {
    /// Returns the trimmed token; `None` if nothing is left.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HubToken(..)")
    }
}

/// Proxies by the scheme of the requested address, as curl's variables name them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HubProxies {
    pub https: Option<String>,
    pub http: Option<String>,
    /// Hosts that are reached without a proxy, separated by commas.
    pub except: Option<String>,
}

/// Shows which proxies there are, without their addresses: these may hold passwords.
impl fmt::Debug for HubProxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (https, http) = (self.https.is_some(), self.http.is_some());
        f.debug_struct("HubProxies").field("https", &https).field("http", &http).finish_non_exhaustive()
    }
}

/// Repetition of requests that failed for a passing reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetrySettings {
    /// Attempts without progress before the download fails.
    pub attempts: u32,
    /// The first pause; it doubles with each attempt.
    pub first_pause: Duration,
    /// The longest pause. A server that asks for a longer one ends the download.
    pub longest_pause: Duration,
}

impl Default for RetrySettings {
    fn default() -> Self {
        let (first_pause, longest_pause) = (Duration::from_millis(500), Duration::from_secs(300));
        Self { attempts: 5, first_pause, longest_pause }
    }
}

/// Addresses and settings of downloads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// Address of the hub or of a mirror, without a slash at the end.
    pub endpoint: String,
    pub token: Option<HubToken>,
    pub proxies: HubProxies,
    /// PEM file with the certificate authorities to trust instead of the built-in ones.
    pub ca_file: Option<PathBuf>,
    /// Limit for connecting and for the first byte of an answer.
    pub answer_timeout: Duration,
    /// Limit between two bytes of a body.
    pub read_timeout: Duration,
    pub connections: usize,
    pub part_bytes: u64,
    pub retry: RetrySettings,
}

impl Default for HubSettings {
    fn default() -> Self {
        Self {
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            proxies: HubProxies::default(),
            ca_file: None,
            answer_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(10),
            connections: DEFAULT_CONNECTIONS,
            part_bytes: DEFAULT_PART_BYTES,
            retry: RetrySettings::default(),
        }
    }
}

impl HubProxies {
    /// Parses the proxy for addresses of a scheme; `None` if there is none. Networks among the exceptions (`127.0.0.0/8`) count
    /// for `host`, the endpoint's.
    ///
    /// # Errors
    /// [`HubError::Setting`] for an address that is no proxy's. The message leaves it out, because it may hold a
    /// password.
    pub(super) fn proxy(&self, is_https: bool, host: &str) -> Result<Option<Proxy>, HubError> {
        let (name, address) =
            if is_https { ("HTTPS_PROXY", &self.https) } else { ("HTTP_PROXY", &self.http) };
        let Some(address) = address else { return Ok(None) };
        let invalid = |_| HubError::Setting { name, message: "is not the address of a proxy".to_owned() };
        let parsed = Proxy::new(address).map_err(invalid)?;
        let mut builder = Proxy::builder(parsed.protocol()).host(parsed.host()).port(parsed.port());
        if let Some(user) = parsed.username() {
            builder = builder.username(user);
        }
        if let Some(password) = parsed.password() {
            builder = builder.password(password);
        }
        let hosts = self.except.iter().flat_map(|list| list.split(',')).map(str::trim);
        let endpoint = host;
        for host in hosts.filter(|host| !host.is_empty()) {
            if is_in_network(endpoint, host) {
                builder = builder.no_proxy(endpoint);
                continue;
            }
            builder = builder.no_proxy(host);
            // As in curl, a name stands for its subdomains too.
            if !host.starts_with(['.', '*']) {
                builder = builder.no_proxy(&format!(".{host}"));
            }
        }
        builder.build().map(Some).map_err(invalid)
    }
}

/// Returns whether a host is an address of a network such as `127.0.0.0/8`.
fn is_in_network(host: &str, network: &str) -> bool {
    let Some((address, bits)) = network.split_once('/') else { return false };
    let host = host.trim_start_matches('[').trim_end_matches(']').parse();
    match (host, address.parse(), bits.parse()) {
        (Ok(IpAddr::V4(host)), Ok(IpAddr::V4(address)), Ok(bits @ 0..=32)) => {
            (host.to_bits() ^ address.to_bits()).checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (Ok(IpAddr::V6(host)), Ok(IpAddr::V6(address)), Ok(bits @ 0..=128)) => {
            (host.to_bits() ^ address.to_bits()).checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_an_excepted_network_are_reached_without_the_proxy() {
        let goes_direct = |except: &str, host: &str| {
            let (http, except) = (Some("http://proxy:1".to_owned()), Some(except.to_owned()));
            let proxies = HubProxies { http, except, ..HubProxies::default() };
            let proxy = proxies.proxy(false, host).expect("a proxy").expect("a proxy");
            proxy.is_no_proxy(&format!("http://{host}:8/x").parse().expect("an address"))
        };
        for (except, host, expected) in [
            ("localhost,127.0.0.0/8,::1", "127.0.0.1", true),
            ("127.0.0.0/8", "128.0.0.1", false),
            ("10.1.0.0/16", "10.1.2.3", true),
            ("10.1.0.0/16", "10.2.2.3", false),
            ("0.0.0.0/0", "10.2.2.3", true),
            ("fd00::/8", "[fd00::1]", true),
            ("127.0.0.0/8", "localhost", false),
            ("127.0.0.0/40", "127.0.0.1", false),
        ] {
            assert_eq!(goes_direct(except, host), expected, "{except} {host}");
        }
    }
}
