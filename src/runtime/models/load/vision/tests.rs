//! Every family of the fixtures: texts, ids and tower rows against transformers', and mmproj files against folders.

use std::path::Path;
use std::sync::Arc;

use llmctl_image::{ImageFile, ImageLimits, Patches};
use serde_json::json;

use super::*;
use crate::backend::cpu::CpuOptions;
use crate::images::ImageRows;
use crate::load::KvType;
use crate::vision::fixtures::{self, Golden, largest_difference, prompts};
use llmctl_hub::ModelSource;
use llmctl_kernel::Dtype;

/// Families, and the largest difference of rows from the reference's. Its pixels are torchvision's in two of them, which differ
/// from Pillow's by two levels.
const FOLDERS: [(&str, f32); 17] = [
    ("gemma3", 1e-4),
    ("gemma4", 1e-4),
    ("gemma4-e", 1e-4),
    ("gemma4-moe", 1e-4),
    ("gemma4-unified", 0.2),
    ("glm4.1v", 1e-4),
    ("idefics3", 1e-4),
    ("internvl3", 1e-4),
    ("lfm2-vl", 0.2),
    ("ministral3", 1e-4),
    ("mistral3", 1e-4),
    ("qwen2.5-vl", 1e-4),
    ("qwen3-vl", 1e-4),
    ("qwen3-vl-moe", 1e-4),
    ("qwen3.5", 1e-4),
    ("qwen3.5-moe", 1e-4),
    ("smolvlm", 1e-4),
];

fn options() -> LoadOptions {
    LoadOptions {
        device: Device::Cpu(CpuOptions::new(2)),
        dtype: Some(Dtype::F32),
        kv_type: KvType::F32,
        ..LoadOptions::default()
    }
}

/// A family's files, opened.
struct Opened {
    files: ModelFiles,
    vision: VisionFiles,
}

fn resolved(folder: &Path, mmproj: Option<&Path>) -> Resolved {
    let source = ModelSource::Folder(folder.to_owned());
    Resolved { mmproj: mmproj.map(Path::to_owned), ..Resolved::new("tiny".to_owned(), source) }
}

/// Opens a family's files, and says what is noticed.
fn look_at(
    folder: &Path,
    mmproj: Option<&Path>,
    images: ImageUse,
) -> Result<(Option<Opened>, Vec<Notice>), LoadError> {
    let files = ModelFiles::of(&resolved(folder, mmproj))?;
    let description = crate::model::arch::parse_config(files.config_reader())?.expect("a native family");
    let mut notices = Vec::new();
    let found = find(&files, &description, images, &mut notices)?;
    Ok((found.map(|vision| Opened { files, vision }), notices))
}

fn open(folder: &Path, mmproj: Option<&Path>) -> Result<Option<Opened>, LoadError> {
    look_at(folder, mmproj, ImageUse::default()).map(|(opened, _)| opened)
}

fn picture(fixtures: &Path, name: &str) -> Arc<ImageFile> {
    let decoded =
        fixtures.join("images").join(format!("{}.decoded.png", name.split('.').next().expect("a name")));
    let path = Some(decoded).filter(|path| path.exists() && name != "alpha.png");
    let bytes = std::fs::read(path.unwrap_or_else(|| fixtures.join("images").join(name))).expect("readable");
    ImageFile::read(bytes.into(), &ImageLimits::default()).expect("an image")
}

fn rows(tower: &dyn Tower, tiles: Vec<Patches>) -> ImageRows {
    let mut job = tower.begin(tiles).expect("begins");
    for _ in 0..10_000 {
        if let Some(rows) = job.advance().expect("computes") {
            return rows;
        }
    }
    panic!("never ends")
}

/// Returns the names of images in a prompt of golden.json.
fn images(prompt: &Value) -> Vec<&str> {
    prompt["images"].as_array().expect("a list").iter().map(|name| name.as_str().expect("a name")).collect()
}

#[test]
fn texts_and_ids_of_images_are_the_references() {
    let Some(fixtures) = fixtures::folder() else { return };
    for (family, _) in FOLDERS {
        let folder = fixtures.join(family);
        let Opened { files, vision } = open(&folder, None).expect(family).expect(family);
        let tokenizer = files.tokenizer().expect(family);
        let spec = vision.spec(&tokenizer).expect(family);
        for (name, prompt) in &prompts(&folder) {
            let text = prompt["text"].as_str().expect("text");
            let mut parts = text.split(&spec.text.printed);
            let mut expanded = parts.next().unwrap_or_default().to_owned();
            for (image, rest) in images(prompt).into_iter().zip(parts) {
                let info = picture(&fixtures, image).info;
                expanded += &spec.text.expand(&spec.pixels.plan(info.width, info.height).expect("a plan"));
                expanded += rest;
            }
            let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).expect("ids");
            assert_eq!(
                tokenizer.encode_chat(&expanded).expect("encodes"),
                ids,
                "{family} {name}: {expanded}"
            );
            let placeholders = ids.iter().filter(|&&id| id == spec.placeholder).count();
            let spans: Vec<[usize; 2]> =
                serde_json::from_value(prompt["image_spans"].clone()).expect("spans");
            assert_eq!(
                placeholders,
                spans.iter().map(|[start, end]| end - start).sum::<usize>(),
                "{family} {name}"
            );
        }
    }
}

#[test]
fn rows_of_folders_and_mmproj_files_are_the_references() {
    let Some(fixtures) = fixtures::folder() else { return };
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/vision-gguf");
    let mut worst = Vec::new();
    for (family, most) in FOLDERS {
        let folder = fixtures.join(family);
        let golden = Golden::read(&folder);
        let tower = |mmproj: Option<&Path>| {
            let Opened { files, vision } = open(&folder, mmproj).expect(family).expect(family);
            let tokenizer = files.tokenizer().expect(family);
            let tower = vision.load(&files, &options(), None, &tokenizer, &mut Vec::new());
            tower.expect(family).expect(family)
        };
        let of_folder = tower(None);
        let mmproj = [folder.join("mmproj-F32.gguf"), ours.join(format!("{family}-mmproj-f32.gguf"))];
        let of_file = tower(Some(mmproj.iter().find(|path| path.exists()).expect(family)));
        let (mut from_reference, mut from_folder) = (0.0f32, 0.0f32);
        for (name, prompt) in &prompts(&folder) {
            let [image] = images(prompt)[..] else { continue };
            let patches =
                of_folder.spec().pixels.patches(&picture(&fixtures, image).picture).expect("patches");
            let computed = rows(&*of_folder, patches.clone());
            for (part, values) in
                [("image_rows", computed.embeddings.clone()), ("deepstack", computed.deep.concat())]
            {
                let stored = golden.floats(&format!("prompt/{name}/{part}"));
                from_reference = from_reference.max(largest_difference(&values, &stored));
            }
            let other = rows(&*of_file, patches);
            from_folder = from_folder.max(largest_difference(&computed.embeddings, &other.embeddings));
        }
        if !(from_reference <= most && from_folder <= 2e-5) {
            worst.push(format!(
                "{family}: {from_reference} from the reference, {from_folder} from the folder"
            ));
        }
    }
    assert!(worst.is_empty(), "{}", worst.join("\n"));
}

/// Copies a folder, and changes a file of JSON in it.
fn changed(folder: &Path, file: &str, change: impl Fn(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("tempdir");
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        let name = path.file_name().expect("name");
        if name == file {
            let mut value = serde_json::from_slice(&std::fs::read(&path).expect("readable")).expect("JSON");
            change(&mut value);
            std::fs::write(copy.path().join(name), value.to_string()).expect("written");
        } else if !name.to_string_lossy().starts_with("golden") {
            std::fs::copy(&path, copy.path().join(name)).expect("copied");
        }
    }
    copy
}

#[test]
fn numbers_that_cannot_be_are_refused_by_name() {
    let Some(fixtures) = fixtures::folder() else { return };
    let cases = [
        ("qwen3-vl", "config.json", "/vision_config/num_heads", json!(0)),
        ("qwen3-vl", "config.json", "/vision_config/depth", json!(1u64 << 40)),
        ("qwen3-vl", "config.json", "/vision_config/patch_size", json!("many")),
        ("qwen3-vl", "config.json", "/vision_config/spatial_merge_size", json!(0)),
        ("qwen3-vl", "config.json", "/vision_config/hidden_act", json!("relu")),
        ("qwen3-vl", "preprocessor_config.json", "/image_std", json!([0.5])),
        ("qwen3-vl", "preprocessor_config.json", "/resample", json!(9)),
        ("smolvlm", "config.json", "/scale_factor", json!(-1)),
        ("internvl3", "config.json", "/downsample_ratio", json!(0)),
    ];
    for (family, file, pointer, value) in cases {
        let folder = changed(&fixtures.join(family), file, |config| {
            *config.pointer_mut(pointer).expect("a key") = value.clone();
        });
        let key = pointer.rsplit('/').next().expect("a key");
        let error = open(folder.path(), None).err().unwrap_or_else(|| panic!("{family} {pointer} is read"));
        assert!(error.to_string().contains(key), "{error} names {key}");
    }
}

#[test]
fn a_tower_that_is_not_computed_leaves_the_text_and_a_notice() {
    let Some(fixtures) = fixtures::folder() else { return };
    let find = |folder: &Path, mmproj: Option<&Path>, images| {
        look_at(folder, mmproj, images).map(|(found, notices)| (found.is_some(), notices))
    };
    let folder = changed(&fixtures.join("qwen2.5-vl"), "config.json", |config| {
        config["model_type"] = json!("qwen2_vl");
    });
    let (is_found, notices) = find(folder.path(), None, ImageUse::default()).expect("loads as text");
    assert!(!is_found && notices.len() == 1 && notices[0].to_string().contains("qwen2_vl"), "{notices:?}");
    let off = ImageUse { is_off: true, ..ImageUse::default() };
    assert_eq!(find(&fixtures.join("gemma3"), None, off).expect("loads as text"), (false, Vec::new()));
    // Of another family, but with rows of the same width: nothing tells.
    let other = fixtures.join("gemma3/mmproj-F32.gguf");
    let narrow = changed(&fixtures.join("qwen3-vl"), "config.json", |config| {
        config["text_config"]["hidden_size"] = json!(48);
    });
    let error = find(narrow.path(), Some(&other), ImageUse::default()).expect_err("of another width");
    assert!(error.to_string().contains("another model"), "{error}");
}

#[test]
fn limits_of_tokens_are_the_users_or_a_processors() {
    let Some(fixtures) = fixtures::folder() else { return };
    let folder = changed(&fixtures.join("qwen3-vl"), "preprocessor_config.json", |config| {
        config["size"] = json!({"shortest_edge": 65_536, "longest_edge": 16_777_216});
    });
    let facts = |tokens| {
        let images = ImageUse { is_off: false, tokens };
        match Sight::of(&resolved(folder.path(), None), images) {
            Ok(Sight::Images(facts)) => facts,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(facts([None; 2]), VisionFacts { tower: "qwen3-vl", tokens: [64, 1280] });
    assert_eq!(facts([Some(100), Some(16_384)]).tokens, [100, 16_384]);
    assert_eq!(facts([None, Some(256)]).tokens, [64, 256]);
}

#[test]
fn audio_of_an_mmproj_file_is_noticed_and_a_missing_one_is_seen() {
    let Some(fixtures) = fixtures::folder() else { return };
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/vision-gguf");
    let mmproj = ours.join("gemma4-unified-mmproj-f32.gguf");
    let (found, notices) =
        look_at(&fixtures.join("gemma4-unified"), Some(&mmproj), ImageUse::default()).expect("opens");
    assert!(found.is_some() && notices == [Notice::NoAudio { path: mmproj.clone() }], "{notices:?}");
    let audio_alone = tempfile::NamedTempFile::new().expect("a file");
    let bytes = std::fs::read(&mmproj).expect("readable");
    let key = b"clip.has_vision_encoder";
    let at = bytes.windows(key.len()).position(|window| window == key).expect("the key");
    let mut changed = bytes.clone();
    changed[at + key.len() + 4] = 0;
    std::fs::write(audio_alone.path(), changed).expect("written");
    let (found, notices) =
        look_at(&fixtures.join("gemma4-unified"), Some(audio_alone.path()), ImageUse::default())
            .expect("opens");
    assert!(
        found.is_none() && notices.len() == 1 && notices[0].to_string().contains("audio alone"),
        "{notices:?}"
    );
    let of_text = |family: &str| {
        let source = ModelSource::Gguf(ours.join(format!("{family}-bf16.gguf")));
        Sight::of(&Resolved::new("tiny".to_owned(), source), ImageUse::default()).expect("opens")
    };
    let missing = ["gemma4", "qwen2.5-vl", "qwen3-vl", "qwen3.5-moe", "glm4.1v", "ministral3"];
    assert!(missing.iter().all(|family| of_text(family) == Sight::FileMissing));
    assert_eq!(of_text("smolvlm"), Sight::Text, "a Llama as any other, by its keys");
}
