//! Nonblocking requests of one hop.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use mpi_sys as ffi;

use super::status::{check, code_to_result};
use super::wait::{Wait, wait_until};
use crate::transport::{Failure, Incoming, Outgoing};

/// Counts of MPI's functions are C's `int`. Longer messages are sent in segments of this many bytes,
/// which arrive in order because they have the same ranks and tag.
const SEGMENT: usize = 1 << 30;

/// Messages in flight.
pub(super) struct Requests<'h> {
    sends: &'h mut [Outgoing],
    pub(super) receives: &'h mut [Incoming],
    /// Segments that MPI has not completed.
    open: Vec<Segment>,
    tag: c_int,
}

/// A segment of a message in flight.
struct Segment {
    request: ffi::MPI_Request,
    message: MessageIndex,
    /// Offset in the message, and length.
    at: usize,
    len: usize,
}

/// A message of the hop.
#[derive(Clone, Copy)]
enum MessageIndex {
    Send(usize),
    Receive(usize),
}

impl<'h> Requests<'h> {
    pub(super) fn new(sends: &'h mut [Outgoing], receives: &'h mut [Incoming], tag: c_int) -> Self {
        Requests { sends, receives, open: Vec::new(), tag }
    }

    /// Itself, if MPI accepts all requests.
    pub(super) fn started(mut self, comm: ffi::MPI_Comm) -> Option<Self> {
        self.start(comm).is_ok().then_some(self)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn start(&mut self, comm: ffi::MPI_Comm) -> Result<(), Failure> {
        let tag = self.tag;
        // A receive posted before its message arrives saves MPI a copy.
        for index in 0..self.receives.len() {
            let len = self.receives[index].bytes.len();
            let from = self.receives[index].from;
            let first = self.receives[index].bytes.as_mut_ptr();
            for (at, len) in segments(len) {
                self.post(MessageIndex::Receive(index), (at, len), |request| {
                    // SAFETY: bytes `at..at + len` are those of the buffer. It is not accessed, moved
                    // or freed while the segment is open: the hop is borrowed as long as `self`, and
                    // buffers of segments that are open at its end are taken out of it and leaked.
                    unsafe {
                        let (first, kind) = (first.add(at).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                        ffi::MPI_Irecv(first, int(len), kind, int(from), tag, comm, request)
                    }
                })?;
            }
        }
        for index in 0..self.sends.len() {
            let len = self.sends[index].bytes.len();
            let to = self.sends[index].to;
            let first = self.sends[index].bytes.as_mut_ptr();
            for (at, len) in segments(len) {
                self.post(MessageIndex::Send(index), (at, len), |request| {
                    // SAFETY: as of the receives above.
                    unsafe {
                        let (first, kind) = (first.add(at).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                        ffi::MPI_Isend(first, int(len), kind, int(to), tag, comm, request)
                    }
                })?;
            }
        }
        Ok(())
    }

    fn post(
        &mut self,
        message: MessageIndex,
        (at, len): (usize, usize),
        start: impl FnOnce(&mut ffi::MPI_Request) -> c_int,
    ) -> Result<(), Failure> {
        // SAFETY: a constant of the library, which nothing writes.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let code = start(&mut request);
        let segment = Segment { request, message, at, len };
        let started = self.check_segment(&segment, code);
        // MPI may access the buffer of a request that it failed to start.
        self.open.push(segment);
        started
    }

    /// Lets MPI make progress, and removes completed segments.
    pub(super) fn advance(&mut self) -> Result<(), Failure> {
        let mut index = 0;
        while index < self.open.len() {
            match self.test(index)? {
                true => drop(self.open.swap_remove(index)),
                false => index += 1,
            }
        }
        Ok(())
    }

    /// Whether a segment is complete.
    fn test(&mut self, index: usize) -> Result<bool, Failure> {
        let segment = &mut self.open[index];
        let mut flag = 0;
        // SAFETY: a status is a C structure of integers, for which zeros are valid.
        let mut status = unsafe { std::mem::zeroed::<ffi::MPI_Status>() };
        // SAFETY: `post` has started the request, and it is not complete: `advance` removes those
        // that are.
        let code = unsafe { ffi::MPI_Test(&mut segment.request, &mut flag, &mut status) };
        let segment = &self.open[index];
        self.check_segment(segment, code)?;
        let MessageIndex::Receive(receive) = segment.message else { return Ok(flag != 0) };
        if flag == 0 {
            return Ok(false);
        }
        let mut count = 0;
        // SAFETY: `MPI_Test` has written the status: the flag reports that the receive is complete.
        check(unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        if count as usize == segment.len {
            return Ok(true);
        }
        let receive = &self.receives[receive];
        let (from, expected) = (receive.from, receive.bytes.len());
        let got = segment.at + count as usize;
        let beginning = receive.bytes[..got.min(Failure::BEGINNING)].to_vec();
        Err(Failure::Length { from, expected, got, beginning })
    }

    /// The failure that a return code reports for a segment.
    fn check_segment(&self, segment: &Segment, code: c_int) -> Result<(), Failure> {
        let Err(error) = code_to_result(code) else { return Ok(()) };
        let peer = match segment.message {
            MessageIndex::Send(send) => self.sends[send].to,
            MessageIndex::Receive(receive) => self.receives[receive].from,
        };
        if error.class != ffi::MPI_ERR_TRUNCATE as c_int {
            return Err(Failure::Gone { rank: Some(peer), message: error.message });
        }
        let (expected, message) = (segment.at + segment.len, error.message);
        Err(Failure::Longer { from: peer, expected, message })
    }

    /// Waits until all segments are complete.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<(), Failure> {
        let waited = wait_until(timeout, || {
            self.advance()?;
            Ok(self.open.is_empty())
        })?;
        let Wait::TimedOut(waited) = waited else { return Ok(()) };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for segment in &self.open {
            match segment.message {
                MessageIndex::Send(send) => to.push(self.sends[send].to),
                MessageIndex::Receive(receive) => from.push(self.receives[receive].from),
            }
        }
        for ranks in [&mut from, &mut to] {
            ranks.sort_unstable();
            ranks.dedup();
        }
        Err(Failure::Timeout { from, to, waited })
    }
}

/// Leaks the buffers that MPI may still access, also after a panic of the computation.
impl Drop for Requests<'_> {
    fn drop(&mut self) {
        for segment in &self.open {
            let bytes = match segment.message {
                MessageIndex::Send(send) => &mut self.sends[send].bytes,
                MessageIndex::Receive(receive) => &mut self.receives[receive].bytes,
            };
            std::mem::forget(std::mem::take(bytes));
        }
    }
}

/// Offset and length of each segment of a message; an empty message has one.
fn segments(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len.div_ceil(SEGMENT).max(1)).map(move |n| (n * SEGMENT, SEGMENT.min(len - n * SEGMENT)))
}

/// A count or rank as MPI's type.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("segments are below 2 GiB, and ranks come from MPI")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_message() {
        for len in [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT, 5 * SEGMENT + 7] {
            let mut end = 0;
            for (at, len) in segments(len) {
                assert_eq!(at, end);
                assert!(c_int::try_from(len).is_ok());
                end = at + len;
            }
            assert_eq!(end, len);
        }
        assert_eq!(segments(0).count(), 1);
    }
}
