//! The rule by which a family makes patches of a picture: sizes, tiles, filter and normalisation, as facts.

use serde::{Deserialize, Serialize};

use super::resize::crop;
use super::size::TileLayout;
use super::{ImageError, Picture, ResizeFilter, SizeRule, resize};

/// Rule by which a family makes patches of a picture. Part of an image's key, so equal rules give equal patches. Comes from
/// configurations, which are untrusted: see [`Self::check`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PixelRule {
    pub filter: ResizeFilter,
    /// Pixels of a side of a patch.
    pub patch: u32,
    /// Patches of a side of what becomes one token.
    pub merge: u32,
    /// Normalisation of each channel: `(value / 255 - mean) / std`. With 0 and 1 (Gemma 4), values lie in 0 to 1 and the tower
    /// itself takes 2x - 1.
    pub mean: [f32; 3],
    pub std: [f32; 3],
    pub size: SizeRule,
    /// Limits of tokens that a user asks for, within what the family can do. Where its rule makes fewer or more tokens, the
    /// picture is enlarged or reduced, or cut into fewer tiles. A side is at least one token, so a long strip may have more
    /// than the most; [`SizeRule::Fixed`] heeds neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_tokens: Option<u32>,
}

/// The plan for a picture of one size: its tiles, in the order in which their tokens stand in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePlan {
    pub tiles: Vec<TilePlan>,
    /// Rows and columns of tiles that the picture was cut into; `[1, 1]` if it was not.
    pub cut: [u32; 2],
    /// True if the last tile shows the whole picture once more.
    pub has_overview: bool,
}

/// One tile: a picture of its own for the tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TilePlan {
    /// Rows and columns of patches.
    pub patches: [u32; 2],
    /// Rows and columns of tokens.
    pub tokens: [u32; 2],
}

impl ImagePlan {
    /// Returns the number of tokens whose embeddings the tower computes.
    pub fn num_tokens(&self) -> usize {
        self.tiles.iter().map(|tile| tile.tokens[0] as usize * tile.tokens[1] as usize).sum()
    }
}

/// The patches of one tile, row by row; a patch is `[3, patch, patch]` (channel, row, column), normalised.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// Rows and columns of patches.
    pub grid: [u32; 2],
    /// `[grid[0] * grid[1], 3 * patch * patch]`.
    pub values: Vec<f32>,
}

impl PixelRule {
    /// Checks the numbers against nonsense; all other functions expect a rule that passed.
    ///
    /// # Errors
    /// [`ImageError::Rule`] with the number at fault.
    pub fn check(&self) -> Result<(), ImageError> {
        let refuse = |what: String| Err(ImageError::Rule(what));
        if !(1..=256).contains(&self.patch) || !(1..=64).contains(&self.merge) {
            return refuse(format!("patches of {} pixels, {} to a side of a token", self.patch, self.merge));
        }
        let is_normal = |value: &f32| value.is_finite() && value.abs() < 1e3;
        if !self.mean.iter().all(is_normal) || !self.std.iter().all(|value| is_normal(value) && *value > 1e-3)
        {
            return refuse(format!("mean {:?} and deviation {:?} of pixels", self.mean, self.std));
        }
        if self.most_tokens == Some(0) || self.most_tokens.is_some_and(|most| Some(most) < self.least_tokens)
        {
            return refuse(format!("{:?} to {:?} tokens of an image", self.least_tokens, self.most_tokens));
        }
        self.size.check(self.patch, self.merge)
    }

    /// Returns the pixels of a side of what becomes one token.
    pub fn unit(&self) -> u32 {
        self.patch * self.merge
    }

    /// Returns what becomes of a picture of this size; needs no pixels.
    ///
    /// # Errors
    /// [`ImageError::Size`] for a size that the reference refuses too, or that becomes too many pixels.
    pub fn plan(&self, width: u32, height: u32) -> Result<ImagePlan, ImageError> {
        let layout = self.layout(width, height)?;
        let tile = |[width, height]: [u32; 2]| TilePlan {
            patches: [height / self.patch, width / self.patch],
            tokens: [height / self.unit(), width / self.unit()],
        };
        let cut = layout.cut;
        let mut tiles = vec![tile(layout.tile()); cut[0] as usize * cut[1] as usize];
        tiles.extend(layout.overview.map(tile));
        Ok(ImagePlan { tiles, cut, has_overview: layout.overview.is_some() })
    }

    /// Returns the patches of each tile of the picture's plan.
    ///
    /// # Errors
    /// Those of [`Self::plan`].
    pub fn patches(&self, picture: &Picture) -> Result<Vec<Patches>, ImageError> {
        let layout = self.layout(picture.width, picture.height)?;
        let to_size =
            |picture: &Picture, [width, height]: [u32; 2]| resize(picture, width, height, self.filter);
        let first = layout.first.map(|size| to_size(picture, size));
        let whole = to_size(first.as_ref().unwrap_or(picture), layout.size);
        let table = self.normalised();
        let [width, height] = layout.tile();
        let corners =
            (0..layout.cut[0]).flat_map(|row| (0..layout.cut[1]).map(move |col| [col * width, row * height]));
        let mut patches: Vec<Patches> =
            corners.map(|corner| self.cut(&crop(&whole, corner, [width, height]), &table)).collect();
        // Where a picture is resized twice, its overview comes from the result.
        let seen = if first.is_some() { &whole } else { picture };
        patches.extend(layout.overview.map(|size| self.cut(&to_size(seen, size), &table)));
        Ok(patches)
    }

    fn layout(&self, width: u32, height: u32) -> Result<TileLayout, ImageError> {
        self.size.layout([width, height], self.unit(), [self.least_tokens, self.most_tokens])
    }

    /// Returns the normalised form of each value of each channel, with the roundings of the reference's Pillow backend.
    fn normalised(&self) -> [[f32; 256]; 3] {
        std::array::from_fn(|channel| {
            std::array::from_fn(|value| {
                ((value as f64 * (1.0 / 255.0)) as f32 - self.mean[channel]) / self.std[channel]
            })
        })
    }

    fn cut(&self, tile: &Picture, table: &[[f32; 256]; 3]) -> Patches {
        let [rows, cols] = [tile.height / self.patch, tile.width / self.patch];
        let patch = self.patch as usize;
        let stride = 3 * tile.width as usize;
        let mut values = Vec::with_capacity(rows as usize * cols as usize * 3 * patch * patch);
        for (row, col) in (0..rows as usize).flat_map(|row| (0..cols as usize).map(move |col| (row, col))) {
            for (channel, table) in table.iter().enumerate() {
                for y in row * patch..(row + 1) * patch {
                    let pixels = &tile.rgb[y * stride + 3 * col * patch..][..3 * patch];
                    values
                        .extend(pixels[channel..].iter().step_by(3).map(|value| table[usize::from(*value)]));
                }
            }
        }
        Patches { grid: [rows, cols], values }
    }
}
