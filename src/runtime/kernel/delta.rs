//! The gated delta rule (Yang, Kautz and Hatamizadeh 2024): a head's state maps keys to values, decays, and
//! is corrected by its error for each token's value.
//!
//! One token at a time: chunked forms are faster for prompts, but their sums depend on where a prompt is cut.
//! Every element of the state has one order of operations, and outputs are sums over keys in ascending order.

use super::isa::{Isa, dispatch};

/// One token of one head: normalised key and query `[key_dim]`, value `[value_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct DeltaToken<'a> {
    pub key: &'a [f32],
    pub query: &'a [f32],
    pub value: &'a [f32],
    /// Factors of the state, 0 to 1: one, or one for each key (Kimi delta attention, 2025).
    pub decay: &'a [f32],
    /// Fraction of the error that is corrected, 0 to 1.
    pub rate: f32,
}

#[inline(always)]
fn recall_body(state: &[f32], key: &[f32], recalled: &mut [f32]) {
    recalled.fill(0.0);
    for (state, key) in state.chunks_exact(recalled.len()).zip(key) {
        for (state, recalled) in state.iter().zip(recalled.iter_mut()) {
            *recalled = key.mul_add(*state, *recalled);
        }
    }
}

#[inline(always)]
fn correct_body(state: &mut [f32], decay: f32, [key, query]: [&[f32]; 2], error: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for ((state, key), query) in state.chunks_exact_mut(out.len()).zip(key).zip(query) {
        for ((state, error), out) in state.iter_mut().zip(error).zip(out.iter_mut()) {
            *state = decay.mul_add(*state, key * error);
            *out = query.mul_add(*state, *out);
        }
    }
}

#[inline(always)]
fn fade_body(state: &mut [f32], decay: &[f32]) {
    for (values, decay) in state.chunks_exact_mut(state.len() / decay.len()).zip(decay) {
        values.iter_mut().for_each(|value| *value *= decay);
    }
}

dispatch! {
    /// Multiplies each key's values by its factor.
    fn fade(state: &mut [f32], decay: &[f32]) = fade_body
}
dispatch! {
    /// Computes `recalled = key . state`.
    fn recall(state: &[f32], key: &[f32], recalled: &mut [f32]) = recall_body
}
dispatch! {
    /// Computes `state = decay * state + key x error`, and `out = query . state`.
    fn correct(state: &mut [f32], decay: f32, rows: [&[f32]; 2], error: &[f32], out: &mut [f32]) = correct_body
}

/// Updates a head's `state`, `[key_dim, value_dim]`, with a token; `out` is the state's value for its query,
/// `[value_dim]`. `error` is temporary memory of `value_dim` values.
pub fn step(isa: Isa, state: &mut [f32], token: DeltaToken<'_>, error: &mut [f32], out: &mut [f32]) {
    let decay = match token.decay {
        [of_all] => *of_all,
        of_keys => {
            fade(isa, state, of_keys);
            1.0
        }
    };
    recall(isa, state, token.key, error);
    for (error, value) in error.iter_mut().zip(token.value) {
        *error = error.mul_add(-decay, *value) * token.rate;
    }
    correct(isa, state, decay, [token.key, token.query], error, out);
}

#[cfg(test)]
mod tests {
    use super::super::isa::available;
    use super::*;

    #[test]
    fn a_state_recalls_what_it_was_told_and_forgets_what_is_replaced() {
        let (mut state, mut error, mut out) = ([0.0; 6], [0.0; 3], [0.0; 3]);
        let mut tell = |key: &[f32], query: &[f32], value: &[f32], decay: f32, rate| {
            let token = DeltaToken { key, query, value, decay: &[decay], rate };
            step(Isa::Scalar, &mut state, token, &mut error, &mut out);
            out
        };
        assert_eq!(tell(&[1.0, 0.0], &[1.0, 0.0], &[1.0, 2.0, 3.0], 1.0, 1.0), [1.0, 2.0, 3.0]);
        assert_eq!(tell(&[0.0, 1.0], &[1.0, 1.0], &[4.0, 4.0, 4.0], 1.0, 0.5), [3.0, 4.0, 5.0]);
        assert_eq!(
            tell(&[1.0, 0.0], &[1.0, 0.0], &[7.0, 7.0, 7.0], 1.0, 1.0),
            [7.0; 3],
            "replaced, not added"
        );
        assert_eq!(tell(&[1.0, 0.0], &[0.0, 1.0], &[0.0; 3], 0.5, 0.0), [1.0; 3], "half of 2 is left");
    }

    #[test]
    fn a_key_that_fades_takes_its_values_along() {
        let (mut state, mut error, mut out) = ([2.0, 4.0, 6.0, 8.0], [0.0; 2], [0.0; 2]);
        let token = DeltaToken {
            key: &[0.0; 2],
            query: &[1.0, 1.0],
            value: &[0.0; 2],
            decay: &[0.5, 0.0],
            rate: 1.0,
        };
        step(Isa::Scalar, &mut state, token, &mut error, &mut out);
        assert_eq!((state, out), ([1.0, 2.0, 0.0, 0.0], [1.0, 2.0]));
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let noise = |seed: usize, len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 37 + seed * 101) % 211) as f32 / 97.0 - 1.0).collect()
        };
        for (keys, values) in [(16, 16), (5, 33), (128, 64)] {
            let (key, query, value) = (noise(1, keys), noise(2, keys), noise(3, values));
            let of_keys: Vec<f32> = noise(5, keys).iter().map(|factor| factor.abs().min(1.0)).collect();
            let run = |isa, decay: &[f32]| {
                let token = DeltaToken { key: &key, query: &query, value: &value, decay, rate: 0.3 };
                let mut state = noise(4, keys * values);
                let (mut error, mut out) = (vec![0.0; values], vec![0.0; values]);
                step(isa, &mut state, token, &mut error, &mut out);
                state.into_iter().chain(out).map(f32::to_bits).collect::<Vec<_>>()
            };
            for isa in available() {
                for decay in [&[0.9][..], &of_keys] {
                    assert_eq!(run(isa, decay), run(Isa::Scalar, decay), "{isa:?}");
                }
            }
        }
    }
}
