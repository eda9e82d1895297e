//! Images of prompts: from what a template prints for them to the rows that a tower's embeddings take.
//!
//! Plans come of sizes alone, so that tokens can be counted without a file. Files that were decoded and the keys of pictures are kept, since
//! a conversation comes back with the same images in every turn.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::request::PromptImage;
use llmctl_base::error::{Error, Result};
use llmctl_image::{ImageError, ImageFile, ImageHash, ImageLimits, ImagePlan};
use llmctl_models::images::{ImageKey, ImageSpan, VisionSpec};
use llmctl_template::{ImageMarkup, ImageRef};

/// Bytes of decoded files that are kept.
const MAX_KEPT_BYTES: usize = 256 << 20;
/// Keys that are kept, 64 bytes each.
const MAX_KEYS: usize = 1 << 16;

/// The vision tower of an engine, for prompts.
#[derive(Debug)]
pub struct PromptVision {
    spec: Arc<VisionSpec>,
    markup: ImageMarkup,
    known: Mutex<KnownImages>,
}

#[derive(Debug, Default)]
struct KnownImages {
    keys: HashMap<ImageHash, ImageKey>,
    /// Used last at the end.
    files: VecDeque<Arc<ImageFile>>,
}

impl PromptVision {
    pub fn new(spec: Arc<VisionSpec>, markup: ImageMarkup) -> Self {
        Self { spec, markup, known: Mutex::default() }
    }

    pub fn spec(&self) -> &Arc<VisionSpec> {
        &self.spec
    }

    pub fn markup(&self) -> &ImageMarkup {
        &self.markup
    }

    /// Returns what becomes of images of these sizes.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming the image whose size is refused.
    pub fn plans(&self, images: &[ImageRef]) -> Result<Vec<ImagePlan>> {
        let plan = |image: &ImageRef| {
            let plan = self.spec.pixels.plan(image.width, image.height);
            plan.map_err(|error| invalid(format!("{}: {error}", image.tag())))
        };
        images.iter().map(plan).collect()
    }

    /// Puts the texts of images in place of what the template printed for them, the next plan each.
    ///
    /// # Errors
    /// [`Error::PromptOversized`] if the images alone exceed the context; [`Error::InvalidParameter`] if there are too few plans.
    pub fn expanded<'p>(
        &self,
        text: &str,
        plans: &mut impl Iterator<Item = &'p ImagePlan>,
        context_tokens: usize,
    ) -> Result<String> {
        let mut pieces = text.split(&self.spec.text.printed);
        let mut expanded = pieces.next().unwrap_or_default().to_owned();
        let mut least_tokens = 0;
        for piece in pieces {
            let refused = "the prompt's text holds the mark of an image, and there is no such image";
            let plan = plans.next().ok_or_else(|| invalid(refused.to_owned()))?;
            least_tokens += plan.num_tokens();
            if least_tokens > context_tokens {
                return Err(Error::PromptOversized { least_tokens, context_tokens });
            }
            expanded.push_str(&self.spec.text.expand(plan));
            expanded.push_str(piece);
        }
        Ok(expanded)
    }

    /// Returns the positions of an encoded text's placeholders, whose first token is at `start`.
    pub fn places(&self, ids: &[u32], start: usize) -> impl Iterator<Item = usize> {
        let placeholder = self.spec.placeholder;
        let is_placeholder = move |(_, id): &(usize, &u32)| **id == placeholder;
        ids.iter().enumerate().filter(is_placeholder).map(move |(at, _)| start + at)
    }

    /// Returns the file of an image, decoded from these bytes if it is not known.
    ///
    /// # Errors
    /// As [`refused`].
    pub fn decoded(&self, image: &ImageRef, bytes: &Arc<[u8]>) -> Result<Arc<ImageFile>> {
        let hash = ImageHash::of(bytes);
        if let Some(known) = self.known_file(&hash) {
            return Ok(known);
        }
        // It was accepted when it came; only the memory that it takes is bounded again.
        let limits =
            ImageLimits { bytes: usize::MAX, side: u32::MAX, ratio: u32::MAX, ..ImageLimits::default() };
        let file = ImageFile::read(Arc::clone(bytes), &limits);
        let file = file.map_err(|error| refused(error, "image", format!("{}: ", image.tag())))?;
        let files = &mut self.known.lock().files;
        files.push_back(Arc::clone(&file));
        let size = |file: &Arc<ImageFile>| file.bytes.len() + file.picture.rgb.len();
        while files.len() > 1 && files.iter().map(size).sum::<usize>() > MAX_KEPT_BYTES {
            files.pop_front();
        }
        Ok(file)
    }

    fn known_file(&self, hash: &ImageHash) -> Option<Arc<ImageFile>> {
        let files = &mut self.known.lock().files;
        let at = files.iter().position(|file| file.hash == *hash)?;
        let file = files.remove(at)?;
        files.push_back(Arc::clone(&file));
        Some(file)
    }

    /// Returns the key of a file's picture.
    pub fn key(&self, file: &ImageFile) -> ImageKey {
        let known = || self.known.lock();
        let found = known().keys.get(&file.hash).copied();
        found.unwrap_or_else(|| {
            let key = ImageKey::of(&file.picture, &self.spec);
            let keys = &mut known().keys;
            if keys.len() >= MAX_KEYS {
                keys.clear();
            }
            keys.insert(file.hash, key);
            key
        })
    }

    /// Returns the images of a prompt with their spans. `places` are the positions of all placeholders, in ascending order, that
    /// [`check_count`] has accepted.
    pub fn prompt_images(
        &self,
        files: Vec<Arc<ImageFile>>,
        plans: &[ImagePlan],
        places: &[usize],
    ) -> Vec<PromptImage> {
        let mut rest = places;
        let image = |(file, plan): (Arc<ImageFile>, &ImagePlan)| {
            let (own, behind) = rest.split_at(plan.num_tokens());
            rest = behind;
            let key = self.key(&file);
            PromptImage { spans: spans(own, plan, key), file, key }
        };
        files.into_iter().zip(plans).map(image).collect()
    }
}

/// Checks that a prompt has as many placeholders as its images have tokens.
///
/// # Errors
/// [`Error::InvalidParameter`].
pub fn check_count(plans: &[ImagePlan], places: &[usize]) -> Result<()> {
    let wanted: usize = plans.iter().map(ImagePlan::num_tokens).sum();
    match places.len() {
        found if found == wanted => Ok(()),
        found => Err(invalid(format!(
            "the prompt has {found} tokens for images, but its {} images have {wanted}: the chat template prints another number of them",
            plans.len()
        ))),
    }
}

/// Returns the runs of an image's rows, cut where a tile ends.
fn spans(places: &[usize], plan: &ImagePlan, key: ImageKey) -> Vec<ImageSpan> {
    let mut spans = Vec::new();
    let mut first = 0;
    for tile in &plan.tiles {
        let end = first + tile.tokens[0] as usize * tile.tokens[1] as usize;
        for run in places[first..end].chunk_by(|a, b| a + 1 == *b) {
            let rows = run[0]..run[0] + run.len();
            spans.push(ImageSpan { rows, key, first, grid: tile.tokens });
            first += run.len();
        }
    }
    spans
}

/// Returns [`Error::ImagesBusy`] or [`Error::InvalidParameter`] for an image that is not decoded; `of` names it, e.g. `[image: a.png 640x480]: `.
pub fn refused(error: ImageError, name: &'static str, of: String) -> Error {
    match error {
        ImageError::Busy { most_bytes } => Error::ImagesBusy { most_bytes },
        error => Error::InvalidParameter { name, message: format!("{of}{error}") },
    }
}

/// Returns an error of a conversation's images.
pub fn invalid(message: String) -> Error {
    Error::InvalidParameter { name: "image", message }
}

#[cfg(test)]
mod tests {
    use llmctl_image::TilePlan;

    use super::*;

    #[test]
    fn spans_are_runs_of_one_tile() {
        let tile = |tokens| TilePlan { patches: [0, 0], tokens };
        let plan = ImagePlan { tiles: vec![tile([1, 2]), tile([2, 2])], cut: [1, 1], has_overview: true };
        let key = ImageKey([7; 32]);
        let span = |rows, first, grid| ImageSpan { rows, key, first, grid };
        // Both tiles in one run; then text between them, and between the rows of the second.
        assert_eq!(spans(&[3, 4, 5, 6, 7, 8], &plan, key), [span(3..5, 0, [1, 2]), span(5..9, 2, [2, 2])]);
        assert_eq!(
            spans(&[3, 4, 6, 7, 9, 10], &plan, key),
            [span(3..5, 0, [1, 2]), span(6..8, 2, [2, 2]), span(9..11, 4, [2, 2])]
        );
        assert!(check_count(std::slice::from_ref(&plan), &[1; 6]).is_ok());
        let error = check_count(&[plan], &[1; 7]).expect_err("one too many").to_string();
        assert!(error.contains("7 tokens for images"), "{error}");
    }
}
