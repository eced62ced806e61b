//! Ranks that are threads of one process.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Failure, Hear, Hop, Meanwhile, Transport};
use crate::buffer::Buffer;

/// A rank among threads of one process: for tests, and for one rank a NUMA node.
///
/// ```
/// use std::time::Duration;
/// use longspan_ring::{Buffer, Hop, Incoming, Local, Outgoing, Transport};
///
/// let mut ranks = Local::ranks(2);
/// let mut second = ranks.pop().unwrap();
/// let mut first = ranks.pop().unwrap();
/// let patience = Duration::from_secs(1);
/// std::thread::scope(|scope| {
///     scope.spawn(move || {
///         let sends = &mut [Outgoing { to: 1, bytes: Buffer::from(&b"hello"[..]) }];
///         first.hop(Hop { sends, receives: &mut [], patience }, &mut |_| ()).unwrap();
///     });
///     let receives = &mut [Incoming { from: 0, bytes: Buffer::zeroed(5) }];
///     second.hop(Hop { sends: &mut [], receives, patience }, &mut |_| ()).unwrap();
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
    mail: Mutex<Mail>,
    changed: Condvar,
}

#[derive(Debug)]
struct Mail {
    /// Messages from `a` to `b` at `a · ranks + b`.
    boxes: Vec<VecDeque<Buffer>>,
    /// What ranks have said when they gave up.
    said: Vec<Option<Vec<u8>>>,
    gone: Vec<bool>,
}

impl Local {
    /// So many ranks, each for a thread of its own.
    pub fn ranks(count: usize) -> Vec<Local> {
        let boxes = vec![VecDeque::new(); count * count];
        let mail = Mail { boxes, said: vec![None; count], gone: vec![false; count] };
        let mail = Mutex::new(mail);
        let shared = Arc::new(Shared { ranks: count, mail, changed: Condvar::new() });
        (0..count).map(|rank| Local { rank, shared: shared.clone() }).collect()
    }

    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.shared.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, from: usize, to: usize) -> usize {
        from * self.shared.ranks + to
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.mail().gone[self.rank] = true;
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
        // A send is a copy: it has left at once.
        let copies: Vec<_> = hop.sends.iter().map(|send| (send.to, send.bytes.clone())).collect();
        let mut mail = self.mail();
        for (to, bytes) in copies {
            mail.boxes[self.slot(self.rank, to)].push_back(bytes);
        }
        drop(mail);
        self.shared.changed.notify_all();
        meanwhile(&mut || ControlFlow::Continue(()));

        let start = Instant::now();
        let mut mail = self.mail();
        let mut arrived = 0;
        while arrived < hop.receives.len() {
            let receive = &mut hop.receives[arrived];
            let slot = self.slot(receive.from, self.rank);
            if let Some(bytes) = mail.boxes[slot].pop_front() {
                let (expected, got) = (receive.bytes.len(), bytes.len());
                if expected != got {
                    let beginning = bytes[..got.min(Failure::BEGINNING)].to_vec();
                    return Err(Failure::Length { from: receive.from, expected, got, beginning });
                }
                receive.bytes = bytes;
                arrived += 1;
                continue;
            }
            if mail.gone[receive.from] {
                let message = "its thread has ended".to_owned();
                return Err(Failure::Gone { rank: Some(receive.from), message });
            }
            let waited = start.elapsed();
            let Some(left) = hop.patience.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let from = hop.receives[arrived..].iter().map(|receive| receive.from).collect();
                return Err(Failure::Late { from, to: Vec::new(), waited });
            };
            let waiting = self.shared.changed.wait_timeout(mail, left);
            mail = waiting.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration) {
        let start = Instant::now();
        let mut mail = self.mail();
        mail.said[self.rank] = Some(told.to_vec());
        self.shared.changed.notify_all();
        let mut heard = vec![false; self.shared.ranks];
        heard[self.rank] = true;
        loop {
            for (rank, said) in mail.said.iter().enumerate() {
                if let (Some(said), false) = (said, heard[rank]) {
                    heard[rank] = true;
                    if hear(rank, said).is_break() {
                        return;
                    }
                }
            }
            let left = patience.saturating_sub(start.elapsed());
            if left.is_zero() || heard.iter().all(|heard| *heard) {
                return;
            }
            let waiting = self.shared.changed.wait_timeout(mail, left);
            mail = waiting.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
