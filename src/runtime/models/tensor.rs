//! Tensors as stored in files: a type, a shape, and bytes that are mapped or owned.
//!
//! `TensorSource` separates file formats from models: `load/` implements it for GGUF and safetensors,
//! `model/` reads through it. Invariants: a tensor's constructor ([`HostTensor::new`]) has checked the bytes
//! against shape and type, and they start at an address aligned for the type's scalars, so that a kernel may
//! view them as `f32` or `f16`. Knows no file format.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Mmap, MmapOptions};

use llmctl_base::error::LoadError;
use llmctl_kernel::Dtype;

/// Alignment of every owned buffer in bytes; suits any scalar in a file.
const OWNED_ALIGN: usize = 8;

/// Immutable bytes, in a mapped file or in memory. Clones and slices share them.
#[derive(Clone)]
pub struct SharedBytes {
    storage: Storage,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Storage {
    Mapped(Arc<Mapping>),
    Owned(Arc<Vec<u8>>),
    /// Part of the executable, which the system maps like other files.
    Static(&'static [u8]),
}

struct Mapping {
    map: Mmap,
    /// Held by a map of [`SharedBytes::map_present`].
    _slot: Option<MapSlot>,
}

/// Slots for maps that are many and small: a process may have 65,530 maps on Linux by default (`vm.max_map_count`), and the
/// allocator and threads need some of them.
static PRESENT_MAPS: MapSlots = MapSlots::new(1 << 14);

#[derive(Debug)]
struct MapSlots {
    most: usize,
    taken: AtomicUsize,
}

/// A taken slot, given back when it is dropped.
#[derive(Debug)]
struct MapSlot(&'static MapSlots);

impl MapSlots {
    const fn new(most: usize) -> Self {
        Self { most, taken: AtomicUsize::new(0) }
    }

    fn take(&'static self) -> Option<MapSlot> {
        let more = |taken: usize| (taken < self.most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| MapSlot(self))
    }
}

impl Drop for MapSlot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

impl SharedBytes {
    /// Maps a whole regular file for reading.
    ///
    /// If a file is truncated while mapped, reading it ends the process with SIGBUS, as in every program that maps
    /// files.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if there is no such file, [`LoadError::Io`] if it is not a regular file or cannot be
    /// read.
    pub fn map_file(path: &Path) -> Result<SharedBytes, LoadError> {
        // Checked before opening: opening a pipe would wait for a writer.
        let kind = std::fs::metadata(path).map_err(|error| LoadError::io(path, &error))?;
        if !kind.is_file() {
            return Err(LoadError::Io { path: path.into(), message: "not a regular file".into() });
        }
        let file = File::open(path).map_err(|error| LoadError::io(path, &error))?;
        SharedBytes::map(&file, &MmapOptions::new(), None).map_err(|error| LoadError::io(path, &error))
    }

    /// Maps a whole open file for reading, with the warning of [`map_file`](Self::map_file), and waits until all of it is
    /// in memory: for a file that is about to be read once from beginning to end.
    ///
    /// # Errors
    /// Errors of the system, among them that its file system maps no files, and too many of these maps
    /// ([`io::ErrorKind::QuotaExceeded`]).
    pub fn map_present(file: &File) -> io::Result<SharedBytes> {
        let slot = PRESENT_MAPS.take().ok_or(io::ErrorKind::QuotaExceeded)?;
        SharedBytes::map(file, MmapOptions::new().populate(), Some(slot))
    }

    fn map(file: &File, options: &MmapOptions, slot: Option<MapSlot>) -> io::Result<SharedBytes> {
        // SAFETY: the map is private to `SharedBytes`, never written, and outlives every borrow of it. Another process
        // may change the file meanwhile; only plain integers and floats are read from it, for which every bit
        // pattern is valid, and text is checked as UTF-8 each time it is borrowed.
        let map = unsafe { options.map(file) }?;
        let len = map.len();
        Ok(SharedBytes { storage: Storage::Mapped(Arc::new(Mapping { map, _slot: slot })), start: 0, len })
    }

    /// Returns a part of these bytes that shares the storage. Panics if it is out of bounds.
    pub fn slice(&self, start: usize, len: usize) -> SharedBytes {
        let end = start.checked_add(len).expect("a slice's end fits usize");
        assert!(end <= self.len, "slice {start}..{end} outside {} bytes", self.len);
        SharedBytes { storage: self.storage.clone(), start: self.start + start, len }
    }

    /// Returns the bytes at an address divisible by `align` (a power of two, at most 8); copies them only if
    /// necessary.
    pub fn aligned_to(self, align: usize) -> SharedBytes {
        debug_assert!(align.is_power_of_two() && align <= OWNED_ALIGN);
        if (self.as_ptr() as usize).is_multiple_of(align) { self } else { SharedBytes::copied(&self) }
    }

    fn copied(bytes: &[u8]) -> SharedBytes {
        let mut buffer = Vec::with_capacity(bytes.len() + OWNED_ALIGN);
        let start = (OWNED_ALIGN - buffer.as_ptr() as usize % OWNED_ALIGN) % OWNED_ALIGN;
        buffer.resize(start, 0);
        buffer.extend_from_slice(bytes); // within the capacity, so the address stays
        SharedBytes { storage: Storage::Owned(Arc::new(buffer)), start, len: bytes.len() }
    }

    /// Lets the system reclaim the memory of a part of a mapped file until it is read again; owned bytes stay. Panics
    /// if the part is out of bounds.
    pub fn release(&self, part: Range<usize>) {
        let len = self[part.clone()].len();
        #[cfg(unix)]
        if let (Storage::Mapped(mapping), 1..) = (&self.storage, len) {
            // SAFETY: a read-only map of a file gives the same bytes when they are read again, as `map_file` assumes of it.
            let released = unsafe {
                let start = self.start + part.start;
                mapping.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len)
            };
            // If the system refuses, the only cost is memory.
            let _ = released;
        }
        #[cfg(not(unix))]
        let _ = len;
    }

    /// Returns whether the bytes lie in a mapped file, so that the kernel can drop and reread them.
    pub fn is_mapped(&self) -> bool {
        matches!(self.storage, Storage::Mapped(_) | Storage::Static(_))
    }
}

impl std::ops::Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let whole: &[u8] = match &self.storage {
            Storage::Mapped(mapping) => &mapping.map,
            Storage::Owned(buffer) => buffer,
            Storage::Static(bytes) => bytes,
        };
        &whole[self.start..self.start + self.len]
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<&'static [u8]> for SharedBytes {
    fn from(bytes: &'static [u8]) -> Self {
        SharedBytes { storage: Storage::Static(bytes), start: 0, len: bytes.len() }
    }
}

impl From<Vec<u8>> for SharedBytes {
    /// Takes ownership of the buffer; copies it only if the allocator did not align it to 8 bytes.
    fn from(buffer: Vec<u8>) -> Self {
        let len = buffer.len();
        SharedBytes { storage: Storage::Owned(Arc::new(buffer)), start: 0, len }.aligned_to(OWNED_ALIGN)
    }
}

impl PartialEq for SharedBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for SharedBytes {}

impl std::fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedBytes({} {})", self.len, if self.is_mapped() { "mapped" } else { "owned" })
    }
}

/// A tensor of a file. `shape` is row-major, outermost first (GGUF's dimensions reversed);
/// `bytes.len()` equals the product of the outer dimensions times `dtype.row_bytes(innermost)`.
#[derive(Debug, Clone)]
pub struct HostTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: SharedBytes,
}

impl HostTensor {
    /// Creates a tensor, copying misaligned bytes.
    ///
    /// # Errors
    /// A sentence for [`LoadError::Tensor`]'s message, if a dimension is zero or the sizes disagree.
    pub fn new(dtype: Dtype, shape: Vec<usize>, bytes: SharedBytes) -> Result<HostTensor, String> {
        let wanted = byte_len(dtype, &shape)?;
        if wanted != bytes.len() {
            return Err(format!("{} {shape:?} takes {wanted} bytes, not {}", dtype.name(), bytes.len()));
        }
        Ok(HostTensor { dtype, shape, bytes: bytes.aligned_to(scalar_align(dtype)) })
    }

    /// Returns the rows and columns of a matrix; a vector counts as one row.
    pub fn rows_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        (self.shape.iter().rev().skip(1).product(), cols)
    }

    /// Returns part `index` of the outermost dimension, sharing the bytes. Panics if there is no such part.
    pub fn slice_outer(&self, index: usize) -> HostTensor {
        let shape = self.shape[1..].to_vec();
        let len = self.bytes.len() / self.shape[0];
        HostTensor { dtype: self.dtype, shape, bytes: self.bytes.slice(index * len, len) }
    }

    /// Returns rows `start..end` of a matrix, sharing the bytes. Panics if they are out of range or this is not a
    /// matrix.
    pub fn slice_rows(&self, start: usize, end: usize) -> HostTensor {
        let (rows, cols) = self.rows_cols();
        assert!(self.shape.len() == 2 && start <= end && end <= rows, "slice of rows outside the matrix");
        let row_bytes = self.dtype.row_bytes(cols).expect("checked by the loader");
        let bytes = self.bytes.slice(start * row_bytes, (end - start) * row_bytes);
        HostTensor { dtype: self.dtype, shape: vec![end - start, cols], bytes }
    }
}

/// Returns the bytes of a tensor of this type and shape.
///
/// # Errors
/// A sentence if a dimension is zero, a row is not a whole number of blocks, or the size overflows.
pub fn byte_len(dtype: Dtype, shape: &[usize]) -> Result<usize, String> {
    if shape.contains(&0) {
        return Err(format!("shape {shape:?} has a dimension of zero"));
    }
    let cols = shape.last().copied().unwrap_or(1);
    let block = dtype.block_len();
    if !cols.is_multiple_of(block) {
        return Err(format!(
            "rows of {cols} values are not a whole number of {} blocks ({block} values)",
            dtype.name()
        ));
    }
    let outer = &shape[..shape.len().saturating_sub(1)];
    dtype
        .row_bytes(cols)
        .and_then(|row| outer.iter().try_fold(row, |size, &dim| size.checked_mul(dim)))
        .ok_or_else(|| format!("shape {shape:?} is too large"))
}

/// Alignment of the scalars inside a type: block formats contain an `f16` scale.
const fn scalar_align(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        _ => 2,
    }
}

/// The named tensors of a model, in any file format.
pub trait TensorSource: Send + Sync {
    /// Returns the tensor, or `None` if the model has none of that name.
    ///
    /// # Errors
    /// [`LoadError`] naming the tensor if the file's entry is damaged or has an unsupported type.
    fn tensor(&self, name: &str) -> Result<Option<HostTensor>, LoadError>;

    /// Returns shape and type without touching the bytes; `None` also for an unsupported type.
    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)>;

    /// Returns all names, in file order.
    fn names(&self) -> Vec<Cow<'_, str>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_bytes_are_copied_to_an_aligned_place_and_aligned_ones_are_shared() {
        let whole = SharedBytes::from((0..64u8).collect::<Vec<_>>());
        for start in 0..16 {
            let part = whole.slice(start, 12);
            let tensor = HostTensor::new(Dtype::F32, vec![3], part.clone()).unwrap();
            assert_eq!(*tensor.bytes, *part);
            assert!((tensor.bytes.as_ptr() as usize).is_multiple_of(4));
            let shared = std::ptr::eq(tensor.bytes.as_ptr(), part.as_ptr());
            assert_eq!(shared, start.is_multiple_of(4));
        }
    }

    #[test]
    fn a_slot_of_a_map_is_given_back_with_it() {
        static SLOTS: MapSlots = MapSlots::new(2);
        let [first, second] = [SLOTS.take(), SLOTS.take()];
        assert!(first.is_some() && second.is_some());
        assert!(SLOTS.take().is_none(), "both are taken");
        drop(first);
        assert!(SLOTS.take().is_some());
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), [7; 100]).expect("written");
        let before = SLOTS.taken.load(Ordering::Relaxed);
        let map = SharedBytes::map(file.as_file(), &MmapOptions::new(), SLOTS.take()).expect("mapped");
        let part = map.slice(10, 20);
        drop(map);
        assert_eq!(SLOTS.taken.load(Ordering::Relaxed), before + 1, "a part keeps the map");
        drop(part);
        assert_eq!(SLOTS.taken.load(Ordering::Relaxed), before);
    }

    #[test]
    fn released_bytes_are_the_same_when_they_are_read_again() {
        let content: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 7) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &content).unwrap();
        for bytes in [SharedBytes::map_file(file.path()).unwrap(), content.clone().into()] {
            let part = bytes.slice(5000, 900_000);
            assert_eq!(*part, content[5000..905_000]);
            #[cfg(target_os = "linux")]
            let before = resident_kib(&part);
            part.release(0..0);
            part.release(100..880_000);
            #[cfg(target_os = "linux")]
            if bytes.is_mapped() {
                let after = resident_kib(&part);
                assert!(after + 700 < before, "{before} KiB before, {after} KiB after");
            }
            assert_eq!(*part, content[5000..905_000]);
        }
    }

    /// Returns the resident memory of the mapping that holds `bytes`.
    #[cfg(target_os = "linux")]
    fn resident_kib(bytes: &[u8]) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines();
        let holds = |line: &str| {
            let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = ends.map(|(start, end)| [start, end].map(|end| usize::from_str_radix(end, 16)));
            matches!(ends, Some([Ok(start), Ok(end)]) if (start..end).contains(&(bytes.as_ptr() as usize)))
        };
        lines.find(|line| holds(line)).expect("a mapping for every address");
        let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        resident.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn row_slices_share_the_bytes() {
        let matrix =
            HostTensor::new(Dtype::F16, vec![4, 3], SharedBytes::from((0..24u8).collect::<Vec<_>>()))
                .unwrap();
        let rows = matrix.slice_rows(1, 3);
        assert_eq!(rows.shape, [2, 3]);
        assert_eq!(*rows.bytes, (6..18).collect::<Vec<u8>>());
        assert!(std::ptr::eq(rows.bytes.as_ptr(), &matrix.bytes[6]));
    }

    #[test]
    fn sizes_that_disagree_or_overflow_are_refused() {
        let bytes = || SharedBytes::from(vec![0; 36]);
        assert!(HostTensor::new(Dtype::Q4_0, vec![2, 32], bytes()).is_ok());
        for (shape, word) in [
            (vec![2, 33], "whole number"),
            (vec![3, 32], "takes 54 bytes"),
            (vec![0, 32], "zero"),
            (vec![usize::MAX, usize::MAX, 32], "is too large"),
            (vec![], "whole number"),
        ] {
            let error = HostTensor::new(Dtype::Q4_0, shape, bytes()).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
