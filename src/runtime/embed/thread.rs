//! The thread that owns an embedder's model, and its client.
//!
//! Texts are computed in the order in which they came, as many in one step as fit, whichever requests they
//! are of.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use super::{EmbedInput, EmbedModel, EmbedTexts, split};
use llmctl_base::error::{Error, Result, panic_text};
use llmctl_models::load::LoadedEmbedder;
use llmctl_models::model::TEXT_STEP_TOKENS;

/// The result of one text.
#[derive(Debug, Clone, PartialEq)]
pub enum EmbedOutput {
    Vector(Vec<f32>),
    /// Between 0 and 1.
    Score(f32),
}

/// A request under way: yields the results in the order of its texts. Dropping it cancels the texts that are not computed yet.
pub struct EmbedJob {
    results: Receiver<Result<EmbedOutput>>,
}

impl Iterator for EmbedJob {
    type Item = Result<EmbedOutput>;

    fn next(&mut self) -> Option<Self::Item> {
        self.results.recv().ok()
    }
}

/// Client of an embedder in a thread of this process; clones use the same thread, which ends with the last one.
#[derive(Clone)]
pub struct EmbedClient {
    texts: Arc<EmbedTexts>,
    jobs: Sender<QueuedJob>,
}

/// A request's texts that are not computed yet.
struct QueuedJob {
    inputs: VecDeque<EmbedInput>,
    dimensions: Option<usize>,
    results: Sender<Result<EmbedOutput>>,
}

impl EmbedClient {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Backend`] if it cannot be started.
    pub fn spawn(loaded: LoadedEmbedder) -> Result<Self> {
        let (texts, model) = split(loaded);
        let (jobs, queue) = mpsc::channel();
        std::thread::Builder::new()
            .name("embedder".to_owned())
            .spawn(move || serve(model, &queue))
            .map_err(|error| Error::Backend(format!("cannot start a thread: {error}")))?;
        Ok(Self { texts: Arc::new(texts), jobs })
    }

    pub fn texts(&self) -> &Arc<EmbedTexts> {
        &self.texts
    }

    /// Submits texts; vectors are cut to `dimensions` values.
    ///
    /// # Errors
    /// [`Error::Backend`] if the thread has ended.
    pub fn submit(&self, inputs: Vec<EmbedInput>, dimensions: Option<usize>) -> Result<EmbedJob> {
        let (sender, results) = mpsc::channel();
        let job = QueuedJob { inputs: inputs.into(), dimensions, results: sender };
        match self.jobs.send(job) {
            Ok(()) => Ok(EmbedJob { results }),
            Err(_) => Err(Error::Backend("the embedder has ended".to_owned())),
        }
    }
}

/// Computes until the last client is gone.
fn serve(mut model: EmbedModel, queue: &Receiver<QueuedJob>) {
    let mut jobs: VecDeque<QueuedJob> = VecDeque::new();
    loop {
        if jobs.is_empty() {
            let Ok(job) = queue.recv() else { return };
            jobs.push_back(job);
        }
        while let Ok(job) = queue.try_recv() {
            jobs.push_back(job);
        }
        step(&mut model, &mut jobs);
    }
}

/// Computes one step, and delivers its results.
fn step(model: &mut EmbedModel, jobs: &mut VecDeque<QueuedJob>) {
    let counts = plan(jobs);
    let planned = jobs
        .iter()
        .zip(&counts)
        .flat_map(|(job, &count)| job.inputs.iter().take(count).map(|input| (input, job.dimensions)));
    let planned: Vec<_> = planned.collect();
    let outputs = catch_unwind(AssertUnwindSafe(|| model.compute(&planned)))
        .unwrap_or_else(|panic| Err(Error::Backend(panic_text(&*panic).to_owned())));
    let mut outputs = outputs.map(Vec::into_iter);
    for (job, count) in jobs.iter_mut().zip(counts) {
        job.inputs.drain(..count);
        let mine: Vec<Result<EmbedOutput>> = match &mut outputs {
            Ok(outputs) => outputs.by_ref().take(count).map(Ok).collect(),
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        };
        // A client that has gone wants nothing more.
        if mine.into_iter().any(|output| job.results.send(output).is_err()) {
            job.inputs.clear();
        }
    }
    jobs.retain(|job| !job.inputs.is_empty());
}

/// Returns how many texts of each job, from the first on, make one step: those that fit, at least one.
fn plan(jobs: &VecDeque<QueuedJob>) -> Vec<usize> {
    let mut tokens = 0;
    let mut counts = Vec::new();
    for job in jobs {
        let mut count = 0;
        for input in &job.inputs {
            if tokens > 0 && tokens + input.num_tokens() > TEXT_STEP_TOKENS {
                counts.push(count);
                return counts;
            }
            tokens += input.num_tokens();
            count += 1;
        }
        counts.push(count);
    }
    counts
}
