//! Images at http(s) URLs: fetched from named hosts only, under limits of time and size, and never from an address of this machine
//! or its network.
//!
//! Invariants: a name is looked up once, and the connection goes to the address that was checked; redirects are not followed.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use hyper::header::{ACCEPT, HOST, USER_AGENT};
use hyper::{Request, StatusCode};
use tokio::net::lookup_host;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::App;
use crate::wire::Problems;
use crate::wire::image_files::{ImageFetch, ImageReading};
use llmctl_engine::http_engine::{EngineHttp, EngineUrl, ServerSettings};

/// Longest time for an image to arrive.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Hosts that images are fetched from.
#[derive(Debug, Clone, Default)]
pub struct ImageUrls {
    /// In lower case, e.g. `images.example`; with a port if it is not that of https.
    pub hosts: Vec<String>,
    /// Fetches from named hosts of this machine, also without TLS: for tests.
    pub allows_loopback: bool,
}

/// Returns the notes on a body whose fields are read for a model.
pub fn problems(app: &App) -> Problems {
    let refusal = match app.settings().remote {
        true => "the model is behind an engine elsewhere, which takes tokens and no images".to_owned(),
        false => {
            format!("the model {:?} reads no images; choose one that does, or leave them out", app.model().id)
        }
    };
    let urls = &app.settings().image_urls;
    let fetch = (!urls.hosts.is_empty()).then(|| Arc::new(urls.clone()) as Arc<dyn ImageFetch>);
    let reading = ImageReading { is_on: app.reads_images(), refusal, fetch };
    Problems::new(app.settings().lenient).with_images(reading)
}

impl ImageFetch for ImageUrls {
    fn fetch(&self, url: &str, most: usize) -> Result<Vec<u8>, String> {
        let runtime = Handle::try_current().map_err(|_| "there is no connection to fetch it".to_owned())?;
        let fetched = runtime.block_on(timeout(FETCH_TIMEOUT, self.get(url, most)));
        fetched.unwrap_or_else(|_| Err(format!("it did not arrive within {} s", FETCH_TIMEOUT.as_secs())))
    }
}

impl ImageUrls {
    async fn get(&self, url: &str, most: usize) -> Result<Vec<u8>, String> {
        let (server, path) = EngineUrl::with_query(url)?;
        let host = self.named(&server)?;
        let address = self.address(&server).await?;
        let request = Request::get(path)
            .header(HOST, host)
            .header(ACCEPT, "image/*")
            .header(USER_AGENT, concat!("llmctl/", env!("CARGO_PKG_VERSION")))
            .body(String::new())
            .map_err(|error| error.to_string())?;
        let http = EngineHttp::new(server, ServerSettings::default()).at(address);
        let answer = http.request(request).await.map_err(|error| format!("its server: {error}"))?;
        match answer.status {
            StatusCode::OK => answer.bytes(most).await.map_err(|error| format!("its server: {error}")),
            status if status.is_redirection() => {
                Err("its server sends us to another address, which is not followed".to_owned())
            }
            status => Err(format!("its server answers {status}")),
        }
    }

    /// Returns the host as requests name it.
    ///
    /// # Errors
    /// Why this server is not asked.
    fn named(&self, server: &EngineUrl) -> Result<String, String> {
        let usual = if server.is_https { 443 } else { 80 };
        let name = if server.port == usual { server.host.clone() } else { server.authority() };
        if !server.is_https && !self.allows_loopback {
            return Err("images are fetched over https only".to_owned());
        }
        match self.hosts.contains(&name) {
            true => Ok(name),
            false => Err("its host is not one that images are fetched from (serve --image-urls)".to_owned()),
        }
    }

    /// Looks the host up.
    ///
    /// # Errors
    /// Without an address, or with one that is not public.
    async fn address(&self, server: &EngineUrl) -> Result<IpAddr, String> {
        let found = lookup_host((server.host.as_str(), server.port)).await;
        let found = found.map_err(|error| format!("its host has no address: {error}"))?;
        let addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
        let is_allowed = |ip: &IpAddr| is_public(*ip) || self.allows_loopback && ip.is_loopback();
        match addresses.first() {
            None => Err("its host has no address".to_owned()),
            Some(_) if !addresses.iter().all(is_allowed) => {
                Err("its host is an address of this machine or its network".to_owned())
            }
            Some(first) => Ok(*first),
        }
    }
}

/// Returns true for an address that the whole internet can reach: of IPv6 only the range that is given out, without those that stand
/// for IPv4 addresses.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => match ip.segments() {
            // Teredo and 6to4 hold an IPv4 address; the last one is for documentation.
            [0x2001, 0 | 0x0db8, ..] | [0x2002, ..] => false,
            [first, ..] => first & 0xe000 == 0x2000,
        },
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let is_special = ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_documentation();
    // This network, shared by providers, protocols, benchmarks, reserved.
    let is_reserved = matches!(
        ip.octets(),
        [0, ..] | [100, 64..=127, ..] | [192, 0, 0, _] | [198, 18 | 19, ..] | [240..=255, ..]
    );
    !is_special && !is_reserved
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn only_public_addresses_are_asked() {
        for address in ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"] {
            assert!(is_public(address.parse().expect(address)), "{address}");
        }
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.5",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "2001:0:a00::1",
            "2001:db8::1",
        ] {
            assert!(!is_public(address.parse().expect(address)), "{address}");
        }
    }

    /// Answers each request with the next of these texts, and returns its port.
    fn serve(answers: Vec<Vec<u8>>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().expect("a client");
                let mut head = [0; 4096];
                let read = stream.read(&mut head).expect("a request");
                assert!(
                    head[..read].starts_with(b"GET /x.png?a=1 HTTP/1.1"),
                    "{}",
                    String::from_utf8_lossy(&head)
                );
                stream.write_all(&answer).expect("a reader");
            }
        });
        port
    }

    fn answer(status: &str, body: &[u8]) -> Vec<u8> {
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nLocation: http://127.0.0.1/\r\n\r\n",
            body.len()
        );
        [head.as_bytes(), body].concat()
    }

    #[test]
    fn an_image_is_fetched_within_its_limits() {
        let port = serve(vec![
            answer("200 OK", b"\x89PNG"),
            answer("302 Found", b""),
            answer("404 Not Found", b""),
            answer("200 OK", &[0; 101]),
        ]);
        let host = format!("127.0.0.1:{port}");
        let urls = ImageUrls { hosts: vec![host.clone()], allows_loopback: true };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let fetch = |urls: &ImageUrls, url: String| {
            let urls = urls.clone();
            runtime.block_on(runtime.spawn_blocking(move || urls.fetch(&url, 100))).expect("no panic")
        };
        let url = format!("http://{host}/x.png?a=1");
        assert_eq!(fetch(&urls, url.clone()), Ok(b"\x89PNG".to_vec()));
        for reason in ["not followed", "404", "more than"] {
            assert!(fetch(&urls, url.clone()).is_err_and(|why| why.contains(reason)), "{reason}");
        }
        let strict = ImageUrls { allows_loopback: false, ..urls };
        assert!(fetch(&strict, url).is_err_and(|why| why.contains("https only")));
        let secure = format!("https://{host}/x.png");
        assert!(fetch(&strict, secure).is_err_and(|why| why.contains("this machine")), "before a connection");
    }

    #[test]
    fn hosts_are_named_and_reached_over_https() {
        let urls = ImageUrls {
            hosts: vec!["a.example".to_owned(), "b.example:8443".to_owned()],
            allows_loopback: false,
        };
        let named = |url: &str| urls.named(&EngineUrl::with_query(url).expect(url).0);
        assert_eq!(named("https://A.example/x.png"), Ok("a.example".to_owned()));
        assert_eq!(named("https://b.example:8443/x.png"), Ok("b.example:8443".to_owned()));
        for url in [
            "https://c.example/",
            "https://a.example:8443/",
            "https://b.example/",
            "https://a.example.evil.example/",
        ] {
            assert!(named(url).is_err_and(|why| why.contains("--image-urls")), "{url}");
        }
        assert!(named("http://a.example/").is_err_and(|why| why.contains("https only")));
    }
}
