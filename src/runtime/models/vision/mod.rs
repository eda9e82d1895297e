//! Vision towers: patches of a picture to rows that take the place of token embeddings.
//!
//! A tower is loaded beside the decoder and computes a picture in slices, so that the engine can run steps in between.

mod config;
#[cfg(test)]
pub mod fixtures;
mod job;
mod load;
mod parts;
#[cfg(test)]
mod tests;
mod tile;

use std::sync::Arc;

use parking_lot::Mutex;

pub use config::*;
use llmctl_base::error::{LoadError, Result};
use llmctl_image::Patches;

use crate::backend::cpu::Cpu;
use crate::images::{ImageRows, VisionSpec};
use crate::model::decoder::Convert;
use crate::tensor::TensorSource;
use job::{Job, Vit};
use load::TowerFile;

/// A loaded vision tower with its projector. The engine owns it and calls it from its thread.
pub trait Tower: Send {
    fn spec(&self) -> &VisionSpec;

    /// Starts the computation of an image's tiles.
    ///
    /// # Errors
    /// [`llmctl_base::error::Error::Backend`] for patches of another form than the tower's rule makes.
    fn begin(&self, tiles: Vec<Patches>) -> Result<Box<dyn TowerJob>>;
}

/// The computation of one image, in slices. Slices change no bit of the result.
pub trait TowerJob: Send {
    /// Computes the next slice, about as much as a step of [`crate::model::STEP_TOKENS`] rows. Returns the rows after the
    /// last one.
    ///
    /// # Errors
    /// [`llmctl_base::error::Error::Backend`].
    fn advance(&mut self) -> Result<Option<ImageRows>>;

    /// Returns the number of slices that are done, and of all.
    fn progress(&self) -> (usize, usize);
}

/// The inputs of a tower's construction.
pub struct TowerParts<'a> {
    pub config: TowerConfig,
    pub source: &'a dyn TensorSource,
    pub convert: Convert<'a>,
    pub cpu: Cpu,
    /// Its fingerprint is replaced.
    pub spec: VisionSpec,
}

/// Reads a tower's weights.
///
/// # Errors
/// [`LoadError::Tensor`] naming a setting that is out of range, or a tensor that is missing or has another size.
pub fn load_tower(parts: TowerParts<'_>) -> Result<Box<dyn Tower>, LoadError> {
    let TowerParts { config, source, convert, cpu, spec } = parts;
    config.check()?;
    let file = TowerFile::new(&cpu, source, convert);
    let weights = file.weights(&config)?;
    let spec = VisionSpec { fingerprint: file.fingerprint(&config), ..spec };
    Ok(Box::new(Vision { spec, vit: Arc::new(Mutex::new(Vit { cpu, config, weights })) }))
}

struct Vision {
    spec: VisionSpec,
    vit: Arc<Mutex<Vit>>,
}

impl Tower for Vision {
    fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    fn begin(&self, tiles: Vec<Patches>) -> Result<Box<dyn TowerJob>> {
        Ok(Box::new(Job::new(self.vit.clone(), tiles, None)?))
    }
}
