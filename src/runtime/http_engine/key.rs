//! The API key of a server.
//!
//! Invariant: neither debug output nor an error message shows it.

use std::fmt;

use hyper::header::HeaderValue;

/// An API key, sent as a bearer token.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerKey(String);

impl ServerKey {
    /// Takes a text without the white space around it.
    ///
    /// # Errors
    /// Why it is no key; the message does not repeat it.
    pub fn new(text: &str) -> Result<Self, &'static str> {
        let text = text.trim();
        match text.bytes().all(|byte| byte.is_ascii_graphic()) {
            _ if text.is_empty() => Err("is empty"),
            true => Ok(Self(text.to_owned())),
            false => Err("holds blanks, line ends or characters that no key has"),
        }
    }

    /// Returns the value of the header `Authorization`.
    pub(super) fn header(&self) -> HeaderValue {
        let value = HeaderValue::try_from(format!("Bearer {}", self.0)).ok();
        let mut value = value.unwrap_or(HeaderValue::from_static("")); // visible ASCII is always a value
        value.set_sensitive(true);
        value
    }

    /// Returns a server's text without the key, which some repeat in their messages.
    pub fn hidden_in(&self, text: &str) -> String {
        text.replace(&self.0, "***")
    }
}

impl fmt::Debug for ServerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_shown_nowhere() {
        let key = ServerKey::new(" sk-secret\n").expect("a key");
        assert!(!format!("{key:?}{:?}", key.header()).contains("secret"));
        assert_eq!(key.hidden_in("wrong key: sk-secret!"), "wrong key: ***!");
        assert_eq!(key.header(), "Bearer sk-secret");
        for wrong in ["", " \n", "a b", "a\nb", "schlüssel"] {
            let why = ServerKey::new(wrong).expect_err(wrong);
            assert!(why.len() < 80, "{why}");
        }
    }
}
