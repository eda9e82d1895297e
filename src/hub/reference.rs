//! The grammar of model references. Pure: it does not check whether a model exists.
//!
//! ```text
//! path       ./file.gguf  /dir  ../dir  ~/dir  a/b/c  file.gguf
//! hub        [hf:] [org/] repo [@revision] [:quant | :file.gguf | :safetensors]
//! ollama     ollama:[host/][namespace/]model[:tag]
//! ```
//! Invariant: the parts of a [`HubRef`] can be joined to a path without leaving it: no `..`, no absolute
//! part, no odd character. The rules for names are those of huggingface_hub's `validate_repo_id`.

use std::path::PathBuf;

use super::ollama::OllamaName;
use llmctl_base::error::LoadError;

/// A model reference as written, and its parsed form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRef {
    text: String,
    form: ReferenceForm,
}

/// The possible meanings of a reference, by its form alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ReferenceForm {
    /// A path only.
    Path(PathBuf),
    /// A repository only, because of the `hf:` prefix.
    Hub(HubRef),
    /// A model in ollama's store, because of the `ollama:` prefix.
    Ollama(OllamaName),
    /// An existing path, else an alias, else a repository, unless the inner error explains why it is none.
    Open(Result<HubRef, String>),
}

/// A repository of the hub, with an optional revision and file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRef {
    /// Owner; `None` for a bare name.
    pub org: Option<String>,
    pub repo: String,
    /// Branch, tag or commit (possibly abbreviated); `None` is `main`.
    pub revision: Option<String>,
    pub selector: Option<Selector>,
}

/// Selects one of a repository's GGUF files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// By path inside the repository.
    File(String),
    /// By quantisation, as written (`Q4_K_M`).
    Quant(String),
}

/// Common spellings of the hub's address in front of a repository.
const HUB_PREFIXES: [&str; 5] =
    ["hf:", "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/"];

/// Prefix of a model in ollama's store.
const OLLAMA_PREFIX: &str = "ollama:";

/// The hub's own limit for `org/repo`.
const MAX_REPO_ID: usize = 96;

impl ModelRef {
    /// # Errors
    /// [`LoadError::InvalidReference`] for an empty text and for an `hf:` form that breaks the rules. A text that may
    /// be a path is not refused before it is looked up.
    pub fn parse(text: &str) -> Result<ModelRef, LoadError> {
        let invalid = |message: String| LoadError::InvalidReference { reference: text.to_owned(), message };
        if text.trim().is_empty() {
            return Err(invalid("it is empty".to_owned()));
        }
        let form = if let Some(rest) = HUB_PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix)) {
            ReferenceForm::Hub(HubRef::parse(rest).map_err(invalid)?)
        } else if let Some(name) = text.strip_prefix(OLLAMA_PREFIX) {
            ReferenceForm::Ollama(OllamaName::parse(name).map_err(invalid)?)
        } else if is_path_only(text) {
            ReferenceForm::Path(PathBuf::from(text))
        } else {
            ReferenceForm::Open(HubRef::parse(text))
        };
        Ok(ModelRef { text: text.to_owned(), form })
    }

    /// Returns the text as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn form(&self) -> &ReferenceForm {
        &self.form
    }
}

/// Returns whether only a path is written like this.
fn is_path_only(text: &str) -> bool {
    let starts = ["/", "./", "../", "~/"].iter().any(|start| text.starts_with(start));
    let whole = matches!(text, "." | ".." | "~");
    let plain = !text.contains([':', '@']);
    let file = plain && (text.ends_with(".gguf") || text.ends_with(".safetensors"));
    let deep = plain && text.trim_end_matches('/').matches('/').count() > 1;
    starts || whole || file || deep || (plain && text.ends_with('/'))
}

impl HubRef {
    fn parse(text: &str) -> Result<HubRef, String> {
        let end = text.find(['@', ':']).unwrap_or(text.len());
        let (id, rest) = text.split_at(end);
        let (revision, selector) = match rest.strip_prefix('@') {
            Some(rest) => match rest.split_once(':') {
                Some((revision, selector)) => (Some(revision), Some(selector)),
                None => (Some(rest), None),
            },
            None => (None, rest.strip_prefix(':')),
        };
        let (org, repo) = match id.split_once('/') {
            Some((org, repo)) => (Some(name(org)?), name(repo)?),
            None => (None, name(id)?),
        };
        if id.len() > MAX_REPO_ID {
            return Err(format!("a repository's name has at most {MAX_REPO_ID} characters"));
        }
        let revision = revision.map(|text| checked_path(text, "revision")).transpose()?;
        let selector = selector.map(Selector::parse).transpose()?;
        Ok(HubRef { org, repo, revision, selector })
    }

    /// Returns `org/repo`, or the bare name.
    pub fn repo_id(&self) -> String {
        match &self.org {
            Some(org) => format!("{org}/{}", self.repo),
            None => self.repo.clone(),
        }
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Selector::File(text) | Selector::Quant(text)) = self;
        f.write_str(text)
    }
}

impl Selector {
    fn parse(text: &str) -> Result<Selector, String> {
        if text.to_ascii_lowercase().ends_with(".gguf") {
            return checked_path(text, "file").map(Selector::File);
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.is_empty() || text.len() > 32 || !text.chars().all(plain) {
            return Err(format!("{text:?} is neither a quantisation such as Q4_K_M nor a .gguf file"));
        }
        Ok(Selector::Quant(text.to_owned()))
    }
}

/// Checks the name of an owner or a repository.
fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if text.is_empty() {
        return Err("a repository is written org/name".to_owned());
    }
    if let Some(odd) = text.chars().find(|&c| !plain(c)) {
        return Err(format!("{odd:?} cannot be part of a repository's name"));
    }
    // "--" separates owner and name in the cache's folder names.
    let bad_end = |c: Option<char>| matches!(c, Some('.' | '-'));
    if text.contains("..")
        || text.contains("--")
        || bad_end(text.chars().next())
        || bad_end(text.chars().last())
    {
        return Err(format!("{text:?} cannot be a repository's name"));
    }
    Ok(text.to_owned())
}

/// Checks a relative path of plain components, such as `refs/pr/1` or `BF16/model.gguf`.
fn checked_path(text: &str, what: &str) -> Result<String, String> {
    let component = |part: &str| {
        let odd = |c: char| c.is_control() || matches!(c, '\\' | ':' | '@');
        !part.is_empty() && part != "." && part != ".." && !part.starts_with('-') && !part.contains(odd)
    };
    if text.len() <= 512 && text.split('/').all(component) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} cannot be a {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> Result<String, String> {
        match ModelRef::parse(text).map(|r| r.form) {
            Ok(ReferenceForm::Hub(hub) | ReferenceForm::Open(Ok(hub))) => Ok(format!(
                "{} {} {}",
                hub.repo_id(),
                hub.revision.as_deref().unwrap_or("-"),
                match hub.selector {
                    Some(Selector::File(file)) => format!("file={file}"),
                    Some(Selector::Quant(tag)) => format!("quant={tag}"),
                    None => "-".to_owned(),
                }
            )),
            Ok(ReferenceForm::Open(Err(message))) => Err(message),
            Ok(ReferenceForm::Ollama(name)) => Err(format!("ollama {}", name.short())),
            Ok(ReferenceForm::Path(path)) => Err(format!("path {}", path.display())),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn repositories() {
        for (text, expected) in [
            ("org/repo", "org/repo - -"),
            ("gpt2", "gpt2 - -"),
            ("org/repo:Q4_K_M", "org/repo - quant=Q4_K_M"),
            ("org/repo@v1.0", "org/repo v1.0 -"),
            ("org/repo@refs/pr/3", "org/repo refs/pr/3 -"),
            ("org/repo@abc:UD-Q4_K_XL", "org/repo abc quant=UD-Q4_K_XL"),
            ("hf:org/repo@rev:sub/file.gguf", "org/repo rev file=sub/file.gguf"),
            ("hf:gpt2", "gpt2 - -"),
            ("hf.co/org/repo:q8_0", "org/repo - quant=q8_0"),
            ("https://huggingface.co/org/repo", "org/repo - -"),
            ("Org-1/Some.Repo_2", "Org-1/Some.Repo_2 - -"),
        ] {
            assert_eq!(hub(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn models_of_ollama() {
        assert_eq!(hub("ollama:llama3.2"), Err("ollama llama3.2:latest".to_owned()));
        assert!(hub("ollama:../x").is_err_and(|error| error.contains("\"../x\" is not a model reference")
            || error.contains("cannot be part of the name")));
        assert_eq!(hub("ollama/repo").as_deref(), Ok("ollama/repo - -"));
    }

    #[test]
    fn paths() {
        for text in [".", "..", "./x", "../x", "/x/y", "~/x", "a/b/c", "m.gguf", "dir/m.gguf", "dir/", "~"] {
            assert_eq!(hub(text), Err(format!("path {text}")));
        }
    }

    #[test]
    fn traversal_and_odd_characters_are_refused() {
        for text in [
            "hf:",
            "hf:/etc",
            "hf:../x",
            "hf:org/..",
            "hf:org/../x",
            "hf:org/a--b",
            "hf:org/re po",
            "hf:org/repo@",
            "hf:org/repo@../../x",
            "hf:org/repo@/etc",
            "hf:org/repo:",
            "hf:org/repo:../x.gguf",
            "hf:org/repo:/x.gguf",
            "hf:org/repo:Q4 K",
            "hf:a/b/c",
            "hf:org/.repo",
            "hf:org/repo-",
            "hf:org/r\u{e9}po",
            "hf:org/repo:a@b",
            "hf:org/repo@a@b",
            "hf:org/repo:x\0.gguf",
            "",
            "  ",
        ] {
            let error = ModelRef::parse(text).expect_err(text);
            assert!(matches!(error, LoadError::InvalidReference { .. }), "{text}: {error:?}");
        }
        assert!(ModelRef::parse(&format!("hf:org/{}", "x".repeat(100))).is_err());
    }

    #[test]
    fn what_may_be_a_path_is_not_refused_early() {
        for text in ["my model", "we$ird/name", "ends."] {
            assert!(
                matches!(ModelRef::parse(text).map(|r| r.form), Ok(ReferenceForm::Open(Err(_)))),
                "{text}"
            );
        }
    }
}
