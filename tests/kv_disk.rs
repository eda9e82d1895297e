//! KV pages on disk: what comes back is what was saved, or a reason. Killed processes, damaged, cut and missing files, full
//! and read-only disks and other processes cost warmth, never a wrong byte, and nothing panics.

use std::fs::{self, FileTimes};
use std::io::Write;
use std::time::SystemTime;

use llmctl_models::kv::disk::{
    DiskEvent, DiskPageKey, MissingReason, PageLabel, PageName, PageUse, Saving, WarmPrompt, forget,
    pinned_bytes,
};

use crate::common::prelude::*;
#[cfg(unix)]
use crate::common::unprivileged;

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Bytes of a file beside its payload: header, 32 tokens, checksum.
const FRAME: u64 = 96 + 4 * 32 + 4;

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

fn name(n: u32) -> PageName {
    let mut next = random(u64::from(n));
    let mut bytes = [0; 32];
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&next().to_le_bytes()));
    PageName(bytes)
}

/// The `n`th page of a sequence.
fn label(n: u32) -> PageLabel {
    PageLabel {
        key: DiskPageKey { name: name(n), group: (n % 3) as u8 },
        parent: n.checked_sub(1).map(name),
        tokens: (0..32).map(|t| 32 * n + t).collect(),
        depth: n,
    }
}

/// Returns the content of the `n`th page. No two pages have the same content.
fn payload(n: u32, num_bytes: usize) -> Vec<u8> {
    let mut next = random(u64::from(n) ^ 0xABCD);
    (0..num_bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(num_bytes).collect()
}

fn config(root: &Path) -> DiskConfig {
    DiskConfig {
        root: root.to_owned(),
        limit_bytes: 1 << 30,
        fingerprint: "f00d".to_owned(),
        description: json!({"weights": "toy", "kv_type": "f16"}),
        queue_bytes: 256 << 20,
        vault: None,
    }
}

fn open(root: &Path) -> DiskStore {
    DiskStore::open(config(root)).expect("opened")
}

fn save(store: &DiskStore, pages: impl IntoIterator<Item = u32>, num_bytes: usize) {
    for n in pages {
        assert_eq!(store.save(label(n), payload(n, num_bytes)), Saving::Queued, "page {n}");
    }
    assert!(store.flush(LONG), "written in time");
}

/// Saves pages with a store of their own.
fn saved(root: &Path, pages: impl IntoIterator<Item = u32>, num_bytes: usize) {
    let store = open(root);
    save(&store, pages, num_bytes);
    assert_eq!(notices(&store), [""; 0]);
}

fn notices(store: &DiskStore) -> Vec<String> {
    let text = |event| match event {
        DiskEvent::Notice(notice) => Some(notice.to_string()),
        _ => None,
    };
    store.poll().into_iter().filter_map(text).collect()
}

type Answer = Result<Vec<u8>, MissingReason>;

/// Asks for pages and waits for all answers.
fn answers(
    store: &DiskStore,
    labels: impl IntoIterator<Item = PageLabel>,
    num_bytes: usize,
) -> BTreeMap<DiskPageKey, Answer> {
    let mut asked = 0;
    for label in labels {
        store.load(label, num_bytes);
        asked += 1;
    }
    let mut answers = BTreeMap::new();
    while answers.len() < asked {
        assert!(store.wait(LONG), "{} of {asked} answers", answers.len());
        for event in store.poll() {
            let (key, answer) = match event {
                DiskEvent::Loaded { key, bytes } => (key, Ok(bytes.to_vec())),
                DiskEvent::Missing { key, reason } => (key, Err(reason)),
                DiskEvent::Notice(_) => continue,
            };
            assert!(answers.insert(key, answer).is_none(), "answered twice");
        }
    }
    assert!(!store.is_loading());
    answers
}

fn load(store: &DiskStore, n: u32, num_bytes: usize) -> Answer {
    answers(store, [label(n)], num_bytes).remove(&label(n).key).expect("answered")
}

/// Returns the pages that the store still has. Those must be as they were saved.
fn present(store: &DiskStore, pages: impl IntoIterator<Item = u32>, num_bytes: usize) -> Vec<u32> {
    let pages: Vec<u32> = pages.into_iter().collect();
    let answers = answers(store, pages.iter().map(|&n| label(n)), num_bytes);
    let is_there = |n: &u32| match &answers[&label(*n).key] {
        Ok(bytes) => {
            assert_eq!(*bytes, payload(*n, num_bytes), "page {n}");
            true
        }
        Err(reason) => {
            assert_eq!(*reason, MissingReason::Absent, "page {n}");
            false
        }
    };
    pages.into_iter().filter(is_there).collect()
}

/// Every file below `folder`, sorted.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn page_files(folder: &Path) -> Vec<PathBuf> {
    files(folder).into_iter().filter(|path| path.extension().is_some_and(|end| end == "kv")).collect()
}

fn page_file(root: &Path, n: u32) -> PathBuf {
    let DiskPageKey { name, group } = label(n).key;
    let name = name.to_string();
    root.join("f00d").join(&name[..2]).join(format!("{name}-{group}.kv"))
}

fn bytes_of_pages(root: &Path) -> u64 {
    page_files(root).iter().map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len())).sum()
}

fn set_last_use(path: &Path, seconds_ago: u64) {
    let time = SystemTime::now() - Duration::from_secs(seconds_ago);
    File::open(path).and_then(|file| file.set_times(FileTimes::new().set_modified(time))).expect("ours");
}

fn last_use(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|metadata| metadata.modified()).expect("there")
}

fn scratch() -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a scratch folder");
    let root = folder.path().join("cache/kv");
    (folder, root)
}

#[test]
fn pages_come_back_as_they_were_saved() {
    let (_folder, root) = scratch();
    let store = open(&root);
    assert!(!root.exists(), "nothing is created before there is something to save");
    assert!(!store.contains(label(0).key) && !store.is_busy());
    save(&store, 0..20, 5000);
    assert!((0..20).all(|n| store.contains(label(n).key)) && !store.contains(label(20).key));
    assert_eq!(present(&store, 0..21, 5000), (0..20).collect::<Vec<_>>());
    let stats = store.stats();
    assert_eq!((stats.saved_pages, stats.saved_bytes), (20, 100_000));
    assert_eq!((stats.loaded_pages, stats.loaded_bytes, stats.missing_pages), (20, 100_000, 1));
    drop(store);
    let store = open(&root);
    assert!((0..20).all(|n| store.contains(label(n).key)) && !store.contains(label(20).key));
    assert_eq!(present(&store, 0..21, 5000), (0..20).collect::<Vec<_>>());
    assert_eq!(store.save(label(3), payload(3, 5000)), Saving::Known);
    assert!(store.flush(LONG) && !store.is_busy());
    assert_eq!((store.stats().saved_pages, page_files(&root).len()), (0, 20));
}

#[test]
fn the_folder_says_what_it_is() {
    let (_folder, root) = scratch();
    saved(&root, 0..2, 100);
    let path = root.join("f00d/manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(path).expect("there")).expect("JSON");
    assert_eq!(manifest["schema"], "llmctl.kv.v1");
    assert_eq!(manifest["fingerprint"], "f00d");
    assert_eq!(manifest["made_of"], json!({"weights": "toy", "kv_type": "f16"}));
    assert_eq!(page_files(&root), {
        let mut expected = vec![page_file(&root, 0), page_file(&root, 1)];
        expected.sort();
        expected
    });
    assert_eq!(files(&root).len(), 4, "manifest, cache tag and nothing else: {:?}", files(&root));
    let tag = fs::read_to_string(root.join("CACHEDIR.TAG")).expect("a tag");
    assert!(tag.starts_with("Signature: 8a477f597d28d172789f06886806bc55"));
    assert_eq!(fs::metadata(page_file(&root, 0)).expect("there").len(), 100 + FRAME);
}

#[cfg(unix)]
#[test]
fn only_the_owner_can_read_pages() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, root) = scratch();
    saved(&root, 0..1, 100);
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let page = page_file(&root, 0);
    let fan_out = page.parent().expect("a folder");
    assert_eq!((mode(&page), mode(&root.join("f00d/manifest.json"))), (0o600, 0o600));
    assert_eq!((mode(fan_out), mode(&root.join("f00d")), mode(&root)), (0o700, 0o700, 0o700));
}

#[test]
fn a_manifest_of_something_else_keeps_the_folder_untouched() {
    let (_folder, root) = scratch();
    saved(&root, 0..3, 100);
    let manifest = root.join("f00d/manifest.json");
    let original = fs::read(&manifest).expect("there");
    let mut contents: Vec<Vec<u8>> =
        vec![Vec::new(), b"{}".to_vec(), original[..original.len() / 2].to_vec()];
    for at in [0, original.len() / 3, original.len() / 2, original.len() - 4] {
        let mut flipped = original.clone();
        flipped[at] ^= 1;
        contents.push(flipped);
    }
    for content in contents {
        fs::write(&manifest, &content).expect("ours");
        let before: Vec<_> =
            files(&root).iter().map(|path| (fs::read(path).expect("there"), last_use(path))).collect();
        let store = open(&root);
        let notices = notices(&store);
        assert!(notices.len() == 1 && notices[0].contains("manifest.json"), "{notices:?}");
        assert!(!store.contains(label(0).key));
        assert_eq!(store.save(label(9), payload(9, 100)), Saving::Dropped);
        assert_eq!(load(&store, 0, 100), Err(MissingReason::Absent));
        assert!(store.flush(LONG) && !store.is_busy());
        drop(store);
        let after: Vec<_> =
            files(&root).iter().map(|path| (fs::read(path).expect("there"), last_use(path))).collect();
        assert_eq!(after, before);
    }
    let other = DiskConfig { description: json!({"weights": "toy", "kv_type": "f32"}), ..config(&root) };
    fs::write(&manifest, &original).expect("ours");
    let store = DiskStore::open(other).expect("opened");
    assert_eq!((notices(&store).len(), store.contains(label(0).key)), (1, false));
    assert_eq!(present(&open(&root), 0..3, 100), [0, 1, 2], "the right one is as good as before");
}

#[test]
fn a_page_is_given_only_to_who_asks_for_exactly_it() {
    let (_folder, root) = scratch();
    let wrong: [fn(&mut PageLabel); 3] =
        [|label| label.parent = Some(name(77)), |label| label.parent = None, |label| label.tokens[31] += 1];
    for change in wrong {
        saved(&root, [5], 1000);
        let store = open(&root);
        let mut asked = label(5);
        change(&mut asked);
        let answer = answers(&store, [asked], 1000).remove(&label(5).key).expect("answered");
        assert!(matches!(answer, Err(MissingReason::Mismatch(_))), "{answer:?}");
        assert!(
            !store.contains(label(5).key) && !page_file(&root, 5).exists(),
            "it would not fit the next time either"
        );
    }
    saved(&root, [5, 6], 1000);
    let store = open(&root);
    assert!(matches!(load(&store, 5, 1001), Err(MissingReason::Mismatch(_))), "another length");
    let elsewhere = page_file(&root, 9); // same group, another name
    fs::create_dir_all(elsewhere.parent().expect("a folder")).expect("ours");
    fs::rename(page_file(&root, 6), elsewhere).expect("ours");
    let answer = load(&store, 9, 1000);
    assert!(matches!(&answer, Err(MissingReason::Mismatch(reason)) if reason.contains("name")), "{answer:?}");
}

/// Damages one page of several in all given ways; it alone is missing, and can be saved again.
fn check_damage(damage: impl Fn(&mut Vec<u8>), what: &str) {
    let (_folder, root) = scratch();
    saved(&root, 0..3, 3000);
    let path = page_file(&root, 1);
    let mut bytes = fs::read(&path).expect("there");
    damage(&mut bytes);
    fs::write(&path, bytes).expect("ours");
    let store = open(&root);
    let answer = load(&store, 1, 3000);
    assert!(matches!(answer, Err(MissingReason::Damaged(_))), "{what}: {answer:?}");
    assert!(!path.exists() && !store.contains(label(1).key), "{what}");
    assert_eq!(present(&store, 0..3, 3000), [0, 2], "{what}");
    save(&store, [1], 3000);
    assert_eq!(present(&store, 0..3, 3000), [0, 1, 2], "{what}");
    assert_eq!(notices(&store), [""; 0]);
}

#[test]
fn a_flipped_byte_anywhere_makes_a_page_missing() {
    // Each field of the header, the first and last token, the payload's ends and middle, each byte of the checksum.
    let len = (3000 + FRAME) as usize;
    let offsets = [0, 7, 8, 12, 16, 20, 24, 31, 32, 63, 64, 95, 96, 223, 224, 225, 1700, len - 5];
    for offset in offsets.into_iter().chain(len - 4..len) {
        for mask in [1, 0x80, 0xFF] {
            check_damage(|bytes| bytes[offset] ^= mask, &format!("byte {offset}"));
        }
    }
}

#[test]
fn a_cut_or_overlong_file_is_a_missing_page() {
    let mut next = random(1);
    let len = (3000 + FRAME) as usize;
    let cuts: Vec<usize> = (0..40).map(|_| next() as usize % len).collect();
    for cut in cuts.into_iter().chain([0, 1, 95, 96, 224, len - 4, len - 1]) {
        check_damage(|bytes| bytes.truncate(cut), &format!("cut at {cut}"));
        // What a power failure leaves: the length is right, the end was never written.
        if cut < len - 4 {
            check_damage(|bytes| bytes[cut..].fill(0), &format!("a hole from {cut}"));
        }
    }
    check_damage(|bytes| bytes.push(0), "one byte more");
    check_damage(|bytes| bytes.extend_from_within(..), "twice as long");
}

#[test]
fn what_vanishes_or_is_no_file_is_a_missing_page() {
    let (_folder, root) = scratch();
    saved(&root, 0..4, 500);
    let store = open(&root);
    // The thread walks the folders before its first write, and not again later.
    save(&store, [4], 500);
    fs::remove_file(page_file(&root, 1)).expect("ours");
    fs::remove_file(page_file(&root, 2)).expect("ours");
    fs::create_dir(page_file(&root, 2)).expect("ours");
    assert!(store.contains(label(1).key), "not known yet");
    assert_eq!(load(&store, 1, 500), Err(MissingReason::Absent));
    assert!(!store.contains(label(1).key));
    let answer = load(&store, 2, 500);
    assert!(matches!(answer, Err(MissingReason::Io(_))), "{answer:?}");
    assert_eq!(load(&store, 2, 500), Err(MissingReason::Absent), "not asked for again");
    fs::remove_dir_all(&root).expect("ours");
    assert_eq!(present(&store, [0, 3], 500), [0; 0]);
    save(&store, [0, 1, 3], 500);
    assert_eq!(present(&open(&root), 0..4, 500), [0, 1, 3]);
    assert!(root.join("f00d/manifest.json").is_file(), "made anew with the folder");
}

#[test]
fn a_page_in_use_stays_as_it_is_when_its_file_is_removed_or_saved_anew() {
    const NUM_BYTES: usize = 100_000;
    let (_folder, root) = scratch();
    saved(&root, 0..2, NUM_BYTES);
    let store = open(&root);
    store.load(label(0), NUM_BYTES);
    assert!(store.wait(LONG), "no answer");
    let events = store.poll();
    let [DiskEvent::Loaded { bytes, .. }] = &events[..] else { panic!("{events:?}") };
    fs::remove_file(page_file(&root, 0)).expect("a page in use can be removed");
    let other = open(&root);
    assert_eq!(other.save(label(0), vec![9; NUM_BYTES]), Saving::Queued);
    assert!(other.flush(LONG), "written in time");
    let news = fs::read(page_file(&root, 0)).expect("saved anew");
    assert!(news.windows(64).any(|bytes| bytes == [9; 64]), "the new content");
    fs::remove_dir_all(&root).expect("ours");
    assert_eq!(**bytes, *payload(0, NUM_BYTES));
}

#[test]
fn the_limit_holds_over_all_models_and_the_longest_unused_go_first() {
    let (_folder, root) = scratch();
    let page = 10_000 + FRAME;
    let other = DiskConfig { fingerprint: "beef".to_owned(), ..config(&root) };
    let store = DiskStore::open(other).expect("opened");
    save(&store, 0..4, 10_000);
    drop(store);
    page_files(&root.join("beef")).iter().for_each(|path| set_last_use(path, 5000));
    saved(&root, 0..6, 10_000);
    (0..6).for_each(|n| set_last_use(&page_file(&root, n), 4000 - 100 * u64::from(n)));
    fs::write(root.join("note.kv"), vec![0; 200_000]).expect("ours");
    let ours = |count| (0..count).filter(|&n| page_file(&root, n).exists()).collect::<Vec<u32>>();
    // Ten pages are there; eight fit, and seven are left when some must go.
    let limited = DiskConfig { limit_bytes: 8 * page, ..config(&root) };
    let store = DiskStore::open(limited.clone()).expect("opened");
    assert_eq!(present(&store, [0], 10_000), [0], "used now");
    save(&store, [6], 10_000);
    assert_eq!((page_files(&root.join("beef")).len(), ours(8)), (1, (0..7).collect()));
    save(&store, [7], 10_000);
    assert!(!root.join("beef").exists(), "the other model's went first, and left nothing");
    assert_eq!(ours(8), (0..8).collect::<Vec<_>>());
    save(&store, [8], 10_000);
    assert_eq!(ours(9), [0, 2, 3, 4, 5, 6, 7, 8], "1 was not used for the longest time");
    assert!(!store.contains(label(1).key) && store.contains(label(0).key));
    assert_eq!(store.stats().removed_pages, 5);
    assert!(root.join("note.kv").exists(), "what is not ours is neither counted nor removed");
    drop(store);
    // A lower limit takes effect though nothing is saved.
    let store = DiskStore::open(DiskConfig { limit_bytes: 4 * page, ..limited }).expect("opened");
    for _ in 0..600 {
        if bytes_of_pages(&root.join("f00d")) <= 4 * page {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(page_files(&root.join("f00d")).len(), 3);
    assert_eq!(notices(&store), [""; 0]);
}

#[test]
fn pages_that_several_sessions_begin_with_go_last_and_the_user_is_told() {
    let (_folder, root) = scratch();
    let limited = |num_pages| DiskConfig { limit_bytes: num_pages * (10_000 + FRAME), ..config(&root) };
    let store = DiskStore::open(limited(8)).expect("opened");
    save(&store, 0..8, 10_000);
    let used = |n, is_shared| assert!(store.touch(label(n).key, PageUse { depth: n, is_shared }));
    (0..2).for_each(|n| used(n, true));
    assert!(store.flush(LONG));
    // One session's own use leaves them shared.
    used(0, false);
    assert!(store.flush(LONG));
    drop(store);
    (2..8).for_each(|n| set_last_use(&page_file(&root, n), 300));
    let store = DiskStore::open(limited(8)).expect("opened");
    save(&store, 8..30, 10_000);
    let left =
        |pages: std::ops::Range<u32>| pages.filter(|&n| page_file(&root, n).exists()).collect::<Vec<u32>>();
    assert_eq!((left(0..8), notices(&store)), (vec![0, 1], vec![]));
    // A month without a use ends it.
    set_last_use(&page_file(&root, 0), 300);
    save(&store, 30..40, 10_000);
    assert_eq!((left(0..8), notices(&store)), (vec![1], vec![]));
    // Nothing but shared pages is left.
    left(8..40).into_iter().for_each(|n| fs::remove_file(page_file(&root, n)).expect("ours"));
    drop(store);
    let store = DiskStore::open(limited(1)).expect("opened");
    save(&store, [40], 10_000);
    assert_eq!(left(0..8), [0; 0]);
    let said = notices(&store);
    assert!(
        said.len() == 1 && said[0].starts_with("1 KV pages that several sessions begin with"),
        "{said:?}"
    );
}

fn warm(of: &str, pages: impl IntoIterator<Item = u32>) -> WarmPrompt {
    let pages = pages.into_iter().map(name).collect();
    WarmPrompt::new(of.to_owned(), "toy".to_owned(), 7, pages).expect("a prompt")
}

fn bytes_of(prompt: &WarmPrompt, root: &Path) -> Option<u64> {
    WarmPrompt::bytes_on_disk(std::slice::from_ref(prompt), root).expect("read")[0]
}

fn file_limited(root: &Path, pages: u64) -> DiskStore {
    DiskStore::open(DiskConfig { limit_bytes: pages * (1000 + FRAME), ..config(root) }).expect("opened")
}

#[test]
fn pages_of_prompts_computed_ahead_stay_until_no_prompt_has_them() {
    let (_scratch, root) = scratch();
    saved(&root, 0..8, 1000);
    let (long, short) = (warm("long", 0..3), warm("short", 0..2));
    assert_eq!((long.keep(&root).expect("kept"), pinned_bytes(&root).expect("read")), (3 * 1100 + 384, 3684));
    short.keep(&root).expect("kept");
    (0..8).for_each(|n| set_last_use(&page_file(&root, n), 1000 * u64::from(9 - n)));
    // Room for six of what would be nine.
    let store = file_limited(&root, 6);
    save(&store, [8], 1000);
    assert_eq!(present(&store, 0..9, 1000), [0, 1, 2, 6, 7, 8], "the oldest stay");
    drop(store);
    // Sessions that began with them are removed.
    let forgotten = [name(0), name(7)].into();
    assert_eq!(forget(&root, &forgotten, None).expect("removed"), 2, "page 7, and page 8 that follows it");
    long.remove(&root).expect("released");
    let (left, faults) = WarmPrompt::read_all(&root);
    assert_eq!((left, faults), (vec![short.clone()], vec![]));
    assert_eq!(bytes_of(&short, &root), Some(2 * 1228));
    let store = file_limited(&root, 3);
    save(&store, [9], 1000);
    assert_eq!(present(&store, 0..10, 1000), [0, 1, 9], "the third page was the long prompt's alone");
    drop(store);
    short.remove(&root).expect("released");
    assert_eq!(pinned_bytes(&root).expect("read"), 0);
    assert_eq!(forget(&root, &[name(0)].into(), None).expect("removed"), 2);
}

#[test]
fn where_prompts_computed_ahead_leave_no_room_nothing_else_is_saved_and_the_user_is_told() {
    let (_scratch, root) = scratch();
    saved(&root, 0..3, 1000);
    warm("all", 0..3).keep(&root).expect("kept");
    let store = file_limited(&root, 3);
    assert_eq!(store.save(label(3), payload(3, 1000)), Saving::Queued);
    assert!(store.flush(LONG));
    let said = notices(&store).join("\n");
    assert!(said.contains("prompts that were computed ahead take 3.6 KiB of 3.6 KiB (--kv-disk"), "{said}");
    assert_eq!(present(&store, 0..4, 1000), [0, 1, 2]);
}

#[test]
fn a_prompt_computed_ahead_is_read_as_it_was_written_and_counts_its_uses() {
    let (_scratch, root) = scratch();
    let prompt = warm("agent-1", 4..7);
    prompt.keep(&root).expect("kept");
    assert_eq!((prompt.num_tokens(), bytes_of(&prompt, &root)), (96, None), "not computed yet");
    for hits in 1..4 {
        prompt.count_hit(&root).expect("counted");
        assert_eq!(prompt.num_hits(&root), hits);
    }
    let begins = |pages: &[u32]| prompt.begins(&pages.iter().map(|&n| name(n)).collect::<Vec<_>>());
    assert!(
        begins(&[4, 5, 6])
            && begins(&[4, 5, 6, 7])
            && !begins(&[4, 5])
            && !begins(&[4, 5, 7])
            && !begins(&[])
    );
    assert_eq!(WarmPrompt::from_json(&prompt.to_json()), Ok(prompt.clone()));
    for (bad, why) in [
        (json!({"name": "../x"}), "is no name"),
        (json!({"pages": []}), "it has no page"),
        (json!({"pages": ["ab"]}), "is no name of a page"),
        (json!({"schema": "llmctl.warm.v9"}), "the schema is"),
        (json!({"more": 1}), "unknown field"),
    ] {
        let mut record: Value = serde_json::from_slice(&prompt.to_json()).expect("JSON");
        record.as_object_mut().expect("an object").extend(bad.as_object().expect("one").clone());
        let error = WarmPrompt::from_json(record.to_string().as_bytes()).expect_err("refused");
        assert!(error.contains(why), "{error}");
    }
    fs::write(root.join("warm/other.json"), prompt.to_json()).expect("written");
    fs::write(root.join("warm/torn.json"), b"{").expect("written");
    let (prompts, faults) = WarmPrompt::read_all(&root);
    assert_eq!(prompts, [prompt]);
    assert!(
        faults[0].contains("name of another prompt") && faults[1].contains("torn.json: EOF"),
        "{faults:?}"
    );
}

#[test]
fn use_is_marked_and_of_one_use_the_deepest_pages_go_first() {
    let (_folder, root) = scratch();
    saved(&root, 0..8, 1000);
    (0..8).for_each(|n| set_last_use(&page_file(&root, n), 9000));
    let limit_bytes = 8 * (1000 + FRAME);
    let store = DiskStore::open(DiskConfig { limit_bytes, ..config(&root) }).expect("opened");
    // Half by loading, half by saving what is known, the first pages of the sequence first.
    assert_eq!(present(&store, 0..3, 1000), [0, 1, 2]);
    (3..6).for_each(|n| assert_eq!(store.save(label(n), payload(n, 1000)), Saving::Known));
    assert!(store.flush(LONG));
    let recent = SystemTime::now() - Duration::from_secs(600);
    (0..6).for_each(|n| assert!(last_use(&page_file(&root, n)) > recent, "page {n}"));
    // All within a minute: as if at once.
    let now = SystemTime::now();
    let at = |n: u32| FileTimes::new().set_modified(now - Duration::from_millis(u64::from(n)));
    (0..6).for_each(|n| drop(File::open(page_file(&root, n)).and_then(|file| file.set_times(at(n)))));
    let strangers = |n: u32| PageLabel { parent: None, depth: 0, ..label(n) };
    for n in 100..105 {
        assert_eq!(store.save(strangers(n), payload(n, 1000)), Saving::Queued);
        assert!(store.flush(LONG));
        set_last_use(&page_file(&root, n), 0);
    }
    let left: Vec<u32> = (0..8).filter(|&n| page_file(&root, n).exists()).collect();
    assert!(!left.is_empty() && left.len() < 6, "{left:?}");
    assert_eq!(left, (0..left.len() as u32).collect::<Vec<_>>(), "a beginning of the sequence");
}

#[test]
fn a_store_can_be_off_and_a_page_can_be_too_large() {
    let (_folder, root) = scratch();
    saved(&root, 0..2, 1000);
    let off = DiskStore::open(DiskConfig { limit_bytes: 0, ..config(&root) }).expect("opened");
    assert!(!off.contains(label(0).key));
    assert_eq!((off.save(label(2), payload(2, 1000)), off.is_saving()), (Saving::Dropped, false));
    assert_eq!(load(&off, 0, 1000), Err(MissingReason::Absent));
    assert!(off.flush(LONG) && notices(&off).is_empty());
    drop(off);
    let limit_bytes = 4000 + FRAME;
    let store = DiskStore::open(DiskConfig { limit_bytes, ..config(&root) }).expect("opened");
    assert_eq!(store.save(label(2), payload(2, 4001)), Saving::Dropped);
    assert_eq!(store.save(label(3), payload(3, 4000)), Saving::Queued);
    assert!(store.flush(LONG));
    assert_eq!((page_files(&root), store.stats().dropped_pages), (vec![page_file(&root, 3)], 1));
    let bad = DiskStore::open(DiskConfig { fingerprint: "../x".to_owned(), ..config(&root) });
    assert!(matches!(bad.map(drop), Err(Error::InvalidParameter { name: "fingerprint", .. })));
}

#[test]
fn leftovers_are_removed_when_they_are_old_and_strangers_never() {
    let (_folder, root) = scratch();
    saved(&root, 0..2, 1000);
    let fan_out = page_file(&root, 0).parent().expect("a folder").to_owned();
    let keep = [".new-1-2", ".new-mine", "note.txt", "0-0.kv"].map(|name| fan_out.join(name));
    let old = [fan_out.join(".new-1-3"), root.join("f00d/.new-7-0")];
    for path in keep.iter().chain(&old) {
        fs::write(path, "half a pa").expect("ours");
        set_last_use(path, 4000);
    }
    set_last_use(&keep[0], 60); // still being written
    let store = open(&root);
    assert!(
        old.iter().all(|path| !path.exists()) && keep.iter().all(|path| path.exists()),
        "{:?}",
        files(&root)
    );
    assert_eq!(present(&store, 0..2, 1000), [0, 1]);
}

/// The store goes on: said once, nothing saved, no answer is owed, loading works.
fn check_saving_is_off(store: &DiskStore, reason: &str, pages: &[u32]) {
    assert!(store.wait(LONG), "no notice");
    for n in 50..60 {
        store.save(label(n), payload(n, 1000));
    }
    assert!(store.flush(LONG));
    let notices = notices(store);
    assert!(notices.len() == 1 && notices[0].contains(reason), "{notices:?}");
    assert_eq!(store.save(label(60), payload(60, 1000)), Saving::Dropped);
    assert_eq!((store.takes(1), store.stats().saved_pages), (false, 0));
    assert!(!store.contains(label(50).key) && store.stats().dropped_pages >= 11);
    assert_eq!(present(store, 0..4, 1000), pages);
    assert!(!store.is_busy());
}

#[test]
fn a_root_that_is_no_folder_turns_saving_off() {
    let (folder, _) = scratch();
    let file = folder.path().join("file");
    fs::write(&file, "text").expect("ours");
    for root in [file.clone(), file.join("below/kv")] {
        let store = open(&root);
        check_saving_is_off(&store, "saving of KV pages is off", &[]);
        assert_eq!(fs::read_to_string(&file).expect("there"), "text");
    }
}

#[test]
fn a_folder_that_turns_into_a_file_turns_saving_off_and_the_rest_still_loads() {
    let (_folder, root) = scratch();
    saved(&root, 0..4, 1000);
    let store = open(&root);
    let blocked = page_file(&root, 50).parent().expect("a folder").to_owned();
    assert!((0..4).all(|n| !page_file(&root, n).starts_with(&blocked)), "other folders");
    fs::write(&blocked, "in the way").expect("ours");
    assert_eq!(store.save(label(50), payload(50, 1000)), Saving::Queued);
    check_saving_is_off(&store, &root.display().to_string(), &[0, 1, 2, 3]);
    assert_eq!(page_files(&root).len(), 4, "no unfinished page is left: {:?}", files(&root));
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_can_be_loaded_from() {
    if !unprivileged(load_from_a_read_only_folder) {
        crate::common::skip("this user may write everywhere");
    }
}

#[cfg(unix)]
fn load_from_a_read_only_folder() {
    use std::os::unix::fs::PermissionsExt;
    let (_folder, root) = scratch();
    saved(&root, 0..4, 1000);
    let mut damaged = fs::read(page_file(&root, 3)).expect("there");
    damaged[500] ^= 1;
    fs::write(page_file(&root, 3), damaged).expect("ours");
    let mut folders: Vec<PathBuf> =
        page_files(&root).iter().filter_map(|path| path.parent()).map(Path::to_owned).collect();
    folders.extend([root.join("f00d"), root.clone()]);
    let set = |mode| {
        for folder in &folders {
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).expect("ours");
        }
    };
    set(0o500);
    fs::write(root.join("probe"), "").expect_err("read-only");
    let store = open(&root);
    for _ in 0..2 {
        let answer = load(&store, 3, 1000);
        assert!(answer.is_err(), "damaged");
    }
    assert!(!store.contains(label(3).key), "ignored from now on, though it cannot be removed");
    assert_eq!(store.save(label(50), payload(50, 1000)), Saving::Queued);
    check_saving_is_off(&store, &root.display().to_string(), &[0, 1, 2]);
    set(0o700);
    assert_eq!(page_files(&root).len(), 4);
}

/// Many threads' worth of stores in one process stand for processes: they share nothing but the folder.
#[test]
fn two_stores_on_one_root_share_pages_and_keep_the_limit() {
    let (_folder, root) = scratch();
    let page = 20_000 + FRAME;
    let limit_bytes = 40 * page;
    let work = |seed: u64| {
        let store = DiskStore::open(DiskConfig { limit_bytes, ..config(&root) }).expect("opened");
        let mut next = random(seed);
        for _ in 0..150 {
            let n = (next() % 80) as u32;
            if next().is_multiple_of(2) {
                store.save(label(n), payload(n, 20_000));
                assert!(store.flush(LONG));
            } else {
                present(&store, [n], 20_000); // right or absent, never wrong
            }
            // A sixteenth that the other one has not seen yet, and the pages at hand.
            assert!(bytes_of_pages(&root) <= limit_bytes + 5 * page);
        }
        assert_eq!(notices(&store), [""; 0]);
        let stats = store.stats();
        assert!(stats.saved_pages > 0 && stats.loaded_pages > 0, "{stats:?}");
    };
    std::thread::scope(|scope| {
        (0..2).map(|seed| scope.spawn(move || work(seed))).for_each(drop);
    });
    let before = open(&root);
    let there = present(&before, 0..80, 20_000);
    assert!(!there.is_empty());
    let fresh = (0..80).find(|n| !there.contains(n)).expect("not all fit");
    saved(&root, [fresh], 20_000);
    assert_eq!(present(&before, [fresh], 20_000), [fresh], "saved by another one meanwhile");
}

/// Where the children below find their root; set only by the tests that start them.
const CHILD_ROOT: &str = "LLMCTL_TEST_KV_DISK";

#[test]
fn a_store_sees_pages_that_another_saves_later_and_writes_none_of_them_again() {
    let (_scratch, root) = scratch();
    let (early, late) = (open(&root), open(&root));
    assert!(!late.contains(label(3).key));
    save(&early, 0..8, 1000);
    assert!((0..8).all(|n| late.contains(label(n).key)), "saved after the second store was opened");
    assert!(!late.contains(label(8).key), "saved by neither");
    assert_eq!(present(&late, 0..8, 1000), (0..8).collect::<Vec<_>>());
    // A third store that has not looked saves one of them: the file stays, though what it was given differs.
    let (third, file) = (open(&root), page_file(&root, 8));
    save(&late, [8], 1000);
    let before = fs::read(&file).expect("saved");
    // Its thread reads the folder when it comes to it: then it knows the page already.
    assert!(matches!(third.save(label(8), payload(9, 1000)), Saving::Queued | Saving::Known));
    assert!(third.flush(LONG), "in time");
    assert_eq!(fs::read(&file).expect("still there"), before);
}

fn child(test: &str, root: &Path, first: u32) -> Child {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", &format!("kv_disk::{test}"), "--nocapture"])
        .env(CHILD_ROOT, format!("{first}:{}", root.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a child")
}

fn child_task() -> Option<(u32, PathBuf)> {
    let task = std::env::var(CHILD_ROOT).ok()?;
    let (first, root) = task.split_once(':')?;
    Some((first.parse().ok()?, PathBuf::from(root)))
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "\n{line}").and_then(|()| out.flush()).expect("a pipe");
}

fn lines_of(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok)
}

/// Not a test by itself: the process that is killed. It keeps and removes prompts that share pages.
#[test]
fn child_that_keeps_prompts() {
    let Some((_, root)) = child_task() else { return };
    say("begun");
    for n in 0.. {
        warm("a", 0..4 + n % 3).keep(&root).expect("kept");
        warm("b", n % 5..9).keep(&root).expect("kept");
        warm("a", 0..4 + n % 3).remove(&root).expect("removed");
        if n % 2 == 0 {
            warm("b", n % 5..9).remove(&root).expect("removed");
        }
    }
}

#[cfg(unix)]
#[test]
fn sigkill_while_prompts_are_kept_leaves_no_pinned_page_without_a_record() {
    let (_scratch, root) = scratch();
    saved(&root, 0..9, 1000);
    let mut next = random(7);
    for round in 0..12 {
        let mut child = child("child_that_keeps_prompts", &root, 0);
        assert!(lines_of(&mut child).any(|line| line == "begun"), "round {round}");
        std::thread::sleep(Duration::from_micros(next() % 30_000));
        child.kill().expect("killed");
        child.wait().expect("gone");
        let (prompts, faults) = WarmPrompt::read_all(&root);
        assert_eq!(faults, [""; 0], "round {round}");
        let is_pinned = |n: &u32| fs::metadata(page_file(&root, *n)).expect("there").permissions().readonly();
        let pinned: Vec<u32> = (0..9).filter(is_pinned).collect();
        let has_record = |n: &u32| prompts.iter().any(|prompt| prompt.pages.contains(&name(*n)));
        assert!(pinned.iter().all(has_record), "round {round}: {pinned:?} {prompts:?}");
        prompts.iter().for_each(|prompt| prompt.remove(&root).expect("removed"));
        assert_eq!(pinned_bytes(&root).expect("read"), 0, "round {round}");
    }
}

const KILLED_PAGE: usize = 60_000;

/// Not a test by itself: the process that is killed. It saves pages and says which are flushed.
#[test]
fn child_that_saves() {
    let Some((first, root)) = child_task() else { return };
    let store = open(&root);
    say("opened");
    for n in first..first + 3000 {
        store.save(label(n), payload(n, KILLED_PAGE));
        if n % 3 == 0 {
            assert!(store.flush(LONG));
            say(&format!("saved {n}"));
        }
    }
}

#[test]
fn sigkill_while_saving_leaves_whole_pages_only() {
    let (_folder, root) = scratch();
    let mut next = random(5);
    let (mut first, mut num_unfinished) = (0, 0);
    for round in 0..MOST_KILLS {
        // Where pages are written in no time, as in memory, few kills find one unfinished.
        if round >= KILLS && num_unfinished > 0 {
            break;
        }
        let mut child = child("child_that_saves", &root, first);
        let mut lines = lines_of(&mut child);
        assert!(lines.any(|line| line == "opened"), "round {round}: the child could not open the store");
        std::thread::sleep(Duration::from_micros(next() % 8000));
        child.kill().expect("killed");
        let flushed = lines.filter_map(|line| line.strip_prefix("saved ")?.parse::<u32>().ok()).last();
        child.wait().expect("gone");
        let store = open(&root);
        let there = present(&store, first..first + 60, KILLED_PAGE);
        if let Some(flushed) = flushed.map(|n| n.min(first + 59)) {
            assert!(
                (first..=flushed).all(|n| there.contains(&n)),
                "round {round}: {there:?} up to {flushed}"
            );
        }
        assert_eq!(notices(&store), [""; 0]);
        num_unfinished += files(&root).iter().filter(|path| path.to_string_lossy().contains(".new-")).count();
        first += 3000;
        drop(store);
        fs::remove_dir_all(&root)
            .or_else(|error| if root.exists() { Err(error) } else { Ok(()) })
            .expect("ours");
    }
    assert!(num_unfinished > 0, "no kill came while a page was written");
}

/// A minute is enough on a slow machine.
const KILLS: usize = 200;
const MOST_KILLS: usize = 10 * KILLS;

/// Not a test by itself: a process whose files cannot grow beyond 30,000 bytes, as on a disk that is nearly full.
#[cfg(unix)]
#[test]
fn child_on_a_full_disk() {
    let Some((first, root)) = child_task() else { return };
    let limit = libc::rlimit { rlim_cur: 30_000, rlim_max: 30_000 };
    // SAFETY: plain calls with a live struct; an ignored signal makes the write an error instead of the process's end.
    let limited = unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::setrlimit(libc::RLIMIT_FSIZE, &limit)
    };
    assert_eq!(limited, 0);
    let store = open(&root);
    save(&store, first..first + 2, 1000);
    assert_eq!(store.save(label(first + 2), payload(first + 2, 40_000)), Saving::Queued);
    assert!(store.flush(LONG));
    assert_eq!(store.save(label(first + 3), payload(first + 3, 1000)), Saving::Dropped, "small ones neither");
    let notices = notices(&store);
    assert!(notices.len() == 1 && notices[0].contains("saving of KV pages is off"), "{notices:?}");
    assert_eq!(present(&store, first..first + 4, 1000), [first, first + 1]);
    assert_eq!(load(&store, first + 2, 40_000), Err(MissingReason::Absent));
    assert!(!store.is_busy());
    say("done");
}

#[cfg(unix)]
#[test]
fn a_full_disk_turns_saving_off_and_leaves_no_torn_page() {
    let (_folder, root) = scratch();
    let mut child = child("child_on_a_full_disk", &root, 10);
    // Read to the end: the child's last words need a reader.
    let done = lines_of(&mut child).filter(|line| line == "done").count();
    assert!(done == 1 && child.wait().expect("gone").success());
    assert_eq!(page_files(&root).len(), 2);
    assert_eq!(files(&root).len(), 4, "the unfinished page was removed: {:?}", files(&root));
    saved(&root, [12], 40_000);
}

#[test]
fn dropping_a_busy_store_ends_soon_and_leaves_whole_pages() {
    let (_folder, root) = scratch();
    let store = open(&root);
    for n in 0..200 {
        store.save(label(n), payload(n, 100_000));
    }
    (0..200).for_each(|n| store.load(label(n), 100_000));
    assert!(store.is_loading() && store.is_busy());
    drop(store);
    assert!(files(&root).iter().all(|path| !path.to_string_lossy().contains(".new-")));
    present(&open(&root), 0..200, 100_000);
}
