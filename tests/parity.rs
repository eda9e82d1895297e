//! The parity table: every family reproduces the logits of its reference implementation (transformers, float32, eager).

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use llmctl::runtime::LoadError;
use llmctl::runtime::backend::KvType;
use llmctl::runtime::backend::cpu::Cpu;
use llmctl::runtime::kernel::Dtype;
use llmctl::runtime::kv::{PagePool, PageTable};
use llmctl::runtime::model::arch::{Facts, describe};
use llmctl::runtime::model::decoder::{Decoder, Parts};
use llmctl::runtime::model::{Batch, Model, Row};
use llmctl::runtime::tensor::{HostTensor, TensorSource};

struct Memory(Vec<u8>);

impl TensorSource for Memory {
    fn tensor(&self, name: &str) -> Result<Option<HostTensor>, LoadError> {
        let st = safetensors::SafeTensors::deserialize(&self.0).unwrap();
        let Ok(t) = st.tensor(name) else { return Ok(None) };
        let dtype = match t.dtype() {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            _ => panic!(),
        };
        Ok(Some(HostTensor { dtype, shape: t.shape().to_vec(), bytes: t.data().to_vec().into() }))
    }
    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        self.tensor(name).unwrap().map(|t| (t.shape, t.dtype))
    }
    fn names(&self) -> Vec<Cow<'_, str>> {
        vec![]
    }
}

fn load(dir: &Path) -> Result<Box<dyn Model>, LoadError> {
    let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let d = describe(&Facts::hugging_face(dir.join("config.json"), config))?;
    let source = Memory(std::fs::read(dir.join("model.safetensors")).unwrap());
    let context_length = d.config.context_length;
    Ok(Box::new(Decoder::load(
        Cpu::new(2).unwrap(),
        Parts {
            config: d.config,
            naming: d.naming,
            source: &source,
            context_length,
            kv_type: KvType::F32,
            convert: &|_, t| Ok(t),
            progress: &mut |_, _| (),
        },
    )?))
}

fn logits(model: &mut dyn Model, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let pool = PagePool::new(100);
    let mut table = PageTable::new(&pool);
    let mut all = vec![];
    for (i, c) in tokens.chunks(chunk).enumerate() {
        table.extend(c.len()).unwrap();
        let rows: Vec<Row> = c
            .iter()
            .enumerate()
            .map(|(j, &token)| Row { token, position: i * chunk + j, sequence: 0, wants_logits: true })
            .collect();
        all.extend(model.forward(&Batch { rows: &rows, tables: &[&table] }).unwrap().values);
    }
    all
}

#[test]
fn parity() {
    let root: PathBuf = crate::common::fixtures().unwrap().join("parity");
    let mut dirs: Vec<_> = std::fs::read_dir(root).unwrap().map(|d| d.unwrap().path()).collect();
    dirs.sort();
    for dir in dirs {
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let mut model = match load(&dir) {
            Ok(m) => m,
            Err(e) => {
                println!("{name}: {e}");
                continue;
            }
        };
        let golden = std::fs::read(dir.join("golden.safetensors")).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        for (prompt, _) in [("short", 0), ("medium", 0), ("long", 0)] {
            let t = golden.tensor(&format!("{prompt}.tokens")).unwrap();
            let p = golden.tensor(&format!("{prompt}.positions")).unwrap();
            let l = golden.tensor(&format!("{prompt}.logits")).unwrap();
            let ints = |t: &safetensors::tensor::TensorView| -> Vec<usize> {
                match t.dtype() {
                    safetensors::Dtype::I64 => t
                        .data()
                        .chunks(8)
                        .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as usize)
                        .collect(),
                    _ => t
                        .data()
                        .chunks(4)
                        .map(|c| i32::from_le_bytes(c.try_into().unwrap()) as usize)
                        .collect(),
                }
            };
            let tokens: Vec<u32> = ints(&t).into_iter().map(|t| t as u32).collect();
            let expected: Vec<f32> =
                l.data().chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
            let mut first: Option<Vec<f32>> = None;
            for chunk in [1000, 1, 7, 64] {
                let got = logits(&mut *model, &tokens, chunk);
                let vocab = got.len() / tokens.len();
                let mut worst = 0f32;
                for (i, &pos) in ints(&p).iter().enumerate() {
                    for v in 0..vocab {
                        worst = worst.max((got[pos * vocab + v] - expected[i * vocab + v]).abs());
                    }
                }
                let f = first.get_or_insert_with(|| got.clone());
                println!("{name} {prompt} {chunk}: {worst:e} same bits {}", f == &got);
            }
        }
    }
}
