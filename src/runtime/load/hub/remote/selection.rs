//! Chooses the files of a repository that a reference needs. Pure: decides over a listing.
//!
//! A repository in transformers' form needs its configuration, its tokenizer, its templates and the weights that its
//! index names; one in GGUF form needs one model, with all its parts.

use std::collections::BTreeSet;

use super::super::quant_tag::{self, GgufGroup, group_shards};
use super::super::reference::Selector;
use super::error::HubError;
use super::listing::{RemoteFile, RemoteListing};
use crate::runtime::notice::Notice;

/// Text files that llmctl reads, and those by which it recognises quantised weights.
const TEXTS: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
    "hf_quant_config.json",
];

/// Folder of further chat templates.
const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

/// Weights in one file, and the index of weights in several.
const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The files to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteSelection {
    pub files: Vec<RemoteFile>,
    /// Files that were looked for and that the commit does not have.
    pub absent: Vec<String>,
    /// The weights are those that the index names.
    pub needs_index: bool,
    /// What to write after `--model`: the repository, with a tag or a file if there are several.
    pub selector: Option<String>,
    pub notices: Vec<Notice>,
}

/// Chooses the files that `selector` needs; with `only_texts` no weights.
///
/// # Errors
/// [`HubError::FileNotFound`], [`HubError::SeveralFiles`] or [`HubError::NoModel`].
pub(super) fn select(
    listing: &RemoteListing,
    selector: Option<&Selector>,
    only_texts: bool,
) -> Result<RemoteSelection, HubError> {
    let is_checkpoint = listing.file("config.json").is_some() && listing.files.iter().any(is_root_weight);
    if only_texts {
        return texts_alone(listing);
    }
    if selector.is_none() && is_checkpoint {
        return Ok(checkpoint(listing));
    }
    let names: Vec<String> = listing.files.iter().map(|file| file.path.clone()).collect();
    let names: Vec<String> = names.into_iter().filter(|name| name.ends_with(".gguf")).collect();
    let groups = group_shards(&names);
    let (group, notices) = choose(listing, &groups, selector)?;
    if let Some(missing) = group.missing_part() {
        let message = format!("lacks a part of a split model: {missing}");
        return Err(HubError::NoModel { repo: listing.repo.clone(), message });
    }
    let files = group.parts.iter().filter_map(|path| listing.file(path)).cloned().collect();
    let selector = Some(reference_part(group, &groups));
    Ok(RemoteSelection { files, absent: Vec::new(), needs_index: false, selector, notices })
}

/// Chooses one GGUF model.
fn choose<'a>(
    listing: &RemoteListing,
    groups: &'a [GgufGroup],
    selector: Option<&Selector>,
) -> Result<(&'a GgufGroup, Vec<Notice>), HubError> {
    let shown = |groups: Vec<&GgufGroup>| candidates(listing, &groups);
    let missing = |wanted: &str| HubError::FileNotFound {
        repo: listing.repo.clone(),
        wanted: wanted.to_owned(),
        candidates: shown(groups.iter().collect()),
    };
    let several = |matches: Vec<&GgufGroup>| HubError::SeveralFiles {
        reference: listing.repo.clone(),
        candidates: shown(matches),
    };
    match selector {
        Some(Selector::File(file)) => {
            let found = groups.iter().find(|group| group.parts.contains(file));
            found.map(|group| (group, Vec::new())).ok_or_else(|| missing(file))
        }
        Some(Selector::Quant(tag)) => {
            let mut matches: Vec<&GgufGroup> = groups.iter().filter(|group| group.has_tag(tag)).collect();
            if matches.is_empty() {
                matches = groups.iter().filter(|group| group.ends_with_tag(tag)).collect();
            }
            match matches[..] {
                [] => Err(missing(&format!("{tag} file"))),
                [only] => Ok((only, Vec::new())),
                _ => Err(several(matches)),
            }
        }
        None => match groups {
            [] => Err(HubError::NoModel { repo: listing.repo.clone(), message: what_it_holds(listing) }),
            [only] => Ok((only, Vec::new())),
            _ => {
                let best = quant_tag::preferred(groups).ok_or_else(|| several(groups.iter().collect()))?;
                Ok((best, vec![chosen_notice(listing, groups, best)]))
            }
        },
    }
}

fn chosen_notice(listing: &RemoteListing, groups: &[GgufGroup], best: &GgufGroup) -> Notice {
    let tag = |group: &GgufGroup| group.tag.as_ref().unwrap_or(&group.first).clone();
    let mut offered: Vec<String> = groups.iter().map(tag).collect();
    offered.dedup();
    Notice::RemoteQuantisation { repo: listing.repo.clone(), offered, chosen: tag(best) }
}

/// Formats references to models, each with its size.
fn candidates(listing: &RemoteListing, groups: &[&GgufGroup]) -> Vec<String> {
    let size = |group: &GgufGroup| -> u64 {
        group.parts.iter().filter_map(|path| listing.file(path)).map(|file| file.size).sum()
    };
    let all: Vec<GgufGroup> = groups.iter().map(|group| (*group).clone()).collect();
    let name = |group: &GgufGroup| format!("{}:{}", listing.repo, reference_part(group, &all));
    groups.iter().map(|group| format!("{} ({:.1} GB)", name(group), size(group) as f64 / 1e9)).collect()
}

/// Returns the tag of a model if no other one has it, else its first file.
fn reference_part(group: &GgufGroup, groups: &[GgufGroup]) -> String {
    match &group.tag {
        Some(tag) if groups.iter().filter(|other| other.has_tag(tag)).count() == 1 => tag.clone(),
        _ => group.first.clone(),
    }
}

/// Says why a repository has no model.
fn what_it_holds(listing: &RemoteListing) -> String {
    let has = |ending: &str| listing.files.iter().any(|file| file.path.ends_with(ending));
    if listing.file("adapter_config.json").is_some() {
        "holds a LoRA adapter, which llmctl does not support: use its base model, or a merged one"
    } else if has(".bin") || has(".pth") || has(".pt") {
        "holds PyTorch weights, which llmctl does not read; look for its safetensors or GGUF form"
    } else if has(".onnx") {
        "holds ONNX files, which llmctl does not read; look for its safetensors or GGUF form"
    } else {
        "holds neither a GGUF file nor config.json with safetensors"
    }
    .to_owned()
}

fn is_root_weight(file: &RemoteFile) -> bool {
    file.path == SINGLE || file.path == INDEX
}

/// Chooses the texts and the weights of a repository in transformers' form.
fn checkpoint(listing: &RemoteListing) -> RemoteSelection {
    let (mut files, absent) = texts(listing);
    let single = listing.file(SINGLE);
    files.extend(single.or_else(|| listing.file(INDEX)).cloned());
    let needs_index = single.is_none();
    RemoteSelection { files, absent, needs_index, selector: None, notices: Vec::new() }
}

fn texts_alone(listing: &RemoteListing) -> Result<RemoteSelection, HubError> {
    let (files, absent) = texts(listing);
    if files.is_empty() {
        let message =
            "has no text files of its own: a GGUF file holds its tokenizer and its template".to_owned();
        return Err(HubError::NoModel { repo: listing.repo.clone(), message });
    }
    Ok(RemoteSelection { files, absent, needs_index: false, selector: None, notices: Vec::new() })
}

/// Returns the text files that exist, and the names of those that do not.
fn texts(listing: &RemoteListing) -> (Vec<RemoteFile>, Vec<String>) {
    let mut files: Vec<RemoteFile> = TEXTS.iter().filter_map(|name| listing.file(name)).cloned().collect();
    let templates = listing.files.iter().filter(|file| file.path.starts_with(TEMPLATE_FOLDER));
    files.extend(templates.filter(|file| file.path.ends_with(".jinja")).cloned());
    let absent = TEXTS.iter().filter(|name| listing.file(name).is_none()).map(|name| (*name).to_owned());
    (files, absent.collect())
}

/// Returns the files of weights that an index names.
///
/// # Errors
/// [`HubError::NoModel`] for an index that is damaged or names files that the commit does not have.
pub(super) fn indexed_weights(listing: &RemoteListing, index: &[u8]) -> Result<Vec<RemoteFile>, HubError> {
    let refusal = |message: String| HubError::NoModel { repo: listing.repo.clone(), message };
    let index: serde_json::Value =
        serde_json::from_slice(index).map_err(|error| refusal(format!("has a damaged {INDEX}: {error}")))?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| refusal(format!("has a damaged {INDEX}: no weight_map")))?;
    let names: BTreeSet<&str> = map.values().filter_map(|name| name.as_str()).collect();
    let file = |name: &str| {
        listing.file(name).cloned().ok_or_else(|| refusal(format!("lacks {name:?}, which its {INDEX} names")))
    };
    names.into_iter().map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::super::listing::FileHash;
    use super::*;

    fn listing(paths: &[&str]) -> RemoteListing {
        let file = |path: &&str| RemoteFile {
            path: (*path).to_owned(),
            size: 1_500_000_000,
            hash: FileHash::parse(&"a".repeat(64)).expect("hex"),
            blob_id: "b".repeat(40),
            xet_hash: None,
        };
        RemoteListing {
            repo: "o/m".to_owned(),
            renamed: None,
            revision: "main".to_owned(),
            commit: "c".repeat(40),
            files: paths.iter().map(file).collect(),
            is_whole: true,
        }
    }

    fn paths(selection: &RemoteSelection) -> Vec<&str> {
        selection.files.iter().map(|file| file.path.as_str()).collect()
    }

    const CHECKPOINT: [&str; 9] = [
        "README.md",
        "config.json",
        "tokenizer.json",
        "additional_chat_templates/rag.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
        "model.safetensors.index.json",
        "onnx/model.onnx",
    ];

    #[test]
    fn a_checkpoint_needs_its_texts_and_what_the_index_names() {
        let listing = listing(&CHECKPOINT);
        let chosen = select(&listing, None, false).expect("a model");
        let expected = [
            "config.json",
            "tokenizer.json",
            "additional_chat_templates/rag.jinja",
            "model.safetensors.index.json",
        ];
        assert_eq!(paths(&chosen), expected);
        assert!(chosen.needs_index && chosen.absent.contains(&"generation_config.json".to_owned()));
        let index = br#"{"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
            "c": "model-00001-of-00002.safetensors"}}"#;
        let weights = indexed_weights(&listing, index).expect("complete");
        let names: Vec<_> = weights.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
        let error =
            indexed_weights(&listing, br#"{"weight_map": {"a": "../../x"}}"#).expect_err("not in the commit");
        assert!(error.to_string().contains("../../x"), "{error}");
        let texts = select(&listing, None, true).expect("texts");
        assert_eq!(paths(&texts), ["config.json", "tokenizer.json", "additional_chat_templates/rag.jinja"]);
    }

    #[test]
    fn a_gguf_with_all_its_parts() {
        let names = [
            "config.json",
            "m-Q8_0.gguf",
            "Q4/m-Q4_K_M-00001-of-00002.gguf",
            "Q4/m-Q4_K_M-00002-of-00002.gguf",
        ];
        let listing = listing(&names);
        let chosen = |selector: Option<&Selector>| select(&listing, selector, false);
        let parts = &names[2..];
        let preferred = chosen(None).expect("a model");
        assert_eq!(paths(&preferred), parts);
        assert_eq!((preferred.selector.as_deref(), preferred.notices.len()), (Some("Q4_K_M"), 1));
        let file = Selector::File("Q4/m-Q4_K_M-00002-of-00002.gguf".to_owned());
        assert_eq!(paths(&chosen(Some(&file)).expect("a part names all")), parts);
        assert_eq!(
            paths(&chosen(Some(&Selector::Quant("q8_0".to_owned()))).expect("a tag")),
            ["m-Q8_0.gguf"]
        );
        let error = chosen(Some(&Selector::Quant("Q5_K_M".to_owned()))).expect_err("no such file");
        let HubError::FileNotFound { candidates, .. } = error else { panic!("{error:?}") };
        assert_eq!(candidates, ["o/m:Q4_K_M (3.0 GB)", "o/m:Q8_0 (1.5 GB)"]);
    }

    #[test]
    fn a_repository_without_a_model_says_what_it_holds() {
        let message =
            |paths: &[&str]| select(&listing(paths), None, false).expect_err("no model").to_string();
        assert!(message(&["config.json", "pytorch_model.bin"]).contains("PyTorch"));
        assert!(message(&["adapter_config.json", "adapter_model.safetensors"]).contains("LoRA"));
        assert!(message(&["README.md"]).contains("neither a GGUF"));
        let error = select(&listing(&["m-Q8_0.gguf"]), None, true).expect_err("no texts").to_string();
        assert!(error.contains("a GGUF file holds its tokenizer"), "{error}");
        let halves = ["m-Q8_0-00001-of-00002.gguf"];
        assert!(message(&halves).contains("m-Q8_0-00002-of-00002.gguf"));
    }
}
