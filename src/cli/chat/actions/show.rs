//! Commands that show: the conversation, what stands behind it, and what the last answer cost.

use super::{Done, told};
use crate::cli::chat::model::Answerer;
use crate::cli::chat::session::Chat;
use crate::cli::chat::state::{AnswerRequest, LastTurn, SavePlace, opening};
use crate::cli::chat::{counted, grouped};
use crate::cli::error::{CommandError, nearest};
use crate::cli::run::report;
use crate::cli::sessions as shared;
use crate::cli::terminal::report::columns;
use llmctl_engine::{Explanation, ReuseReason, Started};
use llmctl_models::text::Vocabulary;

const SUBJECTS: [&str; 5] = ["config", "model", "template", "prompt", "thinking"];

pub fn show(chat: &mut Chat<'_>, argument: &str) -> Done {
    let text = match argument {
        "" => conversation(chat),
        "config" => config(chat),
        "model" => model(chat),
        "template" => {
            let llm = chat.model.needed_for("/show template")?;
            llm.texts().chat_tokenizer().template_source().unwrap_or_default().to_owned()
        }
        "prompt" => prompt(chat)?,
        "thinking" => thinking(chat)?,
        other => {
            let error = CommandError::usage(format!("/show: unknown subject {other:?}"));
            return Err(error.hint(match nearest(other, SUBJECTS) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("the subjects are {}", SUBJECTS.join(", ")),
            }));
        }
    };
    told(chat, text.trim_end())
}

fn conversation(chat: &Chat<'_>) -> String {
    let saved = chat.state.saved();
    if saved.turns.is_empty() {
        let system =
            chat.state.system.as_ref().map_or(String::new(), |system| format!("[system] {system}\n"));
        return format!("{system}there is no turn yet");
    }
    let lines = saved
        .messages()
        .map(|message| format!("[{}] {}", message.role.as_str(), shared::message_text(message)));
    lines.collect::<Vec<_>>().join("\n")
}

fn config(chat: &Chat<'_>) -> String {
    let mut rows = chat.settings_table();
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let thinking = chat.state.think.spoken(&chat.model.thinking());
    rows.push(row("thinking", thinking.trim_start_matches("thinking: ").to_owned()));
    rows.push(row("json", chat.state.schema.as_ref().map_or("off".to_owned(), |schema| schema.name.clone())));
    let tools = chat.state.toolbox.as_ref();
    rows.push(row("tools", tools.map_or("off".to_owned(), |tools| tools.path.display().to_string())));
    rows.push(row("mcp", chat.servers.as_ref().map_or("off".to_owned(), |servers| servers.spoken())));
    let session = match &chat.state.keeping {
        SavePlace::Nowhere => "not saved".to_owned(),
        SavePlace::Planned => "starts with the first message".to_owned(),
        SavePlace::Saved { name, .. } => name.to_string(),
    };
    rows.push(row("session", session));
    let places = chat.places;
    let folder =
        |path: Option<std::path::PathBuf>| path.map_or("none".to_owned(), |path| places.shorten(&path));
    rows.push(row("sessions in", folder(places.sessions())));
    rows.push(row("history in", folder(places.state.as_ref().map(|state| state.join("history")))));
    columns(&rows)
}

fn model(chat: &Chat<'_>) -> String {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let llm = match chat.model.answerer() {
        Answerer::Loaded(llm) => llm,
        Answerer::Endpoint(endpoint) => {
            return columns(&[
                row("model", endpoint.model().to_owned()),
                row("endpoint", endpoint.url().to_string()),
                row("fingerprint", endpoint.fingerprint().fingerprint),
            ]);
        }
    };
    let (info, spec) = (llm.info(), llm.engine().spec());
    let output_markup = llm.texts().chat_tokenizer().output_markup();
    columns(&[
        row("model", info.name.clone()),
        row("context", format!("{} tokens", grouped(info.context_tokens))),
        row("vocabulary", format!("{} tokens", grouped(info.vocab_size))),
        match llm.engine().remote() {
            Some(remote) => row("engine", remote.engines.join(", ")),
            None => row("kv memory", crate::cli::terminal::report::bytes(spec.kv_memory as u64)),
        },
        row("loaded in", crate::cli::chat::spoken(info.load_time)),
        row("reasoning", output_markup.reasoning.map_or("none", |format| format.name()).to_owned()),
        row("tool calls", output_markup.tool_calls.map_or("none", |format| format.name()).to_owned()),
        row("fingerprint", chat.model.fingerprint().fingerprint),
    ])
}

/// Returns the conversation as the model got it last, up to the last answer.
fn prompt(chat: &Chat<'_>) -> Result<String, CommandError> {
    let llm = chat.model.needed_for("/show prompt")?;
    let turns = chat.state.turns();
    let Some(last) = turns.last() else { return Err(CommandError::usage("there is no turn yet")) };
    let added = last.turn.messages[..last.turn.messages.len() - 1].to_vec();
    let turn = chat.prompted(&AnswerRequest { kept: turns.len() - 1, added, ..AnswerRequest::default() })?;
    let text = turn.text(llm.texts().chat_tokenizer());
    Ok(format!("{text}\n({})", counted(turn.tokens().len(), "token")))
}

fn thinking(chat: &Chat<'_>) -> Result<String, CommandError> {
    let last = chat.state.turns().last().and_then(|saved| saved.turn.messages.last());
    let reasoning = last.and_then(|message| message.reasoning.clone());
    reasoning.ok_or_else(|| CommandError::usage("the last answer has no thinking"))
}

pub fn context(chat: &mut Chat<'_>) -> Done {
    let size = chat.model.needed_for("/context")?.info().context_tokens;
    let saved = chat.state.saved();
    let used = saved.num_tokens();
    let mut rows = Vec::new();
    let mut before = 0;
    for (at, saved) in saved.turns.iter().enumerate() {
        let turn = &saved.turn;
        let answer = turn.generated.len();
        let question = turn.num_tokens().saturating_sub(before + answer);
        before = turn.num_tokens();
        rows.push(vec![
            format!("turn {}", at + 1),
            format!("{} + {}", grouped(question), grouped(answer)),
            opening(saved),
        ]);
    }
    let percent = 100 * used / size.max(1);
    let filled = (30 * used / size.max(1)).min(30);
    let bar = format!("[{}{}]", "#".repeat(filled), ".".repeat(30 - filled));
    let total = format!("{bar} {} of {} tokens ({percent}%)", grouped(used), grouped(size));
    chat.ui.report_table(&rows);
    told(chat, total)
}

pub fn stats(chat: &mut Chat<'_>) -> Done {
    let Some(LastTurn { started, outcome: Some(outcome), .. }) = &chat.state.last else {
        return Err(CommandError::usage("there is no answer yet"));
    };
    let stats = match chat.model.answerer() {
        Answerer::Loaded(llm) => report::stats(outcome, started.as_ref(), llm.texts()),
        Answerer::Endpoint(endpoint) => report::endpoint_stats(outcome, endpoint),
    };
    told(chat, stats)
}

pub fn why(chat: &mut Chat<'_>) -> Done {
    let llm = chat.model.needed_for("/why")?;
    let Some(started) = chat.state.last.as_ref().and_then(|last| last.started.as_ref()) else {
        return Err(CommandError::usage("there is no prompt yet"));
    };
    told(chat, explained(started, llm.texts().vocabulary()))
}

/// Why as much of a prompt was reused as was.
fn explained(started: &Started, vocabulary: &dyn Vocabulary) -> String {
    let Started { prompt_tokens, reuse, difference, .. } = started;
    let (cached, restored) = (reuse.cached_tokens, reuse.restored_tokens);
    let from_disk =
        if restored > 0 { format!(", {} of them from disk", grouped(restored)) } else { String::new() };
    let meaning = match (reuse.reason, difference) {
        (ReuseReason::PartialPrefix, Some(difference)) => {
            let Explanation { position, .. } = difference.explain(vocabulary);
            format!("the prompt differs from the session after token {}", grouped(position))
        }
        (reason, _) => meaning(reason).to_owned(),
    };
    let mut text = format!(
        "{} of {} prompt tokens were reused{from_disk}; {} computed\n{}: {meaning}",
        grouped(cached),
        grouped(*prompt_tokens),
        grouped(prompt_tokens - cached),
        reuse.reason.name(),
    );
    if let Some(difference) = difference {
        let Explanation { before, session, prompt, image, .. } = difference.explain(vocabulary);
        let side =
            |text: &str| if text.is_empty() { "(ends here)".to_owned() } else { format!("\"{text}\"") };
        text.push_str(&format!(
            "\n  both:    \"{before}\"\n  session: {}\n  prompt:  {}",
            side(&session),
            side(&prompt)
        ));
        image.iter().for_each(|image| text.push_str(&format!("\n  {}", image.clause(None))));
    }
    text
}

fn meaning(reason: ReuseReason) -> &'static str {
    match reason {
        ReuseReason::New => "the cache had nothing of this conversation, in memory or on disk",
        ReuseReason::ExactPrefix => "the prompt continues the conversation",
        ReuseReason::Equal => "the prompt equals the conversation; its last token is computed again",
        ReuseReason::PartialPrefix => "the prompt and the session differ after a common beginning",
        ReuseReason::Mismatch => "they differ from the first token, or this model cannot go back",
        ReuseReason::Adapters => "the conversation was computed with other LoRA adapters",
        ReuseReason::Dirty => "an earlier step failed, and its state was discarded",
        ReuseReason::Evicted => "no whole page of the common beginning is in memory or on disk",
        ReuseReason::PrefixCache => "the same beginning was computed before, in whole pages",
        ReuseReason::PromptLogprobs => "log-probabilities of the prompt were asked for",
        ReuseReason::EngineLost => {
            "the engine that held the conversation has ended, and none of it was on disk"
        }
        ReuseReason::RemoteEngine => {
            "the remote engine keeps what it has computed, and reports what it reused when it has answered"
        }
        ReuseReason::Restored => "computed by another process and read from disk, in whole pages",
    }
}
