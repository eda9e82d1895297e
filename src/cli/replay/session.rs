//! `llmctl sessions replay`: the turns of a session computed again.

use super::report::ReplayReport;
use super::{AnswerRecord, Said};
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::sessions::{self, SessionReplayArgs};
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::ReportFormat;
use llmctl_engine::session::store::{SavedSession, SessionName, SessionStore};

/// Why a turn cannot be computed again.
const NO_RECEIPT: &str = "no receipt (saved by an older llmctl, or answered by another server)";

/// Runs the subcommand on a session of `store`.
pub fn replay(
    args: &SessionReplayArgs,
    store: &SessionStore,
    format: ReportFormat,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    let (name, turn) = parse(&args.name, store)?;
    let saved = store.read(&name).map_err(|error| sessions::not_found(error, store))?;
    let num_turns = saved.turns.len();
    if turn.is_some() && args.all {
        return Err(CommandError::usage(format!("{}: a turn and --all exclude each other", args.name)));
    }
    let asked = match turn {
        _ if args.all => 1..=num_turns,
        Some(turn) if !(1..=num_turns).contains(&turn) => {
            let message = format!("session {name} has {num_turns} turns, and no turn {turn}");
            return Err(Kind::NotFound.error(message));
        }
        turn => turn.unwrap_or(num_turns)..=turn.unwrap_or(num_turns),
    };
    let mut report = ReplayReport::default();
    let mut answers = Vec::new();
    for number in 1..=num_turns {
        let place = format!("{name} turn {number}");
        match recorded(place.clone(), saved.up_to(number)) {
            // A text that was edited anywhere before the turn is told, too.
            Some(answer) if asked.contains(&number) || answer.fault.is_some() => answers.push(answer),
            None if asked.contains(&number) => report.skip(&place, NO_RECEIPT),
            _ => {}
        }
    }
    if answers.is_empty() {
        return Err(Kind::NotFound.error(format!("session {name}: {NO_RECEIPT}")));
    }
    super::replay(&answers, &args.model, report, terminal)?.print(format)
}

/// Returns the session's name and the turn. A session whose name has an `@` of its own is found first.
fn parse(text: &str, store: &SessionStore) -> Result<(SessionName, Option<usize>), CommandError> {
    let whole = SessionName::new(text).ok().filter(|name| store.exists(name));
    if let Some(name) = whole {
        return Ok((name, None));
    }
    let turn = text.rsplit_once('@').and_then(|(name, turn)| Some((name, turn.parse().ok()?)));
    match turn {
        Some((name, turn)) => Ok((sessions::parse(name)?, Some(turn))),
        None => Ok((sessions::parse(text)?, None)),
    }
}

/// Returns the last turn of a session; `None` without a receipt.
fn recorded(name: String, saved: SavedSession) -> Option<AnswerRecord> {
    let (receipt, prompt) = (saved.last_receipt()?, saved.last_prompt().ids);
    let last = saved.turns.last()?;
    let is_intact = saved.last_receipt_hash() == Some(&receipt.hash());
    let changed = "it was changed after it was saved: its receipt has another hash".to_owned();
    let fault = match receipt.check(&prompt) {
        Ok(()) => (!is_intact).then_some(changed),
        Err(fault) => Some(fault),
    };
    let reference = last.model.reference.clone();
    Some(AnswerRecord { name, receipt, prompt, reference, fault, said: Said::Turn(Box::new(saved)) })
}
