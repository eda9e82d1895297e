//! The crate's neutral vocabulary for a conversation: roles, messages, tool definitions and calls.
//!
//! Every front door (CLI flags, batch rows, HTTP wire types) converts into these and back by hand; nothing
//! here follows a vendor's schema. A field that is absent stays absent: templates can tell `None` from empty.

use serde::Serialize;
use serde_json::{Value, json};

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

/// The content of a message. Templates for multimodal models iterate parts; text templates want one string. It is written in
/// OpenAI's form.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    Text(String),
    /// Typed parts as the caller gave them, e.g. `{"type": "text", "text": "..."}`.
    Parts(Vec<Value>),
}

impl Content {
    /// Returns it as a list of parts.
    pub fn into_parts(self) -> Vec<Value> {
        match self {
            Content::Text(text) => vec![text_part(&text)],
            Content::Parts(parts) => parts,
        }
    }

    /// Returns its texts, without images.
    pub fn texts(&self) -> Vec<&str> {
        match self {
            Content::Text(text) => vec![text],
            Content::Parts(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Content::Text(text.to_owned())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Content::Text(text)
    }
}

impl From<Vec<Value>> for Content {
    fn from(parts: Vec<Value>) -> Self {
        Content::Parts(parts)
    }
}

/// Returns a part of a text.
pub fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// An image of a message: a part `{"type": "image", "sha256": ..., "width": ..., "height": ..., "media_type": ..., "name": ...}`. The
/// bytes lie elsewhere, under their hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageRef {
    /// SHA-256 of the file's bytes, 64 lower-case hexadecimal digits.
    pub sha256: String,
    pub width: u32,
    pub height: u32,
    pub media_type: String,
    /// Name of the file, for people.
    pub name: Option<String>,
}

impl ImageRef {
    pub fn to_part(&self) -> Value {
        let Self { sha256, width, height, media_type, name } = self;
        let mut part = json!({"type": "image", "sha256": sha256, "width": width, "height": height, "media_type": media_type});
        if let Some(name) = name {
            part["name"] = name.as_str().into();
        }
        part
    }

    /// Reads a part that [`Self::to_part`] wrote; `None` for any other.
    pub fn of(part: &Value) -> Option<Self> {
        let text = |name: &str| part.get(name)?.as_str().map(str::to_owned);
        let side = |name: &str| part.get(name)?.as_u64()?.try_into().ok();
        (part.get("type")? == "image").then_some(())?;
        Some(Self {
            sha256: text("sha256")?,
            width: side("width")?,
            height: side("height")?,
            media_type: text("media_type")?,
            name: text("name"),
        })
    }

    /// Returns the image in words, e.g. `[image: photo.png 640x480]`.
    pub fn tag(&self) -> String {
        let name = self.name.as_deref().unwrap_or(&self.media_type);
        format!("[image: {name} {}x{}]", self.width, self.height)
    }
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
    pub fn new(role: Role, content: impl Into<Content>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    pub fn system(text: impl Into<Content>) -> Self {
        Self::new(Role::System, text)
    }

    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    pub fn assistant(text: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, text)
    }

    /// Returns the images, in the order of the parts.
    pub fn images(&self) -> impl Iterator<Item = ImageRef> {
        let parts = match &self.content {
            Some(Content::Parts(parts)) => parts.as_slice(),
            _ => &[],
        };
        parts.iter().filter_map(ImageRef::of)
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

impl Conversation {
    /// Returns the images of all messages, in their order.
    pub fn images(&self) -> impl Iterator<Item = ImageRef> {
        self.messages.iter().flat_map(Message::images)
    }
}
