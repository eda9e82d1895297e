//! A tower's weights in memory, and what they do to rows.

use super::config::{Positions, Resampling};
use crate::backend::cpu::{Cpu, CpuBuffer, CpuWeight};
use crate::backend::{Activation, Backend, GatedNetwork, Product};
use crate::model::weights::to_f32;
use crate::tensor::HostTensor;
use llmctl_base::error::Result;
use llmctl_kernel::{Isa, dot};

pub struct TowerWeights {
    pub patches: PatchMatrix,
    pub positions: Option<PositionTable>,
    pub class_row: Option<Vec<f32>>,
    pub layers: Vec<TowerLayer>,
    /// Behind which layers.
    pub deepstack: Vec<(usize, Vec<ProjectionStep>)>,
    pub projector: Vec<ProjectionStep>,
}

pub struct PatchMatrix {
    pub pixel_norm: Option<TowerNorm>,
    pub matrix: TowerLinear,
    pub norm: Option<TowerNorm>,
    pub position_norm: Option<TowerNorm>,
}

pub struct TowerLayer {
    pub norms: [TowerNorm; 2],
    pub post_norms: Option<[TowerNorm; 2]>,
    pub qkv: [TowerLinear; 3],
    pub q_norm: Option<TowerNorm>,
    pub k_norm: Option<TowerNorm>,
    pub v_norm: Option<TowerNorm>,
    pub output: TowerLinear,
    pub scales: Option<[Vec<f32>; 2]>,
    pub gate: Option<TowerLinear>,
    pub up: TowerLinear,
    pub down: TowerLinear,
}

/// A loaded [`ProjectorStep`](super::ProjectorStep).
pub enum ProjectionStep {
    Norm(TowerNorm),
    Join { channels_first: bool },
    Average { factor: f32 },
    Standardise { bias: Vec<f32>, scale: Vec<f32> },
    Linear(TowerLinear),
    Activation(Activation),
    Gated { network: Box<[TowerLinear; 3]>, activation: Activation },
}

/// A layer norm if it has a bias, else an RMS norm of each run of values as long as its weight.
pub struct TowerNorm {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub eps: f32,
}

impl TowerNorm {
    pub fn apply(&self, cpu: &Cpu, x: &CpuBuffer, out: &mut CpuBuffer) -> Result<()> {
        match &self.bias {
            Some(bias) => cpu.layer_norm(x, [&self.weight, bias], self.eps, out),
            None => cpu.rms_norm(x, &self.weight, self.eps, out),
        }
    }

    /// Normalises `x` by way of `space`.
    pub fn change(&self, cpu: &Cpu, x: &mut CpuBuffer, space: &mut CpuBuffer) -> Result<()> {
        self.apply(cpu, x, space)?;
        std::mem::swap(x, space);
        Ok(())
    }
}

/// Limits of a matrix's inputs and results, least and most.
#[derive(Debug, Clone, Copy)]
pub struct Clamp {
    pub input: [f32; 2],
    pub output: [f32; 2],
}

/// A matrix with its optional bias and limits.
pub struct TowerLinear {
    pub weight: CpuWeight,
    pub bias: Option<Vec<f32>>,
    pub clamp: Option<Clamp>,
}

impl TowerLinear {
    fn onto<'a>(&'a self, out: &'a mut CpuBuffer) -> Product<'a, Cpu> {
        Product::new(&self.weight, self.bias.as_ref(), out)
    }

    pub fn apply(&self, cpu: &Cpu, x: &CpuBuffer, out: &mut CpuBuffer) -> Result<()> {
        let Some(Clamp { input, output }) = self.clamp else {
            return cpu.matmul_each(x, &mut [self.onto(out)]);
        };
        let mut limited = x.clone();
        limit(&mut limited, input);
        cpu.matmul_each(&limited, &mut [self.onto(out)])?;
        limit(out, output);
        Ok(())
    }
}

/// Computes products of one input, which is prepared once if no matrix limits it.
pub fn apply_each<const N: usize>(
    cpu: &Cpu,
    x: &CpuBuffer,
    products: [(&TowerLinear, &mut CpuBuffer); N],
) -> Result<()> {
    if products.iter().all(|(linear, _)| linear.clamp.is_none()) {
        return cpu.matmul_each(x, &mut products.map(|(linear, out)| linear.onto(out)));
    }
    products.into_iter().try_for_each(|(linear, out)| linear.apply(cpu, x, out))
}

/// Computes `out = down(activation(gate(x)) * up(x))`; `inner` is overwritten.
pub fn apply_gated(
    cpu: &Cpu,
    x: &CpuBuffer,
    [gate, up, down]: [&TowerLinear; 3],
    activation: Activation,
    [inner, other]: [&mut CpuBuffer; 2],
    out: &mut CpuBuffer,
) -> Result<()> {
    if [gate, up, down].iter().all(|linear| linear.clamp.is_none()) {
        let inner = [gate.onto(inner), up.onto(other)];
        return cpu.feed_forward(x, GatedNetwork { activation, inner, down: down.onto(out) });
    }
    apply_each(cpu, x, [(gate, &mut *inner), (up, &mut *other)])?;
    cpu.gated(activation, inner, other)?;
    down.apply(cpu, inner, out)
}

/// Limits values; keeps NaN.
fn limit(x: &mut CpuBuffer, [least, most]: [f32; 2]) {
    for x in x.values_mut() {
        *x = if *x < least {
            least
        } else if *x > most {
            most
        } else {
            *x
        };
    }
}

/// Rows and weights of a table, for a place on an axis.
type Taps = Vec<(usize, f32)>;

/// A table of learned positions.
pub struct PositionTable {
    pub kind: Positions,
    /// `[rows, hidden]`.
    pub table: HostTensor,
    /// Rows before the patches'.
    pub first: usize,
}

/// Positions for tiles of one size.
pub struct TilePositions<'a> {
    table: &'a PositionTable,
    /// The table; of axes only the rows for the tile's columns, then its rows.
    values: Vec<f32>,
    hidden: usize,
    columns: usize,
    /// By row and by column.
    taps: [Vec<Taps>; 2],
}

impl PositionTable {
    /// Returns whether a tile's size needs no more rows than the table has.
    pub fn fits(&self, grid: [usize; 2]) -> bool {
        match self.kind {
            Positions::Square { side, resampling: Resampling::None } => grid == [side; 2],
            Positions::Axes { len, .. } => grid.iter().all(|&side| side <= len),
            _ => true,
        }
    }

    /// Prepares the positions of a tile of [rows, columns], for which the table [`fits`](Self::fits).
    pub fn of_tile(&self, grid: [usize; 2]) -> TilePositions<'_> {
        let hidden = self.table.rows_cols().1;
        let axis = |size: usize| match self.kind {
            Positions::Square { side, resampling } => {
                (0..size).map(|at| taps(resampling, side, size, at)).collect()
            }
            _ => Vec::new(),
        };
        let values = match self.kind {
            Positions::Axes { len, interleaved } => {
                let index = |axis, place| if interleaved { 2 * place + axis } else { axis * len + place };
                let places = (0..grid[1])
                    .map(|place| index(0, place))
                    .chain((0..grid[0]).map(|place| index(1, place)));
                places.flat_map(|index| to_f32(&self.table.slice_rows(index, index + 1))).collect()
            }
            _ => to_f32(&self.table),
        };
        TilePositions { table: self, values, hidden, columns: grid[1], taps: grid.map(axis) }
    }
}

impl TilePositions<'_> {
    /// Returns the row that stands before the patches'.
    pub fn first(&self) -> &[f32] {
        &self.values[..self.hidden]
    }

    /// Adds the position of a patch to its row.
    pub fn add(&self, isa: Isa, [row, column]: [usize; 2], out: &mut [f32]) {
        let at = |index: usize| &self.values[index * self.hidden..][..self.hidden];
        match self.table.kind {
            Positions::None => (),
            Positions::Square { side, .. } => {
                for (y, of_row) in &self.taps[0][row] {
                    for (x, of_column) in &self.taps[1][column] {
                        dot::axpy(isa, of_row * of_column, at(self.table.first + y * side + x), out);
                    }
                }
            }
            Positions::Axes { .. } => {
                [column, self.columns + row]
                    .into_iter()
                    .for_each(|index| dot::axpy(isa, 1.0, at(index), out));
            }
        }
    }
}

/// Returns what place `at` of `size` on an axis takes from a table of `side` places. Sources: transformers
/// `vision_utils._interpolation_axis_taps_weights` and `Siglip2VisionEmbeddings.resize_positional_embeddings`.
fn taps(resampling: Resampling, side: usize, size: usize, at: usize) -> Taps {
    let (last, place) = (side as isize - 1, at as f32);
    let [of_table, of_tile] = [side, size].map(|size| size as f32);
    let centre = (place + 0.5) * of_table / of_tile - 0.5;
    let around = |centre: f32, offsets: std::ops::RangeInclusive<isize>, weight: &dyn Fn(f32) -> f32| {
        let floor = centre.floor();
        let tap = |offset: isize| {
            let index = (floor as isize + offset).clamp(0, last) as usize;
            (index, weight((centre - floor - offset as f32).abs()))
        };
        offsets.map(tap).filter(|(_, weight)| *weight != 0.0).collect()
    };
    match resampling {
        Resampling::None => vec![(at, 1.0)],
        Resampling::Corners => {
            let centre = place * (of_table - 1.0) / (of_tile - 1.0).max(1.0);
            around(centre, 0..=1, &|distance| (1.0 - distance).max(0.0))
        }
        Resampling::Cubic => around(centre, -1..=2, &cubic),
        Resampling::Antialias => {
            let scale = of_table / of_tile;
            let centre = (place + 0.5) * scale - 0.5;
            let weight = |index: usize| (1.0 - (index as f32 - centre).abs() / scale.max(1.0)).max(0.0);
            let all: Taps = (0..side).map(|index| (index, weight(index))).filter(|tap| tap.1 > 0.0).collect();
            let sum: f32 = all.iter().map(|tap| tap.1).sum();
            all.into_iter().map(|(index, weight)| (index, weight / sum)).collect()
        }
    }
}

/// Keys' cubic kernel with a = -0.75.
fn cubic(distance: f32) -> f32 {
    const A: f32 = -0.75;
    match distance <= 1.0 {
        true => ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0,
        false => ((A * distance - 5.0 * A) * distance + 8.0 * A) * distance - 4.0 * A,
    }
}
