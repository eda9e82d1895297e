//! Parses GGUF file names: the quantisation, and the parts of split models.
//!
//! Names are a convention, not a format (ggml's `docs/gguf.md`, "GGUF Naming Convention", and the practice of
//! publishers): `Name-1B-Q4_K_M.gguf`, `name.q8_0.gguf`, `Name-UD-Q4_K_XL.gguf`,
//! `BF16/Name-BF16-00001-of-00002.gguf`. Pure functions. Files that accompany models (`mmproj`, `imatrix`,
//! draft models) are left out.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::repo_files::ListedFile;

/// Preference among several quantisations if the user names none: Q4_K_M, the usual compromise between size and quality,
/// then other types of four bits, then the nearest larger ones, the nearest smaller ones, floats, and one bit last. A
/// publisher's dynamic mix (`UD-`) follows the plain type of its name.
#[rustfmt::skip]
pub const PREFERENCE: [&str; 55] = [
    "Q4_K_M", "Q4_K_XL", "Q4_K_L", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4_MOE", "MXFP4", "NVFP4", "Q4_1", "Q4_0",
    "Q5_K_M", "Q5_K_XL", "Q5_K_L", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0",
    "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8_0_L", "Q8_K_XL",
    "Q3_K_XL", "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "Q3_K", "IQ3_XXS",
    "Q2_K_XL", "Q2_K_L", "Q2_K", "IQ2_M", "Q2_K_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "Q2_0", "TQ1_0", "Q1_0",
    "F16", "FP16", "BF16", "F32", "FP32",
    "IQ1_M", "IQ1_S", "IQ1_XS", "IQ1_XXS",
];

/// Word in the names of GGUF files that hold a model's vision tower and its projector.
const PROJECTOR_WORD: &str = "mmproj";

/// Words in the names of GGUF files that accompany a model: vision projectors, importance matrices.
const COMPANION_WORDS: [&str; 2] = [PROJECTOR_WORD, "imatrix"];

/// Beginnings of names of GGUF files, or of their folders, that hold a draft model for another one.
const DRAFT_PREFIXES: [&str; 6] = ["mtp", "eagle3", "eagle", "dflash", "dspark", "draft"];

/// One model in GGUF form: a file, or all parts of a split one. Paths are relative to the listed folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufGroup {
    /// The first part, which may be missing.
    pub first: String,
    /// The existing parts, in order.
    pub parts: Vec<String>,
    /// The expected number of parts.
    pub num_parts: usize,
    /// File name without extension and part number.
    pub stem: String,
    /// Quantisation in upper case.
    pub tag: Option<String>,
    /// Size of the existing parts.
    pub bytes: u64,
}

impl GgufGroup {
    /// Returns whether the quantisation equals `wanted`, ignoring case.
    pub fn has_tag(&self, wanted: &str) -> bool {
        self.tag.as_deref().is_some_and(|tag| tag.eq_ignore_ascii_case(wanted))
    }

    /// Returns whether the name ends in `wanted` after a separator: `Q4_K_XL` matches `UD-Q4_K_XL`.
    pub fn ends_with_tag(&self, wanted: &str) -> bool {
        let (stem, wanted) = (self.stem.to_ascii_lowercase(), wanted.to_ascii_lowercase());
        stem.strip_suffix(&wanted)
            .is_some_and(|before| before.chars().next_back().is_none_or(|c| !c.is_ascii_alphanumeric()))
    }

    /// Returns whether the path has `wanted` between a separator and one of `.`, `-`, as llama.cpp searches for a tag.
    pub fn contains_tag(&self, wanted: &str) -> bool {
        let (path, wanted) = (self.first.to_ascii_lowercase(), wanted.to_ascii_lowercase());
        path.match_indices(&wanted).any(|(at, found)| {
            let before = path[..at].chars().next_back();
            path[at + found.len()..].starts_with(['.', '-'])
                && before.is_none_or(|c| !c.is_ascii_alphanumeric())
        })
    }

    /// Returns the quantisation, or the path if it has none.
    pub fn name(&self) -> &str {
        self.tag.as_deref().unwrap_or(&self.first)
    }

    /// Returns the first missing part.
    pub fn missing_part(&self) -> Option<String> {
        if self.parts.len() == self.num_parts {
            return None;
        }
        let base = self.first.strip_suffix(&part_suffix(1, self.num_parts))?;
        (1..=self.num_parts)
            .map(|n| format!("{base}{}", part_suffix(n, self.num_parts)))
            .find(|part| self.parts.binary_search(part).is_err()) // they are sorted
    }
}

fn part_suffix(index: usize, count: usize) -> String {
    format!("-{index:05}-of-{count:05}.gguf")
}

/// Splits `stem-00001-of-00003.gguf` into stem, part and number of parts.
fn split_part(name: &str) -> Option<(&str, usize, usize)> {
    let stem = name.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, index) = rest.rsplit_once('-')?;
    let number = |text: &str| {
        (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse::<usize>().ok())?
    };
    let (index, count) = (number(index)?, number(count)?);
    (1..=count).contains(&index).then_some((base, index, count))
}

/// Returns whether a GGUF file accompanies a model instead of being one: a projector, an importance matrix, a draft
/// model. The names are llama.cpp's (`common/download.cpp`), which knows draft models by lower case; in upper case in the
/// middle of a name, `MTP` marks a whole model that has such layers.
pub fn is_companion(path: &str) -> bool {
    let mut parts: Vec<&str> = path.split('/').collect();
    let name = parts.pop().unwrap_or_default();
    let begins = |part: &str, prefix: &str| {
        let rest = part.get(..prefix.len()).filter(|start| start.eq_ignore_ascii_case(prefix));
        rest.is_some_and(|_| part[prefix.len()..].starts_with(['-', '_', '.']) || part.len() == prefix.len())
    };
    let is_draft = |part: &str| DRAFT_PREFIXES.iter().any(|prefix| begins(part, prefix));
    let lower = path.to_ascii_lowercase();
    let inside =
        |prefix: &&str| name.contains(&format!("-{prefix}-")) || name.contains(&format!(".{prefix}-"));
    COMPANION_WORDS.iter().any(|word| lower.contains(word))
        || parts.into_iter().chain([name]).any(is_draft)
        || DRAFT_PREFIXES.iter().any(inside)
}

/// Groups the parts of split files, sorted by name. Paths may contain folders (`BF16/x.gguf`). Other files than GGUF,
/// and companions of models, are left out.
pub fn group_shards(files: &[ListedFile]) -> Vec<GgufGroup> {
    let mut groups: BTreeMap<String, GgufGroup> = BTreeMap::new();
    for ListedFile { path, bytes } in files {
        if !path.ends_with(".gguf") || is_companion(path) {
            continue;
        }
        let (folder, name) =
            path.rsplit_once('/').map_or(("", path.as_str()), |(folder, name)| (folder, name));
        let whole = name.get(..name.len().saturating_sub(5)).unwrap_or(name);
        let (stem, num_parts) = split_part(name).map_or((whole, 1), |(stem, _, count)| (stem, count));
        let split = split_part(name).is_some();
        let prefix = path.strip_suffix(name).unwrap_or_default();
        let first = if split { format!("{prefix}{stem}{}", part_suffix(1, num_parts)) } else { path.clone() };
        let tag = quant_tag(stem).or_else(|| quant_tag(folder.rsplit('/').next().unwrap_or_default()));
        let group = groups.entry(first.clone()).or_insert_with(|| GgufGroup {
            first,
            parts: Vec::new(),
            num_parts,
            stem: stem.to_owned(),
            tag,
            bytes: 0,
        });
        group.parts.push(path.clone());
        group.bytes = group.bytes.saturating_add(*bytes);
    }
    let mut files: Vec<GgufGroup> = groups.into_values().collect();
    files.iter_mut().for_each(|file| file.parts.sort());
    files
}

/// Returns the projector (mmproj) that belongs to the model whose first part is `model`, among the files of its repository or
/// folder: of those in its folder or above it, the deepest, then a float before a quantised one, then the nearest number of bits.
/// llmctl's own beside llama.cpp's rule (`find_best_sibling` of `common/download.cpp`): floats come first, and a projector that
/// names another model of the listing is left out.
pub fn projector_of<'a>(files: &'a [ListedFile], model: &str) -> Option<&'a ListedFile> {
    let groups = group_shards(files);
    let own = groups.iter().find(|group| group.first == model)?;
    let folder = folder_of(model);
    let is_near = |file: &&ListedFile| {
        let lower = file.path.to_ascii_lowercase();
        let beside = folder_of(&file.path);
        lower.ends_with(".gguf")
            && lower.contains(PROJECTOR_WORD)
            && (beside.is_empty() || folder == beside || folder.starts_with(&format!("{beside}/")))
    };
    let names = |file: &ListedFile, group: &GgufGroup| {
        let (wanted, base) = (model_named_by(&file.path), base_name(&group.stem));
        wanted.is_empty() || base.contains(&wanted) || wanted.contains(&base)
    };
    let is_ours = |file: &&ListedFile| names(file, own) || !groups.iter().any(|group| names(file, group));
    let order = |file: &&ListedFile| {
        let tag = quant_tag(file_stem(&file.path));
        let bits = |tag: &Option<String>| tag.as_deref().map_or(16, bits_of);
        let is_small = tag.as_deref().is_some_and(is_quantised);
        (
            Reverse(folder_of(&file.path).len()),
            is_small,
            bits(&tag).abs_diff(bits(&own.tag)),
            file.path.clone(),
        )
    };
    files.iter().filter(is_near).filter(is_ours).min_by_key(order)
}

fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn file_stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.get(..name.len().saturating_sub(".gguf".len())).unwrap_or(name)
}

/// Returns the bits of a quantisation's weights, as its name says: the first number in it.
fn bits_of(tag: &str) -> u32 {
    let digits = tag.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(16)
}

/// Returns a stem without its quantisation, in lower case.
fn base_name(stem: &str) -> String {
    let lower = stem.to_ascii_lowercase();
    let tag = quant_tag(stem).map(|tag| tag.to_ascii_lowercase()).unwrap_or_default();
    lower.replacen(&tag, "", 1).trim_matches(['-', '.', '_']).to_owned()
}

/// Returns the model that a projector's name names; empty for `mmproj-F16.gguf` and `mmproj-model-f16.gguf`.
fn model_named_by(path: &str) -> String {
    let base = base_name(file_stem(path)).replacen(PROJECTOR_WORD, "", 1);
    let base = base.trim_matches(['-', '.', '_']);
    let base = base.strip_prefix("model").unwrap_or(base);
    base.trim_matches(['-', '.', '_']).to_owned()
}

/// Returns the place of a quantisation in [`PREFERENCE`], with 1 for a dynamic mix; `None` if it has none.
pub fn rank(tag: &str) -> Option<(usize, usize)> {
    let (plain, is_dynamic) = tag.strip_prefix("UD-").map_or((tag, 0), |plain| (plain, 1));
    Some((PREFERENCE.iter().position(|known| *known == plain)?, is_dynamic))
}

/// Returns whether the tag names a type below 16 bits.
pub fn is_quantised(tag: &str) -> bool {
    rank(tag).is_some_and(|(place, _)| !matches!(PREFERENCE[place], "F16" | "FP16" | "BF16" | "F32" | "FP32"))
}

/// Returns the quantisation in a file's stem, in upper case, with the `UD-` that marks a dynamic mix of types.
///
/// It is the longest ending of a tag's shape, else the last word of that shape between dashes or dots.
pub fn quant_tag(stem: &str) -> Option<String> {
    let bytes = stem.as_bytes();
    let word_starts = (0..stem.len()).filter(|&i| i == 0 || !bytes[i - 1].is_ascii_alphanumeric());
    let ending = word_starts.filter_map(|i| Some((i, stem.get(i..)?))).find(|(_, text)| has_tag_shape(text));
    let (start, tag) = ending.or_else(|| {
        let last = stem.rsplit(['-', '.']).find(|word| has_tag_shape(word))?;
        Some((stem.rfind(last)?, last))
    })?;
    let dynamic = stem.get(..start).is_some_and(|before| {
        let before = before.to_ascii_uppercase();
        before == "UD-" || before.ends_with("-UD-") || before.ends_with(".UD-")
    });
    Some(format!("{}{}", if dynamic { "UD-" } else { "" }, tag.to_ascii_uppercase()))
}

/// Matches `F32 F16 BF16 FP16 FP32 MXFP4 MXFP4_MOE NVFP4`, or `Q|IQ|TQ` + digit + `_` words as in `Q4_K_M`, `IQ3_XXS`,
/// `Q8_0` and ik_llama.cpp's `IQ4_KSS`, or Meta's `kquant-` + word.
fn has_tag_shape(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    if matches!(&*upper, "F32" | "F16" | "BF16" | "FP16" | "FP32" | "MXFP4" | "MXFP4_MOE" | "NVFP4") {
        return true;
    }
    if let Some(mix) = upper.strip_prefix("KQUANT-") {
        return !mix.is_empty() && mix.bytes().all(|b| b.is_ascii_alphanumeric());
    }
    let Some(rest) = ["IQ", "TQ", "Q"].iter().find_map(|prefix| upper.strip_prefix(prefix)) else {
        return false;
    };
    let mut words = rest.split('_');
    let bits =
        words.next().is_some_and(|word| word.len() == 1 && word.bytes().all(|b| (b'1'..=b'8').contains(&b)));
    bits && words.all(|word| {
        let is_size = matches!(word, "XXS" | "XS" | "S" | "M" | "L" | "XL" | "NL");
        is_size || matches!(word, "K" | "KS" | "KSS" | "KT" | "KL" | "0" | "1" | "4" | "8" | "R4" | "R8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(names: &[&str]) -> Vec<GgufGroup> {
        let file = |path: &&str| ListedFile { path: (*path).to_owned(), bytes: 10 };
        group_shards(&names.iter().map(file).collect::<Vec<_>>())
    }

    #[test]
    fn tags() {
        for (stem, expected) in [
            ("SmolLM2-135M-Instruct-Q4_K_M", Some("Q4_K_M")),
            ("qwen2.5-0.5b-instruct-q8_0", Some("Q8_0")),
            ("model.Q6_K", Some("Q6_K")),
            ("ggml-model-f16", Some("F16")),
            ("ggml_model_q4_0", Some("Q4_0")),
            ("gemma-3-1b-it-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("gpt-oss-20b-MXFP4", Some("MXFP4")),
            ("Llama-3.2-1B-IQ3_XXS", Some("IQ3_XXS")),
            ("Name-Q4_K_M-imat", Some("Q4_K_M")),
            ("phi-4-BF16", Some("BF16")),
            ("BF16", Some("BF16")),
            ("gpt-oss-20b-MXFP4_MOE", Some("MXFP4_MOE")),
            ("Nemotron-NVFP4", Some("NVFP4")),
            ("Bonsai-8B-Q1_0", Some("Q1_0")),
            ("Qwen3-UD-TQ1_0", Some("UD-TQ1_0")),
            ("GLM-smol-IQ4_KSS", Some("IQ4_KSS")),
            ("Llama-5-kquant-17gb", Some("KQUANT-17GB")),
            ("model", None),
            ("qwen2-7b", None),
            ("Q4K-9", None),
            ("", None),
            ("\u{e9}-Q8_0", Some("Q8_0")),
        ] {
            assert_eq!(quant_tag(stem).as_deref(), expected, "{stem}");
        }
    }

    #[test]
    fn parts_form_one_file() {
        let files = group(&["b-Q8_0-00002-of-00002.gguf", "a-Q4_0.gguf", "b-Q8_0-00001-of-00002.gguf"]);
        assert_eq!(files.len(), 2);
        assert_eq!(files[1].first, "b-Q8_0-00001-of-00002.gguf");
        assert_eq!((files[1].stem.as_str(), files[1].tag.as_deref()), ("b-Q8_0", Some("Q8_0")));
        assert_eq!((files[1].missing_part(), files[1].bytes, files[0].bytes), (None, 20, 10));
    }

    #[test]
    fn a_missing_part_is_named() {
        let files = group(&["d/b-00001-of-00003.gguf", "d/b-00003-of-00003.gguf"]);
        assert_eq!(files[0].missing_part().as_deref(), Some("d/b-00002-of-00003.gguf"));
        assert_eq!(
            group(&["b-00002-of-00002.gguf"])[0].missing_part().as_deref(),
            Some("b-00001-of-00002.gguf")
        );
    }

    #[test]
    fn odd_part_numbers_are_plain_names() {
        for name in
            ["b-00003-of-00002.gguf", "b-00000-of-00002.gguf", "b-1-of-2.gguf", "b-00001-of-99999x.gguf"]
        {
            assert_eq!(group(&[name])[0].num_parts, 1, "{name}");
        }
    }

    #[test]
    fn the_folder_names_the_tag_when_the_file_does_not() {
        assert_eq!(group(&["Q5_K_M/model.gguf"])[0].tag.as_deref(), Some("Q5_K_M"));
    }

    #[test]
    fn companions_of_a_model_are_left_out() {
        for name in [
            "mmproj-F16.gguf",
            "x-mmproj-model.gguf",
            "MMPROJ-x.gguf",
            "Qwen3-imatrix.gguf",
            "imatrix_unsloth.gguf",
            "mtp-Qwen3-Q8_0.gguf",
            "MTP/Qwen3-Q8_0.gguf",
            "Qwen3-mtp-Q8_0.gguf",
            "eagle3-x-BF16.gguf",
            "Eagle3/x-BF16.gguf",
            "dflash-x.gguf",
            "dspark-x.gguf",
            "draft-x.gguf",
            "mmproj/F16.gguf",
            "config.json",
        ] {
            assert!(group(&[name]).is_empty(), "{name}");
        }
        for name in ["Qwen3-Next-MTP-Q4_K_M.gguf", "Smtp-1B-Q8_0.gguf", "drafting-Q8_0.gguf"] {
            assert_eq!(group(&[name]).len(), 1, "{name}");
        }
    }

    #[test]
    fn the_projector_of_a_model() {
        let find = |names: &[&str], model: &str| {
            let file = |path: &&str| ListedFile { path: (*path).to_owned(), bytes: 10 };
            let files: Vec<ListedFile> = names.iter().map(file).collect();
            projector_of(&files, model).map(|file| file.path.clone())
        };
        for (names, model, expected) in [
            (&["m-Q4_K_M.gguf", "mmproj-F16.gguf"][..], "m-Q4_K_M.gguf", Some("mmproj-F16.gguf")),
            (&["m-Q4_K_M.gguf", "imatrix.gguf"], "m-Q4_K_M.gguf", None),
            (
                &["m-Q8_0.gguf", "mmproj-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"],
                "m-Q8_0.gguf",
                Some("mmproj-F16.gguf"),
            ),
            (&["m-F32.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "m-F32.gguf", Some("mmproj-F32.gguf")),
            (
                &["m-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"],
                "m-Q8_0.gguf",
                Some("mmproj-BF16.gguf"),
            ),
            (&["m-Q8_0.gguf", "mmproj-Q8_0.gguf"], "m-Q8_0.gguf", Some("mmproj-Q8_0.gguf")),
            (
                &["Q4/m-Q4_0.gguf", "Q4/mmproj-Q8_0.gguf", "mmproj-F16.gguf"],
                "Q4/m-Q4_0.gguf",
                Some("Q4/mmproj-Q8_0.gguf"),
            ),
            (&["m-Q4_0.gguf", "Q4/mmproj-F16.gguf"], "m-Q4_0.gguf", None),
            (&["Q44/m-Q4_0.gguf", "Q4/mmproj-F16.gguf"], "Q44/m-Q4_0.gguf", None),
            (
                &["gemma-3-4b-it-q4_0.gguf", "mmproj-model-f16-4B.gguf"],
                "gemma-3-4b-it-q4_0.gguf",
                Some("mmproj-model-f16-4B.gguf"),
            ),
            (
                &["a-2b-Q8_0.gguf", "b-1b-Q8_0.gguf", "mmproj-a-2b-F16.gguf"],
                "a-2b-Q8_0.gguf",
                Some("mmproj-a-2b-F16.gguf"),
            ),
            (&["a-2b-Q8_0.gguf", "b-1b-Q8_0.gguf", "mmproj-a-2b-F16.gguf"], "b-1b-Q8_0.gguf", None),
            (
                &["b-Q8_0-00001-of-00002.gguf", "b-Q8_0-00002-of-00002.gguf", "b.mmproj-f16.gguf"],
                "b-Q8_0-00001-of-00002.gguf",
                Some("b.mmproj-f16.gguf"),
            ),
            (&["mmproj-F16.gguf"], "mmproj-F16.gguf", None),
        ] {
            assert_eq!(find(names, model).as_deref(), expected, "{names:?}");
        }
    }

    #[test]
    fn every_type_that_llama_cpp_writes_has_a_rank() {
        for tag in [
            "F32",
            "F16",
            "BF16",
            "Q4_0",
            "Q4_1",
            "Q5_0",
            "Q5_1",
            "Q8_0",
            "Q2_K",
            "Q2_K_S",
            "Q3_K_S",
            "Q3_K_M",
            "Q3_K_L",
            "Q4_K_S",
            "Q4_K_M",
            "Q5_K_S",
            "Q5_K_M",
            "Q6_K",
            "IQ1_S",
            "IQ1_M",
            "IQ2_XXS",
            "IQ2_XS",
            "IQ2_S",
            "IQ2_M",
            "IQ3_XXS",
            "IQ3_XS",
            "IQ3_S",
            "IQ3_M",
            "IQ4_NL",
            "IQ4_XS",
            "TQ1_0",
            "TQ2_0",
            "MXFP4_MOE",
            "NVFP4",
            "Q1_0",
            "Q2_0",
            "UD-Q4_K_XL",
            "UD-IQ1_S",
        ] {
            assert!(rank(tag).is_some(), "{tag}");
            assert!(has_tag_shape(tag.trim_start_matches("UD-")), "{tag}");
        }
        assert_eq!((rank("IQ4_KSS"), rank("KQUANT-17GB")), (None, None));
        assert!(rank("Q4_K_M") < rank("UD-Q4_K_M") && rank("UD-Q4_K_M") < rank("UD-Q4_K_XL"));
        assert!(is_quantised("UD-Q8_K_XL") && is_quantised("MXFP4") && !is_quantised("BF16"));
    }

    #[test]
    fn a_tag_may_leave_out_the_dynamic_mark() {
        let files = group(&["m-UD-Q4_K_XL.gguf"]);
        assert!(
            !files[0].has_tag("q4_k_xl")
                && files[0].ends_with_tag("q4_k_xl")
                && files[0].has_tag("ud-q4_k_xl")
        );
        assert!(!group(&["m-IQ4_XS.gguf"])[0].ends_with_tag("Q4_XS"));
        let file = &group(&["Qwen3-8B-Instruct-Q4_K_M-imat.gguf"])[0];
        assert!(file.contains_tag("instruct-q4_k_m") && file.contains_tag("8B"), "as llama.cpp");
        assert!(!file.contains_tag("struct") && !file.contains_tag("q4_k"));
    }
}
