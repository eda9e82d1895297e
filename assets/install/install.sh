#!/bin/sh
# Installs llmctl's newest release for Linux or macOS: curl -fsSL URL | sh
#
#   LLMCTL_VERSION       a version such as 0.1.0; the newest by default
#   LLMCTL_INSTALL_DIR   folder of the program; ~/.local/bin by default
#   LLMCTL_RELEASES      where releases are; GitHub by default
#
# The archive is compared with the release's SHA256SUMS before anything is unpacked. Nothing outside the folder is changed: the script
# neither asks for root nor edits the shell's files. It runs only after it was read to its end, so that a cut download does nothing.
set -eu

fail() {
    echo "llmctl: $*" >&2
    exit 1
}

need() {
    command -v "$1" > /dev/null 2>&1 || fail "this script needs $1"
}

target() {
    system=$(uname -s)
    processor=$(uname -m)
    case $processor in
        x86_64 | amd64) processor=x86_64 ;;
        arm64 | aarch64) processor=aarch64 ;;
        *) fail "no release is built for the processor $processor; build it: cargo install --git https://github.com/llmctl/llmctl --locked" ;;
    esac
    case $system in
        Linux)
            # ldd of musl names itself on stderr.
            if ldd --version 2>&1 | grep -qi musl; then
                fail "releases for Linux need glibc 2.36 or newer, and this system has musl; build it: cargo install --git https://github.com/llmctl/llmctl --locked"
            fi
            echo "$processor-unknown-linux-gnu"
            ;;
        Darwin) echo "$processor-apple-darwin" ;;
        *) fail "no release is built for $system; for Windows see install.ps1" ;;
    esac
}

fetch() {
    if command -v curl > /dev/null 2>&1; then
        curl --fail --silent --show-error --location --retry 3 --output "$2" "$1"
    else
        wget --quiet --tries 3 --output-document "$2" "$1"
    fi || fail "cannot download $1"
}

sum() {
    if command -v sha256sum > /dev/null 2>&1; then
        sha256sum "$1"
    else
        shasum -a 256 "$1"
    fi | cut -d ' ' -f 1
}

install_llmctl() {
    command -v curl > /dev/null 2>&1 || command -v wget > /dev/null 2>&1 || fail "this script needs curl or wget"
    command -v sha256sum > /dev/null 2>&1 || command -v shasum > /dev/null 2>&1 || fail "this script needs sha256sum or shasum"
    need tar
    need gzip

    releases=${LLMCTL_RELEASES:-https://github.com/llmctl/llmctl/releases}
    if [ -n "${LLMCTL_VERSION:-}" ]; then
        base=$releases/download/v${LLMCTL_VERSION#v}
    else
        base=$releases/latest/download
    fi
    folder=${LLMCTL_INSTALL_DIR:-$HOME/.local/bin}
    target=$(target)
    archive=llmctl-$target.tar.gz

    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 1' HUP INT TERM
    fetch "$base/SHA256SUMS" "$scratch/SHA256SUMS"
    expected=$(awk -v name="$archive" '$2 == name { print $1 }' "$scratch/SHA256SUMS")
    [ -n "$expected" ] || fail "$base has no $archive"
    fetch "$base/$archive" "$scratch/$archive"
    actual=$(sum "$scratch/$archive")
    [ "$actual" = "$expected" ] || fail "$archive has the SHA-256 $actual instead of $expected; nothing was installed"

    tar -xzf "$scratch/$archive" -C "$scratch"
    program=$scratch/llmctl-$target/llmctl
    version=$("$program" --version) || fail "the program does not run on this system; nothing was installed"
    mkdir -p "$folder"
    # Renamed into place, so that a running llmctl keeps its file.
    cp "$program" "$folder/.llmctl.new"
    chmod 755 "$folder/.llmctl.new"
    mv -f "$folder/.llmctl.new" "$folder/llmctl"
    echo "$version is in $folder/llmctl"
    case :$PATH: in
        *:"$folder":*) ;;
        *) echo "add the folder to PATH: export PATH=\"$folder:\$PATH\"" ;;
    esac
    echo "next: llmctl chat"
}

install_llmctl
