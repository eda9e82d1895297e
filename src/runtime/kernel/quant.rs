//! TEMPORARY until the loader branch lands.
use super::Dtype;
pub fn dequantize_row(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes(b.try_into().unwrap());
            }
        }
        Dtype::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::f16::from_le_bytes(b.try_into().unwrap()).to_f32();
            }
        }
        Dtype::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32();
            }
        }
        _ => panic!(),
    }
}
