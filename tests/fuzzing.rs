//! Promise: what fuzzing has found stays fixed. Each file below tests/fuzz/found/TARGET is an input that once broke a target; it
//! is replayed here on every run, and so are small changes of sound inputs, so that the targets themselves keep working.

#[path = "fuzz/format_seeds.rs"]
mod format_seeds;
#[path = "fuzz/formats.rs"]
mod formats;
#[path = "fuzz/seeds.rs"]
mod seeds;
#[path = "fuzz/server.rs"]
mod server;
#[path = "fuzz/targets.rs"]
mod targets;

use targets::TARGETS;
pub use targets::framed;

use crate::common::prelude::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

#[test]
fn what_was_found_once_is_found_no_more() {
    let known: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    for entry in std::fs::read_dir(folder().join("found")).into_iter().flatten().flatten() {
        let name = entry.file_name();
        assert!(known.iter().any(|known| name == **known), "no target is called {name:?}");
    }
    for (name, target) in TARGETS {
        for path in files(&folder().join("found").join(name)) {
            eprintln!("{}", path.display()); // shown if it fails
            target(&std::fs::read(&path).expect("an input"));
        }
    }
}

/// A target that accepts nothing tests nothing.
#[test]
fn sound_inputs_are_accepted() {
    for target in TARGETS {
        let sound = seeds::seeds(target.0);
        let accepted = sound.iter().filter(|seed| target.1(seed)).count();
        // Each reader of calls takes some notations only, and all of them at least one.
        let expected = if target.0 == "tool_call" { ToolCallFormat::ALL.len() } else { sound.len() };
        assert!(accepted >= expected, "{}: {accepted} of {} are accepted", target.0, sound.len());
    }
}

/// The same changes on every run: what is new is found with coverage, in fuzz/, or with many changes (LLMCTL_FUZZ_CHANGES).
#[test]
fn changed_inputs_break_nothing() {
    let asked = std::env::var("LLMCTL_FUZZ_CHANGES").ok().and_then(|count| count.parse().ok());
    let num_changes: usize = asked.unwrap_or(300);
    for (number, (name, target)) in TARGETS.iter().enumerate() {
        let sound = seeds::seeds(name);
        let mut random = Random(number as u64);
        for _ in 0..num_changes {
            let mut input = sound[random.below(sound.len())].clone();
            (0..=random.below(4)).for_each(|_| change(&mut input, &mut random));
            target(&input);
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }
}

fn change(input: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(input.len());
    let end = at + random.below(8.min(input.len() - at)) + usize::from(at < input.len());
    match random.below(5) {
        0 => drop(input.drain(at..end)),
        1 => drop(input.splice(at..at, input[at..end].to_vec())),
        2 => input.truncate(at),
        _ if input.is_empty() => input.push(b'{'),
        3 => input[at] ^= 1 << random.below(8),
        _ => input[at] = *[0, 0xff, b'"', b'{', b'9', b'\n'].get(random.below(6)).expect("six"),
    }
}
