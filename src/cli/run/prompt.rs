//! The prompt: one text from the argument, a file, a stored prompt, its variables and stdin.
//!
//! The parts come in one order, each set off by a blank line: file or stored prompt, argument, stdin. Only a
//! stored prompt, a file with `--var`, or one with `{{ input }}` where there is input is a template; braces in other files
//! are text. Nothing is dropped
//! silently: an unused variable or a missing input is an error.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use super::PromptArgs;
use crate::cli::error::{CommandError, Kind, nearest};
use crate::cli::images::{GivenImage, is_image};
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::{position_in_file, read_all_stdin, read_file, read_stdin_bytes, text_of};
use crate::cli::terminal::report::counted;
use llmctl_base::Error;
use llmctl_template::{PromptTemplate, TemplateError};

/// A prompt that comes with llmctl: a file of prompts/, whose first comment describes it.
#[derive(Debug, Clone, Copy)]
pub struct StoredPrompt {
    pub name: &'static str,
    text: &'static str,
}

macro_rules! stored {
    ($($name:literal),* $(,)?) => {
        &[$(StoredPrompt { name: $name, text: include_str!(concat!("../../../prompts/", $name, ".md")) }),*]
    };
}

/// All of prompts/, in the order of the listing.
pub const STORED: &[StoredPrompt] =
    stored!["summarize", "explain-code", "review-diff", "commit-message", "translate", "extract-json"];

impl StoredPrompt {
    /// Returns the text of the comment that opens the file.
    pub fn description(&self) -> &'static str {
        let comment = self.text.strip_prefix("{#").and_then(|rest| rest.split_once("#}"));
        comment.map_or("", |(inner, _)| inner.trim_end_matches('-').trim())
    }

    /// Returns the template itself, without the describing comment.
    pub fn text(&self) -> &'static str {
        self.text.split_once("#}").map_or(self.text, |(_, rest)| rest.trim_start())
    }

    pub fn named(name: &str) -> Result<&'static StoredPrompt, CommandError> {
        STORED.iter().find(|prompt| prompt.name == name).ok_or_else(|| {
            let hint = match nearest(name, STORED.iter().map(|prompt| prompt.name)) {
                Some(near) => format!("did you mean {near}? `llmctl run --list-prompts` shows all"),
                None => "`llmctl run --list-prompts` shows them; the prompt itself needs no flag".to_owned(),
            };
            Kind::NotFound.error(format!("stored prompt {name:?} not found")).hint(hint)
        })
    }
}

/// Everything a prompt is made of, read but not yet put together.
#[derive(Debug, Default)]
struct Parts {
    /// The file or stored prompt, and what to call it in messages.
    body: Option<(String, String)>,
    is_template: bool,
    variables: BTreeMap<String, String>,
    argument: Option<String>,
    stdin: Option<String>,
}

/// A prompt: its text, and its images in order.
#[derive(Debug, Default)]
pub struct GatheredPrompt {
    pub text: String,
    pub images: Vec<GivenImage>,
}

/// Returns the prompt, from all its sources; may wait for stdin.
pub fn gather(
    args: &PromptArgs,
    words: &[String],
    terminal: &Terminal,
) -> Result<GatheredPrompt, CommandError> {
    let mut images = images(args, words, terminal)?;
    let text = gather_text(args, words, &mut images, terminal)?;
    Ok(GatheredPrompt { text, images })
}

/// Reads the images of `--image`.
fn images(args: &PromptArgs, words: &[String], terminal: &Terminal) -> Result<Vec<GivenImage>, CommandError> {
    let is_stdin = |path: &Path| path == Path::new("-");
    let num_stdin = args.image.iter().filter(|path| is_stdin(path)).count();
    if num_stdin > 1
        || num_stdin == 1 && (words == ["-"] || args.prompt_file.as_deref().is_some_and(is_stdin))
    {
        return Err(CommandError::usage("--image - reads stdin, which something else reads too"));
    }
    let open = |path: &PathBuf| match is_stdin(path) {
        true => image_of_stdin(read_stdin_bytes(terminal)?),
        false => GivenImage::open(path),
    };
    args.image.iter().map(open).collect()
}

fn image_of_stdin(bytes: Vec<u8>) -> Result<GivenImage, CommandError> {
    let refused = |error| CommandError::bad_data(format!("standard input: {error}"));
    GivenImage::of(bytes, Some("stdin".to_owned())).map_err(refused)
}

/// Reads what is piped in: a text, or an image if none is given.
fn piped(images: &mut Vec<GivenImage>, terminal: &Terminal) -> Result<Option<String>, CommandError> {
    let bytes = read_stdin_bytes(terminal)?;
    if images.is_empty() && is_image(&bytes) {
        images.push(image_of_stdin(bytes)?);
        return Ok(None);
    }
    if bytes.is_empty() { Ok(None) } else { text_of(bytes, "standard input").map(Some) }
}

fn gather_text(
    args: &PromptArgs,
    words: &[String],
    images: &mut Vec<GivenImage>,
    terminal: &Terminal,
) -> Result<String, CommandError> {
    let from_stdin = args.prompt_file.as_deref() == Some(Path::new("-"));
    let is_image_piped = args.image.iter().any(|path| path == Path::new("-"));
    // `-` is what other tools call stdin, also a terminal's.
    let is_dash = words == ["-"];
    let words = if is_dash { &[] } else { words };
    let body = match (&args.name, &args.prompt_file) {
        (Some(name), _) => Some((format!("prompt {name}"), StoredPrompt::named(name)?.text.to_owned())),
        (None, Some(_)) if from_stdin => {
            Some(("standard input".to_owned(), read_all_stdin(terminal)?.unwrap_or_default()))
        }
        (None, Some(path)) => Some((path.display().to_string(), read_prompt_file(path)?)),
        (None, None) => None,
    };
    if body.is_none() && !args.var.is_empty() {
        return Err(CommandError::usage("--var fills a prompt file: give --prompt-file or --prompt with it"));
    }
    let skip_stdin = from_stdin || is_image_piped || args.no_stdin || (io::stdin().is_terminal() && !is_dash);
    let begun = if skip_stdin || words.is_empty() { None } else { position_in_file() };
    let stdin = if skip_stdin { None } else { piped(images, terminal)? };
    if let (Some(_), Some(text)) = (begun, &stdin) {
        terminal.warn(format!(
            "the rest of the file on stdin ({}) became part of the prompt, and another command was reading it; \
             --no-stdin leaves it alone",
            counted(text.lines().count(), "line")
        ));
    }
    let variables = variables(&args.var)?;
    let has_input = stdin.is_some() || !words.is_empty();
    let is_filled = has_input && body.as_ref().is_some_and(|(_, text)| takes_input_alone(text));
    let parts = Parts {
        is_template: args.name.is_some() || !args.var.is_empty() || is_filled,
        variables,
        argument: (!words.is_empty()).then(|| words.join(" ")),
        stdin,
        body,
    };
    if let Some((name, text)) =
        parts.body.as_ref().filter(|(_, text)| !parts.is_template && text.contains("{{"))
    {
        let braces: String = text[text.find("{{").unwrap_or(0)..].chars().take(24).collect();
        let shown = braces.lines().next().unwrap_or("{{");
        terminal.note(format!("{name}: {shown:?} is passed on as it is; --var KEY=VALUE fills variables"));
    }
    match assemble(parts) {
        Err(error) if error.kind == Kind::Usage && !images.is_empty() => {
            Err(error.hint("an image needs a question about it: give it as an argument"))
        }
        text => text,
    }
}

fn assemble(parts: Parts) -> Result<String, CommandError> {
    let input = join([parts.argument, parts.stdin]);
    let hint = "give it as an argument, with --prompt-file, or pipe it in";
    match parts.body {
        None => match input {
            Some(text) if text.is_empty() => Err(CommandError::from(Error::PromptEmpty).hint(hint)),
            input => input.ok_or_else(|| CommandError::usage("no prompt given").hint(hint)),
        },
        Some((_, text)) if !parts.is_template => Ok(join([Some(text), input]).unwrap_or_default()),
        Some((name, text)) => fill(&name, &text, parts.variables, input),
    }
}

/// Returns whether a text is a template whose only variable is `input`.
fn takes_input_alone(text: &str) -> bool {
    PromptTemplate::new(text).is_ok_and(|template| template.variables().eq(["input"]))
}

/// Texts set off by blank lines; empty ones take no part, and `None` only when all are.
fn join(texts: impl IntoIterator<Item = Option<String>>) -> Option<String> {
    let given: Vec<_> = texts.into_iter().flatten().collect();
    let mut joined = given.first().cloned()?;
    for text in given.iter().skip(1).filter(|text| !text.is_empty()) {
        if !joined.is_empty() {
            joined.push_str(if joined.ends_with('\n') { "\n" } else { "\n\n" });
        }
        joined.push_str(text);
    }
    Some(joined)
}

/// Renders a template; `input` goes to the variable of that name, else to the end.
fn fill(
    name: &str,
    text: &str,
    mut variables: BTreeMap<String, String>,
    input: Option<String>,
) -> Result<String, CommandError> {
    let broken = |error: TemplateError| CommandError::bad_data(error).context(name.to_owned());
    let template = PromptTemplate::new(text).map_err(broken)?;
    // Before what is missing: the two together are a misspelt name.
    if let Some(unused) = variables.keys().find(|key| !template.variables().any(|known| known == *key)) {
        let known = template.variables().collect::<Vec<_>>().join(", ");
        let message = format!("{name} has no variable {unused:?}");
        return Err(CommandError::usage(message).hint(format!("it has: {known}")));
    }
    let wants_input = template.variables().any(|variable| variable == "input");
    let mut rest = None;
    if variables.contains_key("input") || !wants_input {
        rest = input;
    } else if let Some(input) = input {
        variables.insert("input".to_owned(), input);
    } else {
        let hint = "pipe it in, or give it as an argument or with --var input=@FILE";
        return Err(CommandError::usage(format!("{name} needs an input")).hint(hint));
    }
    let rendered = template.render(&variables).map_err(|error| match error {
        TemplateError::UndefinedVariables { .. } => {
            CommandError::usage(error).context(name.to_owned()).hint("fill it with --var KEY=VALUE")
        }
        error => broken(error),
    })?;
    Ok(join([Some(rendered.text), rest]).unwrap_or_default())
}

/// Returns the variables of `--var`; a key given twice is an error.
fn variables(given: &[(String, String)]) -> Result<BTreeMap<String, String>, CommandError> {
    let mut variables = BTreeMap::new();
    for (key, value) in given {
        if variables.insert(key.clone(), variable_value(value)?).is_some() {
            return Err(CommandError::usage(format!("--var: {key:?} is given twice")));
        }
    }
    Ok(variables)
}

fn variable_value(value: &str) -> Result<String, CommandError> {
    match value.strip_prefix('@') {
        Some(rest) if rest.starts_with('@') => Ok(rest.to_owned()),
        Some(path) => read_file(Path::new(path)),
        None => Ok(value.to_owned()),
    }
}

/// Reads a file of `--prompt-file`. A file that is missing and has the name of a stored prompt gets a hint.
///
/// # Errors
/// Those of [`read_file`].
pub fn read_prompt_file(path: &Path) -> Result<String, CommandError> {
    read_file(path).map_err(|error| match path.to_str().filter(|name| is_stored(name)) {
        Some(name) => error.hint(format!("--prompt {name} is the prompt that comes with llmctl")),
        None => error,
    })
}

fn is_stored(name: &str) -> bool {
    STORED.iter().any(|prompt| prompt.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Option<(String, String)> {
        Some(("test.md".to_owned(), text.to_owned()))
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn parts_are_set_off_by_one_blank_line() {
        let check =
            |body: Option<(String, String)>, argument: Option<&str>, stdin: Option<&str>, expected| {
                let argument = argument.map(str::to_owned);
                let stdin = stdin.map(str::to_owned);
                let text = assemble(Parts { body, argument, stdin, ..Parts::default() }).expect("a prompt");
                assert_eq!(text, expected);
            };
        check(None, Some("ask"), Some("data"), "ask\n\ndata");
        check(None, Some("ask\n"), Some("data"), "ask\n\ndata");
        check(None, None, Some("data"), "data");
        check(None, Some(""), Some("data"), "data");
        check(body(""), None, None, "");
        check(body("file"), Some("ask"), Some("data"), "file\n\nask\n\ndata");
        check(body("{{ not a template }}"), None, None, "{{ not a template }}");
    }

    #[test]
    fn no_source_at_all_is_a_usage_error() {
        assert_eq!(assemble(Parts::default()).unwrap_err().kind, Kind::Usage);
        let empty = assemble(Parts { argument: some(""), ..Parts::default() }).unwrap_err();
        assert_eq!((empty.kind, empty.to_string().as_str()), (Kind::BadData, "the prompt is empty"));
    }

    fn filled(
        text: &str,
        variables: &[(&'static str, &str)],
        input: Option<&str>,
    ) -> Result<String, CommandError> {
        let variables =
            variables.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        fill("test.md", text, variables, input.map(str::to_owned))
    }

    #[test]
    fn input_goes_where_the_template_wants_it_else_to_the_end() {
        assert_eq!(filled("<{{ input }}>", &[], Some("x<&")).unwrap(), "<x<&>");
        assert_eq!(filled("say {{ a }}", &[("a", "b")], Some("x")).unwrap(), "say b\n\nx");
        assert_eq!(filled("<{{ input }}>", &[("input", "given")], Some("x")).unwrap(), "<given>\n\nx");
    }

    #[test]
    fn variables_are_neither_missing_nor_unused() {
        let error = filled("to {{ language }}", &[], None).unwrap_err();
        assert_eq!(error.kind, Kind::Usage);
        assert!(error.to_string().contains("language"), "{error}");
        let error = filled("to {{ language }}", &[("langauge", "x")], None).unwrap_err();
        assert!(error.to_string().contains("langauge") && error.hint_text().unwrap().contains("language"));
        let error = filled("<{{ input }}>", &[], None).unwrap_err();
        assert!(error.to_string().contains("needs an input"));
        assert_eq!(filled("{{ broken", &[], None).unwrap_err().kind, Kind::BadData);
    }

    #[test]
    fn a_variable_is_given_once() {
        let given = |keys: &[&str]| {
            let pairs: Vec<_> = keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
            variables(&pairs).map_err(|error| (error.kind, error.to_string()))
        };
        assert_eq!(given(&["a", "b"]).expect("two keys").len(), 2);
        assert_eq!(given(&["a", "b", "a"]), Err((Kind::Usage, "--var: \"a\" is given twice".to_owned())));
    }

    #[test]
    fn stored_prompts_describe_themselves_and_take_input() {
        for prompt in STORED {
            assert!(prompt.description().len() > 10, "{}", prompt.name);
            let needed = ["language", "fields"]
                .into_iter()
                .filter(|key| prompt.description().contains(&format!("{key} (required)")));
            let variables = needed.map(|key| (key.to_owned(), "X1".to_owned())).collect::<BTreeMap<_, _>>();
            let text = fill(prompt.name, prompt.text, variables, some("THE INPUT")).expect(prompt.name);
            assert!(text.contains("THE INPUT") && !text.starts_with('\n') && !text.contains("{#"), "{text}");
        }
    }

    #[test]
    fn the_folder_and_the_list_agree() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("prompts");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .expect("prompts/")
            .map(|entry| entry.expect("entry").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
            .map(|path| path.file_stem().expect("name").to_string_lossy().into_owned())
            .collect();
        let mut names: Vec<_> = STORED.iter().map(|prompt| prompt.name.to_owned()).collect();
        files.sort();
        names.sort();
        assert_eq!(files, names);
    }

    #[test]
    fn an_at_sign_can_be_written() {
        assert_eq!(variable_value("@@home").unwrap(), "@home");
        assert_eq!(variable_value("a@b").unwrap(), "a@b");
        assert_eq!(variable_value("@/no/such/file").unwrap_err().kind, Kind::NotFound);
    }
}
