//! Storage types of weights: plain floats and ggml's block formats.
//!
//! Block sizes and layouts: ggml's `ggml-common.h` (block_q4_0 ... block_nvfp4) and the GGUF specification's
//! type numbers. A row of a matrix is a whole number of blocks.

/// Storage type of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    /// 4-bit floats (E2M1) with a power of two for each 32 (OCP Microscaling Formats 1.0), in ggml's order.
    Mxfp4,
    /// The same floats with an 8-bit float for each 16, and an f32 factor for all, which every block repeats here: GGUF
    /// has it in a tensor of its own.
    Nvfp4,
    Iq4Nl,
    Iq4Xs,
    Iq3S,
    Iq3Xxs,
    Iq2S,
    Iq2Xs,
    Iq2Xxs,
    Iq1M,
    Iq1S,
    /// Ternary numbers in two bits.
    Tq2_0,
    /// Ternary numbers, five in a byte.
    Tq1_0,
    /// -1, 0, 1, 2.
    Q2_0,
    /// Signs.
    Q1_0,
}

impl Dtype {
    /// Returns the values per block; 1 for plain floats.
    pub const fn block_len(self) -> usize {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => 1,
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 => 32,
            Dtype::Iq4Nl | Dtype::Mxfp4 => 32,
            Dtype::Nvfp4 | Dtype::Q2_0 => 64,
            Dtype::Q1_0 => 128,
            Dtype::Q2K | Dtype::Q3K | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K => 256,
            Dtype::Iq4Xs | Dtype::Iq3S | Dtype::Iq3Xxs | Dtype::Iq2S | Dtype::Iq2Xs | Dtype::Iq2Xxs => 256,
            Dtype::Iq1M | Dtype::Iq1S | Dtype::Tq2_0 | Dtype::Tq1_0 => 256,
        }
    }

    /// Returns the bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Q4_0 => 18,
            Dtype::Q4_1 => 20,
            Dtype::Q5_0 => 22,
            Dtype::Q5_1 => 24,
            Dtype::Q8_0 => 34,
            Dtype::Q2K => 84,
            Dtype::Q3K => 110,
            Dtype::Q4K => 144,
            Dtype::Q5K => 176,
            Dtype::Q6K => 210,
            Dtype::Mxfp4 => 17,
            Dtype::Nvfp4 => 40,
            Dtype::Iq4Nl => 18,
            Dtype::Iq4Xs => 136,
            Dtype::Iq3S => 110,
            Dtype::Iq3Xxs => 98,
            Dtype::Iq2S => 82,
            Dtype::Iq2Xs => 74,
            Dtype::Iq2Xxs => 66,
            Dtype::Iq1M => 56,
            Dtype::Iq1S => 50,
            Dtype::Tq2_0 => 66,
            Dtype::Tq1_0 => 54,
            Dtype::Q2_0 => 18,
            Dtype::Q1_0 => 18,
        }
    }

    /// Returns the bytes of a row of `len` values; `None` if `len` is not a whole number of blocks or the size
    /// overflows.
    pub const fn row_bytes(self, len: usize) -> Option<usize> {
        if len.is_multiple_of(self.block_len()) {
            (len / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Returns whether values are stored in blocks with scales.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns the name in options and files (`q4_k`, `bf16`).
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::Q4_0 => "q4_0",
            Dtype::Q4_1 => "q4_1",
            Dtype::Q5_0 => "q5_0",
            Dtype::Q5_1 => "q5_1",
            Dtype::Q8_0 => "q8_0",
            Dtype::Q2K => "q2_k",
            Dtype::Q3K => "q3_k",
            Dtype::Q4K => "q4_k",
            Dtype::Q5K => "q5_k",
            Dtype::Q6K => "q6_k",
            Dtype::Mxfp4 => "mxfp4",
            Dtype::Nvfp4 => "nvfp4",
            Dtype::Iq4Nl => "iq4_nl",
            Dtype::Iq4Xs => "iq4_xs",
            Dtype::Iq3S => "iq3_s",
            Dtype::Iq3Xxs => "iq3_xxs",
            Dtype::Iq2S => "iq2_s",
            Dtype::Iq2Xs => "iq2_xs",
            Dtype::Iq2Xxs => "iq2_xxs",
            Dtype::Iq1M => "iq1_m",
            Dtype::Iq1S => "iq1_s",
            Dtype::Tq2_0 => "tq2_0",
            Dtype::Tq1_0 => "tq1_0",
            Dtype::Q2_0 => "q2_0",
            Dtype::Q1_0 => "q1_0",
        }
    }
}
