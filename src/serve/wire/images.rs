//! Images of bodies, in the spellings of all APIs.
//!
//! Invariant: an image in a tool's result that cannot be read is replaced by a text, because the client cannot take the result back.

use serde_json::{Value, json};

use super::Fields;
use super::fields::shown;
use super::image_files::REFUSED;
use llmctl_template::{Content, ImageRef};

/// What becomes of a part that no model here reads.
const UNREAD: &str = "llmctl reads only text and images";
const ONLY_TEXT: &str = "this model reads only text";

/// Where an image stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImagePlace {
    User,
    ToolResult,
    /// In a message that has no images.
    Elsewhere,
}

/// A part of a content.
#[derive(Debug, Clone, PartialEq)]
pub enum ImagePiece {
    Text(String),
    /// In the form of [`llmctl_template::ImageRef::to_part`].
    Image(Value),
}

/// Returns the content of pieces: a text, line by line, unless there is an image.
pub fn content(pieces: impl IntoIterator<Item = ImagePiece>) -> Content {
    let mut joined: Vec<ImagePiece> = Vec::new();
    for piece in pieces {
        match (joined.last_mut(), piece) {
            (Some(ImagePiece::Text(text)), ImagePiece::Text(more)) => text.extend(["\n", more.as_str()]),
            (_, piece) => joined.push(piece),
        }
    }
    if let [ImagePiece::Text(text)] = &mut joined[..] {
        return Content::Text(std::mem::take(text));
    }
    let part = |piece| match piece {
        ImagePiece::Text(text) => json!({"type": "text", "text": text}),
        ImagePiece::Image(image) => image,
    };
    match joined.is_empty() {
        true => Content::Text(String::new()),
        false => Content::Parts(joined.into_iter().map(part).collect()),
    }
}

/// Returns the pieces of [`content`].
pub fn pieces(content: Content) -> Vec<ImagePiece> {
    let piece = |part: Value| match part["text"].as_str() {
        Some(text) => ImagePiece::Text(text.to_owned()),
        None => ImagePiece::Image(part),
    };
    match content {
        Content::Text(text) => vec![ImagePiece::Text(text)],
        Content::Parts(parts) => parts.into_iter().map(piece).collect(),
    }
}

/// Returns true if a part of this type is an image.
pub fn is_image(kind: &str) -> bool {
    matches!(kind, "image" | "image_url" | "input_image")
}

/// Reads a part that [`is_image`].
pub fn image(mut part: Fields<'_>, kind: &str, place: ImagePlace) -> Option<ImagePiece> {
    if place == ImagePlace::ToolResult && !part.problems().images().usage.is_on {
        return Some(ImagePiece::Text(left_out(&mut part, kind)));
    }
    part.take("cache_control"); // a hint: what a prompt begins with is kept anyway
    let given = match kind {
        "image" if part.has("sha256") => {
            let piece = held(&mut part);
            part.ignore_rest();
            return piece;
        }
        "image" if !part.has("image_url") => source(&mut part),
        _ => url(&mut part),
    };
    let piece = given.and_then(|(at, text)| admit(&mut part, kind, at, text, place));
    part.ignore_rest();
    piece
}

/// Reads a list of images beside the text of a message, each as base64, as Ollama's clients send them.
pub fn list(fields: &mut Fields<'_>, name: &str, place: ImagePlace) -> Vec<ImagePiece> {
    let items = fields.list(name).unwrap_or_default();
    let read = |(index, item)| {
        let at = format!("{name}[{index}]");
        let path = fields.path(&at);
        match item {
            Value::String(text) => admit(fields, name, path, text, place),
            _ => fields.none(&at, "is not a string"),
        }
    };
    items.into_iter().enumerate().filter_map(read).collect()
}

/// Returns the text that replaces an unread part of a tool's result.
pub fn left_out(part: &mut Fields<'_>, kind: &str) -> String {
    replaced(part, kind, if is_image(kind) { ONLY_TEXT } else { UNREAD })
}

fn replaced(part: &mut Fields<'_>, kind: &str, why: &str) -> String {
    let kind = shown(kind);
    part.ignored(&kind);
    part.problems().notice(format!("a part of type {kind} was left out of a tool's result: {why}"));
    format!("[{kind}: left out; {why}]")
}

/// Reads OpenAI's forms: a URL, or an object with one. Returns its place and text.
fn url(part: &mut Fields<'_>) -> Option<(String, String)> {
    const URL: &str = "image_url";
    let at = part.path(URL);
    let url = match part.take(URL) {
        Some(Value::String(url)) => Some(url),
        Some(Value::Object(members)) => {
            let mut inner = part.inside(URL, members);
            inner.require("url");
            let url = inner.text("url");
            detail(&mut inner);
            inner.ignore_rest();
            url
        }
        Some(_) => part.none(URL, "is neither a URL nor an object with one"),
        None if part.has("file_id") => no_files(part),
        None => {
            part.missing(URL);
            None
        }
    };
    detail(part);
    Some((at, url?))
}

/// Takes OpenAI's wish for a resolution, which is the model's here.
fn detail(fields: &mut Fields<'_>) {
    match fields.text("detail").as_deref() {
        None | Some("auto") => {}
        Some("low" | "high" | "original") => fields.ignored("detail"),
        Some(_) => fields.out_of_range("detail", "is none of auto, low, high and original"),
    }
}

/// Reads Anthropic's forms.
fn source(part: &mut Fields<'_>) -> Option<(String, String)> {
    part.require("source");
    let (at, members) = (part.path("source"), part.object("source")?);
    let mut source = part.inside("source", members);
    source.require("type");
    let member = match source.text("type").as_deref() {
        Some("base64") => Some("data"),
        Some("url") => Some("url"),
        Some("file") => no_files(&mut source),
        Some(other) => {
            let known = format!("= {:?} is not supported, only base64 and url", shown(other));
            source.unsupported("type", &known);
            None
        }
        None => None,
    };
    source.take("media_type"); // the bytes tell it
    let text = member.and_then(|member: &str| {
        source.require(member);
        source.text(member)
    });
    source.ignore_rest();
    Some((at, text?))
}

/// Reads the form in which a session tells of an image, so that its messages can be sent again: the session has the file.
fn held(part: &mut Fields<'_>) -> Option<ImagePiece> {
    let at = part.path("sha256");
    let members = ["sha256", "width", "height", "media_type", "name"];
    let mut told = json!({"type": "image"});
    members.into_iter().for_each(|name| told[name] = part.take(name).unwrap_or_default());
    let images = part.problems().images();
    let held = images.hold(ImageRef::of(&told));
    held.map_err(|refused| images.refuse(&at, refused)).ok().map(ImagePiece::Image)
}

fn no_files<T>(fields: &mut Fields<'_>) -> Option<T> {
    fields.take("file_id");
    let why = "this server keeps no files; send the image itself as a data: URL".to_owned();
    let at = fields.path("file_id");
    fields.problems().images().refuse(&at, (REFUSED, why));
    None
}

/// Takes an image at `at` in, or takes note of why not.
fn admit(
    fields: &mut Fields<'_>,
    kind: &str,
    at: String,
    text: String,
    place: ImagePlace,
) -> Option<ImagePiece> {
    let images = fields.problems().images();
    match images.add(&at, &text) {
        Ok(part) => Some(ImagePiece::Image(part)),
        Err((_, why)) if place == ImagePlace::ToolResult => {
            Some(ImagePiece::Text(replaced(fields, kind, &why)))
        }
        Err(refused) => {
            images.refuse(&at, refused);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base64::Engine as _;
    use base64::prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD};
    use serde_json::Map;

    use super::super::image_files::{ImageFetch, ImageReading, MAX_IMAGES, undecoded};
    use super::super::{Problems, anthropic, message, responses};
    use super::*;
    use crate::error::ApiError;
    use llmctl_image::{ImageError, ImageHash};
    use llmctl_template::Message;

    const PNG: &[u8] = include_bytes!("../../../tests/images/bits.png");
    const JPEG: &[u8] = include_bytes!("../../../tests/images/grey.jpg");

    fn base64(bytes: &[u8]) -> String {
        BASE64_STANDARD.encode(bytes)
    }

    fn data_url(bytes: &[u8]) -> String {
        format!("data:application/octet-stream;base64,{}", base64(bytes))
    }

    /// Fetches the same image everywhere but at one place.
    struct Fetch;

    impl ImageFetch for Fetch {
        fn fetch(&self, url: &str, _: usize) -> Result<Vec<u8>, String> {
            match url {
                "https://a.example/no" => Err("its host is not among those".to_owned()),
                _ => Ok(PNG.to_vec()),
            }
        }
    }

    enum Api {
        Chat,
        Messages,
        Responses,
    }

    struct Outcome {
        messages: Vec<Message>,
        checked: Result<(), ApiError>,
        problems: Problems,
    }

    fn read(api: &Api, usage: ImageReading, conversation: Value) -> Outcome {
        let mut problems = Problems::default().with_images(usage);
        let name = if matches!(api, Api::Responses) { "input" } else { "messages" };
        let mut fields = Fields::new(Map::from_iter([(name.to_owned(), conversation)]), &mut problems);
        let messages = match api {
            Api::Chat => message::messages(&mut fields, &|_| false),
            Api::Messages => anthropic::messages::conversation(&mut fields),
            Api::Responses => responses::input::input(&mut fields),
        };
        fields.end();
        let checked = problems.check();
        Outcome { messages, checked, problems }
    }

    fn seeing() -> ImageReading {
        ImageReading { is_on: true, ..ImageReading::default() }
    }

    fn blind() -> ImageReading {
        ImageReading { refusal: "the model \"m\" reads no images".to_owned(), ..ImageReading::default() }
    }

    /// Code and place of the refusal of a user's part.
    fn refused(api: &Api, usage: ImageReading, part: Value) -> (&'static str, String) {
        let error =
            read(api, usage, json!([{"role": "user", "content": [part]}])).checked.expect_err("refused");
        assert_eq!((error.status.as_u16(), error.kind), (400, "invalid_request_error"));
        (error.code.expect("a code"), error.param.expect("a place"))
    }

    fn image_url(url: impl Into<Value>) -> Value {
        json!({"type": "image_url", "image_url": {"url": url.into()}})
    }

    #[test]
    fn every_spelling_is_the_same_part() {
        let text = json!({"type": "text", "text": "t"});
        let source = json!({"type": "base64", "media_type": "image/jpeg", "data": base64(PNG)});
        let of_responses = json!({"type": "input_image", "image_url": data_url(PNG), "detail": "auto"});
        let message = |part: Value| json!([{"role": "user", "content": [part, text]}]);
        let hash = ImageHash::of(PNG).to_string();
        for (api, conversation) in [
            (Api::Chat, message(image_url(data_url(PNG)))),
            (Api::Chat, message(image_url(BASE64_STANDARD_NO_PAD.encode(PNG)))),
            (Api::Chat, message(json!({"type": "image_url", "image_url": data_url(PNG)}))),
            (Api::Chat, message(image_url("https://a.example/x.png"))),
            (Api::Chat, json!([{"role": "user", "content": "t", "images": [base64(PNG)]}])),
            (Api::Messages, message(json!({"type": "image", "source": source}))),
            (
                Api::Messages,
                message(json!({"type": "image", "source": {"type": "url", "url": "https://a.example/x"}})),
            ),
            (Api::Responses, message(of_responses)),
        ] {
            let usage = ImageReading { fetch: Some(Arc::new(Fetch)), ..seeing() };
            let mut outcome = read(&api, usage, conversation.clone());
            assert_eq!(outcome.checked, Ok(()), "{conversation}");
            let Some(Content::Parts(parts)) = &outcome.messages[0].content else { panic!("{conversation}") };
            assert_eq!((&parts[0]["sha256"], &parts[0]["media_type"]), (&json!(hash), &json!("image/png")));
            assert_eq!(parts[1], text);
            let files = outcome.problems.images().decode().expect("decoded");
            assert_eq!(files.iter().map(|file| file.hash.to_string()).collect::<Vec<_>>(), [hash.as_str()]);
            assert_eq!(outcome.problems.take_ignored(), Vec::<String>::new());
        }
    }

    #[test]
    fn the_order_of_texts_and_images_is_kept() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let parts =
            json!([text("a"), text("b"), image_url(data_url(PNG)), image_url(data_url(JPEG)), text("c")]);
        let mut outcome = read(&Api::Chat, seeing(), json!([{"role": "user", "content": parts}]));
        let Some(Content::Parts(read)) = &outcome.messages[0].content else { panic!() };
        let told: Vec<&Value> =
            read.iter().map(|part| part.get("text").unwrap_or(&part["media_type"])).collect();
        assert_eq!(told, ["a\nb", "image/png", "image/jpeg", "c"]);
        assert_eq!(outcome.problems.images().decode().expect("decoded").iter().count(), 2);
        // Anthropic's turns of one role are one.
        let turns = json!([{"role": "user", "content": "a"}, {"role": "user", "content": [image_url(data_url(PNG))]}]);
        let outcome = self::read(&Api::Messages, seeing(), turns);
        assert!(
            matches!(&outcome.messages[..], [Message { content: Some(Content::Parts(parts)), .. }] if parts.len() == 2)
        );
    }

    #[test]
    fn an_image_of_a_session_is_named_and_not_sent() {
        let hash = ImageHash::of(PNG).to_string();
        let part = json!({"type": "image", "sha256": hash, "width": 24, "height": 17, "media_type": "image/png", "name": "a.png"});
        for api in [Api::Chat, Api::Messages, Api::Responses] {
            let mut outcome = read(&api, seeing(), json!([{"role": "user", "content": [part]}]));
            assert_eq!(outcome.checked, Ok(()));
            assert_eq!(outcome.messages[0].content, Some(Content::Parts(vec![part.clone()])));
            assert!(outcome.problems.images().decode().expect("none").is_empty());
        }
        let place = "messages[0].content[0].sha256".to_owned();
        assert_eq!(refused(&Api::Chat, blind(), part.clone()), ("model_without_vision", place.clone()));
        for (name, value) in [("sha256", json!("00")), ("width", json!(0)), ("height", json!(0))] {
            let mut bad = part.clone();
            bad[name] = value;
            assert_eq!(refused(&Api::Chat, seeing(), bad), ("image_undecodable", place.clone()), "{name}");
        }
    }

    #[test]
    fn what_is_no_image_or_too_much_is_refused_by_its_place() {
        let url = "messages[0].content[0].image_url";
        let large = "A".repeat((20 << 20) / 3 * 4 + (2 << 20));
        for (given, code) in [
            ("data:image/png;base64,AAAA".to_owned(), "image_undecodable"),
            ("data:image/png,AAAA".to_owned(), "image_undecodable"),
            ("not base64!".to_owned(), "image_undecodable"),
            (String::new(), "image_undecodable"),
            (large, "image_too_large"),
            ("https://a.example/x.png".to_owned(), "image_url_refused"),
            ("file:///etc/passwd".to_owned(), "image_url_refused"),
            ("FILE:///etc/passwd".to_owned(), "image_url_refused"),
            ("ftp://a.example/x".to_owned(), "image_url_refused"),
        ] {
            let shown: String = given.chars().take(40).collect();
            assert_eq!(refused(&Api::Chat, seeing(), image_url(given)), (code, url.to_owned()), "{shown}");
        }
        let fetching = ImageReading { fetch: Some(Arc::new(Fetch)), ..seeing() };
        let no = image_url("https://a.example/no");
        assert_eq!(refused(&Api::Chat, fetching, no), ("image_url_refused", url.to_owned()));
        let file = json!({"type": "input_image", "file_id": "f"});
        let place = "input[0].content[0].file_id".to_owned();
        assert_eq!(refused(&Api::Responses, seeing(), file), ("image_url_refused", place));
        let many = vec![image_url(data_url(PNG)); MAX_IMAGES + 1];
        let outcome = read(&Api::Chat, seeing(), json!([{"role": "user", "content": many}]));
        let error = outcome.checked.expect_err("too many");
        assert_eq!(error.code, Some("image_too_large"));
        assert_eq!(error.param, Some(format!("messages[0].content[{MAX_IMAGES}].image_url")));
    }

    #[test]
    fn a_file_whose_pixels_are_damaged_is_refused_by_its_place() {
        let cut = &PNG[..PNG.len() - 20];
        let mut outcome =
            read(&Api::Chat, seeing(), json!([{"role": "user", "content": [image_url(data_url(cut))]}]));
        let error = outcome.checked.and_then(|()| outcome.problems.images().decode().map(drop));
        let error = error.expect_err("refused");
        assert_eq!(error.code, Some("image_undecodable"));
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].image_url"));
        let busy = undecoded("messages[0]", ImageError::Busy { most_bytes: 2 << 30 });
        assert_eq!((busy.status.as_u16(), busy.code), (503, Some("images_busy")));
        assert!(busy.message.contains("2048 MiB"), "{}", busy.message);
    }

    #[test]
    fn a_model_of_text_refuses_a_question_and_goes_on_behind_a_result() {
        let part = json!({"type": "image", "source": {"type": "base64", "data": base64(PNG)}});
        assert_eq!(
            refused(&Api::Messages, blind(), part.clone()),
            ("model_without_vision", "messages.0.content.0.source".to_owned())
        );
        let of_chat = "messages[0].content[0].image_url".to_owned();
        assert_eq!(refused(&Api::Chat, blind(), image_url(data_url(PNG))), ("model_without_vision", of_chat));
        let part = json!({"type": "input_image", "image_url": data_url(PNG)});
        let of_responses = "input[0].content[0].image_url".to_owned();
        assert_eq!(refused(&Api::Responses, blind(), part.clone()), ("model_without_vision", of_responses));
        let result =
            json!({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]});
        for (api, conversation, ignored, kind) in [
            (
                Api::Chat,
                json!([{"role": "tool", "tool_call_id": "c", "content": [image_url("x")]}]),
                "messages[].content[].image_url",
                "image_url",
            ),
            (
                Api::Messages,
                json!([{"role": "user", "content": [result]}]),
                "messages[].content[].content[].image",
                "image",
            ),
            (
                Api::Responses,
                json!([{"type": "function_call_output", "call_id": "c", "output": [part]}]),
                "input[].output[].input_image",
                "input_image",
            ),
        ] {
            let mut outcome = read(&api, blind(), conversation);
            assert_eq!(outcome.checked, Ok(()), "{kind}");
            let expected = format!("[{kind}: left out; this model reads only text]");
            assert_eq!(outcome.messages[0].content, Some(Content::Text(expected)));
            assert_eq!(outcome.problems.take_ignored(), [ignored]);
            assert_eq!(outcome.problems.take_notices().len(), 1);
        }
    }

    #[test]
    fn an_image_in_a_result_is_read_or_named() {
        let result =
            |url: String| json!([{"role": "tool", "tool_call_id": "c", "content": [image_url(url)]}]);
        let outcome = read(&Api::Chat, seeing(), result(data_url(PNG)));
        assert!(matches!(&outcome.messages[0].content, Some(Content::Parts(parts)) if parts.len() == 1));
        let mut outcome = read(&Api::Chat, seeing(), result("data:image/png;base64,AAAA".to_owned()));
        assert_eq!(outcome.checked, Ok(()), "the client could not take it back");
        assert!(
            matches!(&outcome.messages[0].content, Some(Content::Text(text)) if text.starts_with("[image_url: left out; "))
        );
        assert_eq!(outcome.problems.take_notices().len(), 1);
    }

    #[test]
    fn the_wish_for_a_resolution_is_a_hint() {
        let part = |detail: &str| json!({"type": "image_url", "image_url": {"url": data_url(PNG), "detail": detail}});
        let mut outcome = read(&Api::Chat, seeing(), json!([{"role": "user", "content": [part("high")]}]));
        assert_eq!(outcome.checked, Ok(()));
        assert_eq!(outcome.problems.take_ignored(), ["messages[].content[].image_url.detail"]);
        let outcome = read(&Api::Chat, seeing(), json!([{"role": "user", "content": [part("best")]}]));
        assert_eq!(outcome.checked.expect_err("refused").code, Some("invalid_value"));
    }
}
