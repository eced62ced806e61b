//! `longspan.Layout`: a pattern compiled to blocks.

use std::hash::{DefaultHasher, Hash, Hasher};

use longspan::{Counts, Heads, Layout as Compiled, LayoutSet, Layouts};
use longspan_pattern::Error;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyTuple};

use crate::arguments::{Placement, Whole, padding};
use crate::block_lists::{self, Region, Width};
use crate::components::{self, Component, ranges};
use crate::errors;
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
    source: Source,
    /// Whether it has some blocks of its source alone.
    selected: bool,
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
        Layout { layouts: layout.into(), batch: None, heads: None, source, selected: false }
    }

    /// Layouts that differ by batch entry, by head or by both; `None` where they don't, and the
    /// set has one of it.
    fn each(set: LayoutSet, batch: Option<usize>, heads: Option<usize>, source: Source) -> Self {
        Layout { layouts: set.into(), batch, heads, source, selected: false }
    }

    /// Some blocks of a pattern, for every batch entry and head.
    pub(crate) fn selected(set: LayoutSet, source: Source) -> Self {
        let (batch, heads) = (Some(set.batch()), Some(set.heads()));
        Layout { layouts: set.into(), batch, heads, source, selected: true }
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
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
        let bytes = array.call_method0("tobytes")?;
        let active: Vec<bool> =
            bytes.cast::<PyBytes>()?.as_bytes().iter().map(|&x| x != 0).collect();
        let mut offsets = (0, 0);
        let mut entries = Vec::with_capacity(batch);
        for entry in 0..batch {
            let mut patterns = Vec::with_capacity(heads);
            for head in 0..heads {
                let pairs = queries * keys;
                let own = &active[(entry * heads + head) * pairs..][..pairs];
                let (pattern, query, key) = longspan::Pattern::from_mask(own, queries, keys)
                    .map_err(errors::raise_pattern)?;
                patterns.push(pattern);
                offsets = (query, key);
            }
            let same = patterns.len() == 1;
            entries.push(match same {
                true => Heads::from(patterns.remove(0)),
                false => Heads::each(patterns).map_err(errors::raise_pattern)?,
            });
        }
        let pattern = match batch {
            1 => entries.remove(0),
            _ => Heads::batch(entries).map_err(errors::raise_pattern)?,
        };
        let placement = Placement {
            block: block.map(|block| block.0),
            query_offset: Some(offsets.0),
            key_offset: Some(offsets.1),
            max_work: max_work.map(|units| units.0),
            ..Placement::default()
        };
        Layout::compile(py, &pattern, (queries, keys), placement, None)
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
        let placement = &slf.get().source.placement;
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
        if self.selected {
            return Err(errors::kind(
                "a selected layout can't be pickled: it is made from queries and keys; pickle those, \
                 and select again",
            ));
        }
        let Source { pattern, tokens, placement, key_padding } = &self.source;
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
