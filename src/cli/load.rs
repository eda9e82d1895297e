//! From the model flags to a model that answers: the one way for every subcommand.

use super::args::{ModelArgs, SamplingArgs};
use super::error::{CommandError, Kind};
use super::run::llm::Llm;
use super::terminal::Terminal;
use crate::runtime::Sampling;

/// Resolves the reference, loads the model and starts its engine; notices and progress go to the terminal.
pub fn load(args: &ModelArgs, _terminal: &Terminal) -> Result<Box<dyn Llm>, CommandError> {
    Err(CommandError::new(Kind::NotFound, anyhow::anyhow!("loading {:?} is not wired in yet", args.model)))
}

impl SamplingArgs {
    /// The sampling in force for this model; says what was taken from the model's own defaults.
    pub fn resolve_for(&self, llm: &dyn Llm, terminal: &Terminal) -> Sampling {
        let info = llm.info();
        let (sampling, taken) = self.resolve(&info.defaults);
        if !taken.is_empty() {
            terminal.note(&format!("sampling defaults from {}: {}", info.defaults_source, taken.join(", ")));
        }
        sampling
    }
}
