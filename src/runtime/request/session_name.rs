//! The name under which an engine knows a session.
//!
//! Invariant: never empty. A name without a slash is a stored session's; one with a slash belongs to a scope,
//! such as an owner, so the two cannot collide. One that begins with a slash has its KV in memory only.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use llmctl_base::error::{Error, Result};

const AHEAD: &str = "computed ahead";

/// Name of a session in an engine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EngineSessionName(String);

impl EngineSessionName {
    /// Validates a name that comes from outside, such as a worker's client.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if it is empty.
    pub fn parse(text: impl Into<String>) -> Result<Self> {
        match text.into() {
            text if text.is_empty() => {
                Err(Error::InvalidParameter { name: "session", message: MUST_NOT_BE_EMPTY.to_owned() })
            }
            text => Ok(Self(text)),
        }
    }

    /// Returns `SCOPE/NAME`, where the scope is an owner or a kind of session that is not stored.
    pub fn scoped(scope: impl Display, name: impl Display) -> Self {
        Self(format!("{scope}/{name}"))
    }

    /// Returns the session in which a prompt is computed ahead. No owner of a key has a name with a space.
    pub fn ahead(prompt: &str) -> Self {
        Self::scoped(AHEAD, prompt)
    }

    /// Returns whether a prompt is computed ahead in it.
    pub fn is_ahead(&self) -> bool {
        self.0.split_once('/').is_some_and(|(scope, _)| scope == AHEAD)
    }

    /// Wraps the text of a name type that is never empty.
    pub(crate) fn of_valid(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// Returns whether its KV stays off the disk, because what is said there is not to be stored.
    pub fn is_memory_only(&self) -> bool {
        self.0.starts_with('/')
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

const MUST_NOT_BE_EMPTY: &str = "must not be empty";

impl Display for EngineSessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<EngineSessionName> for String {
    fn from(name: EngineSessionName) -> Self {
        name.0
    }
}

impl TryFrom<String> for EngineSessionName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        Self::parse(text).map_err(|_| MUST_NOT_BE_EMPTY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::store::SessionName;

    #[test]
    fn a_name_is_not_empty_and_a_scope_keeps_names_apart() {
        assert!(matches!(EngineSessionName::parse(""), Err(Error::InvalidParameter { name: "session", .. })));
        assert!(serde_json::from_str::<EngineSessionName>("\"\"").is_err());
        let stored = EngineSessionName::from(&SessionName::new("trip").expect("valid"));
        assert_eq!(serde_json::to_string(&stored).expect("a string"), "\"trip\"");
        assert_eq!(serde_json::from_str::<EngineSessionName>("\"trip\"").expect("valid"), stored);
        assert_eq!(EngineSessionName::scoped("anna", "trip").as_str(), "anna/trip");
        assert!(SessionName::new("anna/trip").is_err(), "no stored session has a scoped name");
    }
}
