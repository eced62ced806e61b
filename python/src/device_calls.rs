//! Attention as calls of an engine that computes blocks of pairs on a device: torch's FlexAttention.
//!
//! Components are calls over views of tensors. Of each an engine needs the views, which pairs of a block
//! are active (as patterns over positions, of which it makes functions), and the lists of blocks.

mod parts;

use std::borrow::Cow;
use std::sync::Arc;

use longspan::residues::Steps;
use longspan::{
    BlockSize, ComponentCall, Components, Dims, Hook, Layout as Compiled, Layouts, Pattern,
    Positions, Progression, TokenSteps,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use self::parts::{LONG_LISTS, Wide};
use crate::block_lists::{self, Lines, Region, Width};
use crate::dilated::Dilated;
use crate::layout::Layout;
use crate::{errors, signals};

/// `(first, step, count)`.
type Triple = (usize, usize, usize);

/// Patterns, which of them each entry and head has, the progressions of positions of queries and of keys,
/// and the positions of valid keys.
type Masks = (
    Vec<String>,
    Vec<usize>,
    Vec<Vec<(i64, usize, usize)>>,
    Vec<Vec<(i64, usize, usize)>>,
    Option<Vec<(i64, i64)>>,
);

/// One attention call of an engine outside of Longspan: some tokens and heads of the tensors, as a view, and
/// which of their pairs are active. Made by `device_calls`.
#[pyclass(frozen, module = "longspan._longspan")]
pub(crate) struct DeviceCall {
    /// The batch entry that it is for; `None`: each of them.
    #[pyo3(get)]
    entry: Option<usize>,
    queries: View,
    keys: View,
    /// Whether it has the tensors as they are.
    #[pyo3(get)]
    whole: bool,
    layouts: Grid,
}

/// Token `t` of segment `s` is token `segments[s] + tokens[t]` of a tensor.
#[derive(Clone, Copy)]
struct View {
    steps: TokenSteps,
    heads: Steps,
}

impl View {
    fn triples(&self) -> (Triple, Triple, Triple) {
        let triple = |Steps { first, step, count }| (first, step, count);
        (triple(self.steps.segments), triple(self.steps.tokens), triple(self.heads))
    }
}

/// Layouts of entries and heads, the latter fastest.
#[derive(Clone)]
struct Grid {
    entries: usize,
    heads: usize,
    layouts: Vec<Arc<Compiled>>,
}

impl Grid {
    fn of(layouts: &Layouts) -> Self {
        match layouts {
            Layouts::One(layout) => Grid { entries: 1, heads: 1, layouts: vec![layout.clone()] },
            Layouts::Each(set) => {
                let (entries, heads) = (set.batch(), set.heads());
                let pairs =
                    (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head)));
                let layout = |(entry, head)| set.layouts()[set.index(entry, head)].clone();
                Grid { entries, heads, layouts: pairs.map(layout).collect() }.reduced(Arc::ptr_eq)
            }
        }
    }

    fn get(&self, entry: usize, head: usize) -> &Arc<Compiled> {
        &self.layouts[entry * self.heads + head]
    }

    /// With one entry where all have the same, and likewise heads.
    fn reduced(self, same: impl Fn(&Arc<Compiled>, &Arc<Compiled>) -> bool) -> Self {
        let Grid { entries, heads, .. } = self;
        let along = |of: &dyn Fn(usize, usize) -> (usize, usize)| {
            (0..entries).all(|entry| {
                (0..heads).all(|head| {
                    let (first_entry, first_head) = of(entry, head);
                    same(self.get(entry, head), self.get(first_entry, first_head))
                })
            })
        };
        let entries_left = if along(&|_, head| (0, head)) { entries.min(1) } else { entries };
        let heads_left = if along(&|entry, _| (entry, 0)) { heads.min(1) } else { heads };
        let pairs =
            (0..entries_left).flat_map(|entry| (0..heads_left).map(move |head| (entry, head)));
        let layouts = pairs.map(|(entry, head)| self.get(entry, head).clone()).collect();
        Grid { entries: entries_left, heads: heads_left, layouts }
    }

    fn entries(&self) -> impl Iterator<Item = &[Arc<Compiled>]> {
        self.layouts.chunks(self.heads.max(1))
    }

    /// Whether all heads of an entry have the same keys as padding. Those of equal pairs may share a layout
    /// of another entry, which has another padding.
    fn has_padding_per_entry(&self) -> bool {
        self.entries().all(|heads| {
            heads.iter().all(|layout| layout.valid_positions() == heads[0].valid_positions())
        })
    }

    /// A value of each entry's layouts, or one where it is the same for all.
    fn each<T: PartialEq>(&self, value: impl Fn(&Compiled) -> T) -> Vec<T> {
        let mut values: Vec<T> = self.entries().map(|heads| value(&heads[0])).collect();
        if values.iter().all(|value| *value == values[0]) {
            values.truncate(1);
        }
        values
    }
}

impl DeviceCall {
    /// The calls of components; layouts that have far fewer blocks as components are split into them.
    pub(crate) fn of_components(py: Python<'_>, components: &Components) -> PyResult<Vec<Self>> {
        let split = |watch: &mut signals::Watch| {
            let mut look = |_: longspan::Progress| watch.look();
            components.split_by_blocks(Hook::new(&mut look))
        };
        let components = signals::released(py, split, errors::raise)?;
        Ok(components.calls().flat_map(|call| Self::of_call(&call)).collect())
    }

    /// A call; none if it has no blocks.
    fn of_call(call: &ComponentCall<'_>) -> Vec<Self> {
        let layouts = Grid::of(call.layouts());
        let blocks = layouts.layouts.iter().any(|layout| layout.run_count() > 0);
        if !blocks || call.query_heads().count == 0 {
            return Vec::new();
        }
        let queries = View { steps: call.queries(), heads: call.query_heads() };
        let keys = View { steps: call.keys(), heads: call.key_heads() };
        if layouts.has_padding_per_entry() {
            let (entry, whole) = (call.entry(), call.is_whole());
            return vec![DeviceCall { entry, queries, keys, whole, layouts }];
        }
        // Only layouts of batch entries have padding.
        let one = |Steps { first, step, .. }, index| Steps {
            first: first + step * index,
            step,
            count: 1,
        };
        let group = queries.heads.count / keys.heads.count;
        let mut calls = Vec::new();
        for entry in 0..layouts.entries {
            for head in 0..layouts.heads {
                let own =
                    Grid { entries: 1, heads: 1, layouts: vec![layouts.get(entry, head).clone()] };
                calls.push(DeviceCall {
                    entry: if layouts.entries > 1 { Some(entry) } else { call.entry() },
                    queries: View { heads: one(queries.heads, head), ..queries },
                    keys: View { heads: one(keys.heads, head / group), ..keys },
                    whole: false,
                    layouts: own,
                });
            }
        }
        calls.retain(|call| call.layouts.layouts[0].run_count() > 0);
        calls
    }
}

#[pymethods]
impl DeviceCall {
    /// Queries: segments, the tokens of each from its beginning, and heads, as `(first, step, count)` each.
    #[getter]
    fn queries(&self) -> (Triple, Triple, Triple) {
        self.queries.triples()
    }

    /// The same of keys, as many segments.
    #[getter]
    fn keys(&self) -> (Triple, Triple, Triple) {
        self.keys.triples()
    }

    /// Tokens per block.
    #[getter]
    fn block(&self) -> usize {
        self.layouts.layouts[0].block().get()
    }

    /// `(patterns, choice, q_positions, k_positions, valid)`: patterns as text over positions, which of them
    /// each entry and head has, the positions of tokens per entry as progressions `(start, step, len)`, and
    /// the valid ones of keys per entry as `(first, end)`.
    #[getter]
    fn masks(&self, py: Python<'_>) -> PyResult<Masks> {
        let mut patterns: Vec<Cow<'_, Pattern>> = Vec::new();
        let mut choice = Vec::with_capacity(self.layouts.layouts.len());
        for layout in &self.layouts.layouts {
            let pattern = match layout.pattern() {
                Some(pattern) => Cow::Borrowed(pattern),
                // A boolean mask was given.
                None => {
                    let make =
                        |watch: &mut signals::Watch| layout.to_pattern_with(|_, _| watch.look());
                    Cow::Owned(signals::released(py, make, errors::raise_pattern)?)
                }
            };
            // Entries mostly have the pattern of the one before.
            let known = patterns.iter().rposition(|known| *known == pattern);
            choice.push(known.unwrap_or_else(|| {
                patterns.push(pattern);
                patterns.len() - 1
            }));
        }
        let positions = |positions: &Positions| -> Vec<_> {
            let triple = |Progression { start, step, len }| (start, step, len);
            positions.progressions().map(triple).collect()
        };
        let valid = self.layouts.each(Compiled::valid_positions);
        let valid: Option<Vec<_>> =
            valid.into_iter().map(|range| range.map(|range| (range.start, range.end))).collect();
        Ok((
            patterns.iter().map(ToString::to_string).collect(),
            choice,
            // One for each entry, which says how many there are.
            self.layouts.entries().map(|heads| positions(heads[0].query_positions())).collect(),
            self.layouts.each(|layout| positions(layout.key_positions())),
            valid,
        ))
    }

    /// The lists of blocks, in up to three parts: few rows or columns that make the lists of all others long
    /// have parts of their own where all lists take at least `long_lists` bytes, 1 MiB by default.
    #[pyo3(signature = (long_lists=None))]
    fn parts(&self, py: Python<'_>, long_lists: Option<usize>) -> PyResult<Vec<DevicePart>> {
        let grid = self.layouts.clone().reduced(|a, b| Arc::ptr_eq(a, b) || a.shares_blocks(b));
        let layouts: Vec<&Compiled> = grid.layouts.iter().map(|layout| &**layout).collect();
        let least = long_lists.unwrap_or(LONG_LISTS);
        let wide = |watch: &mut signals::Watch| Wide::of(&layouts, least, watch);
        let wide = signals::released(py, wide, errors::raise_pattern)?;
        let part = |region: Region<'_>| {
            let (first, size) = (layouts[0], (grid.entries, grid.heads));
            let lists = block_lists::lists(py, &layouts, size, region, Width::LongestOfTwo)?;
            Ok(DevicePart {
                query_tokens: tokens(py, region.rows, |row| first.row_tokens(row))?,
                key_tokens: tokens(py, region.columns, |column| first.column_tokens(column))?,
                lists: lists.unbind(),
            })
        };
        wide.regions().into_iter().map(part).collect()
    }

    fn __repr__(&self) -> String {
        let len = |view: &View| view.steps.tokens.count;
        let (segments, heads) = (self.queries.steps.segments.count, self.queries.heads.count);
        format!(
            "<longspan.DeviceCall of {segments} × ({} × {}) tokens, {heads} heads, blocks of {}>",
            len(&self.queries),
            len(&self.keys),
            self.block()
        )
    }
}

/// The tokens of an axis that has only some rows or columns of blocks.
fn tokens(
    py: Python<'_>,
    lines: Lines<'_>,
    of_line: impl Fn(u32) -> std::ops::Range<usize>,
) -> PyResult<Option<Py<PyAny>>> {
    let Lines::Only(chosen) = lines else { return Ok(None) };
    let ranges = parts::tokens(chosen, of_line);
    if let [range] = &ranges[..] {
        return Ok(Some((range.start, range.len()).into_pyobject(py)?.into_any().unbind()));
    }
    let indices: Vec<usize> = ranges.into_iter().flatten().collect();
    let array = py.import("numpy")?.call_method1("array", (indices, "int64"))?;
    Ok(Some(array.unbind()))
}

/// Lists of blocks of a call, or of some of its tokens.
#[pyclass(frozen, get_all, module = "longspan._longspan")]
pub(crate) struct DevicePart {
    /// Tokens of the call's query axis that it has, as `(first, count)` or as an array; `None`: all.
    query_tokens: Option<Py<PyAny>>,
    /// The same of keys.
    key_tokens: Option<Py<PyAny>>,
    /// Eight arrays in the order of `block_mask.LISTS`, with at least two lines and two indices each.
    lists: Py<PyTuple>,
}

/// Attention of so many batch entries and heads as calls: over a layout, or over the branches of a `Dilated`
/// for so many tokens.
#[pyfunction]
#[pyo3(signature = (
    what, batch, heads, key_heads, tokens_q=None, tokens_k=None, query_offset=None, block=None
))]
#[expect(clippy::too_many_arguments, reason = "they are named in Python")]
pub(crate) fn device_calls(
    py: Python<'_>,
    what: &Bound<'_, PyAny>,
    batch: usize,
    heads: usize,
    key_heads: usize,
    tokens_q: Option<usize>,
    tokens_k: Option<usize>,
    query_offset: Option<i64>,
    block: Option<u64>,
) -> PyResult<Vec<DeviceCall>> {
    let dims = |tokens, heads| Dims { batch, tokens, heads, dim: 1 };
    if let Ok(layout) = what.cast::<Layout>() {
        if tokens_q.is_some() || tokens_k.is_some() || query_offset.is_some() || block.is_some() {
            return Err(errors::value(
                "a layout has its tokens, offsets and blocks, expected none of them as arguments",
            ));
        }
        let layout = layout.get();
        let make = |_: &mut signals::Watch| {
            let layouts = layout.widened(batch, heads)?;
            let (queries, keys) = layout.lengths();
            Components::of_layouts(layouts, dims(queries, heads), dims(keys, key_heads))
        };
        return DeviceCall::of_components(py, &signals::released(py, make, errors::raise)?);
    }
    let Ok(dilated) = what.cast::<Dilated>() else {
        let kind = what.get_type().name()?;
        return Err(errors::kind(format!("a {kind}, expected a Layout or a Dilated")));
    };
    let (Some(queries), Some(keys)) = (tokens_q, tokens_k) else {
        return Err(errors::value("a Dilated without tokens_q and tokens_k, expected both"));
    };
    let block = BlockSize::new(block.unwrap_or(BLOCK)).map_err(errors::raise_pattern)?;
    let mut engine = dilated.get().shared().block(block);
    if let Some(offset) = query_offset {
        engine = engine.query_offset(offset);
    }
    let make = |watch: &mut signals::Watch| {
        let mut look = |_: longspan::Progress| watch.look();
        engine.all_components(dims(queries, heads), dims(keys, key_heads), Hook::new(&mut look))
    };
    DeviceCall::of_components(py, &signals::released(py, make, errors::raise)?)
}

/// FlexAttention's kernels are tuned for blocks of so many tokens.
const BLOCK: u64 = 128;
