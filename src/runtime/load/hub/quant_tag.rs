//! Parses GGUF file names: the quantisation, and the parts of split models.
//!
//! Names are a convention, not a format (ggml's `docs/gguf.md`, "GGUF Naming Convention", and the practice of
//! publishers): `Name-1B-Q4_K_M.gguf`, `name.q8_0.gguf`, `Name-UD-Q4_K_XL.gguf`,
//! `BF16/Name-BF16-00001-of-00002.gguf`. Pure functions. Vision projectors (`mmproj`) are not models and are left
//! out.

use std::collections::BTreeMap;

/// Preference among several quantisations if the user names none: the usual compromise between size and quality
/// first, then its neighbours, then the large ones. Contains only types that llmctl runs.
pub const PREFERENCE: [&str; 18] = [
    "Q4_K_M",
    "Q4_K_S",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q6_K",
    "Q8_0",
    "Q3_K_L",
    "Q3_K_M",
    "Q3_K_S",
    "Q2_K",
    "F16",
    "BF16",
    "F32",
    "UD-Q4_K_XL",
];

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

    /// Returns the first missing part.
    pub fn missing_part(&self) -> Option<String> {
        if self.parts.len() == self.num_parts {
            return None;
        }
        let base = self.first.strip_suffix(&part_suffix(1, self.num_parts))?;
        (1..=self.num_parts)
            .map(|n| format!("{base}{}", part_suffix(n, self.num_parts)))
            .find(|p| !self.parts.contains(p))
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

/// Groups the parts of split files, sorted by name. `names` may contain folders (`BF16/x.gguf`).
pub fn group_shards(names: &[String]) -> Vec<GgufGroup> {
    let mut groups: BTreeMap<String, GgufGroup> = BTreeMap::new();
    for path in names {
        let (folder, name) =
            path.rsplit_once('/').map_or(("", path.as_str()), |(folder, name)| (folder, name));
        if name.to_ascii_lowercase().contains("mmproj") {
            continue;
        }
        let whole = name.get(..name.len().saturating_sub(5)).unwrap_or(name);
        let (stem, num_parts) = split_part(name).map_or((whole, 1), |(stem, _, count)| (stem, count));
        let split = split_part(name).is_some();
        let prefix = path.strip_suffix(name).unwrap_or_default();
        let first = if split { format!("{prefix}{stem}{}", part_suffix(1, num_parts)) } else { path.clone() };
        let tag = quant_tag(stem).or_else(|| quant_tag(folder.rsplit('/').next().unwrap_or_default()));
        let file =
            GgufGroup { first: first.clone(), parts: Vec::new(), num_parts, stem: stem.to_owned(), tag };
        groups.entry(first).or_insert(file).parts.push(path.clone());
    }
    let mut files: Vec<GgufGroup> = groups.into_values().collect();
    files.iter_mut().for_each(|file| file.parts.sort());
    files
}

/// Returns the file that [`PREFERENCE`] puts first; `None` if no file has a known tag, or two share the best one.
pub fn preferred(files: &[GgufGroup]) -> Option<&GgufGroup> {
    let with = |tag: &str| files.iter().filter(|f| f.has_tag(tag)).collect::<Vec<_>>();
    let best = PREFERENCE.iter().map(|tag| with(tag)).find(|found| !found.is_empty())?;
    if best.len() == 1 { best.first().copied() } else { None }
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

/// Matches `F32 F16 BF16 FP16 FP32 MXFP4 MXFP4_MOE`, or `Q|IQ|TQ` + digit + `_` words as in `Q4_K_M`, `IQ3_XXS`,
/// `Q8_0`.
fn has_tag_shape(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    if matches!(&*upper, "F32" | "F16" | "BF16" | "FP16" | "FP32" | "MXFP4" | "MXFP4_MOE") {
        return true;
    }
    let Some(rest) = ["IQ", "TQ", "Q"].iter().find_map(|prefix| upper.strip_prefix(prefix)) else {
        return false;
    };
    let mut words = rest.split('_');
    let bits =
        words.next().is_some_and(|word| word.len() == 1 && word.bytes().all(|b| (b'1'..=b'8').contains(&b)));
    bits && words.all(|word| {
        matches!(word, "K" | "0" | "1" | "4" | "8" | "XXS" | "XS" | "S" | "M" | "L" | "XL" | "NL")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(names: &[&str]) -> Vec<GgufGroup> {
        group_shards(&names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>())
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
        assert_eq!(files[1].missing_part(), None);
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
    fn projectors_are_no_models() {
        assert!(group(&["mmproj-F16.gguf", "x-mmproj-model.gguf"]).is_empty());
    }

    #[test]
    fn preference() {
        let choice = |names: &[&str]| preferred(&group(names)).map(|f| f.first.clone());
        assert_eq!(choice(&["m-F16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]).as_deref(), Some("m-Q4_K_M.gguf"));
        assert_eq!(choice(&["m-F16.gguf", "m-Q8_0.gguf"]).as_deref(), Some("m-Q8_0.gguf"));
        assert_eq!(choice(&["a-Q8_0.gguf", "b-Q8_0.gguf"]), None);
        assert_eq!(choice(&["m-IQ1_S.gguf", "m-IQ2_XS.gguf"]), None);
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
    }
}
