//! What must be true before a saved session is opened: that its folder can be written, and that its model is known.
//!
//! A session goes on with the model that gave its last answer. Another one takes its place only where the user names it, with
//! `--model` or `LLMCTL_MODEL`; the `model` of a configuration file is for new sessions. A model that is not there any more is
//! an error that names it, and never replaced by another.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::anyhow;

use super::args::ModelArgs;
use super::error::{CommandError, Kind};
use super::models;
use super::places::Places;
use crate::runtime::load::builtin::GUIDE;
use crate::runtime::private_files::private_file;
use crate::runtime::session::store::{SavedSession, SessionName};

/// What is written to find out whether there is room: a turn takes about as much.
const PROBE_BYTES: usize = 4096;

/// Whether sessions can be saved. `otherwise` says what to do about it.
///
/// # Errors
/// `Config` where there is no folder for sessions, `Io` where nothing can be written into it.
pub fn check_place(places: &Places, otherwise: &str) -> Result<(), CommandError> {
    let Some(folder) = places.sessions() else {
        let error = CommandError::new(Kind::Config, anyhow!("sessions cannot be saved: HOME is not set"));
        return Err(error.hint(format!("set HOME or XDG_DATA_HOME, or {otherwise}")));
    };
    probe(&folder).map_err(|error| {
        let reason = match error.kind() {
            ErrorKind::ReadOnlyFilesystem => "read-only file system".to_owned(),
            ErrorKind::PermissionDenied => "permission denied".to_owned(),
            ErrorKind::StorageFull => "the disk is full".to_owned(),
            _ => error.to_string(),
        };
        let place = places.shorten(&folder);
        CommandError::new(Kind::Io, anyhow!("sessions cannot be saved in {place} ({reason})")).hint(otherwise)
    })
}

/// Writes where the folder is, or would be made.
fn probe(folder: &Path) -> io::Result<()> {
    let there = folder.ancestors().find(|path| path.is_dir()).unwrap_or(folder);
    let now = crate::runtime::session::store::now_ms();
    let path = there.join(format!(".llmctl-probe-{}-{now}", std::process::id()));
    let mut file = private_file(OpenOptions::new().write(true).create_new(true), &path)?;
    let written = file.write_all(&[b'\n'; PROBE_BYTES]).and_then(|()| file.flush());
    let removed = std::fs::remove_file(&path);
    written.and(removed)
}

/// The model flags to go on with a session: its own model, unless the user names one. `flag` is how that is done.
///
/// # Errors
/// `NotFound` when the model is not there, or the session does not say where it is.
pub fn model_of(
    args: &ModelArgs,
    name: &SessionName,
    saved: &SavedSession,
    flag: &str,
) -> Result<ModelArgs, CommandError> {
    if args.is_named || saved.turns.is_empty() {
        return Ok(args.clone());
    }
    let model = &saved.model;
    let hint = format!("{flag} names it, or another model: the text of the session is kept");
    let reference = match &model.reference {
        Some(reference) => reference.clone(),
        // Older sessions have the name only, which leads nowhere but to the model inside llmctl.
        None if model.name == GUIDE.name => GUIDE.name.to_owned(),
        None => {
            let error = anyhow!("session {name} was started with {}, and does not say where that is", model.name);
            return Err(CommandError::new(Kind::NotFound, error).hint(hint));
        }
    };
    models::find(&reference, &Places::from_environment(), &args.aliases).map_err(|error| match error.kind {
        Kind::NotFound => {
            let error = anyhow!("session {name} was started with {}, which is missing: {reference}", model.name);
            CommandError::new(Kind::NotFound, error).hint(hint)
        }
        _ => error,
    })?;
    Ok(ModelArgs { model: Some(reference), ..args.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::session::store::ModelFingerprint;

    #[test]
    fn a_place_that_cannot_be_written_is_told_with_its_reason() {
        let check = |places: &Places| {
            let error = check_place(places, "use --ephemeral").err()?;
            Some((error.kind, error.to_string(), error.hint_text().unwrap_or_default().to_owned()))
        };
        let (kind, said, hint) = check(&Places::default()).expect("no home");
        assert_eq!((kind, said.as_str()), (Kind::Config, "sessions cannot be saved: HOME is not set"));
        assert!(hint.ends_with("or use --ephemeral"), "{hint}");
        let folder = tempfile::tempdir().expect("a folder");
        let places = |data: &str| Places { data: Some(folder.path().join(data)), ..Places::default() };
        assert_eq!(check(&places("new")), None);
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is left behind");
        let missing = Places { data: Some("/proc/llmctl".into()), ..Places::default() };
        if cfg!(target_os = "linux") {
            let (kind, said, _) = check(&missing).expect("nothing can be made there");
            assert_eq!(kind, Kind::Io);
            assert!(said.starts_with("sessions cannot be saved in /proc/llmctl/sessions ("), "{said}");
        }
    }

    #[test]
    fn an_empty_session_has_no_model_to_go_on_with() {
        let model =
            ModelFingerprint { name: "m".to_owned(), fingerprint: "1".to_owned(), reference: None };
        let name = SessionName::new("s").expect("a name");
        let args = ModelArgs { model: Some("other".to_owned()), ..ModelArgs::default() };
        let chosen = model_of(&args, &name, &SavedSession::new(&model, 0), "--model REF").expect("any");
        assert_eq!(chosen.model.as_deref(), Some("other"));
    }
}
