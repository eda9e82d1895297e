//! The images of a turn's prompt: their tokens by size, their files, and the rows that they take.

use std::sync::Arc;

use crate::chat_tokenizer::ChatTokenizer;
use crate::images::{check_count, invalid};
use crate::request::PromptImage;
use crate::session::store::SavedSession;
use crate::session::transcript::SplicedPrompt;
use llmctl_base::error::{Error, Result};
use llmctl_image::{ImageFile, ImageHash, ImagePlan, ImageSet};
use llmctl_models::images::ImageSpan;
use llmctl_template::{Conversation, ImageRef, Message};

/// The images that a rendered conversation has, in its order, and what becomes of them.
pub(super) struct AskedImages<'a> {
    tokenizer: &'a ChatTokenizer,
    images: Vec<ImageRef>,
    plans: Vec<ImagePlan>,
}

/// A prompt's ids, and the positions of its images' placeholders.
pub(super) struct EncodedPrompt {
    pub tokens: Vec<u32>,
    places: Vec<usize>,
}

impl<'a> AskedImages<'a> {
    /// # Errors
    /// [`Error::InvalidParameter`] naming an image that the model does not take.
    pub fn of(tokenizer: &'a ChatTokenizer, conversation: &Conversation) -> Result<Self> {
        Self::new(tokenizer, tokenizer.images(conversation))
    }

    /// As [`Self::of`], of images in the order of a text.
    pub fn new(tokenizer: &'a ChatTokenizer, images: Vec<ImageRef>) -> Result<Self> {
        let plans = tokenizer.image_plans(&images)?;
        Ok(Self { tokenizer, images, plans })
    }

    /// Encodes a prompt, its images expanded.
    ///
    /// # Errors
    /// Those of [`ChatTokenizer::encode_with_images`]; another number of placeholders than the images have.
    pub fn encode(&self, prompt: &SplicedPrompt) -> Result<EncodedPrompt> {
        let (mut plans, mut places) = (self.plans.iter(), Vec::new());
        let tokens = prompt.ids(|text, start| {
            let ids = self.tokenizer.encode_with_images(text, start == 0, &mut plans)?;
            if let Some(vision) = self.tokenizer.vision() {
                places.extend(vision.places(&ids, start));
            }
            Ok::<_, Error>(ids)
        })?;
        check_count(&self.plans, &places)?;
        Ok(EncodedPrompt { tokens, places })
    }

    /// Returns the images with their rows in the prompt. Files come from `given`, else from `stored`.
    ///
    /// # Errors
    /// An image whose file is neither; one that cannot be decoded.
    pub fn placed(
        self,
        prompt: &EncodedPrompt,
        given: &ImageSet,
        stored: impl Fn(&ImageRef, &ImageHash) -> Result<Arc<[u8]>>,
    ) -> Result<Vec<PromptImage>> {
        let Some(vision) = self.tokenizer.vision() else { return Ok(Vec::new()) };
        let file = |image: &ImageRef| -> Result<Arc<ImageFile>> {
            let hash = ImageHash::from_hex(&image.sha256)
                .ok_or_else(|| invalid(format!("{}: {:?} is not a SHA-256", image.tag(), image.sha256)))?;
            let file = match given.get(&hash) {
                Some(file) => Arc::clone(file),
                None => vision.decoded(image, &stored(image, &hash)?)?,
            };
            // The plan is the size's that the conversation names.
            match (file.picture.width, file.picture.height) == (image.width, image.height) {
                true => Ok(file),
                false => Err(invalid(format!(
                    "{}: the file has other sides than the conversation says",
                    image.tag()
                ))),
            }
        };
        let files = self.images.iter().map(file).collect::<Result<Vec<_>>>()?;
        Ok(vision.prompt_images(files, &self.plans, &prompt.places))
    }
}

/// Returns the images of a saved session's tokens, for a prompt of the same tokens.
///
/// # Errors
/// [`Error::InvalidParameter`] for an image whose file cannot be read, or that another tower has looked at.
pub fn saved_images(tokenizer: &ChatTokenizer, saved: &SavedSession) -> Result<Vec<PromptImage>> {
    let images = saved.messages().flat_map(Message::images);
    images_at(tokenizer, &saved.spans(), images, |hash| saved.blobs.read(hash))
}

/// Returns images with their rows in a prompt, which are known. `read` gives a file, or why there is none.
///
/// # Errors
/// As [`saved_images`].
pub fn images_at(
    tokenizer: &ChatTokenizer,
    spans: &[ImageSpan],
    images: impl IntoIterator<Item = ImageRef>,
    read: impl Fn(&ImageHash) -> std::result::Result<Arc<[u8]>, String>,
) -> Result<Vec<PromptImage>> {
    let Some(vision) = tokenizer.vision() else { return Ok(Vec::new()) };
    let of_images = spans.chunk_by(|_, next| next.first > 0);
    let image = |(image, spans): (ImageRef, &[ImageSpan])| {
        let refuse = |reason: String| invalid(format!("{}: {reason}", image.tag()));
        let hash = ImageHash::from_hex(&image.sha256).ok_or_else(|| refuse("no SHA-256".to_owned()))?;
        let bytes = read(&hash).map_err(refuse)?;
        let file = vision.decoded(&image, &bytes)?;
        let key = vision.key(&file);
        match spans.iter().all(|span| span.key == key) {
            true => Ok(PromptImage { file, key, spans: spans.to_vec() }),
            false => Err(refuse("was looked at in another way".to_owned())),
        }
    };
    images.into_iter().zip(of_images).map(image).collect()
}

/// The error of an image whose file did not come with the request.
pub(super) fn not_given(image: &ImageRef) -> Error {
    invalid(format!("{}: no file of the SHA-256 {} came with the request", image.tag(), image.sha256))
}
