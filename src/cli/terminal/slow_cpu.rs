//! Words about processors that compute without vector kernels: the same in a note of the commands that load a
//! model, and in `doctor`.

use llmctl_base::machine::cpu_features;
use llmctl_models::load::Isa;

/// The extensions that the slowest vector kernels of x86-64 need together.
const NEEDED: [&str; 3] = ["avx2", "fma", "f16c"];

/// Effect of scalar kernels for the user. Measured against AVX2 on a Zen 5, one thread: products take 15 to
/// 43 times as long for 128 rows, 15 to 30 times for one row.
const EXPECT: &str = "prompts take about 30 times as long as with them, and generation about 15 times";

/// Returns what to expect of the instruction set `used`; `None` if it is not the scalar one.
pub fn slow_kernels(used: Isa) -> Option<String> {
    let features = cpu_features();
    let lacks = features.iter().filter(|feature| NEEDED.contains(&feature.name) && !feature.available);
    let lacks: Vec<&str> = lacks.map(|feature| feature.name).collect();
    words(used, Isa::available().last().unwrap_or(Isa::Scalar), &lacks)
}

/// Words [`slow_kernels`] for a processor whose best instruction set is `best`, and that lacks these of [`NEEDED`].
fn words(used: Isa, best: Isa, lacks: &[&str]) -> Option<String> {
    if used != Isa::Scalar {
        return None;
    }
    if best != Isa::Scalar {
        return Some(format!(
            "--cpu scalar computes without vector instructions ({}): {EXPECT}",
            best.name()
        ));
    }
    if lacks.is_empty() {
        let arch = std::env::consts::ARCH;
        return Some(format!("llmctl has no vector kernels for {arch} processors: {EXPECT}"));
    }
    let lacks = lacks.join(", ");
    Some(format!(
        "this processor is slow for llmctl, because it lacks {lacks}: {EXPECT}; a small model helps"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_names_the_missing_instructions() {
        assert_eq!(words(Isa::Avx2, Isa::Avx2, &[]), None);
        assert_eq!(
            words(Isa::Neon, Isa::I8mm, &[]),
            None,
            "its vector kernels are not the best, yet not slow"
        );
        let old = words(Isa::Scalar, Isa::Scalar, &["avx2", "fma"]).expect("a note");
        assert!(old.contains("lacks avx2, fma: prompts take about"), "{old}");
        let forced = words(Isa::Scalar, Isa::Avx512, &[]).expect("a note");
        assert!(forced.starts_with("--cpu scalar") && forced.contains("(avx512)"), "{forced}");
        let other = words(Isa::Scalar, Isa::Scalar, &[]).expect("a note");
        assert!(other.starts_with("llmctl has no vector kernels"), "{other}");
    }
}
