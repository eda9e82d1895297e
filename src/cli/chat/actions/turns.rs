//! Commands about the turns of the conversation.

use super::{Done, count, no_argument};
use crate::cli::chat::command::Next;
use crate::cli::chat::room::opening;
use crate::cli::chat::talk::Chat;
use crate::cli::chat::turn::{question, text};
use crate::cli::error::CommandError;
use crate::runtime::Finish;

pub fn undo(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = chat.dialogue.saved().turns.clone();
    let count = count("undo", argument, 1)?;
    if turns.is_empty() {
        return Err(CommandError::usage("there is no turn to take back"));
    }
    // A tool's result is answered in a turn of its own, which goes with the question.
    let asked: Vec<usize> = turns
        .iter()
        .enumerate()
        .filter(|(_, saved)| question(&saved.turn.messages).is_some())
        .map(|(at, _)| at)
        .collect();
    let Some(&left) = asked.len().checked_sub(count).and_then(|at| asked.get(at)) else {
        return Err(CommandError::usage(format!("there are only {} turns", asked.len())));
    };
    if left == 0 {
        // The system prompt belongs to the first turn, and stays for the next first one.
        let system = chat.dialogue.saved().system().map(str::to_owned);
        chat.system = system.or(chat.system.take());
    }
    chat.dialogue.rewind(left)?;
    for saved in turns[left..].iter().filter(|saved| question(&saved.turn.messages).is_some()) {
        chat.terminal.report(&format!("taken back: {}", opening(saved)));
    }
    Ok(Next::Prompt)
}

pub fn retry(chat: &mut Chat<'_>, argument: &str) -> Done {
    let seed = match argument.strip_prefix("seed=") {
        Some(seed) => {
            Some(seed.parse().map_err(|_| CommandError::usage(format!("/retry: {seed:?} is no seed")))?)
        }
        None if argument.is_empty() => None,
        None => return Err(CommandError::usage("/retry [seed=N]")),
    };
    let sampling = chat.sampling();
    if sampling.temperature == 0.0 {
        chat.terminal
            .note("(temperature is 0, so the answer will be the same; /set temperature 0.8 changes that)");
    } else if seed.is_none() && sampling.seed.is_some() {
        chat.terminal.note("(the seed is set, so the answer will be the same; /retry seed=N takes another)");
    }
    chat.answer_again(Vec::new(), seed)
}

pub fn go_on(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("continue", argument)?;
    let Some(last) = chat.dialogue.saved().turns.last().cloned() else {
        return Err(CommandError::usage("there is no answer to go on with"));
    };
    if matches!(last.turn.finish, Finish::Eos(_) | Finish::StopString(_)) {
        return Err(CommandError::usage("the answer ended by itself").hint("say what should come next"));
    }
    if !last.model.is_same(&chat.model()) {
        return Err(CommandError::usage("another model gave the answer").hint("/retry answers with this one"));
    }
    chat.answer_again(last.turn.generated.clone(), None)
}

/// `/edit [N] [TEXT]`: without a text, the message comes back on the line.
pub fn edit(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = &chat.dialogue.saved().turns;
    let first = argument.split_whitespace().next().unwrap_or_default();
    let number = first.parse::<usize>().ok();
    let given = if number.is_some() { argument[first.len()..].trim_start() } else { argument };
    let has_question =
        |at: usize| turns.get(at).is_some_and(|saved| question(&saved.turn.messages).is_some());
    let last = || (0..turns.len()).rev().find(|&at| has_question(at)).map_or(0, |at| at + 1);
    let number = number.unwrap_or_else(last);
    let Some(saved) = number.checked_sub(1).and_then(|at| turns.get(at)).cloned() else {
        return Err(CommandError::usage(match turns.len() {
            0 => "there is no message to edit".to_owned(),
            count => format!("there are turns 1 to {count}"),
        }));
    };
    if !has_question(number - 1) {
        return Err(CommandError::usage(format!("turn {number} answers a tool, not you")));
    }
    if !given.is_empty() {
        return chat.say_instead(number - 1, given.to_owned());
    }
    if !chat.is_interactive() {
        return Err(CommandError::usage("nobody can edit here").hint("/edit N TEXT gives the new text"));
    }
    let message = question(&saved.turn.messages).map(text).unwrap_or_default().to_owned();
    chat.editing = Some(number - 1);
    chat.terminal.note(&format!("(turn {number}; Enter goes on from there, Ctrl-C leaves all as it is)"));
    Ok(Next::Edit(message))
}

pub fn compact(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("compact", argument)?;
    chat.compact()?;
    Ok(Next::Prompt)
}
