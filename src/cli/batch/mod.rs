//! `run --batch`: rows of a JSON Lines file to results in OpenAI's form, in the order of the rows.
//!
//! The engine has several rows at once. The oldest is waited for and written before the others are looked at.
//! `row` reads a row, `results` keeps what is finished. A row that is wrong, or that the engine refuses, is
//! reported in its place and the rest continue; only what would hit every row (a full disk, a dead engine)
//! ends the batch. A custom_id is answered once per file: an interrupted row leaves no trace and `--resume`
//! takes back what failed, so that it answers both. What is counted is in the results.

pub mod input;
pub mod results;
pub mod row;

use std::collections::{HashMap, VecDeque};
use std::io::BufRead;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::error::{CommandError, Exit};
use super::replay::folder::Recorder;
use super::run::answer::{AnswerGeneration, Generated, POLL, is_closed};
use super::run::report::timings_json;
use super::run::{RunArgs, system_prompt};
use super::terminal::Terminal;
use super::think::Think;
use crate::cli::flags::args::{EngineOptions, Sharing};
use crate::cli::model::load;
use crate::cli::model::load::Loaded;
use crate::cli::terminal::report::{counted, drafts, is_same_file};
use crate::cli::terminal::signal::Graceful;
use input::{MAX_ROW_BYTES, open_rows, read_row};
use llmctl_base::GivenSampling;
use llmctl_engine::turn::{Answer, TextPrompt, TurnError, TurnInput, TurnPlan, TurnRequest};
use llmctl_engine::{EventStream, Finish, Outcome, Overflow, Usage};
use llmctl_serve::error::ApiError;
use llmctl_serve::wire::answer as wire;
use llmctl_serve::wire::answer::TokenBytes;
use llmctl_serve::wire::image_files::ImageReading;
use llmctl_serve::wire::params::MAX_CHOICES;
use llmctl_template::{Content, Conversation, Message};
use results::{Earlier, Results};
use row::{BatchRow, Defaults, RowFormat, own_failure, parse, refusal};

/// Number of refused rows that are named on stderr; the rest are counted.
const NAMED_FAILURES: usize = 5;

/// Number of rows that the engine computes together.
const ROWS_TOGETHER: usize = 8;

/// Most rows that the engine has at once, so that a long answer leaves it other rows to compute. A kill loses at most these.
const ROWS_AHEAD: usize = 4 * ROWS_TOGETHER;

/// Runs the batch that `--batch` names.
pub fn run(mut args: RunArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    super::run::prepare(&mut args, terminal)?;
    let args = &args;
    let path = args.batch.batch.as_deref().unwrap_or(Path::new("-"));
    if args.batch.out.as_deref().is_some_and(|out| is_same_file(path, out)) {
        return Err(CommandError::usage("--batch and --out are the same file"));
    }
    let (rows, total) = open_rows(path, false)?;
    let (results, earlier) = match &args.batch.out {
        Some(out) => Results::open(out, args.batch.resume)?,
        None => (Results::stdout(), Earlier::default()),
    };
    note_earlier(&earlier, terminal);
    let system = system_prompt(args.prompt.system.as_ref(), args.prompt.system_file.as_ref())?;
    let sharing =
        Sharing { max_running: ROWS_TOGETHER, max_waiting: ROWS_AHEAD * MAX_CHOICES, ..Sharing::default() };
    let asked = EngineOptions { sharing, ..args.engine.resolve(false) };
    let llm = load::load(&args.model, asked, terminal)?;
    let record = args.batch.record.as_deref();
    let recorder = record.map(|folder| Recorder::open(folder, llm.texts().fingerprint())).transpose()?;
    let defaults = Defaults {
        sampling: args.sampling.resolve_for(llm.info(), terminal),
        limits: args.limits.resolve(),
        logprobs: args.output.logprobs,
        system,
        raw: args.prompt.raw,
        constraint: args.constraint.constraint(),
        think: think(&llm, args)?,
        shows_tools: llm.texts().chat_tokenizer().shows_tools(),
        strict_limits: args.limits.overflow == Some(Overflow::Refuse),
        schema_open: args.constraint.schema_open,
        images: ImageReading {
            is_on: llm.texts().chat_tokenizer().vision().is_some(),
            refusal: format!("the model {:?} reads no images", llm.info().name),
            fetch: None,
        },
        adapters: llm.engine().spec().model.adapters.clone(),
        models: (!args.batch.any_model).then(|| known_names(&llm, args)),
    };
    let progress = terminal.progress(total, "rows");
    let (llm, defaults, progress, tally) = (&llm, &defaults, &progress, BatchTally::default());
    let mut batch = BatchJob { llm, defaults, results, recorder, earlier, progress, terminal, tally };
    let start = Instant::now();
    let stopped = batch.answer_all(rows);
    progress.finish_and_clear();
    let counts = &batch.tally.counts;
    terminal.note(format!(
        "batch: {} answered, {} failed, {} skipped as finished before",
        counts.answered, counts.failed, counts.skipped
    ));
    if args.output.stats {
        terminal.report(&stats(counts, llm.info().refuses_drafts, start.elapsed()));
    }
    match stopped? {
        Stopped::Signal(number) => Ok(Exit::Signal(number)),
        Stopped::ReaderGone => Ok(Exit::Success),
        Stopped::End if counts.failed > 0 => Ok(Exit::FailedRows),
        Stopped::End => Ok(Exit::Success),
    }
}

/// Says what is done again of a previous run.
fn note_earlier(earlier: &Earlier, terminal: &Terminal) {
    if earlier.torn_bytes > 0 {
        let torn = earlier.torn_bytes;
        terminal
            .note(format!("the last row of a previous run was incomplete ({torn} bytes): answered again"));
    }
    if earlier.retried > 0 {
        let rows = counted(earlier.retried, "row");
        terminal.note(format!("{rows} of a previous run failed: tried again"));
    }
}

/// `--stats`: the tokens of all rows of this run.
fn stats(counts: &Counts, refuses_drafts: bool, time: Duration) -> String {
    let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = counts.usage;
    let drafts = drafts(&counts.usage, refuses_drafts);
    let rate = completion_tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE);
    format!(
        "prefill      {prompt_tokens} tokens, {cached_tokens} cached\n\
         decode       {completion_tokens} tokens{drafts}\n\
         total        {:.1} s, {rate:.1} generated tok/s with everything",
        time.as_secs_f64()
    )
}

/// Returns the reasoning that `--think` asks for, if the model supports it.
fn think(llm: &Loaded, args: &RunArgs) -> Result<Think, CommandError> {
    args.prompt.thinking_variables(llm.texts())?;
    args.prompt.think()
}

/// Returns the names by which a row may call the loaded model: its own, and the reference that the user gave.
fn known_names(llm: &Loaded, args: &RunArgs) -> Vec<String> {
    [Some(llm.info().name.clone()), args.model.model.clone()].into_iter().flatten().collect()
}

/// Why the rows came to an end.
#[derive(Debug, PartialEq, Eq)]
enum Stopped {
    End,
    Signal(u8),
    /// Of results that go to stdout.
    ReaderGone,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    answered: usize,
    failed: usize,
    skipped: usize,
    usage: Usage,
}

impl Counts {
    /// Adds the tokens of a row that is answered.
    fn add(&mut self, usage: &Usage) {
        self.answered += 1;
        self.usage.prompt_tokens += usage.prompt_tokens;
        self.usage.cached_tokens += usage.cached_tokens;
        self.usage.add_drafts(usage);
        self.usage.completion_tokens += usage.completion_tokens;
    }
}

/// A batch under way.
struct BatchJob<'a> {
    llm: &'a Loaded,
    defaults: &'a Defaults,
    results: Results,
    /// Set with `--record`.
    recorder: Option<Recorder>,
    earlier: Earlier,
    progress: &'a ProgressBar,
    terminal: &'a Terminal,
    tally: BatchTally,
}

/// Result of a batch so far.
#[derive(Default)]
struct BatchTally {
    counts: Counts,
    /// Number of rows of this file by custom_id.
    seen: HashMap<String, usize>,
    /// The note that the default system prompt does not reach text completions has been printed.
    has_said_system: bool,
    /// The note that rows are completed as plain text has been printed.
    has_said_plain: bool,
}

impl BatchJob<'_> {
    fn answer_all(&mut self, rows: Box<dyn BufRead + Send>) -> Result<Stopped, CommandError> {
        let graceful = Graceful::begin();
        let lines = lines(rows);
        let (mut number, mut ahead) = (0, VecDeque::new());
        loop {
            while ahead.len() < ROWS_AHEAD && graceful.received().is_none() {
                match lines.recv_timeout(POLL) {
                    Ok(line) => {
                        number += 1;
                        ahead.extend(self.ask(line, number));
                    }
                    Err(RecvTimeoutError::Timeout) if ahead.is_empty() => {}
                    Err(_) => break,
                }
            }
            let Some(row) = ahead.pop_front() else {
                return Ok(graceful.received().map_or(Stopped::End, Stopped::Signal));
            };
            if let Some(stopped) = self.finish(row, &graceful)? {
                return Ok(stopped);
            }
        }
    }

    /// Gives a row to the engine. `None` for a blank line, and for a row that an earlier run answered.
    fn ask(&mut self, line: Result<Vec<u8>, CommandError>, number: usize) -> Option<AheadRow> {
        let line = match line {
            Ok(line) if line.trim_ascii().is_empty() => return None,
            Ok(line) => line,
            Err(error) => return Some(AheadRow { id: String::new(), number, asked: Err(error) }),
        };
        let (id, row) = self.name(&line, number);
        let Some(row) = row else {
            self.tally.counts.skipped += 1;
            self.progress.set_length(self.progress.length().unwrap_or(1).saturating_sub(1));
            return None;
        };
        let place = place(&id, number);
        self.note_system(&place, &row);
        for warning in row.iter().flat_map(warnings) {
            self.progress.suspend(|| self.terminal.detail(&format!("{place}: {warning}")));
        }
        let row = row.map(|row| self.plain_text(row));
        let asked = row.map_or_else(|refused| Ok(Err(refused)), |row| self.submit(row));
        Some(AheadRow { id, number, asked })
    }

    /// Gives the engine a request for each answer of a row.
    fn submit(&self, row: BatchRow) -> Result<Result<AskedRow, ApiError>, CommandError> {
        let plan = match self.llm.planner().plan(&row.input, self.llm.texts().now(), &row.turn) {
            Ok(plan) => plan,
            Err(error) => return failed_to_plan(error).map(Err),
        };
        let choice = |nth| {
            let turn = nth_turn(&row.turn, nth);
            self.llm.engine().submit(plan.request(&turn)).map(|events| (turn, events))
        };
        match (0..row.num_choices).map(choice).collect() {
            Ok(choices) => Ok(Ok(AskedRow { row, plan, choices })),
            Err(error) => own_failure(CommandError::from(error)).map(Err),
        }
    }

    /// Waits for a row and adds its result. Returns why the batch ends, if it does.
    fn finish(&mut self, row: AheadRow, graceful: &Graceful) -> Result<Option<Stopped>, CommandError> {
        let AheadRow { id, number, asked } = row;
        let answered = asked?.map_or_else(
            |refused| Ok(Answered::Row(Err(refused))),
            |asked| self.answer(&id, asked, graceful),
        );
        let answer = match answered? {
            Answered::Row(answer) => answer,
            Answered::Stopped(signal) => return Ok(Some(Stopped::Signal(signal))),
        };
        if is_closed(self.results.append(&result_row(&id, number, answer.as_ref())))? {
            return Ok(Some(Stopped::ReaderGone));
        }
        self.progress.inc(1);
        self.count(&place(&id, number), answer.map(|(_, usage)| usage));
        Ok(None)
    }

    /// Returns the row's name and the parsed row; `None` if an earlier run answered it.
    fn name(&mut self, line: &[u8], number: usize) -> (String, Option<Result<BatchRow, ApiError>>) {
        let (id, row) = match line.len() as u64 > MAX_ROW_BYTES {
            false => {
                let chat_tokenizer = self.llm.texts().chat_tokenizer();
                chat_tokenizer.with_template(|template| parse(line, number, self.defaults, template))
            }
            true => {
                let message = format!("the row is longer than {} MiB", MAX_ROW_BYTES >> 20);
                (format!("line-{number}"), Err(refusal("row_too_long", message)))
            }
        };
        let nth = self.tally.seen.entry(id.clone()).or_default();
        *nth += 1;
        let row = match *nth {
            nth if nth <= self.earlier.rows.get(&id).copied().unwrap_or(0) => None,
            1 => Some(row),
            _ => {
                let message = format!("custom_id {id:?} was used by an earlier row");
                Some(Err(refusal("duplicate_custom_id", message)))
            }
        };
        (id, row)
    }

    fn answer(&self, id: &str, asked: AskedRow, graceful: &Graceful) -> Result<Answered, CommandError> {
        let (llm, AskedRow { row, plan, choices }) = (self.llm, asked);
        let mut answers = Vec::new();
        for (nth, (turn, events)) in choices.into_iter().enumerate() {
            let generation = AnswerGeneration { llm, turn: &turn, plan: &plan, session: None, graceful };
            let Generated { answer, signal, .. } = match generation.read(events, &mut ()) {
                Ok(generated) => generated,
                Err(error) => return Ok(Answered::Row(Err(own_failure(error)?))),
            };
            // An answer that ended by itself while the signal came is a finished one.
            if let Some(signal) = signal.filter(|_| answer.outcome.finish == Finish::Cancelled) {
                return Ok(Answered::Stopped(signal));
            }
            if let Some(recorder) = &self.recorder {
                recorder.record((id, nth), llm, (&turn, &plan), &answer)?;
            }
            answers.push(plan.parser.generated(answer));
        }
        Ok(Answered::Row(Ok((body(llm, &row, &answers), usage_of(&answers)))))
    }

    /// Notes, for the first such row, that a text completion has no place for a system prompt.
    fn note_system(&mut self, place: &str, row: &Result<BatchRow, ApiError>) {
        let is_completion = row.as_ref().is_ok_and(|row| row.form == RowFormat::Completion);
        let is_unreached = self.defaults.system.is_some() && is_completion;
        if is_unreached && !std::mem::replace(&mut self.tally.has_said_system, true) {
            let message =
                "is a text completion, to which the system prompt is not given, nor to others like it";
            self.progress.suspend(|| self.terminal.note(format!("{place} {message}")));
        }
    }

    /// Turns a single message into text to continue if the model has no chat template, as `run` does. Notes it for the first row.
    fn plain_text(&mut self, row: BatchRow) -> BatchRow {
        let info = self.llm.info();
        let text = if info.has_chat_template { None } else { only_message(&row.input) };
        let Some(text) = text else { return row };
        if !std::mem::replace(&mut self.tally.has_said_plain, true) {
            let message = format!("{} has no chat template: prompts are completed as plain text", info.name);
            self.progress.suspend(|| self.terminal.note(&message));
        }
        BatchRow { input: TurnInput::Text(TextPrompt::Text(text)), ..row }
    }

    /// Counts a row that is among the results, and names it when it failed.
    fn count(&mut self, place: &str, answer: Result<Usage, ApiError>) {
        let error = match answer {
            Ok(usage) => return self.tally.counts.add(&usage),
            Err(error) => error,
        };
        self.tally.counts.failed += 1;
        let message = match self.tally.counts.failed {
            count if count <= NAMED_FAILURES => format!("{place}: {}", error.message),
            count if count == NAMED_FAILURES + 1 => "more rows failed; the results name them".to_owned(),
            _ => return,
        };
        self.progress.suspend(|| self.terminal.warn(&message));
    }
}

/// Reads rows on a thread of its own, one ahead: a program may write the next when it has seen the result of the last.
fn lines(mut rows: Box<dyn BufRead + Send>) -> Receiver<Result<Vec<u8>, CommandError>> {
    let (sender, lines) = mpsc::sync_channel(0);
    thread::spawn(move || {
        let mut next = || read_row(rows.as_mut()).map_err(CommandError::io("reading the batch")).transpose();
        while let Some(line) = next()
            && sender.send(line).is_ok()
        {}
    });
    lines
}

/// Returns how users are told which row is meant.
fn place(id: &str, number: usize) -> String {
    format!("row {id:?} (line {number})")
}

/// A row whose turn to be written comes, with what the engine was asked or why the row is refused.
struct AheadRow {
    id: String,
    number: usize,
    asked: Result<Result<AskedRow, ApiError>, CommandError>,
}

/// A row that the engine has.
struct AskedRow {
    row: BatchRow,
    plan: TurnPlan,
    /// The request for each answer, with its events.
    choices: Vec<(TurnRequest, EventStream)>,
}

/// State of a row that is asked.
enum Answered {
    Row(Result<(Value, Usage), ApiError>),
    Stopped(u8),
}

/// Returns the row's own error of planning; any other ends the batch.
fn failed_to_plan(error: TurnError) -> Result<ApiError, CommandError> {
    match error {
        TurnError::Unsupported { .. } => Ok(error.into()),
        TurnError::Param { param, error } => Ok(own_failure(error.into())?.param(param)),
        TurnError::Other(error) => own_failure(error.into()),
    }
}

/// Returns the text of a conversation that is one message of the user's and nothing else.
fn only_message(input: &TurnInput) -> Option<String> {
    let TurnInput::Chat(conversation) = input else { return None };
    let [message] = &*conversation.messages else { return None };
    match &message.content {
        Some(Content::Text(text)) if *message == Message::user(text.clone()) => (*conversation
            == Conversation { messages: vec![message.clone()], ..Conversation::default() })
        .then(|| text.clone()),
        _ => None,
    }
}

/// Builds a row of OpenAI's batch output. A failure is both an HTTP-like response and an `error`, so that clients may read either.
fn result_row(id: &str, number: usize, answer: Result<&(Value, Usage), &ApiError>) -> Value {
    let (status, body, error) = match answer {
        Ok((body, _)) => (200, body.clone(), Value::Null),
        Err(error) => {
            let fault = json!({"code": error.code, "message": error.message});
            (error.status.as_u16(), error.body(), fault)
        }
    };
    json!({
        "id": format!("batch_req_{number}"),
        "custom_id": id,
        "response": {"status_code": status, "request_id": format!("req_{number}"), "body": body},
        "error": error,
    })
}

/// Returns the request for one of several answers to a prompt: each has a seed of its own.
fn nth_turn(turn: &TurnRequest, nth: usize) -> TurnRequest {
    let seed = turn.sampling.seed.map(|seed| seed.wrapping_add(nth as u64));
    TurnRequest { sampling: GivenSampling { seed, ..turn.sampling.clone() }, ..turn.clone() }
}

/// Adds the tokens of several answers to one prompt, which counts once.
fn usage_of(answers: &[Answer]) -> Usage {
    let first = answers.first().map(|answer| answer.outcome.usage.clone()).unwrap_or_default();
    let completion_tokens = answers.iter().map(|answer| answer.outcome.usage.completion_tokens).sum();
    Usage { completion_tokens, ..first }
}

/// Returns OpenAI's result object, with seed and times of each answer under `llmctl`.
fn body(llm: &Loaded, row: &BatchRow, answers: &[Answer]) -> Value {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let object = match row.form {
        RowFormat::Chat => "chat.completion",
        RowFormat::Completion => "text_completion",
    };
    let mut own: Vec<Value> = answers.iter().map(|answer| own_facts(llm, answer)).collect();
    let mut facts = if own.len() == 1 { own.remove(0) } else { json!({"answers": own}) };
    facts["warnings"] = warnings(row).into();
    let choices = answers.iter().enumerate().map(|(index, answer)| choice(llm, row, index, answer));
    json!({
        "object": object,
        "created": created,
        "model": llm.info().name,
        "choices": choices.collect::<Vec<_>>(),
        "usage": wire::usage(&usage_of(answers)),
        "llmctl": facts,
    })
}

fn own_facts(llm: &Loaded, answer: &Answer) -> Value {
    let Outcome { usage, timings, seed, .. } = &answer.outcome;
    json!({"seed": seed, "timings": timings_json(timings, usage, llm.info())})
}

/// Returns one answer of a row as OpenAI's object has it.
fn choice(llm: &Loaded, row: &BatchRow, index: usize, answer: &Answer) -> Value {
    let bytes: TokenBytes<'_> = &|id| llm.texts().chat_tokenizer().token_bytes(id).into_owned();
    let logprobs = row.turn.logprobs.map(|_| match row.form {
        RowFormat::Chat => wire::chat_logprobs(&answer.content_tokens, bytes),
        RowFormat::Completion => wire::completion_logprobs(&answer.tokens, bytes, &mut 0),
    });
    let (name, said) = match row.form {
        RowFormat::Chat => ("message", wire::message_json(answer, row.shows_reasoning, row.has_functions)),
        RowFormat::Completion => ("text", answer.content.as_str().into()),
    };
    let finish_reason = match answer.finish_reason() {
        "tool_calls" if row.has_functions => "function_call",
        reason => reason,
    };
    json!({"index": index, name: said, "logprobs": logprobs, "finish_reason": finish_reason})
}

/// Returns a sentence for each part of a row that had no effect.
fn warnings(row: &BatchRow) -> Vec<String> {
    row.ignored.iter().map(|name| format!("{name} has no effect")).collect()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::cli::error::Kind;
    use crate::cli::flags::args::ColorWhen;
    use crate::cli::script::{Script, saying};
    use llmctl_base::Error;
    use llmctl_engine::Event;

    /// Runs `input` with the script into a file of `folder`, as `--resume` does; returns the counts and all results.
    fn batch(
        script: &Script,
        input: &str,
        folder: &Path,
    ) -> (Result<Stopped, CommandError>, Counts, Vec<Value>) {
        let out = folder.join("out.jsonl");
        let opened = Results::open(&out, true).expect("a file of results");
        let defaults = Defaults { models: Some(vec!["script".to_owned()]), ..Defaults::default() };
        let llm = Loaded::scripted(script);
        let quiet = quiet();
        let mut batch = job(&llm, &defaults, opened, &quiet);
        let stopped = batch.answer_all(Box::new(io::Cursor::new(input.to_owned().into_bytes())));
        let text = std::fs::read_to_string(&out).expect("the results");
        let rows = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        (stopped, batch.tally.counts, rows)
    }

    fn quiet() -> (ProgressBar, Terminal) {
        (ProgressBar::hidden(), Terminal::new(ColorWhen::Never, 0, true))
    }

    fn job<'a>(
        llm: &'a Loaded,
        defaults: &'a Defaults,
        (results, earlier): (Results, Earlier),
        (progress, terminal): &'a (ProgressBar, Terminal),
    ) -> BatchJob<'a> {
        let tally = BatchTally::default();
        BatchJob { llm, defaults, results, recorder: None, earlier, progress, terminal, tally }
    }

    const INPUT: &str = r#"{"custom_id":"a","prompt":"say one"}

{"custom_id":"b","prompt":"say two","temperature":9}
not json
{"custom_id":"a","prompt":"say again"}
{"prompt":"say five"}
"#;

    fn ids(rows: &[Value]) -> Vec<&str> {
        rows.iter().map(|row| row["custom_id"].as_str().expect("an id")).collect()
    }

    #[test]
    fn bad_rows_are_reported_in_their_place_and_the_rest_go_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let (stopped, counts, rows) = batch(&Script::default(), INPUT, folder.path());
        assert_eq!(stopped.expect("no error"), Stopped::End);
        assert_eq!((counts.answered, counts.failed, counts.skipped), (2, 3, 0));
        assert_eq!(counts.usage.completion_tokens, "onefive".len());
        assert_eq!(ids(&rows), ["a", "b", "line-4", "a", "line-6"]);
        let content = |row: &Value| row["response"]["body"]["choices"][0]["message"]["content"].clone();
        assert_eq!((content(&rows[0]), content(&rows[4])), (json!("one"), json!("five")));
        let codes: Vec<_> = rows.iter().map(|row| row["error"]["code"].as_str().unwrap_or("")).collect();
        assert_eq!(codes, ["", "invalid_value", "invalid_json", "duplicate_custom_id", ""]);
        assert_eq!(rows[1]["response"]["status_code"], 400);
        assert_eq!(rows[1]["response"]["body"]["error"]["param"], "temperature");
        assert_eq!(rows[0]["error"], Value::Null);
    }

    #[test]
    fn rows_are_asked_together_and_their_results_are_in_order() {
        let rows = |count: usize| -> String {
            (0..count).map(|row| format!("{{\"custom_id\":\"{row}\",\"prompt\":\"say {row}\"}}\n")).collect()
        };
        let (together, alone) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let script = Script::default().awaiting_the_next();
        let input = rows(ROWS_AHEAD + 9);
        let (stopped, counts, found) = batch(&script, &input, together.path());
        assert_eq!((stopped.expect("no error"), counts.answered), (Stopped::End, ROWS_AHEAD + 9));
        assert!(script.has_met(), "a row waited for the answer of another");
        for line in input.lines() {
            let (stopped, ..) = batch(&Script::default(), line, alone.path());
            assert_eq!(stopped.expect("no error"), Stopped::End);
        }
        let alone = std::fs::read_to_string(alone.path().join("out.jsonl")).expect("the results");
        let said = |row: &Value| (row["custom_id"].clone(), row["response"]["body"]["choices"].clone());
        let alone = alone.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        assert_eq!(
            found.iter().map(said).collect::<Vec<_>>(),
            alone.map(|row: Value| said(&row)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn no_more_rows_are_read_than_may_be_ahead() {
        let input = "{\"prompt\":\"say one\"}\n".repeat(ROWS_AHEAD + 9);
        let folder = tempfile::tempdir().expect("a folder");
        let script = Script::default().answering(vec![Event::Failed(Error::EngineGone)]);
        let (stopped, _, rows) = batch(&script, &input, folder.path());
        assert_eq!((stopped.unwrap_err().kind, rows.len()), (Kind::Bug, 0));
        assert!(script.requests().len() <= ROWS_AHEAD, "{}", script.requests().len());
    }

    #[test]
    fn resume_answers_only_what_is_missing_wherever_it_was_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_, _, whole) = batch(&Script::default(), INPUT, folder.path());
        let out = folder.path().join("out.jsonl");
        let full = std::fs::read(&out).expect("the results");
        let strip = |rows: Vec<Value>| {
            let one = |mut row: Value| {
                row["response"]["body"]["created"] = Value::Null;
                row
            };
            rows.into_iter().map(one).collect::<Vec<_>>()
        };
        let whole = strip(whole);
        for cut in (0..=full.len()).step_by(37) {
            std::fs::write(&out, &full[..cut]).expect("a cut file");
            let kept = full[..cut].iter().filter(|byte| **byte == b'\n').count();
            let (_, counts, rows) = batch(&Script::default(), INPUT, folder.path());
            // Failed rows are tried again, after the answered ones.
            let sorted = |mut rows: Vec<Value>| {
                rows.sort_by_key(|row| row["id"].to_string());
                rows
            };
            assert_eq!(sorted(strip(rows)), sorted(whole.clone()), "cut at {cut}");
            let answered = |row: &&Value| row["error"].is_null();
            assert_eq!(counts.skipped, whole[..kept].iter().filter(answered).count(), "cut at {cut}");
        }
    }

    #[test]
    fn resume_tries_again_what_failed_and_nothing_else() {
        let input =
            "{\"custom_id\":\"a\",\"prompt\":\"say one\"}\n{\"custom_id\":\"b\",\"prompt\":\"say two\"}\n";
        let folder = tempfile::tempdir().expect("a folder");
        let script = Script::default().answering(vec![Event::Failed(Error::Backend("nan".into()))]);
        let (_, counts, rows) = batch(&script, input, folder.path());
        assert_eq!((counts.answered, counts.failed, ids(&rows)), (1, 1, vec!["a", "b"]));
        let (_, counts, rows) = batch(&script, input, folder.path());
        assert_eq!((counts.answered, counts.failed, counts.skipped), (1, 0, 1));
        assert_eq!(ids(&rows), ["b", "a"], "one result for each row");
        assert!(rows.iter().all(|row| row["error"].is_null()), "{rows:?}");
        assert_eq!(script.requests().len(), 3);
    }

    #[test]
    fn one_message_without_a_template_is_plain_text() {
        let script = Script::default().with_template(None);
        let folder = tempfile::tempdir().expect("a folder");
        let input = concat!(
            "{\"prompt\":\"once upon\"}\n",
            "{\"messages\":[{\"role\":\"user\",\"content\":\"a time\"}]}\n",
        );
        let (_, counts, _) = batch(&script, input, folder.path());
        assert_eq!((counts.answered, counts.failed), (2, 0));
        let asked: Vec<String> = script
            .requests()
            .iter()
            .map(|request| request.prompt.iter().map(|id| *id as u8 as char).collect())
            .collect();
        assert_eq!(asked, ["once upon", "a time"], "no template around them");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_could_not_be_written_is_not_counted() {
        let llm = Loaded::scripted(&Script::default());
        let defaults = Defaults::default();
        let opened = Results::open(Path::new("/dev/full"), false).expect("a device");
        let quiet = quiet();
        let mut batch = job(&llm, &defaults, opened, &quiet);
        let stopped = batch.answer_all(Box::new(io::Cursor::new(b"{\"prompt\":\"say one\"}\n")));
        assert_eq!(stopped.expect_err("a full disk").kind, Kind::Io);
        assert_eq!(batch.tally.counts, Counts::default());
    }

    #[test]
    fn a_failed_forward_pass_costs_one_row_and_a_dead_engine_the_batch() {
        let input = "{\"prompt\":\"x one\"}\n{\"prompt\":\"x two\"}\n";
        let folder = tempfile::tempdir().expect("a folder");
        let script = Script::default().answering(vec![Event::Failed(Error::Backend("nan".into()))]);
        let (stopped, counts, rows) = batch(&script, input, folder.path());
        assert_eq!((stopped.expect("goes on"), counts.answered, counts.failed), (Stopped::End, 1, 1));
        assert_eq!(rows[0]["response"]["status_code"], 500);

        let folder = tempfile::tempdir().expect("a folder");
        let script = script.answering(vec![Event::Failed(Error::EngineGone)]);
        let (stopped, _, rows) = batch(&script, input, folder.path());
        assert_eq!((stopped.unwrap_err().kind, rows.len()), (Kind::Bug, 0));
    }

    #[test]
    fn a_row_may_ask_for_several_answers() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = Script::default();
        let input = "{\"prompt\":\"say one\",\"n\":3,\"seed\":7}\n";
        let (_, counts, rows) = batch(&script, input, folder.path());
        assert_eq!((counts.answered, counts.failed), (1, 0));
        let body = &rows[0]["response"]["body"];
        let choices = body["choices"].as_array().expect("a list");
        let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64()).collect();
        assert_eq!(indices, [Some(0), Some(1), Some(2)]);
        assert!(choices.iter().all(|choice| choice["message"]["content"] == "one"), "{choices:?}");
        assert_eq!(body["usage"]["completion_tokens"], 3 * "one".len());
        let requests = script.requests();
        assert_eq!(body["usage"]["prompt_tokens"], requests[0].prompt.len(), "the prompt counts once");
        let seeds: Vec<_> = requests.iter().map(|request| request.sampling.seed).collect();
        assert_eq!(seeds, [Some(7), Some(8), Some(9)]);
    }

    #[test]
    fn the_context_is_never_cut_silently() {
        let folder = tempfile::tempdir().expect("a folder");
        let long = format!("{{\"prompt\":\"{}\"}}\n", "x".repeat(200));
        let (_, counts, rows) = batch(&Script::default(), &long, folder.path());
        assert_eq!(counts.failed, 1);
        assert_eq!(rows[0]["error"]["code"], "context_length_exceeded");
    }

    #[test]
    fn results_have_openais_shape() {
        let hi = || saying("hi", 4, Finish::Eos(0));
        let llm = Loaded::scripted(&Script::default().answering(hi()).answering(hi()));
        let row = |form, text| BatchRow {
            form,
            input: TurnInput::Text(TextPrompt::Text(String::from(text))),
            turn: TurnRequest { logprobs: Some(2), ..TurnRequest::default() },
            num_choices: 1,
            shows_reasoning: true,
            has_functions: false,
            ignored: Vec::new(),
        };
        let (defaults, quiet) = (Defaults::default(), quiet());
        let batch = job(&llm, &defaults, (Results::stdout(), Earlier::default()), &quiet);
        let both = [row(RowFormat::Chat, "q"), row(RowFormat::Completion, "q")].map(|row| {
            let Ok(Ok(asked)) = batch.submit(row) else { panic!("a request") };
            let Ok(Answered::Row(Ok((mut body, usage)))) = batch.answer("a", asked, &Graceful::begin())
            else {
                panic!("an answer")
            };
            body["created"] = 0.into();
            result_row("q1", 1, Ok(&(body, usage)))
        });
        insta::assert_snapshot!("batch_results", format!("{:#}", json!(both)));
    }
}
