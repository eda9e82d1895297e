//! One tile on its way through a tower: the order of its rows, their angles and windows, and their values.

use std::ops::Range;

use super::config::{RopeFrequencies, TowerConfig, TowerRope};
use crate::backend::cpu::{CpuKv, WholeSpan};
use crate::backend::{KvLayout, KvShape, KvType, KvValues, PAGE_TOKENS, RowSpan, Store, StoreShape};

/// A tile's rows and what is known of them. Rows are blocks of `merge * merge` patches, each row by row, in the order of
/// windows if there are some; a class row is the last one.
pub struct Tile {
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Row and column of each row's patch.
    pub places: Vec<[usize; 2]>,
    /// For each block, its number row by row.
    pub blocks: Vec<usize>,
    /// Rows of each window; one of all rows without windows.
    pub windows: Vec<Range<usize>>,
    /// Cosines and sines, `[rows, head_dim / 2]` each; empty without rotary positions.
    pub angles: [Vec<f32>; 2],
    /// `[rows, hidden]`.
    pub residual: Vec<f32>,
    /// Keys and values of the layer that is computed.
    pub kv: CpuKv,
}

impl Tile {
    pub fn new(config: &TowerConfig, grid: [usize; 2]) -> Self {
        let merge = config.merge;
        let sides = grid.map(|side| side / merge);
        let window = config.windows.as_ref().map_or(usize::MAX, |windows| windows.side);
        let (mut blocks, mut windows, mut start) = (Vec::new(), Vec::new(), 0);
        for top in (0..sides[0]).step_by(window) {
            for left in (0..sides[1]).step_by(window) {
                let rows = top..top.saturating_add(window).min(sides[0]);
                let columns = left..left.saturating_add(window).min(sides[1]);
                blocks
                    .extend(rows.flat_map(|row| columns.clone().map(move |column| row * sides[1] + column)));
                windows.push(start..blocks.len() * merge * merge);
                start = blocks.len() * merge * merge;
            }
        }
        let places: Vec<[usize; 2]> = blocks
            .iter()
            .flat_map(|block| {
                let [top, left] = [block / sides[1] * merge, block % sides[1] * merge];
                (0..merge * merge).map(move |at| [top + at / merge, left + at % merge])
            })
            .collect();
        let len = places.len() + usize::from(config.class_row);
        if let [whole] = &mut windows[..] {
            whole.end = len;
        }
        let shape =
            KvShape { num_kv_heads: config.num_kv_heads, head_dim: config.head_dim, values: KvValues::Own };
        let stores = vec![Store { shape: StoreShape::Rows(shape), group: 0 }];
        Self {
            grid,
            angles: config.rope.map(|rope| angles(config, rope, grid, &places, len)).unwrap_or_default(),
            residual: vec![0.0; len * config.hidden_size],
            kv: CpuKv::new(&KvLayout { stores, num_groups: 1 }, KvType::F32),
            places,
            blocks,
            windows,
        }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.windows.last().map_or(0, |last| last.end)
    }

    /// Returns the parts of the windows, or of the whole tile, that lie in some rows, each with pages of its own.
    pub fn spans(&self, rows: &Range<usize>, in_windows: bool) -> Vec<WholeSpan> {
        let whole = std::slice::from_ref(&(0..self.len())).to_vec();
        let (mut spans, mut page) = (Vec::new(), 0);
        for window in if in_windows { &self.windows[..] } else { &whole } {
            let pages: Vec<u32> = (page..).take(window.len().div_ceil(PAGE_TOKENS)).collect();
            page += pages.len() as u32;
            let [start, end] = [rows.start.max(window.start), rows.end.min(window.end)];
            if start < end {
                let (rows, start) = (start - rows.start..end - rows.start, start - window.start);
                let span = RowSpan { rows, start, num_drafted: 0, pages, seen_besides: Vec::new() };
                spans.push(WholeSpan { span, len: window.len() });
            }
        }
        spans
    }
}

/// Computes cosines and sines of all rows; those of a class row are of no rotation.
fn angles(
    config: &TowerConfig,
    rope: TowerRope,
    grid: [usize; 2],
    places: &[[usize; 2]],
    len: usize,
) -> [Vec<f32>; 2] {
    let (quarter, width) = (config.head_dim / 4, config.head_dim as f32);
    let frequency = |axis: usize, at: usize| {
        let exponent = match rope.frequencies {
            RopeFrequencies::Same => 4.0 * at as f32 / width,
            RopeFrequencies::Alternating => 2.0 * (2 * at + axis) as f32 / width,
        };
        1.0 / libm::pow(rope.theta.into(), exponent.into()) as f32
    };
    let of_axis = |axis: usize| -> Vec<f64> {
        let frequencies: Vec<f32> = (0..quarter).map(|at| frequency(axis, at)).collect();
        let angles =
            |place: usize| frequencies.iter().map(move |frequency| f64::from(place as f32 * frequency));
        (0..grid[axis]).flat_map(angles).collect()
    };
    let axes = [0, 1].map(of_axis);
    let order = if rope.columns_first { [1, 0] } else { [0, 1] };
    [libm::cos as fn(f64) -> f64, libm::sin].map(|function| {
        let tables =
            axes.each_ref().map(|axis| axis.iter().map(|&angle| function(angle) as f32).collect::<Vec<_>>());
        let mut out = Vec::with_capacity(len * 2 * quarter);
        for place in places {
            order
                .iter()
                .for_each(|&axis| out.extend_from_slice(&tables[axis][place[axis] * quarter..][..quarter]));
        }
        out.resize(len * 2 * quarter, function(0.0) as f32);
        out
    })
}
