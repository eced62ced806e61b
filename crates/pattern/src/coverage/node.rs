//! The expression tree that coverage queries run on, and its construction from a pattern.
//!
//! The primitives are lowered onto a few leaves: `causal` is a window, `sinks` a range of keys, a
//! level of `hierarchical` a window and a comb. The operands of a conjunction are ordered by
//! breadth, narrowest first.

use std::ops::Range;

use super::axis::Axis;
use super::interval::Interval;
use super::relation::Relation;
use crate::arith::Divisor;
use crate::pattern::{Expr, Lengths, MAX_ARGUMENT, Pattern};

pub(super) enum Node {
    Full,
    Window {
        left: i64,
        right: i64,
    },
    KeyRange {
        low: i64,
        high: i64,
    },
    QueryRange {
        low: i64,
        high: i64,
    },
    /// Coordinates `⌊position / stride⌋ mod size` that differ by at most `radius`.
    Axis(Axis),
    Strided {
        stride: i64,
    },
    /// The first `grain` keys of every `period`.
    Comb {
        period: i64,
        grain: i64,
    },
    Dilated {
        segment: i64,
        rate: i64,
        offset: i64,
    },
    Documents {
        lengths: Lengths,
        hint: usize,
    },
    Packed(Box<Packed>),
    Blocks {
        size: Divisor,
        relation: Relation,
    },
    /// The operands, in order of [`Node::breadth`].
    And(Vec<Node>, Scratch),
    Or(Vec<Node>, Scratch),
    Not(Box<Node>, Scratch),
}

pub(super) struct Packed {
    pub(super) queries: Lengths,
    pub(super) keys: Lengths,
    pub(super) inner: Node,
    pub(super) hint: usize,
    pub(super) scratch: Scratch,
}

/// Buffers of an inner node, reused across queries.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) left: Vec<Interval>,
    pub(super) right: Vec<Interval>,
    pub(super) both: Vec<Interval>,
    pub(super) words: Vec<u64>,
}

/// Recursive; leaves are lowered out of line, so that a level takes little stack.
pub(super) fn lower(pattern: &Pattern, view: &Range<i64>) -> Node {
    let lower_all = |parts: &[Pattern]| parts.iter().map(|part| lower(part, view)).collect();
    match &pattern.0 {
        Expr::Packed { queries, keys, inner } => {
            Packed::node(queries, keys, lower(inner, &(0..keys.longest())))
        }
        Expr::And(parts) => conjunction(lower_all(parts)),
        Expr::Or(parts) => Node::Or(lower_all(parts), Scratch::default()),
        Expr::Not(inner) => Node::Not(Box::new(lower(inner, view)), Scratch::default()),
        leaf => lower_leaf(leaf, view),
    }
}

#[inline(never)]
fn lower_leaf(leaf: &Expr, view: &Range<i64>) -> Node {
    let int = |value: &u64| *value as i64;
    match leaf {
        Expr::Full => Node::Full,
        Expr::Causal => Node::Window { left: MAX_ARGUMENT as i64, right: 0 },
        Expr::Window { left, right } => Node::Window { left: int(left), right: int(right) },
        Expr::Sinks { tokens } => Node::KeyRange { low: 0, high: int(tokens) },
        Expr::GlobalTokens { tokens } => any([
            Node::KeyRange { low: 0, high: int(tokens) },
            Node::QueryRange { low: 0, high: int(tokens) },
        ]),
        Expr::Keys { from, to } => Node::KeyRange { low: int(from), high: int(to) },
        Expr::Queries { from, to } => Node::QueryRange { low: int(from), high: int(to) },
        Expr::Neighborhood { sizes, radii } => {
            let cells = sizes.iter().product::<u64>() as i64;
            let mut stride = cells;
            let axes = sizes.iter().zip(radii).map(|(size, radius)| {
                stride /= int(size);
                Node::Axis(Axis { stride, size: int(size), radius: int(radius) })
            });
            // The first axis leaves few keys to the others, which repeat over all.
            let mut parts: Vec<Node> = axes.collect();
            parts.insert(1, Node::KeyRange { low: 0, high: cells });
            parts.push(Node::QueryRange { low: 0, high: cells });
            Node::And(parts, Scratch::default())
        }
        Expr::Dilated { segment, rate, offset } => {
            Node::Dilated { segment: int(segment), rate: int(rate), offset: int(offset) }
        }
        Expr::Strided { stride } => Node::Strided { stride: int(stride) },
        Expr::Hierarchical(levels) => any(levels.iter().map(|level| {
            let window = Node::Window { left: int(&level.window), right: int(&level.window) };
            // Clamped to 2^62, which lies beyond every position and the groups next to it.
            let period = level.stride.saturating_mul(level.grain).min(1 << 62);
            all([window, Node::Comb { period: int(&period), grain: int(&level.grain) }])
        })),
        Expr::Documents(lengths) => Node::Documents { lengths: lengths.clone(), hint: 0 },
        Expr::BlocksDilated { block, rates } => {
            Node::Blocks { size: Divisor::new(int(block)), relation: Relation::dilated(rates) }
        }
        Expr::Butterfly { block } => {
            Node::Blocks { size: Divisor::new(int(block)), relation: Relation::butterfly() }
        }
        Expr::Random { block, per_row, blocks, seed } => Node::Blocks {
            size: Divisor::new(int(block)),
            relation: Relation::random(*per_row, *blocks, *seed, *block, view),
        },
        Expr::Blocks { block, rows } => Node::Blocks {
            size: Divisor::new(int(block)),
            relation: Relation::explicit(rows.clone()),
        },
        // `TooDeep` allows nothing; the others are lowered by `lower`.
        Expr::TooDeep | Expr::Packed { .. } | Expr::And(_) | Expr::Or(_) | Expr::Not(_) => {
            Node::KeyRange { low: 0, high: 0 }
        }
    }
}

/// A conjunction, ordered by breadth.
fn conjunction(mut parts: Vec<Node>) -> Node {
    parts.sort_by_key(Node::breadth);
    Node::And(parts, Scratch::default())
}

pub(super) fn all(parts: impl IntoIterator<Item = Node>) -> Node {
    conjunction(parts.into_iter().collect())
}

impl Packed {
    #[inline(never)]
    fn node(queries: &Lengths, keys: &Lengths, inner: Node) -> Node {
        let (queries, keys) = (queries.clone(), keys.clone());
        Node::Packed(Box::new(Packed {
            queries,
            keys,
            inner,
            hint: 0,
            scratch: Scratch::default(),
        }))
    }
}

fn any(parts: impl IntoIterator<Item = Node>) -> Node {
    let mut parts: Vec<_> = parts.into_iter().collect();
    if parts.len() == 1 { parts.remove(0) } else { Node::Or(parts, Scratch::default()) }
}

impl Node {
    /// Nodes of this subtree.
    pub(super) fn count(&self) -> u64 {
        1 + match self {
            Node::Packed(packed) => packed.inner.count(),
            Node::And(parts, _) | Node::Or(parts, _) => parts.iter().map(Node::count).sum(),
            Node::Not(inner, _) => inner.count(),
            _ => 0,
        }
    }

    pub(super) fn is_toeplitz(&self) -> bool {
        match self {
            Node::Full | Node::Window { .. } | Node::Strided { .. } => true,
            Node::And(parts, _) | Node::Or(parts, _) => parts.iter().all(Node::is_toeplitz),
            Node::Not(inner, _) => inner.is_toeplitz(),
            _ => false,
        }
    }

    /// About how many keys the intervals of one query span: an estimate of a query's cost.
    fn breadth(&self) -> i64 {
        match self {
            Node::Full | Node::QueryRange { .. } | Node::Strided { .. } => i64::MAX,
            Node::Comb { .. } | Node::Not(..) => i64::MAX,
            Node::Window { left, right } => left.saturating_add(*right),
            Node::KeyRange { low, high } => high - low,
            Node::Axis(axis) => axis.breadth(),
            Node::Dilated { segment, .. } => *segment,
            Node::Documents { lengths, .. } => lengths.total() / (lengths.count() as i64).max(1),
            Node::Packed(packed) => packed.keys.total() / (packed.keys.count() as i64).max(1),
            Node::Blocks { size, relation } => size.by.saturating_mul(relation.degree()),
            Node::And(parts, _) => parts.iter().map(Node::breadth).min().unwrap_or(i64::MAX),
            Node::Or(parts, _) => parts.iter().map(Node::breadth).fold(0, i64::saturating_add),
        }
    }
}
