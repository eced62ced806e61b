//! Limits of a container: the control groups of this process.
//!
//! `/proc/self/cgroup` names the group in each hierarchy, one line each: `0::/a/b` in version 2,
//! `4:cpu,cpuacct:/a/b` in version 1. A group is bound by its own limits and by those of all
//! groups above it, so the lowest limit applies. Inside a container the path may be that of the
//! host while the files start at the container's own group; the root is always included.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// CPUs that this process may use on average, where there is a limit.
pub(crate) fn cpu_quota() -> Option<f64> {
    quota_below(Path::new(ROOT), &read_to_string(GROUPS).ok()?)
}

/// Bytes of memory that this process may use, where there is a limit.
pub(crate) fn memory_limit() -> Option<u64> {
    memory_below(Path::new(ROOT), &read_to_string(GROUPS).ok()?)
}

const ROOT: &str = "/sys/fs/cgroup";
const GROUPS: &str = "/proc/self/cgroup";

fn quota_below(root: &Path, groups: &str) -> Option<f64> {
    let version_2 = |folder: &Path| {
        let text = read_to_string(folder.join("cpu.max")).ok()?;
        let (quota, period) = text.trim().split_once(' ')?;
        share(quota, period)
    };
    let version_1 = |folder: &Path| {
        let read = |name| read_to_string(folder.join(name)).ok();
        share(read("cpu.cfs_quota_us")?.trim(), read("cpu.cfs_period_us")?.trim())
    };
    let limits = folders(root, groups, "cpu").into_iter();
    limits.filter_map(|folder| version_2(&folder).or_else(|| version_1(&folder))).reduce(f64::min)
}

/// CPUs of a quota per period; `None` for `max` and −1.
fn share(quota: &str, period: &str) -> Option<f64> {
    let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
    (period > 0).then(|| quota as f64 / period as f64)
}

/// Version 1 encodes "no limit" as the largest multiple of a page.
const NO_LIMIT: u64 = 1 << 60;

fn memory_below(root: &Path, groups: &str) -> Option<u64> {
    let limit = |folder: PathBuf| {
        let read = |name| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        read("memory.max").or_else(|| read("memory.limit_in_bytes"))
    };
    let limits = folders(root, groups, "memory").into_iter();
    limits.filter_map(limit).filter(|&limit| limit < NO_LIMIT).min()
}

/// The folders of a controller's groups, those above included.
fn folders(root: &Path, groups: &str, controller: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let tops = match controllers {
            "" => vec![root.to_path_buf(), root.join("unified")],
            list if list.split(',').any(|name| name == controller) => {
                vec![root.join(list), root.join(controller)]
            }
            _ => continue,
        };
        for top in tops {
            // From the group up to the root, whatever of it there is.
            let group = Path::new(path.trim_start_matches('/'));
            folders.extend(group.ancestors().map(|above| top.join(above)));
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("longspan-{}-{name}", std::process::id()));
        create_dir_all(root.join("a/b")).unwrap();
        create_dir_all(root.join("cpu/a/b")).unwrap();
        create_dir_all(root.join("memory")).unwrap();
        root
    }

    #[test]
    fn the_lowest_limit_above_counts() {
        let root = scratch("v2");
        write(root.join("a/cpu.max"), "150000 100000\n").unwrap();
        write(root.join("a/b/cpu.max"), "max 100000\n").unwrap();
        write(root.join("a/memory.max"), "max\n").unwrap();
        write(root.join("a/b/memory.max"), "1048576\n").unwrap();
        assert_eq!(quota_below(&root, "0::/a/b\n"), Some(1.5));
        assert_eq!(quota_below(&root, "0::/\n"), None);
        assert_eq!(memory_below(&root, "0::/a/b\n"), Some(1 << 20));
        assert_eq!(memory_below(&root, "0::/a\n"), None);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn version_1_has_one_folder_per_controller() {
        let root = scratch("v1");
        let group = root.join("cpu/a/b");
        write(group.join("cpu.cfs_quota_us"), "-1\n").unwrap();
        write(group.join("cpu.cfs_period_us"), "100000\n").unwrap();
        write(root.join("memory/memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        let groups = "4:memory:/elsewhere\n3:cpu,cpuacct:/a/b\n0::/\n";
        assert_eq!(quota_below(&root, groups), None);
        assert_eq!(memory_below(&root, groups), None);
        write(group.join("cpu.cfs_quota_us"), "250000\n").unwrap();
        write(root.join("memory/memory.limit_in_bytes"), "4096\n").unwrap();
        assert_eq!(quota_below(&root, groups), Some(2.5));
        assert_eq!(memory_below(&root, groups), Some(4_096));
        std::fs::remove_dir_all(root).unwrap();
    }
}
