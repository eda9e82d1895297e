//! A first model for `chat`: offered on a terminal where nothing names one.
//!
//! The table stands in the source, so that the question needs no network. Sizes are those of the files when
//! the table was written; the download itself shows and checks the real ones.

use super::download::{first_use, forbidden_by};
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::ModelArgs;
use crate::cli::places::Places;
use crate::cli::terminal::question::TypedAnswer;
use crate::cli::terminal::report::columns;
use crate::cli::terminal::{Terminal, question};
use llmctl_hub::{ModelRef, PullExtent, fits};

/// A published model that answers well for its size.
#[derive(Debug, PartialEq, Eq)]
struct StarterModel {
    reference: &'static str,
    /// Size of its file in MB.
    megabytes: u64,
    note: &'static str,
}

const fn starter(reference: &'static str, megabytes: u64, note: &'static str) -> StarterModel {
    StarterModel { reference, megabytes, note }
}

/// From small to large.
const STARTERS: [StarterModel; 8] = [
    starter("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", 490, "simple questions, any machine"),
    starter("Qwen/Qwen3-0.6B-GGUF:Q8_0", 640, "small, can reason"),
    starter("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_830, "short texts, calls tools"),
    starter("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2_490, "texts in many languages"),
    starter("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_500, "reasons, calls tools"),
    starter("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_030, "reasons well, calls tools"),
    starter("ggml-org/gpt-oss-20b-GGUF", 12_110, "experts: fast for its size; calls tools"),
    starter("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18_560, "experts: fast for its size"),
];

/// The number of models that are offered.
const NUM_OFFERED: usize = 3;

/// Returns the largest models that fit into `memory` bytes, from small to large; all of the smallest if it is unknown.
fn suitable(memory: Option<u64>) -> &'static [StarterModel] {
    let known = memory.unwrap_or(0);
    let num_fitting = STARTERS
        .iter()
        .filter(|model| fits(model.megabytes * 1_000_000, Some(known)))
        .count()
        .max(NUM_OFFERED);
    &STARTERS[num_fitting - NUM_OFFERED..num_fitting]
}

/// Reply of a person.
#[derive(Debug, PartialEq, Eq)]
enum StarterChoice {
    BuiltIn,
    Model(&'static str),
    Unknown,
}

fn choice(line: &str, offered: &'static [StarterModel]) -> StarterChoice {
    match line.trim() {
        "" | "0" | "guide" => StarterChoice::BuiltIn,
        typed => {
            let index = typed.parse::<usize>().ok().and_then(|number| number.checked_sub(1));
            index
                .and_then(|index| offered.get(index))
                .map_or(StarterChoice::Unknown, |model| StarterChoice::Model(model.reference))
        }
    }
}

fn menu(offered: &[StarterModel]) -> String {
    let rows = offered.iter().enumerate().map(|(index, model)| {
        let size = format!("{:.1} GB", model.megabytes as f64 / 1_000.0);
        vec![format!("  {}", index + 1), model.reference.to_owned(), size, model.note.to_owned()]
    });
    let built_in =
        ["  Enter", "guide", "built in", "a demo that knows only llmctl"].map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(built_in).chain(rows).collect();
    format!("no model is named; models for this machine:\n{}", columns(&rows).trim_end())
}

/// Asks which model to use if nothing names one, a person can answer, and downloading is allowed. A chosen model is downloaded
/// without another question.
///
/// # Errors
/// The terminal cannot be read or written.
pub fn offer(model: &mut ModelArgs, places: &Places, terminal: &Terminal) -> Result<(), CommandError> {
    let is_named = model.model.is_some() || !model.remote.engine.is_empty();
    if is_named || model.fetch.yes || !question::can_ask() || forbidden_by(&model.fetch).is_some() {
        return Ok(());
    }
    let offered = suitable(places.hub_paths().memory);
    terminal.note(menu(offered));
    loop {
        let answer = question::ask("number, or Enter for guide:", || false);
        let TypedAnswer::Line(line) = answer.map_err(|error| CommandError::new(Kind::Io, error))? else {
            return Ok(());
        };
        match choice(&line, offered) {
            StarterChoice::BuiltIn => return Ok(()),
            StarterChoice::Model(reference) => {
                model.model = Some(reference.to_owned());
                model.fetch.yes = true;
                let parsed = ModelRef::parse(reference)?;
                if llmctl_hub::resolve(&parsed, &places.hub_paths(), &model.aliases).is_err() {
                    let repo = llmctl_hub::remote_form(&parsed, &model.aliases)?;
                    first_use(&repo, PullExtent::Whole, &model.fetch, places, terminal)?;
                }
                terminal.note(format!("next time: llmctl chat --model {reference}, or `model = \"{reference}\"` in the configuration"));
                return Ok(());
            }
            StarterChoice::Unknown => terminal.note(format!("a number from 1 to {NUM_OFFERED}, or Enter")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fit_are_offered() {
        assert_eq!(suitable(None), &STARTERS[..3]);
        assert_eq!(suitable(Some(1 << 30)), &STARTERS[..3]);
        assert_eq!(suitable(Some(8 << 30)).last().expect("three").reference, "Qwen/Qwen3-8B-GGUF:Q4_K_M");
        assert_eq!(suitable(Some(64 << 30)), &STARTERS[5..]);
        assert!(STARTERS.is_sorted_by_key(|model| model.megabytes));
    }

    #[test]
    fn a_number_or_enter_chooses() {
        let offered = suitable(Some(8 << 30));
        assert_eq!(choice("", offered), StarterChoice::BuiltIn);
        assert_eq!(choice(" 3 ", offered), StarterChoice::Model(offered[2].reference));
        for wrong in ["4", "-1", "x", "99999999999999999999"] {
            assert_eq!(choice(wrong, offered), StarterChoice::Unknown, "{wrong}");
        }
    }

    #[test]
    fn the_menu_has_a_line_for_each() {
        let text = menu(suitable(Some(8 << 30)));
        assert_eq!(text.lines().count(), 2 + NUM_OFFERED, "{text}");
        assert!(text.contains("  3  ") && text.contains("5.0 GB"), "{text}");
    }
}
