//! Tests of decoding against Pillow, and of resizing and patches against the reference processors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use super::*;

/// Pictures of 24x17 pixels, and in `expected.png` what Pillow 13 makes of them (transposed, on white), one below the
/// other. Around the frame of `canvas.gif` it is white, as in browsers.
fn samples() -> Vec<(String, Vec<u8>, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/images");
    let entries = fs::read_dir(&folder).expect("the samples").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| !path.ends_with("expected.png")).collect();
    paths.sort();
    let expected = read(&folder.join("expected.png"));
    let sizes = expected.picture.rgb.chunks_exact(3 * 24 * 17);
    assert_eq!(sizes.len(), paths.len());
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let bytes = |path: &Path| fs::read(path).expect("a sample");
    paths.iter().zip(sizes).map(|(path, rgb)| (name(path), bytes(path), rgb.to_vec())).collect()
}

fn read(path: &Path) -> Arc<ImageFile> {
    let bytes = fs::read(path).expect("a file");
    ImageFile::read(bytes.into(), &ImageLimits::default()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

fn decoded(bytes: &[u8]) -> Result<Arc<ImageFile>, ImageError> {
    ImageFile::read(bytes.into(), &ImageLimits::default())
}

#[test]
fn the_pixels_of_all_images_together_are_bounded() {
    // One by one, because other tests of this process hold images too.
    let (_, bytes, _) = samples().remove(0);
    let limits = ImageLimits { used_bytes: 3 * 24 * 17 - 1, ..ImageLimits::default() };
    let refused = ImageFile::read(bytes.clone().into(), &limits);
    assert_eq!(refused, Err(ImageError::Busy { most_bytes: limits.used_bytes }));
    let held = decoded(&bytes).expect("an image");
    let limits = ImageLimits { used_bytes: 2 * 3 * 24 * 17 - 1, ..limits };
    assert!(
        matches!(ImageFile::read(bytes.into(), &limits), Err(ImageError::Busy { .. })),
        "{held:?} is in use"
    );
}

#[test]
fn every_format_is_decoded_as_pillow_does() {
    for (name, bytes, expected) in samples() {
        let file = decoded(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let is_turned = ["turned-6.jpg", "turned-7.jpg", "turned.png"].contains(&&*name);
        let size = if is_turned { (17, 24) } else { (24, 17) };
        assert_eq!((file.picture.width, file.picture.height), size, "{name}");
        assert_eq!((file.info.width, file.info.height), size, "{name}");
        let off = file.picture.rgb.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b)).max();
        // Lossy formats leave the rounding of their transforms and the filter of their colours to the decoder.
        let allowed = match &*name {
            "baseline.jpg" | "lossy.webp" | "lossy-alpha.webp" => 12,
            "cmyk.jpg" | "ycck.jpg" => 4,
            name if name.ends_with(".jpg") => 3,
            _ => 0,
        };
        assert!(off <= Some(allowed), "{name}: off by {off:?}");
    }
}

#[test]
fn alpha_is_composited_and_formats_are_told_by_their_bytes() {
    let limits = ImageLimits::default();
    let refused = |bytes: &[u8]| inspect(bytes, &limits).expect_err("no image").to_string();
    assert!(refused(b"\0\0\0\x20ftypavif").starts_with("AVIF is not read: convert"));
    assert!(refused(b"\0\0\0\x20ftypheic").starts_with("HEIC"));
    assert!(refused(b"II*\0\0\0").starts_with("TIFF"));
    assert!(refused(b"%PDF-1.7").starts_with("PDF"));
    assert!(refused(b"\n<svg xmlns='x'>").starts_with("SVG"));
    assert!(refused(b"<?xml version='1.0'?><svg>").starts_with("SVG"));
    assert!(refused(b"").contains("empty") && refused(b"hello").contains("no image"));
}

/// A PNG of this size, without pixels.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    let mut crc = u32::MAX;
    let mut chunk = b"IHDR".to_vec();
    chunk.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    chunk.extend([8, 2, 0, 0, 0]);
    for byte in &chunk {
        crc ^= u32::from(*byte);
        (0..8).for_each(|_| crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 });
    }
    let start = [&b"\x89PNG\r\n\x1a\n\0\0\0\x0d"[..], &chunk, &(!crc).to_be_bytes()].concat();
    [&start[..], b"\0\0\0\0IDAT\x35\xaf\x06\x1e"].concat()
}

#[test]
fn limits_come_before_pixels() {
    let limits = ImageLimits::default();
    let refused = |width, height| inspect(&png_header(width, height), &limits).expect_err("too large");
    assert!(
        matches!(refused(60_000, 60_000), ImageError::TooLarge(reason) if reason.contains("16384 pixels a side"))
    );
    assert!(
        matches!(refused(16_000, 16_000), ImageError::TooLarge(reason) if reason.contains("67108864 pixels"))
    );
    assert!(matches!(refused(10_000, 49), ImageError::TooLarge(reason) if reason.contains("200 times")));
    assert!(inspect(&png_header(8_000, 8_000), &limits).is_ok());
    let small = ImageLimits { bytes: 10, ..limits };
    assert!(matches!(inspect(&png_header(1, 1), &small), Err(ImageError::TooLarge(_))));
}

#[test]
fn incomplete_files_are_refused() {
    for (name, bytes, _) in samples() {
        let whole = decoded(&bytes).expect("sound");
        for end in 0..bytes.len() {
            // A trailer or later frames stand behind the pixels, and may be missing.
            if let Ok(file) = decoded(&bytes[..end]) {
                assert_eq!(file.picture, whole.picture, "{name}: {end} of {}", bytes.len());
            }
        }
    }
}

#[test]
fn damaged_files_break_nothing() {
    let samples = samples();
    let limits = ImageLimits { pixels: 1 << 20, ..ImageLimits::default() };
    let mut state = 1_u64;
    let mut below = move |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    for turn in 0..20_000 {
        let mut bytes = samples[turn % samples.len()].1.clone();
        for _ in 0..=below(3) {
            let at = below(bytes.len());
            match below(4) {
                0 => bytes[at] ^= 1 << below(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][below(5)],
                2 => drop(bytes.drain(at..(at + 1 + below(4)).min(bytes.len() - 1).max(at))),
                _ => bytes.insert(at, below(256) as u8),
            }
        }
        if let Ok(file) = ImageFile::read(bytes.into(), &limits) {
            assert_eq!(
                file.picture.rgb.len() as u64,
                3 * u64::from(file.info.width) * u64::from(file.info.height)
            );
        }
    }
}

#[test]
fn the_sums_of_a_resize_fit() {
    let rgb = (0..3 * 97 * 61).map(|at| if at / 3 % 2 == 0 { 255 } else { 0 }).collect();
    let picture = Picture { width: 97, height: 61, rgb };
    for filter in [ResizeFilter::Bilinear, ResizeFilter::Bicubic, ResizeFilter::Lanczos] {
        for (width, height) in [(1, 1), (97, 61), (33, 200), (300, 7), (98, 60)] {
            let resized = resize(&picture, width, height, filter);
            assert_eq!(resized.rgb.len(), 3 * width as usize * height as usize);
            assert!(filter != ResizeFilter::Bilinear || (width, height) != (97, 61) || resized == picture);
        }
    }
}

// ---- against the reference

fn fixtures() -> Option<PathBuf> {
    let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures");
    let folder = std::env::var_os("LLMCTL_FIXTURES").map_or(near, PathBuf::from).join("vision");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no fixtures at {}", folder.display());
    None
}

fn rule(filter: ResizeFilter, patch: u32, merge: u32, size: SizeRule) -> PixelRule {
    let half = [0.5; 3];
    PixelRule { filter, patch, merge, mean: half, std: half, size, least_tokens: None, most_tokens: None }
}

fn area(least_pixels: u64, most_pixels: u64) -> SizeRule {
    SizeRule::Area { least_pixels, most_pixels, frames: 1, enlarges: false }
}

fn glm(least_pixels: u64, most_pixels: u64) -> SizeRule {
    SizeRule::Area { least_pixels, most_pixels, frames: 2, enlarges: true }
}

fn lfm2(tokens: [u32; 2], tile: u32, tiles: [u32; 2]) -> SizeRule {
    let [[least_tokens, most_tokens], [least_tiles, most_tiles]] = [tokens, tiles];
    let (tolerance, split, overview) = (2.0, true, true);
    SizeRule::AreaTiles {
        least_tokens,
        most_tokens,
        tolerance,
        tile,
        least_tiles,
        most_tiles,
        split,
        overview,
    }
}

fn tables() -> Vec<(&'static str, PixelRule)> {
    use ResizeFilter::{Bicubic, Bilinear, Lanczos};
    let edge = |longest, tile| SizeRule::EdgeTiles { longest, tile, split: true };
    let limited = PixelRule { most_tokens: Some(1280), ..rule(Bicubic, 16, 2, area(65_536, 16_777_216)) };
    vec![
        ("qwen3-vl 32px 65536..16777216", rule(Bicubic, 16, 2, area(65_536, 16_777_216))),
        ("qwen3-vl 32px 65536..1310720 (1280 tokens)", limited),
        ("qwen2.5-vl 28px 3136..12845056", rule(Bicubic, 14, 2, area(3_136, 12_845_056))),
        ("glm4v 28px 12544..9633792", rule(Bicubic, 14, 2, glm(12_544, 9_633_792))),
        ("gemma4 280", rule(Bicubic, 16, 3, SizeRule::Budget { tokens: 280 })),
        ("gemma4 70", rule(Bicubic, 48, 1, SizeRule::Budget { tokens: 70 })),
        ("gemma4 1120", rule(Bicubic, 16, 3, SizeRule::Budget { tokens: 1120 })),
        ("mistral3 28px 1540", rule(Bicubic, 14, 2, SizeRule::LongestEdge { longest: 1540 })),
        ("pixtral 16px 1024", rule(Bicubic, 16, 1, SizeRule::LongestEdge { longest: 1024 })),
        ("smolvlm 2048/512 64", rule(Lanczos, 16, 4, edge(2048, 512))),
        ("smolvlm 1536/384 81", rule(Lanczos, 14, 3, edge(1536, 384))),
        ("idefics3 1456/364 169", rule(Lanczos, 14, 2, edge(1456, 364))),
        ("lfm2-vl", rule(Bilinear, 16, 2, lfm2([64, 256], 512, [2, 10]))),
        (
            "internvl3 12",
            rule(
                Bicubic,
                14,
                2,
                SizeRule::RatioTiles { tile: 448, least_tiles: 1, most_tiles: 12, overview: true },
            ),
        ),
    ]
}

#[test]
fn sizes_and_tokens_are_the_references() {
    let Some(folder) = fixtures() else { return };
    let table: Value =
        serde_json::from_slice(&fs::read(folder.join("sizes.json")).expect("sizes")).expect("JSON");
    for (name, rule) in tables() {
        let expected = table["rules"][name].as_array().expect(name);
        for (size, expected) in table["sizes_wh"].as_array().expect("sizes").iter().zip(expected) {
            let [width, height] = [0, 1].map(|at| size[at].as_u64().expect("a side") as u32);
            check_size(&rule, [width, height], expected, &format!("{name}: {width}x{height}"));
        }
    }
}

fn check_size(rule: &PixelRule, [width, height]: [u32; 2], expected: &Value, place: &str) {
    let plan = rule.plan(width, height);
    if !expected["refused"].is_null() {
        assert!(matches!(plan, Err(ImageError::Size(_))), "{place}");
        return;
    }
    let plan = plan.expect(place);
    let layout = rule.size.layout([width, height], rule.unit(), [None, rule.most_tokens]).expect(place);
    let pair = |size: [u32; 2]| Value::from(vec![size[1], size[0]]);
    let found = [
        ("tokens", plan.num_tokens().into()),
        ("width", layout.size[0].into()),
        ("height", layout.size[1].into()),
        ("rows", plan.cut[0].into()),
        ("cols", plan.cut[1].into()),
        ("first", layout.first.map_or(Value::Null, pair)),
        ("thumbnail", layout.overview.map_or(Value::Null, pair)),
    ];
    for (key, found) in found.into_iter().filter(|(key, _)| expected.get(key).is_some()) {
        assert_eq!(found, expected[key], "{place}: {key}");
    }
}

#[allow(clippy::excessive_precision)] // as published
const CLIP: [[f32; 3]; 2] =
    [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];

/// The rules of the fixtures' processor files.
fn families() -> BTreeMap<&'static str, PixelRule> {
    use ResizeFilter::{Bicubic, Bilinear, Lanczos};
    let with = |[mean, std]: [[f32; 3]; 2], rule| PixelRule { mean, std, ..rule };
    let plain = [[0.0; 3], [1.0; 3]];
    let edge = SizeRule::EdgeTiles { longest: 192, tile: 64, split: true };
    let qwen3 = rule(Bicubic, 16, 2, area(4_096, 24_576));
    let gemma4 = with(plain, rule(Bicubic, 4, 3, SizeRule::Budget { tokens: 70 }));
    let mistral = with(CLIP, rule(Bicubic, 14, 2, SizeRule::LongestEdge { longest: 140 }));
    let internvl = SizeRule::RatioTiles { tile: 56, least_tiles: 1, most_tiles: 6, overview: true };
    BTreeMap::from([
        ("qwen3-vl", qwen3.clone()),
        ("qwen3-vl-moe", qwen3.clone()),
        ("qwen3.5", qwen3.clone()),
        ("qwen3.5-moe", qwen3),
        ("qwen2.5-vl", with(CLIP, rule(Bicubic, 14, 2, area(3_136, 31_360)))),
        ("glm4.1v", with(CLIP, rule(Bicubic, 14, 2, glm(6_272, 37_632)))),
        ("gemma3", rule(Bilinear, 14, 2, SizeRule::Fixed { width: 56, height: 56 })),
        ("gemma4", gemma4.clone()),
        ("gemma4-e", gemma4.clone()),
        ("gemma4-moe", gemma4),
        ("gemma4-unified", with(plain, rule(Bicubic, 12, 1, SizeRule::Budget { tokens: 70 }))),
        ("smolvlm", rule(Lanczos, 16, 2, edge.clone())),
        ("idefics3", rule(Lanczos, 8, 4, edge)),
        ("lfm2-vl", rule(Bilinear, 16, 2, lfm2([4, 9], 64, [2, 6]))),
        ("mistral3", mistral.clone()),
        ("ministral3", mistral),
        ("internvl3", with([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], rule(Bicubic, 14, 2, internvl))),
    ])
}

#[test]
fn pixels_of_every_family_are_the_references() {
    let Some(folder) = fixtures() else { return };
    for (family, rule) in families() {
        rule.check().expect(family);
        let bytes = fs::read(folder.join(family).join("golden.safetensors")).expect(family);
        let golden = SafeTensors::deserialize(&bytes).expect(family);
        let mut num_seen = 0;
        for name in golden.names() {
            let Some(image) = name.strip_prefix("image/").and_then(|name| name.strip_suffix("/pixel_values"))
            else {
                continue;
            };
            let stem = image.strip_suffix(".jpg").map(|stem| format!("{stem}.decoded.png"));
            let file = read(&folder.join("images").join(stem.as_deref().unwrap_or(image)));
            let view = golden.tensor(name).expect(name);
            let (values, _) = view.data().as_chunks::<4>();
            let expected: Vec<f32> = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
            check_pixels(family, &rule, &file.picture, &expected, &format!("{family}: {image}"));
            num_seen += 1;
        }
        let is_tiled =
            rule.size.layout([100, 100], rule.unit(), [None; 2]).expect("a layout").overview.is_some();
        assert!(num_seen >= if is_tiled { 5 } else { 10 }, "{family}: {num_seen}");
    }
}

fn check_pixels(family: &str, rule: &PixelRule, picture: &Picture, expected: &[f32], place: &str) {
    let tiles = rule.patches(picture).expect(place);
    let plan = rule.plan(picture.width, picture.height).expect(place);
    let grids: Vec<[u32; 2]> = plan.tiles.iter().map(|tile| tile.patches).collect();
    assert_eq!(tiles.iter().map(|tile| tile.grid).collect::<Vec<_>>(), grids, "{place}");
    let mut found: Vec<f32> = Vec::new();
    for tile in &tiles {
        let padded = if family == "lfm2-vl" { 36 * 768 } else { 0 }; // room for the most patches of a tile
        found.extend(in_family_order(family, rule, tile));
        found.resize(found.len().next_multiple_of(padded.max(1)), 0.0);
    }
    assert_eq!(found.len(), expected.len(), "{place}");
    // The resize of torchvision is not that of Pillow: up to two levels apart in an eighth of the values.
    let is_other = ["lfm2-vl", "gemma4-unified"].contains(&family);
    let level = 1.0 / 255.0 / rule.std[0];
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let most = differences.clone().fold(0.0, f32::max);
    let num_off = differences.filter(|difference| *difference > 1e-6).count();
    let allowed = if is_other { (2.01 * level, found.len() / 8) } else { (1e-6, 0) };
    assert!(
        most <= allowed.0 && num_off <= allowed.1,
        "{place}: off by {most}, {num_off} of {}",
        found.len()
    );
}

/// A tile's values in the order of its family's processor.
fn in_family_order(family: &str, rule: &PixelRule, tile: &Patches) -> Vec<f32> {
    let [rows, cols] = tile.grid.map(|side| side as usize);
    let (patch, merge) = (rule.patch as usize, rule.merge as usize);
    let value = |row: usize, col: usize, [channel, y, x]: [usize; 3]| {
        tile.values[(((row * cols + col) * 3 + channel) * patch + y) * patch + x]
    };
    let inside = |order: [usize; 3]| {
        let sizes = [3, patch, patch];
        (0..3 * patch * patch).map(move |at| {
            let [_, second, third] = order.map(|axis| sizes[axis]);
            let mut place = [0; 3];
            [place[order[0]], place[order[1]], place[order[2]]] =
                [at / (second * third), at / third % second, at % third];
            place
        })
    };
    let raster: Vec<[usize; 2]> = (0..rows * cols).map(|at| [at / cols, at % cols]).collect();
    match family {
        "qwen3-vl" | "qwen3-vl-moe" | "qwen3.5" | "qwen3.5-moe" | "qwen2.5-vl" | "glm4.1v" => {
            let mut blocks = raster;
            blocks.sort_by_key(|&[row, col]| [row / merge, col / merge, row % merge, col % merge]);
            let frames = if family == "glm4.1v" { 2 } else { 1 };
            let patches =
                blocks.iter().flat_map(|&[row, col]| (0..3).map(move |channel| (row, col, channel)));
            let plane = |(row, col, channel): (usize, usize, usize)| {
                (0..patch * patch).map(move |at| value(row, col, [channel, at / patch, at % patch]))
            };
            patches.flat_map(|place| (0..frames).flat_map(move |_| plane(place))).collect()
        }
        "gemma4" | "gemma4-e" | "gemma4-moe" | "gemma4-unified" | "lfm2-vl" => {
            let patches = raster.into_iter().flat_map(|place| inside([1, 2, 0]).map(move |at| (place, at)));
            patches.map(|([row, col], at)| value(row, col, at)).collect()
        }
        _ => {
            let (height, width) = (rows * patch, cols * patch);
            let pixels =
                (0..3 * height * width).map(|at| [at / (height * width), at / width % height, at % width]);
            pixels.map(|[c, y, x]| value(y / patch, x / patch, [c, y % patch, x % patch])).collect()
        }
    }
}

#[test]
fn limits_of_tokens_are_kept() {
    for (name, rule) in tables() {
        for most in [1, 70, 300, 1000] {
            let limited = PixelRule { most_tokens: Some(most), least_tokens: None, ..rule.clone() };
            limited.check().expect(name);
            for [width, height] in [[1, 1], [640, 480], [1920, 1080], [300, 900]] {
                let plan = limited.plan(width, height).expect(name);
                let one_tile = plan.tiles.len() == 1 && !matches!(rule.size, SizeRule::Area { .. });
                assert!(plan.num_tokens() <= most as usize || one_tile, "{name}: {width}x{height} of {most}");
            }
        }
    }
    let more =
        PixelRule { least_tokens: Some(100), ..rule(ResizeFilter::Bicubic, 14, 2, area(3_136, 12_845_056)) };
    assert!(more.plan(56, 56).expect("a plan").num_tokens() >= 100);
}

#[test]
fn nonsense_is_refused() {
    let sound = rule(ResizeFilter::Bicubic, 16, 2, area(65_536, 16_777_216));
    let refused = |change: &dyn Fn(&mut PixelRule)| {
        let mut rule = sound.clone();
        change(&mut rule);
        assert!(matches!(rule.check(), Err(ImageError::Rule(_))), "{rule:?}");
    };
    sound.check().expect("sound");
    refused(&|rule| rule.patch = 0);
    refused(&|rule| rule.merge = 0);
    refused(&|rule| rule.patch = u32::MAX);
    refused(&|rule| rule.std[1] = 0.0);
    refused(&|rule| rule.mean[2] = f32::NAN);
    refused(&|rule| (rule.least_tokens, rule.most_tokens) = (Some(2), Some(1)));
    refused(&|rule| rule.size = area(2, 1));
    refused(&|rule| rule.size = area(0, 0));
    refused(&|rule| rule.size = SizeRule::Fixed { width: 20, height: 64 });
    refused(&|rule| rule.size = SizeRule::EdgeTiles { longest: 64, tile: 0, split: true });
    refused(&|rule| rule.size = lfm2([1, 2], 64, [3, 2]));
    refused(&|rule| rule.size = SizeRule::LongestEdge { longest: 0 });
    refused(&|rule| rule.size = SizeRule::Budget { tokens: 0 });
    // Sound numbers that would make a small picture a large one.
    let large = rule(ResizeFilter::Bicubic, 16, 2, area(1 << 40, 1 << 40));
    large.check().expect("sound");
    assert!(matches!(large.plan(10, 10), Err(ImageError::Size(_))));
    let json = serde_json::to_string(&sound).expect("JSON");
    assert_eq!(serde_json::from_str::<PixelRule>(&json).expect("the same"), sound);
}
