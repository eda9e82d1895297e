//! `llmctl man`: manual pages in roff, made from the command line's own definition.

use std::fs;
use std::path::{Path, PathBuf};

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
    match args.out {
        Some(folder) => {
            fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
            write_pages(&folder, "llmctl", command)?;
            Ok(Exit::Success)
        }
        None => print(&String::from_utf8_lossy(&page("llmctl", command))),
    }
}

fn failed(path: &Path, error: std::io::Error) -> CommandError {
    CommandError::new(Kind::Io, error).context(path.display().to_string())
}

fn page(name: &str, command: Command) -> Vec<u8> {
    let mut page = Vec::new();
    let man = clap_mangen::Man::new(command.name(name.to_owned()));
    man.render(&mut page).expect("a Vec takes all");
    page
}

fn write_pages(folder: &Path, name: &str, command: Command) -> Result<(), CommandError> {
    for subcommand in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(folder, &format!("{name}-{}", subcommand.get_name()), subcommand.clone())?;
    }
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(name, command)).map_err(|error| failed(&path, error))
}
