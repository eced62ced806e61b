//! `longspan.Layout`: a pattern compiled to blocks.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use longspan::{Counts, Heads, Layout as Compiled, LayoutSet, Layouts};
use longspan_pattern::{Error, Tiles};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyTuple};

use crate::arguments::{Placement, Whole, padding};
use crate::block_lists::{self, Region, Width};
use crate::components::{self, Component, ranges};
use crate::errors;
use crate::tensor::items;
use crate::{picture, signals};

/// A pattern compiled for given lengths: which blocks of queries and keys are seen in full, in part
/// or not at all. Made by `Pattern.compile`.
///
/// Where it differs by batch entry or by head, `batch` and `heads` say for how many it is.
///
/// >>> import longspan
/// >>> layout = longspan.Pattern("causal & window(64, 0)").compile(1000)
/// >>> layout
/// <longspan.Layout of 1000 × 1000 tokens, blocks of 64, 6.3 % of all pairs>
/// >>> layout.rows, layout.columns, layout.active_blocks
/// (16, 16, 31)
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Layout {
    /// A set has one entry, or one head, along an axis that it is the same for.
    layouts: Layouts,
    batch: Option<usize>,
    heads: Option<usize>,
    origin: Origin,
}

/// What a layout was made from.
enum Origin {
    Compiled(Source),
    /// Some blocks of it.
    Selected(Source),
    /// A boolean mask; a pattern of it is made when one is asked for.
    Mask(PyOnceLock<Source>),
}

/// The keys that hold tokens: one pair `(first, end)` per batch entry.
pub(crate) type KeyPadding = Vec<(usize, usize)>;

/// What a layout was compiled from.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) pattern: Heads,
    /// Queries and keys of the whole sequence; a map holds some of them.
    pub(crate) tokens: (usize, usize),
    pub(crate) placement: Placement,
    pub(crate) key_padding: Option<KeyPadding>,
}

impl Layout {
    /// A pattern compiled for so many queries and keys.
    pub(crate) fn compile(
        py: Python<'_>,
        pattern: &Heads,
        tokens: (usize, usize),
        placement: Placement,
        key_padding: Option<KeyPadding>,
    ) -> PyResult<Self> {
        let shape = placement.shape(tokens.0, tokens.1)?;
        let (entries, heads) = (pattern.entries(), pattern.count());
        let batch = key_padding.as_ref().map(Vec::len).or(entries);
        let padding = padding(key_padding.clone(), entries.unwrap_or(1));
        let source = Source { pattern: pattern.clone(), tokens, placement, key_padding };
        if let (Heads::Same(pattern), None) = (pattern, batch) {
            let compile = |watch: &mut signals::Watch| {
                Compiled::compile_with(pattern, &shape, |_, _| watch.look())
            };
            let layout = signals::released(py, compile, errors::raise_pattern)?;
            return Ok(Layout::same(layout, source));
        }
        let compile = |watch: &mut signals::Watch| {
            let heads = heads.unwrap_or(1);
            LayoutSet::compile_with(pattern, heads, &shape, &padding, None, |_, _| watch.look())
        };
        let set = signals::released(py, compile, errors::raise_pattern)?;
        Ok(Layout::each(set, batch, heads, source))
    }

    /// A layout for every batch entry and head.
    fn same(layout: Compiled, source: Source) -> Self {
        let origin = Origin::Compiled(source);
        Layout { layouts: layout.into(), batch: None, heads: None, origin }
    }

    /// Layouts that differ by batch entry, by head or by both; `None` where they don't, and the
    /// set has one of it.
    fn each(set: LayoutSet, batch: Option<usize>, heads: Option<usize>, source: Source) -> Self {
        Layout { layouts: set.into(), batch, heads, origin: Origin::Compiled(source) }
    }

    /// Some blocks of a pattern, for every batch entry and head.
    pub(crate) fn selected(set: LayoutSet, source: Source) -> Self {
        let (batch, heads) = (Some(set.batch()), Some(set.heads()));
        Layout { layouts: set.into(), batch, heads, origin: Origin::Selected(source) }
    }

    /// The layout of masks, one per batch entry and head, each made by a call of `make` with its
    /// number. With one entry, or one head, it is for any number of them.
    fn of_masks(
        py: Python<'_>,
        (batch, heads): (usize, usize),
        make: impl Fn(usize, &mut signals::Watch) -> Result<Compiled, Error> + Send + Sync,
    ) -> PyResult<Self> {
        let layouts = |watch: &mut signals::Watch| -> Result<Layouts, Error> {
            if (batch, heads) == (1, 1) {
                return make(0, watch).map(Layouts::from);
            }
            let each = (0..batch * heads).map(|number| make(number, watch).map(Arc::new));
            let each = each.collect::<Result<Vec<_>, _>>()?;
            LayoutSet::new_with(batch, heads, each, |_, _| watch.look()).map(Layouts::from)
        };
        let layouts = signals::released(py, layouts, errors::raise_pattern)?;
        let several = |count: usize| (count != 1).then_some(count);
        let origin = Origin::Mask(PyOnceLock::new());
        Ok(Layout { layouts, batch: several(batch), heads: several(heads), origin })
    }

    pub(crate) fn source(&self, py: Python<'_>) -> PyResult<&Source> {
        match &self.origin {
            Origin::Compiled(source) | Origin::Selected(source) => Ok(source),
            Origin::Mask(source) => source.get_or_try_init(py, || self.source_of_masks(py)),
        }
    }

    /// Patterns that list the keys of each query.
    fn source_of_masks(&self, py: Python<'_>) -> PyResult<Source> {
        let patterns = |watch: &mut signals::Watch| -> Result<Heads, Error> {
            let mut entries = Vec::new();
            for layouts in self.all().chunks(self.heads.unwrap_or(1)) {
                let mut patterns = Vec::with_capacity(layouts.len());
                for layout in layouts {
                    patterns.push(layout.to_pattern_with(|_, _| watch.look())?);
                }
                entries.push(match self.heads {
                    None => Heads::from(patterns.remove(0)),
                    Some(_) => Heads::each(patterns)?,
                });
            }
            if self.batch.is_none() { Ok(entries.remove(0)) } else { Heads::batch(entries) }
        };
        let pattern = signals::released(py, patterns, errors::raise_pattern)?;
        let start = |positions: &longspan::Positions| positions.get(0).unwrap_or(0);
        let first = self.first();
        let placement = Placement {
            query_offset: first.map(|layout| start(layout.query_positions())),
            key_offset: first.map(|layout| start(layout.key_positions())),
            ..Placement::default()
        };
        Ok(Source { pattern, tokens: self.lengths(), placement, key_padding: None })
    }

    /// The layouts of a call with so many batch entries and heads. Where the set is for other
    /// numbers of them, the call itself refuses it.
    pub(crate) fn widened(&self, batch: usize, heads: usize) -> Result<Layouts, Error> {
        let Layouts::Each(set) = &self.layouts else { return Ok(self.layouts.clone()) };
        let (batch, heads) = (self.batch.unwrap_or(batch), self.heads.unwrap_or(heads));
        let at = |entry: usize, head: usize| {
            let entry = self.batch.map_or(0, |_| entry);
            let head = self.heads.map_or(0, |_| head);
            set.layouts()[set.index(entry, head)].clone()
        };
        let pairs = (0..batch).flat_map(|entry| (0..heads).map(move |head| (entry, head)));
        LayoutSet::new(batch, heads, pairs.map(|(entry, head)| at(entry, head))).map(Layouts::Each)
    }

    /// The layout of each batch entry and head that it distinguishes, one after the other.
    fn all(&self) -> Vec<&Compiled> {
        match &self.layouts {
            Layouts::One(layout) => vec![layout],
            Layouts::Each(set) => {
                let pairs = (0..set.batch()).flat_map(|b| (0..set.heads()).map(move |h| (b, h)));
                pairs.map(|(entry, head)| set.get(entry, head)).collect()
            }
        }
    }

    /// Queries and keys.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        (self.tokens_q(), self.tokens_k())
    }

    /// All that differ.
    fn distinct(&self) -> Vec<&Compiled> {
        match &self.layouts {
            Layouts::One(layout) => vec![layout],
            Layouts::Each(set) => set.layouts().iter().map(|layout| &**layout).collect(),
        }
    }

    /// One of them; they agree on tokens and blocks. Nothing of a set without entries or heads.
    fn first(&self) -> Option<&Compiled> {
        self.distinct().into_iter().next()
    }

    fn sum(&self, py: Python<'_>, number: fn(&Counts) -> u128) -> PyResult<u128> {
        let sum = |watch: &mut signals::Watch| {
            let mut sum = 0;
            for layout in self.all() {
                sum += number(layout.counts_with(|_, _| watch.look())?);
            }
            Ok(sum)
        };
        signals::released(py, sum, errors::raise_pattern)
    }
}

#[pymethods]
impl Layout {
    /// The layout of the pairs that are true in a boolean array: `(queries, keys)`, or `(batch, heads,
    /// queries, keys)` with 1 along an axis that it is the same for. The queries are the last
    /// positions. The array is read once: time and memory follow the ranges of its rows.
    ///
    /// >>> import longspan, numpy
    /// >>> mask = numpy.tri(1000, dtype=bool)
    /// >>> longspan.Layout.from_mask(mask) == longspan.causal().compile(1000)
    /// True
    #[staticmethod]
    #[pyo3(signature = (mask, *, block=None, max_work=None))]
    fn from_mask(
        py: Python<'_>,
        mask: &Bound<'_, PyAny>,
        block: Option<Whole>,
        max_work: Option<Whole>,
    ) -> PyResult<Layout> {
        let array = py.import("numpy")?.call_method1("ascontiguousarray", (mask,))?;
        let shape: Vec<usize> = array.getattr("shape")?.extract()?;
        let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
        let (batch, heads, queries, keys) = match shape[..] {
            [queries, keys] if kind == "b" => (1, 1, queries, keys),
            [batch, heads, queries, keys] if kind == "b" && batch * heads > 0 => {
                (batch, heads, queries, keys)
            }
            _ => {
                return Err(errors::value(format!(
                    "mask is an array of {} of shape {shape:?}, expected bool of shape (queries, \
                     keys) or (batch, heads, queries, keys)",
                    array.getattr("dtype")?.str()?
                )));
            }
        };
        let placement = Placement {
            block: block.map(|block| block.0),
            max_work: max_work.map(|units| units.0),
            ..Placement::default()
        };
        let (shape, pairs) = (placement.shape(queries, keys)?, queries * keys);
        // SAFETY: `ascontiguousarray` returns so many bytes side by side, and `array` lives to the end.
        let active: &[u8] = unsafe { items(&array, batch * heads * pairs) }?;
        Layout::of_masks(py, (batch, heads), |number, watch| {
            let own = &active[number * pairs..][..pairs];
            Compiled::from_mask_with(own, shape.clone(), |_, _| watch.look())
        })
    }

    /// The layout of FlexAttention's lists of blocks, for so many batch entries and heads, with query and
    /// key 0 at position 0. `size` has the queries and keys per block of the lists, which are `counts`, the
    /// blocks per row (int64, all batch entries and heads), `columns` (uint32), ascending in a row,
    /// `numbers` (int64), which mask each block has, -1 for a full one, and the masks (bool, `[mask, query,
    /// key]`). For the package's own glue.
    #[staticmethod]
    fn _from_block_lists(
        py: Python<'_>,
        of_each: (usize, usize),
        tokens: (usize, usize),
        size: (usize, usize),
        lists: [Bound<'_, PyAny>; 4],
    ) -> PyResult<Layout> {
        let ((batch, heads), (queries, keys)) = (of_each, tokens);
        let [counts, columns, numbers, masks] = lists;
        let placement = Placement { query_offset: Some(0), ..Placement::default() };
        let shape = placement.shape(queries, keys)?;
        let len = |array: &Bound<'_, PyAny>| array.getattr(intern!(py, "size"))?.extract::<usize>();
        // SAFETY: only the package's Python calls this, with contiguous arrays of these types, which live
        // to the end.
        let (counts, columns, numbers, masks): (&[i64], &[u32], &[i64], &[u8]) = unsafe {
            (
                items(&counts, len(&counts)?)?,
                items(&columns, len(&columns)?)?,
                items(&numbers, len(&numbers)?)?,
                items(&masks, len(&masks)?)?,
            )
        };
        let rows = queries.div_ceil(size.0);
        if counts.len() != batch * heads * rows || columns.len() != numbers.len() {
            let (lists, blocks) = (counts.len(), columns.len());
            return Err(errors::value(format!("{lists} rows and {blocks} blocks are no lists")));
        }
        let mut starts = vec![0];
        for &count in counts {
            starts.push(starts[starts.len() - 1] + count as usize);
        }
        let numbers: Vec<Option<u32>> = numbers.iter().map(|&n| u32::try_from(n).ok()).collect();
        Layout::of_masks(py, (batch, heads), |number, watch| {
            let bounds = &starts[number * rows..][..=rows];
            let (first, end) = (bounds[0], bounds[rows]);
            let starts: Vec<usize> = bounds.iter().map(|start| start - first).collect();
            let tiles = Tiles {
                size,
                starts: &starts,
                columns: &columns[first..end],
                numbers: &numbers[first..end],
                masks,
            };
            Compiled::from_tiles_with(&shape, tiles, |_, _| watch.look())
        })
    }

    /// Queries.
    #[getter]
    fn tokens_q(&self) -> usize {
        self.first().map_or(0, Compiled::queries)
    }

    /// Keys.
    #[getter]
    fn tokens_k(&self) -> usize {
        self.first().map_or(0, Compiled::keys)
    }

    /// Tokens per block.
    #[getter]
    fn block(&self) -> usize {
        self.first().map_or(0, |layout| layout.block().get())
    }

    /// Rows of query blocks.
    #[getter]
    fn rows(&self) -> usize {
        self.first().map_or(0, |layout| layout.rows().len())
    }

    /// Columns of key blocks.
    #[getter]
    fn columns(&self) -> u32 {
        self.first().map_or(0, Compiled::columns)
    }

    /// Batch entries it is for; `None` where it is for any.
    #[getter]
    fn batch(&self) -> Option<usize> {
        self.batch
    }

    /// Query heads it is for; `None` where it is for any.
    #[getter]
    fn heads(&self) -> Option<usize> {
        self.heads
    }

    /// The share of all pairs of a query and a key that is seen, over all that it distinguishes.
    #[getter]
    fn density(&self, py: Python<'_>) -> PyResult<f64> {
        signals::released(py, |watch| self.density_with(watch), errors::raise_pattern)
    }

    /// Blocks of which anything is seen, over all that it distinguishes.
    #[getter]
    fn active_blocks(&self, py: Python<'_>) -> PyResult<u128> {
        self.sum(py, |counts| counts.active_blocks())
    }

    /// Pairs of a query and a key that are seen, over all that it distinguishes.
    #[getter]
    fn active_pairs(&self, py: Python<'_>) -> PyResult<u128> {
        self.sum(py, |counts| counts.active_pairs)
    }

    /// The layout of a batch entry and head as `Component`s over disjoint pairs, where its pattern has
    /// terms that are dense in an order of residues (`strided`, `dilated`); an empty list for others.
    /// Kernels compute these where that is faster.
    ///
    /// >>> import longspan
    /// >>> layout = longspan.Pattern("strided(64) | window(8, 8)").compile(4096)
    /// >>> [(part.modulus, part.queries) for part in layout.components()]
    /// [(1, (range(0, 1), range(0, 4096))), (64, (range(0, 64), range(0, 4096, 64)))]
    #[pyo3(signature = (batch=0, head=0))]
    fn components(&self, py: Python<'_>, batch: usize, head: usize) -> PyResult<Vec<Component>> {
        let layout = match &self.layouts {
            Layouts::One(layout) => layout,
            Layouts::Each(set) => {
                let entry = self.batch.map_or(0, |_| batch);
                let head = self.heads.map_or(0, |_| head);
                if entry >= set.batch() || head >= set.heads() {
                    let (batches, heads) = (set.batch(), set.heads());
                    let text = format!("the layout has {batches} batch entries and {heads} heads");
                    return Err(errors::value(text));
                }
                &set.layouts()[set.index(entry, head)]
            }
        };
        components::all(py, layout)
    }

    /// Bytes that the distinct layouts hold at present.
    #[getter]
    fn nbytes(&self) -> usize {
        self.distinct().iter().map(|layout| layout.bytes()).sum()
    }

    /// The layout as torch's `BlockMask`, for `flex_attention` on a GPU or on the CPU.
    ///
    /// Blocks are those of the layout; FlexAttention's kernels are tuned for `block=128`. The
    /// mask's `mask_mod` is made from the pattern's expression. Needs torch.
    ///
    /// The mask is one list of blocks in the order of tokens, and FlexAttention computes all of each:
    /// `active_blocks · block²` pairs. For `strided` and `dilated` terms, which Longspan computes in
    /// the order of residues (`components`), that is many times the `active_pairs`.
    ///
    /// With `width="all"` the lists of blocks have room for all blocks of a row, as torch's own
    /// have: FlexAttention on the CPU and its FlashAttention-4 backend take no others.
    /// `width="longest"` has room for the longest row alone. Triton's kernels read such lists too,
    /// and beyond a million tokens they are what fits; torch can't print them as a picture.
    ///
    /// ```python
    /// layout = longspan.Pattern("causal & window(1024, 0)").compile(65536, block=128)
    /// mask = layout.to_block_mask("cuda")
    /// out = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    /// ```
    #[pyo3(
        signature = (device=None, *, width="all"),
        text_signature = "($self, device='cpu', *, width='all')"
    )]
    pub(crate) fn to_block_mask<'py>(
        slf: &Bound<'py, Self>,
        device: Option<Bound<'py, PyAny>>,
        width: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        Width::read(width)?;
        let placement = &slf.get().source(slf.py())?.placement;
        if placement.query_map.is_some() || placement.key_map.is_some() {
            return Err(errors::value(
                "the layout has a query_map or a key_map, which a BlockMask can't express: compile \
                 the pattern without maps",
            ));
        }
        let py = slf.py();
        let device = device.unwrap_or_else(|| intern!(py, "cpu").clone().into_any());
        let glue = py.import("longspan.block_mask")?;
        glue.call_method1("to_block_mask", (slf, device, width))
    }

    /// `(counts, indices)` of partial and full blocks by rows, then by columns, as eight arrays of
    /// int32. For the package's own glue.
    fn _block_lists<'py>(&self, py: Python<'py>, width: &str) -> PyResult<Bound<'py, PyTuple>> {
        let (batch, heads) = match &self.layouts {
            Layouts::One(_) => (1, 1),
            Layouts::Each(set) => (set.batch(), set.heads()),
        };
        block_lists::lists(py, &self.all(), (batch, heads), Region::ALL, Width::read(width)?)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<Layout>() else { return Ok(py.NotImplemented()) };
        let other = other.get();
        let equal = |watch: &mut signals::Watch| {
            let (all, others) = (self.all(), other.all());
            if (self.batch, self.heads) != (other.batch, other.heads)
                || self.tokens() != other.tokens()
                || all.len() != others.len()
            {
                return Ok(false);
            }
            for (layout, other) in all.iter().zip(others) {
                if !layout.same_pairs_with(other, |_, _| watch.look())? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        let equal = signals::released(py, equal, errors::raise_pattern)?;
        Ok(PyBool::new(py, equal).to_owned().into_any().unbind())
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<u64> {
        let hash = |watch: &mut signals::Watch| {
            let mut hasher = DefaultHasher::new();
            self.tokens().hash(&mut hasher);
            for layout in self.all() {
                let hash = layout.hash_with(|_, _| watch.look())?;
                hash.to_string().hash(&mut hasher);
            }
            Ok(hasher.finish())
        };
        signals::released(py, hash, errors::raise_pattern)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (q, k) = (self.tokens_q(), self.tokens_k());
        let batch = self.batch.map(|batch| format!(", {batch} batch entries"));
        let heads = self.heads.map(|heads| format!(", {heads} heads"));
        // A layout whose pairs are too much work to count prints all the same.
        let density = |watch: &mut signals::Watch| match self.density_with(watch) {
            Ok(density) => Ok(format!(", {:.1} % of all pairs", 100.0 * density)),
            Err(Error::TooMuchWork { .. }) => Ok(String::new()),
            Err(error) => Err(error),
        };
        let density = signals::released(py, density, errors::raise_pattern)?;
        Ok(format!(
            "<longspan.Layout of {q} × {k} tokens, blocks of {}{density}{}{}>",
            self.block(),
            batch.unwrap_or_default(),
            heads.unwrap_or_default()
        ))
    }

    fn __str__(&self, py: Python<'_>) -> PyResult<String> {
        let summary = self.__repr__(py)?;
        let picture = |watch: &mut signals::Watch| match self.first() {
            Some(layout) => picture::text(layout, watch),
            None => Ok(String::new()),
        };
        let picture = signals::released(py, picture, errors::raise_pattern)?;
        Ok(format!("{summary}\n{picture}"))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        if matches!(self.origin, Origin::Selected(_)) {
            return Err(errors::kind(
                "a selected layout can't be pickled: it is made from queries and keys; pickle those, \
                 and select again",
            ));
        }
        let Source { pattern, tokens, placement, key_padding } = self.source(py)?;
        let named = PyDict::new(py);
        named.set_item("block", self.block())?;
        named.set_item("query_offset", placement.query_offset)?;
        named.set_item("key_offset", placement.key_offset)?;
        named.set_item("query_map", ranges(py, placement.query_map.as_ref())?)?;
        named.set_item("key_map", ranges(py, placement.key_map.as_ref())?)?;
        named.set_item("key_padding", key_padding)?;
        named.set_item("mask_bytes", placement.mask_bytes)?;
        named.set_item("max_work", placement.max_work)?;
        let restore = py.import("longspan._restore")?.getattr("layout")?;
        (restore, (pattern.to_string(), tokens.0, tokens.1, named)).into_pyobject(py)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    /// What a notebook shows: full blocks dark, partial ones light; a cell is a block, or many.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<String> {
        let draw = |watch: &mut signals::Watch| {
            let distinct = self.distinct();
            picture::svg(&distinct, distinct.len(), watch)
        };
        signals::released(py, draw, errors::raise_pattern)
    }
}

impl Layout {
    fn density_with(&self, watch: &mut signals::Watch) -> longspan_pattern::Result<f64> {
        let (all, mut sum) = (self.all(), 0.0);
        for layout in &all {
            layout.counts_with(|_, _| watch.look())?;
            sum += layout.density()?;
        }
        Ok(if all.is_empty() { 0.0 } else { sum / all.len() as f64 })
    }

    fn tokens(&self) -> (usize, usize, usize) {
        (self.tokens_q(), self.tokens_k(), self.block())
    }
}
