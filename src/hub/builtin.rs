//! Models compiled into the binary, so that llmctl works without a download: `guide`, which answers questions
//! about llmctl.
//!
//! `assets/guide/README.md` describes its abilities and its training.

use std::path::Path;

/// A GGUF file compiled into the binary.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// Name for `--model`.
    pub name: &'static str,
    /// Quantisation of its matrices.
    pub quantization: &'static str,
    /// Most tokens of an answer if the request names no limit. Its answers are short; a runaway answer would fill the
    /// context.
    pub answer_tokens: usize,
    /// Name of the file in messages.
    path: &'static str,
    file: &'static Aligned<[u8]>,
    /// Index of hints that are added to its prompts.
    pub hints: &'static [u8],
}

/// Aligned storage: tensors begin at multiples of 32 bytes of the file, which must hold in memory too, or they would
/// be copied.
#[derive(Debug, PartialEq, Eq)]
#[repr(C, align(32))]
struct Aligned<T: ?Sized>(T);

/// The default model.
pub static GUIDE: BuiltIn = BuiltIn {
    name: "guide",
    quantization: "Q8_0",
    answer_tokens: 400,
    path: "built-in:guide.gguf",
    file: &Aligned(*include_bytes!("../../assets/guide/guide.gguf")),
    hints: include_bytes!("../../assets/guide/hints.bin"),
};

impl BuiltIn {
    /// Finds the built-in model of that name.
    pub fn find(name: &str) -> Option<&'static BuiltIn> {
        [&GUIDE].into_iter().find(|model| model.name == name)
    }

    pub fn path(&self) -> &'static Path {
        Path::new(self.path)
    }

    /// Returns the file.
    pub fn bytes(&self) -> &'static [u8] {
        &self.file.0
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
    }
}
