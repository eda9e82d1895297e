//! The beginning of an answer that a client gives, in the model's markup, so that the model continues it.
//!
//! Invariant: a parser that reads the text behind the prompt finds the reasoning and the content that were given.

use super::output_markup::OutputMarkup;
use super::tool_call::Protocol;

impl OutputMarkup {
    /// Returns an answer so far as the model would have written it behind a prompt that ends with `prompt_tail`. `None` if its
    /// answers are rows of messages in an unknown protocol.
    pub fn begun(&self, prompt_tail: &str, reasoning: &str, content: &str) -> Option<String> {
        match self.protocol() {
            None => Some(self.begun_text(prompt_tail, reasoning, content)),
            Some(Protocol::Harmony) => Some(begun_messages(reasoning, content)),
            Some(_) => None,
        }
    }

    fn begun_text(&self, prompt_tail: &str, reasoning: &str, content: &str) -> String {
        let Some(format) = self.reasoning else { return content.to_owned() };
        let marks = format.row();
        let closing = marks.closing.unwrap_or(marks.close);
        let lead = marks.lead.filter(|(end, _)| prompt_tail.ends_with(end)).map_or("", |(_, text)| text);
        let opening = match self.may_reason(prompt_tail) {
            _ if format.is_open_in(prompt_tail) => Some(String::new()),
            Some((open, _)) if !reasoning.is_empty() => Some(format!("{open}\n")),
            _ => None,
        };
        match opening {
            None => format!("{lead}{content}"),
            Some(opening) if content.is_empty() => format!("{opening}{reasoning}"),
            Some(opening) => format!("{opening}{reasoning}{closing}{content}"),
        }
    }
}

/// Harmony: the analysis is a message of its own before the final one.
fn begun_messages(reasoning: &str, content: &str) -> String {
    let analysis = format!("<|channel|>analysis<|message|>{reasoning}");
    let last = format!("<|channel|>final<|message|>{content}");
    match (reasoning.is_empty(), content.is_empty()) {
        (true, _) => last,
        (false, true) => analysis,
        (false, false) => format!("{analysis}<|end|><|start|>assistant{last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ReasoningFormat, parse_answer};
    use super::*;

    #[test]
    fn what_was_given_is_read_back() {
        let think = OutputMarkup { reasoning: Some(ReasoningFormat::Think), tool_calls: None };
        let harmony = OutputMarkup { reasoning: Some(ReasoningFormat::Harmony), tool_calls: None };
        let bare = OutputMarkup::default();
        for (markup, tail, reasoning, content) in [
            (bare, "<|im_start|>assistant\n", "", "One, two,"),
            (think, "<|im_start|>assistant\n", "", "One, two,"),
            (think, "<|im_start|>assistant\n", "Counting.", "One, two,"),
            (think, "<|im_start|>assistant\n<think>\n", "Counting.", "One, two,"),
            (think, "<|im_start|>assistant\n<think>\n", "", "One, two,"),
            (think, "<|im_start|>assistant\n<think>\n", "Counting", ""),
            (think, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "One, two,"),
            (harmony, "<|start|>assistant", "Counting.", "One, two,"),
            (harmony, "<|start|>assistant", "", "One, two,"),
        ] {
            let text = markup.begun(tail, reasoning, content).expect("a known markup");
            let read = parse_answer(&markup, &[], tail, &text, true);
            let found = (read.reasoning.trim(), read.content.as_str());
            assert_eq!(found, (reasoning, content), "{text:?} behind {tail:?}");
        }
    }
}
