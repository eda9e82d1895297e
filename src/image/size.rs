//! Sizes: what a family's rule makes of a picture's width and height. The arithmetic is the reference's, in f64 with its
//! roundings, so that the numbers of tokens agree for every size.

use serde::{Deserialize, Serialize};

use super::ImageError;

/// Most pixels that the tiles of a picture may have together, whatever a configuration says.
const MOST_PIXELS: u64 = 32 << 20;

/// Most times that a side may be longer than the other in rules that keep the ratio ([`SizeRule::Area`]).
const MOST_RATIO: u32 = 200;

/// The rule by which a family sizes a picture and cuts it into tiles. A token is `patch * merge` pixels wide and high.
/// Sides are in pixels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeRule {
    /// Stretched to one size (Gemma 3; InternVL without tiles).
    Fixed { width: u32, height: u32 },
    /// Sides are rounded to tokens, then scaled until the area lies within limits (Qwen's `smart_resize`). GLM counts the
    /// area of two `frames`, and first enlarges pictures with a side below a token (`enlarges`); Qwen: 1 and false.
    Area { least_pixels: u64, most_pixels: u64, frames: u32, enlarges: bool },
    /// Enlarged or reduced to nearly `tokens` tokens (Gemma 4: 70, 140, 280, 560 or 1120).
    Budget { tokens: u32 },
    /// Reduced until no side is longer than `longest`, then sides up to whole tokens (Pixtral, Mistral 3).
    LongestEdge { longest: u32 },
    /// The longer side becomes `longest`, then both go up to multiples of `tile`: two resizes. Cut into tiles, with an
    /// overview; if not `split`, one tile alone (Idefics3, SmolVLM).
    EdgeTiles { longest: u32, tile: u32, split: bool },
    /// Like [`SizeRule::Area`], but with limits in tokens and at least one token a side; if that makes more than `tolerance`
    /// times `most_tokens` and `split`, stretched to the grid of tiles with the nearest ratio, with an overview (LFM2-VL).
    AreaTiles {
        least_tokens: u32,
        most_tokens: u32,
        tolerance: f64,
        tile: u32,
        least_tiles: u32,
        most_tiles: u32,
        split: bool,
        overview: bool,
    },
    /// Stretched to the grid of tiles with the nearest ratio; with an overview if there are several (InternVL).
    RatioTiles { tile: u32, least_tiles: u32, most_tiles: u32, overview: bool },
}

/// Sizes on the way from a picture to its tiles. A size is `[width, height]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TileLayout {
    /// The size of a resize that goes before.
    pub first: Option<[u32; 2]>,
    /// The size that is cut into tiles.
    pub size: [u32; 2],
    /// Rows and columns of tiles.
    pub cut: [u32; 2],
    /// The size of the whole picture behind its tiles.
    pub overview: Option<[u32; 2]>,
}

impl TileLayout {
    /// One tile.
    fn single(size: [u32; 2]) -> Self {
        Self { first: None, size, cut: [1, 1], overview: None }
    }

    pub fn tile(&self) -> [u32; 2] {
        [self.size[0] / self.cut[1], self.size[1] / self.cut[0]]
    }

    fn pixels(&self) -> u64 {
        let sizes = self.first.iter().chain([&self.size]).chain(&self.overview);
        sizes.map(|&size| area(size)).sum()
    }

    fn num_tokens(&self, unit: u32) -> u64 {
        let tokens = |size: [u32; 2]| area(size.map(|side| side / unit));
        area(self.cut) * tokens(self.tile()) + self.overview.map_or(0, tokens)
    }
}

fn area([width, height]: [u32; 2]) -> u64 {
    u64::from(width) * u64::from(height)
}

impl SizeRule {
    /// Checks the rule's numbers for patches of `patch` pixels a side, of which `merge` make a side of a token.
    pub(super) fn check(&self, patch: u32, merge: u32) -> Result<(), ImageError> {
        // Pixels behind the last patch are left out (384 of 14).
        let is_tile = |side: u32| (patch..=4096).contains(&side) && (side / patch).is_multiple_of(merge);
        let is_range = |least: u64, most: u64, top: u64| least <= most && (1..=top).contains(&most);
        let is_sound = match *self {
            Self::Fixed { width, height } => is_tile(width) && is_tile(height),
            Self::Area { least_pixels, most_pixels, frames, .. } => {
                is_range(least_pixels, most_pixels, 1 << 40) && (1..=16).contains(&frames)
            }
            Self::Budget { tokens } => (1..=1 << 20).contains(&tokens),
            Self::LongestEdge { longest } => (1..=1 << 16).contains(&longest),
            Self::EdgeTiles { longest, tile, .. } => is_tile(tile) && (tile..=4096).contains(&longest),
            Self::AreaTiles {
                least_tokens, most_tokens, tolerance, tile, least_tiles, most_tiles, ..
            } => {
                is_range(least_tokens.into(), most_tokens.into(), 1 << 20)
                    && (1.0..=1e6).contains(&tolerance)
                    && is_tile(tile)
                    && is_range(least_tiles.into(), most_tiles.into(), 256)
            }
            Self::RatioTiles { tile, least_tiles, most_tiles, .. } => {
                is_tile(tile) && is_range(least_tiles.into(), most_tiles.into(), 256)
            }
        };
        let wrong = || {
            ImageError::Rule(format!("{self:?} with {merge} patches of {patch} pixels to a side of a token"))
        };
        if is_sound { Ok(()) } else { Err(wrong()) }
    }

    /// Returns the layout of a picture of this size, for tokens of `unit` pixels a side and a user's limits of tokens.
    pub(super) fn layout(
        &self,
        size: [u32; 2],
        unit: u32,
        limits: [Option<u32>; 2],
    ) -> Result<TileLayout, ImageError> {
        let [width, height] = size;
        if width == 0 || height == 0 {
            return Err(ImageError::Size("an image without pixels".to_owned()));
        }
        let ratio = u64::from(width.max(height)) > u64::from(MOST_RATIO) * u64::from(width.min(height));
        if ratio && matches!(self, Self::Area { .. }) {
            let reason = format!(
                "an image of {width}x{height} pixels is too narrow: crop it to at most 1:{MOST_RATIO}"
            );
            return Err(ImageError::Size(reason));
        }
        let [least, most] = [limits[0].unwrap_or(0), limits[1].unwrap_or(u32::MAX)];
        let layout = self.within(size, unit, least, most);
        if layout.pixels() > MOST_PIXELS {
            let [width, height] = layout.size;
            let reason = format!(
                "the model would see {width}x{height} pixels, more than {MOST_PIXELS} in all: limit its tokens"
            );
            return Err(ImageError::Size(reason));
        }
        Ok(layout)
    }

    fn within(&self, size: [u32; 2], unit: u32, least: u32, most: u32) -> TileLayout {
        let pixels = |tokens: u32| u64::from(tokens) * area([unit, unit]);
        let single = match *self {
            Self::Fixed { width, height } => return TileLayout::single([width, height]),
            Self::Budget { tokens } => {
                return TileLayout::single(to_budget(size, unit, tokens.clamp(least, most)));
            }
            Self::EdgeTiles { longest, tile, split } => {
                return edge_tiles(size, unit, [longest, tile], split, most);
            }
            Self::RatioTiles { tile, .. } => {
                let grid = self.grid(size, unit, most, [tile, tile]);
                return grid.unwrap_or(TileLayout::single([tile, tile]));
            }
            Self::AreaTiles { least_tokens, most_tokens, tolerance, split, .. } => {
                let bounds = [least_tokens, most_tokens].map(|tokens| pixels(tokens.clamp(least, most)));
                let whole = fit(size, unit, bounds, 1, unit);
                let rounded = area(size.map(|side| rounded(side, unit)));
                let is_large = rounded as f64 > pixels(most_tokens) as f64 * tolerance;
                let grid = self.grid(size, unit, most, whole).filter(|_| split && is_large);
                return grid.unwrap_or(TileLayout::single(whole));
            }
            Self::Area { least_pixels, most_pixels, frames, enlarges } => {
                let size = if enlarges { enlarged(size, unit) } else { size };
                fit(size, unit, [least_pixels, most_pixels], frames, 0)
            }
            Self::LongestEdge { longest } => {
                reduced(size, longest).map(|side| side.div_ceil(unit).max(1) * unit)
            }
        };
        let layout = TileLayout::single(single);
        let is_within = (u64::from(least)..=u64::from(most)).contains(&layout.num_tokens(unit));
        let limited = || TileLayout::single(fit(size, unit, [pixels(least), pixels(most)], 1, unit));
        if is_within { layout } else { limited() }
    }

    /// Returns the picture stretched to the allowed grid of tiles with the nearest ratio, the smaller one of two unless the
    /// picture has more than half of the larger one's pixels. `overview` is the size of the whole picture behind the tiles.
    fn grid(&self, size: [u32; 2], unit: u32, most: u32, overview: [u32; 2]) -> Option<TileLayout> {
        let (Self::AreaTiles { tile, least_tiles, most_tiles, overview: has_overview, .. }
        | Self::RatioTiles { tile, least_tiles, most_tiles, overview: has_overview }) = *self
        else {
            return None;
        };
        let affordable = u64::from(most) / area([tile / unit, tile / unit]).max(1);
        let most_tiles = affordable.saturating_sub(has_overview.into()).min(most_tiles.into()) as u32;
        let grids = (1..=most_tiles).flat_map(|cols| (1..=most_tiles / cols).map(move |rows| [cols, rows]));
        let mut grids: Vec<[u32; 2]> = grids.filter(|&grid| area(grid) >= least_tiles.into()).collect();
        grids.sort_by_key(|&grid| area(grid));
        let ratio = |[width, height]: [u32; 2]| f64::from(width) / f64::from(height);
        let mut best = *grids.first()?;
        for grid in grids {
            let [distance, least] = [grid, best].map(|grid| (ratio(size) - ratio(grid)).abs());
            let is_filled = area(size) as f64 > 0.5 * area([tile, tile]) as f64 * area(grid) as f64;
            if distance < least || distance == least && is_filled {
                best = grid;
            }
        }
        let [cols, rows] = best;
        let overview = Some(overview).filter(|_| has_overview && cols * rows > 1);
        Some(TileLayout { first: None, size: [cols * tile, rows * tile], cut: [rows, cols], overview })
    }
}

/// Python's `round(side / unit) * unit`.
fn rounded(side: u32, unit: u32) -> u32 {
    (f64::from(side) / f64::from(unit)).round_ties_even() as u32 * unit
}

/// Qwen's `smart_resize`: sides in whole tokens, whose area times `frames` lies within bounds of pixels; each side is rounded to
/// no less than `least`.
fn fit(size: [u32; 2], unit: u32, [least_px, most_px]: [u64; 2], frames: u32, least: u32) -> [u32; 2] {
    let near = size.map(|side| rounded(side, unit).max(least));
    let pixels = u64::from(frames) * area(size);
    let (near_px, unit_f) = (u64::from(frames) * area(near), f64::from(unit));
    let to_side = |tokens: f64| (tokens as u32).max(1).saturating_mul(unit);
    if near_px > most_px {
        let beta = (pixels as f64 / most_px as f64).sqrt();
        size.map(|side| to_side((f64::from(side) / beta / unit_f).floor()))
    } else if near_px < least_px {
        let beta = (least_px as f64 / pixels as f64).sqrt();
        size.map(|side| to_side((f64::from(side) * beta / unit_f).ceil()))
    } else {
        near.map(|side| side.max(unit))
    }
}

/// Returns a size of which no side is below a token.
fn enlarged(size: [u32; 2], unit: u32) -> [u32; 2] {
    let scale = size.map(|side| f64::from(unit) / f64::from(side));
    let scale = scale[0].max(scale[1]);
    if scale > 1.0 { size.map(|side| (f64::from(side) * scale) as u32) } else { size }
}

/// Returns a size of which no side is longer than `longest`.
fn reduced(size: [u32; 2], longest: u32) -> [u32; 2] {
    let ratio = f64::from(size[0].max(size[1])) / f64::from(longest);
    if ratio > 1.0 { size.map(|side| (f64::from(side) / ratio).floor() as u32) } else { size }
}

/// Gemma 4's `get_aspect_ratio_preserving_size`.
fn to_budget(size: [u32; 2], unit: u32, tokens: u32) -> [u32; 2] {
    let target = u64::from(tokens) * area([unit, unit]);
    let factor = (target as f64 / area(size) as f64).sqrt();
    let counts = size.map(|side| (factor * f64::from(side) / f64::from(unit)).floor() as u32);
    // A strip is one token high, and as wide as its ratio says.
    let long = |a: u32, b: u32| (a / b).clamp(1, tokens);
    let [cols, rows] = match counts {
        [0, _] => [1, long(size[1], size[0])],
        [_, 0] => [long(size[0], size[1]), 1],
        counts => counts,
    };
    [cols * unit, rows * unit]
}

/// Idefics3's two resizes and its tiles; of fewer tiles if they would have more than `most` tokens.
fn edge_tiles(size: [u32; 2], unit: u32, [longest, tile]: [u32; 2], split: bool, most: u32) -> TileLayout {
    let one =
        |longest| TileLayout { first: Some(to_edge(size, longest)), ..TileLayout::single([tile, tile]) };
    let tiled = |longest: u32| {
        let first = to_edge(size, longest);
        let is_wide = usize::from(first[0] < first[1]);
        let (long, ratio) =
            (first[is_wide].next_multiple_of(tile), f64::from(first[0]) / f64::from(first[1]));
        let short = if is_wide == 0 { f64::from(long) / ratio } else { f64::from(long) * ratio };
        let mut size = [(short as u32).next_multiple_of(tile).max(tile); 2];
        size[is_wide] = long;
        let cut = [size[1] / tile, size[0] / tile];
        let overview = Some([tile, tile]).filter(|_| cut != [1, 1]);
        TileLayout { first: Some(first), size, cut, overview }
    };
    if !split {
        return one(longest);
    }
    let shorter = (1..longest.div_ceil(tile)).rev().map(|tiles| tiles * tile);
    let mut layouts = [longest].into_iter().chain(shorter).map(tiled);
    layouts.find(|layout| layout.num_tokens(unit) <= most.into()).unwrap_or_else(|| one(tile))
}

/// Returns a size whose longer side is `longest`, and whose other side is even.
fn to_edge([width, height]: [u32; 2], longest: u32) -> [u32; 2] {
    let ratio = f64::from(width) / f64::from(height);
    let even = |side: f64| (side as u32).next_multiple_of(2).max(1);
    if width >= height {
        [longest, even(f64::from(longest) / ratio)]
    } else {
        [even(f64::from(longest) * ratio), longest]
    }
}
