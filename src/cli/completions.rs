//! `llmctl completions SHELL`: a completion script on stdout, made from the command line's own definition.

use clap::{Args, Command};
use clap_complete::Shell;

use super::error::{CommandError, Exit};
use super::report::print;

/// Print a completion script for a shell
#[derive(Debug, Clone, Args)]
#[command(after_long_help = "\
Examples:
  llmctl completions bash > ~/.local/share/bash-completion/completions/llmctl
  llmctl completions zsh > \"${fpath[1]}/_llmctl\"
  llmctl completions fish > ~/.config/fish/completions/llmctl.fish")]
pub struct CompletionsArgs {
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

pub fn run(args: CompletionsArgs, mut command: Command) -> Result<Exit, CommandError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "llmctl", &mut script);
    print(&String::from_utf8_lossy(&script))
}
