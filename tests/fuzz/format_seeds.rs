//! Sound inputs of the targets in formats.rs; those that are texts are in formats.json.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use llmctl_base::vault::KeyKind;
use llmctl_engine::session::store::{ModelFingerprint, SessionName, SessionStore};
use llmctl_models::kv::disk::{DiskPageKey, PageLabel, names, page};
use serde_json::{Value, json};

use super::formats::{
    BESIDE_WEIGHTS, ENDPOINTS, SEALED_ID, archive_of, sealed_archive, sealed_session_id, sealed_vault,
};
use super::targets::Folder;
use crate::common::gguf::{F32, GgufBuilder};
use crate::common::stored_tensors::{StoredTensor, StoredTensors};

/// The sound inputs of a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "session_archive" => session_archives(),
        "imatrix" => vec![imatrix_gguf(), imatrix_list()],
        "tokenizer_file" => vec![sentencepiece(), tiktoken(), tekken()],
        "gguf_split" => vec![gguf_split()],
        "kept_panels" => vec![kept_panels()],
        "sealed" => sealed(),
        "adapter" => {
            let [config, weights] = peft_adapter();
            [gguf_adapter(), config, weights]
                .into_iter()
                .zip(0..)
                .map(|(file, form)| [&[form], &file[..]].concat())
                .collect()
        }
        "mmproj" => vec![qwen_mmproj(), gemma_mmproj()],
        "model_folder" => {
            let files = model_folder().into_iter();
            let listed = files.filter_map(|(name, content)| {
                let at = BESIDE_WEIGHTS.iter().position(|listed| *listed == name)?;
                Some([&[at as u8], &content[..]].concat())
            });
            listed.collect()
        }
        "http_api" => {
            let bodies = listed(target);
            let of_path = |(at, (path, _)): (usize, &(&str, u16))| {
                let bodies = bodies[*path].as_array().unwrap_or_else(|| panic!("no bodies of {path}"));
                bodies.iter().map(|body| [&[at as u8], &bytes(body)[..]].concat()).collect::<Vec<_>>()
            };
            ENDPOINTS.iter().enumerate().flat_map(of_path).collect()
        }
        "engine_events" => {
            let with_kind = |input: &Value| {
                [&[input["kind"].as_u64().expect("a kind") as u8], &bytes(&input["stream"])[..]].concat()
            };
            listed(target).as_array().expect("a list").iter().map(with_kind).collect()
        }
        _ => listed(target).as_array().expect("a list").iter().map(bytes).collect(),
    }
}

fn listed(target: &str) -> Value {
    let mut all: Value = serde_json::from_str(include_str!("formats.json")).expect("inputs by target");
    let found = all.as_object_mut().and_then(|all| all.remove(target));
    found.unwrap_or_else(|| panic!("no seeds for {target}"))
}

/// A text itself, anything else as JSON.
fn bytes(input: &Value) -> Vec<u8> {
    input.as_str().map_or_else(|| input.to_string(), str::to_owned).into_bytes()
}

/// A folder that every reader accepts.
pub fn model_folder() -> Vec<(&'static str, Vec<u8>)> {
    let texts = listed("model_folder");
    let listed = BESIDE_WEIGHTS.iter().map(|name| (*name, bytes(&texts[*name])));
    let weights = super::seeds::seeds("safetensors").remove(0);
    let others = [
        ("model-00001-of-00001.safetensors", weights),
        ("2_Dense/model.safetensors", dense()),
        ("tokenizer.model", sentencepiece()[1..].to_vec()),
    ];
    listed.chain(others).collect()
}

/// A layer of two inputs and two outputs.
fn dense() -> Vec<u8> {
    let tensor = |shape: &[usize], offsets: [usize; 2]| json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
    let header =
        json!({"linear.bias": tensor(&[2], [0, 8]), "linear.weight": tensor(&[2, 2], [8, 24])}).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 24]].concat()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn imatrix_gguf() -> Vec<u8> {
    GgufBuilder::new()
        .text("general.type", "imatrix")
        .u32("imatrix.chunk_count", 1)
        .tensor("a.in_sum2", &[2, 3], F32, &floats(&[1.0, 2.0, 3.0, 0.0, 5.0, 6.0]))
        .tensor("a.counts", &[2, 1], F32, &floats(&[2.0, 0.0]))
        .build()
}

fn imatrix_list() -> Vec<u8> {
    let number = |number: u32| number.to_le_bytes();
    let entry = [&number(1)[..], b"a", &number(2), &number(3), &floats(&[1.0, 2.0, 3.0])].concat();
    [&number(1)[..], &entry, &number(1), &number(1), b"x"].concat()
}

/// A field of a protocol buffer.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(content.len()).expect("short")], content].concat()
}

/// A vocabulary of BPE with the name of its file before it.
pub fn sentencepiece() -> Vec<u8> {
    let piece = |(text, score, kind): &(&str, f32, u8)| {
        let fields =
            [&field(1, text.as_bytes())[..], &[2 << 3 | 5], &score.to_le_bytes(), &[3 << 3, *kind]].concat();
        field(1, &fields)
    };
    let pieces = [("<unk>", 0.0, 2), ("a", -3.0, 1), ("b", -4.0, 1), ("ab", -1.0, 1), ("\u{2581}", -5.0, 1)];
    let pieces: Vec<u8> = pieces.iter().flat_map(piece).collect();
    [&[0][..], &pieces, &field(2, &[3 << 3, 2]), &field(3, &[3 << 3, 0])].concat()
}

fn tiktoken() -> Vec<u8> {
    let line = |(rank, token): (usize, &&[u8])| format!("{} {rank}\n", BASE64_STANDARD.encode(token));
    let lines: String = [&b"a"[..], b"b", b"ab", b" "].iter().enumerate().map(line).collect();
    [&[0], lines.as_bytes()].concat()
}

fn tekken() -> Vec<u8> {
    let bytes = (0..=255).map(|byte| vec![byte]);
    let tokens = bytes.chain([&b"he"[..], b"ll", b"hell", b"hello", b" h"].map(<[u8]>::to_vec));
    let entry =
        |(rank, token): (usize, Vec<u8>)| json!({"rank": rank, "token_bytes": BASE64_STANDARD.encode(token)});
    let vocab: Vec<Value> = tokens.enumerate().map(entry).collect();
    let config =
        json!({"default_vocab_size": 271, "default_num_special_tokens": 10, "pattern": "x", "version": "v3"});
    let special = json!([{"rank": 0, "token_str": "<unk>", "is_control": true}]);
    let file = json!({"config": config, "vocab": vocab, "special_tokens": special});
    [&[1], file.to_string().as_bytes()].concat()
}

fn gguf_split() -> Vec<u8> {
    let part = |number: u32, tensor: &str| {
        let file = GgufBuilder::new()
            .text("general.architecture", "llama")
            .raw("split.no", 2, &(number as u16).to_le_bytes())
            .raw("split.count", 2, &2u16.to_le_bytes())
            .u32("split.tensors.count", 2);
        file.tensor(tensor, &[2, 3], F32, &[0; 24]).build()
    };
    let (first, second) = (part(0, "a"), part(1, "b"));
    [&(first.len() as u16).to_le_bytes()[..], &first, &second].concat()
}

/// Two matrices of Q4_0, of 4 rows of 32, whose panels the file does not look into.
fn kept_panels() -> Vec<u8> {
    let panels = [[1u8; 136], [2; 136]];
    let starts = [64, 256];
    let mut file = b"llmctl panels 1\n".to_vec();
    let entry = |(panels, start): (&[u8; 136], usize)| json!({"dtype": "q4_0", "shape": [4, 32], "start": start, "len": 136, "checksums": [crc32fast::hash(panels)]});
    let matrices: Vec<Value> = panels.iter().zip(starts).map(entry).collect();
    for (panels, start) in panels.iter().zip(starts) {
        file.resize(start, 0);
        file.extend_from_slice(panels);
    }
    file.resize(448, 0);
    let index = json!({"key": "aa", "matrices": matrices}).to_string();
    let checksum = crc32fast::hash(index.as_bytes());
    let end = [&448u64.to_le_bytes()[..], &checksum.to_le_bytes(), &[0; 4], b"llmctl panels 1\n"].concat();
    [&[1], &file[..], index.as_bytes(), &end].concat()
}

/// Zeros for a matrix of these rows and columns.
fn zeros(shape: &[usize]) -> Vec<u8> {
    vec![0; 4 * shape.iter().product::<usize>()]
}

/// A text model whose rows have four values, with tokens for images.
pub fn seeing_text() -> Vec<u8> {
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", 4)
        .u32("llama.feed_forward_length", 8)
        .u32("llama.context_length", 64)
        .u32("llama.attention.head_count", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "gpt-2")
        .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<|image_pad|>", "<|image|>"])
        .texts("tokenizer.ggml.merges", &["a b"])
        .array("tokenizer.ggml.token_type", 5, 5, &[1_i32, 1, 1, 3, 3].map(i32::to_le_bytes).concat())
        .tensor("token_embd.weight", &[5, 4], F32, &[0; 80])
        .build()
}

/// A LoRA adapter of rank 2 for one matrix, in llama.cpp's form.
fn gguf_adapter() -> Vec<u8> {
    let [down, up]: [&[usize]; 2] = [&[2, 4], &[8, 2]];
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .text("general.type", "adapter")
        .text("adapter.type", "lora")
        .f32("adapter.lora.alpha", 4.0)
        .tensor("blk.0.attn_q.weight.lora_a", down, F32, &zeros(down))
        .tensor("blk.0.attn_q.weight.lora_b", up, F32, &zeros(up))
        .build()
}

/// The files of the same in PEFT's form: the configuration, and the weights.
pub fn peft_adapter() -> [Vec<u8>; 2] {
    let config = json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": true, "bias": "none", "use_dora": false,
        "modules_to_save": null, "alpha_pattern": {"q_proj": 8},
    });
    let tensor = |(side, shape): (&str, [usize; 2])| StoredTensor {
        name: format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"),
        dtype: "F32".to_owned(),
        shape: shape.iter().map(|size| *size as u64).collect(),
        bytes: zeros(&shape),
    };
    let weights = StoredTensors([("A", [2, 4]), ("B", [8, 2])].map(tensor).into()).to_bytes();
    [config.to_string().into_bytes(), weights]
}

fn mmproj_of(projector: &str, layers: u32, tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let head = GgufBuilder::new()
        .text("general.architecture", "clip")
        .text("clip.projector_type", projector)
        .bool("clip.has_vision_encoder", true)
        .u32("clip.vision.patch_size", 2)
        .u32("clip.vision.block_count", layers)
        .u32("clip.vision.attention.head_count", 1)
        .u32("clip.vision.projector.scale_factor", 1);
    let add =
        |file: GgufBuilder, (name, shape): &(&str, &[usize])| file.tensor(name, shape, F32, &zeros(shape));
    tensors.iter().fold(head, add).build()
}

/// A tower of the Qwen3-VL kind with one layer.
fn qwen_mmproj() -> Vec<u8> {
    let tensors: [(&str, &[usize]); 13] = [
        ("v.patch_embd.weight", &[4, 3, 2, 2]),
        ("v.patch_embd.weight.1", &[4, 3, 2, 2]),
        ("v.position_embd.weight", &[4, 4]),
        ("v.blk.0.ln1.weight", &[4]),
        ("v.blk.0.attn_qkv.weight", &[12, 4]),
        ("v.blk.0.attn_out.weight", &[4, 4]),
        ("v.blk.0.ln2.weight", &[4]),
        ("v.blk.0.ffn_up.weight", &[8, 4]),
        ("v.blk.0.ffn_down.weight", &[4, 8]),
        ("v.post_ln.weight", &[4]),
        ("mm.0.weight", &[16, 16]),
        ("mm.0.bias", &[16]),
        ("mm.2.weight", &[4, 16]),
    ];
    mmproj_of("qwen3vl_merger", 1, &tensors)
}

/// The projector of Gemma 4 unified, which has no layers.
fn gemma_mmproj() -> Vec<u8> {
    let tensors: [(&str, &[usize]); 6] = [
        ("v.patch_embd.weight", &[4, 12]),
        ("v.patch_norm.1.weight", &[12]),
        ("v.patch_norm.2.weight", &[4]),
        ("v.patch_norm.3.weight", &[4]),
        ("v.position_embd.weight", &[2, 8, 4]),
        ("mm.input_projection.weight", &[4, 4]),
    ];
    mmproj_of("gemma4uv", 0, &tensors)
}

/// The weights that the configurations of `tower_config` fit: those of [`qwen_mmproj`] by their names in folders.
pub fn tower_tensors() -> Vec<u8> {
    let tensors: [(&str, &[usize]); 11] = [
        ("patch_embed.proj.weight", &[4, 3, 2, 2, 2]),
        ("pos_embed.weight", &[4, 4]),
        ("blocks.0.norm1.weight", &[4]),
        ("blocks.0.attn.qkv.weight", &[12, 4]),
        ("blocks.0.attn.proj.weight", &[4, 4]),
        ("blocks.0.norm2.weight", &[4]),
        ("blocks.0.mlp.linear_fc1.weight", &[8, 4]),
        ("blocks.0.mlp.linear_fc2.weight", &[4, 8]),
        ("merger.norm.weight", &[4]),
        ("merger.linear_fc1.weight", &[16, 16]),
        ("merger.linear_fc2.weight", &[4, 16]),
    ];
    let tensor = |(name, shape): &(&str, &[usize])| StoredTensor {
        name: format!("model.visual.{name}"),
        dtype: "F32".to_owned(),
        shape: shape.iter().map(|size| *size as u64).collect(),
        bytes: zeros(shape),
    };
    StoredTensors(tensors.iter().map(tensor).collect()).to_bytes()
}

/// A conversation with a page of KV, in each form.
fn session_archives() -> Vec<Vec<u8>> {
    let tokens: Vec<u32> = (0..40).collect();
    let header = r#"{"type":"header","schema":"llmctl.session.v1","name":"s","created_ms":1,"model":{"name":"m","fingerprint":"f"}}"#;
    let turn = json!({
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "kept_tokens": 0, "prompt_tail": tokens, "generated": [], "splice_after": null,
        "sampling": {
            "temperature": 0.5, "top_k": 4, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "logit_bias": [], "seed": 1
        },
        "finish": "complete", "usage": {"prompt_tokens": 40, "cached_tokens": 0, "completion_tokens": 0}, "started_ms": 1, "finished_ms": 2
    });
    let records = format!("{header}\n{}", json!({"type": "turn", "number": 1, "turn": turn}));
    let name = names(&tokens).next().expect("a full page");
    let label = PageLabel {
        key: DiskPageKey { name, group: 0 },
        parent: None,
        tokens: tokens[..32].into(),
        depth: 0,
    };
    let mut file = Vec::new();
    page::write(&mut file, &label, b"payload").expect("memory takes it");
    let part = |bytes: &[u8]| [&(bytes.len() as u16).to_le_bytes(), bytes].concat();
    let parts = [part(records.as_bytes()), part(&file)].concat();
    let tar = archive_of(&parts);
    vec![[&[0], &sealed_archive(&tar)[..]].concat(), [&[1], &tar[..]].concat(), [&[2], &parts[..]].concat()]
}

/// A key and a page that it seals, and a key and a transcript, as `formats::sealed` takes them.
fn sealed() -> Vec<Vec<u8>> {
    let folder = Folder::new();
    let vault = sealed_vault(&folder.0);
    let page = vault.seal_file(KeyKind::Page, SEALED_ID, b"the content of a page", 4).expect("sealed");
    let store = SessionStore::new(folder.0.join("sessions")).with_vault(Some(vault));
    let name = SessionName::new("s").expect("a name");
    drop(store.create(&name, &ModelFingerprint::default()).expect("created"));
    store.fork(&name, &SessionName::new("t").expect("a name"), None).expect("forked");
    let transcript = std::fs::read(folder.0.join("sessions/t/transcript.jsonl")).expect("there");
    let key = |kind: &str, id: String| {
        std::fs::read(folder.0.join("keys").join(kind).join(format!("{id}.key"))).expect("there")
    };
    let id = sealed_session_id(&transcript).expect("it names its key");
    vec![
        [&[0], &key("page", SEALED_ID.to_string())[..], &page].concat(),
        [&[1], &key("session", id)[..], &transcript].concat(),
    ]
}
