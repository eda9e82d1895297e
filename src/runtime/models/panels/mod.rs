//! Packed weights kept on disk, so that a later start reads them instead of packing them again.
//!
//! A [`PanelStore`] serves one load: the backend asks it for each matrix, in the order of loading, and tells
//! it what it loaded. After the load a thread of low priority writes what was packed, and packs first what no
//! step has needed yet. A matrix is copied from the mapped file to huge pages: decoding from the file's own 4
//! KiB pages is 5% (F16) to 9% (Q8_0) slower, and a copy takes less time than packing, but for Q8_0 (all measured).
//!
//! Invariants: the bytes that this process computes with were compared with their checksums after they were
//! copied from a file, and a file that differs at load is removed and written again; a matrix that differs
//! later is packed from the model's file. A file has its name only when it is whole and synced. Everything
//! here may be deleted at any time. Knows no model format; the caller's key says what the panels are of.

mod file;
mod folder;
mod writer;

use std::io;
use std::path::PathBuf;

use parking_lot::Mutex;

pub use file::PanelsInFile;
use file::{PanelFile, PanelLabel};
pub use folder::{KeptPanels, kept_panels};
use llmctl_base::notice::Notice;
use llmctl_kernel::Dtype;
use llmctl_kernel::memory::{Arena, PanelMemory};
use llmctl_kernel::pool::Pool;
use writer::PanelWriter;

/// Bytes of panels below which none are kept: packing them takes less time than a person notices.
pub const LEAST_BYTES: u64 = 64 << 20;

/// Place of packed weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PanelPlace {
    pub folder: PathBuf,
    /// Bytes of all files there; those used longest ago are removed first.
    pub limit_bytes: u64,
    /// Models whose panels take less are not kept.
    pub least_bytes: u64,
}

/// The panels of a loaded matrix.
pub enum LoadedPanels {
    /// Panels that are in memory.
    Ready(PanelMemory),
    /// Panels that are packed at their first use.
    Late { len: usize, get: Box<dyn Fn() -> io::Result<PanelMemory> + Send> },
}

impl LoadedPanels {
    fn len(&self) -> usize {
        match self {
            LoadedPanels::Ready(memory) => memory.len(),
            LoadedPanels::Late { len, .. } => *len,
        }
    }

    /// # Errors
    /// If they could not be packed.
    fn get(&self) -> io::Result<PanelMemory> {
        match self {
            LoadedPanels::Ready(memory) => Ok(memory.clone()),
            LoadedPanels::Late { get, .. } => get(),
        }
    }
}

/// Returns the label of a matrix whose panels are kept. `None` for Q8_0: its bytes are only put into another order, which takes less
/// time than a copy with checksums (measured).
fn label_of(dtype: Dtype, shape: [usize; 2]) -> Option<PanelLabel> {
    (dtype != Dtype::Q8_0).then(|| PanelLabel { dtype: dtype.name().to_owned(), shape })
}

/// The kept panels of one model, and those that a load packs.
pub struct PanelStore {
    place: PanelPlace,
    key: String,
    state: Mutex<PanelState>,
}

#[derive(Default)]
struct PanelState {
    /// The model's file, until it turns out not to fit.
    file: Option<PanelFile>,
    /// Damage of the file, in words.
    damage: Option<String>,
    /// Matrices so far, in the order of loading.
    loaded: Vec<(PanelLabel, LoadedPanels)>,
    /// Writes what was packed; waits for it a moment when the model is dropped.
    writer: Option<PanelWriter>,
}

impl PanelStore {
    /// Opens the panels that are kept under `key`, lowercase hexadecimal digits that differ wherever the panels might.
    pub fn open(place: PanelPlace, key: String) -> PanelStore {
        let mut state = PanelState::default();
        match PanelFile::open(&folder::path_of(&place.folder, &key)) {
            Ok(file) => state.file = file,
            Err(damage) => state.damage = Some(damage),
        }
        PanelStore { place, key, state: Mutex::new(state) }
    }

    fn path(&self) -> PathBuf {
        folder::path_of(&self.place.folder, &self.key)
    }

    /// Returns the next matrix of the load, in `memory`, if the file has it; it must be of this type and shape. All threads of
    /// `pool` copy it and compare it with its checksums.
    pub fn next(&self, dtype: Dtype, shape: [usize; 2], memory: &Arena, pool: &Pool) -> Option<PanelMemory> {
        self.next_by(dtype, shape, |file, index, label| file.read(index, label, memory, pool))
    }

    /// Returns the next matrix of the load as [`Self::next`] does, but checked only, where the file has it.
    pub fn next_in_place(&self, dtype: Dtype, shape: [usize; 2], pool: &Pool) -> Option<PanelsInFile> {
        self.next_by(dtype, shape, |file, index, label| file.check(index, label, pool))
    }

    fn next_by<T>(
        &self,
        dtype: Dtype,
        shape: [usize; 2],
        read: impl FnOnce(&PanelFile, usize, &PanelLabel) -> Result<T, String>,
    ) -> Option<T> {
        let label = label_of(dtype, shape)?;
        let mut state = self.state.lock();
        match read(state.file.as_ref()?, state.loaded.len(), &label) {
            Ok(panels) => Some(panels),
            Err(damage) => {
                state.damage = Some(damage);
                state.file = None;
                None
            }
        }
    }

    /// Takes note of a loaded matrix, whether [`Self::next`] had it, it was packed, or it will be.
    pub fn loaded(&self, dtype: Dtype, shape: [usize; 2], panels: LoadedPanels) {
        self.state.lock().loaded.extend(label_of(dtype, shape).map(|label| (label, panels)));
    }

    /// Ends the load. Starts to write its panels if the file lacks any, unless they are few, too many, or being written by
    /// another process.
    pub fn finish(&self) -> Vec<Notice> {
        let mut state = self.state.lock();
        let loaded = std::mem::take(&mut state.loaded);
        if let Some(file) = state.file.take() {
            if file.len() == loaded.len() {
                folder::note_use(&self.path());
                return Vec::new();
            }
            state.damage = Some("it has more matrices than the model".to_owned());
        }
        let mut notices = Vec::new();
        if let Some(reason) = state.damage.take() {
            folder::remove(&self.path());
            notices.push(Notice::DamagedPanels { path: self.path(), reason });
        }
        match self.start_writer(loaded) {
            Ok(writer) => state.writer = writer,
            Err(error) => {
                let (path, reason) = (self.place.folder.clone(), error.to_string());
                notices.push(Notice::PanelsNotKept { path, reason });
            }
        }
        notices
    }

    fn start_writer(&self, loaded: Vec<(PanelLabel, LoadedPanels)>) -> io::Result<Option<PanelWriter>> {
        let bytes: u64 = loaded.iter().map(|(_, panels)| panels.len() as u64).sum();
        let PanelPlace { folder, limit_bytes, least_bytes } = &self.place;
        if bytes < *least_bytes
            || loaded.is_empty()
            || !folder::prepare(folder, *limit_bytes, bytes, &self.key)?
        {
            return Ok(None);
        }
        PanelWriter::start(&folder::unfinished_path(folder, &self.key), &self.path(), loaded)
    }
}
