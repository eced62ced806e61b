//! Panics at chosen places, for tests of what happens then, and records of work: with the feature
//! `fault-injection` only, which no release enables.

mod pieces;

#[cfg(feature = "fault-injection")]
pub use self::pieces::{Piece, record_pieces, take_pieces};
pub(crate) use self::pieces::{begin_tasks, cut, task};

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Where a panic can be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// Inside a kernel: forward within a tile of rows, backward while the task holds its turn at
    /// dQ.
    Kernel,
    /// Where a kernel reads the mask of a Partial block.
    Mask,
}

/// How often each site is passed before it panics, plus 1; 0 is never.
static COUNTDOWN: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// Lets `site` panic once, on whichever thread passes it after `passes` others.
pub fn arm(site: Site, passes: usize) {
    COUNTDOWN[site as usize].store(passes + 1, Ordering::SeqCst);
}

/// Lets `site` pass. Returns how many passes were left before it would have panicked.
pub fn disarm(site: Site) -> Option<usize> {
    COUNTDOWN[site as usize].swap(0, Ordering::SeqCst).checked_sub(1)
}

/// Pairs of queries and keys whose scores kernels have computed, whether they are active or not.
static PAIRS: AtomicU64 = AtomicU64::new(0);

/// Pairs whose scores were computed since the last call of this function, by both passes; those of
/// at most 16 query rows × heads, which the decode kernel computes, are not counted.
pub fn take_pairs() -> u64 {
    PAIRS.swap(0, Ordering::SeqCst)
}

/// Counts the scores of a product.
#[inline(always)]
pub(crate) fn count_pairs(queries: usize, keys: usize) {
    if cfg!(feature = "fault-injection") {
        PAIRS.fetch_add((queries * keys) as u64, Ordering::Relaxed);
    }
}

/// Passes a site.
#[inline(always)]
pub(crate) fn fault(site: Site) {
    if cfg!(feature = "fault-injection") {
        let count = &COUNTDOWN[site as usize];
        let take = |left: usize| left.checked_sub(1);
        let before = count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        assert!(before != Ok(1), "injected at {site:?}");
    }
}
