//! A packed matrix as numbers, and its exact conversion to a block type of ours.
//!
//! Every packed form is `number * scale + min` with a scale for each group of columns. If the scales are
//! half-precision numbers, a block type with enough bits holds exactly these values: Q4_0, Q5_0 and Q8_0
//! without minimum, Q4_1 and Q5_1 with one. A zero point is subtracted from the numbers first, which costs
//! one bit: four bits with any zero point fit the five of Q5_0. Whatever fits no type becomes f32.

use half::f16;

use super::super::blocks::write_block;
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_kernel::Dtype;

/// Values of a block.
pub(super) const BLOCK: usize = 32;

/// A matrix `[rows, cols]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PackedValues {
    pub rows: usize,
    pub cols: usize,
    /// Row-major, zero points subtracted.
    pub numbers: Vec<i16>,
    /// `[rows, groups]`.
    pub scales: Vec<f32>,
    /// `[rows, groups]`; `None` if all are 0.
    pub mins: Option<Vec<f32>>,
    /// The group of each column. Only neighbouring columns of one group can share a block.
    pub groups: Vec<u32>,
}

impl PackedValues {
    /// Converts to the smallest type that holds the values exactly, else to f32.
    pub fn into_tensor(self) -> Result<HostTensor, String> {
        let dtype = self.block_type().unwrap_or(Dtype::F32);
        let mut bytes = Vec::with_capacity(dtype.row_bytes(self.cols).unwrap_or(0) * self.rows);
        let num_groups = self.num_groups();
        for row in 0..self.rows {
            let numbers = &self.numbers[row * self.cols..(row + 1) * self.cols];
            let part = row * num_groups..(row + 1) * num_groups;
            let scales = &self.scales[part.clone()];
            let mins = self.mins.as_ref().map(|mins| &mins[part]);
            if dtype == Dtype::F32 {
                for (number, &group) in numbers.iter().zip(&self.groups) {
                    let scaled = f32::from(*number) * scales[group as usize];
                    let value = mins.map_or(scaled, |mins| scaled + mins[group as usize]);
                    bytes.extend(value.to_le_bytes());
                }
                continue;
            }
            for (numbers, groups) in numbers.as_chunks::<BLOCK>().0.iter().zip(self.groups.chunks(BLOCK)) {
                let group = groups[0] as usize;
                push_block(dtype, numbers, scales[group], mins.map_or(0.0, |mins| mins[group]), &mut bytes);
            }
        }
        HostTensor::new(dtype, vec![self.rows, self.cols], SharedBytes::from(bytes))
    }

    fn num_groups(&self) -> usize {
        self.scales.len() / self.rows.max(1)
    }

    /// Returns the smallest block type that holds the values exactly; `None` if there is none.
    fn block_type(&self) -> Option<Dtype> {
        let is_half = |value: &f32| f16::from_f32(*value).to_f32() == *value;
        let all = self.scales.iter().chain(self.mins.iter().flatten());
        let is_uniform = |groups: &[u32]| groups.iter().all(|group| *group == groups[0]);
        if !self.cols.is_multiple_of(BLOCK)
            || !self.groups.chunks(BLOCK).all(is_uniform)
            || !all.into_iter().all(is_half)
        {
            return None;
        }
        let least = self.numbers.iter().copied().min()?;
        let most = self.numbers.iter().copied().max()?;
        let fits = |low: i16, high: i16| (low..=high).contains(&least) && (low..=high).contains(&most);
        match self.mins {
            Some(_) if fits(0, 15) => Some(Dtype::Q4_1),
            Some(_) if fits(0, 31) => Some(Dtype::Q5_1),
            None if fits(-8, 7) => Some(Dtype::Q4_0),
            None if fits(-16, 15) => Some(Dtype::Q5_0),
            None if fits(-128, 127) => Some(Dtype::Q8_0),
            _ => None,
        }
    }
}

/// Appends a block; layouts as in `kernel::quant`.
fn push_block(dtype: Dtype, numbers: &[i16; BLOCK], scale: f32, min: f32, out: &mut Vec<u8>) {
    let offset = match dtype {
        Dtype::Q4_0 => 8,
        Dtype::Q5_0 => 16,
        _ => 0,
    };
    let (scale, quants) = (f16::from_f32(scale), numbers.map(|number| (number + offset) as u8));
    if dtype == Dtype::Q8_0 {
        out.extend(scale.to_le_bytes());
        out.extend(quants);
        return;
    }
    let min = matches!(dtype, Dtype::Q4_1 | Dtype::Q5_1).then(|| f16::from_f32(min));
    let start = out.len();
    out.resize(start + dtype.block_bytes(), 0);
    write_block(scale, min, &quants, &mut out[start..]);
}

/// Reads `count` numbers of `bits` bits, the lowest bits of the first byte first.
pub(super) fn unpack(bytes: &[u8], bits: u32, count: usize) -> impl Iterator<Item = i16> + '_ {
    let mask = (1u32 << bits) - 1;
    (0..count).map(move |index| {
        let start = index * bits as usize;
        let (at, shift) = (start / 8, start % 8);
        // A number of at most 8 bits lies in two bytes at most.
        let word = u32::from(bytes[at]) | u32::from(*bytes.get(at + 1).unwrap_or(&0)) << 8;
        ((word >> shift) & mask) as i16
    })
}

/// Values of 4-bit floats with a sign, two bits of exponent and one of mantissa, by code.
pub(super) const FP4: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Converts an 8-bit float with four bits of exponent and three of mantissa (E4M3, without infinities).
pub(super) fn fp8(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code < 128 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_kernel::dequantize_row;

    fn values(tensor: &HostTensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
        values
    }

    #[test]
    fn each_type_holds_exactly_what_it_is_chosen_for() {
        let scale = f16::from_f32(0.0123).to_f32();
        let min = f16::from_f32(-0.37).to_f32();
        for (least, most, has_min, expected) in [
            (-8, 7, false, Dtype::Q4_0),
            (-15, 15, false, Dtype::Q5_0),
            (-128, 127, false, Dtype::Q8_0),
            (-255, 255, false, Dtype::F32),
            (0, 15, true, Dtype::Q4_1),
            (0, 31, true, Dtype::Q5_1),
            (0, 255, true, Dtype::F32),
        ] {
            let span = most - least + 1;
            let numbers: Vec<i16> = (0..128).map(|i| least + i * 37 % span).chain([least, most]).collect();
            let numbers = numbers[2..].to_vec();
            let mut packed = PackedValues {
                rows: 2,
                cols: 64,
                numbers: numbers.clone(),
                scales: vec![scale, 2.0 * scale, 0.5 * scale, scale],
                mins: has_min.then(|| vec![min; 4]),
                groups: (0..64).map(|col| col / 32).collect(),
            };
            let tensor = packed.clone().into_tensor().unwrap();
            assert_eq!(tensor.dtype, expected, "{least} to {most}");
            for (at, value) in values(&tensor).into_iter().enumerate() {
                let scale = packed.scales[at / 32];
                let exact = f32::from(numbers[at]) * scale + if has_min { min } else { 0.0 };
                assert_eq!(value, exact, "{} at {at}", tensor.dtype.name());
            }
            packed.scales[3] = 0.012345;
            assert_eq!(packed.clone().into_tensor().unwrap().dtype, Dtype::F32, "no half-precision scale");
            packed.scales[3] = scale;
            packed.groups[5] = 1;
            assert_eq!(packed.into_tensor().unwrap().dtype, Dtype::F32, "two groups in a block");
        }
    }

    #[test]
    fn numbers_are_read_across_bytes() {
        for bits in 2..=8u32 {
            let numbers: Vec<i16> = (0..64).map(|i| i * 29 % (1 << bits)).collect();
            let mut bytes = vec![0u8; 64 * bits as usize / 8];
            for (at, number) in numbers.iter().enumerate() {
                for bit in 0..bits as usize {
                    let place = at * bits as usize + bit;
                    bytes[place / 8] |= ((number >> bit & 1) as u8) << (place % 8);
                }
            }
            assert_eq!(unpack(&bytes, bits, 64).collect::<Vec<_>>(), numbers, "{bits} bits");
        }
    }

    #[test]
    fn eight_bit_floats_have_the_values_of_their_specification() {
        for (code, value) in
            [(0, 0.0), (1, 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0x7e, 448.0), (0xb8, -1.0)]
        {
            assert_eq!(fp8(code), value, "{code:#x}");
        }
        assert!(fp8(0x7f).is_nan() && fp8(0xff).is_nan());
    }
}
