//! The coverage engine: a pattern lowered for coverage queries.
//!
//! Used by `layout`; [`PatternCoverage`] is the public form. The operands of a query are a range of
//! query positions and a range of keys:
//!
//! ```text
//! coverage   intervals of keys: Full, Partial or Unknown           (query.rs)
//! fill       mask bits, one word per query                         (bits.rs)
//! signature  the values that the mask bits depend on: equal masks
//!            are recognized without computing them                 (signature.rs)
//! edges      for how many rows the intervals only shift            (edges.rs)
//! ```
//!
//! A conjunction queries its second operand only within the intervals of its first, so regions
//! that the first leaves empty cost nothing.
//!
//! A [`LoweredPattern`] owns its scratch buffers and search hints. It is cheap to build; each
//! thread has its own.

use std::ops::Range;

use crate::meter::Meter;
use crate::pattern::Pattern;

mod axis;
mod bits;
mod edges;
pub(crate) mod interval;
mod node;
mod progressions;
mod query;
mod ranges;
mod relation;
mod signature;

pub(crate) use edges::Edges;
use interval::Interval;
use node::Node;
pub use progressions::{BlockCoverage, PatternCoverage};
use ranges::CoverageQuery;
pub(crate) use ranges::{KeyRange, PositionRange};

/// A pattern lowered for coverage queries.
pub(crate) struct LoweredPattern {
    root: Node,
    /// Nodes of the tree: the cost of evaluating single bits.
    nodes: u64,
    signature: Vec<i64>,
}

/// Units per node and query of mask bits.
const BITS: u64 = 2;
/// Units per node of bits, a signature or edges.
const NODE: u64 = 16;

impl LoweredPattern {
    /// Lowers `pattern`. Keys at positions outside `valid` are masked. Queries are restricted to
    /// keys at the positions `view`.
    pub(crate) fn new(pattern: &Pattern, valid: Option<&Range<i64>>, view: Range<i64>) -> Self {
        let mut root = node::lower(pattern, &view);
        if let Some(valid) = valid {
            root = node::all([Node::KeyRange { low: valid.start, high: valid.end }, root]);
        }
        let nodes = root.count();
        LoweredPattern { root, nodes, signature: Vec::new() }
    }

    /// Appends the intervals of `keys` that `queries` attend to.
    pub(crate) fn coverage(
        &mut self,
        queries: PositionRange,
        keys: KeyRange,
        meter: &mut Meter<'_>,
        out: &mut Vec<Interval>,
    ) {
        self.root.coverage(CoverageQuery { queries, keys }, meter, out);
    }

    /// Sets `out[i]` to the mask bits of query `i` over `keys` (at most 64).
    pub(crate) fn fill(
        &mut self,
        queries: PositionRange,
        keys: PositionRange,
        meter: &mut Meter<'_>,
        out: &mut [u64],
    ) {
        debug_assert!(keys.len <= 64 && out.len() as i64 == queries.len);
        meter.coverage_query();
        meter.spend(self.nodes * (NODE + BITS * queries.len as u64));
        self.root.fill(queries, keys, meter, out);
    }

    /// The values that the bits of `queries` × `keys` depend on, or `None` if they are too many.
    /// Equal signatures have equal bits.
    pub(crate) fn signature(
        &mut self,
        queries: PositionRange,
        keys: PositionRange,
        meter: &mut Meter<'_>,
    ) -> Option<&[i64]> {
        meter.coverage_query();
        meter.spend(self.nodes * NODE);
        self.signature.clear();
        self.signature.extend([queries.len, queries.step, keys.len, keys.step]);
        let short = self.root.signature(queries, keys, meter, &mut self.signature);
        short.then_some(&self.signature[..])
    }

    /// Replaces `out` by the edges of the intervals and returns for how many rows they hold, the
    /// moving ones shifted; `None` if for none in this shape.
    pub(crate) fn edges(
        &mut self,
        queries: PositionRange,
        keys: KeyRange,
        meter: &mut Meter<'_>,
        out: &mut Edges,
    ) -> Option<i64> {
        meter.coverage_query();
        meter.spend(self.nodes * NODE);
        out.clear();
        out.fixed.extend([keys.low, keys.high]);
        self.root.edges(queries, keys, meter, out)
    }

    /// Whether the predicate depends on `key − query` alone.
    pub(crate) fn is_toeplitz(&self) -> bool {
        self.root.is_toeplitz()
    }

    pub(crate) fn allows(&mut self, query: i64, key: i64) -> bool {
        let (query, key) = (PositionRange::one(query), PositionRange::one(key));
        let mut word = [0];
        self.fill(query, key, &mut Meter::unlimited(), &mut word);
        word[0] != 0
    }
}

impl Pattern {
    /// Whether the query at position `query` may attend to the key at position `key`.
    ///
    /// For single pairs; a [`Layout`](crate::Layout) covers all of them.
    pub fn allows(&self, query: i64, key: i64) -> bool {
        LoweredPattern::new(self, None, key..key.saturating_add(1)).allows(query, key)
    }
}
