//! The files of a repository by their names: which ones a safetensors checkpoint needs, and which of these
//! are texts.
//!
//! Pure functions over a listing, of a local snapshot or of a remote repository. A checkpoint is config.json
//! and the weights that the loader opens: model.safetensors, or model.safetensors.index.json and its shards,
//! all in the root. Copies of the weights in other forms (PyTorch's `.bin`, ONNX, Mistral's
//! `consolidated.safetensors`, variants such as `model.fp16.safetensors`) are never among them.

use std::collections::HashSet;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedFile {
    /// Path in the repository, with `/`.
    pub path: String,
    pub bytes: u64,
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Texts that a checkpoint may have: configuration, tokenizer, chat template, generation settings.
const TEXTS: [&str; 11] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json", // GPTQ's settings, before they moved to config.json
    "quant_config.json",    // AWQ's
];

/// The safetensors weights in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The weight files, by name; the index is not one.
    pub weights: Vec<ListedFile>,
    /// The index, if the loader reads it.
    pub index: Option<ListedFile>,
    /// The first shard that the others' numbers imply and the listing lacks.
    pub missing: Option<String>,
}

impl Checkpoint {
    /// Finds the checkpoint in a listing; `None` without config.json or without weights.
    pub fn find(files: &[ListedFile]) -> Option<Checkpoint> {
        let named = |name: &str| files.iter().find(|file| file.path == name);
        named(CONFIG)?;
        if let Some(single) = named(SINGLE) {
            return Some(Checkpoint { weights: vec![single.clone()], index: None, missing: None });
        }
        let index = named(INDEX)?.clone();
        let in_root = |file: &&ListedFile| !file.path.contains('/') && file.path.ends_with(".safetensors");
        let mut weights: Vec<ListedFile> =
            files.iter().filter(in_root).filter(|file| shard(&file.path).is_some()).cloned().collect();
        if weights.is_empty() {
            // The index may name its shards in any way (older MLX conversions: weights.00.safetensors).
            let is_copy =
                |file: &&ListedFile| ["consolidated", "adapter"].iter().any(|p| file.path.starts_with(p));
            weights = files.iter().filter(in_root).filter(|file| !is_copy(file)).cloned().collect();
        }
        weights.sort_by(|a, b| a.path.cmp(&b.path));
        let missing = missing_shard(&weights);
        Some(Checkpoint { weights, index: Some(index), missing })
    }

    /// Returns the size of the weights.
    pub fn bytes(&self) -> u64 {
        self.weights.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }
}

/// Splits `model-00001-of-00003.safetensors` into its number and the number of shards.
fn shard(path: &str) -> Option<(usize, usize)> {
    let (number, count) = path.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let plain = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !plain(number) || !plain(count) {
        return None;
    }
    Some((number.parse().ok()?, count.parse().ok()?))
}

fn missing_shard(weights: &[ListedFile]) -> Option<String> {
    let numbers: Vec<(usize, usize)> = weights.iter().filter_map(|file| shard(&file.path)).collect();
    let count = match numbers.first() {
        Some((_, count)) => *count,
        None if weights.is_empty() => return Some("model-00001.safetensors".to_owned()),
        None => return None,
    };
    let known: HashSet<(usize, usize)> = numbers.into_iter().collect();
    let missing = (1..=count).find(|number| !known.contains(&(*number, count)))?;
    Some(format!("model-{missing:05}-of-{count:05}.safetensors"))
}

/// Returns the texts of a checkpoint in a listing: all that is read apart from weights. Empty for a repository of GGUF
/// files, whose headers hold their texts.
pub fn text_files(files: &[ListedFile]) -> Vec<ListedFile> {
    files.iter().filter(|file| TEXTS.contains(&&*file.path)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(paths: &[&str]) -> Vec<ListedFile> {
        paths.iter().map(|path| ListedFile { path: (*path).to_owned(), bytes: 7 }).collect()
    }

    fn names(files: &[ListedFile]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    #[test]
    fn weights_without_their_copies() {
        let files = listing(&[
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.fp16-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "original/model.safetensors",
            "pytorch_model-00001-of-00002.bin",
        ]);
        let found = Checkpoint::find(&files).expect("a checkpoint");
        assert_eq!(
            names(&found.weights),
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        );
        assert_eq!((found.bytes(), found.missing), (14, None));
        assert_eq!(found.index.expect("an index").path, "model.safetensors.index.json");
    }

    #[test]
    fn one_file_needs_no_index() {
        let files =
            listing(&["config.json", "model.safetensors", "model.safetensors.index.json", "x.safetensors"]);
        let found = Checkpoint::find(&files).expect("a checkpoint");
        assert_eq!((names(&found.weights), found.index), (vec!["model.safetensors"], None));
    }

    #[test]
    fn a_missing_shard_is_named() {
        let index = "model.safetensors.index.json";
        let missing = |paths: &[&str]| {
            let files = listing(&[&["config.json", index], paths].concat());
            Checkpoint::find(&files).expect("a checkpoint").missing
        };
        assert_eq!(
            missing(&["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]).as_deref(),
            Some("model-00002-of-00003.safetensors")
        );
        assert_eq!(missing(&["weights.00.safetensors", "consolidated.safetensors"]), None);
        assert!(missing(&[]).is_some());
    }

    #[test]
    fn what_is_no_checkpoint() {
        for paths in [
            &["model.safetensors"][..],
            &["config.json", "pytorch_model.bin"],
            &["config.json", "consolidated.safetensors"],
            &["adapter_config.json", "adapter_model.safetensors"],
            &["config.json", "sub/model.safetensors"],
        ] {
            assert_eq!(Checkpoint::find(&listing(paths)), None, "{paths:?}");
        }
    }

    #[test]
    fn texts_are_everything_but_weights() {
        let files = listing(&[
            ".gitattributes",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
        ]);
        assert_eq!(
            names(&text_files(&files)),
            [
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ]
        );
        assert!(text_files(&listing(&["README.md", "m-Q8_0.gguf"])).is_empty());
    }
}
