//! Progress on standard error, if it is a terminal.
//!
//! A stage shorter than two seconds prints nothing. After that, a line shows a bar once the stage
//! has reported progress, else a spinner.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Duration after which progress is shown.
const DELAY: Duration = Duration::from_secs(2);
/// Interval between updates.
const TICK: Duration = Duration::from_millis(100);

/// A stage of work; it ends when dropped.
pub(crate) struct Stage {
    counter: Arc<Counter>,
    /// Closed to stop the thread that draws.
    watcher: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

#[derive(Default)]
struct Counter {
    done: AtomicU64,
    total: AtomicU64,
}

/// The unit of a bar.
#[derive(Debug, Clone, Copy)]
enum Unit {
    /// Rows of blocks.
    Rows,
    /// Steps without a meaningful unit: only the share is shown.
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
    /// A stage over rows of blocks, or one that reports no progress.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Stage::counting(Unit::Rows, what.into())
    }

    /// A stage that shows its share.
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

    /// Reports progress.
    pub(crate) fn at(&self, done: u64, total: u64) {
        self.counter.done.store(done, Ordering::Relaxed);
        self.counter.total.store(total, Ordering::Relaxed);
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.watcher.take() {
            drop(stop);
            // A panic of the drawing thread doesn't affect the work.
            let _ = thread.join();
        }
    }
}

fn watch(what: String, unit: Unit, counter: &Counter, stopped: &mpsc::Receiver<()>) {
    let continues = |time| stopped.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Timeout);
    if !continues(DELAY) {
        return;
    }
    let style = |template| ProgressStyle::with_template(template).expect("a valid template");
    let bar = ProgressBar::new_spinner().with_message(what).with_elapsed(DELAY);
    bar.set_style(style("{spinner} {msg} ({elapsed})"));
    loop {
        let total = counter.total.load(Ordering::Relaxed);
        if total > 0 && bar.length() != Some(total) {
            bar.set_length(total);
            bar.set_style(style(unit.template()));
        }
        bar.set_position(counter.done.load(Ordering::Relaxed));
        bar.tick();
        if !continues(TICK) {
            break;
        }
    }
    bar.finish_and_clear();
}
