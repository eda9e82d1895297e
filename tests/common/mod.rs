//! Shared by test modules: fixtures, writers of small model files.

pub mod alloc;
pub mod convert;
pub mod fake_http;
pub mod fake_hub;
pub mod gguf;
pub mod golden;
pub mod k_quants;
pub mod prelude;
pub mod remote;
pub mod scripted;
pub mod server;
pub mod stored_tensors;
pub mod tables;
pub mod telling;
#[cfg(unix)]
pub mod terminal;
pub mod toy;
pub mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use llmctl_engine::EngineSessionName;
use llmctl_engine::session::store::StoredTurn;
use llmctl_models::load::Isa;

use prelude::*;

/// Returns `name` as the name of a session in an engine.
pub fn named(name: &str) -> EngineSessionName {
    EngineSessionName::parse(name).expect("not empty")
}

/// Returns the words of a line.
pub fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Returns the name of a stored session.
pub fn name(name: &str) -> SessionName {
    SessionName::new(name).expect("a valid name")
}

/// A turn of a session, of which only its messages and its tokens matter: it keeps `kept` of those before.
pub fn stored_turn(messages: [&str; 2], kept: usize, tail: Vec<u32>, generated: Vec<u32>) -> StoredTurn {
    let [question, answer] = messages;
    StoredTurn {
        messages: vec![Message::user(question), Message::assistant(answer)],
        kept_tokens: kept,
        usage: Usage { prompt_tokens: 2, completion_tokens: generated.len(), ..Usage::default() },
        prompt_tail: tail,
        generated,
        adapters: Vec::new(),
        spans: Vec::new(),
        splice_after: None,
        sampling: Sampling::default(),
        finish: Finish::Eos(2),
        started_ms: 1,
        finished_ms: 2,
        receipt: None,
    }
}

/// Opens a store of KV with room for everything.
pub fn kv_store(root: &Path, fingerprint: &str) -> DiskStore {
    DiskStore::open(DiskConfig {
        root: root.to_owned(),
        limit_bytes: u64::MAX,
        fingerprint: fingerprint.to_owned(),
        description: json!({ "model": fingerprint }),
        queue_bytes: DEFAULT_QUEUE_BYTES,
        vault: None,
    })
    .expect("a store")
}

/// The variable that chooses the instruction set for the whole suite: in this process, and in the commands that it starts.
pub const CPU: &str = "LLMCTL_CPU";

/// The CPU that tests load models on, with the best instruction set or that of [`CPU`].
pub fn cpu(threads: usize) -> CpuOptions {
    let mut options = CpuOptions::new(threads);
    if let Ok(name) = std::env::var(CPU) {
        let set = Isa::available().find(|set| set.name() == name);
        options.isa = set.unwrap_or_else(|| panic!("{CPU}: this processor has no {name}"));
    }
    options
}

/// Runs `body` in a thread that may write only where modes allow it: root's right to write everywhere is left out, in that thread
/// and those that it starts. `false` where this user keeps such a right, on systems that do not have them by thread.
#[cfg(unix)]
pub fn unprivileged(body: impl FnOnce() + Send + 'static) -> bool {
    let run = move || {
        #[cfg(target_os = "linux")]
        drop_file_capabilities();
        // SAFETY: no memory is passed.
        let is_bound = cfg!(target_os = "linux") || unsafe { libc::geteuid() } != 0;
        if is_bound {
            body();
        }
        is_bound
    };
    match std::thread::spawn(run).join() {
        Ok(is_bound) => is_bound,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Of this thread: capabilities(7), capset(2).
#[cfg(target_os = "linux")]
fn drop_file_capabilities() {
    const VERSION_3: u32 = 0x2008_0522;
    const FILES: u32 = 0b1111; // CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER
    let header = [VERSION_3, 0];
    let mut sets = [0u32; 6]; // effective, permitted, inheritable: of the first 32 capabilities, then of the others
    // SAFETY: both arrays are as large as the system's structures of this version.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    sets[0] &= !FILES;
    // SAFETY: as above; nothing is written.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// The seed of random cases: that of .cargo/config.toml, or of the environment.
pub fn seed() -> u64 {
    std::env::var("PROPTEST_RNG_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// What this process has not tested, by the reason, with the tests that say so.
static SKIPPED: Mutex<BTreeMap<String, BTreeSet<String>>> = Mutex::new(BTreeMap::new());

/// Notes that the calling test leaves something out because of what is absent. A line at the end of the run counts and names all.
pub fn skip(why: impl ToString) {
    let why = why.to_string();
    eprintln!("skipped: {why}");
    let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    if skipped.is_empty() {
        // SAFETY: the function may be called at the end of a process: it only takes a lock and writes.
        unsafe { libc::atexit(report_skipped) };
    }
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    skipped.entry(why).or_default().insert(test);
}

extern "C" fn report_skipped() {
    let Ok(skipped) = SKIPPED.try_lock() else { return };
    let tests: BTreeSet<&String> = skipped.values().flatten().collect();
    let reasons = skipped.iter().map(|(why, tests)| {
        let tests: Vec<&str> = tests.iter().map(String::as_str).collect();
        format!("{why} ({})", tests.join(", "))
    });
    let reasons: Vec<String> = reasons.collect();
    // Past the harness, which keeps what tests print.
    let line = format!("skipped, in part or whole: {} tests: {}\n", tests.len(), reasons.join("; "));
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The folder of shared test data, or `None` (with a note) where it is absent.
pub fn fixtures() -> Option<PathBuf> {
    let folder = std::env::var_os("LLMCTL_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"), PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    skip(format!("no fixtures at {}", folder.display()));
    None
}

/// Starts a test of this program alone in a process of its own, with a folder that it is told by a variable. Returns the process and
/// the lines that it prints.
pub fn child_of_test(test: &str, (variable, folder): (&str, &Path)) -> (Child, impl Iterator<Item = String>) {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--nocapture"])
        .env(variable, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a child");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    (child, lines)
}
