//! The transcript: earlier answers of a session go back into prompts as the exact token ids that were
//! generated.
//!
//! A chat template prints an earlier answer as text, which need not encode to the same ids (re-serialised
//! tool arguments, think blocks, merges); nothing after it could then be resumed. So each answer is stored
//! under the chain of messages before it, and a later prompt that contains it there becomes text, ids, text.
//!
//! Pure: rendering and encoding are passed in. In any doubt (the template changed a mark, or printed other
//! text around it, or the text before the answer differs from when it was generated) the answer goes in as
//! plain text: the prompt then means the same, and costs a prefill. Answers are found by chain rather than
//! counted, so a conversation that starts with foreign history resumes too.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;

use serde_json::{Value, json};

use llmctl_template::message::{Content, Conversation, ImageRef, Message, Role, ToolCall};

/// Part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SplicedSegment {
    Text(String),
    /// The ids of an answer as generated.
    Ids(Vec<u32>),
}

/// A prompt, ready to be encoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SplicedPrompt {
    /// Text first and last; text and ids alternate.
    pub segments: Vec<SplicedSegment>,
}

impl SplicedPrompt {
    pub fn text(text: String) -> Self {
        Self { segments: vec![SplicedSegment::Text(text)] }
    }

    /// Returns the number of answers inserted as ids.
    pub fn num_spliced(&self) -> usize {
        self.segments.iter().filter(|segment| matches!(segment, SplicedSegment::Ids(_))).count()
    }

    /// Returns the prompt's suffix, which the answer will follow. Pass it to [`Transcript::record`], also
    /// after a restart.
    pub fn splice_after(&self) -> &str {
        match self.segments.last() {
            Some(SplicedSegment::Text(text)) => tail(text),
            _ => "",
        }
    }

    /// Returns all ids. `encode` gets each text and the number of ids before it: a BOS, or the space that
    /// some tokenizers put before a text, belongs only to the start of the prompt.
    ///
    /// # Errors
    /// The first error of `encode`.
    pub fn ids<E>(&self, mut encode: impl FnMut(&str, usize) -> Result<Vec<u32>, E>) -> Result<Vec<u32>, E> {
        let mut ids: Vec<u32> = Vec::new();
        for (at, segment) in self.segments.iter().enumerate() {
            match segment {
                SplicedSegment::Text(text) if text.is_empty() && at > 0 => {}
                SplicedSegment::Text(text) => {
                    let start = ids.len();
                    ids.extend(encode(text, start)?);
                }
                SplicedSegment::Ids(run) => ids.extend_from_slice(run),
            }
        }
        Ok(ids)
    }
}

/// Bytes of a prompt's suffix that are stored: an assistant header with its empty think block, and some text
/// before.
const TAIL_BYTES: usize = 96;

/// Text that templates put between the assistant header and an answer, in a generation prompt, in history, or
/// in both: think blocks that are empty, only opened or only closed (Qwen3 and relatives, DeepSeek, GLM,
/// Gemma 4), and white space (Mistral's `[/INST] `). Tried in this order. A block is removed if there is one,
/// because history may hold reasoning where the mark got an empty block.
const SCAFFOLDS: [&str; 14] = [
    "<think>\n\n</think>\n\n",
    "<think>\n\n</think>\n",
    "\n<think></think>\n",
    "<think></think>\n",
    "<think>\n</think>",
    "<think></think>",
    "</think>",
    "<think>\n\n",
    "<think>\n",
    "<think>",
    "<|channel>thought\n<channel|>",
    "",
    " ",
    "\n",
];

/// Delimiters of tool calls in templates that print calls elsewhere than the message's text (Gemma 4).
const CALL_MARKUP: [(&str, &str); 1] = [("<|tool_call>", "<tool_call|>")];

/// Most renderings with marks before all answers become plain text. Each attempt but the last gives up an
/// answer or a method.
const MAX_ATTEMPTS: usize = 4;

/// Normal form of a message that ignores what clients change: call ids, reasoning, white space and key order
/// of arguments, and whether a text is one part or a list of parts. Equal forms are the same message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageFingerprint(String);

impl MessageFingerprint {
    /// Also used for messages of other roles, in chains.
    pub fn of(message: &Message) -> Self {
        let calls: Vec<Value> = message
            .tool_calls
            .iter()
            .map(|call| json!([call.name, normal_arguments(&call.arguments)]))
            .collect();
        Self(json!([content_form(message.content.as_ref()), calls]).to_string())
    }
}

/// Missing and empty content are equal, and so are a text and its parts if all parts are text.
fn content_form(content: Option<&Content>) -> Value {
    match content {
        None => Value::String(String::new()),
        Some(Content::Text(text)) => Value::String(text.clone()),
        Some(Content::Parts(parts)) => {
            let texts: Option<String> = parts.iter().map(text_of_part).collect();
            texts.map_or_else(|| Value::Array(parts.iter().map(form_of_part).collect()), Value::String)
        }
    }
}

/// An image is its bytes: names and media types differ between clients.
fn form_of_part(part: &Value) -> Value {
    ImageRef::of(part).map_or_else(|| sorted(part), |image| json!({ "image": image.sha256 }))
}

fn text_of_part(part: &Value) -> Option<&str> {
    (part.get("type")? == "text").then(|| part.get("text")?.as_str())?
}

/// Parses arguments given as JSON text. Text that is not JSON stays as it is, byte for byte.
fn normal_arguments(arguments: &Value) -> Value {
    match arguments {
        Value::String(text) => match serde_json::from_str(text) {
            Ok(parsed) => sorted(&parsed),
            Err(_) => json!({ "not json": text }),
        },
        parsed => sorted(parsed),
    }
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let by_key: BTreeMap<&String, Value> =
                map.iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(by_key.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

/// Hash of the messages before an answer. 64 bits suffice: an entry also holds the answer's normal form, so a
/// collision would insert ids of an equal answer.
type Chain = u64;

/// Returns the chain before each message, and after the last.
fn chains(messages: &[Message]) -> Vec<Chain> {
    let mut chains = vec![0];
    for message in messages {
        let mut hasher = DefaultHasher::new();
        (chains[chains.len() - 1], message.role.as_str(), &message.name, MessageFingerprint::of(message))
            .hash(&mut hasher);
        chains.push(hasher.finish());
    }
    chains
}

/// An answer of this session.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StoredAnswer {
    fingerprint: MessageFingerprint,
    ids: Vec<u32>,
    /// Suffix of the prompt it was generated from.
    after: String,
}

/// Answers of one session that can be inserted as ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transcript {
    /// One per position in the conversation: a regenerated answer replaces the old one.
    answers: BTreeMap<Chain, StoredAnswer>,
}

impl Transcript {
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    pub fn clear(&mut self) {
        self.answers.clear();
    }

    /// Stores the final answer to the conversation `before`, and forgets answers on other branches, so there
    /// are never more than the conversation has. `after` is the prompt's [`SplicedPrompt::splice_after`].
    /// `ids` are the generated ids without the end-of-generation token; `None` if the client was shown other
    /// text, because a stop string was cut off.
    pub fn record(&mut self, before: &[Message], answer: &Message, after: &str, ids: Option<&[u32]>) {
        let chains = chains(before);
        let here = chains[before.len()];
        self.answers.retain(|chain, _| *chain != here && chains.contains(chain));
        if let Some(ids) = ids.filter(|ids| !ids.is_empty()) {
            let fingerprint = MessageFingerprint::of(answer);
            self.answers
                .insert(here, StoredAnswer { fingerprint, ids: ids.to_vec(), after: after.to_owned() });
        }
    }

    /// Rebuilds a transcript from disk. `known` lists answers by their index in `messages`, with the
    /// arguments of [`Self::record`].
    pub fn restored<'a>(
        messages: &[Message],
        known: impl IntoIterator<Item = (usize, &'a str, &'a [u32])>,
    ) -> Self {
        let chains = chains(messages);
        let answer = |(index, after, ids): (usize, &str, &[u32])| {
            let fingerprint = MessageFingerprint::of(messages.get(index)?);
            Some((chains[index], StoredAnswer { fingerprint, ids: ids.to_vec(), after: after.to_owned() }))
        };
        Self { answers: known.into_iter().filter_map(answer).collect() }
    }

    /// Returns the ids of the message at `index` if this session generated it after the same messages.
    pub fn lookup(&self, messages: &[Message], index: usize) -> Option<&[u32]> {
        let message = messages.get(index).filter(|message| message.role == Role::Assistant)?;
        let chain = chains(&messages[..index])[index];
        self.find(chain, message).map(|answer| answer.ids.as_slice())
    }

    fn find(&self, chain: Chain, message: &Message) -> Option<&StoredAnswer> {
        self.answers.get(&chain).filter(|answer| answer.fingerprint == MessageFingerprint::of(message))
    }

    /// Builds the prompt of a conversation, with known answers as ids. `render` returns the text up to and
    /// including the generation prompt. It is called once without marks, and usually once with marks.
    ///
    /// # Errors
    /// The error of rendering without marks. A failure with marks only means plain text.
    pub fn splice<E>(
        &self,
        conversation: &Conversation,
        render: impl FnMut(&Conversation) -> Result<String, E>,
    ) -> Result<SplicedPrompt, E> {
        self.splice_arranged(&conversation.messages, conversation, render)
    }

    /// As [`Self::splice`], with answers looked up in `messages`, from which `conversation` differs in ids of calls, the form of their
    /// arguments and the order of what stands between two answers.
    ///
    /// # Errors
    /// As [`Self::splice`].
    pub fn splice_arranged<E>(
        &self,
        messages: &[Message],
        conversation: &Conversation,
        mut render: impl FnMut(&Conversation) -> Result<String, E>,
    ) -> Result<SplicedPrompt, E> {
        let plain = render(conversation)?;
        let mut targets = self.targets(messages, &plain);
        for _ in 0..MAX_ATTEMPTS {
            if targets.is_empty() {
                break;
            }
            let marks = SpliceMarks::new(conversation, targets.len());
            let marked = render(&marks.applied(conversation, &targets));
            let Ok(marked) = marked else {
                let all: Vec<usize> = targets.iter().map(|target| target.index).collect();
                targets = reconsider(targets, &all);
                continue;
            };
            match cut(&marked, &plain, &marks, &targets) {
                Ok(segments) => return Ok(SplicedPrompt { segments }),
                Err(doubtful) => targets = reconsider(targets, &doubtful),
            }
        }
        Ok(SplicedPrompt::text(plain))
    }

    fn targets(&self, messages: &[Message], plain: &str) -> Vec<SpliceTarget<'_>> {
        let chains = chains(messages);
        let has_markup = CALL_MARKUP.iter().any(|(open, _)| plain.contains(open));
        let answers = messages.iter().enumerate().filter(|(_, message)| message.role == Role::Assistant);
        let found = answers.filter_map(|(index, message)| {
            let answer = self.find(chains[index], message)?;
            let is_call = !message.tool_calls.is_empty() && content_form(message.content.as_ref()) == "";
            Some(SpliceTarget {
                index,
                answer,
                method: MarkMethod::Content,
                has_second_way: is_call && has_markup,
            })
        });
        found.collect()
    }
}

/// An answer to insert as ids.
#[derive(Debug, Clone)]
struct SpliceTarget<'a> {
    /// Index of the message in the conversation.
    index: usize,
    answer: &'a StoredAnswer,
    method: MarkMethod,
    /// True if the answer is a tool call without text, which can also be marked in its arguments.
    has_second_way: bool,
}

/// Way to mark an answer in the conversation to be rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MarkMethod {
    /// Replace the message by an answer whose text is the mark.
    Content,
    /// Keep the message a tool call and put the mark into its arguments; the answer is all markup around it.
    Calls,
}

/// Chooses targets for the next attempt. Calls up to the last doubtful answer switch to the second method,
/// because one that is marked wrongly makes later ones doubtful. If none can switch, the doubtful answers are
/// dropped.
fn reconsider<'a>(targets: Vec<SpliceTarget<'a>>, doubtful: &[usize]) -> Vec<SpliceTarget<'a>> {
    let last = doubtful.iter().max().copied().unwrap_or(usize::MAX);
    let is_open = |target: &SpliceTarget<'_>| target.has_second_way && target.index <= last;
    if targets.iter().any(is_open) {
        let switch = |target: SpliceTarget<'a>| match is_open(&target) {
            true => SpliceTarget { method: MarkMethod::Calls, has_second_way: false, ..target },
            false => target,
        };
        return targets.into_iter().map(switch).collect();
    }
    targets.into_iter().filter(|target| !doubtful.contains(&target.index)).collect()
}

/// Words of equal length that do not occur in the conversation.
struct SpliceMarks {
    stem: String,
    count: usize,
}

impl SpliceMarks {
    fn new(conversation: &Conversation, count: usize) -> Self {
        // The debug form contains every text of the conversation, with letters and digits unescaped.
        let everything = format!("{conversation:?}");
        let number = |rest: &str| rest.split_once("xSpliced").and_then(|(digits, _)| digits.parse().ok());
        let taken: BTreeSet<u64> = everything.split("Zq").skip(1).filter_map(number).collect();
        let free = (0..).zip(&taken).find(|(n, taken)| n != *taken).map_or(taken.len() as u64, |(n, _)| n);
        Self { stem: format!("Zq{free}xSpliced"), count }
    }

    /// Returns a mark of letters and digits only, because templates trim, escape and split on other
    /// characters.
    fn mark(&self, target: usize, call: usize) -> String {
        debug_assert!(target < self.count);
        format!("{}{target:06}c{call:03}Qz", self.stem)
    }

    fn applied(&self, conversation: &Conversation, targets: &[SpliceTarget<'_>]) -> Conversation {
        let mut marked = conversation.clone();
        for (at, target) in targets.iter().enumerate() {
            let message = &mut marked.messages[target.index];
            message.reasoning = None;
            match target.method {
                MarkMethod::Content => {
                    message.content = Some(Content::Text(self.mark(at, 0)));
                    message.tool_calls = Vec::new();
                }
                MarkMethod::Calls => {
                    let calls = message.tool_calls.iter().enumerate();
                    message.tool_calls = calls
                        .map(|(n, call)| ToolCall {
                            arguments: json!({ self.mark(at, n): 0 }),
                            ..call.clone()
                        })
                        .collect();
                }
            }
        }
        marked
    }
}

/// Cuts the marked rendering at its marks. `Err` lists the doubtful messages.
fn cut(
    marked: &str,
    plain: &str,
    marks: &SpliceMarks,
    targets: &[SpliceTarget<'_>],
) -> Result<Vec<SplicedSegment>, Vec<usize>> {
    let index_of = |target: &SpliceTarget<'_>| target.index;
    let spans: Vec<Option<Range<usize>>> =
        targets.iter().enumerate().map(|(at, target)| span(marked, marks, at, target)).collect();
    let unmarked: Vec<usize> = targets
        .iter()
        .zip(&spans)
        .filter(|(_, span)| span.is_none())
        .map(|(target, _)| target.index)
        .collect();
    if !unmarked.is_empty() {
        return Err(unmarked);
    }
    let spans: Vec<Range<usize>> = spans.into_iter().flatten().collect();
    if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(targets.iter().map(index_of).collect());
    }
    let mut segments = Vec::new();
    let mut doubtful = Vec::new();
    let mut plain_at = 0;
    let mut from = 0;
    for (target, span) in targets.iter().zip(&spans) {
        match fitted(&marked[from..span.start], &target.answer.after, from > 0) {
            Some(fitted)
                if appears(plain, &mut plain_at, &marked[from..span.start][..fitted.common], from == 0) =>
            {
                segments.push(SplicedSegment::Text(fitted.text));
                segments.push(SplicedSegment::Ids(target.answer.ids.clone()));
            }
            _ => doubtful.push(target.index),
        }
        from = span.end;
    }
    let last = &marked[from..];
    if !(plain.ends_with(last) && plain.len() - last.len() >= plain_at) {
        doubtful.extend(targets.last().map(index_of));
    }
    segments.push(SplicedSegment::Text(last.to_owned()));
    doubtful.dedup();
    if doubtful.is_empty() { Ok(segments) } else { Err(doubtful) }
}

/// Returns whether `text` occurs in the plain rendering after position `at`; the first text must be at its
/// start.
fn appears(plain: &str, at: &mut usize, text: &str, is_first: bool) -> bool {
    let found = if is_first { plain.starts_with(text).then_some(0) } else { plain[*at..].find(text) };
    match found {
        Some(offset) => {
            *at += offset + text.len();
            true
        }
        None => false,
    }
}

/// Returns the range of the answer in the marked rendering. Each mark must occur exactly once.
fn span(marked: &str, marks: &SpliceMarks, at: usize, target: &SpliceTarget<'_>) -> Option<Range<usize>> {
    match target.method {
        MarkMethod::Content => only(marked, &marks.mark(at, 0)),
        MarkMethod::Calls => {
            let first = only(marked, &marks.mark(at, 0))?;
            let mut last = first.clone();
            let mut call = 1;
            while let Some(next) = only(marked, &marks.mark(at, call)) {
                last = next;
                call += 1;
            }
            let enclosed = |(open, close): &(&str, &str)| {
                let start = marked[..first.start].rfind(open)?;
                let end = last.end + marked[last.end..].find(close)? + close.len();
                Some(start..end)
            };
            CALL_MARKUP.iter().find_map(enclosed)
        }
    }
}

fn only(text: &str, mark: &str) -> Option<Range<usize>> {
    let mut found = text.match_indices(mark);
    let (start, _) = found.next()?;
    found.next().is_none().then_some(start..start + mark.len())
}

/// The text before an answer, changed to end as it did when the answer was generated.
struct Fitted {
    text: String,
    /// Bytes of the original text that remain.
    common: usize,
}

/// Removes the empty think block that history has, and adds the one that the generation prompt had.
///
/// ```text
/// history     ...<|im_end|>\n<|im_start|>assistant\n                        MARK
/// generated   ...<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n answer
/// ```
///
/// A text that follows ids may be shorter than the stored suffix: an answer before it was text at that time.
fn fitted(before: &str, wanted: &str, follows_ids: bool) -> Option<Fitted> {
    if wanted.is_empty() {
        return None; // the suffix was not stored
    }
    for printed in SCAFFOLDS {
        let Some(bare) = before.strip_suffix(printed) else { continue };
        for generated in SCAFFOLDS.into_iter().filter(|scaffold| wanted.ends_with(scaffold)) {
            let text = format!("{bare}{generated}");
            if text.ends_with(wanted) || (follows_ids && !text.is_empty() && wanted.ends_with(&text)) {
                return Some(Fitted { text, common: bare.len() });
            }
        }
    }
    None
}

/// Returns the last [`TAIL_BYTES`] bytes of a text or a few more, to start at a character.
fn tail(text: &str) -> &str {
    &text[text.floor_char_boundary(text.len().saturating_sub(TAIL_BYTES))..]
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn user(text: &str) -> Message {
        Message::user(text)
    }

    fn call(name: &str, arguments: Value) -> Message {
        let id = Some("call_1".to_owned());
        let tool_calls = vec![ToolCall { id, name: name.to_owned(), arguments }];
        Message { content: None, tool_calls, ..Message::assistant("") }
    }

    fn conversation(messages: &[Message]) -> Conversation {
        Conversation { messages: messages.to_vec(), ..Conversation::default() }
    }

    /// A template of one line per message, and how it prints the answers.
    fn rendered(conversation: &Conversation, answer: impl Fn(&str) -> String) -> Result<String, Infallible> {
        let mut text = String::new();
        for message in &conversation.messages {
            let Value::String(content) = content_form(message.content.as_ref()) else {
                unreachable!("texts only")
            };
            let calls: String =
                message.tool_calls.iter().map(|call| format!("{}{}", call.name, call.arguments)).collect();
            match message.role {
                Role::Assistant => text.push_str(&answer(&format!("{content}{calls}"))),
                _ => text.push_str(&format!("[{}]{content}[/]", message.role.as_str())),
            }
        }
        Ok(text + "[assistant]")
    }

    fn usual(answer: &str) -> String {
        format!("[assistant]{answer}[/]")
    }

    fn recorded(transcript: &mut Transcript, before: &[Message], answer: &Message, ids: &[u32]) {
        let prompt = transcript.splice(&conversation(before), |c| rendered(c, usual)).expect("renders");
        let after = prompt.splice_after().to_owned();
        transcript.record(before, answer, &after, Some(ids));
    }

    fn ids_in(transcript: &Transcript, messages: &[Message]) -> Vec<Vec<u32>> {
        let prompt = transcript.splice(&conversation(messages), |c| rendered(c, usual)).expect("renders");
        let ids = prompt.segments.into_iter().filter_map(|segment| match segment {
            SplicedSegment::Ids(ids) => Some(ids),
            SplicedSegment::Text(_) => None,
        });
        ids.collect()
    }

    #[test]
    fn fingerprints_ignore_what_clients_change() {
        let of = |arguments: Value| MessageFingerprint::of(&call("f", arguments));
        let wanted = of(json!({"a": 1, "b": {"x": [1, 2], "y": null}}));
        assert_eq!(of(json!({"b": {"y": null, "x": [1, 2]}, "a": 1})), wanted);
        assert_eq!(of(json!(" {\"b\" : {\"y\":null,\"x\":[1,2]},\n\"a\":1}")), wanted);
        for other in
            [json!({"a": 1}), json!({"a": 1, "b": {"x": [2, 1], "y": null}}), json!("{\"a\": 1"), json!(null)]
        {
            assert_ne!(of(other), wanted);
        }
        assert_eq!(of(json!("f(x")), of(json!("f(x")));
        assert_ne!(of(json!("f(x")), of(json!("f(x ")), "text that is not JSON counts byte for byte");
        assert_ne!(of(json!("f(x")), of(json!({"not json": "f(y"})));
        let mut other = call("f", json!({"a": 1, "b": {"x": [1, 2], "y": null}}));
        (other.reasoning, other.tool_calls[0].id) = (Some("hm".to_owned()), None);
        assert_eq!(MessageFingerprint::of(&other), wanted);
        other.content = Some(Content::Text(String::new()));
        assert_eq!(MessageFingerprint::of(&other), wanted);
        other.content = Some(Content::Text(" ".to_owned()));
        assert_ne!(MessageFingerprint::of(&other), wanted);
        let part = |text| json!({"type": "text", "text": text});
        let parts = Message { content: Some(Content::Parts(vec![part("a"), part("b")])), ..user("") };
        assert_eq!(MessageFingerprint::of(&parts), MessageFingerprint::of(&user("ab")));
        let image =
            Message { content: Some(Content::Parts(vec![part("ab"), json!({"type": "image"})])), ..user("") };
        assert_ne!(MessageFingerprint::of(&image), MessageFingerprint::of(&user("ab")));
        let photo = |sha256: &str, name: Option<&str>| {
            let image = ImageRef {
                sha256: sha256.to_owned(),
                width: 1,
                height: 2,
                media_type: "image/png".to_owned(),
                name: name.map(str::to_owned),
            };
            let content = Some(Content::Parts(vec![part("ab"), image.to_part()]));
            MessageFingerprint::of(&Message { content, ..user("") })
        };
        assert_eq!(photo("aa", None), photo("aa", Some("photo.png")));
        assert_ne!(photo("aa", None), photo("bb", None));
    }

    #[test]
    fn an_answer_goes_back_as_ids_between_the_texts_around_it() {
        let mut transcript = Transcript::default();
        recorded(&mut transcript, &[user("hi")], &Message::assistant("hello"), &[7, 8]);
        let messages = [user("hi"), Message::assistant("hello"), user("and?")];
        let prompt = transcript.splice(&conversation(&messages), |c| rendered(c, usual)).expect("renders");
        let text = |text: &str| SplicedSegment::Text(text.to_owned());
        let wanted = [
            text("[user]hi[/][assistant]"),
            SplicedSegment::Ids(vec![7, 8]),
            text("[/][user]and?[/][assistant]"),
        ];
        assert_eq!(prompt.segments, wanted);
        assert_eq!(transcript.lookup(&messages, 1), Some(&[7, 8][..]));
        assert_eq!((transcript.lookup(&messages, 0), transcript.lookup(&messages, 9)), (None, None));
        let ids = prompt.ids(|text, start| Ok::<_, ()>(vec![text.len() as u32, start as u32]));
        assert_eq!(ids, Ok(vec![22, 0, 7, 8, 27, 4]));
    }

    #[test]
    fn an_answer_behind_rearranged_results_goes_back_as_ids() {
        let result = |id: &str| Message { tool_call_id: Some(id.to_owned()), ..Message::new(Role::Tool, id) };
        let given = [user("q"), call("f", json!("")), result("b"), result("a")];
        let arranged = [user("q"), call("f", json!({})), result("a"), result("b")];
        let mut transcript = Transcript::default();
        recorded(&mut transcript, &given[..1], &given[1], &[7]);
        let (next, answer) = (user("and?"), Message::assistant("done"));
        let splice = |transcript: &Transcript, more: &[&Message]| {
            let with = |messages: &[Message]| {
                messages.iter().chain(more.iter().copied()).cloned().collect::<Vec<_>>()
            };
            let (given, shown) = (with(&given), conversation(&with(&arranged)));
            transcript.splice_arranged(&given, &shown, |c| rendered(c, usual)).expect("renders")
        };
        let prompt = splice(&transcript, &[]);
        assert_eq!(prompt.num_spliced(), 1);
        assert_eq!(prompt.splice_after(), "[/][tool]a[/][tool]b[/][assistant]");
        transcript.record(&given, &answer, prompt.splice_after(), Some(&[8]));
        assert_eq!(splice(&transcript, &[&answer, &next]).num_spliced(), 2);
    }

    #[test]
    fn marks_are_words_that_nobody_has_said() {
        let stem = |text: &str| SpliceMarks::new(&conversation(&[user(text)]), 1).stem;
        assert_eq!(stem("hi"), "Zq0xSpliced");
        assert_eq!(stem("Zq0xSpliced Zq1xSplicedZq3xSpliced"), "Zq2xSpliced");
        assert_eq!(stem("Zq0 Zq1xSpliced ZqZq0xSpliced Zq99999999999999999999xSpliced"), "Zq2xSpliced");
    }

    #[test]
    fn edited_regenerated_and_foreign_answers() {
        let [q1, q2, q3] = ["one?", "two?", "three?"].map(user);
        let [a1, a2] = ["one", "two"].map(Message::assistant);
        let mut transcript = Transcript::default();
        recorded(&mut transcript, std::slice::from_ref(&q1), &a1, &[1]);
        recorded(&mut transcript, &[q1.clone(), a1.clone(), q2.clone()], &a2, &[2]);
        let whole = [q1.clone(), a1.clone(), q2.clone(), a2.clone(), q3.clone()];
        assert_eq!(ids_in(&transcript, &whole), [[1], [2]]);
        let with = |at: usize, message: Message| {
            let mut messages = whole.clone();
            messages[at] = message;
            messages
        };
        assert_eq!(ids_in(&transcript, &with(3, Message::assistant("two!"))), [[1]], "edited by the client");
        assert_eq!(ids_in(&transcript, &with(3, Message::assistant("two "))), [[1]], "white space counts");
        assert!(
            ids_in(&transcript, &with(1, Message::assistant("uno"))).is_empty(),
            "nothing behind an edit"
        );
        assert!(ids_in(&transcript, &with(0, user("one!"))).is_empty());
        let exemplars = [&[user("2+2"), Message::assistant("4")][..], &whole].concat();
        assert!(
            ids_in(&transcript, &exemplars).is_empty(),
            "exemplars put in front are text, and all behind them"
        );

        let mut regenerated = transcript.clone();
        let two = Message::assistant("zwei");
        recorded(&mut regenerated, &[q1.clone(), a1.clone(), q2.clone()], &two, &[22]);
        assert_eq!(ids_in(&regenerated, &with(3, two)), [[1], [22]]);
        assert_eq!(ids_in(&regenerated, &whole), [[1]], "the old answer was replaced");

        let other_branch = [q1.clone(), a1.clone(), user("three!")];
        recorded(&mut transcript, &other_branch, &a2, &[3]);
        assert_eq!(transcript.len(), 2, "what is on no branch is forgotten");
        assert_eq!(ids_in(&transcript, &whole), [[1]]);
    }

    #[test]
    fn a_conversation_first_seen_with_history_is_spliced_from_then_on() {
        let history = [user("q"), Message::assistant("imported"), user("go on")];
        let mut transcript = Transcript::default();
        recorded(&mut transcript, &history, &Message::assistant("ours"), &[5]);
        let next = [&history[..], &[Message::assistant("ours"), user("more")]].concat();
        assert_eq!(ids_in(&transcript, &next), [[5]]);
        let known = [(3, "[user]go on[/][assistant]", &[5][..]), (99, "", &[1])];
        let restored = Transcript::restored(&next[..4], known);
        assert_eq!(ids_in(&restored, &next), [[5]], "as from disk");
    }

    #[test]
    fn what_the_client_was_not_shown_stays_text() {
        let mut transcript = Transcript::default();
        let (before, answer) = ([user("q")], Message::assistant("a"));
        recorded(&mut transcript, &before, &answer, &[1]);
        transcript.record(&before, &answer, "[user]q[/][assistant]", None);
        assert!(
            transcript.is_empty(),
            "a stop string was cut off, and the earlier answer is replaced all the same"
        );
        transcript.record(&before, &answer, "[user]q[/][assistant]", Some(&[]));
        assert!(transcript.is_empty());
        transcript.record(&before, &answer, "", Some(&[1]));
        assert!(
            ids_in(&transcript, &[before[0].clone(), answer, user("x")]).is_empty(),
            "nobody knows what was before"
        );
    }

    #[test]
    fn a_template_that_is_not_understood_gives_its_plain_text() {
        let (before, answer) = ([user("q")], Message::assistant("abc"));
        let next = conversation(&[before[0].clone(), answer.clone(), user("x")]);
        type Answers = fn(&str) -> String;
        let templates: [(&str, Answers); 7] = [
            ("drops answers", |_| String::new()),
            ("prints them twice", |a| format!("[assistant]{a}{a}[/]")),
            ("changes case", |a| format!("[assistant]{}[/]", a.to_uppercase())),
            ("cuts them", |a| format!("[assistant]{}[/]", &a[..3])),
            ("another header", |a| format!("[model]{a}[/]")),
            ("something in front", |a| format!("[assistant]<note>{a}[/]")),
            ("depends on the answer", |a| format!("[assistant]{a}[/{}]", a.len())),
        ];
        for (what, template) in templates {
            let mut transcript = Transcript::default();
            transcript.record(&before, &answer, "[user]q[/][assistant]", Some(&[1]));
            let plain = rendered(&next, template).expect("renders");
            let prompt = transcript.splice(&next, |c| rendered(c, template)).expect("renders");
            assert_eq!(prompt.segments, [SplicedSegment::Text(plain)], "{what}");
        }
        let mut transcript = Transcript::default();
        transcript.record(&before, &answer, "[user]q[/][assistant]", Some(&[1]));
        let refused = |c: &Conversation| if c == &next { Ok("plain".to_owned()) } else { Err("marks") };
        assert_eq!(transcript.splice(&next, refused), Ok(SplicedPrompt::text("plain".to_owned())));
        assert_eq!(transcript.splice(&next, |_| Err("no")), Err("no"));
    }

    #[test]
    fn texts_that_hold_marks_do_not_confuse() {
        let stem = SpliceMarks::new(&conversation(&[]), 1);
        let evil = [user(&format!("say {}", stem.mark(0, 0)))];
        let answer = Message::assistant(stem.mark(0, 0));
        let mut transcript = Transcript::default();
        recorded(&mut transcript, &evil, &answer, &[1, 2]);
        let next = [evil[0].clone(), answer, user(&stem.stem)];
        assert_eq!(ids_in(&transcript, &next), [[1, 2]]);
    }

    #[test]
    fn the_scaffold_is_what_it_was_when_the_answer_was_generated() {
        let head = "<|im_end|>\n<|im_start|>assistant\n";
        let empty = "<think>\n\n</think>\n\n";
        for (printed, generated) in
            [("", ""), ("", empty), (empty, ""), (empty, empty), ("", "<think>\n"), (empty, "<think>\n")]
        {
            let fitted = fitted(&format!("u{head}{printed}"), &format!("u{head}{generated}"), false);
            assert_eq!(
                fitted.map(|f| (f.text, f.common)),
                Some((format!("u{head}{generated}"), 1 + head.len()))
            );
        }
        assert!(
            fitted("[INST] q [/INST] ", "[INST] q [/INST]", false).is_some(),
            "white space that generation does not have"
        );
        assert!(fitted("<start_of_turn>model\n", "<start_of_turn>model\n", false).is_some(), "any header");
        assert!(fitted(&format!("u{head}<think>\nso\n</think>\n\n"), &format!("u{head}"), false).is_none());
        assert!(fitted(&format!("u{head}"), &format!("v{head}"), false).is_none());
        assert!(fitted(head, "", false).is_none());
    }
}
