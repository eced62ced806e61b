//! Token lists as bytes. Setup messages use it.

use longspan::{Positions, Progression};

use crate::error::{Error, Result};
use crate::tokens::Tokens;

pub(crate) fn write_word(bytes: &mut Vec<u8>, word: u64) {
    bytes.extend_from_slice(&word.to_le_bytes());
}

pub(crate) fn write_tokens(bytes: &mut Vec<u8>, tokens: &Tokens) {
    write_word(bytes, tokens.progressions().count() as u64);
    for Progression { start, step, len } in tokens.progressions() {
        [start as u64, step as u64, len as u64]
            .into_iter()
            .for_each(|word| write_word(bytes, word));
    }
}

/// Reads words and token lists.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn word(&mut self) -> Result<u64> {
        let (word, rest) = self.rest.split_at_checked(8).ok_or(Error::Malformed)?;
        self.rest = rest;
        Ok(u64::from_le_bytes(word.try_into().expect("8 bytes")))
    }

    pub(crate) fn tokens(&mut self) -> Result<Tokens> {
        let count = self.word()?;
        let progressions = (0..count).map(|_| {
            let mut word = || self.word();
            let (start, step, len) = (word()? as i64, word()? as usize, word()? as usize);
            Ok(Progression { start, step, len })
        });
        Ok(Positions::new(progressions.collect::<Result<Vec<_>>>()?)?)
    }
}
