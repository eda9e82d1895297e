//! Reads a tower's tensors, each checked against the configuration, and takes samples of them for the fingerprint.

use std::cell::RefCell;

use sha2::{Digest, Sha256};

use super::config::{
    NormConfig, NormKind, PatchEmbedding, Positions, ProjectorStep, RopePairs, TowerConfig, TowerQkNorm,
};
use super::parts::{
    Clamp, PatchMatrix, PositionTable, ProjectionStep, TowerLayer, TowerLinear, TowerNorm, TowerWeights,
};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::model::decoder::{Convert, Matrix};
use crate::model::weights::{Linear, missing, to_f32};
use crate::tensor::{HostTensor, TensorSource};
use llmctl_base::error::LoadError;
use llmctl_kernel::Dtype;

/// Bytes of each of a tensor's samples: its first, middle and last ones.
const SAMPLE_BYTES: usize = 4 << 10;

/// The tensors of a tower, by name.
pub struct TowerFile<'a> {
    cpu: &'a Cpu,
    source: &'a dyn TensorSource,
    convert: Convert<'a>,
    /// Of all tensors that were read.
    hash: RefCell<Sha256>,
}

impl<'a> TowerFile<'a> {
    pub fn new(cpu: &'a Cpu, source: &'a dyn TensorSource, convert: Convert<'a>) -> Self {
        Self { cpu, source, convert, hash: RefCell::default() }
    }

    /// Reads all weights. `config` has been checked.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming a tensor that is missing or has another size than the configuration's.
    pub fn weights(&self, config: &TowerConfig) -> Result<TowerWeights, LoadError> {
        let layers = (0..config.num_layers).map(|layer| self.layer(config, layer));
        let deepstack =
            config.deepstack.iter().map(|level| Ok((level.layer, self.projector(config, &level.projector)?)));
        let class_row = config.class_row.then(|| {
            self.vector(&format!("{}{}", config.names.prefix, config.names.class_row), config.hidden_size)
        });
        Ok(TowerWeights {
            patches: self.patches(config)?,
            positions: self.positions(config)?,
            class_row: class_row.transpose()?,
            layers: layers.collect::<Result<_, _>>()?,
            deepstack: deepstack.collect::<Result<_, LoadError>>()?,
            projector: self.projector(config, &config.projector)?,
        })
    }

    /// Identifies the tensors that were read and the types that they are kept in.
    pub fn fingerprint(self, config: &TowerConfig) -> String {
        let mut hash = self.hash.into_inner();
        hash.update(format!("{} {config:?}", env!("CARGO_PKG_VERSION")));
        llmctl_image::ImageHash(hash.finalize().into()).to_string()
    }

    fn find(&self, name: &str) -> Result<Option<HostTensor>, LoadError> {
        let tensor = self.source.tensor(name)?;
        if let Some(HostTensor { dtype, shape, bytes }) = &tensor {
            let mut hash = self.hash.borrow_mut();
            hash.update(format!("{name} {} {shape:?}", dtype.name()));
            let middle = bytes.len() / 2;
            hash.update(&bytes[..SAMPLE_BYTES.min(bytes.len())]);
            hash.update(&bytes[middle..bytes.len().min(middle + SAMPLE_BYTES)]);
            hash.update(&bytes[bytes.len().saturating_sub(SAMPLE_BYTES)..]);
        }
        Ok(tensor)
    }

    /// Reads a tensor of this many values, whatever its shape.
    fn sized(&self, name: &str, len: usize) -> Result<Option<HostTensor>, LoadError> {
        let tensor = self.find(name)?;
        match &tensor {
            Some(found) if found.shape.iter().product::<usize>() != len => Err(wrong_size(name, found, len)),
            _ => Ok(tensor),
        }
    }

    /// Reads a tensor of this many values by its name, with `.weight` or without. Returns the name that the file has.
    fn named(&self, name: &str, len: usize) -> Result<(String, HostTensor), LoadError> {
        let weight = format!("{name}.weight");
        if let Some(found) = self.sized(&weight, len)? {
            return Ok((weight, found));
        }
        let found = self.sized(name, len)?.ok_or_else(|| missing(&weight))?;
        Ok((name.to_owned(), found))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        self.named(name, len).map(|(_, tensor)| to_f32(&tensor))
    }

    fn norm(&self, norm: &NormConfig, len: usize) -> Result<TowerNorm, LoadError> {
        let NormConfig { kind, eps, name } = norm;
        let weight = match kind {
            NormKind::RmsAlone => vec![1.0; len],
            NormKind::RmsAroundOne => {
                self.vector(name, len)?.into_iter().map(|weight| weight + 1.0).collect()
            }
            NormKind::Layer | NormKind::Rms => self.vector(name, len)?,
        };
        let bias = match kind {
            NormKind::Layer => {
                let bias = self.sized(&format!("{name}.bias"), len)?;
                Some(bias.map_or_else(|| vec![0.0; len], |bias| to_f32(&bias)))
            }
            _ => None,
        };
        Ok(TowerNorm { weight, bias, eps: *eps })
    }

    /// Reads a matrix and its bias, if it has one. All dimensions of the file's tensor behind the first count as one.
    fn linear(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Linear, LoadError> {
        let (found_name, weight) = self.named(name, rows * cols)?;
        if weight.shape.first() != Some(&rows) {
            return Err(wrong_size(&found_name, &weight, rows * cols));
        }
        let weight = HostTensor { shape: vec![rows, cols], ..weight };
        let bias = self.sized(&format!("{name}.bias"), rows)?.map(|bias| to_f32(&bias));
        Ok(Linear::new(found_name, weight, bias))
    }

    /// Converts a matrix and gives it the form in which it is multiplied.
    fn keep(&self, linear: Linear, clamp: Option<Clamp>) -> Result<TowerLinear, LoadError> {
        let weight = (self.convert)(&linear.name, Matrix::Projection, linear.weight)?;
        self.hash.borrow_mut().update(weight.dtype.name());
        Ok(TowerLinear { weight: self.cpu.weight(&weight)?, bias: linear.bias, clamp })
    }

    fn plain(&self, name: &str, shape: [usize; 2]) -> Result<TowerLinear, LoadError> {
        self.keep(self.linear(name, shape)?, None)
    }

    fn patches(&self, config: &TowerConfig) -> Result<PatchMatrix, LoadError> {
        let PatchEmbedding { size, norm, pixel_norm, position_norm, .. } = &config.patches;
        let (hidden, len) = (config.hidden_size, 3 * size * size);
        let read =
            |norm: &Option<NormConfig>, len| norm.as_ref().map(|norm| self.norm(norm, len)).transpose();
        Ok(PatchMatrix {
            pixel_norm: read(pixel_norm, len)?,
            matrix: self.keep(self.patch_matrix(config, [hidden, len])?, None)?,
            norm: read(norm, hidden)?,
            position_norm: read(position_norm, hidden)?,
        })
    }

    /// Reads the matrix of patches. Those of a film's frames are added, because a still's frames are equal.
    fn patch_matrix(&self, config: &TowerConfig, [hidden, len]: [usize; 2]) -> Result<Linear, LoadError> {
        let name = format!("{}{}", config.names.prefix, config.names.patches);
        let (frames, area) = (config.patches.frames, len / 3);
        let are_apart = self.source.describe(&format!("{name}.weight.1")).is_some();
        if frames == 1 {
            return self.linear(&name, [hidden, len]);
        }
        let mut linear = self.linear(&name, [hidden, if are_apart { len } else { frames * len }])?;
        let mut sums = vec![0.0f32; hidden * len];
        let whole = to_f32(&linear.weight);
        for (channel, sums) in sums.chunks_exact_mut(area).enumerate() {
            let frames = if are_apart { 1 } else { frames };
            for frame in 0..frames {
                let values = &whole[(channel * frames + frame) * area..][..area];
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        for frame in (1..frames).filter(|_| are_apart) {
            let name = format!("{name}.weight.{frame}");
            let values = self.sized(&name, hidden * len)?.ok_or_else(|| missing(&name))?;
            sums.iter_mut().zip(to_f32(&values)).for_each(|(sum, value)| *sum += value);
        }
        let bytes: Vec<u8> = sums.into_iter().flat_map(f32::to_le_bytes).collect();
        linear.weight = HostTensor { dtype: Dtype::F32, shape: vec![hidden, len], bytes: bytes.into() };
        Ok(linear)
    }

    fn positions(&self, config: &TowerConfig) -> Result<Option<PositionTable>, LoadError> {
        let hidden = config.hidden_size;
        let first = usize::from(config.class_row);
        let rows = match config.positions {
            Positions::None => return Ok(None),
            Positions::Square { side, .. } => side * side + first,
            Positions::Axes { len, .. } => 2 * len,
        };
        let name = format!("{}{}", config.names.prefix, config.names.positions);
        let (found_name, table) = self.named(&name, rows * hidden)?;
        if table.shape.last() != Some(&hidden) {
            return Err(wrong_size(&found_name, &table, rows * hidden));
        }
        Ok(Some(PositionTable {
            kind: config.positions,
            table: HostTensor { shape: vec![rows, hidden], ..table },
            first,
        }))
    }

    fn layer(&self, config: &TowerConfig, layer: usize) -> Result<TowerLayer, LoadError> {
        let TowerConfig { hidden_size: hidden, intermediate_size: inner, head_dim, names, .. } = config;
        let name = |part: &str| format!("{}{}.{layer}.{part}", names.prefix, names.layers);
        let norm = |part: &str| {
            self.norm(&NormConfig { kind: config.norm, eps: config.norm_eps, name: name(part) }, *hidden)
        };
        let norms = |[first, second]: [&str; 2]| Ok::<_, LoadError>([norm(first)?, norm(second)?]);
        let heads = [config.num_heads, config.num_kv_heads];
        let widths = heads.map(|heads| heads * head_dim);
        let linear = |part: &str, shape| self.clamped(config, &name(part), shape);
        let qk_norm = |part: &str, width: usize| {
            let len = match config.qk_norm {
                TowerQkNorm::None => return Ok(None),
                TowerQkNorm::PerHead => *head_dim,
                TowerQkNorm::Whole => width,
            };
            let weight = self.vector(&name(part), len)?;
            Ok::<_, LoadError>(Some(TowerNorm {
                weight: paired(config, weight),
                bias: None,
                eps: config.norm_eps,
            }))
        };
        let scale = |part: &str| self.vector(&name(part), *hidden);
        let scales = config
            .layer_scales
            .then(|| Ok::<_, LoadError>([scale(names.layer_scales[0])?, scale(names.layer_scales[1])?]));
        let [q_norm, k_norm] = names.qk_norms;
        Ok(TowerLayer {
            norms: norms(names.norms)?,
            post_norms: config.post_norms.then(|| norms(names.post_norms)).transpose()?,
            qkv: self.qkv(config, &name)?,
            q_norm: qk_norm(q_norm, widths[0])?,
            k_norm: qk_norm(k_norm, widths[1])?,
            v_norm: config.value_norm.then(|| TowerNorm {
                weight: vec![1.0; *head_dim],
                bias: None,
                eps: config.norm_eps,
            }),
            output: linear(names.attention_output, [*hidden, widths[0]])?,
            scales: scales.transpose()?,
            gate: config.is_gated.then(|| linear(names.gate, [*inner, *hidden])).transpose()?,
            up: linear(names.up, [*inner, *hidden])?,
            down: linear(names.down, [*hidden, *inner])?,
        })
    }

    /// Reads the projections of queries, keys and values, apart or as consecutive rows of one matrix.
    fn qkv(
        &self,
        config: &TowerConfig,
        name: &dyn Fn(&str) -> String,
    ) -> Result<[TowerLinear; 3], LoadError> {
        let TowerConfig { num_heads, num_kv_heads, head_dim, hidden_size, names, .. } = config;
        let rows = [*num_heads, *num_kv_heads, *num_kv_heads].map(|heads| heads * head_dim);
        let fused = name(names.fused_qkv);
        let fused = match self.source.describe(&format!("{fused}.weight")) {
            Some(_) => Some(self.linear(&fused, [rows.iter().sum(), *hidden_size])?),
            None => None,
        };
        let part = |part: usize| {
            let name = name(names.qkv[part]);
            let linear = match &fused {
                Some(whole) => {
                    let start = rows[..part].iter().sum::<usize>();
                    whole.slice_rows(start, start + rows[part])
                }
                None => self.linear(&format!("{name}{}", names.matrix), [rows[part], *hidden_size])?,
            };
            let linear = if part < 2 { paired_rows(config, linear) } else { linear };
            self.keep(linear, self.clamp(config, &name)?)
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }

    fn clamped(&self, config: &TowerConfig, name: &str, shape: [usize; 2]) -> Result<TowerLinear, LoadError> {
        let linear = self.linear(&format!("{name}{}", config.names.matrix), shape)?;
        self.keep(linear, self.clamp(config, name)?)
    }

    fn clamp(&self, config: &TowerConfig, name: &str) -> Result<Option<Clamp>, LoadError> {
        let end = |end: &str| Ok::<_, LoadError>(self.vector(&format!("{name}.{end}"), 1)?[0]);
        let read = || {
            let input = [end("input_min")?, end("input_max")?];
            Ok(Clamp { input, output: [end("output_min")?, end("output_max")?] })
        };
        config.clamps.then(read).transpose()
    }

    fn projector(
        &self,
        config: &TowerConfig,
        steps: &[ProjectorStep],
    ) -> Result<Vec<ProjectionStep>, LoadError> {
        let wrong = |message: &str| LoadError::Tensor {
            tensor: "vision projector".to_owned(),
            message: message.to_owned(),
        };
        let (mut width, mut is_joined) = (config.hidden_size, config.merge == 1);
        let mut read = Vec::with_capacity(steps.len());
        for step in steps {
            if matches!(step, ProjectorStep::Join { .. } | ProjectorStep::Average { .. })
                && std::mem::replace(&mut is_joined, true)
            {
                return Err(wrong("joins blocks twice"));
            }
            read.push(self.step(step, config.merge, &mut width)?);
        }
        match (is_joined, width == config.output_size) {
            (true, true) => Ok(read),
            (false, _) => Err(wrong("joins no blocks")),
            _ => Err(wrong("makes rows of another width than the decoder's")),
        }
    }

    fn step(
        &self,
        step: &ProjectorStep,
        merge: usize,
        width: &mut usize,
    ) -> Result<ProjectionStep, LoadError> {
        let cols = *width;
        Ok(match step {
            ProjectorStep::Norm(norm) => ProjectionStep::Norm(self.norm(norm, cols)?),
            ProjectorStep::Join { channels_first } => {
                *width = cols * merge * merge;
                ProjectionStep::Join { channels_first: *channels_first }
            }
            ProjectorStep::Average { factor } => ProjectionStep::Average { factor: *factor },
            ProjectorStep::Standardise { bias, scale } => ProjectionStep::Standardise {
                bias: self.vector(bias, cols)?,
                scale: self.vector(scale, cols)?,
            },
            ProjectorStep::Linear { name, out, transposed } => {
                *width = *out;
                ProjectionStep::Linear(match transposed {
                    true => self.keep(self.linear(name, [cols, *out])?.transposed(), None)?,
                    false => self.plain(name, [*out, cols])?,
                })
            }
            ProjectorStep::Activation(activation) => ProjectionStep::Activation(*activation),
            ProjectorStep::Gated { names: [gate, up, down], inner, out, activation } => {
                *width = *out;
                let network = [
                    self.plain(gate, [*inner, cols])?,
                    self.plain(up, [*inner, cols])?,
                    self.plain(down, [*out, *inner])?,
                ];
                ProjectionStep::Gated { network: Box::new(network), activation: *activation }
            }
        })
    }
}

/// Brings the rows of queries' and keys' matrices to the order in which value `i` of a head is rotated with `i + d/2`, the pairs of
/// the first axis before the other's.
fn paired_rows(config: &TowerConfig, linear: Linear) -> Linear {
    let (rows, _) = linear.weight.rows_cols();
    match config.rope.map(|rope| rope.pairs) {
        None | Some(RopePairs::Halves) => linear,
        Some(_) => linear.gather_rows((0..rows).map(|row| source_row(config, row))),
    }
}

/// Reorders a weight of heads as [`paired_rows`] does.
fn paired(config: &TowerConfig, weight: Vec<f32>) -> Vec<f32> {
    (0..weight.len()).map(|row| weight[source_row(config, row)]).collect()
}

/// Returns the row of the file for a row of [`paired_rows`].
fn source_row(config: &TowerConfig, row: usize) -> usize {
    let (head, within) = (row / config.head_dim, row % config.head_dim);
    let (half, quarter) = (config.head_dim / 2, config.head_dim / 4);
    let within = match config.rope.map(|rope| rope.pairs) {
        None | Some(RopePairs::Halves) => within,
        Some(RopePairs::Neighbours) => within % half * 2 + within / half,
        Some(RopePairs::Quarters) => match within / quarter {
            1 => within + quarter,
            2 => within - quarter,
            _ => within,
        },
    };
    head * config.head_dim + within
}

fn wrong_size(name: &str, tensor: &HostTensor, len: usize) -> LoadError {
    let message = format!("has shape {:?}, but the configuration needs {len} values", tensor.shape);
    LoadError::Tensor { tensor: name.to_owned(), message }
}
