//! `sessions export`: a conversation for other programs and for people, without what only llmctl needs.

use clap::ValueEnum;
use serde_json::{Value, json};

use super::show::{message_json, message_text};
use crate::cli::error::{CommandError, Exit};
use crate::cli::terminal::report::{print, print_json};
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_template::{Message, Role};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// For reading: a heading per message
    #[default]
    Markdown,
    /// `{"messages": [...]}`, as /v1/chat/completions takes them
    Json,
}

/// Writes the conversation to stdout.
///
/// # Errors
/// Those of stdout.
pub fn run(name: &SessionName, saved: &SavedSession, format: ExportFormat) -> Result<Exit, CommandError> {
    match format {
        ExportFormat::Markdown => print(&markdown(name, saved)),
        ExportFormat::Json => {
            let messages: Vec<Value> = saved.messages().map(message_json).collect();
            print_json(&json!({"model": saved.model.name, "messages": messages}))
        }
    }
}

fn markdown(name: &SessionName, saved: &SavedSession) -> String {
    let mut text = format!("# {name}\n");
    for message in saved.messages() {
        text.push_str(&format!("\n## {}\n\n{}\n", heading(message), message_text(message).trim_end()));
    }
    text
}

fn heading(message: &Message) -> &str {
    match &message.role {
        Role::User => "User",
        Role::Assistant => "Assistant",
        Role::System | Role::Developer => "System",
        role => role.as_str(),
    }
}
