//! The transcript: answers of this session go back into later prompts as the exact token ids that were generated.
//!
//! A chat template prints an earlier answer as text, which need not become the same ids again (re-serialised tool
//! arguments, think blocks, merges), and then nothing after it can be resumed. So each answer is remembered under the
//! chain of messages before it; when a later conversation holds it there, the prompt becomes text, ids, text.
//!
//! Pure: rendering and encoding are passed in. Any doubt (a mark the template changed, a surrounding it would not have
//! printed, another text in front of the answer than when it was generated) makes that answer plain text: the prompt
//! then says the same, and costs a prefill. Beyond the reference, which counts answers: a conversation first seen with
//! history resumes too, because foreign answers have no entry and do not shift ours.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use serde_json::{Value, json};

use crate::template::message::{Content, Conversation, Message, Role, ToolCall};

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    Text(String),
    /// An answer as it was generated.
    Ids(Vec<u32>),
}

/// A prompt, ready to be encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplicedPrompt {
    /// Text at both ends; never two of a kind in a row.
    pub segments: Vec<Segment>,
}

impl SplicedPrompt {
    fn text(text: String) -> Self {
        Self { segments: vec![Segment::Text(text)] }
    }

    /// Answers that went in as ids.
    pub fn num_spliced(&self) -> usize {
        self.segments.iter().filter(|segment| matches!(segment, Segment::Ids(_))).count()
    }

    /// What the answer to this prompt will stand behind: pass it to [`Transcript::record`], also from disk.
    pub fn splice_after(&self) -> &str {
        match self.segments.last() {
            Some(Segment::Text(text)) => tail(text),
            _ => "",
        }
    }

    /// All ids. `encode` gets each text and whether it begins the prompt: only there a BOS, or the space that some
    /// tokenizers put before a text, belongs.
    ///
    /// # Errors
    /// The first of `encode`.
    pub fn ids<E>(&self, mut encode: impl FnMut(&str, bool) -> Result<Vec<u32>, E>) -> Result<Vec<u32>, E> {
        let mut ids = Vec::new();
        for (at, segment) in self.segments.iter().enumerate() {
            match segment {
                Segment::Text(text) if text.is_empty() && at > 0 => {}
                Segment::Text(text) => ids.extend(encode(text, at == 0)?),
                Segment::Ids(run) => ids.extend_from_slice(run),
            }
        }
        Ok(ids)
    }
}

/// How much of a prompt's end is remembered: an assistant header with its scaffold, and some of what is before.
const TAIL_BYTES: usize = 96;

/// What templates put between the assistant header and an answer, in a generation prompt, in history, or in both: think
/// blocks that are empty or only opened (Qwen3 and its kin, Gemma 4), and white space (Mistral's `[/INST] `).
const SCAFFOLDS: [&str; 9] = [
    "",
    "<think>\n\n</think>\n\n",
    "<think>\n\n</think>\n",
    "<think></think>\n",
    "<think></think>",
    "<think>\n",
    "<|channel>thought\n<channel|>",
    " ",
    "\n",
];

/// How templates enclose a tool call that they do not print where the message's text stands (Gemma 4).
const CALL_MARKUP: [(&str, &str); 1] = [("<|tool_call>", "<tool_call|>")];

/// Renderings with marks before all is plain text. Each but the last gives up an answer or a way of marking.
const MAX_ATTEMPTS: usize = 4;

/// An answer in a form that ignores what clients change: call ids, reasoning, white space and key order of arguments,
/// whether a text is one part or a list of them. Equal forms are the same answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Also for messages of other roles, where it serves the chain.
    pub fn of(message: &Message) -> Self {
        let calls: Vec<Value> =
            message.tool_calls.iter().map(|call| json!([call.name, normal_arguments(&call.arguments)])).collect();
        Self(json!([content_form(message.content.as_ref()), calls]).to_string())
    }
}

/// No content and an empty one are the same; so are a text and its parts, when all of them are text.
fn content_form(content: Option<&Content>) -> Value {
    match content {
        None => Value::String(String::new()),
        Some(Content::Text(text)) => Value::String(text.clone()),
        Some(Content::Parts(parts)) => {
            let texts: Option<String> = parts.iter().map(text_of_part).collect();
            texts.map_or_else(|| Value::Array(parts.iter().map(sorted).collect()), Value::String)
        }
    }
}

fn text_of_part(part: &Value) -> Option<&str> {
    (part.get("type")? == "text").then(|| part.get("text")?.as_str())?
}

/// Arguments given as JSON text are what the text says; text that is not JSON is itself, byte for byte.
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
            let by_key: BTreeMap<&String, Value> = map.iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(by_key.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

/// Stands for the messages before an answer. 64 bits are enough: an entry also holds the answer's whole fingerprint,
/// so that a collision would splice ids of the same answer, which read the same.
type Chain = u64;

/// The chain before each message, and after the last.
fn chains(messages: &[Message]) -> Vec<Chain> {
    let mut chains = vec![0];
    for message in messages {
        let mut hasher = DefaultHasher::new();
        (chains[chains.len() - 1], message.role.as_str(), &message.name, Fingerprint::of(message)).hash(&mut hasher);
        chains.push(hasher.finish());
    }
    chains
}

/// One answer of this session.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    fingerprint: Fingerprint,
    ids: Vec<u32>,
    /// The end of the prompt it was generated from.
    after: String,
}

/// The answers of one session that can go back as ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transcript {
    /// One per place in the conversation: an answer generated anew replaces the old one.
    answers: BTreeMap<Chain, Answer>,
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

    /// Remembers the answer to the conversation `before`, once it is final. Answers that are not on this branch of the
    /// conversation are forgotten, so there are never more than the conversation has. `after` is the prompt's
    /// [`SplicedPrompt::splice_after`]; `ids` are what was generated, without the end-of-generation token, and `None`
    /// when they are not what the client was shown (a stop string was cut off).
    pub fn record(&mut self, before: &[Message], answer: &Message, after: &str, ids: Option<&[u32]>) {
        let chains = chains(before);
        let here = chains[before.len()];
        self.answers.retain(|chain, _| *chain != here && chains.contains(chain));
        if let Some(ids) = ids.filter(|ids| !ids.is_empty()) {
            let fingerprint = Fingerprint::of(answer);
            self.answers.insert(here, Answer { fingerprint, ids: ids.to_vec(), after: after.to_owned() });
        }
    }

    /// The ids of the message at `index`, when it is an answer of this session with the same messages before it.
    pub fn lookup(&self, messages: &[Message], index: usize) -> Option<&[u32]> {
        let message = messages.get(index).filter(|message| message.role == Role::Assistant)?;
        let chain = chains(&messages[..index])[index];
        self.find(chain, message).map(|answer| answer.ids.as_slice())
    }

    fn find(&self, chain: Chain, message: &Message) -> Option<&Answer> {
        self.answers.get(&chain).filter(|answer| answer.fingerprint == Fingerprint::of(message))
    }

    /// The prompt of a conversation, its known answers as ids. `render` gives the text that ends with the generation
    /// prompt; it is called once for the plain text, and once more, rarely more often, for marked ones.
    ///
    /// # Errors
    /// That of rendering the conversation as it is; a failure on a marked one only means plain text.
    pub fn splice<E>(
        &self,
        conversation: &Conversation,
        mut render: impl FnMut(&Conversation) -> Result<String, E>,
    ) -> Result<SplicedPrompt, E> {
        let plain = render(conversation)?;
        let mut places = self.places(&conversation.messages);
        for _ in 0..MAX_ATTEMPTS {
            if places.is_empty() {
                break;
            }
            let marks = Marks::new(conversation, places.len());
            let marked = render(&marks.applied(conversation, &places));
            let Ok(marked) = marked else {
                places = second_way(places);
                continue;
            };
            match cut(&marked, &plain, &marks, &places) {
                Ok(segments) => return Ok(SplicedPrompt { segments }),
                Err(doubtful) => places = reconsidered(places, &doubtful),
            }
        }
        Ok(SplicedPrompt::text(plain))
    }

    fn places(&self, messages: &[Message]) -> Vec<Place<'_>> {
        let chains = chains(messages);
        let answers = messages.iter().enumerate().filter(|(_, message)| message.role == Role::Assistant);
        let found = answers.filter_map(|(index, message)| {
            let answer = self.find(chains[index], message)?;
            let is_call = !message.tool_calls.is_empty() && content_form(message.content.as_ref()) == "";
            Some(Place { index, answer, way: Way::Content, has_second_way: is_call })
        });
        found.collect()
    }
}

/// An answer that is to go in as ids.
#[derive(Debug, Clone)]
struct Place<'a> {
    /// Of the message in the conversation.
    index: usize,
    answer: &'a Answer,
    way: Way,
    /// A tool call without text can also be marked in its arguments.
    has_second_way: bool,
}

/// How an answer is marked in the conversation that is rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The message becomes a plain answer whose text is the mark.
    Content,
    /// The message stays a tool call whose arguments are the mark; the answer is the whole of the markup around it.
    Calls,
}

/// After doubt: the doubtful ones are marked the second way, or given up.
fn reconsidered<'a>(places: Vec<Place<'a>>, doubtful: &[usize]) -> Vec<Place<'a>> {
    let keep = |place: Place<'a>| match doubtful.contains(&place.index) {
        false => Some(place),
        true if place.has_second_way => Some(Place { way: Way::Calls, has_second_way: false, ..place }),
        true => None,
    };
    places.into_iter().filter_map(keep).collect()
}

/// After a template refused the marked conversation: every call is marked the second way, or there is nothing left.
fn second_way(places: Vec<Place<'_>>) -> Vec<Place<'_>> {
    if !places.iter().any(|place| place.has_second_way) {
        return Vec::new();
    }
    let calls: Vec<usize> =
        places.iter().filter(|place| place.has_second_way).map(|place| place.index).collect();
    reconsidered(places, &calls)
}

/// Words that nothing in a conversation contains, all of one length.
struct Marks {
    stem: String,
    count: usize,
}

impl Marks {
    fn new(conversation: &Conversation, count: usize) -> Self {
        // The debug form holds every text of the conversation, its letters and digits as they are.
        let everything = format!("{conversation:?}");
        let stems = (0u32..).map(|n| format!("Zq{n}xSpliced"));
        let stem = { stems }.find(|stem| !everything.contains(stem)).expect("a conversation is finite");
        Self { stem, count }
    }

    /// Letters and digits only: templates trim, escape and split on much else.
    fn mark(&self, place: usize, call: usize) -> String {
        debug_assert!(place < self.count);
        format!("{}{place:06}c{call:03}Qz", self.stem)
    }

    fn applied(&self, conversation: &Conversation, places: &[Place<'_>]) -> Conversation {
        let mut marked = conversation.clone();
        for (at, place) in places.iter().enumerate() {
            let message = &mut marked.messages[place.index];
            message.reasoning = None;
            match place.way {
                Way::Content => {
                    message.content = Some(Content::Text(self.mark(at, 0)));
                    message.tool_calls = Vec::new();
                }
                Way::Calls => {
                    let calls = message.tool_calls.iter().enumerate();
                    message.tool_calls = calls
                        .map(|(n, call)| ToolCall { arguments: json!({ self.mark(at, n): 0 }), ..call.clone() })
                        .collect();
                }
            }
        }
        marked
    }
}

/// Cuts the marked rendering at its marks; `Err` names the messages in doubt.
fn cut(marked: &str, plain: &str, marks: &Marks, places: &[Place<'_>]) -> Result<Vec<Segment>, Vec<usize>> {
    let index_of = |place: &Place<'_>| place.index;
    let spans: Vec<Option<Range<usize>>> =
        places.iter().enumerate().map(|(at, place)| span(marked, marks, at, place, plain)).collect();
    let unmarked: Vec<usize> =
        places.iter().zip(&spans).filter(|(_, span)| span.is_none()).map(|(place, _)| place.index).collect();
    if !unmarked.is_empty() {
        return Err(unmarked);
    }
    let spans: Vec<Range<usize>> = spans.into_iter().flatten().collect();
    if spans.windows(2).any(|pair| pair[0].end > pair[1].start) {
        return Err(places.iter().map(index_of).collect());
    }
    let mut segments = Vec::new();
    let mut doubtful = Vec::new();
    let mut plain_at = 0;
    let mut from = 0;
    for (place, span) in places.iter().zip(&spans) {
        match fitted(&marked[from..span.start], place, from > 0) {
            Some(fitted) if appears(plain, &mut plain_at, &marked[from..span.start][..fitted.common], from == 0) => {
                segments.push(Segment::Text(fitted.text));
                segments.push(Segment::Ids(place.answer.ids.clone()));
            }
            _ => doubtful.push(place.index),
        }
        from = span.end;
    }
    let last = &marked[from..];
    if !(plain.ends_with(last) && plain.len() - last.len() >= plain_at) {
        doubtful.extend(places.last().map(index_of));
    }
    segments.push(Segment::Text(last.to_owned()));
    doubtful.dedup();
    if doubtful.is_empty() { Ok(segments) } else { Err(doubtful) }
}

/// Whether the plain rendering goes on with `text` behind what was found of it so far: at its start for the first.
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

/// Where the answer stands in the marked rendering. Each mark must be there exactly once.
fn span(marked: &str, marks: &Marks, at: usize, place: &Place<'_>, plain: &str) -> Option<Range<usize>> {
    match place.way {
        Way::Content => only(marked, &marks.mark(at, 0)),
        Way::Calls => {
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
                plain.contains(open).then_some(start..end)
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

/// The text before an answer, made to end as it did when the answer was generated.
struct Fitted {
    text: String,
    /// How much of the text that was there is left.
    common: usize,
}

/// Takes the scaffold that history has off, and puts on the one that the generation prompt had.
///
/// ```text
/// history     ...<|im_end|>\n<|im_start|>assistant\n                        MARK
/// generated   ...<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n answer
/// ```
fn fitted(before: &str, place: &Place<'_>, follows_ids: bool) -> Option<Fitted> {
    let wanted = &place.answer.after;
    for printed in SCAFFOLDS {
        let Some(bare) = before.strip_suffix(printed) else { continue };
        for generated in SCAFFOLDS.into_iter().filter(|scaffold| wanted.ends_with(scaffold)) {
            let text = format!("{bare}{generated}");
            if text.ends_with(wanted) && (wanted.len() >= TAIL_BYTES.min(text.len()) || follows_ids) {
                return Some(Fitted { text, common: bare.len() });
            }
        }
    }
    None
}

/// The last [`TAIL_BYTES`] of a text, at least: it begins at a character.
fn tail(text: &str) -> &str {
    &text[text.floor_char_boundary(text.len().saturating_sub(TAIL_BYTES))..]
}
