//! What the model says, told apart: answer, reasoning and tool calls, as they come.

use super::turn::{Delta, Said};

/// One answer's text on its way.
#[derive(Debug, Clone)]
pub struct Voice {
    said: Said,
}

impl Voice {
    /// All text is the answer.
    pub fn plain() -> Self {
        Self { said: Said::default() }
    }

    /// Takes the text of `num_tokens` more tokens.
    pub fn push(&mut self, text: &str, _num_tokens: usize) -> Vec<Delta> {
        let deltas = if text.is_empty() { Vec::new() } else { vec![Delta::Content(text.to_owned())] };
        deltas.iter().for_each(|delta| self.said.add(delta));
        deltas
    }

    /// The end of the text; `is_cut` when it did not end by itself. What is held back comes out.
    pub fn finish(&mut self, _is_cut: bool) -> Vec<Delta> {
        Vec::new()
    }

    /// All so far.
    pub fn said(&self) -> &Said {
        &self.said
    }
}
