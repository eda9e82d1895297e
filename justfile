# The commands of README.md and .ci/run, one recipe each. `just` lists them.

default:
    @just --list

# Everything that CI runs
ci:
    .ci/run

# The main job, with the model in the binary
run:
    cargo run --release --locked -- run "How do I save a conversation?"

# Unit, integration and documentation tests
test:
    cargo test --workspace --locked

fmt:
    cargo fmt --check

lint:
    cargo clippy --workspace --all-targets --locked -- -D warnings
    cargo clippy -p llmctl -p llmctl-models -p llmctl-serve --lib --locked --no-default-features --features llmctl/otel -- -D warnings

# Licences, advisories and sources of dependencies (needs cargo-deny)
deny:
    cargo deny check

# Kernels, parity and a smoke of the binary under qemu (needs a cross toolchain for aarch64)
aarch64:
    .ci/aarch64

# A release binary that knows its commit
release:
    LLMCTL_COMMIT="$(git rev-parse --short HEAD)" cargo build --release --locked
