//! Permissions of calls, and the line that shows a call to the user.
//!
//! Invariant: what is shown of a call is what is called; nothing in it can hide on a terminal.

use std::collections::BTreeSet;
use std::str::FromStr;

use super::connection::ServerTool;
use super::names::SEPARATOR;
use crate::cli::error::CommandError;

/// Most characters of the arguments that are shown before a call.
const MAX_SHOWN: usize = 4000;

/// `--allow-tool`: a tool, or all tools of a server. The tool has the server's own name: an offered name may get a number, which says
/// nothing but its place in the server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedTool {
    server: String,
    /// `None` for all tools of the server.
    tool: Option<String>,
}

impl FromStr for AllowedTool {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "neither server__tool nor server__*";
        let (server, tool) = text.split_once(SEPARATOR).ok_or(FORM)?;
        let is_word = |text: &str, others: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
        };
        let tool = Some(tool.to_owned()).filter(|tool| tool != "*");
        let is_name = tool.as_ref().is_none_or(|tool| is_word(tool, "_-./"));
        match is_word(server, "_-") && is_name {
            true => Ok(Self { server: server.to_owned(), tool }),
            false => Err(FORM.to_owned()),
        }
    }
}

impl AllowedTool {
    /// Returns the pattern for a tool. One whose name would need quotes in a shell is allowed with its server.
    pub fn of(server: &str, tool: &ServerTool) -> Self {
        let alone = format!("{server}{SEPARATOR}{}", tool.name).parse();
        alone.unwrap_or(Self { server: server.to_owned(), tool: None })
    }

    fn allows(&self, server: &str, tool: &ServerTool) -> bool {
        self.server == server && self.tool.as_ref().is_none_or(|name| *name == tool.name)
    }
}

impl std::fmt::Display for AllowedTool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tool {
            Some(tool) => write!(f, "{}{SEPARATOR}{tool}", self.server),
            None => write!(f, "{}{SEPARATOR}*", self.server),
        }
    }
}

/// Calls that run without asking.
#[derive(Debug, Default)]
pub struct Permissions {
    allowed: Vec<AllowedTool>,
    /// Servers and their own names of tools that the user allowed when asked, for this chat or run.
    always: BTreeSet<(String, String)>,
}

impl Permissions {
    pub fn new(allowed: Vec<AllowedTool>) -> Self {
        Self { allowed, always: BTreeSet::new() }
    }

    /// Returns whether a tool runs without asking.
    pub fn allows(&self, server: &str, tool: &ServerTool) -> bool {
        let is_always = self.always.contains(&(server.to_owned(), tool.name.clone()));
        is_always || self.allowed.iter().any(|allowed| allowed.allows(server, tool))
    }

    /// Lets a tool run without asking from now on.
    pub fn allow_always(&mut self, server: &str, tool: &ServerTool) {
        self.always.insert((server.to_owned(), tool.name.clone()));
    }

    /// Takes back what the user allowed when asked, for the tools of a server that starts anew or changes them.
    pub fn forget(&mut self, server: &str) {
        self.always.retain(|(owner, _)| owner != server);
    }

    /// Returns what was allowed beforehand and is none of these tools.
    pub fn without_use(&self, tools: &[(&str, ServerTool)]) -> Vec<String> {
        let is_idle =
            |allowed: &&AllowedTool| !tools.iter().any(|(server, tool)| allowed.allows(server, tool));
        self.allowed.iter().filter(is_idle).map(AllowedTool::to_string).collect()
    }
}

/// Asks the user; `None` without a terminal to ask on.
pub type AskUser<'a> = &'a mut dyn FnMut(&str) -> Result<Option<String>, CommandError>;

/// A user's answer to the question before a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallConsent {
    Once,
    Always,
    No,
}

pub const QUESTION: &str = "call it? y(es), n(o), a(lways this tool, until llmctl ends): ";

impl CallConsent {
    /// Asks until the answer is one; `None` without a terminal to ask on.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn ask(question: &str, ask: AskUser<'_>) -> Result<Option<Self>, CommandError> {
        while let Some(answer) = ask(question)? {
            if let Some(consent) = Self::read(&answer) {
                return Ok(Some(consent));
            }
        }
        Ok(None)
    }

    /// Returns whether the call may be made.
    pub fn is_given(self) -> bool {
        self != Self::No
    }

    /// Reads an answer; `None` for one that is none of the three, which is asked again.
    fn read(answer: &str) -> Option<Self> {
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

    fn tool(name: &str) -> ServerTool {
        let (offered, name, description) = (String::new(), name.to_owned(), String::new());
        ServerTool { offered, name, description, parameters: serde_json::Value::Null }
    }

    #[test]
    fn a_pattern_names_a_tool_or_a_server() {
        let parse = |text: &str| text.parse::<AllowedTool>();
        let permissions =
            Permissions::new(vec![parse("a__b").expect("a tool"), parse("c__*").expect("a server")]);
        assert!(permissions.allows("a", &tool("b")) && permissions.allows("c", &tool("x__y")));
        assert!(!permissions.allows("a", &tool("b_2")) && !permissions.allows("a", &tool("c")));
        assert!(!permissions.allows("b", &tool("b")), "another server's tool");
        assert_eq!(permissions.without_use(&[("a", tool("b")), ("d", tool("x"))]), ["c__*"]);
        for wrong in ["*", "a", "a__", "__b", "a*__b", "a__b*", "a__*b", "a b__c", "a.b__c", "a__b;c", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        for (name, pattern) in [("b.c/d", "a__b.c/d"), ("$(b)", "a__*"), ("", "a__*")] {
            let allowed = AllowedTool::of("a", &tool(name));
            assert_eq!(allowed.to_string(), pattern);
            assert!(Permissions::new(vec![allowed]).allows("a", &tool(name)), "{name}");
        }
    }

    #[test]
    fn a_name_that_another_tool_gets_carries_no_permission() {
        let offered = |own: &'static str, others: &[&'static str]| {
            let names: Vec<&str> = others.iter().copied().chain([own]).collect();
            let offered = crate::cli::mcp::names::offered_names("s", names);
            ServerTool { offered: offered.last().expect("the own one").clone(), ..tool(own) }
        };
        let mut permissions = Permissions::new(vec!["s__a.b".parse().expect("a tool")]);
        permissions.allow_always("s", &offered("a b", &["a.b"]));
        let other = offered("a/b", &["a.b"]);
        assert_eq!(other.offered, "s__a_b_2", "as \"a b\" was");
        assert!(!permissions.allows("s", &other));
        assert!(permissions.allows("s", &offered("a.b", &["a/b"])), "whatever its number");
    }

    #[test]
    fn what_is_allowed_always_is_one_tool_until_its_server_starts_anew() {
        let mut permissions = Permissions::default();
        permissions.allow_always("a", &tool("b"));
        assert!(permissions.allows("a", &tool("b")) && !permissions.allows("a", &tool("c")));
        permissions.forget("b");
        assert!(permissions.allows("a", &tool("b")));
        permissions.forget("a");
        assert!(!permissions.allows("a", &tool("b")));
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
