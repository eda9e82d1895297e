//! One configuration file: TOML to entries with their lines, checked against the command line's definition.
//!
//! Keys are long flag names, with dashes or underscores: at the top for every subcommand that has the flag,
//! in a `[run]` or `[bench.serve]` table for one. `[aliases]` names model references. Everything wrong is a
//! [`ConfigProblem`] with its position; all of them are reported, not only the first. Pure: reads no file.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::cli::flags::{FlagShape, ScalarType};
use crate::cli::{error, flags};

/// The table of model aliases.
const ALIASES: &str = "aliases";

/// A value for a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigEntry {
    /// The subcommand whose table it is in, as `run` or `bench.serve`; `None` at the top.
    pub scope: Option<String>,
    /// The flag's long name.
    pub key: String,
    /// As on the command line, one per occurrence.
    pub values: Vec<String>,
    pub line: usize,
}

/// A name for a model reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alias {
    pub name: String,
    pub reference: String,
    pub line: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfigFile {
    pub path: PathBuf,
    pub entries: Vec<ConfigEntry>,
    pub aliases: Vec<Alias>,
}

/// Problem in a file, with its place; lines and columns count from 1, in characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    pub path: PathBuf,
    pub line: usize,
    pub column: usize,
    pub message: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.path.display(), self.line, self.column, self.message)
    }
}

/// Reads `text` as the file `path` for the subcommands of `command`.
///
/// # Errors
/// Everything that is wrong, in order.
pub fn parse(path: &Path, text: &str, command: &Command) -> Result<ConfigFile, Vec<ConfigProblem>> {
    let mut reader = FileReader {
        text,
        command,
        file: ConfigFile { path: path.to_owned(), ..Default::default() },
        problems: Vec::new(),
    };
    match DeTable::parse(text) {
        Ok(table) => reader.top(table.get_ref()),
        Err(error) => reader.problem(error.span().unwrap_or(0..0), error.message().to_owned()),
    }
    // toml's tables are sorted by key; people read by line.
    reader.file.entries.sort_by_key(|entry| entry.line);
    reader.file.aliases.sort_by_key(|alias| alias.line);
    reader.problems.sort_by_key(|problem| (problem.line, problem.column));
    if reader.problems.is_empty() { Ok(reader.file) } else { Err(reader.problems) }
}

/// Returns the flag of `key` in `command` itself.
pub fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| flags::key(arg) == Some(key))
}

/// `command` and everything below it.
fn with_all_below(command: &Command) -> Vec<&Command> {
    std::iter::once(command).chain(command.get_subcommands().flat_map(with_all_below)).collect()
}

/// Returns the subcommand of `command` that has the flag of `key`.
fn below_with<'a>(command: &'a Command, key: &str) -> Option<&'a str> {
    command.get_subcommands().find(|below| find(below, key).is_some()).map(Command::get_name)
}

/// Returns the position of a byte offset: line and column from 1.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

struct FileReader<'a> {
    text: &'a str,
    command: &'a Command,
    file: ConfigFile,
    problems: Vec<ConfigProblem>,
}

impl<'a> FileReader<'a> {
    fn problem(&mut self, span: Range<usize>, message: String) {
        let (line, column) = position(self.text, span.start);
        self.problems.push(ConfigProblem { path: self.file.path.clone(), line, column, message });
    }

    fn top(&mut self, table: &DeTable<'_>) {
        let commands = with_all_below(self.command);
        for (name, value) in table {
            match value.get_ref().as_table() {
                Some(inner) if name.get_ref() == ALIASES => self.aliases(inner),
                Some(inner) => self.subcommand(self.command, "", name, inner),
                None => self.entry(None, &commands, name, value),
            }
        }
    }

    /// The table `name` inside that of `parent`; `prefix` is what stands before the name in full.
    fn subcommand(
        &mut self,
        parent: &'a Command,
        prefix: &str,
        name: &Spanned<toml::de::DeString<'_>>,
        table: &DeTable<'_>,
    ) {
        let path = format!("{prefix}{}", name.get_ref());
        let found = parent.get_subcommands().find(|sub| sub.get_name() == name.get_ref().as_ref());
        let Some(subcommand) = found else {
            let aliases = prefix.is_empty().then_some(ALIASES);
            let names = parent.get_subcommands().map(Command::get_name).chain(aliases);
            let nearest = nearest(name.get_ref(), names);
            return self.problem(name.span(), format!("unknown table [{path}]{nearest}"));
        };
        // Global flags may be set for one subcommand too.
        let commands = [self.command, subcommand];
        for (key, value) in table {
            match value.get_ref().as_table() {
                Some(inner) => self.subcommand(subcommand, &format!("{path}."), key, inner),
                None => self.entry(Some(&path), &commands, key, value),
            }
        }
    }

    fn entry(
        &mut self,
        scope: Option<&str>,
        commands: &[&'a Command],
        name: &Spanned<toml::de::DeString<'_>>,
        value: &Spanned<DeValue<'_>>,
    ) {
        let key = name.get_ref().replace('_', "-");
        let args: Vec<&Arg> = commands.iter().filter_map(|command| find(command, &key)).collect();
        if args.is_empty() {
            let keys = commands.iter().flat_map(|command| command.get_arguments()).filter_map(flags::key);
            let advice = match commands.last().and_then(|command| below_with(command, &key)) {
                Some(below) => format!("; it belongs in [{}.{below}]", scope.unwrap_or_default()),
                None => nearest(&key, keys),
            };
            return self.problem(name.span(), format!("unknown key {:?}{advice}", name.get_ref()));
        }
        if self.file.entries.iter().any(|other| other.key == key && other.scope.as_deref() == scope) {
            return self.problem(name.span(), format!("{key:?} is given twice"));
        }
        // A flag may differ between subcommands: the value has to fit one of them, and is used where it fits.
        let results: Vec<_> = args.iter().map(|arg| values(arg, value)).collect();
        let error = results.iter().find_map(|result| result.clone().err());
        match (results.into_iter().find_map(Result::ok), error) {
            (Some(values), _) => {
                let (line, _) = position(self.text, name.span().start);
                self.file.entries.push(ConfigEntry { scope: scope.map(str::to_owned), key, values, line });
            }
            (None, Some((span, message))) => self.problem(span, format!("{key}: {message}")),
            (None, None) => {}
        }
    }

    fn aliases(&mut self, table: &DeTable<'_>) {
        for (name, value) in table {
            let odd = |c: char| !(c.is_ascii_alphanumeric() || "._-:".contains(c));
            if name.get_ref().is_empty()
                || name.get_ref().contains(odd)
                || name.get_ref().starts_with(['.', '-'])
            {
                let message =
                    format!("{:?} cannot be an alias: use letters, digits and . _ - :", name.get_ref());
                self.problem(name.span(), message);
                continue;
            }
            let (line, _) = position(self.text, name.span().start);
            match value.get_ref().as_str() {
                Some(text) if !text.trim().is_empty() => {
                    let (name, reference) = (name.get_ref().to_string(), text.to_owned());
                    self.file.aliases.push(Alias { name, reference, line });
                }
                _ => self.problem(value.span(), "an alias is a string with a model reference".to_owned()),
            }
        }
    }
}

type Wrong = (Range<usize>, String);

/// Returns the value as command line words.
fn values(arg: &Arg, value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, Wrong> {
    let expected = |what: &str| {
        Err((value.span(), format!("expected {what}, found {}", article(value.get_ref().type_str()))))
    };
    match FlagShape::of(arg) {
        FlagShape::Switch => match value.get_ref().as_bool() {
            Some(on) => Ok(vec![on.to_string()]),
            None => expected("true or false"),
        },
        FlagShape::Count => one(arg, ScalarType::Integer, value).map(|count| vec![count]),
        FlagShape::One(scalar) => one(arg, scalar, value).map(|value| vec![value]),
        FlagShape::Many(scalar) => match value.get_ref().as_array() {
            Some(array) => array.iter().map(|item| one(arg, scalar, item)).collect(),
            None => one(arg, scalar, value).map(|value| vec![value]),
        },
    }
}

fn one(arg: &Arg, scalar: ScalarType, value: &Spanned<DeValue<'_>>) -> Result<String, Wrong> {
    let wrong = |message: String| (value.span(), message);
    let takes_text = matches!(scalar, ScalarType::Text | ScalarType::TextOrNumber);
    let takes_float = matches!(scalar, ScalarType::Number | ScalarType::TextOrNumber);
    let takes_integer = scalar != ScalarType::Text;
    let text = match value.get_ref() {
        DeValue::String(text) if takes_text => text.to_string(),
        DeValue::Integer(number) if takes_integer => {
            let parsed = i128::from_str_radix(number.as_str(), number.radix());
            parsed.map_err(|_| wrong(format!("{number} is out of range")))?.to_string()
        }
        DeValue::Float(number) if takes_float => {
            let parsed: Result<f64, _> = number.as_str().parse();
            parsed.map_err(|_| wrong(format!("{} is not a number", number.as_str())))?.to_string()
        }
        other => {
            return Err(wrong(format!("expected {}, found {}", scalar.name(), article(other.type_str()))));
        }
    };
    flags::check(arg, &text).map_err(wrong)?;
    Ok(text)
}

fn article(kind: &str) -> String {
    let vowel = kind.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {kind}", if vowel { "an" } else { "a" })
}

/// `; did you mean "x"?` for the closest of `names`, if one is close.
fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> String {
    error::nearest(wanted, names).map_or(String::new(), |name| format!("; did you mean {name:?}?"))
}

#[cfg(test)]
mod tests {
    use clap::{ArgAction, value_parser};

    use super::*;

    fn command() -> Command {
        let number = |name: &'static str| Arg::new(name).long(name).value_parser(value_parser!(f32));
        let run = Command::new("run")
            .arg(number("temperature"))
            .arg(Arg::new("max_tokens").long("max-tokens").value_parser(value_parser!(u64)))
            .arg(Arg::new("stop").long("stop").action(ArgAction::Append))
            .arg(Arg::new("output").long("output").value_parser(["text", "json", "jsonl"]))
            .arg(Arg::new("raw").long("raw").action(ArgAction::SetTrue))
            .arg(Arg::new("words"));
        let show = Command::new("show").arg(Arg::new("level").long("level").value_parser(value_parser!(u8)));
        let list = Command::new("models")
            .subcommand(show)
            .arg(Arg::new("output").long("output").value_parser(["text", "json"]));
        Command::new("llmctl")
            .arg(Arg::new("verbose").long("verbose").action(ArgAction::Count))
            .arg(Arg::new("config").long("config"))
            .subcommand(run)
            .subcommand(list)
    }

    fn entries(text: &str) -> Vec<String> {
        let file = parse(Path::new("c.toml"), text, &command()).unwrap_or_else(|p| panic!("{p:?}"));
        let show = |e: &ConfigEntry| {
            format!("{}.{}={}@{}", e.scope.as_deref().unwrap_or(""), e.key, e.values.join("|"), e.line)
        };
        file.entries.iter().map(show).collect()
    }

    fn problems(text: &str) -> Vec<String> {
        let problems = parse(Path::new("c.toml"), text, &command()).expect_err(text);
        problems.iter().map(ConfigProblem::to_string).collect()
    }

    #[test]
    fn values_of_each_shape() {
        let text =
            "verbose = 2\nmax_tokens = 1_000\n\n[run]\ntemperature = 1\nstop = [\"a\", \"b\"]\nraw = true\n";
        let mut found = entries(text);
        found.sort();
        assert_eq!(
            found,
            [".max-tokens=1000@2", ".verbose=2@1", "run.raw=true@7", "run.stop=a|b@6", "run.temperature=1@5"]
        );
        assert_eq!(entries("stop = \"x\""), [".stop=x@1"]);
        assert_eq!(entries("max-tokens = 0xff"), [".max-tokens=255@1"]);
        assert_eq!(entries("max-tokens = 18446744073709551615"), [".max-tokens=18446744073709551615@1"]);
        assert_eq!(entries("output = \"jsonl\""), [".output=jsonl@1"]);
        assert_eq!(entries("[run]\nverbose = 1"), ["run.verbose=1@2"]);
        assert_eq!(
            entries("[models.show]\nlevel = 1\nverbose = 2").join(" "),
            "models.show.level=1@2 models.show.verbose=2@3"
        );
        assert_eq!(entries("level = 1"), [".level=1@1"], "the top is for nested subcommands too");
    }

    #[test]
    fn unknown_keys_have_positions_and_suggestions() {
        assert_eq!(
            problems("[run]\n  temprature = 1"),
            ["c.toml:2:3: unknown key \"temprature\"; did you mean \"temperature\"?"]
        );
        assert_eq!(
            problems("max_token = 1"),
            ["c.toml:1:1: unknown key \"max_token\"; did you mean \"max-tokens\"?"]
        );
        assert_eq!(problems("\n[rnu]\nx = 1"), ["c.toml:2:2: unknown table [rnu]; did you mean \"run\"?"]);
        assert_eq!(problems("xyzzy = 1"), ["c.toml:1:1: unknown key \"xyzzy\""]);
        assert_eq!(problems("words = 1"), ["c.toml:1:1: unknown key \"words\""]);
        assert_eq!(problems("[models]\ntemperature = 1"), ["c.toml:2:1: unknown key \"temperature\""]);
        assert_eq!(problems("config = \"x\"").len(), 1);
        assert_eq!(
            problems("[models]\nlevel = 1"),
            ["c.toml:2:1: unknown key \"level\"; it belongs in [models.show]"]
        );
        assert_eq!(
            problems("[models.shwo]\nlevel = 1"),
            ["c.toml:1:9: unknown table [models.shwo]; did you mean \"show\"?"]
        );
    }

    #[test]
    fn wrong_types_and_values_have_positions() {
        for (text, expected) in [
            ("temperature = \"hot\"", "1:15: temperature: expected a number, found a string"),
            ("max-tokens = 1.5", "1:14: max-tokens: expected an integer, found a float"),
            ("max-tokens = -1", "1:14: max-tokens: -1 is negative"),
            ("raw = 1", "1:7: raw: expected true or false, found an integer"),
            ("stop = [\"a\", 2]", "1:14: stop: expected a string, found an integer"),
            ("output = \"yaml\"", "1:10: output: unknown value \"yaml\""),
            ("[models]\noutput = \"jsonl\"", "2:10: output: unknown value \"jsonl\""),
            ("run = 3", "1:1: unknown key \"run\""),
            ("verbose = true", "1:11: verbose: expected an integer, found a boolean"),
            ("a = = 1", "1:5: "),
        ] {
            let found = problems(text);
            assert!(found[0].starts_with(&format!("c.toml:{expected}")), "{text}: {found:?}");
        }
    }

    #[test]
    fn both_spellings_are_one_key() {
        assert_eq!(problems("max-tokens = 1\nmax_tokens = 2"), ["c.toml:2:1: \"max-tokens\" is given twice"]);
    }

    #[test]
    fn all_problems_are_reported_in_order() {
        let found = problems("zzz = 1\n[run]\nraw = 1\n[aliases]\nx = 1\n\"../y\" = \"z\"");
        let lines: Vec<&str> = found.iter().map(|p| p.split(':').nth(1).unwrap_or_default()).collect();
        assert_eq!(lines, ["1", "3", "5", "6"]);
    }

    #[test]
    fn aliases() {
        let text = "[aliases]\nsmall = \"o/m:Q4_0\"\n\"llama3:8b\" = \"./x.gguf\"";
        let file = parse(Path::new("c.toml"), text, &command()).expect("valid");
        let found: Vec<_> =
            file.aliases.iter().map(|a| (a.name.as_str(), a.reference.as_str(), a.line)).collect();
        assert_eq!(found, [("small", "o/m:Q4_0", 2), ("llama3:8b", "./x.gguf", 3)]);
    }

    #[test]
    fn columns_count_characters() {
        assert_eq!(position("\u{e9}\u{e9} = 1", 4), (1, 3));
        assert_eq!(position("a\nb", 2), (2, 1));
        assert_eq!(position("", 0), (1, 1));
    }
}
