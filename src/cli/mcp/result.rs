//! The result of a call as text for the model.
//!
//! Invariants: what is left out or cut is named in the text; the text is bounded.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::cli::images::GivenImage;
use crate::cli::terminal::report::bytes;

/// Most bytes of a result that the model gets.
pub const MAX_TEXT: usize = 64 << 10;

const UNKNOWN: &str = "content of a kind that llmctl does not know: left out";

/// A result as the model gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultText {
    pub text: String,
    /// The tool says that it failed.
    pub is_error: bool,
    /// Names the parts that were cut or left out, for the user.
    pub notes: Vec<String>,
    /// Images: what stands for each in `text`, without its brackets, and its bytes in base64.
    images: Vec<(String, String)>,
}

impl ResultText {
    /// Takes out the images, for a model that reads them, each with what stands for it in `text`. One that is damaged stays
    /// left out.
    pub fn take_images(&mut self) -> Vec<(String, GivenImage)> {
        let mut taken = Vec::new();
        for (note, data) in std::mem::take(&mut self.images) {
            let read = STANDARD.decode(&data).map_err(|error| error.to_string());
            match read.and_then(|bytes| GivenImage::of(bytes, None).map_err(|error| error.to_string())) {
                Ok(given) => {
                    let at = self.notes.iter().position(|other| *other == note);
                    if let Some(at) = at {
                        self.notes.remove(at);
                    }
                    taken.push((format!("[{note}]"), given));
                }
                Err(why) => self.notes.push(why),
            }
        }
        taken
    }
}

/// Returns the text of a result.
pub fn text_of(result: &CallToolResult) -> ResultText {
    let mut notes = Vec::new();
    let mut parts: Vec<String> = Vec::new();
    let (mut has_text, mut images) = (false, Vec::new());
    for block in &result.content {
        match readable(block) {
            Ok(text) => {
                has_text = true;
                parts.push(text);
            }
            Err(left_out) => {
                parts.push(format!("[{left_out}]"));
                if let ContentBlock::Image(image) = block {
                    images.push((left_out.clone(), image.data.clone()));
                }
                notes.push(left_out);
            }
        }
    }
    // A server repeats structured content as text for clients that know text only.
    if let Some(structured) = result.structured_content.as_ref().filter(|_| !has_text) {
        parts.push(structured.to_string());
    }
    let text = cut(parts.join("\n"), &mut notes);
    ResultText { text, is_error: result.is_error == Some(true), notes, images }
}

/// Returns the text of a result in JSON.
///
/// # Errors
/// The fault, if the answer holds no result.
pub fn parse_result(json: &[u8]) -> serde_json::Result<ResultText> {
    serde_json::from_slice(json).map(|result| text_of(&result))
}

/// Returns the text of a block, or what it is that cannot be read.
fn readable(block: &ContentBlock) -> Result<String, String> {
    let left_out = |kind: &str, base64: &str, what: &str| {
        let size = bytes((base64.len() as u64) / 4 * 3);
        Err(format!("{kind}, {size}: left out; {what}"))
    };
    match block {
        ContentBlock::Text(text) => Ok(text.text.clone()),
        ContentBlock::Image(image) => left_out(&image.mime_type, &image.data, "the model reads no images"),
        ContentBlock::Audio(audio) => left_out(&audio.mime_type, &audio.data, "llmctl cannot read audio"),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { uri, text, .. } => Ok(format!("{uri}:\n{text}")),
            ResourceContents::BlobResourceContents { uri, mime_type, blob, .. } => {
                let kind = mime_type.as_deref().unwrap_or("a file");
                left_out(&format!("{uri}, {kind}"), blob, "llmctl cannot read binary resources")
            }
            _ => Err(UNKNOWN.to_owned()),
        },
        ContentBlock::ResourceLink(link) => {
            Err(format!("{}: a link; llmctl does not read resources", link.uri))
        }
        _ => Err(UNKNOWN.to_owned()),
    }
}

/// Cuts a text that is too long, and says so at its end.
fn cut(text: String, notes: &mut Vec<String>) -> String {
    if text.len() <= MAX_TEXT {
        return text;
    }
    let end = (0..=MAX_TEXT).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let note = format!("cut: {} of {} left out", bytes((text.len() - end) as u64), bytes(text.len() as u64));
    let whole = format!("{}\n[{note}]", &text[..end]);
    notes.push(note);
    whole
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn text(result: Value) -> ResultText {
        parse_result(result.to_string().as_bytes()).expect("a result")
    }

    #[test]
    fn texts_are_joined_and_everything_else_is_named() {
        let result = text(json!({"content": [
            {"type": "text", "text": "one"},
            {"type": "image", "data": "A".repeat(16384), "mimeType": "image/png"},
            {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
            {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "two"}},
            {"type": "resource", "resource": {"uri": "file:///b.bin", "blob": "AAAA", "mimeType": "application/x"}},
            {"type": "resource_link", "uri": "file:///c", "name": "c"},
            {"type": "text", "text": "three"},
        ]}));
        let expected = "one\n[image/png, 12.0 KiB: left out; the model reads no images]\n\
             [audio/wav, 3 B: left out; llmctl cannot read audio]\nfile:///a.txt:\ntwo\n\
             [file:///b.bin, application/x, 3 B: left out; llmctl cannot read binary resources]\n\
             [file:///c: a link; llmctl does not read resources]\nthree";
        assert_eq!(result.text, expected);
        assert_eq!((result.notes.len(), result.is_error), (4, false));
    }

    #[test]
    fn images_are_for_models_that_see() {
        let gif = STANDARD
            .encode(b"GIF89a\x01\0\x01\0\x80\0\0\xff\xff\xff\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;");
        let mut result = text(json!({"content": [
            {"type": "text", "text": "one"},
            {"type": "image", "data": gif, "mimeType": "image/gif"},
            {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        ]}));
        let taken = result.take_images();
        assert_eq!(taken.len(), 1);
        assert_eq!((taken[0].1.image.width, taken[0].1.image.media_type.as_str()), (1, "image/gif"));
        assert!(result.text.contains(&taken[0].0), "{}", result.text);
        assert_eq!(result.notes.len(), 2, "the damaged one is left out, and why: {:?}", result.notes);
    }

    #[test]
    fn structured_content_stands_where_no_text_does() {
        let structured = json!({"b": 1, "a": [2]});
        let alone = text(json!({"content": [], "structuredContent": structured}));
        assert_eq!(alone.text, "{\"b\":1,\"a\":[2]}");
        let both = text(
            json!({"content": [{"type": "text", "text": "x"}], "structuredContent": structured, "isError": true}),
        );
        assert_eq!((both.text.as_str(), both.is_error), ("x", true));
    }

    #[test]
    fn a_long_result_is_cut_and_says_so() {
        let long = text(json!({"content": [{"type": "text", "text": "\u{e9}".repeat(MAX_TEXT)}]}));
        assert!(long.text.len() < MAX_TEXT + 100, "{}", long.text.len());
        assert!(
            long.text.ends_with("[cut: 64.0 KiB of 128.0 KiB left out]"),
            "{}",
            &long.text[long.text.len() - 50..]
        );
        assert_eq!(long.notes, ["cut: 64.0 KiB of 128.0 KiB left out"]);
    }
}
