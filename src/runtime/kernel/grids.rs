//! The grids of the IQ types: which groups of four or eight magnitudes an index stands for.
//!
//! Source: the tables `iq2xxs_grid` ... `iq1s_grid` of ggml's `ggml-common.h`. ggml stores magnitudes (8, 25,
//! 43; 4 to 62; 1 to 15) in a byte each; here they are numbered in ascending order. Every grid is in
//! ascending order.

/// Grid of IQ2_XXS: eight magnitudes of two bits each, the first in the lowest bits.
pub static IQ2_XXS: [u16; 256] = grid(include_bytes!("grids/iq2_xxs.txt"));

/// Grid of IQ2_XS, in the form of [`IQ2_XXS`].
pub static IQ2_XS: [u16; 512] = grid(include_bytes!("grids/iq2_xs.txt"));

/// Grid of IQ2_S, in the form of [`IQ2_XXS`].
pub static IQ2_S: [u16; 1024] = grid(include_bytes!("grids/iq2_s.txt"));

/// Grid of IQ1_S and IQ1_M: eight numbers from -1 to 1, plus 1, of two bits each.
pub static IQ1: [u16; 2048] = grid(include_bytes!("grids/iq1.txt"));

/// Grid of IQ3_XXS: four magnitudes of three bits each, the first in the lowest bits.
pub static IQ3_XXS: [u16; 256] = grid(include_bytes!("grids/iq3_xxs.txt"));

/// Grid of IQ3_S, in the form of [`IQ3_XXS`].
pub static IQ3_S: [u16; 512] = grid(include_bytes!("grids/iq3_s.txt"));

/// Reads a grid of `N` numbers, each of four hexadecimal digits and one character behind them.
const fn grid<const N: usize>(text: &[u8]) -> [u16; N] {
    assert!(text.len() == 5 * N);
    let (mut grid, mut at) = ([0; N], 0);
    while at < text.len() {
        if at % 5 < 4 {
            let digit = match text[at] {
                digit @ b'0'..=b'9' => digit - b'0',
                digit => digit - b'a' + 10,
            };
            grid[at / 5] = grid[at / 5] << 4 | digit as u16;
        }
        at += 1;
    }
    grid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_ascend_and_hold_only_magnitudes_that_exist() {
        for (grid, bits, largest) in [
            (&IQ2_XXS[..], 2, 2),
            (&IQ2_XS, 2, 2),
            (&IQ2_S, 2, 2),
            (&IQ1, 2, 2),
            (&IQ3_XXS, 3, 7),
            (&IQ3_S, 3, 7),
        ] {
            assert!(grid.windows(2).all(|pair| pair[0] < pair[1]));
            let numbers = |entry: u16| {
                (0..if bits == 2 { 8 } else { 4 }).map(move |at| entry >> (bits * at) & ((1 << bits) - 1))
            };
            assert!(grid.iter().all(|entry| numbers(*entry).all(|number| number <= largest)));
        }
    }
}
