//! Rules of pixels, from preprocessor_config.json or processor_config.json; GGUF says little of them, so that most of its
//! numbers are the family's. Sources: transformers' `image_processing_*.py`.

use llmctl_image::{PixelRule, ResizeFilter, SizeRule};

use super::VisionSource;
use crate::model::arch::ConfigReader;
use crate::vision::TowerConfig;
use llmctl_base::error::LoadError;

/// Most tokens of an image on a CPU for families that take any size, unless the user asks for more: a tower's work grows with the
/// square of its patches.
const CPU_TOKENS: u32 = 1280;

const HALF: [[f32; 3]; 2] = [[0.5; 3]; 2];
const CLIP: [[f32; 3]; 2] =
    [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_55, 0.261_302_6, 0.275_777_1]];
const IMAGENET: [[f32; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];
const AS_IS: [[f32; 3]; 2] = [[0.0; 3], [1.0; 3]];

/// Makes a rule for a tower.
struct Rule<'a> {
    reader: &'a ConfigReader,
    patch: u32,
    merge: u32,
}

impl<'a> Rule<'a> {
    fn of(source: &VisionSource<'a>, tower: &TowerConfig) -> Self {
        let [patch, merge] = [tower.patches.size, tower.merge].map(|side| side.min(1 << 12) as u32);
        Self { reader: source.pixels, patch, merge }
    }

    fn finish(
        &self,
        filter: ResizeFilter,
        norm: [[f32; 3]; 2],
        size: SizeRule,
    ) -> Result<PixelRule, LoadError> {
        let is_plain = self.reader.flag("do_normalize")? == Some(false);
        let [mean, std] = if is_plain { AS_IS } else { norm };
        let key = |hugging_face, gguf| self.reader.pick(hugging_face, gguf);
        let of = |key, default| if is_plain { Ok(default) } else { self.channels(key, default) };
        Ok(PixelRule {
            filter: self.filter(filter)?,
            patch: self.patch,
            merge: self.merge,
            mean: of(key("image_mean", "vision.image_mean"), mean)?,
            std: of(key("image_std", "vision.image_std"), std)?,
            size,
            least_tokens: None,
            most_tokens: None,
        })
    }

    fn channels(&self, key: &str, default: [f32; 3]) -> Result<[f32; 3], LoadError> {
        let Some(value) = self.reader.value(key) else { return Ok(default) };
        serde_json::from_value(value).map_err(|_| self.reader.error(key, "is not a list of three numbers"))
    }

    /// Returns the filter by Pillow's number.
    fn filter(&self, default: ResizeFilter) -> Result<ResizeFilter, LoadError> {
        match self.reader.count("resample")? {
            None => Ok(default),
            Some(1) => Ok(ResizeFilter::Lanczos),
            Some(2) => Ok(ResizeFilter::Bilinear),
            Some(3) => Ok(ResizeFilter::Bicubic),
            Some(other) => Err(self.reader.error("resample", format!("filter {other} is not supported"))),
        }
    }

    /// Returns a count, of the object under `object` if there is one, or `default`.
    fn inner(&self, object: &str, key: &str, default: u64) -> Result<u64, LoadError> {
        match self.reader.value(object) {
            None | Some(serde_json::Value::Number(_)) => Ok(default),
            Some(value) => match value.get(key) {
                None | Some(serde_json::Value::Null) => Ok(default),
                Some(count) => {
                    let wrong =
                        || self.reader.error(object, format!("{key} is {count}, which is not a count"));
                    count.as_u64().filter(|count| *count < 1 << 40).ok_or_else(wrong)
                }
            },
        }
    }

    fn side(&self, object: &str, key: &str, default: u32) -> Result<u32, LoadError> {
        let side = self.inner(object, key, default.into())?;
        u32::try_from(side).map_err(|_| self.reader.error(object, format!("{side} pixels are too many")))
    }

    fn count(&self, key: &str, default: u32) -> Result<u32, LoadError> {
        Ok(self.reader.count(key)?.map_or(default, |count| count as u32))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, LoadError> {
        Ok(self.reader.flag(key)?.unwrap_or(default))
    }

    /// Returns the least and most pixels, under the keys that publishers use.
    fn area(&self, default: [u64; 2]) -> Result<[u64; 2], LoadError> {
        let keys = match self.reader.is_gguf() {
            true => ["vision.image_min_pixels", "vision.image_max_pixels"],
            false => ["min_pixels", "max_pixels"],
        };
        let sizes = ["shortest_edge", "longest_edge"];
        let number = |end: usize| match self.reader.count(keys[end])? {
            Some(pixels) => Ok(pixels as u64),
            None => self.inner("size", sizes[end], default[end]),
        };
        Ok([number(0)?, number(1)?])
    }
}

fn area(
    source: &VisionSource,
    tower: &TowerConfig,
    norm: [[f32; 3]; 2],
    limits: [u64; 2],
    frames: u32,
) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let [least_pixels, most_pixels] = rule.area(limits)?;
    let enlarges = frames > 1;
    rule.finish(ResizeFilter::Bicubic, norm, SizeRule::Area { least_pixels, most_pixels, frames, enlarges })
}

pub fn qwen3_vl(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    area(source, tower, HALF, [1 << 16, 1 << 24], 1)
}

pub fn qwen2_5_vl(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    area(source, tower, CLIP, [3136, 12_845_056], 1)
}

pub fn glm4v(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    area(source, tower, CLIP, [12_544, 11_760_000], 2)
}

pub fn gemma3(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let whole = rule.count("vision.image_size", 896)?;
    let size = SizeRule::Fixed {
        width: rule.side("size", "width", whole)?,
        height: rule.side("size", "height", whole)?,
    };
    rule.finish(ResizeFilter::Bilinear, HALF, size)
}

pub fn gemma4(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let tokens = rule.count("max_soft_tokens", 280)?;
    rule.finish(ResizeFilter::Bicubic, AS_IS, SizeRule::Budget { tokens })
}

pub fn idefics3(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let [longest, tile] = match rule.reader.is_gguf() {
        true => {
            let tile = rule.count("vision.image_size", 364)?;
            [rule.count("vision.preproc_image_size", tile.saturating_mul(4))?, tile]
        }
        false => {
            [rule.side("size", "longest_edge", 1456)?, rule.side("max_image_size", "longest_edge", 364)?]
        }
    };
    let split = rule.flag("do_image_splitting", true)?;
    rule.finish(ResizeFilter::Lanczos, HALF, SizeRule::EdgeTiles { longest, tile, split })
}

pub fn lfm2_vl(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let tiles = |key, gguf, default| rule.count(rule.reader.pick(key, gguf), default);
    let size = SizeRule::AreaTiles {
        least_tokens: rule.count("min_image_tokens", 64)?,
        most_tokens: rule.count("max_image_tokens", 256)?,
        tolerance: rule.reader.number("max_pixels_tolerance")?.unwrap_or(2.0).into(),
        tile: rule.count("tile_size", 512)?,
        least_tiles: tiles("min_tiles", "vision.preproc_min_tiles", 2)?,
        most_tiles: tiles("max_tiles", "vision.preproc_max_tiles", 10)?,
        split: rule.flag("do_image_splitting", true)?,
        overview: rule.flag("use_thumbnail", true)?,
    };
    rule.finish(ResizeFilter::Bilinear, HALF, size)
}

pub fn pixtral(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let longest = rule.count("vision.image_size", 1024)?;
    let size = SizeRule::LongestEdge { longest: rule.side("size", "longest_edge", longest)? };
    rule.finish(ResizeFilter::Bicubic, CLIP, size)
}

pub fn internvl(source: &VisionSource, tower: &TowerConfig) -> Result<PixelRule, LoadError> {
    let rule = Rule::of(source, tower);
    let whole = rule.count("vision.image_size", 448)?;
    let tile = rule.side("size", "height", whole)?;
    let tiles = |key, gguf, default| rule.count(rule.reader.pick(key, gguf), default);
    let size = match rule.flag("crop_to_patches", true)? {
        true => SizeRule::RatioTiles {
            tile,
            least_tiles: tiles("min_patches", "vision.preproc_min_tiles", 1)?,
            most_tiles: tiles("max_patches", "vision.preproc_max_tiles", 12)?,
            overview: true,
        },
        false => SizeRule::Fixed { width: tile, height: tile },
    };
    rule.finish(ResizeFilter::Bicubic, IMAGENET, size)
}

/// Sets the limits of tokens: those that the user asks for, else one that a CPU can compute.
pub fn limit(rule: &mut PixelRule, [least, most]: [Option<u32>; 2]) {
    let is_free = matches!(rule.size, SizeRule::Area { .. } | SizeRule::LongestEdge { .. });
    let family = token_range(rule)[1];
    rule.most_tokens =
        most.or_else(|| (is_free && family > CPU_TOKENS).then_some(CPU_TOKENS.max(least.unwrap_or(0))));
    rule.least_tokens = least;
}

/// Returns the least and most tokens of an image under a rule that was checked; a long strip may have more.
pub fn token_range(rule: &PixelRule) -> [u32; 2] {
    let unit = u64::from(rule.unit()).max(1);
    let of = |pixels: u64| u32::try_from(pixels / (unit * unit)).unwrap_or(u32::MAX).max(1);
    let square = |side: u32| of(u64::from(side) * u64::from(side));
    let range = match rule.size {
        SizeRule::Fixed { width, height } => return [of(u64::from(width) * u64::from(height)); 2],
        SizeRule::Area { least_pixels, most_pixels, frames, .. } => {
            [least_pixels, most_pixels].map(|pixels| of(pixels / u64::from(frames.max(1))))
        }
        SizeRule::Budget { tokens } => [1, tokens],
        SizeRule::LongestEdge { longest } => [1, square(longest.next_multiple_of(rule.unit().max(1)))],
        SizeRule::EdgeTiles { longest, tile, split } => {
            let sides = u64::from(longest.div_ceil(tile.max(1)));
            let tiles = if split { sides * sides + 1 } else { 1 };
            [square(tile), square(tile).saturating_mul(tiles.try_into().unwrap_or(u32::MAX))]
        }
        SizeRule::AreaTiles { least_tokens, most_tokens, tile, most_tiles, split, .. } => {
            let tiled = square(tile).saturating_mul(most_tiles).saturating_add(most_tokens);
            [least_tokens, if split { tiled } else { most_tokens }]
        }
        SizeRule::RatioTiles { tile, most_tiles, overview, .. } => {
            let tiles = most_tiles.saturating_add((overview && most_tiles > 1).into());
            [square(tile), square(tile).saturating_mul(tiles)]
        }
    };
    let [least, most] = [rule.least_tokens, rule.most_tokens];
    let top = most.map_or(range[1], |most| most.min(range[1]));
    [least.unwrap_or(range[0]).max(range[0]).min(top), top.max(least.unwrap_or(0))]
}
