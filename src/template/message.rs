//! The crate's neutral vocabulary for a conversation: roles, messages, tool definitions and calls.
//!
//! Every front door (CLI flags, batch rows, HTTP wire types) converts into these and back by hand; nothing
//! here follows a vendor's schema. A field that is absent stays absent: templates can tell `None` from empty.

use serde_json::Value;

/// The author of a message. Templates see the lower-case name; a role they do not know is their error to raise.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Other(String),
}

impl Role {
    pub fn as_str(&self) -> &str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
            Role::Other(name) => name,
        }
    }
}

impl From<&str> for Role {
    fn from(name: &str) -> Self {
        match name {
            "system" => Role::System,
            "developer" => Role::Developer,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            other => Role::Other(other.to_owned()),
        }
    }
}

/// The content of a message. Templates for multimodal models iterate parts; text templates want one string.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    Text(String),
    /// Typed parts as the caller gave them, e.g. `{"type": "text", "text": "..."}`.
    Parts(Vec<Value>),
}

/// One call of a tool by the assistant.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub id: Option<String>,
    pub name: String,
    /// Usually an object; whatever a client sends. Templates see an object (`arrange`).
    pub arguments: Value,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    pub role: Role,
    pub content: Option<Content>,
    /// Reasoning that the assistant produced before its answer; seen by templates as `reasoning_content`.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    pub tool_call_id: Option<String>,
    pub name: Option<String>,
}

impl Message {
    pub fn new(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(Content::Text(text.into())),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    pub fn system(text: impl Into<String>) -> Self {
        Self::new(Role::System, text)
    }

    pub fn user(text: impl Into<String>) -> Self {
        Self::new(Role::User, text)
    }

    pub fn assistant(text: impl Into<String>) -> Self {
        Self::new(Role::Assistant, text)
    }
}

/// A conversation with all that a chat template may read.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// Tool definitions in OpenAI's form `{"type": "function", "function": {...}}`, passed to the template as they are.
    pub tools: Vec<Value>,
    /// Documents for retrieval templates, passed as they are.
    pub documents: Vec<Value>,
    /// Extra template variables, e.g. `enable_thinking`.
    pub kwargs: serde_json::Map<String, Value>,
}
