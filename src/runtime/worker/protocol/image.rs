//! Images on the wire: a generation names them by their hash, and their bytes travel once, in a line of their own.

use std::collections::VecDeque;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use crate::images::refused;
use crate::request::PromptImage;
use llmctl_base::error::{Error, Result};
use llmctl_image::{ImageFile, ImageHash, ImageLimits};
use llmctl_models::images::{ImageKey, ImageSpan};

/// Bytes of files that a worker keeps, at most.
const MAX_KEPT_BYTES: usize = 256 << 20;

/// Bytes of an image file.
type ImageBytes = Arc<[u8]>;

/// An image of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerImage {
    pub spans: Vec<ImageSpan>,
    pub key: ImageKey,
    /// Of the file, 64 lower-case hexadecimal digits. The worker must have it from an earlier line.
    pub sha256: String,
}

/// Arguments of `image`: a file in base64, to be named by its hash later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageUpload {
    pub blob: String,
}

impl WorkerImage {
    pub fn of(image: &PromptImage) -> Self {
        let PromptImage { file, key, spans } = image;
        Self { spans: spans.clone(), key: *key, sha256: file.hash.to_string() }
    }
}

impl ImageUpload {
    pub fn of(file: &ImageFile) -> Self {
        Self { blob: BASE64_STANDARD.encode(&file.bytes) }
    }
}

/// Files that a worker keeps, the one used last at the end.
#[derive(Debug, Default)]
pub struct KeptImages {
    files: VecDeque<(ImageHash, Arc<[u8]>)>,
    bytes: usize,
}

impl KeptImages {
    /// Keeps a file, in place of those that were not used for longest. Returns its hash.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for what is no base64 or too large.
    pub fn add(&mut self, blob: &str) -> Result<ImageHash> {
        let limit = ImageLimits::default().bytes;
        let bytes = BASE64_STANDARD.decode(blob).map_err(|_| invalid("the blob is not base64"))?;
        if bytes.len() > limit {
            return Err(invalid(&format!("the blob has more than {limit} bytes")));
        }
        let hash = ImageHash::of(&bytes);
        if self.get(&hash).is_none() {
            self.bytes += bytes.len();
            self.files.push_back((hash, bytes.into()));
        }
        while self.bytes > MAX_KEPT_BYTES
            && let Some((_, oldest)) = self.files.pop_front()
        {
            self.bytes -= oldest.len();
        }
        Ok(hash)
    }

    /// Returns a file, which counts as used.
    pub fn get(&mut self, hash: &ImageHash) -> Option<Arc<[u8]>> {
        let at = self.files.iter().position(|(kept, _)| kept == hash)?;
        let file = self.files.remove(at)?;
        self.files.push_back(file.clone());
        Some(file.1)
    }

    /// Returns the files of images, and the hashes of those that are not kept.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a hash that is none.
    pub fn files(&mut self, images: &[WorkerImage]) -> Result<(Vec<ImageBytes>, Vec<String>)> {
        let (mut files, mut missing) = (Vec::new(), Vec::new());
        for image in images {
            let hash = ImageHash::from_hex(&image.sha256).ok_or_else(|| invalid("sha256 is no hash"))?;
            match self.get(&hash) {
                Some(file) => files.push(file),
                None => missing.push(image.sha256.clone()),
            }
        }
        Ok((files, missing))
    }
}

fn invalid(message: &str) -> Error {
    Error::InvalidParameter { name: "images", message: message.to_owned() }
}

/// Decodes a file.
///
/// # Errors
/// [`Error::InvalidParameter`] with the reason; [`Error::ImagesBusy`].
pub fn decoded(bytes: Arc<[u8]>) -> Result<Arc<ImageFile>> {
    ImageFile::read(bytes, &ImageLimits::default()).map_err(|error| refused(error, "images", String::new()))
}
