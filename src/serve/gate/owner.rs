//! Owners of sessions, and the lines of a key file, which assign keys to owners.
//!
//! Invariants: two keys share sessions only if the file gives them the same owner; an owner is the same after
//! a restart, as long as the key, or the owner's name, is. The name of an owner does not reveal a key.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts};
use axum::http::request::Parts;
use sha2::{Digest, Sha256};

use crate::App;

/// Prefix of the owner of a key without a named owner; names in a key file cannot begin with it.
const OF_KEY: &str = "key-";

/// The owner of requests to a server without keys; a key file cannot use this name.
const ANONYMOUS: &str = "anonymous";

const MAX_OWNER_BYTES: usize = 64;

/// The owner of a session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(Option<Arc<str>>);

impl Owner {
    /// Returns the local user, who owns the sessions of `run` and `chat`.
    pub const LOCAL: Self = Self(None);

    /// Returns the owner of all requests to a server without keys.
    pub fn anonymous() -> Self {
        Self(Some(ANONYMOUS.into()))
    }

    /// Returns the name in the file of a session.
    pub fn stored(&self) -> Option<&str> {
        self.0.as_deref()
    }

    fn of_key(key: &str) -> Self {
        let digest = Sha256::digest(key.as_bytes());
        let hex: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Self(Some(format!("{OF_KEY}{hex}").into()))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.stored().unwrap_or_default())
    }
}

/// The owners whose sessions a request sees: first its own, whose new sessions it creates, then the local user if shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    owner: Owner,
    also: Option<Owner>,
}

impl Caller {
    /// With `shares_local`, all callers see the sessions of the local user, and requests without keys are that user.
    pub fn new(owner: Owner, shares_local: bool) -> Self {
        match (shares_local, owner == Owner::anonymous()) {
            (false, _) => Self { owner, also: None },
            (true, false) => Self { owner, also: Some(Owner::LOCAL) },
            (true, true) => Self { owner: Owner::LOCAL, also: Some(owner) },
        }
    }

    /// Returns the owner of new sessions.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Returns all owners whose sessions the request sees, in order.
    pub fn owners(&self) -> impl Iterator<Item = &Owner> {
        [Some(&self.owner), self.also.as_ref()].into_iter().flatten()
    }
}

/// Set by the guard; without one, requests are anonymous.
impl<S: Sync> FromRequestParts<S> for Caller
where
    SharesSessions: FromRef<S>,
{
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Infallible> {
        let owner = parts.extensions.get::<Owner>().cloned().unwrap_or_else(Owner::anonymous);
        let SharesSessions(shares_local) = SharesSessions::from_ref(state);
        Ok(Self::new(owner, shares_local))
    }
}

/// True if all callers see the sessions of the local user.
pub struct SharesSessions(pub bool);

impl FromRef<App> for SharesSessions {
    fn from_ref(app: &App) -> Self {
        Self(app.settings().share_sessions)
    }
}

/// A key and its owner.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyLine {
    pub key: String,
    pub owner: Owner,
}

impl fmt::Debug for KeyLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyLine").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl KeyLine {
    /// Parses `KEY [owner=NAME] [# comment]`; `None` for a blank line or a comment.
    ///
    /// # Errors
    /// Error of the line, without the key.
    pub fn parse(line: &str) -> Result<Option<Self>, String> {
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(key) = words.next() else { return Ok(None) };
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("the key has characters that no header can carry".to_owned());
        }
        let owner = words.next().map(owner_word).transpose()?;
        if words.next().is_some() {
            return Err("too many words; a line is KEY [owner=NAME] [# comment]".to_owned());
        }
        let owner = owner.unwrap_or_else(|| Owner::of_key(key));
        Ok(Some(Self { key: key.to_owned(), owner }))
    }
}

fn owner_word(word: &str) -> Result<Owner, String> {
    let Some(name) = word.strip_prefix("owner=") else {
        return Err("unexpected word after the key; a line is KEY [owner=NAME] [# comment]".to_owned());
    };
    let is_name = !name.is_empty()
        && name.len() <= MAX_OWNER_BYTES
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte));
    match name {
        _ if !is_name => Err(format!(
            "owner {name:?}: a name is 1 to {MAX_OWNER_BYTES} letters, digits and any of - _ . @"
        )),
        ANONYMOUS => Err(format!("owner {name:?}: reserved for requests without a key")),
        _ if name.starts_with(OF_KEY) => Err(format!("owner {name:?}: names in {OF_KEY:?} are reserved")),
        _ => Ok(Owner(Some(name.into()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(line: &str) -> Result<Option<(String, String)>, String> {
        let line = KeyLine::parse(line)?;
        Ok(line.map(|line| (line.key, line.owner.to_string())))
    }

    #[test]
    fn a_line_holds_a_key_an_owner_and_a_comment() {
        let check = |line: &str, key: &str, name: &str| {
            assert_eq!(owner(line), Ok(Some((key.to_owned(), name.to_owned()))), "{line:?}");
        };
        check("sk-1 owner=anna", "sk-1", "anna");
        check("  sk-1\towner=anna.b@c  # of Anna\r", "sk-1", "anna.b@c");
        check("sk-1 #owner=anna", "sk-1", "key-0f2c10bf3d128c71");
        check("sk#1 # a key may have a # within", "sk#1", "key-8977b33b0dad68bb");
        for nothing in ["", "   ", "# sk-1", "  #"] {
            assert_eq!(owner(nothing), Ok(None), "{nothing:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said_without_its_key() {
        for (line, expected) in [
            ("sk-1 anna", "unexpected word"),
            ("sk-1 owner=", "a name is 1 to 64"),
            ("sk-1 owner=a/b", "a name is 1 to 64"),
            ("sk-1 owner=anonymous", "reserved"),
            ("sk-1 owner=key-1", "reserved"),
            ("sk-1 owner=a owner=b", "too many words"),
            ("sk-\u{e9}", "no header can carry"),
        ] {
            let message = owner(line).expect_err(line);
            assert!(message.contains(expected) && !message.contains("sk-"), "{line:?}: {message}");
        }
    }

    #[test]
    fn local_sessions_are_shared_only_where_that_is_asked_for() {
        let anna = KeyLine::parse("k owner=anna").expect("a line").expect("a key").owner;
        let sees =
            |owner: &Owner, shares| Caller::new(owner.clone(), shares).owners().cloned().collect::<Vec<_>>();
        assert_eq!(sees(&anna, false), std::slice::from_ref(&anna));
        assert_eq!(sees(&Owner::anonymous(), false), [Owner::anonymous()]);
        assert_eq!(sees(&anna, true), [anna, Owner::LOCAL]);
        assert_eq!(sees(&Owner::anonymous(), true), [Owner::LOCAL, Owner::anonymous()]);
    }

    #[test]
    fn keys_without_an_owner_share_nothing_and_keep_theirs() {
        let of = |key: &str| KeyLine::parse(key).expect("a line").expect("a key").owner;
        assert_eq!(of("sk-1"), of("sk-1 # again"));
        assert_ne!(of("sk-1"), of("sk-2"));
        assert_ne!(of("sk-1"), Owner::LOCAL);
    }
}
