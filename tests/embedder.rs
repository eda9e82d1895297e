//! Promise: embeddings are those of transformers, and a text's vector depends on that text alone.
//!
//! The reference checkpoints are tiny and random: folders of the shared fixtures with texts, token ids and vectors of
//! transformers in float32.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use llmctl_engine::embed::{EmbedClient, EmbedInput, EmbedKind, EmbedOutput, LongText};
use llmctl_models::load::{AskedTask, LoadedEmbedder, Pooling, load_embedder};
use llmctl_models::model::weights::to_f32;

use crate::common::gguf::F32;
use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, start_as_told};
use crate::serve_ops::client::{ask, get};

pub const FAMILIES: [&str; 7] = [
    "bert-cls",
    "bert-mean",
    "embedding-gemma-mean",
    "modernbert-mean",
    "nomic-bert-mean",
    "qwen3-embedding-last",
    "xlm-roberta-cls",
];

pub fn encoder(name: &str) -> Option<PathBuf> {
    let folder = fixtures()?.join("encoders").join(name);
    folder.is_dir().then_some(folder)
}

pub fn load(
    path: &Path,
    asked: Option<AskedTask>,
    options: &LoadOptions,
) -> Result<LoadedEmbedder, LoadError> {
    let source = match path.is_dir() {
        true => ModelSource::Folder(path.to_owned()),
        false => ModelSource::Gguf(path.to_owned()),
    };
    let resolved = Resolved::new(path.display().to_string(), source);
    load_embedder(&resolved, asked, options, &mut |_, _| {})
}

fn client(path: &Path) -> EmbedClient {
    let loaded = load(path, None, &exact());
    EmbedClient::spawn(loaded.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .expect("a thread")
}

fn vectors(client: &EmbedClient, inputs: Vec<EmbedInput>, dimensions: Option<usize>) -> Vec<Vec<f32>> {
    let vector = |output| match output {
        Ok(EmbedOutput::Vector(vector)) => vector,
        other => panic!("{other:?}"),
    };
    client.submit(inputs, dimensions).expect("a running embedder").map(vector).collect()
}

struct Golden {
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

fn golden_rows(folder: &Path) -> Vec<Golden> {
    let golden = std::fs::read(folder.join("golden.json")).expect("a file");
    let golden: Value = serde_json::from_slice(&golden).expect("JSON");
    let numbers = |value: &Value| {
        value.as_array().expect("a list").iter().map(|n| n.as_f64().expect("a number")).collect()
    };
    let row = |row: &Value| {
        let [ids, vector]: [Vec<f64>; 2] = [numbers(&row["ids"]), numbers(&row["vector"])];
        Golden {
            text: row["text"].as_str().expect("a text").to_owned(),
            ids: ids.into_iter().map(|id| id as u32).collect(),
            vector: vector.into_iter().map(|value| value as f32).collect(),
        }
    };
    golden["rows"].as_array().expect("a list").iter().map(row).collect()
}

#[test]
fn vectors_and_ids_are_those_of_transformers_and_the_same_bits_alone_and_together() {
    for name in FAMILIES {
        let Some(folder) = encoder(name) else { continue };
        let client = client(&folder);
        let rows = golden_rows(&folder);
        let texts = client.texts();
        let inputs: Vec<EmbedInput> =
            rows.iter().map(|row| texts.encode("", &row.text, LongText::Refuse).expect("a text")).collect();
        let together = vectors(&client, inputs.clone(), None);
        assert_eq!(together.len(), rows.len());
        for ((row, input), vector) in rows.iter().zip(&inputs).zip(&together) {
            assert_eq!(input.ids(), row.ids, "{name} {:?}", row.text);
            assert_eq!(texts.kind, EmbedKind::Vectors(row.vector.len()), "{name}");
            let close = |(got, expected): (&f32, &f32)| (got - expected).abs() < 1e-4;
            assert!(vector.len() == row.vector.len(), "{name} {:?}", row.text);
            assert!(vector.iter().zip(&row.vector).all(close), "{name} {:?}", row.text);
            let alone = vectors(&client, vec![input.clone()], None);
            assert!(same_bits(&alone[0], vector), "{name} {:?} alone", row.text);
        }
        let reversed: Vec<EmbedInput> = inputs.into_iter().rev().collect();
        let reversed = vectors(&client, reversed, None);
        assert!(together.iter().rev().zip(&reversed).all(|(a, b)| same_bits(a, b)), "{name} reversed");
    }
}

#[test]
fn long_texts_are_refused_or_cut_and_dimensions_are_the_first() {
    let Some(folder) = encoder("bert-mean") else { return };
    let options = LoadOptions { context: Some(12), ..exact() };
    let client = EmbedClient::spawn(load(&folder, None, &options).expect("a model")).expect("a thread");
    let texts = client.texts();
    let long = "one two three four five six seven eight nine ten one two three";
    let error = texts.encode("", long, LongText::Refuse).expect_err("too long").to_string();
    assert!(error.contains("at most 12"), "{error}");
    let cut = texts.encode("", long, LongText::Cut).expect("a text");
    let short = texts.encode("", "one two", LongText::Refuse).expect("a text");
    assert_eq!((cut.num_tokens(), cut.ids().last()), (12, short.ids().last()), "it ends as every text does");
    let huge = "a".repeat(1 << 20);
    assert!(texts.encode("", &huge, LongText::Refuse).expect_err("too long").to_string().contains("bytes"));
    assert!(texts.encode("", &huge, LongText::Cut).is_ok());
    let whole = vectors(&client, vec![short.clone()], None);
    let first = vectors(&client, vec![short], Some(8));
    let length = |vector: &[f32]| vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    assert!((length(&first[0]) - 1.0).abs() < 1e-6 && first[0].len() == 8);
    let factor = length(&whole[0][..8]);
    assert!(first[0].iter().zip(&whole[0]).all(|(cut, whole)| (cut * factor - whole).abs() < 1e-6));
}

/// A tiny encoder as a folder whose files a test may change.
fn copy(name: &str) -> Option<(TempDir, PathBuf)> {
    let from = encoder(name)?;
    let place = tempfile::tempdir().expect("a folder");
    let folder = place.path().join(name);
    std::fs::create_dir_all(folder.join("1_Pooling")).expect("a file");
    for file in
        ["config.json", "model.safetensors", "modules.json", "tokenizer.json", "tokenizer_config.json"]
    {
        std::fs::copy(from.join(file), folder.join(file)).expect("a file");
    }
    std::fs::copy(from.join("1_Pooling/config.json"), folder.join("1_Pooling/config.json")).expect("a file");
    Some((place, folder))
}

#[test]
fn models_that_are_not_computed_are_refused_by_name() {
    let Some((_place, folder)) = copy("bert-mean") else { return };
    let refused = |file: &str, content: &str, expected: &str| {
        let path = folder.join(file);
        let before = std::fs::read(&path).ok();
        std::fs::write(&path, content).expect("a file");
        let error = load(&folder, None, &exact()).err().unwrap_or_else(|| panic!("{expected}")).to_string();
        assert!(error.contains(expected), "{error}");
        match before {
            Some(before) => std::fs::write(&path, before).expect("a file"),
            None => std::fs::remove_file(&path).expect("a file"),
        }
    };
    let pooling = "1_Pooling/config.json";
    refused(
        pooling,
        r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}"#,
        "mean_tokens and cls_token",
    );
    refused(pooling, r#"{"pooling_mode_weightedmean_tokens": true}"#, "weightedmean_tokens");
    refused(pooling, r#"{"pooling_mode_mean_tokens": true, "include_prompt": false}"#, "prompt");
    refused("modules.json", r#"[{"path": "", "type": "sentence_transformers.models.CNN"}]"#, "CNN");
    refused(
        "modules.json",
        r#"[{"path": "../x", "type": "sentence_transformers.models.Pooling"}]"#,
        "leaves the folder",
    );
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a file");
    refused("config.json", &config.replace("\"gelu\"", "\"relu\""), "relu");
    refused("config.json", &config.replace("\"hidden_size\": 32", "\"hidden_size\": 30"), "heads");
    refused("config.json", &config.replace("\"vocab_size\": 400", "\"vocab_size\": 401"), "word_embeddings");
    refused("sentence_bert_config.json", r#"{"max_seq_length": 0}"#, "max_seq_length");
    let asked = |task| load(&folder, Some(task), &exact()).err().expect("refused").to_string();
    let error = asked(AskedTask::Rerank);
    assert!(error.contains("--task rerank") && error.contains("classification head"), "{error}");
    let Some(parity) = Some(parity_folder().join("llama")).filter(|path| path.is_dir()) else {
        return;
    };
    let error = load(&parity, None, &exact()).err().expect("a model that writes text").to_string();
    assert!(error.contains("--pooling"), "{error}");
    assert!(load(&parity, Some(AskedTask::Pooling(Pooling::Last)), &exact()).is_ok());
}

#[test]
fn an_encoder_without_modules_is_pooled_by_the_mean_with_a_notice() {
    let Some((_place, folder)) = copy("bert-mean") else { return };
    let said = client(&folder);
    std::fs::remove_file(folder.join("modules.json")).expect("a file");
    let loaded = load(&folder, None, &exact()).expect("a model");
    assert!(loaded.notices.iter().any(|notice| notice.to_string().contains("mean")), "{:?}", loaded.notices);
    let assumed = EmbedClient::spawn(loaded).expect("a thread");
    let [said, assumed] = [said, assumed].map(|client| {
        let input = client.texts().encode("", "A feline", LongText::Refuse).expect("a text");
        vectors(&client, vec![input], None).remove(0)
    });
    assert!(same_bits(&said, &assumed));
}

#[test]
fn a_decoder_of_vectors_needs_no_output_matrix_and_shards_beside_its_file_are_named() {
    let Some((_place, folder)) = copy("qwen3-embedding-last") else { return };
    let of = |client: EmbedClient| {
        let input = client.texts().encode("", "A feline", LongText::Refuse).expect("a text");
        vectors(&client, vec![input], None).remove(0)
    };
    let tied = of(client(&folder));
    rewrite(&folder, &[], &[("tie_word_embeddings", json!(false))]);
    let index =
        json!({"metadata": {}, "weight_map": {"embed_tokens.weight": "model-00001-of-00002.safetensors"}});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("a file");
    let loaded = load(&folder, None, &exact()).expect("a model");
    let notices: Vec<String> = loaded.notices.iter().map(ToString::to_string).collect();
    assert!(
        notices.iter().any(|notice| notice.starts_with("model.safetensors is used, not the shards")),
        "{notices:?}"
    );
    assert!(same_bits(&tied, &of(EmbedClient::spawn(loaded).expect("a thread"))));
}

#[test]
fn prompts_of_the_files_go_before_the_text_and_dense_layers_behind_the_pooling() {
    let Some((_place, folder)) = copy("bert-mean") else { return };
    let settings = r#"{"prompts": {"query": "one two "}, "default_prompt_name": null}"#;
    std::fs::write(folder.join("config_sentence_transformers.json"), settings).expect("a file");
    let plain = client(&folder);
    let texts = plain.texts();
    assert_eq!(texts.prompt(None).expect("a prompt"), "");
    let prompt = texts.prompt(Some("query")).expect("a prompt");
    let [with, whole] = [(prompt, "three"), ("", "one two three")]
        .map(|(prompt, text)| texts.encode(prompt, text, LongText::Refuse).expect("a text"));
    assert_eq!(with, whole);
    assert!(texts.prompt(Some("passage")).expect_err("no such prompt").to_string().contains("query"));
    // A dense layer that takes the difference of the first two values, and adds one.
    let modules = r#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]"#;
    std::fs::write(folder.join("modules.json"), modules).expect("a file");
    std::fs::create_dir(folder.join("2_Dense")).expect("a file");
    let config = r#"{"in_features": 32, "out_features": 1, "bias": true,
        "activation_function": "torch.nn.modules.linear.Identity"}"#;
    std::fs::write(folder.join("2_Dense/config.json"), config).expect("a file");
    let weight: Vec<u8> =
        (0..32).map(|at| [1.0f32, -1.0, 0.0][at.min(2)]).flat_map(f32::to_le_bytes).collect();
    let bias = 1.0f32.to_le_bytes();
    let view =
        |shape: Vec<usize>, bytes| TensorView::new(safetensors::Dtype::F32, shape, bytes).expect("a tensor");
    let tensors =
        [("linear.weight", view(vec![1, 32], &weight[..])), ("linear.bias", view(vec![1], &bias[..]))];
    let bytes = safetensors::serialize(tensors, None).expect("a checkpoint");
    std::fs::write(folder.join("2_Dense/model.safetensors"), bytes).expect("a file");
    let dense = client(&folder);
    assert_eq!(dense.texts().kind, EmbedKind::Vectors(1));
    std::fs::write(
        folder.join("modules.json"),
        modules.replace("2_Dense", "1_Pooling").replace("models.Dense", "models.Pooling"),
    )
    .expect("a file");
    let pooled = vectors(&client(&folder), vec![whole.clone()], None);
    let vector = vectors(&dense, vec![whole], None);
    assert!((vector[0][0] - (pooled[0][0] - pooled[0][1] + 1.0)).abs() < 1e-6, "{vector:?} {pooled:?}");
}

#[test]
fn the_command_writes_lines_and_matrices() {
    let Some(folder) = encoder("bert-mean") else { return };
    let model = folder.to_string_lossy().into_owned();
    let rows = golden_rows(&folder);
    let place = Place::new();
    let lines: String = rows.iter().map(|row| row.text.replace(['\n', '\t'], " ") + "\n").collect();
    let ran = finish(place.command(&["embed", "--model", &model]), &lines);
    let written: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(written.len(), rows.len());
    for (index, (line, row)) in written.iter().zip(&rows).enumerate() {
        assert_eq!(line["index"], index);
        let vector = line["embedding"].as_array().expect("a list");
        let close = |(got, expected): (&Value, &f32)| {
            (got.as_f64().expect("a number") as f32 - expected).abs() < 1e-4
        };
        assert!(vector.iter().zip(&row.vector).all(close), "{line}");
    }
    let json = "{\"id\": \"a\", \"body\": \"x\"}\n\"x\"\n";
    place.write("in.jsonl", json);
    let args = ["embed", "--model", &model, "--jsonl", "--field", "body", "--input", "in.jsonl"];
    let ran = place.run(&args);
    let written: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&written[0]["id"], written[1].get("id")), (&"a".into(), None));
    assert_eq!(written[0]["embedding"], written[1]["embedding"]);
    place.run(&[&args[..], &["--out", "out.npy", "--dimensions", "8"]].concat()).check(0, "");
    let matrix = std::fs::read(place.path("out.npy")).expect("a file");
    assert!(matrix.starts_with(b"\x93NUMPY\x01\x00") && matrix.len() == 128 + 2 * 8 * 4);
    assert!(String::from_utf8_lossy(&matrix[..128]).contains("(2, 8)"));
    let args = ["embed", "--model", &model, "--jsonl", "--input"];
    let lines = "\"one\"\n\"two\"\n{\n\"three\"\n";
    place.write("torn.jsonl", lines);
    let ran = place.run(&[&args[..], &["torn.jsonl"]].concat());
    assert_eq!(ran.check(65, "line 3").stdout.lines().count(), 2, "texts before a wrong line are written");
    for out in ["torn.npy", "torn.out"] {
        place.run(&[&args[..], &["torn.jsonl", "--out", out]].concat()).check(65, "line 3");
    }
    let written = std::fs::read_dir(place.folder.path()).expect("a folder");
    let names = written.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let left: Vec<String> =
        names.filter(|name| name.contains("torn.") && !name.ends_with(".jsonl")).collect();
    assert_eq!(left, [""; 0], "nothing is left of a file that was not finished");
    let out = ["in.jsonl", "--field", "body", "--out", "precious"];
    place.write("precious", "precious");
    place.run(&[&args[..], &out].concat()).check(2, "--force replaces it");
    assert_eq!(place.read("precious"), "precious");
    place.run(&[&args[..], &out, &["--force"]].concat()).check(0, "");
    assert_eq!(place.read("precious").lines().count(), 2);
    place.run(&[&args[..], &["torn.jsonl", "--out", "torn.jsonl"]].concat()).check(2, "the same file");
    assert_eq!(std::fs::read_to_string(place.path("torn.jsonl")).expect("a file"), lines);
    let long = "one two three ".repeat(200);
    let args = ["embed", "--model", &model, "short", &long];
    place.run(&args).check(65, "text 2").check(65, "--truncate");
    place.run(&[&args[..], &["--truncate"]].concat()).check(0, "1 text cut to 256 tokens");
    place.run(&["embed", "x"]).check(2, "--model");
    place.run(&["run", "--model", &model, "x"]).check(65, "llmctl embed");
    let shown = place.run(&["models", "show", &model]);
    assert!(shown.check(0, "").stdout.contains("embeddings of 32 values"), "{shown:?}");
}

fn post(serving: &Serving, path: &str, body: &Value) -> crate::serve_ops::client::Reply {
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json");
    ask(serving.address, &head, &body.to_string())
}

#[test]
fn a_server_of_an_encoder_answers_as_openai_does_and_refuses_chat() {
    let Some(folder) = encoder("bert-mean") else { return };
    let model = folder.to_string_lossy().into_owned();
    let (serving, said) = start_as_told(Place::new(), &["--model", &model]);
    assert!(said.iter().any(|line| line.contains("embeddings of 32 values")), "{said:?}");
    let rows = golden_rows(&folder);
    let texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
    let many = post(&serving, "/v1/embeddings", &json!({"input": texts, "model": "bert-mean"})).json();
    for (index, (data, row)) in many["data"].as_array().expect("a list").iter().zip(&rows).enumerate() {
        assert_eq!((&data["object"], &data["index"]), (&"embedding".into(), &index.into()));
        let close = |(got, expected): (&Value, &f32)| {
            (got.as_f64().expect("a number") as f32 - expected).abs() < 1e-4
        };
        assert!(data["embedding"].as_array().expect("a list").iter().zip(&row.vector).all(close), "{data}");
    }
    let tokens: usize = rows.iter().map(|row| row.ids.len()).sum();
    assert_eq!(many["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    let same = |body: Value| {
        let reply = post(&serving, "/v1/embeddings", &body).json();
        assert_eq!(reply["data"][0]["embedding"], many["data"][0]["embedding"], "{body}");
    };
    same(json!({"input": texts[0]}));
    same(json!({"input": rows[0].ids}));
    same(json!({"input": [rows[0].ids, [2, 3]], "user": "somebody"}));
    let packed =
        post(&serving, "/v1/embeddings", &json!({"input": texts[0], "encoding_format": "base64"})).json();
    let bytes = STANDARD.decode(packed["data"][0]["embedding"].as_str().expect("a text")).expect("base64");
    let first = f32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
    assert_eq!(many["data"][0]["embedding"][0].as_f64().expect("a number") as f32, first);
    let short = post(&serving, "/v1/embeddings", &json!({"input": texts[0], "dimensions": 4})).json();
    assert_eq!(short["data"][0]["embedding"].as_array().expect("a list").len(), 4);
    for (body, status, code) in [
        (json!({"input": []}), 422, "invalid_value"),
        (json!({"input": {"a": 1}}), 422, "invalid_value"),
        (json!({"model": "bert-mean"}), 422, "invalid_value"),
        (json!({"input": "x", "model": "other"}), 404, "model_not_found"),
        (json!({"input": "x", "dimensions": 33}), 400, "invalid_value"),
        (json!({"input": "x", "dimensions": 0}), 400, "invalid_value"),
        (json!({"input": vec!["x"; 2049]}), 400, "invalid_value"),
        (json!({"input": "x", "encoding_format": "hex"}), 400, "unsupported_parameter"),
        (json!({"input": [[400]]}), 400, "invalid_value"),
        (json!({"input": ["x", "one ".repeat(300)]}), 400, "invalid_value"),
        (json!({"input": "x", "temperature": 1}), 400, "unsupported_parameter"),
    ] {
        post(&serving, "/v1/embeddings", &body).check(status, code);
    }
    for path in ["/v1/rerank", "/reranking", "/v1/reranking"] {
        post(&serving, path, &json!({"query": "x", "documents": ["y"]})).check(400, "unsupported_parameter");
    }
    let cut = json!({"input": "one ".repeat(300), "truncate": true});
    assert_eq!(post(&serving, "/v1/embeddings", &cut).json()["usage"]["total_tokens"], 256);
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let refused = post(&serving, "/v1/chat/completions", &chat);
    assert!(refused.check(400, "unsupported_parameter").body.contains("/v1/embeddings"), "{}", refused.body);
    assert_eq!(get(serving.address, "/v1/models").json()["data"][0]["max_model_len"], 256);
    let ids = post(&serving, "/tokenize", &json!({"content": texts[0], "add_special": true})).json();
    assert_eq!(ids["tokens"], json!(rows[0].ids));
}

#[test]
fn a_server_of_an_embedder_refuses_flags_that_it_cannot_honour() {
    let Some(folder) = encoder("bert-mean") else { return };
    let (model, place) = (folder.to_string_lossy().into_owned(), Place::new());
    let refused = |flags: &[&str], code: i32, expected: &str| {
        let args = [&["serve", "--port", "0", "--model", &model][..], flags].concat();
        place.run(&args).check(code, expected);
    };
    refused(&["--kv-type", "f32"], 2, "--kv-type is for models that write text");
    refused(&["--speculate", "off"], 2, "--speculate is for models that write text");
    refused(&["--parallel", "2"], 2, "--parallel is for models that write text");
    place.write("mcp.json", "{\"mcpServers\": {}}");
    refused(&["--mcp-config", "mcp.json"], 2, "--mcp-config is for models that write text");
    refused(&["--task", "embed", "--engine", "http://127.0.0.1:1"], 2, "--engine");
    refused(&["--task", "rerank", "--pooling", "cls"], 2, "--pooling");
    refused(&["--task", "rerank"], 65, "classification head");
    let llama = crate::serve_ops::binary::model();
    let twice = ["serve", "--port", "0", "--model", &llama, "--embedding-model", &model];
    place.run(&[&twice[..], &["--model-id", "bert-mean"]].concat()).check(2, "both called \"bert-mean\"");
    let chat = ["serve", "--port", "0", "--model", &llama, "--task", "chat", "--pooling", "cls"];
    place.run(&chat).check(2, "--pooling");
    let (serving, _) = start_as_told(Place::new(), &["--model", &model, "--pooling", "cls"]);
    let asked = Some(AskedTask::Pooling(Pooling::Cls));
    let pooled = EmbedClient::spawn(load(&folder, asked, &exact()).expect("a model")).expect("a thread");
    let input = pooled.texts().encode("", "A feline", LongText::Refuse).expect("a text");
    let expected = vectors(&pooled, vec![input], None).remove(0);
    let reply = post(&serving, "/v1/embeddings", &json!({"input": "A feline"})).json();
    let got = reply["data"][0]["embedding"].as_array().expect("a list");
    let close =
        |(got, expected): (&Value, &f32)| (got.as_f64().expect("a number") as f32 - expected).abs() < 1e-6;
    assert!(got.len() == expected.len() && got.iter().zip(&expected).all(close), "{reply}");
}

#[test]
fn an_embedder_needs_no_tools_of_the_users_configuration() {
    let Some(folder) = encoder("bert-mean") else { return };
    let place = Place::new();
    std::fs::create_dir_all(place.path(".config/llmctl")).expect("a folder");
    place.write("mcp.json", json!({"mcpServers": {"a": {"command": "/bin/cat"}}}).to_string());
    let file = format!("mcp-config = [{:?}]\n", place.path("mcp.json").display().to_string());
    place.write(".config/llmctl/config.toml", file);
    let (serving, said) = start_as_told(place, &["--model", &folder.to_string_lossy()]);
    let note = "no MCP servers: bert-mean writes no text that could call their tools";
    assert!(said.iter().any(|line| line == note), "{said:?}");
    get(serving.address, "/v1/mcp").check(400, "unsupported_parameter");
    post(&serving, "/v1/mcp/tools/a__b", &json!({"arguments": {}})).check(400, "unsupported_parameter");
}

#[test]
fn a_context_is_as_long_as_the_rows_of_a_text_fit_into_memory() {
    let Some(folder) = encoder("bert-mean") else { return };
    let context = |available_memory: Option<u64>| {
        let loaded = load(&folder, None, &LoadOptions { available_memory, ..exact() });
        loaded.map(|loaded| (loaded.model.spec().context_length, loaded.notices))
    };
    let whole = context(None).expect("a model").0;
    let needed = match context(Some(0)) {
        Err(LoadError::TooBig { needed, .. }) => needed,
        other => panic!("{other:?}"),
    };
    assert_eq!(context(Some(needed)).expect("it fits").0, whole);
    // 8 values per hidden one and 2 per one of the feed-forward part.
    let row_bytes = 4 * (8 * 32 + 2 * 64);
    let (shorter, notices) = context(Some(needed - 10 * row_bytes)).expect("a shorter context");
    assert_eq!(shorter, whole - 10);
    assert!(notices.iter().any(|notice| notice.to_string().contains("context limited")), "{notices:?}");
}

#[test]
fn an_embedder_beside_a_model_that_writes_text() {
    let Some(folder) = encoder("qwen3-embedding-last") else { return };
    let (embedder, llama) = (folder.to_string_lossy().into_owned(), crate::serve_ops::binary::model());
    let (serving, _) = start_as_told(Place::new(), &["--model", &llama, "--embedding-model", &embedder]);
    let listed = get(serving.address, "/v1/models").json();
    let ids: Vec<&Value> =
        listed["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["llama", "qwen3-embedding-last"]);
    let shown = get(serving.address, "/v1/models/qwen3-embedding-last");
    assert_eq!((shown.status, &shown.json()), (200, &listed["data"][1]));
    assert_eq!(shown.json()["capabilities"]["completion_chat"], false);
    assert!(shown.json()["max_model_len"].is_u64(), "{shown:?}");
    let row = &golden_rows(&folder)[0];
    let body = json!({"input": row.text, "model": "qwen3-embedding-last"});
    let reply = post(&serving, "/v1/embeddings", &body).json();
    assert!(
        (reply["data"][0]["embedding"][0].as_f64().expect("a number") as f32 - row.vector[0]).abs() < 1e-4
    );
    post(&serving, "/v1/embeddings", &json!({"input": "x", "model": "llama"})).check(404, "model_not_found");
    let text =
        post(&serving, "/v1/completions", &json!({"prompt": "Once", "max_tokens": 2, "model": "llama"}));
    assert_eq!(text.status, 200);
    let (alone, _) = start_as_told(Place::new(), &["--model", &llama]);
    let refused = post(&alone, "/v1/embeddings", &json!({"input": "x"}));
    assert!(
        refused.check(400, "unsupported_parameter").body.contains("--embedding-model"),
        "{}",
        refused.body
    );
}

fn gguf_name(name: &str) -> Option<String> {
    let name = name.replace("mlp.Wi.", "ffn_up.").replace("mlp.Wo.", "ffn_down.");
    let within = name.trim_start_matches("encoder.");
    let (prefix, part) = match within.split_once('.').filter(|(first, _)| first.starts_with("layer")) {
        Some((_, rest)) => {
            let (number, part) = rest.split_once('.')?;
            (format!("blk.{number}."), part)
        }
        None => (String::new(), within),
    };
    if part.starts_with("ffn_") {
        return Some(format!("{prefix}{part}"));
    }
    // The table has parts of names of Hugging Face and of llama.cpp's converter; a tensor without one is left out.
    let named = |(hf, gguf): (&str, &str)| Some(format!("{gguf}{}", part.strip_prefix(hf)?));
    listed("gguf", "encoder names").into_iter().find_map(named).map(|part| format!("{prefix}{part}"))
}

/// The pieces of a WordPiece vocabulary as llama.cpp's converter writes them, padded to the embedding's rows, and their kinds.
fn gguf_vocabulary(folder: &Path) -> (Vec<String>, Vec<u32>) {
    let file = std::fs::read(folder.join("tokenizer.json")).expect("a file");
    let json: Value = serde_json::from_slice(&file).expect("JSON");
    let mut pieces: Vec<String> = (0..400).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![5; 400];
    for (text, id) in json["model"]["vocab"].as_object().expect("an object") {
        let id = id.as_u64().expect("a number") as usize;
        let is_special = text.starts_with('[') && text.len() > 1;
        let begun = || text.strip_prefix("##").map_or_else(|| format!("▁{text}"), str::to_owned);
        (pieces[id], kinds[id]) = if is_special { (text.clone(), 3) } else { (begun(), 1) };
    }
    (pieces, kinds)
}

fn write_gguf(folder: &Path, arch: &str, pooling: u32, into: &Path) {
    let (pieces, kinds) = gguf_vocabulary(folder);
    let key = |name: &str| format!("{arch}.{name}");
    let mut file = GgufBuilder::new()
        .text("general.architecture", arch)
        .u32(&key("context_length"), 256)
        .u32(&key("embedding_length"), 32)
        .u32(&key("block_count"), 3)
        .u32(&key("feed_forward_length"), 64)
        .u32(&key("attention.head_count"), 4)
        .f32(&key("attention.layer_norm_epsilon"), if arch == "modern-bert" { 1e-5 } else { 1e-12 })
        .bool(&key("attention.causal"), false)
        .u32(&key("pooling_type"), pooling)
        .text("tokenizer.ggml.model", "bert")
        .texts("tokenizer.ggml.tokens", &pieces)
        .u32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.unknown_token_id", 1)
        .u32("tokenizer.ggml.cls_token_id", 2)
        .u32("tokenizer.ggml.seperator_token_id", 3);
    file = match arch {
        // As llama.cpp's converter writes them since 2025; the others as before.
        "bert" => file
            .bool("tokenizer.ggml.add_bos_token", true)
            .bool("tokenizer.ggml.add_eos_token", true)
            .bool("tokenizer.ggml.add_sep_token", false),
        "nomic-bert" => file.f32(&key("rope.freq_base"), 1000.0),
        "modern-bert" => file
            .f32(&key("rope.freq_base"), 160_000.0)
            .f32(&key("rope.freq_base_swa"), 10_000.0)
            .u32(&key("attention.sliding_window"), 16)
            .array(&key("attention.sliding_window_pattern"), 7, 3, &[0, 1, 0]),
        _ => file,
    };
    let checkpoint = Safetensors::open(folder).expect("a checkpoint");
    for name in checkpoint.names() {
        let Some(gguf) = gguf_name(&name) else { continue };
        let tensor = checkpoint.tensor(&name).expect("a checkpoint").expect("a tensor");
        file = file.tensor(&gguf, &tensor.shape, F32, &tensor.bytes);
    }
    std::fs::write(into, file.build()).expect("a file");
}

#[test]
fn encoders_as_gguf_give_the_bits_of_their_folders() {
    let place = tempfile::tempdir().expect("a folder");
    for (name, arch, pooling) in [
        ("bert-mean", "bert", 1),
        ("bert-cls", "bert", 2),
        ("nomic-bert-mean", "nomic-bert", 1),
        ("modernbert-mean", "modern-bert", 1),
    ] {
        let Some(folder) = encoder(name) else { continue };
        let path = place.path().join(format!("{name}.gguf"));
        write_gguf(&folder, arch, pooling, &path);
        let [folder_client, gguf_client] = [client(&folder), client(&path)];
        for row in golden_rows(&folder) {
            if arch != "modern-bert" {
                let encoded = gguf_client.texts().encode("", &row.text, LongText::Refuse).expect("a text");
                assert_eq!(encoded.ids(), row.ids, "{name} {:?}", row.text);
            }
            let [from_folder, from_gguf] = [&folder_client, &gguf_client].map(|client| {
                let input = client.texts().ids(row.ids.clone(), LongText::Refuse).expect("a text");
                vectors(client, vec![input], None).remove(0)
            });
            assert!(same_bits(&from_folder, &from_gguf), "{name} {:?}", row.text);
        }
    }
}

/// Writes the checkpoint of `folder` anew, with these tensors added or replaced, and some members of its configuration.
fn rewrite(folder: &Path, tensors: &[(&str, Vec<usize>, Vec<f32>)], config: &[(&str, Value)]) {
    let checkpoint = Safetensors::open(folder).expect("a checkpoint");
    let mut all: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for name in checkpoint.names().iter().filter(|name| tensors.iter().all(|(added, ..)| **added != name[..]))
    {
        let tensor = checkpoint.tensor(name).expect("a checkpoint").expect("a tensor");
        all.push((name.to_string(), tensor.shape.clone(), tensor.bytes.to_vec()));
    }
    drop(checkpoint);
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    all.extend(tensors.iter().map(|(name, shape, values)| (name.to_string(), shape.clone(), bytes(values))));
    let view = |(name, shape, bytes): &(String, Vec<usize>, Vec<u8>)| {
        let bytes: &'static [u8] = bytes.clone().leak();
        (name.clone(), TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).expect("a tensor"))
    };
    let written = safetensors::serialize(all.iter().map(view), None).expect("a checkpoint");
    std::fs::remove_file(folder.join("model.safetensors")).expect("a file");
    std::fs::write(folder.join("model.safetensors"), written).expect("a file");
    let path = folder.join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    config.iter().for_each(|(key, value)| json[*key] = value.clone());
    std::fs::write(path, json.to_string()).expect("a file");
}

fn values(folder: &Path, name: &str) -> Vec<f32> {
    to_f32(
        &Safetensors::open(folder)
            .expect("a checkpoint")
            .tensor(name)
            .expect("a checkpoint")
            .expect("a tensor"),
    )
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn score(client: &EmbedClient, input: EmbedInput) -> f64 {
    match client.submit(vec![input], None).expect("a running embedder").next() {
        Some(Ok(EmbedOutput::Score(score))) => score.into(),
        other => panic!("{other:?}"),
    }
}

/// Makes the folder's model give its pooled hidden states as they are.
fn unnormalized(folder: &Path) {
    let modules = r#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    std::fs::write(folder.join("modules.json"), modules).expect("a file");
}

#[test]
fn a_cross_encoder_scores_a_pair_by_its_first_token() {
    let Some((_place, folder)) = copy("bert-cls") else { return };
    let (_vectors_place, plain) = copy("bert-cls").expect("a folder");
    std::fs::remove_file(folder.join("modules.json")).expect("a file");
    unnormalized(&plain);
    let weight: Vec<f32> = (0..32).map(|at| (at as f32).sin()).collect();
    let classifier =
        [("classifier.weight", vec![1, 32], weight.clone()), ("classifier.bias", vec![1], vec![0.25])];
    let labels =
        [("architectures", json!(["BertForSequenceClassification"])), ("id2label", json!({"0": "LABEL_0"}))];
    rewrite(&folder, &classifier, &labels);
    let reranker = client(&folder);
    assert_eq!(reranker.texts().kind, EmbedKind::Scores);
    let pair = reranker
        .texts()
        .pairs(None, "The cat")
        .expect("a query")
        .with("sits on the mat", LongText::Refuse)
        .expect("a text");
    let apart = score(&reranker, pair.clone());
    // With one row for both types, the pair is a text whose hidden states the other folder gives.
    let types = "embeddings.token_type_embeddings.weight";
    let first = values(&folder, types)[..32].to_vec();
    let both = [(types, vec![2, 32], [&first[..], &first].concat())];
    rewrite(&folder, &[&classifier[..], &both].concat(), &labels);
    rewrite(&plain, &both, &[]);
    let alike = score(&client(&folder), pair.clone());
    assert!((apart - alike).abs() > 1e-6, "the second part has a type of its own");
    let plain_client = client(&plain);
    let text = plain_client.texts().ids(pair.ids().to_vec(), LongText::Refuse).expect("a text");
    let hidden = vectors(&plain_client, vec![text], None).remove(0);
    let [pooler, bias] = ["pooler.dense.weight", "pooler.dense.bias"].map(|name| values(&plain, name));
    let pooled: Vec<f32> = pooler
        .chunks(32)
        .zip(&bias)
        .map(|(row, bias)| (dot(row, &hidden) + f64::from(*bias)).tanh() as f32)
        .collect();
    let expected = 1.0 / (1.0 + (-(dot(&weight, &pooled) + 0.25)).exp());
    assert!((alike - expected).abs() < 1e-5, "{alike} {expected}");
    let long = "one two three four five six ".repeat(100);
    let pairs = reranker.texts().pairs(None, "The cat").expect("a query");
    assert!(pairs.with(&long, LongText::Refuse).is_err());
    let cut = pairs.with(&long, LongText::Cut).expect("a text");
    assert_eq!((cut.num_tokens(), cut.ids().last()), (256, pair.ids().last()));
    assert!(cut.is_cut() && !pair.is_cut());
    let error = reranker.texts().pairs(None, &long).err().expect("a query is not cut").to_string();
    assert!(error.contains("query") && error.contains("no room"), "{error}");
    let error = load(&folder, Some(AskedTask::Embed), &exact()).err().expect("no embeddings");
    assert!(error.to_string().contains("--task embed"), "{error}");
    rewrite(&folder, &classifier, &[("id2label", json!({"0": "no", "1": "yes"}))]);
    let error = load(&folder, None, &exact()).err().expect("refused").to_string();
    assert!(error.contains("2 classes"), "{error}");
}

#[test]
fn a_language_model_scores_a_pair_by_yes_and_no() {
    let Some((_place, folder)) = copy("qwen3-embedding-last") else { return };
    unnormalized(&folder);
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    for (id, content, special) in
        [(390, "yes", false), (391, "no", false), (392, "<|im_start|>", true), (393, "<|im_end|>", true)]
    {
        let token = json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special});
        tokenizer["added_tokens"].as_array_mut().expect("a list").push(token);
    }
    std::fs::write(&path, tokenizer.to_string()).expect("a file");
    rewrite(&folder, &[], &[("max_position_embeddings", json!(2048))]);
    let vectors_client = client(&folder);
    let reranker = load(&folder, Some(AskedTask::Rerank), &exact()).expect("a model");
    let reranker = EmbedClient::spawn(reranker).expect("a thread");
    let pairs = reranker.texts().pairs(None, "What is a cat?").expect("a query");
    let pair = |document: &str| pairs.with(document, LongText::Refuse).expect("a text");
    let input = pair("A feline <|im_end|> of yes");
    let ends = input.ids().iter().filter(|id| **id == 393).count();
    assert_eq!(ends, 2, "texts hold no special tokens");
    let table = values(&folder, "embed_tokens.weight");
    let row = |id: usize| &table[id * 32..(id + 1) * 32];
    let text = vectors_client.texts().ids(input.ids().to_vec(), LongText::Refuse).expect("a text");
    let hidden = vectors(&vectors_client, vec![text], None).remove(0);
    let expected = 1.0 / (1.0 + (dot(row(391), &hidden) - dot(row(390), &hidden)).exp());
    let got = score(&reranker, input);
    assert!((got - expected).abs() < 1e-5, "{got} {expected}");
    let documents = ["A feline", "a car", "A feline"];
    let model = folder.to_string_lossy().into_owned();
    let (serving, _) = start_as_told(Place::new(), &["--model", &model, "--task", "rerank"]);
    let body = json!({"query": "What is a cat?", "documents": documents, "return_documents": true});
    let reply = post(&serving, "/v1/rerank", &body).json();
    let results = reply["results"].as_array().expect("a list");
    let scores: Vec<f64> =
        results.iter().map(|result| result["relevance_score"].as_f64().expect("a number")).collect();
    assert!(scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b), "{reply}");
    for result in results {
        let index = result["index"].as_u64().expect("a number") as usize;
        assert_eq!(result["document"]["text"], documents[index]);
        let expected = score(&reranker, pair(documents[index]));
        assert!((result["relevance_score"].as_f64().expect("a number") - expected).abs() < 1e-6, "{reply}");
    }
    let best = json!({"query": "What is a cat?", "documents": [{"text": "A feline"}, "a car"], "top_n": 1});
    for path in ["/rerank", "/v2/rerank", "/reranking", "/v1/reranking"] {
        assert_eq!(post(&serving, path, &best).json()["results"].as_array().expect("a list").len(), 1);
    }
    let tei =
        json!({"query": "What is a cat?", "texts": documents, "return_text": true, "raw_scores": false});
    let ranked = post(&serving, "/rerank", &tei).json();
    for (result, ranked) in results.iter().zip(ranked.as_array().expect("a bare list")) {
        let text = &documents[result["index"].as_u64().expect("a number") as usize];
        let expected = json!({"index": result["index"], "score": result["relevance_score"], "text": text});
        assert_eq!(*ranked, expected);
    }
    assert_eq!(ranked.as_array().map(Vec::len), Some(3));
    let raw = json!({"query": "x", "texts": ["y"], "raw_scores": true});
    post(&serving, "/rerank", &raw).check(400, "unsupported_parameter");
    post(&serving, "/v1/rerank", &json!({"documents": ["x"]})).check(422, "invalid_value");
    post(&serving, "/v1/rerank", &json!({"query": "x", "documents": [1]})).check(422, "invalid_value");
    post(&serving, "/v1/embeddings", &json!({"input": "x"})).check(400, "unsupported_parameter");
    let none = json!({"query": "x", "documents": ["y"], "top_n": 0});
    post(&serving, "/v1/rerank", &none).check(400, "invalid_value");
    let long = json!({"query": "cat ".repeat(3000), "documents": ["y"], "truncate": true});
    let refused = post(&serving, "/v1/rerank", &long);
    assert_eq!(refused.check(400, "invalid_value").json()["error"]["param"], "query", "{refused:?}");
}
