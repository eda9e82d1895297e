//! Plays the chats of `transcripts.txt`, a section each, line by line:
//!
//! - `$ chat ARGUMENTS` begins a chat in a terminal and waits for its prompt (`$40`: of 40 columns); `scripted` and `long` are those
//!   with the model that says what it is told to, `llmctl` is any command. `env NAME=VALUE` and `env -NAME` hold from then on, as
//!   does `context TOKENS`, which the prompt tells.
//! - `> TEXT` types a line; what `< TEXT` expects comes after it, then the next prompt. `~ KEYS` types keys, and `prompt` waits.
//! - `has` and `lacks` are of what was shown since something was typed, `seen` and `unseen` of the whole chat.
//! - `leave` ends the chat, `end CODE` waits for its end; `signal`, `gone` and `pause` are for chats that do not end so.
//! - `| chat ARGUMENTS << STDIN` runs a command to its end; `exit CODE: TEXT` is of its stderr, `out START…END` and
//!   `nothing` of its stdout.
//! - `asked`, `turns`, `turn` and `within` are of a session: its questions, their number, a member of a turn, its bounds; `sessions`
//!   are the names of all. `note NAME: SESSION MEMBER` remembers a member as `{NAME}`.
//! - `write`, `read`, `remove`, `rename` and `model` are of files.

use super::*;

struct Player {
    place: Place,
    term: Option<Term>,
    /// Shown since something was typed.
    shown: String,
    /// Whether a line was typed whose prompt is still to come.
    is_answered: bool,
    ran: Option<Ran>,
    env: Vec<(String, Option<String>)>,
    context: String,
    /// What stands for `{NAME}`.
    names: BTreeMap<String, String>,
}

pub fn play(name: &str) {
    let sections = include_str!("transcripts.txt").split("== ");
    let section = sections.filter_map(|section| section.split_once('\n')).find(|(title, _)| *title == name);
    let (_, lines) = section.unwrap_or_else(|| panic!("there is no transcript {name}"));
    let mut player = Player::new();
    for line in lines.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        eprintln!("{line}");
        let (step, rest) = line.split_once(' ').unwrap_or((line, ""));
        player.play(step, &player.text(rest));
    }
}

/// Returns the words of a command, of which some are quoted.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('\'').enumerate();
    parts
        .flat_map(|(at, part)| if at % 2 == 1 { vec![part] } else { part.split_whitespace().collect() })
        .collect()
}

fn unescaped(text: &str) -> String {
    let json = text.replace('"', "\\\"").replace("\\x", "\\u00");
    serde_json::from_str(&format!("\"{json}\"")).unwrap_or_else(|error| panic!("{error}: {text}"))
}

impl Player {
    fn new() -> Self {
        let place = Place::new();
        let (model, other) = (model(), model().replace("qwen3", "llama"));
        let folder = place.folder.path().display().to_string();
        let names = [("model", &*model), ("other", &other), ("place", &folder)].into_iter();
        let names = names.chain([("PLAIN", PLAIN), ("ENDLESS", ENDLESS.trim_end())]);
        let names = names.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        Self {
            place,
            term: None,
            shown: String::new(),
            is_answered: true,
            ran: None,
            env: vec![],
            context: "2,048".to_owned(),
            names,
        }
    }

    /// Returns a text with what its escapes and names stand for; `{*9 x}` is nine times x.
    fn text(&self, text: &str) -> String {
        let mut text = unescaped(text);
        for (name, meaning) in &self.names {
            text = text.replace(&format!("{{{name}}}"), meaning);
        }
        while let Some((before, repeated)) = text.split_once("{*")
            && let Some((part, rest)) = repeated.split_once('}')
        {
            let (count, part) = part.split_once(' ').expect("a number and a text");
            text = format!("{before}{}{rest}", part.repeat(count.parse().expect("a number")));
        }
        text
    }

    fn term(&mut self) -> &mut Term {
        self.term.as_mut().expect("a chat")
    }

    fn command(&self, line: &str) -> Command {
        let words = words(line);
        let mut command = match words[0] {
            "chat" => command(&self.place, &words[1..]),
            "scripted" => scripted(&self.place, &words[1..]),
            "long" => long(&self.place, &words[1..]),
            _ => self.place.command(&words[1..]),
        };
        command.env("NO_COLOR", "1").env_remove("COLUMNS");
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn play(&mut self, step: &str, rest: &str) {
        if !self.is_answered && step != "<" {
            self.is_answered = true;
            let prompt = self.term().prompt();
            self.shown += &prompt;
        }
        let (subject, told) = rest.split_once(": ").unwrap_or((rest.trim_end_matches(':'), ""));
        match step {
            "|" => {
                let (line, stdin) = rest.split_once(" << ").unwrap_or((rest, ""));
                self.ran = Some(finish(self.command(line), stdin));
            }
            "exit" => drop(self.ran.as_ref().expect("a run").check(subject.parse().expect("a code"), told)),
            "out" => {
                let stdout = &self.ran.as_ref().expect("a run").stdout;
                let (start, end) = rest.split_once('…').unwrap_or((rest, rest));
                assert!(stdout.starts_with(start) && stdout.ends_with(end), "{stdout:?}");
            }
            "nothing" => assert_eq!(self.ran.as_ref().expect("a run").stdout, ""),
            "env" => self.env.push(match rest.strip_prefix('-') {
                Some(name) => (name.to_owned(), None),
                None => rest
                    .split_once('=')
                    .map(|(name, value)| (name.to_owned(), Some(value.to_owned())))
                    .expect("="),
            }),
            "context" => {
                rest.clone_into(&mut self.context);
                self.term.iter_mut().for_each(|term| rest.clone_into(&mut term.context));
            }
            "write" => drop(self.place.write(subject, told)),
            "read" => assert_eq!(self.place.read(subject), told),
            "remove" => std::fs::remove_dir_all(self.place.path(rest)).expect("a folder"),
            "rename" => std::fs::rename(self.place.path(subject), self.place.path(told)).expect("renamed"),
            "model" => scripted::write(&self.place.path(rest)),
            "asked" => assert_eq!(questions(&self.place, subject).join(" | "), told),
            "sessions" => assert_eq!(names_sorted(&self.place).join(" "), rest),
            "turns" => assert_eq!(turns(&self.place, subject).len().to_string(), told),
            "turn" => assert_eq!(self.member(subject), told),
            "within" => {
                let (least, most) = told.split_once(' ').expect("two numbers");
                let [number, least, most] = [&*self.member(subject), least, most]
                    .map(|number| number.parse::<u64>().expect("a number"));
                assert!((least..most).contains(&number), "{number}");
            }
            "note" => {
                let member = self.member(told);
                self.names.insert(subject.to_owned(), member);
            }
            _ => self.play_in_terminal(step, rest),
        }
    }

    /// Returns a member of a session's turns, `SESSION /0/finish_reason`.
    fn member(&self, place: &str) -> String {
        let (session, pointer) = place.split_once(' ').expect("a session and a member");
        let turns = Value::Array(turns(&self.place, session));
        let member = turns.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {turns}"));
        member.as_str().map_or_else(|| member.to_string(), str::to_owned)
    }

    fn play_in_terminal(&mut self, step: &str, rest: &str) {
        if let Some(columns) = step.strip_prefix('$') {
            let command = self.command(rest);
            let mut term = Term::open(command, columns.parse().unwrap_or(100));
            term.context.clone_from(&self.context);
            term.prompt();
            self.term = Some(term);
            return;
        }
        let shown = self.shown.clone();
        let term = self.term();
        match step {
            ">" => {
                term.send(&format!("{rest}\r"));
                self.shown = self.term().expect("\r\n");
                self.is_answered = false;
            }
            "~" => {
                term.send(rest);
                self.shown.clear();
            }
            "<" => self.shown = shown + &term.expect(rest),
            "prompt" => self.shown = shown + &term.prompt(),
            "has" => assert!(shown.contains(rest), "{shown:?}"),
            "lacks" => assert!(!shown.contains(rest), "{shown:?}"),
            "seen" => assert!(term.seen.contains(rest), "{}", term.seen),
            "unseen" => assert!(!term.seen.contains(rest), "{}", term.seen),
            "leave" => {
                term.send("/exit\r");
                term.ended(0);
            }
            "end" => drop(term.ended(rest.parse().expect("a code"))),
            "signal" => term.signal(match rest {
                "KILL" => Signal::KILL,
                "TERM" => Signal::TERM,
                "STOP" => Signal::STOP,
                "CONT" => Signal::CONT,
                other => panic!("no signal {other}"),
            }),
            "gone" => drop(term.session.get_process_mut().child.wait()),
            "pause" => std::thread::sleep(Duration::from_millis(50)),
            other => panic!("there is no step {other}"),
        }
    }
}
