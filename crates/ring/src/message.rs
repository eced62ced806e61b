//! Message headers and checksums; `communicator` is the only module that writes and reads them.
//!
//! ```text
//! magic 4 | kind 4 | call 4 | step 4 | from 4 | to 4 | suspect 4 | cause 4 | length 8 | checksum 8
//! ```
//!
//! An abort is a header without contents. It takes the place of any awaited message. No message is
//! shorter, so a receiving rank recognizes an abort by the first [`HEADER`] bytes.

use twox_hash::XxHash3_64;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::phase::Phase;
use crate::transport::Failure;

/// Bytes of a header; the contents behind it are aligned for every dtype.
pub(crate) const HEADER: usize = 64;

// Transports pass on enough of a message of unexpected length to recognize an abort.
const _: () = assert!(Failure::BEGINNING >= HEADER);

const MAGIC: u32 = u32::from_le_bytes(*b"LSR1");
/// Offset of the checksum.
const CHECKSUM: usize = 40;
const NO_RANK: u32 = u32::MAX;

/// Identity of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub(crate) phase: Phase,
    /// Index of the ring's call.
    pub(crate) call: u32,
    pub(crate) step: u32,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Report of a rank that ends with an error, sent instead of its remaining messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abort {
    /// The aborting rank.
    pub(crate) by: usize,
    /// The rank that it holds responsible; none where only itself is involved.
    pub(crate) suspect: Option<usize>,
    pub(crate) cause: FailureCause,
    pub(crate) phase: Phase,
    pub(crate) step: u32,
}

/// Why a rank is suspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureCause {
    /// Its message did not arrive; it may have been waiting itself.
    Timeout,
    /// It sent a wrong message, or reports its own error.
    Observed,
}

const DATA: u32 = 0;
const ABORT: u32 = 1;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// A message with room for `len` bytes behind its [`HEADER`].
pub(crate) fn blank(len: usize) -> Buffer {
    Buffer::zeroed(HEADER + len)
}

/// Writes the header; the contents must be complete.
pub(crate) fn seal(message: &mut Buffer, envelope: Envelope) {
    write(message, envelope, DATA, [NO_RANK, 0]);
}

/// The abort message, the same for all receiving ranks.
pub(crate) fn encode_abort(call: u32, abort: Abort) -> Buffer {
    let mut message = blank(0);
    let Abort { by, suspect, cause, phase, step } = abort;
    let suspect = suspect.map_or(NO_RANK, |rank| rank as u32);
    let envelope = Envelope { phase, call, step, from: by, to: NO_RANK as usize };
    write(&mut message, envelope, ABORT, [suspect, cause as u32]);
    message
}

/// The abort that a message with this beginning is, if it is one.
pub(crate) fn decode_abort(beginning: &[u8]) -> Option<Abort> {
    let header = beginning.get(..HEADER)?;
    let kind = word(header, 4);
    let intact = word(header, 0) == MAGIC && long(header, CHECKSUM) == checksum(header);
    if !intact || kind >> 8 != ABORT || long(header, 32) != 0 {
        return None;
    }
    let suspect = word(header, 24);
    let observed = word(header, 28) == FailureCause::Observed as u32;
    Some(Abort {
        by: word(header, 16) as usize,
        suspect: (suspect != NO_RANK).then_some(suspect as usize),
        cause: if observed { FailureCause::Observed } else { FailureCause::Timeout },
        phase: *Phase::ALL.get((kind & 0xFF) as usize)?,
        step: word(header, 12),
    })
}

fn write(message: &mut Buffer, envelope: Envelope, kind: u32, attribution: [u32; 2]) {
    let len = (message.len() - HEADER) as u64;
    let words = [
        MAGIC,
        kind << 8 | envelope.phase as u32,
        envelope.call,
        envelope.step,
        envelope.from as u32,
        envelope.to as u32,
    ];
    for (index, word) in words.into_iter().chain(attribution).enumerate() {
        message[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
    }
    message[32..CHECKSUM].copy_from_slice(&len.to_le_bytes());
    message[CHECKSUM..HEADER].fill(0);
    let checksum = checksum(message);
    message[CHECKSUM..CHECKSUM + 8].copy_from_slice(&checksum.to_le_bytes());
}

/// Checksum of header fields and contents.
fn checksum(message: &[u8]) -> u64 {
    let header = XxHash3_64::oneshot(&message[..CHECKSUM]);
    XxHash3_64::oneshot_with_seed(header, &message[HEADER..])
}

impl From<Abort> for Error {
    fn from(abort: Abort) -> Self {
        let Abort { by, suspect, phase, step, .. } = abort;
        Error::Aborted { by, suspect, step, phase: phase.name() }
    }
}

/// Checks that a message is intact and the expected one.
pub(crate) fn open(message: &Buffer, envelope: Envelope, awaited: &str) -> Result<()> {
    let wrong = |why: String| Error::Message {
        from: envelope.from,
        why,
        phase: envelope.phase.name(),
        step: envelope.step,
        awaited: awaited.to_owned(),
    };
    if let Some(abort) = decode_abort(message) {
        return Err(abort.into());
    }
    if word(message, 0) != MAGIC {
        return Err(wrong("is not a Longspan message, or its header is damaged".into()));
    }
    if long(message, CHECKSUM) != checksum(message) {
        return Err(wrong("is damaged: its checksum does not match".into()));
    }
    let got = [4, 8, 12, 16, 20].map(|at| word(message, at));
    let Envelope { phase, call, step, from, to } = envelope;
    let expected = [phase as u32, call, step, from as u32, to as u32];
    if got != expected {
        return Err(wrong(format!(
            "has the envelope (phase, call, step, from, to) {got:?}, expected {expected:?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENVELOPE: Envelope = Envelope { phase: Phase::Forward, call: 3, step: 7, from: 1, to: 2 };

    #[test]
    fn every_flipped_bit_is_detected() {
        let mut message = blank(24);
        message[HEADER..].copy_from_slice(b"abcdefghijklmnopqrstuvwx");
        seal(&mut message, ENVELOPE);
        open(&message, ENVELOPE, "keys").unwrap();
        for bit in 0..8 * message.len() {
            // The padding between checksum and contents is not read.
            if (8 * (CHECKSUM + 8)..8 * HEADER).contains(&bit) {
                continue;
            }
            let mut damaged = message.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&damaged, ENVELOPE, "keys").is_err(), "bit {bit}");
        }
    }

    #[test]
    fn unexpected_messages_are_rejected() {
        let mut message = blank(8);
        seal(&mut message, ENVELOPE);
        let error = open(&message, Envelope { step: 8, ..ENVELOPE }, "keys of rank 1").unwrap_err();
        assert!(error.to_string().contains("waiting for keys of rank 1"), "{error}");
    }

    /// Independent of the awaited length, and of whether the transport detects a shorter message.
    #[test]
    fn aborts_are_recognized_in_place_of_any_message() {
        let (phase, cause) = (Phase::Setup, FailureCause::Observed);
        let abort = Abort { by: 1, suspect: Some(5), cause, phase, step: 4 };
        let encoded = encode_abort(0, abort);
        let expected = Error::Aborted { by: 1, suspect: Some(5), step: 4, phase: "setup" };
        for awaited in [0, 8, 24, 1_000] {
            let mut message = blank(awaited);
            message[..encoded.len()].copy_from_slice(&encoded);
            assert_eq!(open(&message, ENVELOPE, "keys").unwrap_err(), expected, "{awaited} bytes");
        }
        assert_eq!(decode_abort(&encoded), Some(abort));
        for bit in 0..8 * (CHECKSUM + 8) {
            let mut damaged = encoded.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_abort(&damaged), None, "bit {bit}");
        }
        let mut other = blank(0);
        seal(&mut other, ENVELOPE);
        assert_eq!(decode_abort(&other), None);
    }
}
