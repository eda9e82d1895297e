//! Packed weights kept on disk: the same logits with and without them, and no file is ever computed with that is not whole.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::time::SystemTime;

use llmctl_kernel::gemm::fixed;
use llmctl_kernel::isa;
use llmctl_models::load::export::{Export, ExportOptions, MIXES, WriteEnd};
use llmctl_models::load::fingerprint::panel_key;
use llmctl_models::load::{PanelPlace, kept_panels};

use crate::common::prelude::*;

/// Room for everything.
const ALL: u64 = u64::MAX;

/// Tokens that every test model has.
const TOKENS: [u32; 12] = [1, 5, 9, 2, 7, 3, 11, 8, 4, 6, 10, 12];

fn keeping(folder: &Path, limit_bytes: u64) -> LoadOptions {
    let packed = PanelPlace { folder: folder.into(), limit_bytes, least_bytes: 0 };
    LoadOptions { packed: Some(packed), ..packing() }
}

fn packing() -> LoadOptions {
    LoadOptions { dtype: None, ..exact() }
}

/// Writes a checkpoint with quantised weights to `folder`.
fn quantised(name: &str, folder: &Path) -> PathBuf {
    quantised_as("Q4_0", name, folder)
}

fn quantised_as(mix: &str, name: &str, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{name}.gguf"));
    let files = ModelFiles::open(&ModelSource::Folder(parity_folder().join(name))).expect("opens");
    let mix = MIXES.into_iter().find(|known| known.name == mix).expect("a mix");
    let export = Export::plan(&files, &ExportOptions { mix, imatrix: None, name: "model" }).expect("a plan");
    assert_eq!(export.write(&path, &mut |_, _| true).expect("writes"), WriteEnd::Done);
    path
}

fn logits(model: &mut LoadedModel) -> Vec<u32> {
    let logits = Fed::new(&mut *model.model).feed(&TOKENS, 5);
    logits.iter().map(|value| value.to_bits()).collect()
}

/// Waits until a load's writer is done: the model must still be there.
fn wait_for_files(folder: &Path, count: usize) -> Vec<PathBuf> {
    let begun = Instant::now();
    while kept_panels(folder).files < count || !named(folder, "part").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    named(folder, "panels")
}

fn named(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == extension)).collect();
    paths.sort();
    paths
}

/// Loads with a folder, waits for the file, and returns logits and the words of the notices.
fn load_and_keep(model: &Path, folder: &Path) -> (Vec<u32>, Vec<String>, PathBuf) {
    let mut loaded = load_model(model, &keeping(folder, ALL)).expect("loads");
    let logits = logits(&mut loaded);
    let path = wait_for_files(folder, 1).remove(0);
    (logits, loaded.notices.iter().map(ToString::to_string).collect(), path)
}

fn change_byte(path: &Path, at: u64) {
    let mut file = File::options().read(true).write(true).open(path).expect("opens");
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).expect("seeks");
    file.read_exact(&mut byte).expect("reads");
    file.seek(SeekFrom::Start(at)).expect("seeks");
    file.write_all(&[byte[0] ^ 4]).expect("writes");
}

fn is_used(path: &Path, load: impl FnOnce()) -> bool {
    let long_ago = SystemTime::now() - Duration::from_secs(100_000);
    let file = File::options().append(true).open(path).expect("opens");
    file.set_times(fs::FileTimes::new().set_modified(long_ago)).expect("sets");
    load();
    fs::metadata(path).and_then(|meta| meta.modified()).expect("a time") > long_ago + Duration::from_secs(9)
}

#[test]
fn logits_are_the_same_with_and_without_kept_panels() {
    let scratch = tempfile::tempdir().expect("tempdir");
    for model in ["qwen3", "qwen3-moe"].map(|name| quantised(name, scratch.path())) {
        let folder = tempfile::tempdir().expect("tempdir");
        let expected = logits(&mut load_model(&model, &packing()).expect("loads"));
        let (first, _, path) = load_and_keep(&model, folder.path());
        let mut second = Vec::new();
        let used = is_used(&path, || second = load_and_keep(&model, folder.path()).0);
        assert!(used, "{}: packed again", model.display());
        assert!(first == expected && second == expected, "{}", model.display());
    }
}

#[test]
fn floats_are_used_where_their_file_has_them() {
    let folder = tempfile::tempdir().expect("tempdir");
    let mut loaded = load_model(&parity_folder().join("qwen3"), &keeping(folder.path(), ALL)).expect("loads");
    logits(&mut loaded);
    drop(loaded); // waits for a writer
    let in_place = fixed::is_fast_in_place(isa::isa());
    assert_eq!(kept_panels(folder.path()).bytes == 0, in_place);
}

#[test]
fn bytes_are_packed_by_each_load() {
    let folder = tempfile::tempdir().expect("tempdir");
    let model = quantised_as("Q8_0", "qwen3", folder.path());
    let loaded = load_model(&model, &keeping(folder.path(), ALL)).expect("loads");
    assert_eq!(loaded.notices.len(), 0);
    drop(loaded); // waits for a writer
    assert_eq!(kept_panels(folder.path()).bytes, 0);
}

#[test]
fn a_damaged_file_is_found_out_and_written_again() {
    let scratch = tempfile::tempdir().expect("tempdir");
    for model in ["qwen3", "qwen3-moe"].map(|name| quantised(name, scratch.path())) {
        let folder = tempfile::tempdir().expect("tempdir");
        let (expected, notices, path) = load_and_keep(&model, folder.path());
        assert_eq!(notices, Vec::<String>::new());
        let whole = fs::read(&path).expect("reads");
        let len = whole.len() as u64;
        // The version, panels of the first and of a later matrix, the index, its place.
        for at in [0, 64, len / 2, len - 40, len - 32] {
            change_byte(&path, at);
            check_repair(&model, folder.path(), &expected, &whole);
        }
        for kept in [0, 10, len / 2, len - 1] {
            File::options().write(true).open(&path).and_then(|file| file.set_len(kept)).expect("cuts");
            check_repair(&model, folder.path(), &expected, &whole);
        }
        // Whole, but the file of another model, whose matrices have the same types and shapes.
        let others = tempfile::tempdir().expect("tempdir");
        let other = load_and_keep(&quantised("gemma2", scratch.path()), others.path()).2;
        fs::copy(other, &path).expect("copies");
        check_repair(&model, folder.path(), &expected, &whole);
    }
}

/// Checks that a load says what it found, computes the right logits, and leaves the right file.
fn check_repair(model: &Path, folder: &Path, expected: &[u32], whole: &[u8]) {
    let mut loaded = load_model(model, &keeping(folder, ALL)).expect("loads");
    let said: Vec<String> = loaded.notices.iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|text| text.contains("are damaged") && text.contains(".panels")), "{said:?}");
    assert!(logits(&mut loaded) == expected);
    let path = wait_for_files(folder, 1).remove(0);
    assert!(fs::read(path).expect("reads") == whole, "another file");
    let (logits, notices, _) = load_and_keep(model, folder);
    assert!(logits == expected && notices.is_empty(), "{notices:?}");
}

#[test]
fn a_write_that_was_killed_is_continued_by_the_next_load() {
    let [scratch, folder] = [(); 2].map(|()| tempfile::tempdir().expect("tempdir"));
    let model = quantised("qwen3", scratch.path());
    let (expected, _, path) = load_and_keep(&model, folder.path());
    let whole = fs::read(&path).expect("reads");
    let part = path.with_extension("part");
    // Before the first byte, in a matrix, in the index, after the end but before the rename; and with too many bytes.
    for kept in [0, 70, whole.len() / 2, whole.len() - 10, whole.len(), whole.len() + 5000] {
        fs::remove_file(&path).expect("removes");
        let mut written = whole.clone();
        written.resize(kept, 7);
        fs::write(&part, &written).expect("writes");
        let (logits, notices, path) = load_and_keep(&model, folder.path());
        assert!(logits == expected && notices.is_empty(), "{notices:?}");
        assert!(fs::read(path).expect("reads") == whole, "{kept} bytes were there");
    }
    // What a crash of the system left wrong is found when it is read.
    fs::remove_file(&path).expect("removes");
    fs::write(&part, vec![0; whole.len() / 2]).expect("writes");
    assert!(load_and_keep(&model, folder.path()).0 == expected);
    check_repair(&model, folder.path(), &expected, &whole);
}

#[test]
fn a_file_is_written_by_one_process_at_a_time() {
    let [scratch, folder] = [(); 2].map(|()| tempfile::tempdir().expect("tempdir"));
    let model = quantised("qwen3", scratch.path());
    let loads: Vec<_> = (0..4)
        .map(|_| {
            let (model, folder) = (model.clone(), folder.path().to_owned());
            std::thread::spawn(move || load_and_keep(&model, &folder))
        })
        .collect();
    let loads: Vec<_> = loads.into_iter().map(|load| load.join().expect("no panic")).collect();
    assert!(loads.iter().all(|(logits, notices, _)| *logits == loads[0].0 && notices.is_empty()));
    assert_eq!(kept_panels(folder.path()).files, 1);
    let (logits, notices, path) = load_and_keep(&model, folder.path());
    assert!(logits == loads[0].0 && notices.is_empty(), "the file is whole: {notices:?}");
    // Another process, which writes and has not finished.
    fs::remove_file(&path).expect("removes");
    let part = File::create(path.with_extension("part")).expect("creates");
    part.lock().expect("locks");
    let loaded = load_model(&model, &keeping(folder.path(), ALL)).expect("loads");
    assert!(loaded.notices.is_empty());
    drop(loaded);
    assert_eq!(part.metadata().expect("its length").len(), 0, "its file is its own");
    assert_eq!(kept_panels(folder.path()).files, 0);
}

#[test]
fn the_limit_holds_and_the_file_used_longest_ago_goes() {
    let [scratch, folder] = [(); 2].map(|()| tempfile::tempdir().expect("tempdir"));
    let [model, other] = ["qwen3", "gemma2"].map(|name| quantised(name, scratch.path()));
    let first = load_and_keep(&other, folder.path()).2;
    let bytes_of_other = kept_panels(folder.path()).bytes;
    let bytes_of_model =
        fs::metadata(load_and_keep(&model, &folder.path().join("alone")).2).expect("a file").len();
    drop(load_model(&model, &keeping(folder.path(), 1000)).expect("loads"));
    assert_eq!(
        named(folder.path(), "panels"),
        std::slice::from_ref(&first),
        "a model larger than the limit changes nothing"
    );
    // There is room for the larger one alone.
    let bytes = bytes_of_other.max(bytes_of_model);
    let loaded = load_model(&model, &keeping(folder.path(), bytes)).expect("loads");
    let begun = Instant::now();
    while first.exists() || kept_panels(folder.path()).files == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(loaded.notices.is_empty() && kept_panels(folder.path()).bytes <= bytes);
    let few = PanelPlace { folder: folder.path().join("few"), limit_bytes: ALL, least_bytes: 1 << 30 };
    drop(load_model(&model, &LoadOptions { packed: Some(few.clone()), ..packing() }).expect("loads"));
    assert!(!few.folder.exists(), "what is packed in no time is not kept");
}

#[test]
fn a_changed_model_and_another_layout_have_files_of_their_own() {
    let scratch = tempfile::tempdir().expect("tempdir");
    let model = quantised("qwen3", scratch.path());
    let folder = tempfile::tempdir().expect("tempdir");
    let (before, _, path) = load_and_keep(&model, folder.path());
    let len = fs::metadata(&model).expect("a length").len();
    change_byte(&model, len / 2);
    let expected = logits(&mut load_model(&model, &packing()).expect("loads"));
    assert!(expected != before, "the change shows");
    let used = is_used(&path, || {
        let mut loaded = load_model(&model, &keeping(folder.path(), ALL)).expect("loads");
        assert!(logits(&mut loaded) == expected);
        assert_eq!(wait_for_files(folder.path(), 2).len(), 2);
    });
    assert!(!used, "the old file is of the old model");
    assert_ne!(panel_key("qwen3", "a", "1"), panel_key("qwen3", "a", "1 inverted"));
    assert_ne!(panel_key("qwen3", "a", "1"), panel_key("qwen3", "b", "1"));
    assert_ne!(panel_key("qwen3", "a", "1"), panel_key("llama", "a", "1"));
}

#[test]
fn a_folder_that_cannot_be_written_stops_no_load() {
    let scratch = tempfile::tempdir().expect("tempdir");
    let file = scratch.path().join("file");
    fs::write(&file, "in the way").expect("writes");
    let model = quantised("qwen3", scratch.path());
    let loaded = load_model(&model, &keeping(&file.join("packed"), ALL)).expect("loads");
    let said: Vec<String> = loaded.notices.iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1 && said[0].contains("cannot be kept in") && said[0].contains("file/packed"),
        "{said:?}"
    );
}
