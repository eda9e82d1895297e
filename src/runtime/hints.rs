//! Which facts about llmctl a question may be about: the built-in model's index of words, and the line that its prompts get.
//!
//! `assets/guide/train/hints.py` makes the file, says how it is laid out, and scores in whole numbers as this does: guide was
//! trained on the very lines that it gets here. A naive Bayes on the words of a text, the first four letters of the longer
//! ones, and the fact that the user's message before was about. The hints of a message depend on it and on the one before it,
//! so that a longer conversation begins with the same text.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::template::message::{Content, Conversation, Role};

/// Hints at most.
const MOST: usize = 8;
/// How far below the best a fact may be, in sixteenths of a nat.
const NEAR: i32 = 8 * 16;
/// Words of a text that may still be a question about llmctl.
const LONGEST: usize = 64;
/// Letters of a longer word that stand for it.
const STEM: usize = 4;

/// An index that was compiled in. Reads the file in place.
#[derive(Debug, Clone, Copy)]
pub struct Hints {
    /// Per label: the score of a feature that its questions never had.
    base: &'static [[u8; 2]],
    /// Per feature, and one more: where its text begins, and where its postings do.
    starts: &'static [[u8; 8]],
    /// Per posting: the label, and its score above the base.
    whose: &'static [[u8; 2]],
    above: &'static [u8],
    features: &'static str,
    /// The labels' words, a line each; an empty one is no fact.
    words: &'static str,
}

impl Hints {
    /// `None` where the file is not one.
    pub fn parse(file: &'static [u8]) -> Option<Self> {
        let (counts, rest) = file.strip_prefix(b"LLMHINT1")?.split_at_checked(16)?;
        let [labels, features, postings, text_len] =
            std::array::from_fn(|n| u32_at(counts, 4 * n).unwrap_or_default() as usize);
        let (base, rest) = rest.split_at_checked(2 * labels)?;
        let (starts, rest) = rest.split_at_checked(8 * (features + 1))?;
        let (whose, rest) = rest.split_at_checked(2 * postings)?;
        let (above, text) = rest.split_at_checked(postings)?;
        let starts = starts.as_chunks().0;
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() == text_len)?;
        let (features, words) = text.split_at_checked(u32_at(starts.last()?, 0)? as usize)?;
        let found =
            Self { base: base.as_chunks().0, starts, whose: whose.as_chunks().0, above, features, words };
        (found.words.split('\n').count() == labels).then_some(found)
    }

    /// The conversation as guide was trained on it: behind what users say stand the words of the facts that it may be about.
    /// Where there are tools, there are none.
    pub fn annotate(&self, conversation: &Conversation) -> Conversation {
        let mut annotated = conversation.clone();
        if !conversation.tools.is_empty() {
            return annotated;
        }
        let mut before: Option<String> = None;
        for message in annotated.messages.iter_mut().filter(|message| message.role == Role::User) {
            let Some(Content::Text(text)) = &mut message.content else {
                before = None;
                continue;
            };
            let hints = self.hints(text, before.as_deref());
            before = Some(text.clone());
            if !hints.is_empty() {
                text.push_str("\nsee: ");
                text.push_str(&hints.join(" "));
            }
        }
        annotated
    }

    /// The words of the facts that a text may be about, the likeliest first, after what the user said `before`.
    fn hints(&self, text: &str, before: Option<&str>) -> Vec<&'static str> {
        let after = before.and_then(|before| self.ranked(before, "").first().copied());
        let found = self.ranked(text, after.unwrap_or_default());
        match found.first() {
            None | Some(&"") => Vec::new(),
            Some(_) => found.into_iter().filter(|word| !word.is_empty()).collect(),
        }
    }

    /// The labels within reach of the best.
    fn ranked(&self, text: &str, after: &str) -> Vec<&'static str> {
        let found: Vec<usize> =
            features(text, after).iter().filter_map(|feature| self.position(feature)).collect();
        let mut scores: Vec<i32> =
            self.base.iter().map(|&base| i32::from(i16::from_le_bytes(base)) * found.len() as i32).collect();
        for (label, above) in found.iter().flat_map(|&feature| self.postings(feature)) {
            if let Some(score) = scores.get_mut(usize::from(label)) {
                *score += i32::from(above);
            }
        }
        let mut order: Vec<(i32, &str)> = scores.into_iter().zip(self.words.split('\n')).collect();
        order.sort_by_key(|&(score, _)| Reverse(score));
        let best = order.first().map_or(0, |&(score, _)| score);
        let is_near = |&&(score, _): &&(i32, &str)| !found.is_empty() && score >= best - NEAR;
        order.iter().take(MOST).filter(is_near).map(|&(_, word)| word).collect()
    }

    fn position(&self, feature: &str) -> Option<usize> {
        let all = &self.starts[..self.starts.len() - 1];
        let name = |start: &[u8; 8]| {
            let rest = self.features.get(u32_at(start, 0)? as usize..)?;
            rest.split('\n').next()
        };
        all.binary_search_by(|start| name(start).cmp(&Some(feature))).ok()
    }

    fn postings(&self, feature: usize) -> impl Iterator<Item = (u16, u8)> {
        let begin =
            |n: usize| self.starts.get(n).and_then(|start| u32_at(start, 4)).unwrap_or_default() as usize;
        let range = begin(feature)..begin(feature + 1);
        let labels = self.whose.get(range.clone()).unwrap_or_default();
        let above = self.above.get(range).unwrap_or_default();
        labels.iter().map(|&label| u16::from_le_bytes(label)).zip(above.iter().copied())
    }
}

/// The words of a text, the first letters of the longer ones, and the fact of the message before, each once; none of a long text.
fn features(text: &str, after: &str) -> BTreeSet<String> {
    let is_inside = |letter: char| letter.is_ascii_alphanumeric() || "_/.-".contains(letter);
    let words: Vec<String> = text
        .split(|letter| !is_inside(letter))
        .map(|word| word.trim_end_matches(['.', '-']).to_ascii_lowercase())
        .filter(|word| !word.is_empty())
        .collect();
    if words.len() > LONGEST {
        return BTreeSet::new();
    }
    let stems = words.iter().filter(|word| word.len() > STEM).map(|word| format!("{}*", &word[..STEM]));
    let after = (!after.is_empty()).then(|| format!(">{after}"));
    stems.chain(after).chain(words.iter().cloned()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::runtime::load::builtin::GUIDE;
    use crate::template::message::Message;

    fn hints() -> Hints {
        GUIDE.hints()
    }

    /// What the messages say in the prompt.
    fn annotated(messages: &[Message]) -> Vec<String> {
        let conversation = Conversation { messages: messages.to_vec(), ..Conversation::default() };
        let text = |message: Message| match message.content {
            Some(Content::Text(text)) => text,
            other => panic!("{other:?}"),
        };
        hints().annotate(&conversation).messages.into_iter().map(text).collect()
    }

    #[test]
    fn they_are_those_of_the_training() {
        let lines = include_str!("../../assets/guide/hints.jsonl").lines();
        let mut num_with_hints = 0;
        for line in lines {
            let row: Value = serde_json::from_str(line).expect("JSON");
            let turns: Vec<&str> =
                row["turns"].as_array().expect("turns").iter().filter_map(Value::as_str).collect();
            let before = std::iter::once(None).chain(turns.iter().copied().map(Some));
            let found: Vec<_> =
                turns.iter().zip(before).map(|(turn, before)| hints().hints(turn, before)).collect();
            num_with_hints += usize::from(found.iter().all(|words| !words.is_empty()));
            assert_eq!(json!(found), row["hints"], "{turns:?}");
        }
        assert!(num_with_hints > 100, "{num_with_hints}");
    }

    #[test]
    fn only_what_users_say_gets_some_and_later_messages_change_nothing() {
        let question = "How do I save a conversation?";
        let messages = [
            Message::system(question),
            Message::user(question),
            Message::assistant(question),
            Message::user("and how do I delete it?"),
        ];
        let found = annotated(&messages);
        assert_eq!([&found[0], &found[2]], [question, question]);
        assert!(found[1].starts_with("How do I save a conversation?\nsee: save"), "{found:?}");
        assert!(found[3].contains("\nsee: "), "{found:?}");
        assert_eq!(annotated(&messages[..2]), found[..2]);
    }

    #[test]
    fn tasks_long_texts_and_conversations_with_tools_get_none() {
        for text in
            ["count from 1 to 5".to_owned(), "How do I save it? ".repeat(20), "¿é?".to_owned(), String::new()]
        {
            assert_eq!(annotated(&[Message::user(text.as_str())]), [text]);
        }
        let tools = vec![json!({"type": "function"})];
        let messages = vec![Message::user("How do I save a conversation?")];
        let conversation = Conversation { messages, tools, ..Conversation::default() };
        assert_eq!(hints().annotate(&conversation), conversation);
    }

    #[test]
    fn a_file_that_is_cut_is_none() {
        let file: &'static [u8] = include_bytes!("../../assets/guide/hints.bin");
        assert!(Hints::parse(file).is_some());
        for len in [0, 8, 20, 24, 700, file.len() / 2, file.len() - 1] {
            assert!(Hints::parse(&file[..len]).is_none(), "{len}");
        }
    }
}
