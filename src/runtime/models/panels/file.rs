//! A file of packed weights:
//!
//! ```text
//! name and version, 64 bytes
//! panels of each matrix, in the order of loading, each from a multiple of 64 on
//! index: JSON, an object with the key and the label, place and checksums of each matrix
//! end: the index's start and CRC-32, and the first 16 bytes once more, 32 bytes
//! ```
//!
//! The index comes last, so that a file that is cut off anywhere has none. Each MiB of panels has a CRC-32 of
//! its own, so that all threads check a matrix together, at the speed of memory.

use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::tensor::SharedBytes;
use llmctl_base::error::LoadError;
use llmctl_kernel::memory::{Arena, PanelMemory};
use llmctl_kernel::pool::Pool;

/// Name and version of the format.
const MAGIC: &[u8; 16] = b"llmctl panels 1\n";

/// Offset of the first panels, and a divisor of the other offsets: a cache line.
pub const ALIGNMENT: usize = 64;

/// Bytes under one checksum.
pub const PIECE_BYTES: usize = 1 << 20;

/// Bytes of the end.
const END_BYTES: usize = 32;

/// Identity of a matrix, compared with the one that is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PanelLabel {
    pub dtype: String,
    pub shape: [usize; 2],
}

/// One matrix of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PanelEntry {
    #[serde(flatten)]
    pub label: PanelLabel,
    /// Offset in the file.
    pub start: usize,
    pub len: usize,
    /// The CRC-32 of each [`PIECE_BYTES`].
    pub checksums: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct PanelIndex {
    /// The key whose panels these are, which is also the file's name.
    key: String,
    matrices: Vec<PanelEntry>,
}

/// A mapped file whose index was checked; its panels were not.
pub struct PanelFile {
    bytes: SharedBytes,
    entries: Vec<PanelEntry>,
}

impl PanelFile {
    /// Maps a file; `None` if there is none.
    ///
    /// # Errors
    /// The end of a sentence that says what is wrong with the file.
    pub fn open(path: &Path) -> Result<Option<PanelFile>, String> {
        let bytes = match SharedBytes::map_file(path) {
            Err(LoadError::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error.to_string()),
            Ok(bytes) => bytes,
        };
        let index = index_of(&bytes).ok_or("it is cut off, or of another version")?;
        let index: PanelIndex =
            serde_json::from_slice(index).map_err(|error| format!("its index: {error}"))?;
        if path.file_stem().is_none_or(|stem| stem != index.key.as_str()) {
            return Err(format!("it is the file of {}", index.key));
        }
        let entries = index.matrices;
        let fits = |entry: &PanelEntry| {
            entry.start.is_multiple_of(ALIGNMENT)
                && entry.start.checked_add(entry.len).is_some_and(|end| end <= bytes.len())
                && entry.checksums.len() == entry.len.div_ceil(PIECE_BYTES)
        };
        match entries.iter().all(fits) {
            true => Ok(Some(PanelFile { bytes, entries })),
            false => Err("its index names places that it does not have".to_owned()),
        }
    }

    /// Returns the number of matrices.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Copies the panels of matrix `index` to `memory`, and compares them with their label and their checksums.
    ///
    /// # Errors
    /// The end of a sentence that says what is wrong with the file.
    pub fn read(
        &self,
        index: usize,
        label: &PanelLabel,
        memory: &Arena,
        pool: &Pool,
    ) -> Result<PanelMemory, String> {
        let panels = self.matrix(index, label)?;
        let mut copy =
            memory.zeroed(panels.num_bytes()).map_err(|error| format!("no memory for it: {error}"))?;
        match panels.copy_to(&mut copy, pool) {
            true => Ok(copy.into()),
            false => Err(differing(index)),
        }
    }

    /// Compares the panels of matrix `index` with their label and their checksums, and leaves them where they are.
    ///
    /// # Errors
    /// The end of a sentence that says what is wrong with the file.
    pub fn check(&self, index: usize, label: &PanelLabel, pool: &Pool) -> Result<PanelsInFile, String> {
        let panels = self.matrix(index, label)?;
        let differs = AtomicBool::new(false);
        pool.for_each(panels.checksums.len(), |piece| {
            let end = panels.num_bytes().min((piece + 1) * PIECE_BYTES);
            if crc32fast::hash(&panels.bytes[piece * PIECE_BYTES..end]) != panels.checksums[piece] {
                differs.store(true, Ordering::Relaxed);
            }
        });
        panels.bytes.release(0..panels.num_bytes()); // until they are used
        match differs.into_inner() {
            false => Ok(panels),
            true => Err(differing(index)),
        }
    }

    /// Returns the panels of matrix `index`, which were not checked.
    fn matrix(&self, index: usize, label: &PanelLabel) -> Result<PanelsInFile, String> {
        let entry = self.entries.get(index).ok_or("it has fewer matrices than the model")?;
        match entry.label == *label {
            true => {
                let bytes = self.bytes.slice(entry.start, entry.len);
                Ok(PanelsInFile { bytes, checksums: entry.checksums.clone() })
            }
            false => Err(format!("matrix {index} is {:?}, not {label:?}", entry.label)),
        }
    }
}

/// The panels of one matrix in a mapped file.
pub struct PanelsInFile {
    pub bytes: SharedBytes,
    /// The CRC-32 of each [`PIECE_BYTES`].
    pub checksums: Vec<u32>,
}

impl PanelsInFile {
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Copies the panels to memory of their length. Returns whether the copy has their checksums: the system reads what it has
    /// dropped from memory again, and a disk or another program may have changed it since an earlier check.
    #[must_use]
    pub fn copy_to(&self, memory: &mut [u8], pool: &Pool) -> bool {
        let differs = AtomicBool::new(false);
        pool.chunks_mut(memory, PIECE_BYTES, |piece, copy| {
            copy.copy_from_slice(&self.bytes[piece * PIECE_BYTES..][..copy.len()]);
            if crc32fast::hash(copy) != self.checksums[piece] {
                differs.store(true, Ordering::Relaxed);
            }
        });
        self.bytes.release(0..self.num_bytes());
        !differs.into_inner()
    }
}

fn differing(index: usize) -> String {
    format!("matrix {index} does not have its checksum")
}

/// Returns the index of a whole file.
fn index_of(bytes: &[u8]) -> Option<&[u8]> {
    let (start, end) = bytes.split_last_chunk::<END_BYTES>()?;
    let start_of_index = usize::try_from(u64::from_le_bytes(*end.first_chunk()?)).ok()?;
    let checksum = u32::from_le_bytes(*end[8..].first_chunk()?);
    let index = start.get(start_of_index..)?;
    let is_whole = bytes.starts_with(MAGIC) && end.ends_with(MAGIC) && crc32fast::hash(index) == checksum;
    is_whole.then_some(index)
}

/// Returns where the panels of each matrix begin, given their lengths, and where the index does.
pub fn places(lens: impl Iterator<Item = usize>) -> (Vec<usize>, usize) {
    let mut end = ALIGNMENT;
    let starts = lens.map(|len| {
        let start = end;
        end = (start + len).next_multiple_of(ALIGNMENT);
        start
    });
    (starts.collect(), end)
}

/// Writes the beginning of a file that has none yet.
///
/// # Errors
/// Errors of writing.
pub fn write_start(file: &mut (impl Write + Seek)) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    file.write_all(MAGIC)
}

/// Writes index and end of the panels of `key` from `start` on, which [`places`] has returned.
///
/// # Errors
/// Errors of writing.
pub fn write_index(
    file: &mut (impl Write + Seek),
    key: String,
    start: usize,
    matrices: Vec<PanelEntry>,
) -> io::Result<()> {
    let index = serde_json::to_vec(&PanelIndex { key, matrices })?;
    let mut end = [0; END_BYTES];
    end[..8].copy_from_slice(&(start as u64).to_le_bytes());
    end[8..12].copy_from_slice(&crc32fast::hash(&index).to_le_bytes());
    end[16..].copy_from_slice(MAGIC);
    file.seek(SeekFrom::Start(start as u64))?;
    file.write_all(&index)?;
    file.write_all(&end)
}
