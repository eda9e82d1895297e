//! ggml's numbers for tensor types: their names, the storage types that hold them, and the bytes in a file.
//!
//! Source: `ggml_type` in ggml's `ggml.h`, and llama.cpp's converter for the factors of NVFP4 (`NAME.scale`
//! beside `NAME.weight`, one number, or one per expert).

use crate::tensor::byte_len;
use llmctl_kernel::Dtype;

pub const F32: u32 = 0;
pub const NVFP4: u32 = 40;

/// Numbers, names, and storage types; `None` for types that are not weights' or are no longer written.
const TYPES: [(u32, &str, Option<Dtype>); 35] = [
    (F32, "F32", Some(Dtype::F32)),
    (1, "F16", Some(Dtype::F16)),
    (2, "Q4_0", Some(Dtype::Q4_0)),
    (3, "Q4_1", Some(Dtype::Q4_1)),
    (6, "Q5_0", Some(Dtype::Q5_0)),
    (7, "Q5_1", Some(Dtype::Q5_1)),
    (8, "Q8_0", Some(Dtype::Q8_0)),
    (9, "Q8_1", None),
    (10, "Q2_K", Some(Dtype::Q2K)),
    (11, "Q3_K", Some(Dtype::Q3K)),
    (12, "Q4_K", Some(Dtype::Q4K)),
    (13, "Q5_K", Some(Dtype::Q5K)),
    (14, "Q6_K", Some(Dtype::Q6K)),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", Some(Dtype::Iq2Xxs)),
    (17, "IQ2_XS", Some(Dtype::Iq2Xs)),
    (18, "IQ3_XXS", Some(Dtype::Iq3Xxs)),
    (19, "IQ1_S", Some(Dtype::Iq1S)),
    (20, "IQ4_NL", Some(Dtype::Iq4Nl)),
    (21, "IQ3_S", Some(Dtype::Iq3S)),
    (22, "IQ2_S", Some(Dtype::Iq2S)),
    (23, "IQ4_XS", Some(Dtype::Iq4Xs)),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", Some(Dtype::Iq1M)),
    (30, "BF16", Some(Dtype::Bf16)),
    (34, "TQ1_0", Some(Dtype::Tq1_0)),
    (35, "TQ2_0", Some(Dtype::Tq2_0)),
    (39, "MXFP4", Some(Dtype::Mxfp4)),
    (NVFP4, "NVFP4", Some(Dtype::Nvfp4)),
    (41, "Q1_0", Some(Dtype::Q1_0)),
    (42, "Q2_0", Some(Dtype::Q2_0)),
];

/// Returns the storage type of a type number, if the kernels support it.
pub fn dtype(kind: u32) -> Option<Dtype> {
    TYPES.iter().find(|(number, ..)| *number == kind)?.2
}

/// Returns the type number that a tensor of this storage type can be written as; `None` for NVFP4, whose factors have no
/// place in a file's blocks.
pub fn number(dtype: Dtype) -> Option<u32> {
    let numbers = TYPES.iter().filter(|(number, ..)| *number != NVFP4);
    numbers.filter(|(.., stored)| *stored == Some(dtype)).map(|(number, ..)| *number).next()
}

/// Returns the number with the name, if it has one: `type 23 (IQ4_XS)`.
pub fn kind_name(kind: u32) -> String {
    match TYPES.iter().find(|(number, ..)| *number == kind) {
        Some((_, name, _)) => format!("{kind} ({name})"),
        None => format!("number {kind}"),
    }
}

/// Bytes of an NVFP4 block in a file, which lacks the factor.
const NVFP4_BYTES: usize = 36;

/// Returns the bytes of a tensor in a file; `None` for a type without a storage type, whose layout is unknown.
///
/// # Errors
/// As [`byte_len`].
pub fn file_len(kind: u32, shape: &[usize]) -> Result<Option<usize>, String> {
    let Some(dtype) = dtype(kind) else { return Ok(None) };
    let len = byte_len(dtype, shape)?;
    Ok(Some(if kind == NVFP4 { len / dtype.block_bytes() * NVFP4_BYTES } else { len }))
}

/// Converts blocks of a file to [`Dtype::Nvfp4`]: `factors` are those of equal parts of the blocks.
pub fn nvfp4_with_factors(blocks: &[u8], factors: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(blocks.len() / NVFP4_BYTES * Dtype::Nvfp4.block_bytes());
    for (part, factor) in blocks.chunks_exact(blocks.len() / factors.len()).zip(factors) {
        for block in part.as_chunks::<NVFP4_BYTES>().0 {
            bytes.extend(factor.to_le_bytes());
            bytes.extend(block);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_storage_type_has_the_name_of_its_number() {
        let mut seen = Vec::new();
        for (kind, name, dtype) in TYPES {
            if let Some(dtype) = dtype {
                assert_eq!(dtype.name(), name.to_lowercase(), "{kind}");
                seen.push(dtype);
            }
        }
        assert_eq!(seen.len(), 28, "one number for each type");
        assert_eq!([Dtype::Iq4Xs, Dtype::F32, Dtype::Nvfp4].map(number), [Some(23), Some(0), None]);
        assert_eq!((kind_name(23), kind_name(31)), ("23 (IQ4_XS)".into(), "number 31".into()));
    }

    #[test]
    fn a_block_of_nvfp4_gets_the_factor_of_its_part() {
        let blocks: Vec<u8> = (0..4 * 36).map(|at| at as u8).collect();
        let bytes = nvfp4_with_factors(&blocks, &[0.5, 2.0]);
        assert_eq!(bytes.len(), 4 * 40);
        let factor = |block: usize| f32::from_le_bytes(*bytes[40 * block..].first_chunk().unwrap());
        assert_eq!([0, 1, 2, 3].map(factor), [0.5, 0.5, 2.0, 2.0]);
        assert_eq!(bytes[40 * 3 + 4..], blocks[36 * 3..]);
        assert_eq!(file_len(NVFP4, &[2, 128]), Ok(Some(4 * 36)));
        assert!(file_len(NVFP4, &[2, 32]).is_err());
        assert_eq!(file_len(9, &[2, 32]), Ok(None));
    }
}
