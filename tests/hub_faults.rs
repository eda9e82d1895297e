//! Promise: whatever the hub, the network or the machine does during a download, no wrong or unfinished file gets a name in a
//! snapshot, and the next attempt goes on where the last one stopped.

use std::fs;
use std::io::Write;
use std::sync::atomic::AtomicBool;

use crate::common::fake_hub::{Access, FakeHub, Faults, sha256};
use crate::common::prelude::*;
use crate::hub_download::{Downloader, content};
use llmctl_hub::{
    HubClient, HubError, HubPaths, HubSettings, ModelRef, PullEvent, PullExtent, PullObserver, PullPlan,
    RetrySettings, remote_form,
};

/// Counts events, and never stops.
#[derive(Default)]
struct Quiet {
    retries: AtomicUsize,
    restarts: AtomicUsize,
    /// Seconds of all pauses.
    seconds: AtomicUsize,
}

impl PullObserver for Quiet {
    fn event(&self, event: PullEvent) {
        match event {
            PullEvent::Retrying { seconds, .. } => {
                self.seconds.fetch_add(usize::try_from(seconds).expect("short"), Ordering::SeqCst);
                self.retries.fetch_add(1, Ordering::SeqCst)
            }
            PullEvent::Restarted { .. } => self.restarts.fetch_add(1, Ordering::SeqCst),
            _ => 0,
        };
    }

    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A client with small parts and short pauses.
fn settings(hub: &FakeHub) -> HubSettings {
    let pause = Duration::from_millis(1);
    let retry = RetrySettings { attempts: 4, first_pause: pause, longest_pause: Duration::from_secs(5) };
    HubSettings {
        endpoint: hub.url.clone(),
        connections: 4,
        part_bytes: 64 << 10,
        read_timeout: Duration::from_secs(5),
        retry,
        ..HubSettings::default()
    }
}

fn paths(cache: &Path) -> HubPaths {
    HubPaths { cache: Some(cache.to_path_buf()), ..HubPaths::default() }
}

/// Pulls `org/m` into `cache` with a fresh client.
fn pull(hub: &FakeHub, cache: &Path, observer: &dyn PullObserver) -> Result<PullPlan, HubError> {
    let client = HubClient::new(settings(hub))?;
    let reference =
        remote_form(&ModelRef::parse("org/m").expect("a name"), &Default::default()).expect("a repository");
    let plan = PullPlan::new(&client, &reference, &paths(cache), PullExtent::Whole, observer)?;
    plan.run(&client, observer).map(|()| plan)
}

/// A hub with one model of this size, and an empty cache.
struct Case {
    hub: FakeHub,
    cache: TempDir,
    weights: Vec<u8>,
    observer: Quiet,
}

impl Case {
    fn new(len: usize, faults: Faults) -> Self {
        let (hub, weights) = (FakeHub::start(), content(len, len as u64));
        hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
        hub.misbehave(faults);
        Self { hub, cache: tempfile::tempdir().expect("a folder"), weights, observer: Quiet::default() }
    }

    fn pull(&self) -> Result<PullPlan, HubError> {
        pull(&self.hub, self.cache.path(), &self.observer)
    }

    #[track_caller]
    fn check_complete(&self) {
        let plan = self.pull().expect("the download succeeds");
        assert!(fs::read(plan.path()).expect("the model") == self.weights, "the bytes are those of the hub");
    }

    /// Nothing is in a snapshot, and no blob has a final name.
    #[track_caller]
    fn check_nothing_named(&self) {
        let repo = self.cache.path().join("models--org--m");
        assert!(!repo.join("snapshots").exists() && !repo.join("refs").exists());
        let named: Vec<_> = fs::read_dir(repo.join("blobs")).into_iter().flatten().flatten().collect();
        let named =
            named.iter().filter(|entry| !entry.file_name().to_string_lossy().ends_with(".llmctl.incomplete"));
        assert_eq!(named.count(), 0);
    }
}

#[test]
fn parts_in_parallel_give_the_same_file() {
    for len in [0, 1, 65_535, 65_536, 131_072, 131_073, 1_000_000] {
        let case = Case::new(len, Faults::default());
        case.check_complete();
        let ranges = case.hub.transfers().iter().filter(|seen| seen.range.is_some()).count();
        assert_eq!(ranges > 0, len >= 131_072, "{len} bytes in {ranges} ranges");
    }
}

/// Erases the first file that is complete, as another program may.
struct Eraser {
    blobs: PathBuf,
    is_done: AtomicBool,
}

impl PullObserver for Eraser {
    fn event(&self, event: PullEvent) {
        if matches!(event, PullEvent::Finished { .. }) && !self.is_done.swap(true, Ordering::SeqCst) {
            let blobs = fs::read_dir(&self.blobs).expect("blobs").flatten().map(|entry| entry.path());
            let complete = blobs.filter(|path| path.extension().is_none());
            complete.for_each(|path| fs::remove_file(path).expect("erased"));
        }
    }

    fn is_cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_file_that_is_erased_before_it_has_a_link_is_downloaded_again() {
    let case = Case::new(100_000, Faults::default());
    let observer =
        Eraser { blobs: case.cache.path().join("models--org--m/blobs"), is_done: AtomicBool::default() };
    let plan = pull(&case.hub, case.cache.path(), &observer).expect("the download succeeds");
    assert!(fs::read(plan.path()).expect("no dangling link") == case.weights);
}

#[test]
fn a_connection_that_is_cut_goes_on_where_it_stopped() {
    let case = Case::new(1_000_000, Faults { cuts: (20, 10_000), ..Faults::default() });
    case.check_complete();
    assert!(case.observer.retries.load(Ordering::SeqCst) >= 16, "each cut of a first part is repeated");
    assert_eq!(case.observer.restarts.load(Ordering::SeqCst), 0);
    let small = Case::new(100_000, Faults { cuts: (3, 30_000), ..Faults::default() });
    small.check_complete();
    let ranges: Vec<_> = small.hub.transfers().into_iter().map(|seen| seen.range).collect();
    let from = |first: u32| Some(format!("bytes={first}-"));
    assert_eq!(ranges, [None, from(30_000), from(60_000), from(90_000)]);
}

#[test]
fn a_connection_that_gives_nothing_ends_the_download_after_some_attempts() {
    let case = Case::new(100_000, Faults { cuts: (1000, 0), ..Faults::default() });
    let error = case.pull().expect_err("no byte comes");
    assert!(matches!(error, HubError::Unreachable { .. }), "{error:?}");
    case.check_nothing_named();
    assert_eq!(case.hub.transfers().len(), 4);
    case.hub.misbehave(Faults::default());
    case.check_complete();
}

#[test]
fn a_server_without_ranges_is_asked_for_the_whole_file() {
    let case = Case::new(1_000_000, Faults { ignores_ranges: true, ..Faults::default() });
    case.check_complete();
    let resumed = Case::new(100_000, Faults { cuts: (1, 50_000), ignores_ranges: true, ..Faults::default() });
    resumed.check_complete();
    assert!(resumed.observer.restarts.load(Ordering::SeqCst) > 0);
    // Each attempt of a broken connection begins anew and gets no further: the download must end.
    let endless =
        Case::new(100_000, Faults { cuts: (1000, 50_000), ignores_ranges: true, ..Faults::default() });
    endless.pull().expect_err("no progress");
    endless.check_nothing_named();
}

#[test]
fn a_server_that_never_sends_what_is_asked_for_is_given_up() {
    for faults in [
        Faults { later_part: true, ..Faults::default() },
        Faults { cuts: (usize::MAX, 1), ..Faults::default() },
    ] {
        let case = Case::new(100_000, faults.clone());
        let error = case.pull().expect_err("no progress");
        assert!(matches!(error, HubError::Unexpected { .. } | HubError::Unreachable { .. }), "{error:?}");
        assert!(case.hub.transfers().len() < 10, "{faults:?}: {}", case.hub.transfers().len());
        case.check_nothing_named();
    }
}

#[test]
fn wrong_bytes_are_removed_and_never_named() {
    let case = Case::new(300_000, Faults { corrupt: true, ..Faults::default() });
    let error = case.pull().expect_err("wrong bytes");
    assert!(
        matches!(&error, HubError::WrongHash { expected, .. } if *expected == sha256(&case.weights)),
        "{error:?}"
    );
    case.check_nothing_named();
    let blobs = case.cache.path().join("models--org--m/blobs");
    assert_eq!(fs::read_dir(blobs).expect("a folder").count(), 0, "wrong bytes are not resumed");
    case.hub.misbehave(Faults::default());
    case.check_complete();
}

#[test]
fn damaged_bytes_of_an_earlier_download_are_found_out() {
    let case = Case::new(300_000, Faults::default());
    let blobs = case.cache.path().join("models--org--m/blobs");
    fs::create_dir_all(&blobs).expect("mkdir");
    let partial = blobs.join(format!("{}.llmctl.incomplete", sha256(&case.weights)));
    for damaged in [vec![0; 100_000], vec![0; 300_000], vec![1; 400_000]] {
        fs::write(&partial, &damaged).expect("write");
        case.check_complete();
        fs::remove_dir_all(&blobs).expect("removed");
        fs::create_dir_all(&blobs).expect("mkdir");
    }
    fs::write(&partial, &case.weights[..200_000]).expect("write");
    case.hub.forget();
    case.check_complete();
    let first = |range: &str| {
        range.trim_start_matches("bytes=").split('-').next().and_then(|at| at.parse::<u32>().ok())
    };
    let firsts: Vec<_> =
        case.hub.transfers().iter().filter_map(|seen| first(seen.range.as_deref()?)).collect();
    assert!(
        !firsts.is_empty() && firsts.iter().all(|at| *at >= 200_000),
        "only what is missing is asked for: {firsts:?}"
    );
}

#[test]
fn a_file_that_changed_since_it_was_listed_is_not_taken() {
    let case = Case::new(300_000, Faults { other_etag: Some("ab".repeat(32)), ..Faults::default() });
    let error = case.pull().expect_err("another file");
    assert!(matches!(error, HubError::Changed { .. }), "{error:?}");
    case.check_nothing_named();
    case.hub.misbehave(Faults::default());
    case.check_complete();
}

#[test]
fn a_busy_hub_is_asked_again_when_it_says() {
    let limit = vec![("ratelimit", "\"api\";r=0;t=0".to_owned())];
    let case = Case::new(1000, Faults { busy: (2, limit), ..Faults::default() });
    case.check_complete();
    assert_eq!(case.observer.retries.load(Ordering::SeqCst), 2);
    assert_eq!(
        case.observer.seconds.load(Ordering::SeqCst),
        2,
        "a window ends one second after its last one"
    );
    let later = vec![("Retry-After", "3600".to_owned())];
    let case = Case::new(1000, Faults { busy: (1, later), ..Faults::default() });
    let error = case.pull().expect_err("an hour is too long to wait");
    assert!(matches!(error, HubError::RateLimited { seconds: 3600, .. }), "{error:?}");
    let case = Case::new(1000, Faults { failing: (3, 503), ..Faults::default() });
    case.check_complete();
    let case = Case::new(1000, Faults { failing: (100, 500), ..Faults::default() });
    assert!(matches!(case.pull(), Err(HubError::Unreachable { .. })));
}

#[test]
fn a_full_disk_is_seen_before_the_download() {
    let case = Case::new(300_000, Faults::default());
    let client = HubClient::new(settings(&case.hub)).expect("a client");
    let reference =
        remote_form(&ModelRef::parse("org/m").expect("a name"), &Default::default()).expect("a repository");
    let plan =
        PullPlan::new(&client, &reference, &paths(case.cache.path()), PullExtent::Whole, &case.observer)
            .expect("a plan");
    assert_eq!((plan.total_bytes, plan.missing_bytes()), (300_000, 300_000));
    let error = plan.check_space(Some(299_999)).expect_err("too little");
    assert!(matches!(error, HubError::DiskFull { needed: 300_000, free: Some(299_999), .. }), "{error:?}");
    plan.check_space(Some(300_000)).expect("enough");
    plan.check_space(None).expect("not known");
}

/// A file system of 4 MiB, or `None` (said on stderr) where this user may not mount one.
#[cfg(target_os = "linux")]
fn small_disk() -> Option<(TempDir, impl Drop)> {
    struct Mounted(PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&self.0).status();
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "llmctl-test"])
        .arg(folder.path())
        .stderr(Stdio::null())
        .status();
    if !mount.is_ok_and(|status| status.success()) {
        crate::common::skip("this user may not mount a tmpfs");
        return None;
    }
    let mounted = Mounted(folder.path().to_path_buf());
    Some((folder, mounted))
}

#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_fills_up_meanwhile_keeps_the_partial_file() {
    let Some((disk, _mounted)) = small_disk() else { return };
    let case = Case::new(2_000_000, Faults { cuts: (1000, 500_000), ..Faults::default() });
    let ballast = disk.path().join("ballast");
    fs::write(&ballast, vec![0; 3 << 20]).expect("room for the ballast");
    let error = pull(&case.hub, disk.path(), &case.observer).expect_err("the disk is full");
    assert!(matches!(error, HubError::DiskFull { .. }), "{error:?}");
    let blobs = disk.path().join("models--org--m/blobs");
    let partial = blobs.join(format!("{}.llmctl.incomplete", sha256(&case.weights)));
    let kept = fs::metadata(&partial).expect("the partial file").len();
    assert!(kept > 0, "what fitted is kept");
    fs::remove_file(ballast).expect("removed");
    case.hub.forget();
    let plan = pull(&case.hub, disk.path(), &case.observer).expect("it goes on");
    assert!(fs::read(plan.path()).expect("the model") == case.weights);
    assert!(case.hub.transfers().iter().all(|seen| seen.range.is_some()), "nothing begins anew");
}

#[test]
fn two_processes_share_one_download() {
    let user = Downloader::new();
    let weights = content(400_000, 7);
    user.hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
    user.hub.misbehave(Faults { pause: Some(Duration::from_millis(40)), ..Faults::default() });
    let start = || {
        let mut command = user.command(&["pull", "org/m"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("llmctl starts")
    };
    let both = [start(), start()].map(|child| child.wait_with_output().expect("llmctl ends"));
    let said = both.each_ref().map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(both.iter().all(|output| output.status.success()), "{said:?}");
    assert_eq!(user.hub.transfers().len(), 1, "{:?}", user.hub.transfers());
    let waiting = said.iter().filter(|said| said.contains("another process is downloading it")).count();
    assert!(waiting <= 1, "{said:?}");
    for output in &both {
        let path = String::from_utf8_lossy(&output.stdout);
        assert!(fs::read(path.trim()).expect("the model") == weights);
    }
}

#[test]
fn a_process_that_waits_for_another_says_so() {
    let user = Downloader::new();
    let weights = content(100_000, 7);
    user.hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
    let locks = user.cache().join(".locks/models--org--m");
    fs::create_dir_all(&locks).expect("mkdir");
    let lock = File::create(locks.join(format!("{}.lock", sha256(&weights)))).expect("a lock file");
    lock.lock().expect("free");
    let mut command = user.command(&["pull", "org/m"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("llmctl starts");
    let mut stderr = child.stderr.take().expect("piped");
    let lines: Vec<String> = (0..2).map(|_| crate::cli::read_line(&mut stderr)).collect();
    assert!(lines[1].contains("another process is downloading it; waiting"), "{lines:?}");
    assert!(user.hub.transfers().is_empty());
    drop(lock);
    assert!(child.wait().expect("llmctl ends").success());
    assert_eq!(user.hub.transfers().len(), 1);
}

#[test]
fn a_hundred_kills_cost_nothing_that_was_received() {
    const KILLS: usize = 100;
    let user = Downloader::new();
    let weights = content(20 << 20, 9);
    let commit = user.hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
    user.hub.misbehave(Faults { pause: Some(Duration::from_millis(6)), ..Faults::default() });
    let moments = content(KILLS, crate::common::seed());
    let link = user.in_repo("org/m", &format!("snapshots/{commit}/m-Q8_0.gguf"));
    let hash = sha256(&weights);
    let blob = user.in_repo("org/m", &format!("blobs/{hash}"));
    let partial = user.in_repo("org/m", &format!("blobs/{hash}.llmctl.incomplete"));
    let (mut num_complete, mut num_resumed) = (0, 0);
    for (kill, moment) in moments.into_iter().enumerate() {
        let before = fs::metadata(&partial).map_or(0, |partial| partial.len());
        let mut command = user.command(&["pull", "org/m", "--quiet"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("llmctl starts");
        // Half of the kills come at any moment since the start, the other half while bytes arrive.
        let limit = Instant::now() + Duration::from_secs(60);
        let is_idle =
            || fs::metadata(&partial).map_or(0, |partial| partial.len()) <= before && !blob.exists();
        while kill % 2 == 1 && is_idle() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(u64::from(moment)));
        child.kill().expect("SIGKILL");
        child.wait().expect("ended");
        let after = fs::metadata(&partial).map_or(0, |partial| partial.len());
        num_resumed += usize::from(before > 0 && after > before);
        if blob.exists() {
            assert!(fs::read(&blob).expect("the blob") == weights, "a blob is complete");
            num_complete += 1;
            fs::remove_dir_all(user.in_repo("org/m", "")).expect("removed");
        } else {
            assert!(after >= before, "{after} of {before} bytes are left");
            assert!(!link.exists() && fs::symlink_metadata(&link).is_err(), "no link without its blob");
            let kept = fs::read(&partial).unwrap_or_default();
            assert!(weights.starts_with(&kept), "the partial file is the beginning of the model");
        }
    }
    eprintln!("{num_complete} complete downloads and {num_resumed} resumed ones in {KILLS} kills");
    assert!(num_resumed > 0, "no download was resumed");
    user.hub.misbehave(Faults::default());
    let ran = user.run(&["pull", "org/m"]);
    ran.check(0, "");
    assert!(fs::read(ran.stdout.trim()).expect("the model") == weights);
}

#[cfg(unix)]
#[test]
fn an_interrupt_keeps_the_partial_file_and_says_how_to_go_on() {
    let user = Downloader::new();
    let weights = content(2 << 20, 9);
    user.hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
    user.hub.misbehave(Faults { pause: Some(Duration::from_millis(20)), ..Faults::default() });
    let partial = user.in_repo("org/m", &format!("blobs/{}.llmctl.incomplete", sha256(&weights)));
    let len = || fs::metadata(&partial).map_or(0, |partial| partial.len());
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let before = len();
        let mut command = user.command(&["run", "--model", "org/m", "hi"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("llmctl starts");
        let limit = Instant::now() + Duration::from_secs(60);
        while len() <= before && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(i32::try_from(child.id()).expect("a process id"), signal) };
        let output = child.wait_with_output().expect("llmctl ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("`llmctl pull org/m:Q8_0` continues where it stopped"), "{said}");
        assert!(len() > before);
    }
    user.hub.misbehave(Faults::default());
    user.run(&["pull", "org/m:Q8_0"]).check(0, "continuing after");
}

/// A proxy that opens tunnels (RFC 9110, CONNECT) and counts them.
fn proxy() -> (String, Arc<AtomicUsize>) {
    use std::io::{BufRead, BufReader};
    use std::net::{TcpListener, TcpStream};
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://user:secret@{}", listener.local_addr().expect("bound"));
    let count = Arc::new(AtomicUsize::new(0));
    let tunnels = count.clone();
    let tunnel = move |client: TcpStream| -> std::io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut first = String::new();
        reader.read_line(&mut first)?;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                break;
            }
        }
        let target = first.split_whitespace().nth(1).unwrap_or_default().to_owned();
        let mut server = TcpStream::connect(target.trim_start_matches("http://"))?;
        (&client).write_all(b"HTTP/1.1 200 ok\r\n\r\n")?;
        tunnels.fetch_add(1, Ordering::SeqCst);
        let (mut up, mut down) = (server.try_clone()?, client.try_clone()?);
        std::thread::spawn(move || std::io::copy(&mut reader, &mut up).map(drop));
        std::io::copy(&mut server, &mut down).map(drop)?;
        client.shutdown(std::net::Shutdown::Both)
    };
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let tunnel = tunnel.clone();
            // A broken tunnel is the client's to report.
            std::thread::spawn(move || drop(tunnel(client)));
        }
    });
    (address, count)
}

#[test]
fn proxies_of_the_environment_are_used_and_their_passwords_not_shown() {
    let user = Downloader::new();
    user.hub.publish("org/m", Access::Open, &[("m-Q8_0.gguf", &content(1000, 1))]);
    let (address, tunnels) = proxy();
    let mut command = user.command(&["pull", "org/m", "-vv"]);
    command.env("HTTP_PROXY", &address);
    let ran = finish(command, "");
    assert!(!ran.check(0, "").stderr.contains("secret"), "{ran:?}");
    assert!(tunnels.load(Ordering::SeqCst) > 0);
    let before = tunnels.load(Ordering::SeqCst);
    fs::remove_dir_all(user.cache()).expect("removed");
    let mut command = user.command(&["pull", "org/m"]);
    command.env("HTTP_PROXY", &address).env("NO_PROXY", "127.0.0.1,localhost");
    finish(command, "").check(0, "");
    assert_eq!(tunnels.load(Ordering::SeqCst), before, "NO_PROXY names both hosts");
    let mut command = user.command(&["pull", "org/m"]);
    command.env("HTTP_PROXY", "http://user:secret@bad host");
    let ran = finish(command, "");
    assert!(!ran.check(78, "HTTP_PROXY: is not the address of a proxy").stderr.contains("secret"), "{ran:?}");
}
