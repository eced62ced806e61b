//! Ranks as threads of one process.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{AbortListener, Failure, Hop, Meanwhile, Transport};
use crate::buffer::Buffer;

/// A rank that is a thread of one process: for tests, and for one rank per NUMA node.
///
/// ```
/// use std::time::Duration;
/// use longspan_ring::{Buffer, Hop, Incoming, Local, Outgoing, Transport};
///
/// let mut ranks = Local::ranks(2);
/// let mut second = ranks.pop().unwrap();
/// let mut first = ranks.pop().unwrap();
/// let timeout = Duration::from_secs(1);
/// std::thread::scope(|scope| {
///     scope.spawn(move || {
///         let sends = &mut [Outgoing { to: 1, bytes: Buffer::from(&b"hello"[..]) }];
///         first.hop(Hop { sends, receives: &mut [], timeout }, &mut |_| ()).unwrap();
///     });
///     let receives = &mut [Incoming { from: 0, bytes: Buffer::zeroed(5) }];
///     second.hop(Hop { sends: &mut [], receives, timeout }, &mut |_| ()).unwrap();
///     assert_eq!(&receives[0].bytes[..], b"hello");
/// });
/// ```
#[derive(Debug)]
pub struct Local {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ranks: usize,
    channels: Mutex<Channels>,
    changed: Condvar,
}

#[derive(Debug)]
struct Channels {
    /// Messages from `a` to `b` at `a · ranks + b`.
    queues: Vec<VecDeque<Buffer>>,
    /// Abort messages by rank.
    aborts: Vec<Option<Vec<u8>>>,
    closed: Vec<bool>,
}

impl Local {
    /// The endpoints of `count` ranks, one per thread.
    pub fn ranks(count: usize) -> Vec<Local> {
        let queues = vec![VecDeque::new(); count * count];
        let channels = Channels { queues, aborts: vec![None; count], closed: vec![false; count] };
        let channels = Mutex::new(channels);
        let shared = Arc::new(Shared { ranks: count, channels, changed: Condvar::new() });
        (0..count).map(|rank| Local { rank, shared: shared.clone() }).collect()
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.shared.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, from: usize, to: usize) -> usize {
        from * self.shared.ranks + to
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.channels().closed[self.rank] = true;
        self.shared.changed.notify_all();
    }
}

impl Transport for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.ranks
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        // Sends are buffered, so they complete at once.
        let copies: Vec<_> = hop.sends.iter().map(|send| (send.to, send.bytes.clone())).collect();
        let mut channels = self.channels();
        for (to, bytes) in copies {
            channels.queues[self.slot(self.rank, to)].push_back(bytes);
        }
        drop(channels);
        self.shared.changed.notify_all();
        meanwhile(&mut || ControlFlow::Continue(()));

        let start = Instant::now();
        let mut channels = self.channels();
        let mut arrived = 0;
        while arrived < hop.receives.len() {
            let receive = &mut hop.receives[arrived];
            let slot = self.slot(receive.from, self.rank);
            if let Some(bytes) = channels.queues[slot].pop_front() {
                let (expected, got) = (receive.bytes.len(), bytes.len());
                if expected != got {
                    let beginning = bytes[..got.min(Failure::BEGINNING)].to_vec();
                    return Err(Failure::Length { from: receive.from, expected, got, beginning });
                }
                receive.bytes = bytes;
                arrived += 1;
                continue;
            }
            if channels.closed[receive.from] {
                let message = "its thread has ended".to_owned();
                return Err(Failure::Gone { rank: Some(receive.from), message });
            }
            let waited = start.elapsed();
            let Some(left) = hop.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let from = hop.receives[arrived..].iter().map(|receive| receive.from).collect();
                return Err(Failure::Timeout { from, to: Vec::new(), waited });
            };
            let waiting = self.shared.changed.wait_timeout(channels, left);
            channels = waiting.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn broadcast_abort(
        &mut self,
        message: &[u8],
        listener: &mut AbortListener<'_>,
        timeout: Duration,
    ) {
        let start = Instant::now();
        let mut channels = self.channels();
        channels.aborts[self.rank] = Some(message.to_vec());
        self.shared.changed.notify_all();
        let mut delivered = vec![false; self.shared.ranks];
        delivered[self.rank] = true;
        loop {
            for (rank, abort) in channels.aborts.iter().enumerate() {
                if let (Some(abort), false) = (abort, delivered[rank]) {
                    delivered[rank] = true;
                    if listener(rank, abort).is_break() {
                        return;
                    }
                }
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() || delivered.iter().all(|delivered| *delivered) {
                return;
            }
            let waiting = self.shared.changed.wait_timeout(channels, left);
            channels = waiting.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
