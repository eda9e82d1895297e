//! Promise: a session moves to another machine in one file, whole and warm; a file that is damaged, cut, foreign or hostile changes
//! nothing; and a kill leaves no session or the whole one.

use std::fs;
use std::io::Write;

use llmctl_engine::session::store::{
    Archive, Blobs, BranchReason, Import, Imported, SavedSession, SessionWriter, StoredTurn,
};
use llmctl_image::{ImageFile, ImageHash, ImageInfo, ImageSet, Picture};
use llmctl_models::images::{ImageKey, ImageRows, ImageSpan};
use llmctl_models::kv::disk::{DiskPageKey, ImageFolder, PageLabel, Saving, file_name, names};
use llmctl_models::load::{Fingerprint, adopt_pages, fingerprint};
use llmctl_models::model::arch::parse_config;
use llmctl_template::ImageRef;
use sha2::{Digest, Sha256};

use crate::common::prelude::*;

const LIMIT: u64 = 1 << 30;
const KEY: ImageKey = ImageKey([3; 32]);

fn model() -> ModelFingerprint {
    ModelFingerprint {
        name: "m".to_owned(),
        fingerprint: "f".to_owned(),
        reference: Some("/m.gguf".to_owned()),
    }
}

/// A fingerprint of this build.
fn computed_with() -> Fingerprint {
    let files = ModelFiles::open(&ModelSource::Folder(parity_folder().join("qwen3"))).expect("opens");
    let config = parse_config(files.config_reader()).expect("described").expect("native").config;
    fingerprint(&files, &config, 2048, &exact()).expect("readable")
}

/// A home folder: its sessions and its KV.
struct Home {
    folder: TempDir,
    store: SessionStore,
}

impl Home {
    fn new() -> Self {
        let folder = TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path().join("sessions")).with_kv(Some(folder.path().join("kv")));
        Self { folder, store }
    }

    fn kv(&self) -> PathBuf {
        self.folder.path().join("kv")
    }

    /// Puts the full pages of a sequence on disk, as the engine does.
    fn save_pages(&self, tokens: &llmctl_models::kv::TokenBuf, model: &Fingerprint) {
        let store = DiskStore::open(DiskConfig {
            root: self.kv(),
            limit_bytes: LIMIT,
            fingerprint: model.hex.clone(),
            description: model.facts.clone(),
            queue_bytes: 1 << 20,
            vault: None,
        });
        let (store, mut parent) = (store.expect("opened"), None);
        for (number, name) in names(tokens).enumerate() {
            let tokens = tokens.as_tokens().page(number).expect("full").into_owned().into();
            let label =
                PageLabel { key: DiskPageKey { name, group: 0 }, parent, tokens, depth: number as u32 };
            assert_ne!(store.save(label, vec![number as u8; 200]), Saving::Dropped);
            parent = Some(name);
        }
        assert!(store.flush(Duration::from_secs(60)));
    }

    /// All files, but for locks, tags and lists of what is there.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn below(folder: &Path, root: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                match path.is_dir() {
                    true => below(&path, root, files),
                    false => {
                        let short = path.strip_prefix(root).expect("below").to_owned();
                        files.insert(short, fs::read(&path).expect("readable"));
                    }
                }
            }
        }
        let mut files = BTreeMap::new();
        below(self.folder.path(), self.folder.path(), &mut files);
        files
    }

    fn pages(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        self.files().into_iter().filter(|(path, _)| path.extension().is_some_and(|end| end == "kv")).collect()
    }

    fn import(&self, archive: &[u8], import: Import<'_>) -> Result<Imported, Error> {
        let folder = TempDir::new().expect("a scratch folder");
        let path = folder.path().join("archive");
        fs::write(&path, archive).expect("written");
        let mut archive = Archive::open(&path, File::open(&path).expect("there"))?;
        self.store.import(&mut archive, import)
    }

    fn turns(&self, session: &str) -> Vec<StoredTurn> {
        self.read(session).turns.iter().map(|saved| saved.turn.clone()).collect()
    }

    fn read(&self, session: &str) -> SavedSession {
        self.store.read(&name(session)).expect("reads")
    }

    fn pack(&self, session: &str) -> Vec<u8> {
        let mut archive = Vec::new();
        let package =
            self.store.pack(&name(session), |_, _| Some(vec!["weights".to_owned()])).expect("packed");
        let num_bytes = package.write(&mut archive).expect("memory takes it");
        assert_eq!(num_bytes, archive.len() as u64);
        archive
    }
}

fn plain() -> Import<'static> {
    Import { name: None, kv_limit: LIMIT }
}

fn turn(kept: usize, added: Vec<u32>) -> StoredTurn {
    stored_turn(["?", "!"], kept, added, vec![])
}

/// A turn with an image among its rows.
fn seeing(content: &[u8]) -> (StoredTurn, Blobs) {
    let hash = ImageHash::of(content);
    let (width, height, media_type) = (2, 1, "image/png");
    let image =
        ImageRef { sha256: hash.to_string(), width, height, media_type: media_type.to_owned(), name: None };
    let mut files = ImageSet::default();
    files.insert(Arc::new(ImageFile {
        hash,
        bytes: content.into(),
        info: ImageInfo { media_type, width, height },
        picture: Picture { width, height, rgb: vec![0; 6] },
    }));
    let mut blobs = Blobs::default();
    blobs.keep(&files);
    let question = Message { content: Some(Content::Parts(vec![image.to_part()])), ..Message::user("") };
    let span = ImageSpan { rows: 1..3, key: KEY, first: 0, grid: [1, 2] };
    let turn = StoredTurn {
        messages: vec![question, Message::assistant("a dot")],
        prompt_tail: (0..100).collect(),
        spans: vec![span],
        ..turn(0, Vec::new())
    };
    (turn, blobs)
}

/// A home with session "trip" of two turns with an image and pages, and a branch of one turn with a page of its own.
fn trip() -> Home {
    let home = Home::new();
    let mut writer = home.store.create(&name("trip"), &model()).expect("created");
    let (first, blobs) = seeing(b"pixels");
    writer.take_blobs(&blobs);
    writer.append(&model(), &first).expect("saved");
    let second: fn(u32) -> StoredTurn = |text| turn(100, (text * 1000..text * 1000 + 60).collect());
    writer.append(&model(), &second(1)).expect("saved");
    save(&home, &writer);
    drop(writer.branch(None, BranchReason::Edit).expect("a branch"));
    writer.append_after(1, &model(), &second(2)).expect("edited");
    save(&home, &writer);
    let rows = ImageRows { width: 2, embeddings: vec![0.5; 4], deep: vec![] };
    ImageFolder::new(&home.kv(), LIMIT).write(KEY, &rows).expect("written");
    home
}

fn save(home: &Home, writer: &SessionWriter) {
    home.save_pages(&writer.saved().tokens_of(&model()).expect("the model's"), &computed_with());
}

#[test]
fn a_session_arrives_with_its_branches_images_and_pages_and_nothing_else() {
    let (from, to) = (trip(), Home::new());
    let mut other = from.store.create(&name("other"), &model()).expect("created");
    other.append(&model(), &turn(0, (5000..5100).collect())).expect("saved");
    let before = from.pages();
    save(&from, &other);
    let archive = from.pack("trip");
    let imported = to.import(&archive, plain()).expect("imported");
    assert_eq!((imported.branches, imported.pages.notices), (vec![name("trip~1")], vec![]));
    // Three pages before the turns part, two of each.
    assert_eq!((imported.pages.num_pages, imported.pages.num_removed, to.pages()), (7, 0, before));
    for session in ["trip", "trip~1"] {
        assert_eq!(to.turns(session), from.turns(session));
        let hash = ImageHash::of(b"pixels");
        assert_eq!(to.read(session).blobs.read(&hash).as_deref(), Ok(&b"pixels"[..]));
    }
    assert_eq!(to.read("trip").id, from.read("trip").id);
    assert_eq!(to.store.branches(&name("trip")).expect("listed").len(), 1);
    assert!(ImageFolder::new(&to.kv(), LIMIT).read(KEY, 2).is_some(), "the image is not encoded again");
    assert!(!to.store.exists(&name("other")));
    // The pages are those of the session: they go with it.
    for session in ["trip", "trip~1"] {
        to.store.remove(&name(session)).expect("removed");
    }
    assert_eq!(to.pages(), BTreeMap::new());
}

#[test]
fn a_name_that_is_taken_stays_and_another_name_is_another_session() {
    let home = trip();
    let archive = home.pack("trip");
    let before = home.files();
    let refused = home.import(&archive, plain()).expect_err("the name is taken");
    assert!(matches!(refused, Error::InvalidParameter { name: "session", .. }), "{refused}");
    assert_eq!(home.files(), before);
    let copy = name("copy");
    let imported = home.import(&archive, Import { name: Some(&copy), ..plain() }).expect("imported");
    assert_eq!(imported.branches, [name("copy~1")]);
    assert_ne!(home.read("copy").id, home.read("trip").id);
    assert_eq!(home.store.session_of(&name("copy~1")).expect("reads"), Some(copy));
    assert_eq!(home.store.session_of(&name("trip~1")).expect("reads"), Some(name("trip")));
    assert_eq!(home.turns("copy"), home.turns("trip"));
    // A branch alone becomes a session if it gets a name of its own.
    let oslo = name("oslo");
    home.import(&home.pack("trip~1"), Import { name: Some(&oslo), ..plain() }).expect("imported");
    assert_eq!((home.read("oslo").branch(), home.turns("oslo")), (None, home.turns("trip~1")));
    let owned = home.store.of_owner("anna");
    let folder = TempDir::new().expect("a scratch folder");
    fs::write(folder.path().join("f"), &archive).expect("written");
    let path = folder.path().join("f");
    let mut opened = Archive::open(&path, File::open(&path).expect("there")).expect("sound");
    owned.import(&mut opened, plain()).expect("imported");
    assert_eq!(owned.read(&name("trip")).expect("reads").owner.as_deref(), Some("anna"));
}

#[test]
fn every_changed_byte_and_every_cut_is_refused_and_nothing_is_written() {
    let (archive, to) = (trip().pack("trip"), Home::new());
    let folder = TempDir::new().expect("a scratch folder");
    let path = folder.path().join("archive");
    let is_refused = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("written");
        let opened = Archive::open(&path, File::open(&path).expect("there")).map(drop);
        matches!(opened, Err(Error::Store(_)))
    };
    assert!(!is_refused(&archive), "sound");
    for at in 0..archive.len() {
        let mut changed = archive.clone();
        changed[at] ^= 1 << (at % 8);
        assert!(is_refused(&changed), "byte {at} of {}", archive.len());
    }
    for len in (0..archive.len()).step_by(7) {
        assert!(is_refused(&archive[..len]), "{len} of {} bytes", archive.len());
    }
    assert!(is_refused(&[&archive[..], b"x"].concat()) && is_refused(&[b"x", &archive[..]].concat()));
    assert!(is_refused(b"") && is_refused(&[0; 4096]) && is_refused(include_bytes!("fuzz/transcript.jsonl")));
    to.import(&archive[1..], plain()).expect_err("cut");
    assert_eq!(to.files(), BTreeMap::new());
}

/// A part of a file that somebody made by hand.
#[derive(Clone)]
struct Part {
    name: String,
    kind: tar::EntryType,
    bytes: Vec<u8>,
}

/// The parts of an archive; the first is the manifest.
fn parts(archive: &[u8]) -> Vec<Part> {
    let tar = zstd::decode_all(&archive[..archive.len() - 56]).expect("zstd");
    let mut archive = tar::Archive::new(&tar[..]);
    let part = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
        let mut entry = entry.expect("an entry");
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("in memory");
        let name = entry.path().expect("a path").display().to_string();
        Part { name, kind: entry.header().entry_type(), bytes }
    };
    archive.entries().expect("a tar archive").map(part).collect()
}

/// Makes an archive of parts, with a sound checksum.
fn sealed(parts: &[Part], end: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for part in parts {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(part.kind);
        header.set_size(part.bytes.len() as u64);
        header.as_mut_bytes()[..part.name.len()].copy_from_slice(part.name.as_bytes());
        header.set_cksum();
        tar.append(&header, &part.bytes[..]).expect("in memory");
    }
    let tar = [tar.into_inner().expect("in memory"), end.to_vec()].concat();
    let mut archive = zstd::encode_all(&tar[..], 1).expect("in memory");
    let hash = Sha256::digest(&archive);
    archive.extend_from_slice(b"\x50\x2a\x4d\x18\x30\x00\x00\x00llmctl archive 1");
    archive.extend_from_slice(&hash);
    archive
}

/// Lists a part anew in the manifest, as `listed`, with its true size and checksum.
fn relist(parts: &mut [Part], at: usize, listed: &str) {
    let sha256 = ImageHash::of(&parts[at].bytes).to_string();
    let entry = json!({"name": listed, "bytes": parts[at].bytes.len(), "sha256": sha256});
    edit(parts, |manifest| manifest["parts"][at - 1] = entry);
}

fn edit(parts: &mut [Part], change: impl FnOnce(&mut Value)) {
    let mut manifest = serde_json::from_slice(&parts[0].bytes).expect("JSON");
    change(&mut manifest);
    parts[0].bytes = manifest.to_string().into_bytes();
}

#[test]
fn hostile_files_with_sound_checksums_are_refused_by_what_is_wrong() {
    let sound = parts(&trip().pack("trip"));
    assert_eq!(sound[1].name, "sessions/0.jsonl");
    let last = sound.len() - 1;
    let to = Home::new();
    let refused = |change: &dyn Fn(&mut Vec<Part>), expected: &str| {
        let mut parts = sound.clone();
        change(&mut parts);
        let error = to.import(&sealed(&parts, &[]), plain()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{expected:?} is not in {error:?}");
    };
    for path in ["../../evil", "/tmp/evil", "sessions/../../evil", "kv/0/../evil.kv", "images/evil"] {
        refused(&|parts| relist(parts, last, path), "is no name of a part");
        refused(&|parts| parts[last].name = path.to_owned(), "is in its place");
    }
    for kind in
        [tar::EntryType::Symlink, tar::EntryType::Link, tar::EntryType::Directory, tar::EntryType::Fifo]
    {
        refused(&|parts| parts[last].kind = kind, "is in its place");
    }
    let renamed =
        Part { name: "././@LongLink".to_owned(), kind: tar::EntryType::GNULongName, bytes: b"x".to_vec() };
    refused(&|parts| parts.insert(last, renamed.clone()), "is in its place");
    refused(&|parts| parts.truncate(last), "cannot be unpacked");
    refused(&|parts| parts.push(parts[last].clone()), "not those of its manifest");
    refused(&|parts| parts[last].bytes[50] ^= 1, "checksum is another");
    refused(&|parts| parts[last].bytes.truncate(100), "checksum is another");
    refused(&|parts| parts[last].bytes.push(0), "more than");
    refused(
        &|parts| edit(parts, |manifest| manifest["schema"] = "llmctl.session-archive.v9".into()),
        "written by another",
    );
    refused(
        &|parts| edit(parts, |manifest| manifest["parts"][0]["bytes"] = (1u64 << 40).into()),
        "bytes of content in a file",
    );
    refused(
        &|parts| edit(parts, |manifest| manifest["parts"][0]["bytes"] = u64::MAX.into()),
        "bytes of content in a file",
    );
    refused(
        &|parts| edit(parts, |manifest| manifest["models"][0]["made_of"]["kv_type"] = "f64".into()),
        "not that of its facts",
    );
    refused(&|parts| edit(parts, |manifest| manifest["sessions"][0]["name"] = "../x".into()), "use letters");
    refused(&|parts| edit(parts, |manifest| manifest["sessions"][0]["turns"] = 3.into()), "turns instead of");
    refused(&|parts| edit(parts, |manifest| manifest["sessions"] = json!([])), "neither a session");
    refused(
        &|parts| edit(parts, |manifest| manifest["parts"].as_array_mut().expect("a list").reverse()),
        "not in order",
    );
    refused(&|parts| parts[0].bytes.truncate(100), "manifest.json");
    let transcript = |parts: &mut Vec<Part>| {
        parts[1].bytes[40] ^= 1;
        relist(parts, 1, "sessions/0.jsonl");
    };
    refused(&transcript, "line 1");
    // Another conversation, to which neither image nor pages belong.
    let foreign = |parts: &mut Vec<Part>| {
        let home = Home::new();
        let mut writer = home.store.create(&name("trip"), &model()).expect("created");
        writer.append(&model(), &turn(0, (7000..7100).collect())).expect("saved");
        drop(writer);
        parts[1].bytes = fs::read(home.folder.path().join("sessions/trip/transcript.jsonl")).expect("there");
        relist(parts, 1, "sessions/0.jsonl");
        edit(parts, |manifest| manifest["sessions"][0]["turns"] = 1.into());
    };
    refused(&foreign, "no branch of the session");
    let alone = |parts: &mut Vec<Part>| {
        foreign(parts);
        parts.remove(2);
        edit(parts, |manifest| {
            manifest["parts"].as_array_mut().expect("a list").remove(1);
            manifest["sessions"].as_array_mut().expect("a list").truncate(1);
        });
    };
    refused(&alone, "no image of the session");
    let page = |change: fn(&mut Part)| {
        move |parts: &mut Vec<Part>| {
            let listed = parts[last].name.clone();
            change(&mut parts[last]);
            relist(parts, last, &listed);
        }
    };
    refused(&page(|part| part.bytes[300] ^= 1), "the checksum is wrong");
    refused(&page(|part| part.bytes = Vec::new()), "too short");
    assert!(to.import(&sealed(&sound, &[1]), plain()).is_err(), "more behind the last part");
    assert!(to.import(&sealed(&sound, &vec![0; 2 << 20]), plain()).is_err(), "a great many zeros");
    assert_eq!(to.files(), BTreeMap::new());
    to.import(&sealed(&sound, &[]), plain()).expect("sound as it is");
}

#[test]
fn pages_that_do_not_fit_are_left_out_from_the_end_and_so_are_those_of_another_build() {
    let archive = trip().pack("trip");
    let of = |kv_limit| {
        let to = Home::new();
        let imported = to.import(&archive, Import { kv_limit, ..plain() }).expect("imported");
        assert_eq!(to.turns("trip").len(), 2, "whole");
        (imported.pages.num_pages, to.pages().len(), imported.pages.notices)
    };
    let page_bytes = 200 + 128 + 100 + 44; // payload, tokens, header, words of the image
    let (taken, there, notices) = of(3 * page_bytes * 8 / 7);
    assert_eq!((taken, there, notices.len()), (3, 3, 1), "{notices:?}");
    assert!(notices[0].contains("4 pages of KV are left out"), "{notices:?}");
    let (taken, there, notices) = of(0);
    assert_eq!((taken, there), (0, 0));
    assert!(notices[0].contains("none is kept on disk"), "{notices:?}");
    let mut older = parts(&archive);
    edit(&mut older, |manifest| {
        manifest["models"][0]["made_of"]["llmctl"] = "0.0.1".into();
        let facts = manifest["models"][0]["made_of"].clone();
        manifest["models"][0]["fingerprint"] = Fingerprint::of(facts).hex.into();
    });
    let to = Home::new();
    let imported = to.import(&sealed(&older, &[]), plain()).expect("imported, cold");
    assert_eq!((imported.pages.num_pages, to.pages().len()), (0, 0));
    assert!(imported.pages.notices[0].contains(r#"llmctl is "0.0.1" there"#), "{:?}", imported.pages.notices);
}

#[test]
fn pages_become_those_of_a_model_with_the_same_weights_and_of_no_other() {
    let archive = trip().pack("trip");
    let theirs = computed_with();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut facts = theirs.facts.clone();
        change(&mut facts);
        Fingerprint::of(facts)
    };
    let later = changed(&|facts| facts["weights"][0]["modified_ns"] = "1".into());
    let other_type = changed(&|facts| facts["kv_type"] = "another".into());
    let weights = |hash: &str| Some(vec![hash.to_owned()]);
    let to = Home::new();
    to.import(&archive, plain()).expect("imported");
    let of_model = |model: &Fingerprint| {
        to.pages().keys().filter(|path| path.starts_with(Path::new("kv").join(&model.hex))).count()
    };
    let unread = || -> Option<Vec<String>> { panic!("the weights are not read for another model") };
    assert_eq!(adopt_pages(&to.kv(), &other_type, unread).expect("nothing fails"), 0);
    assert_eq!(adopt_pages(&to.kv(), &later, || None).expect("nothing fails"), 0);
    // A page that is here already stays as it is.
    let there: Vec<PathBuf> = to.pages().into_keys().collect();
    let own = Path::new("kv")
        .join(&later.hex)
        .join(there[0].strip_prefix(format!("kv/{}", theirs.hex)).expect("theirs"));
    fs::create_dir_all(to.folder.path().join(&own).parent().expect("a folder")).expect("created");
    fs::write(to.folder.path().join(&own), "own").expect("written");
    assert_eq!(adopt_pages(&to.kv(), &later, || weights("weights")).expect("moved"), 7);
    assert_eq!((of_model(&theirs), of_model(&later)), (0, 7));
    assert_eq!(fs::read(to.folder.path().join(&own)).expect("there"), b"own");
    assert!(!to.kv().join(&theirs.hex).exists());
    assert_eq!(adopt_pages(&to.kv(), &later, unread).expect("nothing to do"), 0);
    // Other weights between the samples.
    let to = Home::new();
    to.import(&archive, plain()).expect("imported");
    assert_eq!(adopt_pages(&to.kv(), &later, || weights("other")).expect("nothing fails"), 0);
    assert_eq!(adopt_pages(&to.kv(), &later, unread).expect("asked once"), 0);
    assert_eq!(to.pages().len(), 7, "the model that computed them may come");
    // Where the model's own pages are, what is imported joins them and no other model takes them.
    let home = trip();
    home.import(&archive, Import { name: Some(&name("copy")), ..plain() }).expect("imported");
    assert_eq!(adopt_pages(&home.kv(), &later, unread).expect("nothing to do"), 0);
}

const CHILD_FOLDER: &str = "LLMCTL_TEST_ARCHIVES";

#[test]
fn prompts_computed_ahead_arrive_pinned_once_and_whole() {
    let (from, to) = (trip(), Home::new());
    let tokens = from.read("trip").tokens_of(&model()).expect("computed");
    let pages: Vec<_> = names(&tokens).collect();
    let record = |name: &str, pages: &[_]| {
        llmctl_models::kv::disk::WarmPrompt::new(name.to_owned(), "/m.gguf".to_owned(), 7, pages.to_vec())
    };
    let prompts =
        [record("whole", &pages), record("half", &pages[..1])].map(|prompt| prompt.expect("a prompt"));
    let package = from.store.pack_prompts(&prompts, |_, _| Some(vec!["weights".to_owned()])).expect("packed");
    let mut bytes = Vec::new();
    package.write(&mut bytes).expect("memory takes it");
    let path = to.folder.path().join("archive");
    let open = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("written");
        Archive::open(&path, File::open(&path).expect("there"))
    };
    let mut archive = open(&bytes).expect("sound");
    assert_eq!((archive.prompts(), archive.num_pages()), (&prompts[..], pages.len()));
    let error = to.store.import(&mut archive, plain()).expect_err("no session").to_string();
    assert!(error.contains("`llmctl warm FILE` takes it"), "{error}");
    let error = to.store.import_prompts(&mut archive, 0).expect_err("no room").to_string();
    assert!(error.contains("no KV is kept on disk here"), "{error}");
    assert!(to.files().keys().all(|path| path.ends_with("archive")), "{:?}", to.files().keys());
    let imported = to.store.import_prompts(&mut archive, LIMIT).expect("imported");
    let all = from.pages();
    assert_eq!((imported.num_pages, to.pages().len()), (pages.len(), pages.len()));
    assert!(to.pages().iter().all(|(path, bytes)| all.get(path) == Some(bytes)));
    assert_eq!(
        llmctl_models::kv::disk::WarmPrompt::read_all(&to.kv()).0,
        [prompts[1].clone(), prompts[0].clone()]
    );
    let pinned = llmctl_models::kv::disk::pinned_bytes(&to.kv()).expect("read");
    assert_eq!(pinned, to.pages().values().map(|page| page.len() as u64).sum::<u64>());
    let again = to.store.import_prompts(&mut archive, LIMIT).expect("there already");
    assert_eq!(again.num_pages, 0);
    let inner = file_name(DiskPageKey { name: pages[1], group: 0 });
    let lost =
        to.pages().into_keys().find(|path| path.ends_with(&inner)).expect("a page that ends no prompt");
    assert_ne!(pages.last(), Some(&pages[1]));
    fs::remove_file(to.folder.path().join(lost)).expect("lost");
    to.store.import_prompts(&mut archive, LIMIT).expect("imported");
    assert_eq!(to.pages().len(), pages.len(), "it is there again");
    #[cfg(unix)]
    {
        let pipe = to.kv().join("warm/pipe.json");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
        let faults = llmctl_models::kv::disk::WarmPrompt::read_all(&to.kv()).1;
        assert!(faults[0].ends_with("pipe.json: not a regular file"), "{faults:?}");
        fs::remove_file(pipe).expect("removed");
    }
    let session = &mut open(&from.pack("trip")).expect("sound");
    let error = to.store.import_prompts(session, LIMIT).expect_err("a session").to_string();
    assert!(error.contains("`llmctl sessions import FILE` takes it"), "{error}");
    for (name, pages, expected) in [
        ("whole", &pages[..1], "no page of its sessions or prompts"),
        ("other", &pages[..], "no prompt of that number"),
    ] {
        let mut parts = parts(&bytes);
        assert_eq!(parts[1].name, "prompts/0.json");
        parts[1].bytes = record(name, pages).expect("a prompt").to_json();
        relist(&mut parts, 1, "prompts/0.json");
        let error = open(&sealed(&parts, &[])).err().expect("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Not a test of its own: the process that the test below kills.
#[test]
fn child_that_imports_and_exports() {
    let Some(folder) = std::env::var_os(CHILD_FOLDER).map(PathBuf::from) else { return };
    let store = SessionStore::new(folder.join("sessions")).with_kv(Some(folder.join("kv")));
    writeln!(std::io::stdout(), "\nbegun").expect("a pipe");
    for round in 0.. {
        let path = folder.join("in");
        let mut archive = Archive::open(&path, File::open(&path).expect("there")).expect("sound");
        let copy = name(&format!("copy{round}"));
        if !store.exists(&copy) {
            store.import(&mut archive, Import { name: Some(&copy), ..plain() }).expect("imported");
        }
        let package = store.pack(&copy, |_, _| None).expect("packed");
        let (unfinished, mut file) =
            llmctl_base::private_files::UnfinishedFile::create_private(&folder.join("out")).expect("created");
        package.write(&mut file).expect("written");
        unfinished.finish(&file).expect("named");
    }
}

#[test]
fn a_kill_leaves_no_session_or_the_whole_one_and_no_file_that_is_cut() {
    let (from, to) = (trip(), Home::new());
    let archive = from.pack("trip");
    fs::write(to.folder.path().join("in"), &archive).expect("written");
    let mut random = 1u64;
    for round in 0..12 {
        let (mut child, mut lines) = child_of_test(
            "session_archive::child_that_imports_and_exports",
            (CHILD_FOLDER, to.folder.path()),
        );
        assert!(lines.any(|line| line == "begun"), "round {round}");
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 60_000));
        let out = to.folder.path().join("out");
        // Once it comes to the end.
        while round == 0 && !out.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().expect("killed");
        child.wait().expect("gone");
        for listed in to.store.list().expect("listed") {
            let parts = listed.name.as_str().split_once('~');
            let original = if parts.is_some() { "trip~1" } else { "trip" };
            assert_eq!(
                to.turns(listed.name.as_str()),
                from.turns(original),
                "round {round}: {}",
                listed.name
            );
            let hash = ImageHash::of(b"pixels");
            assert!(to.read(listed.name.as_str()).blobs.read(&hash).is_ok(), "round {round}");
            let branches = to.store.branches(&listed.name).expect("listed").len();
            assert!(
                parts.is_some() || branches == 1,
                "round {round}: {} has {branches} branches",
                listed.name
            );
        }
        if let Ok(file) = File::open(&out) {
            Archive::open(&out, file).expect("whole");
        }
    }
}

#[test]
fn a_stream_is_read_once_and_leaves_nothing_behind() {
    let (archive, to) = (trip().pack("trip"), Home::new());
    let file = to.store.spooled(&mut &archive[..]).expect("spooled");
    let mut opened = Archive::open(Path::new("-"), file).expect("sound");
    assert!(!to.files().keys().any(|path| path.starts_with("sessions")), "{:?}", to.files().keys());
    to.store.import(&mut opened, plain()).expect("imported");
    assert_eq!(to.turns("trip").len(), 2);
    let mut out = Vec::new();
    out.write_all(&to.pack("trip")).expect("in memory");
    assert_eq!(parts(&out).len(), parts(&archive).len());
}
