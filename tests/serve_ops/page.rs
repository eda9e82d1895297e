//! The page for browsers: who gets it, and what its headers keep away. `tests/page/browser.py` looks at it in a browser.

use std::fs;

use llmctl_serve::gate::policy::{Hosts, Policy};

use super::app::{Options, Site, address, loading};
use super::client::{Reply, ask, connect};
use super::{keys_of, with_policy};
use crate::common::prelude::*;

const BROWSER: &str = "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";

fn browse(site: &Site, path: &str) -> Reply {
    ask(site.address(), &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{BROWSER}"), "")
}

#[test]
fn a_browser_gets_the_page_and_programs_what_they_know() {
    let site = Site::new(Options::default());
    let page = browse(&site, "/");
    assert_eq!((page.status, page.header("content-type")), (200, "text/html; charset=utf-8"));
    assert!(page.body.starts_with("<!doctype html>"), "{page:?}");
    for accept in ["", "\r\nAccept: */*", "\r\nAccept: application/json"] {
        let reply = ask(site.address(), &format!("GET / HTTP/1.1\r\nHost: localhost{accept}"), "");
        assert_eq!((&reply.json()["name"], reply.header("vary")), (&"llmctl".into(), "Accept"), "{accept}");
        let index = reply.json();
        assert_eq!((&index["shares_sessions"], &index["remote_engine"]), (&false.into(), &false.into()));
    }
    assert_eq!(page.header("vary"), "Accept");
    let mut head = connect(site.address());
    head.send(&format!("HEAD / HTTP/1.1\r\nHost: localhost\r\n{BROWSER}\r\n\r\n"));
    assert_eq!(head.head().header("content-type"), "text/html; charset=utf-8");
    // The page waits for the model by itself.
    let server = loading(Options::default());
    let early = ask(address(&server), &format!("GET / HTTP/1.1\r\nHost: localhost\r\n{BROWSER}"), "");
    assert_eq!(early.body, page.body);
}

/// The files of `assets/page/`, with their texts.
fn files() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/page");
    let entries =
        fs::read_dir(&folder).expect("the page's folder").map(|entry| entry.expect("an entry").path());
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    entries.map(|path| (name(&path), fs::read_to_string(&path).expect("a text"))).collect()
}

#[test]
fn every_file_of_the_page_is_in_the_binary_and_confined() {
    let site = Site::new(Options::default());
    for (name, text) in files() {
        let path = if name == "index.html" { "/".to_owned() } else { format!("/page/{name}") };
        let file = browse(&site, &path);
        assert_eq!((file.status, &file.body), (200, &text), "{path}");
        let policy = file.header("content-security-policy");
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"), "{policy}");
        assert_eq!(file.header("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(file.header("referrer-policy"), "no-referrer", "{path}");
        assert_eq!(file.header("cache-control"), "no-cache", "{path}");
    }
    for (path, kind) in
        [("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")]
    {
        assert!(browse(&site, &format!("/page/{path}")).header("content-type").starts_with(kind), "{path}");
    }
    for absent in ["/page/none.js", "/page/index.html", "/page/..%2fCargo.toml", "/page/main.js/x"] {
        browse(&site, absent).check(404, "unknown_url");
    }
}

#[test]
fn the_files_use_each_other_and_nothing_else() {
    let files = files();
    let named = files.iter().flat_map(|(name, text)| {
        let before = if name == "index.html" { "=\"page/" } else { "from \"./" };
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next())
    });
    let named: BTreeSet<&str> = named.chain(["index.html"]).collect();
    let there: BTreeSet<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(named, there);
}

#[test]
fn no_file_makes_markup_of_text_or_names_another_origin() {
    let markup =
        ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser"];
    let inline = [" style=", " onclick", " onload", "<style", "javascript:"];
    for (name, text) in files() {
        for forbidden in markup.iter().chain(if name == "index.html" { &inline[..] } else { &inline[..0] }) {
            assert!(!text.contains(*forbidden), "{name}: {forbidden}");
        }
        let addresses = text.replace("http://www.w3.org/", "");
        assert!(!addresses.contains("://"), "{name} names an address");
    }
}

#[test]
fn the_page_needs_no_key_and_what_it_asks_for_does() {
    let site = with_policy(Policy { keys: keys_of(&["sk-one"]), ..Policy::default() });
    for path in ["/", "/page/main.js", "/page/style.css"] {
        assert_eq!(browse(&site, path).status, 200, "{path}");
    }
    for path in ["/metrics", "/v1/sessions", "/echo"] {
        browse(&site, path).check(401, "invalid_api_key");
    }
    ask(site.address(), "GET / HTTP/1.1\r\nHost: localhost", "").check(401, "invalid_api_key");
    let post = format!("POST / HTTP/1.1\r\nHost: localhost\r\n{BROWSER}");
    ask(site.address(), &post, "x").check(401, "invalid_api_key");
}

#[test]
fn a_foreign_name_gets_no_page() {
    let hosts = Hosts { names: vec!["llm.example".to_owned()] };
    let site = with_policy(Policy { hosts, ..Policy::default() });
    let page = |host: &str| ask(site.address(), &format!("GET / HTTP/1.1\r\nHost: {host}\r\n{BROWSER}"), "");
    assert_eq!(page("llm.example").status, 200);
    page("evil.example").check(403, "host_not_allowed");
}

#[test]
fn the_page_can_be_turned_off() {
    let site = with_policy(Policy { page: false, ..Policy::default() });
    assert_eq!(browse(&site, "/").json()["name"], "llmctl");
    browse(&site, "/page/main.js").check(404, "unknown_url");
    let keys = with_policy(Policy { page: false, keys: keys_of(&["sk-one"]), ..Policy::default() });
    browse(&keys, "/").check(401, "invalid_api_key");
    browse(&keys, "/page/main.js").check(401, "invalid_api_key");
}
