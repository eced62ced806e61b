//! Hops between two MPI processes. Started by `mpirun -n 2`, as in `.ci/mpi`, without a harness: every
//! rank is one run of `main`.
//!
//! A transport is not used after a failure, so every part has its own communicator.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use longspan_ring::{Buffer, Failure, Hop, Incoming, Mpi, Outgoing, Transport};

const TIMEOUT: Duration = Duration::from_secs(20);

fn main() {
    // Otherwise the other rank would wait for one that has panicked.
    std::panic::set_hook(Box::new(|panic| {
        if std::thread::current().name() == Some("main") && !on_purpose(panic) {
            eprintln!("{panic}");
            std::process::exit(1);
        }
    }));
    let mut mpi = Mpi::world(TIMEOUT).unwrap();
    assert_eq!(mpi.size(), 2, "start this with mpirun -n 2");
    let lengths = [0, 1, 7, 64, 4_095, 65_537, 3 << 20];
    for len in lengths {
        exchange(&mut mpi, len);
    }
    many_hops(&mut mpi);
    one_way(&mut mpi, (2 << 30) + 12_345);
    for part in [shorter, longer, late, not_received, stops_computing, panics, broadcast_abort] {
        let mut own = Mpi::world(TIMEOUT).unwrap();
        part(&mut own);
        mpi.barrier(TIMEOUT).unwrap();
    }
    if mpi.rank() == 0 {
        eprintln!("MPI hops: passed");
    }
    mpi.close(TIMEOUT).unwrap();
}

const ON_PURPOSE: &str = "on purpose";

fn on_purpose(panic: &std::panic::PanicHookInfo<'_>) -> bool {
    panic.payload_as_str() == Some(ON_PURPOSE)
}

/// Bytes that depend on offset and rank.
fn text(rank: usize, len: usize) -> Buffer {
    let mut buffer = Buffer::zeroed(len);
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = (at ^ (at >> 8) ^ (at >> 16) ^ (at >> 27)) as u8 ^ (rank as u8).wrapping_mul(91);
    }
    buffer
}

fn send(mpi: &mut Mpi, bytes: Buffer, timeout: Duration) -> Result<Buffer, Failure> {
    let sends = &mut [Outgoing { to: 1 - mpi.rank(), bytes }];
    mpi.hop(Hop { sends, receives: &mut [], timeout }, &mut |_| ())?;
    Ok(std::mem::take(&mut sends[0].bytes))
}

/// The error of a receive after a failure.
const NOT_STARTED: &str = "failed before";

fn receive(mpi: &mut Mpi, len: usize, timeout: Duration) -> Result<Buffer, Failure> {
    let receives = &mut [Incoming { from: 1 - mpi.rank(), bytes: Buffer::zeroed(len) }];
    let hopped = mpi.hop(Hop { sends: &mut [], receives, timeout }, &mut |_| ());
    if hopped.as_ref().is_err_and(|failure| !failure.to_string().contains(NOT_STARTED)) {
        // MPI may still write to the buffer, so it is leaked.
        assert!(receives[0].bytes.is_empty(), "the buffer of a failed hop was not taken");
    }
    hopped?;
    Ok(std::mem::take(&mut receives[0].bytes))
}

fn exchange(mpi: &mut Mpi, len: usize) {
    let (rank, other) = (mpi.rank(), 1 - mpi.rank());
    let sends = &mut [Outgoing { to: other, bytes: text(rank, len) }];
    let receives = &mut [Incoming { from: other, bytes: Buffer::zeroed(len) }];
    let mut polls = 0;
    let hop = Hop { sends, receives, timeout: TIMEOUT };
    mpi.hop(hop, &mut |poll| {
        polls += 1;
        assert_eq!(poll(), ControlFlow::Continue(()));
    })
    .unwrap();
    assert_eq!(polls, 1);
    assert_eq!(receives[0].bytes, text(other, len), "{len} bytes");
    assert_eq!(sends[0].bytes, text(rank, len), "{len} bytes that were sent");
}

/// Messages arrive in the order of their hops, for all lengths.
fn many_hops(mpi: &mut Mpi) {
    for hop in 0..300 {
        let len = [8, 100_000, 3, 5_000][hop % 4];
        match mpi.rank() {
            0 => drop(send(mpi, text(hop, len), TIMEOUT).unwrap()),
            _ => assert_eq!(receive(mpi, len, TIMEOUT).unwrap(), text(hop, len), "hop {hop}"),
        }
    }
}

/// Longer than C's `int`, with a value on each page.
fn one_way(mpi: &mut Mpi, len: usize) {
    const PAGE: usize = 4_096;
    let value = |page: usize| (page as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    if mpi.rank() == 0 {
        let mut bytes = Buffer::zeroed(len);
        for (page, bytes) in bytes.chunks_exact_mut(PAGE).enumerate() {
            bytes[..8].copy_from_slice(&value(page));
        }
        drop(send(mpi, bytes, TIMEOUT).unwrap());
        return;
    }
    let bytes = receive(mpi, len, TIMEOUT).unwrap();
    assert_eq!(bytes.len(), len);
    for (page, bytes) in bytes.chunks_exact(PAGE).enumerate() {
        assert_eq!(bytes[..8], value(page), "page {page}");
    }
}

/// The failure for a message of rank 0 with unexpected length.
fn length(expected: usize, got: usize) -> Failure {
    let beginning = text(0, got)[..got.min(Failure::BEGINNING)].to_vec();
    Failure::Length { from: 0, expected, got, beginning }
}

fn shorter(mpi: &mut Mpi) {
    match mpi.rank() {
        0 => drop(send(mpi, text(0, 10), TIMEOUT).unwrap()),
        _ => {
            let failure = receive(mpi, 20, TIMEOUT).unwrap_err();
            assert_eq!(failure, length(20, 10));
            let again = receive(mpi, 20, TIMEOUT).unwrap_err();
            assert!(again.to_string().contains(NOT_STARTED), "{again}");
        }
    }
}

fn longer(mpi: &mut Mpi) {
    match mpi.rank() {
        0 => drop(send(mpi, text(0, 30), TIMEOUT).unwrap()),
        _ => {
            let message = receive(mpi, 20, TIMEOUT).unwrap_err().to_string();
            assert!(message.contains("rank 0 sent more than the 20 bytes"), "{message}");
        }
    }
}

/// No message: an error after the timeout.
fn late(mpi: &mut Mpi) {
    if mpi.rank() == 1 {
        let (timeout, start) = (Duration::from_millis(300), Instant::now());
        let failure = receive(mpi, 20, timeout).unwrap_err();
        let took = start.elapsed();
        assert!(took >= timeout && took < 3 * timeout, "{took:?}");
        let Failure::Timeout { from, to, waited } = failure else { panic!("{failure}") };
        assert_eq!((&from[..], &to[..]), (&[0][..], &[][..]));
        assert!(waited >= timeout);
    }
}

/// No receive: an error after the timeout, for messages beyond MPI's eager limit.
fn not_received(mpi: &mut Mpi) {
    if mpi.rank() == 1 {
        let failure = send(mpi, text(1, 64 << 20), Duration::from_millis(300)).unwrap_err();
        let Failure::Timeout { from, to, .. } = failure else { panic!("{failure}") };
        assert_eq!((&from[..], &to[..]), (&[][..], &[0][..]));
    }
}

/// A failure stops the computation.
fn stops_computing(mpi: &mut Mpi) {
    match mpi.rank() {
        0 => drop(send(mpi, text(0, 10), TIMEOUT).unwrap()),
        _ => {
            let receives = &mut [Incoming { from: 0, bytes: Buffer::zeroed(20) }];
            let hop = Hop { sends: &mut [], receives, timeout: TIMEOUT };
            let failure = mpi.hop(hop, &mut |poll| {
                let start = Instant::now();
                while poll().is_continue() {
                    assert!(start.elapsed() < TIMEOUT, "the failure was not reported");
                }
            });
            assert_eq!(failure.unwrap_err(), length(20, 10));
        }
    }
}

/// Buffers in flight are leaked on a panic.
fn panics(mpi: &mut Mpi) {
    if mpi.rank() == 1 {
        let receives = &mut [Incoming { from: 0, bytes: Buffer::zeroed(20) }];
        let hop = Hop { sends: &mut [], receives: &mut *receives, timeout: TIMEOUT };
        let hopped = AssertUnwindSafe(|| mpi.hop(hop, &mut |_| panic!("{ON_PURPOSE}")));
        assert!(catch_unwind(hopped).is_err());
        assert!(receives[0].bytes.is_empty());
    }
}

/// Abort messages are not received by abandoned receives of a failed hop.
fn broadcast_abort(mpi: &mut Mpi) {
    let (rank, other) = (mpi.rank(), 1 - mpi.rank());
    assert!(receive(mpi, 20, Duration::from_millis(50)).is_err());
    let start = Instant::now();
    let mut received = Vec::new();
    mpi.broadcast_abort(
        &text(rank, 20),
        &mut |by, message| {
            received.push((by, message.to_vec()));
            ControlFlow::Break(())
        },
        TIMEOUT,
    );
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
    assert_eq!(received, [(other, text(other, 20).to_vec())]);
}
