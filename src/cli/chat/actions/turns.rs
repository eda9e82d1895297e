//! Commands about the turns of the conversation.
//!
//! Invariant: what one of them takes away stays, as a branch of the session or, where nothing is saved, in
//! memory, and /redo brings it back.

use super::{Done, count};
use crate::cli::chat::counted;
use crate::cli::chat::session::Chat;
use crate::cli::chat::state::{Effect, TakenTurns, opening, question};
use crate::cli::error::CommandError;
use crate::cli::run::next_turn::text;
use llmctl_engine::Finish;
use llmctl_engine::session::store::BranchReason;
use llmctl_engine::turn::session_chat::SessionChat;

pub fn undo(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = chat.state.turns().to_vec();
    let count = count("undo", argument, 1)?;
    if turns.is_empty() {
        return match last_taken(chat)? {
            Some((taken, BranchReason::Reset)) => bring_back(chat, taken),
            _ => Err(CommandError::usage("there is no turn to take back")),
        };
    }
    // A tool's result is answered in a turn of its own, which goes with the question.
    let asked: Vec<usize> = turns
        .iter()
        .enumerate()
        .filter(|(_, saved)| question(&saved.turn.messages).is_some())
        .map(|(at, _)| at)
        .collect();
    let Some(&left) = asked.len().checked_sub(count).and_then(|at| asked.get(at)) else {
        let verb = if asked.len() == 1 { "is" } else { "are" };
        return Err(CommandError::usage(format!("there {verb} only {}", counted(asked.len(), "turn"))));
    };
    chat.state.set_aside(BranchReason::Undo)?;
    if left == 0 {
        chat.state.keep_system();
    }
    chat.state.session_chat.rewind(left)?;
    for saved in turns[left..].iter().filter(|saved| question(&saved.turn.messages).is_some()) {
        chat.ui.terminal.report(&format!("taken back: {}", opening(saved)));
    }
    chat.ui.terminal.note("(/redo brings it back)");
    Ok(Effect::Prompt)
}

pub fn redo(chat: &mut Chat<'_>) -> Done {
    match last_taken(chat)? {
        Some((taken, _)) => bring_back(chat, taken),
        None => Err(CommandError::usage("there is nothing to bring back")),
    }
}

/// Returns the turns that were removed last, by this chat or by an earlier user of the session.
fn last_taken(chat: &Chat<'_>) -> Result<Option<(TakenTurns, BranchReason)>, CommandError> {
    if let Some(taken) = chat.state.taken.clone() {
        return Ok(Some(taken));
    }
    let Some(name) = chat.state.name() else { return Ok(None) };
    let branches = chat.store()?.branches(name)?;
    let taken = |branch: &llmctl_engine::session::store::Listed| {
        Some((TakenTurns::Branch(branch.name.clone()), branch.branch()?.reason))
    };
    let by_user = branches.iter().rev().filter(|branch| branch.name != *name).filter_map(taken);
    Ok(by_user.into_iter().find(|(_, reason)| *reason != BranchReason::Request))
}

/// Restores the conversation as it was before, and keeps the present one for /redo.
fn bring_back(chat: &mut Chat<'_>, taken: TakenTurns) -> Done {
    let before = chat.state.saved().clone();
    chat.state.taken = match taken {
        TakenTurns::Branch(branch) => {
            let kept = chat.state.session_chat.restore(&branch)?;
            kept.map(|kept| (TakenTurns::Branch(kept), BranchReason::Restore))
        }
        TakenTurns::Unsaved(saved) => {
            chat.state.session_chat = SessionChat::look_at(*saved, chat.model.fingerprint());
            let holds_all = chat.state.turns().starts_with(&before.turns);
            (!holds_all).then(|| (TakenTurns::Unsaved(Box::new(before)), BranchReason::Restore))
        }
    };
    (chat.state.last, chat.state.has_warned) = (None, false);
    chat.model.close_session(&chat.state.engine_name());
    chat.tell_engine()?;
    let turns = counted(chat.state.turns().len(), "turn");
    chat.ui.terminal.report(&format!("brought back: the conversation has {turns}"));
    if let Some((TakenTurns::Branch(kept), _)) = &chat.state.taken {
        chat.ui.terminal.note(format!("(what stood instead is kept as {kept}; /redo swaps them again)"));
    }
    Ok(Effect::Prompt)
}

pub fn retry(chat: &mut Chat<'_>, argument: &str) -> Done {
    let seed = match argument.strip_prefix("seed=") {
        Some(seed) => Some(seed.parse().map_err(|_| {
            CommandError::usage(format!("/retry: expected a whole number as the seed, got {seed:?}"))
        })?),
        None if argument.is_empty() => None,
        None => return Err(CommandError::usage(format!("/retry: expected seed=N, got {argument:?}"))),
    };
    let sampling = chat.sampling();
    let last = chat.state.turns().last();
    if chat.model.endpoint().is_some()
        || last.is_none_or(|last| !last.model.is_same(&chat.model.fingerprint()))
    {
        // An endpoint's own temperature is not known, and few keep to a seed; another model gives another answer.
    } else if sampling.temperature == 0.0 {
        chat.ui
            .terminal
            .note("(temperature is 0, so the answer will be the same; /set temperature 0.8 changes that)");
    } else if seed.is_none() && sampling.seed.is_some() {
        chat.ui
            .terminal
            .note("(the seed is set, so the answer will be the same; /retry seed=N uses another)");
    }
    chat.answer_again(Vec::new(), seed)
}

pub fn go_on(chat: &mut Chat<'_>) -> Done {
    let is_here = chat.model.needed_for("/continue").map(drop);
    is_here.map_err(|error| error.hint("type a message that asks it to continue, or /retry"))?;
    let Some(last) = chat.state.turns().last().cloned() else {
        return Err(CommandError::usage("there is no answer to continue"));
    };
    if matches!(last.turn.finish, Finish::Eos(_) | Finish::StopString(_)) {
        return Err(CommandError::usage("the last answer is complete").hint("type a message to continue"));
    }
    if !last.model.is_same(&chat.model.fingerprint()) {
        return Err(
            CommandError::usage("the last answer is another model's").hint("/retry answers with this one")
        );
    }
    chat.answer_again(last.turn.generated.clone(), None)
}

/// `/edit [N] [TEXT]`: without a text, the message comes back on the line.
pub fn edit(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = chat.state.turns();
    let first = argument.split_whitespace().next().unwrap_or_default();
    let number = first.parse::<i64>().ok().map(|number| usize::try_from(number).unwrap_or_default());
    let given = if number.is_some() { argument[first.len()..].trim_start() } else { argument };
    let has_question =
        |at: usize| turns.get(at).is_some_and(|saved| question(&saved.turn.messages).is_some());
    let last = || (0..turns.len()).rev().find(|&at| has_question(at)).map_or(0, |at| at + 1);
    let number = number.unwrap_or_else(last);
    let Some(saved) = number.checked_sub(1).and_then(|at| turns.get(at)).cloned() else {
        return Err(CommandError::usage(match turns.len() {
            0 => "there is no message to edit".to_owned(),
            1 => "there is only turn 1".to_owned(),
            count => format!("there are turns 1 to {count}"),
        }));
    };
    if !has_question(number - 1) {
        return Err(CommandError::usage(format!("turn {number} answers a tool: it has no message of yours")));
    }
    let replaced = match turns.len() - number {
        0 => format!("turn {number}"),
        1 => format!("turns {number} and {}", turns.len()),
        _ => format!("turns {number} to {}", turns.len()),
    };
    if !given.is_empty() {
        chat.ui.terminal.note(format!("(this replaces {replaced})"));
        return chat.say_instead(number - 1, given.to_owned());
    }
    if !chat.ui.is_interactive() {
        let error = CommandError::usage("/edit: the message can be edited on a terminal only");
        return Err(error.hint("/edit N TEXT gives the new text"));
    }
    let message = question(&saved.turn.messages).map(text).unwrap_or_default();
    chat.state.editing = Some(number - 1);
    chat.ui.terminal.note(format!("(Enter replaces {replaced}; Ctrl-C changes nothing)"));
    Ok(Effect::Edit(message))
}

pub fn compact(chat: &mut Chat<'_>) -> Done {
    chat.compact()?;
    Ok(Effect::Prompt)
}
