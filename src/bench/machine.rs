//! The machine of a run: its description, its limits, and other load on it.
//!
//! Reads below an injectable root ("/" in production), so that tests can use sample files. Values that cannot
//! be read are unknown, never an error.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::record::{HostFacts, Load, Probe};
use crate::error::BenchError;
use llmctl_base::machine;
use llmctl_kernel::limits;
use llmctl_models::memory;

/// Duration of a probe.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// Returns the facts that do not change during a run.
pub fn facts(root: &Path) -> HostFacts {
    let features = machine::cpu_features().into_iter().filter(|feature| feature.available);
    HostFacts {
        cpu: machine::cpu_model(root),
        processors: machine::cpu_count(root),
        quota: machine::cpu_quota(root),
        features: features.map(|feature| feature.name.to_owned()).collect(),
        memory_bytes: memory::tightest(&memory::memory_limits(root)).map(|limit| limit.total),
        ..HostFacts::default()
    }
}

/// Measures the machine's limits with this many threads. Takes two seconds and 256 MiB.
///
/// # Errors
/// [`BenchError::Threads`] if the system cannot start the threads.
pub fn probe(threads: usize) -> Result<Probe, BenchError> {
    let found = limits::probe(threads, PROBE_TIME).map_err(BenchError::Threads)?;
    Ok(Probe { threads, read_gb_s: found.read_gb, int8_gop_s: found.int8_gop, f32_gop_s: found.f32_gop })
}

/// Returns the most bytes that this process had resident since the last [`forget_peak`].
pub fn peak_memory(root: &Path) -> Option<u64> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Resets the peak (proc(5), clear_refs). Where the system does not allow it, the old one stays.
pub fn forget_peak(root: &Path) {
    let _ = fs::write(root.join("proc/self/clear_refs"), "5");
}

/// Counters of the system at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Clock ticks of all processors.
    total: u64,
    idle: u64,
    steal: u64,
    /// Clock ticks of this process.
    own: u64,
    throttled_us: u64,
    hot: u64,
}

impl Counters {
    /// Reads the counters; `None` if the system has none.
    pub fn read(root: &Path) -> Option<Self> {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok();
        let (total, idle, steal) = parse_stat(&text("proc/stat")?)?;
        let own = parse_own(&text("proc/self/stat")?)?;
        Some(Self { total, idle, steal, own, throttled_us: throttled(root), hot: hot(root) })
    }

    /// Returns the load between `self` and `later`.
    pub fn until(&self, later: &Counters) -> Load {
        let share = |ticks: u64| {
            let total = later.total.saturating_sub(self.total);
            if total == 0 { 0.0 } else { ticks as f64 / total as f64 }
        };
        let total = later.total.saturating_sub(self.total);
        let idle = later.idle.saturating_sub(self.idle);
        let steal = later.steal.saturating_sub(self.steal);
        let own = later.own.saturating_sub(self.own);
        Load {
            steal: share(steal),
            others: share(total.saturating_sub(idle + steal + own)),
            throttled_s: later.throttled_us.saturating_sub(self.throttled_us) as f64 / 1e6,
            hot: later.hot.saturating_sub(self.hot),
        }
    }
}

/// Returns all, idle and stolen ticks of the first line of /proc/stat (proc(5)): user, nice, system, idle,
/// iowait, irq, softirq, steal. Guest time is part of user time.
fn parse_stat(text: &str) -> Option<(u64, u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> =
        line.split_whitespace().take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
    let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
    Some((ticks.iter().sum(), at(3) + at(4), at(7)))
}

/// Returns user and system ticks of /proc/self/stat. The command's name, in parentheses, may contain
/// anything.
fn parse_own(text: &str) -> Option<u64> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(ticks(11)? + ticks(12)?)
}

/// Returns the microseconds that a quota held this process's cgroup, or one around it, back; the largest of
/// them.
fn throttled(root: &Path) -> u64 {
    let dirs = machine::cgroup_dirs(root, "cpu");
    let stats = dirs.iter().flat_map(|group| &group.dirs).filter_map(|dir| {
        let text = fs::read_to_string(dir.join("cpu.stat")).ok()?;
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
        };
        field("throttled_usec").or_else(|| Some(field("throttled_time")? / 1000))
    });
    stats.max().unwrap_or(0)
}

/// Returns how often a core was slowed down because of heat, over all cores.
fn hot(root: &Path) -> u64 {
    let Ok(cores) = fs::read_dir(root.join("sys/devices/system/cpu")) else { return 0 };
    let count = |core: fs::DirEntry| {
        let text = fs::read_to_string(core.path().join("thermal_throttle/core_throttle_count")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    cores.flatten().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, text).expect("write");
    }

    /// Builds a root with these counters.
    fn counters(stat: &str, own: &str, throttled: &str, hot: &str) -> Counters {
        let root = tempfile::tempdir().expect("tempdir");
        write(root.path(), "proc/stat", stat);
        write(root.path(), "proc/self/stat", own);
        write(root.path(), "proc/self/cgroup", "0::/job\n");
        let mount = "31 22 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        write(root.path(), "proc/self/mountinfo", mount);
        write(root.path(), "sys/fs/cgroup/job/cpu.stat", throttled);
        write(root.path(), "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", hot);
        Counters::read(root.path()).expect("counters")
    }

    #[test]
    fn who_used_the_machine_is_told_apart() {
        let before = counters(
            "cpu  100 0 100 800 0 0 0 0 50 0\ncpu0 1 2 3 4\n",
            "7 (a) b) R 1 7 7 0 -1 0 0 0 0 0 60 40 0 0 20 0",
            "usage_usec 5\nthrottled_usec 1000000\n",
            "3\n",
        );
        let after = counters(
            "cpu  600 0 200 1100 0 0 0 100 50 0\n",
            "7 (a) b) R 1 7 7 0 -1 0 0 0 0 0 360 140 0 0 20 0",
            "usage_usec 5\nthrottled_usec 3500000\n",
            "5\n",
        );
        let load = before.until(&after);
        assert_eq!(load, Load { steal: 0.1, others: 0.2, throttled_s: 2.5, hot: 2 });
        assert_eq!(after.until(&after), Load::default());
    }

    #[test]
    fn what_the_system_does_not_tell_is_unknown() {
        let root = tempfile::tempdir().expect("tempdir");
        assert_eq!(Counters::read(root.path()), None);
        assert_eq!(peak_memory(root.path()), None);
        forget_peak(root.path());
        write(root.path(), "proc/stat", "cpu  x\n");
        write(root.path(), "proc/self/stat", "no name");
        assert_eq!(Counters::read(root.path()), None);
        write(root.path(), "proc/self/status", "Name:\tx\nVmHWM:\t  2048 kB\n");
        assert_eq!(peak_memory(root.path()), Some(2 << 20));
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = facts(Path::new("/"));
        if cfg!(target_os = "linux") {
            assert!(facts.processors.is_some_and(|count| count > 0), "{facts:?}");
            assert!(Counters::read(Path::new("/")).is_some());
            assert!(peak_memory(Path::new("/")).is_some());
        }
    }
}
