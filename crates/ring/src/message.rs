//! What every message carries besides its contents: what it is, and a checksum.
//!
//! ```text
//! magic 4 | kind 4 | call 4 | step 4 | from 4 | to 4 | blamed 4 | 0 4 | length 8 | checksum 8
//! ```

use twox_hash::XxHash3_64;

use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// Bytes of a header; contents behind it are aligned for any number.
pub(crate) const HEADER: usize = 64;

/// Steps are below; those in which ranks tell each other that they are done, from here on.
pub(crate) const END: u32 = 1 << 30;

const MAGIC: u32 = u32::from_le_bytes(*b"LSR1");
/// Where the checksum stands.
const CHECKSUM: usize = 40;
const NOBODY: u32 = u32::MAX;

/// What ranks are doing together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    Agreeing,
    Forward,
    Backward,
}

impl Doing {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Doing::Agreeing => "agreeing",
            Doing::Forward => "the forward pass",
            Doing::Backward => "the backward pass",
        }
    }
}

/// Where a message belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) doing: Doing,
    /// Which call of the ring.
    pub(crate) call: u32,
    pub(crate) step: u32,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// A rank that ends with an error tells the others in place of what it owes them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GiveUp {
    pub(crate) blamed: Option<usize>,
    pub(crate) step: u32,
}

const DATA: u32 = 0;
const GIVEN_UP: u32 = 1;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// A message for contents of so many bytes, which go behind its [`HEADER`].
pub(crate) fn blank(len: usize) -> Buffer {
    Buffer::zeroed(HEADER + len)
}

/// Writes the header, once the contents are there.
pub(crate) fn seal(message: &mut Buffer, place: Place) {
    write(message, place, DATA, NOBODY, place.step);
}

/// Makes it a message that says that this rank has given up.
pub(crate) fn seal_given_up(message: &mut Buffer, place: Place, why: GiveUp) {
    message.fill(0);
    let blamed = why.blamed.map_or(NOBODY, |rank| rank as u32);
    write(message, place, GIVEN_UP, blamed, why.step);
}

fn write(message: &mut Buffer, place: Place, kind: u32, blamed: u32, step: u32) {
    let len = (message.len() - HEADER) as u64;
    let words = [
        MAGIC,
        kind << 8 | place.doing as u32,
        place.call,
        step,
        place.from as u32,
        place.to as u32,
    ];
    for (index, word) in words.into_iter().chain([blamed, 0]).enumerate() {
        message[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
    }
    message[32..CHECKSUM].copy_from_slice(&len.to_le_bytes());
    message[CHECKSUM..HEADER].fill(0);
    let checksum = checksum(message);
    message[CHECKSUM..CHECKSUM + 8].copy_from_slice(&checksum.to_le_bytes());
}

/// Of all but itself.
fn checksum(message: &[u8]) -> u64 {
    let header = XxHash3_64::oneshot(&message[..CHECKSUM]);
    XxHash3_64::oneshot_with_seed(header, &message[HEADER..])
}

/// Whether a message is whole and the one that was awaited.
pub(crate) fn open(message: &Buffer, place: Place, awaited: &str) -> Result<()> {
    let wrong = |why: String| Error::Message {
        from: place.from,
        why,
        doing: place.doing.name(),
        step: place.step,
        awaited: awaited.to_owned(),
    };
    if word(message, 0) != MAGIC {
        return Err(wrong("isn't one of Longspan's, or its beginning is damaged".into()));
    }
    if long(message, CHECKSUM) != checksum(message) {
        return Err(wrong("is damaged: its checksum doesn't fit".into()));
    }
    let (kind, step, blamed) = (word(message, 4), word(message, 12), word(message, 24));
    if kind >> 8 == GIVEN_UP {
        let rank = (blamed != NOBODY).then_some(blamed as usize);
        return Err(Error::GivenUp { by: place.from, rank, step, doing: place.doing.name() });
    }
    let got = [kind, word(message, 8), step, word(message, 16), word(message, 20)];
    let expected = [place.doing as u32, place.call, place.step, place.from as u32, place.to as u32];
    if got != expected {
        return Err(wrong(format!(
            "is another one: (kind, call, step, from, to) {got:?}, expected {expected:?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { doing: Doing::Forward, call: 3, step: 7, from: 1, to: 2 };

    #[test]
    fn every_damaged_bit_is_noticed() {
        let mut message = blank(24);
        message[HEADER..].copy_from_slice(b"abcdefghijklmnopqrstuvwx");
        seal(&mut message, PLACE);
        open(&message, PLACE, "keys").unwrap();
        for bit in 0..8 * message.len() {
            // Behind the checksum nothing is read.
            if (8 * (CHECKSUM + 8)..8 * HEADER).contains(&bit) {
                continue;
            }
            let mut damaged = message.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&damaged, PLACE, "keys").is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_message_is_refused() {
        let mut message = blank(8);
        seal(&mut message, PLACE);
        let error = open(&message, Place { step: 8, ..PLACE }, "keys of rank 1").unwrap_err();
        assert!(error.to_string().contains("waiting for keys of rank 1"), "{error}");
        seal_given_up(&mut message, PLACE, GiveUp { blamed: Some(5), step: 4 });
        let error = open(&message, PLACE, "keys").unwrap_err();
        let expected = Error::GivenUp { by: 1, rank: Some(5), step: 4, doing: "the forward pass" };
        assert_eq!(error, expected);
    }
}
