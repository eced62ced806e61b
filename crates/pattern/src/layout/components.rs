//! A layout as components: disjoint sets of pairs, each in an order of positions in which it is dense.
//!
//! `strided(64)` touches every block in natural order and fills few pairs of it. In the order of
//! residues modulo 64 it is 64 dense attentions. A [`Component`] is such a part: views with a step of
//! queries and keys, equal ones as entries of one view, and a layout for each.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::compile::compile;
use super::{Layout, RunKind};
use crate::error::{Error, Result};
use crate::meter::Progress;
use crate::pattern::{Lengths, MAX_ARGUMENT, Pattern, Residues, Term};
use crate::positions::{Positions, Progression};
use crate::residues::{self, Alike, Members, Segment, Steps, Tokens};
use crate::shape::Frame;

/// Segments that components may have besides four per row of blocks.
const FEW_SEGMENTS: usize = 1 << 10;

/// Memory limit of the masks of all components, unless the shape has one.
const MASK_BYTES: u64 = 2 << 20;

/// The order of positions in which a component is dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PositionOrder {
    /// That of the tokens.
    Natural,
    /// Positions of one residue after the other, within segments of so many positions if there are any.
    Residues {
        /// Positions of one residue are so far apart, or a multiple of it.
        modulus: u64,
        /// Positions per segment.
        segment: Option<u64>,
    },
}

/// Tokens of a tensor as a view with a step: token `t` of segment `s` is token
/// `segments[s] + tokens[t]` of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenSteps {
    /// Where each segment begins.
    pub segments: Steps,
    /// The tokens of each, from its beginning.
    pub tokens: Steps,
}

/// Some pairs of a layout, as dense blocks.
#[derive(Debug, Clone)]
pub struct Component {
    order: PositionOrder,
    queries: TokenSteps,
    keys: TokenSteps,
    /// One per segment.
    layouts: Vec<Arc<Layout>>,
    tiles: TileCounts,
}

impl Component {
    /// The order in which it is dense.
    pub fn order(&self) -> PositionOrder {
        self.order
    }

    /// Its queries.
    pub fn queries(&self) -> TokenSteps {
        self.queries
    }

    /// Its keys.
    pub fn keys(&self) -> TokenSteps {
        self.keys
    }

    /// The layout of each segment; masks and positions are those of its tokens.
    pub fn layouts(&self) -> &[Arc<Layout>] {
        &self.layouts
    }

    /// What a kernel computes for it.
    pub fn tiles(&self) -> &TileCounts {
        &self.tiles
    }
}

/// What a kernel computes for a layout, for a cost model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TileCounts {
    /// Queries, a row of blocks rounded up to whole vectors of 16.
    pub queries: u128,
    /// Those times the keys of Full blocks.
    pub full_pairs: u128,
    /// Those times the keys of Partial blocks.
    pub partial_pairs: u128,
    /// Calls of a kernel.
    pub calls: u64,
}

impl TileCounts {
    /// The blocks of a layout as it is.
    pub fn of(layout: &Layout) -> Self {
        let mut counts = TileCounts { calls: 1, ..TileCounts::default() };
        let (keys, block) = (layout.keys() as u128, layout.block().get() as u128);
        for row in layout.rows() {
            let runs = layout.row(row);
            if runs.is_empty() {
                continue;
            }
            let queries = layout.row_tokens(row).len().next_multiple_of(16) as u128;
            counts.queries += queries;
            for run in runs {
                let end = (u128::from(run.end()) * block).min(keys);
                let pairs = queries * (end - u128::from(run.start) * block);
                match run.kind() {
                    RunKind::Full => counts.full_pairs += pairs,
                    RunKind::Partial => counts.partial_pairs += pairs,
                }
            }
        }
        counts
    }

    fn add(&mut self, other: &TileCounts) {
        self.queries += other.queries;
        self.full_pairs += other.full_pairs;
        self.partial_pairs += other.partial_pairs;
        self.calls += other.calls;
    }
}

/// A layout as components over disjoint pairs, which together are its pairs.
pub struct Split {
    components: Vec<Component>,
    natural: TileCounts,
    tiles: TileCounts,
    bytes: usize,
}

impl Split {
    /// The components: that in natural order first, if there is one.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// What a kernel computes for the layout as it is.
    pub fn natural_tiles(&self) -> &TileCounts {
        &self.natural
    }

    /// What a kernel computes for the components.
    pub fn tiles(&self) -> &TileCounts {
        &self.tiles
    }

    /// Memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The components of a layout: `None` if it has no terms with an order of their own, or limits do not
/// allow them.
pub(super) fn split(layout: &Layout, progress: &mut Progress<'_>) -> Result<Option<Split>> {
    let Some(pattern) = layout.pattern.as_deref().filter(|_| layout.whole) else { return Ok(None) };
    if layout.rows().len() != layout.queries().div_ceil(layout.block().get()) {
        return Ok(None);
    }
    let Some(terms) = pattern.terms() else { return Ok(None) };
    let most = FEW_SEGMENTS + 4 * layout.rows().len();
    let mut builder = Builder {
        layout,
        work: layout.frame.max_work,
        mask_bytes: layout.frame.mask_bytes.unwrap_or(MASK_BYTES),
        split: Split {
            components: Vec::new(),
            natural: TileCounts::of(layout),
            tiles: TileCounts::default(),
            bytes: 0,
        },
        progress,
    };
    let result = builder.natural(terms.natural).and_then(|()| {
        for term in &terms.ordered {
            let Some(segments) = segments(layout, term, most) else { return Ok(None) };
            builder.ordered(term, &segments)?;
        }
        Ok(Some(()))
    });
    match result {
        Ok(Some(())) => Ok(Some(builder.split)),
        Ok(None) | Err(Error::TooMuchWork { .. } | Error::TooLarge { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The views of a term, at most `most`.
fn segments(layout: &Layout, term: &Term, most: usize) -> Option<Vec<Segment>> {
    let (queries, keys) = (layout.query_positions(), layout.key_positions());
    let sequences = match &term.sequences {
        None => vec![(Members::all(queries), Members::all(keys))],
        Some((query_lengths, key_lengths)) => {
            let count = query_lengths.count();
            if count > most {
                return None;
            }
            let behind = key_lengths.total() - query_lengths.total();
            let starts = |lengths: &Lengths, shift| {
                (0..=count)
                    .map(|i| if i == count { lengths.total() } else { lengths.start(i) } + shift)
                    .collect::<Vec<_>>()
            };
            let (query_bounds, key_bounds) =
                (starts(query_lengths, behind), starts(key_lengths, 0));
            let query_shift =
                |i: usize| key_lengths.length(i) - query_lengths.length(i) - query_bounds[i];
            let queries = Members::in_ranges(queries, &query_bounds, query_shift);
            let keys = Members::in_ranges(keys, &key_bounds, |i| -key_bounds[i]);
            queries.into_iter().zip(keys).collect()
        }
    };
    let mut all = Vec::new();
    for (queries, keys) in sequences {
        let room = most - all.len();
        all.extend(match term.residues {
            Residues::Congruent { modulus } => residues::strided(&queries, &keys, modulus, room)?,
            Residues::Segments { segment, rate, offset } => {
                residues::dilated(&queries, &keys, (segment, rate, offset), room)?
            }
        });
    }
    Some(all)
}

struct Builder<'a, 'p> {
    layout: &'a Layout,
    /// Units of work that are left.
    work: u64,
    /// Bytes of masks that are left.
    mask_bytes: u64,
    split: Split,
    progress: &'a mut Progress<'p>,
}

/// What layouts of a relative pattern depend on: lengths and steps of queries and keys, and the distance
/// of their first positions.
type Key = ([usize; 4], i64);

impl Builder<'_, '_> {
    fn natural(&mut self, pattern: Option<Pattern>) -> Result<()> {
        let Some(pattern) = pattern else { return Ok(()) };
        let frame = &self.layout.frame;
        let positions = (frame.queries.clone(), frame.keys.clone());
        let layout = Arc::new(self.compile(&Arc::new(pattern), positions)?);
        let all = |count| TokenSteps {
            segments: Steps { first: 0, step: 1, count: 1 },
            tokens: Steps { first: 0, step: 1, count },
        };
        let (queries, keys) = (all(layout.queries()), all(layout.keys()));
        self.push(PositionOrder::Natural, (queries, keys), vec![layout]);
        Ok(())
    }

    fn ordered(&mut self, term: &Term, segments: &[Segment]) -> Result<()> {
        let pattern = Arc::new(term.remainder.clone());
        let relative = pattern.is_relative() && self.layout.frame.valid.is_none();
        let order = PositionOrder::Residues {
            modulus: term.residues.modulus(),
            segment: match term.residues {
                Residues::Segments { segment, .. } if segment < MAX_ARGUMENT => Some(segment),
                _ => None,
            },
        };
        let mut compiled: FxHashMap<Key, Arc<Layout>> = FxHashMap::default();
        let mut rest = segments;
        while let [first, ..] = rest {
            let Alike { count, steps } = Alike::of(rest);
            let (group, others) = rest.split_at(count);
            rest = others;
            let mut layouts = Vec::with_capacity(count);
            for segment in group {
                let [queries, keys] = [
                    progression(self.layout.query_positions(), &segment.queries),
                    progression(self.layout.key_positions(), &segment.keys),
                ];
                let positions = (Positions::new([queries])?, Positions::new([keys])?);
                let key =
                    ([queries.len, queries.step, keys.len, keys.step], queries.start - keys.start);
                layouts.push(match compiled.get(&key).filter(|_| relative) {
                    Some(known) => Arc::new(known.moved(positions)),
                    None => {
                        let layout = Arc::new(self.compile(&pattern, positions)?);
                        compiled.insert(key, layout.clone());
                        layout
                    }
                });
            }
            let view = |tokens: Tokens, step| TokenSteps {
                segments: Steps { first: tokens.indices.first, step, count },
                tokens: Steps { first: 0, ..tokens.indices },
            };
            self.push(order, (view(first.queries, steps.0), view(first.keys, steps.1)), layouts);
        }
        Ok(())
    }

    fn push(
        &mut self,
        order: PositionOrder,
        (queries, keys): (TokenSteps, TokenSteps),
        layouts: Vec<Arc<Layout>>,
    ) {
        let mut tiles = TileCounts::default();
        let (mut last, mut of_last): (Option<&Arc<Layout>>, _) = (None, TileCounts::default());
        for layout in &layouts {
            // Layouts that share their blocks follow each other.
            let known = last.is_some_and(|last| Arc::ptr_eq(&last.content, &layout.content));
            if !known {
                (last, of_last) = (Some(layout), TileCounts::of(layout));
                self.split.bytes += layout.bytes();
            }
            tiles.add(&of_last);
            self.split.bytes += size_of::<Layout>();
        }
        tiles.calls = 1;
        if tiles.queries > 0 {
            self.split.tiles.add(&tiles);
            self.split.components.push(Component { order, queries, keys, layouts, tiles });
        }
    }

    /// Compiles a part of the pattern for some of the tokens.
    fn compile(
        &mut self,
        pattern: &Arc<Pattern>,
        (queries, keys): (Positions, Positions),
    ) -> Result<Layout> {
        let whole = &self.layout.frame;
        let block = whole.block.get();
        let explicit = whole.mask_bytes.is_some() || self.mask_bytes == 0;
        let frame = Frame {
            rows: 0..queries.len().div_ceil(block) as u32,
            columns: keys.len().div_ceil(block) as u32,
            queries,
            keys,
            mask_bytes: explicit.then_some(self.mask_bytes),
            max_work: self.work,
            ..whole.clone()
        };
        let mut layout = compile(pattern, frame, self.progress)?;
        layout.positioning = self.layout.positioning.clone();
        layout.whole = false;
        layout.frame.max_work = whole.max_work;
        self.work = self.work.saturating_sub(layout.work());
        let bytes = layout.content.table.bytes() as u64;
        self.mask_bytes = self.mask_bytes.saturating_sub(bytes);
        Ok(layout)
    }
}

/// The positions of some tokens.
fn progression(positions: &Positions, tokens: &Tokens) -> Progression {
    let Steps { first, step, count } = tokens.indices;
    let position = |index| positions.get(index).expect("a token of the layout");
    let start = position(first);
    let step = if count > 1 { (position(first + step) - start) as usize } else { 1 };
    Progression { start, step, len: count }
}

impl Layout {
    /// The same blocks at other positions.
    fn moved(&self, (queries, keys): (Positions, Positions)) -> Self {
        Layout {
            frame: Frame { queries, keys, ..self.frame.clone() },
            pattern: self.pattern.clone(),
            whole: false,
            positioning: self.positioning.clone(),
            content: self.content.clone(),
            split: Default::default(),
        }
    }
}
