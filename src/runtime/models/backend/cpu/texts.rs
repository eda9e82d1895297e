//! Attention within whole texts: which task computes which rows.

use std::cell::RefCell;
use std::ops::Range;

use super::{Cpu, CpuBuffer, SERIAL_LIMIT};
use crate::backend::TextHeads;
use llmctl_kernel::texts::{BLOCK_ROWS, TextRows, TextScratch, attend_block};

thread_local! {
    static SCRATCH: RefCell<TextScratch> = RefCell::default();
}

/// A task: rows of one text.
struct TextBlock<'a> {
    text: &'a Range<usize>,
    /// Row of the text at which the block begins.
    first: usize,
    out: &'a mut [f32],
}

impl Cpu {
    /// Computes `Backend::attend_texts`.
    pub(super) fn attend_text_rows(
        &self,
        heads: &TextHeads,
        [q, k, v]: [&CpuBuffer; 3],
        texts: &[Range<usize>],
        out: &mut CpuBuffer,
    ) {
        let (isa, width) = (self.isa, q.width());
        let work: usize = texts.iter().map(|text| text.len() * text.len() * width).sum();
        let mut blocks = blocks(texts, width, out.values_mut());
        let rows = |x: &'_ CpuBuffer, text: &Range<usize>| text.start * x.width()..text.end * x.width();
        let task = |_: usize, blocks: &mut [TextBlock<'_>]| {
            SCRATCH.with_borrow_mut(|scratch| {
                for TextBlock { text, first, out } in blocks {
                    let [q, k, v] = [q, k, v].map(|x| &x.values()[rows(x, text)]);
                    attend_block(isa, heads, TextRows { q, k, v }, *first, out, scratch);
                }
            });
        };
        match work < SERIAL_LIMIT {
            true => task(0, &mut blocks),
            false => self.pool().chunks_mut(&mut blocks, 1, task),
        }
    }
}

/// Cuts the rows of all texts into blocks.
fn blocks<'a>(texts: &'a [Range<usize>], width: usize, mut out: &'a mut [f32]) -> Vec<TextBlock<'a>> {
    let mut blocks = Vec::new();
    for text in texts {
        for first in (0..text.len()).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(text.len() - first);
            let (block, rest) = out.split_at_mut(rows * width);
            blocks.push(TextBlock { text, first, out: block });
            out = rest;
        }
    }
    blocks
}
