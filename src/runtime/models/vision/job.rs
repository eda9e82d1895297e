//! The forward pass, in units: some rows of a tile through a part of the tower. A slice computes as many units as fit its work;
//! by the kernels' invariant a row's bits depend on no cut.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::TowerJob;
use super::config::TowerConfig;
use super::parts::{ProjectionStep, TowerLayer, TowerNorm, TowerWeights, apply_each, apply_gated};
use super::tile::Tile;
use crate::backend::cpu::{Cpu, CpuAngles, CpuBuffer};
use crate::backend::{Backend, ScoreRule};
use crate::images::ImageRows;
use llmctl_base::error::{Error, Result};
use llmctl_image::Patches;
use llmctl_kernel::dot;

/// Multiplications of a slice, about as many as a step of 128 rows has in a small decoder.
const SLICE_WORK: usize = 8 << 30;

/// Least rows of a unit, so that weights are read for many.
const LEAST_ROWS: usize = 64;

/// A tower on its processor.
pub struct Vit {
    pub cpu: Cpu,
    pub config: TowerConfig,
    pub weights: TowerWeights,
}

/// A part of the tower that all rows pass before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Embed,
    /// Keys and values of a layer.
    Keys(usize),
    /// Queries of a layer, attention and the feed-forward part.
    Layer(usize),
    /// A projector by number: the main one, or one of deepstack from 1 on.
    Project(usize),
}

/// Rows of a tile in a pass.
struct JobUnit {
    tile: usize,
    pass: Pass,
    rows: Range<usize>,
    work: usize,
}

/// The computation of an image.
pub struct Job {
    vit: Arc<Mutex<Vit>>,
    tiles: Vec<Patches>,
    units: Vec<JobUnit>,
    done: usize,
    slice_work: usize,
    tile: Option<Tile>,
    space: JobSpace,
    /// Rows of the tiles before.
    rows: ImageRows,
}

/// Temporary values of a unit.
#[derive(Default)]
struct JobSpace {
    block: CpuBuffer,
    normed: CpuBuffer,
    q: CpuBuffer,
    k: CpuBuffer,
    v: CpuBuffer,
    added: CpuBuffer,
    angles: CpuAngles,
}

impl Job {
    pub fn new(vit: Arc<Mutex<Vit>>, tiles: Vec<Patches>, slice_work: Option<usize>) -> Result<Self> {
        let (units, rows) = {
            let vit = vit.lock();
            let slice_work = slice_work.unwrap_or(SLICE_WORK);
            let mut units = Vec::new();
            for (index, tile) in tiles.iter().enumerate() {
                vit.check(tile)?;
                vit.plan(index, tile, slice_work, &mut units);
            }
            let deep = vec![Vec::new(); vit.config.deepstack.len()];
            (units, ImageRows { width: vit.config.output_size, embeddings: Vec::new(), deep })
        };
        let slice_work = slice_work.unwrap_or(SLICE_WORK);
        Ok(Self { vit, tiles, units, done: 0, slice_work, tile: None, space: JobSpace::default(), rows })
    }

    fn compute(&mut self, at: usize) -> Result<()> {
        let vit = self.vit.lock();
        let JobUnit { tile: index, pass, rows, .. } = &self.units[at];
        let patches = &self.tiles[*index];
        if *pass == Pass::Embed && rows.start == 0 {
            self.tile = Some(Tile::new(&vit.config, patches.grid.map(|side| side as usize)));
        }
        let tile = self.tile.as_mut().ok_or_else(|| Error::Backend("a tile without rows".to_owned()))?;
        vit.cpu.begin_rows(rows.len());
        let space = &mut self.space;
        match pass {
            Pass::Embed => vit.embed(patches, tile, rows, space),
            Pass::Keys(layer) => vit.keys(*layer, tile, rows, space),
            Pass::Layer(layer) => vit.layer(*layer, tile, rows, space),
            Pass::Project(number) => {
                vit.project(*number, tile, rows, space)?;
                let out = match number.checked_sub(1) {
                    None => &mut self.rows.embeddings,
                    Some(level) => &mut self.rows.deep[level],
                };
                place_blocks(tile, rows, &vit.config, &space.block, out);
                Ok(())
            }
        }
    }
}

/// Writes the rows of blocks to their places behind the rows of the tiles before.
fn place_blocks(
    tile: &Tile,
    rows: &Range<usize>,
    config: &TowerConfig,
    from: &CpuBuffer,
    out: &mut Vec<f32>,
) {
    let (area, width) = (config.merge * config.merge, config.output_size);
    if rows.start == 0 {
        out.resize(out.len() + tile.blocks.len() * width, 0.0);
    }
    let first = out.len() - tile.blocks.len() * width;
    for (at, block) in tile.blocks[rows.start / area..rows.end / area].iter().enumerate() {
        out[first + block * width..][..width].copy_from_slice(from.row(at));
    }
}

impl TowerJob for Job {
    fn advance(&mut self) -> Result<Option<ImageRows>> {
        let mut work = 0;
        while self.done < self.units.len() {
            work += self.units[self.done].work;
            self.compute(self.done)?;
            self.done += 1;
            let next = self.units.get(self.done).map_or(0, |unit| unit.work);
            if work.saturating_add(next) > self.slice_work {
                break;
            }
        }
        let is_done = self.done == self.units.len();
        Ok(is_done.then(|| std::mem::take(&mut self.rows)))
    }

    fn progress(&self) -> (usize, usize) {
        (self.done, self.units.len())
    }
}

impl Vit {
    /// Checks that a tile is one that the tower can compute.
    fn check(&self, Patches { grid, values }: &Patches) -> Result<()> {
        let Self { config, weights, .. } = self;
        let [rows, columns] = grid.map(|side| side as usize);
        let len =
            rows.checked_mul(columns).and_then(|patches| patches.checked_mul(3 * config.patches.size.pow(2)));
        let is_whole =
            rows > 0 && columns > 0 && [rows, columns].iter().all(|side| side.is_multiple_of(config.merge));
        let fits = weights.positions.as_ref().is_none_or(|table| table.fits([rows, columns]));
        match len == Some(values.len()) && is_whole && fits {
            true => Ok(()),
            false => Err(Error::Backend(format!(
                "the tower cannot read {rows} x {columns} patches of {} values",
                values.len()
            ))),
        }
    }

    /// Appends the units of a tile.
    fn plan(&self, tile: usize, patches: &Patches, slice_work: usize, units: &mut Vec<JobUnit>) {
        let config = &self.config;
        let num_patches = patches.grid.iter().map(|side| *side as usize).product::<usize>();
        let rows = num_patches + usize::from(config.class_row);
        let unit = LEAST_ROWS.next_multiple_of(config.merge * config.merge);
        let mut pass = |pass: Pass, rows: usize, work: usize| {
            let step = (slice_work / work.max(1) / unit * unit).max(unit);
            let of = |first: usize| first..rows.min(first + step);
            units.extend((0..rows).step_by(step).map(of).map(|rows| JobUnit {
                tile,
                pass,
                work: work.saturating_mul(rows.len()),
                rows,
            }));
        };
        let TowerConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
        let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * head_dim);
        let matrices = 2 + usize::from(config.is_gated);
        let project = 4 * hidden * config.output_size.max(hidden);
        pass(Pass::Embed, rows, hidden * patches.values.len() / num_patches);
        for layer in 0..config.num_layers {
            pass(Pass::Keys(layer), rows, 2 * hidden * kv);
            pass(Pass::Layer(layer), rows, 2 * hidden * q + matrices * hidden * inner + 2 * q * rows);
            for (level, _) in
                self.weights.deepstack.iter().enumerate().filter(|(_, (behind, _))| *behind == layer)
            {
                pass(Pass::Project(level + 1), num_patches, project);
            }
        }
        pass(Pass::Project(0), num_patches, project);
    }

    fn embed(
        &self,
        patches: &Patches,
        tile: &mut Tile,
        rows: &Range<usize>,
        space: &mut JobSpace,
    ) -> Result<()> {
        let Self { cpu, config, weights } = self;
        let JobSpace { block, normed, .. } = space;
        let of_patches = rows.start..rows.end.min(tile.places.len());
        self.gather_pixels(patches, &tile.places[of_patches.clone()], block);
        let TowerWeights { patches: matrix, positions, class_row, .. } = weights;
        change(cpu, matrix.pixel_norm.as_ref(), block, normed)?;
        matrix.matrix.apply(cpu, block, normed)?;
        std::mem::swap(block, normed);
        change(cpu, matrix.norm.as_ref(), block, normed)?;
        let hidden = config.hidden_size;
        block.resize(rows.len(), hidden);
        let values = block.values_mut();
        let positions = positions.as_ref().map(|table| table.of_tile(tile.grid));
        for (row, place) in values.chunks_exact_mut(hidden).zip(&tile.places[of_patches.clone()]) {
            positions.iter().for_each(|positions| positions.add(cpu.isa(), *place, row));
        }
        if let (Some(class_row), true) = (class_row, of_patches.end < rows.end) {
            let row = &mut values[of_patches.len() * hidden..];
            row.copy_from_slice(class_row);
            positions.iter().for_each(|positions| dot::axpy(cpu.isa(), 1.0, positions.first(), row));
        }
        change(cpu, matrix.position_norm.as_ref(), block, normed)?;
        tile.residual[rows.start * hidden..rows.end * hidden].copy_from_slice(block.values());
        Ok(())
    }

    /// Gathers the patches of some places, in the order of the matrix's values.
    fn gather_pixels(&self, patches: &Patches, places: &[[usize; 2]], out: &mut CpuBuffer) {
        let embedding = &self.config.patches;
        let (area, [factor, addend]) = (embedding.size.pow(2), embedding.scale);
        out.resize(places.len(), 3 * area);
        for (out, [row, column]) in out.values_mut().chunks_exact_mut(3 * area).zip(places) {
            let patch = row * patches.grid[1] as usize + column;
            let values = &patches.values[patch * 3 * area..][..3 * area];
            for (at, value) in values.iter().enumerate() {
                let to = if embedding.channels_last { at % area * 3 + at / area } else { at };
                out[to] = value * factor + addend;
            }
        }
    }

    /// Stores the keys and values of a layer.
    fn keys(&self, layer: usize, tile: &mut Tile, rows: &Range<usize>, space: &mut JobSpace) -> Result<()> {
        let (cpu, of) = (&self.cpu, &self.weights.layers[layer]);
        let JobSpace { block, normed, k, v, added, angles, .. } = space;
        take_rows(&tile.residual, self.config.hidden_size, rows, block);
        of.norms[0].apply(cpu, block, normed)?;
        apply_each(cpu, normed, [(&of.qkv[1], &mut *k), (&of.qkv[2], &mut *v)])?;
        change(cpu, of.k_norm.as_ref(), k, added)?;
        change(cpu, of.v_norm.as_ref(), v, added)?;
        self.rotate(tile, rows, angles, k)?;
        let spans: Vec<_> = tile.spans(rows, self.has_windows(layer)).into_iter().map(|of| of.span).collect();
        cpu.store_kv(&mut tile.kv, 0, k, v, &spans)
    }

    /// Computes a layer whose keys and values are stored.
    fn layer(&self, layer: usize, tile: &mut Tile, rows: &Range<usize>, space: &mut JobSpace) -> Result<()> {
        let Self { cpu, config, weights } = self;
        let of = &weights.layers[layer];
        let JobSpace { block, normed, q, k, added, angles, .. } = space;
        take_rows(&tile.residual, config.hidden_size, rows, block);
        of.norms[0].apply(cpu, block, normed)?;
        of.qkv[0].apply(cpu, normed, q)?;
        change(cpu, of.q_norm.as_ref(), q, added)?;
        self.rotate(tile, rows, angles, q)?;
        let rule = ScoreRule { scale: config.score_scale, softcap: None };
        cpu.attend_whole(&tile.kv, rule, q, &tile.spans(rows, self.has_windows(layer)), k);
        of.output.apply(cpu, k, added)?;
        self.add(of, 0, block, [added, normed])?;
        of.norms[1].apply(cpu, block, normed)?;
        match &of.gate {
            Some(gate) => {
                apply_gated(cpu, normed, [gate, &of.up, &of.down], config.activation, [q, k], added)?;
            }
            None => {
                of.up.apply(cpu, normed, q)?;
                cpu.activate(config.activation, q)?;
                of.down.apply(cpu, q, added)?;
            }
        }
        self.add(of, 1, block, [added, normed])?;
        let hidden = config.hidden_size;
        tile.residual[rows.start * hidden..rows.end * hidden].copy_from_slice(block.values());
        Ok(())
    }

    /// Adds the result of a layer's first or second part to the rows.
    fn add(
        &self,
        of: &TowerLayer,
        part: usize,
        block: &mut CpuBuffer,
        [added, space]: [&mut CpuBuffer; 2],
    ) -> Result<()> {
        change(&self.cpu, of.post_norms.as_ref().map(|norms| &norms[part]), added, space)?;
        if let Some(scales) = &of.scales {
            self.cpu.multiply(added, &scales[part])?;
        }
        self.cpu.add_scaled(block, added, 1.0)
    }

    fn has_windows(&self, layer: usize) -> bool {
        self.config.windows.as_ref().is_some_and(|windows| !windows.full_layers.contains(&layer))
    }

    fn rotate(
        &self,
        tile: &Tile,
        rows: &Range<usize>,
        angles: &mut CpuAngles,
        x: &mut CpuBuffer,
    ) -> Result<()> {
        if self.config.rope.is_none() {
            return Ok(());
        }
        let half = self.config.head_dim / 2;
        let [cos, sin] = tile.angles.each_ref().map(|all| &all[rows.start * half..rows.end * half]);
        self.cpu.angles(cos, sin, rows.len(), angles)?;
        self.cpu.rope(x, self.config.head_dim, angles)
    }

    /// Computes a projector's rows into the block.
    fn project(&self, number: usize, tile: &Tile, rows: &Range<usize>, space: &mut JobSpace) -> Result<()> {
        let Self { cpu, config, weights } = self;
        let JobSpace { block, normed, q, k, .. } = space;
        let steps = match number.checked_sub(1) {
            None => &weights.projector,
            Some(level) => &weights.deepstack[level].1,
        };
        take_rows(&tile.residual, config.hidden_size, rows, block);
        let area = config.merge * config.merge;
        for step in steps {
            match step {
                ProjectionStep::Norm(norm) => norm.apply(cpu, block, normed)?,
                ProjectionStep::Join { channels_first } => join(block, area, *channels_first, normed),
                ProjectionStep::Average { factor } => average(cpu, block, area, *factor, normed),
                ProjectionStep::Standardise { bias, scale } => {
                    standardise(block, [bias, scale]);
                    continue;
                }
                ProjectionStep::Linear(linear) => linear.apply(cpu, block, normed)?,
                ProjectionStep::Activation(activation) => {
                    cpu.activate(*activation, block)?;
                    continue;
                }
                ProjectionStep::Gated { network, activation } => {
                    apply_gated(cpu, block, network.each_ref(), *activation, [q, k], normed)?;
                }
            }
            std::mem::swap(block, normed);
        }
        Ok(())
    }
}

fn change(cpu: &Cpu, norm: Option<&TowerNorm>, x: &mut CpuBuffer, space: &mut CpuBuffer) -> Result<()> {
    norm.map_or(Ok(()), |norm| norm.change(cpu, x, space))
}

fn take_rows(values: &[f32], width: usize, rows: &Range<usize>, out: &mut CpuBuffer) {
    out.resize(rows.len(), width);
    out.values_mut().copy_from_slice(&values[rows.start * width..rows.end * width]);
}

/// Joins each `area` rows to one.
fn join(x: &CpuBuffer, area: usize, channels_first: bool, out: &mut CpuBuffer) {
    let width = x.width();
    out.resize(x.num_rows() / area, width * area);
    let blocks = x.values().chunks_exact(width * area);
    for (out, block) in out.values_mut().chunks_exact_mut(width * area).zip(blocks) {
        match channels_first {
            false => out.copy_from_slice(block),
            true => {
                for (at, value) in block.iter().enumerate() {
                    out[at % width * area + at / width] = *value;
                }
            }
        }
    }
}

/// Averages each `area` rows, in f32, and multiplies by `factor`.
fn average(cpu: &Cpu, x: &CpuBuffer, area: usize, factor: f32, out: &mut CpuBuffer) {
    let width = x.width();
    out.resize(x.num_rows() / area, width);
    let blocks = x.values().chunks_exact(width * area);
    for (out, block) in out.values_mut().chunks_exact_mut(width).zip(blocks) {
        out.fill(0.0);
        block.chunks_exact(width).for_each(|row| dot::axpy(cpu.isa(), 1.0, row, out));
        out.iter_mut().for_each(|value| *value = *value / area as f32 * factor);
    }
}

fn standardise(x: &mut CpuBuffer, [bias, scale]: [&Vec<f32>; 2]) {
    let width = x.width();
    for row in x.values_mut().chunks_exact_mut(width) {
        for (value, (bias, scale)) in row.iter_mut().zip(bias.iter().zip(scale)) {
            *value = (*value - bias) * scale;
        }
    }
}
