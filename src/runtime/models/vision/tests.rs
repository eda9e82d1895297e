//! Towers of the fixture families against transformers' rows for the same patches.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use llmctl_image::Patches;
use llmctl_kernel::isa::isa;
use llmctl_kernel::{Dtype, Isa};

use super::TowerJob;
use super::config::*;
use super::fixtures::{self, Golden, largest_difference};
use super::job::{Job, Vit};
use super::load::TowerFile;
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::images::ImageRows;
use crate::load::safetensors::Safetensors;
use crate::load::vision::find;
use crate::load::{ImageUse, ModelFiles, quantize};
use crate::model::arch::parse_config;
use llmctl_base::error::LoadError;
use llmctl_hub::ModelSource;

/// The families whose processors make one tile of an image.
const FAMILIES: [&str; 11] = [
    "gemma3",
    "gemma4",
    "gemma4-e",
    "gemma4-moe",
    "gemma4-unified",
    "glm4.1v",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5",
    "qwen3.5-moe",
];

/// Returns the checkpoints with their towers and what the reference computed.
fn families() -> impl Iterator<Item = (&'static str, PathBuf, TowerConfig, Golden)> {
    fixtures::folder()
        .into_iter()
        .flat_map(|folder| FAMILIES.map(|family| (family, folder.join(family))))
        .map(|(family, folder)| {
            let files = ModelFiles::open(&ModelSource::Folder(folder.clone())).unwrap();
            let description = parse_config(files.config_reader()).unwrap().unwrap();
            let found = find(&files, &description, ImageUse::default(), &mut Vec::new()).unwrap();
            let golden = Golden::read(&folder);
            (family, folder, found.unwrap().config, golden)
        })
}

/// Returns the names of the images that a prompt has alone.
fn images(folder: &Path) -> Vec<String> {
    let prompts = fixtures::prompts(folder);
    prompts.keys().filter_map(|name| Some(name.strip_prefix("image:")?.to_owned())).collect()
}

/// Returns an image's patches row by row, whatever the processor's order.
fn patches(golden: &Golden, image: &str, config: &TowerConfig) -> Patches {
    let (size, merge) = (config.patches.size, config.merge);
    let name = format!("image/{image}/pixel_values");
    let (shape, values) = (golden.shape(&name).unwrap(), golden.floats(&name));
    let area = size * size;
    let place: Box<dyn Fn([usize; 2], [usize; 3]) -> usize>;
    let grid;
    let numbers = |part: &str| golden.integers(&format!("image/{image}/{part}"));
    let (thw, places) = (numbers("image_grid_thw"), numbers("image_position_ids"));
    if !thw.is_empty() {
        grid = [thw[1] as usize, thw[2] as usize];
        let frames = shape[1] / area / 3;
        place = Box::new(move |[row, column], [channel, y, x]| {
            let block = row / merge * (grid[1] / merge) + column / merge;
            let patch = block * merge * merge + row % merge * merge + column % merge;
            (patch * 3 + channel) * frames * area + y * size + x
        });
    } else if !places.is_empty() {
        let most = |axis: usize| *places.iter().skip(axis).step_by(2).max().unwrap() as usize + 1;
        grid = [most(1), most(0)];
        place = Box::new(move |[row, column], [channel, y, x]| {
            (((row * grid[1] + column) * size + y) * size + x) * 3 + channel
        });
    } else {
        grid = [shape[2] / size, shape[3] / size];
        let [height, width] = [shape[2], shape[3]];
        place = Box::new(move |[row, column], [channel, y, x]| {
            (channel * height + row * size + y) * width + column * size + x
        });
    }
    let patches = (0..grid[0]).flat_map(|row| (0..grid[1]).map(move |column| [row, column]));
    let pixels: Vec<[usize; 3]> = (0..3 * area).map(|at| [at / area, at % area / size, at % size]).collect();
    let values =
        patches.flat_map(|patch| pixels.iter().map(|pixel| values[place(patch, *pixel)]).collect::<Vec<_>>());
    Patches { grid: grid.map(|side| side as u32), values: values.collect() }
}

/// Loads a family's tower, its matrices as they are or in another type.
fn tower(
    folder: &Path,
    config: &TowerConfig,
    threads: usize,
    isa: Isa,
    dtype: Option<Dtype>,
) -> Result<Vit, LoadError> {
    let source = Safetensors::open(folder)?;
    let options = CpuOptions { threads, threads_batch: threads, isa, ..CpuOptions::new(1) };
    let cpu = Cpu::with(options).unwrap();
    config.check()?;
    let convert = |name: &str, _, tensor: crate::tensor::HostTensor| {
        let wanted = dtype.unwrap_or(tensor.dtype);
        quantize::convert(name, &tensor, wanted)
    };
    let weights = TowerFile::new(&cpu, &source, &convert).weights(config)?;
    Ok(Vit { cpu, config: config.clone(), weights })
}

fn rows(vit: Vit, tiles: Vec<Patches>, slice_work: Option<usize>) -> (ImageRows, usize) {
    let mut job = Job::new(Arc::new(Mutex::new(vit)), tiles, slice_work).unwrap();
    let mut slices = 0;
    loop {
        slices += 1;
        let rows = job.advance().unwrap();
        let (done, all) = job.progress();
        assert_eq!(rows.is_some(), done == all);
        if let Some(rows) = rows {
            return (rows, slices);
        }
    }
}

#[test]
fn rows_and_deepstack_are_the_references() {
    let mut wrong = Vec::new();
    for (family, folder, config, golden) in families() {
        assert!(images(&folder).len() >= 9, "{family}");
        for (dtype, most) in [(Some(Dtype::F32), 1e-4), (None, 1e-2)] {
            for image in images(&folder) {
                let patches = patches(&golden, &image, &config);
                let vit = tower(&folder, &config, 2, isa(), dtype).unwrap();
                let (rows, _) = rows(vit, vec![patches], None);
                let expected = |what: &str| golden.floats(&format!("prompt/image:{image}/{what}"));
                let worst = largest_difference(&rows.embeddings, &expected("image_rows"))
                    .max(largest_difference(&rows.deep.concat(), &expected("deepstack")));
                if worst > most {
                    wrong.push(format!("{family} {image} {dtype:?}: {worst:e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn assert_same_bits(got: &ImageRows, expected: &ImageRows, what: &str) {
    let bits = |rows: &ImageRows| -> Vec<u32> {
        rows.embeddings.iter().chain(rows.deep.iter().flatten()).map(|value| value.to_bits()).collect()
    };
    assert!(!got.is_empty() && bits(got) == bits(expected), "{what}");
}

#[test]
fn threads_processors_slices_and_other_jobs_change_no_bit() {
    for (family, folder, config, golden) in families() {
        let tiles = || ["large.png", "noise.png"].map(|image| patches(&golden, image, &config)).to_vec();
        let load = |threads, isa| tower(&folder, &config, threads, isa, None).unwrap();
        let (expected, slices) = rows(load(1, Isa::Scalar), tiles(), None);
        assert_eq!(slices, 1, "{family}: small tiles take one slice");
        for isa in Isa::available() {
            for threads in [1, 2] {
                let (got, slices) = rows(load(threads, isa), tiles(), Some(1));
                assert!(slices >= 2 + 2 * config.num_layers, "{family}: {slices} slices");
                assert_same_bits(&got, &expected, &format!("{family} {isa:?} {threads} threads"));
            }
        }
        let vit = Arc::new(Mutex::new(load(2, Isa::Scalar)));
        let mut jobs = [tiles(), vec![patches(&golden, "tall.png", &config)]]
            .map(|tiles| Job::new(vit.clone(), tiles, Some(1)).unwrap());
        let [mut got, mut other] = [None, None];
        while got.is_none() {
            got = jobs[0].advance().unwrap();
            if other.is_none() {
                other = jobs[1].advance().unwrap();
            }
        }
        assert_same_bits(&got.unwrap(), &expected, &format!("{family} beside another"));
    }
}

/// Spoils a setting.
type Change = fn(&mut TowerConfig);

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let cases: [(&str, Change); 8] = [
        ("merge", |config| config.merge = 0),
        ("num_heads", |config| config.num_heads = 0),
        ("num_kv_heads", |config| config.num_kv_heads = 3),
        ("head_dim", |config| config.head_dim = 18),
        ("window", |config| config.windows = Some(Windows { side: 0, full_layers: Vec::new() })),
        ("patch_size", |config| config.patches.size = 0),
        ("position_embedding", |config| {
            config.positions = Positions::Square { side: 0, resampling: Resampling::Cubic };
        }),
        ("deepstack layer", |config| config.deepstack[0].layer = 4),
    ];
    let Some((.., sound, _)) = families().find(|(family, ..)| *family == "qwen3-vl") else { return };
    assert!(sound.check().is_ok());
    for (key, change) in cases {
        let mut config = sound.clone();
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains(&format!("vision {key}\"")), "{key}: {error}");
    }
}

#[test]
fn patches_of_another_form_are_refused() {
    let Some((_, folder, config, golden)) = families().next() else { return };
    let vit = Arc::new(Mutex::new(tower(&folder, &config, 1, Isa::Scalar, None).unwrap()));
    let patches = patches(&golden, "noise.png", &config);
    for (grid, len) in [([0, 4], 0), ([4, 3], 12), ([4, 4], 15), ([8, 4], 32), ([u32::MAX; 2], 16)] {
        let values = patches.values.iter().copied().cycle().take(len * 3 * 14 * 14).collect();
        assert!(Job::new(vit.clone(), vec![Patches { grid, values }], None).is_err(), "{grid:?}");
    }
    assert!(Job::new(vit, vec![patches], None).is_ok());
}
