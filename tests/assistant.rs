//! Gemma 4's assistant: its logits are those of transformers (`tests/parity/make.py`), from a folder and from GGUF, it fits its
//! model alone, and its drafts change no answer.

use llmctl_engine::{DraftStop, ModelDrafter};
use llmctl_models::load::{PredictionUse, load_with_draft};
use llmctl_models::model::weights::to_f32;
use safetensors::SafeTensors;

use crate::cli::llmctl;
use crate::common::convert::{POST_NORM, Tensor, Written, facts_after, renamed, with_named_tokens, write};
use crate::common::golden::{checkpoint, feed};
use crate::common::prelude::*;
use crate::common::telling::{
    Telling, Texts, ToyAssisted, VOCAB, check_together, check_turns, greedy, toy_config,
};

/// Models and their assistants.
const PAIRS: [(&str, &str); 2] = [("gemma4", "gemma4-assistant"), ("gemma4-e", "gemma4-e-assistant")];

fn assistant_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity-assistants").join(name)
}

fn resolved(path: &Path) -> Resolved {
    let source = match path.is_dir() {
        true => ModelSource::Folder(path.into()),
        false => ModelSource::Gguf(path.into()),
    };
    Resolved::new(path.display().to_string(), source)
}

fn load_pair(model: &Path, assistant: &Path, options: &LoadOptions) -> Result<LoadedModel, LoadError> {
    load_with_draft(&resolved(model), Some(&resolved(assistant)), options, &mut |_, _| ())
}

/// The checkpoint of an assistant as llama.cpp's converter writes it, with other counts.
fn gguf(folder: &Path, others: &[(&str, u32)]) -> Written {
    write(facts(others), &gguf_tensors(folder))
}

fn facts(others: &[(&str, u32)]) -> GgufBuilder {
    let tokenizer = from_folder(&checkpoint("gemma4")).expect("a tokenizer");
    let tokens: Vec<String> =
        (0..384).map(|id| tokenizer.id_to_token(id).expect("a token").to_owned()).collect();
    facts_after(|arch| with_named_tokens(arch, &tokens), "gemma4-assistant", others)
}

fn gguf_tensors(folder: &Path) -> Vec<(String, Tensor)> {
    let file = Safetensors::open(folder).expect("opens");
    let tensors = file.names().into_iter().filter(|name| !name.starts_with("masked_embedding")).map(|name| {
        let tensor = file.tensor(&name).expect("reads").expect("is there");
        (name.trim_start_matches("model.").to_owned(), (tensor.shape.clone(), to_f32(&tensor)))
    });
    // A quarter of a global head's pairs are rotated.
    let divisors = [vec![1.0; 4], vec![1e30; 12]].concat();
    let tensors = renamed(tensors.collect(), &POST_NORM, |_, _| None).into_iter();
    tensors.chain([("rope_freqs.weight".to_owned(), (vec![16], divisors))]).collect()
}

/// A draft after a prompt as transformers made it: tokens, of which the first is the model's, logits and hidden states of each
/// step.
struct Golden {
    prompt: Vec<u32>,
    drafted: Vec<u32>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
}

fn goldens(folder: &Path) -> Vec<Golden> {
    let json = std::fs::read(folder.join("golden.json")).expect("golden.json");
    let json: Value = serde_json::from_slice(&json).expect("golden.json");
    let bytes = std::fs::read(folder.join("golden.safetensors")).expect("golden.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("golden.safetensors");
    let ids = |ids: &Value| serde_json::from_value::<Vec<u32>>(ids.clone()).expect("ids");
    let prompt = |(name, stored): (&String, &Value)| {
        let floats = |part: &str| -> Vec<f32> {
            let tensor = tensors.tensor(&format!("{name}.{part}")).expect("golden tensor");
            tensor
                .data()
                .chunks(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes")))
                .collect()
        };
        let (prompt, drafted) = (ids(&stored["tokens"]), ids(&stored["drafted"]));
        Golden { prompt, drafted, logits: floats("logits"), hidden: floats("hidden") }
    };
    json["prompts"].as_object().expect("prompts").iter().map(prompt).collect()
}

/// Feeds a prompt, and lets the assistant make each step of the golden draft. Returns the worst difference. A step goes on from the
/// golden hidden state, because each one would multiply the rounding of those before it by ten.
fn worst(model: &mut dyn Model, golden: &Golden) -> f32 {
    let width = model.hidden_width().expect("an assistant");
    let pool = page_pool(model, 64);
    let mut table = PageTable::new(&pool);
    let logits = feed(model, &mut table, &golden.prompt);
    assert_eq!(top_two(&logits[logits.len() - 384..]).0, golden.drafted[0], "the model's own token");
    let mut hidden = model.hidden()[(golden.prompt.len() - 1) * width..].to_vec();
    let mut worst = 0f32;
    for step in 0..golden.drafted.len() - 1 {
        let rows = [Row::known(golden.drafted[step], table.len() - 1, 0, true)];
        let logits = model.predict(&Batch::new(&rows, &[&table]), &hidden).expect("logits").values;
        hidden = golden.hidden[step * width..(step + 1) * width].to_vec();
        worst = worst
            .max(largest_difference(&logits, &golden.logits[step * 384..(step + 1) * 384]))
            .max(largest_difference(model.hidden(), &hidden));
    }
    worst
}

#[test]
fn an_assistant_drafts_as_transformers_does_from_either_form_of_file() {
    for (model, assistant) in PAIRS {
        let folder = assistant_folder(assistant);
        let converted = gguf(&folder, &[]);
        let each = [exact(), on_candle()];
        for (path, options) in
            [&folder, &converted.path].into_iter().flat_map(|path| each.iter().map(move |on| (path, on)))
        {
            let mut loaded = load_pair(&checkpoint(model), path, options).expect("loads");
            for golden in goldens(&folder) {
                let worst = worst(&mut *loaded.model, &golden);
                let len = golden.prompt.len();
                // A row more or less changes logits by 0.1 or more.
                assert!(worst < 2e-3, "{}, {len} tokens: {worst}", path.display());
            }
        }
    }
}

#[test]
fn an_assistant_fits_its_model_alone() {
    let folder = assistant_folder("gemma4-assistant");
    let refused = |model: &Path, assistant: &Path, options: &LoadOptions| {
        load_pair(model, assistant, options).err().expect("refused").to_string()
    };
    let model = checkpoint("gemma4");
    let error = refused(&checkpoint("llama"), &folder, &exact());
    assert!(error.contains("it is an assistant of Gemma 4, not of llama"), "{error}");
    for (key, count, reason) in [
        ("embedding_length_out", 48, "it drafts for hidden states of 48 values, the model's have 32"),
        ("attention.key_length_swa", 8, "its layer 0 has 4 heads of 8, the model's KV 2 of 16"),
    ] {
        let error = refused(&model, &gguf(&folder, &[(key, count)]).path, &exact());
        assert!(error.contains(reason), "{error}");
    }
    let error = load_model(&folder, &exact()).err().expect("refused").to_string();
    assert!(error.contains("an assistant") && error.contains("--draft-model"), "{error}");
    let required = LoadOptions { prediction: PredictionUse::Required, ..exact() };
    assert!(load_pair(&model, &folder, &required).is_ok());
    let error = refused(&model, &model, &required);
    assert!(error.contains("not an assistant"), "{error}");
}

/// A damaged assistant is an error that names the tensor.
#[test]
fn an_assistant_with_a_tensor_missing_is_refused_by_name() {
    let folder = assistant_folder("gemma4-assistant");
    for lacking in ["nextn.post_projection.weight", "blk.2.attn_q.weight", "output_norm.weight"] {
        let mut tensors = gguf_tensors(&folder);
        tensors.retain(|(name, _)| name != lacking);
        let file = write(facts(&[]), &tensors);
        let error =
            load_pair(&checkpoint("gemma4"), &file.path, &exact()).err().expect("refused").to_string();
        assert!(error.contains(lacking), "{error} names {lacking}");
    }
}

#[test]
fn an_assistant_changes_neither_fingerprint_nor_spec_and_has_no_kv() {
    let without = load_model(&checkpoint("gemma4"), &exact()).expect("loads");
    let with =
        load_pair(&checkpoint("gemma4"), &assistant_folder("gemma4-assistant"), &exact()).expect("loads");
    let draft = with.draft.expect("an assistant");
    assert_eq!(with.fingerprint, without.fingerprint);
    assert_eq!(with.model.spec(), without.model.spec());
    assert!(draft.model.is_none() && draft.name.is_some_and(|name| name.ends_with("gemma4-assistant")));
    // At least the table of tokens and the projections of its layers, in f32.
    assert!(draft.weight_bytes > 4 * (384 * 16 + 3 * 64 * 16), "{}", draft.weight_bytes);
    assert!(without.model.hidden().is_empty() && without.model.hidden_width().is_none());
}

fn by_assistant(answer: &Answer) -> DraftModelUsage {
    let usage = answer.outcome().usage.draft_model.expect("the assistant was asked");
    assert_eq!(usage.drafter, ModelDrafter::Assistant);
    usage
}

/// Two turns of a session, another that takes over its pages, and three requests at once, in texts longer than the window.
#[test]
fn answers_are_the_same_with_an_assistants_drafts() {
    for ((model, assistant), kv_type) in PAIRS.into_iter().zip([KvType::F16, KvType::Q8_0]) {
        let (model, assistant): (PathBuf, PathBuf) = (checkpoint(model), assistant_folder(assistant));
        let options = LoadOptions { dtype: None, kv_type, ..exact() };
        let watched = Watched::of(load_pair(&model, &assistant, &options).expect("loads")).0;
        let plain = Watched::load(&model, &options);
        let long = golden_prompts(&model).pop().expect("a prompt").tokens;
        let ask = |prompt: &[u32], sampling| Request { sampling, logprobs: Some(2), ..limited(prompt, 20) };
        let first = plain.cold(&ask(&long[..70], Sampling::default()));
        let next = [&long[..70], &first.ids(), &[5, 6, 7]].concat();
        let second = plain.cold(&ask(&next, seeded(17)));
        let truths = [first, second, plain.cold(&ask(&long[7..60], seeded(11)))];
        let modes = [
            Speculation::Always(1),
            Speculation::Always(4),
            Speculation::Auto,
            Speculation::Draft,
            Speculation::Mtp,
        ];
        for mode in modes {
            let mut engine = watched.engine(|config| config.speculation = mode);
            for (session, truth) in [("a", &truths[0]), ("a", &truths[1]), ("b", &truths[1])] {
                watched.forget();
                let answer = run_one(&mut engine, within(session, truth.request.clone()));
                watched.check(&format!("{}: {session}, {mode:?}", model.display()), &answer, truth);
                assert_eq!(engine.inspect_session(&named(session)).expect("open").tokens, truth.fed());
                assert!(!matches!(mode, Speculation::Always(_)) || by_assistant(&answer).drafted_tokens > 0);
            }
            watched.forget();
            let answers = run_all(&mut engine, truths.iter().map(|truth| truth.request.clone()).collect());
            for (answer, truth) in answers.iter().zip(&truths) {
                watched.check(&format!("{}: together, {mode:?}", model.display()), answer, truth);
            }
        }
    }
}

fn toy_engine(kinds: &[KvKind], config: EngineConfig) -> Engine {
    let model = ToyAssisted::new(Telling::new(kinds, &Texts::default()));
    Engine::new(Box::new(model), ToyVocabulary::numbers(VOCAB), config).expect("valid")
}

const KINDS: [&[KvKind]; 2] = [&[KvKind::Full], &[KvKind::Full, KvKind::SlidingWindow(20)]];

/// Rows, hidden states and KV keep in step: over chunks of a prompt, refused drafts, turns of a session, and several requests.
#[test]
fn an_assistants_drafts_follow_the_hidden_states_of_the_text() {
    KINDS.iter().for_each(|kinds| check_turns(kinds, &toy_engine, ModelDrafter::Assistant));
}

/// Ten requests are more than the rows of a step whose time is measured.
#[test]
fn requests_that_run_together_are_drafted_for_together() {
    KINDS.iter().for_each(|kinds| check_together(kinds, &toy_engine, ModelDrafter::Assistant, 10));
}

/// A failing assistant drafts nothing more, and no request fails for it.
#[test]
fn an_assistant_that_fails_costs_no_answer() {
    let asked = greedy(&[5, 70, 9], 30);
    let truth = run_one(&mut toy_engine(KINDS[0], toy_config(Speculation::Off)), asked.clone());
    let config = toy_config(Speculation::Always(3));
    let model = ToyAssisted::new(Telling::new(KINDS[0], &Texts::default())).failing_after(5);
    let mut engine = Engine::new(Box::new(model), ToyVocabulary::numbers(VOCAB), config).expect("valid");
    let answer = run_one(&mut engine, asked.clone());
    assert_eq!(answer.ids(), truth.ids());
    let usage = by_assistant(&answer);
    assert_eq!(usage.stop, Some(DraftStop::Failed));
    assert!(usage.drafted_tokens > 0);
    let notices: Vec<String> = engine.take_notices().iter().map(ToString::to_string).collect();
    assert!(notices.iter().any(|notice| notice.contains("the assistant")), "{notices:?}");
    assert_eq!(run_one(&mut engine, asked).ids(), truth.ids());
}

#[test]
fn run_uses_an_assistant_and_says_so() {
    let [model, assistant] = PAIRS[1].into();
    let (model, assistant) = (checkpoint(model), assistant_folder(assistant));
    let [model, assistant] = [&model, &assistant].map(|path| path.to_str().expect("a path of text"));
    let run = |flags: &[&str]| {
        let args = ["run", "--model", model, "--draft-model", assistant, "--raw", "a", "--max-tokens", "24"];
        llmctl(&[&args[..], &["--stats", "-v"], flags].concat())
    };
    let plain = run(&["--speculate", "off"]);
    assert!(!plain.stderr.contains("assistant "), "{plain:?}");
    for flags in [&["--speculate", "mtp"][..], &["--speculate", "draft"], &[]] {
        let ran = run(flags);
        ran.check(0, "gemma4-e-assistant: ").check(0, "by the assistant ");
        assert_eq!(ran.stdout, plain.stdout);
    }
    llmctl(&["run", "--model", assistant, "--raw", "a"]).check(65, "name the model with --model");
}
