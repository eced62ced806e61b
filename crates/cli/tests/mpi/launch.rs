//! Processes under `mpirun`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use crate::common::scratch;

/// Seconds after which `timeout` ends a launch, whatever `mpirun` does; a test that gets there has
/// failed.
const MOST: u64 = 90;

/// What the launcher does when a process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// It terminates all others.
    EndsAll,
    /// It keeps them running (ULFM), until one has exited with an error.
    LetsLive,
    /// It keeps them running then, too; its own status is meaningless.
    LetsSpeak,
}

/// `mpirun`, without the ranks. This machine may have fewer cores, and only one address.
pub(crate) fn mpirun(launcher: Launcher) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", &MOST.to_string(), "mpirun", "--allow-run-as-root"]);
    if launcher != Launcher::EndsAll {
        command.args(["--with-ft", "ulfm"]);
    }
    if launcher == Launcher::LetsSpeak {
        command.args(["--rtos", "error-nonzero-status=0"]);
    }
    command.args(["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]);
    command.args(["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]);
    command.stdin(Stdio::null()).env("LONGSPAN_THREADS", "1").env_remove("LONGSPAN_ISA");
    command
}

/// Records the process id, redirects standard error, then executes the command.
const WRAPPER: &str = r#"#!/bin/sh
rank=$OMPI_COMM_WORLD_RANK
exec 2>"$JOB_FOLDER/err.$rank"
echo $$ >"$JOB_FOLDER/new.$rank" && mv "$JOB_FOLDER/new.$rank" "$JOB_FOLDER/pid.$rank"
exec "$@"
"#;

/// Processes that receive signals.
pub(crate) struct Job {
    child: Child,
    folder: PathBuf,
    ranks: usize,
}

/// The end of a job.
pub(crate) struct End {
    pub(crate) status: ExitStatus,
    /// What each rank wrote to standard error.
    pub(crate) said: Vec<String>,
    /// When each last wrote.
    pub(crate) when: Vec<SystemTime>,
}

impl Job {
    pub(crate) fn start(name: &str, launcher: Launcher, ranks: usize, args: &[&str]) -> Job {
        let folder = scratch(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let wrapper = folder.join("wrapper");
        fs::write(&wrapper, WRAPPER).unwrap();
        let mut command = mpirun(launcher);
        command.env("JOB_FOLDER", &folder);
        command.args(["-n", &ranks.to_string(), "sh"]).arg(&wrapper);
        command.arg(env!("CARGO_BIN_EXE_longspan")).arg("ring").args(args);
        let output = fs::File::create(folder.join("launcher")).unwrap();
        command.stdout(output.try_clone().unwrap()).stderr(output);
        Job { child: command.spawn().expect("timeout starts"), folder, ranks }
    }

    /// The process of a rank, once it is there.
    pub(crate) fn pid(&self, rank: usize) -> String {
        let path = self.folder.join(format!("pid.{rank}"));
        let start = Instant::now();
        while !path.exists() {
            assert!(start.elapsed() < Duration::from_secs(30), "rank {rank} doesn't start");
            std::thread::sleep(Duration::from_millis(10));
        }
        fs::read_to_string(path).unwrap().trim().to_owned()
    }

    /// Sends a signal to a rank.
    pub(crate) fn signal(&self, rank: usize, signal: &str) {
        assert!(kill(signal, &self.pid(rank)), "rank {rank} ended before it should");
    }

    /// Waits until these ranks have reported an error or the job has ended, then kills the others and
    /// waits for the end.
    pub(crate) fn end(mut self, survivors: &[usize]) -> End {
        let said = |folder: &Path, rank: usize| {
            let path = folder.join(format!("err.{rank}"));
            let when = fs::metadata(&path).and_then(|about| about.modified());
            (fs::read_to_string(&path).unwrap_or_default(), when.unwrap_or(SystemTime::UNIX_EPOCH))
        };
        let silent = |rank: &usize| !said(&self.folder, *rank).0.contains("error");
        while self.child.try_wait().unwrap().is_none() && survivors.iter().any(silent) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Ranks that have reported exit by themselves.
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(20));
        }
        for rank in (0..self.ranks).filter(|rank| !survivors.contains(rank)) {
            kill("KILL", &self.pid(rank));
        }
        let status = self.child.wait().unwrap();
        let (said, when) = (0..self.ranks).map(|rank| said(&self.folder, rank)).unzip();
        End { status, said, when }
    }
}

impl Drop for Job {
    /// A failed test leaves no process behind.
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        for rank in 0..self.ranks {
            if let Ok(pid) = fs::read_to_string(self.folder.join(format!("pid.{rank}"))) {
                let running = fs::read_link(format!("/proc/{}/exe", pid.trim()));
                if running.is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_longspan"))) {
                    kill("KILL", pid.trim());
                }
            }
        }
    }
}

fn kill(signal: &str, pid: &str) -> bool {
    let mut kill = Command::new("kill");
    kill.args(["-s", signal, pid]).stderr(Stdio::null()).status().unwrap().success()
}
