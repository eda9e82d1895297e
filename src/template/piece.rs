//! The parts that an answer is taken apart into.

/// A part of an answer, in the order in which it was written. Adjacent pieces of one kind belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text of the answer.
    Content(String),
    /// Text of the reasoning.
    Reasoning(String),
    /// A call begins; calls count from 0. Its tool is one of those given, but for messages with headers (Harmony), which may
    /// call others.
    CallName {
        index: usize,
        name: String,
        /// The model's own, where the format has one that prompts repeat.
        id: Option<String>,
    },
    /// The fragments of one call, concatenated, are the JSON text of an object.
    CallArguments { index: usize, fragment: String },
    /// The call is complete. A call without this piece was cut off or broke: its arguments may not parse, and it must not
    /// be executed.
    CallEnd { index: usize },
}

/// Adds text to the last piece of its kind, or as a new one.
pub fn push_text(pieces: &mut Vec<Piece>, is_reasoning: bool, text: &str) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Reasoning(last)) if is_reasoning => last.push_str(text),
        Some(Piece::Content(last)) if !is_reasoning => last.push_str(text),
        _ if is_reasoning => pieces.push(Piece::Reasoning(text.to_owned())),
        _ => pieces.push(Piece::Content(text.to_owned())),
    }
}
