//! Formats, orientation and transparency. Tells a format by its first bytes, never by a name or a media type.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, RgbImage};

use super::jpeg::{self, Header};
use super::{ImageError, ImageLimits, Picture};

/// Bytes that a decoder may take besides eight for each pixel.
const SPARE_BYTES: u64 = 32 << 20;

/// Facts of the header of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInfo {
    /// Media type, e.g. `image/png`.
    pub media_type: &'static str,
    /// Pixels behind orientation.
    pub width: u32,
    pub height: u32,
}

/// Reads the header of a file and checks it against `limits`; allocates nothing for pixels.
///
/// # Errors
/// [`ImageError`].
pub fn inspect(bytes: &[u8], limits: &ImageLimits) -> Result<ImageInfo, ImageError> {
    if bytes.len() > limits.bytes {
        let (found, most) = (bytes.len(), limits.bytes);
        let reason = format!("the image file has {found} bytes, more than {most}: make it smaller");
        return Err(ImageError::TooLarge(reason));
    }
    let format = format_of(bytes)?;
    let Header { width, height, orientation } = header(bytes, format)?;
    check(width, height, limits)?;
    let is_turned = orientation.to_exif() >= 5;
    let (width, height) = if is_turned { (height, width) } else { (width, height) };
    Ok(ImageInfo { media_type: format.to_mime_type(), width, height })
}

fn check(width: u32, height: u32, limits: &ImageLimits) -> Result<(), ImageError> {
    let (long, short) = (width.max(height), width.min(height));
    let most = if short == 0 {
        return Err(ImageError::Damaged("the image has no pixels".to_owned()));
    } else if long > limits.side {
        format!("{} pixels a side", limits.side)
    } else if u64::from(width) * u64::from(height) > limits.pixels {
        format!("{} pixels", limits.pixels)
    } else if u64::from(long) > u64::from(short) * u64::from(limits.ratio) {
        format!("{} times as long on one side as on the other", limits.ratio)
    } else {
        return Ok(());
    };
    Err(ImageError::TooLarge(format!(
        "the image has {width}x{height} pixels; at most {most}: crop it or make it smaller"
    )))
}

fn format_of(bytes: &[u8]) -> Result<ImageFormat, ImageError> {
    let named =
        |name: &str| Err(ImageError::Format(format!("{name} is not read: convert the image to PNG or JPEG")));
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => Ok(ImageFormat::Png),
        [0xff, 0xd8, 0xff, ..] => Ok(ImageFormat::Jpeg),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Ok(ImageFormat::WebP),
        [b'G', b'I', b'F', b'8', ..] => Ok(ImageFormat::Gif),
        [b'B', b'M', ..] => Ok(ImageFormat::Bmp),
        [_, _, _, _, b'f', b't', b'y', b'p', brand @ ..] => match brand {
            [b'a', b'v', b'i', ..] => named("AVIF"),
            [b'h' | b'm', ..] => named("HEIC"),
            _ => named("a video or a format of its kind"),
        },
        [b'I', b'I', b'*' | b'+', 0, ..] | [b'M', b'M', 0, b'*' | b'+', ..] => named("TIFF"),
        [0xff, 0x0a, ..] | [0, 0, 0, 12, b'J', b'X', b'L', ..] => named("JPEG XL"),
        [b'%', b'P', b'D', b'F', ..] => named("PDF"),
        _ if is_svg(bytes) => named("SVG"),
        [] => Err(ImageError::Format("the image file is empty".to_owned())),
        _ => {
            Err(ImageError::Format("the file is no image: PNG, JPEG, WebP, GIF and BMP are read".to_owned()))
        }
    }
}

fn is_svg(bytes: &[u8]) -> bool {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]);
    start.trim_start_matches(['\u{feff}', ' ', '\n', '\r', '\t']).starts_with('<') && start.contains("<svg")
}

fn header(bytes: &[u8], format: ImageFormat) -> Result<Header, ImageError> {
    if format == ImageFormat::Jpeg {
        return jpeg::header(bytes);
    }
    let mut decoder = open(bytes, format, 0)?;
    let (width, height) = decoder.dimensions();
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    Ok(Header { width, height, orientation })
}

fn open(bytes: &[u8], format: ImageFormat, pixels: u64) -> Result<impl ImageDecoder, ImageError> {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(8 * pixels + SPARE_BYTES);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    reader.into_decoder().map_err(failed)
}

fn failed(error: image::ImageError) -> ImageError {
    match error {
        image::ImageError::Limits(error) => {
            ImageError::TooLarge(format!("the image takes too much memory to decode: {error}"))
        }
        image::ImageError::Unsupported(error) => {
            ImageError::Format(format!("the image is not read: {error}"))
        }
        error => ImageError::Damaged(format!("the image file is damaged: {error}")),
    }
}

/// Decodes a file whose header is `info`.
pub(super) fn decode(bytes: &[u8], info: &ImageInfo) -> Result<Picture, ImageError> {
    let format = format_of(bytes)?;
    let orientation = header(bytes, format)?.orientation;
    let Picture { width, height, rgb } = match format {
        ImageFormat::Jpeg => jpeg::decode(bytes)?,
        format => decode_plain(bytes, format, u64::from(info.width) * u64::from(info.height))?,
    };
    let size = || ImageError::Damaged("the image file is damaged: its pixels are not of its size".to_owned());
    let mut image = DynamicImage::ImageRgb8(RgbImage::from_raw(width, height, rgb).ok_or_else(size)?);
    image.apply_orientation(orientation);
    let (width, height) = (image.width(), image.height());
    if (width, height) != (info.width, info.height) {
        return Err(size());
    }
    Ok(Picture { width, height, rgb: image.into_rgb8().into_raw() })
}

fn decode_plain(bytes: &[u8], format: ImageFormat, pixels: u64) -> Result<Picture, ImageError> {
    let decoder = open(bytes, format, pixels)?;
    let (width, height) = decoder.dimensions();
    let (colours, num_bytes) = (decoder.color_type(), decoder.total_bytes());
    if num_bytes > 8 * pixels {
        return Err(ImageError::Damaged("the image file is damaged: two sizes".to_owned()));
    }
    let mut values = vec![0; num_bytes as usize];
    decoder.read_image(&mut values).map_err(failed)?;
    if colours.bytes_per_pixel() > colours.channel_count() {
        values = high_bytes(&values);
    }
    let rgb = match colours {
        ColorType::L8 | ColorType::L16 => values.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::La8 | ColorType::La16 => {
            let (pixels, _) = values.as_chunks::<2>();
            pixels.iter().flat_map(|&[grey, alpha]| [on_white(grey, alpha); 3]).collect()
        }
        ColorType::Rgb8 | ColorType::Rgb16 => values,
        ColorType::Rgba8 | ColorType::Rgba16 => {
            let (pixels, _) = values.as_chunks::<4>();
            pixels
                .iter()
                .flat_map(|&[r, g, b, alpha]| [r, g, b].map(|value| on_white(value, alpha)))
                .collect()
        }
        other => return Err(ImageError::Format(format!("colours of the form {other:?} are not read"))),
    };
    Ok(Picture { width, height, rgb })
}

/// 16 bits to 8 as Pillow does for RGB: the high byte. (Pillow clips grey instead, which makes white pictures.)
fn high_bytes(values: &[u8]) -> Vec<u8> {
    values.as_chunks::<2>().0.iter().map(|pair| (u16::from_ne_bytes(*pair) >> 8) as u8).collect()
}

/// Pillow's `alpha_composite` on white.
fn on_white(value: u8, alpha: u8) -> u8 {
    let [value, alpha] = [u32::from(value), u32::from(alpha)];
    let sum = ((value * alpha + 255 * (255 - alpha)) << 7) + (0x80 << 7);
    ((((sum >> 8) + sum) >> 8) >> 7) as u8
}
