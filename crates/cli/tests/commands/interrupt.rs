//! Ctrl-C ends a command at any time.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Below the threshold of perception.
const LATEST: Duration = Duration::from_millis(200);

/// The most times a command is interrupted per trial.
const TRIES: u32 = 6;

const COMMANDS: [&[&str]; 5] = [
    &["inspect", "dilated(1048576, 65) & dilated(1048575, 67)", "--tokens", "1m"],
    &["bench", "full", "--tokens", "64k", "--repeat", "3", "--pass", "forward"],
    &["bench", "full", "--tokens", "64k", "--repeat", "3", "--pass", "backward"],
    &["ring", "--ranks", "3", "causal", "--tokens", "48k", "--heads", "4"],
    &["verify"],
];

/// How long a command goes on after Ctrl-C; `None` if it had ended before.
fn latency(args: &[&str], delay: Duration) -> Option<Duration> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longspan"));
    let command =
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    std::thread::sleep(delay);
    let start = Instant::now();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let status = child.wait().unwrap();
    (status.signal() == Some(2)).then(|| start.elapsed())
}

#[test]
fn commands_end_at_once() {
    let trials = std::env::var("LONGSPAN_TRIALS").map_or(1, |text| text.parse().unwrap());
    let mut slowest = Duration::ZERO;
    for args in COMMANDS {
        let mut ended = 0;
        for trial in 0..trials {
            let delay = |trial: u32| Duration::from_millis(u64::from(60 + 97 * trial % 900));
            // The machine may have been stalled: repeat until once it was not. A command that is
            // late by itself is late every time.
            let mut fastest = None;
            for trial in (0..TRIES).map(|number| trial + 7 * number) {
                fastest = fastest.into_iter().chain(latency(args, delay(trial))).min();
                if fastest.is_some_and(|fastest| fastest < LATEST) {
                    break;
                }
            }
            let Some(fastest) = fastest else { continue };
            ended += 1;
            slowest = slowest.max(fastest);
            assert!(fastest < LATEST, "{args:?}: {fastest:?} after Ctrl-C");
        }
        assert!(ended > 0, "{args:?} is done before it can be interrupted");
    }
    eprintln!("the slowest command ended after {slowest:?}");
}
