//! Model with which a saved session continues.
//!
//! It is the model of the last answer. Another one is used only if the user names it, with `--model` or
//! `LLMCTL_MODEL`; the `model` of a configuration file is for new sessions. A missing model is an error that
//! names it; it is never replaced.

use super::models;
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::ModelArgs;
use crate::cli::places::Places;
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_hub::builtin::GUIDE;

/// Returns the model flags for continuing a session: its own model, unless the user names one. `flag` is how
/// to do that.
///
/// # Errors
/// `NotFound` if the model is missing, or the session has no reference to it.
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
        // Older sessions have only a name, which identifies no model but the built-in one.
        None if model.name == GUIDE.name => GUIDE.name.to_owned(),
        None => {
            let message =
                format!("session {name} was started with {}, and does not say where that is", model.name);
            return Err(Kind::NotFound.error(message).hint(hint));
        }
    };
    models::find(&reference, &Places::from_environment(), &args.aliases).map_err(|error| {
        match error.kind {
            Kind::NotFound => {
                let message =
                    format!("session {name} was started with {}, which is missing: {reference}", model.name);
                Kind::NotFound.error(message).hint(hint)
            }
            _ => error,
        }
    })?;
    Ok(ModelArgs { model: Some(reference), ..args.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_engine::session::store::ModelFingerprint;

    #[test]
    fn an_empty_session_has_no_model_to_go_on_with() {
        let model = ModelFingerprint { name: "m".to_owned(), fingerprint: "1".to_owned(), reference: None };
        let name = SessionName::new("s").expect("a name");
        let args = ModelArgs { model: Some("other".to_owned()), ..ModelArgs::default() };
        let chosen = model_of(&args, &name, &SavedSession::new(&model, 0), "--model REF").expect("any");
        assert_eq!(chosen.model.as_deref(), Some("other"));
    }
}
