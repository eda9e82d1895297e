//! `sessions export`: a conversation for other programs and for people, without what only llmctl needs.

use clap::ValueEnum;
use serde_json::{Value, json};

use super::show::{message_json, message_text};
use crate::cli::error::{CommandError, Exit};
use crate::cli::images::url_part;
use crate::cli::terminal::report::{print, print_json};
use llmctl_engine::session::store::{Blobs, SavedSession, SessionName};
use llmctl_image::ImageHash;
use llmctl_template::{ImageRef, Message, Role};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// For reading: a heading per message
    #[default]
    Markdown,
    /// `{"messages": [...]}`, as /v1/chat/completions takes them
    Json,
}

/// Writes the conversation to stdout, with the bytes of its images in JSON.
///
/// # Errors
/// Those of stdout; an image that cannot be read.
pub fn run(name: &SessionName, saved: &SavedSession, format: ExportFormat) -> Result<Exit, CommandError> {
    match format {
        ExportFormat::Markdown => print(&markdown(name, saved)),
        ExportFormat::Json => {
            print_json(&json!({"model": saved.model.name, "messages": whole_messages(saved)?}))
        }
    }
}

/// Returns the messages as /v1/chat/completions takes them.
///
/// # Errors
/// An image that cannot be read.
pub fn whole_messages(saved: &SavedSession) -> Result<Vec<Value>, CommandError> {
    let mut messages: Vec<Value> = saved.messages().map(message_json).collect();
    messages.iter_mut().try_for_each(|message| put_images(message, &saved.blobs))?;
    Ok(messages)
}

/// Puts the bytes of images where the message names them.
///
/// # Errors
/// An image that cannot be read.
pub fn put_images(message: &mut Value, blobs: &Blobs) -> Result<(), CommandError> {
    let parts = message.get_mut("content").and_then(Value::as_array_mut);
    for part in parts.into_iter().flatten() {
        let Some(image) = ImageRef::of(part) else { continue };
        let lost =
            |reason: String| CommandError::bad_data(format!("{} cannot be read: {reason}", image.tag()));
        let hash =
            ImageHash::from_hex(&image.sha256).ok_or_else(|| lost("its name is no SHA-256".to_owned()))?;
        *part = url_part(&image.media_type, &blobs.read(&hash).map_err(lost)?);
    }
    Ok(())
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
