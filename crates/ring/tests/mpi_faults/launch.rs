//! Processes under `mpirun`, and their reports.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::fault::{Fault, Kind};
use crate::rank::now;

/// Environment variables of this program as a rank.
pub(crate) const FAULTS: &str = "LONGSPAN_RANK_FAULTS";
pub(crate) const FOLDER: &str = "LONGSPAN_RANK_FOLDER";
/// Set where processes end after one fault.
pub(crate) const LONE: &str = "LONGSPAN_RANK_LONE";

/// A loop that sleeps for 20 ms takes longer only where this machine or process stalls.
const STALL: Duration = Duration::from_secs(1);

/// Behavior of the launcher when a process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// It ends all other processes.
    EndsAll,
    /// The others survive (ULFM).
    Survives,
    /// The same, with one host per process.
    Hosts,
}

/// A rank's report of a fault.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) rank: usize,
    /// Seconds since 1970.
    pub(crate) at: f64,
    pub(crate) error: Option<String>,
    pub(crate) is_wrong: bool,
}

/// Running processes.
pub(crate) struct Launch<'f> {
    faults: &'f [Fault],
    launcher: Launcher,
    folder: PathBuf,
    child: Child,
}

/// Their results.
pub(crate) struct Ended {
    /// By fault and rank.
    pub(crate) reports: Vec<Vec<Option<Report>>>,
    /// Times of the faults.
    pub(crate) injected: Vec<Option<f64>>,
    pub(crate) at: f64,
    pub(crate) succeeded: bool,
    /// Output of all ranks.
    pub(crate) output: String,
    pub(crate) stalled: Option<Duration>,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by benches/ring/hosts"))
}

impl<'f> Launch<'f> {
    /// Faults with equal numbers of ranks.
    pub(crate) fn new(faults: &'f [Fault], launcher: Launcher) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let folder = folder.join(format!("mpi-faults-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let limit = 60 + 12 * faults.len();
        let mut command = Command::new("timeout");
        command.args(["-k", "3", &limit.to_string(), "mpirun", "--allow-run-as-root"]);
        command.args(["-n", &faults[0].ranks.to_string(), "--bind-to", "none"]);
        command.args(["--mca", "pml", "ob1"]);
        if launcher != Launcher::EndsAll {
            command.args(["--with-ft", "ulfm"]);
        }
        let net =
            if launcher == Launcher::Hosts { variable("LONGSPAN_NET") } else { String::new() };
        if launcher == Launcher::Hosts {
            command.args(["--host", &variable("LONGSPAN_HOSTS"), "--map-by", "node"]);
            command.args(["--prtemca", "plm_ssh_agent", &variable("LONGSPAN_AGENT")]);
            command.args(["--prtemca", "prte_if_include", &net, "--mca", "btl", "self,tcp"]);
            command.args(["--mca", "btl_tcp_if_include", &net]);
            for name in ["PATH", "LD_LIBRARY_PATH", FAULTS, FOLDER, LONE] {
                command.args(["-x", name]);
            }
            for rank in 0..faults[0].ranks {
                on_host(rank, &["ip", "link", "set", "eth0", "up"]);
            }
        } else {
            command.args(["--map-by", ":OVERSUBSCRIBE", "--mca", "btl", "self,sm"]);
        }
        command.arg(std::env::current_exe().unwrap());
        let texts: Vec<_> = faults.iter().map(ToString::to_string).collect();
        command.env(FAULTS, texts.join(",")).env(FOLDER, &folder).env_remove("LONGSPAN_ISA");
        if faults.iter().any(|fault| fault.kind.ends_process()) {
            command.env(LONE, "1");
        }
        let output = fs::File::create(folder.join("output")).unwrap();
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        Launch { faults, launcher, folder, child: command.spawn().expect("timeout starts") }
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(name)).ok()
    }

    fn report(&self, index: usize, rank: usize) -> Option<Report> {
        let text = self.read(&format!("report.{index}.{rank}"))?;
        let (at, result) = text.split_once('\n')?;
        let error = result.strip_prefix("error ").map(str::to_owned);
        let is_wrong = error.is_none() && result != "ok";
        Some(Report { rank, at: at.parse().unwrap(), error, is_wrong })
    }

    /// Waits until they have ended; continues stopped processes after all others have reported.
    pub(crate) fn watch(mut self) -> Ended {
        let mut stalled = None;
        let mut continued = vec![false; self.faults.len()];
        let status = loop {
            let start = Instant::now();
            std::thread::sleep(Duration::from_millis(20));
            if start.elapsed() > STALL {
                stalled = stalled.max(Some(start.elapsed()));
            }
            for (index, fault) in self.faults.iter().enumerate() {
                let others = || (0..fault.ranks).filter(|&rank| rank != fault.victim);
                let stopped = fault.kind == Kind::Stop && !continued[index];
                if stopped && others().all(|rank| self.report(index, rank).is_some()) {
                    continued[index] = true;
                    let pid = self.read(&format!("pid.{}", fault.victim)).expect("it has started");
                    quietly(Command::new("kill").args(["-s", "CONT", &pid]));
                }
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let all = |fault: &Fault| (0..fault.ranks).all(|rank| self.report(0, rank).is_some());
            if self.launcher == Launcher::Hosts && self.faults.iter().all(all) {
                // The launcher waits for a host that it cannot reach.
                quietly(Command::new("kill").arg(self.child.id().to_string()));
                break self.child.wait().unwrap();
            }
        };
        let at = now();
        if self.launcher == Launcher::Hosts {
            for rank in 0..self.faults[0].ranks {
                let pids =
                    Command::new("ip").args(["netns", "pids", &host(rank)]).output().unwrap();
                for pid in String::from_utf8_lossy(&pids.stdout).split_whitespace() {
                    quietly(Command::new("kill").args(["-9", pid]));
                }
            }
        }
        let reports =
            self.faults.iter().enumerate().map(|(index, fault)| {
                (0..fault.ranks).map(|rank| self.report(index, rank)).collect()
            });
        let injected = |index| self.read(&format!("injected.{index}"))?.parse().ok();
        Ended {
            reports: reports.collect(),
            injected: (0..self.faults.len()).map(injected).collect(),
            at,
            succeeded: status.success(),
            output: self.read("output").unwrap_or_default(),
            stalled,
        }
    }
}

/// The name of a rank's host.
fn host(rank: usize) -> String {
    format!("{}-{rank}", variable("LONGSPAN_HOST_NAME"))
}

fn on_host(rank: usize, command: &[&str]) {
    quietly(Command::new("ip").args(["netns", "exec", &host(rank)]).args(command));
}

fn quietly(command: &mut Command) {
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}
