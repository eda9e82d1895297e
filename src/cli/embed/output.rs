//! Vectors as JSON lines, or as a matrix in numpy's format (version 1.0), whose header has the number of rows: it is written last,
//! and a file gets its name when it is whole.

use std::fs::File;
use std::io::{self, BufWriter, Cursor, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::VectorFormat;
use crate::cli::output::OutputError;

/// Bytes of a matrix's header: room for any number of rows, and a multiple of 64.
const HEADER_BYTES: usize = 128;

/// The result of a command.
pub struct VectorFile {
    name: String,
    sink: VectorSink,
    width: usize,
    num_rows: usize,
}

enum VectorSink {
    Lines(Box<dyn Write>),
    /// On its way to stdout.
    Matrix(Cursor<Vec<u8>>),
    /// Under its name for the time being, and the one that it gets.
    MatrixFile(BufWriter<File>, [PathBuf; 2]),
}

impl VectorFile {
    /// Opens a file, or stdout, for vectors of `width` values.
    ///
    /// # Errors
    /// A file that cannot be created.
    pub fn create(
        path: Option<&Path>,
        format: Option<VectorFormat>,
        width: usize,
    ) -> Result<Self, super::CommandError> {
        let is_npy = path.and_then(Path::extension).is_some_and(|extension| extension == "npy");
        let by_name = if is_npy { VectorFormat::Npy } else { VectorFormat::Jsonl };
        let failed = |path: &Path, error: io::Error| {
            super::CommandError::new(crate::cli::error::Kind::Io, error)
                .context(format!("creating {}", path.display()))
        };
        let sink = match (path, format.unwrap_or(by_name)) {
            (None, VectorFormat::Jsonl) => VectorSink::Lines(Box::new(io::stdout().lock())),
            (None, VectorFormat::Npy) => VectorSink::Matrix(Cursor::new(vec![0; HEADER_BYTES])),
            (Some(path), VectorFormat::Jsonl) => {
                let file = File::create(path).map_err(|error| failed(path, error))?;
                VectorSink::Lines(Box::new(BufWriter::new(file)))
            }
            (Some(path), VectorFormat::Npy) => {
                let mut name = path.as_os_str().to_owned();
                name.push(".part");
                let part = PathBuf::from(name);
                let mut file = File::create(&part).map_err(|error| failed(&part, error))?;
                file.write_all(&[0; HEADER_BYTES]).map_err(|error| failed(&part, error))?;
                VectorSink::MatrixFile(BufWriter::new(file), [part, path.to_owned()])
            }
        };
        let name = path.map_or("standard output".to_owned(), |path| path.display().to_string());
        Ok(Self { name, sink, width, num_rows: 0 })
    }

    /// Writes one vector.
    ///
    /// # Errors
    /// A full disk, a closed pipe.
    pub fn write(&mut self, index: usize, id: Option<Value>, vector: &[f32]) -> Result<(), OutputError> {
        self.num_rows += 1;
        let bytes = || vector.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let written = match &mut self.sink {
            VectorSink::Lines(lines) => lines.write_all(json_line(index, id, vector).as_bytes()),
            VectorSink::Matrix(matrix) => {
                matrix.seek(SeekFrom::End(0)).and_then(|_| matrix.write_all(&bytes()))
            }
            VectorSink::MatrixFile(file, _) => file.write_all(&bytes()),
        };
        written.map_err(|error| OutputError::new(&self.name, error))
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn finish(self) -> Result<(), OutputError> {
        let Self { name, sink, width, num_rows } = self;
        let header = header(num_rows, width);
        let finished = match sink {
            VectorSink::Lines(mut lines) => lines.flush(),
            VectorSink::Matrix(matrix) => {
                let mut bytes = matrix.into_inner();
                bytes[..HEADER_BYTES].copy_from_slice(&header);
                let mut stdout = io::stdout().lock();
                stdout.write_all(&bytes).and_then(|()| stdout.flush())
            }
            VectorSink::MatrixFile(file, [part, path]) => finish_file(file, &header, &part, &path),
        };
        finished.map_err(|error| OutputError::new(&name, error))
    }
}

fn finish_file(file: BufWriter<File>, header: &[u8], part: &Path, path: &Path) -> io::Result<()> {
    let mut file = file.into_inner()?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(header)?;
    file.sync_all()?;
    std::fs::rename(part, path)
}

fn json_line(index: usize, id: Option<Value>, vector: &[f32]) -> String {
    // Each number in the fewest digits that give it again.
    let embedding = serde_json::to_string(vector).unwrap_or_default();
    let id = id.map_or_else(String::new, |id| format!(",\"id\":{id}"));
    format!("{{\"index\":{index}{id},\"embedding\":{embedding}}}\n")
}

/// Returns the header of a matrix of little-endian 32-bit floats.
fn header(rows: usize, width: usize) -> Vec<u8> {
    let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(((HEADER_BYTES - 10) as u16).to_le_bytes());
    header.extend(text.as_bytes());
    header.resize(HEADER_BYTES - 1, b' ');
    header.push(b'\n');
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_as_long_as_its_room_whatever_it_says() {
        for (rows, width) in [(0, 1), (usize::MAX >> 8, 1 << 20)] {
            let header = header(rows, width);
            assert_eq!((header.len(), header[8..10].to_vec()), (HEADER_BYTES, vec![118, 0]));
            assert!(String::from_utf8_lossy(&header).contains(&format!("({rows}, {width})")));
        }
    }

    #[test]
    fn numbers_are_written_so_that_they_are_read_back() {
        let vector = [0.1f32, -1.0e-7, 3.0];
        let line: Value = serde_json::from_str(&json_line(3, Some("a".into()), &vector)).unwrap();
        assert_eq!((&line["index"], &line["id"]), (&3.into(), &"a".into()));
        let read: Vec<f32> =
            line["embedding"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        assert_eq!(read, vector);
    }
}
