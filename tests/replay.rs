//! Promise: a recorded answer is computed again token by token, on every machine; what differs, and what was edited, is told by
//! position, and the exit code says it.

use llmctl_engine::receipt::{AnswerRecipe, Receipt};
use llmctl_engine::session::store::{SavedTurn, StoredTurn};
use llmctl_template::Message;
use serde_json::{Value, json};

use crate::cli::{Place, Ran, stories};
use crate::common::prelude::*;
use crate::common::{name, stored_turn};

/// A session of the built-in model with three turns: a free one, one under a schema, one that is cut.
fn place() -> Place {
    let place = Place::new();
    for args in [
        &["How do I save a session?", "--temperature", "0.8", "--seed", "7"][..],
        &[
            "Which flag?",
            "--schema",
            r#"{"type":"object","properties":{"flag":{"enum":["a","b"]}},"required":["flag"]}"#,
        ],
        &["And how do I list them?", "-n", "5", "--temperature", "2", "--seed", "3"],
    ] {
        place.run(&[&["run", "-m", "guide", "--session", "trip"], args].concat()).check(0, "");
    }
    place
}

fn transcript(place: &Place) -> PathBuf {
    place.path(".local/share/llmctl/sessions/trip/transcript.jsonl")
}

fn replay(place: &Place, args: &[&str]) -> Ran {
    place.run(&[&["sessions", "replay"], args].concat())
}

/// Edits a session's file by hand, and puts the checksums right.
fn edit(place: &Place, edit: impl Fn(String) -> String) {
    let text = std::fs::read_to_string(transcript(place)).expect("there");
    let (mut lines, mut before) = (String::new(), None);
    for line in edit(text).lines() {
        let body = &line[r#"{"crc32":"XXXXXXXX","record":"#.len()..line.len() - 1];
        let crc = crc32fast::hash(format!("{}{body}", before.unwrap_or_default()).as_bytes());
        let crc = format!("{crc:08x}");
        lines.push_str(&format!("{{\"crc32\":\"{crc}\",\"record\":{body}}}\n"));
        before = Some(crc);
    }
    std::fs::write(transcript(place), lines).expect("written");
}

#[test]
fn a_session_is_replayed_turn_by_turn() {
    let place = place();
    let last = replay(&place, &["trip"]);
    assert_eq!(last.check(0, "").stdout, "trip turn 3: the same 5 tokens\n");
    let all = replay(&place, &["trip", "--all"]).check(0, "").stdout.clone();
    assert!(all.ends_with("trip turn 3: the same 5 tokens\n3 answers: all the same\n"), "{all}");
    let second = replay(&place, &["trip@2", "--output", "json"]);
    let object: Value = serde_json::from_str(&second.check(0, "").stdout).expect("JSON");
    assert_eq!(object["answers"].as_array().expect("a list").len(), 1);
    assert_eq!(object["answers"][0]["name"], "trip turn 2");
    assert_eq!((&object["same"], &object["different"]), (&json!(1), &json!(0)));
    replay(&place, &["trip@4"]).check(66, "session trip has 3 turns, and no turn 4");
    replay(&place, &["trip@2", "--all"]).check(2, "exclude each other");
    replay(&place, &["tripp"]).check(66, "did you mean trip?");
    // What is kept of a conversation replays as it did: a compacted file and a branch have the same receipts.
    place.run(&["sessions", "purge", "trip"]).check(0, "");
    replay(&place, &["trip", "--all"]).check(0, "");
}

#[test]
fn a_turn_that_calls_a_tool_is_replayed() {
    let place = Place::new();
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
    }}}]);
    let args = ["run", "-m", "guide", "--session", "trip", "--tools", &tools.to_string(), "--output", "json"];
    for (question, more) in [("weather in Oslo?", &[][..]), ("weather in Rome?", &["-n", "9"])] {
        place.run(&[&args[..], &[question], more].concat()).check(0, "");
    }
    let all = replay(&place, &["trip", "--all"]).check(0, "").stdout.clone();
    assert!(all.ends_with("2 answers: all the same\n"), "{all}");
}

#[test]
fn the_recipe_is_written_once_and_a_receipt_is_small() {
    let place = Place::new();
    for question in ["One", "One", "One"] {
        place.run(&["run", "-m", "guide", "--session", "trip", question, "-n", "3"]).check(0, "");
    }
    let text = std::fs::read_to_string(transcript(&place)).expect("there");
    let receipt = |line: &str| {
        let turn: Value = serde_json::from_str(line).expect("JSON");
        turn["record"]["turn"].get("receipt").cloned()
    };
    let receipts: Vec<Value> = text.lines().filter_map(receipt).collect();
    let has_recipe =
        |receipt: &Value| receipt.get("recipe").is_some_and(|recipe| recipe["model"].is_string());
    assert_eq!(receipts.iter().map(has_recipe).collect::<Vec<_>>(), [true, false, false], "{receipts:?}");
    assert!(receipts[2].to_string().len() < 100, "{}", receipts[2]);
    assert!(text.starts_with("{\"crc32\":") && text.contains("llmctl.session.v6"));
}

#[test]
fn what_was_edited_by_hand_fails() {
    let place = place();
    let text = std::fs::read_to_string(transcript(&place)).expect("there");
    std::fs::write(transcript(&place), text.replace("Which flag", "What flag")).expect("written");
    replay(&place, &["trip"]).check(65, "checksum is wrong");
    std::fs::write(transcript(&place), &text).expect("written");

    // With its checksums put right, an edit of an earlier question, an answer, a seed or a temperature is told by its turn.
    for (from, to, turn) in [
        ("Which flag", "What flag", 2),
        ("\\\"flag\\\": \\\"", "\\\"flag\\\": \\\" ", 2),
        ("\"seed\":7", "\"seed\":8", 1),
        ("\"temperature\":0.8", "\"temperature\":0.7", 1),
    ] {
        edit(&place, |text| {
            assert!(text.contains(from), "{from}: {text}");
            text.replacen(from, to, 1)
        });
        let told = replay(&place, &["trip"]);
        let line = format!("trip turn {turn}: it was changed after it was saved");
        assert!(told.check(1, "").stdout.contains(&line), "{from}: {told:?}");
        std::fs::write(transcript(&place), &text).expect("written");
    }
    replay(&place, &["trip", "--all"]).check(0, "");
}

/// Changes the last turn of the session and gives it the hash that belongs to it.
fn forge(place: &Place, change: impl Fn(&mut StoredTurn)) {
    let store = SessionStore::new(place.path(".local/share/llmctl/sessions"));
    let mut writer = store.open(&name("trip")).expect("opened");
    let saved = writer.saved().clone();
    let last = saved.turns.last().expect("a turn");
    let mut turn = last.turn.clone();
    change(&mut turn);
    let before = saved.up_to(saved.turns.len() - 1);
    let mut forged = saved.clone();
    *forged.turns.last_mut().expect("a turn") =
        SavedTurn { turn: turn.clone(), model: last.model.clone(), note: None }.into();
    let hash = forged.last_receipt().expect("a receipt").hash();
    turn.receipt.as_mut().expect("a receipt").hash = hash;
    writer.append_after(before.turns.len(), &last.model, &turn).expect("saved");
}

#[test]
fn a_forged_receipt_does_not_compute() {
    let place = place();
    forge(&place, |turn| turn.sampling.seed = Some(turn.sampling.seed.expect("drawn") + 1));
    let told = replay(&place, &["trip", "--output", "json"]);
    let object: Value = serde_json::from_str(&told.check(1, "").stdout).expect("JSON");
    let answer = &object["answers"][0];
    assert_eq!((&answer["status"], &answer["same_model"]), (&json!("different"), &json!(true)), "{answer}");
    assert!(answer["position"].as_u64().expect("a position") < 5);
    assert_ne!(answer["recorded"]["id"], answer["replayed"]["id"]);
    for token in ["recorded", "replayed"] {
        let probability = answer[token]["probability"].as_f64().expect("a probability");
        assert!(probability > 0.0 && probability <= 1.0, "{answer}");
    }
    let line = replay(&place, &["trip"]).check(1, "").stdout.clone();
    assert!(
        line.starts_with("trip turn 3: differs at position ") && line.contains(" of 5 tokens: recorded \""),
        "{line}"
    );
    assert_eq!(line.lines().count(), 1);

    let place = self::place();
    forge(&place, |turn| {
        *turn.messages.last_mut().expect("an answer") = Message::assistant("I never said that.")
    });
    let told = replay(&place, &["trip"]);
    assert_eq!(told.check(1, "").stdout, "trip turn 3: its text is not that of its tokens\n");
    let place = self::place();
    forge(&place, |turn| turn.generated[2] = 300);
    let told = replay(&place, &["trip"]).check(1, "").stdout.clone();
    assert!(told.contains("its text is not that of its tokens"), "{told}");
}

#[test]
fn a_session_of_an_older_llmctl_has_no_receipt() {
    let place = place();
    let store = SessionStore::new(place.path(".local/share/llmctl/sessions"));
    let model = ModelFingerprint { name: "guide".to_owned(), fingerprint: "f".to_owned(), reference: None };
    let mut writer = store.create(&name("old"), &model).expect("created");
    writer.append(&model, &stored_turn(["?", "!"], 0, vec![1, 2], vec![3])).expect("saved");
    drop(writer);
    assert!(
        !std::fs::read_to_string(place.path(".local/share/llmctl/sessions/old/transcript.jsonl"))
            .expect("there")
            .contains("receipt")
    );
    replay(&place, &["old"]).check(66, "no receipt (saved by an older llmctl");
    // It goes on with receipts.
    place.run(&["run", "-m", "guide", "--session", "old", "Hello", "-n", "4"]).check(0, "");
    let all = replay(&place, &["old", "--all"]).check(0, "").stdout.clone();
    assert!(all.contains("old turn 1: no receipt") && all.contains("old turn 2: the same 4 tokens"), "{all}");
}

#[test]
fn another_quantisation_is_compared_with_the_model_that_answered() {
    let Some(folder) = stories() else { return };
    let file = |name: &str| Path::new(&folder).parent().expect("a folder").join(name).display().to_string();
    let (own, other) = (file("stories260K-f32.gguf"), file("stories260K-q4_0.gguf"));
    let place = Place::new();
    place.write("t.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}");
    let args =
        ["run", "-m", &own, "--chat-template", "t.jinja", "--session", "s", "Once upon a time", "-n", "40"];
    place.run(&args).check(0, "");
    replay(&place, &["s", "--chat-template", "t.jinja"]).check(0, "");
    let same = replay(&place, &["s", "-m", &own, "--chat-template", "t.jinja"]);
    assert_eq!(same.check(0, "").stdout, "s turn 1: the same 40 tokens\n");
    let told = replay(&place, &["s", "-m", &other, "--chat-template", "t.jinja", "--output", "json"]);
    let object: Value = serde_json::from_str(&told.check(1, "").stdout).expect("JSON");
    let answer = &object["answers"][0];
    let agreement = answer["agreement"].as_f64().expect("a share");
    assert!((0.0..1.0).contains(&agreement) && agreement > 0.5, "{answer}");
    assert!(answer["mean_kl"].as_f64().expect("a divergence") > 0.0, "{answer}");
    // The answer was greedy: the first token that the other model would have said otherwise is the first that differs.
    assert!(answer["position"].as_u64().expect("a position") < 40, "{answer}");
    assert_eq!(answer["scored_tokens"], 40);
    // Another build of the same model, of whose two sides one is here, has no KL.
    let told = replay(&place, &["s", "--kv-type", "q8_0", "--chat-template", "t.jinja"]);
    assert!(told.stdout.contains("KL not computed (there is no other model to open)"), "{told:?}");
    // Another vocabulary is refused by name.
    replay(&place, &["s", "-m", "guide"]).check(65, "guide has other tokens than the model that answered");
}

const ROWS: &str = concat!(
    r#"{"custom_id":"plain","prompt":"How do I save a session?"}"#,
    "\n",
    r#"{"custom_id":"a b/c","prompt":"What is a model?","temperature":0.9,"seed":5,"max_tokens":6,"n":2}"#,
    "\n",
    r#"{"custom_id":"shaped","messages":[{"role":"user","content":"yes?"}],"regex":"(yes|no)+","max_tokens":4,"stop":["nono"]}"#,
    "\n",
);

fn files(folder: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let mut files: Vec<_> =
        entries.map(|path| (name(&path), std::fs::read_to_string(&path).expect("a text"))).collect();
    files.sort();
    files
}

#[test]
fn a_batch_is_recorded_and_replayed() {
    let place = Place::new();
    place.write("rows.jsonl", ROWS);
    let record = |folder: &str| {
        let args = ["run", "-m", "guide", "--batch", "rows.jsonl", "--out", "/dev/null", "--record", folder];
        place.run(&args).check(0, "3 answered");
    };
    record("golden");
    let recorded = files(&place.path("golden"));
    let names: Vec<&str> = recorded.iter().map(|(name, _)| name.as_str()).collect();
    let expected =
        ["a%20b%2Fc.answer.json", "a%20b%2Fc~2.answer.json", "plain.answer.json", "shaped.answer.json"];
    assert_eq!(names, expected);
    record("again");
    assert_eq!(files(&place.path("again")), recorded, "no time and no chance is in a file");
    for (name, text) in &recorded {
        let here = place.folder.path().to_string_lossy().into_owned();
        assert!(!text.contains(&here) && text.lines().count() > 10, "{name}: {text}");
    }
    let told = place.run(&["replay", "golden"]);
    let lines: Vec<&str> = told.check(0, "").stdout.lines().collect();
    assert_eq!(lines.last(), Some(&"4 answers: all the same"), "{lines:?}");
    assert!(lines[1].starts_with("a b/c answer 2: the same "), "{lines:?}");

    // An edit of the text, of the seed and of a token is found, each in its file alone.
    let path = place.path("golden").join("a%20b%2Fc.answer.json");
    let text = std::fs::read_to_string(&path).expect("there");
    for (from, to) in [
        ("\"seed\": 5", "\"seed\": 6"),
        ("\"text\": \"", "\"text\": \"x"),
        ("\"answer\": [", "\"answer\": [1,"),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        std::fs::write(&path, text.replacen(from, to, 1)).expect("written");
        let told = place.run(&["replay", "golden"]);
        assert!(told.check(1, "").stdout.ends_with("4 answers: 1 differ\n"), "{from}: {told:?}");
    }
    std::fs::write(&path, &text[..text.len() / 2]).expect("written");
    place.run(&["replay", "golden"]).check(65, "a%20b%2Fc.answer.json: EOF");
    place.run(&["replay", "none"]).check(66, "none");
    std::fs::create_dir(place.path("empty")).expect("a folder");
    place.run(&["replay", "empty"]).check(66, "has no recorded answers");
}

/// Answers that guide gave on x86-64 with AVX-512, also sampled ones; `.ci/aarch64` replays them there. Another guide records them
/// again: `llmctl run -m guide --batch rows.jsonl --record tests/replay/guide`, with the rows that their receipts show.
#[test]
fn recorded_answers_are_those_of_every_instruction_set() {
    let place = Place::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/replay/guide");
    for isa in llmctl_models::load::Isa::available() {
        let told = place.run(&["replay", golden, "--cpu", isa.name()]);
        let said = &told.check(0, "").stdout;
        assert!(said.ends_with("2 answers: all the same\n"), "{}: {said}", isa.name());
    }
}

#[test]
fn a_receipt_is_the_same_wherever_it_is_read() {
    let recipe = AnswerRecipe { model: "m".to_owned(), ends: vec![2], ..AnswerRecipe::default() };
    let receipt = Receipt {
        schema: "llmctl.receipt.v1".to_owned(),
        previous: None,
        recipe,
        adapters: Vec::new(),
        images: Vec::new(),
        messages_sha256: None,
        prompt_tokens: 2,
        prompt_sha256: llmctl_engine::receipt::tokens_sha256(&[1, 258]),
        sampling: (&Sampling { temperature: 0.7, seed: Some(u64::MAX), ..Sampling::default() }).into(),
        given: 0,
        answer: vec![3],
        finish: Finish::Eos(2),
    };
    // As sha256sum gives it for the bytes 01 00 00 00 02 01 00 00.
    assert_eq!(receipt.prompt_sha256, "fb8bbe2ad3ab5292f19bc5d75bbab9b5fbddc5a78ce47ab41b2d3d59bca08596");
    let text = serde_json::to_string(&receipt).expect("JSON");
    let back: Receipt = serde_json::from_str(&text).expect("a receipt");
    assert_eq!((&back, back.hash()), (&receipt, receipt.hash()));
    assert_eq!(receipt.check(&[1, 258]), Ok(()));
    assert!(receipt.check(&[1, 259]).is_err());
    assert!(Receipt { given: 2, ..receipt.clone() }.check(&[1, 258]).is_err());
    assert_ne!(Receipt { finish: Finish::Complete, ..receipt.clone() }.hash(), receipt.hash());
}
