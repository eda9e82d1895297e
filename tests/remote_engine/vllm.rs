//! The real vLLM, where LLMCTL_TEST_VLLM names a virtual environment with one (`.ci/run` installs none): the same greedy text as
//! here, sessions with cached tokens, constraints, and a chat that survives a kill of vLLM and of llmctl.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;

use safetensors::Dtype;

use super::texts;
use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, signal, start_as_told};
use crate::serve_ops::client::{Reply, ask, get};

const VARIABLE: &str = "LLMCTL_TEST_VLLM";

/// Longest wait for vLLM, which needs about a minute on two cores.
const PATIENCE: Duration = Duration::from_secs(400);

/// Writes a random Qwen 3 with heads of 32 values, the least that vLLM's attention takes on a CPU.
fn write_model(folder: &Path) {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(texts().join("config.json")).expect("a file")).expect("JSON");
    (config["head_dim"], config["hidden_size"]) = (json!(32), json!(64));
    (config["num_hidden_layers"], config["layer_types"]) =
        (json!(2), json!(["full_attention", "full_attention"]));
    std::fs::create_dir(folder).expect("a folder");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(texts().join(name), folder.join(name)).expect("a copy");
    }
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![384, 64]),
        ("model.norm.weight".to_owned(), vec![64]),
    ];
    for layer in 0..2 {
        for (name, shape) in listed::<(&str, Vec<_>)>("remote_engine_vllm", "write_model") {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product();
            let scale = if name.contains("embed") { 1.6 } else { 0.7 };
            let value = |random: f32| if shape.len() == 1 { 1.0 } else { random * scale };
            // bf16 is the upper half of f32.
            let bytes = (0..count).flat_map(|_| value(random()).to_le_bytes()[2..].to_vec()).collect();
            (name, shape, bytes)
        })
        .collect();
    let view = |(name, shape, bytes): &'_ (String, Vec<usize>, Vec<u8>)| {
        let bytes: &'static [u8] = bytes.clone().leak();
        (name.clone(), TensorView::new(Dtype::BF16, shape.clone(), bytes).expect("a tensor"))
    };
    let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let file = folder.join("model.safetensors");
    safetensors::serialize_to_file(tensors.iter().map(view), Some(metadata), &file).expect("a file");
}

/// A running vLLM, in a process group of its own.
struct Vllm {
    child: Child,
    address: SocketAddr,
}

impl Vllm {
    /// Starts vLLM and waits until it is healthy.
    fn start(environment: &Path, place: &Place, address: SocketAddr) -> Self {
        let log = File::create(place.path("vllm.log")).expect("a file");
        let port = address.port().to_string();
        let child = Command::new(environment.join("bin/vllm"))
            .args(["serve", "./tiny", "--host", "127.0.0.1", "--port", &port, "--served-model-name", "tiny"])
            .args(["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"])
            .args(["--gpu-memory-utilization", "0.08", "--enable-prompt-tokens-details"])
            .envs([("VLLM_TARGET_DEVICE", "cpu"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1")])
            .envs([("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("VLLM_NO_USAGE_STATS", "1")])
            .current_dir(place.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .process_group(0)
            .spawn()
            .expect("vLLM starts");
        let mut vllm = Self { child, address };
        let begun = Instant::now();
        while !vllm.is_healthy() {
            let is_there = vllm.child.try_wait().expect("a child").is_none();
            assert!(is_there && begun.elapsed() < PATIENCE, "{}", place.read("vllm.log"));
            std::thread::sleep(Duration::from_millis(500));
        }
        vllm
    }

    fn is_healthy(&self) -> bool {
        TcpStream::connect(self.address).is_ok() && get(self.address, "/health").status == 200
    }

    /// Kills it and its processes with SIGKILL.
    fn kill(&mut self) {
        let group = i32::try_from(self.child.id()).expect("a process id");
        // SAFETY: sends a signal to the group of a child that has not been waited for.
        unsafe { libc::kill(-group, libc::SIGKILL) };
        let _ = self.child.wait(); // killed above
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        self.kill();
    }
}

fn chat(at: SocketAddr, more: &Value) -> Reply {
    let mut body = json!({"session_id": "trip", "session_append": true, "max_tokens": 12, "temperature": 0});
    body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    ask(
        at,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json",
        &body.to_string(),
    )
}

/// Returns a stream after its first text.
fn ask_for_stream(at: SocketAddr, more: &Value) -> BufReader<TcpStream> {
    let mut body = json!({"session_id": "trip", "session_append": true, "temperature": 0});
    body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    let (body, mut stream) = (body.to_string(), TcpStream::connect(at).expect("it listens"));
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("it reads");
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    // The first event has the role and no text yet.
    while !line.contains("\"content\":\"") || line.contains("\"content\":\"\"") {
        line.clear();
        assert!(stream.read_line(&mut line).expect("UTF-8") > 0, "the stream has ended");
    }
    stream
}

fn says(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

fn serve(place: Place, url: &str) -> Serving {
    let (serving, said) = start_as_told(place, &["--engine", url, "--model", "./texts"]);
    assert!(said.iter().any(|line| line.contains("answers come from vLLM")), "{said:?}");
    serving
}

#[test]
fn a_chat_survives_the_end_of_vllm_and_of_llmctl() {
    let Some(environment) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
    else {
        crate::common::skip(format!("{VARIABLE} names no virtual environment with vLLM"));
        return;
    };
    let place = Place::new();
    write_model(&place.path("tiny"));
    std::fs::create_dir(place.path("texts")).expect("a folder");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(place.path("tiny").join(name), place.path("texts").join(name)).expect("a copy");
    }
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let mut vllm = Vllm::start(&environment, &place, free);
    let url = format!("http://{free}");
    same_text_as_here(&place, &url);
    constrained(&place, &url);

    let Serving { child, address, place } = serve(place, &url);
    // vLLM's pages on a CPU have 128 tokens, so that a shorter beginning is never cached.
    let question = "Where does the river begin, and where does it end? ".repeat(6);
    let first = chat(address, &says(&question)).json();
    assert_eq!(first["usage"]["engine"]["reports_cached_tokens"], true, "{first}");
    let second = chat(address, &says("And how long is it?")).json();
    assert_eq!(second["llmctl"]["kept_turns"], 1, "{second}");
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.is_some_and(|cached| cached >= 128), "{second}");

    // A stream that vLLM's end cuts is an error that names it; what was finished stays.
    let mut endless = says("Tell me everything.");
    (endless["stream"], endless["max_tokens"], endless["ignore_eos"]) =
        (true.into(), 300.into(), true.into());
    let mut stream = ask_for_stream(address, &endless);
    vllm.kill();
    let mut cut = String::new();
    stream.read_to_string(&mut cut).expect("UTF-8");
    assert!(cut.contains("\"error\"") && cut.contains(&url), "{cut}");
    let down = chat(address, &says("Are you there?"));
    assert_eq!((down.status, down.header("retry-after").is_empty()), (503, false), "{down:?}");

    let mut vllm = Vllm::start(&environment, &place, free);
    let third = until_up(address, "Are you back?");
    assert_eq!(third["llmctl"]["kept_turns"], 2, "{third}");

    signal(&child, libc::SIGKILL);
    let mut killed = child;
    killed.wait().expect("it ends");
    let Serving { child, address, place } = serve(place, &url);
    let fourth = chat(address, &says("And now?")).json();
    assert_eq!(fourth["llmctl"]["kept_turns"], 3, "{fourth}");
    let cached = fourth["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.is_some_and(|cached| cached >= 128), "vLLM has kept what it computed: {fourth}");
    signal(&child, libc::SIGTERM);
    let mut said = String::new();
    let mut ended = child;
    ended.stderr.take().expect("a pipe").read_to_string(&mut said).expect("UTF-8");
    assert_eq!(ended.wait().expect("it ends").code(), Some(0), "{said}");
    vllm.kill();
    drop(place);
}

/// The greedy text of vLLM and of llmctl's own engine, from the same weights in f32.
fn same_text_as_here(place: &Place, url: &str) {
    for prompt in ["Once upon a time", "The river", "1, 2, 3,"] {
        let shared = ["--raw", prompt, "--max-tokens", "24", "--temperature", "0", "--quiet"];
        let there = place.run(&[&["run", "--engine", url, "--model", "./texts"][..], &shared].concat());
        let here = place.run(
            &[&["run", "--model", "./tiny", "--dtype", "f32", "--kv-type", "f32"][..], &shared].concat(),
        );
        assert_eq!(there.check(0, "").stdout, here.check(0, "").stdout, "{prompt}");
    }
}

/// Answers keep to a schema, a regular expression and a Lark grammar.
fn constrained(place: &Place, url: &str) {
    let run = |constraint: [&str; 2]| {
        let args =
            ["run", "--engine", url, "--model", "./texts", "--raw", "Say", "--quiet", "--max-tokens", "60"];
        place.run(&[&args[..], &constraint].concat()).check(0, "").stdout.trim_end().to_owned()
    };
    let schema = r#"{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": false}"#;
    let object: Value = serde_json::from_str(&run(["--schema", schema])).expect("JSON");
    assert!(object["a"] == "x" || object["a"] == "y", "{object}");
    let text = run(["--regex", "(ab|cd){2}"]);
    assert!(["abab", "abcd", "cdab", "cdcd"].contains(&text.as_str()), "{text}");
    place.write("g.lark", "start: \"north\" | \"south\"\n");
    let text = run(["--grammar", "g.lark"]);
    assert!(["north", "south"].contains(&text.as_str()), "{text}");
}

/// Asks until the server has found its engine again.
fn until_up(address: SocketAddr, text: &str) -> Value {
    let begun = Instant::now();
    loop {
        let reply = chat(address, &says(text));
        if reply.status == 200 {
            return reply.json();
        }
        assert_eq!(reply.status, 503, "{reply:?}");
        assert!(begun.elapsed() < PATIENCE, "{reply:?}");
        std::thread::sleep(Duration::from_millis(500));
    }
}
