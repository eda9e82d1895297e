//! Tables of listings and what is chosen from them.

use super::*;

const GIB: u64 = 1 << 30;

/// Lists files with sizes in GiB.
fn listing(files: &[(&str, u64)]) -> Vec<ListedFile> {
    files.iter().map(|(path, gib)| ListedFile { path: (*path).to_owned(), bytes: gib * GIB }).collect()
}

fn chosen(
    files: &[(&str, u64)],
    selector: &str,
    memory_gib: Option<u64>,
) -> Result<FileChoice, FileChoiceError> {
    let selector = match selector {
        "" => None,
        file if file.ends_with(".gguf") => Some(Selector::File(file.to_owned())),
        tag => Some(Selector::Quant(tag.to_owned())),
    };
    choose(&FileRequest {
        id: "o/m",
        files: &listing(files),
        selector: selector.as_ref(),
        memory: memory_gib.map(|gib| gib * GIB),
        is_cached: false,
    })
}

/// Returns the first file of the choice, or the candidates with a mark of the error.
fn first(files: &[(&str, u64)], selector: &str, memory_gib: Option<u64>) -> String {
    let list = |candidates: Vec<ModelCandidate>| {
        candidates.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    match chosen(files, selector, memory_gib) {
        Ok(choice) => choice.first.unwrap_or_else(|| "checkpoint".to_owned()),
        Err(FileChoiceError::Ambiguous(candidates)) => format!("any of {}", list(candidates)),
        Err(FileChoiceError::Unknown(candidates)) => format!("none of {}", list(candidates)),
        Err(FileChoiceError::NoModel(message)) => message,
    }
}

/// The files of a popular publisher, with sizes as of an 8B model.
const PUBLISHED: &[(&str, u64)] = &[
    ("BF16/m-BF16-00001-of-00002.gguf", 8),
    ("BF16/m-BF16-00002-of-00002.gguf", 8),
    ("README.md", 0),
    ("config.json", 0),
    ("imatrix_unsloth.gguf", 0),
    ("m-IQ4_NL.gguf", 5),
    ("m-Q2_K.gguf", 3),
    ("m-Q3_K_M.gguf", 4),
    ("m-Q4_K_M.gguf", 6),
    ("m-Q8_0.gguf", 9),
    ("m-UD-IQ1_S.gguf", 2),
    ("m-UD-Q4_K_XL.gguf", 6),
    ("mmproj-BF16.gguf", 1),
    ("mtp-m-Q8_0.gguf", 1),
];

#[test]
fn without_a_tag_four_bits_that_fit() {
    for (memory, expected) in [
        (None, "m-Q4_K_M.gguf"),
        (Some(64), "m-Q4_K_M.gguf"),
        (Some(8), "m-IQ4_NL.gguf"),
        (Some(6), "m-Q3_K_M.gguf"),
        (Some(5), "m-Q2_K.gguf"),
        (Some(3), "m-UD-IQ1_S.gguf"),
        (Some(1), "m-UD-IQ1_S.gguf"),
    ] {
        assert_eq!(first(PUBLISHED, "", memory), expected, "{memory:?}");
        assert_eq!(first(PUBLISHED, "latest", memory), expected, "{memory:?}");
    }
}

#[test]
fn the_notice_gives_the_reason() {
    let notice = |memory| chosen(PUBLISHED, "", memory).expect("found").notice.expect("a notice").to_string();
    let has = "o/m has BF16, IQ4_NL, Q2_K, Q3_K_M, Q4_K_M, Q8_0, UD-IQ1_S, UD-Q4_K_XL; using";
    assert_eq!(notice(None), format!("{has} Q4_K_M"));
    assert_eq!(
        notice(Some(8)),
        format!(
            "{has} IQ4_NL (5.0 GiB), because Q4_K_M (6.0 GiB) does not fit this machine's memory (8.0 GiB)"
        )
    );
    assert_eq!(
        notice(Some(1)),
        format!(
            "{has} UD-IQ1_S (2.0 GiB), the smallest, although it does not fit this machine's memory (1.0 GiB)"
        )
    );
    assert_eq!(chosen(&[("m-Q8_0.gguf", 9)], "", Some(1)).expect("found").notice, None, "no choice");
    assert_eq!(chosen(PUBLISHED, "q8_0", Some(1)).expect("found").notice, None, "the user's choice");
}

#[test]
fn many_names_are_not_all_listed() {
    let files: Vec<(String, u64)> =
        (0..12).map(|n| (format!("{n}/m-Q{}_{}.gguf", n % 6 + 2, n / 6), 1)).collect();
    let files: Vec<(&str, u64)> = files.iter().map(|(path, gib)| (path.as_str(), *gib)).collect();
    let notice = chosen(&files, "", None).expect("found").notice.expect("a notice").to_string();
    assert!(notice.contains(" and 4 others; using Q4_1"), "{notice}");
}

#[test]
fn without_q4_k_m_the_nearest() {
    for (files, expected) in [
        (&["m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "m-Q5_K_M.gguf"][..], "m-UD-Q4_K_XL.gguf"),
        (&["m-IQ4_XS.gguf", "m-IQ4_NL.gguf", "m-Q5_K_M.gguf"], "m-IQ4_NL.gguf"),
        (&["m-F16.gguf", "m-MXFP4_MOE.gguf"], "m-MXFP4_MOE.gguf"),
        (&["m-Q8_0.gguf", "m-Q5_K_S.gguf", "m-Q3_K_L.gguf"], "m-Q5_K_S.gguf"),
        (&["m-Q8_0.gguf", "m-Q3_K_L.gguf"], "m-Q8_0.gguf"),
        (&["m-BF16.gguf", "m-IQ2_M.gguf"], "m-IQ2_M.gguf"),
        (&["m-F16.gguf", "m-Q1_0.gguf"], "m-Q1_0.gguf"),
        (&["m-F16.gguf", "m-BF16.gguf"], "m-F16.gguf"),
        (&["m-NVFP4.gguf", "m-Q8_0.gguf"], "m-NVFP4.gguf"),
    ] {
        let files: Vec<(&str, u64)> = files.iter().map(|path| (*path, 1)).collect();
        assert_eq!(first(&files, "", None), expected);
    }
}

#[test]
fn tags_as_llama_cpp_finds_them() {
    for (tag, expected) in [
        ("Q8_0", "m-Q8_0.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-IQ1_S", "m-UD-IQ1_S.gguf"),
        ("bf16", "BF16/m-BF16-00001-of-00002.gguf"),
        ("m-q2_k", "m-Q2_K.gguf"),
        ("m", "any of o/m:Q3_K_M (4.0 GiB), o/m:Q4_K_M (6.0 GiB)"),
    ] {
        assert_eq!(first(PUBLISHED, tag, Some(1)), expected, "{tag}");
    }
    let candidates = first(PUBLISHED, "Q6_K", None);
    assert!(candidates.starts_with("none of ") && candidates.contains("o/m:Q2_K (3.0 GiB)"), "{candidates}");
}

#[test]
fn a_file_by_name_may_be_a_companion() {
    assert_eq!(first(PUBLISHED, "mmproj-BF16.gguf", None), "mmproj-BF16.gguf");
    assert_eq!(first(PUBLISHED, "BF16/m-BF16-00002-of-00002.gguf", None), "BF16/m-BF16-00001-of-00002.gguf");
    assert!(first(PUBLISHED, "m-Q9.gguf", None).starts_with("none of "));
}

#[test]
fn all_parts_are_files_of_the_choice() {
    let choice = chosen(PUBLISHED, "BF16", None).expect("found");
    assert_eq!(choice.files, ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]);
    assert_eq!((choice.bytes, choice.missing, choice.first.is_some()), (16 * GIB, None, true));
    let cut = chosen(&PUBLISHED[1..], "BF16", None).expect("found");
    assert_eq!(cut.missing.as_deref(), Some("BF16/m-BF16-00001-of-00002.gguf"));
    let whole = first(&[("a-Q4_K_M-00001-of-00002.gguf", 1), ("a-Q8_0.gguf", 2)], "", None);
    assert_eq!(whole, "a-Q8_0.gguf", "a whole file is preferred to one that lacks a part");
}

#[test]
fn a_checkpoint_beside_gguf_files() {
    let with = |gguf: &[(&'static str, u64)]| {
        let checkpoint = [("config.json", 0), ("model.safetensors", 5), ("tokenizer.json", 0)];
        [&checkpoint, gguf].concat()
    };
    let quantised = with(&[("m-F16.gguf", 5), ("m-Q4_0.gguf", 2)]);
    assert_eq!(first(&quantised, "", None), "m-Q4_0.gguf");
    assert_eq!(first(&quantised, "safetensors", None), "checkpoint");
    let notice = chosen(&quantised, "", None).expect("found").notice.expect("a notice").to_string();
    assert_eq!(notice, "o/m has F16, Q4_0, safetensors; using Q4_0");
    // Not more precise than the checkpoint, only larger (google/gemma-2b.gguf is in f32).
    for floats in [&[("gemma-2b.gguf", 10)][..], &[("m-F16.gguf", 5)]] {
        let choice = chosen(&with(floats), "", None).expect("found");
        assert_eq!((choice.first, choice.bytes), (None, 5 * GIB));
        assert_eq!(choice.files, ["config.json", "tokenizer.json", "model.safetensors"]);
        assert!(choice.notice.expect("a notice").to_string().ends_with("; using safetensors"));
    }
    assert_eq!(chosen(&with(&[]), "", None).expect("found").notice, None);
    assert!(first(&with(&[]), "Q4_K_M", None).contains("o/m:safetensors (5.0 GiB)"));
}

#[test]
fn two_models_are_ambiguous_with_their_sizes() {
    let files = [("base-Q8_0.gguf", 1), ("chat-Q8_0.gguf", 2)];
    for selector in ["", "Q8_0"] {
        assert_eq!(
            first(&files, selector, None),
            "any of hf:o/m:base-Q8_0.gguf (1.0 GiB), hf:o/m:chat-Q8_0.gguf (2.0 GiB)"
        );
    }
    let unranked = [("a.gguf", 1), ("b.gguf", 2)];
    assert_eq!(first(&unranked, "", Some(8)), "any of hf:o/m:a.gguf (1.0 GiB), hf:o/m:b.gguf (2.0 GiB)");
    assert_eq!(first(&unranked[..1], "", Some(8)), "a.gguf");
}

#[test]
fn a_listing_without_a_model_is_described() {
    for (files, word) in [
        (&[("config.json", 0), ("pytorch_model.bin", 1)][..], ".bin"),
        (&[("adapter_config.json", 0), ("adapter_model.safetensors", 1)], "LoRA"),
        (&[("mmproj-F16.gguf", 1)], "companions"),
        (&[("consolidated.safetensors", 1), ("params.json", 0)], "consolidated"),
        (&[("README.md", 0)], "neither"),
    ] {
        let message = first(files, "", None);
        assert!(message.contains(word), "{message}");
    }
}
