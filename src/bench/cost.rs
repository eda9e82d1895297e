//! Cost of a token for a model, and the rate that the machine's limits allow: the roofline.
//!
//! Counts products with weights, the weights that a step reads, and the KV that its rows read. Arithmetic of
//! attention and small operations are not counted, so the limits are slightly above the true ones.

use super::plan::{Case, Work};
use super::record::{CaseResult, Document, Probe, RateLimit, TokenCost};
use super::stats;
use llmctl_models::load::Dtype;
use llmctl_models::tensor::{TensorSource, byte_len};

/// A matrix or vector of a model's file.
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
}

/// Returns all tensors that are described.
pub fn tensors(source: &dyn TensorSource) -> Vec<Tensor> {
    let names = source.names();
    let described = names.iter().filter_map(|name| {
        let (shape, dtype) = source.describe(name)?;
        Some(Tensor { name: name.to_string(), shape, dtype })
    });
    described.collect()
}

/// Returns the cost of a token; `None` for a mixture of experts, where it depends on the chosen experts.
///
/// `quantize` is the type that matrices are converted to while loading, `kv_bytes` the bytes of KV per token.
pub fn cost(tensors: &[Tensor], quantize: Option<Dtype>, kv_bytes: u64) -> Option<TokenCost> {
    let is_expert = |tensor: &&Tensor| tensor.name.contains("_exps.") || tensor.name.contains(".experts.");
    let decoder = || tensors.iter().filter(|tensor| !is_vision(&tensor.name));
    if decoder().any(|tensor| is_expert(&tensor)) {
        return None;
    }
    let head =
        decoder().find(|tensor| is_head(&tensor.name)).or_else(|| decoder().find(|t| is_table(&t.name)));
    let mut cost = TokenCost { kv_bytes, ..TokenCost::default() };
    for tensor in decoder().filter(|tensor| !is_head(&tensor.name) && !is_table(&tensor.name)) {
        cost.weight_bytes += bytes(tensor, quantize);
        if tensor.shape.len() == 2 {
            cost.operations += 2 * values(tensor);
            cost.is_integer |= quantize.unwrap_or(tensor.dtype) != Dtype::F32;
        }
    }
    if let Some(head) = head {
        cost.head_operations = 2 * values(head);
        // At four bits, embedding tables keep a finer type.
        let finer = quantize.map(|to| if matches!(to, Dtype::Q4_0 | Dtype::Q4K) { Dtype::Q6K } else { to });
        cost.weight_bytes += bytes(head, finer);
    }
    (cost.operations > 0).then_some(cost)
}

fn is_vision(name: &str) -> bool {
    name.starts_with("v.") || name.starts_with("mm.") || name.contains("vision")
}

fn is_head(name: &str) -> bool {
    name == "output.weight" || name.ends_with("lm_head.weight")
}

fn is_table(name: &str) -> bool {
    name == "token_embd.weight" || name.ends_with("embed_tokens.weight")
}

fn values(tensor: &Tensor) -> u64 {
    tensor.shape.iter().map(|&n| n as u64).product()
}

/// Returns the bytes in memory. Only float matrices whose rows are whole blocks are converted.
fn bytes(tensor: &Tensor, quantize: Option<Dtype>) -> u64 {
    let is_float = matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
    let wanted = quantize.filter(|_| is_float && tensor.shape.len() == 2);
    let converted = wanted.and_then(|to| byte_len(to, &tensor.shape).ok());
    converted.or_else(|| byte_len(tensor.dtype, &tensor.shape).ok()).unwrap_or(0) as u64
}

/// Bytes that the caches of a large processor hold.
const IN_CACHES: u64 = 64 << 20;

/// Computes the limit from the mean of the probes with as many threads.
pub fn limit_of(document: &Document, result: &CaseResult) -> Option<RateLimit> {
    let model = document.models.iter().find(|model| model.setting == result.setting)?;
    let probes = document.machine.probes.iter().filter(|probe| probe.threads == result.setting.threads);
    let probes: Vec<_> = probes.collect();
    let mut probe = (*probes.first()?).clone();
    probe.read_gb_s = stats::mean(&probes.iter().map(|probe| probe.read_gb_s).collect::<Vec<_>>());
    let step = CaseStep::of(&result.case, result.setting.step_tokens)?;
    // Weights that fit in caches are not read from memory.
    let cost = model.cost.filter(|cost| cost.weight_bytes > IN_CACHES && !result.samples.is_empty())?;
    limit(&step, &cost, &probe, result.summary.median)
}

/// The step that a case repeats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CaseStep {
    /// Tokens that it computes.
    pub rows: u64,
    /// Tokens among them that are sampled from.
    pub sampled: u64,
    /// Average number of tokens before each row.
    pub behind: u64,
}

impl CaseStep {
    /// Returns the step of a case; `None` for cases that mix kinds of steps or measure a time.
    pub fn of(case: &Case, step_tokens: usize) -> Option<CaseStep> {
        let sequences = case.sequences as u64;
        match case.work {
            Work::Prompt { tokens } => Some(CaseStep {
                rows: (tokens * case.sequences).min(step_tokens) as u64,
                sampled: 0,
                behind: (case.depth + tokens / 2) as u64,
            }),
            Work::Generate { tokens } => Some(CaseStep {
                rows: sequences,
                sampled: sequences,
                behind: (case.depth + tokens / 2) as u64,
            }),
            _ => None,
        }
    }

    /// Returns the operations of the step.
    pub fn operations(&self, cost: &TokenCost) -> u64 {
        self.rows * cost.operations + self.sampled * cost.head_operations
    }

    /// Returns the bytes that it reads. Rows of one prompt share the KV before them.
    pub fn bytes(&self, cost: &TokenCost) -> u64 {
        cost.weight_bytes + self.sampled.max(1) * self.behind * cost.kv_bytes
    }
}

/// Returns the highest rate in tokens per second that the limits allow, and the median as a share of it.
fn limit(step: &CaseStep, cost: &TokenCost, probe: &Probe, median: f64) -> Option<RateLimit> {
    let peak = if cost.is_integer { probe.int8_gop_s } else { probe.f32_gop_s };
    let arithmetic = peak.map(|peak| step.operations(cost) as f64 / (peak * 1e9));
    let memory = step.bytes(cost) as f64 / (probe.read_gb_s * 1e9);
    let (by, seconds) = match arithmetic {
        Some(arithmetic) if arithmetic > memory => ("arithmetic", arithmetic),
        // Without a known arithmetic peak, a step of many rows has no known limit.
        None if step.rows > step.sampled => return None,
        _ => ("memory", memory),
    };
    let rate = step.rows as f64 / seconds;
    rate.is_finite().then(|| RateLimit { by: by.to_owned(), rate, share: median / rate })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], dtype: Dtype) -> Tensor {
        Tensor { name: name.to_owned(), shape: shape.to_vec(), dtype }
    }

    fn model() -> Vec<Tensor> {
        vec![
            tensor("token_embd.weight", &[100, 32], Dtype::F32),
            tensor("blk.0.attn_q.weight", &[64, 32], Dtype::Q8_0),
            tensor("blk.0.attn_norm.weight", &[32], Dtype::F32),
            tensor("v.patch.weight", &[64, 64], Dtype::F32),
        ]
    }

    #[test]
    fn a_tied_table_is_read_once_and_a_norm_is_no_product() {
        let found = cost(&model(), None, 8).expect("a cost");
        let expected = TokenCost {
            operations: 2 * 64 * 32,
            head_operations: 2 * 100 * 32,
            weight_bytes: 64 * 34 + 32 * 4 + 100 * 32 * 4,
            kv_bytes: 8,
            is_integer: true,
        };
        assert_eq!(found, expected);
        let mut untied = model();
        untied.push(tensor("output.weight", &[100, 32], Dtype::Q8_0));
        assert_eq!(cost(&untied, None, 8).expect("a cost").weight_bytes, 64 * 34 + 32 * 4 + 100 * 34);
    }

    #[test]
    fn experts_have_no_fixed_cost_and_conversion_changes_it() {
        let mut experts = model();
        experts.push(tensor("blk.0.ffn_up_exps.weight", &[4, 64, 32], Dtype::Q8_0));
        assert_eq!(cost(&experts, None, 8), None);
        let converted = cost(&model(), Some(Dtype::Q8_0), 8).expect("a cost");
        assert_eq!(converted.weight_bytes, 64 * 34 + 32 * 4 + 100 * 34);
        assert_eq!(cost(&[], None, 8), None);
    }

    #[test]
    fn prompts_meet_arithmetic_and_single_tokens_memory() {
        let cost = TokenCost {
            operations: 1_000_000,
            head_operations: 500_000,
            weight_bytes: 1_000_000,
            kv_bytes: 100,
            is_integer: true,
        };
        let probe = Probe { threads: 2, read_gb_s: 1.0, int8_gop_s: Some(100.0), f32_gop_s: Some(10.0) };
        let of = |work, depth, sequences| CaseStep::of(&Case { work, depth, sequences }, 128);
        let prompt = of(Work::Prompt { tokens: 512 }, 0, 1).expect("a step");
        assert_eq!(prompt, CaseStep { rows: 128, sampled: 0, behind: 256 });
        let found = limit(&prompt, &cost, &probe, 50_000.0).expect("a limit");
        // 128 rows of 10^6 operations at 10^11 per second.
        assert_eq!((found.by.as_str(), found.rate.round()), ("arithmetic", 100_000.0));
        assert!((found.share - 0.5).abs() < 1e-9);
        let single = of(Work::Generate { tokens: 128 }, 9936, 1).expect("a step");
        // 10^6 bytes of weights and 10^4 tokens of 100 bytes at 10^9 per second.
        let found = limit(&single, &cost, &probe, 100.0).expect("a limit");
        assert_eq!((found.by.as_str(), found.rate.round()), ("memory", 500.0));
        assert!((found.share - 0.2).abs() < 1e-9);
        let unknown = Probe { int8_gop_s: None, ..probe.clone() };
        assert_eq!(limit(&prompt, &cost, &unknown, 1.0), None);
        assert!(limit(&single, &cost, &unknown, 1.0).is_some());
        assert_eq!(of(Work::Warm { first: 1, turn: 1 }, 0, 1), None);
    }
}
