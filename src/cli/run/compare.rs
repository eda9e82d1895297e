//! One point of a conversation answered under several variations: `run --compare`, and the parts that chat's `/compare` shares.
//!
//! Variations of one model run on one engine, one after the other, so that they share the KV pages of the tokens that their prompts
//! begin with. Each starts from the flags alone: their order changes no answer. A variation that fails is reported in its place.

use std::collections::BTreeSet;
use std::iter;

use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr;

use super::answer::{AnswerCounter, AnswerGeneration, Generated};
use super::next_turn::{Next, text};
use super::prompt::GatheredPrompt;
use super::report::timings_json;
use super::request::{input, turn_request};
use super::settings::{AnswerSettings, spelled};
use super::{OutputFormat, RunArgs, note_system};
use crate::cli::error::{CommandError, Exit};
use crate::cli::flags::args::ModelArgs;
use crate::cli::images;
use crate::cli::model::load::{self, Loaded};
use crate::cli::terminal::report::{counted, print, stdout_width, table};
use crate::cli::terminal::signal::Graceful;
use crate::cli::terminal::{Terminal, wrap};
use crate::cli::think::Think;
use llmctl_engine::turn::{Answer, ToolUse, TurnRequest};
use llmctl_engine::{Finish, Outcome, Timings, Usage};
use llmctl_serve::wire::answer::{message_json, usage as usage_json};
use llmctl_template::{Content, Message, Role, ToolCall, text_part};

/// Columns of a terminal for each of several answers that stand side by side.
const COLUMN: usize = 50;
/// Between two of them.
const GAP: &str = " \u{2502} ";

const SCHEMA: &str = "llmctl.compare.v1";

/// Changes of the flags or of a chat's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Variation {
    pub model: Option<String>,
    prompt: Option<String>,
    system: Option<String>,
    think: Option<String>,
    /// Sampling parameters and limits, by the names of their flags.
    values: Vec<(String, String)>,
    /// The words as they were typed.
    typed: String,
}

impl Variation {
    /// Reads variations that stand apart by `|`, each of words as in a shell: `KEY=VALUE`, or the model.
    ///
    /// # Errors
    /// A usage error that begins with `command`.
    pub fn parse_all(command: &str, texts: &[String]) -> Result<Vec<Self>, CommandError> {
        let mut variations = Vec::new();
        for text in texts {
            let words = shlex::split(&apart(text)).ok_or_else(|| {
                CommandError::usage(format!("{command}: a quote is not closed in {text:?}"))
            })?;
            for words in words.split(|word| word == "|") {
                variations.push(Self::parse(command, words)?);
            }
        }
        Ok(variations)
    }

    fn parse(command: &str, words: &[String]) -> Result<Self, CommandError> {
        let mut variation = Self { typed: words.join(" "), ..Self::default() };
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or(("model", word));
            let text = match key {
                "model" => &mut variation.model,
                "prompt" => &mut variation.prompt,
                "system" => &mut variation.system,
                "think" => &mut variation.think,
                _ => {
                    variation.values.push((spelled(key), value.to_owned()));
                    continue;
                }
            };
            if text.replace(value.to_owned()).is_some() {
                return Err(CommandError::usage(format!(
                    "{command}: a second {key} in {:?}",
                    variation.typed
                )));
            }
        }
        let mut seen = BTreeSet::new();
        if let Some((key, _)) = variation.values.iter().find(|(key, _)| !seen.insert(key)) {
            return Err(CommandError::usage(format!("{command}: a second {key} in {:?}", variation.typed)));
        }
        variation.change(command, &mut AnswerSettings::default(), &mut Think::default())?;
        Ok(variation)
    }

    /// Returns the words, or `otherwise` if there are none.
    pub fn name<'a>(&'a self, otherwise: &'a str) -> &'a str {
        if self.typed.is_empty() { otherwise } else { &self.typed }
    }

    /// Changes settings; what is refused leaves them in an unknown state.
    ///
    /// # Errors
    /// As [`Self::parse_all`].
    pub fn change(
        &self,
        command: &str,
        settings: &mut AnswerSettings,
        think: &mut Think,
    ) -> Result<(), CommandError> {
        self.values.iter().try_for_each(|(key, value)| settings.set(command, key, value))?;
        let refused = |reason| CommandError::usage(format!("{command} think: {reason}"));
        self.think.as_ref().map_or(Ok(()), |how| think.change(how).map_err(refused))
    }

    /// Puts the variation's prompt in the place of the last question's text, and its system prompt before all messages.
    ///
    /// # Errors
    /// There is no question.
    pub fn change_messages(&self, messages: &mut Vec<Message>) -> Result<(), CommandError> {
        if let Some(prompt) = &self.prompt {
            let question = messages.iter_mut().rfind(|message| message.role == Role::User);
            let question = question.ok_or_else(|| CommandError::usage("prompt: there is no question yet"))?;
            question.content = Some(match question.content.take() {
                Some(Content::Parts(mut parts)) => {
                    parts.retain(|part| part["type"] != "text");
                    parts.push(text_part(prompt));
                    Content::Parts(parts)
                }
                _ => Content::Text(prompt.clone()),
            });
        }
        if let Some(system) = &self.system {
            let is_system = |message: &Message| matches!(message.role, Role::System | Role::Developer);
            let earlier = usize::from(messages.first().is_some_and(is_system));
            messages.splice(..earlier, [Message::system(system.clone())]);
        }
        Ok(())
    }
}

/// Puts blanks around each `|` outside of quotes.
fn apart(text: &str) -> String {
    let (mut quote, mut is_escaped) = (None, false);
    let spaced = text.chars().map(|c| {
        let is_plain = !std::mem::take(&mut is_escaped);
        match (quote, c) {
            (Some(open), _) if open == c && is_plain => quote = None,
            (None, '"' | '\'') if is_plain => quote = Some(c),
            (None | Some('"'), '\\') => is_escaped = is_plain,
            (None, '|') if is_plain => return " | ".to_owned(),
            _ => {}
        }
        c.to_string()
    });
    spaced.collect()
}

/// An answer with what stands above it.
pub struct Column {
    pub title: String,
    pub text: String,
}

impl Column {
    /// Returns whether this many answers fit on `width` columns side by side.
    pub fn fit(count: usize, width: Option<usize>) -> bool {
        width.is_some_and(|columns| count > 1 && columns / count >= COLUMN)
    }
}

/// The measured facts of an answer, for a row of the table.
pub struct ComparedFacts<'a> {
    pub name: &'a str,
    pub model: &'a str,
    pub usage: &'a Usage,
    /// `None` for an answer of another process.
    pub timings: Option<&'a Timings>,
    pub finish: &'a Finish,
}

impl<'a> ComparedFacts<'a> {
    /// Returns the facts of an answer of this process.
    pub fn of(name: &'a str, model: &'a str, outcome: &'a Outcome) -> Self {
        let Outcome { usage, timings, finish, .. } = outcome;
        Self { name, model, usage, timings: Some(timings), finish }
    }

    fn row(&self) -> Vec<String> {
        let Self { name, model, usage, timings, finish } = self;
        let number = |count: usize| if count == 0 { "-".to_owned() } else { count.to_string() };
        let rate = timings.and_then(|timings| timings.decode_rate(usage));
        let first = timings.and_then(|timings| timings.time_to_first_token);
        vec![
            (*name).to_owned(),
            (*model).to_owned(),
            number(usage.prompt_tokens),
            number(usage.cached_tokens),
            number(usage.completion_tokens),
            first.map_or("-".to_owned(), |first| format!("{} ms", first.as_millis())),
            rate.map_or("-".to_owned(), |rate| format!("{rate:.1}")),
            timings.map_or("-".to_owned(), |timings| format!("{:.1} s", timings.total.as_secs_f64())),
            finish.reason().to_owned(),
        ]
    }

    /// Returns the table of answers: tokens, times, and how each ended.
    pub fn table(facts: impl IntoIterator<Item = Self>, width: usize) -> String {
        let head =
            ["VARIATION", "MODEL", "PROMPT", "CACHED", "ANSWER", "FIRST TOKEN", "TOK/S", "TIME", "END"];
        let rows = facts.into_iter().map(|facts| facts.row());
        table(&iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect::<Vec<_>>(), width)
    }
}

/// Returns an answer's text and its calls.
pub fn shown(message: &Message) -> String {
    let call = |call: &ToolCall| {
        let arguments = match &call.arguments {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        format!("calls {} {arguments}", call.name)
    };
    let parts = iter::once(text(message).trim_end().to_owned()).filter(|text| !text.is_empty());
    parts.chain(message.tool_calls.iter().map(call)).collect::<Vec<_>>().join("\n")
}

/// Returns texts in columns of a terminal.
pub fn side_by_side(answers: &[Column], columns: usize) -> String {
    let gaps = GAP.width() * answers.len().saturating_sub(1);
    let width = columns.saturating_sub(gaps + 1) / answers.len().max(1);
    let lines = |column: &Column| -> Vec<String> {
        let rule = "\u{2500}".repeat(width);
        let whole = format!("{}\n{rule}\n{}", column.title, column.text.replace('\t', "    "));
        let wrapped = wrap::wrapped(&crate::cli::terminal::output::visible(&whole), width, 0);
        wrapped.lines().flat_map(|line| pieces(line, width)).collect()
    };
    let answers: Vec<_> = answers.iter().map(lines).collect();
    let cell = |lines: &Vec<String>, at: usize| {
        let text = lines.get(at).cloned().unwrap_or_default();
        let blanks = " ".repeat(width.saturating_sub(text.width()));
        text + &blanks
    };
    let row =
        |at| answers.iter().map(|lines| cell(lines, at)).collect::<Vec<_>>().join(GAP).trim_end().to_owned();
    (0..answers.iter().map(Vec::len).max().unwrap_or(0)).map(row).collect::<Vec<_>>().join("\n")
}

/// Cuts a line that could not be broken between words.
fn pieces(line: &str, width: usize) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for c in line.chars() {
        let last = pieces.last_mut().expect("there is one");
        let is_full = last.width() + c.to_string().width() > width.max(2);
        match is_full {
            true => pieces.push(c.to_string()),
            false => last.push(c),
        }
    }
    pieces
}

/// `run --compare`.
pub struct VariedRun<'a> {
    pub args: &'a RunArgs,
    pub prompt: GatheredPrompt,
    pub system: Option<String>,
    pub tools: ToolUse,
    pub terminal: &'a Terminal,
}

/// An answer, with the names of its variation and its model.
struct VariedAnswer {
    at: usize,
    name: String,
    model: String,
    /// With its message, as it is shown, and its times.
    answer: Result<(Answer, Value), String>,
}

impl VariedRun<'_> {
    /// Answers the prompt under each variation; models are loaded one after the other.
    ///
    /// # Errors
    /// Wrong variations. An error of a variation is among the results.
    pub fn run(self) -> Result<Exit, CommandError> {
        let variations = Variation::parse_all("--compare", &self.args.compare)?;
        let (graceful, mut answers) = (Graceful::begin(), Vec::new());
        let mut rest: Vec<_> = variations.iter().enumerate().collect();
        while let Some((_, first)) = rest.first() {
            let model = first.model.clone();
            let (these, others) = rest.into_iter().partition(|(_, variation)| variation.model == model);
            rest = others;
            self.answer_all(model, these, &graceful, &mut answers);
            if graceful.received().is_some() {
                break;
            }
        }
        answers.sort_by_key(|compared| compared.at);
        self.print(&answers)?;
        let has_failed = answers.iter().any(|compared| compared.answer.is_err());
        Ok(match graceful.received() {
            Some(signal) => Exit::Signal(signal),
            None if has_failed => Exit::FailedRows,
            None => Exit::Success,
        })
    }

    fn answer_all(
        &self,
        model: Option<String>,
        variations: Vec<(usize, &Variation)>,
        graceful: &Graceful,
        answers: &mut Vec<VariedAnswer>,
    ) {
        let args = ModelArgs { model: model.or(self.args.model.model.clone()), ..self.args.model.clone() };
        let loaded = load::load(&args, self.args.engine.resolve(false), self.terminal);
        for (at, variation) in variations {
            let answer = match &loaded {
                Ok(llm) => self.answer(llm, variation, graceful).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = &answer {
                self.terminal.warn(format!("{}: {error}", variation.name("as given")));
            }
            let model = loaded.as_ref().map_or(args.model.clone(), |llm| Some(llm.info().name.clone()));
            let (name, model) = (variation.name("as given").to_owned(), model.unwrap_or_default());
            answers.push(VariedAnswer { at, name, model, answer });
            if graceful.received().is_some() {
                break;
            }
        }
        loaded.iter().for_each(|llm| llm.settle(self.terminal));
    }

    fn answer(
        &self,
        llm: &Loaded,
        variation: &Variation,
        graceful: &Graceful,
    ) -> Result<(Answer, Value), CommandError> {
        let mut args = self.args.clone();
        let mut settings = AnswerSettings { sampling: args.sampling, limits: args.limits };
        let mut think = args.prompt.think()?;
        variation.change("--compare", &mut settings, &mut think)?;
        (args.sampling, args.limits) = (settings.sampling, settings.limits);
        args.prompt.varied_think = Some(think);
        let text = variation.prompt.as_ref().unwrap_or(&self.prompt.text).clone();
        let images = images::set_of(&self.prompt.images);
        let system = variation.system.clone().or(self.system.clone());
        let content = images::content(&self.prompt.images, text)?;
        let next = Next { content, system, images: images.clone() };
        next.check_sight(llm)?;
        note_system(llm.texts().chat_tokenizer(), next.system.as_deref(), self.terminal);
        let input = input(llm.texts(), &args, &self.tools, next, self.terminal)?;
        let turn = turn_request(llm, &args, self.tools.clone(), self.terminal)?;
        let turn = &TurnRequest { images, is_streamed: false, ..turn };
        let plan = &llm.planner().plan(&input, llm.texts().now(), turn)?;
        let name = variation.name("as given");
        let spoken = |count| format!("{name}: {}", counted(count, "token"));
        let mut counter = AnswerCounter { terminal: self.terminal, count: 0, spoken: &spoken };
        let generation = AnswerGeneration { llm, turn, plan, session: None, graceful };
        let Generated { answer, .. } = generation.run(&mut counter)?;
        self.terminal.status("");
        let timings = timings_json(&answer.outcome.timings, &answer.outcome.usage, llm.info());
        let message = message_json(&answer, think.is_shown, false);
        Ok((answer, json!({"message": message, "timings": timings})))
    }

    fn print(&self, answers: &[VariedAnswer]) -> Result<Exit, CommandError> {
        let rows = answers.iter().map(object);
        match self.args.output.output.unwrap_or_default() {
            OutputFormat::Text => self.print_text(answers),
            OutputFormat::Json => {
                let rows: Vec<_> = rows.collect();
                print(&format!("{:#}\n", json!({"schema": SCHEMA, "variations": rows})))
            }
            OutputFormat::Jsonl => print(&rows.map(|row| format!("{row}\n")).collect::<String>()),
        }
    }

    fn print_text(&self, answers: &[VariedAnswer]) -> Result<Exit, CommandError> {
        let column = |compared: &VariedAnswer| Column {
            title: compared.name.clone(),
            text: match &compared.answer {
                Ok((answer, _)) => shown(&answer.to_message()),
                Err(error) => format!("error: {error}"),
            },
        };
        let columns: Vec<_> = answers.iter().map(column).collect();
        let width = stdout_width();
        let terminal_width = Some(width).filter(|width| *width != usize::MAX);
        let texts = match Column::fit(columns.len(), terminal_width) {
            true => side_by_side(&columns, width) + "\n",
            false => columns.iter().map(|one| format!("== {}\n{}\n\n", one.title, one.text)).collect(),
        };
        let facts = answers.iter().filter_map(|compared| {
            let VariedAnswer { name, model, answer, .. } = compared;
            Some(ComparedFacts::of(name, model, &answer.as_ref().ok()?.0.outcome))
        });
        print(&(texts + &ComparedFacts::table(facts, width)))
    }
}

/// Returns a variation's answer for json.
fn object(compared: &VariedAnswer) -> Value {
    let mut object = json!({"variation": compared.name, "model": compared.model});
    match &compared.answer {
        Ok((answer, shown)) => {
            let outcome = &answer.outcome;
            object["message"] = shown["message"].clone();
            object["finish_reason"] = answer.finish_reason().into();
            object["seed"] = outcome.seed.into();
            object["usage"] = usage_json(&outcome.usage);
            object["timings"] = shown["timings"].clone();
        }
        Err(error) => object["error"] = error.as_str().into(),
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_answers_stand_side_by_side_and_nothing_of_them_is_lost() {
        let column = |title: &str, text: &str| Column { title: title.to_owned(), text: text.to_owned() };
        let left = column("one (2 tokens)", "short");
        let right = column("two", &format!("several words in a line\n{}", "x".repeat(25)));
        let shown = side_by_side(&[left, right], 44);
        let expected = "\
one (2 tokens)       \u{2502} two
\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500} \u{2502} \u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}\u{2500}
short                \u{2502} several words in a
                     \u{2502} line
                     \u{2502} xxxxxxxxxxxxxxxxxxxx
                     \u{2502} xxxxx";
        assert_eq!(shown, expected);
        let wide = side_by_side(&[column("\u{65e5}\u{672c}", "a"), column("b", "c")], 24);
        assert_eq!(wide.lines().next(), Some("\u{65e5}\u{672c}       \u{2502} b"));
    }

    #[test]
    fn variations_stand_apart_where_no_quote_is_open() {
        let names = |text: &str| -> Vec<String> {
            let all = Variation::parse_all("/compare", &[text.to_owned()]).expect("variations");
            all.iter().map(|one| one.name("as given").to_owned()).collect()
        };
        assert_eq!(names("seed=1|seed=2 | qwen"), ["seed=1", "seed=2", "qwen"]);
        assert_eq!(
            names(r#"prompt="a|b \" c"|prompt='d|\'|"#),
            ["prompt=a|b \" c", "prompt=d|\\", "as given"]
        );
        let twice = Variation::parse_all("/compare", &["top_p=1 top-p=0.5".to_owned()]).expect_err("refused");
        assert_eq!(twice.to_string(), "/compare: a second top-p in \"top_p=1 top-p=0.5\"");
    }

    #[test]
    fn calls_are_part_of_what_is_compared() {
        let mut message = Message::assistant("Wait.\n");
        let arguments = serde_json::json!({"a": 1});
        message.tool_calls = vec![ToolCall { id: None, name: "f".to_owned(), arguments }];
        assert_eq!(shown(&message), "Wait.\ncalls f {\"a\":1}");
    }
}
