//! Pictures: bytes of a file to pixels, and pixels to the patches that a vision tower reads.
//!
//! Knows files, sizes and arithmetic, and neither models nor requests. A file is untrusted: its header is read and
//! checked against [`ImageLimits`] before anything is allocated for its pixels.
//!
//! - `decode`: formats, orientation, transparency; `jpeg`: JPEG, the same bits everywhere
//! - `resize`: Pillow's filters, bit by bit
//! - `rule`: how a family makes patches of a picture; `size`: sides and tiles, and how many tokens come of them

mod decode;
mod error;
mod jpeg;
mod resize;
mod rule;
mod size;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

pub use decode::{ImageInfo, inspect};
pub use error::ImageError;
pub use resize::{ResizeFilter, resize};
pub use rule::{ImagePlan, Patches, PixelRule, TilePlan};
use sha2::{Digest, Sha256};
pub use size::SizeRule;

/// SHA-256 of the bytes of an image file: the image's name in transcripts and in folders of sessions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageHash(pub [u8; 32]);

impl ImageHash {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap_or_default();
        (hex.len() == 64 && hex.bytes().all(is_digit)).then(|| Self(std::array::from_fn(byte)))
    }
}

impl fmt::Display for ImageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ImageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Limits that an image file is checked against before it is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageLimits {
    /// Most bytes of the file.
    pub bytes: usize,
    /// Most pixels of a side.
    pub side: u32,
    /// Most pixels.
    pub pixels: u64,
    /// Most times that one side is longer than the other.
    pub ratio: u32,
    /// Most bytes of the pixels of all images that this process uses together.
    pub used_bytes: u64,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self { bytes: 20 << 20, side: 16_384, pixels: 64 << 20, ratio: 200, used_bytes: 2 << 30 }
    }
}

/// Pixels as a tower sees them: 8-bit RGB behind orientation and on white, row by row.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    /// `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({}x{})", self.width, self.height)
    }
}

/// An image file that was decoded: its bytes, which sessions keep and workers are sent, and its pixels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFile {
    pub hash: ImageHash,
    pub bytes: Arc<[u8]>,
    pub info: ImageInfo,
    pub picture: Picture,
}

impl ImageFile {
    /// Decodes a file within `limits`; one at a time in a process, because clients choose how many there are.
    ///
    /// # Errors
    /// [`ImageError`] with the reason: too large, not an image, of a format that is not read, damaged, or too many in use.
    pub fn read(bytes: Arc<[u8]>, limits: &ImageLimits) -> Result<Arc<Self>, ImageError> {
        let info = inspect(&bytes, limits)?;
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|file| file.strong_count() > 0);
        let size = |info: &ImageInfo| u64::from(info.width) * u64::from(info.height) * 3;
        let sum: u64 = used.iter().filter_map(Weak::upgrade).map(|file| size(&file.info)).sum();
        if sum + size(&info) > limits.used_bytes {
            return Err(ImageError::Busy { most_bytes: limits.used_bytes });
        }
        let picture = decode::decode(&bytes, &info)?;
        let file = Arc::new(Self { hash: ImageHash::of(&bytes), bytes, info, picture });
        used.push(Arc::downgrade(&file));
        Ok(file)
    }
}

/// The files whose pixels this process holds, and some that are gone. Held while one is decoded.
static USED: Mutex<Vec<Weak<ImageFile>>> = Mutex::new(Vec::new());

/// Image files by hash; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ImageSet(Arc<BTreeMap<ImageHash, Arc<ImageFile>>>);

impl PartialEq for ImageSet {
    fn eq(&self, other: &Self) -> bool {
        self.0.keys().eq(other.0.keys())
    }
}

impl ImageSet {
    pub fn insert(&mut self, file: Arc<ImageFile>) {
        Arc::make_mut(&mut self.0).insert(file.hash, file);
    }

    pub fn get(&self, hash: &ImageHash) -> Option<&Arc<ImageFile>> {
        self.0.get(hash)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<ImageFile>> {
        self.0.values()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
