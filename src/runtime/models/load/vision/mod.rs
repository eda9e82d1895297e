//! What a model sees: its vision tower in a checkpoint's folder, or in an mmproj file beside a GGUF.
//!
//! `towers` describes the towers of the families, `pixels` how they make patches of a picture. To add a family: a row in
//! [`FAMILIES`], and its functions there.

mod pixels;
#[cfg(test)]
mod tests;
mod towers;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use llmctl_image::{ImageLimits, PixelRule};
use serde_json::Value;

use super::files::ModelFiles;
use super::gguf::Gguf;
use super::gguf_config::gguf_config_reader;
use super::{Device, ImageUse, LoadOptions, hf};
use crate::backend::cpu::{Cpu, CpuOptions, CpuThreads};
use crate::images::{ImageText, RowRule, TextForm, TwoWay, VisionSpec};
use crate::memory::Demand;
use crate::model::arch::{ConfigReader, Description};
use crate::model::decoder::Matrix;
use crate::model::weights::MISSING;
use crate::tensor::{HostTensor, TensorSource};
use crate::text::Tokenizer;
use crate::vision::{ProjectorStep, Tower, TowerConfig, TowerParts, load_tower};
use llmctl_base::error::LoadError;
use llmctl_base::notice::Notice;
use llmctl_hub::Resolved;

/// One family of towers: its names in files, and the facts that no file states.
pub struct VisionFamily {
    pub name: &'static str,
    /// `model_type` values of config.json.
    model_types: &'static [&'static str],
    /// `clip.projector_type` of mmproj files.
    projector: &'static str,
    /// Architectures of GGUF files whose models all read images, besides those with sections of M-RoPE.
    gguf_names: &'static [&'static str],
    /// What the chat template prints for an image.
    printed: &'static str,
    /// Tokens that can stand for a row, the usual one first.
    placeholders: &'static [&'static str],
    form: fn() -> TextForm,
    tower: fn(&VisionSource) -> Result<TowerConfig, LoadError>,
    pixels: fn(&VisionSource, &TowerConfig) -> Result<PixelRule, LoadError>,
}

/// Where a tower's description is: in GGUF all three readers read the mmproj file.
pub struct VisionSource<'a> {
    vision: &'a ConfigReader,
    /// The whole config.json.
    top: &'a ConfigReader,
    pixels: &'a ConfigReader,
    tensors: &'a dyn TensorSource,
    decoder: &'a Description,
}

impl VisionSource<'_> {
    /// Describes a family's tower in the model's own files.
    fn files(&self, family: &'static VisionFamily, path: &Path) -> Result<VisionFiles, LoadError> {
        let config = (family.tower)(self)?;
        Ok(VisionFiles {
            family,
            pixels: (family.pixels)(self, &config)?,
            config,
            rows: row_rule(self.decoder),
            mmproj: None,
            has_audio: false,
            image_token: None,
            path: path.to_owned(),
        })
    }
}

fn between(before: &str, after: &str) -> TextForm {
    TextForm::Run { before: before.to_owned(), after: after.to_owned() }
}

const QWEN3_VL: VisionFamily = VisionFamily {
    name: "qwen3-vl",
    model_types: &["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"],
    projector: "qwen3vl_merger",
    gguf_names: &[],
    printed: "<|image_pad|>",
    placeholders: &["<|image_pad|>"],
    form: || between("", ""),
    tower: towers::qwen3_vl,
    pixels: pixels::qwen3_vl,
};

const GEMMA4: VisionFamily = VisionFamily {
    name: "gemma4",
    model_types: &["gemma4"],
    projector: "gemma4v",
    gguf_names: &["gemma4"],
    printed: "<|image|>",
    placeholders: &["<|image|>"],
    form: || between("<|image>", "<image|>"),
    tower: towers::gemma4,
    pixels: pixels::gemma4,
};

const GEMMA4_UNIFIED: VisionFamily = VisionFamily {
    name: "gemma4-unified",
    model_types: &["gemma4_unified"],
    projector: "gemma4uv",
    tower: towers::gemma4_unified,
    ..GEMMA4
};

/// Every family of towers that is computed.
const FAMILIES: &[VisionFamily] = &[
    QWEN3_VL,
    VisionFamily {
        name: "qwen2.5-vl",
        model_types: &["qwen2_5_vl"],
        projector: "qwen2.5vl_merger",
        tower: towers::qwen2_5_vl,
        pixels: pixels::qwen2_5_vl,
        ..QWEN3_VL
    },
    VisionFamily {
        name: "gemma3",
        model_types: &["gemma3"],
        projector: "gemma3",
        gguf_names: &[],
        printed: "<start_of_image>",
        // Published GGUF files have no token for a row; any unused one does, because its embedding is not read.
        placeholders: &["<image_soft_token>", "<unused98>"],
        form: || between("\n\n<start_of_image>", "<end_of_image>\n\n"),
        tower: towers::gemma3,
        pixels: pixels::gemma3,
    },
    GEMMA4,
    GEMMA4_UNIFIED,
    VisionFamily {
        name: "idefics3",
        model_types: &["idefics3", "smolvlm"],
        projector: "idefics3",
        gguf_names: &[],
        printed: "<image>",
        placeholders: &["<image>"],
        form: || TextForm::FencedTiles,
        tower: towers::idefics3,
        pixels: pixels::idefics3,
    },
    VisionFamily {
        name: "lfm2-vl",
        model_types: &["lfm2_vl"],
        projector: "lfm2",
        gguf_names: &[],
        printed: "<image>",
        placeholders: &["<image>"],
        form: || TextForm::NumberedTiles,
        tower: towers::lfm2_vl,
        pixels: pixels::lfm2_vl,
    },
    VisionFamily {
        name: "pixtral",
        model_types: &["mistral3"],
        projector: "pixtral",
        gguf_names: &["mistral3"],
        printed: "[IMG]",
        placeholders: &["[IMG]"],
        form: || TextForm::Rows { row_end: "[IMG_BREAK]".to_owned(), end: "[IMG_END]".to_owned() },
        tower: towers::pixtral,
        pixels: pixels::pixtral,
    },
    VisionFamily {
        name: "internvl",
        model_types: &["internvl"],
        projector: "internvl",
        gguf_names: &[],
        printed: "<IMG_CONTEXT>",
        placeholders: &["<IMG_CONTEXT>"],
        form: || between("<img>", "</img>"),
        tower: towers::internvl,
        pixels: pixels::internvl,
    },
    VisionFamily {
        name: "glm4v",
        model_types: &["glm4v", "glm46v"],
        projector: "glm4v",
        gguf_names: &[],
        printed: "<|image|>",
        placeholders: &["<|image|>"],
        form: || between("", ""),
        tower: towers::glm4v,
        pixels: pixels::glm4v,
    },
];

/// The files of a tower that can be computed. Opening them reads headers only.
pub struct VisionFiles {
    family: &'static VisionFamily,
    pub config: TowerConfig,
    pub pixels: PixelRule,
    /// What the decoder has to do with the rows.
    pub rows: RowRule,
    /// `None` if the tensors are the model's.
    mmproj: Option<Arc<Gguf>>,
    /// True if the mmproj file has an encoder of audio, which is not read.
    has_audio: bool,
    /// Token that the file gives a row.
    image_token: Option<u32>,
    path: PathBuf,
}

/// What a model sees, from headers alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisionFacts {
    /// Name of the tower's kind, e.g. `qwen3-vl`.
    pub tower: &'static str,
    /// Least and most tokens of an image.
    pub tokens: [u32; 2],
}

/// The images that a model reads, from headers alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sight {
    Images(VisionFacts),
    /// Its mmproj file is not here.
    FileMissing,
    /// It has no tower.
    Text,
    /// Why its tower cannot be used.
    Unusable(String),
}

impl Sight {
    /// Reads what the model of these files sees.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and the key or tensor at fault.
    pub fn of(resolved: &Resolved, images: ImageUse) -> Result<Self, LoadError> {
        let files = ModelFiles::of(resolved)?;
        let Some(description) = crate::model::arch::parse_config(files.config_reader())? else {
            return Ok(Self::Text);
        };
        Ok(match look(&files, &description, images)? {
            Found::Tower(vision) => Self::Images(VisionFacts {
                tower: vision.family.name,
                tokens: pixels::token_range(&vision.pixels),
            }),
            Found::NoFile if reads_images(&files, &description)? => Self::FileMissing,
            Found::NoFile | Found::Nothing => Self::Text,
            Found::Unusable(reason) => Self::Unusable(reason),
        })
    }
}

/// Returns whether the model of a GGUF file has a tower in a file of its own, as far as its keys say: M-RoPE is for images.
fn reads_images(files: &ModelFiles, description: &Description) -> Result<bool, LoadError> {
    let name = files.config_reader().architecture()?;
    let is_listed = |family: &VisionFamily| family.gguf_names.contains(&&*name);
    let has_one_stream = description.config.hyper.is_none();
    Ok(has_one_stream && row_rule(description).mrope || FAMILIES.iter().any(is_listed))
}

/// Finds the tower of a model. A model whose tower cannot be computed gets a notice, and reads text alone.
///
/// # Errors
/// [`LoadError`] naming the key or tensor at fault; [`LoadError::Unsupported`] for an mmproj file of another model.
pub fn find(
    files: &ModelFiles,
    description: &Description,
    images: ImageUse,
    notices: &mut Vec<Notice>,
) -> Result<Option<VisionFiles>, LoadError> {
    match look(files, description, images)? {
        Found::Tower(vision) => {
            notices.extend(vision.has_audio.then(|| Notice::NoAudio { path: vision.path.clone() }));
            Ok(Some(*vision))
        }
        Found::NoFile | Found::Nothing => Ok(None),
        Found::Unusable(reason) => {
            notices.push(Notice::NoVision { family: description.config.architecture.to_owned(), reason });
            Ok(None)
        }
    }
}

enum Found {
    Tower(Box<VisionFiles>),
    /// A GGUF file without an mmproj file.
    NoFile,
    /// The files have no vision part, or it is not to be used.
    Nothing,
    /// Why the tower is not computed.
    Unusable(String),
}

/// Takes a tensor that a tower lacks for a reason to read text alone.
fn usable<T>(tower: Result<T, LoadError>) -> Result<Result<T, String>, LoadError> {
    match tower {
        Err(LoadError::Tensor { tensor, message }) if message == MISSING => {
            Ok(Err(format!("the tower's tensor {tensor:?} is missing")))
        }
        tower => tower.map(Ok),
    }
}

fn look(files: &ModelFiles, description: &Description, images: ImageUse) -> Result<Found, LoadError> {
    let found = match (files.mmproj(), files.folder()) {
        _ if images.is_off => return Ok(Found::Nothing),
        (Some(_), _) if description.config.hyper.is_some() => {
            return Ok(Found::Unusable("models with several residual streams read no images".to_owned()));
        }
        (Some(path), _) => in_mmproj(path, description),
        (None, Some(folder)) => in_folder(folder, files.tensors(), description),
        (None, None) => return Ok(Found::NoFile),
    };
    let mut vision = match usable(found)? {
        Ok(Found::Tower(vision)) => vision,
        Ok(found) => return Ok(found),
        Err(reason) => return Ok(Found::Unusable(reason)),
    };
    vision.config.check()?;
    pixels::limit(&mut vision.pixels, images.tokens);
    let refuse = |error: llmctl_image::ImageError| {
        LoadError::malformed(&vision.path, "preprocessing of images", error.to_string())
    };
    vision.pixels.check().map_err(refuse)?;
    vision.check_width(description.config.hidden_size)?;
    Ok(Found::Tower(vision))
}

fn in_mmproj(path: &Path, description: &Description) -> Result<Found, LoadError> {
    let gguf = Arc::new(Gguf::open(path)?);
    let reader = gguf_config_reader(&gguf);
    if reader.architecture()? != "clip" {
        return Err(reader.unsupported("is no file of a vision tower (general.architecture is not clip)"));
    }
    // A file with an audio part too has a type for each.
    let [of_all, of_vision, of_audio] =
        ["projector_type", "vision.projector_type", "audio.projector_type"].map(|key| reader.string(key));
    let has_audio = of_audio?.is_some() || reader.flag("has_audio_encoder")? == Some(true);
    let projector = match (of_vision?, of_all?) {
        _ if has_audio && reader.flag("has_vision_encoder")? != Some(true) => {
            return Ok(Found::Unusable("its mmproj file has an encoder of audio alone".to_owned()));
        }
        (Some(projector), _) | (None, Some(projector)) => projector,
        (None, None) => return Err(reader.error("projector_type", "is missing")),
    };
    let Some(family) = FAMILIES.iter().find(|family| family.projector == projector) else {
        return Ok(Found::Unusable(format!("projector type {projector:?} is not supported")));
    };
    let [vision, top, pixels] = [&reader; 3];
    let source = VisionSource { vision, top, pixels, tensors: &*gguf, decoder: description };
    let mut files = source.files(family, path)?;
    if family.projector == GEMMA4_UNIFIED.projector {
        // The keys of the unified model's text are those of its relatives.
        files.rows.two_way = TwoWay::Whole;
    }
    Ok(Found::Tower(Box::new(VisionFiles { mmproj: Some(gguf.clone()), has_audio, ..files })))
}

fn in_folder(
    folder: &Path,
    tensors: &dyn TensorSource,
    description: &Description,
) -> Result<Found, LoadError> {
    let path = folder.join("config.json");
    let config = hf::config(folder)?;
    let Some(vision) = config.get("vision_config").filter(|vision| vision.is_object()).cloned() else {
        return Ok(Found::Nothing);
    };
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(family) = FAMILIES.iter().find(|family| family.model_types.contains(&model_type)) else {
        return Ok(Found::Unusable(format!("vision towers of model type {model_type:?} are not supported")));
    };
    let is_vision = |name: &str| ["vision", "visual"].iter().any(|part| name.contains(part));
    if !tensors.names().iter().any(|name| is_vision(name)) {
        return Ok(Found::Unusable("the folder has no tensors of the vision tower".to_owned()));
    }
    let reader = |value| ConfigReader::hugging_face(path.clone(), value);
    let (vision, top, pixels) = (&reader(vision), &reader(config), &preprocessor(folder)?);
    let token = match top.count("image_token_id")? {
        None => top.count("image_token_index")?,
        given => given,
    };
    let source = VisionSource { vision, top, pixels, tensors, decoder: description };
    let image_token = token.and_then(|token| u32::try_from(token).ok());
    Ok(Found::Tower(Box::new(VisionFiles { image_token, ..source.files(family, &path)? })))
}

/// Returns what the decoder does with rows of images.
fn row_rule(description: &Description) -> RowRule {
    let config = &description.config;
    RowRule { two_way: config.two_way, mrope: config.ropes.iter().any(|rope| rope.sections.is_some()) }
}

/// Reads how pictures are prepared: preprocessor_config.json, or the part of processor_config.json that newer folders have.
fn preprocessor(folder: &Path) -> Result<ConfigReader, LoadError> {
    let path = folder.join("preprocessor_config.json");
    if let Some(value) = hf::optional_json(&path)? {
        return Ok(ConfigReader::hugging_face(path, value));
    }
    let path = folder.join("processor_config.json");
    let value = hf::optional_json(&path)?.and_then(|value| value.get("image_processor").cloned());
    Ok(ConfigReader::hugging_face(path, value.unwrap_or_default()))
}

impl VisionFiles {
    /// Checks that the projector makes rows of the decoder's width.
    fn check_width(&self, width: usize) -> Result<(), LoadError> {
        let made = self.config.projector.iter().rev().find_map(|step| match step {
            ProjectorStep::Linear { out, .. } | ProjectorStep::Gated { out, .. } => Some(*out),
            _ => None,
        });
        match made {
            Some(made) if made != width => Err(LoadError::Unsupported {
                path: self.path.clone(),
                message: format!(
                    "the vision tower makes rows of {made} values, but the model's have {width}: it belongs to another model"
                ),
            }),
            _ => Ok(()),
        }
    }

    pub fn tensors<'a>(&'a self, files: &'a ModelFiles) -> &'a dyn TensorSource {
        match self.mmproj.as_deref() {
            Some(gguf) => gguf,
            None => files.tensors(),
        }
    }

    /// Returns how the engine and turns see the tower; the fingerprint comes with its weights.
    ///
    /// # Errors
    /// [`LoadError::Tokenizer`] if the tokenizer has no token for the rows of an image.
    pub fn spec(&self, tokenizer: &Tokenizer) -> Result<VisionSpec, LoadError> {
        let usual = || self.family.placeholders.iter().find_map(|token| tokenizer.token_to_id(token));
        let placeholder = self.image_token.or_else(usual);
        let text = placeholder.and_then(|id| tokenizer.id_to_token(id));
        let (Some(placeholder), Some(text)) = (placeholder, text) else {
            let message = format!("has no token {:?} for images", self.family.placeholders[0]);
            return Err(LoadError::Unsupported { path: self.path.clone(), message });
        };
        Ok(VisionSpec {
            tower: self.family.name.to_owned(),
            fingerprint: String::new(),
            pixels: self.pixels.clone(),
            rows: self.rows,
            placeholder,
            text: ImageText {
                printed: self.family.printed.to_owned(),
                placeholder: text.to_owned(),
                form: (self.family.form)(),
            },
        })
    }

    /// Reads the tower's weights. `workers` are threads that the model shares. A tower that lacks a tensor gets a notice.
    ///
    /// # Errors
    /// Those of [`Self::spec`] and [`load_tower`].
    pub fn load(
        self,
        files: &ModelFiles,
        options: &LoadOptions,
        workers: Option<&CpuThreads>,
        tokenizer: &Tokenizer,
        notices: &mut Vec<Notice>,
    ) -> Result<Option<Box<dyn Tower>>, LoadError> {
        let cpu_options = match options.device {
            Device::Cpu(options) => options,
            Device::Candle(_) => {
                CpuOptions::new(std::thread::available_parallelism().map_or(1, |threads| threads.get()))
            }
        };
        let cpu = match workers {
            Some(workers) => Cpu::sharing(cpu_options, workers.clone()),
            None => Cpu::with(cpu_options),
        };
        let convert = |name: &str, _: Matrix, tensor: HostTensor| {
            let wanted = tower_dtype(options, tensor.dtype);
            super::quantize::convert(name, &tensor, wanted)
        };
        let tower = load_tower(TowerParts {
            spec: self.spec(tokenizer)?,
            config: self.config.clone(),
            source: self.tensors(files),
            convert: &convert,
            cpu: cpu.map_err(super::backend)?,
        });
        let family = self.family.name.to_owned();
        let blind = |reason| notices.push(Notice::NoVision { family, reason });
        Ok(usable(tower)?.map_err(blind).ok())
    }

    /// Adds the tower's memory: its weights, the activations of the largest image, and its decoded pixels.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] for rows that are not whole blocks.
    pub fn add_demand(
        &self,
        demand: Demand,
        files: &ModelFiles,
        options: &LoadOptions,
    ) -> Result<Demand, LoadError> {
        let tensors = self.tensors(files);
        let parts: &[&str] = match self.mmproj {
            Some(_) => &["v.", "mm."],
            None => &["vision", "visual", "multi_modal_projector", "connector"],
        };
        let is_ours = |name: &str| parts.iter().any(|part| name.contains(part)) && !name.starts_with("mm.a.");
        let mut weights = demand.weights;
        for name in tensors.names().iter().filter(|name| is_ours(name)) {
            let Some((shape, stored)) = tensors.describe(name) else { continue };
            let dtype = super::quantize::converted_dtype(&shape, stored, tower_dtype(options, stored));
            let bytes = super::weight_bytes(options.device, dtype, &shape)
                .map_err(|message| LoadError::Tensor { tensor: name.to_string(), message })?;
            weights = weights.saturating_add(bytes as u64);
        }
        let config = &self.config;
        let patches = u64::from(pixels::token_range(&self.pixels)[1]) * (config.merge * config.merge) as u64;
        let per_patch = 6 * config.hidden_size
            + 2 * config.intermediate_size
            + 3 * config.patches.size * config.patches.size;
        let picture = 3 * ImageLimits::default().pixels;
        let fixed =
            demand.fixed.saturating_add(patches.saturating_mul(4 * per_patch as u64).saturating_add(picture));
        Ok(Demand { weights, fixed, ..demand })
    }
}

/// Returns the type that a tower's matrix is kept in: a float type that is asked for, else its own. Towers are small beside
/// decoders, and their products are not quantised on load.
pub fn tower_dtype(options: &LoadOptions, stored: llmctl_kernel::Dtype) -> llmctl_kernel::Dtype {
    options.dtype.filter(|_| !stored.is_quantized()).unwrap_or(stored)
}
