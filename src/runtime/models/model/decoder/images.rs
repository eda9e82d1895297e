//! Rows of images: their embeddings take the place of the placeholders', and some families add more to the residual stream
//! behind the first layers (deepstack).

use std::ops::Range;

use super::stream::Stream;
use crate::backend::Backend;
use crate::images::TwoWay;
use crate::model::config::DecoderConfig;
use crate::model::{Batch, BatchImage, Row};
use llmctl_base::error::{Error, Result};

/// Checks that a model reads the batch's images, and that they fit.
///
/// # Errors
/// [`Error::Backend`] otherwise.
pub fn check(batch: &Batch<'_>, config: &DecoderConfig) -> Result<()> {
    let refuse = |message: &str| Err(Error::Backend(message.to_owned()));
    let mut end = 0;
    for BatchImage { rows, embeddings, first } in batch.images {
        if config.altup.is_some() || config.hyper.is_some() {
            return refuse("models with several residual streams read no images");
        }
        if embeddings.width != config.hidden_size || embeddings.deep.len() > config.layers.len() {
            return refuse("the rows of an image are another model's");
        }
        let are_missing = first.checked_add(rows.len()).is_none_or(|last| last > embeddings.len());
        let len = embeddings.embeddings.len();
        if are_missing || embeddings.deep.iter().any(|level| level.len() != len) {
            return refuse("an image has fewer rows than its place in the prompt");
        }
        if rows.start < end || rows.start > rows.end || rows.end > batch.rows.len() {
            return refuse("an image lies outside the rows of its step");
        }
        end = rows.end;
    }
    Ok(())
}

/// Replaces the embeddings of the images' rows in `embedded`, `[rows, width]`.
pub fn place<B: Backend>(backend: &B, images: &[BatchImage<'_>], embedded: &mut B::Buffer) -> Result<()> {
    let Some(width) = images.first().map(|image| image.embeddings.width) else { return Ok(()) };
    let mut values = Vec::new();
    backend.read(embedded, &mut values)?;
    for image in images {
        let rows = image.rows.start * width..image.rows.end * width;
        values[rows].copy_from_slice(values_of(image, &image.embeddings.embeddings));
    }
    backend.write(&values, width, embedded)
}

/// Adds what the images have for the residual stream behind a layer.
pub fn add_deep<B: Backend>(
    backend: &B,
    layer: usize,
    images: &[BatchImage<'_>],
    Stream { residual, added, .. }: &mut Stream<B::Buffer>,
) -> Result<()> {
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for image in images {
        if let Some(level) = image.embeddings.deep.get(layer) {
            rows.extend(image.rows.clone());
            values.extend_from_slice(values_of(image, level));
        }
    }
    if rows.is_empty() {
        return Ok(());
    }
    backend.write(&values, images[0].embeddings.width, added)?;
    backend.add_rows(residual, added, &rows, &vec![1.0; rows.len()])
}

/// Returns the values of an image's rows in the step, of all its rows' `values`.
fn values_of<'a>(image: &BatchImage<'_>, values: &'a [f32]) -> &'a [f32] {
    let width = image.embeddings.width;
    &values[image.first * width..(image.first + image.rows.len()) * width]
}

/// Returns the images of the rows whose logits are wanted, by their places among those.
pub fn wanted<'a>(batch: &Batch<'a>) -> Vec<BatchImage<'a>> {
    let mut wanted = Vec::new();
    for image in batch.images {
        let before = batch.rows[..image.rows.start].iter().filter(|row| row.wants_logits).count();
        let kept = image.rows.clone().filter(|&row| batch.rows[row].wants_logits).enumerate();
        wanted.extend(kept.map(|(index, row)| BatchImage {
            rows: before + index..before + index + 1,
            embeddings: image.embeddings,
            first: image.first + row - image.rows.start,
        }));
    }
    wanted
}

/// Finds for each row the positions that it sees besides its own and earlier ones; nothing if no row sees any. The rows of a
/// span, all of which are in the step, are those with the same [`Row::visible`].
pub fn find_seen(rows: &[Row], two_way: TwoWay, seen: &mut Vec<Range<usize>>) {
    seen.clear();
    if two_way == TwoWay::Never || !rows.iter().any(|row| row.visible > row.position + 1) {
        return;
    }
    for (index, row) in rows.iter().enumerate() {
        let before = index.checked_sub(1).filter(|&before| {
            let before = &rows[before];
            two_way == TwoWay::Whole && [before.sequence, before.visible] == [row.sequence, row.visible]
        });
        let start = before.map_or(row.position, |before| seen[before].start);
        seen.push(start..row.visible.max(row.position + 1));
    }
}
