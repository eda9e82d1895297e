//! A conversation in progress: its turns, the answers that go back into prompts as token ids, and the file it
//! is saved in, if any.
//!
//! A turn is two calls. [`SessionChat::begin`] changes nothing and returns the prompt.
//! [`SessionChat::finish`] takes the answer; when it returns, the turn is on disk. If anything fails between
//! the two, the conversation is as before. Only ids of the same model go back into prompts; another model
//! gets the text.
//!
//! Knows no engine: the caller submits the prompt and collects the answer. The date that templates see is
//! that of the conversation's first turn, because a later date would change every prompt of a resumed
//! conversation.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

use super::answer::Answer;
use super::constraint::PromptEnd;
use super::images::{AskedImages, not_given};
use super::plan::{Planner, TurnPlan};
use super::{AnswerStart, TurnError, TurnRequest};
use crate::chat_tokenizer::ChatTokenizer;
use crate::images::invalid;
use crate::receipt::AnswerRecipe;
use crate::request::{Finish, Outcome, PromptImage};
use crate::session::store::{
    BranchReason, Forgotten, ModelFingerprint, SavedSession, SavedTurn, SessionName, SessionWriter,
    StoredTurn, TurnReceipt, now_ms, receipt_of,
};
use crate::session::transcript::{MessageFingerprint, SplicedPrompt, SplicedSegment, Transcript};
use llmctl_base::Sampling;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_image::{ImageHash, ImageSet};
use llmctl_models::images::ImageSpan;
use llmctl_models::kv::Tokens;
use llmctl_template::{Content, Conversation, DateTime, ImageRef, Message, Reasoning, leave_out_images};

/// A conversation in progress.
#[derive(Debug)]
pub struct SessionChat {
    model: ModelFingerprint,
    /// All finished turns; what `writer` says when there is one.
    saved: SavedSession,
    transcript: Transcript,
    writer: Option<SessionWriter>,
    /// Images beside those of its turns that a prompt may name.
    lent: BTreeSet<ImageHash>,
}

/// A turn that has been prompted and not answered yet.
#[derive(Debug, Clone, Default)]
pub struct PromptedTurn {
    prompt: SplicedPrompt,
    tokens: Vec<u32>,
    /// Images of `tokens`, in the order of their rows.
    images: Vec<PromptImage>,
    /// Files that came with the turn.
    given: ImageSet,
    /// All messages before the answer.
    messages: Vec<Message>,
    is_reasoning_off: bool,
    /// Finished turns that this one follows; later ones it replaces.
    kept_turns: usize,
    /// Messages of those turns.
    kept_messages: usize,
    started_ms: u64,
    /// Set once the turn is planned.
    decided: Option<Decided>,
}

/// What decides a turn's answer beside the prompt and the sampling.
#[derive(Debug, Clone)]
struct Decided {
    recipe: Arc<AnswerRecipe>,
    /// First tokens of the answer, which the request gives.
    begun: Vec<u32>,
}

/// A turn that has been planned and not answered yet.
#[derive(Debug, Clone)]
pub struct PlannedTurn {
    pub plan: TurnPlan,
    pub prompted: PromptedTurn,
    sampling: Sampling,
}

/// The answer to a prompted turn, as it is recorded.
#[derive(Debug, Clone)]
pub struct RecordedAnswer {
    /// As the client gets it, and may send it back.
    pub message: Message,
    /// All generated ids except the end-of-generation token.
    pub generated: Vec<u32>,
    pub outcome: Outcome,
    /// As requested.
    pub sampling: Sampling,
}

impl RecordedAnswer {
    /// Returns the record of an answer that was asked for with `sampling`.
    pub fn of(answer: &Answer, sampling: Sampling) -> Self {
        let (message, generated, outcome) = (answer.to_message(), answer.ids(), answer.outcome.clone());
        Self { message, generated, outcome, sampling }
    }

    /// Returns whether the answer was stopped before it began, so that there is nothing to keep.
    pub fn is_empty(&self, turn: &PromptedTurn) -> bool {
        let is_begun = match turn.tokens.is_empty() {
            true => says_anything(&self.message), // of a server that takes messages
            false => !self.generated.is_empty(),
        };
        matches!(self.outcome.finish, Finish::Cancelled | Finish::Deadline) && !is_begun
    }
}

/// Result of finishing a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// The turn is part of the conversation, and on disk when the conversation is saved.
    Kept,
    /// It was cancelled before the answer's first token: there is nothing to keep, and the conversation is as before.
    Empty,
}

impl SessionChat {
    /// Creates a conversation that is not saved.
    pub fn new(model: ModelFingerprint) -> Self {
        Self::with(SavedSession::new(&model, now_ms()), None, model)
    }

    /// Continues a saved session, which may be empty. `model` gives the next answers.
    pub fn resume(writer: SessionWriter, model: ModelFingerprint) -> Self {
        Self::with(writer.saved().clone(), Some(writer), model)
    }

    /// As [`Self::resume`], but saves nothing more.
    pub fn look_at(saved: SavedSession, model: ModelFingerprint) -> Self {
        Self::with(saved, None, model)
    }

    /// Changes the model of the next answers. The conversation stays open for writing.
    pub fn answered_by(self, model: ModelFingerprint) -> Self {
        Self::with(self.saved, self.writer, model)
    }

    fn with(saved: SavedSession, writer: Option<SessionWriter>, model: ModelFingerprint) -> Self {
        Self { transcript: saved.transcript(&model), model, saved, writer, lent: BTreeSet::new() }
    }

    /// Lets prompts name the images of a conversation of the same owner.
    pub fn lend(&mut self, other: &SavedSession) {
        self.saved.blobs.take(&other.blobs);
        self.lent.extend(other.named_images());
    }

    /// Returns what the user should know before the conversation continues.
    pub fn notices(&self) -> Vec<Notice> {
        let mut notices: Vec<Notice> =
            self.writer.as_ref().map(|writer| writer.notices().to_vec()).unwrap_or_default();
        let is_foreign = |saved: &&SavedTurn| !saved.model.is_same(&self.model);
        let foreign: Vec<&SavedTurn> =
            self.saved.turns.iter().map(|saved| &**saved).filter(is_foreign).collect();
        if let Some(last) = foreign.last() {
            notices.push(Notice::ForeignTurns {
                model: last.model.name.clone(),
                num_foreign: foreign.len(),
                num_turns: self.saved.turns.len(),
                is_same_name: last.model.name == self.model.name,
            });
        }
        notices
    }

    /// Returns all finished turns.
    pub fn saved(&self) -> &SavedSession {
        &self.saved
    }

    /// Returns the messages so far.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.saved.messages()
    }

    /// Returns the messages so far and `added`, for [`Self::prompt`]. The caller adds tools and template variables.
    pub fn followed_by(&self, added: Vec<Message>) -> Conversation {
        let messages = self.messages().cloned().chain(added).collect();
        Conversation { messages, ..Conversation::default() }
    }

    /// Renders and encodes the prompt of the next answer. `conversation` holds all messages, as a client sends them. Finished
    /// turns that it repeats stay; the new turn replaces those from the first that it does not repeat. Images are `given`, or those of
    /// the conversation; for a model that reads text alone, words stand for those of finished turns.
    ///
    /// # Errors
    /// [`Error::Template`]; [`Error::InvalidParameter`] for a text that the vocabulary cannot express, and for an image that is not
    /// there.
    pub fn prompt(
        &self,
        chat_tokenizer: &ChatTokenizer,
        conversation: Conversation,
        given: &ImageSet,
    ) -> Result<PromptedTurn> {
        let started_ms = now_ms();
        let date = self.date(started_ms);
        let (kept_turns, kept_messages) = repeated(&self.saved, &conversation.messages);
        let mut arranged = chat_tokenizer.arranged(&conversation);
        if chat_tokenizer.vision().is_none() && arranged.images().next().is_some() {
            leave_out_images(&mut arranged.to_mut().messages[..kept_messages]);
        }
        let asked = AskedImages::of(chat_tokenizer, &arranged)?;
        let render = |shown: &Conversation| chat_tokenizer.render(shown, date);
        let prompt = self.transcript.splice_arranged(&conversation.messages, &arranged, render)?;
        let encoded = asked.encode(&prompt)?;
        let images = asked.placed(&encoded, given, |image, hash| self.stored_image(image, hash))?;
        let mut given = given.clone();
        let lent = images.iter().filter(|image| self.lent.contains(&image.file.hash));
        lent.for_each(|image| given.insert(Arc::clone(&image.file)));
        let tokens = encoded.tokens;
        let is_reasoning_off = Reasoning::is_off_in(&conversation.kwargs);
        let messages = conversation.messages;
        Ok(PromptedTurn {
            prompt,
            tokens,
            images,
            given,
            messages,
            is_reasoning_off,
            kept_turns,
            kept_messages,
            started_ms,
            decided: None,
        })
    }

    /// Returns the bytes of an image of an earlier turn, or of one that is lent.
    fn stored_image(&self, image: &ImageRef, hash: &ImageHash) -> Result<Arc<[u8]>> {
        let session = self.writer.as_ref().map(SessionWriter::name);
        let is_own = |own: ImageRef| own.sha256 == image.sha256;
        let is_ours = || self.lent.contains(hash) || self.messages().flat_map(Message::images).any(is_own);
        self.saved.blobs.read(hash).map_err(|reason| match session {
            _ if !is_ours() => not_given(image),
            Some(name) => invalid(format!(
                "session {}: {} cannot be read: {reason}; send it again, or go back to before it",
                name.as_str(),
                image.tag()
            )),
            None => invalid(format!("{} cannot be read: {reason}; send it again", image.tag())),
        })
    }

    /// As [`Self::prompt`], for a server that takes `messages`: there is neither text nor tokens.
    pub fn addressed(&self, messages: Vec<Message>) -> PromptedTurn {
        let (kept_turns, kept_messages) = repeated(&self.saved, &messages);
        let started_ms = now_ms();
        PromptedTurn { messages, kept_turns, kept_messages, started_ms, ..PromptedTurn::default() }
    }

    /// Plans the next turn. `conversation` is as for [`Self::prompt`].
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn begin(
        &self,
        planner: Planner<'_>,
        conversation: Conversation,
        turn: &TurnRequest,
    ) -> Result<PlannedTurn, TurnError> {
        let prompted = self.prompt(planner.chat_tokenizer, conversation, &turn.images)?;
        PlannedTurn::new(planner, prompted, turn)
    }

    /// Takes the answer to a turn that [`Self::begin`] planned.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub fn finish(&mut self, turn: PlannedTurn, answer: &Answer) -> Result<Finished> {
        self.finish_noted(turn, answer, None)
    }

    /// As [`Self::finish`], with a note that the frontend keeps beside the turn.
    ///
    /// # Errors
    /// As [`Self::record`].
    pub fn finish_noted(
        &mut self,
        turn: PlannedTurn,
        answer: &Answer,
        note: Option<Value>,
    ) -> Result<Finished> {
        let PlannedTurn { prompted, sampling, .. } = turn;
        self.record_noted(prompted, RecordedAnswer::of(answer, sampling), note)
    }

    /// Returns the time that templates see; `now_ms` before the first turn.
    fn date(&self, now_ms: u64) -> DateTime {
        let began_ms = self.saved.turns.first().map_or(now_ms, |first| first.turn.started_ms);
        DateTime::local(began_ms)
    }

    /// Returns the model of the next answers.
    pub fn model(&self) -> &ModelFingerprint {
        &self.model
    }

    /// Adds a turn. When this returns, the turn is on disk. A cancelled turn is marked as such, and dropped if its answer had
    /// not begun.
    ///
    /// # Errors
    /// [`Error::Store`]: the turn is not part of the conversation.
    pub fn record(&mut self, turn: PromptedTurn, answer: RecordedAnswer) -> Result<Finished> {
        self.record_noted(turn, answer, None)
    }

    fn record_noted(
        &mut self,
        turn: PromptedTurn,
        answer: RecordedAnswer,
        note: Option<Value>,
    ) -> Result<Finished> {
        if answer.is_empty(&turn) {
            return Ok(Finished::Empty);
        }
        let RecordedAnswer { message, generated, outcome, sampling } = answer;
        let has_tokens = !turn.tokens.is_empty();
        // A stop string was generated, and is not part of what the client saw.
        let is_shown_whole = !matches!(outcome.finish, Finish::StopString(_));
        let after = turn.prompt.splice_after();
        let spans: Vec<ImageSpan> = turn.images.iter().flat_map(|image| image.spans.clone()).collect();
        let prompt = Tokens { ids: &turn.tokens, images: &spans, adapters: &outcome.adapters };
        let kept_tokens = self.common_tokens(turn.kept_turns, prompt);
        self.saved.blobs.keep(&turn.given);
        let added = turn.messages[turn.kept_messages..].iter().cloned();
        let decided = turn
            .decided
            .filter(|decided| outcome.usage.remote.is_none() && generated.starts_with(&decided.begun));
        let mut record = StoredTurn {
            messages: added.chain([message.clone()]).collect(),
            kept_tokens,
            prompt_tail: turn.tokens[kept_tokens..].to_vec(),
            generated: generated.clone(),
            spans: spans.iter().filter(|span| span.rows.start >= kept_tokens).cloned().collect(),
            adapters: outcome.adapters,
            splice_after: (is_shown_whole && has_tokens).then(|| after.to_owned()),
            sampling: Sampling {
                seed: if has_tokens { Some(outcome.seed) } else { sampling.seed },
                ..sampling
            },
            finish: outcome.finish,
            usage: outcome.usage,
            started_ms: turn.started_ms,
            finished_ms: now_ms(),
            receipt: None,
        };
        record.receipt = decided.map(|Decided { recipe, begun }| {
            let own = TurnReceipt { recipe, given: begun.len(), hash: String::new() };
            let prompt = Tokens { ids: &turn.tokens, images: &spans, adapters: &record.adapters };
            let hash = receipt_of(&record, &own, prompt, self.saved.receipt_hash(turn.kept_turns)).hash();
            TurnReceipt { hash, ..own }
        });
        self.add(turn.kept_turns, record, note)?;
        let ids = is_shown_whole.then_some(generated.as_slice());
        self.transcript.record(&turn.messages, &message, after, ids);
        Ok(Finished::Kept)
    }

    /// Returns the number of tokens of the first `turns` turns that the prompt begins with, never ending inside an image; 0 after an
    /// answer of another model.
    fn common_tokens(&self, turns: usize, prompt: Tokens<'_>) -> usize {
        let mut kept = self.saved.clone();
        kept.turns.truncate(turns);
        let kept = kept.tokens_of(&self.model).unwrap_or_default();
        prompt.before_span(prompt.common_prefix(kept.as_tokens()))
    }

    fn add(&mut self, kept_turns: usize, turn: StoredTurn, note: Option<Value>) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.take_blobs(&self.saved.blobs);
            writer.append_noted(kept_turns, &self.model, &turn, note)?;
            self.saved = writer.saved().clone();
            return Ok(());
        }
        self.saved.turns.truncate(kept_turns);
        self.saved.last_used_ms = turn.finished_ms;
        self.saved.turns.push(SavedTurn { turn, model: self.model.clone().into(), note }.into());
        self.saved.blobs.retain(&self.saved.named_images());
        Ok(())
    }

    /// Replaces the note on a turn, which counts from 1.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there is no such turn; [`Error::Store`].
    pub fn set_note(&mut self, number: usize, note: Value) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.set_note(number, note)?;
            self.saved = writer.saved().clone();
            return Ok(());
        }
        let refuse = |message| Error::InvalidParameter { name: "turn", message };
        self.saved.set_note(number, note).map_err(refuse)
    }

    /// Erases from the session's file what no turn holds any more, and its KV on disk.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn compact(&mut self) -> Result<Forgotten> {
        self.writer.as_mut().map_or(Ok(Forgotten::default()), SessionWriter::compact)
    }

    /// Removes all turns but the first `turns`, for an undo or an edit.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there are fewer; [`Error::Store`].
    pub fn rewind(&mut self, turns: usize) -> Result<()> {
        if turns > self.saved.turns.len() {
            let message = format!("the conversation has {} turns, not {turns}", self.saved.turns.len());
            return Err(Error::InvalidParameter { name: "turns", message });
        }
        if let Some(writer) = &mut self.writer {
            writer.truncate(turns)?;
        }
        self.saved.turns.truncate(turns);
        self.transcript = self.saved.transcript(&self.model);
        Ok(())
    }

    /// Copies all turns to a branch of the session, before the caller removes or replaces some. Returns the branch's name; `None`
    /// if there are no turns or the conversation is not saved.
    ///
    /// # Errors
    /// [`Error::Store`]: the caller must not remove turns then.
    pub fn keep(&self, reason: BranchReason) -> Result<Option<SessionName>> {
        self.writer.as_ref().map_or(Ok(None), |writer| writer.keep(reason))
    }

    /// Replaces the turns by those of a branch. Returns the name of the branch that the earlier turns become; `None` if `branch`
    /// holds them.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if the conversation is not saved; as [`SessionWriter::restore`].
    pub fn restore(&mut self, branch: &SessionName) -> Result<Option<SessionName>> {
        let Some(writer) = &mut self.writer else {
            return Err(Error::InvalidState("the conversation is not saved"));
        };
        let kept = writer.restore(branch)?;
        self.saved = writer.saved().clone();
        self.transcript = self.saved.transcript(&self.model);
        Ok(kept)
    }

    /// Creates a branch with the first `turns` turns (`None`: all) and opens it for writing. Returns `None` if the conversation
    /// is not saved. This conversation does not change.
    ///
    /// # Errors
    /// As [`SessionWriter::branch`].
    pub fn branch(&self, turns: Option<usize>, reason: BranchReason) -> Result<Option<Self>> {
        let Some(writer) = &self.writer else { return Ok(None) };
        Ok(Some(Self::resume(writer.branch(turns, reason)?, self.model.clone())))
    }

    /// Ends the conversation and removes its saved session.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn remove(self) -> Result<()> {
        self.writer.map_or(Ok(()), |writer| writer.remove().map(drop))
    }

    /// Ends the conversation and removes a session that never had a turn. Returns whether it did.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn remove_if_empty(self) -> Result<bool> {
        self.writer.map_or(Ok(false), SessionWriter::remove_if_empty)
    }
}

/// Returns whether a message has text, reasoning or a call.
fn says_anything(message: &Message) -> bool {
    let has_content = match &message.content {
        Some(Content::Text(text)) => !text.is_empty(),
        Some(Content::Parts(parts)) => !parts.is_empty(),
        None => false,
    };
    has_content || message.reasoning.is_some() || !message.tool_calls.is_empty()
}

/// Returns the number of turns that `messages` begins with: all of them if it continues the conversation.
pub fn num_repeated(saved: &SavedSession, messages: &[Message]) -> usize {
    repeated(saved, messages).0
}

/// Returns how many turns, and how many messages of them, `messages` begins with.
fn repeated(saved: &SavedSession, messages: &[Message]) -> (usize, usize) {
    let (mut num_turns, mut num_messages) = (0, 0);
    for saved in &saved.turns {
        let ours = &saved.turn.messages;
        let theirs = messages.get(num_messages..num_messages + ours.len()).unwrap_or_default();
        if theirs.len() < ours.len() || !ours.iter().zip(theirs).all(|(a, b)| says_the_same(a, b)) {
            break;
        }
        num_turns += 1;
        num_messages += ours.len();
    }
    (num_turns, num_messages)
}

/// Returns whether two messages are the same turn of a conversation, in whatever spelling.
fn says_the_same(a: &Message, b: &Message) -> bool {
    a.role == b.role && a.name == b.name && MessageFingerprint::of(a) == MessageFingerprint::of(b)
}

impl PlannedTurn {
    /// Plans the answer to a prompt of [`SessionChat::prompt`].
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn new(planner: Planner<'_>, prompted: PromptedTurn, turn: &TurnRequest) -> Result<Self, TurnError> {
        let (mut tokens, images) = (prompted.tokens.clone(), prompted.images.clone());
        if let AnswerStart::Text(start) = &turn.answer_start {
            tokens.extend(planner.chat_tokenizer.encode_rest(start)?);
        }
        let end = PromptEnd { text: prompted.tail(), is_reasoning_off: prompted.is_reasoning_off };
        let plan = TurnPlan { images, ..planner.plan_answer(tokens, end, turn)? };
        let begun = plan.tokens[prompted.tokens.len()..].to_vec();
        let decided = Some(Decided { recipe: planner.recipe(&plan, turn).into(), begun });
        Ok(Self { plan, prompted: PromptedTurn { decided, ..prompted }, sampling: turn.sampling() })
    }
}

impl PromptedTurn {
    /// Returns all messages before the answer.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns the turn with the files of its new images, for a server that takes messages.
    pub fn with_images(self, given: &ImageSet) -> Self {
        Self { given: given.clone(), ..self }
    }

    /// Returns the ids of the prompt; none for a server that takes messages.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the end of the prompt's text, which the answer follows.
    pub fn tail(&self) -> &str {
        self.prompt.splice_after()
    }

    /// Returns the number of earlier answers that the prompt contains as generated ids.
    pub fn num_spliced(&self) -> usize {
        self.prompt.num_spliced()
    }

    /// Returns the number of finished turns that the answer follows. It replaces later ones.
    pub fn num_kept_turns(&self) -> usize {
        self.kept_turns
    }

    /// Returns the prompt as text, with earlier answers decoded from their ids.
    pub fn text(&self, chat_tokenizer: &ChatTokenizer) -> String {
        let text = |segment: &SplicedSegment| match segment {
            SplicedSegment::Text(text) => text.clone(),
            SplicedSegment::Ids(ids) => {
                let bytes: Vec<u8> =
                    ids.iter().flat_map(|&id| chat_tokenizer.token_bytes(id).into_owned()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
        };
        self.prompt.segments.iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use llmctl_image::{ImageFile, ImageInfo, Picture};
    use llmctl_models::images::ImageKey;

    use super::*;
    use crate::request::{Timings, Usage};

    #[test]
    fn a_prompt_keeps_tokens_up_to_an_image_that_differs() {
        let info = ImageInfo { media_type: "image/png", width: 2, height: 1 };
        let picture = Picture { width: 2, height: 1, rgb: vec![0; 6] };
        let hash = ImageHash::of(b"file");
        let file = Arc::new(ImageFile { hash, bytes: (*b"file").into(), info, picture });
        let image = ImageRef {
            sha256: hash.to_string(),
            width: 2,
            height: 1,
            media_type: "image/png".to_owned(),
            name: None,
        };
        let question = Message { content: Some(Content::Parts(vec![image.to_part()])), ..Message::user("") };
        let mut given = ImageSet::default();
        given.insert(Arc::clone(&file));
        let mut chat = SessionChat::new(ModelFingerprint::default());
        // The prompt has the image's two rows behind the first token.
        let ask = |chat: &mut SessionChat, messages: Vec<Message>, tokens: &[u32], key: ImageKey| {
            let span = ImageSpan { rows: 1..3, key, first: 0, grid: [1, 2] };
            let images = vec![PromptImage { file: Arc::clone(&file), key, spans: vec![span] }];
            let turn = chat.addressed(messages).with_images(&given);
            let turn = PromptedTurn { tokens: tokens.to_vec(), images, ..turn };
            let outcome = Outcome {
                finish: Finish::Eos(0),
                usage: Usage::default(),
                timings: Timings::default(),
                seed: 1,
                adapters: Vec::new(),
            };
            let (message, sampling) = (Message::assistant("yes"), Sampling::default());
            let answer = RecordedAnswer { message, generated: vec![5], outcome, sampling };
            assert_eq!(chat.record(turn, answer).expect("kept"), Finished::Kept);
            let turn = chat.saved().turns.last().expect("a turn").turn.clone();
            (turn.kept_tokens, turn.spans.len(), chat.saved().spans()[0].key)
        };
        let [a, b] = [[1; 32], [2; 32]].map(ImageKey);
        assert_eq!(ask(&mut chat, vec![question.clone()], &[1, 9, 9, 2], a), (0, 1, a));
        let more = vec![question, Message::assistant("yes"), Message::user("and?")];
        assert_eq!(ask(&mut chat, more.clone(), &[1, 9, 9, 2, 5, 6], a), (5, 0, a));
        chat.rewind(1).expect("undone");
        // Another tower sees the same file otherwise.
        assert_eq!(ask(&mut chat, more, &[1, 9, 9, 2, 5, 6], b), (1, 1, b));
        assert_eq!(chat.stored_image(&image, &hash).expect("in memory")[..], *b"file");
        let unknown = ImageHash::of(b"other");
        let error = chat.stored_image(&ImageRef { sha256: unknown.to_string(), ..image }, &unknown);
        assert!(error.expect_err("never given").to_string().contains(&unknown.to_string()));
    }

    #[test]
    fn an_answer_that_was_stopped_before_it_began_is_empty() {
        let model = ModelFingerprint { name: "m".to_owned(), fingerprint: "1".to_owned(), reference: None };
        let turn = |tokens: &[u32]| {
            let turn = SessionChat::new(model.clone()).addressed(vec![Message::user("q")]);
            PromptedTurn { tokens: tokens.to_vec(), ..turn }
        };
        let answer = |text: &str, generated: &[u32], finish: Finish| {
            let outcome = Outcome {
                finish,
                usage: Usage::default(),
                timings: Timings::default(),
                seed: 1,
                adapters: Vec::new(),
            };
            let (message, generated) = (Message::assistant(text), generated.to_vec());
            RecordedAnswer { message, generated, outcome, sampling: Sampling::default() }
        };
        for finish in [Finish::Cancelled, Finish::Deadline] {
            let is_empty = |text, generated: &[u32], tokens: &[u32]| {
                answer(text, generated, finish.clone()).is_empty(&turn(tokens))
            };
            assert!(is_empty("", &[], &[]) && !is_empty("a", &[], &[]), "of an endpoint");
            assert!(is_empty("", &[], &[5]) && !is_empty("", &[7], &[5]), "of a model here");
        }
        assert!(!answer("", &[], Finish::Eos(1)).is_empty(&turn(&[])), "an empty answer that is whole");
    }
}
