//! Memory limits of this process, and whether a model fits into them.
//!
//! The kernel kills a process that exceeds its cgroup's limit without a message, so the limits are checked
//! before loading: all are read (cgroup and parents, the machine, the process's own), the smallest counts,
//! and `fit` computes the largest context that fits. Swap is left out on purpose: weights are read once per
//! token, and a model that swaps is slower than none. `fit` is pure; the reader takes a root. `give_back`
//! returns free memory that the allocator holds.

use std::fs;
use std::path::{Path, PathBuf};

use llmctl_base::error::LoadError;
use llmctl_base::machine::{CgroupDirs, cgroup_dirs};

/// Origin of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// A control group: a container, a systemd unit, a batch job.
    Cgroup,
    /// The machine's memory that is free or can be freed without swapping.
    System,
    /// `ulimit -v`.
    AddressSpace,
    /// `ulimit -d`: writable memory. Mapped files do not count.
    Data,
    /// The memory of a GPU.
    Device,
}

/// One limit on this process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    pub kind: LimitKind,
    /// File that the limit was read from; the name of a GPU.
    pub source: PathBuf,
    /// The limit in bytes.
    pub total: u64,
    /// Bytes not yet taken, including page cache that the kernel would free.
    pub available: u64,
}

/// Reads all limits under `root` ("/" in production). Returns an empty list on systems without these files (not
/// Linux); no model is then refused beforehand.
pub fn memory_limits(root: &Path) -> Vec<MemoryLimit> {
    let mut limits: Vec<MemoryLimit> = cgroup_dirs(root, "memory").iter().flat_map(cgroup_limits).collect();
    let meminfo = root.join("proc/meminfo");
    if let Some((total, available)) = read(&meminfo).as_deref().and_then(parse_meminfo) {
        limits.push(MemoryLimit { kind: LimitKind::System, source: meminfo, total, available });
    }
    limits.extend(own_limit(root, LimitKind::AddressSpace, "Max address space", "VmSize:"));
    limits.extend(own_limit(root, LimitKind::Data, "Max data size", "VmData:"));
    limits
}

/// Returns the limit with the fewest available bytes.
pub fn tightest(limits: &[MemoryLimit]) -> Option<&MemoryLimit> {
    limits.iter().min_by_key(|limit| limit.available)
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn cgroup_limits(group: &CgroupDirs) -> Vec<MemoryLimit> {
    group.dirs.iter().filter_map(|dir| cgroup_limit(group.version, dir)).collect()
}

fn cgroup_limit(version: u8, dir: &Path) -> Option<MemoryLimit> {
    let bytes = |name: &str| read(&dir.join(name)).as_deref().and_then(parse_bytes);
    let (source, total, used) = if version == 2 {
        // Above memory.high the kernel throttles the process nearly to a halt, so it counts as a limit.
        let (max, high) = (bytes("memory.max"), bytes("memory.high"));
        let by_high = high.is_some_and(|high| max.is_none_or(|max| high < max));
        let source = if by_high { "memory.high" } else { "memory.max" };
        (source, if by_high { high? } else { max? }, bytes("memory.current")?)
    } else {
        ("memory.limit_in_bytes", bytes("memory.limit_in_bytes")?, bytes("memory.usage_in_bytes")?)
    };
    let reclaimable = read(&dir.join("memory.stat")).map_or(0, |stat| parse_reclaimable(&stat));
    let available = total.saturating_sub(used.saturating_sub(reclaimable));
    Some(MemoryLimit { kind: LimitKind::Cgroup, source: dir.join(source), total, available })
}

/// Parses a byte count; `None` for v2's `max` and for v1's equivalent, the largest page-aligned i64.
fn parse_bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes: &u64| bytes < 1 << 62)
}

/// Sums the clean page cache charged to the group, most of which is the model file after an earlier run. v1 prefixes
/// hierarchical sums with `total_`; its plain names count the group alone.
fn parse_reclaimable(stat: &str) -> u64 {
    let field = |name: &str| {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    let sum = |names: [&str; 2]| names.iter().filter_map(|name| field(name)).fold(0, u64::saturating_add);
    if field("total_inactive_file").is_some() {
        let cache = sum(["total_inactive_file", "total_active_file"]);
        return cache.saturating_sub(sum(["total_dirty", "total_writeback"]));
    }
    sum(["inactive_file", "active_file"]).saturating_sub(sum(["file_dirty", "file_writeback"]))
}

/// Parses MemTotal and MemAvailable of /proc/meminfo, in bytes.
fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let kibibytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((kibibytes("MemTotal")?, kibibytes("MemAvailable")?))
}

/// Reads a limit of this process by its name in /proc/self/limits, and the bytes that count against it by name in
/// /proc/self/status; `None` if it is `unlimited`.
fn own_limit(root: &Path, kind: LimitKind, name: &str, taken: &str) -> Option<MemoryLimit> {
    let source = root.join("proc/self/limits");
    let total = first_word_after(&read(&source)?, name).and_then(|word| parse_bytes(&word))?;
    let status = read(&root.join("proc/self/status")).unwrap_or_default();
    let kibibytes = first_word_after(&status, taken).and_then(|word| word.parse::<u64>().ok());
    let taken = kibibytes.unwrap_or(0).saturating_mul(1024);
    Some(MemoryLimit { kind, source, total, available: total.saturating_sub(taken) })
}

fn first_word_after(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next().map(str::to_owned)
}

/// Memory that a model needs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// All weights in their form in memory.
    pub weights: u64,
    /// Keys and values of one token, in all layers with full attention.
    pub kv_per_token: u64,
    /// KV that does not grow with the context: windows, and the unused rest of a last page.
    pub kv_fixed: u64,
    /// Everything else that does not grow with the context: activations, logits, tokenizer, recurrent states.
    pub fixed: u64,
}

/// Result of [`fit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFit {
    /// Bytes for the requested context.
    pub needed: u64,
    pub available: u64,
    pub context: usize,
    /// The largest context, at most the requested one, that fits; `None` if not even one token does.
    pub largest_context: Option<usize>,
}

/// Computes whether `demand` with `context` tokens fits into `available` bytes. Sums saturate, so that a file with
/// absurd sizes is refused as too big.
pub fn fit(demand: Demand, context: usize, available: u64) -> MemoryFit {
    let base = demand.weights.saturating_add(demand.fixed).saturating_add(demand.kv_fixed);
    let needed = base.saturating_add(demand.kv_per_token.saturating_mul(context as u64));
    let largest_context = available.checked_sub(base).and_then(|left| {
        let tokens = left.checked_div(demand.kv_per_token).unwrap_or(u64::MAX);
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX).min(context);
        (tokens > 0).then_some(tokens)
    });
    MemoryFit { needed, available, context, largest_context }
}

impl MemoryFit {
    /// Returns whether the requested context fits.
    pub fn fits(&self) -> bool {
        self.needed <= self.available
    }

    /// # Errors
    /// [`LoadError::TooBig`] if it does not fit.
    pub fn check(&self) -> Result<(), LoadError> {
        if self.fits() {
            return Ok(());
        }
        Err(LoadError::TooBig {
            needed: self.needed,
            available: self.available,
            context: self.context,
            largest_context: self.largest_context,
        })
    }
}

/// Returns free memory that the allocator holds to the system; called after a phase that used much memory once. glibc
/// keeps free memory per thread; other allocators return it themselves.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number; what it looks at is behind the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A root with the files of a process in cgroup `/app/job`, v2, mounted at the usual place.
    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            let root = Self(tempfile::tempdir().expect("tempdir"));
            root.write(
                "proc/meminfo",
                "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n",
            );
            root.write("proc/self/cgroup", "4:memory:/v1\n0::/app/job\n");
            root.write(
                "proc/self/mountinfo",
                "31 22 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n32 22 0:28 / /sys/v1 rw - cgroup c rw,memory\n",
            );
            root
        }

        fn write(&self, path: &str, text: &str) -> &Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
            fs::write(path, text).expect("write");
            self
        }

        fn tightest(&self) -> (LimitKind, u64, String) {
            let limits = memory_limits(self.0.path());
            let limit = tightest(&limits).expect("a limit");
            let source = limit.source.strip_prefix(self.0.path()).expect("below the root");
            (limit.kind, limit.available, source.display().to_string())
        }
    }

    #[test]
    fn without_a_cgroup_limit_the_machine_counts() {
        let root = Root::new();
        root.write("sys/fs/cgroup/app/job/memory.max", "max\n");
        root.write("sys/fs/cgroup/app/job/memory.current", "1000\n");
        assert_eq!(root.tightest(), (LimitKind::System, 8 * GIB, "proc/meminfo".into()));
    }

    #[test]
    fn a_parents_limit_counts() {
        let root = Root::new();
        root.write("sys/fs/cgroup/app/job/memory.max", "max\n");
        root.write("sys/fs/cgroup/app/job/memory.current", "1000\n");
        root.write("sys/fs/cgroup/app/memory.max", &format!("{}\n", 4 * GIB));
        root.write("sys/fs/cgroup/app/memory.current", &format!("{GIB}\n"));
        assert_eq!(root.tightest(), (LimitKind::Cgroup, 3 * GIB, "sys/fs/cgroup/app/memory.max".into()));
    }

    #[test]
    fn page_cache_is_given_back_but_dirty_pages_are_not() {
        let root = Root::new();
        root.write("sys/fs/cgroup/app/job/memory.max", &format!("{}\n", 4 * GIB));
        root.write("sys/fs/cgroup/app/job/memory.current", &format!("{}\n", 3 * GIB));
        root.write(
            "sys/fs/cgroup/app/job/memory.stat",
            &format!(
                "anon 5\nfile 7\nfile_dirty 96\nfile_writeback 4\ninactive_file {GIB}\nactive_file {GIB}\n"
            ),
        );
        assert_eq!(root.tightest().1, 3 * GIB - 100);
    }

    #[test]
    fn memory_high_is_a_limit_too() {
        let root = Root::new();
        root.write("sys/fs/cgroup/app/job/memory.max", "max\n");
        root.write("sys/fs/cgroup/app/job/memory.high", &format!("{GIB}\n"));
        root.write("sys/fs/cgroup/app/job/memory.current", "24\n");
        assert_eq!(
            root.tightest(),
            (LimitKind::Cgroup, GIB - 24, "sys/fs/cgroup/app/job/memory.high".into())
        );
    }

    #[test]
    fn the_older_hierarchy_is_read() {
        let root = Root::new();
        root.write("sys/v1/v1/memory.limit_in_bytes", &format!("{}\n", 2 * GIB));
        root.write("sys/v1/v1/memory.usage_in_bytes", &format!("{GIB}\n"));
        root.write(
            "sys/v1/v1/memory.stat",
            "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 24\ntotal_dirty 4\ntotal_writeback 0\n",
        );
        root.write("sys/v1/memory.limit_in_bytes", "9223372036854771712\n");
        root.write("sys/v1/memory.usage_in_bytes", "1\n");
        assert_eq!(root.tightest(), (LimitKind::Cgroup, GIB + 520, "sys/v1/v1/memory.limit_in_bytes".into()));
    }

    #[test]
    fn address_space_counts_what_is_mapped() {
        let root = Root::new();
        let limits = "MemoryLimit Soft Hard Units\nMax address space         1073741824           unlimited            bytes\n";
        root.write("proc/self/limits", limits).write("proc/self/status", "Name:\tx\nVmSize:\t     1024 kB\n");
        assert_eq!(root.tightest(), (LimitKind::AddressSpace, GIB - (1 << 20), "proc/self/limits".into()));
        let unlimited = "Max address space         unlimited            unlimited            bytes\n";
        root.write("proc/self/limits", unlimited);
        assert_eq!(root.tightest().0, LimitKind::System);
    }

    #[test]
    fn what_may_be_written_to_is_limited_too() {
        let root = Root::new();
        let limits = "Max data size             1073741824           1073741824           bytes\n";
        root.write("proc/self/limits", limits)
            .write("proc/self/status", "VmSize:\t9 kB\nVmData:\t 2048 kB\n");
        assert_eq!(root.tightest(), (LimitKind::Data, GIB - (2 << 20), "proc/self/limits".into()));
    }

    #[test]
    fn usage_above_the_limit_leaves_nothing() {
        let root = Root::new();
        root.write("sys/fs/cgroup/app/job/memory.max", "100\n");
        root.write("sys/fs/cgroup/app/job/memory.current", "200\n");
        assert_eq!(root.tightest().1, 0);
    }

    #[test]
    fn nothing_known_is_no_limit() {
        let root = tempfile::tempdir().expect("tempdir");
        assert!(memory_limits(root.path()).is_empty());
        assert_eq!(tightest(&[]), None);
    }

    #[test]
    fn this_process_has_some_memory() {
        if cfg!(target_os = "linux") {
            let limits = memory_limits(Path::new("/"));
            assert!(
                tightest(&limits).is_some_and(|limit| limit.available > 0 && limit.available <= limit.total)
            );
        }
    }

    fn largest(demand: Demand, context: usize, available: u64) -> (bool, Option<usize>) {
        let fit = fit(demand, context, available);
        (fit.fits(), fit.largest_context)
    }

    #[test]
    fn the_largest_context_is_exact() {
        let demand = Demand { weights: 1000, kv_per_token: 10, kv_fixed: 30, fixed: 20 };
        assert_eq!(largest(demand, 100, 2050), (true, Some(100)));
        assert_eq!(largest(demand, 100, 2049), (false, Some(99)));
        assert_eq!(largest(demand, 100, 1060), (false, Some(1)));
        assert_eq!(largest(demand, 100, 1059), (false, None));
        assert_eq!(largest(demand, 100, 999), (false, None));
        for available in 1060..2100 {
            let (_, context) = largest(demand, 100, available);
            assert!(fit(demand, context.expect("one token fits"), available).fits(), "{available}");
        }
    }

    #[test]
    fn a_model_without_kv_fits_with_any_context() {
        assert_eq!(largest(Demand { weights: 10, ..Demand::default() }, 5, 10), (true, Some(5)));
    }

    #[test]
    fn absurd_sizes_saturate() {
        let demand =
            Demand { weights: u64::MAX, kv_per_token: u64::MAX, kv_fixed: u64::MAX, fixed: u64::MAX };
        assert_eq!(largest(demand, usize::MAX, 1 << 40), (false, None));
        assert_eq!(fit(demand, usize::MAX, 1 << 40).needed, u64::MAX);
    }

    #[test]
    fn too_big_names_the_largest_context() {
        let demand = Demand { weights: 100, kv_per_token: 1, ..Demand::default() };
        match fit(demand, 1000, 600).check() {
            Err(LoadError::TooBig {
                needed: 1100,
                available: 600,
                context: 1000,
                largest_context: Some(500),
            }) => {}
            other => panic!("{other:?}"),
        }
    }
}
