//! `run --batch`: rows of a JSON Lines file to results, one row at a time.
use super::error::{CommandError, Exit};
use super::run::RunArgs;
use super::terminal::Terminal;
pub fn run(_args: &RunArgs, _terminal: &Terminal) -> Result<Exit, CommandError> {
    Ok(Exit::Success)
}
