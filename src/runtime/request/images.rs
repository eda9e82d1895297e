//! Images of a request: which rows of the prompt are theirs, and whether they agree with the model's rule.

use super::{PromptImage, Request};
use llmctl_base::error::{Error, Result};
use llmctl_models::images::{ImageSpan, VisionSpec};
use llmctl_models::kv::Tokens;

impl Request {
    /// Returns the spans of all images.
    pub fn spans(&self) -> Vec<ImageSpan> {
        self.images.iter().flat_map(|image| &image.spans).cloned().collect()
    }

    /// Returns the prompt with the spans of its images.
    pub(super) fn tokens<'a>(&'a self, spans: &'a [ImageSpan]) -> Tokens<'a> {
        Tokens { ids: &self.prompt, images: spans, adapters: self.adapters.as_deref().unwrap_or_default() }
    }

    /// Checks the images against the prompt and the model.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for `images`.
    pub(super) fn check_images(&self, vision: Option<&VisionSpec>) -> Result<()> {
        let refuse = |message: String| Err(Error::InvalidParameter { name: "images", message });
        let Some(vision) = vision else {
            return match self.images.is_empty() {
                true => Ok(()),
                false => refuse("this model reads text alone".to_owned()),
            };
        };
        let mut end = 0;
        for (number, image) in (1..).zip(&self.images) {
            if let Err(reason) = image.check(&self.prompt, vision, &mut end) {
                return refuse(format!("image {number}: {reason}"));
            }
        }
        let spans = self.spans();
        let tokens = self.tokens(&spans);
        let is_stray = |position: &usize| {
            self.prompt[*position] == vision.placeholder && tokens.image_at(*position).is_none()
        };
        match (0..self.prompt.len()).find(is_stray) {
            None => Ok(()),
            Some(position) => refuse(format!("token {position} stands for an image, and none is there")),
        }
    }
}

impl PromptImage {
    /// Checks that the spans follow `end`, which becomes their end, and cover the image's rows.
    fn check(&self, prompt: &[u32], vision: &VisionSpec, end: &mut usize) -> Result<(), String> {
        let mut num_rows = 0;
        for ImageSpan { rows, key, first, grid } in &self.spans {
            let is_in_order = *end <= rows.start && rows.start < rows.end && rows.end <= prompt.len();
            if !is_in_order || !prompt[rows.clone()].iter().all(|&id| id == vision.placeholder) {
                return Err(format!("its rows {rows:?} are not placeholders, in order, in the prompt"));
            }
            let [height, width] = grid.map(|side| side as usize);
            let is_whole = !vision.rows.mrope || height.checked_mul(width) == Some(rows.len());
            if *key != self.key || *first != num_rows || !is_whole {
                return Err(format!("its rows {rows:?} are not {height} x {width} of its embeddings"));
            }
            (*end, num_rows) = (rows.end, num_rows + rows.len());
        }
        let picture = &self.file.picture;
        let plan = vision.pixels.plan(picture.width, picture.height).map_err(|error| error.to_string())?;
        if num_rows != plan.num_tokens() {
            return Err(format!("{num_rows} rows, but {} embeddings", plan.num_tokens()));
        }
        Ok(())
    }
}
