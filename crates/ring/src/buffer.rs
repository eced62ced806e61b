//! Bytes that messages are made of.

/// Bytes, aligned so that numbers can lie in them.
///
/// It is owned by whoever holds it, so that a transport whose engine may still be using it after a
/// failure can take it away and never free it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Buffer {
    words: Vec<u64>,
    len: usize,
}

impl Buffer {
    /// So many bytes, all 0.
    pub fn zeroed(len: usize) -> Self {
        Buffer { words: vec![0; len.div_ceil(8)], len }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes it so long, in the memory that it has where that is enough. What it holds then is
    /// unspecified.
    pub fn resize(&mut self, len: usize) {
        self.words.resize(len.div_ceil(8), 0);
        self.len = len;
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}
