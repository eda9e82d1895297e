//! Images that a user or a tool gives: files and bytes to parts of messages, and their tags.
//!
//! A conversation has a part with the hash of each image; the files travel beside it, in an [`ImageSet`].

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::cli::error::CommandError;
use crate::cli::places::typed_path;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::counted;
use llmctl_engine::session::store::{SavedSession, percent_decoded};
use llmctl_image::{ImageError, ImageFile, ImageHash, ImageLimits, ImageSet, inspect};
use llmctl_models::images::VisionSpec;
use llmctl_template::{Content, ImageRef, Message, text_part};

/// Place of an image in a text.
const PLACE: &str = "{image}";

/// Bytes of a file that tell whether it is an image.
const HEAD_BYTES: u64 = 1 << 20;

/// An image for a message, with its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenImage {
    pub image: ImageRef,
    pub file: Arc<ImageFile>,
}

impl GivenImage {
    /// Reads a file.
    ///
    /// # Errors
    /// `NotFound` for what is not there or is no file, `BadData` for what is no image, with the reason.
    pub fn open(path: &Path) -> Result<Self, CommandError> {
        let unreadable = |error| CommandError::reading(path, error);
        if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
            return Err(unreadable(io::Error::other("a folder, not an image file")));
        }
        let most = ImageLimits::default().bytes as u64;
        let mut bytes = Vec::new();
        File::open(path).map_err(unreadable)?.take(most + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Self::of(bytes, name).map_err(|error| CommandError::bad_data(format!("{}: {error}", path.display())))
    }

    /// Decodes an image.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn of(bytes: Vec<u8>, name: Option<String>) -> Result<Self, ImageError> {
        let file = ImageFile::read(bytes.into(), &ImageLimits::default())?;
        let image = ImageRef {
            sha256: file.hash.to_string(),
            width: file.info.width,
            height: file.info.height,
            media_type: file.info.media_type.to_owned(),
            name: name.map(|name| visible(&name).into_owned()),
        };
        Ok(Self { image, file })
    }

    /// Returns how it is shown to the user, with the tokens that it takes in a prompt of the model.
    ///
    /// # Errors
    /// That the model cannot read an image of its size.
    pub fn tag(&self, number: usize, vision: Option<&VisionSpec>) -> Result<String, CommandError> {
        let plan = vision.map(|vision| vision.pixels.plan(self.image.width, self.image.height)).transpose();
        let plan =
            plan.map_err(|error| CommandError::bad_data(format!("{}: {error}", name_of(&self.image))))?;
        let tokens =
            plan.map(|plan| format!(", {}", counted(plan.num_tokens(), "token"))).unwrap_or_default();
        let (name, size) = (name_of(&self.image), size_of(&self.image));
        Ok(format!("[image {number}: {name} {size}{tokens}]"))
    }
}

fn name_of(image: &ImageRef) -> &str {
    image.name.as_deref().unwrap_or(&image.media_type)
}

fn size_of(image: &ImageRef) -> String {
    format!("{}\u{d7}{}", image.width, image.height)
}

/// Returns whether bytes are an image of a format that is read; a text is none.
pub fn is_image(bytes: &[u8]) -> bool {
    let is_text = std::str::from_utf8(bytes).is_ok_and(|text| !text.contains('\0'));
    let limits = ImageLimits { bytes: usize::MAX, ..ImageLimits::default() };
    !is_text && !matches!(inspect(bytes, &limits), Err(ImageError::Format(_)))
}

/// Returns the content of a message: the images before the text, or where it has `{image}`.
///
/// # Errors
/// `Usage` for more or fewer places than images.
pub fn content(images: &[GivenImage], text: String) -> Result<Content, CommandError> {
    if images.is_empty() {
        return Ok(Content::Text(text));
    }
    let texts: Vec<&str> = text.split(PLACE).collect();
    let places = texts.len() - 1;
    if places > 0 && places != images.len() {
        let (places, images) = (counted(places, "place"), counted(images.len(), "image"));
        return Err(CommandError::usage(format!("the prompt has {places} {PLACE}, and there are {images}"))
            .hint(format!("write one {PLACE} for each image, or none: then the images come first")));
    }
    let mut parts = Vec::new();
    if places == 0 {
        parts.extend(images.iter().map(|given| given.image.to_part()));
        parts.extend(text_if_any(&text));
    } else {
        for (at, text) in texts.into_iter().enumerate() {
            parts.extend(text_if_any(text));
            parts.extend(images.get(at).map(|given| given.image.to_part()));
        }
    }
    Ok(Content::Parts(parts))
}

fn text_if_any(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| text_part(text))
}

/// Puts images in the place of their markers in the text of a tool's result.
pub fn marked_content(text: String, images: &[(String, GivenImage)]) -> Content {
    let (mut parts, mut rest) = (Vec::new(), text.as_str());
    for (marker, given) in images {
        let Some((before, after)) = rest.split_once(marker.as_str()) else { continue };
        parts.extend(text_if_any(before));
        parts.push(given.image.to_part());
        rest = after;
    }
    if parts.is_empty() {
        return Content::Text(text);
    }
    parts.extend(text_if_any(rest));
    Content::Parts(parts)
}

/// Returns the image parts of a message.
pub fn parts_of(message: &Message) -> Vec<Value> {
    match &message.content {
        Some(Content::Parts(parts)) => {
            parts.iter().filter(|part| ImageRef::of(part).is_some()).cloned().collect()
        }
        _ => Vec::new(),
    }
}

/// Returns what a content says, with a tag for each image; other parts as they are.
pub fn shown(content: &Content) -> String {
    let part = |part: &Value| match (ImageRef::of(part), part["text"].as_str()) {
        (Some(image), _) => format!("[image: {} {}]\n", name_of(&image), size_of(&image)),
        (None, Some(text)) if part["type"] == "text" => text.to_owned(),
        (None, _) => part.to_string(),
    };
    match content {
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => parts.iter().map(part).collect(),
    }
}

/// Returns a set of the images' files.
pub fn set_of<'a>(images: impl IntoIterator<Item = &'a GivenImage>) -> ImageSet {
    let mut set = ImageSet::default();
    images.into_iter().for_each(|given| set.insert(Arc::clone(&given.file)));
    set
}

/// Adds the files of a session's images, for a server that is sent the whole conversation. One that cannot be read stays out.
pub fn add_kept(files: &mut ImageSet, saved: &SavedSession) {
    for hash in saved.named_images() {
        let read = |bytes| ImageFile::read(bytes, &ImageLimits::default()).ok();
        let kept =
            if files.get(&hash).is_some() { None } else { saved.blobs.read(&hash).ok().and_then(read) };
        kept.into_iter().for_each(|file| files.insert(file));
    }
}

/// Puts the images of a message in OpenAI's form: data URLs. An image whose file is not in the set becomes its tag.
pub fn as_data_urls(content: &mut Value, files: &ImageSet) {
    for part in content.as_array_mut().into_iter().flatten() {
        let Some(image) = ImageRef::of(part) else { continue };
        let file = ImageHash::from_hex(&image.sha256).and_then(|hash| files.get(&hash));
        *part = match file {
            Some(file) => url_part(file.info.media_type, &file.bytes),
            None => text_part(&shown(&vec![part.clone()].into())),
        };
    }
}

/// Returns OpenAI's part of an image, with its bytes.
pub fn url_part(media_type: &str, bytes: &[u8]) -> Value {
    let url = format!("data:{media_type};base64,{}", STANDARD.encode(bytes));
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// Takes the lines out of a message that are paths of image files: as a terminal writes a file that is dropped on it, quoted,
/// with backslashes or as a `file:` URL.
pub fn take_paths(message: &str) -> (Vec<PathBuf>, String) {
    let (mut paths, mut rest) = (Vec::new(), Vec::new());
    for line in message.lines() {
        match image_path(line.trim()) {
            Some(path) => paths.push(path),
            None => rest.push(line),
        }
    }
    if paths.is_empty() { (paths, message.to_owned()) } else { (paths, rest.join("\n").trim().to_owned()) }
}

fn image_path(line: &str) -> Option<PathBuf> {
    const MOST_BYTES: usize = 4096;
    if line.is_empty() || line.len() > MOST_BYTES {
        return None;
    }
    let path = match line.strip_prefix("file://") {
        Some(url) => {
            let path = percent_decoded(url.strip_prefix("localhost").unwrap_or(url))?;
            String::from_utf8(path).ok()?.into()
        }
        None => typed_path(line),
    };
    if !path.is_file() {
        return None;
    }
    let file = File::open(&path).ok()?;
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    is_image(&head).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of two pixels.
    const BMP: [u8; 62] = {
        let mut file = [0; 62];
        let head = [
            b'B', b'M', 62, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24,
            0,
        ];
        let mut at = 0;
        while at < head.len() {
            file[at] = head[at];
            at += 1;
        }
        file
    };

    fn given(name: &str) -> GivenImage {
        GivenImage::of(BMP.to_vec(), Some(name.to_owned())).expect("a picture")
    }

    fn types(content: &Content) -> Vec<&str> {
        let Content::Parts(parts) = content else { panic!("{content:?}") };
        parts.iter().map(|part| part["text"].as_str().or(part["name"].as_str()).expect("a name")).collect()
    }

    #[test]
    fn images_come_first_unless_the_text_has_places() {
        let two = [given("a"), given("b")];
        let of = |text: &str| content(&two, text.to_owned());
        assert_eq!(types(&of("why?").expect("no places")), ["a", "b", "why?"]);
        assert_eq!(
            types(&of("is {image} like {image}?").expect("two places")),
            ["is ", "a", " like ", "b", "?"]
        );
        let error = of("only {image}").expect_err("one place").to_string();
        assert!(error.contains("1 place {image}") && error.contains("2 images"), "{error}");
        assert_eq!(content(&[], "{image}".to_owned()).ok(), Some(Content::Text("{image}".to_owned())));
    }

    #[test]
    fn images_of_a_result_stand_at_their_markers() {
        let images = [("[x]".to_owned(), given("a")), ("[x]".to_owned(), given("b"))];
        assert_eq!(types(&marked_content("one\n[x]\n[x]".to_owned(), &images)), ["one\n", "a", "\n", "b"]);
        let cut = marked_content("cut".to_owned(), &images);
        assert_eq!(cut, Content::Text("cut".to_owned()));
    }

    #[test]
    fn a_transcript_has_tags() {
        let said = content(&[given("a.bmp")], "why?".to_owned()).expect("a content");
        assert_eq!(shown(&said), "[image: a.bmp 2\u{d7}1]\nwhy?");
        let mut sent = json!([given("a").image.to_part(), {"type": "text", "text": "why?"}]);
        let mut unknown = sent.clone();
        as_data_urls(&mut sent, &set_of([&given("a")]));
        let url = sent[0]["image_url"]["url"].as_str().expect("a URL");
        assert!(url.starts_with("data:image/bmp;base64,Qk0+"), "{url}");
        as_data_urls(&mut unknown, &ImageSet::default());
        assert_eq!(unknown[0], json!({"type": "text", "text": "[image: a 2\u{d7}1]\n"}));
    }

    #[test]
    fn a_line_of_its_own_that_is_the_path_of_an_image_is_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let (image, note) = (folder.path().join("a b.bmp"), folder.path().join("note.txt"));
        std::fs::write(&image, BMP).expect("written");
        std::fs::write(&note, "BM is a text").expect("written");
        let path = image.display().to_string();
        let url = format!("file://{}", path.replace(' ', "%20"));
        let mut forms = vec![path.clone(), format!("'{path}'"), format!(" \"{path}\" "), url];
        if cfg!(unix) {
            forms.push(path.replace(' ', "\\ "));
        }
        for form in forms {
            assert_eq!(take_paths(&form), (vec![image.clone()], String::new()), "{form}");
            let said = take_paths(&format!("{form}\nwhat is it?"));
            assert_eq!(said, (vec![image.clone()], "what is it?".to_owned()), "{form}");
        }
        for text in [format!("see {path}"), note.display().to_string(), "a\n\nb ".to_owned(), String::new()] {
            assert_eq!(take_paths(&text), (Vec::new(), text.clone()));
        }
    }

    #[test]
    fn what_is_no_image_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = GivenImage::open(folder.path()).expect_err("a folder").to_string();
        assert!(error.contains("not an image file"), "{error}");
        let missing = GivenImage::open(&folder.path().join("x.png")).expect_err("missing");
        assert!(missing.to_string().contains("x.png"), "{missing}");
        let text = folder.path().join("note.png");
        std::fs::write(&text, "text").expect("written");
        let error = GivenImage::open(&text).expect_err("a text");
        assert!(error.kind == crate::cli::error::Kind::BadData && error.to_string().contains("note.png"));
    }
}
