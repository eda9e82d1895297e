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
use std::sync::Arc;

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
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
        let bytes: Vec<u8> =
            pairs.iter().map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?)).collect::<Option<_>>()?;
        if rest.is_empty() { bytes.try_into().ok().map(Self) } else { None }
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
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self { bytes: 20 << 20, side: 16_384, pixels: 64 << 20, ratio: 200 }
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
    /// Decodes a file within `limits`.
    ///
    /// # Errors
    /// [`ImageError`] with the reason: too large, not an image, of a format that is not read, or damaged.
    pub fn read(bytes: Arc<[u8]>, limits: &ImageLimits) -> Result<Self, ImageError> {
        let info = inspect(&bytes, limits)?;
        let picture = decode::decode(&bytes, &info)?;
        Ok(Self { hash: ImageHash::of(&bytes), bytes, info, picture })
    }
}

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
