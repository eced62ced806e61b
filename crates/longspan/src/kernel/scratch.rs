//! What one thread works with while it runs tasks; nothing in it shrinks.

use super::bias::BiasSums;
use super::forward::Lists;
use crate::exec::Arena;

/// What one thread works with.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) elements: Arena,
    pub(crate) lists: Lists,
    /// Clean copies of numbers that aren't finite, in the rare case.
    pub(crate) clean: Arena,
    /// What masks are made in.
    pub(crate) mask: Vec<u64>,
    /// Gradients of biases.
    pub(crate) bias: BiasSums,
}

impl Scratch {
    /// Bytes of what is reserved before tasks run.
    pub(crate) fn bytes(&self) -> usize {
        self.elements.bytes() + self.lists.bytes() + self.clean.bytes()
    }
}
