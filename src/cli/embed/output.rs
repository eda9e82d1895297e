//! Vectors as JSON lines, or as a matrix in numpy's format (version 1.0), whose header has the number of
//! rows: it is written last. So a matrix on its way to stdout is held whole. A file gets its name when it is whole; a failure
//! leaves none.

use std::fs::File;
use std::io::{self, BufWriter, Cursor, Seek, SeekFrom, StdoutLock, Write};
use std::path::Path;

use serde_json::Value;

use super::VectorFormat;
use crate::cli::error::{CommandError, Kind};
use crate::cli::terminal::output::OutputError;
use llmctl_base::private_files::UnfinishedFile;

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
    Lines(StdoutLock<'static>),
    /// On its way to stdout.
    Matrix(Cursor<Vec<u8>>),
    File(BufWriter<File>, UnfinishedFile, VectorFormat),
}

impl VectorFile {
    /// Opens a file, or stdout, for vectors of `width` values.
    ///
    /// # Errors
    /// A file that cannot be created.
    pub fn create(path: Option<&Path>, format: VectorFormat, width: usize) -> Result<Self, CommandError> {
        let sink = match (path, format) {
            (None, VectorFormat::Jsonl) => Ok(VectorSink::Lines(io::stdout().lock())),
            (None, VectorFormat::Npy) => Ok(VectorSink::Matrix(Cursor::new(vec![0; HEADER_BYTES]))),
            (Some(path), format) => file_sink(path, format),
        };
        let sink = sink.map_err(|error| {
            let path = path.unwrap_or(Path::new("standard output"));
            CommandError::new(Kind::Io, error).context(format!("creating {}", path.display()))
        })?;
        let name = path.map_or("standard output".to_owned(), |path| path.display().to_string());
        Ok(Self { name, sink, width, num_rows: 0 })
    }

    /// Writes one vector.
    ///
    /// # Errors
    /// A full disk, a closed pipe.
    pub fn write(&mut self, index: usize, id: Option<Value>, vector: &[f32]) -> Result<(), OutputError> {
        self.num_rows += 1;
        let bytes = |format| match format {
            VectorFormat::Jsonl => json_line(index, id, vector).into_bytes(),
            VectorFormat::Npy => vector.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        let written = match &mut self.sink {
            VectorSink::Lines(lines) => lines.write_all(&bytes(VectorFormat::Jsonl)),
            VectorSink::Matrix(matrix) => {
                matrix.seek(SeekFrom::End(0)).and_then(|_| matrix.write_all(&bytes(VectorFormat::Npy)))
            }
            VectorSink::File(file, _, format) => file.write_all(&bytes(*format)),
        };
        written.map_err(|error| OutputError::new(&self.name, error))
    }

    /// Writes the header and the rest of the rows.
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
            VectorSink::File(file, unfinished, format) => {
                let header = if format == VectorFormat::Npy { &header[..] } else { &[] };
                finish_file(file, header, unfinished)
            }
        };
        finished.map_err(|error| OutputError::new(&name, error))
    }
}

fn file_sink(path: &Path, format: VectorFormat) -> io::Result<VectorSink> {
    let (unfinished, mut file) = UnfinishedFile::create(path)?;
    if format == VectorFormat::Npy {
        file.write_all(&[0; HEADER_BYTES])?;
    }
    Ok(VectorSink::File(BufWriter::new(file), unfinished, format))
}

fn finish_file(file: BufWriter<File>, header: &[u8], unfinished: UnfinishedFile) -> io::Result<()> {
    let mut file = file.into_inner()?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(header)?;
    unfinished.finish(&file)
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
    fn a_header_has_the_same_length_for_matrices_of_any_shape() {
        for (rows, width) in [(0, 1), (usize::MAX >> 8, 1 << 20)] {
            let header = header(rows, width);
            assert_eq!((header.len(), header[8..10].to_vec()), (HEADER_BYTES, vec![118, 0]));
            assert!(String::from_utf8_lossy(&header).contains(&format!("({rows}, {width})")));
        }
    }

    #[test]
    fn numbers_are_written_so_that_they_are_read_back() {
        let vector = [0.1f32, -1.0e-7, 3.0];
        let line: Value =
            serde_json::from_str(&json_line(3, Some("a".into()), &vector)).expect("a line of JSON");
        assert_eq!((&line["index"], &line["id"]), (&3.into(), &"a".into()));
        let read: Vec<f32> = serde_json::from_value(line["embedding"].clone()).expect("a list of numbers");
        assert_eq!(read, vector);
    }
}
