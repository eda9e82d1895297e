//! Matrices of experts, packed or copied from packed ones on disk when a token first uses them.
//!
//! A short prompt uses few of a layer's experts: a load of all of them makes people wait for what they do not
//! need yet. Invariant: the panels are those that a load would have packed: kept ones are compared with their
//! checksums when they are copied, and packed anew from the model's file if they differ. Their memory is
//! reserved at load, so that no step fails for lack of it.

use std::io;
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::panels::PanelsInFile;
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_kernel::Dtype;
use llmctl_kernel::gemm::{MatrixSource, Packed, packed_bytes};
use llmctl_kernel::memory::{Arena, ArenaMemory, PanelMemory};
use llmctl_kernel::pool::Pool;

pub struct LatePacked {
    dtype: Dtype,
    rows_cols: (usize, usize),
    /// Rows in the model's file.
    rows: SharedBytes,
    /// Panels that an earlier load has packed.
    kept: Option<PanelsInFile>,
    /// Memory for the panels until they are packed; untouched, so that it takes none.
    memory: Mutex<Option<ArenaMemory>>,
    packed: OnceLock<Packed>,
}

impl LatePacked {
    /// Reserves memory for the panels of a matrix; `None` for plain floats, which have none.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn of_rows(tensor: &HostTensor, arena: &Arena) -> io::Result<Option<LatePacked>> {
        LatePacked::new(tensor, None, arena)
    }

    /// Reserves memory for panels that are in a file; `None` if they are not those of a matrix of this type and shape.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn of_panels(
        tensor: &HostTensor,
        panels: PanelsInFile,
        arena: &Arena,
    ) -> io::Result<Option<LatePacked>> {
        let len = panels.num_bytes();
        let late = LatePacked::new(tensor, Some(panels), arena)?;
        Ok(late.filter(|late| late.bytes() == len))
    }

    fn new(tensor: &HostTensor, kept: Option<PanelsInFile>, arena: &Arena) -> io::Result<Option<LatePacked>> {
        let (dtype, rows_cols) = (tensor.dtype, tensor.rows_cols());
        let Some(bytes) = packed_bytes(dtype, rows_cols.into()) else { return Ok(None) };
        let memory = Mutex::new(Some(arena.zeroed(bytes)?));
        let rows = tensor.bytes.clone();
        Ok(Some(LatePacked { dtype, rows_cols, rows, kept, memory, packed: OnceLock::new() }))
    }

    pub fn rows_cols(&self) -> (usize, usize) {
        self.rows_cols
    }

    /// Returns the bytes of the panels.
    pub fn bytes(&self) -> usize {
        packed_bytes(self.dtype, self.rows_cols.into()).expect("as the constructor saw")
    }

    /// Returns the panels if they are packed already.
    pub fn get(&self) -> Option<&Packed> {
        self.packed.get()
    }

    /// Returns the panels, made on the first call by the threads of `pool`; calls at the same time wait for the first.
    pub fn packed(&self, pool: &Pool) -> &Packed {
        self.packed.get_or_init(|| {
            let memory = self.memory.lock().take();
            let mut memory = memory.expect("taken once, here");
            if let Some(kept) = &self.kept {
                if kept.copy_to(&mut memory, pool) {
                    let packed = Packed::of(self.dtype, self.rows_cols.into(), memory.into());
                    return packed.expect("of this length");
                }
                memory.fill(0);
            }
            let release = |part| self.rows.release(part);
            let source = MatrixSource::new(self.dtype, self.rows_cols.into(), &self.rows);
            Packed::pack_into(&source.telling(&release), memory, pool)
        })
    }

    /// Returns the panels; the calling thread packs them at the first use.
    ///
    /// # Errors
    /// If the system gives no pool, which takes no thread here.
    pub fn panels(&self) -> io::Result<PanelMemory> {
        Ok(self.packed(&Pool::new(1)?).memory().clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn panels_are_packed_once_and_are_those_of_a_load() {
        let pool = Pool::new(2).unwrap();
        let bytes: Vec<u8> = (0..48 * 34 * 2).map(|at: usize| (at * 7 % 61) as u8).collect();
        let tensor = HostTensor::new(Dtype::Q8_0, vec![48, 64], bytes.clone().into()).unwrap();
        let source = MatrixSource::new(Dtype::Q8_0, [48, 64], &bytes);
        let expected = Packed::pack(&source, &Arena::default(), &pool).unwrap().unwrap();
        let late = Arc::new(LatePacked::of_rows(&tensor, &Arena::default()).unwrap().unwrap());
        assert!(late.get().is_none() && late.rows_cols() == (48, 64));
        let others: Vec<_> = (0..4)
            .map(|_| Arc::clone(&late))
            .map(|late| std::thread::spawn(move || late.panels().unwrap().as_ptr() as usize))
            .collect();
        let panels = late.packed(&pool).memory().clone();
        for other in others {
            assert_eq!(other.join().unwrap(), panels.as_ptr() as usize, "another copy");
        }
        assert!(*panels == **expected.memory());
        let kept = |bytes: Vec<u8>| {
            let checksums = vec![crc32fast::hash(&panels)];
            let panels = PanelsInFile { bytes: bytes.into(), checksums };
            LatePacked::of_panels(&tensor, panels, &Arena::default()).unwrap()
        };
        let mut changed = panels.to_vec();
        changed[7] ^= 1; // since they were checked
        for bytes in [panels.to_vec(), changed] {
            let copied = kept(bytes).unwrap();
            assert!(**copied.packed(&pool).memory() == *panels);
        }
        assert!(kept(panels[1..].to_vec()).is_none(), "another length");
    }

    #[test]
    fn floats_have_no_panels() {
        let tensor = HostTensor::new(Dtype::F32, vec![1, 2], vec![0; 8].into()).unwrap();
        assert!(LatePacked::of_rows(&tensor, &Arena::default()).unwrap().is_none());
    }
}
