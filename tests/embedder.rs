//! Promise: embeddings are those of transformers, and a text's vector depends on that text alone.
//!
//! The reference checkpoints are tiny and random: folders of the shared fixtures with texts, token ids and vectors of
//! transformers in float32.

use std::path::{Path, PathBuf};

use llmctl::runtime::embed::{EmbedClient, EmbedInput, EmbedKind, EmbedOutput, LongText};
use llmctl::runtime::load::hub::{ModelSource, Resolved};
use llmctl::runtime::load::{AskedTask, LoadOptions, LoadedEmbedder, load_embedder};
use llmctl::runtime::LoadError;
use serde_json::Value;

use crate::common::{fixtures, golden};

const FAMILIES: [&str; 7] = [
    "bert-cls",
    "bert-mean",
    "embedding-gemma-mean",
    "modernbert-mean",
    "nomic-bert-mean",
    "qwen3-embedding-last",
    "xlm-roberta-cls",
];

fn encoder(name: &str) -> Option<PathBuf> {
    let folder = fixtures()?.join("encoders").join(name);
    folder.is_dir().then_some(folder)
}

fn load(path: &Path, asked: Option<AskedTask>, options: &LoadOptions) -> Result<LoadedEmbedder, LoadError> {
    let source = match path.is_dir() {
        true => ModelSource::Folder(path.to_owned()),
        false => ModelSource::Gguf(path.to_owned()),
    };
    let resolved = Resolved::new(path.display().to_string(), source);
    load_embedder(&resolved, asked, options, &mut |_, _| {})
}

fn client(path: &Path) -> EmbedClient {
    let loaded = load(path, None, &golden::exact());
    EmbedClient::spawn(loaded.unwrap_or_else(|error| panic!("{}: {error}", path.display()))).unwrap()
}

fn vectors(client: &EmbedClient, inputs: Vec<EmbedInput>, dimensions: Option<usize>) -> Vec<Vec<f32>> {
    let vector = |output| match output {
        Ok(EmbedOutput::Vector(vector)) => vector,
        other => panic!("{other:?}"),
    };
    client.submit(inputs, dimensions).unwrap().map(vector).collect()
}

struct Golden {
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

fn golden_rows(folder: &Path) -> Vec<Golden> {
    let golden = std::fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
    let row = |row: &Value| {
        let [ids, vector]: [Vec<f64>; 2] = [numbers(&row["ids"]), numbers(&row["vector"])];
        Golden {
            text: row["text"].as_str().unwrap().to_owned(),
            ids: ids.into_iter().map(|id| id as u32).collect(),
            vector: vector.into_iter().map(|value| value as f32).collect(),
        }
    };
    golden["rows"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn vectors_and_ids_are_those_of_transformers_and_the_same_bits_alone_and_together() {
    for name in FAMILIES {
        let Some(folder) = encoder(name) else { continue };
        let client = client(&folder);
        let rows = golden_rows(&folder);
        let texts = client.texts();
        let inputs: Vec<EmbedInput> =
            rows.iter().map(|row| texts.encode("", &row.text, LongText::Refuse).unwrap()).collect();
        let together = vectors(&client, inputs.clone(), None);
        assert_eq!(together.len(), rows.len());
        let mut worst = 0.0f32;
        for ((row, input), vector) in rows.iter().zip(&inputs).zip(&together) {
            assert_eq!(input.ids(), row.ids, "{name} {:?}", row.text);
            assert_eq!(texts.kind, EmbedKind::Vectors(row.vector.len()), "{name}");
            let differences = vector.iter().zip(&row.vector).map(|(got, expected)| (got - expected).abs());
            worst = differences.fold(worst, f32::max);
            let alone = vectors(&client, vec![input.clone()], None);
            assert!(same_bits(&alone[0], vector), "{name} {:?} alone", row.text);
        }
        eprintln!("{name:22} {worst:.1e}");
        assert!(worst < 1e-4, "{name}: {worst}");
        let reversed: Vec<EmbedInput> = inputs.into_iter().rev().collect();
        let reversed = vectors(&client, reversed, None);
        assert!(together.iter().rev().zip(&reversed).all(|(a, b)| same_bits(a, b)), "{name} reversed");
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn long_texts_are_refused_or_cut_and_dimensions_are_the_first() {
    let Some(folder) = encoder("bert-mean") else { return };
    let options = LoadOptions { context: Some(12), ..golden::exact() };
    let client = EmbedClient::spawn(load(&folder, None, &options).unwrap()).unwrap();
    let texts = client.texts();
    let long = "one two three four five six seven eight nine ten one two three";
    let error = texts.encode("", long, LongText::Refuse).unwrap_err().to_string();
    assert!(error.contains("at most 12"), "{error}");
    let cut = texts.encode("", long, LongText::Cut).unwrap();
    let short = texts.encode("", "one two", LongText::Refuse).unwrap();
    assert_eq!((cut.num_tokens(), cut.ids().last()), (12, short.ids().last()), "it ends as every text does");
    let huge = "a".repeat(1 << 20);
    assert!(texts.encode("", &huge, LongText::Refuse).unwrap_err().to_string().contains("bytes"));
    assert!(texts.encode("", &huge, LongText::Cut).is_ok());
    let whole = vectors(&client, vec![short.clone()], None);
    let first = vectors(&client, vec![short], Some(8));
    let length = |vector: &[f32]| vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    assert!((length(&first[0]) - 1.0).abs() < 1e-6 && first[0].len() == 8);
    let factor = length(&whole[0][..8]);
    assert!(first[0].iter().zip(&whole[0]).all(|(cut, whole)| (cut * factor - whole).abs() < 1e-6));
}
