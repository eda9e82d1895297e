//! The recurrence of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): a head's state decays by one factor
//! per token, takes in the product of the token's input and its key, and is read by its query.
//!
//! One token at a time: chunked forms are faster for prompts, but their sums depend on where a prompt is cut.
//! Every element of the state has one order of operations, and outputs are sums over the state in ascending
//! order.

use super::isa::dispatch;

/// One token of one head.
#[derive(Debug, Clone, Copy)]
pub struct SsmToken<'a> {
    /// The head's values, `[head_dim]`.
    pub x: &'a [f32],
    /// The same, multiplied by the length of the time step.
    pub input: &'a [f32],
    /// Key (B) and query (C), `[state_dim]` each.
    pub key: &'a [f32],
    pub query: &'a [f32],
    /// Factor of the state, 0 to 1.
    pub decay: f32,
    /// Factor of `x` in the output (D).
    pub skip: f32,
}

#[inline(always)]
fn step_body(state: &mut [f32], token: SsmToken<'_>, out: &mut [f32]) {
    let SsmToken { x, input, key, query, decay, skip } = token;
    out.fill(0.0);
    for ((state, key), query) in state.chunks_exact_mut(out.len()).zip(key).zip(query) {
        for ((state, input), out) in state.iter_mut().zip(input).zip(out.iter_mut()) {
            *state = decay.mul_add(*state, key * input);
            *out = query.mul_add(*state, *out);
        }
    }
    for (out, x) in out.iter_mut().zip(x) {
        *out = skip.mul_add(*x, *out);
    }
}

dispatch! {
    /// Computes `state = decay * state + key x input`, and `out = query . state + skip * x`: `state` is `[state_dim,
    /// head_dim]`, `out` is `[head_dim]`.
    pub fn step(state: &mut [f32], token: SsmToken<'_>, out: &mut [f32]) = step_body
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn a_state_decays_takes_in_and_is_read() {
        let (mut state, mut out) = ([0.0; 6], [9.0; 3]);
        let first = SsmToken {
            x: &[10.0, 20.0, 30.0],
            input: &[1.0, 2.0, 3.0],
            key: &[1.0, 2.0],
            query: &[1.0, 1.0],
            decay: 0.5,
            skip: 0.0,
        };
        step(Isa::Scalar, &mut state, first, &mut out);
        assert_eq!((state, out), ([1.0, 2.0, 3.0, 2.0, 4.0, 6.0], [3.0, 6.0, 9.0]));
        step(
            Isa::Scalar,
            &mut state,
            SsmToken { input: &[0.0; 3], query: &[2.0, 0.0], skip: 0.1, ..first },
            &mut out,
        );
        assert_eq!((state, out), ([0.5, 1.0, 1.5, 1.0, 2.0, 3.0], [2.0, 4.0, 6.0]));
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let noise = |seed: usize, len: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 37 + seed * 101) % 211) as f32 / 97.0 - 1.0).collect()
        };
        for (state_dim, head_dim) in [(16, 16), (5, 33), (128, 64)] {
            let [x, input, key, query] =
                [(1, head_dim), (2, head_dim), (3, state_dim), (4, state_dim)].map(|(n, len)| noise(n, len));
            let token = SsmToken { x: &x, input: &input, key: &key, query: &query, decay: 0.9, skip: 0.3 };
            let run = |isa| {
                let (mut state, mut out) = (noise(5, state_dim * head_dim), vec![0.0; head_dim]);
                step(isa, &mut state, token, &mut out);
                state.into_iter().chain(out).map(f32::to_bits).collect::<Vec<_>>()
            };
            for isa in available() {
                assert_eq!(run(isa), run(Isa::Scalar), "{isa:?}");
            }
        }
    }
}
