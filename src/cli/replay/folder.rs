//! The folder that `run --batch --record` writes: one file per answer, and the files of images.
//!
//! A file has a field per line, so that a change shows in a repository as the lines that it changes. It contains no time and nothing of
//! the machine, and is named after the row's `custom_id`. It appears as a whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AnswerRecord, Said};
use crate::cli::error::{CommandError, Kind};
use crate::cli::model::load::Loaded;
use llmctl_base::private_files::{replace_file, sync_folder_of};
use llmctl_base::read::read_optional;
use llmctl_engine::receipt::{RECEIPT_SCHEMA, Receipt, tokens_sha256};
use llmctl_engine::session::store::ModelFingerprint;
use llmctl_engine::turn::{Answer, TurnPlan, TurnRequest};
use llmctl_image::{ImageHash, ImageLimits};
use llmctl_template::ImageRef;

/// Schema of the files.
const SCHEMA: &str = "llmctl.recorded.v1";
/// Most bytes of a file; a prompt of a million tokens has less.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Ending of the files.
const ENDING: &str = ".answer.json";
/// Most bytes of a name; file systems have at most 255.
const MAX_STEM_BYTES: usize = 160;
/// Folder of the images' files, inside.
const IMAGES: &str = "images";

/// A file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedFile {
    schema: String,
    /// The row's `custom_id`, or `line-N`.
    id: String,
    /// Index of the answer, if the row asks for several.
    #[serde(default, skip_serializing_if = "llmctl_base::units::is_zero")]
    choice: usize,
    /// Reference that finds the model on any machine; absent for a path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Hash of the receipt.
    hash: String,
    /// The answer as the engine streams it.
    text: String,
    /// Images of the prompt, in its order, as parts of messages name them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    images: Vec<Value>,
    prompt: Vec<u32>,
    receipt: Receipt,
}

/// A folder that answers are recorded in.
pub struct Recorder {
    folder: PathBuf,
    model: Option<String>,
}

impl Recorder {
    /// Creates the folder if it is missing.
    ///
    /// # Errors
    /// `Io`, naming the folder.
    pub fn open(folder: &Path, model: &ModelFingerprint) -> Result<Self, CommandError> {
        fs::create_dir_all(folder).map_err(CommandError::io(folder.display()))?;
        let is_portable = |reference: &String| !Path::new(reference).is_absolute();
        Ok(Self { folder: folder.to_owned(), model: model.reference.clone().filter(is_portable) })
    }

    /// Writes an answer, in place of an earlier one of the same name. When this returns, it is on disk.
    ///
    /// # Errors
    /// `Io`, naming the file.
    pub fn record(
        &self,
        (id, choice): (&str, usize),
        llm: &Loaded,
        (turn, plan): (&TurnRequest, &TurnPlan),
        answer: &Answer,
    ) -> Result<(), CommandError> {
        let receipt = receipt(llm, turn, plan, answer);
        let images = plan.images.iter().map(|image| {
            let (file, info) = (&image.file, &image.file.info);
            let path = self.folder.join(IMAGES).join(file.hash.to_string());
            write(&path, &file.bytes)?;
            let (width, height, media_type) = (info.width, info.height, info.media_type.to_owned());
            Ok(ImageRef { sha256: file.hash.to_string(), width, height, media_type, name: None }.to_part())
        });
        let recorded = RecordedFile {
            schema: SCHEMA.to_owned(),
            id: id.to_owned(),
            choice,
            model: self.model.clone(),
            hash: receipt.hash(),
            text: llm.planner().recorded_text(&receipt),
            images: images.collect::<Result<_, CommandError>>()?,
            prompt: plan.tokens.clone(),
            receipt,
        };
        write(&self.folder.join(file_name(id, choice)), text(&recorded).as_bytes())
    }
}

/// Returns the receipt of an answer outside a session: its given beginning is a part of the prompt.
fn receipt(llm: &Loaded, turn: &TurnRequest, plan: &TurnPlan, answer: &Answer) -> Receipt {
    let given = plan.parser.given_tokens();
    let asked = turn.sampling();
    // A greedy answer depends on no seed, so that none is drawn into the file.
    let draws = asked.temperature > 0.0 || asked.samplers.is_some();
    let seed = asked.seed.or(draws.then_some(answer.outcome.seed));
    Receipt {
        schema: RECEIPT_SCHEMA.to_owned(),
        previous: None,
        recipe: llm.planner().recipe(plan, turn),
        adapters: answer.outcome.adapters.clone(),
        images: plan.images.iter().flat_map(|image| image.spans.clone()).collect(),
        messages_sha256: None,
        prompt_tokens: plan.tokens.len(),
        prompt_sha256: tokens_sha256(&plan.tokens),
        sampling: (&llmctl_base::Sampling { seed, ..asked }).into(),
        given: 0,
        answer: answer.ids().split_off(given),
        finish: answer.outcome.finish.clone(),
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CommandError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| replace_file(path, bytes))
        .map_err(CommandError::io(path.display()))?;
    sync_folder_of(path);
    Ok(())
}

/// Returns the name of a row's file. Other characters than letters, digits, `.`, `_` and `-` are written as %XX, and a long name ends
/// with a hash.
fn file_name(id: &str, choice: usize) -> String {
    let mut stem = String::new();
    for byte in id.bytes() {
        let is_plain =
            byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-') || byte == b'.' && !stem.is_empty();
        match is_plain {
            true => stem.push(char::from(byte)),
            false => stem.push_str(&format!("%{byte:02X}")),
        }
    }
    if stem.len() > MAX_STEM_BYTES {
        stem.truncate(MAX_STEM_BYTES - 65);
        stem = format!("{stem}~{}", ImageHash::of(id.as_bytes()));
    }
    let nth = if choice == 0 { String::new() } else { format!("~{}", choice + 1) };
    format!("{stem}{nth}{ENDING}")
}

/// Returns a file's text: each field of an object on its own line, lists and the objects inside them on one.
fn text(recorded: &RecordedFile) -> String {
    // By way of text, because a value would have more digits of a short float.
    let whole = serde_json::to_string(recorded).expect("strings, numbers and lists are always JSON");
    let mut text = String::new();
    put_fields(&serde_json::from_str(&whole).expect("it was just written"), 1, &mut text);
    text + "\n"
}

fn put_fields(value: &Value, depth: usize, text: &mut String) {
    let Some(fields) = value.as_object().filter(|_| depth <= 3) else {
        return text.push_str(&value.to_string());
    };
    for (at, (name, value)) in fields.iter().enumerate() {
        text.push_str(if at == 0 { "{\n" } else { ",\n" });
        text.push_str(&format!("{}{}: ", "  ".repeat(depth), Value::from(name.as_str())));
        put_fields(value, depth + 1, text);
    }
    text.push_str(&format!("\n{}}}", "  ".repeat(depth - 1)));
}

/// Reads bytes as a recorded answer of a folder.
///
/// # Errors
/// Why they are none.
pub fn recorded(bytes: &[u8], folder: &Path) -> Result<AnswerRecord, String> {
    let file: RecordedFile = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let RecordedFile { schema, id, choice, model, hash, text, images, prompt, receipt } = file;
    if schema != SCHEMA {
        return Err(format!("the schema {schema:?} is unknown"));
    }
    let name = if choice == 0 { id } else { format!("{id} answer {}", choice + 1) };
    let changed = "it was changed after it was recorded: its receipt has another hash".to_owned();
    let fault = receipt.check(&prompt).err().or_else(|| (receipt.hash() != hash).then_some(changed));
    let images = images.iter().filter_map(ImageRef::of).collect();
    let said = Said::Text { text, images, folder: folder.to_owned() };
    Ok(AnswerRecord { name, receipt, prompt, reference: model, fault, said })
}

/// Reads all answers of a folder, by the names of their files.
///
/// # Errors
/// `NotFound` without a folder or an answer in it, `BadData` for a file that is none.
pub fn read(folder: &Path) -> Result<Vec<AnswerRecord>, CommandError> {
    let unreadable = |error| CommandError::reading(folder, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(ENDING) && !name.starts_with('.') {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        let hint = "`llmctl run --batch ROWS --record DIR` records them";
        return Err(Kind::NotFound.error(format!("{} has no recorded answers", folder.display())).hint(hint));
    }
    paths.sort();
    let one = |path: &PathBuf| {
        let bytes = read_optional(path, MAX_FILE_BYTES)?.unwrap_or_default();
        let answer = recorded(&bytes, folder);
        answer.map_err(|reason| CommandError::bad_data(format!("{}: {reason}", path.display())))
    };
    paths.iter().map(one).collect()
}

/// Reads the file of an image.
///
/// # Errors
/// That it is missing or another one.
pub fn read_image(folder: &Path, hash: &ImageHash) -> Result<Arc<[u8]>, String> {
    let path = folder.join(IMAGES).join(hash.to_string());
    match read_optional(&path, ImageLimits::default().bytes as u64) {
        Ok(Some(bytes)) if ImageHash::of(&bytes) == *hash => Ok(bytes.into()),
        Ok(Some(_)) => Err(format!("{} is damaged", path.display())),
        Ok(None) => Err(format!("{} is missing", path.display())),
        Err(error) => Err(error.to_string()),
    }
}
