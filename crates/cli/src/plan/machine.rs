//! Machine descriptions: FLOP/s per rank, and latency and bandwidth between ranks.
//!
//! FLOPs are counted as by `longspan bench`: 2 · (key dim + value dim) per pair forward, 2 · (3 · key
//! dim + 2 · value dim) backward. Partial blocks have a rate of their own, over *all* pairs of the
//! block, since kernels compute whole blocks.
//!
//! Figures that aren't measured are published ones, with their source. Longspan has not run on those
//! machines: the rates are those of dense attention by others.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use longspan::ElementType;
use serde::{Deserialize, Serialize};

use crate::args::Network;
use crate::compile::BadInput;

/// The rates of one rank, and its links to others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machine {
    pub(crate) name: String,
    /// Where the figures come from.
    pub(crate) sources: Vec<String>,
    /// Bytes of memory per rank.
    pub(crate) memory_bytes: f64,
    pub(crate) kernels: Vec<Kernel>,
    /// CPU time per byte of a message to pack, check and copy it; doesn't overlap with computing.
    #[serde(alias = "handling_seconds_a_byte")]
    pub(crate) handling_seconds_per_byte: f64,
    /// Ranks per node; `None`: all ranks share one node.
    #[serde(alias = "ranks_a_node")]
    pub(crate) ranks_per_node: Option<usize>,
    /// Within a node.
    pub(crate) near: Link,
    /// Between nodes.
    pub(crate) far: Option<Link>,
}

/// Rates for one dtype.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kernel {
    pub(crate) dtype: String,
    pub(crate) forward: Rate,
    pub(crate) backward: Rate,
}

/// FLOP/s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rate {
    /// In Full blocks.
    pub(crate) full: f64,
    /// In Partial blocks, counting all of their pairs.
    pub(crate) partial: f64,
}

/// A link, one direction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Link {
    pub(crate) latency_seconds: f64,
    #[serde(alias = "bytes_a_second")]
    pub(crate) bytes_per_second: f64,
}

impl Link {
    /// Transfer time of a message.
    pub(crate) fn seconds(&self, bytes: u64) -> f64 {
        self.latency_seconds + bytes as f64 / self.bytes_per_second
    }
}

impl Machine {
    /// The machine of a `--machine` argument.
    pub(crate) fn find(name: &str) -> Result<Self> {
        let published = |gpu: &Gpu| gpu.name.eq_ignore_ascii_case(name);
        if let Some(gpu) = GPUS.iter().find(|gpu| published(gpu)) {
            return Ok(gpu.machine());
        }
        if name == "this" {
            let path = default_path()?;
            let advice = "run `longspan plan --calibrate` first, or name another --machine";
            return Machine::read(&path)?.ok_or_else(|| {
                BadInput(format!("this machine hasn't been measured: {advice}")).into()
            });
        }
        Machine::read(Path::new(name))?.ok_or_else(|| {
            let names: Vec<_> = GPUS.iter().map(|gpu| gpu.name).collect();
            let expected = format!("this, {}, or a file", names.join(", "));
            BadInput(format!("there is no machine {name:?}: expected {expected}")).into()
        })
    }

    /// Reads a description; `None` where there is no such file.
    fn read(path: &Path) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("can't read {}", path.display()));
            }
        };
        let refuse = |why: String| BadInput(format!("{}: {why}", path.display()));
        let machine: Machine =
            serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        machine.check().map_err(refuse)?;
        Ok(Some(machine))
    }

    fn check(&self) -> Result<(), String> {
        let links = [Some(("near", self.near)), self.far.map(|far| ("far", far))];
        let mut numbers = vec![("memory_bytes".to_owned(), self.memory_bytes)];
        for (name, link) in links.into_iter().flatten() {
            numbers.push((format!("{name}.bytes_per_second"), link.bytes_per_second));
            numbers.push((
                format!("{name}.latency_seconds"),
                link.latency_seconds + f64::MIN_POSITIVE,
            ));
        }
        for Kernel { dtype, forward, backward } in &self.kernels {
            for (pass, rate) in [("forward", forward), ("backward", backward)] {
                numbers.push((format!("{dtype}.{pass}.full"), rate.full));
                numbers.push((format!("{dtype}.{pass}.partial"), rate.partial));
            }
        }
        let handling = self.handling_seconds_per_byte + f64::MIN_POSITIVE;
        numbers.push(("handling_seconds_per_byte".into(), handling));
        match numbers.iter().find(|(_, number)| !number.is_finite() || *number <= 0.0) {
            Some((name, number)) => Err(format!("{name} is {number}, expected more than 0")),
            None if self.ranks_per_node == Some(0) => {
                Err("ranks_per_node is 0, expected 1 or more".into())
            }
            None => Ok(()),
        }
    }

    pub(crate) fn kernel(&self, element: ElementType) -> Result<&Kernel> {
        let found = self.kernels.iter().find(|kernel| kernel.dtype == element.to_string());
        found.ok_or_else(|| {
            let has: Vec<_> = self.kernels.iter().map(|kernel| &kernel.dtype[..]).collect();
            let has = has.join(", ");
            BadInput(format!("machine {} has no rate for {element}, it has {has}", self.name))
                .into()
        })
    }

    /// The link from one rank to another.
    pub(crate) fn link(&self, from: usize, to: usize) -> Link {
        match (self.ranks_per_node, self.far) {
            (Some(node), Some(far)) if from / node != to / node => far,
            _ => self.near,
        }
    }

    /// Writes the description to a file, by default the one that [`Machine::find`] reads.
    pub(crate) fn save(&self, file: Option<&Path>) -> Result<PathBuf> {
        let path = match file {
            Some(path) => path.to_owned(),
            None => default_path()?,
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("can't make {}", folder.display()))?;
        }
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(&path, text).with_context(|| format!("can't write {}", path.display()))?;
        Ok(path)
    }
}

/// The default file of measurements.
fn default_path() -> Result<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).filter(|text| !text.is_empty());
    let cache = match (folder("XDG_CACHE_HOME"), folder("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => Path::new(&home).join(".cache"),
        (None, None) => {
            let rule = "neither XDG_CACHE_HOME nor HOME is set";
            return Err(BadInput(format!("{rule}: use --out and --machine with a file")).into());
        }
    };
    Ok(cache.join("longspan").join("machine.json"))
}

/// A network by name. Bandwidths are those of the standards, one direction; latencies are orders of
/// magnitude: 20 to 50 µs with TCP, 1 to 4 µs with RDMA.
pub(crate) fn network(network: Network) -> (Link, &'static str) {
    let link = |gbits: f64, us: f64| Link {
        latency_seconds: us * 1e-6,
        bytes_per_second: gbits * 1e9 / 8.0,
    };
    match network {
        Network::Ten => (link(10.0, 30.0), "10 Gbit/s: IEEE 802.3ae; TCP, 30 µs assumed"),
        Network::Hundred => (link(100.0, 3.0), "100 Gbit/s: IEEE 802.3ba; RDMA, 3 µs assumed"),
        Network::FourHundred => (
            link(400.0, 3.0),
            "400 Gbit/s: NVIDIA ConnectX-7 user manual (NDR, 400GbE); RDMA, 3 µs assumed",
        ),
    }
}

/// A GPU of a node of eight, one rank each.
struct Gpu {
    name: &'static str,
    sources: &'static [&'static str],
    memory_bytes: f64,
    /// Peak FLOP/s: f32, and dense bf16 or f16 on tensor cores.
    peaks: (f64, f64),
    /// Shares of the peak that attention reaches, forward and backward.
    shares: (f64, f64),
    /// NVLink, one direction.
    nvlink: f64,
}

const GPUS: [Gpu; 3] = [
    Gpu {
        name: "a100",
        sources: &[
            "NVIDIA A100 80GB SXM data sheet: 312 TFLOPS bf16 dense, 19.5 f32, 80 GB, NVLink 600 GB/s both ways",
            "FlashAttention-2, arXiv:2307.08691: up to 73 % of the peak forward, 63 % backward",
        ],
        memory_bytes: 80e9,
        peaks: (19.5e12, 312e12),
        shares: (0.73, 0.63),
        nvlink: 300e9,
    },
    Gpu {
        name: "h100",
        sources: &[
            "NVIDIA H100 SXM data sheet: 1,979 TFLOPS bf16 with sparsity, half of it dense, 67 f32, 80 GB, NVLink 900 GB/s both ways",
            "FlashAttention-3, arXiv:2407.08608, figures: 648 TFLOPS forward, 561 backward (head dim 128, 16k tokens)",
        ],
        memory_bytes: 80e9,
        peaks: (67e12, 989e12),
        shares: (0.655, 0.567),
        nvlink: 450e9,
    },
    Gpu {
        name: "b200",
        sources: &[
            "NVIDIA HGX B200 data sheet: 4,500 TFLOPS bf16 with sparsity, half of it dense, 75 f32, 180 GB, NVLink 1,800 GB/s both ways",
            "FlashAttention-4 (together.ai/blog/flashattention-4): up to 1,605 TFLOPS forward, 71 %; backward assumed 55 %",
        ],
        memory_bytes: 180e9,
        peaks: (75e12, 2_250e12),
        shares: (0.71, 0.55),
        nvlink: 900e9,
    },
];

/// Latency between GPUs of a node, assumed: a kernel that copies, and a flag.
const NVLINK_LATENCY: f64 = 3e-6;

impl Gpu {
    fn machine(&self) -> Machine {
        // Nothing is published for f32: the same shares are assumed. A masked block takes as long
        // as a full one.
        let kernel = |dtype: &str, peak: f64| {
            let rate = |share: f64| Rate { full: share * peak, partial: share * peak };
            let (forward, backward) = (rate(self.shares.0), rate(self.shares.1));
            Kernel { dtype: dtype.into(), forward, backward }
        };
        let (f32, half) = self.peaks;
        Machine {
            name: self.name.into(),
            sources: self.sources.iter().map(|&source| source.into()).collect(),
            memory_bytes: self.memory_bytes,
            kernels: vec![kernel("f32", f32), kernel("bf16", half), kernel("f16", half)],
            handling_seconds_per_byte: 0.0,
            ranks_per_node: Some(8),
            near: Link { latency_seconds: NVLINK_LATENCY, bytes_per_second: self.nvlink },
            far: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_machines_are_valid() {
        for gpu in &GPUS {
            let machine = Machine::find(&gpu.name.to_uppercase()).unwrap();
            assert_eq!(machine.check(), Ok(()));
            assert!(machine.sources.len() >= 2);
            let (forward, f32) = (|kernel: &Kernel| kernel.forward.full, ElementType::F32);
            let bf16 = machine.kernel(ElementType::Bf16).unwrap();
            assert!(forward(bf16) > forward(machine.kernel(f32).unwrap()));
        }
    }

    #[test]
    fn former_names_are_read() {
        let machine = Machine::find("h100").unwrap();
        let text = serde_json::to_string(&machine).unwrap();
        let former = text
            .replace("handling_seconds_per_byte", "handling_seconds_a_byte")
            .replace("ranks_per_node", "ranks_a_node")
            .replace("bytes_per_second", "bytes_a_second");
        assert_ne!(former, text);
        assert_eq!(serde_json::from_str::<Machine>(&former).unwrap(), machine);
    }

    #[test]
    fn nodes_have_links_of_their_own() {
        let mut machine = Machine::find("h100").unwrap();
        machine.far = Some(network(Network::Ten).0);
        assert_eq!(machine.link(0, 7), machine.near);
        assert_eq!(Some(machine.link(7, 8)), machine.far);
        assert!(machine.link(7, 8).seconds(1 << 20) > machine.link(0, 7).seconds(1 << 20));
    }
}
