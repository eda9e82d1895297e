//! Recurrent states behind drafted rows. A state stands for all tokens it has taken in and cannot drop one,
//! so a step leaves it after the known rows, computes drafted rows on a copy, and records their inputs. Once
//! the engine knows how many drafted tokens are right, the state takes in their records, which reads no
//! weight.
//!
//! Invariant: a record has the very inputs that the step computed, and taking it in is the step's own
//! operation, so the state gets the bits that it would have got without a draft.

use crate::backend::{PageId, RowSpan};
use llmctl_kernel::delta::DeltaToken;
use llmctl_kernel::ssm::SsmToken;
use llmctl_kernel::{Isa, delta, ssm};

/// The operation by which a state takes in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateUpdate {
    /// The last inputs of a convolution, `[tokens, width]`: the oldest are dropped.
    Shift { width: usize },
    /// The delta rule, for each head: key, value, `decays` factors and rate.
    Delta { key_dim: usize, value_dim: usize, decays: usize },
    /// Mamba-2, for each head: input, key and decay.
    Ssm { head_dim: usize, state_dim: usize },
}

impl StateUpdate {
    /// Returns the values of one row's record, of one head if there are heads.
    pub fn record_len(self) -> usize {
        match self {
            StateUpdate::Shift { width } => width,
            StateUpdate::Delta { key_dim, value_dim, decays } => key_dim + value_dim + decays + 1,
            StateUpdate::Ssm { head_dim, state_dim } => head_dim + state_dim + 1,
        }
    }

    /// Returns the values of the state of one head; `len`, those of the whole state, if there are no heads.
    pub fn state_len(self, len: usize) -> usize {
        match self {
            StateUpdate::Shift { .. } => len,
            StateUpdate::Delta { key_dim, value_dim, .. } => key_dim * value_dim,
            StateUpdate::Ssm { head_dim, state_dim } => head_dim * state_dim,
        }
    }

    /// Lets a state, of one head if there are heads, take in the first `count` of its records.
    pub fn take_in(self, isa: Isa, state: &mut [f32], records: &[f32], count: usize) {
        let rows = records.chunks_exact(self.record_len()).take(count);
        match self {
            StateUpdate::Shift { width } => shift(state, &records[..count * width]),
            StateUpdate::Delta { key_dim, value_dim, decays } => {
                let (mut error, mut out) = (vec![0.0; value_dim], vec![0.0; value_dim]);
                for row in rows {
                    let (key, rest) = row.split_at(key_dim);
                    let (value, rest) = rest.split_at(value_dim);
                    let (decay, rate) = (&rest[..decays], rest[decays]);
                    let token = DeltaToken { key, query: key, value, decay, rate };
                    delta::step(isa, state, token, &mut error, &mut out);
                }
            }
            StateUpdate::Ssm { head_dim, .. } => {
                let mut out = vec![0.0; head_dim];
                for row in rows {
                    let (input, rest) = row.split_at(head_dim);
                    let (decay, key) = rest.split_last().expect("the decay comes last");
                    let token = SsmToken { x: input, input, key, query: key, decay: *decay, skip: 0.0 };
                    ssm::step(isa, state, token, &mut out);
                }
            }
        }
    }
}

/// Appends `rows` to a state and drops as many values from its start.
fn shift(state: &mut [f32], rows: &[f32]) {
    let kept = state.len().saturating_sub(rows.len());
    state.copy_within(state.len() - kept.., 0);
    let new = state.len() - kept;
    state[kept..].copy_from_slice(&rows[rows.len() - new..]);
}

/// The inputs that the drafted rows of one sequence have for one state, `[heads, rows, record]` in f32.
#[derive(Debug, Default)]
pub struct DraftRecord {
    page: PageId,
    pub num_rows: usize,
    pub values: Vec<f32>,
}

/// The records of one store. Their memory is kept for later steps.
#[derive(Debug)]
pub struct StoreRecords {
    update: StateUpdate,
    /// Those of the last step.
    records: Vec<DraftRecord>,
    spare: Vec<DraftRecord>,
}

impl Default for StoreRecords {
    fn default() -> Self {
        Self { update: StateUpdate::Shift { width: 1 }, records: Vec::new(), spare: Vec::new() }
    }
}

impl StoreRecords {
    /// Forgets the records of the last step.
    pub fn begin(&mut self, update: StateUpdate) {
        self.update = update;
        self.spare.append(&mut self.records);
    }

    /// Returns a record for a span's drafted rows in a state of `heads` heads. Its values are to be written.
    pub fn start(&mut self, span: &RowSpan, heads: usize) -> DraftRecord {
        if span.num_drafted == 0 {
            return DraftRecord::default();
        }
        let mut record = self.spare.pop().unwrap_or_default();
        (record.page, record.num_rows) = (span.pages[0], span.num_drafted);
        record.values.resize(heads * span.num_drafted * self.update.record_len(), 0.0);
        record
    }

    /// Adds a written record.
    pub fn add(&mut self, record: DraftRecord) {
        if record.num_rows > 0 {
            self.records.push(record);
        }
    }

    /// Returns the record of the sequence whose states are in a page, if at least `count` rows were drafted, and how it
    /// is taken in.
    pub fn find(&self, page: PageId, count: usize) -> Option<(StateUpdate, &DraftRecord)> {
        let record = self.records.iter().find(|record| record.page == page && record.num_rows >= count)?;
        Some((self.update, record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_inputs_keeps_the_last_ones() {
        for (rows, expected) in
            [(1, [3, 4, 5, 6, 10, 11]), (2, [5, 6, 10, 11, 12, 13]), (4, [12, 13, 14, 15, 16, 17])]
        {
            let mut state = [1, 2, 3, 4, 5, 6].map(|n| n as f32);
            let records: Vec<f32> = (10..18).map(|n| n as f32).collect();
            StateUpdate::Shift { width: 2 }.take_in(Isa::Scalar, &mut state, &records, rows);
            assert_eq!(state, expected.map(|n| n as f32), "{rows} rows");
        }
    }
}
