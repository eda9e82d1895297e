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
    static SCRATCH: RefCell<(Scratch, Vec<f32>)> = RefCell::default();
    /// The results of a step's tasks.
    static RESULTS: RefCell<Vec<f32>> = RefCell::default();
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

/// Lists the tasks by head, whose keys and values stay in the second-level cache for all rows.
fn whole_tasks<'a>(spans: &'a [WholeSpan], num_kv_heads: usize, block_rows: usize) -> Vec<WholeTask<'a>> {
    let starts =
        spans.iter().flat_map(|of| of.span.rows.clone().step_by(block_rows).map(move |row| (of, row)));
    let heads = (0..num_kv_heads).flat_map(|kv_head| starts.clone().map(move |start| (start, kv_head)));
    let task = |((of, row), kv_head): ((&'a WholeSpan, usize), usize)| WholeTask {
        of,
        row,
        num_rows: block_rows.min(of.span.rows.end - row),
        kv_head,
    };
    heads.map(task).collect()
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
        let tasks = whole_tasks(spans, shape.num_kv_heads, block_rows);
        let len = partial_len(shape.head_dim);
        let slot_len = block_rows * group * shape.head_dim;
        let mut results = RESULTS.take();
        results.resize(tasks.len() * slot_len, 0.0);
        let seen: usize = spans.iter().map(|of| of.span.rows.len() * of.len).sum();
        self.for_chunks(&mut results, slot_len, seen * width, |index, slot| {
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
            SCRATCH.with_borrow_mut(|(scratch, partials)| {
                partials.resize(num_rows * group * len, 0.0);
                attention::attend(isa, &queries, queries.runs(), &page, scratch, partials);
                for (partial, out) in partials.chunks_exact(len).zip(slot.chunks_exact_mut(shape.head_dim)) {
                    attention::finish(isa, partial, len, None, out);
                }
            });
        });
        out.resize(q.num_rows(), width);
        let values = out.values_mut();
        let row_len = group * shape.head_dim;
        for (task, slot) in tasks.iter().zip(results.chunks_exact(slot_len)) {
            for (row, result) in slot.chunks_exact(row_len).take(task.num_rows).enumerate() {
                values[(task.row + row) * width + task.kv_head * row_len..][..row_len]
                    .copy_from_slice(result);
            }
        }
        RESULTS.set(results);
    }
}
