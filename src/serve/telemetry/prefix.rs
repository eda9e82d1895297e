//! Finds out which part of a prompt broke the prefix that an earlier prompt of the same client had: by message and character, with
//! the usual causes by name (a date, a counter, tools in another order) and what it cost.
//!
//! A client's prompts are compared with its last ones, as messages, before the chat template. A prompt that continues an earlier one
//! breaks nothing, and neither does another question behind the same beginning. Everything is in memory and bounded; the log gets
//! places and causes, never text. The first prompt with tools is kept as long as the server runs, for `launch --warm`.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use llmctl_engine::{EngineSessionName, Started};
use llmctl_template::{Content, Conversation, Message, Role};

/// Prompts that are kept for comparison, and bytes of their text.
const MAX_PROMPTS: usize = 64;
const MAX_BYTES: usize = 32 << 20;
/// Clients that are told apart; all others are one.
const MAX_CLIENTS: usize = 32;
const MAX_CLIENT_CHARS: usize = 32;
/// Characters of an excerpt.
const MAX_EXCERPT: usize = 60;
/// Characters around a change among which names of months and days are looked for.
const AROUND: usize = 16;

/// A prompt that was answered.
#[derive(Debug, Clone, Copy)]
pub struct AnsweredPrompt<'a> {
    /// The `User-Agent` of the client.
    pub user_agent: Option<&'a str>,
    /// Owner of its key.
    pub owner: Option<&'a str>,
    pub model: &'a str,
    pub session: Option<&'a EngineSessionName>,
    pub conversation: &'a Conversation,
    pub started: &'a Started,
    /// Time for the tokens that were computed.
    pub prefill: Duration,
}

/// Where a prompt parts from an earlier one that it repeats otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixBreak {
    pub client: String,
    /// Number of the message, from 0, and its role; `None` for the tools.
    pub message: Option<(usize, String)>,
    /// Equal characters of the message before the change.
    pub character: usize,
    pub cause: BreakCause,
    /// Text before the change, the earlier text and the new one, each cut to an excerpt.
    pub before: String,
    pub was: String,
    pub now: String,
    /// Prompt tokens that were computed again for it, at most, and the time for that.
    pub tokens: usize,
    pub ms: u64,
}

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum BreakCause {
    BillingHeader,
    Countdown,
    Date,
    Number,
    Id,
    ToolsOrder,
    Tools,
    #[strum(serialize = "inserted_message")]
    Inserted,
    #[strum(serialize = "removed_message")]
    Removed,
    Text,
}

impl BreakCause {
    /// Returns the name in JSON, in metrics and in the log.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns what to do about it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::BillingHeader => "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for Claude Code",
            Self::Countdown => {
                "set CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off for Claude Code; else put the count at the end"
            }
            Self::Date => "leave the time of day out, or put it into the last message",
            Self::Number => "put what counts into the last message",
            Self::Id => "use one id for the conversation, or leave it out",
            Self::ToolsOrder => "send the tools in the same order each time",
            Self::Tools => "send the same tools with each request, and limit them by tool_choice",
            Self::Inserted => "add messages at the end",
            Self::Removed => "keep earlier messages, or compact rarely",
            Self::Text => "keep what was sent as it was",
        }
    }
}

impl PrefixBreak {
    pub fn to_json(&self) -> Value {
        json!({
            "client": self.client,
            "message": self.message.as_ref().map(|(number, _)| number),
            "role": self.message.as_ref().map_or("tools", |(_, role)| role),
            "character": self.character,
            "cause": self.cause.name(),
            "before": self.before,
            "was": self.was,
            "now": self.now,
            "tokens": self.tokens,
            "ms": self.ms,
            "advice": self.cause.advice(),
        })
    }

    /// Returns the line of the log.
    pub fn line(&self) -> String {
        let Self { client, character, cause, tokens, ms, .. } = self;
        let mut line = format!("prefix_break client={client} ");
        let written = match &self.message {
            Some((number, role)) => write!(line, "message={number} role={role} "),
            None => write!(line, "message=tools "),
        };
        written.expect("a string takes everything");
        let (cause, advice) = (cause.name(), cause.advice());
        line + &format!("character={character} cause={cause} tokens={tokens} ms={ms} advice=\"{advice}\"")
    }
}

/// A part of a prompt: the tools, or a message.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Section {
    /// `None` for the tools.
    role: Option<Role>,
    text: String,
}

#[derive(Debug)]
struct SeenPrompt {
    client: String,
    owner: Option<String>,
    model: String,
    session: Option<EngineSessionName>,
    sections: Vec<Section>,
    num_bytes: usize,
    prompt_tokens: usize,
    broken: Option<PrefixBreak>,
}

/// The last prompts of all clients.
#[derive(Debug, Default)]
pub struct PrefixWatch {
    state: Mutex<WatchState>,
    agent: OnceLock<Conversation>,
}

#[derive(Debug, Default)]
struct WatchState {
    seen: VecDeque<SeenPrompt>,
    clients: BTreeSet<String>,
}

impl PrefixWatch {
    /// Compares a prompt with the last ones of its client, and keeps it for the next.
    pub fn note(&self, prompt: AnsweredPrompt<'_>) -> Option<PrefixBreak> {
        if !prompt.conversation.tools.is_empty() {
            self.agent.get_or_init(|| before_questions(prompt.conversation));
        }
        let sections = sections(prompt.conversation);
        let mut state = self.state.lock();
        let client = state.client(prompt.user_agent);
        let is_of_client = |seen: &&SeenPrompt| {
            seen.client == client && seen.owner.as_deref() == prompt.owner && seen.model == prompt.model
        };
        let is_of_session =
            |seen: &SeenPrompt| seen.session.is_some() && seen.session.as_ref() == prompt.session;
        let nearest = state.seen.iter().filter(is_of_client);
        let nearest = nearest.max_by_key(|seen| (is_of_session(seen), common(&seen.sections, &sections)));
        let broken = nearest.and_then(|seen| {
            let change = change(&seen.sections, &sections, is_of_session(seen))?;
            let Started { prompt_tokens, reuse, .. } = prompt.started;
            let computed = prompt_tokens - reuse.cached_tokens;
            let tokens = seen.prompt_tokens.min(*prompt_tokens).saturating_sub(reuse.cached_tokens);
            let ms = prompt.prefill.as_secs_f64() * 1e3 * tokens as f64 / computed.max(1) as f64;
            Some(PrefixBreak { client: client.clone(), tokens, ms: ms.round() as u64, ..change })
        });
        // A prompt replaces those that it continues.
        state.seen.retain(|seen| !(is_of_client(&seen) && sections.starts_with(&seen.sections)));
        let num_bytes = sections.iter().map(|section| section.text.len()).sum();
        let (owner, model) = (prompt.owner.map(str::to_owned), prompt.model.to_owned());
        let (session, prompt_tokens) = (prompt.session.cloned(), prompt.started.prompt_tokens);
        let seen = SeenPrompt {
            client,
            owner,
            model,
            session,
            sections,
            num_bytes,
            prompt_tokens,
            broken: broken.clone(),
        };
        state.seen.push_back(seen);
        let is_full = |seen: &VecDeque<SeenPrompt>| {
            seen.len() > MAX_PROMPTS || seen.iter().map(|seen| seen.num_bytes).sum::<usize>() > MAX_BYTES
        };
        while is_full(&state.seen) {
            state.seen.pop_front();
        }
        broken
    }

    /// Returns the prompt of the agent whose request with tools was the first: what stands before the user's first message.
    pub fn agent_prompt(&self) -> Option<&Conversation> {
        self.agent.get()
    }

    /// Returns the break of the session's last prompt.
    pub fn last(&self, session: &EngineSessionName) -> Option<PrefixBreak> {
        let state = self.state.lock();
        state.seen.iter().rev().find(|seen| seen.session.as_ref() == Some(session))?.broken.clone()
    }
}

impl WatchState {
    /// Returns the first word of what a client calls itself, without a version: a label of metrics.
    fn client(&mut self, user_agent: Option<&str>) -> String {
        let name = user_agent.unwrap_or_default().split(['/', ' ']).next().unwrap_or_default();
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
        let name: String = name.chars().filter(is_plain).take(MAX_CLIENT_CHARS).collect();
        let name = if name.is_empty() { "unknown".to_owned() } else { name };
        if self.clients.len() < MAX_CLIENTS {
            self.clients.insert(name.clone());
        }
        if self.clients.contains(&name) { name } else { "other".to_owned() }
    }
}

fn before_questions(conversation: &Conversation) -> Conversation {
    let is_before = |message: &&Message| message.role != Role::User;
    let messages = conversation.messages.iter().take_while(is_before).cloned().collect();
    let Conversation { tools, documents, kwargs, .. } = conversation;
    Conversation { messages, tools: tools.clone(), documents: documents.clone(), kwargs: kwargs.clone() }
}

fn sections(conversation: &Conversation) -> Vec<Section> {
    let tools = (!conversation.tools.is_empty())
        .then(|| Section { role: None, text: Value::from(conversation.tools.clone()).to_string() });
    let message = |message: &Message| {
        let mut text = match &message.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => Value::from(parts.clone()).to_string(),
        };
        for call in &message.tool_calls {
            write!(text, "{} {}", call.name, call.arguments).expect("a string takes everything");
        }
        Section { role: Some(message.role.clone()), text }
    };
    tools.into_iter().chain(conversation.messages.iter().map(message)).collect()
}

/// Returns the number of equal sections, and of equal bytes of the next one.
fn common(old: &[Section], new: &[Section]) -> (usize, usize) {
    let equal = old.iter().zip(new).take_while(|(old, new)| old == new).count();
    let next = old.get(equal).zip(new.get(equal));
    (equal, next.map_or(0, |(old, new)| equal_chars(old.text.chars(), new.text.chars())))
}

fn equal_chars(old: impl Iterator<Item = char>, new: impl Iterator<Item = char>) -> usize {
    old.zip(new).take_while(|(old, new)| old == new).count()
}

/// Returns where `new` parts from `old`, if it repeats it otherwise: in a text of which most is the same, or with the same message
/// behind it, or in the same session.
fn change(old: &[Section], new: &[Section], is_same_session: bool) -> Option<PrefixBreak> {
    let (at, _) = common(old, new);
    let (was, now) = (old.get(at)?, new.get(at)?);
    if at + 1 == new.len() {
        return None; // another question
    }
    let (was_chars, now_chars): (Vec<char>, Vec<char>) =
        (was.text.chars().collect(), now.text.chars().collect());
    let start = equal_chars(was_chars.iter().copied(), now_chars.iter().copied());
    let rest = was_chars.len().min(now_chars.len()) - start;
    let end = equal_chars(was_chars.iter().rev().copied(), now_chars.iter().rev().copied()).min(rest);
    let is_similar = was.role == now.role && 2 * (start + end) >= was_chars.len().max(now_chars.len());
    let is_inserted = new.get(at + 1) == Some(was);
    let is_removed = old.get(at + 1) == Some(now);
    let goes_on = old.get(at + 1).is_some() && old.get(at + 1) == new.get(at + 1);
    if !(is_similar || is_inserted || is_removed || goes_on || is_same_session) {
        return None;
    }
    let (was_text, now_text) = (changed(&was_chars, start, end), changed(&now_chars, start, end));
    let cause = match () {
        () if was.role.is_none() || now.role.is_none() => tools_cause(&was.text, &now.text),
        () if is_inserted => BreakCause::Inserted,
        () if is_removed => BreakCause::Removed,
        () if !is_similar && !goes_on && was.role != now.role => BreakCause::Removed,
        () => text_cause(&was_text, &now_text, &around(&now_chars, start, end)),
    };
    let number = at.saturating_sub(usize::from(new[0].role.is_none()));
    let role = was.role.as_ref().and(now.role.as_ref()); // none if either is the tools
    Some(PrefixBreak {
        client: String::new(),
        message: role.map(|role| (number, role.as_str().to_owned())),
        character: start,
        cause,
        before: now_chars[start.saturating_sub(AROUND)..start].iter().collect(),
        was: was_text.chars().take(MAX_EXCERPT).collect(),
        now: now_text.chars().take(MAX_EXCERPT).collect(),
        tokens: 0,
        ms: 0,
    })
}

/// Returns what is between the equal beginning and end, widened to whole words and numbers.
fn changed(text: &[char], start: usize, end: usize) -> String {
    let is_inner = |c: &&char| c.is_alphanumeric() || "-_:./,".contains(**c);
    let left = text[..start].iter().rev().take(MAX_EXCERPT).take_while(is_inner).count();
    let right = text[text.len() - end..].iter().take(MAX_EXCERPT).take_while(is_inner).count();
    text[start - left..text.len() - end + right].iter().collect()
}

fn around(text: &[char], start: usize, end: usize) -> String {
    text[start.saturating_sub(AROUND)..(text.len() - end + AROUND).min(text.len())].iter().collect()
}

fn tools_cause(was: &str, now: &str) -> BreakCause {
    let tools = |text: &str| {
        let mut tools: Vec<String> = serde_json::from_str::<Vec<Value>>(text)
            .unwrap_or_default()
            .iter()
            .map(Value::to_string)
            .collect();
        tools.sort();
        tools
    };
    if tools(was) == tools(now) { BreakCause::ToolsOrder } else { BreakCause::Tools }
}

/// Names of months and days, by which a date is known.
const DATE_WORDS: &str = "jan feb mar apr may jun jul aug sep oct nov dec monday tuesday wednesday thursday friday saturday sunday";

fn text_cause(was: &str, now: &str, around: &str) -> BreakCause {
    let around = around.to_ascii_lowercase();
    let both = |is: fn(&str) -> bool| is(was) && is(now);
    match () {
        () if around.contains("billing-header") || around.contains("cch=") => BreakCause::BillingHeader,
        () if both(is_number) && around.contains("token") => BreakCause::Countdown,
        () if both(is_date)
            || (both(is_number) && has_date_word(&around))
            || (has_date_word(was) && has_date_word(now)) =>
        {
            BreakCause::Date
        }
        () if both(is_number) => BreakCause::Number,
        () if both(is_id) => BreakCause::Id,
        () => BreakCause::Text,
    }
}

fn is_number(text: &str) -> bool {
    let digits = text.trim_matches(['.', ',', ':', '/', '-']);
    !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || ".,".contains(c))
}

/// `2026-11-29`, `29.11.2026`, `11/29`, `07:36`.
fn is_date(text: &str) -> bool {
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    ["0000-00", "0:00", "00/00", "0.0.0000", "00.00.00"].iter().any(|date| shape.contains(date))
}

fn has_date_word(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    let mut words = text.split(|c: char| !c.is_ascii_alphabetic());
    words.any(|word| {
        let is_name =
            |name: &str| word == name || (name.len() == 3 && word.len() > 4 && word.starts_with(name));
        DATE_WORDS.split(' ').any(is_name)
    })
}

fn is_id(text: &str) -> bool {
    text.len() >= 8 && text.contains(|c: char| c.is_ascii_digit()) && !text.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_engine::Reuse;

    const AGENT: Option<&str> = Some("claude-cli/2.0 (external)");

    fn conversation(messages: &[(&str, &str)]) -> Conversation {
        let messages = messages.iter().map(|(role, text)| Message::new(Role::from(*role), *text)).collect();
        Conversation { messages, ..Conversation::default() }
    }

    fn note(watch: &PrefixWatch, conversation: &Conversation, cached_tokens: usize) -> Option<PrefixBreak> {
        let reuse = Reuse { cached_tokens, ..Reuse::default() };
        let started = &Started { prompt_tokens: 100, max_tokens: 5, seed: 1, reuse, difference: None };
        let (owner, model, prefill) = (None, "m", Duration::from_millis(500));
        watch.note(AnsweredPrompt {
            user_agent: AGENT,
            owner,
            model,
            session: None,
            conversation,
            started,
            prefill,
        })
    }

    /// The break of a second prompt: message, character, cause, what was and what is.
    fn second(
        first: &Conversation,
        then: &Conversation,
    ) -> Option<(Option<usize>, usize, &'static str, String, String)> {
        let watch = PrefixWatch::default();
        assert_eq!(note(&watch, first, 0), None);
        let broken = note(&watch, then, 20)?;
        assert_eq!((&*broken.client, broken.tokens, broken.ms), ("claude-cli", 80, 500));
        let message = broken.message.map(|(number, _)| number);
        Some((message, broken.character, broken.cause.name(), broken.was, broken.now))
    }

    #[test]
    fn causes_are_told_by_what_changed() {
        let system = |text: &str| {
            conversation(&[("system", text), ("user", "hi"), ("assistant", "yes"), ("user", "go")])
        };
        let check = |was: &str, now: &str, cause: &'static str, spans: (&str, &str), character: usize| {
            let expected = (Some(0), character, cause, spans.0.to_owned(), spans.1.to_owned());
            assert_eq!(second(&system(was), &system(now)), Some(expected), "{was:?} {now:?}");
        };
        check(
            "You help. Now: 2026-11-29 07:36.",
            "You help. Now: 2026-11-29 07:41.",
            "date",
            ("07:36.", "07:41."),
            29,
        );
        check(
            "Today is Sunday, 29 November 2026",
            "Today is Monday, 30 November 2026",
            "date",
            ("Sunday, 29", "Monday, 30"),
            9,
        );
        check("It is the 29 of Nov.", "It is the 30 of Nov.", "date", ("29", "30"), 10);
        check("Step 7 of the plan", "Step 12 of the plan", "number", ("7", "12"), 5);
        check(
            "You have 90000 tokens left.",
            "You have 80000 tokens left.",
            "countdown",
            ("90000", "80000"),
            9,
        );
        check(
            "request 1f3a-99aa: be kind",
            "request 77bc-01cd: be kind",
            "id",
            ("1f3a-99aa:", "77bc-01cd:"),
            8,
        );
        check(
            "x-anthropic-billing-header: a1;",
            "x-anthropic-billing-header: b2;",
            "billing_header",
            ("a1", "b2"),
            28,
        );
        check("Be kind to all of them", "Be rude to all of them", "text", ("kind", "rude"), 3);
    }

    #[test]
    fn tools_messages_and_new_questions_are_told_apart() {
        let base = conversation(&[("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "three")]);
        let with = |tools: Value| Conversation {
            tools: serde_json::from_value(tools).expect("a list"),
            ..base.clone()
        };
        let cause =
            |a: &Conversation, b: &Conversation| second(a, b).map(|(message, _, cause, ..)| (message, cause));
        let (a, b) = (json!({"name": "a", "x": 1}), json!({"name": "b"}));
        assert_eq!(cause(&with(json!([a, b])), &with(json!([b, a]))), Some((None, "tools_order")));
        assert_eq!(cause(&with(json!([a, b])), &with(json!([a, {"name": "c"}]))), Some((None, "tools")));
        // Tools that come and go.
        assert_eq!(cause(&base, &with(json!([a]))), Some((None, "tools")));
        assert_eq!(cause(&with(json!([a])), &base), Some((None, "tools")));
        let removed = conversation(&[("system", "s"), ("assistant", "two"), ("user", "three")]);
        assert_eq!(cause(&base, &removed), Some((Some(1), "removed_message")));
        assert_eq!(cause(&removed, &base), Some((Some(1), "inserted_message")));
        // Neither goes on, nor parts: a longer one, a shorter one, another question, another conversation.
        let longer = conversation(&[
            ("system", "s"),
            ("user", "one"),
            ("assistant", "two"),
            ("user", "three"),
            ("user", "x"),
        ]);
        let other = conversation(&[("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]);
        let question =
            conversation(&[("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "four")]);
        for next in [&longer, &other, &question, &base] {
            assert_eq!(second(&base, next), None, "{next:?}");
        }
        assert_eq!(second(&longer, &base), None);
    }

    #[test]
    fn a_session_is_compared_with_itself_and_names_are_bounded() {
        let watch = PrefixWatch::default();
        let session = EngineSessionName::scoped("s", "1");
        let started =
            &Started { prompt_tokens: 9, max_tokens: 5, seed: 1, reuse: Reuse::default(), difference: None };
        let note = |conversation: &Conversation, user_agent: Option<&str>| {
            let (owner, model, session) = (Some("anna"), "m", Some(&session));
            let prefill = Duration::ZERO;
            watch.note(AnsweredPrompt { user_agent, owner, model, session, conversation, started, prefill })
        };
        let first = conversation(&[("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]);
        let compacted = conversation(&[("system", "s"), ("user", "summary"), ("user", "d")]);
        assert_eq!(note(&first, None), None);
        let broken = note(&compacted, None).expect("the session parts");
        assert_eq!((broken.message.clone(), &*broken.client), (Some((1, "user".to_owned())), "unknown"));
        assert_eq!(watch.last(&session), Some(broken.clone()));
        assert!(
            !broken.line().contains("summary") && broken.line().contains("message=1 role=user"),
            "{}",
            broken.line()
        );
        for n in 0..100 {
            note(&compacted, Some(&format!("client{n}/1.0 \u{7}")));
        }
        let state = watch.state.lock();
        assert_eq!((state.clients.len(), state.seen.len()), (MAX_CLIENTS, MAX_CLIENTS + 2));
    }
}
