# The commands of README.md and .ci/run, one recipe each. `just` lists them.

default:
    @just --list

# Everything that CI runs
ci:
    .ci/run

# The main job, on MODEL (any .gguf file, model folder or cached org/repo)
run:
    cargo run --release --locked -- run --model "${MODEL:-tests/parity/llama}" --raw "Once upon a time" --max-tokens 64

# Unit, integration and documentation tests
test:
    cargo test --locked

fmt:
    cargo fmt --check

lint:
    cargo clippy --all-targets --locked -- -D warnings

# Licences, advisories and sources of dependencies (needs cargo-deny)
deny:
    cargo deny check

# A release binary that knows its commit
release:
    LLMCTL_COMMIT="$(git rev-parse --short HEAD)" cargo build --release --locked
