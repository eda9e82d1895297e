//! Errors of commands, for the shell and the user: a kind (one exit code each), a message chain and a hint.
//!
//! Each `match` over the engine's errors is exhaustive, so a new variant there is a compile error here.

use std::borrow::Cow;
use std::path::Path;
use std::{fmt, io};

use llmctl_base::{Error, GrammarError, LoadError, StoreError};
use llmctl_bench::{BenchError, RequestFailure};
use llmctl_engine::http_engine::HttpFailure;
use llmctl_engine::turn::TurnError;
use llmctl_hub::HubError;

/// Kind of a command's failure; each is one exit code of the table in `llmctl help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The work failed while running.
    Failure,
    /// A flag or a value is invalid.
    Usage,
    /// Input data is malformed.
    BadData,
    /// A prompt, model or session does not exist or cannot be read.
    NotFound,
    /// A server or the hub cannot be reached.
    Unavailable,
    /// A bug of llmctl.
    Bug,
    /// Reading or writing failed.
    Io,
    /// May succeed later: busy, locked, not enough memory now.
    Temporary,
    /// A file that this user may not read, or a key that is rejected.
    Auth,
    /// A configuration file is invalid.
    Config,
    /// SIGINT stopped the work.
    Interrupted,
    /// SIGTERM stopped the work.
    Terminated,
}

impl Kind {
    const fn facts(self) -> (u8, &'static str) {
        match self {
            Kind::Failure => (1, "failure"),
            Kind::Usage => (2, "usage"),
            Kind::BadData => (65, "bad_data"),
            Kind::NotFound => (66, "not_found"),
            Kind::Unavailable => (69, "unavailable"),
            Kind::Bug => (70, "bug"),
            Kind::Io => (74, "io"),
            Kind::Temporary => (75, "temporary"),
            Kind::Auth => (77, "auth"),
            Kind::Config => (78, "config"),
            Kind::Interrupted => (130, "interrupted"),
            Kind::Terminated => (143, "terminated"),
        }
    }

    pub fn code(self) -> u8 {
        self.facts().0
    }

    /// Returns an error of this kind with this message.
    pub fn error(self, message: impl fmt::Display) -> CommandError {
        CommandError::new(self, anyhow::anyhow!("{message}"))
    }

    /// Returns the kind's name in machine-readable output.
    pub fn word(self) -> &'static str {
        self.facts().1
    }
}

/// Result of a command for the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Success,
    Error(Kind),
    /// The output was cut by a limit and `--fail-on-length` was given.
    Cut,
    /// The batch is complete, but some rows failed.
    FailedRows,
    /// Stopped by this signal, in good order.
    Signal(u8),
    /// The code of the agent that `launch` has run.
    Agent(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Error(kind) => kind.code(),
            Exit::Cut => 3,
            Exit::FailedRows => 4,
            Exit::Signal(number) => number.saturating_add(128),
            Exit::Agent(code) => code,
        }
    }
}

impl From<Kind> for Exit {
    fn from(kind: Kind) -> Self {
        Exit::Error(kind)
    }
}

/// An error of a subcommand.
#[derive(Debug)]
pub struct CommandError {
    pub kind: Kind,
    error: anyhow::Error,
    hint: Option<String>,
}

impl CommandError {
    pub fn new(kind: Kind, error: impl Into<anyhow::Error>) -> Self {
        Self { kind, error: error.into(), hint: None }
    }

    pub fn usage(message: impl fmt::Display) -> Self {
        Kind::Usage.error(message)
    }

    /// Returns the error for a download that `setting` forbids.
    pub fn offline(setting: &str) -> Self {
        Kind::Unavailable
            .error(format!("{setting} forbids downloading"))
            .hint(format!("leave {setting} out, or copy the model here by hand"))
    }

    pub fn bad_data(message: impl fmt::Display) -> Self {
        Kind::BadData.error(message)
    }

    /// Returns what makes the error of reading or writing that failed while `doing`, or at this path.
    pub fn io(doing: impl fmt::Display) -> impl Fn(io::Error) -> Self {
        move |error| Self::new(Kind::Io, error).context(doing.to_string())
    }

    /// Returns the error for a file that the user named and that cannot be read: missing (66) or not
    /// permitted (77).
    pub fn reading(path: &Path, error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::PermissionDenied => Kind::Auth,
            _ => Kind::NotFound,
        };
        Self::new(kind, error).context(path.display().to_string())
    }

    /// Adds advice, printed after the message.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds advice, if there is some.
    pub fn hint_if(self, hint: Option<impl Into<String>>) -> Self {
        Self { hint: hint.map(Into::into).or(self.hint), ..self }
    }

    /// Adds the attempted action, printed before the message.
    pub fn context(mut self, doing: impl fmt::Display + Send + Sync + 'static) -> Self {
        self.error = self.error.context(doing);
        self
    }

    /// Replaces kind and message, and keeps the hint.
    pub fn replaced(self, kind: Kind, message: String) -> Self {
        Self { kind, error: anyhow::anyhow!(message), hint: self.hint }
    }

    /// Returns the engine's error, if it is one.
    pub fn runtime(&self) -> Option<&Error> {
        self.error.downcast_ref()
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

/// Formats the message and its causes, outermost first.
impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = String::new();
        for cause in self.error.chain() {
            let message = plain(&cause.to_string()).into_owned();
            // Some errors repeat their source in their own message.
            if said.ends_with(&message) {
                continue;
            }
            f.write_str(if said.is_empty() { "" } else { ": " })?;
            f.write_str(&message)?;
            said = message;
        }
        Ok(())
    }
}

impl From<TurnError> for CommandError {
    fn from(error: TurnError) -> Self {
        match error {
            TurnError::Unsupported { .. } => Self::usage(error.to_string()),
            TurnError::Param { param, error } => Self::from(error).context(param),
            TurnError::Other(error) => error.into(),
        }
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        let (kind, hint) = match &error {
            Error::PromptEmpty => {
                (Kind::BadData, Some("give it text, or a chat template by leaving out --raw"))
            }
            Error::PromptTooLong { .. } | Error::PromptOversized { .. } => {
                (Kind::BadData, Some("shorten the prompt, or give a larger --ctx if the model allows it"))
            }
            Error::ContextExceeded { .. } => (
                Kind::BadData,
                Some(
                    "lower --max-tokens, shorten the prompt, give a larger --ctx, or take what fits with --overflow clamp",
                ),
            ),
            Error::InvalidParameter { .. } | Error::NotSupported(_) => (Kind::Usage, None),
            Error::SessionBusy(_) | Error::SessionsFull { .. } | Error::QueueFull { .. } => {
                (Kind::Temporary, Some("try again later"))
            }
            Error::ImagesBusy { .. } => (Kind::Temporary, Some("go on with fewer or smaller images")),
            Error::DeadlineExceeded { .. } => {
                (Kind::Temporary, Some("try again later, or allow it more time"))
            }
            Error::SessionNotFound(_) => (Kind::NotFound, None),
            Error::Load(error) => return error.clone().into(),
            Error::Template(error) => return error.clone().into(),
            Error::Store(StoreError::Io { .. }) => (Kind::Io, None),
            Error::Store(StoreError::Damaged { .. } | StoreError::Unsupported { .. }) => {
                (Kind::BadData, None)
            }
            Error::Grammar(GrammarError::Failed(_)) | Error::Backend(_) => (Kind::Failure, None),
            Error::Grammar(_) => (Kind::BadData, None),
            Error::NotFinite(_) => {
                (Kind::BadData, Some("the model's weights are probably damaged; fetch its files again"))
            }
            Error::RemoteLost(_) => {
                (Kind::Unavailable, Some("try again when the engine of --engine is back"))
            }
            Error::RemoteRefused(_) => (Kind::Failure, None),
            Error::InvalidState(_) | Error::Poisoned | Error::EngineGone => {
                (Kind::Bug, Some("this is a bug; please report it with the command"))
            }
        };
        Self::new(kind, error).hint_if(hint)
    }
}

impl From<LoadError> for CommandError {
    fn from(error: LoadError) -> Self {
        let (kind, hint) = match &error {
            LoadError::NotFound(_) => (Kind::NotFound, None),
            LoadError::Denied(_) => (Kind::Auth, None),
            LoadError::UnknownModel { candidates, .. } => (Kind::NotFound, did_you_mean(candidates)),
            LoadError::AmbiguousModel { .. } => (Kind::NotFound, Some("name one of them exactly".to_owned())),
            LoadError::InvalidReference { .. } | LoadError::ContextTooLong { .. } => (Kind::Usage, None),
            LoadError::DraftModel { .. } => {
                (Kind::Usage, Some("give a smaller model of the same family with --draft-model".to_owned()))
            }
            LoadError::NoPrediction { .. } => {
                (Kind::Usage, Some("leave --speculate out: drafts then come from what there is".to_owned()))
            }
            LoadError::OutOfMemory(_) => (Kind::Temporary, None),
            LoadError::Device(_) => (Kind::Failure, None),
            LoadError::Io { .. } => (Kind::Io, None),
            LoadError::Malformed { .. } => {
                (Kind::BadData, Some("the file is damaged or incomplete; fetch it again".to_owned()))
            }
            LoadError::UnknownArchitecture { nearest, .. } => {
                (Kind::BadData, did_you_mean(nearest.as_slice()))
            }
            LoadError::Unsupported { .. } | LoadError::Tensor { .. } | LoadError::Tokenizer(_) => {
                (Kind::BadData, None)
            }
            LoadError::KvTooSmall { .. } => {
                (Kind::Usage, Some("give a larger --kv-memory or a smaller --ctx".to_owned()))
            }
            LoadError::KvTooLarge { .. } => (Kind::Usage, Some("give a smaller --kv-memory".to_owned())),
            LoadError::TooBig { largest_context, .. } => (Kind::Temporary, Some(fits(*largest_context))),
        };
        Self { kind, error: error.into(), hint }
    }
}

impl std::error::Error for CommandError {}

/// For the parts of a measurement that the command adds.
impl From<CommandError> for BenchError {
    fn from(error: CommandError) -> Self {
        BenchError::Caller(Box::new(error))
    }
}

impl From<BenchError> for CommandError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Usage { message, hint } => Self::usage(message).hint_if(hint),
            BenchError::Damaged(message) => Self::bad_data(message),
            BenchError::Read { path, error } => {
                let kind = match error.kind() {
                    io::ErrorKind::NotFound => Kind::NotFound,
                    io::ErrorKind::InvalidData => Kind::BadData,
                    _ => Kind::Io,
                };
                Self::new(kind, error).context(path)
            }
            BenchError::Write { place, error } => Self::new(Kind::Io, error).context(place),
            BenchError::Threads(error) => Self::new(Kind::Failure, error).context("starting threads"),
            BenchError::Engine(error) => error.into(),
            BenchError::Case { name, error } => Self::from(*error).context(name),
            BenchError::Caller(error) => match error.downcast::<Self>() {
                Ok(error) => *error,
                Err(error) => Self::new(Kind::Failure, anyhow::anyhow!(error)),
            },
            BenchError::Drawing(_) => Self::new(Kind::Bug, error),
            BenchError::Temporary(_) => Self::new(Kind::Temporary, error),
            BenchError::Request { ref failure, .. } => Self::new(request_kind(failure), error),
        }
    }
}

/// Returns the kind of a request to a server that everything after it needs.
fn request_kind(failure: &RequestFailure) -> Kind {
    match failure {
        RequestFailure::Http(HttpFailure::Status { code, .. }) => match code {
            401 | 403 => Kind::Auth,
            404 => Kind::NotFound,
            429 | 503 => Kind::Temporary,
            _ => Kind::Failure,
        },
        RequestFailure::Http(HttpFailure::Malformed(_)) | RequestFailure::Server(_) => Kind::Failure,
        RequestFailure::Http(HttpFailure::Unreachable(_) | HttpFailure::Broken(_) | HttpFailure::Timeout) => {
            Kind::Unavailable
        }
    }
}

impl From<HubError> for CommandError {
    fn from(error: HubError) -> Self {
        let kind = match &error {
            HubError::RepoNotFound { .. }
            | HubError::RevisionNotFound { .. }
            | HubError::FileNotFound { .. }
            | HubError::SeveralFiles { .. }
            | HubError::Disabled { .. } => Kind::NotFound,
            HubError::NoModel { .. } | HubError::WrongHash { .. } => Kind::BadData,
            HubError::Gated { .. }
            | HubError::TokenRejected { .. }
            | HubError::Files { is_denied: true, .. } => Kind::Auth,
            HubError::RateLimited { .. } | HubError::Changed { .. } => Kind::Temporary,
            HubError::Unreachable { .. } | HubError::Unexpected { .. } => Kind::Unavailable,
            HubError::DiskFull { .. } | HubError::Files { .. } => Kind::Io,
            HubError::Setting { .. } => Kind::Config,
            HubError::Cancelled => Kind::Interrupted,
        };
        let hint = hub_advice(&error);
        Self { kind, error: error.into(), hint }
    }
}

/// Returns what the user can do about a failed download.
fn hub_advice(error: &HubError) -> Option<String> {
    let token = "make a token at huggingface.co/settings/tokens and set HF_TOKEN (or run `hf auth login`)";
    let listed = |list: &[String]| (!list.is_empty()).then(|| format!("there is: {}", list.join(", ")));
    match error {
        HubError::RepoNotFound { has_token: false, .. } => {
            Some(format!("check the name; for a private repository {token}"))
        }
        HubError::RepoNotFound { .. } => {
            Some("check the name; a private repository needs a token of a user who may read it".to_owned())
        }
        HubError::RevisionNotFound { existing, .. } => listed(existing),
        HubError::FileNotFound { candidates, .. } => listed(candidates),
        HubError::SeveralFiles { .. } => Some("name one of them exactly".to_owned()),
        HubError::Gated { page, has_token: false, .. } => {
            Some(format!("accept the terms at {page}, then {token}"))
        }
        HubError::Gated { page, .. } => Some(format!(
            "accept the terms at {page} as the user of the token, and wait if they are reviewed"
        )),
        HubError::TokenRejected { .. } => Some(
            "HF_TOKEN or the saved token is wrong or has expired; a public model needs none: unset it"
                .to_owned(),
        ),
        HubError::RateLimited { .. } => Some("try again later; with HF_TOKEN the limit is higher".to_owned()),
        HubError::Unreachable { message, .. }
            if message.contains("certificate") || message.contains("Issuer") =>
        {
            Some(
                "set SSL_CERT_FILE to a PEM file with the authority that signs here, e.g. a company's"
                    .to_owned(),
            )
        }
        HubError::Unreachable { .. } => {
            Some("check the network, HTTPS_PROXY, and HF_ENDPOINT if you use a mirror".to_owned())
        }
        HubError::Changed { .. } | HubError::WrongHash { .. } => Some("try again".to_owned()),
        HubError::DiskFull { needed: 0, .. } => Some(
            "free some space, or set HF_HUB_CACHE to a folder on another disk; then repeat it".to_owned(),
        ),
        HubError::DiskFull { needed, free, .. } => {
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let (needed, free) = (gib(*needed), gib(free.unwrap_or_default()));
            Some(format!(
                "{needed:.1} GiB are needed and {free:.1} GiB are free; set HF_HUB_CACHE to a folder on another disk"
            ))
        }
        HubError::Files { is_denied: true, .. } => {
            Some("set HF_HUB_CACHE to a folder that you may write".to_owned())
        }
        HubError::Disabled { .. }
        | HubError::NoModel { .. }
        | HubError::Unexpected { .. }
        | HubError::Files { .. }
        | HubError::Setting { .. }
        | HubError::Cancelled => None,
    }
}

/// Writes errors of the system like all others: `permission denied`, not `Permission denied (os error 13)`.
pub fn plain(message: &str) -> Cow<'_, str> {
    const MARK: &str = " (os error ";
    let mut text = Cow::Borrowed(message);
    while let Some(at) = text.find(MARK) {
        let (before, number) = (&text[..at], &text[at + MARK.len()..]);
        let Some(digits) = number.find(')').filter(|end| number[..*end].bytes().all(|b| b.is_ascii_digit()))
        else {
            break;
        };
        let start = before.rfind([':', '(', '"', '\n']).map_or(0, |at| at + 1);
        let start = start + before[start..].len() - before[start..].trim_start().len();
        let mut words = before[start..].chars();
        let first: String = words.next().into_iter().flat_map(char::to_lowercase).collect();
        let rest = &number[digits + 1..];
        text = format!("{}{first}{}{rest}", &before[..start], words.as_str()).into();
    }
    text
}

/// Returns the candidate that was probably meant: similar, or different by one letter or two swapped ones.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let likeness = |other: &str| {
        let is_slip = other.len() > 2 && strsim::damerau_levenshtein(name, other) == 1;
        strsim::jaro_winkler(name, other) + f64::from(u8::from(is_slip))
    };
    let near = candidates.into_iter().map(|other| (likeness(other), other));
    near.filter(|(likeness, _)| *likeness > 0.75).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other)
}

fn fits(largest_context: Option<usize>) -> String {
    match largest_context {
        Some(tokens) => format!("--ctx {tokens} is the largest context that fits"),
        None => "no context fits; choose a smaller model or --quantize it".to_owned(),
    }
}

fn did_you_mean(candidates: &[String]) -> Option<String> {
    (!candidates.is_empty()).then(|| format!("did you mean {}?", candidates.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_is_said_once_and_in_order() {
        let inner = LoadError::NotFound("model.gguf".into());
        let error = CommandError::from(Error::Load(inner)).context("loading the model");
        assert_eq!(error.to_string(), "loading the model: model.gguf: no such file or directory");
        assert_eq!(error.kind.code(), 66);
    }

    #[test]
    fn slips_of_the_finger_find_what_was_meant() {
        let names = ["job", "work", "summarize"];
        for (given, meant) in [("jbo", "job"), ("wrok", "work"), ("sumarise", "summarize"), ("works", "work")]
        {
            assert_eq!(nearest(given, names), Some(meant), "{given}");
        }
        assert_eq!((nearest("zzz", names), nearest("x", []), nearest("b", ["a"])), (None, None, None));
    }

    #[test]
    fn the_systems_errors_are_written_as_our_own() {
        let check = |message: &str, expected: &str| assert_eq!(plain(message), expected);
        check("Permission denied (os error 13)", "permission denied");
        check("a/b: No such file or directory (os error 2)", "a/b: no such file or directory");
        check("x: Is a directory (os error 21); y: Too big (os error 7)", "x: is a directory; y: too big");
        check("it said (os error x)", "it said (os error x)");
        check("Nothing of the kind", "Nothing of the kind");
        let error = CommandError::reading(Path::new("f"), io::Error::from_raw_os_error(2));
        assert_eq!(
            (error.kind, error.to_string().as_str()),
            (Kind::NotFound, "f: no such file or directory")
        );
        let denied = CommandError::reading(Path::new("f"), io::ErrorKind::PermissionDenied.into());
        assert_eq!(denied.kind, Kind::Auth);
        assert_eq!(CommandError::from(LoadError::Denied("f".into())).kind, Kind::Auth);
    }

    #[test]
    fn too_big_says_what_fits() {
        let error = LoadError::TooBig { needed: 9, available: 5, context: 4096, largest_context: Some(1024) };
        let error = CommandError::from(error);
        assert_eq!(error.kind, Kind::Temporary);
        assert_eq!(error.hint_text(), Some("--ctx 1024 is the largest context that fits"));
    }

    #[test]
    fn what_is_no_number_is_the_models_fault() {
        let error = CommandError::from(Error::NotFinite("NaN"));
        assert_eq!((error.kind, error.to_string().as_str()), (Kind::BadData, "the model's logits hold NaN"));
        assert!(error.hint_text().is_some_and(|hint| hint.contains("damaged")));
        assert_eq!(CommandError::from(Error::Backend("x".to_owned())).kind, Kind::Failure);
    }

    #[test]
    fn failed_requests_have_exit_codes() {
        let status = |code| HttpFailure::Status { code, message: String::new(), retry_after: None };
        let unreachable = HttpFailure::Unreachable("refused".to_owned());
        for (failure, kind, message) in [
            (unreachable, Kind::Unavailable, "cannot connect to http://h: refused"),
            (status(401), Kind::Auth, "http://h: "),
            (status(500), Kind::Failure, "http://h: "),
        ] {
            let error = BenchError::Request { url: "http://h".to_owned(), failure: failure.into() };
            let error = CommandError::from(error);
            assert_eq!(error.kind, kind);
            assert!(error.to_string().starts_with(message), "{error}");
        }
    }

    #[test]
    fn codes_are_the_documented_ones_and_distinct() {
        let exits = [
            Exit::Success,
            Kind::Failure.into(),
            Kind::Usage.into(),
            Exit::Cut,
            Exit::FailedRows,
            Kind::BadData.into(),
            Kind::NotFound.into(),
            Kind::Unavailable.into(),
            Kind::Bug.into(),
            Kind::Io.into(),
            Kind::Temporary.into(),
            Kind::Auth.into(),
            Kind::Config.into(),
            Exit::Signal(1),
            Exit::Signal(2),
            Exit::Signal(15),
        ];
        let codes: Vec<_> = exits.into_iter().map(Exit::code).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 65, 66, 69, 70, 74, 75, 77, 78, 129, 130, 143]);
        for code in codes {
            assert!(super::super::LONG_HELP.contains(&format!("\n  {code:<4} ")), "{code} is documented");
        }
    }
}
