//! What every message carries besides its contents: what it is, and a checksum.
//!
//! ```text
//! magic 4 | kind 4 | call 4 | step 4 | from 4 | to 4 | blamed 4 | seen 4 | length 8 | checksum 8
//! ```
//!
//! That a rank has given up is a header without contents. It stands in the place of whatever is
//! awaited, which is never shorter, so whoever waits knows it by its first [`HEADER`] bytes.

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
    const ALL: [Doing; 3] = [Doing::Agreeing, Doing::Forward, Doing::Backward];

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

/// What a rank that ends with an error tells the others in place of what it owes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GiveUp {
    /// Who says so.
    pub(crate) by: usize,
    /// Itself, if nobody.
    pub(crate) blamed: Option<usize>,
    pub(crate) ground: Ground,
    pub(crate) doing: Doing,
    pub(crate) step: u32,
}

/// On what ground a rank is blamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ground {
    /// It was waited for in vain, and may have waited itself.
    Waited,
    /// It sent something wrong, or says so itself.
    Seen,
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
    write(message, place, DATA, [NOBODY, 0]);
}

/// The message that says that a rank has given up, the same to everybody.
pub(crate) fn give_up(call: u32, why: GiveUp) -> Buffer {
    let mut message = blank(0);
    let GiveUp { by, blamed, ground, doing, step } = why;
    let blamed = blamed.map_or(NOBODY, |rank| rank as u32);
    let place = Place { doing, call, step, from: by, to: NOBODY as usize };
    write(&mut message, place, GIVEN_UP, [blamed, ground as u32]);
    message
}

/// What a message says that begins like this, if it says that its sender has given up.
pub(crate) fn given_up(beginning: &[u8]) -> Option<GiveUp> {
    let header = beginning.get(..HEADER)?;
    let kind = word(header, 4);
    let whole = word(header, 0) == MAGIC && long(header, CHECKSUM) == checksum(header);
    if !whole || kind >> 8 != GIVEN_UP || long(header, 32) != 0 {
        return None;
    }
    let blamed = word(header, 24);
    Some(GiveUp {
        by: word(header, 16) as usize,
        blamed: (blamed != NOBODY).then_some(blamed as usize),
        ground: if word(header, 28) == Ground::Seen as u32 { Ground::Seen } else { Ground::Waited },
        doing: *Doing::ALL.get((kind & 0xFF) as usize)?,
        step: word(header, 12),
    })
}

fn write(message: &mut Buffer, place: Place, kind: u32, blame: [u32; 2]) {
    let len = (message.len() - HEADER) as u64;
    let words = [
        MAGIC,
        kind << 8 | place.doing as u32,
        place.call,
        place.step,
        place.from as u32,
        place.to as u32,
    ];
    for (index, word) in words.into_iter().chain(blame).enumerate() {
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

impl From<GiveUp> for Error {
    fn from(why: GiveUp) -> Self {
        let GiveUp { by, blamed, doing, step, .. } = why;
        Error::GivenUp { by, rank: blamed, step, doing: doing.name() }
    }
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
    if let Some(why) = given_up(message) {
        return Err(why.into());
    }
    if word(message, 0) != MAGIC {
        return Err(wrong("isn't one of Longspan's, or its beginning is damaged".into()));
    }
    if long(message, CHECKSUM) != checksum(message) {
        return Err(wrong("is damaged: its checksum doesn't fit".into()));
    }
    let got = [4, 8, 12, 16, 20].map(|at| word(message, at));
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
    }

    /// Whatever was awaited, and whether or not the engine says that less has come.
    #[test]
    fn giving_up_is_recognised_in_any_place() {
        let (doing, ground) = (Doing::Agreeing, Ground::Seen);
        let why = GiveUp { by: 1, blamed: Some(5), ground, doing, step: 4 };
        let said = give_up(0, why);
        let expected = Error::GivenUp { by: 1, rank: Some(5), step: 4, doing: "agreeing" };
        for awaited in [0, 8, 24, 1_000] {
            let mut message = blank(awaited);
            message[..said.len()].copy_from_slice(&said);
            assert_eq!(open(&message, PLACE, "keys").unwrap_err(), expected, "{awaited} bytes");
        }
        assert_eq!(given_up(&said), Some(why));
        for bit in 0..8 * (CHECKSUM + 8) {
            let mut damaged = said.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(given_up(&damaged), None, "bit {bit}");
        }
        let mut other = blank(0);
        seal(&mut other, PLACE);
        assert_eq!(given_up(&other), None);
    }
}
