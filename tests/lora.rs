//! Promise: with LoRA adapters a model computes what PEFT computes; requests with other adapters, or none, share steps and nothing
//! else; and what is no adapter for the model is refused by name.

use llmctl_models::adapters::{AdapterSpec, AdapterUse};
use llmctl_models::load::AdapterFile;

use crate::cli::Place;
use crate::common::golden::checkpoint;
use crate::common::prelude::*;
use crate::common::stored_tensors::{StoredTensor, StoredTensors};
use crate::common::watched::{Truth, Watched};
use crate::model_serving::Serving;
use crate::serve_ops::client::get;

const NEW_TOKENS: usize = 6;

/// Projections of a llama-like layer, with outputs and inputs of the checkpoint `llama`.
const PROJECTIONS: [(&str, [usize; 2]); 7] = [
    ("self_attn.q_proj", [32, 32]),
    ("self_attn.k_proj", [16, 32]),
    ("self_attn.v_proj", [16, 32]),
    ("self_attn.o_proj", [32, 32]),
    ("mlp.gate_proj", [96, 32]),
    ("mlp.up_proj", [96, 32]),
    ("mlp.down_proj", [32, 96]),
];

/// An adapter of rank 4 for all projections of the checkpoint `llama`, in PEFT's form; `seed` chooses its values.
fn written(folder: &Path, seed: usize) -> PathBuf {
    let folder = folder.join(format!("adapter-{seed}"));
    std::fs::create_dir(&folder).expect("a folder");
    let value = |at: usize| (((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0) * 0.3;
    let tensor = |name: String, shape: [usize; 2]| StoredTensor {
        bytes: (0..shape[0] * shape[1]).flat_map(|at| value(at + name.len()).to_le_bytes()).collect(),
        name,
        dtype: "F32".to_owned(),
        shape: shape.map(|size| size as u64).into(),
    };
    let mut tensors = Vec::new();
    for layer in 0..4 {
        for (name, [out, input]) in PROJECTIONS {
            let module = format!("base_model.model.model.layers.{layer}.{name}");
            tensors.push(tensor(format!("{module}.lora_A.weight"), [4, input]));
            tensors.push(tensor(format!("{module}.lora_B.weight"), [out, 4]));
        }
    }
    std::fs::write(folder.join("adapter_model.safetensors"), StoredTensors(tensors).to_bytes())
        .expect("written");
    let config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).expect("written");
    folder
}

fn with_adapters(files: &[(&Path, f32)]) -> LoadOptions {
    let file = |(path, scale): &(&Path, f32)| AdapterFile { path: (*path).to_owned(), scale: *scale };
    LoadOptions { dtype: None, kv_type: KvType::F16, adapters: files.iter().map(file).collect(), ..exact() }
}

fn using(request: &Request, uses: &[(&AdapterSpec, f32)]) -> Request {
    let list = AdapterUse::list(uses.iter().map(|(spec, scale)| AdapterUse { key: spec.key, scale: *scale }));
    Request { adapters: Some(list.expect("finite")), ..request.clone() }
}

#[test]
fn requests_with_other_adapters_share_steps_and_nothing_else() {
    let folder = tempfile::tempdir().expect("tempdir");
    let [one, two] = [1, 2].map(|seed| written(folder.path(), seed));
    let path = checkpoint("llama");
    let plain = Watched::load(&path, &with_adapters(&[]));
    let model = Watched::load(&path, &with_adapters(&[(&one, 0.0), (&two, 0.0)]));
    let [first, second] = &model.spec().adapters[..] else { panic!("two adapters") };
    let prompt = golden_prompts(&path).pop().expect("the long prompt").tokens[..70].to_vec();
    let asked = Request { logprobs: Some(3), ..limited(&prompt, NEW_TOKENS) };
    let ways: [&[(&AdapterSpec, f32)]; 5] =
        [&[], &[(first, 1.0)], &[(second, 1.0)], &[(first, 0.5)], &[(second, 0.25), (first, 1.0)]];
    let truths: Vec<Truth> = ways.iter().map(|uses| model.cold(&using(&asked, uses))).collect();
    assert!(plain.cold(&asked).is_same(&truths[0]), "beside adapters, the model's own bits");
    assert!(model.cold(&asked).is_same(&truths[0]), "adapters of scale 0 are left out");
    for (index, truth) in truths.iter().enumerate() {
        assert!(truths[..index].iter().all(|other| !other.is_same(truth)), "way {index} is like another");
    }

    // All in one step, of one prompt: each with its own logits, and nothing of another's rows.
    for step_tokens in [11, 400] {
        let mut engine = model.engine(|config| (config.max_running, config.step_tokens) = (8, step_tokens));
        model.forget();
        let answers = run_all(&mut engine, truths.iter().map(|truth| truth.request.clone()).collect());
        for (truth, answer) in truths.iter().zip(&answers) {
            model.check("together", answer, truth);
            assert_eq!(answer.outcome().usage.cached_tokens, 0, "rows of other adapters are no prefix");
            assert_eq!(Some(&answer.outcome().adapters), truth.request.adapters.as_ref());
        }
        // Pages are found again by those who use the same adapters, in the same measure.
        let answers = run_all(&mut engine, truths.iter().map(|truth| truth.request.clone()).collect());
        for (truth, answer) in truths.iter().zip(&answers) {
            model.check("from the index", answer, truth);
            assert_eq!(answer.outcome().usage.cached_tokens, 64);
        }
    }

    // A session whose adapters change is computed anew, and says why.
    let mut engine = model.engine(|_| ());
    let in_session = |truth: &Truth| Request { session: Some(named("a")), ..truth.request.clone() };
    run_one(&mut engine, in_session(&truths[1]));
    let same = run_one(&mut engine, in_session(&truths[1]));
    assert_eq!(same.outcome().usage.cached_tokens, prompt.len() - 1);
    let other = run_one(&mut engine, in_session(&truths[3]));
    assert_eq!((other.reuse().cached_tokens, other.reuse().reason), (0, ReuseReason::Adapters));
    assert_eq!(other.tokens(), truths[3].tokens);

    for (list, word) in [
        (vec![AdapterUse { key: first.key, scale: 0.0 }], "scale of 0"),
        (vec![AdapterUse { key: llmctl_models::adapters::AdapterKey([0; 32]), scale: 1.0 }], "not loaded"),
    ] {
        let error = engine.submit(Request { adapters: Some(list), ..asked.clone() }).expect_err("refused");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn what_is_no_adapter_for_the_model_is_refused_by_name() {
    let place = tempfile::tempdir().expect("tempdir");
    let sound = written(place.path(), 1);
    let gguf = parity_gguf("llama-f32.gguf").expect("in the repository");
    let refused = |model: &Path, adapters: &[(&Path, f32)], words: &[&str]| {
        let error = load_model(model, &with_adapters(adapters)).err().expect("refused").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    };
    let llama = checkpoint("llama");
    refused(&llama, &[(&sound, 1.0), (&sound, 0.5)], &["adapter-1", "given before"]);
    refused(&gguf, &[(&sound, 1.0)], &["convert_lora_to_gguf.py"]);
    refused(&llama, &[(&gguf, 1.0)], &["give the adapter's own folder"]);
    refused(&gguf, &[(&gguf, 1.0)], &["no LoRA adapter"]);
    refused(&llama, &[(&place.path().join("nothing"), 1.0)], &["adapter's own folder"]);
    refused(&checkpoint("qwen3"), &[(&sound, 1.0)], &["do not fit", "adapter-1"]);
    refused(&checkpoint("nemotron-h-moe"), &[(&sound, 1.0)], &["adapter-1", "layers.0"]);

    let config = std::fs::read(sound.join("adapter_config.json")).expect("read");
    let config: Value = serde_json::from_slice(&config).expect("JSON");
    for (key, value) in [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("modules_to_save", json!(["lm_head"])),
        ("peft_type", json!("LOHA")),
        ("lora_alpha", json!("much")),
        ("alpha_pattern", json!({"(q_proj": 3})),
    ] {
        let mut changed = config.clone();
        changed[key] = value;
        std::fs::write(sound.join("adapter_config.json"), changed.to_string()).expect("written");
        refused(&llama, &[(&sound, 1.0)], &[key]);
    }
    std::fs::write(sound.join("adapter_config.json"), config.to_string()).expect("written");

    let weights = sound.join("adapter_model.safetensors");
    let stored = std::fs::read(&weights).expect("read");
    let changed = |change: &dyn Fn(&mut StoredTensor), words: &[&str]| {
        let mut tensors = StoredTensors::from_bytes(&stored);
        change(&mut tensors.0[0]);
        std::fs::write(&weights, tensors.to_bytes()).expect("written");
        refused(&llama, &[(&sound, 1.0)], words);
    };
    let renamed = |to: &'static str| move |tensor: &mut StoredTensor| tensor.name = to.to_owned();
    changed(&renamed("base_model.model.lm_head.lora_A.weight"), &["lm_head", "pair is missing"]);
    changed(&renamed("base_model.model.lm_head.weight"), &["no matrix of a LoRA adapter"]);
    changed(&|tensor| tensor.shape[0] = 2, &["is damaged"]);
    changed(&|tensor| tensor.bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()), &["not finite"]);
}

/// A place with two adapters of a model, and what `run` says without them, with the first, with half of the second, and with both.
#[cfg(unix)]
struct Adapted {
    place: Place,
    model: String,
    one: String,
    two: String,
    told: [String; 4],
}

#[cfg(unix)]
const GREEDY: [&str; 7] = ["--raw", "--max-tokens", "8", "--quiet", "--temperature", "0", "Once"];

#[cfg(unix)]
impl Adapted {
    fn new() -> Self {
        let place = Place::new();
        let model = checkpoint("llama").to_string_lossy().into_owned();
        let [one, two] = [1, 2].map(|seed| written(&place.path(""), seed).to_string_lossy().into_owned());
        let half = format!("{two}=0.5");
        let run = |adapters: &[&str]| Self::run(&place, &model, adapters, &[]);
        let told = [run(&[]), run(&[&one]), run(&[&half]), run(&[&one, &half])];
        let is_unique = |text: &String| told.iter().filter(|other| *other == text).count() == 1;
        assert!(told.iter().all(is_unique), "{told:?}");
        Self { place, model, one, two, told }
    }

    /// Returns the text of `run`, without the end of the line.
    fn run(place: &Place, model: &str, adapters: &[&str], more: &[&str]) -> String {
        let mut args = [&["run", "--model", model], &GREEDY[..], more].concat();
        adapters.iter().for_each(|adapter| args.extend(["--lora", adapter]));
        place.run(&args).check(0, "").stdout.trim_end_matches('\n').to_owned()
    }

    /// Fields by which a request to the model `id` chooses adapters, and the text that it gets.
    fn chosen(&self, id: &str) -> [(Value, &str); 5] {
        let [none, one, half, both] = self.told.each_ref().map(String::as_str);
        [
            (json!({}), one),
            (json!({"lora": []}), none),
            (json!({"lora": [{"id": 1, "scale": 0.5}]}), half),
            (json!({"lora": [{"id": "adapter-2", "scale": 0.5}, {"id": 0, "scale": 1}]}), both),
            (json!({"model": format!("{id}:adapter-1")}), one),
        ]
    }
}

/// A question with more fields.
#[cfg(unix)]
fn with(more: &Value) -> Value {
    let mut body = json!({"prompt": "Once", "max_tokens": 8, "temperature": 0});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

#[cfg(unix)]
fn text_of(choice: &Value) -> &str {
    choice["text"].as_str().expect("a text").trim_end_matches('\n')
}

/// Fields that are refused in a request to the model `id`, and the field that the error names.
#[cfg(unix)]
fn wrong(id: &str) -> [(Value, &'static str); 4] {
    [
        (json!({"lora": [{"id": 7, "scale": 1}]}), "lora[0].id"),
        (json!({"lora": [{"id": "gone"}]}), "lora[0].id"),
        (json!({"lora": [{"id": 0, "weight": 1}]}), "lora[0].weight"),
        (json!({"model": format!("{id}:adapter-1"), "lora": [{"id": 1}]}), "lora"),
    ]
}

#[cfg(unix)]
#[test]
fn commands_take_adapters() {
    let adapted = Adapted::new();
    let Adapted { place, model, one, two, told } = &adapted;
    // The model drafts for itself, without the adapter.
    assert_eq!(Adapted::run(place, model, &[one], &["--draft-model", model]), told[1]);

    let row = |body: Value| json!({"method": "POST", "url": "/v1/completions", "body": body}).to_string();
    let (asked, wrong) = (adapted.chosen("llama"), wrong("llama"));
    let bodies = asked.iter().map(|(more, _)| more).chain(wrong.iter().map(|(more, _)| more));
    let rows: Vec<String> = bodies.map(|more| row(with(more))).collect();
    place.write("rows.jsonl", rows.join("\n"));
    let idle = format!("{two}=0");
    let args = ["run", "--model", model, "--batch", "rows.jsonl", "--quiet", "--lora", one, "--lora", &idle];
    let ran = place.run(&args);
    let results: Vec<Value> =
        ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(results.len(), rows.len(), "{}", ran.stderr);
    for ((more, expected), result) in asked.iter().zip(&results) {
        assert_eq!(text_of(&result["response"]["body"]["choices"][0]), *expected, "{more}");
    }
    for ((more, param), result) in wrong.iter().zip(&results[asked.len()..]) {
        assert!(result.to_string().contains(&format!("\"{param}\"")), "{more}: {result}");
    }
}

#[cfg(unix)]
#[test]
fn servers_take_adapters() {
    let adapted = Adapted::new();
    let Adapted { place, model, one, two, told } = &adapted;
    let idle = format!("{two}=0");
    let server =
        Serving::start(place, &["--model", model, "--model-id", "m", "--lora", one, "--lora", &idle]);
    let listed = get(server.address, "/v1/models").json();
    let ids: Vec<&str> =
        listed["data"].as_array().expect("models").iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(ids, ["m", "m:adapter-1", "m:adapter-2"]);
    assert_eq!((&listed["data"][1]["parent"], &listed["data"][0]["parent"]), (&json!("m"), &Value::Null));
    let adapters =
        json!([{"id": 0, "path": "adapter-1", "scale": 1.0}, {"id": 1, "path": "adapter-2", "scale": 0.0}]);
    assert_eq!(get(server.address, "/lora-adapters").json(), adapters);
    for (more, expected) in adapted.chosen("m") {
        let reply = server.post("/v1/completions", &with(&more));
        assert_eq!((reply.status, text_of(&reply.json()["choices"][0])), (200, expected), "{more}");
    }
    let native =
        server.post("/completion", &json!({"prompt": "Once", "n_predict": 8, "temperature": 0, "lora": []}));
    assert_eq!(native.json()["content"].as_str().expect("a text").trim_end_matches('\n'), told[0]);
    for (more, param) in wrong("m") {
        let error = server.post("/v1/completions", &with(&more));
        assert_eq!((error.status, &error.json()["error"]["param"]), (400, &json!(param)), "{error:?}");
    }
    server.end();
}

/// What PEFT computed for a checkpoint: cases of adapters, with logits and the tokens that follow.
struct Golden {
    folder: PathBuf,
    facts: Value,
    logits: Safetensors,
}

impl Golden {
    fn of(family: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lora").join(family);
        let facts = std::fs::read(folder.join("golden.json")).expect("golden.json");
        let facts = serde_json::from_slice(&facts).expect("JSON");
        let logits = Safetensors::open(folder.join("golden.safetensors")).expect("tensors");
        Self { folder, facts, logits }
    }

    fn list<T: serde::de::DeserializeOwned>(&self, name: &str) -> Vec<T> {
        serde_json::from_value(self.facts[name].clone()).expect("a list")
    }

    /// Adapters of a case; `form` chooses their files by their names.
    fn adapters(&self, case: &str, form: impl Fn(&str) -> String) -> Vec<(PathBuf, f32)> {
        let listed = self.facts["cases"][case]["adapters"].as_array().expect("adapters");
        let adapter = |adapter: &Value| {
            let name = form(adapter["name"].as_str().expect("a name"));
            (self.folder.join(name), adapter["scale"].as_f64().expect("a scale") as f32)
        };
        listed.iter().map(adapter).collect()
    }

    /// Logits within 1e-3 of PEFT's, and the same greedy tokens, on the CPU backend and on candle's devices.
    fn check(&self, model: &Path, case: &str, adapters: &[(PathBuf, f32)]) {
        [exact(), on_candle()].iter().for_each(|options| self.check_on(options, model, case, adapters));
    }

    fn check_on(&self, on: &LoadOptions, model: &Path, case: &str, adapters: &[(PathBuf, f32)]) {
        let way = format!("{}, {case}, {:?}", model.display(), on.device);
        let tokens: Vec<u32> = self.list("tokens");
        let adapters: Vec<(&Path, f32)> = adapters.iter().map(|(path, scale)| (&**path, *scale)).collect();
        let options = LoadOptions { adapters: with_adapters(&adapters).adapters, ..on.clone() };
        let mut loaded = load_model(model, &options).unwrap_or_else(|error| panic!("{way}: {error}"));
        let stored = self.logits.tensor(&format!("{case}.logits")).expect("readable").expect("there");
        let expected: Vec<f32> =
            stored.bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let computed = Fed::new(&mut *loaded.model).feed(&tokens, usize::MAX);
        let vocab = computed.len() / tokens.len();
        let rows = self.list("positions").into_iter().zip(expected.chunks_exact(vocab));
        let worst = rows
            .map(|(position, expected): (usize, _)| {
                largest_difference(&computed[position * vocab..][..vocab], expected)
            })
            .fold(0.0, f32::max);
        assert!(worst < 1e-3, "{way}: {worst}");
        let greedy: Vec<u32> =
            serde_json::from_value(self.facts["cases"][case]["greedy"].clone()).expect("tokens");
        let config = EngineConfig::new(256, Vec::new());
        let mut engine =
            Engine::new(loaded.model, loaded.texts.tokenizer.clone(), config).expect("an engine");
        assert_eq!(run_one(&mut engine, limited(&tokens, greedy.len())).ids(), greedy, "{way}");
    }
}

#[test]
fn every_family_computes_what_peft_computes() {
    for family in ["llama", "qwen3", "gemma3", "phi3", "qwen3-moe"] {
        let golden = Golden::of(family);
        let cases = golden.facts["cases"].as_object().expect("cases");
        for case in cases.keys().filter(|case| !case.ends_with("-gguf")) {
            golden.check(&checkpoint(family), case, &golden.adapters(case, str::to_owned));
        }
        let Some(gguf) =
            parity_gguf(&format!("{family}-f32.gguf")).filter(|_| golden.folder.join("one.gguf").exists())
        else {
            continue;
        };
        for case in ["base", "one", "one-half", "two-gguf"] {
            let form = |name: &str| format!("{}.gguf", name.trim_end_matches(".gguf"));
            golden.check(&gguf, case, &golden.adapters(case, form));
        }
    }
    // Adapters of experts' modules for experts of modules; and what PEFT wrote in another order is refused by its version.
    let golden = Golden::of("qwen3-moe");
    golden.check(&checkpoint("qwen3-moe"), "one", &golden.adapters("one", |_| "one-modules".to_owned()));
    let old = golden.folder.join("fused-old");
    let error = load_model(&checkpoint("qwen3-moe"), &with_adapters(&[(&old, 1.0)])).err().expect("refused");
    assert!(error.to_string().contains("PEFT 0.20 or newer"), "{error}");
}

/// One tensor of all experts, and adapters made for modules; and the other way round.
#[test]
fn experts_are_adapted_in_whatever_form_they_are_stored() {
    let golden = Golden::of("qwen3-moe");
    let from = checkpoint("qwen3-moe");
    let place = tempfile::tempdir().expect("tempdir");
    for entry in std::fs::read_dir(&from).expect("a folder") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, place.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    let weights = place.path().join("model.safetensors");
    let stored = StoredTensors::from_bytes(&std::fs::read(&weights).expect("read"));
    let (experts, mut kept): (Vec<StoredTensor>, Vec<StoredTensor>) =
        stored.0.into_iter().partition(|tensor| tensor.name.contains(".mlp.experts."));
    let experts: BTreeMap<String, StoredTensor> =
        experts.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let layers = experts.keys().filter(|name| name.ends_with(".experts.0.up_proj.weight")).count();
    for layer in 0..layers {
        let module = format!("model.layers.{layer}.mlp.experts");
        let count = experts
            .keys()
            .filter(|name| name.starts_with(&format!("{module}.")) && name.ends_with(".up_proj.weight"))
            .count();
        for (stack, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])]
        {
            let each = (0..count).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
            let each: Vec<&StoredTensor> =
                each.map(|(expert, part)| &experts[&format!("{module}.{expert}.{part}.weight")]).collect();
            let [rows, cols] = each[0].shape[..] else { panic!("a matrix") };
            kept.push(StoredTensor {
                name: format!("{module}.{stack}"),
                dtype: each[0].dtype.clone(),
                shape: vec![count as u64, rows * parts.len() as u64, cols],
                bytes: each.iter().flat_map(|tensor| tensor.bytes.clone()).collect(),
            });
        }
    }
    std::fs::remove_file(&weights).expect("a copy of a read-only file");
    std::fs::write(&weights, StoredTensors(kept).to_bytes()).expect("written");
    for form in ["one", "one-modules"] {
        golden.check(place.path(), "one", &golden.adapters("one", |_| form.to_owned()));
    }
}
