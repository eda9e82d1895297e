//! `llmctl sessions export --with-kv` and `sessions import`: a conversation goes on elsewhere as if it had never moved.

use super::{llmctl, stories};
use crate::common::prelude::*;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]";

/// A turn of session "trip" as JSON.
fn turn(place: &Place, model: &str, question: &str, more: &[&str]) -> Value {
    place.write("t.jinja", TEMPLATE);
    let fixed = ["run", "--model", model, "--chat-template", "t.jinja", "--session", "trip", "-n", "12"];
    json_of(place, &[&fixed, &[question][..], more].concat())
}

fn json_of(place: &Place, args: &[&str]) -> Value {
    let ran = place.run(&[args, &["--output", "json"]].concat());
    serde_json::from_str(&ran.check(0, "").stdout).expect("JSON")
}

/// What of an answer may not depend on the machine.
fn essence(turn: &Value) -> [Value; 4] {
    let reuse = &turn["reuse"];
    [
        turn["text"].clone(),
        reuse["reason"].clone(),
        reuse["restored_tokens"].clone(),
        turn["usage"]["prompt_tokens"].clone(),
    ]
}

/// Copies a model's folder; its files get the time of now.
fn copy_of(model: &str, place: &Place) -> String {
    let to = place.path("model");
    std::fs::create_dir(&to).expect("a folder");
    for entry in std::fs::read_dir(model).expect("a model").flatten() {
        let bytes = std::fs::read(entry.path()).expect("readable");
        std::fs::write(to.join(entry.file_name()), bytes).expect("written");
    }
    to.display().to_string()
}

#[test]
fn a_conversation_goes_on_warm_on_another_machine_with_a_model_file_of_another_time() {
    let Some(model) = stories() else { return };
    let here = Place::new();
    for question in ["Once upon a time there was a dog", "And then it ran"] {
        turn(&here, &model, question, &[]);
    }
    let exported = json_of(&here, &["sessions", "export", "trip", "--with-kv", "trip.archive"]);
    assert_eq!((&exported["schema"], &exported["exported"]), (&json!("llmctl.sessions.v1"), &json!("trip")));
    assert!(exported["kv_pages"].as_u64() >= Some(2), "{exported}");
    assert_eq!(exported["bytes"], std::fs::metadata(here.path("trip.archive")).expect("there").len());
    assert_eq!(exported["notices"], json!([]));
    let original = turn(&here, &model, "The end", &[]);
    assert_eq!(original["reuse"]["reason"], "restored", "{original}");
    for is_copied in [false, true] {
        let there = Place::new();
        let model = if is_copied { copy_of(&model, &there) } else { model.clone() };
        std::fs::copy(here.path("trip.archive"), there.path("trip.archive")).expect("moved");
        let imported = json_of(&there, &["sessions", "import", "trip.archive"]);
        assert_eq!((&imported["imported"], &imported["notices"]), (&json!("trip"), &json!([])));
        assert_eq!(imported["kv_pages"], exported["kv_pages"]);
        let moved = turn(&there, &model, "The end", &[]);
        assert_eq!(essence(&moved), essence(&original), "copied: {is_copied}");
        assert_eq!(moved["usage"]["cached_tokens"], original["usage"]["cached_tokens"]);
        // And on from there, in a process that finds the pages where they now are.
        let next = turn(&there, &model, "Once more", &[]);
        assert_eq!(next["reuse"]["reason"], "restored", "{next}");
    }
    // Another type of KV computes the prompt anew, to its own answer.
    let there = Place::new();
    there.run(&["sessions", "import", &here.path("trip.archive").display().to_string()]).check(0, "");
    let cold = turn(&there, &model, "The end", &["--kv-type", "f32"]);
    assert_eq!(
        (&cold["reuse"]["restored_tokens"], &cold["usage"]["prompt_tokens"]),
        (&json!(0), &original["usage"]["prompt_tokens"])
    );
}

#[test]
fn an_image_goes_with_its_conversation() {
    let Some(vision) = fixtures().map(|root| root.join("vision")) else { return };
    let (model, image) = (vision.join("qwen3-vl"), vision.join("images/gradient.png"));
    if !model.is_dir() {
        return crate::common::skip(format!("no model at {}", model.display()));
    }
    let (model, image) = (model.display().to_string(), image.display().to_string());
    let (here, there) = (Place::new(), Place::new());
    let ask = |place: &Place, more: &[&str]| {
        json_of(place, &[&["run", "--model", &model, "--session", "see", "-n", "6"], more].concat())
    };
    ask(&here, &["--image", &image, "What is this? Look at it closely and say all that you see."]);
    let exported = json_of(&here, &["sessions", "export", "see", "--with-kv", "see.archive"]);
    assert_eq!((&exported["images"], &exported["turns"]), (&json!(1), &json!(1)));
    let original = ask(&here, &["And now?"]);
    there.run(&["sessions", "import", &here.path("see.archive").display().to_string()]).check(0, "");
    let moved = ask(&there, &["And now?"]);
    assert_eq!(essence(&moved), essence(&original));
    assert!(moved["reuse"]["restored_tokens"].as_u64() > Some(0), "{moved}");
    let shown =
        |place: &Place| place.run(&["sessions", "export", "see", "--as", "json"]).check(0, "").stdout.clone();
    assert_eq!(shown(&there), shown(&here));
}

#[test]
fn files_are_refused_by_name_and_none_is_replaced_unasked() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    turn(&place, &model, "Once upon a time there was a dog", &[]);
    let export = ["sessions", "export", "trip", "--with-kv"];
    place.write("there", "precious");
    place
        .run(&[&export[..], &["there"]].concat())
        .check(2, "there exists already")
        .check(2, "--force replaces it");
    assert_eq!(place.read("there"), "precious");
    place.run(&[&export[..], &["."]].concat()).check(2, "is a folder");
    place.run(&[&export[..], &["no/such/folder"]].concat()).check(74, "no/such/folder");
    place.run(&["sessions", "export", "tripp", "--with-kv", "x"]).check(66, "did you mean trip?");
    place
        .run(&["sessions", "export", "trip", "--as", "json", "--with-kv", "x"])
        .check(2, "cannot be used with");
    let text = place.run(&[&export[..], &["there", "--force"]].concat());
    assert!(text.check(0, "").stdout.contains("session trip is in there: "), "{text:?}");
    place
        .run(&["sessions", "import", "there"])
        .check(2, "there is a session named \"trip\" already")
        .check(2, "--as NAME");
    let owned = place.run(&["sessions", "import", "there", "--owner", "anna"]);
    assert!(owned.check(0, "").stdout.contains("session trip is imported"), "{owned:?}");
    assert!(place.run(&["sessions", "--owner", "anna"]).check(0, "").stdout.contains("trip"));
    place.run(&["sessions", "import", "there", "--owner", ""]).check(2, "a value is required");
    place.run(&["sessions", "import", "nowhere"]).check(66, "nowhere");
    place.run(&["sessions", "import", "t.jinja"]).check(65, "no file of `llmctl sessions export --with-kv`");
    let named = place.run(&["sessions", "import", "there", "--as", "oslo"]);
    assert!(named.check(0, "").stdout.contains("session oslo is imported: 1 turn, "), "{named:?}");
    let cold = place.run(&["sessions", "import", "there", "--as", "cold", "--kv-disk", "0"]);
    assert!(cold.check(0, "").stdout.contains("none is kept on disk"), "{cold:?}");
    // Through pipes.
    let piped = place.command(&[&export[..], &["-"]].concat()).output().expect("runs");
    assert!(piped.status.success() && !piped.stdout.is_empty(), "{piped:?}");
    let there = Place::new();
    there.write("piped", &piped.stdout);
    let mut command = there.command(&["sessions", "import", "-"]);
    command.stdin(File::open(there.path("piped")).expect("there"));
    finish(command, "").check(0, "");
    assert_eq!(
        json_of(&there, &["sessions", "show", "trip"])["turns"],
        json_of(&place, &["sessions", "show", "trip"])["turns"]
    );
    llmctl(&["sessions", "import"]).check(2, "<FILE>");
}
