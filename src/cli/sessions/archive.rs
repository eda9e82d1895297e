//! `sessions export --with-kv` and `sessions import`: a session in one file, warm on another machine.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Read};
use std::path::Path;

use serde_json::{Value, json};

use super::{encryption, not_found};
use crate::cli::error::{CommandError, Kind};
use crate::cli::places::Places;
use crate::cli::terminal::report::{bytes, check_new_file, counted};
use llmctl_base::private_files::UnfinishedFile;
use llmctl_base::{Error, StoreError};
use llmctl_engine::session::store::{
    Archive, ArchiveManifest, ArchivedModel, Import, Package, SessionName, SessionStore,
};
use llmctl_hub::{Aliases, ModelRef};
use llmctl_models::kv::disk::WarmPrompt;
use llmctl_models::load::{Fingerprint, ModelFiles, content_hashes};

/// Stands for stdin or stdout.
const STREAM: &str = "-";

/// Writes a session with its KV to a file, or to stdout, where no report follows then.
///
/// # Errors
/// There is no such session; `file` exists and may not be replaced; output failed.
pub fn export(
    name: &SessionName,
    (file, may_replace): (&Path, bool),
    store: &SessionStore,
    places: &Places,
) -> Result<Option<(String, Value)>, CommandError> {
    let is_stream = file == Path::new(STREAM);
    if is_stream && io::stdout().is_terminal() {
        return Err(CommandError::usage("--with-kv - writes to a pipe or a file, not to the terminal"));
    }
    if !is_stream {
        check_new_file(file, may_replace)?;
    }
    let hashes = |reference: &str, model: &Fingerprint| hashes_of(reference, model, places);
    let package = store.pack(name, hashes).map_err(|error| not_found(error, store))?;
    if is_stream {
        let mut out = BufWriter::new(io::stdout().lock());
        return package.write(&mut out).map(|_| None).map_err(|error| CommandError::new(Kind::Io, error));
    }
    let num_bytes = write(&package, file).map_err(|error| Error::from(StoreError::io(file, &error)))?;
    Ok(Some(exported(name, file, num_bytes, &package)))
}

/// Returns the content hashes of the model that a session's reference leads to, if it computed with this fingerprint.
pub fn hashes_of(reference: &str, model: &Fingerprint, places: &Places) -> Option<Vec<String>> {
    let reference = ModelRef::parse(reference).ok()?;
    let resolved = llmctl_hub::resolve(&reference, &places.hub_paths(), &Aliases::default()).ok()?;
    let files = ModelFiles::of(&resolved).ok()?;
    model.is_of(&files).then(|| content_hashes(&files))
}

/// Writes a file that has its name when it is whole; returns its length.
pub fn write(package: &Package, path: &Path) -> io::Result<u64> {
    let (unfinished, file) = UnfinishedFile::create_private(path)?;
    let mut out = BufWriter::new(file);
    let num_bytes = package.write(&mut out)?;
    unfinished.finish(&out.into_inner().map_err(io::IntoInnerError::into_error)?)?;
    Ok(num_bytes)
}

fn exported(name: &SessionName, file: &Path, num_bytes: u64, package: &Package) -> (String, Value) {
    let manifest = package.manifest();
    let (turns, branches) = (manifest.sessions[0].turns, manifest.sessions.len() - 1);
    let mut text = format!(
        "session {name} is in {}: {}, {} with {} ({} of KV{})\n",
        file.display(),
        bytes(num_bytes),
        counted(turns, "turn"),
        counted(package.num_tokens, "token"),
        counted(package.num_pages, "page"),
        model_text(&manifest.models),
    );
    if package.num_pages == 0 {
        text.push_str("its KV is not on disk here, so it is computed anew where the file is imported\n");
    }
    if encryption::is_on() {
        text.push_str("the file is not encrypted: it is for another place\n");
    }
    package.notices.iter().for_each(|notice| text.push_str(&format!("{notice}\n")));
    let object = json!({
        "exported": name.as_str(),
        "file": file,
        "bytes": num_bytes,
        "turns": turns,
        "tokens": package.num_tokens,
        "branches": branches,
        "images": package.num_images,
        "kv_pages": package.num_pages,
        "kv_bytes": package.page_bytes,
        "models": models_json(manifest),
        "notices": package.notices,
    });
    (text, object)
}

fn model_text(models: &[ArchivedModel]) -> String {
    let settings = models.iter().map(|model| format!(" as {}", model.setting("kv_type")));
    settings.collect::<Vec<_>>().join(" and")
}

fn models_json(manifest: &ArchiveManifest) -> Value {
    let model = |model: &ArchivedModel| {
        json!({
            "fingerprint": model.fingerprint,
            "made_of": model.made_of,
            "weights_sha256": model.weights_sha256,
        })
    };
    manifest.models.iter().map(model).collect()
}

/// Returns whether a file begins as one of `export --with-kv` or `warm --out` does: as zstd.
pub fn is_archive(file: &Path) -> bool {
    let mut start = [0; 4];
    File::open(file).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"\x28\xb5\x2f\xfd"
}

/// Imports prompts that were computed ahead. Returns them and what to say of them.
///
/// # Errors
/// The file cannot be read, is damaged or is none of `warm --out`.
pub fn import_prompts(
    file: &Path,
    store: &SessionStore,
    kv_limit: u64,
) -> Result<(Vec<WarmPrompt>, String), CommandError> {
    let opened = File::open(file).map_err(|error| CommandError::reading(file, error))?;
    let mut archive = Archive::open(file, opened)?;
    let imported = store.import_prompts(&mut archive, kv_limit)?;
    let prompts = archive.prompts().to_vec();
    let mut text = String::new();
    for prompt in &prompts {
        text.push_str(&format!(
            "{}: {} for {}\n",
            prompt.name,
            counted(prompt.num_tokens(), "token"),
            prompt.model
        ));
    }
    let added = match imported.num_pages {
        0 => "all were here already".to_owned(),
        count => format!("{} of {} of KV", count, counted(archive.num_pages(), "page")),
    };
    text.push_str(&format!("{} of {}: {added}\n", counted(prompts.len(), "prompt"), file.display()));
    imported.notices.iter().for_each(|notice| text.push_str(&format!("{notice}\n")));
    Ok((prompts, text))
}

/// Imports a file, or stdin.
///
/// # Errors
/// The file cannot be read, is damaged or is none of `sessions export`; a session has the name. Nothing is imported then.
pub fn import(
    file: &Path,
    import: Import<'_>,
    store: &SessionStore,
) -> Result<(String, Value), CommandError> {
    if file == Path::new(STREAM) && encryption::is_on() {
        let error = CommandError::usage(
            "--encrypt: a session from stdin would lie on disk in plain text for a moment",
        );
        return Err(error.hint("name the file instead"));
    }
    let opened = match file == Path::new(STREAM) {
        true => store.spooled(&mut io::stdin().lock()).map_err(super::explain)?,
        false => File::open(file).map_err(|error| CommandError::reading(file, error))?,
    };
    let mut archive = Archive::open(file, opened)?;
    let imported = store.import(&mut archive, import).map_err(|error| match error {
        Error::InvalidParameter { message, .. } => {
            CommandError::usage(message).hint("--as NAME imports it under another name")
        }
        error => super::explain(error),
    })?;
    let name = &imported.name;
    let turns = archive.manifest().sessions[0].turns;
    let mut text = format!(
        "session {name} is imported: {}, {} of {} of KV{}\n",
        counted(turns, "turn"),
        imported.pages.num_pages,
        counted(archive.num_pages(), "page"),
        model_text(&archive.manifest().models),
    );
    if !imported.branches.is_empty() {
        let names: Vec<&str> = imported.branches.iter().map(SessionName::as_str).collect();
        text.push_str(&format!("branches: {}\n", names.join(", ")));
    }
    if imported.pages.num_removed > 0 {
        text.push_str(&format!(
            "{} of KV used longest ago made room\n",
            counted(imported.pages.num_removed as usize, "page")
        ));
    }
    imported.pages.notices.iter().for_each(|notice| text.push_str(&format!("{notice}\n")));
    let object = json!({
        "imported": name.as_str(),
        "branches": imported.branches.iter().map(SessionName::as_str).collect::<Value>(),
        "turns": turns,
        "bytes": archive.num_bytes(),
        "kv_pages": imported.pages.num_pages,
        "kv_pages_in_file": archive.num_pages(),
        "kv_pages_removed": imported.pages.num_removed,
        "llmctl": archive.manifest().llmctl,
        "models": models_json(archive.manifest()),
        "notices": imported.pages.notices,
    });
    Ok((text, object))
}
