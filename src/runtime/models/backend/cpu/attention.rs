//! Cuts the attention of a step into tasks: blocks of a span's rows for some KV heads, over all visible pages
//! or one run of them each. By the kernel's definition all cuts give the same bits.
//!
//! Rows of a prompt share what they read: a task takes one KV head at a time, whose run stays in the cache. A
//! single row reads everything once: it is cut by runs, and a task takes as many KV heads as leave enough
//! tasks for the threads, because heads lie side by side in a page and sequential reads are fastest.
//!
//! A row that sees chosen positions only is computed alone: the chosen keys and values are copied, in ascending order of their
//! positions, to pages of its own, of which it sees all; pages that are chosen as a whole are read where they are. So a choice of all
//! positions gives the bits of attention without a choice.

use std::cell::RefCell;
use std::ops::Range;

use super::kv::CpuKv;
use super::{Cpu, CpuBuffer};
use crate::backend::{AttentionSpec, KvShape, RowSpan, SelectedKeys};
use llmctl_kernel::attention::{
    HeadPage, KvPart, PAGE_TOKENS, Queries, RUN_PAGES, RUN_TOKENS, Scratch, partial_len,
};
use llmctl_kernel::{Isa, attention};

/// Queries of a task, few enough that they and their scores stay in the second-level cache.
const BLOCK_QUERIES: usize = 64;

/// Tasks per thread below which long histories are split.
const TASKS_PER_THREAD: usize = 4;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Keys and values that a row has chosen, as pages; words, so that they are aligned.
    static CHOSEN: RefCell<Vec<u32>> = RefCell::default();
}

/// Consecutive rows of a span that are computed together.
#[derive(Debug, Clone)]
struct QueryBlock {
    span: usize,
    /// Rows of the step.
    rows: Range<usize>,
    /// Runs of pages that the rows see.
    runs: Range<usize>,
    /// Index of the first task, `[part][num_kv_heads / kv_heads]`: one part, or one for each run.
    first_task: usize,
    num_parts: usize,
    /// KV heads per task.
    kv_heads: usize,
}

/// One task: its row block, its first KV head, and its runs.
#[derive(Debug, Clone)]
struct AttentionTask {
    block: usize,
    kv_head: usize,
    runs: Range<usize>,
}

/// The tasks of a layer and their results; kept between calls to reuse the memory.
#[derive(Default)]
pub struct AttentionPlan {
    blocks: Vec<QueryBlock>,
    tasks: Vec<AttentionTask>,
    /// One slot per task, `[kv_heads][row][head of the group][partial_len]`.
    partials: Vec<f32>,
}

/// The inputs that all tasks of a layer share.
#[derive(Clone, Copy)]
struct AttentionJob<'a> {
    kv: &'a CpuKv,
    spec: &'a AttentionSpec<'a, Vec<f32>>,
    q: &'a CpuBuffer,
    spans: &'a [RowSpan],
    /// Query heads per KV head.
    group: usize,
    shape: KvShape,
}

impl AttentionJob<'_> {
    fn queries(&self, block: &QueryBlock, kv_head: usize) -> Queries<'_> {
        let (span, KvShape { head_dim, .. }) = (&self.spans[block.span], self.shape);
        let start = span.start + block.rows.start - span.rows.start;
        let rows = block.rows.start - span.rows.start..block.rows.end - span.rows.start;
        let spans = span.seen_besides.get(rows).filter(|_| self.spec.is_two_way);
        Queries {
            q: &self.q.values()[block.rows.start * self.q.width() + kv_head * self.group * head_dim..],
            row_stride: self.q.width(),
            rows: block.rows.len(),
            kv_heads: block.kv_heads,
            heads: self.group,
            head_dim,
            values: self.shape.values,
            // The last one of the pages that hold the chosen keys.
            start: self.chosen(block, kv_head).map_or(start, |chosen| chosen.len() - 1),
            window: self.spec.window,
            spans: spans.unwrap_or_default(),
            rule: self.spec.rule,
            kv_type: self.kv.kv_type(),
        }
    }

    /// Returns the positions that a KV head's row of a block sees; `None` if its rows see all.
    fn chosen(&self, block: &QueryBlock, kv_head: usize) -> Option<&[u32]> {
        let (span, row) = (&self.spans[block.span], block.rows.start);
        self.spec.selected?.of_row(row, kv_head, span.start + row - span.rows.start)
    }

    /// Returns whether chosen positions are whole pages.
    fn chooses_pages(&self) -> bool {
        self.spec.selected.is_some_and(|selected| selected.blocks.size.is_multiple_of(PAGE_TOKENS))
    }

    /// Copies the chosen rows of some runs, counted in the order of `positions`, to pages side by side, each with the keys of all
    /// `kv_heads` and then their values, if these have rows of their own.
    fn gather(
        &self,
        span: &RowSpan,
        (positions, runs): (&[u32], Range<usize>),
        kv_heads: Range<usize>,
        pages: &mut Vec<u32>,
    ) {
        let [keys, values] = self.chosen_bytes(kv_heads.len());
        let positions = &positions[runs.start * RUN_TOKENS..positions.len().min(runs.end * RUN_TOKENS)];
        let page_bytes = keys + values;
        pages.resize((positions.len().div_ceil(PAGE_TOKENS) * page_bytes).div_ceil(size_of::<u32>()), 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(pages);
        for (positions, page) in positions.chunks(PAGE_TOKENS).zip(bytes.chunks_exact_mut(page_bytes)) {
            let (to_keys, to_values) = page.split_at_mut(keys);
            let mut first = 0;
            for run in positions.chunk_by(|a, b| a + 1 == *b && !(*b as usize).is_multiple_of(PAGE_TOKENS)) {
                let (page, token) = span.slot(run[0] as usize);
                let from = self.kv.head_pages(self.spec.store, kv_heads.clone(), page);
                let KvShape { head_dim, values, .. } = self.shape;
                let (layout, count) = ((values.key_layout(), head_dim), run.len());
                self.copy(layout, (from.keys, token), (&mut *to_keys, first), count);
                let layout = (KvPart::Values, values.row_dim(head_dim));
                self.copy(layout, (from.values, token), (&mut *to_values, first), count);
                first += count;
            }
        }
    }

    /// Returns the bytes of a page's keys and of its values, if these have rows of their own, of some heads.
    fn chosen_bytes(&self, kv_heads: usize) -> [usize; 2] {
        let KvShape { head_dim, values, .. } = self.shape;
        let of = |dim| kv_heads * PAGE_TOKENS * self.kv.kv_type().row_bytes(dim);
        [of(head_dim), if values.num_rows() == 2 { of(values.row_dim(head_dim)) } else { 0 }]
    }

    /// Copies rows from and to each head's block, of which `to` may have none.
    fn copy(
        &self,
        (part, dim): (KvPart, usize),
        (from, token): (&[u8], usize),
        (to, first): (&mut [u8], usize),
        count: usize,
    ) {
        let kv_type = self.kv.kv_type();
        let len = PAGE_TOKENS * kv_type.row_bytes(dim);
        for (from, to) in from.chunks_exact(len).zip(to.chunks_exact_mut(len)) {
            attention::copy_rows(kv_type, (part, dim), (from, token), (to, first), count);
        }
    }

    fn slot_len(&self, plan: &AttentionPlan) -> usize {
        let rows = plan.blocks.iter().map(|block| block.rows.len() * block.kv_heads).max().unwrap_or(0);
        rows * self.group * partial_len(self.shape.value_dim())
    }

    /// Returns the KV heads per task if `blocks` single rows are cut into runs.
    fn kv_heads_of_a_run(&self, num_runs: usize, threads: usize) -> usize {
        let tasks_per_run = (TASKS_PER_THREAD * threads).div_ceil(num_runs.max(1));
        let largest = (self.shape.num_kv_heads / tasks_per_run).max(1);
        (1..=largest).rev().find(|count| self.shape.num_kv_heads.is_multiple_of(*count)).unwrap_or(1)
    }
}

impl AttentionPlan {
    fn make(&mut self, job: &AttentionJob<'_>, threads: usize) {
        self.blocks.clear();
        self.tasks.clear();
        let block_rows = (BLOCK_QUERIES / job.group).max(1);
        for (span, facts) in job.spans.iter().enumerate() {
            let most = job.spec.selected.map_or(usize::MAX, SelectedKeys::first_choosing);
            let choosing = facts.first_beyond(most)..facts.rows.end;
            let seeing_all = facts.rows.start..choosing.start;
            let blocks = seeing_all.clone().step_by(block_rows);
            let blocks = blocks.map(|start| start..seeing_all.end.min(start + block_rows));
            for rows in blocks.chain(choosing.map(|row| row..row + 1)) {
                let mut block =
                    QueryBlock { span, rows, runs: 0..0, first_task: 0, num_parts: 1, kv_heads: 1 };
                block.runs = job.queries(&block, 0).runs();
                self.blocks.push(block);
            }
        }
        let num_kv_heads = job.shape.num_kv_heads;
        let single = |block: &QueryBlock| job.spans[block.span].rows.len() == 1;
        let num_runs = self.blocks.iter().filter(|block| single(block)).map(|block| block.runs.len()).sum();
        let kv_heads = job.kv_heads_of_a_run(num_runs, threads);
        let chooses_by_head = job.spec.selected.is_some_and(|selected| selected.num_choices > 1);
        let few = self.blocks.len() * num_kv_heads < TASKS_PER_THREAD * threads;
        // The last rows of a prompt see the most pages: they go first, so that no thread ends up alone with them.
        for (index, block) in self.blocks.iter_mut().enumerate().rev() {
            block.first_task = self.tasks.len();
            block.kv_heads = if single(block) && !chooses_by_head { kv_heads } else { 1 };
            block.num_parts = if single(block) || few { block.runs.len() } else { 1 };
            let step = block.runs.len() / block.num_parts;
            for first in block.runs.clone().step_by(step) {
                let runs = first..first + step;
                let task = |kv_head| AttentionTask { block: index, kv_head, runs: runs.clone() };
                self.tasks.extend((0..num_kv_heads).step_by(block.kv_heads).map(task));
            }
        }
    }
}

impl Cpu {
    /// Computes the attention of all rows.
    pub(super) fn attend_rows(
        &self,
        kv: &CpuKv,
        spec: &AttentionSpec<'_, Vec<f32>>,
        q: &CpuBuffer,
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) {
        let shape = kv.shape(spec.store);
        let job = AttentionJob { kv, spec, q, spans, group: spec.num_heads / shape.num_kv_heads, shape };
        let scratch = &mut *self.scratch.borrow_mut();
        let (plan, isa) = (&mut scratch.attention, self.isa);
        plan.make(&job, self.pool().threads());
        let slot_len = job.slot_len(plan);
        plan.partials.resize(plan.tasks.len() * slot_len, 0.0);
        let AttentionPlan { blocks, tasks, partials } = plan;
        let seen: usize = spans.iter().map(|span| (span.start + span.rows.len()) * span.rows.len()).sum();
        self.for_chunks(partials, slot_len, seen * q.width(), |index, slot| {
            run_task(isa, &job, blocks, &tasks[index], slot);
        });
        let (width, work) = (out.width(), tasks.len() * slot_len);
        self.for_chunks(out.values_mut(), width, work, |row, out| {
            finish_row(isa, &job, blocks, (partials, slot_len), row, out);
        });
    }
}

fn run_task(isa: Isa, job: &AttentionJob<'_>, blocks: &[QueryBlock], task: &AttentionTask, slot: &mut [f32]) {
    let block = &blocks[task.block];
    let queries = job.queries(block, task.kv_head);
    let span = &job.spans[block.span];
    let kv_heads = task.kv_head..task.kv_head + block.kv_heads;
    let page_at = |number: usize| job.kv.head_pages(job.spec.store, kv_heads.clone(), span.pages[number]);
    let len = block.kv_heads * queries.rows * queries.heads * partial_len(job.shape.value_dim());
    let slot = &mut slot[..len];
    let Some(positions) = job.chosen(block, task.kv_head) else {
        return attend_runs(isa, &queries, task.runs.clone(), &page_at, slot);
    };
    if job.chooses_pages() {
        let page = |number: usize| page_at(positions[number * PAGE_TOKENS] as usize / PAGE_TOKENS);
        return attend_runs(isa, &queries, task.runs.clone(), &page, slot);
    }
    CHOSEN.with_borrow_mut(|pages| {
        job.gather(span, (positions, task.runs.clone()), kv_heads.clone(), pages);
        let [keys, values] = job.chosen_bytes(kv_heads.len());
        let first = task.runs.start * RUN_PAGES;
        let bytes: &[u8] = bytemuck::cast_slice(pages);
        let page = |number: usize| {
            let page = &bytes[(number - first) * (keys + values)..][..keys + values];
            HeadPage { keys: &page[..keys], values: if values > 0 { &page[keys..] } else { page } }
        };
        attend_runs(isa, &queries, task.runs.clone(), &page, slot);
    });
}

fn attend_runs<'a>(
    isa: Isa,
    queries: &Queries<'_>,
    runs: Range<usize>,
    page: &dyn Fn(usize) -> HeadPage<'a>,
    slot: &mut [f32],
) {
    SCRATCH.with_borrow_mut(|scratch| attention::attend(isa, queries, runs, page, scratch, slot));
}

/// Merges the results of a row's tasks.
fn finish_row(
    isa: Isa,
    job: &AttentionJob<'_>,
    blocks: &[QueryBlock],
    (partials, slot_len): (&[f32], usize),
    row: usize,
    out: &mut [f32],
) {
    let index = blocks.partition_point(|block| block.rows.end <= row);
    let Some(block) = blocks.get(index).filter(|block| block.rows.contains(&row)) else {
        return; // spans cover the rows of a step
    };
    let (num_kv_heads, value_dim) = (job.shape.num_kv_heads, job.shape.value_dim());
    let (len, stride) = (partial_len(value_dim), num_kv_heads / block.kv_heads * slot_len);
    for (head, out) in out.chunks_exact_mut(value_dim).enumerate() {
        let (kv_head, within_group) = (head / job.group, head % job.group);
        let (task, kv_head) = (block.first_task + kv_head / block.kv_heads, kv_head % block.kv_heads);
        let row = kv_head * block.rows.len() + row - block.rows.start;
        let first = task * slot_len + (row * job.group + within_group) * len;
        let partials = &partials[first..first + (block.num_parts - 1) * stride + len];
        let sink = job.spec.sinks.map(|sinks| sinks[head]);
        attention::finish(isa, partials, stride, sink, out);
    }
}
