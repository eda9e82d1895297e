//! Promise: images from files and pipes reach a model that reads them as its own processor would have it, and are refused by name
//! everywhere else.

use std::fs::File;

use super::*;
use crate::common::fixtures;

/// The Qwen3-VL checkpoint of the fixtures, and the folder of the pictures.
fn seeing() -> Option<(String, PathBuf)> {
    let vision = fixtures()?.join("vision");
    Some((vision.join("qwen3-vl").display().to_string(), vision.join("images")))
}

fn golden(model: &str, prompt: &str) -> Value {
    let golden = std::fs::read(Path::new(model).join("golden.json")).expect("golden.json");
    serde_json::from_slice::<Value>(&golden).expect("JSON")["prompts"][prompt].clone()
}

fn json_of(ran: &Ran) -> Value {
    serde_json::from_str(&ran.check(0, "").stdout).expect("JSON")
}

#[test]
fn an_image_stands_where_the_prompt_says_with_the_tokens_of_the_reference() {
    let Some((model, images)) = seeing() else { return };
    let golden = golden(&model, "image:gradient.png");
    let gradient = images.join("gradient.png").display().to_string();
    let asked = "Look at {image} and say what it shows.";
    let shown = ["run", "--model", &model, "--image", &gradient, "--dry-run", "--output", "json", asked];
    assert_eq!(json_of(&Place::new().run(&shown))["tokens"], golden["ids"]);
    let answered = [
        "run",
        "--model",
        &model,
        "--dtype",
        "f32",
        "--max-tokens",
        "2",
        "--image",
        &gradient,
        "--output",
        "json",
        asked,
    ];
    let object = json_of(&Place::new().run(&answered));
    let num_ids = golden["ids"].as_array().expect("ids").len();
    assert_eq!(object["usage"]["prompt_tokens"], num_ids, "{object}");
}

#[test]
fn an_image_is_piped_in_with_and_without_the_flag() {
    let Some((model, images)) = seeing() else { return };
    let place = Place::new();
    let piped = |more: &[&str]| {
        let args =
            [&["run", "--model", &model, "--dry-run", "--output", "json", "what is it?"], more].concat();
        let mut command = place.command(&args);
        command.stdin(File::open(images.join("photo.jpg")).expect("a picture"));
        json_of(&finish(command, ""))["tokens"].clone()
    };
    let photo = images.join("photo.jpg").display().to_string();
    let named = ["run", "--model", &model, "--dry-run", "--output", "json", "--image", &photo, "what is it?"];
    let named = json_of(&place.run(&named))["tokens"].clone();
    assert_eq!(piped(&[]), named);
    assert_eq!(piped(&["--image", "-"]), named);
}

#[test]
fn what_is_no_image_or_has_no_place_is_refused() {
    let Some((model, images)) = seeing() else { return };
    let place = Place::new();
    let note = place.write("note.png", "a text").display().to_string();
    let dot = images.join("gradient.png").display().to_string();
    let run = |more: &[&str]| place.run(&[&["run", "--model", &model, "--max-tokens", "1"], more].concat());
    run(&["--image", "missing.png", "q"]).check(66, "missing.png");
    run(&["--image", ".", "q"]).check(66, "not an image file");
    run(&["--image", &note, "q"]).check(65, "note.png");
    run(&["--image", &dot, "{image} and {image}"]).check(2, "2 places {image}, and there are 1 image");
    run(&["--image", "-", "--image", "-", "q"]).check(2, "--image -");
    run(&["--image", &dot]).check(2, "no prompt given");
    run(&["--raw", "--image", &dot, "q"]).check(2, "--raw");
}

#[test]
fn a_model_that_reads_text_alone_says_what_to_do() {
    let Some((model, images)) = seeing() else { return };
    let dot = images.join("gradient.png").display().to_string();
    let place = Place::new();
    let blind = place.run(&["run", "--model", &model, "--no-mmproj", "--image", &dot, "q"]);
    blind.check(2, "takes no images").check(2, "--no-mmproj");
    place.run(&["run", "--image", &dot, "q"]).check(2, "guide takes no images");
}

#[test]
fn a_session_keeps_its_images_after_a_restart() {
    let Some((model, images)) = seeing() else { return };
    let place = Place::new();
    let picture = place.path("a picture.png");
    std::fs::copy(images.join("gradient.png"), &picture).expect("copied");
    let picture = picture.display().to_string();
    let ask = |more: &[&str]| {
        let args = [
            "run",
            "--model",
            &model,
            "--session",
            "s",
            "--max-tokens",
            "4",
            "--ignore-eos",
            "--output",
            "json",
        ];
        json_of(&place.run(&[&args, more].concat()))
    };
    ask(&["--image", &picture, "what is it?"]);
    std::fs::remove_file(&picture).expect("removed");
    let again = ask(&["and its colours?"]);
    let cached = again["usage"]["cached_tokens"].as_u64().or(again["reuse"]["cached_tokens"].as_u64());
    assert!(cached.is_some_and(|cached| cached > 8), "the image is warm: {again}");
    let shown = place.run(&["sessions", "export", "s"]);
    assert!(shown.check(0, "").stdout.contains("a picture.png"), "{shown:?}");
}

#[cfg(unix)]
#[test]
fn chat_takes_images_by_command_and_by_a_dropped_path() {
    let Some((model, images)) = seeing() else { return };
    let place = Place::new();
    let dropped = place.path("b c.png");
    std::fs::copy(images.join("stripes.png"), &dropped).expect("copied");
    let lines = [
        format!("/image {}", images.join("gradient.png").display()),
        "/image".to_owned(),
        "/image drop".to_owned(),
        dropped.display().to_string().replace(' ', "\\ "),
        "what is it?".to_owned(),
        "/undo".to_owned(),
    ];
    let args = ["chat", "--model", &model, "--ephemeral", "--max-tokens", "4", "--ignore-eos"];
    let ran = finish(place.command(&args), &(lines.join("\n") + "\n"));
    ran.check(0, "[image 1: gradient.png")
        .check(0, "goes with the next message")
        .check(0, "gradient.png stays out");
    ran.check(0, "[image 1: b c.png").check(0, "taken back: \u{201c}[image: b c.png");
}

#[test]
fn a_resumed_chat_compares_changes_and_exports_its_images() {
    let Some((model, images)) = seeing() else { return };
    let place = Place::new();
    let other = Path::new(&model).with_file_name("gemma3").display().to_string();
    let chat = |lines: &[&str]| {
        let args = ["chat", "--model", &model, "--session", "s", "--max-tokens", "4", "--ignore-eos"];
        finish(place.command(&args), &(lines.join("\n") + "\n"))
    };
    let given = format!("/image {}", images.join("gradient.png").display());
    chat(&[&given, "what is it?"]).check(0, "[image 1: gradient.png");
    // Another process has the image from the session alone.
    let compare = format!("/compare {other}");
    chat(&[&compare, "/export json s.json", "/export jsonl s.jsonl", "/export md s.md", "/retry", "/why"])
        .check(0, " gemma3 ")
        .check(0, "prompt tokens were reused");
    for (file, said) in [
        ("s.json", "data:image/png;base64,"),
        ("s.jsonl", "data:image/png;base64,"),
        ("s.md", "[image: gradient.png 96x64]"),
    ] {
        let text = std::fs::read_to_string(place.path(file)).expect(file);
        assert!(text.contains(said), "{file}: {text}");
    }
}

#[test]
fn show_says_what_a_model_sees() {
    let Some((model, _)) = seeing() else { return };
    let place = Place::new();
    let shown = place.run(&["models", "show", &model]);
    assert!(shown.check(0, "").stdout.contains("yes (qwen3-vl tower, "), "{shown:?}");
    let facts = json_of(&place.run(&["models", "show", &model, "--output", "json"]));
    assert_eq!(facts["reads_images"]["tower"], "qwen3-vl", "{facts}");
}
