//! Images of a served session: a real model, and what is on disk.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::binary::{Serving, post, signal, start_as_told};
use super::client::{Reply, ask, get};
use crate::common::prelude::*;

/// The model of the fixtures that reads images, served; and a picture as a data URL.
fn seeing() -> Option<(Serving, String)> {
    let vision = fixtures()?.join("vision");
    let picture = std::fs::read(vision.join("images/gradient.png")).expect("a picture");
    let model = vision.join("qwen3-vl").display().to_string();
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(picture));
    Some((start_as_told(Place::new(), &["--model", &model]).0, url))
}

fn say(at: SocketAddr, session: &str, messages: &Value) -> Reply {
    let body = json!({"messages": messages, "session_id": session, "max_tokens": 4});
    post(at, "/v1/chat/completions", &body)
}

fn files(serving: &Serving, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(serving.place.path(folder)).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.len() == 64).collect()
}

#[cfg(unix)]
#[test]
fn a_session_gives_its_images_to_what_is_asked_again_and_takes_them_along() {
    let Some((serving, url)) = seeing() else { return };
    let at = serving.address;
    let question = |image: &Value, text: &str| json!({"role": "user", "content": [image, {"type": "text", "text": text}]});
    let agent = ["launch", "codex", "--print", "--endpoint", &format!("http://{at}")];
    let ran = serving.place.run(&agent);
    let told = &ran.check(0, "").stdout;
    assert!(told.contains(r#""input_modalities": ["text", "image"]"#), "{told}");
    let sent = json!({"type": "image_url", "image_url": {"url": url}});
    let first = say(at, "a", &json!([question(&sent, "what?")]));
    assert_eq!(first.status, 200, "{first:?}");
    let held = get(at, "/v1/sessions/a?messages=true").json();
    let image = &held["messages"][0]["content"][0];
    assert_eq!((&image["type"], &image["width"]), (&json!("image"), &json!(96)), "{held}");

    // The same again, another text, and that in the branch which it became.
    for text in ["what?", "why?", "why?"] {
        let again = say(at, "a", &json!([question(image, text)]));
        assert_eq!(again.status, 200, "{text}: {again:?}");
        let (usage, before) = (&again.json()["usage"], &first.json()["usage"]);
        let least = before["prompt_tokens"].as_u64().expect("a count") - 4;
        assert!(usage["prompt_tokens"].as_u64() >= Some(least), "{usage} behind {before}");
    }
    let mut other = image.clone();
    other["width"] = 95.into();
    let alone = json!({"messages": [question(image, "what?")], "max_tokens": 1});
    for (reply, why) in [
        (say(at, "a", &json!([question(&other, "what?")])), "other sides"),
        (post(at, "/v1/chat/completions", &alone), "no file of the SHA-256"),
    ] {
        assert!(reply.check(400, "invalid_value").body.contains(why), "{reply:?}");
    }

    let blobs = ".local/share/llmctl/sessions/.owners/anonymous/.blobs";
    assert_eq!(files(&serving, blobs), [image["sha256"].as_str().expect("a hash")]);
    assert_eq!(files(&serving, ".cache/llmctl/kv/images").len(), 1);
    let listed = get(at, "/v1/sessions").json();
    for session in listed["data"].as_array().expect("a list") {
        let name = session["id"].as_str().expect("a name");
        let reply = ask(at, &format!("DELETE /v1/sessions/{name} HTTP/1.1\r\nHost: {at}"), "");
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    assert_eq!(files(&serving, blobs), [""; 0]);
    assert_eq!(files(&serving, ".cache/llmctl/kv/images"), [""; 0], "what the tower saw");
    signal(&serving.child, libc::SIGTERM);
    assert_eq!(serving.end().0.code(), Some(0));
}
