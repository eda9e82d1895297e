//! Finds the files of a repository that a reference needs, by the rule for snapshots: [`choose`].
//!
//! Pure: decides over a listing. The weights of a checkpoint with an index are those that the index names,
//! which the caller downloads first.

use std::collections::BTreeSet;

use super::super::choice::{FileChoice, FileChoiceError, FileRequest, choose, gguf_reference};
use super::super::quant_tag::group_shards;
use super::super::reference::HubRef;
use super::super::repo_files::{ListedFile, text_files};
use super::error::HubError;
use super::listing::{RemoteFile, RemoteListing};
use llmctl_base::notice::Notice;

/// Folder of further chat templates.
const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

/// The index of weights in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Files that transformers looks for and that many repositories lack.
const OPTIONAL: [&str; 4] =
    ["generation_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"];

/// The files to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteSelection {
    pub files: Vec<RemoteFile>,
    /// Files that others look for and that the commit does not have.
    pub absent: Vec<String>,
    /// The weights are those that the index names.
    pub needs_index: bool,
    /// Reference for `--model`.
    pub reference: String,
    pub notice: Option<Notice>,
}

/// The parts of a model that are downloaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullExtent {
    /// Weights and texts, and the vision tower of a GGUF file (mmproj).
    #[default]
    Whole,
    /// As `Whole`, without the mmproj file.
    WithoutProjector,
    /// Only the texts of a checkpoint.
    Texts,
}

/// Chooses the files that `hub` needs. `memory` is the machine's, in bytes.
///
/// # Errors
/// [`HubError::FileNotFound`], [`HubError::SeveralFiles`] or [`HubError::NoModel`].
pub(super) fn select(
    listing: &RemoteListing,
    hub: &HubRef,
    memory: Option<u64>,
    extent: PullExtent,
) -> Result<RemoteSelection, HubError> {
    let at = hub.revision.as_ref().map(|revision| format!("@{revision}")).unwrap_or_default();
    let id = format!("{}{at}", listing.repo);
    let listed = |file: &RemoteFile| ListedFile { path: file.path.clone(), bytes: file.size };
    let files: Vec<ListedFile> = listing.files.iter().map(listed).collect();
    if extent == PullExtent::Texts {
        return texts_alone(listing, &files, id);
    }
    let request =
        FileRequest { id: &id, files: &files, selector: hub.selector.as_ref(), memory, is_cached: false };
    let mut choice = choose(&request).map_err(|error| refusal(error, listing, hub))?;
    choice.projector = choice.projector.filter(|_| extent == PullExtent::Whole);
    let reference = match (&hub.selector, &choice.first) {
        (Some(selector), _) => format!("{id}:{selector}"),
        (None, None) => id,
        (None, Some(first)) => {
            let groups = group_shards(&files);
            let group = groups.iter().find(|group| group.first == *first);
            group.map_or_else(|| id.clone(), |group| gguf_reference(&id, group, &groups))
        }
    };
    match choice.first {
        Some(_) => gguf(listing, choice, reference),
        None => checkpoint(listing, &files, choice, reference),
    }
}

fn refusal(error: FileChoiceError, listing: &RemoteListing, hub: &HubRef) -> HubError {
    let repo = listing.repo.clone();
    let shown = |candidates: Vec<llmctl_base::error::ModelCandidate>| -> Vec<String> {
        candidates.iter().map(ToString::to_string).collect()
    };
    match error {
        FileChoiceError::NoModel(message) => HubError::NoModel { repo, message },
        FileChoiceError::Ambiguous(candidates) => {
            HubError::SeveralFiles { reference: repo, candidates: shown(candidates) }
        }
        FileChoiceError::Unknown(candidates) => {
            let wanted = hub.selector.as_ref().map_or_else(|| "model".to_owned(), ToString::to_string);
            HubError::FileNotFound { repo, wanted, candidates: shown(candidates) }
        }
    }
}

fn gguf(listing: &RemoteListing, choice: FileChoice, reference: String) -> Result<RemoteSelection, HubError> {
    if let Some(missing) = choice.missing {
        let message = format!("lacks a part of a split model: {missing}");
        return Err(HubError::NoModel { repo: listing.repo.clone(), message });
    }
    let paths = choice.files.iter().chain(&choice.projector);
    let files = paths.filter_map(|path| listing.file(path)).cloned().collect();
    let notice = choice.notice;
    Ok(RemoteSelection { files, absent: Vec::new(), needs_index: false, reference, notice })
}

/// Chooses the texts of a checkpoint, and its weights or the index that names them.
fn checkpoint(
    listing: &RemoteListing,
    listed: &[ListedFile],
    choice: FileChoice,
    reference: String,
) -> Result<RemoteSelection, HubError> {
    let mut files = texts(listing, listed);
    let needs_index = choice.files.iter().any(|path| path == INDEX);
    let is_weight = |path: &&String| path.ends_with(".safetensors") && !needs_index;
    let weights = choice.files.iter().filter(|path| *path == INDEX || is_weight(path));
    files.extend(weights.filter_map(|path| listing.file(path)).cloned());
    let notice = choice.notice;
    Ok(RemoteSelection { files, absent: absent(listing), needs_index, reference, notice })
}

fn texts_alone(
    listing: &RemoteListing,
    listed: &[ListedFile],
    reference: String,
) -> Result<RemoteSelection, HubError> {
    let files = texts(listing, listed);
    if files.is_empty() {
        let message =
            "has no text files of its own: a GGUF file holds its tokenizer and its template".to_owned();
        return Err(HubError::NoModel { repo: listing.repo.clone(), message });
    }
    Ok(RemoteSelection { files, absent: absent(listing), needs_index: false, reference, notice: None })
}

fn texts(listing: &RemoteListing, listed: &[ListedFile]) -> Vec<RemoteFile> {
    let texts = text_files(listed);
    let is_text = |file: &&RemoteFile| {
        let is_template = file.path.starts_with(TEMPLATE_FOLDER) && file.path.ends_with(".jinja");
        is_template || texts.iter().any(|text| text.path == file.path)
    };
    listing.files.iter().filter(is_text).cloned().collect()
}

fn absent(listing: &RemoteListing) -> Vec<String> {
    let is_absent = |name: &&&str| listing.is_whole && listing.file(name).is_none();
    OPTIONAL.iter().filter(is_absent).map(|name| (*name).to_owned()).collect()
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
    use super::super::super::reference::Selector;
    use super::super::listing::FileHash;
    use super::*;

    fn chosen(
        listing: &RemoteListing,
        selector: Option<Selector>,
        extent: PullExtent,
    ) -> Result<RemoteSelection, HubError> {
        let hub = HubRef { org: Some("o".to_owned()), repo: "m".to_owned(), revision: None, selector };
        select(listing, &hub, None, extent)
    }

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

    #[test]
    fn a_checkpoint_needs_its_texts_and_what_the_index_names() {
        let listing = listing(&[
            "README.md",
            "config.json",
            "tokenizer.json",
            "additional_chat_templates/rag.jinja",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
            "model.safetensors.index.json",
        ]);
        let found = chosen(&listing, None, PullExtent::Whole).expect("a model");
        let texts = ["config.json", "tokenizer.json", "additional_chat_templates/rag.jinja"];
        assert_eq!(paths(&found), [&texts[..], &["model.safetensors.index.json"]].concat());
        assert!(found.needs_index && found.absent.contains(&"generation_config.json".to_owned()));
        assert_eq!(found.reference, "o/m");
        let index = br#"{"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
            "c": "model-00001-of-00002.safetensors"}}"#;
        let weights = indexed_weights(&listing, index).expect("complete");
        let names: Vec<_> = weights.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
        let error =
            indexed_weights(&listing, br#"{"weight_map": {"a": "../../x"}}"#).expect_err("not in the commit");
        assert!(error.to_string().contains("../../x"), "{error}");
        assert_eq!(paths(&chosen(&listing, None, PullExtent::Texts).expect("texts")), texts);
    }

    #[test]
    fn a_gguf_with_all_its_parts() {
        let names = [
            "m-Q8_0.gguf",
            "Q4/m-Q4_K_M-00001-of-00002.gguf",
            "Q4/m-Q4_K_M-00002-of-00002.gguf",
            "mmproj-F16.gguf",
        ];
        let listing = listing(&names);
        let preferred = chosen(&listing, None, PullExtent::Whole).expect("a model");
        assert_eq!(paths(&preferred), names[1..]);
        assert!(preferred.reference == "o/m:Q4_K_M" && preferred.notice.is_some(), "{preferred:?}");
        let file = Selector::File("Q4/m-Q4_K_M-00002-of-00002.gguf".to_owned());
        assert_eq!(
            paths(&chosen(&listing, Some(file), PullExtent::Whole).expect("a part names all")),
            names[1..]
        );
        let tag = |tag: &str| chosen(&listing, Some(Selector::Quant(tag.to_owned())), PullExtent::Whole);
        assert_eq!(paths(&tag("q8_0").expect("a tag")), [names[0], names[3]]);
        let Err(HubError::FileNotFound { wanted, candidates, .. }) = tag("Q5_K_M") else {
            panic!("no such file")
        };
        assert!(
            wanted == "Q5_K_M" && candidates.len() == 2 && candidates[0].contains("GiB"),
            "{candidates:?}"
        );
    }

    #[test]
    fn a_repository_without_a_model_says_what_it_holds() {
        let message = |paths: &[&str]| {
            chosen(&listing(paths), None, PullExtent::Whole).expect_err("no model").to_string()
        };
        assert!(message(&["config.json", "pytorch_model.bin"]).contains("PyTorch"));
        assert!(message(&["adapter_config.json", "adapter_model.safetensors"]).contains("LoRA"));
        assert!(message(&["README.md"]).contains("neither config.json"));
        let error =
            chosen(&listing(&["m-Q8_0.gguf"]), None, PullExtent::Texts).expect_err("no texts").to_string();
        assert!(error.contains("a GGUF file holds its tokenizer"), "{error}");
        assert!(message(&["m-Q8_0-00001-of-00002.gguf"]).contains("m-Q8_0-00002-of-00002.gguf"));
    }
}
