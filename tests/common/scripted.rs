//! A model that says what a test wants: real files of a Llama with one layer of zeros, whose next token is a function of the
//! last one.
//!
//! Embeddings are one-hot and the output matrix is the transition table, so that greedy decoding follows a chain. The chat
//! template ends the prompt with a token that begins a chain, chosen by a word in the last message: `tool`, `think`,
//! `opened` (reasoning that the prompt begins), `stubborn` (reasoning that no switch turns off), `code` or `endless`; any other message, a tool's result too, is answered with [`PLAIN`].

use safetensors::tensor::Dtype;

use crate::common::prelude::*;

pub const PLAIN: &str = "A plain answer.";
pub const THOUGHT: &str = "A considered answer.";
pub const CODE: &str = "Look:\n\n```rust\nfn main() {}\n```\n\nThat is **all** \u{65e5}\u{672c}.";
/// The token that follows itself: some of them fill a terminal that nobody reads.
pub const ENDLESS: &str =
    "on and on and on and on and on and on and on and on and on and on and on and on and on and on\n";
/// Tokens of reasoning: `w1 `, `w2 ` and so on.
pub const NUM_THOUGHTS: usize = 20;

const TEMPLATE: &str = r#"{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(go='', opens='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.opens = '<think>' if 'opened' in m.content else '' %}{% set ns.go = '<go-tool>' if 'tool' in m.content else '<go-code>' if 'code' in m.content else '<go-endless>' if 'endless' in m.content else '<go-think>' if 'stubborn' in m.content or 'think' in m.content and enable_thinking is not false else '' %}{% elif m.role == 'tool' %}{% set ns.opens = '' %}{% set ns.go = '' %}{% endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ ns.go }}{% endif %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ ns.go }}{{ ns.opens }}{% endif %}"#;

/// Rows of the embedding, a multiple of what kernels take at once.
const VOCAB: usize = 448;

const EOS: usize = 1;
const THINK: usize = 5;
const END_THINK: usize = 6;
const TOOL_CALL: usize = 7;
const END_TOOL_CALL: usize = 8;

/// Writes the model into a folder.
pub fn write(folder: &Path) {
    write_calling(folder, "now");
}

/// Writes the model, which calls the tool of this name with a zone, into a folder.
pub fn write_calling(folder: &Path, tool: &str) {
    let call = format!("\n{{\"name\": \"{tool}\", \"arguments\": {{\"zone\": \"UTC\"}}}}\n");
    std::fs::create_dir_all(folder).expect("a folder");
    let source = format!("{}/tests/parity/llama", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(format!("{source}/tokenizer.json")).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    let first = tokenizer["model"]["vocab"].as_object().expect("a vocabulary").len();
    let mut added: Vec<String> = Vec::new();
    let mut id_of = |text: &str| {
        added.push(text.to_owned());
        first + added.len() - 1
    };
    let (plain, thought, code, call) = (id_of(PLAIN), id_of(THOUGHT), id_of(CODE), id_of(&call));
    let thoughts: Vec<usize> = (1..=NUM_THOUGHTS).map(|n| id_of(&format!("w{n} "))).collect();
    let (go_tool, go_code, go_think) = (id_of("<go-tool>"), id_of("<go-code>"), id_of("<go-think>"));
    let (go_endless, endless) = (id_of("<go-endless>"), id_of(ENDLESS));
    let chains = [
        vec![go_tool, TOOL_CALL, call, END_TOOL_CALL, EOS],
        vec![go_code, code, EOS],
        vec![go_endless, endless, endless],
        [vec![go_think, THINK], thoughts, vec![END_THINK, thought, EOS]].concat(),
    ];
    // Whatever else a prompt ends with.
    let mut next = vec![plain; VOCAB];
    next[plain] = EOS;
    chains.iter().flat_map(|chain| chain.windows(2)).for_each(|pair| next[pair[0]] = pair[1]);

    let list = tokenizer["added_tokens"].as_array_mut().expect("a list");
    for (n, content) in added.iter().enumerate() {
        let mut token = json!({"id": first + n, "content": content, "special": false});
        for flag in ["single_word", "lstrip", "rstrip", "normalized"] {
            token[flag] = false.into();
        }
        list.push(token);
    }
    let put = |name: &str, value: &Value| {
        std::fs::write(folder.join(name), value.to_string()).expect("a file");
    };
    put("tokenizer.json", &tokenizer);
    put(
        "tokenizer_config.json",
        &json!({"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE,
                "tokenizer_class": "TokenizersBackend"}),
    );
    put("generation_config.json", &json!({"bos_token_id": 0, "eos_token_id": EOS}));
    put("config.json", &config());
    write_weights(&folder.join("model.safetensors"), &next);
}

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": VOCAB, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": null,
        "tie_word_embeddings": false, "vocab_size": VOCAB, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 0, "eos_token_id": EOS, "torch_dtype": "float32",
    })
}

/// A shape and its values.
type Array = (Vec<usize>, Vec<f32>);

fn write_weights(path: &Path, next: &[usize]) {
    let zeros = |rows: usize, columns: usize| (vec![rows, columns], vec![0f32; rows * columns]);
    let ones = || (vec![VOCAB], vec![1f32; VOCAB]);
    let (_, mut embedding) = zeros(VOCAB, VOCAB);
    let (_, mut output) = zeros(VOCAB, VOCAB);
    for (token, &follows) in next.iter().enumerate() {
        embedding[token * VOCAB + token] = 1.0;
        output[follows * VOCAB + token] = 1.0;
    }
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors: Vec<(String, Array)> = vec![
        ("model.embed_tokens.weight".to_owned(), (vec![VOCAB, VOCAB], embedding)),
        ("lm_head.weight".to_owned(), (vec![VOCAB, VOCAB], output)),
        ("model.norm.weight".to_owned(), ones()),
        (layer("input_layernorm"), ones()),
        (layer("post_attention_layernorm"), ones()),
        (layer("self_attn.q_proj"), zeros(32, VOCAB)),
        (layer("self_attn.k_proj"), zeros(16, VOCAB)),
        (layer("self_attn.v_proj"), zeros(16, VOCAB)),
        (layer("self_attn.o_proj"), zeros(VOCAB, 32)),
        (layer("mlp.gate_proj"), zeros(32, VOCAB)),
        (layer("mlp.up_proj"), zeros(32, VOCAB)),
        (layer("mlp.down_proj"), zeros(VOCAB, 32)),
    ];
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, (shape, values))| {
            (name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("shapes and bytes agree"))
    });
    let file = safetensors::serialize(views, None::<HashMap<String, String>>).expect("a file's bytes");
    std::fs::write(path, file).expect("a file");
}
