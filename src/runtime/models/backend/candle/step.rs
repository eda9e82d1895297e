//! Index and mask tensors of one step: the slots that its rows write and see.
//!
//! All layers of a step share them, so they are made and uploaded once per step and kind of layer, not once
//! per layer. They depend on the spans only.
//!
//! Attention is computed in groups: rows whose products are batched into one. A group is one span, or a block
//! of a long span's rows, or several spans of equally many rows (running generations have one each), padded
//! to the longest:
//!
//! ```text
//! span 0   k k k k k . .     slots seen by its rows; `.` is masked padding
//! span 1   k k k k k k k
//! span 2   k k k k . . .
//! ```

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use super::cuda::DecodeTable;
use super::{RowSpan, SelectedKeys};
use crate::backend::PAGE_TOKENS;
use llmctl_kernel::attention::visible;

/// Limit of the values (256 MiB of f32) that scores and gathered keys and values of a group should take together.
pub const GROUP_VALUES: usize = 1 << 26;

/// Indices of the present step, created when a layer first needs them.
#[derive(Debug, Default)]
pub struct StepIndex {
    spans: Vec<RowSpan>,
    /// First page of each span.
    pages: Option<Tensor>,
    writes: Vec<([usize; 2], Arc<Writes>)>,
    reads: Vec<(ReadShape, Arc<Vec<RowGroup>>)>,
    tables: Vec<Arc<DecodeTable>>,
}

/// Slots that a step's rows are written to.
#[derive(Debug)]
pub struct Writes {
    /// `[kv_heads, rows, head_dim]`, the same slot for all values of a row.
    pub slots: Tensor,
    /// An upper bound of all slots, exclusive.
    pub num_slots: usize,
}

/// The parameters, besides the spans, that determine the groups of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub is_two_way: bool,
}

impl ReadShape {
    /// Returns the positions that the row at a position sees.
    fn visible(self, span: &RowSpan, position: usize) -> Range<usize> {
        let besides = span.seen_besides(position).filter(|_| self.is_two_way);
        visible(position, self.window, besides)
    }
}

/// Rows that are computed together.
#[derive(Debug)]
pub struct RowGroup {
    /// Rows of the step: `batch` runs of equal length.
    pub rows: Range<usize>,
    pub batch: usize,
    /// Number of slots that each run sees, including padding.
    pub seen: usize,
    pub slots: Slots,
    /// 0 or minus infinity, `[1, batch, 1, rows per run, seen]`; `None` if every row sees every slot.
    pub mask: Option<Tensor>,
}

impl RowGroup {
    /// Iterates over the rows with their positions.
    pub fn positions<'a>(&self, spans: &'a [RowSpan]) -> impl Iterator<Item = (usize, usize)> + use<'a> {
        let rows = self.rows.clone();
        let of_span =
            |span: &'a RowSpan| span.rows.clone().map(|row| (row, span.start + row - span.rows.start));
        spans.iter().flat_map(of_span).filter(move |(row, _)| rows.contains(row))
    }

    /// Returns the mask of rows that see chosen positions only, as [`Self::mask`]. The group has no window: it sees all
    /// positions from 0 on. The first dimension is 1, or KV heads if each has a choice of its own.
    pub fn chosen(&self, chosen: &SelectedKeys, spans: &[RowSpan], device: &Device) -> Result<Tensor> {
        let mut mask = vec![f32::NEG_INFINITY; chosen.num_choices * self.rows.len() * self.seen];
        let rows = (0..chosen.num_choices).flat_map(|head| self.positions(spans).map(move |row| (head, row)));
        for ((head, (row, position)), mask) in rows.zip(mask.chunks_exact_mut(self.seen)) {
            match chosen.of_row(row, head, position) {
                None => mask[..=position].fill(0.0),
                Some(chosen) => chosen.iter().for_each(|chosen| mask[*chosen as usize] = 0.0),
            }
        }
        let shape = (chosen.num_choices, self.batch, 1, self.rows.len() / self.batch, self.seen);
        Tensor::from_vec(mask, shape, device)
    }
}

/// Slots that a group sees.
#[derive(Debug)]
pub enum Slots {
    /// Consecutive slots from this one, of a single run: read in place.
    From(usize),
    /// Slot numbers, `[batch * seen]`.
    Listed(Tensor),
}

impl StepIndex {
    /// Clears the indices if they belong to another step.
    pub fn turn_to(&mut self, spans: &[RowSpan]) {
        if self.spans != spans {
            *self = StepIndex { spans: spans.to_vec(), ..StepIndex::default() };
        }
    }

    /// Returns the slots of all rows for a layer of `[kv_heads, head_dim]`.
    pub fn writes(&mut self, device: &Device, shape: [usize; 2]) -> Result<Arc<Writes>> {
        if let Some((_, known)) = self.writes.iter().find(|(known, _)| *known == shape) {
            return Ok(known.clone());
        }
        check_rows(&self.spans)?;
        let positions = |span: &RowSpan| span.start..span.start + span.rows.len();
        let slots: Vec<u32> =
            self.spans.iter().flat_map(|span| positions(span).map(|position| slot(span, position))).collect();
        let num_slots = slots.iter().max().map_or(0, |slot| *slot as usize + 1);
        let [num_kv_heads, head_dim] = shape;
        let len = slots.len();
        let slots = Tensor::from_vec(slots, (1, len, 1), device)?;
        let slots = slots.broadcast_as((num_kv_heads, len, head_dim))?.contiguous()?;
        let writes = Arc::new(Writes { slots, num_slots });
        self.writes.push((shape, writes.clone()));
        Ok(writes)
    }

    /// Returns the table of a layer's kernel.
    pub fn table(
        &mut self,
        device: &Device,
        window: Option<usize>,
        is_two_way: bool,
    ) -> Result<Arc<DecodeTable>> {
        if let Some(known) = self.tables.iter().find(|known| known.seen_by == (window, is_two_way)) {
            return Ok(known.clone());
        }
        check_rows(&self.spans)?;
        let table = Arc::new(DecodeTable::new(&self.spans, window, is_two_way, device)?);
        self.tables.push(table.clone());
        Ok(table)
    }

    /// Returns the page of each span's state.
    pub fn pages(&mut self, device: &Device) -> Result<Tensor> {
        let pages = |spans: &[RowSpan]| Tensor::from_iter(spans.iter().map(|span| span.pages[0]), device);
        let pages = self.pages.take().map_or_else(|| pages(&self.spans), Ok)?;
        self.pages = Some(pages.clone());
        Ok(pages)
    }

    /// Returns the groups of a layer, in row order.
    pub fn reads(&mut self, device: &Device, shape: ReadShape) -> Result<Arc<Vec<RowGroup>>> {
        if let Some((_, known)) = self.reads.iter().find(|(known, _)| *known == shape) {
            return Ok(known.clone());
        }
        check_rows(&self.spans)?;
        let blocks: Vec<RowRun> = self.spans.iter().flat_map(|span| blocks(span, shape)).collect();
        let groups = batched(&blocks, shape).map(|blocks| group(device, blocks, shape));
        let groups = Arc::new(groups.collect::<Result<Vec<_>>>()?);
        self.reads.push((shape, groups.clone()));
        Ok(groups)
    }
}

/// Returns a slot's number; pages that fit into a device's memory keep it within u32.
fn slot(span: &RowSpan, position: usize) -> u32 {
    let (page, offset) = span.slot(position);
    (page as usize * PAGE_TOKENS + offset) as u32
}

/// Checks that the spans cover all rows in order, as reads and writes assume.
fn check_rows(spans: &[RowSpan]) -> Result<()> {
    let mut next = 0;
    for span in spans {
        if span.rows.start != next || span.rows.is_empty() {
            candle_core::bail!("spans do not cover the rows of a step in order");
        }
        next = span.rows.end;
    }
    Ok(())
}

/// Consecutive rows of one span.
#[derive(Debug, Clone)]
struct RowRun<'a> {
    span: &'a RowSpan,
    rows: Range<usize>,
    /// Position of the first row.
    start: usize,
    /// Positions that its rows see.
    seen: Range<usize>,
}

/// Cuts a span's rows into blocks whose scores stay within [`GROUP_VALUES`].
fn blocks(span: &RowSpan, shape: ReadShape) -> impl Iterator<Item = RowRun<'_>> {
    let seen =
        move |first: usize, last: usize| shape.visible(span, first).start..shape.visible(span, last).end;
    let most_seen = seen(span.start, span.start + span.rows.len() - 1).len();
    let step = (GROUP_VALUES / (shape.num_heads * most_seen).max(1)).max(1);
    span.rows.clone().step_by(step).map(move |row| {
        let rows = row..(row + step).min(span.rows.end);
        let start = span.start + row - span.rows.start;
        let seen = seen(start, start + rows.len() - 1);
        RowRun { span, rows, start, seen }
    })
}

/// Groups blocks to be batched: equal numbers of rows, at most half of the slots padding, within [`GROUP_VALUES`].
fn batched<'b, 'a>(blocks: &'b [RowRun<'a>], shape: ReadShape) -> impl Iterator<Item = &'b [RowRun<'a>]> {
    let fits = move |run: &[RowRun]| {
        let (rows, batch) = (run[0].rows.len(), run.len());
        let longest = run.iter().map(|block| block.seen.len()).max().unwrap_or(0);
        let seen: usize = run.iter().map(|block| block.seen.len()).sum();
        let per_slot = shape.num_heads * rows + 2 * shape.num_kv_heads * shape.head_dim;
        run.iter().all(|block| block.rows.len() == rows)
            && batch * longest <= 2 * seen
            && batch * longest * per_slot <= GROUP_VALUES
    };
    let mut rest = blocks;
    std::iter::from_fn(move || {
        let mut count = 1;
        while count < rest.len() && fits(&rest[..count + 1]) {
            count += 1;
        }
        let (run, after) = rest.split_at_checked(count)?;
        rest = after;
        Some(run)
    })
}

fn group(device: &Device, blocks: &[RowRun<'_>], shape: ReadShape) -> Result<RowGroup> {
    let (first, last) = (&blocks[0], &blocks[blocks.len() - 1]);
    let (batch, rows) = (blocks.len(), first.rows.len());
    let seen = blocks.iter().map(|block| block.seen.len()).max().unwrap_or(0);
    let mut slots = Vec::with_capacity(batch * seen);
    for block in blocks {
        slots.extend(block.seen.clone().map(|position| slot(block.span, position)));
        // Padding repeats a slot that holds finite numbers; the mask removes it.
        slots.extend((block.seen.len()..seen).map(|_| slot(block.span, block.start)));
    }
    let consecutive = slots.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == 1);
    let slots = match batch == 1 && consecutive {
        true => Slots::From(slots[0] as usize),
        false => Slots::Listed(Tensor::new(slots, device)?),
    };
    let mask = mask(blocks, seen, shape);
    let mask = match mask.iter().all(|value| *value == 0.0) {
        true => None,
        false => Some(Tensor::from_vec(mask, (1, batch, 1, rows, seen), device)?),
    };
    Ok(RowGroup { rows: first.rows.start..last.rows.end, batch, seen, slots, mask })
}

/// Returns a mask `[batch, rows, seen]`, 0 where a row sees a slot.
fn mask(blocks: &[RowRun<'_>], seen: usize, shape: ReadShape) -> Vec<f32> {
    let rows =
        blocks.iter().flat_map(|block| (0..block.rows.len()).map(move |row| (block, block.start + row)));
    let visible = |block: &RowRun<'_>, position: usize| {
        let Range { start, end } = shape.visible(block.span, position);
        start - block.seen.start..end - block.seen.start
    };
    rows.flat_map(|(block, position)| {
        let visible = visible(block, position);
        (0..seen).map(move |slot| if visible.contains(&slot) { 0.0 } else { f32::NEG_INFINITY })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(window: Option<usize>) -> ReadShape {
        ReadShape { num_heads: 4, num_kv_heads: 2, head_dim: 8, window, is_two_way: false }
    }

    fn span(rows: Range<usize>, start: usize, pages: &[u32]) -> RowSpan {
        RowSpan { rows, start, num_drafted: 0, pages: pages.to_vec(), seen_besides: vec![] }
    }

    fn reads(spans: &[RowSpan], shape: ReadShape) -> Arc<Vec<RowGroup>> {
        let mut step = StepIndex::default();
        step.turn_to(spans);
        step.reads(&Device::Cpu, shape).unwrap()
    }

    #[test]
    fn a_single_row_in_consecutive_pages_is_read_in_place_without_a_mask() {
        let groups = reads(&[span(0..1, 40, &[3, 4])], shape(None));
        assert_eq!((groups.len(), groups[0].seen), (1, 41));
        assert!(matches!(groups[0].slots, Slots::From(96)) && groups[0].mask.is_none());
        let windowed = reads(&[span(0..1, 40, &[3, 4])], shape(Some(10)));
        assert!(matches!(windowed[0].slots, Slots::From(127)) && windowed[0].seen == 10);
    }

    #[test]
    fn running_generations_are_batched_and_padding_is_masked() {
        let groups = reads(&[span(0..1, 3, &[5]), span(1..2, 5, &[0])], shape(None));
        let [group] = groups.as_slice() else { panic!("{groups:?}") };
        assert_eq!((group.rows.clone(), group.batch, group.seen), (0..2, 2, 6));
        let Slots::Listed(slots) = &group.slots else { panic!("{group:?}") };
        assert_eq!(
            slots.to_vec1::<u32>().unwrap(),
            [160, 161, 162, 163, 163, 163, 0, 1, 2, 3, 4, 5],
            "four positions and padding, then six"
        );
        let mask = group.mask.as_ref().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let hidden = f32::NEG_INFINITY;
        assert_eq!(mask, [0.0, 0.0, 0.0, 0.0, hidden, hidden, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn unlike_spans_are_not_batched() {
        let pages: Vec<u32> = (0..20).collect();
        let short = |row| span(row..row + 1, 3, &[30 + row as u32]);
        let much_longer = reads(&[short(0), short(1), span(2..3, 600, &pages)], shape(None));
        assert_eq!(much_longer.iter().map(|group| group.batch).collect::<Vec<_>>(), [2, 1]);
        let more_rows = reads(&[span(0..1, 3, &[30]), span(1..3, 3, &[31])], shape(None));
        assert_eq!(more_rows.len(), 2);
    }

    #[test]
    fn rows_see_their_window_and_not_the_future() {
        let groups = reads(&[span(0..3, 1, &[0])], shape(Some(2)));
        let mask = groups[0].mask.as_ref().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let seen: Vec<Vec<bool>> =
            mask.chunks(4).map(|row| row.iter().map(|m| *m == 0.0).collect()).collect();
        let (yes, no) = (true, false);
        assert_eq!(seen, [[yes, yes, no, no], [no, yes, yes, no], [no, no, yes, yes]]);
    }

    #[test]
    fn rows_of_an_image_see_it_whole_in_two_way_layers() {
        let seen_besides = vec![1..2, 2..4, 2..4, 4..5];
        let spans = [RowSpan { seen_besides, ..span(0..4, 1, &[0]) }];
        let count = |shape| {
            let mask = reads(&spans, shape)[0].mask.as_ref().unwrap().flatten_all().unwrap();
            let mask = mask.to_vec1::<f32>().unwrap();
            mask.chunks(5).map(|row| row.iter().filter(|m| **m == 0.0).count()).collect::<Vec<_>>()
        };
        assert_eq!(count(shape(None)), [2, 3, 4, 5]);
        assert_eq!(count(ReadShape { is_two_way: true, ..shape(None) }), [2, 4, 4, 5]);
    }

    #[test]
    fn a_long_prompt_is_cut_into_blocks_that_cover_it_in_order() {
        let big = ReadShape { num_heads: 64, ..shape(None) };
        let pages: Vec<u32> = (0..1024).collect();
        let long = span(0..512, 30_000, &pages);
        let blocks: Vec<RowRun> = blocks(&long, big).collect();
        assert!(blocks.len() > 1);
        let mut next = 0;
        for block in &blocks {
            assert_eq!((block.rows.start, block.start), (next, 30_000 + next));
            assert!(block.rows.len() * block.seen.len() * 64 <= GROUP_VALUES);
            next = block.rows.end;
        }
        assert_eq!(next, 512);
        let runs: usize = batched(&blocks, big).map(<[RowRun]>::len).sum();
        assert_eq!(runs, blocks.len());
    }

    #[test]
    fn rows_out_of_order_are_refused_and_another_step_is_not_confused_with_this_one() {
        let mut step = StepIndex::default();
        step.turn_to(&[span(1..2, 0, &[0])]);
        assert!(step.reads(&Device::Cpu, shape(None)).is_err());
        assert!(step.writes(&Device::Cpu, [1, 1]).is_err());
        step.turn_to(&[span(0..2, 31, &[7, 2])]);
        let slots = step.writes(&Device::Cpu, [1, 1]).unwrap().slots.flatten_all().unwrap();
        assert_eq!(slots.to_vec1::<u32>().unwrap(), [255, 64]);
        step.turn_to(&[span(0..2, 31, &[7, 3])]);
        let writes = step.writes(&Device::Cpu, [1, 1]).unwrap();
        assert_eq!(writes.num_slots, 256);
        assert_eq!(writes.slots.flatten_all().unwrap().to_vec1::<u32>().unwrap(), [255, 96]);
    }
}
