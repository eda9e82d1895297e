//! Processors that this process may use, by kind, and the number of threads to compute with.
//!
//! A thread for each physical performance core: the second thread of a core shares its multipliers and its
//! outstanding cache lines, so it adds nothing to products or to reading weights; a much slower core is still
//! at work on its task when the others have finished the region. No thread is bound to a processor: the
//! system moves threads away from processors that others use, and what binding gains was not measured on a
//! machine with several memory nodes. Weights are spread over the nodes instead
//! ([`MemoryNodes`](llmctl_kernel::memory::MemoryNodes)).
//!
//! Sources: Linux's Documentation/ABI/testing/sysfs-devices-system-cpu and sysfs-devices-node, and for
//! Intel's hybrids the processor lists of the PMUs `cpu_core` and `cpu_atom`; Apple's `sysctl` names
//! `hw.perflevel0.*`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use super::cpu_quota;

/// Share of the fastest core's capacity below which a core counts as slow. Cores that differ less are those of one kind
/// with different highest frequencies (0.7 and more); efficiency cores have a half and less.
const SLOW: f64 = 0.6;

/// Counts of what this process may use; the machine may have more.
#[derive(Debug, Clone, PartialEq)]
pub struct Cores {
    /// Processors of the machine that are online, as the system counts them.
    pub online: usize,
    /// Processors that the affinity mask (and with it the cpuset) allows.
    pub allowed: usize,
    /// Cores of the allowed processors: those of one core count once.
    pub physical: usize,
    /// Cores among them that are not much slower than the fastest.
    pub performance: usize,
    /// Numbers of the memory nodes that they belong to; empty if the system does not tell.
    pub nodes: BTreeSet<usize>,
    /// Last-level caches (L3, else L2) that they share.
    pub caches: usize,
    /// The cgroup's limit of processor time, in processors.
    pub quota: Option<f64>,
}

impl Cores {
    /// Reads below `root` ("/" in production). `None` if the system does not list its processors there.
    pub fn read(root: &Path) -> Option<Cores> {
        let machine = Sysfs(root);
        let online = machine.cpus("sys/devices/system/cpu/online")?;
        let allowed = machine.allowed(&online);
        let physical: BTreeSet<usize> = allowed.iter().map(|&cpu| machine.core(cpu)).collect();
        Some(Cores {
            online: online.len(),
            allowed: allowed.len(),
            performance: machine.fast(&physical, &online).max(1),
            physical: physical.len(),
            nodes: machine.nodes(&allowed),
            caches: machine.caches(&allowed).max(1),
            quota: cpu_quota(root),
        })
    }

    /// Reads Apple's numbers; `number` returns that of a `sysctl` name. `None` without them.
    #[cfg(any(target_os = "macos", test))]
    fn from_sysctl(number: impl Fn(&str) -> Option<usize>) -> Option<Cores> {
        let (online, physical) = (number("hw.logicalcpu")?, number("hw.physicalcpu")?);
        let performance = number("hw.perflevel0.physicalcpu").unwrap_or(physical);
        let shared_by = number("hw.perflevel0.cpusperl2").unwrap_or(performance);
        let caches = performance.div_ceil(shared_by.max(1)).max(1);
        Some(Cores {
            online,
            allowed: online,
            physical,
            performance,
            nodes: BTreeSet::new(),
            caches,
            quota: None,
        })
    }

    /// Describes the machine that this program runs on, as it was at the first call: Linux tells it in seven files or
    /// more for each processor.
    pub fn here() -> &'static Cores {
        static HERE: LazyLock<Cores> = LazyLock::new(|| {
            #[cfg(target_os = "macos")]
            let found = Cores::from_sysctl(sysctl);
            #[cfg(not(target_os = "macos"))]
            let found = Cores::read(Path::new("/"));
            found.unwrap_or_else(|| Cores::alike(std::thread::available_parallelism().map_or(1, usize::from)))
        });
        &HERE
    }

    /// Describes `count` processors of which nothing else is known.
    fn alike(count: usize) -> Cores {
        let [online, allowed, physical, performance] = [count; 4];
        Cores { online, allowed, physical, performance, nodes: BTreeSet::new(), caches: 1, quota: None }
    }

    /// Returns the number of threads to compute with. More threads than the quota are throttled together and run many
    /// times slower.
    pub fn threads(&self) -> usize {
        self.performance.min(self.whole_quota()).max(1)
    }

    fn whole_quota(&self) -> usize {
        self.quota.map_or(usize::MAX, |quota| (quota as usize).max(1))
    }

    /// Returns the reason for [`Self::threads`].
    pub fn reason(&self) -> String {
        let Cores { online, allowed, physical, performance, .. } = *self;
        if let Some(quota) = self.quota.filter(|_| self.whole_quota() < performance) {
            return format!("the cgroup's quota of {quota:.2} CPUs");
        }
        let mut reason = match () {
            () if performance < physical => format!("the performance cores of {physical} cores"),
            () if physical < allowed => format!("a thread per core, not per hardware thread: {allowed}"),
            () => "a thread per core".to_owned(),
        };
        if allowed < online {
            reason += &format!("; the affinity mask allows {allowed} of {online} CPUs");
        }
        reason
    }
}

/// Linux's files on processors below a root.
struct Sysfs<'a>(&'a Path);

impl Sysfs<'_> {
    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.0.join(path)).ok()
    }

    fn number(&self, path: &str) -> Option<f64> {
        self.text(path)?.trim().parse().ok()
    }

    fn cpus(&self, path: &str) -> Option<BTreeSet<usize>> {
        parse_cpu_list(&self.text(path)?)
    }

    /// Returns the processors of the affinity mask, which the kernel keeps within the cpuset.
    fn allowed(&self, online: &BTreeSet<usize>) -> BTreeSet<usize> {
        let status = self.text("proc/self/status").unwrap_or_default();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let allowed = list.and_then(parse_cpu_list).map(|list| &list & online);
        allowed.filter(|allowed| !allowed.is_empty()).unwrap_or_else(|| online.clone())
    }

    fn of_cpu(&self, cpu: usize, name: &str) -> String {
        format!("sys/devices/system/cpu/cpu{cpu}/{name}")
    }

    /// Returns the first processor of the core: its name.
    fn core(&self, cpu: usize) -> usize {
        let siblings = ["topology/core_cpus_list", "topology/thread_siblings_list"];
        let list = siblings.iter().find_map(|name| self.cpus(&self.of_cpu(cpu, name)));
        list.and_then(|list| list.first().copied()).unwrap_or(cpu)
    }

    /// Counts the cores that are not slow, by Intel's lists if there are any, else by capacity. The measure is the
    /// fastest core that this process may use.
    fn fast(&self, cores: &BTreeSet<usize>, online: &BTreeSet<usize>) -> usize {
        let intel = self.cpus("sys/devices/cpu_core/cpus").zip(self.cpus("sys/devices/cpu_atom/cpus"));
        if let Some((fast, _)) = intel {
            let count = cores.intersection(&fast).count();
            return if count == 0 { cores.len() } else { count };
        }
        // All by the same file: the numbers of different files do not compare.
        let files = ["cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq"];
        let all = |file: &&&str| online.iter().all(|&cpu| self.number(&self.of_cpu(cpu, file)).is_some());
        let Some(file) = files.iter().find(all) else { return cores.len() };
        let capacity = |cpu: usize| self.number(&self.of_cpu(cpu, file)).unwrap_or(0.0);
        let fastest = cores.iter().map(|&core| capacity(core)).fold(0.0, f64::max);
        cores.iter().filter(|&&core| capacity(core) >= SLOW * fastest).count()
    }

    fn nodes(&self, allowed: &BTreeSet<usize>) -> BTreeSet<usize> {
        let nodes = self.cpus("sys/devices/system/node/online").unwrap_or_default();
        let of_node = |node: usize| self.cpus(&format!("sys/devices/system/node/node{node}/cpulist"));
        let is_used = |node: &usize| of_node(*node).is_some_and(|cpus| !cpus.is_disjoint(allowed));
        nodes.into_iter().filter(is_used).collect()
    }

    fn caches(&self, allowed: &BTreeSet<usize>) -> usize {
        let shared = |index: usize| {
            let file = format!("cache/index{index}/shared_cpu_list");
            allowed.iter().filter_map(|&cpu| self.cpus(&self.of_cpu(cpu, &file))).collect::<BTreeSet<_>>()
        };
        let third = shared(3);
        if third.is_empty() { shared(2).len() } else { third.len() }
    }
}

/// Parses a list like `0-3,8,10-11`; `None` for anything else, and for a range of more than 65,536.
fn parse_cpu_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last < first || last - first >= 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Returns the number that macOS has under this name.
#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<usize> {
    let name = std::ffi::CString::new(name).ok()?;
    let (mut value, mut len) = (0i32, size_of::<i32>());
    // SAFETY: the name ends with a zero; at most `len` bytes are written to `value`, which lives until the end.
    let status = unsafe {
        libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut len, std::ptr::null_mut(), 0)
    };
    (status == 0 && len == size_of::<i32>()).then_some(value)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine's files, written processor by processor.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(online: &str) -> Self {
            let machine = Self(tempfile::tempdir().expect("tempdir"));
            machine.write("sys/devices/system/cpu/online", online)
        }

        fn write(self, path: &str, text: &str) -> Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
            fs::write(path, format!("{text}\n")).expect("write");
            self
        }

        /// Writes a file of each of these processors.
        fn each(
            self,
            cpus: impl IntoIterator<Item = usize>,
            name: &str,
            text: impl Fn(usize) -> String,
        ) -> Self {
            let file = |cpu| format!("sys/devices/system/cpu/cpu{cpu}/{name}");
            cpus.into_iter().fold(self, |machine, cpu| machine.write(&file(cpu), &text(cpu)))
        }

        fn allows(self, list: &str) -> Self {
            self.write("proc/self/status", &format!("Name:\tx\nCpus_allowed_list:\t{list}"))
        }

        fn quota(self, quota: &str) -> Self {
            self.write("proc/self/cgroup", "0::/")
                .write("proc/self/mountinfo", "31 22 0:27 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw")
                .write("sys/fs/cgroup/cpu.max", quota)
        }

        /// `[online, allowed, physical, performance, nodes, caches]`, threads and their reason.
        fn found(&self) -> ([usize; 6], usize, String) {
            let cores = Cores::read(self.0.path()).expect("processors are listed");
            let Cores { online, allowed, physical, performance, ref nodes, caches, .. } = cores;
            let counts = [online, allowed, physical, performance, nodes.len().max(1), caches];
            (counts, cores.threads(), cores.reason())
        }

        fn check(&self, counts: [usize; 6], threads: usize, reason: &str) {
            assert_eq!(self.found(), (counts, threads, reason.to_owned()));
        }
    }

    /// 8 cores with two hardware threads each, numbered as Linux does: all first threads, then all second ones.
    fn desktop() -> Machine {
        Machine::new("0-15")
            .each(0..16, "topology/core_cpus_list", |cpu| format!("{},{}", cpu % 8, cpu % 8 + 8))
            .each(0..16, "cache/index3/shared_cpu_list", |_| "0-15".to_owned())
            .each(0..16, "acpi_cppc/highest_perf", |cpu| (166 + 5 * (cpu % 8)).to_string())
    }

    #[test]
    fn a_desktop_computes_with_a_thread_per_core() {
        let reason = "a thread per core, not per hardware thread: 16";
        desktop().check([16, 16, 8, 8, 1, 1], 8, reason);
        let reason = "a thread per core, not per hardware thread: 4; the affinity mask allows 4 of 16 CPUs";
        desktop().allows("0-1,8-9").check([16, 4, 2, 2, 1, 1], 2, reason);
        let reason = "a thread per core; the affinity mask allows 4 of 16 CPUs";
        desktop().allows("0-3").check([16, 4, 4, 4, 1, 1], 4, reason);
    }

    #[test]
    fn a_container_computes_within_its_quota_and_cpuset() {
        let container = || desktop().allows("0-7").quota("350000 100000");
        container().check([16, 8, 8, 8, 1, 1], 3, "the cgroup's quota of 3.50 CPUs");
        container().quota("20000 100000").check([16, 8, 8, 8, 1, 1], 1, "the cgroup's quota of 0.20 CPUs");
        let reason = "a thread per core; the affinity mask allows 8 of 16 CPUs";
        container().quota("1600000 100000").check([16, 8, 8, 8, 1, 1], 8, reason);
        container().quota("max 100000").check([16, 8, 8, 8, 1, 1], 8, reason);
    }

    /// 6 performance cores of two threads each, and 8 efficiency cores.
    fn hybrid() -> Machine {
        let core = |cpu: usize| match cpu {
            0..12 => format!("{}-{}", cpu / 2 * 2, cpu / 2 * 2 + 1),
            _ => cpu.to_string(),
        };
        Machine::new("0-19")
            .each(0..20, "topology/thread_siblings_list", core)
            .write("sys/devices/cpu_core/cpus", "0-11")
            .write("sys/devices/cpu_atom/cpus", "12-19")
            .each(0..20, "cache/index3/shared_cpu_list", |_| "0-19".to_owned())
    }

    #[test]
    fn a_hybrid_computes_on_its_performance_cores() {
        hybrid().check([20, 20, 14, 6, 1, 1], 6, "the performance cores of 14 cores");
        // A process that is confined to efficiency cores uses them.
        let reason = "a thread per core; the affinity mask allows 4 of 20 CPUs";
        hybrid().allows("12-15").check([20, 4, 4, 4, 1, 1], 4, reason);
    }

    #[test]
    fn big_cores_of_arm_are_known_by_their_capacity_or_frequency() {
        let reason = "the performance cores of 8 cores";
        for (file, [little, big, prime]) in [
            ("cpu_capacity", [325, 780, 1024]),
            ("cpufreq/cpuinfo_max_freq", [1_400_000, 2_400_000, 2_800_000]),
        ] {
            let speed = |cpu: usize| [little, little, little, little, big, big, big, prime][cpu].to_string();
            let phone = Machine::new("0-7")
                .each(0..8, "topology/core_cpus_list", |cpu| cpu.to_string())
                .each(0..8, file, speed);
            phone.check([8, 8, 8, 4, 1, 1], 4, reason);
            // One processor without the file: nothing is known of any.
            let file = format!("sys/devices/system/cpu/cpu7/{file}");
            phone.write(&file, "?").check([8, 8, 8, 8, 1, 1], 8, "a thread per core");
        }
    }

    #[test]
    fn memory_nodes_and_caches_are_counted_where_the_process_may_run() {
        // Two sockets of 16 cores and 32 threads, in 2 or 8 nodes, with an L3 for every 8 cores.
        for per_socket in [1, 4] {
            let nodes = 2 * per_socket;
            let of_node = |node: usize| {
                let cores = 32 / nodes;
                format!(
                    "{}-{},{}-{}",
                    node * cores,
                    (node + 1) * cores - 1,
                    32 + node * cores,
                    31 + (node + 1) * cores
                )
            };
            let shared = |cpu: usize| {
                let first = cpu % 32 / 8 * 8;
                format!("{first}-{},{}-{}", first + 7, first + 32, first + 39)
            };
            let server = (0..nodes).fold(Machine::new("0-63"), |server, node| {
                server.write(&format!("sys/devices/system/node/node{node}/cpulist"), &of_node(node))
            });
            let server = server
                .write("sys/devices/system/node/online", &format!("0-{}", nodes - 1))
                .each(0..64, "topology/core_cpus_list", |cpu| format!("{},{}", cpu % 32, cpu % 32 + 32))
                .each(0..64, "cache/index3/shared_cpu_list", shared);
            let reason = "a thread per core, not per hardware thread: 64";
            server.check([64, 64, 32, 32, nodes, 4], 32, reason);
            let reason = "a thread per core; the affinity mask allows 4 of 64 CPUs";
            let part = server.allows("24-27");
            part.check([64, 4, 4, 4, 1, 1], 4, reason);
            let cores = Cores::read(part.0.path()).expect("processors are listed");
            assert_eq!(cores.nodes, BTreeSet::from([24 / (32 / nodes)]));
        }
    }

    #[test]
    fn apples_performance_cores_are_read() {
        let pro = |name: &str| match name {
            "hw.logicalcpu" | "hw.physicalcpu" => Some(10),
            "hw.perflevel0.physicalcpu" => Some(8),
            "hw.perflevel0.cpusperl2" => Some(4),
            _ => None,
        };
        let cores = Cores::from_sysctl(pro).expect("known");
        assert_eq!((cores.threads(), cores.caches), (8, 2));
        assert_eq!(cores.reason(), "the performance cores of 10 cores");
        let intel = |name: &str| match name {
            "hw.logicalcpu" => Some(8),
            "hw.physicalcpu" => Some(4),
            _ => None,
        };
        assert_eq!(Cores::from_sysctl(intel).expect("known").threads(), 4);
        assert_eq!(Cores::from_sysctl(|_| None), None);
    }

    #[test]
    fn nothing_but_a_number_is_known_elsewhere() {
        let empty = tempfile::tempdir().expect("tempdir");
        assert_eq!(Cores::read(empty.path()), None);
        Machine::new("0-3").check([4, 4, 4, 4, 1, 1], 4, "a thread per core");
        assert_eq!(Cores::alike(6).threads(), 6);
        assert!(Cores::here().threads() <= Cores::here().allowed);
    }

    #[test]
    fn lists_of_processors() {
        for (text, expected) in [
            ("0-3,8,10-11\n", Some(vec![0, 1, 2, 3, 8, 10, 11])),
            ("\n", Some(vec![])),
            ("5", Some(vec![5])),
            ("3-1", None),
            ("0-99999999999", None),
            ("a", None),
        ] {
            assert_eq!(parse_cpu_list(text), expected.map(BTreeSet::from_iter), "{text:?}");
        }
    }
}
