//! An answer as the user asked to have it: text, one JSON object, or an event per line; statistics on stderr.
//!
//! Owns the schema `llmctl.run.v1`. Fields are added, never renamed or removed, under one schema name. Text
//! mode ends with a line end. All three carry the same text, which begins with the prefilled part of the
//! answer if any. Reasoning is not part of the text: it is a field of its own, and text mode shows it on
//! stderr if that is a terminal. Answers whose calls are run come before the last one: text and json have a
//! line end between them.

use std::io::Write;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use super::answer::{AnswerSink, Generated};
use super::{OutputFormat, RunArgs};
use crate::cli::endpoint::ChatEndpoint;
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::{CommandError, Exit};
use crate::cli::mcp::CallResult;
use crate::cli::model::load::{ModelInfo, PreparedTexts};
use crate::cli::terminal::output::{Output, OutputError};
use crate::cli::terminal::render::Markdown;
use crate::cli::terminal::report::{decimal, drafts, usage_json, used};
use crate::cli::terminal::signal::Graceful;
use crate::cli::terminal::{Terminal, columns};
use llmctl_base::{Sampling, SamplingParameter};
use llmctl_engine::turn::{Answer, AnsweredCall, Delta};
use llmctl_engine::{Explanation, Finish, Logprob, Outcome, Reuse, Started, Timings, Token, Usage};
use llmctl_serve::wire::answer::call_json;

const SCHEMA: &str = "llmctl.run.v1";

/// Settings of a report's form.
#[derive(Debug, Clone, Copy)]
pub struct ReportForm {
    pub format: OutputFormat,
    /// Text as it comes, or at the end: in jsonl as one event.
    pub stream: bool,
    pub logprobs: bool,
    pub shows_reasoning: bool,
    /// A terminal gets text with line breaks between words.
    pub wraps: bool,
}

impl ReportForm {
    /// Returns the form that the flags ask for.
    ///
    /// # Errors
    /// A `--think` that cannot be read.
    pub fn of(args: &RunArgs) -> Result<Self, CommandError> {
        Ok(Self {
            format: args.output.output.unwrap_or_default(),
            stream: !args.output.no_stream,
            logprobs: args.output.logprobs.is_some(),
            shows_reasoning: args.prompt.think()?.is_shown,
            // A line break within JSON would be part of it.
            wraps: args.constraint.source.is_none(),
        })
    }
}

/// Source of an answer.
#[derive(Clone, Copy)]
pub enum ReportSubject<'a> {
    /// A model here, with the parameters in force and the given beginning of the answer, for the record.
    Model { texts: &'a PreparedTexts, sampling: &'a Sampling, prefill: &'a str },
    /// A server that takes messages, and what was asked of it.
    Endpoint(&'a ChatEndpoint, &'a EndpointRequest<'a>),
}

impl ReportSubject<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Model { texts, .. } => &texts.info().name,
            Self::Endpoint(endpoint, _) => endpoint.model(),
        }
    }
}

/// Time of encoding images after which it is shown.
pub const ENCODING_NOTICEABLE: Duration = Duration::from_secs(1);

/// Describes how far images are encoded.
pub fn encoding_status(done: usize, total: usize) -> String {
    format!("encoding the image, {} %", done * 100 / total.max(1))
}

/// Writes one answer.
pub struct Report<'a, W: Write> {
    subject: ReportSubject<'a>,
    form: ReportForm,
    output: Output<W>,
    terminal: &'a Terminal,
    progress: Option<ProgressBar>,
    /// Since when images are encoded.
    encoding_since: Option<Instant>,
    /// Breaks lines between words, as in chat; `None` where the text goes as it is.
    wrap: Option<Markdown>,
    /// The answer so far, if jsonl does not stream it.
    held: Held,
    /// Answers whose calls were run, for json.
    rounds: Vec<Value>,
    /// The text written so far ends with a line end, or there is none.
    is_at_line_start: bool,
    /// Reasoning on stderr has not ended with a line end yet.
    is_reasoning_open: bool,
}

/// Step of [`Report::answers`] after each answer.
pub type AfterAnswer<'a, T, W> =
    dyn FnMut(T, &Generated, &mut Report<'_, W>, &Graceful) -> Result<Option<T>, CommandError> + 'a;

/// Parts of an answer that wait for its end.
#[derive(Default)]
struct Held {
    text: String,
    reasoning: String,
    tokens: Vec<Token>,
}

impl<'a, W: Write> Report<'a, W> {
    pub fn new(
        subject: ReportSubject<'a>,
        form: ReportForm,
        output: Output<W>,
        terminal: &'a Terminal,
    ) -> Self {
        let wraps = form.wraps && form.format == OutputFormat::Text && output.is_terminal();
        Self {
            subject,
            form,
            output,
            terminal,
            progress: None,
            encoding_since: None,
            wrap: wraps.then(|| Markdown::new(false, columns())),
            held: Held::default(),
            rounds: Vec::new(),
            is_at_line_start: true,
            is_reasoning_open: false,
        }
    }

    /// Writes answers until one is the last, and then what `tell` says. `after` gets each answer, with what it answered, before
    /// it is reported as done: it keeps it, runs its calls, and returns what is answered next, if there is more to come.
    ///
    /// # Errors
    /// Those of the two; the failure of an endpoint in the middle of an answer; that stdout cannot be written to.
    pub fn answers<T>(
        mut self,
        first: T,
        generate: &dyn Fn(&T, &mut Self, &Graceful) -> Result<Generated, CommandError>,
        after: &mut AfterAnswer<'_, T, W>,
        tell: impl FnOnce(&Answer, Option<u8>) -> Exit,
    ) -> Result<Exit, CommandError> {
        let (graceful, terminal, mut asked) = (Graceful::begin(), self.terminal, first);
        let Generated { answer, signal, is_reader_gone, failure, notice } = loop {
            let generated = generate(&asked, &mut self, &graceful);
            let next = generated
                .and_then(|generated| Ok((after(asked, &generated, &mut self, &graceful)?, generated)));
            match next.inspect_err(|error| self.fail(error.kind.word(), &error.to_string()))? {
                (Some(next), Generated { failure: None, notice, .. }) => {
                    notice.iter().for_each(|notice| terminal.warn(notice));
                    asked = next;
                }
                (_, generated) => break generated,
            }
        };
        if let Some(failure) = failure {
            self.fail(failure.kind.word(), &failure.to_string());
            return Err(failure);
        }
        let signal = signal.or(graceful.received());
        if is_reader_gone {
            return Ok(signal.map_or(Exit::Success, Exit::Signal));
        }
        if let Err(OutputError::Failed(error)) = self.finish(&answer) {
            return Err(error);
        }
        drop(self);
        notice.iter().for_each(|notice| terminal.warn(notice));
        Ok(tell(&answer, signal))
    }

    /// Ends an answer whose calls are run next.
    pub fn calls(&mut self, answer: &Answer) -> Result<(), OutputError> {
        self.clear_progress();
        let calls: Value = answer.tool_calls.iter().map(call_json).collect();
        let usage = usage_json(&answer.outcome.usage);
        match self.form.format {
            OutputFormat::Text => self.end_text(&answer.content),
            OutputFormat::Json => {
                let (text, reasoning, results) = (&answer.content, self.shown_reasoning(answer), json!([]));
                self.rounds.push(json!({
                    "text": text, "reasoning": reasoning, "tool_calls": calls, "results": results, "usage": usage,
                }));
                Ok(())
            }
            OutputFormat::Jsonl => {
                self.hold(answer);
                self.release()?;
                self.event("tool_calls", json!({"tool_calls": calls, "usage": usage}))
            }
        }
    }

    /// Reports the result of one call of [`Self::calls`].
    pub fn call_result(&mut self, call: &AnsweredCall, result: &CallResult) -> Result<(), OutputError> {
        let fields =
            json!({"id": call.id, "name": call.name, "status": result.status.word(), "text": result.text});
        match (self.form.format, self.rounds.last_mut()) {
            (OutputFormat::Jsonl, _) => self.event("tool_result", fields),
            (OutputFormat::Json, Some(round)) => {
                if let Some(results) = round["results"].as_array_mut() {
                    results.push(fields);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Notes something below the answer so far.
    pub fn note(&mut self, text: String) {
        let _ = self.end_line(); // a failure comes again with the report's end
        self.terminal.note(text);
    }

    /// Ends the report: the line end, the text that was not streamed, or the JSON.
    pub fn finish(&mut self, answer: &Answer) -> Result<(), OutputError> {
        self.clear_progress();
        match self.form.format {
            OutputFormat::Text => self.end_text(&answer.content),
            OutputFormat::Json => {
                let mut object = self.result(answer);
                let rounds = std::mem::take(&mut self.rounds);
                let text = earlier_text(&rounds) + &answer.content;
                if !rounds.is_empty() {
                    object.insert("tool_rounds".to_owned(), rounds.into());
                }
                object.insert("text".to_owned(), text.into());
                object.insert("reasoning".to_owned(), self.shown_reasoning(answer).into());
                if self.form.logprobs {
                    let tokens = self.tokens(&answer.tokens);
                    object.insert("logprobs".to_owned(), tokens);
                }
                self.output.line(&format!("{:#}", Value::Object(object)))
            }
            OutputFormat::Jsonl => {
                self.hold(answer);
                self.release()?;
                let mut object = self.result(answer);
                object.shift_insert(1, "event".to_owned(), "done".into());
                self.output.line(&Value::Object(object).to_string())
            }
        }
    }

    /// A failure after the first event: reported in the stream too if the stream consists of events.
    pub fn fail(&mut self, kind: &str, message: &str) {
        self.clear_progress();
        // The error itself is what the command ends with; a second one from here would hide it.
        if self.form.format == OutputFormat::Jsonl {
            let _ = self.release();
            let _ = self.event("error", json!({"kind": kind, "message": message}));
        } else if self.form.format == OutputFormat::Text && self.form.stream {
            let _ = self.end_line();
        }
    }

    fn result(&self, answer: &Answer) -> Map<String, Value> {
        let Outcome { finish, usage, timings, seed, adapters: _ } = &answer.outcome;
        let mut object = Map::new();
        object.insert("schema".to_owned(), SCHEMA.into());
        object.insert("model".to_owned(), self.subject.name().into());
        let (llm, sampling, prefill) = match self.subject {
            ReportSubject::Model { texts, sampling, prefill } => (texts, sampling, prefill),
            ReportSubject::Endpoint(endpoint, request) => {
                object.extend(endpoint_result(endpoint, request, answer));
                return object;
            }
        };
        let info = llm.info();
        if !prefill.is_empty() {
            object.insert("prefill_response".to_owned(), prefill.into());
        }
        object.insert("finish_reason".to_owned(), answer.finish_reason().into());
        object.insert("finish".to_owned(), finish_forms(finish).0);
        object.insert("tool_calls".to_owned(), answer.whole_calls().map(call_json).collect());
        object.insert("usage".to_owned(), usage_json(usage));
        object.insert("reuse".to_owned(), answer.started.as_ref().map(|s| reuse_json(s, llm)).into());
        object.insert("context".to_owned(), json!({"used": used(usage), "size": info.context_tokens}));
        object.insert("timings".to_owned(), timings_json(timings, usage, info));
        object.insert("seed".to_owned(), (*seed).into());
        object.insert("sampling".to_owned(), sampling_members(sampling).into());
        object
    }

    fn event(&mut self, name: &str, fields: Value) -> Result<(), OutputError> {
        let mut object = Map::new();
        object.insert("schema".to_owned(), SCHEMA.into());
        object.insert("event".to_owned(), name.into());
        if let Value::Object(fields) = fields {
            object.extend(fields);
        }
        self.output.line(&Value::Object(object).to_string())
    }

    /// Takes the parts of an answer that is not streamed.
    fn hold(&mut self, answer: &Answer) {
        let Answer { content: text, reasoning, tokens, .. } = answer.clone();
        self.held = Held { text, reasoning, tokens };
    }

    /// Writes the events of an answer that is not streamed, if it has any text.
    fn release(&mut self) -> Result<(), OutputError> {
        let Held { text, reasoning, tokens } = std::mem::take(&mut self.held);
        if self.form.stream || text.is_empty() && reasoning.is_empty() && tokens.is_empty() {
            return Ok(());
        }
        if reasoning.is_empty() {
            return self.text_event(&text, &tokens);
        }
        self.reasoning_event(&reasoning, &[])?;
        self.text_event(&text, &tokens)
    }

    fn text_event(&mut self, text: &str, tokens: &[Token]) -> Result<(), OutputError> {
        let tokens = self.tokens(tokens);
        self.event("text", json!({"text": text, "tokens": tokens}))
    }

    fn reasoning_event(&mut self, reasoning: &str, tokens: &[Token]) -> Result<(), OutputError> {
        if !self.form.shows_reasoning {
            return Ok(());
        }
        let tokens = self.tokens(tokens);
        self.event("reasoning", json!({"reasoning": reasoning, "tokens": tokens}))
    }

    /// Writes tokens; an endpoint has none.
    fn tokens(&self, tokens: &[Token]) -> Value {
        match self.subject {
            ReportSubject::Model { texts, .. } => {
                tokens.iter().map(|token| token_json(texts, token)).collect()
            }
            ReportSubject::Endpoint(..) => json!([]),
        }
    }

    /// Takes text and reasoning of one step. Its tokens go with the text, if there is any.
    fn take(&mut self, text: &str, reasoning: &str, tokens: &[Token]) -> Result<(), OutputError> {
        match self.form.format {
            OutputFormat::Json => Ok(()),
            OutputFormat::Text => {
                self.show_reasoning(reasoning);
                if self.form.stream { self.write_text(text) } else { Ok(()) }
            }
            OutputFormat::Jsonl if !self.form.stream => {
                self.held.text.push_str(text);
                self.held.reasoning.push_str(reasoning);
                self.held.tokens.extend_from_slice(tokens);
                Ok(())
            }
            OutputFormat::Jsonl if text.is_empty() && !reasoning.is_empty() => {
                self.reasoning_event(reasoning, tokens)
            }
            OutputFormat::Jsonl => {
                if !reasoning.is_empty() {
                    self.reasoning_event(reasoning, &[])?;
                }
                self.text_event(text, tokens)
            }
        }
    }

    fn write_text(&mut self, text: &str) -> Result<(), OutputError> {
        if text.is_empty() {
            return Ok(());
        }
        self.end_reasoning();
        self.is_at_line_start = text.ends_with('\n');
        let Some(wrap) = &mut self.wrap else { return self.output.write(text) };
        wrap.resize(columns());
        let broken = wrap.push(text);
        self.output.write(&broken)
    }

    /// Ends an answer's text, which is written now if it was not streamed.
    fn end_text(&mut self, text: &str) -> Result<(), OutputError> {
        if !self.form.stream {
            self.write_text(text)?;
        }
        self.end_line()
    }

    fn end_line(&mut self) -> Result<(), OutputError> {
        self.end_reasoning();
        let rest = self.wrap.as_mut().map(Markdown::finish).unwrap_or_default();
        self.output.write(&rest)?;
        if std::mem::replace(&mut self.is_at_line_start, true) { Ok(()) } else { self.output.write("\n") }
    }

    /// Returns the reasoning of an answer for json; `None` if there is none or it is not to be shown.
    fn shown_reasoning(&self, answer: &Answer) -> Option<String> {
        Some(answer.reasoning.clone()).filter(|text| self.form.shows_reasoning && !text.is_empty())
    }

    /// Shows reasoning beside the text, to a person.
    fn show_reasoning(&mut self, reasoning: &str) {
        if self.form.shows_reasoning && self.terminal.shows_progress() && !reasoning.is_empty() {
            self.terminal.aside(reasoning);
            self.is_reasoning_open = !reasoning.ends_with('\n');
        }
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.is_reasoning_open) {
            self.terminal.aside("\n");
        }
    }

    fn clear_progress(&mut self) {
        if let Some(bar) = self.progress.take() {
            bar.finish_and_clear();
        }
    }
}

impl<W: Write> Drop for Report<'_, W> {
    fn drop(&mut self) {
        self.clear_progress();
    }
}

impl<W: Write> AnswerSink for Report<'_, W> {
    fn is_watched(&self) -> bool {
        self.form.format == OutputFormat::Text && self.output.is_terminal()
    }

    fn started(&mut self, started: &Started, deltas: &[Delta]) -> Result<(), OutputError> {
        if self.form.format == OutputFormat::Jsonl
            && let ReportSubject::Model { texts: llm, .. } = self.subject
        {
            let info = llm.info();
            let fields = json!({
                "model": info.name,
                "prompt_tokens": started.prompt_tokens,
                "max_tokens": started.max_tokens,
                "context": {"size": info.context_tokens},
                "seed": started.seed,
                "reuse": reuse_json(started, llm),
            });
            self.event("started", fields)?;
        }
        self.answer(deltas, &[], 0)
    }

    fn prefill(&mut self, done: usize, total: usize) -> Result<(), OutputError> {
        if self.form.format == OutputFormat::Jsonl {
            self.event("prefill", json!({"done": done, "total": total}))?;
        }
        // Only when it takes more than one step is there anything to watch.
        if self.terminal.shows_progress() && done < total {
            let terminal = self.terminal;
            let bar = || terminal.progress(Some(total as u64), "tokens of the prompt");
            self.progress.get_or_insert_with(bar).set_position(done as u64);
        } else {
            self.clear_progress();
        }
        Ok(())
    }

    fn encoding(&mut self, done: usize, total: usize) -> Result<(), OutputError> {
        if self.form.format == OutputFormat::Jsonl {
            self.event("encoding", json!({"done": done, "total": total}))?;
        }
        self.clear_progress(); // the prompt waits
        let since = *self.encoding_since.get_or_insert_with(Instant::now);
        if done >= total {
            self.encoding_since = None;
            self.terminal.status("");
        } else if since.elapsed() > ENCODING_NOTICEABLE {
            self.terminal.status(&encoding_status(done, total));
        }
        Ok(())
    }

    fn answer(&mut self, deltas: &[Delta], tokens: &[Token], _: usize) -> Result<(), OutputError> {
        self.clear_progress();
        if deltas.is_empty() && tokens.is_empty() {
            return Ok(());
        }
        let (mut text, mut reasoning) = (String::new(), String::new());
        for delta in deltas {
            match delta {
                Delta::Content(more) => text.push_str(more),
                Delta::Reasoning(more) => reasoning.push_str(more),
                Delta::Call { .. } | Delta::Arguments { .. } | Delta::CallEnd { .. } => {} // reported at the end
            }
        }
        if text.is_empty() && reasoning.is_empty() && tokens.is_empty() {
            return Ok(()); // an endpoint's part of a call
        }
        self.take(&text, &reasoning, tokens)
    }
}

/// Returns the texts of answers whose calls were run, each with a line end.
fn earlier_text(rounds: &[Value]) -> String {
    let texts = rounds.iter().filter_map(|round| round["text"].as_str()).filter(|text| !text.is_empty());
    texts.map(|text| format!("{}\n", text.strip_suffix('\n').unwrap_or(text))).collect()
}

/// Returns the members of a result that differ where the answer is an endpoint's. What it does not report is null.
fn endpoint_result(
    endpoint: &ChatEndpoint,
    request: &EndpointRequest<'_>,
    answer: &Answer,
) -> Map<String, Value> {
    let Outcome { usage, timings, .. } = &answer.outcome;
    let is_counted = usage.prompt_tokens > 0;
    let mut sampling = sampling_members(&request.sampling.given.sampling(false));
    let is_given =
        |name: &str| SamplingParameter::all().any(|one| one.name() == name && request.sampling.gives(one));
    sampling.retain(|name, _| is_given(name));
    let object = json!({
        "endpoint": endpoint.url().to_string(),
        "finish_reason": answer.finish_reason(),
        "finish": {"by": if answer.outcome.finish == Finish::Cancelled { "cancelled" } else { "endpoint" }},
        "tool_calls": answer.tool_calls.iter().map(call_json).collect::<Vec<_>>(),
        "usage": is_counted.then(|| usage_json(usage)),
        "reuse": null,
        "context": {"used": is_counted.then(|| used(usage)), "size": null},
        "timings": {
            "time_to_first_token_ms": timings.time_to_first_token.map(ms),
            "decode_ms": ms(timings.decode),
            "total_ms": ms(timings.total),
        },
        "seed": request.seed(),
        "sampling": sampling,
    });
    object.as_object().cloned().unwrap_or_default()
}

/// `--stats` and `/stats` for an endpoint's answer.
pub fn endpoint_stats(outcome: &Outcome, endpoint: &ChatEndpoint) -> String {
    let Outcome { finish, usage, timings, .. } = outcome;
    let first = timings.time_to_first_token.map_or("none".to_owned(), |time| format!("{:.1} ms", ms(time)));
    let counts = match usage.prompt_tokens {
        0 => "tokens       not reported".to_owned(),
        prompt => {
            let rate = timings.decode_rate(usage).map_or(String::new(), |rate| format!(", {rate:.1} tok/s"));
            let (cached, answered) = (usage.cached_tokens, usage.completion_tokens);
            format!(
                "tokens       prompt {prompt}, {cached} cached; answer {answered}{rate} (as the endpoint counts)"
            )
        }
    };
    [
        format!("model        {} at {}", endpoint.model(), endpoint.url()),
        counts,
        format!("first token  {first}, total {:.1} ms", ms(timings.total)),
        format!("finish       {}", finish.reason()),
    ]
    .join("\n")
}

/// Returns how much of the prompt was reused, and why not more.
fn reuse_json(started: &Started, llm: &PreparedTexts) -> Value {
    let Started { reuse, difference, .. } = started;
    let difference = difference.as_ref().map(|difference| {
        let Explanation { position, before, session, prompt, image } = difference.explain(llm.vocabulary());
        let mut object =
            json!({"position": position, "before": before, "session": session, "prompt": prompt});
        if let Some(image) = image {
            object["image"] = image.clause(None).into();
        }
        object
    });
    json!({
        "cached_tokens": reuse.cached_tokens,
        "restored_tokens": reuse.restored_tokens,
        "prefilled_tokens": started.prompt_tokens - reuse.cached_tokens,
        "reason": reuse.reason.name(),
        "difference": difference,
    })
}

/// Describes the reuse in a line, and in one more where session and prompt differ.
pub fn reuse(started: &Started, llm: &PreparedTexts) -> String {
    let Started { prompt_tokens, reuse, difference, .. } = started;
    let Reuse { cached_tokens, restored_tokens, reason, .. } = reuse;
    let prefilled = prompt_tokens - cached_tokens;
    let line = format!(
        "reuse        {cached_tokens} tokens reused, {restored_tokens} of them from disk, {prefilled} prefilled ({})",
        reason.name()
    );
    let Some(difference) = difference else { return line };
    let Explanation { position, before, session, prompt, image } = difference.explain(llm.vocabulary());
    let image = image.map(|image| format!("; {}", image.clause(None))).unwrap_or_default();
    format!(
        "{line}\ndifference   at token {position}: after \"{before}\" the session has \"{session}\", the prompt \"{prompt}\"{image}"
    )
}

/// Returns the end of an answer as JSON has it, and in words.
fn finish_forms(finish: &Finish) -> (Value, String) {
    match finish {
        Finish::Eos(id) => {
            (json!({"by": "eos", "token": id}), format!("stop (end-of-generation token {id})"))
        }
        Finish::Complete => (json!({"by": "complete"}), "stop (the grammar is complete)".to_owned()),
        Finish::StopString(text) => {
            (json!({"by": "stop_string", "text": text}), format!("stop (at {text:?})"))
        }
        Finish::MaxTokens => (json!({"by": "max_tokens"}), "length (--max-tokens)".to_owned()),
        Finish::ContextFull => (json!({"by": "context_full"}), "length (context full)".to_owned()),
        Finish::Cancelled => (json!({"by": "cancelled"}), "cancelled".to_owned()),
        Finish::Deadline => (json!({"by": "deadline"}), "length (deadline)".to_owned()),
        Finish::Repetition => (json!({"by": "repetition"}), "repetition (--loop-guard)".to_owned()),
    }
}

/// Milliseconds and tokens per second.
pub fn timings_json(timings: &Timings, usage: &Usage, info: &ModelInfo) -> Value {
    json!({
        "load_ms": ms(info.load_time),
        "queue_ms": ms(timings.queue),
        "prefill_ms": ms(timings.prefill),
        "decode_ms": ms(timings.decode),
        "time_to_first_token_ms": timings.time_to_first_token.map(ms),
        "total_ms": ms(timings.total),
        "prefill_tokens_per_second": timings.prefill_rate(usage).map(rounded),
        "decode_tokens_per_second": timings.decode_rate(usage).map(rounded),
    })
}

fn sampling_members(sampling: &Sampling) -> Map<String, Value> {
    let value = |parameter: SamplingParameter| match parameter {
        SamplingParameter::Number(number) => Some(decimal(number.get(sampling))),
        SamplingParameter::TopK => Some(sampling.top_k.into()),
        SamplingParameter::LogitBias => {
            let bias = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), decimal(*bias)));
            Some(Value::Object(bias.collect()))
        }
        SamplingParameter::Seed => None, // the seed in force stands beside it
        SamplingParameter::Samplers => sampling.samplers.as_ref().map(|steps| json!(steps)),
        SamplingParameter::DrySequenceBreakers => {
            sampling.dry_sequence_breakers.as_ref().map(|texts| json!(texts))
        }
    };
    let named = |parameter: SamplingParameter| Some((parameter.name().to_owned(), value(parameter)?));
    SamplingParameter::all().filter_map(named).collect()
}

fn token_json(llm: &PreparedTexts, token: &Token) -> Value {
    let Some(Logprob { logprob, top }) = &token.logprob else { return json!({"id": token.id}) };
    let mut object = piece_json(llm, token.id, *logprob);
    object["top"] = top.iter().map(|(id, logprob)| piece_json(llm, *id, *logprob)).collect();
    object
}

/// Returns a token as text and as bytes (the text alone cannot tell parts of characters apart), with its log-probability.
fn piece_json(llm: &PreparedTexts, id: u32, logprob: f32) -> Value {
    let bytes = llm.chat_tokenizer().token_bytes(id);
    let token = String::from_utf8_lossy(&bytes);
    json!({"id": id, "token": token, "bytes": *bytes, "logprob": decimal(logprob)})
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// `--stats`: what happened, in words, one subject per line.
pub fn stats(outcome: &Outcome, started: Option<&Started>, llm: &PreparedTexts) -> String {
    let info = llm.info();
    let Outcome { finish, usage, timings, seed, adapters: _ } = outcome;
    let rate = |rate: Option<f64>| rate.map_or(String::new(), |rate| format!(", {rate:.1} tok/s"));
    let (_, finish) = finish_forms(finish);
    let first = timings.time_to_first_token.map_or("none".to_owned(), |time| format!("{:.1} ms", ms(time)));
    let percent = 100.0 * used(usage) as f64 / info.context_tokens.max(1) as f64;
    let mut lines = vec![
        format!("model        {}, loaded in {:.1} ms", info.name, ms(info.load_time)),
        format!(
            "prefill      {} tokens, {} cached{}",
            usage.prompt_tokens,
            usage.cached_tokens,
            rate(timings.prefill_rate(usage))
        ),
    ];
    lines.extend(started.map(|started| reuse(started, llm)));
    let images = usage.images;
    if !images.is_zero() {
        lines.push(format!("images       {} encoded, {} known", images.encoded, images.found));
    }
    lines.extend([
        format!(
            "decode       {} tokens{}{}",
            usage.completion_tokens,
            rate(timings.decode_rate(usage)),
            drafts(usage, info.refuses_drafts)
        ),
        format!("first token  {first}, total {:.1} ms", ms(timings.total)),
        format!("context      {} of {} tokens ({percent:.1}%)", used(usage), info.context_tokens),
        format!("finish       {finish}"),
        format!("seed         {seed}"),
    ]);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::answer::AnswerGeneration;
    use super::*;
    use crate::cli::flags::args::ColorWhen;
    use crate::cli::model::load::Loaded;
    use crate::cli::script::{Script, saying};
    use llmctl_engine::Difference;
    use llmctl_engine::turn::{AnswerStart, TextPrompt, TurnRequest};

    /// Returns what is written to stdout for an answer of `text` in this form.
    fn written(format: OutputFormat, stream: bool, text: &str, prefill: &str) -> String {
        let events = saying(text, 3, Finish::StopString("END".to_owned()));
        let llm = Loaded::scripted(&Script::default().answering(events));
        let terminal = Terminal::new(ColorWhen::Never, 0, true);
        let mut stdout = Vec::new();
        let form = ReportForm { format, stream, logprobs: true, shows_reasoning: true, wraps: false };
        let sampling = Sampling { temperature: 0.6, ..Sampling::default() };
        let subject = ReportSubject::Model { texts: llm.texts(), sampling: &sampling, prefill };
        let mut report = Report::new(subject, form, Output::new(&mut stdout, false), &terminal);
        let answer_start = AnswerStart::Text(prefill.to_owned());
        let (turn, graceful) = (TurnRequest { answer_start, ..TurnRequest::default() }, Graceful::begin());
        let prompt = TextPrompt::Text("ab".to_owned());
        let plan = llm.planner().plan_text(&prompt, &turn).expect("a plan");
        let generation =
            AnswerGeneration { llm: &llm, turn: &turn, plan: &plan, session: None, graceful: &graceful };
        let generated = generation.run(&mut report).expect("an answer");
        report.note("a note".to_owned());
        if stream && format == OutputFormat::Text {
            assert!(report.is_at_line_start);
        }
        report.finish(&generated.answer).expect("a Vec takes all");
        drop(report);
        String::from_utf8(stdout).expect("UTF-8")
    }

    #[test]
    fn text_ends_with_one_line_end_streamed_or_not() {
        for stream in [true, false] {
            assert_eq!(written(OutputFormat::Text, stream, "hello", ""), "hello\n");
            assert_eq!(written(OutputFormat::Text, stream, "hello\n", ""), "hello\n");
            assert_eq!(written(OutputFormat::Text, stream, "", ""), "");
            assert_eq!(written(OutputFormat::Text, stream, "lo", "hel"), "hello\n");
        }
    }

    #[test]
    fn json_is_one_object_with_everything() {
        let text = written(OutputFormat::Json, true, "hi", "{");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        insta::assert_snapshot!("run_json", text);
        assert_eq!(value["text"], "{hi");
        assert_eq!(value["usage"]["total_tokens"], 5);
    }

    #[test]
    fn jsonl_is_an_event_per_line_whose_texts_join_to_the_answer() {
        let text = written(OutputFormat::Jsonl, true, "hi", "{");
        insta::assert_snapshot!("run_jsonl", text);
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON per line")).collect();
        let joined: String = lines.iter().filter_map(|line| line["text"].as_str()).collect();
        assert_eq!(joined, "{hi");
        assert!(lines.iter().all(|line| line["schema"] == SCHEMA));
        assert_eq!(lines.last().expect("lines")["event"], "done");
    }

    #[test]
    fn jsonl_that_is_not_streamed_has_one_text_event() {
        let texts = |stream| -> Vec<(String, usize)> {
            let text = written(OutputFormat::Jsonl, stream, "hi!", "{");
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
            let event =
                |line: Value| Some((line["text"].as_str()?.to_owned(), line["tokens"].as_array()?.len()));
            lines.filter_map(event).collect()
        };
        let streamed = texts(true);
        assert!(streamed.len() > 1, "{streamed:?}");
        let num_tokens = streamed.iter().map(|(_, tokens)| tokens).sum();
        assert_eq!(texts(false), [("{hi!".to_owned(), num_tokens)]);
    }

    #[test]
    fn stats_say_what_happened() {
        let Some(llmctl_engine::Event::Done(outcome)) = saying("hello", 7, Finish::MaxTokens).pop() else {
            panic!("the last event is Done")
        };
        let script = Script::default().named("tiny").with_context(48);
        let llm = Loaded::scripted(&script);
        let llm = llm.texts();
        insta::assert_snapshot!("run_stats", stats(&outcome, None, llm));
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let difference = Difference::between(&ids("<user>one\n<assistant>1"), &ids("<user>two\n"));
        let reuse = Reuse {
            cached_tokens: 6,
            restored_tokens: 4,
            reason: llmctl_engine::ReuseReason::PartialPrefix,
            first_difference: Some(6),
        };
        let started = Started { prompt_tokens: 9, max_tokens: 7, seed: 42, reuse, difference };
        insta::assert_snapshot!("run_stats_of_a_miss", stats(&outcome, Some(&started), llm));
        insta::assert_snapshot!("run_reuse", format!("{:#}", reuse_json(&started, llm)));
    }

    #[test]
    fn parts_of_a_call_are_no_events() {
        let llm = Loaded::scripted(&Script::default());
        let (terminal, sampling) = (Terminal::new(ColorWhen::Never, 0, true), Sampling::default());
        let mut stdout = Vec::new();
        let subject = ReportSubject::Model { texts: llm.texts(), sampling: &sampling, prefill: "" };
        let (format, stream, shows_reasoning) = (OutputFormat::Jsonl, true, true);
        let form = ReportForm { format, stream, logprobs: false, shows_reasoning, wraps: false };
        let mut report = Report::new(subject, form, Output::new(&mut stdout, false), &terminal);
        let call = Delta::Call { index: 0, id: "c".to_owned(), name: "f".to_owned() };
        let part = Delta::Arguments { index: 0, fragment: "{".to_owned() };
        report.answer(&[call, part], &[], 0).expect("a Vec takes all");
        report.answer(&[Delta::Content("a".to_owned())], &[], 0).expect("a Vec takes all");
        drop(report);
        let text = String::from_utf8(stdout).expect("UTF-8");
        assert!(text.lines().count() == 1 && text.contains("\"text\":\"a\""), "{text}");
    }
}
