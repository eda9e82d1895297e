//! The files of a body's images: from base64 or an address to bytes, and, once the rest of the body is right, to pixels.
//!
//! Invariants: the size of a file is checked before its base64 is decoded, and its header before its pixels are; its own bytes say what
//! it is, never a media type; no file of this machine is read.

use std::fmt;
use std::sync::Arc;

use axum::http::StatusCode;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use crate::error::ApiError;
use llmctl_base::error::Error;
use llmctl_image::{ImageError, ImageFile, ImageHash, ImageLimits, ImageSet, inspect};
use llmctl_template::ImageRef;

/// Most images of a request.
pub const MAX_IMAGES: usize = 64;

/// Most pixels of a request's images together, which take 384 MiB.
const MAX_PIXELS: u64 = 128 << 20;

/// Base64 with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

pub const REFUSED: &str = "image_url_refused";
const TOO_LARGE: &str = "image_too_large";
const UNDECODABLE: &str = "image_undecodable";

/// What a model and its server do with images. The default reads none.
#[derive(Clone, Default)]
pub struct ImageReading {
    pub is_on: bool,
    /// Why none is read, as a sentence without a full stop.
    pub refusal: String,
    /// Fetches images at URLs; `None` refuses them.
    pub fetch: Option<Arc<dyn ImageFetch>>,
}

impl fmt::Debug for ImageReading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageReading({})", self.is_on)
    }
}

/// Fetches images from other servers.
pub trait ImageFetch: Send + Sync {
    /// Returns the bytes at an http(s) URL, at most `most` of them. May wait.
    ///
    /// # Errors
    /// Why there are none, as a sentence without a full stop.
    fn fetch(&self, url: &str, most: usize) -> Result<Vec<u8>, String>;
}

/// Images of a body so far.
#[derive(Debug, Default)]
pub struct Images {
    pub usage: ImageReading,
    count: usize,
    pixels: u64,
    /// Each file once, with the place where it stands first.
    files: Vec<(ImageHash, Arc<[u8]>, String)>,
    refusal: Option<ApiError>,
}

/// Code and reason of an image that is refused.
pub type Refused = (&'static str, String);

impl Images {
    /// Takes note that the image at `at` is refused.
    pub fn refuse(&mut self, at: &str, refused: Refused) {
        self.refusal.get_or_insert_with(|| error(at, refused));
    }

    /// Returns the first refusal.
    ///
    /// # Errors
    /// 400.
    pub fn check(&self) -> Result<(), ApiError> {
        self.refusal.clone().map_or(Ok(()), Err)
    }

    /// Checks an image by its size and header, and returns its part.
    pub fn add(&mut self, at: &str, text: &str) -> Result<Value, Refused> {
        self.check_use()?;
        self.count += 1;
        if self.count > MAX_IMAGES {
            return Err((TOO_LARGE, format!("the request holds more than {MAX_IMAGES} images")));
        }
        let limits = ImageLimits::default();
        let bytes = self.bytes(text, limits.bytes)?;
        let info = inspect(&bytes, &limits).map_err(refused)?;
        let hash = ImageHash::of(&bytes);
        if !self.files.iter().any(|(known, ..)| *known == hash) {
            self.pixels += u64::from(info.width) * u64::from(info.height);
            if self.pixels > MAX_PIXELS {
                let why = format!("the images of the request have more than {MAX_PIXELS} pixels together");
                return Err((TOO_LARGE, why));
            }
            self.files.push((hash, bytes.into(), at.to_owned()));
        }
        let (width, height, media_type) = (info.width, info.height, info.media_type.to_owned());
        Ok(ImageRef { sha256: hash.to_string(), width, height, media_type, name: None }.to_part())
    }

    /// Checks the name of an image; whether the request's session has it is seen later.
    pub fn hold(&self, image: Option<ImageRef>) -> Result<Value, Refused> {
        self.check_use()?;
        let can_be = |image: &ImageRef| {
            ImageHash::from_hex(&image.sha256).is_some() && image.width.min(image.height) > 0
        };
        let image = image.filter(can_be).map(|image| image.to_part());
        image.ok_or_else(|| (UNDECODABLE, "no session has such an image".to_owned()))
    }

    fn check_use(&self) -> Result<(), Refused> {
        match self.usage.is_on {
            true => Ok(()),
            false => Err(("model_without_vision", self.usage.refusal.clone())),
        }
    }

    /// Returns the bytes that a URL or base64 stands for.
    fn bytes(&self, text: &str, most: usize) -> Result<Vec<u8>, Refused> {
        // Base64 has no colon.
        let scheme = text.get(..text.len().min(32)).and_then(|start| start.split_once(':'));
        match scheme.map(|(scheme, _)| scheme.to_ascii_lowercase()).as_deref() {
            None => from_base64(text, most),
            Some("data") => match text.split_once(',') {
                Some((head, data)) if head.to_ascii_lowercase().ends_with(";base64") => {
                    from_base64(data, most)
                }
                _ => Err((UNDECODABLE, "the data: URL holds no base64".to_owned())),
            },
            Some("http" | "https") => match &self.usage.fetch {
                Some(fetch) => fetch.fetch(text, most).map_err(|why| (REFUSED, why)),
                None => {
                    let why = "images at URLs are not fetched; send it as a data: URL, or name the host when the server is \
                               started (serve --image-urls HOST,...)";
                    Err((REFUSED, why.to_owned()))
                }
            },
            Some(_) => {
                let why = "files of this machine and other addresses are not read; send it as a data: URL";
                Err((REFUSED, why.to_owned()))
            }
        }
    }

    /// Decodes the images, of which each file counts once. Takes long, and needs the memory of the pixels.
    ///
    /// # Errors
    /// `image_undecodable`, with its place; `images_busy`.
    pub fn decode(&mut self) -> Result<ImageSet, ApiError> {
        let mut set = ImageSet::default();
        for (_, bytes, at) in std::mem::take(&mut self.files) {
            let read = ImageFile::read(bytes, &ImageLimits::default());
            set.insert(read.map_err(|why| undecoded(&at, why))?);
        }
        Ok(set)
    }
}

fn error(at: &str, (code, why): Refused) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, Some(code), format!("{at}: {why}")).param(at)
}

/// The refusal of the image at `at`, which may be decoded later if only the memory for its pixels is in use.
pub fn undecoded(at: &str, why: ImageError) -> ApiError {
    match why {
        ImageError::Busy { most_bytes } => Error::ImagesBusy { most_bytes }.into(),
        why => error(at, refused(why)),
    }
}

fn refused(error: ImageError) -> Refused {
    let code = if matches!(error, ImageError::TooLarge(_)) { TOO_LARGE } else { UNDECODABLE };
    (code, error.to_string())
}

/// Decodes base64, which may be broken into lines, of at most `most` bytes.
fn from_base64(text: &str, most: usize) -> Result<Vec<u8>, Refused> {
    if text.len() > most / 3 * 4 + most / 16 {
        return Err((TOO_LARGE, format!("the image has more than {} MiB", most >> 20)));
    }
    let is_broken = text.bytes().any(|byte| byte.is_ascii_whitespace());
    let joined = is_broken.then(|| text.split_ascii_whitespace().collect::<String>());
    let decoded = BASE64.decode(joined.as_deref().unwrap_or(text));
    decoded.map_err(|_| (UNDECODABLE, "it is neither a data: URL nor base64".to_owned()))
}
