//! Images as the engine, the KV pages and the turn pipeline see them: plain data, without a tower.

use std::fmt;
use std::ops::Range;

use llmctl_image::{ImageHash, ImagePlan, Picture, PixelRule, TilePlan};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// What the decoder does with the rows of an image, besides taking them for embeddings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRule {
    /// The layers in which the rows of one span see each other in both directions.
    pub two_way: TwoWay,
    /// True if rows have three position numbers (M-RoPE): a span at position p, whose grid has `h` rows and `w` columns, has
    /// (p, p + row, p + column), and the next token has p + max(h, w).
    pub mrope: bool,
}

/// The layers in which the rows of one image span see each other in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TwoWay {
    #[default]
    Never,
    /// In all layers; a window cuts the past side (Gemma 3).
    All,
    /// In all layers, and no window hides rows of the same span (Gemma 4 unified).
    Whole,
    /// In layers with a sliding window, whose past side stays (Gemma 4 31B and 26B-A4B).
    Sliding,
}

impl TwoWay {
    /// Returns whether rows of a span see each other in both directions in a layer with this window.
    pub fn is_in(self, window: Option<usize>) -> bool {
        match self {
            TwoWay::Never => false,
            TwoWay::All | TwoWay::Whole => true,
            TwoWay::Sliding => window.is_some(),
        }
    }
}

/// A loaded tower, as the engine and the turn pipeline see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VisionSpec {
    /// Name of the tower's kind, e.g. `qwen3-vl`.
    pub tower: String,
    /// Identifies the tower's weights, their types and the projector.
    pub fingerprint: String,
    pub pixels: PixelRule,
    pub rows: RowRule,
    /// Token whose embedding the tower's rows replace.
    pub placeholder: u32,
    pub text: ImageText,
}

/// How an image stands in a prompt's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageText {
    /// What the chat template prints for an image; [`Self::expand`] takes its place.
    pub printed: String,
    /// The text of [`VisionSpec::placeholder`].
    pub placeholder: String,
    pub form: TextForm,
}

/// Where the placeholders of an image stand. Sources: transformers' processors of the families.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextForm {
    /// All between two texts, which may be empty.
    Run { before: String, after: String },
    /// Row by row, with `row_end` behind each and `end` behind the last (Mistral 3).
    Rows { row_end: String, end: String },
    /// Tile by tile, each behind a fence and its row and column, a line for each row; the whole picture at the end (Idefics 3,
    /// SmolVLM).
    FencedTiles,
    /// Tile by tile, each behind its row and column, and the whole picture behind `<|img_thumbnail|>`, all between two marks
    /// (LFM2-VL).
    NumberedTiles,
}

impl ImageText {
    /// Returns the text of an image: markers, and a placeholder for each of the plan's tokens, in their order.
    pub fn expand(&self, plan: &ImagePlan) -> String {
        let run =
            |tile: &TilePlan| self.placeholder.repeat(tile.tokens[0] as usize * tile.tokens[1] as usize);
        let [rows, cols] = plan.cut.map(|count| count as usize);
        let (cut, overview) = plan.tiles.split_at(plan.tiles.len().min(rows * cols));
        let is_whole = cut.len() == 1;
        let place = |index: usize| [index / cols.max(1) + 1, index % cols.max(1) + 1];
        match &self.form {
            TextForm::Run { before, after } => {
                format!("{before}{}{after}", self.placeholder.repeat(plan.num_tokens()))
            }
            TextForm::Rows { row_end, end } => {
                let row = |tile: &TilePlan| self.placeholder.repeat(tile.tokens[1] as usize);
                let of_tile = |tile| vec![row(tile); tile.tokens[0] as usize].join(row_end) + end;
                plan.tiles.iter().map(of_tile).collect()
            }
            TextForm::FencedTiles => {
                const FENCE: &str = "<fake_token_around_image>";
                let tile = |(index, tile): (usize, &TilePlan)| {
                    let [row, col] = place(index);
                    let line = if col == cols { "\n" } else { "" };
                    format!("{FENCE}<row_{row}_col_{col}>{}{line}", run(tile))
                };
                let whole = |tile| format!("{FENCE}<global-img>{}{FENCE}", run(tile));
                match overview.first() {
                    None => cut.iter().map(whole).collect(),
                    Some(last) => {
                        cut.iter().enumerate().map(tile).chain(["\n".to_owned(), whole(last)]).collect()
                    }
                }
            }
            TextForm::NumberedTiles => {
                let tile = |(index, tile): (usize, &TilePlan)| {
                    let [row, col] = place(index);
                    let mark = if is_whole { String::new() } else { format!("<|img_row_{row}_col_{col}|>") };
                    mark + &run(tile)
                };
                let tiles: String = cut.iter().enumerate().map(tile).collect();
                let overview: String =
                    overview.iter().map(|tile| "<|img_thumbnail|>".to_owned() + &run(tile)).collect();
                format!("<|image_start|>{tiles}{overview}<|image_end|>")
            }
        }
    }
}

/// Name of an image's rows: of the pixels that the tower saw, the rule that made patches of them, and the tower.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ImageKey(#[serde(with = "hex")] pub [u8; 32]);

impl ImageKey {
    /// Returns the key of a picture for a tower.
    pub fn of(picture: &Picture, vision: &VisionSpec) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"llmctl image 1");
        let rule = serde_json::to_vec(&(&vision.pixels, &vision.fingerprint)).expect("plain data");
        hash.update((rule.len() as u64).to_le_bytes());
        hash.update(rule);
        hash.update(picture.width.to_le_bytes());
        hash.update(picture.height.to_le_bytes());
        hash.update(&picture.rgb);
        Self(hash.finalize().into())
    }
}

impl fmt::Display for ImageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ImageHash(self.0).fmt(f)
    }
}

impl fmt::Debug for ImageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&ImageHash(self.0), f)
    }
}

/// A run of rows of a prompt that take embeddings of an image in place of their tokens'. An image has several if text stands
/// between its tiles or rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpan {
    /// Positions in the sequence.
    pub rows: Range<usize>,
    pub key: ImageKey,
    /// The embedding of the first row; the others follow.
    pub first: usize,
    /// Rows and columns of the tile's tokens, for positions of M-RoPE.
    pub grid: [u32; 2],
}

/// Iterates over the numbers of the rotary embedding (time, row, column) of a sequence's `rows`, whose image spans are given
/// in ascending order; see [`RowRule::mrope`], without which all three are the position.
pub fn angles_of(spans: &[ImageSpan], mrope: bool, rows: Range<usize>) -> impl Iterator<Item = [u32; 3]> {
    let mut ahead = spans.iter().filter(move |_| mrope).peekable();
    // What the spans behind a row took less than one number for each of their rows.
    let mut saved = 0;
    rows.map(move |position| {
        while let Some(ImageSpan { rows, grid, .. }) = ahead.next_if(|span| span.rows.end <= position) {
            saved += rows.len() as i64 - i64::from(grid[0].max(grid[1]));
        }
        let number = |position: usize| (position as i64 - saved) as u32;
        let Some(ImageSpan { rows, grid, .. }) = ahead.peek().filter(|span| span.rows.contains(&position))
        else {
            return [number(position); 3];
        };
        let (first, width) = (number(rows.start), grid[1].max(1) as usize);
        let [row, column] = [(position - rows.start) / width, (position - rows.start) % width];
        [first, first + row as u32, first + column as u32]
    })
}

/// The embeddings of an image's tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ImageRows {
    /// Width of a row: the decoder's hidden size.
    pub width: usize,
    /// `[tokens, width]`: takes the place of the placeholders' embeddings, behind the decoder's embedding scale.
    pub embeddings: Vec<f32>,
    /// For each of the first decoder layers, `[tokens, width]` that is added to the residual behind it (deepstack); mostly
    /// none.
    pub deep: Vec<Vec<f32>>,
}

impl ImageRows {
    pub fn len(&self) -> usize {
        self.embeddings.len().checked_div(self.width).unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.embeddings.is_empty()
    }

    /// Returns the bytes of all values.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * (self.embeddings.len() + self.deep.iter().map(Vec::len).sum::<usize>())
    }
}

pub(crate) mod hex {
    use llmctl_image::ImageHash;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&ImageHash(*bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        let hex = String::deserialize(deserializer)?;
        ImageHash::from_hex(&hex).map(|hash| hash.0).ok_or_else(|| D::Error::custom("not a hash"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_behind_an_image_goes_on_behind_its_longer_side() {
        let span = |rows, grid| ImageSpan { rows, key: ImageKey([0; 32]), first: 0, grid };
        let spans = [span(2..8, [2, 3]), span(8..10, [2, 1])];
        let text = |number| [number; 3];
        let expected = [
            [text(0), text(1), [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]].as_slice(),
            &[[5, 5, 5], [5, 6, 5], text(7), text(8)],
        ]
        .concat();
        for start in 0..12 {
            assert!(angles_of(&spans, true, start..12).eq(expected[start..].iter().copied()), "from {start}");
        }
        assert!(angles_of(&spans, false, 0..12).eq((0..12).map(text)));
    }
}
