//! Alternating updates (Gemma 3n): several residual streams, of which a layer computes one and predicts the
//! others; and a learned residual of low rank beside its attention. Sources: Baykal et al. 2023; transformers
//! `Gemma3nTextAltUp` and `Gemma3nTextLaurelBlock`.

use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use super::per_layer::LayerInput;
use super::stream::{AltUpStreams, Stream};
use crate::backend::Backend;
use crate::model::config::{AltUpConfig, Names};
use llmctl_base::error::{LoadResult, Result};

/// Least mean square of a projected stream when it is scaled to the first one's magnitude.
const LEAST_SQUARE: f32 = 1e-5;

/// The projections before the first layer and after the last one.
pub struct AltUp<B: Backend> {
    hidden: usize,
    /// From the embedding to each stream after the first.
    embed: Vec<B::Weight>,
    /// From each stream after the first to the output.
    merge: Vec<B::Weight>,
}

impl<B: Backend> AltUp<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, altup: &AltUpConfig) -> LoadResult<Self> {
        let hidden = loader.hidden;
        let matrices = |names| -> LoadResult<Vec<B::Weight>> {
            let matrices = loader.file.global_matrices(names, altup.num_streams - 1, [hidden; 2])?;
            matrices.into_iter().map(|linear| Ok(loader.projection(linear)?.weight)).collect()
        };
        Ok(Self {
            hidden,
            embed: matrices(["altup_projections", "altup_proj"])?,
            merge: matrices(["altup_unembed_projections", "altup_unembd_proj"])?,
        })
    }

    /// Computes all streams of a step from its embeddings, which are in `stream.residual`.
    pub fn begin(&self, backend: &B, num_rows: usize, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let Stream { residual, altup: AltUpStreams { current, rows, .. }, .. } = stream;
        rows.clear();
        rows.extend(0..num_rows);
        let (first, others) = current.split_first_mut().expect("a model has at least two streams");
        backend.select_rows(residual, rows, first)?;
        for (weight, other) in self.embed.iter().zip(others) {
            backend.matmul(residual, weight, None, other)?;
            backend.match_magnitude(other, residual, LEAST_SQUARE)?;
        }
        Ok(())
    }

    /// Computes the mean of all streams' outputs into `stream.added`, for the `wanted` rows.
    pub fn merge(
        &self,
        backend: &B,
        wanted: &[usize],
        stream: &mut Stream<B::Buffer>,
        work: &mut LayerBuffers<B::Buffer>,
    ) -> Result<()> {
        let Stream { added: out, altup: AltUpStreams { current, .. }, .. } = stream;
        let LayerBuffers { mixed, gate, up, .. } = work;
        backend.select_rows(&current[0], wanted, mixed)?;
        backend.zeros(wanted.len(), self.hidden, out)?;
        backend.add_scaled(out, mixed, 1.0)?;
        for (weight, other) in self.merge.iter().zip(&current[1..]) {
            backend.select_rows(other, wanted, gate)?;
            backend.matmul(gate, weight, None, up)?;
            backend.match_magnitude(up, mixed, LEAST_SQUARE)?;
            backend.add_scaled(out, up, 1.0)?;
        }
        backend.scale(out, 1.0 / current.len() as f32)
    }
}

/// One layer's prediction and correction of the streams, and its learned residual.
pub struct LayerAltUp<B: Backend> {
    num_streams: usize,
    active: usize,
    eps: f32,
    router_norm: B::Vector,
    router: Projection<B>,
    /// `[streams * streams, streams]`.
    prediction: Vec<f32>,
    /// `[streams, streams]`.
    correction: Vec<f32>,
    /// Factor of the active stream before the per-layer input reads it.
    output_scale: Option<B::Vector>,
    laurel: [Projection<B>; 2],
    laurel_norm: B::Vector,
}

impl<B: Backend> LayerAltUp<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &AltUpConfig) -> LoadResult<Self> {
        let (file, layer, hidden, streams) = (loader.file, loader.layer, loader.hidden, config.num_streams);
        const LEFT: Names = ["laurel.linear_left", "laurel_l"];
        // GGUF's metadata lacks the rank.
        let rank = file.num_rows(layer, LEFT)?;
        // The router reads its normalised input divided by its width.
        let mut router_norm = file.layer_norm(layer, ["altup.router_norm", "altup_router_norm"], hidden)?;
        router_norm.iter_mut().for_each(|weight| *weight /= hidden as f32);
        let scale = || loader.values(["altup.correct_output_scale", "altup_correct_scale.weight"], hidden);
        let router = file.linear(layer, ["altup.modality_router", "altup_router"], [streams, hidden])?;
        Ok(Self {
            num_streams: streams,
            active: config.active,
            eps: loader.eps,
            router_norm: loader.backend.vector(router_norm)?,
            router: loader.gate(router)?,
            prediction: file.matrix_values(
                layer,
                ["altup.prediction_coefs.weight", "altup_predict_coef.weight"],
                [streams * streams, streams],
            )?,
            correction: file.matrix_values(
                layer,
                ["altup.correction_coefs.weight", "altup_correct_coef.weight"],
                [streams; 2],
            )?,
            output_scale: config.scales_output.then(scale).transpose()?,
            laurel: [
                loader.linear(LEFT, [rank, hidden])?,
                loader.linear(["laurel.linear_right", "laurel_r"], [hidden, rank])?,
            ],
            laurel_norm: loader.norm(["laurel.post_laurel_norm", "laurel_post_norm"], hidden)?,
        })
    }

    /// Predicts every stream; the active one's prediction becomes `stream.residual`.
    pub fn predict(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let backend = context.backend;
        let Stream { residual, altup, .. } = stream;
        self.route(context, &altup.current[self.active], &mut altup.modalities)?;
        multiply(&altup.modalities, &self.prediction, self.num_streams, &mut altup.coefficients);
        let per_row = self.num_streams * self.num_streams;
        let AltUpStreams { current, predicted, coefficients, weights, rows, .. } = altup;
        for (stream, out) in predicted.iter_mut().enumerate() {
            backend.select_rows(&current[stream], rows, out)?;
            for (other, current) in current.iter().enumerate() {
                let at = stream * self.num_streams + other;
                weights.clear();
                weights.extend(coefficients.chunks_exact(per_row).map(|row| row[at]));
                backend.add_rows(out, current, rows, weights)?;
            }
        }
        backend.select_rows(&predicted[self.active], rows, residual)
    }

    /// Computes the learned residual from the mixer's input, to be added by [`Self::add_laurel`].
    pub fn compute_laurel(
        &self,
        LayerContext { backend, work, .. }: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        laurel: &mut B::Buffer,
    ) -> Result<()> {
        let LayerBuffers { gate, up, .. } = &mut **work;
        let [left, right] = &self.laurel;
        left.apply(backend, input, gate)?;
        right.apply(backend, gate, up)?;
        backend.rms_norm(up, &self.laurel_norm, self.eps, laurel)?;
        backend.add_scaled(laurel, input, 1.0)
    }

    /// Adds the learned residual, and keeps the sum's magnitude.
    pub fn add_laurel(backend: &B, laurel: &B::Buffer, residual: &mut B::Buffer) -> Result<()> {
        backend.add_scaled(residual, laurel, 1.0)?;
        backend.scale(residual, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// Corrects every stream by the layer's output, which is in `stream.residual`; all but the first also receive the
    /// layer's own input.
    pub fn correct(
        &self,
        context: &mut LayerContext<'_, B>,
        inputs: Option<(&LayerInput<B>, &B::Buffer)>,
        Stream { residual, added, altup, .. }: &mut Stream<B::Buffer>,
    ) -> Result<()> {
        let backend = context.backend;
        self.route(context, residual, &mut altup.modalities)?;
        multiply(&altup.modalities, &self.correction, self.num_streams, &mut altup.coefficients);
        let AltUpStreams { current, predicted, coefficients, weights, rows, .. } = altup;
        backend.add_scaled(residual, &predicted[self.active], -1.0)?;
        for (stream, out) in predicted.iter_mut().enumerate() {
            weights.clear();
            weights.extend(coefficients.chunks_exact(self.num_streams).map(|row| row[stream] + 1.0));
            backend.add_rows(out, residual, rows, weights)?;
        }
        std::mem::swap(current, predicted);
        if let Some((input, inputs)) = inputs {
            backend.select_rows(&current[self.active], rows, residual)?;
            if let Some(scale) = &self.output_scale {
                backend.multiply(residual, scale)?;
            }
            input.compute(context, [inputs, residual], added)?;
            current[1..].iter_mut().try_for_each(|stream| backend.add_scaled(stream, added, 1.0))?;
        }
        Ok(())
    }

    /// Computes each row's weights of the streams, `[rows, streams]`, within -1..1.
    fn route(
        &self,
        context: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        modalities: &mut Vec<f32>,
    ) -> Result<()> {
        let LayerContext { backend, work, .. } = context;
        let LayerBuffers { mixed, scores, .. } = &mut **work;
        backend.rms_norm(input, &self.router_norm, self.eps, mixed)?;
        self.router.apply(backend, mixed, scores)?;
        backend.read(scores, modalities)?;
        modalities.iter_mut().for_each(|value| *value = libm::tanh((*value).into()) as f32);
        Ok(())
    }
}

/// Computes `out[row] = matrix . x[row]` for rows of `len` values.
fn multiply(x: &[f32], matrix: &[f32], len: usize, out: &mut Vec<f32>) {
    let product = |(row, x): (&[f32], &[f32])| row.iter().zip(x).fold(0.0, |sum, (a, b)| a.mul_add(*b, sum));
    out.clear();
    out.extend(x.chunks_exact(len).flat_map(|x| matrix.chunks_exact(len).map(move |row| product((row, x)))));
}

#[cfg(test)]
mod tests {
    use super::multiply;

    #[test]
    fn rows_are_multiplied_by_the_matrix() {
        let mut out = vec![9.0];
        multiply(&[1.0, 2.0, 0.0, -1.0], &[1.0, 1.0, 0.0, 3.0, 2.0, 0.0], 2, &mut out);
        assert_eq!(out, [3.0, 6.0, 2.0, -1.0, -3.0, 0.0]);
    }
}
