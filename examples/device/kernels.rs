//! The kernels against their references, and the references against candle's own operations.
//!
//! On a GPU an operation runs there and its reference here. On the CPU device the reference itself is run, and compared with
//! what it stands for.

use std::time::Instant;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use llmctl_kernel::Dtype;
use llmctl_kernel::attention::{KvValues, ScoreRule};
use llmctl_models::backend::candle::cuda::{
    DecodeTable, FusedProduct, NormRope, PagedAttention, WIDENED_BYTES, Widened, faults,
};
use llmctl_models::backend::candle::{Candle, f16_product};
use llmctl_models::backend::{AttentionSpec, Backend, KvLayout, KvShape, KvType, RowSpan, Store, StoreShape};
use serde_json::{Value, json};

use super::shapes::{Random, matrix};
use super::{Failure, worse};

/// The largest difference, relative to the largest value: sums in another order, and factors that are rounded once more.
const PRODUCT: f32 = 2e-5;
const ROTATED: f32 = 2e-6;
const ATTENTION: f32 = 2e-5;
/// Matrices, inputs and results that are rounded to f16.
const WIDENED: f32 = 1e-3;

pub const TYPES: [(Dtype, GgmlDType); 7] = [
    (Dtype::Q4_0, GgmlDType::Q4_0),
    (Dtype::Q8_0, GgmlDType::Q8_0),
    (Dtype::Q2K, GgmlDType::Q2K),
    (Dtype::Q3K, GgmlDType::Q3K),
    (Dtype::Q4K, GgmlDType::Q4K),
    (Dtype::Q5K, GgmlDType::Q5K),
    (Dtype::Q6K, GgmlDType::Q6K),
];

/// Checks all kernels; returns the largest difference of each and what exceeded its bound.
pub fn check(device: &Device) -> Result<Value, Failure> {
    let mut worst = json!({});
    let mut wrong = Vec::new();
    let mut note = |name: String, bound: f32, difference: f32| {
        let is_within = difference <= bound; // false for what is not a number
        if !is_within {
            wrong.push(format!("{name}: {difference:e}, more than {bound:e}"));
        }
        worst[&name] = json!(difference);
    };
    for (dtype, stored) in TYPES {
        for (rows, [outs, cols]) in
            [(1, [7, 256]), (2, [64, 512]), (3, [33, 2048]), (5, [16, 1280]), (8, [130, 4096])]
        {
            let difference = product(device, (dtype, stored), rows, [outs, cols])?;
            note(format!("product {} {rows}x{cols}x{outs}", dtype.name()), PRODUCT, difference);
        }
        let difference = wide_product(device, (dtype, stored), 260, [130, 1280])?;
        note(format!("widen {}", dtype.name()), WIDENED, difference);
    }
    for (head_dim, rotated, has_norm) in [(128, 128, true), (64, 32, true), (96, 96, false), (256, 64, false)]
    {
        let difference = norm_rope(device, [head_dim, rotated], has_norm)?;
        note(format!("norm_rope {head_dim}/{rotated} norm {has_norm}"), ROTATED, difference);
    }
    for kv_type in [KvType::F16, KvType::F32] {
        for (head_dim, heads, window, softcap, has_sinks) in [
            (64, [8, 2], None, None, true),
            (128, [7, 1], None, Some(20.0), false),
            (128, [32, 8], Some(40), None, false),
            (256, [4, 4], Some(300), None, true),
        ] {
            let rule = ScoreRule { scale: 1.0 / (head_dim as f32).sqrt(), softcap };
            let difference = attention(device, kv_type, (head_dim, heads), (window, rule, has_sinks))?;
            note(format!("attention {} {head_dim} {heads:?}", kv_type.name()), ATTENTION, difference);
        }
    }
    let began = Instant::now();
    wrong.extend(
        faults(device).iter().map(|fault| format!("unused at load: {}: {}", fault.kernel, fault.reason)),
    );
    let seconds = began.elapsed().as_secs_f64();
    Ok(
        json!({ "ok": wrong.is_empty(), "wrong": wrong, "differences": worst, "check_at_load_seconds": seconds }),
    )
}

/// Returns the largest difference, relative to the largest expected value.
fn difference(got: &Tensor, expected: &Tensor) -> Result<f32, Failure> {
    let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let (got, expected) = (values(got)?, values(expected)?);
    if got.len() != expected.len() {
        return Err(format!("{} values instead of {}", got.len(), expected.len()).into());
    }
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let differences = got.iter().zip(&expected).map(|(got, expected)| (got - expected).abs());
    Ok(differences.fold(0.0, worse) / largest)
}

fn quantised(
    device: &Device,
    (dtype, stored): (Dtype, GgmlDType),
    [outs, cols]: [usize; 2],
) -> Result<QTensor, Failure> {
    let bytes = matrix(&[outs, cols], dtype, (outs * 31 + cols) as u32).bytes;
    Ok(QTensor::new(QStorage::from_data((&*bytes).into(), device, stored)?, (outs, cols))?)
}

fn product(
    device: &Device,
    types: (Dtype, GgmlDType),
    rows: usize,
    shape: [usize; 2],
) -> Result<f32, Failure> {
    let x = Tensor::from_vec(Random(77).floats(rows * shape[1]), (rows, shape[1]), &Device::Cpu)?;
    let on = |device: &Device| -> Result<Tensor, Failure> {
        let (weight, x) = (quantised(device, types, shape)?, x.to_device(device)?);
        let product = FusedProduct::new(&weight, &x).ok_or("no kernel for these rows")?;
        Ok(product.apply(&x)?)
    };
    let expected = match device.is_cpu() {
        true => x.matmul(&quantised(device, types, shape)?.dequantize(device)?.t()?)?,
        false => on(&Device::Cpu)?,
    };
    difference(&on(device)?, &expected)
}

/// A product in f16 with a matrix that is unpacked in three parts, against one in f32 on the CPU.
fn wide_product(
    device: &Device,
    types: (Dtype, GgmlDType),
    rows: usize,
    shape: [usize; 2],
) -> Result<f32, Failure> {
    let x = Tensor::from_vec(Random(78).floats(rows * shape[1]), (rows, shape[1]), &Device::Cpu)?;
    let expected = x.matmul(&quantised(&Device::Cpu, types, shape)?.dequantize(&Device::Cpu)?.t()?)?;
    let (weight, x) = (quantised(device, types, shape)?, x.to_device(device)?);
    difference(&widened_product(&weight, &x, 2 * 50 * shape[1])?, &expected)
}

fn widened_product(weight: &QTensor, x: &Tensor, most_bytes: usize) -> Result<Tensor, Failure> {
    let parts = Widened::parts(weight, most_bytes).ok_or("no kernel for this type")?;
    Ok(f16_product(x, parts.iter().map(|part| part.apply(x)))?)
}

fn norm_rope(device: &Device, [head_dim, rotated]: [usize; 2], has_norm: bool) -> Result<f32, Failure> {
    let (rows, heads, half, mut random) = (5, 3, rotated / 2, Random(5));
    let x = Tensor::from_vec(random.floats(rows * heads * head_dim), (rows, heads * head_dim), &Device::Cpu)?;
    let weight = Tensor::from_vec(random.floats(head_dim), head_dim, &Device::Cpu)?;
    let turns = random.floats(rows * half);
    let cosines: Vec<f32> = turns.iter().map(|turn| turn.cos()).collect();
    let sines: Vec<f32> = turns.iter().map(|turn| turn.sin()).collect();
    let on = |device: &Device| -> Result<Tensor, Failure> {
        let table = |values: &[f32]| Tensor::from_slice(values, (rows, half), device);
        let (angles, weight) = ([table(&cosines)?, table(&sines)?], weight.to_device(device)?);
        let norm = has_norm.then_some((&weight, 1e-6));
        Ok(NormRope::apply(&x.to_device(device)?, norm, head_dim, &angles)?)
    };
    if !device.is_cpu() {
        return difference(&on(device)?, &on(&Device::Cpu)?);
    }
    let candle = Candle::new(Device::Cpu)?;
    let (mut input, mut out, mut angles) = (candle.buffer(), candle.buffer(), Default::default());
    candle.write(&x.flatten_all()?.to_vec1()?, heads * head_dim, &mut input)?;
    candle.angles(&cosines, &sines, rows, &mut angles)?;
    if has_norm {
        candle.norm_rope(&input, (&weight, 1e-6), head_dim, &angles, &mut out)?;
    } else {
        candle.rope(&mut input, head_dim, &angles)?;
        out = input;
    }
    let mut values = Vec::new();
    candle.read(&mut out, &mut values)?;
    difference(&on(device)?, &Tensor::from_vec(values, x.shape(), &Device::Cpu)?)
}

/// Sequences with 1, 70 and 700 tokens, two new rows of the second, in pages that are not consecutive.
fn spans() -> Vec<RowSpan> {
    let span = |rows, start, pages| RowSpan { rows, start, num_drafted: 0, pages, seen_besides: Vec::new() };
    let scattered = (0..22).map(|page| page * 7 % 29 + 2).collect();
    vec![span(0..1, 0, vec![31]), span(1..3, 68, vec![1, 33, 0]), span(3..4, 699, scattered)]
}

fn attention(
    device: &Device,
    kv_type: KvType,
    (head_dim, [num_heads, num_kv_heads]): (usize, [usize; 2]),
    (window, rule, has_sinks): (Option<usize>, ScoreRule, bool),
) -> Result<f32, Failure> {
    let (spans, rows, mut random) = (spans(), 4, Random(9));
    let shape = KvShape { num_kv_heads, head_dim, values: KvValues::Own };
    let layout = KvLayout { stores: vec![Store { shape: StoreShape::Rows(shape), group: 0 }], num_groups: 1 };
    let stored: Vec<[Vec<f32>; 2]> = spans
        .iter()
        .map(|span| [(); 2].map(|()| random.floats((span.start + span.rows.len()) * num_kv_heads * head_dim)))
        .collect();
    let (q, sinks) = (random.floats(rows * num_heads * head_dim), random.floats(num_heads));
    // By the backend, which uses the kernel where it runs; or by the kernel's reference.
    let on = |device: &Device, by_reference: bool| -> Result<Tensor, Failure> {
        let candle = Candle::new(device.clone())?;
        let mut kv = candle.kv(&layout, kv_type)?;
        for (span, [keys, values]) in spans.iter().zip(&stored) {
            let whole = RowSpan { rows: 0..span.start + span.rows.len(), start: 0, ..span.clone() };
            let [mut k, mut v] = [candle.buffer(), candle.buffer()];
            candle.write(keys, num_kv_heads * head_dim, &mut k)?;
            candle.write(values, num_kv_heads * head_dim, &mut v)?;
            candle.store_kv(&mut kv, 0, &k, &v, &[whole])?;
        }
        let sinks = Tensor::from_slice(&sinks, num_heads, device)?;
        let sinks = has_sinks.then_some(&sinks);
        if by_reference {
            let stores = kv.stores(0)?;
            let table = DecodeTable::new(&spans, window, false, device)?;
            let op =
                PagedAttention { stores: [&stores[0], &stores[1]], table: &table, num_heads, rule, sinks };
            return Ok(op.apply(&Tensor::from_slice(&q, (rows, num_heads * head_dim), device)?)?);
        }
        let spec =
            AttentionSpec { store: 0, num_heads, rule, window, is_two_way: false, sinks, selected: None };
        let (mut input, mut out, mut read) = (candle.buffer(), candle.buffer(), Vec::new());
        candle.write(&q, num_heads * head_dim, &mut input)?;
        candle.attend(&kv, &spec, &input, &spans, &mut out)?;
        candle.read(&mut out, &mut read)?;
        Ok(Tensor::from_vec(read, (rows, num_heads * head_dim), &Device::Cpu)?)
    };
    match device.is_cpu() {
        true => difference(&on(device, true)?, &on(device, false)?),
        false => difference(&on(device, false)?, &on(&Device::Cpu, true)?),
    }
}

/// Measures products by our kernels, for many rows with cuBLAS, and by candle, in bytes of weights per second.
pub fn measure(device: &Device, shape: [usize; 2], rounds: usize) -> Result<Value, Failure> {
    let mut all = json!({});
    for (dtype, stored) in TYPES {
        for rows in [1, 2, 4, 8, 64, 128, 256, 512] {
            let x = Tensor::from_vec(Random(3).floats(rows * shape[1]), (rows, shape[1]), device)?;
            // Several matrices, so that none stays in the cache.
            let weights =
                (0..4).map(|_| quantised(device, (dtype, stored), shape)).collect::<Result<Vec<_>, _>>()?;
            let bytes: usize = weights.iter().map(QTensor::storage_size_in_bytes).sum();
            let rate = |by_kernel: bool| -> Result<f64, Failure> {
                let mut began = Instant::now();
                for round in 0..rounds + 1 {
                    for weight in &weights {
                        match FusedProduct::new(weight, &x) {
                            _ if !by_kernel => drop(x.apply_op1_no_bwd(weight)?),
                            Some(product) => drop(product.apply(&x)?),
                            None => drop(widened_product(weight, &x, WIDENED_BYTES)?),
                        }
                    }
                    if round == 0 {
                        device.synchronize()?;
                        began = Instant::now();
                    }
                }
                device.synchronize()?;
                Ok((bytes * rounds) as f64 / began.elapsed().as_secs_f64() / 1e9)
            };
            all[format!("{} {rows}", dtype.name())] =
                json!({ "kernel": rate(true)?, "candle": rate(false)? });
        }
    }
    Ok(json!({ "ok": true, "gigabytes_per_second": all }))
}
