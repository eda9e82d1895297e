//! JPEG: decoded by zune-jpeg without its SIMD, whose rounding differs between processors; colours as Pillow converts them.

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use image::metadata::Orientation;

use super::{ImageError, Picture};

/// Most scans of a progressive file; each is a pass over all blocks.
const MOST_SCANS: usize = 100;

/// Sizes as stored, and how to turn the picture.
pub(super) struct Header {
    pub width: u32,
    pub height: u32,
    pub orientation: Orientation,
}

fn damaged(reason: impl std::fmt::Display) -> ImageError {
    ImageError::Damaged(format!("the JPEG file is damaged: {reason}"))
}

fn open(bytes: &[u8]) -> Result<JpegDecoder<ZCursor<&[u8]>>, ImageError> {
    let options = DecoderOptions::new_safe()
        .set_strict_mode(false)
        .jpeg_set_max_scans(MOST_SCANS)
        .set_max_width(usize::MAX) // the caller has limits of its own
        .set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(damaged)?;
    Ok(decoder)
}

pub(super) fn header(bytes: &[u8]) -> Result<Header, ImageError> {
    let decoder = open(bytes)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
    Ok(Header {
        width: width as u32, // 16 bits
        height: height as u32,
        orientation: orientation.unwrap_or(Orientation::NoTransforms),
    })
}

pub(super) fn decode(bytes: &[u8]) -> Result<Picture, ImageError> {
    let mut decoder = open(bytes)?;
    // The decoder fills up what is missing; the marker of the end stands behind the last scan.
    let last = |marker: [u8; 2]| bytes.windows(2).rposition(|pair| pair == marker);
    if last([0xff, 0xd9]) < last([0xff, 0xda]) {
        return Err(ImageError::Damaged("the JPEG file is incomplete: its end is missing".to_owned()));
    }
    let colours = decoder.input_colorspace().unwrap_or(ColorSpace::YCbCr);
    let components = decoder.info().map_or(0, |info| info.components);
    let (width, height) = decoder.dimensions().unwrap_or_default();
    let output = match components {
        1 => ColorSpace::Luma,
        3 => ColorSpace::RGB,
        4 => colours, // converted below
        other => return Err(damaged(format!("{other} colours"))),
    };
    decoder.set_options(decoder.options().jpeg_set_out_colorspace(output));
    let pixels = decoder.decode().map_err(damaged)?;
    let rgb = match output {
        ColorSpace::Luma => pixels.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorSpace::RGB => pixels,
        ColorSpace::CMYK => printed(&pixels, |colour| colour.map(|value| 255 - value)),
        ColorSpace::YCCK => printed(&pixels, |[y, cb, cr]| to_rgb(y, cb, cr)),
        other => return Err(damaged(format!("{} colours", other.num_components()))),
    };
    Ok(Picture { width: width as u32, height: height as u32, rgb })
}

/// Inks and an inverted black, as Adobe writes them, to RGB. `inks` takes a pixel's three colours to cyan, magenta and yellow.
fn printed(pixels: &[u8], inks: impl Fn([u8; 3]) -> [u8; 3]) -> Vec<u8> {
    let (pixels, _) = pixels.as_chunks::<4>();
    let ink = |ink: u8, light: u8| {
        let product = u32::from(ink) * u32::from(light) + 128;
        light - (((product >> 8) + product) >> 8) as u8
    };
    pixels.iter().flat_map(|&[a, b, c, light]| inks([a, b, c]).map(|value| ink(value, light))).collect()
}

/// YCbCr to RGB as in libjpeg, with 16 fractional bits.
fn to_rgb(y: u8, cb: u8, cr: u8) -> [u8; 3] {
    let [y, cb, cr] = [i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128];
    let half = 1 << 15;
    let red = y + ((91_881 * cr + half) >> 16);
    let green = y + ((-22_554 * cb - 46_802 * cr + half) >> 16);
    let blue = y + ((116_130 * cb + half) >> 16);
    [red, green, blue].map(|value| value.clamp(0, 255) as u8)
}
