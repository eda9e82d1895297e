//! `llmctl replay` and `llmctl sessions replay`: recorded answers computed again, and compared token by token.
//!
//! `folder` has the files that `run --batch --record` writes, `session` the turns of a session; both become [`AnswerRecord`]s.
//! `compute` answers one again in the engine's ordinary way, without reused KV, and scores it under a model; `report` says what came
//! out. Invariant: whoever finds a difference, in the tokens or between a text and its receipt, exits with 1.

mod compute;
pub mod folder;
mod report;
mod session;

use std::path::PathBuf;

use clap::Args;

use super::error::{CommandError, Exit, Kind};
use super::terminal::Terminal;
use crate::cli::flags::args::{EngineArgs, EngineOptions, ModelArgs};
use crate::cli::model::load::{Loaded, load};
use crate::cli::model::models;
use crate::cli::places::Places;
use crate::cli::terminal::report::ReportFormat;
use compute::{Agreement, Computed};
use llmctl_engine::PromptImage;
use llmctl_engine::receipt::{AnswerRecipe, Receipt};
use llmctl_engine::session::store::SavedSession;
use llmctl_engine::turn::{images_at, saved_images};
use llmctl_template::{ImageRef, Message};
use report::{ReplayFinding, ReplayReport};

pub use session::replay as replay_session;

/// Compute recorded answers again, and compare them token by token
///
/// `llmctl run --batch ROWS --record DIR` records them. The exit code is 0 if every answer has the same tokens, and 1 if one differs.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ReplayArgs {
    /// The folder of a batch that was recorded
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    #[command(flatten)]
    pub model: ModelArgs,

    /// Format of stdout: text, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub output: ReportFormat,
}

const LONG_HELP: &str = include_str!("help.txt").trim_ascii_end();

/// Runs `llmctl replay`.
pub fn run(args: &ReplayArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    let report = replay(&folder::read(&args.dir)?, &args.model, ReplayReport::default(), terminal)?;
    report.print(args.output)
}

/// An answer to compute again.
pub struct AnswerRecord {
    /// For people, e.g. `trip turn 2`.
    pub name: String,
    pub receipt: Receipt,
    pub prompt: Vec<u32>,
    /// Reference of the model that gave it; `None` if it is not recorded.
    pub reference: Option<String>,
    /// Why the record contradicts itself, e.g. because its text was edited.
    pub fault: Option<String>,
    pub said: Said,
}

/// The record beside the tokens.
pub enum Said {
    /// The session up to the turn.
    Turn(Box<SavedSession>),
    /// The text of the answer, and the images of the prompt, whose files lie in the folder.
    Text { text: String, images: Vec<ImageRef>, folder: PathBuf },
}

impl AnswerRecord {
    /// Returns whether the recorded text is that of the tokens in the vocabulary of `llm`.
    fn is_said(&self, llm: &Loaded) -> bool {
        match &self.said {
            Said::Text { text, .. } => *text == llm.planner().recorded_text(&self.receipt),
            Said::Turn(saved) => {
                let message = saved.messages().last();
                message.is_some_and(|message: &Message| {
                    llm.planner().is_said(&self.receipt, &self.prompt, message)
                })
            }
        }
    }

    /// Returns the images of the prompt.
    ///
    /// # Errors
    /// An image whose file cannot be read, or that the model looks at in another way.
    fn images(&self, llm: &Loaded) -> Result<Vec<PromptImage>, CommandError> {
        let tokenizer = llm.texts().chat_tokenizer();
        if !self.receipt.images.is_empty() {
            llm.vision()?;
        }
        match &self.said {
            Said::Turn(saved) => Ok(saved_images(tokenizer, saved)?),
            Said::Text { images, folder, .. } => {
                let read = |hash: &_| folder::read_image(folder, hash);
                Ok(images_at(tokenizer, &self.receipt.images, images.iter().cloned(), read)?)
            }
        }
    }
}

/// Computes answers again and adds them to a report. Answers of one model that follow each other are computed with one loading.
fn replay(
    answers: &[AnswerRecord],
    model: &ModelArgs,
    mut report: ReplayReport,
    terminal: &Terminal,
) -> Result<ReplayReport, CommandError> {
    let same_model = |a: &AnswerRecord, b: &AnswerRecord| model.is_named || a.reference == b.reference;
    for answers in answers.chunk_by(same_model) {
        let faults = answers.iter().filter_map(|answer| answer.fault.clone());
        let found = match faults.clone().count() == answers.len() {
            true => faults.map(ReplayFinding::Broken).collect(),
            false => replay_with(answers, model, terminal)?,
        };
        report.add(answers, found);
    }
    Ok(report)
}

/// Computes answers again with one model, and scores those of another one under the model that gave them, if it is here.
fn replay_with(
    answers: &[AnswerRecord],
    args: &ModelArgs,
    terminal: &Terminal,
) -> Result<Vec<ReplayFinding>, CommandError> {
    let mut found: Vec<ReplayFinding> = {
        let llm = load(&model_of(answers, args)?, options(), terminal)?;
        let own = llm.planner().model_recipe();
        let each = |answer| replay_one(&llm, &own, answer, terminal);
        answers.iter().map(each).collect::<Result<_, _>>()?
    };
    let is_foreign = |found: &ReplayFinding| matches!(found, ReplayFinding::Computed(computed) if computed.scores.is_some());
    if !found.iter().any(is_foreign) {
        return Ok(found);
    }
    let recorder = recorder(answers, args, terminal);
    for (answer, found) in answers.iter().zip(&mut found) {
        let ReplayFinding::Computed(Computed { scores: Some(scores), agreement, .. }) = found else {
            continue;
        };
        let first = match &recorder {
            Err(why) => Err(why.clone()),
            Ok(llm) => match answer.receipt.recipe.is_same_model(&llm.planner().model_recipe()) {
                true => compute::scores(llm, answer).map_err(|error| error.to_string()),
                false => {
                    Err("the model that is recorded is not here, or it computes in another way".to_owned())
                }
            },
        };
        *agreement = Some(Agreement::of(&answer.receipt, scores, first));
    }
    Ok(found)
}

fn replay_one(
    llm: &Loaded,
    own: &AnswerRecipe,
    answer: &AnswerRecord,
    terminal: &Terminal,
) -> Result<ReplayFinding, CommandError> {
    if let Some(fault) = &answer.fault {
        return Ok(ReplayFinding::Broken(fault.clone()));
    }
    let recipe = &answer.receipt.recipe;
    if !answer.is_said(llm) {
        if recipe.model == own.model {
            return Ok(ReplayFinding::Broken("its text is not that of its tokens".to_owned()));
        }
        let message = format!(
            "{}: {} has other tokens than the model that answered: they cannot be compared",
            answer.name,
            llm.info().name
        );
        return Err(CommandError::bad_data(message).hint("give a model with the same vocabulary"));
    }
    terminal.status(&format!("computing {}", answer.name));
    let difference = compute::replay(llm, answer);
    terminal.status("");
    let mut computed = Computed::new(difference?, recipe, own);
    computed.find_probabilities(llm, answer)?;
    if !computed.is_same_model {
        computed.scores = Some(compute::scores(llm, answer)?);
    }
    Ok(ReplayFinding::Computed(computed))
}

/// Returns the flags of the model: those given, or with the recorded reference if none is named.
fn model_of(answers: &[AnswerRecord], args: &ModelArgs) -> Result<ModelArgs, CommandError> {
    let reference = answers.first().and_then(|answer| answer.reference.clone());
    match reference {
        _ if args.is_named => Ok(args.clone()),
        Some(reference) => Ok(ModelArgs { model: Some(reference), ..args.clone() }),
        None if args.model.is_some() => Ok(args.clone()),
        None => Err(Kind::NotFound
            .error("the record does not say where its model is")
            .hint("--model REF names it")),
    }
}

/// Loads the model that gave the answers, to compare its probabilities; `Err` says why there is none.
fn recorder(answers: &[AnswerRecord], args: &ModelArgs, terminal: &Terminal) -> Result<Loaded, String> {
    let reference = answers.first().and_then(|answer| answer.reference.clone());
    let reference = reference.filter(|_| args.is_named).ok_or("there is no other model to open")?;
    models::find(&reference, &Places::from_environment(), &args.aliases)
        .map_err(|error| error.to_string())?;
    let args = ModelArgs { model: Some(reference), ..args.clone() };
    load(&args, options(), terminal).map_err(|error| error.to_string())
}

/// Engine options without reuse of KV: each prompt is computed from its first token.
fn options() -> EngineOptions {
    EngineOptions { warm_resume: false, ..EngineArgs::default().resolve(false) }
}
