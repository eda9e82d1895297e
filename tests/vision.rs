//! Promise: a conversation with images has the prompt and the answer that transformers gives it, for every family; cold, warm, and
//! in steps of any size.

use std::fs;

use llmctl_engine::GrammarCompiler;
use llmctl_engine::turn::{Planner, TurnInput, TurnRequest};
use llmctl_image::{ImageFile, ImageLimits, ImageSet};
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
}

impl Seeing {
    fn load(folder: &Path, step_tokens: usize) -> Self {
        let loaded =
            load_model(folder, &exact()).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let context = loaded.model.spec().context_length;
        let config = EngineConfig {
            step_tokens,
            ..EngineConfig::new(context, loaded.texts.end_of_generation.clone())
        };
        let chat_tokenizer = ChatTokenizer::new(loaded.texts, None);
        let vocabulary = Arc::clone(chat_tokenizer.tokenizer());
        let mut engine = Engine::new(loaded.model, vocabulary, config).expect("an engine");
        engine.set_tower(loaded.tower.unwrap_or_else(|| panic!("{}: no tower", folder.display())));
        chat_tokenizer.set_vision(&engine.spec().model.architecture, engine.spec().vision.as_ref());
        let grammars = engine.spec().grammar_compiler(Arc::clone(chat_tokenizer.tokenizer()));
        Self { engine, chat_tokenizer, grammars }
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
        images.insert(Arc::new(file));
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

#[test]
fn answers_about_images_are_the_references_in_every_family() {
    let Some(folder) = fixtures().map(|folder| folder.join("vision")) else { return };
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let golden = fs::read(folder.join(family).join("golden.json")).expect("golden.json");
        let golden: Value = serde_json::from_slice(&golden).expect("JSON");
        let mut engines = [128, 17].map(|step_tokens| Seeing::load(&folder.join(family), step_tokens));
        for (name, prompt) in golden["prompts"].as_object().expect("prompts") {
            let mut ask = |engine: usize| engines[engine].answer(&prompt["messages"], &folder.join("images"));
            let [cold, warm, stepwise] = [0, 0, 1].map(&mut ask);
            let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).expect("ids");
            let greedy: Vec<u32> = serde_json::from_value(prompt["greedy"].clone()).expect("ids");
            let margins = prompt["greedy_margins"].as_array().expect("margins").iter();
            let decided = margins.take_while(|margin| margin.as_f64() >= Some(deciding(family))).count();
            if cold[0] != ids {
                wrong.push(format!("{family} {name}: the prompt is {:?}", cold[0]));
            } else if cold[1][..decided] != greedy[..decided] {
                wrong.push(format!("{family} {name}: {:?}, not {greedy:?} (first {decided})", cold[1]));
            } else if warm != cold || stepwise != cold {
                wrong.push(format!("{family} {name}: warm {:?}, stepwise {:?}", warm[1], stepwise[1]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}
