//! Tokens of one generation that a computing drafter has computed, and those that it lacks.
//!
//! ```text
//! text of the generation   t t t t t t t t t t t t t n n     n: new since the last draft
//! sequence of the draft    t t t t . . . t t t t t t x x     x: drafted and refused; . : skipped
//! ```
//!
//! Invariant: up to `num_agreed` tokens, the sequence is the text without the skipped tokens. The sequence of
//! a block has those tokens whose hidden states it was given, wherever they are in the text: it begins late
//! where a session is continued, and continues behind a gap as if there were none.

use std::collections::VecDeque;
use std::ops::Range;

use crate::request::DraftStop;
use crate::sequence::{Sequence, TurnStart};
use llmctl_models::kv::PAGE_TOKENS;

/// Most hidden states that are kept for a block: with more of a prompt it would draft a little better, and reading costs time.
const MAX_UNREAD: usize = 128;

/// The known tokens of a generation, in two parts.
#[derive(Debug, Clone, Copy, Default)]
pub struct KnownText<'a> {
    /// Those with rows.
    pub resident: &'a [u32],
    /// Those after them.
    pub following: &'a [u32],
}

impl<'a> KnownText<'a> {
    pub fn len(&self) -> usize {
        self.resident.len() + self.following.len()
    }

    /// Iterates over the tokens from the `start`th on.
    pub fn from(self, start: usize) -> impl Iterator<Item = u32> + 'a {
        let num_resident = self.resident.len();
        let resident = &self.resident[start.min(num_resident)..];
        resident.iter().chain(&self.following[start.saturating_sub(num_resident)..]).copied()
    }
}

/// Hidden states of known tokens that a block has not read: the latest, without gaps.
#[derive(Debug, Default)]
struct UnreadHidden {
    values: VecDeque<f32>,
    /// Position of the first one's token.
    position: usize,
    width: usize,
}

impl UnreadHidden {
    fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Returns the position after the last one's token.
    fn end(&self) -> usize {
        self.position + self.len()
    }

    fn push(&mut self, position: usize, count: usize, hidden: &[f32]) {
        if self.end() != position {
            self.values.clear();
            self.position = position;
        }
        self.width = hidden.len() / count.max(1);
        self.values.extend(hidden);
        self.drop_first(self.len().saturating_sub(MAX_UNREAD));
    }

    fn drop_first(&mut self, count: usize) {
        self.values.drain(..count * self.width);
        self.position += count;
    }

    fn rows(&self, count: usize) -> Vec<f32> {
        self.values.iter().take(count * self.width).copied().collect()
    }
}

/// The draft model's side of one generation.
#[derive(Debug, Default)]
pub struct DraftTrack {
    sequence: Option<Sequence>,
    /// Tokens of the text that the sequence leaves out.
    skipped: Range<usize>,
    num_agreed: usize,
    stop: Option<DraftStop>,
    /// For a block: what it has not read.
    unread: UnreadHidden,
}

impl DraftTrack {
    /// Returns why nothing is drafted any more.
    pub fn stop(&self) -> Option<DraftStop> {
        self.stop
    }

    /// Ends drafting for this generation, and frees its pages.
    pub fn end(&mut self, reason: DraftStop) {
        *self = Self { stop: Some(reason), ..Self::default() };
    }

    pub fn has_begun(&self) -> bool {
        self.sequence.is_some()
    }

    /// Returns the length of the sequence for a text.
    pub fn len_of(&self, text: KnownText<'_>) -> usize {
        text.len() - self.skipped.len()
    }

    pub fn has_skipped(&self) -> bool {
        !self.skipped.is_empty()
    }

    /// Returns the sequence; `None` before `begin`.
    pub fn sequence(&mut self) -> Option<&mut Sequence> {
        self.sequence.as_mut()
    }

    /// Starts over with a sequence that has the first tokens of a text of `len` tokens, and leaves out `skipped`.
    pub fn begin(&mut self, mut sequence: Sequence, skipped: Range<usize>, len: usize) {
        // A recurrent state is left at the last page of what is known now, and then at the end of each page.
        let generated_from = len - skipped.len();
        let states_at = vec![(generated_from - 1) / PAGE_TOKENS * PAGE_TOKENS];
        sequence.begin_turn(TurnStart {
            generated_from,
            states_at,
            logprobs: Some(0),
            ..TurnStart::default()
        });
        let num_agreed = sequence.position();
        *self = Self { num_agreed, sequence: Some(sequence), skipped, ..Self::default() };
    }

    /// Starts the sequence of a block. It has no tokens yet, and reads the unread ones.
    pub fn begin_block(&mut self, mut sequence: Sequence) {
        sequence.begin_turn(TurnStart { logprobs: Some(0), ..TurnStart::default() });
        self.sequence = Some(sequence);
    }

    /// Takes the hidden states of `count` known tokens from `position` on.
    pub fn note_hidden(&mut self, position: usize, count: usize, hidden: &[f32]) {
        if self.stop.is_none() && !hidden.is_empty() {
            self.unread.push(position, count, hidden);
        }
    }

    /// Removes a block's drafted rows. Returns the number of rows that it can read so as to draft after `text`: none if
    /// the last token of the text is not the one after the last hidden state.
    pub fn align_block(&mut self, text: KnownText<'_>) -> usize {
        if let Some(sequence) = self.sequence.as_mut() {
            let can = sequence.truncate(self.num_agreed.min(sequence.position()));
            debug_assert!(can, "full attention resumes anywhere");
        }
        if self.unread.end() + 1 == text.len() { self.unread.len() } else { 0 }
    }

    /// Gives up the oldest unread hidden states but `count`.
    pub fn skip_unread(&mut self, count: usize) {
        self.unread.drop_first(self.unread.len().saturating_sub(count));
    }

    /// Returns a block's next rows, at most `count`: tokens, and the hidden states of those before them.
    pub fn unread(&self, text: KnownText<'_>, count: usize) -> (Vec<u32>, Vec<f32>) {
        let count = count.min(self.unread.len());
        let tokens = text.from(self.unread.position + 1).take(count);
        (tokens.collect(), self.unread.rows(count))
    }

    /// Notes that the block has read `count` rows, which stay.
    pub fn note_read(&mut self, count: usize) {
        self.num_agreed += count;
        self.unread.drop_first(count);
    }

    /// Removes what differs from the text, and the last token of the text, after which the next draft begins. Returns
    /// the tokens to compute; none before `begin`.
    pub fn align(&mut self, text: KnownText<'_>) -> Vec<u32> {
        let Range { start: first, end } = self.skipped.clone();
        let from = move |at: usize| {
            let rest = text.from(if at < first { end } else { at + (end - first) });
            text.from(at).take(first.saturating_sub(at)).chain(rest)
        };
        let Some(sequence) = self.sequence.as_mut() else { return Vec::new() };
        let resident = sequence.resident();
        let computed = &resident.tokens()[self.num_agreed..];
        let num_same = computed.iter().zip(from(self.num_agreed)).take_while(|(a, b)| **a == *b).count();
        let len = (self.num_agreed + num_same).min(text.len() - (end - first) - 1);
        if len < resident.tokens().len() {
            let len = resident.resumable(len);
            let can = sequence.truncate(len);
            debug_assert!(can, "a length that can be resumed at");
        }
        self.num_agreed = sequence.position();
        from(self.num_agreed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_models::kv::{KvGroup, KvKind, PagePool};

    fn feed(track: &mut DraftTrack, tokens: &[u32]) {
        let sequence = track.sequence().expect("begun");
        sequence.begin_feed(tokens, &[], 0).expect("room");
        sequence.settle(None);
    }

    /// Returns the tokens to compute for a text of `known` tokens, `num_resident` of them with rows.
    fn lacking(track: &mut DraftTrack, known: &[u32], num_resident: usize) -> Vec<u32> {
        let (resident, following) = known.split_at(num_resident);
        track.align(KnownText { resident, following })
    }

    #[test]
    fn what_was_refused_is_removed_and_what_is_new_is_lacking() {
        let pool = PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], 8);
        let mut track = DraftTrack::default();
        assert_eq!(lacking(&mut track, &[1, 2, 3], 3), [0; 0]);
        track.begin(Sequence::new(&pool), 0..0, 3);
        assert_eq!(lacking(&mut track, &[1, 2, 3], 2), [1, 2, 3]);
        feed(&mut track, &[1, 2, 3, 40, 50]);
        assert_eq!(lacking(&mut track, &[1, 2, 3, 40, 5], 4), [5]);
        assert_eq!(track.sequence().expect("begun").known(), [1, 2, 3, 40]);
        feed(&mut track, &[5]);
        assert_eq!(lacking(&mut track, &[1, 2, 3, 40, 5], 4), [5], "there is one to go on from");
        track.end(DraftStop::Context);
        assert_eq!((track.has_begun(), pool.free_bytes()), (false, 8));
    }

    #[test]
    fn skipped_tokens_are_left_out() {
        let pool = PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], 8);
        let mut track = DraftTrack::default();
        let text: Vec<u32> = (0..20).collect();
        track.begin(Sequence::new(&pool), 2..15, 20);
        assert_eq!(lacking(&mut track, &text, 19), [0, 1, 15, 16, 17, 18, 19]);
        feed(&mut track, &[0]);
        assert_eq!(lacking(&mut track, &text, 17), [1, 15, 16, 17, 18, 19]);
        feed(&mut track, &[1, 15, 16, 17, 18, 19, 20, 99]);
        assert_eq!(lacking(&mut track, &(0..23).collect::<Vec<_>>(), 22), [21, 22]);
    }

    #[test]
    fn a_block_reads_the_latest_hidden_states_without_gaps() {
        let pool = PagePool::without_index(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], 64);
        let text: Vec<u32> = (0..400).collect();
        let known = |len: usize| KnownText { resident: &text[..len - 1], following: &text[len - 1..len] };
        let hidden = |positions: Range<usize>| -> Vec<f32> {
            positions.flat_map(|position| [position as f32; 2]).collect()
        };
        let mut track = DraftTrack::default();
        track.note_hidden(0, 3, &hidden(0..3));
        track.begin_block(Sequence::new(&pool));
        assert_eq!(track.align_block(known(4)), 3);
        assert_eq!(track.align_block(known(5)), 0, "a token without a hidden state before it is known");
        assert_eq!(track.unread(known(4), 2), (vec![1, 2], hidden(0..2)));
        feed(&mut track, &[1, 2]);
        track.note_read(2);
        feed(&mut track, &[90]);
        track.note_hidden(3, 1, &hidden(3..4));
        assert_eq!(track.align_block(known(5)), 2);
        assert_eq!(track.sequence().expect("begun").known(), [1, 2], "what was drafted is removed");
        assert_eq!(track.unread(known(5), 9), (vec![3, 4], hidden(2..4)));
        track.note_hidden(40, 2, &hidden(40..42));
        assert_eq!(track.unread(known(43), 9), (vec![41, 42], hidden(40..42)), "behind a gap");
        track.note_hidden(42, 300, &hidden(42..342));
        assert_eq!(track.align_block(known(343)), MAX_UNREAD);
        track.skip_unread(1);
        assert_eq!(track.unread(known(343), 9), (vec![342], hidden(341..342)));
    }
}
