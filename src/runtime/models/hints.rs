//! Hints of the built-in model: an index that maps a question to facts about llmctl, which are added to its
//! prompt.
//!
//! `assets/guide/train/hints.py` writes the file, documents its layout, and scores in the same integers. The
//! score is naive Bayes over the words of a text, the first four letters of longer words, and the fact that
//! the user's previous message was about. The frontend decides between facts that answer the same question in
//! a chat and over HTTP. A fact that was given before scores lower. Hints depend only on the messages up to
//! theirs, so a longer conversation starts with the same text. A fact that came after the training has its
//! answer in the index.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use llmctl_template::message::{Content, Conversation, Role};

/// Most hints of a message.
const MOST: usize = 8;
/// Largest distance from the best score, in sixteenths of a nat.
const NEAR: i32 = 8 * 16;
/// Most words of a text that may be a question about llmctl.
const LONGEST: usize = 64;
/// Penalty of a fact that was given before, in sixteenths of a nat.
const TOLD: i32 = 3 * 16;
/// Begin of the hints of a message.
const SEE: &str = "\nsee: ";
/// Most words of a question that is also a feature as a whole.
const WHOLE: usize = 10;
/// Letters of a longer word that are a feature.
const STEM: usize = 4;

/// Frontend of a question. `Other` is `run`, `bench` and workers, which prefer no fact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Frontend {
    #[default]
    Other = 0,
    Chat = 1,
    Http = 2,
}

impl Frontend {
    /// Returns the line that names it in a prompt; empty for `Other`.
    fn line(self) -> &'static str {
        match self {
            Self::Other => "",
            Self::Chat => "in chat",
            Self::Http => "over HTTP",
        }
    }
}

/// Likely labels of a text, best first, and whether the frontend decided which is first.
#[derive(Debug, Clone, Default)]
struct Ranked {
    labels: Vec<usize>,
    is_placed: bool,
}

/// A compiled-in index, read in place.
#[derive(Debug, Clone, Copy)]
pub struct Hints {
    /// Per label: score of a feature that is absent from its questions.
    base: &'static [[u8; 2]],
    /// Per label: the group of facts that answer the same question, from 1 (0: none), and its frontend.
    groups: &'static [[u8; 2]],
    /// Per feature, and one more: start of its text and of its postings.
    starts: &'static [[u8; 8]],
    /// Per posting: the label, and its score above the base.
    whose: &'static [[u8; 2]],
    above: &'static [u8],
    features: &'static str,
    /// Text of the labels, one line each: a word, and a tab and the answer of a fact that guide has not learnt. An empty line
    /// is not a fact.
    words: &'static str,
}

impl Hints {
    /// Checks the layout; `None` if it is wrong.
    pub fn parse(file: &'static [u8]) -> Option<Self> {
        let (counts, rest) = file.strip_prefix(b"LLMHINT2")?.split_at_checked(16)?;
        let [labels, features, postings, text_len] =
            std::array::from_fn(|n| u32_at(counts, 4 * n).unwrap_or_default() as usize);
        let (base, rest) = rest.split_at_checked(2 * labels)?;
        let (groups, rest) = rest.split_at_checked(2 * labels)?;
        let (starts, rest) = rest.split_at_checked(8 * (features + 1))?;
        let (whose, rest) = rest.split_at_checked(2 * postings)?;
        let (above, text) = rest.split_at_checked(postings)?;
        let starts = starts.as_chunks().0;
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() == text_len)?;
        let (features, words) = text.split_at_checked(u32_at(starts.last()?, 0)? as usize)?;
        let (base, groups, whose) = (base.as_chunks().0, groups.as_chunks().0, whose.as_chunks().0);
        let found = Self { base, groups, starts, whose, above, features, words };
        (found.words.split('\n').count() == labels).then_some(found)
    }

    /// Adds hints to a conversation as guide was trained on it: after each user message, the facts it may be
    /// about, and the frontend if that decided. With tools there are no hints.
    pub fn annotate(&self, conversation: &Conversation, frontend: Frontend) -> Conversation {
        let mut annotated = conversation.clone();
        if !conversation.tools.is_empty() {
            return annotated;
        }
        let mut asked = HintHistory::new(self, frontend);
        for message in annotated.messages.iter_mut().filter(|message| message.role == Role::User) {
            let Some(Content::Text(text)) = &mut message.content else {
                asked.before = None;
                continue;
            };
            let ranked = asked.rank(text);
            let words = self.facts(&ranked);
            if words.is_empty() {
                continue;
            }
            if ranked.is_placed {
                text.push('\n');
                text.push_str(frontend.line());
            }
            text.push_str(SEE);
            text.push_str(&words.join(" "));
        }
        annotated
    }

    /// Returns the text of the labels that are facts; empty if the first is not.
    fn facts(&self, ranked: &Ranked) -> Vec<&'static str> {
        let words = ranked.labels.iter().map(|&label| self.word(label));
        match words.clone().next() {
            None | Some("") => Vec::new(),
            Some(_) => words.filter(|word| !word.is_empty()).collect(),
        }
    }

    fn word(&self, label: usize) -> &'static str {
        let line = self.words.split('\n').nth(label).unwrap_or_default();
        line.split('\t').next().unwrap_or_default()
    }

    /// Returns the answer to the last message of a rendered prompt if guide has not learnt the fact that its hints begin with.
    pub fn answer(&self, prompt: &str) -> Option<&'static str> {
        let (words, rest) = prompt.rsplit_once(SEE)?.1.split_once("<|im_end|>")?;
        let first = words.split(' ').next().filter(|_| !rest.contains("<|im_end|>"))?;
        let mut known = self.words.split('\n').filter_map(|line| line.split_once('\t'));
        known.find(|(word, _)| *word == first).map(|(_, answer)| answer)
    }

    /// Returns the labels near the best score. Facts in `given` score lower, and among facts that answer the
    /// same question the frontend's comes first.
    fn ranked(&self, text: &str, after: &str, frontend: Frontend, given: &BTreeSet<usize>) -> Ranked {
        let found: Vec<usize> =
            features(text, after).iter().filter_map(|feature| self.position(feature)).collect();
        if found.is_empty() {
            return Ranked::default();
        }
        let mut scores: Vec<i32> =
            self.base.iter().map(|&base| i32::from(i16::from_le_bytes(base)) * found.len() as i32).collect();
        for (label, above) in found.iter().flat_map(|&feature| self.postings(feature)) {
            if let Some(score) = scores.get_mut(usize::from(label)) {
                *score += i32::from(above);
            }
        }
        given.iter().for_each(|&label| scores[label] -= TOLD);
        let mut labels: Vec<usize> = (0..scores.len()).collect();
        labels.sort_by_key(|&label| Reverse(scores[label]));
        let best = labels.first().map_or(0, |&label| scores[label]);
        labels.truncate(MOST);
        labels.retain(|&label| scores[label] >= best - NEAR);
        self.placed(labels, frontend)
    }

    /// Moves the frontend's fact to the front if one of its group is first.
    fn placed(&self, mut labels: Vec<usize>, frontend: Frontend) -> Ranked {
        let own = frontend as u8;
        let Some(&[group, place]) = labels.first().and_then(|&first| self.groups.get(first)) else {
            return Ranked::default();
        };
        let is_own = |&label: &usize| self.groups.get(label) == Some(&[group, own]);
        let is_placed = frontend != Frontend::Other && group != 0 && place != own;
        match labels.iter().position(is_own).filter(|_| is_placed) {
            Some(at) => labels[..=at].rotate_right(1),
            None => return Ranked { labels, is_placed: false },
        }
        Ranked { labels, is_placed }
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

/// State of the hints over one conversation's user messages.
struct HintHistory<'a> {
    hints: &'a Hints,
    frontend: Frontend,
    /// The previous message.
    before: Option<String>,
    /// Hints by question, so that a repeated question gets the same ones.
    seen: HashMap<String, Ranked>,
    /// Facts of the messages so far.
    given: BTreeSet<usize>,
}

impl<'a> HintHistory<'a> {
    fn new(hints: &'a Hints, frontend: Frontend) -> Self {
        Self { hints, frontend, before: None, seen: HashMap::new(), given: BTreeSet::new() }
    }

    fn rank(&mut self, text: &str) -> Ranked {
        let before = self.before.replace(text.to_owned());
        if let Some(ranked) = self.seen.get(text) {
            return ranked.clone();
        }
        let (hints, frontend) = (self.hints, self.frontend);
        let after = before.and_then(|text| {
            let ranked = hints.ranked(&text, "", frontend, &BTreeSet::new());
            ranked.labels.first().map(|&label| hints.word(label))
        });
        let ranked = hints.ranked(text, after.unwrap_or_default(), frontend, &self.given);
        if !hints.facts(&ranked).is_empty() {
            self.given.extend(ranked.labels.first());
        }
        self.seen.insert(text.to_owned(), ranked.clone());
        ranked
    }
}

/// Returns the features of a text: its words, first letters of longer words, the fact of the previous
/// message, and a short text as a whole. Empty for a long text.
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
    let whole = (1..=WHOLE).contains(&words.len()).then(|| format!("={}", words.join(" ")));
    stems.chain(after).chain(whole).chain(words.iter().cloned()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use llmctl_hub::builtin::GUIDE;
    use llmctl_template::message::Message;

    fn hints() -> Hints {
        Hints::parse(GUIDE.hints).expect("the index that was compiled in")
    }

    /// The messages as the prompt shows them.
    fn annotated(messages: &[Message], frontend: Frontend) -> Vec<String> {
        let conversation = Conversation { messages: messages.to_vec(), ..Conversation::default() };
        let text = |message: Message| match message.content {
            Some(Content::Text(text)) => text,
            other => panic!("{other:?}"),
        };
        hints().annotate(&conversation, frontend).messages.into_iter().map(text).collect()
    }

    #[test]
    fn they_are_those_of_the_trainer() {
        let frontends = [Frontend::Other, Frontend::Chat, Frontend::Http];
        let (mut num_with_hints, mut num_placed) = (0, 0);
        for line in include_str!("../../../assets/guide/hints.jsonl").lines() {
            let row: Value = serde_json::from_str(line).expect("JSON");
            let frontend = frontends[row["place"].as_u64().expect("a number") as usize];
            let hints = hints();
            let mut asked = HintHistory::new(&hints, frontend);
            let turns = row["turns"].as_array().expect("turns").iter().filter_map(Value::as_str);
            let found: Vec<_> = turns
                .map(|turn| {
                    let ranked = asked.rank(turn);
                    num_placed += usize::from(ranked.is_placed);
                    json!([hints.facts(&ranked), if ranked.is_placed { frontend.line() } else { "" }])
                })
                .collect();
            num_with_hints += usize::from(found.iter().all(|hints| hints[0] != json!([])));
            assert_eq!(json!(found), row["hints"], "{row}");
        }
        assert!(num_with_hints > 300 && num_placed > 5, "{num_with_hints} {num_placed}");
    }

    #[test]
    fn each_subcommand_has_its_own_fact_in_any_order() {
        let names = ["run", "chat", "serve", "bench"];
        let first = |text: &str| text.rsplit_once("see: ").map_or("", |(_, words)| words).to_owned();
        for frontend in [Frontend::Other, Frontend::Chat, Frontend::Http] {
            let mut facts = BTreeSet::new();
            for name in names {
                let asked = annotated(&[Message::user(format!("what is {name}?"))], frontend);
                facts.insert(first(&asked[0]).split(' ').next().unwrap_or_default().to_owned());
            }
            assert_eq!(facts.into_iter().collect::<Vec<_>>(), ["clients", "ends", "measures", "org"]);
        }
    }

    #[test]
    fn the_frontend_decides_between_facts_that_answer_the_same() {
        let asked = |frontend| annotated(&[Message::user("how do I fork a session")], frontend).remove(0);
        let words = |text: &str| text.rsplit_once("see: ").map_or("", |(_, words)| words).to_owned();
        assert!(asked(Frontend::Chat).starts_with("how do I fork a session\nin chat\nsee: goes "));
        assert!(words(&asked(Frontend::Http)).starts_with("fork "), "no line where it was first anyway");
        assert!(!asked(Frontend::Http).contains("over HTTP"));
        assert!(words(&asked(Frontend::Other)).starts_with("fork "));
    }

    #[test]
    fn a_question_that_comes_again_has_its_hints_and_another_has_not_the_same_fact() {
        let again = ["what is KV", "why is it 4G", "what is KV"].map(Message::user);
        let found = annotated(&again, Frontend::Chat);
        assert_eq!(found[0], found[2]);
        let first = |text: &str| {
            text.rsplit("see: ").next().and_then(|words| words.split(' ').next()).map(str::to_owned)
        };
        assert_ne!(first(&found[0]), first(&found[1]));
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
        let found = annotated(&messages, Frontend::Other);
        assert_eq!([&found[0], &found[2]], [question, question]);
        assert!(found[1].starts_with("How do I save a conversation?\nsee: save"), "{found:?}");
        assert!(found[3].contains("\nsee: "), "{found:?}");
        assert_eq!(annotated(&messages[..2], Frontend::Other), found[..2]);
    }

    #[test]
    fn what_guide_has_not_learnt_has_its_answer_for_the_last_question_alone() {
        let hints = hints();
        let answer = |questions: &[&str]| {
            let messages: Vec<Message> = questions.iter().map(|&text| Message::user(text)).collect();
            let prompt = annotated(&messages, Frontend::Chat).join("<|im_end|>\n<|im_start|>user\n");
            hints.answer(&format!("{prompt}<|im_end|>\n<|im_start|>assistant\n"))
        };
        let rerank = answer(&["Can llmctl rerank documents?"]).expect("an answer");
        assert!(rerank.contains("`/v1/rerank`"), "{rerank}");
        assert_eq!(answer(&["hello", "Can llmctl rerank documents?"]), Some(rerank));
        assert_eq!(answer(&["Can llmctl rerank documents?", "count from 1 to 5"]), None);
        assert_eq!(answer(&["How do I save a conversation?"]), None);
    }

    #[test]
    fn tasks_long_texts_and_conversations_with_tools_get_none() {
        for text in
            ["count from 1 to 5".to_owned(), "How do I save it? ".repeat(20), "¿é?".to_owned(), String::new()]
        {
            assert_eq!(annotated(&[Message::user(text.as_str())], Frontend::Chat), [text]);
        }
        let tools = vec![json!({"type": "function"})];
        let messages = vec![Message::user("How do I save a conversation?")];
        let conversation = Conversation { messages, tools, ..Conversation::default() };
        assert_eq!(hints().annotate(&conversation, Frontend::Chat), conversation);
    }

    #[test]
    fn a_file_that_is_cut_is_none() {
        let file: &'static [u8] = include_bytes!("../../../assets/guide/hints.bin");
        assert!(Hints::parse(file).is_some());
        for len in [0, 8, 20, 24, 700, file.len() / 2, file.len() - 1] {
            assert!(Hints::parse(&file[..len]).is_none(), "{len}");
        }
    }
}
