//! The JSON configuration of MCP servers, as Claude Desktop, Cursor and VS Code write it.
//!
//! Invariants: a key that is not known is refused by name; one that other clients know and llmctl has no use
//! for is reported; no value of a variable or header is in a message.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::names::server_name;
use crate::cli::error::{CommandError, Kind};
use crate::cli::terminal::input::read_file;
use llmctl_serve::wire::json::object;

/// Keys of a server that other clients know. They would allow calls unasked, or describe the server, and are reported.
const NOT_USED: &str = "\
alwaysAllow autoApprove description dev gallery icon name note timeout transportType trust version";

/// Variables that a server process gets beside those of its `env`: what programs need to start, and no keys.
pub const PASSED_ON: &str = "\
APPDATA HOME HTTPS_PROXY HTTP_PROXY LANG LC_ALL LC_CTYPE LOCALAPPDATA LOGNAME NO_PROXY PATH PATHEXT SHELL \
SSL_CERT_DIR SSL_CERT_FILE SYSTEMDRIVE SYSTEMROOT TEMP TERM TMPDIR TZ USER USERNAME USERPROFILE \
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR XDG_STATE_HOME http_proxy https_proxy \
no_proxy";

/// Looks a variable of the environment up.
pub type VariableLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Servers of all configuration files, in their order.
#[derive(Default)]
pub struct McpConfig {
    pub servers: Vec<ServerConfig>,
    /// Notices about the files, for the user.
    pub notes: Vec<String>,
}

/// One server.
#[derive(Clone)]
pub struct ServerConfig {
    /// The beginning of its tools' names.
    pub name: String,
    pub transport: TransportConfig,
    /// The server's own names of tools that are not offered.
    pub disabled_tools: Vec<String>,
}

/// Connection to a server. It holds secrets, so it has no `Debug`.
#[derive(Clone)]
pub enum TransportConfig {
    Process(ProcessConfig),
    Http(HttpConfig),
}

/// A command that speaks on its standard input and output.
#[derive(Clone)]
pub struct ProcessConfig {
    pub command: PathBuf,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<PathBuf>,
}

/// A server that is reached with streamable HTTP.
#[derive(Clone)]
pub struct HttpConfig {
    pub url: String,
    pub headers: Vec<(String, String)>,
}

impl McpConfig {
    /// Reads configuration files.
    ///
    /// # Errors
    /// `NotFound` for a file that is missing, `Config` for what is wrong in one.
    pub fn read(paths: &[PathBuf], lookup: VariableLookup<'_>) -> Result<Self, CommandError> {
        let mut config = Self::default();
        for path in paths {
            let text = read_file(path)?;
            let refused = |why: String| Kind::Config.error(format!("{}: {why}", path.display()));
            config.add(&text, path, lookup).map_err(refused)?;
        }
        Ok(config)
    }

    fn add(&mut self, text: &str, path: &Path, lookup: VariableLookup<'_>) -> Result<(), String> {
        let mut members = object(text.as_bytes(), "the file")?;
        let servers = match (members.shift_remove("mcpServers"), members.shift_remove("servers")) {
            (Some(_), Some(_)) => {
                return Err("it has both mcpServers and servers; one of them is read".to_owned());
            }
            (Some(servers), None) | (None, Some(servers)) => servers,
            (None, None) => return Err("it has no mcpServers".to_owned()),
        };
        // Clients keep other settings in the same file, which are none of a server.
        let others: Vec<&str> = members.keys().map(String::as_str).filter(|key| *key != "$schema").collect();
        if !others.is_empty() {
            self.notes.push(format!(
                "{}: only the servers are read, not {}",
                path.display(),
                others.join(", ")
            ));
        }
        let Value::Object(servers) = servers else { return Err("its servers are no object".to_owned()) };
        let folder = path.parent().unwrap_or(Path::new(""));
        for (given, server) in servers {
            let reader = ServerReader { given: &given, path, folder, lookup };
            if let Some((transport, disabled_tools)) =
                reader.read(server, &mut self.notes).map_err(|why| format!("{given}: {why}"))?
            {
                self.push(ServerConfig { name: server_name(&given)?, transport, disabled_tools })?;
            }
        }
        Ok(())
    }

    fn push(&mut self, server: ServerConfig) -> Result<(), String> {
        let name = &server.name;
        if self.servers.iter().any(|other| other.name == *name) {
            return Err(format!("there is another server {name}; the names of its tools would be the same"));
        }
        self.servers.push(server);
        Ok(())
    }
}

/// Reads one server.
struct ServerReader<'a> {
    /// Its name in the file.
    given: &'a str,
    path: &'a Path,
    /// Commands and folders that begin with a dot are below it.
    folder: &'a Path,
    lookup: VariableLookup<'a>,
}

impl ServerReader<'_> {
    /// Returns how the server is reached, and its disabled tools; `None` if it is disabled itself.
    fn read(
        &self,
        server: Value,
        notes: &mut Vec<String>,
    ) -> Result<Option<(TransportConfig, Vec<String>)>, String> {
        let Value::Object(mut members) = server else { return Err("no object".to_owned()) };
        let is_on = |value: Option<Value>, otherwise| match value {
            None => Ok(otherwise),
            Some(Value::Bool(is_on)) => Ok(is_on),
            Some(_) => Err("disabled and enabled are true or false".to_owned()),
        };
        let is_disabled = is_on(members.shift_remove("disabled"), false)?;
        if is_disabled || !is_on(members.shift_remove("enabled"), true)? {
            return Ok(None);
        }
        let transport = self.transport(&mut members)?;
        let disabled_tools = self.list(&mut members, "disabledTools")?;
        self.check_rest(&members, notes)?;
        Ok(Some((transport, disabled_tools)))
    }

    fn transport(&self, members: &mut Map<String, Value>) -> Result<TransportConfig, String> {
        let kind = self.text(members, "type")?;
        let (has_command, has_url) = (members.contains_key("command"), members.contains_key("url"));
        match (kind.as_deref(), has_command, has_url) {
            (Some("sse"), _, _) => {
                Err("type sse, the transport of 2024, is not supported; most such servers have streamable HTTP too, often at /mcp"
                    .to_owned())
            }
            (_, true, true) => Err("it has a command and a url".to_owned()),
            (None | Some("stdio"), true, false) => self.process(members),
            (None | Some("http" | "streamable-http" | "streamableHttp" | "streamable_http"), false, true) => {
                self.http(members)
            }
            (Some("stdio"), false, _) => Err("type stdio needs a command".to_owned()),
            (Some("http" | "streamable-http" | "streamableHttp" | "streamable_http"), _, false) => {
                Err("type http needs a url".to_owned())
            }
            (Some(other), _, _) => Err(format!("unknown type {other:?} (stdio, http)")),
            (None, false, false) => Err("it has neither a command nor a url".to_owned()),
        }
    }

    fn process(&self, members: &mut Map<String, Value>) -> Result<TransportConfig, String> {
        let command = self.text(members, "command")?.unwrap_or_default();
        if command.is_empty() {
            return Err("its command is empty".to_owned());
        }
        let args = self.list(members, "args")?;
        let env = self.texts(members, "env")?.into_iter().collect();
        let cwd = self.text(members, "cwd")?.map(|cwd| self.folder.join(cwd));
        // A command is found in PATH, or beside the file; never in the folder where llmctl happens to run.
        let is_relative = command.contains('/') && !Path::new(&command).is_absolute();
        let command = if is_relative { self.folder.join(command) } else { command.into() };
        let command = if is_relative { std::path::absolute(&command).unwrap_or(command) } else { command };
        Ok(TransportConfig::Process(ProcessConfig { command, args, env, cwd }))
    }

    fn http(&self, members: &mut Map<String, Value>) -> Result<TransportConfig, String> {
        let url = self.text(members, "url")?.unwrap_or_default();
        let headers = self.texts(members, "headers")?;
        Ok(TransportConfig::Http(HttpConfig { url, headers }))
    }

    fn check_rest(&self, members: &Map<String, Value>, notes: &mut Vec<String>) -> Result<(), String> {
        let (known, unknown): (Vec<&String>, Vec<&String>) =
            members.keys().partition(|key| NOT_USED.split(' ').any(|word| word == **key));
        if let Some(key) = unknown.first() {
            return Err(format!(
                "unknown key {key:?} (command, args, env, cwd; url, headers; type, disabled, enabled, disabledTools)"
            ));
        }
        if !known.is_empty() {
            let keys: Vec<&str> = known.iter().map(|key| key.as_str()).collect();
            notes.push(format!("{}: {}: not used: {}", self.path.display(), self.given, keys.join(", ")));
        }
        Ok(())
    }

    /// Takes a text out, with its variables filled in.
    fn text(&self, members: &mut Map<String, Value>, key: &str) -> Result<Option<String>, String> {
        members.shift_remove(key).map(|value| self.filled(value, key)).transpose()
    }

    /// Takes an array of texts out.
    fn list(&self, members: &mut Map<String, Value>, key: &str) -> Result<Vec<String>, String> {
        match members.shift_remove(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(texts)) => texts.into_iter().map(|text| self.filled(text, key)).collect(),
            Some(_) => Err(format!("{key} is no array")),
        }
    }

    /// Takes an object of texts out.
    fn texts(&self, members: &mut Map<String, Value>, key: &str) -> Result<Vec<(String, String)>, String> {
        match members.shift_remove(key) {
            None => Ok(Vec::new()),
            Some(Value::Object(texts)) => {
                let filled = |(name, value)| {
                    let text = self.filled(value, &format!("{key}.{name}"))?;
                    Ok((name, text))
                };
                texts.into_iter().map(filled).collect()
            }
            Some(_) => Err(format!("{key} is no object")),
        }
    }

    fn filled(&self, value: Value, key: &str) -> Result<String, String> {
        match value {
            Value::String(text) => filled(&text, self.lookup).map_err(|why| format!("{key}: {why}")),
            _ => Err(format!("{key} is no text")),
        }
    }
}

/// Fills `${NAME}`, `${env:NAME}` and `${NAME:-otherwise}` in; other dollar signs are themselves.
fn filled(text: &str, lookup: VariableLookup<'_>) -> Result<String, String> {
    let (mut whole, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("${") {
        let (before, after) = rest.split_at(at);
        whole.push_str(before);
        let Some((inner, behind)) = after[2..].split_once('}') else {
            rest = after;
            break;
        };
        whole.push_str(&value_of(inner, lookup)?);
        rest = behind;
    }
    Ok(whole + rest)
}

/// Returns what stands for `${inner}`.
fn value_of(inner: &str, lookup: VariableLookup<'_>) -> Result<String, String> {
    let named = inner.strip_prefix("env:").unwrap_or(inner);
    let (name, otherwise) = match named.split_once(":-") {
        Some((name, otherwise)) => (name, Some(otherwise)),
        None => (named, None),
    };
    if inner.starts_with("input:") {
        return Err(format!("${{{inner}}}: llmctl asks for no inputs; ${{env:NAME}} takes a variable"));
    }
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !is_name {
        return Ok(format!("${{{inner}}}"));
    }
    let value = lookup(name).filter(|value| !value.is_empty()).or_else(|| otherwise.map(str::to_owned));
    value.ok_or_else(|| format!("the variable {name} is not set"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<McpConfig, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mcp.json");
        std::fs::write(&path, text).expect("written");
        let lookup = |name: &str| (name == "TOKEN").then(|| "s3cret".to_owned());
        McpConfig::read(&[path], &lookup).map_err(|error| error.to_string())
    }

    fn process(config: &McpConfig, at: usize) -> &ProcessConfig {
        match &config.servers[at].transport {
            TransportConfig::Process(process) => process,
            TransportConfig::Http(_) => panic!("a url"),
        }
    }

    #[test]
    fn the_forms_of_other_clients_are_read() {
        let config = read(
            r#"{"mcpServers": {
                "files": {"command": "npx", "args": ["-y", "server", "${NONE:-/tmp}"], "env": {"KEY": "a ${env:TOKEN} $1 ${a b}"}},
                "my  server!": {"type": "stdio", "command": "./serve.py", "cwd": "data", "autoApprove": ["x"], "disabledTools": ["rm"]},
                "off": {"command": "x", "disabled": true},
                "web": {"url": "https://host/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}
            }, "theme": "dark"}"#,
        )
        .expect("well-formed");
        let names: Vec<&str> = config.servers.iter().map(|server| server.name.as_str()).collect();
        assert_eq!(names, ["files", "my_server", "web"]);
        let files = process(&config, 0);
        assert_eq!(files.command, Path::new("npx"));
        assert_eq!(files.args, ["-y", "server", "/tmp"]);
        assert_eq!(files.env["KEY"], "a s3cret $1 ${a b}");
        let beside = process(&config, 1);
        assert!(beside.command.is_absolute() && beside.command.ends_with("serve.py"), "{:?}", beside.command);
        assert_eq!(
            config.servers.iter().map(|server| server.disabled_tools.join(" ")).collect::<Vec<_>>(),
            ["", "rm", ""]
        );
        assert!(beside.cwd.as_ref().is_some_and(|cwd| cwd.ends_with("data") && cwd.is_absolute()));
        let TransportConfig::Http(web) = &config.servers[2].transport else { panic!("a command") };
        assert_eq!(web.headers, [("Authorization".to_owned(), "Bearer s3cret".to_owned())]);
        assert!(config.notes[0].contains("not theme") && config.notes[1].contains("not used: autoApprove"));
        let config = read(r#"{"servers": {"a": {"type": "http", "url": "http://x/mcp"}}, "inputs": []}"#)
            .expect("VS Code's");
        assert!(config.servers.len() == 1 && config.notes[0].contains("not inputs"));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let server = |text: &str| format!("{{\"mcpServers\": {{\"one\": {text}}}}}");
        for (text, reason) in [
            ("[]".to_owned(), "the file is not a JSON object"),
            ("{".to_owned(), "is not JSON"),
            ("{}".to_owned(), "it has no mcpServers"),
            (r#"{"mcpServers": {}, "servers": {}}"#.to_owned(), "both mcpServers and servers"),
            (server("{}"), "one: it has neither a command nor a url"),
            (server(r#"{"command": "a", "url": "b"}"#), "one: it has a command and a url"),
            (server(r#"{"command": "a", "argv": []}"#), "one: unknown key \"argv\""),
            (server(r#"{"command": "a", "args": "b"}"#), "one: args is no array"),
            (server(r#"{"command": "a", "disabledTools": {"b": true}}"#), "one: disabledTools is no array"),
            (server(r#"{"command": "a", "env": {"A": 1}}"#), "one: env.A is no text"),
            (
                server(r#"{"command": "a", "env": {"A": "${NONE}"}}"#),
                "one: env.A: the variable NONE is not set",
            ),
            (server(r#"{"command": "a", "args": ["${input:key}"]}"#), "asks for no inputs"),
            (server(r#"{"type": "sse", "url": "http://a"}"#), "one: type sse"),
            (server(r#"{"type": "pigeon", "url": "http://a"}"#), "unknown type \"pigeon\""),
            (server(r#"{"command": "a", "disabled": "no"}"#), "true or false"),
            (
                r#"{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}"#.to_owned(),
                "\"a\" is given twice",
            ),
            (
                r#"{"mcpServers": {"a b": {"command": "x"}, "a_b": {"command": "y"}}}"#.to_owned(),
                "another server a_b",
            ),
            (r#"{"mcpServers": {"!": {"command": "x"}}}"#.to_owned(), "no letter"),
        ] {
            let error = read(&text).map(drop).expect_err(reason);
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn no_secret_is_in_an_error() {
        let error =
            read(r#"{"mcpServers": {"a": {"command": "x", "env": {"K": "${TOKEN}"}, "headers": 1}}}"#)
                .map(drop)
                .expect_err("a key that is not known there");
        assert!(error.contains("unknown key \"headers\"") && !error.contains("s3cret"), "{error}");
    }
}
