//! Loads models that candle-transformers computes: checks options, estimates memory, and collects notices.

use candle_core::Device as CandleDevice;

use super::{Device, LoadOptions, ModelFiles, backend, open_device};
use crate::memory::Demand;
use crate::model::Model;
use crate::model::candle_models::{CandlePlan, Prefill};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::notice::Notice;
use llmctl_kernel::Dtype;

/// Refuses options that candle-transformers cannot honour: weights and KV are f32. KV in f16 is the default, so it is
/// not refused.
pub fn check(files: &ModelFiles, plan: &CandlePlan, options: &LoadOptions) -> LoadResult<()> {
    if let Some(adapter) = options.adapters.first() {
        let message =
            format!("{} runs through candle-transformers, which takes no adapters", plan.architecture);
        return Err(LoadError::Unsupported { path: adapter.path.clone(), message });
    }
    let asked = match (options.quantize, options.dtype, options.kv_type) {
        (Some(dtype), _, _) => format!("weights in {}", dtype.name()),
        (None, Some(dtype), _) if dtype != Dtype::F32 => format!("weights in {}", dtype.name()),
        (_, _, kv_type) if kv_type.is_quantized() => format!("KV in {}", kv_type.name()),
        _ => return Ok(()),
    };
    let message = format!(
        "{} runs through candle-transformers, which supports f32 only, not {asked}",
        plan.architecture
    );
    Err(files.config_reader().unsupported(message))
}

/// Returns notices about models that candle-transformers computes.
pub fn notices(plan: &CandlePlan) -> Vec<Notice> {
    let prompts = match plan.prefill {
        Prefill::Chunks => "prompts in chunks of 32 tokens",
        Prefill::Beginning => "prompts at once up to 512 tokens, and one by one beyond",
        Prefill::Single => "prompts one token at a time",
    };
    let general = Notice::CandleFamily { name: plan.architecture, prompts };
    [general].into_iter().chain(plan.notices.iter().cloned()).collect()
}

/// Returns the bytes that a model needs: all weights widened to f32, and the largest of them in its original type.
pub fn demand(files: &ModelFiles, plan: &CandlePlan) -> Demand {
    let tensors = files.tensors();
    let values = tensors.names().into_iter().filter_map(|name| {
        let (shape, _) = tensors.describe(&name)?;
        Some(shape.iter().fold(1u64, |count, &size| count.saturating_mul(size as u64)))
    });
    let values: Vec<u64> = values.collect();
    let largest = values.iter().max().copied().unwrap_or(0);
    let all = values.into_iter().fold(largest, u64::saturating_add);
    Demand {
        weights: all.saturating_mul(size_of::<f32>() as u64),
        kv_per_token: (plan.kv_bytes_per_token().saturating_add(plan.attention_bytes_per_token())) as u64,
        kv_fixed: plan.group().page_bytes as u64,
        fixed: plan.activation_bytes() as u64,
    }
}

/// Reads the weights onto the device.
///
/// # Errors
/// Errors of [`CandlePlan::load`]; [`LoadError::Device`] if there is no such device.
pub fn load(
    files: &ModelFiles,
    plan: CandlePlan,
    options: &LoadOptions,
    context_length: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<Box<dyn Model>> {
    let (device, cpu) = match options.device {
        Device::Cpu(cpu) => (CandleDevice::Cpu, Some(cpu)),
        Device::Candle(kind) => (open_device(kind).map_err(backend)?, None),
    };
    Ok(Box::new(plan.load(files.tensors(), context_length, device, cpu, progress)?))
}
