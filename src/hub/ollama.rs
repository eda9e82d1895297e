//! Reads ollama's model store: a manifest per model, and the GGUF file that it names.
//!
//! Layout (ollama's `manifest` and `types/model` packages): `manifests/<host>/<namespace>/<model>/<tag>` is a
//! JSON object with layers; `blobs/sha256-<hex>` holds a layer's bytes. Read only. Only the weights and the projector are used:
//! ollama's templates are in a language of its own, and its parameters belong to them; both are reported.
//! Models that are not one GGUF file are refused by name. Components of names are checked before they are
//! joined to a path.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{ModelSource, Resolved};
use llmctl_base::error::{LoadError, ModelCandidate};
use llmctl_base::notice::Notice;
use llmctl_base::read::read_optional;

/// Host, namespace and tag that ollama leaves out of a name.
const HOST: &str = "registry.ollama.ai";
const NAMESPACE: &str = "library";
const TAG: &str = "latest";

const LAYER: &str = "application/vnd.ollama.image.";

/// Kind of the layer with the vision tower.
const PROJECTOR: &str = "projector";

/// Most bytes of a manifest; one with a layer per tensor has a few hundred kilobytes.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// The name of a model of ollama.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OllamaName {
    host: String,
    namespace: String,
    model: String,
    tag: String,
}

impl OllamaName {
    /// Parses `[host/][namespace/]model[:tag]`.
    ///
    /// # Errors
    /// The part that no name can have.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // A port may follow the host, so the tag is what follows the last slash's colon.
        let (path, last) = text.rsplit_once('/').map_or((None, text), |(path, last)| (Some(path), last));
        let (model, tag) = last.split_once(':').unwrap_or((last, TAG));
        let (host, namespace) = match path {
            None => (HOST, NAMESPACE),
            Some(path) => path.rsplit_once('/').unwrap_or((HOST, path)),
        };
        for (part, marks) in [(host, "._-:"), (namespace, "._-"), (model, "._-"), (tag, "._-")] {
            let plain = |c: char| c.is_ascii_alphanumeric() || marks.contains(c);
            if part.is_empty() || part.starts_with('.') || part.len() > 128 || !part.chars().all(plain) {
                return Err(format!("{part:?} cannot be part of the name of a model of ollama"));
            }
        }
        let [host, namespace, model, tag] = [host, namespace, model, tag].map(str::to_owned);
        Ok(Self { host, namespace, model, tag })
    }

    /// Returns the name as short as ollama writes it, with the tag.
    pub fn short(&self) -> String {
        let Self { host, namespace, model, tag } = self;
        match (&**host, &**namespace) {
            (HOST, NAMESPACE) => format!("{model}:{tag}"),
            (HOST, _) => format!("{namespace}/{model}:{tag}"),
            _ => format!("{host}/{namespace}/{model}:{tag}"),
        }
    }

    fn manifest(&self, store: &Path) -> PathBuf {
        store.join("manifests").join(&self.host).join(&self.namespace).join(&self.model).join(&self.tag)
    }
}

#[derive(Debug, Deserialize)]
struct OllamaManifest {
    config: Option<OllamaLayer>,
    #[serde(default)]
    layers: Vec<OllamaLayer>,
}

#[derive(Debug, Deserialize)]
struct OllamaLayer {
    #[serde(rename = "mediaType")]
    media_type: String,
    digest: String,
    #[serde(default)]
    size: u64,
}

/// The facts of a config layer that are shown.
#[derive(Debug, Default, Deserialize)]
struct OllamaConfig {
    file_type: Option<String>,
}

impl OllamaLayer {
    /// Returns the layer's kind: `model`, `template`.
    fn kind(&self) -> &str {
        let media_type = self.media_type.split(';').next().unwrap_or_default();
        media_type.strip_prefix(LAYER).unwrap_or(media_type)
    }

    /// Returns the path of the layer's bytes; `None` if the digest is none.
    fn blob(&self, store: &Path) -> Option<PathBuf> {
        let hex = self.digest.strip_prefix("sha256:")?;
        let plain = hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit());
        plain.then(|| store.join("blobs").join(format!("sha256-{}", hex.to_ascii_lowercase())))
    }
}

/// A model in ollama's store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OllamaModel {
    /// Reference to write after `--model`.
    pub reference: String,
    /// The type that ollama states, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// Size of the weights.
    pub bytes: u64,
    /// The GGUF file, or why llmctl cannot open the model.
    pub file: Result<PathBuf, String>,
}

/// Lists the models of all stores, by reference. The first store that has a name counts, as in [`find`].
pub fn list(stores: &[PathBuf]) -> Vec<OllamaModel> {
    let mut models: Vec<OllamaModel> = Vec::new();
    for store in stores {
        for name in names(store) {
            let reference = format!("ollama:{}", name.short());
            if models.iter().all(|model| model.reference != reference) {
                models.push(describe(store, &name, reference));
            }
        }
    }
    models.sort_by(|a, b| a.reference.cmp(&b.reference));
    models
}

fn describe(store: &Path, name: &OllamaName, reference: String) -> OllamaModel {
    // A list shows the reference, so the manifest's path is left out where it is not at fault.
    let reason = |error: LoadError| match error {
        LoadError::Unsupported { message, .. } => message,
        error => error.to_string(),
    };
    let manifest = match read_manifest(store, name) {
        Ok(manifest) => manifest,
        Err(error) => {
            return OllamaModel { reference, quantization: None, bytes: 0, file: Err(reason(error)) };
        }
    };
    let weights = manifest.layers.iter().filter(|layer| matches!(layer.kind(), "model" | "tensor"));
    let config = manifest.config.as_ref().and_then(|layer| read_config(&layer.blob(store)?));
    OllamaModel {
        reference,
        quantization: config.and_then(|config| config.file_type),
        bytes: weights.fold(0, |sum, layer| sum.saturating_add(layer.size)),
        file: weights_of(&manifest, store, name).map_err(reason),
    }
}

fn read_config(path: &Path) -> Option<OllamaConfig> {
    serde_json::from_slice(&read_optional(path, MAX_MANIFEST_BYTES).ok()??).ok()
}

/// Lists the names below `manifests/`; links are followed, odd names are left out.
fn names(store: &Path) -> Vec<OllamaName> {
    let inside = |dir: &Path| -> Vec<(String, PathBuf)> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect()
    };
    let mut names = Vec::new();
    for (host, hosts) in inside(&store.join("manifests")) {
        for (namespace, namespaces) in inside(&hosts) {
            for (model, models) in inside(&namespaces) {
                let tags =
                    inside(&models).into_iter().map(|(tag, _)| format!("{host}/{namespace}/{model}:{tag}"));
                names.extend(tags.filter_map(|name| OllamaName::parse(&name).ok()));
            }
        }
    }
    names
}

/// Opens a model of one of the stores.
///
/// # Errors
/// [`LoadError::UnknownModel`] with the store's similar names; [`LoadError::Malformed`] for a damaged manifest;
/// [`LoadError::Unsupported`] if the model is not one GGUF file; [`LoadError::NotFound`] if that is missing.
pub(super) fn find(name: &OllamaName, stores: &[PathBuf]) -> Result<Resolved, LoadError> {
    let Some(store) = stores.iter().find(|store| name.manifest(store).is_file()) else {
        return Err(unknown(name, stores));
    };
    let manifest = read_manifest(store, name)?;
    let path = weights_of(&manifest, store, name)?;
    fs::metadata(&path).map_err(|error| LoadError::io(&path, &error))?;
    let mut unused: Vec<String> = manifest.layers.iter().map(|layer| layer.kind().to_owned()).collect();
    unused.retain(|kind| !matches!(&**kind, "model" | "license" | PROJECTOR));
    unused.dedup();
    let model = format!("ollama:{}", name.short());
    let notice = (!unused.is_empty()).then(|| Notice::UnusedLayers { model: model.clone(), kinds: unused });
    let mmproj = manifest.layers.iter().find(|layer| layer.kind() == PROJECTOR);
    let mmproj = mmproj.and_then(|layer| layer.blob(store)).filter(|path| path.is_file());
    let notices = notice.into_iter().collect();
    Ok(Resolved { notices, mmproj, ..Resolved::new(model, ModelSource::Gguf(path)) })
}

/// Returns the error for a name that no store has: with all tags of the model, or else the similar names.
fn unknown(name: &OllamaName, stores: &[PathBuf]) -> LoadError {
    let reference = format!("ollama:{}", name.short());
    let models = list(stores);
    let model = reference.rsplit_once(':').map_or(&*reference, |(model, _)| model);
    let same =
        |other: &&OllamaModel| other.reference.rsplit_once(':').is_some_and(|(other, _)| other == model);
    let of_model: Vec<ModelCandidate> = models.iter().filter(same).map(candidate).collect();
    if of_model.len() > 1 && name.tag == TAG {
        return LoadError::AmbiguousModel { reference, candidates: of_model };
    }
    let near = |other: &&OllamaModel| strsim::jaro_winkler(&other.reference, &reference) >= 0.85;
    let mut near: Vec<String> = models.iter().filter(near).map(|model| model.reference.clone()).collect();
    near.truncate(5);
    LoadError::UnknownModel { reference, candidates: near }
}

fn candidate(model: &OllamaModel) -> ModelCandidate {
    ModelCandidate { reference: model.reference.clone(), bytes: Some(model.bytes) }
}

fn read_manifest(store: &Path, name: &OllamaName) -> Result<OllamaManifest, LoadError> {
    let path = name.manifest(store);
    let bytes = read_optional(&path, MAX_MANIFEST_BYTES)?.ok_or_else(|| LoadError::NotFound(path.clone()))?;
    serde_json::from_slice(&bytes).map_err(|error| LoadError::malformed(&path, "manifest", error.to_string()))
}

/// Returns the GGUF file of a model, which may be missing.
fn weights_of(manifest: &OllamaManifest, store: &Path, name: &OllamaName) -> Result<PathBuf, LoadError> {
    let path = name.manifest(store);
    let unsupported =
        |message: &str| LoadError::Unsupported { path: path.clone(), message: message.to_owned() };
    let of_kind =
        |kind: &str| manifest.layers.iter().filter(|layer| layer.kind() == kind).collect::<Vec<_>>();
    if !of_kind("tensor").is_empty() {
        return Err(unsupported(
            "is an MLX model, with one layer per tensor, which llmctl does not read: pull a GGUF model instead",
        ));
    }
    if !of_kind("adapter").is_empty() {
        return Err(unsupported("has a LoRA adapter, which llmctl does not apply: use the base model"));
    }
    match of_kind("model")[..] {
        [] => Err(unsupported(
            "has no weights: it runs on a server of ollama, or is in a form unknown to llmctl",
        )),
        [weights] => weights.blob(store).ok_or_else(|| {
            LoadError::malformed(&path, "layer", format!("{:?} is no digest", weights.digest))
        }),
        _ => Err(unsupported(
            "is split into several GGUF layers, which llmctl does not join: use a model of one layer",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed_as_by_ollama() {
        for (text, short, manifest) in [
            ("llama3.2", "llama3.2:latest", "registry.ollama.ai/library/llama3.2/latest"),
            ("llama3.2:1b", "llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
            ("me/own:q4", "me/own:q4", "registry.ollama.ai/me/own/q4"),
            ("hf.co/org/repo:Q4_K_M", "hf.co/org/repo:Q4_K_M", "hf.co/org/repo/Q4_K_M"),
            ("host:5000/a/b", "host:5000/a/b:latest", "host:5000/a/b/latest"),
        ] {
            let name = OllamaName::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(name.short(), short);
            assert_eq!(name.manifest(Path::new("/s")), Path::new("/s/manifests").join(manifest));
        }
    }

    #[test]
    fn names_do_not_lead_out_of_the_store() {
        for text in
            ["", "..", "../x", "a/../b", "a/b/c/d", "/x", "x:", "x:../y", "x:a/b", "a b", ".hidden", "x\0"]
        {
            assert!(OllamaName::parse(text).is_err(), "{text:?}");
        }
    }
}
