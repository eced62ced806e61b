//! Where a cache keeps keys and values.

use longspan_pattern::{Positions, Progression, Reach, Shape};

use super::Held;
use crate::arguments::Inputs;
use crate::check;
use crate::dims::{Dims, Strides};
use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::tensor::{View, allocatable, allocate};

/// Slots beyond the reach, at least.
const SPARE: usize = 64;

/// Keys and values of several sequences, each in slots of its own.
#[derive(Debug)]
pub(super) struct Slots<E> {
    /// Slots of the first positions, never overwritten, and how many positions before a query it
    /// may attend to.
    first: usize,
    recent: usize,
    /// Tokens are slots.
    dims: Dims,
    value_dim: usize,
    /// `[batch, head, slot, dim]`.
    keys: Vec<E>,
    values: Vec<E>,
    entries: Vec<Entry>,
}

/// What a batch entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Tokens so far.
    pub(super) len: usize,
    /// The position in the slot behind those of the first positions.
    from: usize,
}

impl<E: Element> Held for Slots<E> {
    fn batch(&self) -> usize {
        self.entries.len()
    }

    fn len(&self, entry: usize) -> usize {
        self.entries[entry].len
    }

    fn slots(&self) -> usize {
        self.dims.tokens
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.keys[..]) + size_of_val(&self.values[..])
    }

    fn clear(&mut self, entry: usize) {
        self.entries[entry] = Entry { len: 0, from: self.first };
    }

    fn element(&self) -> ElementType {
        E::TYPE
    }
}

impl<E: Element> Slots<E> {
    /// None yet, for sequences as many as `dims` has and what a pattern reaches.
    pub(super) fn new(dims: Dims, value_dim: usize, reach: Reach) -> Self {
        let bounded = |tokens: u64| usize::try_from(tokens).unwrap_or(usize::MAX);
        let (first, recent) = match bounded(reach.recent) {
            usize::MAX => (0, usize::MAX),
            recent => (bounded(reach.first), recent),
        };
        Slots {
            first,
            recent,
            dims: Dims { tokens: 0, ..dims },
            value_dim,
            keys: Vec::new(),
            values: Vec::new(),
            entries: vec![Entry { len: 0, from: first }; dims.batch],
        }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn lens(&self) -> Vec<usize> {
        self.entries.iter().map(|entry| entry.len).collect()
    }

    /// Forgets the last tokens, down to these lengths.
    pub(super) fn take_back(&mut self, lens: &[usize]) {
        for (entry, len) in self.entries.iter_mut().zip(lens) {
            entry.len = *len;
        }
    }

    /// Whether every slot up to the last is a position, the same for all entries.
    pub(super) fn is_whole(&self) -> bool {
        let same = |entry: &Entry| entry.len == self.entries[0].len && entry.from == self.first;
        self.entries.iter().all(same)
    }

    /// Queries beside the slots up to the last that is used.
    pub(super) fn beside<'a>(&'a self, q: View<'a, E>) -> Inputs<'a, E> {
        Inputs::new(
            q,
            self.view(&self.keys, self.dims.dim),
            self.view(&self.values, self.value_dim),
        )
    }

    /// Slots of an entry that hold tokens.
    pub(super) fn used(&self, entry: Entry) -> usize {
        if entry.len <= self.first { entry.len } else { self.first + entry.len - entry.from }
    }

    /// Slots up to the last that any entry uses.
    pub(super) fn span(&self) -> usize {
        self.entries.iter().map(|&entry| self.used(entry)).max().unwrap_or(0)
    }

    fn view<'a>(&self, data: &'a [E], dim: usize) -> View<'a, E> {
        let Dims { batch, tokens, heads, .. } = self.dims;
        let strides = Strides {
            batch: (heads * tokens * dim) as isize,
            tokens: dim as isize,
            heads: (tokens * dim) as isize,
            dim: 1,
        };
        let dims = Dims { batch, tokens: self.span(), heads, dim };
        View::strided(data, 0, dims, strides).expect("slots lie within the cache")
    }

    /// Where the queries and slots of an entry stand.
    pub(super) fn shape(
        &self,
        entry: Entry,
        queries: usize,
        own: usize,
        span: usize,
    ) -> Result<Shape> {
        let offset = (entry.len - own) as i64;
        if entry.from == self.first {
            // Nothing was overwritten: slots are positions.
            return Ok(Shape::new(queries, span).query_offset(offset));
        }
        let recent = span - self.first;
        let slots = [(0, self.first), (entry.from, recent)];
        let slots = slots.map(|(start, len)| Progression { start: start as i64, step: 1, len });
        let shape = Shape::new(queries, entry.from + recent).query_offset(offset);
        Ok(shape.key_map(Positions::new(slots)?))
    }

    /// Appends keys and values.
    pub(super) fn push(
        &mut self,
        k: &View<'_, E>,
        v: &View<'_, E>,
        lengths: Option<&[usize]>,
    ) -> Result<()> {
        self.check(k, v, lengths)?;
        let Dims { batch, heads, dim, .. } = self.dims;
        let tokens = k.dims().tokens;
        let own = |entry: usize| lengths.map_or(tokens, |lengths| lengths[entry]);
        self.make_room(own)?;
        for index in 0..batch {
            let entry = self.entries[index];
            for token in 0..own(index) {
                let position = entry.len + token;
                let slot = if position < self.first {
                    position
                } else {
                    self.first + position - entry.from
                };
                for head in 0..heads {
                    let row = (index * heads + head) * self.dims.tokens + slot;
                    k.copy_row(index, token, head, &mut self.keys[row * dim..][..dim]);
                    let dim = self.value_dim;
                    v.copy_row(index, token, head, &mut self.values[row * dim..][..dim]);
                }
            }
            self.entries[index].len += own(index);
        }
        Ok(())
    }

    /// Whether keys and values fit the cache.
    pub(super) fn check(
        &self,
        k: &View<'_, E>,
        v: &View<'_, E>,
        lengths: Option<&[usize]>,
    ) -> Result<()> {
        let Dims { batch, heads, dim, .. } = self.dims;
        for (name, view, dim) in [("k", k, dim), ("v", v, self.value_dim)] {
            let dims = view.dims();
            check::axis(name, "batch", dims.batch, batch, "as the cache")?;
            check::axis(name, "heads", dims.heads, heads, "as the cache")?;
            check::axis(name, "head dim", dims.dim, dim, "as the cache")?;
        }
        let tokens = k.dims().tokens;
        check::axis("v", "tokens", v.dims().tokens, tokens, "as k")?;
        if let Some(lengths) = lengths {
            if lengths.len() != batch {
                let len = lengths.len();
                return Err(Error::Length { what: "lengths", len, expected: batch });
            }
            if let Some(&length) = lengths.iter().find(|&&length| length > tokens) {
                let why = "as many as lengths has for a batch entry";
                return Err(Error::Shape {
                    tensor: "k",
                    axis: "tokens",
                    got: tokens,
                    expected: length,
                    why,
                });
            }
        }
        Ok(())
    }

    /// Overwrites what no later query can attend to where room is short, and then takes more slots if
    /// that isn't enough.
    fn make_room(&mut self, new: impl Fn(usize) -> usize) -> Result<()> {
        let mut needed = 0;
        for index in 0..self.entries.len() {
            let entry = self.entries[index];
            let with = Entry { len: entry.len + new(index), ..entry };
            if self.used(with) <= self.dims.tokens {
                continue;
            }
            let from = entry.len.saturating_sub(self.recent).max(entry.from);
            self.move_down(index, from);
            self.entries[index].from = from;
            needed = needed.max(self.used(Entry { from, ..with }));
        }
        if needed <= self.dims.tokens {
            return Ok(());
        }
        let doubled = needed.max(2 * self.dims.tokens).max(SPARE);
        let most =
            self.first.saturating_add(self.recent).saturating_add((self.recent / 4).max(SPARE));
        self.reserve(doubled.min(most.max(needed)))
    }

    /// Moves what an entry has from position `from` on to the slots behind the first positions.
    fn move_down(&mut self, index: usize, from: usize) {
        let entry = self.entries[index];
        if from == entry.from {
            return;
        }
        let source = self.first + from - entry.from;
        let tokens = entry.len.saturating_sub(from);
        for (data, dim) in [(&mut self.keys, self.dims.dim), (&mut self.values, self.value_dim)] {
            for head in 0..self.dims.heads {
                let row = (index * self.dims.heads + head) * self.dims.tokens;
                let start = (row + source) * dim;
                data.copy_within(start..start + tokens * dim, (row + self.first) * dim);
            }
        }
    }

    /// Takes this number of slots, where there are fewer.
    pub(super) fn reserve(&mut self, slots: usize) -> Result<()> {
        if slots <= self.dims.tokens {
            return Ok(());
        }
        let used: Vec<usize> = self.entries.iter().map(|&entry| self.used(entry)).collect();
        let Dims { heads, tokens, .. } = self.dims;
        let widen = |data: &[E], dim: usize| {
            let mut wide =
                allocate::zeros(allocatable::<E>(Dims { tokens: slots, dim, ..self.dims })?)?;
            for row in 0..self.dims.batch * heads {
                let elements = used[row / heads] * dim;
                let (from, to) = (row * tokens * dim, row * slots * dim);
                wide[to..to + elements].copy_from_slice(&data[from..from + elements]);
            }
            Ok::<_, Error>(wide)
        };
        let keys = widen(&self.keys, self.dims.dim)?;
        self.values = widen(&self.values, self.value_dim)?;
        self.keys = keys;
        self.dims.tokens = slots;
        Ok(())
    }
}
