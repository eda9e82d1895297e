//! Hands the command line to [`llmctl::cli`] and its verdict to the shell.

use std::process::ExitCode;

fn main() -> ExitCode {
    llmctl::cli::main(std::env::args_os().collect())
}
