//! A pattern made ready to be asked.
//!
//! [`Plan::new`] lowers the primitives of a [`Pattern`] onto a few leaves (`causal` is a window,
//! `sinks` a range of keys, a level of `hierarchical` a window and a comb) and puts the narrow
//! parts of a conjunction first. A plan answers four kinds of question about a band of queries ×
//! a progression of keys:
//!
//! ```text
//! ask        which stretches of keys are seen, and how surely     (ask.rs)
//! fill       the very bits, one word a query                      (fill.rs)
//! signature  what the bits depend on, so that equal masks are
//!            recognised without making them                       (signature.rs)
//! edges      for how many rows the answer just moves along        (steady.rs)
//! ```
//!
//! A conjunction asks its second part only about keys that its first part sees. So what nobody
//! sees costs nothing, however much the other part has to say there.
//!
//! A plan carries its own scratch and remembers where it last looked; it is cheap to make, and
//! each thread has its own.

use std::ops::Range;

use crate::meter::Meter;
use crate::pattern::{Expr, Lengths, Pattern};

pub(crate) mod arith;
mod ask;
mod fill;
mod relation;
pub(crate) mod segment;
mod signature;
mod steady;

use arith::{Divisor, div_ceil};
use relation::Relation;
use segment::Segment;
pub(crate) use steady::Edges;

/// A band of queries: `len` positions from `start` on, `step` apart; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Band {
    pub(crate) start: i64,
    pub(crate) step: i64,
    pub(crate) len: i64,
}

impl Band {
    pub(crate) fn one(position: i64) -> Self {
        Band { start: position, step: 1, len: 1 }
    }

    pub(crate) fn at(&self, index: i64) -> i64 {
        self.start + self.step * index
    }

    pub(crate) fn last(&self) -> i64 {
        self.at(self.len - 1)
    }

    /// Part of the band, by number.
    pub(crate) fn part(&self, start: i64, len: i64) -> Self {
        Band { start: self.at(start), step: self.step, len }
    }

    fn moved(&self, by: i64) -> Self {
        Band { start: self.start + by, ..*self }
    }

    /// The first number (at most `len`) whose position is at least `position`.
    #[inline]
    fn number_at_least(&self, position: i64) -> i64 {
        div_ceil(position - self.start, self.step).max(0).min(self.len)
    }
}

/// A progression of keys, asked about from number `low` to below number `high`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    /// Position of key number 0.
    pub(crate) start: i64,
    pub(crate) step: i64,
    pub(crate) low: i64,
    pub(crate) high: i64,
    /// Keys a block: gaps and periods below it aren't worth telling apart.
    pub(crate) block: i64,
    /// Segments that an answer may have.
    pub(crate) most: usize,
}

impl Keys {
    /// The first number in `low..=high` whose position is at least `position`.
    #[inline]
    fn number_at_least(&self, position: i64) -> i64 {
        let number = div_ceil(position - self.start, self.step);
        number.max(self.low).min(self.high)
    }

    fn position(&self, number: i64) -> i64 {
        self.start + self.step * number
    }

    fn within(&self, low: i64, high: i64) -> Self {
        Keys { low, high, ..*self }
    }

    fn moved(&self, by: i64) -> Self {
        Keys { start: self.start + by, ..*self }
    }
}

/// What of some keys a band sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) band: Band,
    pub(crate) keys: Keys,
}

impl Question {
    fn within(&self, low: i64, high: i64) -> Self {
        Question { keys: self.keys.within(low, high), ..*self }
    }
}

/// A pattern made ready to be asked.
pub(crate) struct Plan {
    root: Node,
    /// Nodes of the plan, which is what a look at single bits costs.
    nodes: u64,
    signature: Vec<i64>,
}

enum Node {
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
    /// The parts, narrow ones first.
    And(Vec<Node>, Scratch),
    Or(Vec<Node>, Scratch),
    Not(Box<Node>, Scratch),
}

struct Packed {
    queries: Lengths,
    keys: Lengths,
    inner: Node,
    hint: usize,
    scratch: Scratch,
}

/// Buffers of an inner node, kept from question to question.
#[derive(Default)]
struct Scratch {
    left: Vec<Segment>,
    right: Vec<Segment>,
    both: Vec<Segment>,
    words: Vec<u64>,
}

/// Units of one node's bits of a query, and of a node's signature or edges.
const BITS: u64 = 2;
const NODE: u64 = 16;

impl Plan {
    /// Lowers `pattern`; keys outside the positions `valid` are seen by nobody. Only keys at the
    /// positions `view` will be asked about.
    pub(crate) fn new(pattern: &Pattern, valid: Option<&Range<i64>>, view: Range<i64>) -> Self {
        let mut root = lower(pattern, &view);
        if let Some(valid) = valid {
            root = all([Node::KeyRange { low: valid.start, high: valid.end }, root]);
        }
        let nodes = root.count();
        Plan { root, nodes, signature: Vec::new() }
    }

    /// Appends what `band` sees of `keys`.
    pub(crate) fn ask(
        &mut self,
        band: Band,
        keys: Keys,
        meter: &mut Meter<'_>,
        out: &mut Vec<Segment>,
    ) {
        self.root.ask(Question { band, keys }, meter, out);
    }

    /// Sets `out[i]` to the bits that query `i` of the band sees of `keys` (at most 64).
    pub(crate) fn fill(&mut self, band: Band, keys: Band, meter: &mut Meter<'_>, out: &mut [u64]) {
        debug_assert!(keys.len <= 64 && out.len() as i64 == band.len);
        meter.question();
        meter.spend(self.nodes * (NODE + BITS * band.len as u64));
        self.root.fill(band, keys, meter, out);
    }

    /// What the bits of `band` × `keys` depend on, or `None` if that takes too many words: equal
    /// signatures have equal bits.
    pub(crate) fn signature(
        &mut self,
        band: Band,
        keys: Band,
        meter: &mut Meter<'_>,
    ) -> Option<&[i64]> {
        meter.question();
        meter.spend(self.nodes * NODE);
        self.signature.clear();
        self.signature.extend([band.len, band.step, keys.len, keys.step]);
        self.root.signature(band, keys, meter, &mut self.signature).then_some(&self.signature[..])
    }

    /// Replaces `out` by the edges of the answer and tells for how many rows they hold, the moving
    /// ones moved; `None` if never.
    pub(crate) fn edges(
        &mut self,
        band: Band,
        keys: Keys,
        meter: &mut Meter<'_>,
        out: &mut Edges,
    ) -> Option<i64> {
        meter.question();
        meter.spend(self.nodes * NODE);
        out.clear();
        out.standing.extend([keys.low, keys.high]);
        self.root.edges(band, keys, meter, out)
    }

    /// Whether what is seen depends on `key − query` alone.
    pub(crate) fn by_difference(&self) -> bool {
        self.root.by_difference()
    }

    pub(crate) fn allows(&mut self, query: i64, key: i64) -> bool {
        let mut word = [0];
        self.fill(Band::one(query), Band::one(key), &mut Meter::unlimited(), &mut word);
        word[0] != 0
    }
}

/// Calls itself for what is inside; kept apart from leaves, so that a level takes little stack.
fn lower(pattern: &Pattern, view: &Range<i64>) -> Node {
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
        Expr::Causal => Node::Window { left: crate::pattern::LARGEST as i64, right: 0 },
        Expr::Window { left, right } => Node::Window { left: int(left), right: int(right) },
        Expr::Sinks { tokens } => Node::KeyRange { low: 0, high: int(tokens) },
        Expr::GlobalTokens { tokens } => any([
            Node::KeyRange { low: 0, high: int(tokens) },
            Node::QueryRange { low: 0, high: int(tokens) },
        ]),
        Expr::Dilated { segment, rate, offset } => {
            Node::Dilated { segment: int(segment), rate: int(rate), offset: int(offset) }
        }
        Expr::Strided { stride } => Node::Strided { stride: int(stride) },
        Expr::Hierarchical(levels) => any(levels.iter().map(|level| {
            let window = Node::Window { left: int(&level.window), right: int(&level.window) };
            // A period past every position may as well end there; 2^62 is past all of them, the
            // groups on its far side included.
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
        // Those inside others don't get here.
        Expr::TooDeep | Expr::Packed { .. } | Expr::And(_) | Expr::Or(_) | Expr::Not(_) => {
            Node::KeyRange { low: 0, high: 0 }
        }
    }
}

/// A conjunction, narrow parts first.
fn conjunction(mut parts: Vec<Node>) -> Node {
    parts.sort_by_key(Node::breadth);
    Node::And(parts, Scratch::default())
}

fn all(parts: impl IntoIterator<Item = Node>) -> Node {
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
    /// This node and all inside it.
    fn count(&self) -> u64 {
        1 + match self {
            Node::Packed(packed) => packed.inner.count(),
            Node::And(parts, _) | Node::Or(parts, _) => parts.iter().map(Node::count).sum(),
            Node::Not(inner, _) => inner.count(),
            _ => 0,
        }
    }

    fn by_difference(&self) -> bool {
        match self {
            Node::Full | Node::Window { .. } | Node::Strided { .. } => true,
            Node::And(parts, _) | Node::Or(parts, _) => parts.iter().all(Node::by_difference),
            Node::Not(inner, _) => inner.by_difference(),
            _ => false,
        }
    }

    /// About how many keys a query sees stretches of, which is what asking about it costs.
    fn breadth(&self) -> i64 {
        match self {
            Node::Full | Node::QueryRange { .. } | Node::Strided { .. } => i64::MAX,
            Node::Comb { .. } | Node::Not(..) => i64::MAX,
            Node::Window { left, right } => left.saturating_add(*right),
            Node::KeyRange { low, high } => high - low,
            Node::Dilated { segment, .. } => *segment,
            Node::Documents { lengths, .. } => lengths.total() / (lengths.count() as i64).max(1),
            Node::Packed(packed) => packed.keys.total() / (packed.keys.count() as i64).max(1),
            Node::Blocks { size, relation } => size.by.saturating_mul(relation.degree()),
            Node::And(parts, _) => parts.iter().map(Node::breadth).min().unwrap_or(i64::MAX),
            Node::Or(parts, _) => parts.iter().map(Node::breadth).fold(0, i64::saturating_add),
        }
    }
}
