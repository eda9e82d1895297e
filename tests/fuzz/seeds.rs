//! Sound inputs for every target: where fuzzing begins, and what a target has to accept.

use crate::common::gguf::F32;
use crate::common::prelude::*;

/// The sound inputs of a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "gguf" => vec![gguf("llama"), gguf("gpt2")],
        "safetensors" => vec![safetensors()],
        "config_json" => parity("config.json"),
        "tokenizer_json" => {
            let whole = parity("tokenizer.json").into_iter().take(1);
            whole.chain([tokenizer("Split"), tokenizer("Digits")]).collect()
        }
        "chat_template" => TEMPLATES.iter().map(|text| text.as_bytes().to_vec()).collect(),
        "transcript" => vec![[b"\x01", TRANSCRIPT.trim_end().as_bytes()].concat()],
        "kv_page" => vec![kv_page(0), kv_page(5)],
        "http_body" => HTTP_BODIES.iter().map(|text| text.as_bytes().to_vec()).collect(),
        "worker_line" => WORKER_LINES.iter().map(|text| text.as_bytes().to_vec()).collect(),
        "tool_call" => tool_calls(),
        other => panic!("no seeds for {other}"),
    }
}

/// A file of every parity checkpoint.
fn parity(file: &str) -> Vec<Vec<u8>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let roots = [here.join("tests/parity"), here.join("../tests/parity")]; // fuzz/ is a package of its own
    let folders =
        roots.iter().find_map(|root| std::fs::read_dir(root).ok()).expect("the parity checkpoints").flatten();
    let mut paths: Vec<_> = folders.map(|folder| folder.path().join(file)).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}

fn gguf(model: &str) -> Vec<u8> {
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u{2581}", "\u{120}"];
    let kinds = [2_i32, 3, 3, 1, 1, 1, 1, 1];
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", 32)
        .text("tokenizer.ggml.model", model)
        .text("tokenizer.ggml.pre", "default")
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts("tokenizer.ggml.merges", &["a b"])
        .array("tokenizer.ggml.token_type", 5, 8, &kinds.map(i32::to_le_bytes).concat())
        .f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .tensor("token_embd.weight", &[2, 3], F32, &[0; 24])
        .build()
}

fn safetensors() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    });
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 32]].concat()
}

fn tokenizer(pre: &str) -> Vec<u8> {
    let pre = match pre {
        "Split" => {
            json!({"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}|[^\\s]+|\\s+"}, "behavior": "Isolated", "invert": false})
        }
        _ => json!({"type": "Digits", "individual_digits": true}),
    };
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0",
        "added_tokens": [{"id": 6, "content": "<|im_end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": true, "normalized": false}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pre, level]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [6], "tokens": ["<|im_end|>"]}}},
        "decoder": level,
        "model": {"type": "BPE", "vocab": {"H": 0, "e": 1, "l": 2, "o": 3, "ll": 4, "\u{120}": 5}, "merges": [["l", "l"]], "byte_fallback": false, "ignore_merges": true},
    });
    file.to_string().into_bytes()
}

fn kv_page(num_tokens: u32) -> Vec<u8> {
    let mut header = vec![1u8];
    header.extend_from_slice(b"llmctlKV");
    let payload = b"payload";
    for number in [1, 3, num_tokens, 1, payload.len() as u32, 0] {
        header.extend_from_slice(&number.to_le_bytes());
    }
    header.extend_from_slice(&[7; 32]);
    header.extend_from_slice(&[9; 32]);
    (0..num_tokens).for_each(|token| header.extend_from_slice(&token.to_le_bytes()));
    [&header, &payload[..], &[0; 4]].concat()
}

/// A call in every notation, for the reader of every notation.
fn tool_calls() -> Vec<Vec<u8>> {
    let reasonings = ReasoningFormat::ALL.len() as u8;
    let readers =
        (0..ToolCallFormat::ALL.len() as u8).flat_map(|format| CALLS.iter().map(move |call| (format, call)));
    readers.map(|(format, call)| [&[format, (format % reasonings) << 2], call.as_bytes()].concat()).collect()
}

const TEMPLATES: &[&str] = &[
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- macro say(x, n=1) -%}{{ x | trim | upper }}{%- endmacro -%}{% set ns = namespace(i=0) %}{% for m in messages if m['role'] != 'tool' %}{% set ns.i = ns.i + 1 %}{{ loop.index }}:{{ say(m.content|string) }}{% else %}none{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content.split('\\n')[-1].strip() }}{% else %}{% for p in m.content %}{{ p.text[1:] | length }}{% endfor %}{% endif %}{% if loop.first and m.role == 'system' %}{{ raise_exception('no') if false }}{% endif %}{{ strftime_now('%d %b %Y') }}{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function.parameters.properties.items() | list }}{% endfor %}{% endif %}{%- generation -%}x{%- endgeneration -%}",
];

const TRANSCRIPT: &str = r#"{"type":"header","schema":"llmctl.session.v1","name":"s","created_ms":1,"model":{"name":"m","fingerprint":"f"}}
{"type":"turn","number":1,"turn":{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":null,"reasoning":"r","tool_calls":[{"id":"1","name":"f","arguments":{"a":[1]}}]}],"kept_tokens":0,"prompt_tail":[1,2],"generated":[3],"splice_after":"x","sampling":{"temperature":0.5,"top_k":4,"top_p":1.0,"min_p":0.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":[[1,2.0]],"seed":1},"finish":"complete","usage":{"prompt_tokens":2,"cached_tokens":0,"completion_tokens":1},"started_ms":1,"finished_ms":2}}
{"type":"model","model":{"name":"n","fingerprint":"g"}}
{"type":"turn","number":2,"turn":{"messages":[{"role":"user","content":[{"type":"text","text":"p"}]}],"kept_tokens":3,"prompt_tail":[4],"generated":[],"splice_after":null,"sampling":{"temperature":0.0,"top_k":null,"top_p":1.0,"min_p":0.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":[],"seed":null},"finish":{"eos":2},"usage":{"prompt_tokens":4,"cached_tokens":3,"completion_tokens":0},"started_ms":3,"finished_ms":4}}
{"type":"truncate","turns":1,"time_ms":5}
{"type":"rename","to":"t","time_ms":6}
{"type":"fork_of","name":"u","turns":1,"time_ms":7}
"#;

const HTTP_BODIES: &[&str] = &[
    r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"name":"me"},{"role":"assistant","content":null,"reasoning_content":"r","tool_calls":[{"id":"1","type":"function","index":0,"function":{"name":"f","arguments":"{\"a\":[1,2.5]}"}}]},{"role":"tool","tool_call_id":"1","content":"ok"}]}"#,
    r#"{"messages":[{"role":"user","content":"q"}],"temperature":0.5,"top_k":0,"top_p":0.9,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":-1,"frequency_penalty":2,"logit_bias":{"5":-100},"seed":7,"max_completion_tokens":3,"stop":["a","b"],"ignore_eos":false,"logprobs":true,"top_logprobs":2,"user":"u","metadata":{}}"#,
    r#"{"messages":[{"role":"user","content":"q"}],"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}}"#,
];

const WORKER_LINES: &[&str] = &[
    r#"{"op":"generate","id":7,"prompt_segments":[{"ids":[1,2]},{"text":"x"}],"temperature":0.5,"logit_bias":{"3":-1.5},"stop":["a"],"deadline_ms":5.25,"session_id":"s","exact_seed":0,"max_new_tokens":-1}"#,
    r#"{"prompt":"hello"}"#,
    r#"{"op":"fork","id":"x","session_id":"a","to":"b"}"#,
    r#"{"op":"open","session_id":"a"}"#,
    r#"{"op":"cancel","request":3}"#,
    r#"{"op":"flush","timeout_ms":10}"#,
    r#"{"op":"ping"}"#,
    r#"{"op":"sessions","id":1}"#,
];

const CALLS: &[&str] = &[
    "Hm.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"\\u0141\", \"days\": 3}}\n</tool_call>",
    "<think>a</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nK </tool_call>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "<seed:tool_call>\n<function=write_file>\n<parameter=path>p</parameter>\n<parameter=lines>[1]</parameter>\n</function>\n</seed:tool_call>",
    "<|tool_call>call:get_weather{city:<|\"|>K<|\"|>,days:3}<tool_call|>",
    "<|python_tag|>{\"name\": \"now\", \"parameters\": {}}",
    "[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {}}]",
    "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"x\"}",
    "<|python_start|>[get_weather(city='K', days=-3), write_file(flag=True, lines=[1, {'a': None}])]<|python_end|>",
    "<|tool_call_start|>[now()]<|tool_call_end|>",
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>K</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "<|tool_call|>[{\"name\": \"now\", \"arguments\": {}}]",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "<function=now>{}</function>",
    "<tool_calls>[{\"name\": \"now\", \"arguments\": {}}]</tool_calls>",
    "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"now\", \"parameters\": {}}]<|END_ACTION|>",
    "functools[{\"name\": \"now\", \"arguments\": {}}]",
    "Hm.<|tools_prefix|>[{\"now\": {}}]<|tools_suffix|>",
    "Hm.\n<TOOLCALL>[{\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
    "Hm.\n<tool_calls>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_calls>",
    "Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"now\", \"arguments\": {}}",
    "Hm.<|function_call|>{\"name\": \"now\", \"arguments\": {}}",
    "<|content|>Hm.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
    "all\nHm.>>>get_weather\n{\"city\": \"K\", \"days\": 3}",
    "Hm.\nAction:\n```json\n[\n    {\n        \"tool_name\": \"now\",\n        \"parameters\": {}\n    }\n]```",
    "Hm.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">K</parameter>\n</invoke>\n</minimax:tool_call>",
    "Hm.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">K</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "Hm.\n<function name=\"get_weather\"><param name=\"city\">K</param><param name=\"days\">3</param></function>",
    "Hm.\n<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>K</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "<|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    " to=get_weather<|message|><atem:function_calls>\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"days\">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
];
