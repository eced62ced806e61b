//! Attention in components: kernel calls over parts of tensors that continue one softmax state.
//!
//! A component is a layout over some tokens and heads, which it reads and writes through views with
//! a step. Forward, each continues the softmax state of those before it; backward, each adds its
//! gradients, given the final statistics of rows. [`Dilated`](crate::Dilated) is a list of them, and
//! so is what a rank of a ring computes over the keys of a hop.

mod bytes;
mod calls;
mod cost;
mod heads;
mod kept;
mod passes;
mod split;

use std::ops::{ControlFlow, Deref};
use std::sync::Arc;

use longspan_pattern::residues::Steps;
use longspan_pattern::{BlockSize, Heads, Layout, LayoutSet, Padding, Positions, Shape};

pub(crate) use self::bytes::bytes_needed;
pub use self::calls::ComponentCall;
pub use self::cost::Prediction;
pub use self::heads::HeadMap;
pub(crate) use self::kept::Kept;
pub(crate) use self::passes::{accumulate, extend, forward_into};
pub(crate) use self::split::{SplitKey, split};
use crate::arguments::{GradientsMut, Inputs};
use crate::check;
use crate::dims::{Dims, Sizes};
use crate::dtype::Element;
use crate::error::Result;
use crate::exec::{Hook, Monitor};
use crate::layouts::Layouts;
use crate::options::Options;
use crate::score::HeadPart;
use crate::softmax::RowStatistics;
use crate::state::State;
use crate::tensor::{Selection, View};

/// One call.
#[derive(Debug, Clone)]
pub(crate) struct Component {
    pub(crate) layouts: Layouts,
    pub(crate) part: Part,
    /// Active blocks × query heads.
    pub(crate) weight: usize,
    /// The sequence whose tokens it has, where batch entries differ.
    pub(crate) place: Option<Place>,
}

/// A sequence of a batch entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) entry: usize,
    /// Dropout is that of the batch entry with this number.
    pub(crate) sequence: usize,
}

/// What a component reads and writes of the tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    All,
    /// Tokens and heads of queries and of keys, of each batch entry by itself.
    Some {
        queries: Selection,
        keys: Selection,
    },
}

/// The calls of an attention.
#[derive(Debug)]
pub(crate) struct List {
    components: Vec<Component>,
    /// Whether no two of them have a row in common.
    disjoint: bool,
}

impl List {
    /// The components of tensors of such sizes.
    pub(crate) fn new(components: Vec<Component>, sizes: &Sizes) -> Self {
        let disjoint = are_disjoint(&components, sizes);
        List { components, disjoint }
    }
}

impl Deref for List {
    type Target = [Component];

    fn deref(&self) -> &[Component] {
        &self.components
    }
}

/// Whether no two components have a row in common.
fn are_disjoint(components: &[Component], sizes: &Sizes) -> bool {
    if components.len() <= 1 {
        return true;
    }
    let places = components.iter().map(|component| component.place.map_or(0, |place| place.entry));
    let entries = places.max().map_or(0, |last| last + 1);
    let (mut taken, words) = (Vec::new(), (entries * sizes.heads * sizes.queries).div_ceil(64));
    // Rows that no memory holds, of which a caller asks what they need, count as shared.
    if taken.try_reserve_exact(words).is_err() {
        return false;
    }
    taken.resize(words, 0_u64);
    components.iter().all(|component| {
        let entry = component.place.map_or(0, |place| place.entry);
        let Some((queries, _)) = component.part.of(entry) else { return false };
        queries.heads.indices().all(|head| {
            let first = (entry * sizes.heads + head) * sizes.queries;
            queries.segments.indices().all(|segment| {
                queries.tokens.indices().all(|token| {
                    let row = first + segment + token;
                    let (word, bit) = (&mut taken[row / 64], 1 << (row % 64));
                    let free = *word & bit == 0;
                    *word |= bit;
                    free
                })
            })
        })
    })
}

impl Component {
    /// A component of the tensors of another one, which has all tokens.
    fn within(&self, outer: &Component) -> Self {
        let compose = |outer: Selection, inner: Selection| {
            let (of, own) = (outer.heads, inner.heads);
            let heads = Steps {
                first: of.first + of.step * own.first,
                step: of.step * own.step,
                count: own.count,
            };
            Selection { heads, ..inner }
        };
        let part = match (outer.part, self.part) {
            (Part::All, part) | (part, Part::All) => part,
            (Part::Some { queries, keys }, Part::Some { queries: own_queries, keys: own_keys }) => {
                Part::Some { queries: compose(queries, own_queries), keys: compose(keys, own_keys) }
            }
        };
        Component { part, ..self.clone() }
    }

    /// Options for the heads of this component and a batch entry; `of` is the number of query heads.
    fn options(&self, all: &Options, entry: usize, of: usize) -> Options {
        // Sinks join a row where it is finished.
        let mut options = Options { sink_logits: None, ..all.clone() };
        if let Part::Some { queries, .. } = &self.part {
            let Steps { first, step, count } = queries.heads;
            options.score = all.score.of_heads(first, step, count);
            if let Some(dropout) = &mut options.dropout {
                let entry = self.place.map_or(entry, |place| place.sequence);
                dropout.part = Some(HeadPart { entry, first, step, of });
            }
        }
        options
    }

    /// The sink logits of its heads.
    fn sink_logits(&self, all: &Options) -> Option<Arc<[f32]>> {
        let logits = all.sink_logits.as_ref()?;
        Some(match &self.part {
            Part::All => logits.clone(),
            Part::Some { queries, .. } => {
                queries.heads.indices().map(|head| logits[head]).collect()
            }
        })
    }

    /// Options and tensors of the call of a batch entry.
    pub(crate) fn call<'a, E: Element>(
        &self,
        options: &Options,
        inputs: &Inputs<'a, E>,
        entry: usize,
    ) -> (Options, Inputs<'a, E>) {
        let options = self.options(options, entry, inputs.q.dims().heads);
        let inputs = match self.part.of(entry) {
            None => *inputs,
            Some((queries, keys)) => select(inputs, &queries, &keys),
        };
        (options, inputs)
    }
}

/// Attention over some queries and keys, in components.
///
/// A low-level type, for those who compute attention over parts of a sequence and join them: a ring
/// has one for each set of keys that reaches a rank. [`Dilated::components`](crate::Dilated::components)
/// makes those of dilated attention.
#[derive(Debug, Clone)]
pub struct Components {
    list: Arc<Vec<Component>>,
    heads: HeadMap,
    queries: usize,
    keys: usize,
    /// Batch entries, where they differ.
    batch: Option<usize>,
    /// Whether calls have all tokens in their order, and so may be split.
    natural: bool,
    options: Options,
}

impl Components {
    /// The components of a pattern per head for some queries and keys of a sequence of `tokens`
    /// tokens: those at the given positions, in this order. One where the key tensor has all heads.
    /// `block` is that of their layouts, where it isn't 64.
    pub fn of_patterns(
        patterns: &Heads,
        tokens: usize,
        (queries, keys): (&Positions, &Positions),
        heads: &HeadMap,
        batch: usize,
        block: Option<BlockSize>,
        mut poll: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut shape = Shape::new(tokens, tokens).query_map(queries.clone()).key_map(keys.clone());
        if let Some(block) = block {
            shape = shape.block(block);
        }
        let (shape, lens) = (&shape, (queries.len(), keys.len()));
        let mut list = Vec::new();
        if heads.pairs().count() == heads.heads() {
            let layouts: Layouts = match patterns {
                Heads::Same(pattern) => Layout::compile_with(pattern, shape, |_, _| poll())?.into(),
                patterns => {
                    let padding = Padding::None(batch);
                    let poll = |_, _| poll();
                    LayoutSet::compile_with(patterns, heads.heads(), shape, &padding, None, poll)?
                        .into()
                }
            };
            list.push(Component { layouts, part: Part::All, weight: 1, place: None });
        } else {
            for (query_heads, key_heads) in heads.calls(|_| true) {
                let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(query_heads.count);
                let mut made: Vec<(&longspan_pattern::Pattern, Arc<Layout>)> = Vec::new();
                for head in query_heads.indices() {
                    let pattern = patterns.get(head, heads.heads())?;
                    let known = made.iter().find(|(known, _)| *known == pattern);
                    layouts.push(match known {
                        Some((_, layout)) => layout.clone(),
                        None => {
                            let layout =
                                Arc::new(Layout::compile_with(pattern, shape, |_, _| poll())?);
                            made.push((pattern, layout.clone()));
                            layout
                        }
                    });
                }
                let set = LayoutSet::new_with(1, layouts.len(), layouts, |_, _| poll())?;
                let all = |count| Steps { first: 0, step: 1, count };
                let select = |tokens, heads| Selection {
                    entry: 0,
                    segments: all(1),
                    tokens: all(tokens),
                    heads,
                };
                let part = Part::Some {
                    queries: select(lens.0, query_heads),
                    keys: select(lens.1, key_heads),
                };
                list.push(Component { layouts: set.into(), part, weight: 1, place: None });
            }
        }
        let natural = Self::new(list, heads.clone(), lens, None, Options::default());
        Ok(Components { natural: true, ..natural })
    }

    pub(crate) fn new(
        list: Vec<Component>,
        heads: HeadMap,
        (queries, keys): (usize, usize),
        batch: Option<usize>,
        options: Options,
    ) -> Self {
        Components { list: Arc::new(list), heads, queries, keys, batch, natural: false, options }
    }

    /// The same components with other options. Sink logits among them don't count: rows get their
    /// sinks when they are finished.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = Options { uniform: self.options.uniform, ..options };
        self
    }

    /// Whether the bits of a row must not depend on which other rows a call has, at some cost: few
    /// queries are computed as many are. Keys should be those of one block, since a row's sums are
    /// cut by what all rows attend to.
    #[must_use]
    pub fn uniform(mut self, uniform: bool) -> Self {
        self.options.uniform = uniform;
        self
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The layouts of one batch entry, or of all where they differ: one per query head of each call.
    fn layouts(&self) -> impl Iterator<Item = &Layout> {
        self.list.iter().flat_map(|component| {
            let (entries, heads) = match &component.part {
                Part::All => (1, self.heads.heads()),
                Part::Some { queries, .. } => (queries.segments.count, queries.heads.count),
            };
            (0..entries).flat_map(move |entry| {
                (0..heads).map(move |head| component.layouts.get(entry, head))
            })
        })
    }

    /// Active pairs of queries and keys over all query heads: of one batch entry, or of all where they
    /// differ.
    pub fn active_pairs(&self) -> Result<u128> {
        let mut sum = 0;
        for layout in self.layouts() {
            sum += layout.counts()?.active_pairs;
        }
        Ok(sum)
    }

    /// Continues a state, which has a row for each query and head, with these keys.
    pub fn extend<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        state: &mut State,
        hook: Hook<'_>,
    ) -> Result<()> {
        let dims = self.check(&inputs)?;
        check::same("the state", state.dims(), dims)?;
        let monitor = Monitor::new(hook);
        let list = self.split(&inputs, &monitor)?;
        extend(&list, &self.options, &inputs, &mut state.as_mut(), &monitor)
    }

    /// Adds gradients to what `gradients` holds: see
    /// [`Attention::accumulate`](crate::Attention::accumulate).
    pub fn accumulate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        dout: View<'_, E>,
        rows: RowStatistics<'_>,
        gradients: GradientsMut<'_>,
        hook: Hook<'_>,
    ) -> Result<()> {
        check::statistics(&dout, &rows, self.check(&inputs)?)?;
        check::accumulated(&self.options, &inputs, &dout, &rows, &gradients)?;
        let monitor = Monitor::new(hook);
        let list = self.split(&inputs, &monitor)?;
        accumulate(&list, &self.options, &inputs, dout, rows, gradients, &monitor)
    }

    /// The calls, with terms that are faster in an order of residues as calls of their own.
    fn split<E: Element>(
        &self,
        inputs: &Inputs<'_, E>,
        monitor: &Monitor<'_>,
    ) -> Result<Arc<Vec<Component>>> {
        if !self.natural || inputs.q.dims().batch == 0 {
            return Ok(self.list.clone());
        }
        let mut list = Vec::new();
        for component in &*self.list {
            let (options, selected) = component.call(&self.options, inputs, 0);
            // A call over all tensors has all batch entries; others are made for each.
            let sizes = check::inputs(&options, &component.layouts, &selected)?;
            let own =
                split(&options, E::TYPE, &component.layouts, &sizes, &Kept::default(), monitor)?;
            match own {
                Some(own) => list.extend(own.iter().map(|inner| inner.within(component))),
                None => list.push(component.clone()),
            }
        }
        Ok(Arc::new(list))
    }

    /// Whether tensors have the tokens and heads of these components; the dims of the output.
    fn check<E: Element>(&self, inputs: &Inputs<'_, E>) -> Result<Dims> {
        let (q, k, v) = (inputs.q.dims(), inputs.k.dims(), inputs.v.dims());
        let why = "as the components";
        check::axis("q", "tokens", q.tokens, self.queries, why)?;
        check::axis("k", "tokens", k.tokens, self.keys, why)?;
        check::axis("v", "tokens", v.tokens, self.keys, why)?;
        check::axis("q", "heads", q.heads, self.heads.heads(), why)?;
        check::axis("k", "heads", k.heads, self.heads.key_heads(), why)?;
        check::axis("v", "heads", v.heads, self.heads.key_heads(), why)?;
        check::axis("q", "batch", q.batch, self.batch.unwrap_or(q.batch), why)?;
        check::axis("k", "batch", k.batch, q.batch, "as q")?;
        check::axis("v", "batch", v.batch, q.batch, "as q")?;
        Ok(Dims { dim: v.dim, ..q })
    }
}

impl Part {
    /// Queries and keys of a batch entry, where they are not all.
    fn of(&self, entry: usize) -> Option<(Selection, Selection)> {
        match *self {
            Part::All => None,
            Part::Some { queries, keys } => {
                Some((Selection { entry, ..queries }, Selection { entry, ..keys }))
            }
        }
    }
}

fn select<'a, E: Element>(
    inputs: &Inputs<'a, E>,
    queries: &Selection,
    keys: &Selection,
) -> Inputs<'a, E> {
    let Inputs { q, k, v } = inputs;
    Inputs { q: q.select(queries), k: k.select(keys), v: v.select(keys) }
}
