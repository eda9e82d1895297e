//! The targets of tests/fuzz/targets.rs under libFuzzer; `fuzz_targets/` has one line for each.

#[path = "../../tests/fuzz/format_seeds.rs"]
mod format_seeds;
#[path = "../../tests/fuzz/formats.rs"]
mod formats;
#[path = "../../tests/fuzz/seeds.rs"]
mod seeds;
#[path = "../../tests/fuzz/server.rs"]
mod server;
#[path = "../../tests/fuzz/targets.rs"]
mod targets;

#[path = "../../tests/common/gguf.rs"]
pub mod gguf;
#[path = "../../tests/common/stored_tensors.rs"]
pub mod stored_tensors;

/// The helpers of the tests that seeds and targets use, at the path that they name.
mod common {
    pub use super::{gguf, stored_tensors};
}

pub use libfuzzer_sys;

/// Puts the target's sound inputs into its corpus, which libFuzzer reads next.
pub fn plant(target: &str) {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    if std::fs::create_dir_all(&corpus).is_ok() {
        for (at, seed) in seeds::seeds(target).iter().enumerate() {
            let _ = std::fs::write(corpus.join(format!("seed-{at}")), seed);
        }
    }
}

/// Runs the target of this name.
pub fn run(target: &str, data: &[u8]) {
    let (_, function) =
        targets::TARGETS.iter().find(|(name, _)| *name == target).expect("a target of the table");
    function(data);
}

/// The program for one target. libFuzzer's own hook ends the process at every panic, also at one that the product catches and
/// turns into an error (a tokenizer's): what counts is a panic that comes out of the target, which ends it too.
#[macro_export]
macro_rules! fuzz {
    ($target:ident) => {
        use $crate::libfuzzer_sys;
        libfuzzer_sys::fuzz_target!(
            init: {
                std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
                $crate::plant(stringify!($target));
            },
            |data: &[u8]| {
                $crate::run(stringify!($target), data);
            }
        );
    };
}
