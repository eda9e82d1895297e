//! Attention as the CPU backend runs it, on the shape of Qwen3-0.6B: 16 heads, 8 KV heads, 128 coordinates.

use llmctl_kernel::Dtype;
use llmctl_models::backend::cpu::{Cpu, CpuBuffer, CpuKv};
use llmctl_models::backend::{
    AttentionSpec, Backend, KvLayout, KvShape, KvType, KvValues, PAGE_TOKENS, RowSpan, ScoreRule, Store,
    StoreShape,
};
use llmctl_models::tensor::HostTensor;

use super::{SWEEP_BYTES, median, seconds};

const HEADS: usize = 16;
const SHAPE: KvShape = KvShape { num_kv_heads: 8, head_dim: 128, values: KvValues::Own };

/// Positions of a history that one row looks back on.
const DEPTH: usize = 2048;

/// Rows of a prompt.
const PROMPT: usize = 512;

/// One KV type's storage and times.
pub struct Subject {
    kv_type: KvType,
    kv: CpuKv,
    layers: usize,
    decode: Vec<f64>,
    prefill: Vec<f64>,
}

fn queries(cpu: &Cpu, rows: usize) -> CpuBuffer {
    let width = HEADS * SHAPE.head_dim;
    let bytes: Vec<u8> = (0..rows * width).flat_map(|i| (i as f32 * 0.37).sin().to_le_bytes()).collect();
    let table = HostTensor::new(Dtype::F32, vec![rows, width], bytes.into()).expect("a matrix");
    let table = cpu.table(&table).expect("a table");
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let mut out = cpu.buffer();
    cpu.embed(&table, &tokens, 1.0, &mut out).expect("rows");
    out
}

impl Subject {
    /// As many layers as make a sweep over their pages miss every cache.
    pub fn new(cpu: &Cpu, kv_type: KvType) -> Subject {
        let layer_bytes = 2 * SHAPE.num_kv_heads * DEPTH * kv_type.row_bytes(SHAPE.head_dim);
        let layers = SWEEP_BYTES.div_ceil(layer_bytes);
        let layout = KvLayout {
            stores: vec![Store { shape: StoreShape::Rows(SHAPE), group: 0 }; layers],
            num_groups: 1,
        };
        let mut kv = cpu.kv(&layout, kv_type).expect("a type of the CPU's");
        let bytes = layout.page_bytes(0, kv_type);
        // Numbers below 1 in every type.
        let page: Vec<u8> =
            (0..bytes).map(|at| if at % 2 == 1 { 0x2c } else { (at * 37 / 2) as u8 }).collect();
        for number in 0..DEPTH / PAGE_TOKENS {
            cpu.import_page(&mut kv, 0, number as u32, page.clone().into()).expect("a whole page");
        }
        Subject { kv_type, kv, layers, decode: Vec::new(), prefill: Vec::new() }
    }

    fn attend(&self, cpu: &Cpu, layers: usize, rows: usize, end: usize) -> f64 {
        let (q, mut out) = (queries(cpu, rows), cpu.buffer());
        let pages = (0..(DEPTH / PAGE_TOKENS) as u32).collect();
        let spans =
            [RowSpan { rows: 0..rows, start: end - rows, num_drafted: 0, pages, seen_besides: Vec::new() }];
        seconds(|| {
            for layer in 0..layers {
                let rule = ScoreRule { scale: 0.09, softcap: None };
                let spec = AttentionSpec {
                    store: layer,
                    num_heads: HEADS,
                    rule,
                    window: None,
                    is_two_way: false,
                    sinks: None,
                    selected: None,
                };
                cpu.attend(&self.kv, &spec, &q, &spans, &mut out).expect("attention");
            }
        })
    }

    pub fn measure(&mut self, cpu: &Cpu) {
        let bytes = 2 * self.layers * SHAPE.num_kv_heads * DEPTH * self.kv_type.row_bytes(SHAPE.head_dim);
        self.decode.push(bytes as f64 / 1e9 / self.attend(cpu, self.layers, 1, DEPTH));
        let pairs = PROMPT * (PROMPT + 1) / 2 * HEADS;
        let layers = self.layers.min(4);
        let work = (4 * pairs * SHAPE.head_dim * layers) as f64 / 1e9;
        self.prefill.push(work / self.attend(cpu, layers, PROMPT, PROMPT));
    }

    pub fn line(&self, bandwidth: f64, peak: f64) -> String {
        let [decode, prefill] = [&self.decode, &self.prefill].map(|values| median(values.clone()));
        let share = |part: f64, whole: f64| 100.0 * part / whole;
        format!(
            "{:5} {decode:12.1}  {:5.0}% | {prefill:14.0}  {:5.0}%",
            self.kv_type.name(),
            share(decode, bandwidth),
            share(prefill, peak)
        )
    }
}

/// Column titles of [`Subject::line`].
pub const HEADER: &str = "kv     one row GB/s  % read | 512 rows GFLOP/s  % peak";
