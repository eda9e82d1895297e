//! The models inside the binary, so that everything works with nothing downloaded: `guide`, which answers questions about llmctl.
//!
//! `assets/guide/README.md` says what it can do and how it is made.

use std::path::Path;

use crate::runtime::hints::Hints;
use crate::runtime::tensor::SharedBytes;

/// A GGUF file that was compiled in.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// What `--model` calls it.
    pub name: &'static str,
    /// Of its matrices.
    pub quantization: &'static str,
    /// Most tokens of an answer to a request that names no limit: its answers are short, and one that is not goes on to the end
    /// of the context.
    pub answer_tokens: usize,
    /// What messages call the file.
    path: &'static str,
    file: &'static Aligned<[u8]>,
    /// What its prompts get beside the conversation, read as [`Hints`].
    hints: &'static [u8],
}

/// Tensors begin at multiples of 32 bytes of the file, which must hold in memory too, or they would be copied.
#[derive(Debug, PartialEq, Eq)]
#[repr(C, align(32))]
struct Aligned<T: ?Sized>(T);

/// The default model.
pub static GUIDE: BuiltIn = BuiltIn {
    name: "guide",
    quantization: "Q8_0",
    answer_tokens: 400,
    path: "built-in:guide.gguf",
    file: &Aligned(*include_bytes!("../../../assets/guide/guide.gguf")),
    hints: include_bytes!("../../../assets/guide/hints.bin"),
};

impl BuiltIn {
    /// The built-in model of that name.
    pub fn find(name: &str) -> Option<&'static BuiltIn> {
        [&GUIDE].into_iter().find(|model| model.name == name)
    }

    pub fn path(&self) -> &'static Path {
        Path::new(self.path)
    }

    pub fn bytes(&self) -> SharedBytes {
        SharedBytes::from(&self.file.0)
    }

    /// # Panics
    /// When what was compiled in is no index.
    pub fn hints(&self) -> Hints {
        Hints::parse(self.hints).expect("the index that was compiled in")
    }

    /// Size of the file in bytes.
    pub fn file_len(&self) -> usize {
        self.file.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_exact_and_tensors_are_not_copied() {
        assert_eq!(BuiltIn::find("guide"), Some(&GUIDE));
        assert_eq!(BuiltIn::find("Guide"), None);
        assert_eq!(GUIDE.bytes().as_ptr() as usize % 32, 0);
        assert_eq!(GUIDE.bytes().len(), GUIDE.file_len());
    }
}
