//! Attention of rows that see the whole of their sequence, in both directions: for towers, whose keys and values lie in pages
//! as a decoder's do, so that they are streamed, and rows can be computed in parts.

use std::cell::RefCell;

use super::{BATCH_ROWS, Cpu, CpuBuffer, CpuKv};
use crate::backend::{RowSpan, ScoreRule};
use llmctl_kernel::Isa;
use llmctl_kernel::attention::{self, Queries, Scratch, partial_len};

/// Queries of a task, few enough that they and their scores stay in the second-level cache.
const BLOCK_QUERIES: usize = 64;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Some rows of a sequence, and the number of positions that it has, whose keys and values are stored.
#[derive(Debug, Clone)]
pub struct WholeSpan {
    pub span: RowSpan,
    pub len: usize,
}

/// Consecutive rows of a span, for one KV head.
struct WholeTask<'a> {
    of: &'a WholeSpan,
    /// First of the rows, in the step.
    row: usize,
    num_rows: usize,
    kv_head: usize,
}

impl Cpu {
    /// Chooses the threads of the next operations, as a step of this many rows has them.
    pub fn begin_rows(&self, rows: usize) {
        self.pool().use_threads(self.threads[usize::from(rows >= BATCH_ROWS)]);
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Computes `out = attention(q)` over the only store of `kv`; both are `[rows, num_heads * head_dim]`.
    pub fn attend_whole(
        &self,
        kv: &CpuKv,
        rule: ScoreRule,
        q: &CpuBuffer,
        spans: &[WholeSpan],
        out: &mut CpuBuffer,
    ) {
        let (shape, width, isa) = (kv.shape(0), q.width(), self.isa);
        let group = width / shape.head_dim / shape.num_kv_heads;
        let block_rows = (BLOCK_QUERIES / group).max(1);
        let starts =
            spans.iter().flat_map(|of| of.span.rows.clone().step_by(block_rows).map(move |row| (of, row)));
        let tasks: Vec<WholeTask<'_>> = starts
            .flat_map(|(of, row)| {
                let num_rows = block_rows.min(of.span.rows.end - row);
                (0..shape.num_kv_heads).map(move |kv_head| WholeTask { of, row, num_rows, kv_head })
            })
            .collect();
        let len = partial_len(shape.head_dim);
        let slot_len = block_rows * group * len;
        let mut partials = vec![0.0; tasks.len() * slot_len];
        let seen: usize = spans.iter().map(|of| of.span.rows.len() * of.len).sum();
        self.for_chunks(&mut partials, slot_len, seen * width, |index, slot| {
            let WholeTask { of: WholeSpan { span, len: end }, row, num_rows, kv_head } = tasks[index];
            let seen = vec![0..*end; num_rows];
            let queries = Queries {
                q: &q.values()[row * width + kv_head * group * shape.head_dim..],
                row_stride: width,
                rows: num_rows,
                kv_heads: 1,
                heads: group,
                head_dim: shape.head_dim,
                values: shape.values,
                start: span.start + row - span.rows.start,
                window: None,
                spans: &seen,
                rule,
                kv_type: kv.kv_type(),
            };
            let page = |number: usize| kv.head_pages(0, kv_head..kv_head + 1, span.pages[number]);
            let slot = &mut slot[..num_rows * group * len];
            SCRATCH.with_borrow_mut(|scratch| {
                attention::attend(isa, &queries, queries.runs(), &page, scratch, slot);
            });
        });
        out.resize(q.num_rows(), width);
        let values = out.values_mut();
        for (task, slot) in tasks.iter().zip(partials.chunks_exact(slot_len)) {
            for (query, partial) in slot.chunks_exact(len).take(task.num_rows * group).enumerate() {
                let head = task.kv_head * group + query % group;
                let at = (task.row + query / group) * width + head * shape.head_dim;
                attention::finish(isa, partial, len, None, &mut values[at..][..shape.head_dim]);
            }
        }
    }
}
