//! Something to look at while work takes long.
//!
//! A stage of work that is over within two seconds shows nothing. After that a line on standard
//! error shows a bar, once the work has said how far it is, or a spinner. Nothing is ever shown
//! where standard error is not a terminal.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How long work may take unannounced.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the line moves.
const TICK: Duration = Duration::from_millis(100);

/// A stage of work; it ends when dropped.
pub(crate) struct Stage {
    counter: Arc<Counter>,
    /// Closed to end the thread that draws.
    watcher: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

#[derive(Default)]
struct Counter {
    done: AtomicU64,
    total: AtomicU64,
}

/// What a bar counts.
#[derive(Debug, Clone, Copy)]
enum Unit {
    /// Rows of blocks.
    Rows,
    /// Work that only its share says something about.
    Share,
}

impl Unit {
    fn template(self) -> &'static str {
        match self {
            Unit::Rows => "{msg} {wide_bar} {human_pos} of {human_len} rows ({elapsed})",
            Unit::Share => "{msg} {wide_bar} {percent} % ({elapsed}, {eta} to go)",
        }
    }
}

impl Stage {
    /// Work over rows of blocks, or work that never says how far it is.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Stage::counting(Unit::Rows, what.into())
    }

    /// Work whose steps mean nothing to people.
    pub(crate) fn share(what: impl Into<String>) -> Self {
        Stage::counting(Unit::Share, what.into())
    }

    fn counting(unit: Unit, what: String) -> Self {
        let counter = Arc::new(Counter::default());
        let watcher = stderr().is_terminal().then(|| {
            let counter = counter.clone();
            let (stop, stopped) = mpsc::channel();
            (stop, std::thread::spawn(move || watch(what, unit, &counter, &stopped)))
        });
        Stage { counter, watcher }
    }

    /// Says how far the work is.
    pub(crate) fn at(&self, done: u64, total: u64) {
        self.counter.done.store(done, Ordering::Relaxed);
        self.counter.total.store(total, Ordering::Relaxed);
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.watcher.take() {
            drop(stop);
            // The thread only draws; if it panicked, the work is none the worse.
            let _ = thread.join();
        }
    }
}

fn watch(what: String, unit: Unit, counter: &Counter, stopped: &mpsc::Receiver<()>) {
    let goes_on = |time| stopped.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout);
    if !goes_on(PATIENCE) {
        return;
    }
    let style = |template| ProgressStyle::with_template(template).expect("a template of ours");
    let bar = ProgressBar::new_spinner().with_message(what).with_elapsed(PATIENCE);
    bar.set_style(style("{spinner} {msg} ({elapsed})"));
    loop {
        let total = counter.total.load(Ordering::Relaxed);
        if total > 0 && bar.length() != Some(total) {
            bar.set_length(total);
            bar.set_style(style(unit.template()));
        }
        bar.set_position(counter.done.load(Ordering::Relaxed));
        bar.tick();
        if !goes_on(TICK) {
            break;
        }
    }
    bar.finish_and_clear();
}
