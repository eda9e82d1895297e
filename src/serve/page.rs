//! The page for browsers: the files of `assets/page/` within the binary, and the headers that confine them.
//!
//! Invariants: the files need no key and say nothing about this server, which the page asks for with the key
//! of its reader; their policy allows no script, style or connection of another origin, and no markup made
//! from text (trusted types).

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// The files below [`FOLDER`]: name, type and content.
macro_rules! files {
    ($($name:literal: $kind:expr),* $(,)?) => {
        &[$(($name, $kind, include_str!(concat!("../../assets/page/", $name)))),*]
    };
}

const FILES: &[(&str, &str, &str)] = files![
    "icon.svg": "image/svg+xml",
    "style.css": "text/css; charset=utf-8",
    "answer.js": JAVASCRIPT,
    "calls.js": JAVASCRIPT,
    "code.js": JAVASCRIPT,
    "conversation.js": JAVASCRIPT,
    "dom.js": JAVASCRIPT,
    "explain.js": JAVASCRIPT,
    "main.js": JAVASCRIPT,
    "images.js": JAVASCRIPT,
    "markdown.js": JAVASCRIPT,
    "plots.js": JAVASCRIPT,
    "server.js": JAVASCRIPT,
    "sessions.js": JAVASCRIPT,
    "settings.js": JAVASCRIPT,
    "tools.js": JAVASCRIPT,
];

const DOCUMENT: &str = include_str!("../../assets/page/index.html");

/// Path of the files, relative to the document, so that a proxy may strip a prefix.
const FOLDER: &str = "/page/";

/// `require-trusted-types-for` makes a browser refuse text as markup, should the page ever try to.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: [(HeaderName, HeaderValue); 6] = [
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_POLICY)),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
    // Another version of the program may answer at this address next time.
    (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
];

/// Returns whether a request is for the document or one of its files.
pub fn is_meant(method: &Method, path: &str, headers: &HeaderMap) -> bool {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    reads && (path.starts_with(FOLDER) || path == "/" && names_html(headers))
}

/// Returns whether `Accept` names `text/html` with a weight above 0, as browsers do; the order of preference is not looked at.
pub fn names_html(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut ranges = accepts.flat_map(|value| value.split(','));
    ranges.any(|range| {
        let mut parts = range.split(';').map(str::trim);
        let is_html = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("text/html"));
        is_html && !parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}

/// The document.
pub fn document() -> Response {
    (HEADERS, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], DOCUMENT).into_response()
}

/// `GET /page/{file}`.
pub async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some(&(_, kind, text)) => (HEADERS, [(header::CONTENT_TYPE, kind)], text).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_get_the_page_and_programs_do_not() {
        let check = |accept: &str, expected: bool| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_str(accept).expect("a value"));
            assert_eq!(is_meant(&Method::GET, "/", &headers), expected, "{accept}");
            assert!(!is_meant(&Method::POST, "/", &headers), "{accept}");
        };
        check("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", true);
        check("application/json, TEXT/HTML;q=0.1", true);
        check("*/*", false);
        check("text/*", false);
        check("application/json", false);
        check("text/html;q=0, */*", false);
        assert!(!is_meant(&Method::GET, "/", &HeaderMap::new()));
    }
}
