//! Scratch memory of a thread or a call, aligned to cache lines.

/// A cache line of numbers; vectors of scratch never straddle two.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written through pointers")] [f32; 16]);

/// Numbers without meaning, aligned to cache lines.
#[derive(Debug, Default)]
pub(crate) struct Arena(Vec<Line>);

impl Arena {
    pub(crate) fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<Line>()
    }

    /// Room for `len` numbers, among them those of the room before.
    pub(crate) fn reserve(&mut self, len: usize) -> *mut f32 {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([f32::NAN; 16]));
        }
        self.0.as_mut_ptr().cast()
    }

    /// Room for `len` numbers, whatever they are at present. A room that is too small goes before there is
    /// another, so that both are never held.
    pub(crate) fn replace(&mut self, len: usize) -> *mut f32 {
        if self.0.len() < len.div_ceil(16) {
            self.0 = Vec::new();
        }
        self.reserve(len)
    }
}
