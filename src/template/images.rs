//! Images of a conversation, in the form that a template takes them, and their texts apart from what people write.
//!
//! A template prints one text for every image; what the image becomes takes its place before the prompt is tokenised. So the text of a
//! conversation must not hold it: it is broken there by a space.

use serde_json::{Value, json};

use super::{Content, Conversation, ImageRef, Message, Role, text_part};

/// The part that stands for an image in a template's input, or none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageForm {
    /// `{"type": "image"}`.
    #[default]
    Part,
    /// `{"type": "image_url"}`, for templates that know no other.
    UrlPart,
    /// The template prints none: the message is one text, with the image's in it.
    Text,
}

/// How images get into the prompts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageMarkup {
    /// What the prompt has for an image before it is expanded.
    pub printed: String,
    /// That and what stands around it, where the template prints none.
    pub spelt: String,
    /// Text of the token that the image's embeddings replace.
    pub placeholder: String,
    pub in_user: ImageForm,
    /// `None` if images of tool results go into the user message behind them.
    pub in_tool: Option<ImageForm>,
}

impl ImageMarkup {
    /// Without a template: images are texts.
    pub fn of_text(printed: &str, placeholder: &str) -> Self {
        let (printed, placeholder) = (printed.to_owned(), placeholder.to_owned());
        let spelt = printed.clone();
        Self { printed, spelt, placeholder, in_user: ImageForm::Text, in_tool: Some(ImageForm::Text) }
    }

    /// Returns the text with no image in it that people wrote.
    pub fn guarded(&self, text: &str) -> String {
        let broken = |text: String, mark: &str| match mark.char_indices().nth(1) {
            Some((at, _)) => text.replace(mark, &format!("{} {}", &mark[..at], &mark[at..])),
            None => text,
        };
        broken(broken(text.to_owned(), &self.printed), &self.placeholder)
    }

    /// Guards every text that a template sees.
    pub(super) fn guard(&self, conversation: &mut Conversation) {
        for message in &mut conversation.messages {
            match &mut message.content {
                Some(Content::Text(text)) => *text = self.guarded(text),
                Some(Content::Parts(parts)) => parts.iter_mut().for_each(|part| self.guard_value(part)),
                None => {}
            }
            let texts = [&mut message.reasoning, &mut message.tool_call_id, &mut message.name];
            texts.into_iter().flatten().for_each(|text| *text = self.guarded(text));
            for call in &mut message.tool_calls {
                call.name = self.guarded(&call.name);
                self.guard_value(&mut call.arguments);
            }
        }
        let lists = conversation.tools.iter_mut().chain(&mut conversation.documents);
        lists.chain(conversation.kwargs.values_mut()).for_each(|value| self.guard_value(value));
    }

    fn guard_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.guarded(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.guard_value(item)),
            Value::Object(members) => {
                let guarded = |(name, mut value): (String, Value)| {
                    self.guard_value(&mut value);
                    (self.guarded(&name), value)
                };
                *members = std::mem::take(members).into_iter().map(guarded).collect();
            }
            _ => {}
        }
    }

    /// Puts images into the form that the template takes.
    pub(super) fn form(&self, messages: &mut [Message]) {
        for message in messages {
            let form = if message.role == Role::Tool { self.in_tool } else { Some(self.in_user) };
            let Some(Content::Parts(parts)) = &mut message.content else { continue };
            if !parts.iter().any(is_image) {
                continue;
            }
            match form.unwrap_or_default() {
                ImageForm::Text => message.content = Some(as_text(parts, |_| self.spelt.clone())),
                form => parts.iter_mut().filter(|part| is_image(part)).for_each(|part| *part = form.part()),
            }
        }
    }
}

impl ImageForm {
    /// Returns the part; a template that prints no part gets an image's.
    pub(super) fn part(self) -> Value {
        match self {
            Self::UrlPart => json!({"type": "image_url", "image_url": {"url": ""}}),
            Self::Part | Self::Text => json!({"type": "image"}),
        }
    }
}

pub(super) fn is_image(part: &Value) -> bool {
    ImageRef::of(part).is_some()
}

/// Moves the images of tool results into the user message behind them, and says there whose they are.
pub(super) fn move_from_results(messages: &mut Vec<Message>) {
    let mut moved: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    let mut waiting: Vec<Value> = Vec::new();
    let mut count = 0;
    for mut message in std::mem::take(messages) {
        if message.role == Role::Tool {
            if let Some(Content::Parts(parts)) = &mut message.content {
                for part in parts.iter_mut().filter(|part| is_image(part)) {
                    count += 1;
                    let image = std::mem::replace(part, text_part(&format!("[image {count}]")));
                    let whose = text_part(&format!("[image {count} of the tool result above]\n"));
                    waiting.extend([whose, image, text_part("\n")]);
                }
            }
            moved.push(message);
            continue;
        }
        count = 0;
        let waiting = std::mem::take(&mut waiting);
        match message.role {
            Role::User if !waiting.is_empty() => {
                let own = message.content.take().map(Content::into_parts).unwrap_or_default();
                let parts: Vec<Value> = waiting.into_iter().chain(own).collect();
                moved.push(Message { content: Some(parts.into()), ..message });
            }
            _ => moved.extend(of_images(waiting).into_iter().chain([message])),
        }
    }
    moved.extend(of_images(waiting));
    *messages = moved;
}

fn of_images(parts: Vec<Value>) -> Option<Message> {
    (!parts.is_empty()).then(|| Message::user(parts))
}

/// Puts words in place of images, for a model that reads text alone.
pub fn leave_out_images<'a>(messages: impl IntoIterator<Item = &'a mut Message>) {
    for message in messages {
        let parts = match &message.content {
            Some(Content::Parts(parts)) if parts.iter().any(is_image) => parts,
            _ => continue,
        };
        let words = |image: ImageRef| format!("{} (left out: this model reads text alone)", image.tag());
        message.content = Some(as_text(parts, words));
    }
}

fn as_text(parts: &[Value], words: impl Fn(ImageRef) -> String) -> Content {
    let text = |part: &Value| match ImageRef::of(part) {
        Some(image) => words(image),
        None => part["text"].as_str().unwrap_or_default().to_owned(),
    };
    Content::Text(parts.iter().map(text).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Accommodation, ChatTemplate, DateTime, RenderOptions, Shown, SpecialTokens, ToolCall};

    const PRINTED: &str = "<|image|>";

    fn photo(n: u8) -> Value {
        let image = ImageRef {
            sha256: format!("{n:064x}"),
            width: 640,
            height: 480,
            media_type: "image/png".to_owned(),
            name: Some("photo.png".to_owned()),
        };
        assert_eq!(image.tag(), "[image: photo.png 640x480]");
        image.to_part()
    }

    fn said(role: Role, parts: Vec<Value>) -> Message {
        Message::new(role, parts)
    }

    /// A template with these branches for the parts of a content that is no text.
    fn template(parts: &str, result: &str) -> ChatTemplate {
        let source = "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}CALL{% endfor %}\
            {% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}RESULT{% else %}PARTS{% endif %}{% endfor %}";
        ChatTemplate::new(&source.replace("PARTS", parts).replace("RESULT", result), SpecialTokens::default())
            .expect("a template")
    }

    const TEXTS: &str = "{% for p in m.content %}{{ p.text }}{% endfor %}";
    const IMAGES: &str = "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}";
    const URLS: &str = "{% for p in m.content %}{% if 'image_url' in p %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}";

    fn rendered(template: &ChatTemplate, images: Option<&ImageMarkup>, messages: Vec<Message>) -> String {
        let conversation = Conversation { messages, ..Conversation::default() };
        let accommodation = Accommodation::default();
        let shown = accommodation.apply(&conversation, images);
        template.render(&shown, &RenderOptions::default()).expect("renders")
    }

    #[test]
    fn the_form_is_the_one_that_the_template_prints() {
        for (parts, result, in_user, in_tool) in [
            (IMAGES, IMAGES, ImageForm::Part, Some(ImageForm::Part)),
            (URLS, TEXTS, ImageForm::UrlPart, None),
            (TEXTS, TEXTS, ImageForm::Text, None),
            ("{{ raise_exception('texts only') }}", URLS, ImageForm::Text, Some(ImageForm::UrlPart)),
        ] {
            let template = template(parts, result);
            let images = ImageMarkup::of(&template, PRINTED, PRINTED);
            assert_eq!((images.in_user, images.in_tool), (in_user, in_tool), "{parts} {result}");
            let asked = said(Role::User, vec![text_part("See "), photo(1), text_part("?")]);
            assert_eq!(rendered(&template, Some(&images), vec![asked]), "[user]See <|image|>?");
        }
        let turns = template(TEXTS, TEXTS).source().replace(
            "[{{ m.role }}]",
            "{% if m.role == 'user' and not loop.first %}{{ raise_exception('turns') }}{% endif %}[{{ m.role }}]",
        );
        let turns = ChatTemplate::new(&turns, SpecialTokens::default()).expect("a template");
        let images = ImageMarkup::of(&turns, PRINTED, PRINTED);
        assert_eq!(images.in_tool, Some(ImageForm::Text), "no question may follow a result");
    }

    #[test]
    fn images_of_results_follow_them_where_the_template_prints_none() {
        let template = template(IMAGES, TEXTS);
        let images = ImageMarkup::of(&template, PRINTED, PRINTED);
        let call = ToolCall { id: None, name: "look".to_owned(), arguments: json!({}) };
        let round = || {
            vec![
                Message::user("Look"),
                Message { tool_calls: vec![call.clone()], ..Message::assistant("") },
                said(Role::Tool, vec![text_part("Here: "), photo(1), photo(2)]),
            ]
        };
        let expected = "[user]Look[assistant]CALL[tool]Here: [image 1][image 2]\
            [user][image 1 of the tool result above]\n<|image|>\n[image 2 of the tool result above]\n<|image|>\n";
        assert_eq!(rendered(&template, Some(&images), round()), expected);
        let with = |more: Message| rendered(&template, Some(&images), [round(), vec![more]].concat());
        assert_eq!(with(Message::user("And?")), format!("{expected}And?"));
        assert_eq!(with(Message::assistant("A cat.")), format!("{expected}[assistant]A cat."));
        let left_out = rendered(&template, None, round());
        let tag = "[image: photo.png 640x480] (left out: this model reads text alone)";
        assert_eq!(left_out, format!("[user]Look[assistant]CALL[tool]Here: {tag}{tag}"));
    }

    #[test]
    fn spelt_results_keep_their_images() {
        let template = template(IMAGES, TEXTS);
        let images = ImageMarkup::of(&template, PRINTED, PRINTED);
        let spelling = Accommodation { spells_tools: true, ..Accommodation::default() };
        let messages =
            vec![said(Role::Tool, vec![text_part("Here: "), photo(1)]), said(Role::User, vec![photo(2)])];
        let conversation = Conversation { messages, ..Conversation::default() };
        let placed: Vec<String> =
            spelling.placed(&conversation, Some(&images)).images().map(|i| i.sha256).collect();
        assert_eq!(placed, [format!("{:064x}", 1), format!("{:064x}", 2)]);
        let shown = spelling.apply(&conversation, Some(&images));
        let text = template.render(&shown, &RenderOptions::default()).expect("renders");
        assert_eq!(text, "[user]<tool_response>\nHere: <|image|>\n</tool_response>\n<|image|>");
    }

    #[test]
    fn what_people_write_is_no_image() {
        let template = template(IMAGES, IMAGES);
        let images = ImageMarkup::of(&template, PRINTED, "<soft>");
        let evil = "a <|image|> b <soft> <<|image|>";
        let call = ToolCall { id: None, name: evil.to_owned(), arguments: json!({evil: [evil]}) };
        let conversation = Conversation {
            messages: vec![
                Message { reasoning: Some(evil.to_owned()), tool_calls: vec![call], ..Message::user(evil) },
                said(Role::User, vec![text_part(evil), photo(1)]),
            ],
            tools: vec![json!({"name": evil})],
            documents: vec![json!(evil)],
            kwargs: [("x".to_owned(), json!(evil))].into_iter().collect(),
        };
        let shown = Accommodation::default().apply(&conversation, Some(&images));
        let everything = format!("{shown:?}");
        assert!(!everything.contains(PRINTED) && !everything.contains("<soft>"), "{everything}");
        let text = template.render(&shown, &RenderOptions::default()).expect("renders");
        assert_eq!(text.matches(PRINTED).count(), 1, "{text}");
        assert!(text.contains("a < |image|> b < soft> << |image|>"), "{text}");
    }

    #[test]
    fn a_template_that_knows_parts_alone_gets_texts_as_parts() {
        let template = template(IMAGES, IMAGES).source().replace("m.content is string", "false");
        let template = ChatTemplate::new(&template, SpecialTokens::default()).expect("a template");
        let accommodation = Shown::of(&template).accommodation();
        let conversation = Conversation { messages: vec![Message::user("Hi")], ..Conversation::default() };
        let shown = accommodation.apply(&conversation, None);
        assert!(accommodation.lists_parts);
        assert_eq!(template.render(&shown, &RenderOptions::default()).as_deref(), Ok("[user]Hi"));
    }

    /// What the templates of the fixture families print for an image.
    const FAMILIES: [(&str, &str); 17] = [
        ("gemma3", "<start_of_image>"),
        ("gemma4", "<|image|>"),
        ("gemma4-e", "<|image|>"),
        ("gemma4-moe", "<|image|>"),
        ("gemma4-unified", "<|image|>"),
        ("glm4.1v", "<|image|>"),
        ("idefics3", "<image>"),
        ("internvl3", "<IMG_CONTEXT>"),
        ("lfm2-vl", "<image>"),
        ("ministral3", "[IMG]"),
        ("mistral3", "[IMG]"),
        ("qwen2.5-vl", "<|image_pad|>"),
        ("qwen3-vl", "<|image_pad|>"),
        ("qwen3-vl-moe", "<|image_pad|>"),
        ("qwen3.5", "<|image_pad|>"),
        ("qwen3.5-moe", "<|image_pad|>"),
        ("smolvlm", "<image>"),
    ];

    #[test]
    fn prompts_are_the_references_texts() {
        let root = std::env::var_os("LLMCTL_FIXTURES").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures"),
            std::path::PathBuf::from,
        );
        if !root.join("vision").is_dir() {
            eprintln!("skipped: no fixtures at {}", root.display());
            return;
        }
        for (family, printed) in FAMILIES {
            let folder = root.join("vision").join(family);
            let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("a fixture");
            let golden: Value = serde_json::from_str(&read("golden.json")).expect("JSON");
            let template = ChatTemplate::new(&read("chat_template.jinja"), SpecialTokens::default())
                .expect("a template");
            let images = ImageMarkup::of(&template, printed, printed);
            let accommodation = Shown::of(&template).accommodation();
            for (name, prompt) in golden["prompts"].as_object().expect("prompts by name") {
                let message = |message: &Value| {
                    let part = |part: &Value| if part["type"] == "image" { photo(1) } else { part.clone() };
                    let role = Role::from(message["role"].as_str().expect("a role"));
                    match &message["content"] {
                        Value::String(text) => Message::new(role, text.as_str()),
                        parts => said(role, parts.as_array().expect("parts").iter().map(part).collect()),
                    }
                };
                let messages = prompt["messages"].as_array().expect("messages").iter().map(message).collect();
                let conversation = Conversation { messages, ..Conversation::default() };
                let now = DateTime::from_unix(0);
                let options = RenderOptions { add_generation_prompt: true, now, ..RenderOptions::default() };
                let text = template.render(&accommodation.apply(&conversation, Some(&images)), &options);
                assert_eq!(text.as_deref().ok(), prompt["text"].as_str(), "{family} {name}");
            }
        }
    }
}
