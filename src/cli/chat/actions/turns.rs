//! Commands about the turns of the conversation.
//!
//! Invariant: what one of them takes away stays, as a branch of the session or, where nothing is saved, in memory, and /redo
//! brings it back.

use super::{Done, count, no_argument};
use crate::cli::chat::command::Next;
use crate::cli::chat::counted;
use crate::cli::chat::room::opening;
use crate::cli::chat::talk::{Chat, Taken};
use crate::cli::chat::turn::{question, text};
use crate::cli::error::CommandError;
use crate::runtime::Finish;
use crate::runtime::session::store::{BranchReason, SessionName};
use crate::runtime::turn::session_chat::SessionChat;

pub fn undo(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = chat.session_chat.saved().turns.clone();
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
    chat.set_aside(BranchReason::Undo)?;
    if left == 0 {
        chat.keep_system();
    }
    chat.session_chat.rewind(left)?;
    for saved in turns[left..].iter().filter(|saved| question(&saved.turn.messages).is_some()) {
        chat.terminal.report(&format!("taken back: {}", opening(saved)));
    }
    chat.terminal.note("(/redo brings it back)");
    Ok(Next::Prompt)
}

pub fn redo(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("redo", argument)?;
    match last_taken(chat)? {
        Some((taken, _)) => bring_back(chat, taken),
        None => Err(CommandError::usage("there is nothing to bring back")),
    }
}

/// What was taken away last: by this chat, else by whoever had the session before.
fn last_taken(chat: &Chat<'_>) -> Result<Option<(Taken, BranchReason)>, CommandError> {
    if let Some(taken) = chat.taken.clone() {
        return Ok(Some(taken));
    }
    let Some(name) = chat.name() else { return Ok(None) };
    let branches = chat.store()?.branches(name)?;
    let taken = |branch: &crate::runtime::session::store::Listed| {
        Some((Taken::Branch(branch.name.clone()), branch.branch()?.reason))
    };
    let by_user = branches.iter().rev().filter(|branch| branch.name != *name).filter_map(taken);
    Ok(by_user.into_iter().find(|(_, reason)| *reason != BranchReason::Request))
}

/// The conversation as it was before; what it is now is what /redo brings back next.
fn bring_back(chat: &mut Chat<'_>, taken: Taken) -> Done {
    let before = chat.session_chat.saved().clone();
    chat.taken = match taken {
        Taken::Branch(branch) => {
            let kept = chat.session_chat.restore(&branch)?;
            kept.map(|kept| (Taken::Branch(kept), BranchReason::Restore))
        }
        Taken::Unsaved(saved) => {
            chat.session_chat = SessionChat::look_at(*saved, chat.model());
            let holds_all = chat.session_chat.saved().turns.starts_with(&before.turns);
            (!holds_all).then(|| (Taken::Unsaved(Box::new(before)), BranchReason::Restore))
        }
    };
    (chat.last, chat.has_warned) = (None, false);
    let _ = chat.llm().engine().close_session(chat.engine_name()); // there is none before the first turn
    chat.tell_engine()?;
    let turns = counted(chat.session_chat.saved().turns.len(), "turn");
    chat.terminal.report(&format!("brought back: the conversation has {turns}"));
    if let Some((Taken::Branch(kept), _)) = &chat.taken {
        chat.terminal.note(&format!("(what stood instead is kept as {kept}; /redo swaps them again)"));
    }
    Ok(Next::Prompt)
}

impl Chat<'_> {
    /// Keeps the conversation as it is, for a command that is about to take turns away: the branch that holds it, if it is
    /// saved.
    pub fn set_aside(&mut self, reason: BranchReason) -> Result<Option<SessionName>, CommandError> {
        let saved = self.session_chat.saved();
        if saved.turns.is_empty() {
            return Ok(None);
        }
        let branch = self.session_chat.keep(reason)?;
        let taken = match &branch {
            Some(branch) => Taken::Branch(branch.clone()),
            None => Taken::Unsaved(Box::new(saved.clone())),
        };
        self.taken = Some((taken, reason));
        Ok(branch)
    }

    /// The system prompt belongs to the first turn, and stays for the next first one.
    pub fn keep_system(&mut self) {
        let system = self.session_chat.saved().system().map(str::to_owned);
        self.system = system.or(self.system.take());
    }
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
    if sampling.temperature == 0.0 {
        chat.terminal
            .note("(temperature is 0, so the answer will be the same; /set temperature 0.8 changes that)");
    } else if seed.is_none() && sampling.seed.is_some() {
        chat.terminal.note("(the seed is set, so the answer will be the same; /retry seed=N uses another)");
    }
    chat.answer_again(Vec::new(), seed)
}

pub fn go_on(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("continue", argument)?;
    let Some(last) = chat.session_chat.saved().turns.last().cloned() else {
        return Err(CommandError::usage("there is no answer to continue"));
    };
    if matches!(last.turn.finish, Finish::Eos(_) | Finish::StopString(_)) {
        return Err(CommandError::usage("the last answer is complete").hint("type a message to continue"));
    }
    if !last.model.is_same(&chat.model()) {
        return Err(
            CommandError::usage("the last answer is another model's").hint("/retry answers with this one")
        );
    }
    chat.answer_again(last.turn.generated.clone(), None)
}

/// `/edit [N] [TEXT]`: without a text, the message comes back on the line.
pub fn edit(chat: &mut Chat<'_>, argument: &str) -> Done {
    let turns = &chat.session_chat.saved().turns;
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
        chat.terminal.note(&format!("(this replaces {replaced})"));
        return chat.say_instead(number - 1, given.to_owned());
    }
    if !chat.is_interactive() {
        let error = CommandError::usage("/edit: the message can be edited on a terminal only");
        return Err(error.hint("/edit N TEXT gives the new text"));
    }
    let message = question(&saved.turn.messages).map(text).unwrap_or_default().to_owned();
    chat.editing = Some(number - 1);
    chat.terminal.note(&format!("(Enter replaces {replaced}; Ctrl-C changes nothing)"));
    Ok(Next::Edit(message))
}

pub fn compact(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("compact", argument)?;
    chat.compact()?;
    Ok(Next::Prompt)
}
