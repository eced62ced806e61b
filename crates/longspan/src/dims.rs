//! Sizes, strides and the order of axes: plain values that every layer uses.

/// How many elements each axis has.
///
/// ```
/// use longspan::Dims;
///
/// let dims = Dims { batch: 2, tokens: 1_000, heads: 8, dim: 64 };
/// assert_eq!(dims.elements(), Some(1_024_000));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Sequences.
    pub batch: usize,
    /// Positions of each sequence.
    pub tokens: usize,
    /// Heads, of queries or of keys and values.
    pub heads: usize,
    /// Elements per head.
    pub dim: usize,
}

impl Dims {
    /// The product of all axes, if it can be counted.
    pub fn elements(&self) -> Option<usize> {
        if [self.batch, self.tokens, self.heads, self.dim].contains(&0) {
            return Some(0);
        }
        self.batch.checked_mul(self.tokens)?.checked_mul(self.heads)?.checked_mul(self.dim)
    }

    /// Rows of the softmax: one per batch entry, head and token.
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.heads * self.tokens
    }
}

/// Elements from one index of an axis to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// From one sequence to the next.
    pub batch: isize,
    /// From one token to the next.
    pub tokens: isize,
    /// From one head to the next.
    pub heads: isize,
    /// From one element of a head to the next.
    pub dim: isize,
}

/// The order of the axes of a contiguous tensor, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// `[batch, token, head, dim]`: flash-attn, candle, most model code before its transpose.
    Bshd,
    /// `[batch, head, token, dim]`: PyTorch's SDPA and FlexAttention.
    Bhsd,
}

impl Order {
    /// The strides of a contiguous tensor in this order. Where [`Dims::elements`] can be counted,
    /// they can, or there are no elements and they don't matter.
    ///
    /// ```
    /// use longspan::{Dims, Order, Strides};
    ///
    /// let dims = Dims { batch: 2, tokens: 10, heads: 4, dim: 8 };
    /// let strides = Strides { batch: 320, tokens: 32, heads: 8, dim: 1 };
    /// assert_eq!(Order::Bshd.strides(dims), strides);
    /// ```
    pub fn strides(self, dims: Dims) -> Strides {
        let Dims { batch: _, tokens, heads, dim } = dims;
        let (token, head) = match self {
            Order::Bshd => (heads.wrapping_mul(dim), dim),
            Order::Bhsd => (dim, tokens.wrapping_mul(dim)),
        };
        Strides {
            batch: tokens.wrapping_mul(heads).wrapping_mul(dim) as isize,
            tokens: token as isize,
            heads: head as isize,
            dim: 1,
        }
    }
}

/// The sizes of a call, validated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) key_heads: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
}

impl Sizes {
    pub(crate) fn output(&self) -> Dims {
        Dims { batch: self.batch, tokens: self.queries, heads: self.heads, dim: self.value_dim }
    }
}
