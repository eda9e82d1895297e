//! Measures cases on a real engine, through the handle that all frontends use.
//!
//! Each repetition has tokens of its own, so that no prefix is reused by accident. The tokens at a depth are
//! computed once per depth and forked for each repetition, so that every repetition starts at the same
//! position. A model that cannot fork computes them again.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::plan::{Case, Work};
use super::record::{BenchModel, BenchSetting, Sample};
use super::runner::{BenchSubject, Halt};
use super::stats::{self, SplitMix64};
use crate::error::BenchError;
use llmctl_base::Error;
use llmctl_engine::{
    DraftModelUsage, EngineClient, EngineSessionName, Event, Limits, Outcome, Request, StopHandle, Usage,
};

/// Interval for polling signals while the engine is silent.
const POLL: Duration = Duration::from_millis(25);

/// Longest wait for the KV of sessions to reach the disk.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts an engine; with a folder, one that saves its sessions' KV there.
pub type StartEngine<'a> = Box<dyn Fn(Option<&Path>) -> Result<(EngineClient, BenchModel), BenchError> + 'a>;

/// Context of a run that its engines share.
pub struct Around<'a> {
    /// Returns the signal that shall end the run.
    pub interrupted: &'a dyn Fn() -> Option<u8>,
    /// Folder for temporary files.
    pub scratch: PathBuf,
    /// Origin of all times.
    pub start: Instant,
    /// Measurements per case, the warm-up included.
    pub rounds: usize,
    pub seed: u64,
}

/// A loaded model to measure.
pub struct EngineSubject<'a> {
    start: StartEngine<'a>,
    around: &'a Around<'a>,
    handle: EngineClient,
    facts: BenchModel,
    random: SplitMix64,
    /// Tokens of the session at each depth, and the token that comes next.
    depths: HashMap<usize, Vec<u32>>,
    num_sessions: usize,
    /// Sessions on disk that wait to be restored, by case.
    saved: HashMap<Case, Saved>,
}

/// Sessions that an engine has saved, one for each repetition.
struct Saved {
    folder: ScratchFolder,
    sessions: Vec<Vec<u32>>,
}

/// Course of one request.
struct Course {
    submitted: Instant,
    /// Time and number of each group of tokens.
    tokens: Vec<(Instant, usize)>,
    generated: Vec<u32>,
    outcome: Outcome,
    restored_tokens: usize,
}

impl Course {
    fn first(&self) -> Result<Instant, Error> {
        let (time, _) = self.tokens.first().ok_or(Error::EngineGone)?;
        Ok(*time)
    }

    fn last(&self) -> Result<Instant, Error> {
        let (time, _) = self.tokens.last().ok_or(Error::EngineGone)?;
        Ok(*time)
    }
}

impl<'a> EngineSubject<'a> {
    /// Starts the engine and computes one token, so that all memory has been touched once.
    ///
    /// # Errors
    /// Those of `start` and of the engine.
    pub fn open(start: StartEngine<'a>, around: &'a Around<'a>) -> Result<Self, Halt> {
        let (handle, facts) = start(None)?;
        let random = SplitMix64::new(around.seed);
        let (depths, saved) = Default::default();
        let mut subject = Self { start, around, handle, facts, random, depths, num_sessions: 0, saved };
        let prompt = subject.tokens(8);
        subject.converse(vec![request(prompt, 2, None)])?;
        Ok(subject)
    }

    pub fn facts(&self) -> &BenchModel {
        &self.facts
    }

    /// Returns new random tokens at every call, so that no prefix is reused.
    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let vocab_size = self.handle.spec().vocab_size();
        (0..count).map(|_| self.random.below(vocab_size) as u32).collect()
    }

    fn converse(&self, requests: Vec<Request>) -> Result<Vec<Course>, Halt> {
        converse(&self.handle, self.around.interrupted, requests)
    }

    fn session_name(&mut self) -> EngineSessionName {
        self.num_sessions += 1;
        EngineSessionName::scoped("bench", self.num_sessions)
    }

    /// Creates a session that holds `tokens`. Returns them with the token that comes next.
    fn begin(&self, name: &EngineSessionName, mut tokens: Vec<u32>) -> Result<Vec<u32>, Halt> {
        let course = self.converse(vec![request(tokens.clone(), 1, Some(name.clone()))])?.remove(0);
        tokens.extend(course.generated);
        Ok(tokens)
    }

    /// Creates sessions with `depth` random tokens in the KV cache. Returns their names, their tokens, and
    /// the token that comes next.
    fn at_depth(
        &mut self,
        depth: usize,
        count: usize,
    ) -> Result<(Vec<EngineSessionName>, Vec<Vec<u32>>), Halt> {
        let names: Vec<EngineSessionName> = (0..count).map(|_| self.session_name()).collect();
        if !self.handle.spec().model.can_rewind {
            let mut held = Vec::new();
            for name in &names {
                let tokens = self.tokens(depth);
                held.push(self.begin(name, tokens)?);
            }
            return Ok((names, held));
        }
        let original = EngineSessionName::scoped("depth", depth);
        let tokens = match self.depths.get(&depth) {
            Some(tokens) => tokens.clone(),
            None => {
                let tokens = self.tokens(depth);
                let tokens = self.begin(&original, tokens)?;
                self.depths.insert(depth, tokens.clone());
                tokens
            }
        };
        for name in &names {
            self.handle.fork_session(&original, name)?;
        }
        Ok((names, vec![tokens; count]))
    }

    fn close(&self, names: &[EngineSessionName]) -> Result<(), Halt> {
        for name in names {
            self.handle.close_session(name)?;
        }
        Ok(())
    }

    /// Runs requests of `prompt` new tokens each, after `case.depth` others, that generate `generate` tokens.
    fn rows(&mut self, case: &Case, prompt: usize, generate: usize) -> Result<Vec<Course>, Halt> {
        if case.depth == 0 {
            let request = |_| request(self.tokens(prompt), generate, None);
            let requests = (0..case.sequences).map(request).collect();
            return self.converse(requests);
        }
        let (names, held) = self.at_depth(case.depth, case.sequences)?;
        let mut requests = Vec::new();
        for (name, mut tokens) in names.iter().zip(held) {
            // The token that comes next is the first of the new ones.
            tokens.extend(self.tokens(prompt - 1));
            requests.push(request(tokens, generate, Some(name.clone())));
        }
        let courses = self.converse(requests)?;
        self.close(&names)?;
        Ok(courses)
    }

    fn prompt(&mut self, case: &Case, tokens: usize) -> Result<Sample, Halt> {
        let courses = self.rows(case, tokens, 1)?;
        let value = match &courses[..] {
            [one] => one.outcome.timings.prefill_rate(&one.outcome.usage).unwrap_or(0.0),
            _ => {
                let computed =
                    courses.iter().map(|c| c.outcome.usage.prompt_tokens - c.outcome.usage.cached_tokens);
                computed.sum::<usize>() as f64 / until_all_began(&courses)?.as_secs_f64()
            }
        };
        Ok(self.sample(value, &courses))
    }

    fn generate(&mut self, case: &Case, tokens: usize) -> Result<Sample, Halt> {
        let waiting = case.sequences.saturating_sub(1) * 2;
        // The first token belongs to the prompt.
        let courses = self.rows(case, 1, tokens + waiting + 1)?;
        let value = match &courses[..] {
            [one] => one.outcome.timings.decode_rate(&one.outcome.usage).unwrap_or(0.0),
            _ => rate_together(&courses)?,
        };
        Ok(self.sample(value, &courses))
    }

    fn both(&mut self, case: &Case, prompt: usize, generate: usize) -> Result<Sample, Halt> {
        let courses = self.rows(case, prompt, generate + 1)?;
        let mut end = courses[0].last()?;
        for course in &courses {
            end = end.max(course.last()?);
        }
        let time = end - courses[0].submitted;
        let value = (case.sequences * (prompt + generate)) as f64 / time.as_secs_f64();
        Ok(self.sample(value, &courses))
    }

    /// Measures the time to the first token without any reuse.
    fn cold(&mut self, case: &Case, tokens: usize) -> Result<Sample, Halt> {
        let names: Vec<EngineSessionName> = (0..case.sequences).map(|_| self.session_name()).collect();
        let prompts = names.iter().map(|name| request(self.tokens(tokens), 1, Some(name.clone())));
        let prompts = prompts.collect();
        self.first_tokens(prompts, names)
    }

    /// Measures the time to the first token of prompts with a common prefix.
    fn shared(&mut self, case: &Case, first: usize, turn: usize) -> Result<Sample, Halt> {
        let system = self.tokens(first);
        let names: Vec<EngineSessionName> = (0..case.sequences).map(|_| self.session_name()).collect();
        let prompt = |name: &EngineSessionName| {
            let tokens = [system.clone(), self.tokens(turn)].concat();
            request(tokens, 1, Some(name.clone()))
        };
        let prompts = names.iter().map(prompt).collect();
        self.first_tokens(prompts, names)
    }

    fn warm(&mut self, first: usize, turn: usize) -> Result<Sample, Halt> {
        let name = self.session_name();
        let tokens = self.tokens(first);
        let mut tokens = self.begin(&name, tokens)?;
        tokens.extend(self.tokens(turn - 1));
        self.first_tokens(vec![request(tokens, 1, Some(name.clone()))], vec![name])
    }

    fn fork(&mut self, case: &Case, first: usize, turn: usize) -> Result<Sample, Halt> {
        let original = self.session_name();
        let tokens = self.tokens(first);
        let held = self.begin(&original, tokens)?;
        let names: Vec<EngineSessionName> = (0..case.sequences).map(|_| self.session_name()).collect();
        let begun = Instant::now();
        for name in &names {
            self.handle.fork_session(&original, name)?;
        }
        let fork_ms = milliseconds(begun.elapsed());
        let prompt = |name: &EngineSessionName| {
            let tokens = [held.clone(), self.tokens(turn - 1)].concat();
            request(tokens, 1, Some(name.clone()))
        };
        let prompts = names.iter().map(prompt).collect();
        let sample = self.first_tokens(prompts, names)?;
        self.close(&[original])?;
        Ok(Sample { fork_ms: Some(fork_ms), ..sample })
    }

    /// Runs requests at once and closes their sessions. The value is the time until all have their first
    /// token.
    fn first_tokens(
        &mut self,
        requests: Vec<Request>,
        names: Vec<EngineSessionName>,
    ) -> Result<Sample, Halt> {
        let courses = self.converse(requests)?;
        let load = self.handle.load()?;
        self.close(&names)?;
        let value = milliseconds(until_all_began(&courses)?);
        let kv_bytes = Some(load.kv_capacity.saturating_sub(load.kv_free) as u64);
        Ok(Sample { kv_bytes, ..self.sample(value, &courses) })
    }

    /// Measures a session's second turn in an engine that was just started.
    fn restore(&mut self, case: &Case, first: usize, turn: usize) -> Result<Sample, Halt> {
        let new = self.tokens(turn - 1);
        let tokens = self.saved_session(case, first)?;
        let prompt = [&tokens[..], &new].concat();
        self.after_restart(case, prompt, |handle, name| handle.restore_session(name, tokens))
    }

    /// Measures a new session that begins like a saved one, in an engine that was just started.
    fn agent(&mut self, case: &Case, first: usize, turn: usize) -> Result<Sample, Halt> {
        let new = self.tokens(turn);
        let tokens = self.saved_session(case, first)?;
        let prompt = [&tokens[..first], &new].concat();
        self.after_restart(case, prompt, |_, _| Ok(()))
    }

    /// Returns the tokens of a session on disk that no round has used yet.
    fn saved_session(&mut self, case: &Case, first: usize) -> Result<Vec<u32>, Halt> {
        if self.saved.get(case).is_none_or(|saved| saved.sessions.is_empty()) {
            let saved = self.save_sessions(first)?;
            self.saved.insert(*case, saved);
        }
        Ok(self.saved.get_mut(case).and_then(|saved| saved.sessions.pop()).expect("filled above"))
    }

    /// Measures the time to the first token of a prompt in an engine that was just started.
    fn after_restart(
        &self,
        case: &Case,
        prompt: Vec<u32>,
        prepare: impl FnOnce(&EngineClient, &EngineSessionName) -> Result<(), Error>,
    ) -> Result<Sample, Halt> {
        let folder = &self.saved[case].folder.path;
        let (handle, facts) = (self.start)(Some(folder))?;
        let name = EngineSessionName::scoped("bench", "restored");
        prepare(&handle, &name)?;
        let courses = converse(&handle, self.around.interrupted, vec![request(prompt, 1, Some(name))])?;
        let value = milliseconds(until_all_began(&courses)?);
        Ok(Sample { load_s: facts.load_s.first().copied(), ..self.sample(value, &courses) })
    }

    /// Saves a session of `first` tokens to disk for each round, and ends the engine that did so.
    fn save_sessions(&mut self, first: usize) -> Result<Saved, Halt> {
        let folder = ScratchFolder::new(&self.around.scratch)?;
        let (handle, _) = (self.start)(Some(&folder.path))?;
        let mut sessions = Vec::new();
        for index in 0..self.around.rounds {
            let mut tokens = self.tokens(first);
            let name = EngineSessionName::scoped("saved", index);
            let asked = request(tokens.clone(), 1, Some(name.clone()));
            let course = converse(&handle, self.around.interrupted, vec![asked])?.remove(0);
            tokens.extend(course.generated);
            sessions.push(tokens);
            handle.close_session(&name)?;
        }
        if !handle.flush_disk(FLUSH_TIMEOUT)? {
            return Err(BenchError::Temporary("the disk is slow: the sessions' KV is not saved").into());
        }
        Ok(Saved { folder, sessions })
    }

    fn sample(&self, value: f64, courses: &[Course]) -> Sample {
        let first: Vec<f64> = courses
            .iter()
            .filter_map(|course| course.outcome.timings.time_to_first_token.map(milliseconds))
            .collect();
        let token_ms = courses.iter().flat_map(|course| {
            course
                .tokens
                .windows(2)
                .map(|pair| milliseconds((pair[1].0 - pair[0].0) / pair[1].1.max(1) as u32))
        });
        Sample {
            value: rounded(value),
            at_s: rounded(self.around.start.elapsed().as_secs_f64()),
            first_token_ms: (!first.is_empty()).then(|| rounded(stats::median(&first))),
            cached_tokens: courses.iter().map(|course| course.outcome.usage.cached_tokens).sum(),
            restored_tokens: courses.iter().map(|course| course.restored_tokens).sum(),
            drafted_tokens: courses.iter().map(|course| course.outcome.usage.drafted_tokens).sum(),
            accepted_tokens: courses.iter().map(|course| course.outcome.usage.accepted_tokens).sum(),
            draft_model: by_draft_model(courses),
            token_ms: token_ms.map(rounded).collect(),
            ..Sample::default()
        }
    }
}

impl BenchSubject for EngineSubject<'_> {
    fn setting(&self) -> &BenchSetting {
        &self.facts.setting
    }

    fn measure(&mut self, case: &Case) -> Result<Sample, Halt> {
        match case.work {
            Work::Prompt { tokens } => self.prompt(case, tokens),
            Work::Generate { tokens } => self.generate(case, tokens),
            Work::Both { prompt, generate } => self.both(case, prompt, generate),
            Work::Cold { first, turn } => self.cold(case, first + turn),
            Work::Warm { first, turn } => self.warm(first, turn),
            Work::Restore { first, turn } => self.restore(case, first, turn),
            Work::Fork { first, turn } => self.fork(case, first, turn),
            Work::Shared { first, turn } => self.shared(case, first, turn),
            Work::Agent { first, turn } => self.agent(case, first, turn),
        }
    }
}

/// Sums up what the draft model came to.
fn by_draft_model(courses: &[Course]) -> Option<DraftModelUsage> {
    let mut sum = Usage::default();
    courses.iter().for_each(|course| sum.add_drafts(&course.outcome.usage));
    sum.draft_model
}

/// Rounds to thousandths, enough for rates and milliseconds.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Returns the time from the submission of all to the first token of the last.
fn until_all_began(courses: &[Course]) -> Result<Duration, Error> {
    let mut latest = Duration::ZERO;
    for course in courses {
        latest = latest.max(course.first()? - courses[0].submitted);
    }
    Ok(latest)
}

/// Returns the tokens per second of sequences that generate together: from the last sequence's first token to
/// the first sequence's last token, so that all take part throughout.
///
/// # Errors
/// [`BenchError::Temporary`] if there is no such time.
fn rate_together(courses: &[Course]) -> Result<f64, Halt> {
    let mut start = courses[0].first()?;
    let mut end = courses[0].last()?;
    for course in courses {
        start = start.max(course.first()?);
        end = end.min(course.last()?);
    }
    let times = courses.iter().flat_map(|course| &course.tokens);
    let counted: usize =
        times.filter(|(time, _)| *time > start && *time <= end).map(|(_, count)| count).sum();
    let time = end.saturating_duration_since(start);
    if time.is_zero() {
        let apart = "the sequences did not generate at the same time: use a larger -n";
        return Err(BenchError::Temporary(apart).into());
    }
    Ok(counted as f64 / time.as_secs_f64())
}

fn request(prompt: Vec<u32>, generate: usize, session: Option<EngineSessionName>) -> Request {
    let limits = Limits { max_tokens: Some(generate), ignore_eos: true, ..Limits::default() };
    Request { prompt, limits, session, ..Request::default() }
}

/// Submits all requests at once and reads each to its end. Events of the first wait until the last is
/// submitted: a small model would finish it before this thread continues.
fn converse(
    handle: &EngineClient,
    interrupted: &dyn Fn() -> Option<u8>,
    requests: Vec<Request>,
) -> Result<Vec<Course>, Halt> {
    let (sender, events) = mpsc::channel();
    let submitted = Instant::now();
    let mut stops = StopAll(Vec::new());
    let mut courses = Vec::new();
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    for (index, request) in requests.into_iter().enumerate() {
        let (sender, gate) = (sender.clone(), gate.clone());
        let sink = move |event| {
            drop(gate.lock());
            match sender.send((Instant::now(), index, event)) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        };
        stops.0.push(handle.submit_to(request, Box::new(sink))?);
        courses.push((Vec::new(), Vec::new(), None, 0));
    }
    drop((closed, sender));
    loop {
        if let Some(signal) = interrupted() {
            return Err(Halt::Interrupted(signal));
        }
        let (time, index, event) = match events.recv_timeout(POLL) {
            Ok(heard) => heard,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let (times, generated, outcome, restored) = &mut courses[index];
        match event {
            Event::Queued { .. } | Event::Encoding { .. } | Event::Prefill { .. } | Event::Prompt { .. } => {}
            Event::Started(started) => *restored = started.reuse.restored_tokens,
            Event::Text { tokens, .. } if tokens.is_empty() => {}
            Event::Text { tokens, .. } => {
                times.push((time, tokens.len()));
                generated.extend(tokens.iter().map(|token| token.id));
            }
            Event::Done(done) => *outcome = Some(done),
            Event::Failed(error) => return Err(error.into()),
        }
    }
    let course = |(tokens, generated, outcome, restored_tokens): (_, _, Option<Outcome>, _)| {
        let outcome = outcome.ok_or(Error::EngineGone)?;
        Ok(Course { submitted, tokens, generated, outcome, restored_tokens })
    };
    Ok(courses.into_iter().map(course).collect::<Result<_, Error>>()?)
}

/// Stops the requests when dropped.
struct StopAll(Vec<StopHandle>);

impl Drop for StopAll {
    fn drop(&mut self) {
        self.0.iter().for_each(StopHandle::stop);
    }
}

/// A folder that is removed when dropped.
struct ScratchFolder {
    path: PathBuf,
}

impl ScratchFolder {
    fn new(within: &Path) -> Result<Self, BenchError> {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = within.join(format!("llmctl-bench-{}-{count}", std::process::id()));
        let failed = |error| BenchError::Write { place: format!("making {}", path.display()), error };
        std::fs::create_dir(&path).map_err(failed)?;
        Ok(Self { path })
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path); // what remains is in the system's folder for temporary files
    }
}
