//! Permissions of calls, and the line that shows a call to the user.
//!
//! Invariant: what is shown of a call is what is called; nothing in it can hide on a terminal.

use std::collections::BTreeSet;
use std::str::FromStr;

use super::names::SEPARATOR;

/// Most characters of the arguments that are shown before a call.
const MAX_SHOWN: usize = 4000;

/// `--allow-tool`: a tool, or all tools of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedTool {
    server: String,
    /// The offered name; `None` for all tools of the server.
    tool: Option<String>,
}

impl FromStr for AllowedTool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "neither server__tool nor server__*";
        let (server, tool) = text.split_once(SEPARATOR).ok_or(FORM)?;
        let is_word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        match (server.is_empty() || !is_word(server), tool) {
            (true, _) | (_, "") => Err(FORM.to_owned()),
            (false, "*") => Ok(Self { server: server.to_owned(), tool: None }),
            (false, tool) if is_word(tool) => {
                Ok(Self { server: server.to_owned(), tool: Some(text.to_owned()) })
            }
            (false, _) => Err(FORM.to_owned()),
        }
    }
}

impl AllowedTool {
    fn allows(&self, server: &str, offered: &str) -> bool {
        self.server == server && self.tool.as_ref().is_none_or(|tool| tool == offered)
    }
}

impl std::fmt::Display for AllowedTool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tool {
            Some(tool) => f.write_str(tool),
            None => write!(f, "{}{SEPARATOR}*", self.server),
        }
    }
}

/// Calls that run without asking.
#[derive(Debug, Default)]
pub struct Permissions {
    allowed: Vec<AllowedTool>,
    /// Offered names of tools that the user allowed when asked, for this chat or run.
    always: BTreeSet<String>,
}

impl Permissions {
    pub fn new(allowed: Vec<AllowedTool>) -> Self {
        Self { allowed, always: BTreeSet::new() }
    }

    /// Returns whether a tool runs without asking.
    pub fn allows(&self, server: &str, offered: &str) -> bool {
        self.always.contains(offered) || self.allowed.iter().any(|allowed| allowed.allows(server, offered))
    }

    /// Lets a tool run without asking from now on.
    pub fn allow_always(&mut self, offered: &str) {
        self.always.insert(offered.to_owned());
    }

    /// Takes back what the user allowed when asked, for the tools of a server that is started anew.
    pub fn forget(&mut self, server: &str) {
        self.always.retain(|offered| offered.split_once(SEPARATOR).is_none_or(|(owner, _)| owner != server));
    }

    /// Returns what was allowed beforehand and is none of these tools.
    pub fn without_use(&self, tools: &[(&str, &str)]) -> Vec<String> {
        let is_idle =
            |allowed: &&AllowedTool| !tools.iter().any(|(server, offered)| allowed.allows(server, offered));
        self.allowed.iter().filter(is_idle).map(AllowedTool::to_string).collect()
    }
}

/// A user's answer to the question before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallConsent {
    Once,
    Always,
    No,
}

pub const QUESTION: &str = "call it? y(es), n(o), a(lways this tool, until llmctl ends): ";

impl CallConsent {
    /// Reads an answer; `None` for one that is none of the three, which is asked again.
    pub fn read(answer: &str) -> Option<Self> {
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => Some(Self::Once),
            "a" | "always" => Some(Self::Always),
            "" | "n" | "no" => Some(Self::No),
            _ => None,
        }
    }
}

/// Returns the arguments of a call as they are shown: characters that could hide or reorder text are escaped.
pub fn shown(arguments: &str) -> String {
    let escaped = |c: char| match c {
        ' '..='~' => c.to_string(),
        _ => c.escape_debug().to_string(),
    };
    let text: String = arguments.chars().take(MAX_SHOWN).map(escaped).collect();
    match arguments.chars().count().saturating_sub(MAX_SHOWN) {
        0 => text,
        more => format!("{text}\u{2026} ({more} more characters)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_a_tool_or_a_server() {
        let parse = |text: &str| text.parse::<AllowedTool>();
        let permissions =
            Permissions::new(vec![parse("a__b").expect("a tool"), parse("c__*").expect("a server")]);
        assert!(permissions.allows("a", "a__b") && permissions.allows("c", "c__x__y"));
        assert!(!permissions.allows("a", "a__b_2") && !permissions.allows("a", "a__c"));
        assert!(!permissions.allows("b", "a__b"), "another server's tool");
        assert_eq!(permissions.without_use(&[("a", "a__b"), ("d", "d__x")]), ["c__*"]);
        for wrong in ["*", "a", "a__", "__b", "a*__b", "a__b*", "a__*b", "a b__c", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_allowed_always_is_one_tool_until_its_server_starts_anew() {
        let mut permissions = Permissions::default();
        permissions.allow_always("a__b");
        assert!(permissions.allows("a", "a__b") && !permissions.allows("a", "a__c"));
        permissions.forget("b");
        assert!(permissions.allows("a", "a__b"));
        permissions.forget("a");
        assert!(!permissions.allows("a", "a__b"));
    }

    #[test]
    fn nothing_in_a_call_hides() {
        let hostile = "{\"a\":\"x\u{202e}y\u{200b}\u{9b}31m\u{e0041}\u{e9}\"}";
        assert_eq!(shown(hostile), "{\"a\":\"x\\u{202e}y\\u{200b}\\u{9b}31m\\u{e0041}\u{e9}\"}");
        let long = "x".repeat(MAX_SHOWN + 7);
        assert!(shown(&long).ends_with("(7 more characters)"));
        for (typed, consent) in [
            ("Y", Some(CallConsent::Once)),
            ("a", Some(CallConsent::Always)),
            ("", Some(CallConsent::No)),
            ("yess", None),
        ] {
            assert_eq!(CallConsent::read(typed), consent, "{typed}");
        }
    }
}
