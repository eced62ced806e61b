//! Attention in components: kernel calls over parts of tensors that continue one softmax state.
//!
//! A component is a layout over some tokens and heads, which it reads and writes through views with
//! a step. Forward, each continues the softmax state of those before it; backward, each adds its
//! gradients, given the final statistics of rows. [`Dilated`](crate::Dilated) is a list of them, and
//! so is what a rank of a ring computes over the keys of a hop.

use std::ops::ControlFlow;
use std::sync::Arc;

use longspan_pattern::{Heads, Layout, LayoutSet, Padding, Positions, Shape};

use crate::arguments::{GradientsMut, Inputs};
use crate::check;
use crate::dims::Dims;
use crate::driver;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor, Progress};
use crate::layouts::Layouts;
use crate::options::Options;
use crate::score::HeadPart;
use crate::softmax::RowStatistics;
use crate::state::{State, StateMut};
use crate::tensor::{Selection, Steps, View, allocate};

/// One call.
#[derive(Debug)]
pub(crate) struct Component {
    pub(crate) layouts: Layouts,
    pub(crate) part: Part,
    /// Active blocks × query heads.
    pub(crate) weight: usize,
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

impl Component {
    /// Options for the heads of this component and a batch entry; `of` is the number of query heads.
    fn options(&self, all: &Options, entry: usize, of: usize) -> Options {
        // Rows are finished once all components have been added, and get their sinks then.
        let mut options = Options { sink_logits: None, ..all.clone() };
        if let Part::Some { queries, .. } = &self.part {
            let Steps { first, step, count } = queries.heads;
            options.score = all.score.of_heads(first, step, count);
            if let Some(dropout) = &mut options.dropout {
                dropout.part = Some(HeadPart { entry, first, step, of });
            }
        }
        options
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

/// Query heads of a call, and the key head that each attends to.
///
/// A call over received keys may have the keys of some heads only: the key head of a query head is
/// then another one in the key tensor than in the whole of it.
///
/// ```
/// use longspan::HeadMap;
///
/// // Eight query heads on two key heads, of which the key tensor has the second.
/// let map = HeadMap::of_key_heads(8, 2, [1]);
/// assert_eq!((map.heads(), map.key_heads()), (8, 1));
/// assert_eq!(map.pairs().collect::<Vec<_>>(), [(4, 0), (5, 0), (6, 0), (7, 0)]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadMap {
    heads: usize,
    key_heads: usize,
    /// Ascending.
    pairs: Vec<(usize, usize)>,
}

impl HeadMap {
    /// All of `heads` query heads, on all of `key_heads` key heads.
    pub fn all(heads: usize, key_heads: usize) -> Self {
        Self::of_key_heads(heads, key_heads, 0..key_heads)
    }

    /// The query heads of some of `key_heads` key heads, ascending; the key tensor has only those.
    pub fn of_key_heads(
        heads: usize,
        key_heads: usize,
        chosen: impl IntoIterator<Item = usize>,
    ) -> Self {
        let group = heads.checked_div(key_heads).unwrap_or(0);
        let mut pairs = Vec::new();
        let mut count = 0;
        for (index, key_head) in chosen.into_iter().enumerate() {
            pairs.extend((key_head * group..(key_head + 1) * group).map(|head| (head, index)));
            count = index + 1;
        }
        HeadMap { heads, key_heads: count, pairs }
    }

    /// Of these, only some query heads; the tensors have all.
    ///
    /// ```
    /// let map = longspan::HeadMap::all(8, 2).of_heads(&[1, 5]);
    /// assert_eq!((map.heads(), map.key_heads()), (8, 2));
    /// assert_eq!(map.pairs().collect::<Vec<_>>(), [(1, 0), (5, 1)]);
    /// ```
    #[must_use]
    pub fn of_heads(&self, chosen: &[usize]) -> Self {
        let pairs = self.pairs().filter(|(head, _)| chosen.contains(head)).collect();
        HeadMap { pairs, ..*self }
    }

    /// Heads of the query tensor.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Heads of the key tensor.
    pub fn key_heads(&self) -> usize {
        self.key_heads
    }

    /// Query heads, ascending, and the key head of each.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.pairs.iter().copied()
    }

    /// The query heads that fulfil a condition, in groups that a call can have: of both tensors
    /// every so many heads, and as many query heads for each key head.
    pub(crate) fn calls(&self, has: impl Fn(usize) -> bool) -> Vec<(Steps, Steps)> {
        let pairs: Vec<_> = self.pairs().filter(|(head, _)| has(*head)).collect();
        let groups: Vec<_> = pairs.chunk_by(|a, b| a.1 == b.1).collect();
        let one = |group: &[(usize, usize)]| {
            let key = Steps { first: group[0].1, step: 1, count: 1 };
            steps(group.iter().map(|pair| pair.0)).map(|heads| (heads, key))
        };
        let even = groups.windows(2).all(|pair| pair[0].len() == pair[1].len());
        let heads = steps(pairs.iter().map(|pair| pair.0));
        let key_heads = steps(groups.iter().map(|group| group[0].1));
        if let (true, Some(heads), Some(key_heads)) = (even, heads, key_heads) {
            return vec![(heads, key_heads)];
        }
        let singles = |group: &&[(usize, usize)]| match one(group) {
            Some(call) => vec![call],
            None => group.chunks(1).filter_map(one).collect(),
        };
        groups.iter().flat_map(singles).collect()
    }
}

/// Indices as steps, where there are any and all have the same distance.
fn steps(mut indices: impl Iterator<Item = usize>) -> Option<Steps> {
    let first = indices.next()?;
    let mut steps = Steps { first, step: 1, count: 1 };
    for index in indices {
        if steps.count == 1 {
            steps.step = index - first;
        }
        if index != first + steps.step * steps.count {
            return None;
        }
        steps.count += 1;
    }
    Some(steps)
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
    options: Options,
}

impl Components {
    /// The components of a pattern per head for some queries and keys of a sequence of `tokens`
    /// tokens: those at the given positions, in this order. One where the key tensor has all heads.
    pub fn of_patterns(
        patterns: &Heads,
        tokens: usize,
        (queries, keys): (&Positions, &Positions),
        heads: &HeadMap,
        batch: usize,
        mut poll: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Self> {
        let shape = Shape::new(tokens, tokens).query_map(queries.clone()).key_map(keys.clone());
        let (shape, lens) = (&shape, (queries.len(), keys.len()));
        let mut list = Vec::new();
        if heads.pairs.len() == heads.heads {
            let layouts: Layouts = match patterns {
                Heads::Same(pattern) => Layout::compile_with(pattern, shape, |_, _| poll())?.into(),
                patterns => {
                    let padding = Padding::None(batch);
                    let poll = |_, _| poll();
                    LayoutSet::compile_with(patterns, heads.heads, shape, &padding, None, poll)?
                        .into()
                }
            };
            list.push(Component { layouts, part: Part::All, weight: 1 });
        } else {
            for (query_heads, key_heads) in heads.calls(|_| true) {
                let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(query_heads.count);
                let mut made: Vec<(&longspan_pattern::Pattern, Arc<Layout>)> = Vec::new();
                for head in query_heads.indices() {
                    let pattern = patterns.get(head, heads.heads)?;
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
                list.push(Component { layouts: set.into(), part, weight: 1 });
            }
        }
        Ok(Self::new(list, heads.clone(), lens, Options::default()))
    }

    pub(crate) fn new(
        list: Vec<Component>,
        heads: HeadMap,
        (queries, keys): (usize, usize),
        options: Options,
    ) -> Self {
        Components { list: Arc::new(list), heads, queries, keys, options }
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

    /// The layouts of one batch entry: one per query head of each call.
    fn layouts(&self) -> impl Iterator<Item = &Layout> {
        self.list.iter().flat_map(|component| {
            let (entries, heads) = match &component.part {
                Part::All => (1, self.heads.heads),
                Part::Some { queries, .. } => (queries.segments.count, queries.heads.count),
            };
            (0..entries).flat_map(move |entry| {
                (0..heads).map(move |head| component.layouts.get(entry, head))
            })
        })
    }

    /// Active pairs of queries and keys of one batch entry, over all query heads.
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
        extend(&self.list, &self.options, &inputs, &mut state.as_mut(), &Monitor::new(hook))
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
        accumulate(&self.list, &self.options, &inputs, dout, rows, gradients, &Monitor::new(hook))
    }

    /// Whether tensors have the tokens and heads of these components; the dims of the output.
    fn check<E: Element>(&self, inputs: &Inputs<'_, E>) -> Result<Dims> {
        let (q, k, v) = (inputs.q.dims(), inputs.k.dims(), inputs.v.dims());
        let why = "as the components";
        check::axis("q", "tokens", q.tokens, self.queries, why)?;
        check::axis("k", "tokens", k.tokens, self.keys, why)?;
        check::axis("v", "tokens", v.tokens, self.keys, why)?;
        check::axis("q", "heads", q.heads, self.heads.heads, why)?;
        check::axis("k", "heads", k.heads, self.heads.key_heads, why)?;
        check::axis("v", "heads", v.heads, self.heads.key_heads, why)?;
        check::axis("k", "batch", k.batch, q.batch, "as q")?;
        check::axis("v", "batch", v.batch, q.batch, "as q")?;
        Ok(Dims { dim: v.dim, ..q })
    }
}

/// Continues a state with all components.
pub(crate) fn extend<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    state: &mut StateMut<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    each(components, inputs.q.dims().batch, monitor, |entry, component, monitor| {
        let (options, inputs) = component.call(options, inputs, entry);
        let rows = driver::Target::Extend(match component.part.of(entry) {
            None => state.reborrow(),
            Some((queries, _)) => state.select(&queries),
        });
        driver::forward(&options, &component.layouts, &inputs, rows, monitor)
    })
}

/// Adds the gradients of all components, given the final statistics of rows.
pub(crate) fn accumulate<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    dout: View<'_, E>,
    rows: RowStatistics<'_>,
    mut gradients: GradientsMut<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (all, dims) = (options, dout.dims());
    each(components, dims.batch, monitor, |entry, component, monitor| {
        let (options, selected) = component.call(all, inputs, entry);
        let Some((queries, keys)) = component.part.of(entry) else {
            let into = gradients.reborrow();
            let layouts = &component.layouts;
            return driver::backward(&options, layouts, &selected, dout, rows, into, monitor);
        };
        let gather = |list: &[f32]| -> Result<Vec<f32>> {
            let Selection { segments, tokens, heads, .. } = queries;
            let mut own = all.workspaces.rows(segments.count * tokens.count * heads.count)?;
            own.clear();
            for first in segments.indices() {
                for head in heads.indices() {
                    let row = (entry * dims.heads + head) * dims.tokens + first;
                    own.extend(tokens.indices().map(|token| list[row + token]));
                }
            }
            Ok(own)
        };
        let (lse, delta) = (gather(rows.lse)?, gather(rows.delta)?);
        let rest = rows.lse_lo.map(gather).transpose()?;
        let rows = RowStatistics { lse: &lse, lse_lo: rest.as_deref(), delta: &delta };
        // Gradients of biases of the component's heads.
        let [_, bias_table, alibi_slopes] = options.gradient_lens();
        let own = |wanted: bool, len: Option<usize>| {
            len.filter(|_| wanted).map(allocate::zeros::<f32>).transpose()
        };
        let mut own_table = own(gradients.dbias_table.is_some(), bias_table)?;
        let mut own_slopes = own(gradients.dalibi_slopes.is_some(), alibi_slopes)?;
        let into = GradientsMut {
            dq: gradients.dq.select(&queries),
            dk: gradients.dk.select(&keys),
            dv: gradients.dv.select(&keys),
            dsink_logits: None,
            dbias_table: own_table.as_deref_mut(),
            dalibi_slopes: own_slopes.as_deref_mut(),
        };
        let dout = dout.select(&queries);
        let layouts = &component.layouts;
        let result = driver::backward(&options, layouts, &selected, dout, rows, into, monitor);
        let lists =
            [(&mut gradients.dbias_table, own_table), (&mut gradients.dalibi_slopes, own_slopes)];
        for (all, own) in lists {
            let (Some(all), Some(own)) = (all, own) else { continue };
            let per_head = all.len() / dims.heads;
            for (head, own) in queries.heads.indices().zip(own.chunks(per_head)) {
                let all = &mut all[head * per_head..][..per_head];
                all.iter_mut().zip(own).for_each(|(all, own)| *all += own);
            }
        }
        for own in [lse, delta].into_iter().chain(rest) {
            all.workspaces.give_back(own);
        }
        result
    })
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

/// Runs `call` for every component, and for every batch entry where its part has one; `monitor` has
/// the progress over all of them.
fn each(
    components: &[Component],
    batch: usize,
    monitor: &Monitor<'_>,
    mut call: impl FnMut(usize, &Component, &Monitor<'_>) -> Result<()>,
) -> Result<()> {
    let total = batch * components.iter().map(|component| component.weight).sum::<usize>();
    let mut before = 0;
    for entry in 0..batch {
        for component in components {
            let all = matches!(component.part, Part::All);
            let weight = component.weight;
            if all && entry > 0 {
                before += weight;
                continue;
            }
            let mut scaled = |progress: Progress| {
                let share = progress.done as f64 / progress.total.max(1) as f64;
                let done = before + (share * weight as f64) as usize;
                monitor.advance_to(Progress { done, total });
                if monitor.poll() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            call(entry, component, &Monitor::new(Hook::new(&mut scaled))).map_err(|error| {
                match error {
                    Error::Stopped { .. } => Error::Stopped { done: before, total },
                    other => other,
                }
            })?;
            before += weight;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_go_together_where_a_call_can_have_them() {
        let steps = |first, step, count| Steps { first, step, count };
        let calls = |map: &HeadMap, rate: usize, offset: usize| {
            map.calls(move |head| head % rate == offset)
        };
        // Four to one: two of each group; every fourth is one of each.
        let map = HeadMap::all(8, 2);
        assert_eq!(calls(&map, 1, 0), [(steps(0, 1, 8), steps(0, 1, 2))]);
        assert_eq!(calls(&map, 2, 1), [(steps(1, 2, 4), steps(0, 1, 2))]);
        assert_eq!(calls(&map, 4, 3), [(steps(3, 4, 2), steps(0, 1, 2))]);
        // Heads 0, 3 and 6: two of the first group, one of the second.
        let apart = [(steps(0, 3, 2), steps(0, 1, 1)), (steps(6, 1, 1), steps(1, 1, 1))];
        assert_eq!(calls(&map, 3, 0), apart);
        // Key heads 1 and 3 of four, which are the only ones of their tensor.
        let map = HeadMap::of_key_heads(8, 4, [1, 3]);
        let apart = [(steps(2, 1, 2), steps(0, 1, 1)), (steps(6, 1, 2), steps(1, 1, 1))];
        assert_eq!(calls(&map, 1, 0), apart);
        assert_eq!(calls(&map, 2, 1), [(steps(3, 4, 2), steps(0, 1, 2))]);
        assert!(calls(&map, 16, 15).is_empty());
    }
}
