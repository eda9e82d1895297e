//! The coding agents that `launch` starts: one row each, with the settings that point it at a server.
//!
//! Invariants: all files lie in a folder of llmctl's own, which the agent's variable names, so that none of
//! the user's is read for settings or changed. The key is in the environment only. Every row has its agent's
//! switches for working without a network.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use llmctl_base::private_files::{private_file, private_folder};

/// Most tokens that an agent is set to ask for in one answer; fewer with a small context.
const MAX_ANSWER_TOKENS: usize = 16_384;

/// One coding agent. Values, arguments and files may hold the placeholders of [`LaunchTarget`]: `@url@`, `@key@`, `@model@`,
/// `@context@`, `@answer@`, `@inputs@` for what the model reads, as items of a JSON list, and `@folder@` for the folder of its files.
#[derive(Debug)]
pub struct Agent {
    /// The name in `llmctl launch NAME`.
    pub name: &'static str,
    pub program: &'static str,
    /// Its package of npm.
    pub package: &'static str,
    /// The endpoint that it speaks to.
    pub endpoint: &'static str,
    pub variables: &'static [(&'static str, &'static str)],
    /// Arguments before the user's.
    pub arguments: &'static [&'static str],
    pub files: &'static [AgentFile],
}

#[derive(Debug)]
pub struct AgentFile {
    pub name: &'static str,
    pub content: &'static str,
    /// The agent keeps its own state in it, so that it is written only where it is missing.
    pub is_kept: bool,
}

/// The agents, in alphabetical order.
pub const AGENTS: &[Agent] = &[
    Agent {
        name: "claude",
        program: "claude",
        package: "@anthropic-ai/claude-code",
        endpoint: "/v1/messages",
        variables: &[
            ("CLAUDE_CONFIG_DIR", "@folder@"),
            ("ANTHROPIC_BASE_URL", "@url@"),
            ("ANTHROPIC_AUTH_TOKEN", "@key@"),
            ("ANTHROPIC_API_KEY", ""),
            ("ANTHROPIC_MODEL", "@model@"),
            ("ANTHROPIC_DEFAULT_OPUS_MODEL", "@model@"),
            ("ANTHROPIC_DEFAULT_SONNET_MODEL", "@model@"),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "@model@"),
            ("CLAUDE_CODE_SUBAGENT_MODEL", "@model@"),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "@context@"),
            ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "@context@"),
            ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "@answer@"),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("CLAUDE_CODE_TOTAL_TOKENS_REMINDER", "off"),
            ("DISABLE_AUTOUPDATER", "1"),
        ],
        arguments: &[],
        files: &[AgentFile {
            name: ".claude.json",
            content: "{\"hasCompletedOnboarding\": true}\n",
            is_kept: true,
        }],
    },
    Agent {
        name: "cline",
        program: "cline",
        package: "cline",
        endpoint: "/v1/chat/completions",
        variables: &[("OPENAI_API_KEY", "@key@"), ("CLINE_NO_AUTO_UPDATE", "1")],
        // With a folder of its own it starts no daemon, which would outlive it and go on with the first key.
        arguments: &["--data-dir", "@folder@", "-P", "openai-compatible"],
        files: &[AgentFile {
            name: "settings/providers.json",
            content: include_str!("cline-providers.json"),
            is_kept: false,
        }],
    },
    Agent {
        name: "codex",
        program: "codex",
        package: "@openai/codex",
        endpoint: "/v1/responses",
        variables: &[("CODEX_HOME", "@folder@"), ("LLMCTL_API_KEY", "@key@")],
        arguments: &[],
        files: &[
            AgentFile { name: "config.toml", content: include_str!("codex.toml"), is_kept: false },
            AgentFile { name: "models.json", content: include_str!("codex-models.json"), is_kept: false },
        ],
    },
    Agent {
        name: "copilot",
        program: "copilot",
        package: "@github/copilot",
        endpoint: "/v1/messages",
        variables: &[
            ("COPILOT_HOME", "@folder@"),
            // The other types send reasoning twice, or a field of their own in a continued conversation.
            ("COPILOT_PROVIDER_TYPE", "anthropic"),
            ("COPILOT_PROVIDER_BASE_URL", "@url@"),
            ("COPILOT_PROVIDER_API_KEY", "@key@"),
            ("COPILOT_PROVIDER_HEADERS", "x-session-affinity: copilot"),
            ("COPILOT_MODEL", "@model@"),
            ("COPILOT_PROVIDER_MAX_PROMPT_TOKENS", "@context@"),
            ("COPILOT_PROVIDER_MAX_OUTPUT_TOKENS", "@answer@"),
            ("COPILOT_OFFLINE", "true"),
            ("COPILOT_AUTO_UPDATE", "false"),
        ],
        arguments: &[],
        files: &[],
    },
    Agent {
        name: "droid",
        program: "droid",
        package: "droid",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("FACTORY_HOME_OVERRIDE", "@folder@"),
            ("LLMCTL_API_KEY", "@key@"),
            ("FACTORY_AIRGAP_ENABLED", "true"),
            ("FACTORY_DROID_AUTO_UPDATE_ENABLED", "false"),
        ],
        arguments: &[],
        files: &[AgentFile {
            name: ".factory/settings.json",
            content: include_str!("droid.json"),
            is_kept: false,
        }],
    },
    Agent {
        name: "goose",
        program: "goose",
        package: "@aaif/goose-binary-linux-x64",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("GOOSE_PATH_ROOT", "@folder@"),
            ("GOOSE_PROVIDER", "openai"),
            ("GOOSE_MODEL", "@model@"),
            ("GOOSE_CONTEXT_LIMIT", "@context@"),
            ("GOOSE_MAX_TOKENS", "@answer@"),
            ("OPENAI_HOST", "@url@"),
            ("OPENAI_API_KEY", "@key@"),
            ("OPENAI_CUSTOM_HEADERS", "x-session-affinity=goose"),
            ("GOOSE_DISABLE_KEYRING", "1"),
        ],
        arguments: &[],
        files: &[AgentFile {
            // Without a file it asks for a provider first. JSON is YAML.
            name: "config/config.yaml",
            content: "{\"GOOSE_TELEMETRY_ENABLED\": false}\n",
            is_kept: true,
        }],
    },
    Agent {
        name: "kimi",
        program: "kimi",
        package: "@moonshot-ai/kimi-code",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("KIMI_CODE_HOME", "@folder@"),
            ("LLMCTL_API_KEY", "@key@"),
            ("KIMI_CODE_NO_AUTO_UPDATE", "1"),
        ],
        arguments: &[],
        files: &[AgentFile { name: "config.toml", content: include_str!("kimi.toml"), is_kept: false }],
    },
    Agent {
        name: "opencode",
        program: "opencode",
        package: "opencode-ai",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("OPENCODE_CONFIG", "@folder@/opencode.json"),
            ("LLMCTL_API_KEY", "@key@"),
            ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
            ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
            ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
            ("OPENCODE_DISABLE_DEFAULT_PLUGINS", "1"),
        ],
        arguments: &[],
        files: &[AgentFile { name: "opencode.json", content: include_str!("opencode.json"), is_kept: false }],
    },
    Agent {
        name: "pi",
        program: "pi",
        package: "@earendil-works/pi-coding-agent",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("PI_CODING_AGENT_DIR", "@folder@"),
            ("LLMCTL_API_KEY", "@key@"),
            ("PI_OFFLINE", "1"),
            ("PI_TELEMETRY", "0"),
        ],
        arguments: &["--provider", "llmctl", "--model", "@model@"],
        files: &[AgentFile { name: "models.json", content: include_str!("pi-models.json"), is_kept: false }],
    },
    Agent {
        name: "qwen",
        program: "qwen",
        package: "@qwen-code/qwen-code",
        endpoint: "/v1/chat/completions",
        variables: &[
            ("QWEN_HOME", "@folder@"),
            ("OPENAI_BASE_URL", "@url@/v1"),
            ("OPENAI_API_KEY", "@key@"),
            ("OPENAI_MODEL", "@model@"),
        ],
        arguments: &["--auth-type", "openai"],
        files: &[AgentFile { name: "settings.json", content: include_str!("qwen.json"), is_kept: false }],
    },
];

/// A server that an agent is set to.
#[derive(Debug, Clone)]
pub struct LaunchTarget {
    /// `http://ADDRESS:PORT`, without a path.
    pub url: String,
    pub key: String,
    pub model: String,
    pub context_tokens: usize,
    /// The model reads images.
    pub sees: bool,
}

/// An agent's settings for one server.
#[derive(Debug)]
pub struct AgentSettings {
    pub variables: Vec<(&'static str, String)>,
    pub arguments: Vec<String>,
    pub files: Vec<SettingsFile>,
}

#[derive(Debug)]
pub struct SettingsFile {
    pub path: PathBuf,
    pub content: String,
    is_kept: bool,
}

impl Agent {
    pub fn find(name: &str) -> Option<&'static Agent> {
        AGENTS.iter().find(|agent| agent.name == name)
    }

    /// Returns how to install it.
    pub fn install_command(&self) -> String {
        format!("npm install -g {}", self.package)
    }

    /// Fills in the agent's settings; its files are meant for `folder`.
    pub fn settings(&self, target: &LaunchTarget, folder: &Path) -> AgentSettings {
        let plain = |text: &str| fill(text, target, folder, str::to_owned);
        let file = |file: &AgentFile| SettingsFile {
            path: folder.join(file.name),
            content: fill(file.content, target, folder, quoted),
            is_kept: file.is_kept,
        };
        AgentSettings {
            variables: self.variables.iter().map(|(name, value)| (*name, plain(value))).collect(),
            arguments: self.arguments.iter().map(|argument| plain(argument)).collect(),
            files: self.files.iter().map(file).collect(),
        }
    }
}

impl AgentSettings {
    /// Writes the files, for their owner only.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&self) -> io::Result<()> {
        for file in &self.files {
            if let Some(folder) = file.path.parent() {
                private_folder(folder, true)?;
            }
            if !(file.is_kept && file.path.exists()) {
                let mut options = OpenOptions::new();
                let options = options.write(true).create(true).truncate(true);
                private_file(options, &file.path)?.write_all(file.content.as_bytes())?;
            }
        }
        Ok(())
    }
}

/// Replaces the placeholders; `spell` writes a text as `template` needs it.
fn fill(template: &str, target: &LaunchTarget, folder: &Path, spell: fn(&str) -> String) -> String {
    let inputs = if target.sees { r#""text", "image""# } else { r#""text""# };
    let answer_tokens = MAX_ANSWER_TOKENS.min(target.context_tokens / 4);
    [
        ("@url@", target.url.clone()),
        ("@key@", target.key.clone()),
        ("@model@", target.model.clone()),
        ("@context@", target.context_tokens.to_string()),
        ("@answer@", answer_tokens.to_string()),
        ("@folder@", folder.display().to_string()),
    ]
    .into_iter()
    .fold(template.replace("@inputs@", inputs), |text, (placeholder, value)| {
        text.replace(placeholder, &spell(&value))
    })
}

/// Returns the inside of a string of JSON, which is one of TOML as well.
fn quoted(text: &str) -> String {
    let json = Value::from(text).to_string();
    json[1..json.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> LaunchTarget {
        LaunchTarget {
            url: "http://127.0.0.1:1".to_owned(),
            key: "sk-secret".to_owned(),
            model: "a\"b\\c".to_owned(),
            context_tokens: 32_768,
            sees: true,
        }
    }

    #[test]
    fn agents_that_ask_are_told_of_images() {
        let told = |name: &str, sees| {
            let settings = Agent::find(name)
                .expect("a row")
                .settings(&LaunchTarget { sees, ..target() }, Path::new("/f"));
            settings.files.iter().any(|file| file.content.contains(r#"["text", "image"]"#))
        };
        for name in ["codex", "opencode", "pi"] {
            assert!(told(name, true) && !told(name, false), "{name}");
        }
    }

    #[test]
    fn files_are_well_formed_whatever_the_model_is_called() {
        for agent in AGENTS {
            let settings = agent.settings(&target(), Path::new("/f"));
            for SettingsFile { path, content, .. } in &settings.files {
                let is_toml = path.extension().is_some_and(|extension| extension == "toml");
                let value: Value = match is_toml {
                    true => toml::from_str(content).expect("TOML"),
                    false => serde_json::from_str(content).expect("JSON"),
                };
                assert!(value.is_object(), "{}", path.display());
            }
            let all = format!("{settings:?}");
            for placeholder in ["@url@", "@key@", "@model@", "@context@", "@answer@", "@folder@", "@inputs@"]
            {
                assert!(!all.contains(placeholder), "{placeholder} is left in {all}");
            }
        }
    }

    #[test]
    fn every_agent_gets_url_key_model_and_context_and_the_key_in_its_environment_only() {
        for agent in AGENTS {
            let settings = agent.settings(&target(), Path::new("/f"));
            let variables: Vec<&str> = settings.variables.iter().map(|(_, value)| value.as_str()).collect();
            let files: String = settings.files.iter().map(|file| file.content.as_str()).collect();
            assert!(variables.contains(&"sk-secret"), "{}", agent.name);
            assert!(!files.contains("sk-secret"), "{}", agent.name);
            let everywhere = format!("{variables:?} {:?} {files}", settings.arguments);
            for expected in ["http://127.0.0.1:1", "a\\\"b", "32768", "/f"] {
                assert!(everywhere.contains(expected), "{} is not told {expected}: {everywhere}", agent.name);
            }
        }
    }

    #[test]
    fn files_are_private_and_an_agents_own_state_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let settings =
            Agent::find("claude").expect("a row").settings(&target(), &folder.path().join("claude"));
        settings.write().expect("written");
        let path = &settings.files[0].path;
        std::fs::write(path, "its own").expect("a file");
        settings.write().expect("written");
        assert_eq!(std::fs::read_to_string(path).expect("a file"), "its own");
        #[cfg(unix)]
        assert_eq!(llmctl_base::private_files::mode_for_others(path), None);
    }
}
