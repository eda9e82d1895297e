//! Facts about the machine and its container: cgroup directories, CPU model and features; cores in [`cores`].
//!
//! Everything is read below an injectable root ("/" in production), so that tests can supply sample files;
//! the parsers are pure. A file that is missing or malformed yields `None`, never an error: these facts are
//! for reports and planning. Imports nothing from the crate and reads no environment variable.

mod cores;

use std::fs;
use std::path::{Component, Path, PathBuf};

pub use cores::Cores;

/// The control groups that govern this process, from the innermost directory outwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupDirs {
    /// 2 for the unified hierarchy, 1 for the older one.
    pub version: u8,
    /// Directories as seen under the root given, innermost first, mount point last.
    pub dirs: Vec<PathBuf>,
}

/// Finds the cgroup directories of this process for `controller` ("memory", "cpu"); v2 first, then v1.
///
/// A hybrid system has both hierarchies with each controller in only one of them, so the caller may get two.
pub fn cgroup_dirs(root: &Path, controller: &str) -> Vec<CgroupDirs> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let memberships = parse_memberships(&read("proc/self/cgroup"));
    let mounts = parse_cgroup_mounts(&read("proc/self/mountinfo"));
    let mut found = Vec::new();
    for version in [2, 1] {
        let membership = memberships
            .iter()
            .find(|m| if version == 2 { m.controllers.is_empty() } else { m.has_controller(controller) });
        let mount =
            mounts.iter().find(|m| m.version == version && (version == 2 || m.has_option(controller)));
        if let (Some(membership), Some(mount)) = (membership, mount) {
            found.push(CgroupDirs { version, dirs: walk_up(root, mount, &membership.path) });
        }
    }
    found
}

/// One line of /proc/self/cgroup: `hierarchy-id:controllers:path`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Membership {
    /// Comma-separated controllers; empty for the unified hierarchy.
    controllers: String,
    path: PathBuf,
}

impl Membership {
    fn has_controller(&self, name: &str) -> bool {
        self.controllers.split(',').any(|c| c == name)
    }
}

fn parse_memberships(text: &str) -> Vec<Membership> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let _hierarchy = fields.next()?;
            let controllers = fields.next()?.to_owned();
            Some(Membership { controllers, path: PathBuf::from(fields.next()?) })
        })
        .collect()
}

/// A cgroup file system in /proc/self/mountinfo (proc(5)): the visible part of the hierarchy and its mount point.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CgroupMount {
    version: u8,
    /// The directory of the hierarchy that forms the mount's root; in a container often the container's own group.
    root: PathBuf,
    mount_point: PathBuf,
    super_options: String,
}

impl CgroupMount {
    fn has_option(&self, name: &str) -> bool {
        self.super_options.split(',').any(|o| o == name)
    }
}

fn parse_cgroup_mounts(text: &str) -> Vec<CgroupMount> {
    text.lines()
        .filter_map(|line| {
            let (mount, file_system) = line.split_once(" - ")?;
            let mut file_system = file_system.split(' ');
            let version = match file_system.next()? {
                "cgroup2" => 2,
                "cgroup" => 1,
                _ => return None,
            };
            let super_options = file_system.nth(1).unwrap_or_default().to_owned();
            let mut mount = mount.split(' ').skip(3).map(unescape);
            Some(CgroupMount { version, root: mount.next()?, mount_point: mount.next()?, super_options })
        })
        .collect()
}

/// Decodes the three-digit octal escapes that the kernel writes for space, tab, newline and backslash in mountinfo.
fn unescape(field: &str) -> PathBuf {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    PathBuf::from(escapes.iter().fold(field.to_owned(), |text, (from, to)| text.replace(from, to)))
}

/// Lists the directories from the process's group up to the mount point. For a path outside the mount (`/../..`,
/// which the kernel shows across cgroup namespaces) it lists the mount point only.
fn walk_up(root: &Path, mount: &CgroupMount, path: &Path) -> Vec<PathBuf> {
    let top = below(root, &mount.mount_point);
    let inside = path.strip_prefix(&mount.root).ok().or_else(|| path.strip_prefix("/").ok());
    let plain = inside.filter(|p| p.components().all(|c| matches!(c, Component::Normal(_))));
    let innermost = plain.map(|p| top.join(p)).filter(|p| p.is_dir()).unwrap_or_else(|| top.clone());
    innermost.ancestors().take_while(|dir| dir.starts_with(&top)).map(Path::to_path_buf).collect()
}

/// Joins the absolute `path` to `root`.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Returns the tightest CPU quota over the cgroup and its parents, in CPUs (1.5 = one and a half); `None` without a
/// quota.
pub fn cpu_quota(root: &Path) -> Option<f64> {
    cgroup_dirs(root, "cpu")
        .iter()
        .flat_map(|group| group.dirs.iter().map(|dir| (group.version, dir)))
        .filter_map(|(version, dir)| {
            let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
            match version {
                2 => parse_quota(&read("cpu.max")?),
                _ => parse_quota(&format!("{} {}", read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?)),
            }
        })
        .min_by(f64::total_cmp)
}

/// Parses `quota period` in microseconds, as in cpu.max; `None` for `max` or a negative quota.
fn parse_quota(text: &str) -> Option<f64> {
    let mut fields = text.split_whitespace();
    let quota: f64 = fields.next()?.parse().ok()?;
    let period: f64 = fields.next()?.parse().ok()?;
    (quota > 0.0 && period > 0.0 && quota.is_finite()).then(|| quota / period)
}

/// Counts the machine's processors, including those this process may not use; `None` if they cannot be read.
pub fn cpu_count(root: &Path) -> Option<usize> {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).ok()?;
    let is_processor = |line: &&str| line.split(':').next().is_some_and(|key| key.trim() == "processor");
    Some(text.lines().filter(is_processor).count()).filter(|&count| count > 0)
}

/// Returns the number of threads to compute with, by [`Cores::threads`].
pub fn default_threads() -> usize {
    Cores::here().threads()
}

/// One instruction-set extension, and whether this CPU and the operating system support it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuFeature {
    pub name: &'static str,
    pub available: bool,
}

/// Lists the extensions by which kernels are chosen at run time.
#[cfg(target_arch = "x86_64")]
pub fn cpu_features() -> Vec<CpuFeature> {
    macro_rules! detect {
        ($($name:tt),*) => {
            vec![$(CpuFeature { name: $name, available: std::arch::is_x86_feature_detected!($name) }),*]
        };
    }
    detect!["sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avx512bf16"]
}

/// Lists the extensions by which kernels are chosen at run time.
#[cfg(target_arch = "aarch64")]
pub fn cpu_features() -> Vec<CpuFeature> {
    macro_rules! detect {
        ($($name:tt),*) => {
            vec![$(CpuFeature { name: $name, available: std::arch::is_aarch64_feature_detected!($name) }),*]
        };
    }
    detect!["neon", "dotprod", "fp16", "i8mm", "bf16"]
}

/// Lists the extensions by which kernels are chosen at run time.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn cpu_features() -> Vec<CpuFeature> {
    Vec::new()
}

/// Returns the CPU's name as the system reports it.
pub fn cpu_model(root: &Path) -> Option<String> {
    parse_cpu_model(&fs::read_to_string(root.join("proc/cpuinfo")).ok()?)
}

fn parse_cpu_model(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key && !value.trim().is_empty()).then(|| value.trim().to_owned())
        })
    };
    value("model name").or_else(|| value("Model"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO: &str = "\
22 27 0:20 / /proc rw,nosuid - proc proc rw
31 22 0:27 / /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
40 22 0:30 /docker/ab /sys/fs/my\\040cgroup/memory rw - cgroup cgroup rw,memory
41 22 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
not a mount line
";

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, text).expect("write");
    }

    #[test]
    fn mounts_are_found_with_their_escapes_and_options() {
        let mounts = parse_cgroup_mounts(MOUNTINFO);
        let points: Vec<_> =
            mounts.iter().map(|m| (m.version, m.mount_point.to_str().expect("utf-8"))).collect();
        assert_eq!(
            points,
            [(2, "/sys/fs/cgroup"), (1, "/sys/fs/my cgroup/memory"), (1, "/sys/fs/cgroup/cpu,cpuacct")]
        );
        assert!(mounts[2].has_option("cpu") && !mounts[2].has_option("cpua"));
        assert_eq!(mounts[1].root, Path::new("/docker/ab"));
    }

    #[test]
    fn groups_are_walked_from_the_process_to_the_mount() {
        let root = tempfile::tempdir().expect("tempdir");
        write(root.path(), "proc/self/cgroup", "0::/user.slice/run.scope\n5:memory:/docker/ab/job\n");
        write(root.path(), "proc/self/mountinfo", MOUNTINFO);
        fs::create_dir_all(root.path().join("sys/fs/cgroup/user.slice/run.scope")).expect("mkdir");
        fs::create_dir_all(root.path().join("sys/fs/my cgroup/memory/job")).expect("mkdir");
        let dirs = cgroup_dirs(root.path(), "memory");
        let relative = |group: &CgroupDirs| -> Vec<String> {
            let strip =
                |d: &PathBuf| d.strip_prefix(root.path()).expect("below the root").display().to_string();
            group.dirs.iter().map(strip).collect()
        };
        assert_eq!(dirs.len(), 2);
        assert_eq!(
            relative(&dirs[0]),
            ["sys/fs/cgroup/user.slice/run.scope", "sys/fs/cgroup/user.slice", "sys/fs/cgroup"]
        );
        assert_eq!(relative(&dirs[1]), ["sys/fs/my cgroup/memory/job", "sys/fs/my cgroup/memory"]);
    }

    #[test]
    fn a_group_outside_the_namespace_leaves_the_mount_point() {
        let root = tempfile::tempdir().expect("tempdir");
        write(root.path(), "proc/self/cgroup", "0::/../../etc\n");
        write(root.path(), "proc/self/mountinfo", MOUNTINFO);
        fs::create_dir_all(root.path().join("sys/fs/cgroup")).expect("mkdir");
        assert_eq!(cgroup_dirs(root.path(), "memory")[0].dirs, [root.path().join("sys/fs/cgroup")]);
    }

    #[test]
    fn the_tightest_quota_counts() {
        let root = tempfile::tempdir().expect("tempdir");
        write(root.path(), "proc/self/cgroup", "0::/a/b\n");
        write(root.path(), "proc/self/mountinfo", MOUNTINFO);
        write(root.path(), "sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        write(root.path(), "sys/fs/cgroup/a/cpu.max", "150000 100000\n");
        write(root.path(), "sys/fs/cgroup/cpu.max", "400000 100000\n");
        assert_eq!(cpu_quota(root.path()), Some(1.5));
    }

    #[test]
    fn quota_texts() {
        for (text, expected) in [
            ("max 100000", None),
            ("-1 100000", None),
            ("50000 100000", Some(0.5)),
            ("50000", None),
            ("50000 0", None),
            ("", None),
        ] {
            assert_eq!(parse_quota(text), expected, "{text:?}");
        }
    }

    #[test]
    fn nothing_is_known_under_an_empty_root() {
        let root = tempfile::tempdir().expect("tempdir");
        assert!(cgroup_dirs(root.path(), "memory").is_empty());
        assert_eq!(cpu_quota(root.path()), None);
        assert_eq!(cpu_model(root.path()), None);
        assert_eq!(cpu_count(root.path()), None);
        assert!(default_threads() >= 1);
    }

    #[test]
    fn processors_are_counted() {
        let root = tempfile::tempdir().expect("tempdir");
        write(root.path(), "proc/cpuinfo", "processor\t: 0\nmodel name\t: processor\n\nprocessor : 1\n");
        assert_eq!(cpu_count(root.path()), Some(2));
    }

    #[test]
    fn cpu_model_names() {
        let intel = "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Some CPU @ 2.00GHz\n";
        assert_eq!(parse_cpu_model(intel).as_deref(), Some("Some CPU @ 2.00GHz"));
        assert_eq!(parse_cpu_model("Model\t\t: Raspberry Pi 5\n").as_deref(), Some("Raspberry Pi 5"));
        assert_eq!(parse_cpu_model("processor : 0\n"), None);
    }
}
