//! `llmctl man`: manual pages in roff, made from the command line's own definition.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};

use super::error::{CommandError, Exit, Kind};
use super::report::print;

/// Print the manual page, or write one for each subcommand
#[derive(Debug, Clone, Args)]
#[command(after_long_help = "\
Examples:
  llmctl man | man -l -
  llmctl man --out ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Write llmctl.1, llmctl-run.1 and so on into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

pub fn run(args: ManArgs, command: Command) -> Result<Exit, CommandError> {
    // `help` would be a page that says nothing of its own.
    let mut command = command.disable_help_subcommand(true);
    match args.out {
        Some(folder) => {
            let written =
                fs::create_dir_all(&folder).and_then(|()| clap_mangen::generate_to(command, &folder));
            written
                .map_err(|error| CommandError::new(Kind::Io, error).context(folder.display().to_string()))?;
            Ok(Exit::Success)
        }
        None => {
            command.build();
            let mut page = Vec::new();
            let rendered = clap_mangen::Man::new(command).render(&mut page);
            rendered.map_err(|error| CommandError::new(Kind::Bug, error))?;
            print(&String::from_utf8_lossy(&page))
        }
    }
}
