//! Promise: what the reference's launchers for Gemma 4 and Qwen 3.5 with experts configure by hand is found in the model's own
//! files, and a flag overrides it; and tiny models of both families, with their real templates and special tokens, are
//! served, chatted with and resumed, over a restart too, without one bit of one conversation in another.

use std::fmt::Write as _;
use std::fs;

use llmctl_models::load::{ModelTexts, load_texts, model_facts};
use llmctl_template::DateTime;

use crate::cli::read_line;
use crate::common::prelude::*;
use crate::serve_ops::client::{Reply, ask, get};

/// A model: the weights of a parity checkpoint, a vocabulary that has the family's special tokens, the published template.
struct Model {
    place: Place,
    specials: Vec<String>,
}

const GEMMA_TEMPLATE: &str = "templates/llama.cpp/google-gemma-4-31B-it.jinja";
const QWEN_TEMPLATE: &str = "tokenizers/qwen3.5/chat_template.jinja";

fn fixture_json(path: &Path) -> Option<Value> {
    let Ok(text) = fs::read(path) else {
        crate::common::skip(format!("no {}", path.display()));
        return None;
    };
    Some(serde_json::from_slice(&text).expect("JSON"))
}

/// Special tokens by the members that tokenizer_config.json names them with; the first is BOS, the second EOS.
fn gemma() -> Option<Model> {
    const NAMES: &str = "bos_token eos_token pad_token sot_token eot_token soc_token eoc_token stc_token etc_token std_token etd_token str_token etr_token escape_token think_token";
    let root = fixtures()?;
    let config = fixture_json(&root.join("tokenizers/gemma4/tokenizer_config.json"))?;
    let text = |name: &str| (config[name].as_str().expect("a token").to_owned(), true);
    let specials: Vec<(String, bool)> = NAMES.split(' ').map(text).collect();
    let settings =
        json!({"bos_token": specials[0].0, "eos_token": specials[1].0, "pad_token": specials[2].0});
    model(&root, "gemma4", GEMMA_TEMPLATE, &specials, &settings)
}

/// Special and other added tokens as tokenizer_config.json lists them.
fn qwen() -> Option<Model> {
    const TEXTS: [&str; 9] = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ];
    let root = fixtures()?;
    let config = fixture_json(&root.join("tokenizers/qwen3.5/tokenizer_config.json"))?;
    let listed = config["added_tokens_decoder"].as_object().expect("added tokens");
    let added = |text: &&str| {
        let token = listed.values().find(|token| token["content"] == **text).expect("a token of that text");
        ((*text).to_owned(), token["special"] == true)
    };
    let specials: Vec<(String, bool)> = TEXTS.iter().map(added).collect();
    let settings =
        json!({"eos_token": config["eos_token"], "pad_token": config["pad_token"], "add_bos_token": false});
    model(&root, "qwen3.5-moe", QWEN_TEMPLATE, &specials, &settings)
}

/// The checkpoint's vocabulary with these tokens: as many as it has special ones take their ids, the others those of the last
/// merges, which no other merge builds on. Config and generation settings name one end only, as exports do.
fn model(
    root: &Path,
    checkpoint: &str,
    template: &str,
    specials: &[(String, bool)],
    settings: &Value,
) -> Option<Model> {
    let (from, place) = (root.join("parity").join(checkpoint), Place::new());
    fs::create_dir(place.path("model")).expect("a folder");
    let mut tokenizer = fixture_json(&from.join("tokenizer.json"))?;
    let mut config = fixture_json(&from.join("config.json"))?;
    let template = fs::read(root.join(template)).ok()?;
    let num_own = tokenizer["added_tokens"].as_array().expect("added tokens").len();
    let num_more = specials.len() - num_own;
    let vocab = tokenizer["model"]["vocab"].as_object().expect("a vocabulary").clone();
    let first_more = vocab.len() - num_more;
    let kept = |id: &Value| (num_own..first_more).contains(&(id.as_u64().expect("an id") as usize));
    let mut words: Map<String, Value> = vocab.into_iter().filter(|(_, id)| kept(id)).collect();
    let ids = (0..num_own).chain(first_more..);
    let added = |(id, (text, special)): (usize, &(String, bool))| {
        json!({"id": id, "content": text, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let added: Vec<Value> = ids.zip(specials).map(added).collect();
    words.extend(
        added
            .iter()
            .map(|token| (token["content"].as_str().expect("a text").to_owned(), token["id"].clone())),
    );
    tokenizer["model"]["vocab"] = words.into();
    let merges = tokenizer["model"]["merges"].as_array_mut().expect("merges");
    merges.truncate(merges.len() - num_more);
    tokenizer["added_tokens"] = added.into();
    if let Some(bos) = settings["bos_token"].as_str() {
        // As Gemma's own file has it: the tokenizer adds what the template writes.
        let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
        let special = json!({"SpecialToken": {"id": bos, "type_id": 0}});
        tokenizer["post_processor"]["single"] = json!([special, sequence]);
        tokenizer["post_processor"]["special_tokens"] =
            json!({bos: {"id": bos, "ids": [0], "tokens": [bos]}});
    }
    let eos = specials.iter().position(|(text, _)| settings["eos_token"] == **text).expect("an EOS");
    config["eos_token_id"] = eos.into();
    config["text_config"]["eos_token_id"] = eos.into();
    place.write("model/tokenizer.json", tokenizer.to_string());
    place.write("model/tokenizer_config.json", settings.to_string());
    place.write("model/config.json", config.to_string());
    place.write("model/generation_config.json", json!({"eos_token_id": eos}).to_string());
    place.write("model/chat_template.jinja", template);
    place.write("model/model.safetensors", fs::read(from.join("model.safetensors")).expect("weights"));
    Some(Model { place, specials: specials.iter().map(|(text, _)| text.clone()).collect() })
}

impl Model {
    fn folder(&self) -> PathBuf {
        self.place.path("model")
    }

    fn chat_tokenizer(&self) -> ChatTokenizer {
        let files = ModelFiles::open(&ModelSource::Folder(self.folder())).expect("a model");
        ChatTokenizer::new(load_texts(&files).expect("texts"), None)
    }

    fn id(&self, text: &str) -> u32 {
        self.chat_tokenizer().tokenizer().token_to_id(text).expect("a token")
    }

    /// Starts a server whose home, and with it sessions and KV on disk, is `home`.
    fn serve(&self, home: &Place, args: &[&str]) -> Serving {
        let folder = self.folder().to_string_lossy().into_owned();
        Serving::start(home, &[&["--model", &*folder], args].concat())
    }
}

pub struct Serving {
    child: Child,
    pub address: SocketAddr,
}

impl Serving {
    /// Starts a server whose home, and with it sessions and KV on disk, is `home`.
    pub fn start(home: &Place, args: &[&str]) -> Self {
        let mut command = home.command(&[&["serve", "--port", "0"], args].concat());
        let mut child = command.stderr(Stdio::piped()).spawn().expect("llmctl starts");
        let stderr = child.stderr.as_mut().expect("a pipe");
        let mut said = Vec::new();
        let address = loop {
            let line = read_line(stderr);
            if let Some(address) = line.strip_prefix("listening on http://") {
                break address.parse().expect("an address");
            }
            assert!(!line.is_empty(), "{said:?}");
            said.push(line);
        };
        Self { child, address }
    }

    /// A chat completion.
    fn chat(&self, messages: &[Value], more: &Value) -> Value {
        let mut body = json!({"messages": messages, "temperature": 0, "max_tokens": 12});
        let more = more.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(more);
        let reply = self.post("/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json", self.address);
        ask(self.address, &head, &body.to_string())
    }

    /// Ends in good order, so that sessions are saved.
    #[cfg(unix)]
    pub fn end(mut self) {
        let pid = i32::try_from(self.child.id()).expect("a process id");
        // SAFETY: sends a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
        let mut said = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("UTF-8");
        assert_eq!(self.child.wait().expect("it ends").code(), Some(0), "{said}");
    }
}

fn count(answer: &Value, pointer: &str) -> u64 {
    answer.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} in {answer}"))
}

fn prompt_tokens(answer: &Value) -> u64 {
    count(answer, "/usage/prompt_tokens")
}

fn cached_tokens(answer: &Value) -> u64 {
    count(answer, "/usage/prompt_tokens_details/cached_tokens")
}

/// A conversation as its client keeps it.
struct Chat {
    messages: Vec<Value>,
    more: Value,
}

impl Chat {
    fn new(system: &str, more: Value) -> Self {
        Self { messages: vec![json!({"role": "system", "content": system})], more }
    }

    fn ask(&mut self, server: &Serving, question: &str) -> Value {
        self.messages.push(json!({"role": "user", "content": question}));
        let answer = server.chat(&self.messages, &self.more);
        self.messages.push(answer["choices"][0]["message"].clone());
        answer
    }
}

const SYSTEM: &str =
    "You know the tides of every harbour between here and the cape, and you answer in few words.";
const QUESTIONS: [&str; 3] = [
    "When is it safe to leave the harbour today?",
    "And for a boat of twice the draught?",
    "Thanks, and tomorrow?",
];

fn thinks(thinks: bool) -> Value {
    json!({"chat_template_kwargs": {"enable_thinking": thinks}})
}

fn in_session(name: &str, more: &Value) -> Value {
    let mut more = more.clone();
    more["session_id"] = name.into();
    more
}

/// Three turns, the last after a restart; the same answers as from a server that computes everything.
#[cfg(unix)]
fn is_resumed(model: &Model) {
    let home = Place::new();
    for more in [thinks(false), thinks(true)] {
        let name = if more == thinks(true) { "thinking" } else { "plain" };
        let mut warm = Chat::new(SYSTEM, in_session(name, &more));
        let server = model.serve(&home, &[]);
        let first = warm.ask(&server, QUESTIONS[0]);
        let second = warm.ask(&server, QUESTIONS[1]);
        // All of the first prompt and of its answer but the last token, which has not been fed.
        let held = prompt_tokens(&first) + count(&first, "/usage/completion_tokens") - 1;
        assert_eq!(cached_tokens(&second), held, "{name}: {second}");
        server.end();
        let server = model.serve(&home, &[]);
        let third = warm.ask(&server, QUESTIONS[2]);
        let on_disk = cached_tokens(&third);
        assert!(on_disk >= prompt_tokens(&first), "{name}: {on_disk} tokens of {third} came from disk");
        assert!(on_disk < prompt_tokens(&third));
        server.end();

        let cold_home = Place::new();
        let server = model.serve(&cold_home, &["--no-warm-resume", "--kv-disk", "0"]);
        let mut cold = Chat::new(SYSTEM, in_session(name, &more));
        for question in QUESTIONS {
            assert_eq!(cached_tokens(&cold.ask(&server, question)), 0);
        }
        assert_eq!(cold.messages, warm.messages, "{name}");
        server.end();
    }
}

#[cfg(unix)]
#[test]
fn a_gemma_4_is_served_and_resumed() {
    if let Some(model) = gemma() {
        is_resumed(&model);
    }
}

#[cfg(unix)]
#[test]
fn a_qwen_3_5_with_experts_is_served_and_resumed() {
    if let Some(model) = qwen() {
        is_resumed(&model);
    }
}

/// Conversations longer than the window, two at a time on one server, answer as each does alone on a cold one.
#[cfg(unix)]
#[test]
fn conversations_beside_each_other_do_not_mix() {
    for model in [gemma(), qwen()].into_iter().flatten() {
        let systems = [SYSTEM.to_owned(), SYSTEM.replace("harbour", "lagoon")];
        let follow = |server: &Serving, system: &str, name: &str| {
            let mut chat = Chat::new(system, in_session(name, &thinks(false)));
            let answers: Vec<Value> = QUESTIONS.iter().map(|question| chat.ask(server, question)).collect();
            assert!(prompt_tokens(&answers[0]) > 64, "not twice the window: {}", answers[0]);
            chat.messages
        };
        let home = Place::new();
        let server = model.serve(&home, &[]);
        let together: Vec<Vec<Value>> = std::thread::scope(|scope| {
            let chats = systems.iter().zip(["a", "b"]);
            let chats: Vec<_> =
                chats.map(|(system, name)| scope.spawn(|| follow(&server, system, name))).collect();
            chats.into_iter().map(|chat| chat.join().expect("a conversation")).collect()
        });
        server.end();
        assert_ne!(together[0], together[1]);
        for (system, wanted) in systems.iter().zip(&together) {
            let home = Place::new();
            let server = model.serve(&home, &["--no-warm-resume", "--parallel", "1"]);
            assert_eq!(&follow(&server, system, "alone"), wanted);
            server.end();
        }
    }
}

#[cfg(unix)]
#[test]
fn a_gemmas_prompt_has_one_bos_and_its_thoughts_are_reasoning() {
    let Some(model) = gemma() else { return };
    let home = Place::new();
    let server = model.serve(&home, &[]);
    let messages =
        [json!({"role": "system", "content": SYSTEM}), json!({"role": "user", "content": QUESTIONS[0]})];

    // The template writes BOS and the tokenizer adds it: the count is that of the rest, by another implementation, and one.
    let source = fs::read_to_string(model.folder().join("chat_template.jinja")).expect("a template");
    let bos = &model.specials[0];
    let specials = SpecialTokens { bos: Some(bos.clone()), ..SpecialTokens::default() };
    let template = ChatTemplate::new(&source, specials).expect("a template");
    let conversation = Conversation {
        messages: vec![Message::system(SYSTEM), Message::user(QUESTIONS[0])],
        ..Conversation::default()
    };
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let text = template.render(&conversation, &options).expect("a prompt");
    let rest = text.strip_prefix(bos.as_str()).expect("the template writes BOS");
    let reference =
        tokenizers::Tokenizer::from_file(model.folder().join("tokenizer.json")).expect("a tokenizer");
    let ids = reference.encode(rest, false).expect("ids");
    let plain = server.chat(&messages, &json!({}));
    assert_eq!(prompt_tokens(&plain), ids.get_ids().len() as u64 + 1);

    // What the model says is given; how it is taken apart is not.
    let (open, close) = (model.id("<|channel>"), model.id("<channel|>"));
    let lark = format!("start: <[{open}]> \"thought\\nlow water\\n\" <[{close}]> \"At noon.\"");
    let mut more = thinks(true);
    (more["lark"], more["max_tokens"]) = (lark.into(), 64.into());
    let answer = server.chat(&messages, &more);
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &answer["choices"][0]["finish_reason"]),
        (&json!("At noon."), &json!("stop"))
    );
    assert_eq!(message["reasoning_content"].as_str().map(str::trim), Some("low water"), "{answer}");
    server.end();

    let server = model.serve(&home, &["--bos-id", "none"]);
    assert_eq!(prompt_tokens(&server.chat(&messages, &json!({}))), ids.get_ids().len() as u64);
    assert_eq!(get(server.address, "/ready").status, 200);
    server.end();
    let folder = model.folder().to_string_lossy().into_owned();
    home.run(&["serve", "--model", &folder, "--eos-id", "9999"])
        .check(2, "eos-id: the model has no token 9999");
    home.run(&["serve", "--model", &folder, "--bos-id", "x"]).check(2, "neither a token id nor `none`");
    home.run(&["serve", "--think", "--no-think"]).check(2, "cannot be used with");
}

/// A call, its result and what follows, with both families' markup.
#[cfg(unix)]
#[test]
fn a_call_goes_out_and_its_result_comes_in_warm() {
    for model in [gemma(), qwen()].into_iter().flatten() {
        let home = Place::new();
        let server = model.serve(&home, &[]);
        let parameters = json!({"type": "object", "required": ["harbour"], "additionalProperties": false,
            "properties": {"harbour": {"type": "string", "enum": ["north", "south"]}}});
        let tools = json!([{"type": "function", "function": {
            "name": "tide", "description": "The next high water", "parameters": parameters}}]);
        let mut more = in_session("tools", &thinks(false));
        (more["tools"], more["tool_choice"]) = (tools.clone(), "required".into());
        (more["max_tokens"], more["parallel_tool_calls"]) = (200.into(), false.into());
        // Noise has no end of its own: no thought before the call.
        let thought =
            ["<|channel>", "<think>"].iter().find(|open| model.specials.iter().any(|text| text == *open));
        let thought = model.id(thought.expect("a marker"));
        more["logit_bias"] = json!({thought.to_string(): -100});
        let mut chat = Chat::new(SYSTEM, more);
        let called = chat.ask(&server, QUESTIONS[0]);
        let message = &called["choices"][0]["message"];
        assert_eq!(called["choices"][0]["finish_reason"], "tool_calls", "{called}");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["name"], "tide");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().expect("a text")).expect("JSON");
        assert!(["north", "south"].map(Value::from).contains(&arguments["harbour"]), "{arguments}");
        chat.messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "at noon"}));
        chat.more["tool_choice"] = "auto".into();
        chat.more["max_tokens"] = 8.into();
        let answer = server.chat(&chat.messages, &chat.more);
        // The prompt holds the call as it was generated.
        assert!(cached_tokens(&answer) >= prompt_tokens(&called), "{answer}\n{called}");
        server.end();
    }
}

/// A knob's value in a model's own files; nothing for what is built in.
fn value(model: &Model, knob: &str) -> String {
    let chat_tokenizer = model.chat_tokenizer();
    let tokenizer = chat_tokenizer.tokenizer();
    let output_markup = OutputMarkup::detect(chat_tokenizer.template_source().expect("a template"));
    let prompt = |conversation: &Conversation| {
        chat_tokenizer.render(conversation, DateTime::default()).expect("a prompt")
    };
    let behind = |text: String, mark: &str| text.rsplit(mark).next().unwrap_or_default().to_owned();
    let asked = |kwargs: Value| {
        let kwargs = kwargs.as_object().expect("an object").clone();
        let messages = vec![Message::user("Question")];
        format!(
            "{:?}",
            behind(prompt(&Conversation { messages, kwargs, ..Conversation::default() }), "Question")
        )
    };
    let special =
        |text: &&'static str| tokenizer.token_to_id(text).is_some_and(|id| tokenizer.is_special(id));
    match knob {
        "beginning of sequence" => {
            let ids = chat_tokenizer.encode(&prompt(&Conversation {
                messages: vec![Message::user("Question")],
                ..Conversation::default()
            }));
            let count = ids.expect("ids").iter().filter(|&&id| Some(id) == tokenizer.bos()).count();
            match tokenizer.bos() {
                Some(id) => {
                    format!("{} ({id}), {count} in a prompt", tokenizer.id_to_token(id).expect("a token"))
                }
                None => "none".to_owned(),
            }
        }
        "end of generation" => {
            let name = |&id: &u32| format!("{} ({id})", tokenizer.id_to_token(id).expect("a token"));
            chat_tokenizer.texts().end_of_generation.iter().map(name).collect::<Vec<_>>().join(", ")
        }
        "prompt after a tool result" => {
            let id = Some("call00001".to_owned());
            let call = ToolCall { id: id.clone(), name: "f".to_owned(), arguments: json!({}) };
            let called = Message { content: None, tool_calls: vec![call], ..Message::assistant("") };
            let result = Message {
                tool_call_id: id,
                name: Some("f".to_owned()),
                ..Message::new(Role::Tool, "Result")
            };
            let messages = vec![Message::user("Question"), called, result];
            let tools = vec![json!({"type": "function", "function": {"name": "f", "description": "",
                "parameters": {"type": "object", "properties": {}}}})];
            format!(
                "{:?}",
                behind(prompt(&Conversation { messages, tools, ..Conversation::default() }), "Result")
            )
        }
        "reasoning" => output_markup.reasoning.map_or("none", |format| format.name()).to_owned(),
        "markers that are heard" => {
            output_markup.markers().into_iter().filter(special).collect::<Vec<_>>().join(" ")
        }
        "tool calls" => output_markup.tool_calls.map_or("none", |format| format.name()).to_owned(),
        "thinking unless asked" => asked(json!({})),
        "thinking when asked" => asked(json!({"enable_thinking": true})),
        "context" => {
            let facts = model_facts(&ModelSource::Folder(model.folder())).expect("facts").decoder;
            facts.expect("a decoder").context_length.to_string()
        }
        _ => String::new(),
    }
}

#[test]
fn tokens_around_turns_can_be_overridden() {
    let Some(model) = gemma() else { return };
    let files = ModelFiles::open(&ModelSource::Folder(model.folder())).expect("a model");
    let mut texts = load_texts(&files).expect("texts");
    let first = |texts: &ModelTexts| {
        let rendered = "<bos><|turn>user\n";
        texts.tokenizer.encode_chat(rendered).expect("ids").into_iter().take(2).collect::<Vec<_>>()
    };
    let (bos, turn) = (model.id("<bos>"), model.id("<|turn>"));
    assert_eq!(first(&texts), [bos, turn]);
    texts.set_bos(Some(7)).expect("a token");
    assert_eq!(first(&texts), [7, bos], "a template that writes another is not taken at its word");
    assert_eq!(texts.tokenizer.num_added_tokens(), 1);
    texts.set_bos(None).expect("no token");
    assert_eq!((first(&texts), texts.tokenizer.adds_bos()), (vec![bos, turn], false));
    texts.set_ends(&[9, 3, 9]).expect("tokens");
    assert_eq!(texts.end_of_generation, [3, 9]);
    assert!(texts.set_ends(&[384]).is_err() && texts.set_bos(Some(384)).is_err());
}

#[test]
fn every_knob_is_found_in_the_models_files_and_has_a_flag() {
    let (Some(gemma), Some(qwen)) = (gemma(), qwen()) else { return };
    let command = llmctl::cli::command();
    let serve = command.find_subcommand("serve").expect("a subcommand");
    let mut table = String::new();
    // Settings of the reference's launchers, their source here, and the flag that overrides each.
    for (knob, source, flag) in listed::<(&str, &str, &str)>("model_serving", "knobs") {
        assert!(serve.get_arguments().any(|arg| arg.get_long() == Some(flag)), "serve has no --{flag}");
        writeln!(table, "{knob} (--{flag})\n  from     {source}").expect("a string takes everything");
        for (name, model) in [("gemma 4", &gemma), ("qwen 3.5", &qwen)] {
            let value = value(model, knob);
            if !value.is_empty() {
                writeln!(table, "  {name:8} {value}").expect("a string takes everything");
            }
        }
    }
    insta::assert_snapshot!("knobs", table);
}
