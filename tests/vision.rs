//! Promise: a conversation with images has the prompt and the answer that transformers gives it, for every family; cold, warm, and
//! in steps of any size, with and without drafts, from folders and from GGUF files.

use std::fs;

use llmctl_engine::GrammarCompiler;
use llmctl_engine::turn::{Planner, TurnInput, TurnRequest};
use llmctl_image::{ImageFile, ImageLimits, ImageSet, Patches};
use llmctl_models::images::VisionSpec;
use llmctl_models::vision::{Tower, TowerJob};
use llmctl_template::{DateTime, ImageRef};

use crate::common::prelude::*;

const FAMILIES: [&str; 17] = [
    "gemma3",
    "gemma4",
    "gemma4-e",
    "gemma4-moe",
    "gemma4-unified",
    "glm4.1v",
    "idefics3",
    "internvl3",
    "lfm2-vl",
    "ministral3",
    "mistral3",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5",
    "qwen3.5-moe",
    "smolvlm",
];

/// The least margin between the two likeliest logits that decides: pixels of the families whose reference is torchvision's are up
/// to two levels off.
fn deciding(family: &str) -> f64 {
    if matches!(family, "lfm2-vl" | "gemma4-unified") { 0.3 } else { 0.02 }
}

struct Seeing {
    engine: Engine,
    chat_tokenizer: ChatTokenizer,
    grammars: GrammarCompiler,
    /// Tokens of a draft model that were accepted.
    num_accepted: usize,
}

/// A tower with the pixels of another one's rule: files of GGUF lack most limits of the fixtures.
struct Ruled {
    tower: Box<dyn Tower>,
    spec: VisionSpec,
}

impl Tower for Ruled {
    fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    fn begin(&self, tiles: Vec<Patches>) -> llmctl_base::Result<Box<dyn TowerJob>> {
        self.tower.begin(tiles)
    }
}

fn load(folder: &Path) -> LoadedModel {
    load_model(folder, &exact()).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

/// Loads the GGUF form of a fixture, with the rule of pixels of its folder. Its text was written by llama.cpp's converter, as
/// the mmproj files of the fixtures were.
fn load_gguf(folder: &Path) -> LoadedModel {
    let family = folder.file_name().expect("a name").to_string_lossy();
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vision-gguf");
    let mmproj = [folder.join("mmproj-F32.gguf"), ours.join(format!("{family}-mmproj-f32.gguf"))].into_iter();
    let source = ModelSource::Gguf(ours.join(format!("{family}-bf16.gguf")));
    let mmproj = mmproj.into_iter().find(|path| path.exists());
    let resolved = Resolved { mmproj, ..Resolved::new(family.to_string(), source) };
    let loaded = llmctl_models::load::load(&resolved, &exact(), &mut |_, _| ());
    let mut loaded = loaded.unwrap_or_else(|error| panic!("{family}: {error}"));
    let tower = loaded.tower.take().unwrap_or_else(|| panic!("{family}: no tower: {:?}", loaded.notices));
    let pixels = load(folder).tower.expect("a tower").spec().pixels.clone();
    let spec = VisionSpec { pixels, ..tower.spec().clone() };
    loaded.tower = Some(Box::new(Ruled { tower, spec }));
    loaded
}

impl Seeing {
    /// `draft` is a model that drafts, and sees no images.
    fn new(loaded: LoadedModel, step_tokens: usize, draft: Option<LoadedModel>) -> Self {
        let context = loaded.model.spec().context_length;
        let config = EngineConfig {
            step_tokens,
            speculation: if draft.is_some() { Speculation::Always(3) } else { Speculation::default() },
            ..EngineConfig::new(context, loaded.texts.end_of_generation.clone())
        };
        let chat_tokenizer = ChatTokenizer::new(loaded.texts, None);
        let vocabulary = Arc::clone(chat_tokenizer.tokenizer());
        let mut engine = Engine::new(loaded.model, vocabulary, config).expect("an engine");
        engine.set_tower(loaded.tower.expect("a tower"));
        draft.into_iter().for_each(|draft| engine.set_draft_model(draft.model).expect("a draft model"));
        chat_tokenizer.set_vision(&engine.spec().model.architecture, engine.spec().vision.as_ref());
        let grammars = engine.spec().grammar_compiler(Arc::clone(chat_tokenizer.tokenizer()));
        Self { engine, chat_tokenizer, grammars, num_accepted: 0 }
    }

    /// Returns the ids of the prompt and of 16 tokens of the answer.
    fn answer(&mut self, messages: &Value, pictures: &Path) -> [Vec<u32>; 2] {
        let mut images = ImageSet::default();
        let conversation = conversation(messages, pictures, &mut images);
        let turn = TurnRequest {
            images,
            limits: Limits { max_tokens: Some(16), ignore_eos: true, ..Limits::default() },
            ..TurnRequest::default()
        };
        let planner = Planner { chat_tokenizer: &self.chat_tokenizer, grammars: &self.grammars };
        let plan = planner.plan(&TurnInput::Chat(conversation), DateTime::default(), &turn).expect("a plan");
        let request = Request { sampling: Sampling::default(), ..plan.request(&turn) };
        let answer = run_one(&mut self.engine, request);
        self.num_accepted += answer.outcome().usage.draft_model.map_or(0, |usage| usage.accepted_tokens);
        [plan.tokens, answer.ids()]
    }
}

/// Puts the files of the golden's images in the parts' places; of a JPEG the reference's pixels, because no two decoders agree.
fn conversation(messages: &Value, pictures: &Path, images: &mut ImageSet) -> Conversation {
    let mut part = |part: &Value| {
        let Some(name) = part["path"].as_str() else { return part.clone() };
        let decoded = pictures.join(name.replace(".jpg", ".decoded.png"));
        let path = if decoded.exists() { decoded } else { pictures.join(name) };
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = ImageFile::read(bytes.into(), &ImageLimits::default()).expect("an image");
        let part = ImageRef {
            sha256: file.hash.to_string(),
            width: file.info.width,
            height: file.info.height,
            media_type: file.info.media_type.to_owned(),
            name: None,
        };
        images.insert(file);
        part.to_part()
    };
    let mut message = |message: &Value| {
        let parts = message["content"].as_array().expect("parts").iter().map(&mut part).collect();
        Message {
            content: Some(Content::Parts(parts)),
            ..Message::new(message["role"].as_str().expect("a role").into(), "")
        }
    };
    let messages = messages.as_array().expect("messages").iter().map(&mut message).collect();
    Conversation { messages, ..Conversation::default() }
}

/// Returns a golden's prompts by name.
fn prompts(folder: &Path) -> Map<String, Value> {
    let golden = fs::read(folder.join("golden.json")).expect("golden.json");
    let mut golden: Value = serde_json::from_slice(&golden).expect("JSON");
    serde_json::from_value(golden["prompts"].take()).expect("prompts")
}

/// Returns what is wrong with the ids of a prompt and of its answer.
fn difference(family: &str, name: &str, prompt: &Value, [asked, told]: &[Vec<u32>; 2]) -> Option<String> {
    let ids = |key: &str| serde_json::from_value::<Vec<u32>>(prompt[key].clone()).expect("ids");
    let margins = prompt["greedy_margins"].as_array().expect("margins").iter();
    let decided = margins.take_while(|margin| margin.as_f64() >= Some(deciding(family))).count();
    let greedy = ids("greedy");
    if *asked != ids("ids") {
        Some(format!("{family} {name}: the prompt is {asked:?}"))
    } else if told[..decided] != greedy[..decided] {
        Some(format!("{family} {name}: {told:?}, not {greedy:?} (first {decided})"))
    } else {
        None
    }
}

#[test]
fn answers_about_images_are_the_references_in_every_family() {
    let Some(folder) = fixtures().map(|folder| folder.join("vision")) else { return };
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let of_family = folder.join(family);
        let mut engines = [(128, false), (17, false), (128, true)].map(|(step_tokens, drafts)| {
            Seeing::new(load(&of_family), step_tokens, drafts.then(|| load(&of_family)))
        });
        for (name, prompt) in prompts(&of_family) {
            let mut ask = |engine: usize| engines[engine].answer(&prompt["messages"], &folder.join("images"));
            let [cold, warm, stepwise, drafted] = [0, 0, 1, 2].map(&mut ask);
            wrong.extend(difference(family, &name, &prompt, &cold));
            for (way, answer) in [("warm", warm), ("stepwise", stepwise), ("drafted", drafted)] {
                wrong.extend((answer != cold).then(|| format!("{family} {name}: {way} {:?}", answer[1])));
            }
        }
        assert!(engines[2].num_accepted > 0, "{family}");
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

/// The towers compute on the CPU, and their rows go to the device.
#[test]
fn answers_about_images_are_the_references_on_candles_devices_too() {
    let Some(folder) = fixtures().map(|folder| folder.join("vision")) else { return };
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let of_family = folder.join(family);
        let loaded = load_model(&of_family, &on_candle()).unwrap_or_else(|error| panic!("{family}: {error}"));
        let mut seeing = Seeing::new(loaded, 128, None);
        for (name, prompt) in prompts(&of_family) {
            let answer = seeing.answer(&prompt["messages"], &folder.join("images"));
            wrong.extend(difference(family, &name, &prompt, &answer));
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn answers_of_gguf_files_with_their_mmproj_are_the_references_too() {
    let Some(folder) = fixtures().map(|folder| folder.join("vision")) else { return };
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let of_family = folder.join(family);
        let mut seeing = Seeing::new(load_gguf(&of_family), 128, None);
        for (name, prompt) in prompts(&of_family) {
            let answer = seeing.answer(&prompt["messages"], &folder.join("images"));
            wrong.extend(difference(family, &name, &prompt, &answer));
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}
