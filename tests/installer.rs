//! Promise: the installer puts the program of a release where it is asked to, and installs nothing that differs from the release's
//! checksums. The release is packed by the scripts that pack real ones, with a shell script as its program, and is read by `file://`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = r#"#!/bin/sh
case $1 in
    --version) echo "llmctl 9.9.9" ;;
    man) echo page > "$3/llmctl.1" ;;
    completions) echo words ;;
esac
"#;

fn script(path: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(path));
    command.stdin(Stdio::null());
    command
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn succeeded(mut command: Command) {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output));
}

/// A release below `latest/download` of a folder, and a home to install into; `None` where the installer cannot run.
struct Release(tempfile::TempDir);

impl Release {
    fn new() -> Option<Self> {
        let has_curl = Command::new("curl").arg("--version").output().is_ok();
        let is_linux = cfg!(all(target_os = "linux", target_env = "gnu"));
        if !is_linux || !has_curl {
            crate::common::skip("the installer's test needs Linux with glibc, and curl");
            return None;
        }
        let release = Self(tempfile::tempdir().expect("a folder"));
        fs::create_dir_all(release.files()).expect("a folder");
        let program = release.0.path().join("llmctl");
        fs::write(&program, PROGRAM).expect("a file");
        succeeded({
            let mut chmod = Command::new("chmod");
            chmod.arg("755").arg(&program);
            chmod
        });
        let mut archive = script(".ci/release/archive");
        archive.arg(&program).arg(Self::target()).arg(release.files());
        succeeded(archive);
        let mut sums = script(".ci/release/sums");
        sums.arg(release.files());
        succeeded(sums);
        Some(release)
    }

    fn target() -> String {
        format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
    }

    fn files(&self) -> PathBuf {
        self.0.path().join("releases/latest/download")
    }

    fn archive(&self) -> PathBuf {
        self.files().join(format!("llmctl-{}.tar.gz", Self::target()))
    }

    fn installed(&self) -> PathBuf {
        self.0.path().join(".local/bin/llmctl")
    }

    fn install(&self) -> Output {
        let mut command = Command::new("sh");
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.0.path());
        command.env("LLMCTL_RELEASES", format!("file://{}", self.0.path().join("releases").display()));
        let installer =
            fs::File::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/install/install.sh"));
        command.stdin(installer.expect("the installer"));
        command.output().expect("sh starts")
    }

    fn refuses(&self, reason: &str) {
        let output = self.install();
        let said = text(&output);
        assert!(!output.status.success() && said.contains(reason), "{reason:?} is not in {said}");
        assert!(!self.0.path().join(".local").exists(), "{said}");
    }
}

#[test]
fn the_installer_installs_a_release() {
    let Some(release) = Release::new() else { return };
    let output = release.install();
    let said = text(&output);
    assert!(output.status.success() && said.contains("llmctl 9.9.9 is in"), "{said}");
    assert!(said.contains("add the folder to PATH") && said.contains("next: llmctl chat"), "{said}");
    let mut program = Command::new(release.installed());
    program.arg("--version");
    succeeded(program);
}

#[test]
fn the_installer_refuses_what_the_checksums_do_not_name() {
    let Some(release) = Release::new() else { return };
    let mut bytes = fs::read(release.archive()).expect("the archive");
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    fs::write(release.archive(), &bytes).expect("written");
    release.refuses("nothing was installed");

    fs::write(release.files().join("SHA256SUMS"), "").expect("written");
    release.refuses("has no llmctl-");
    fs::remove_file(release.files().join("SHA256SUMS")).expect("removed");
    release.refuses("cannot download");
}
