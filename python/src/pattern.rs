//! `longspan.Pattern`: a predicate over positions, in Python's operators.

use std::hash::{DefaultHasher, Hash, Hasher};

use longspan::Heads;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::arguments::{Map, Placement, Whole, pairs};
use crate::errors;
use crate::layout::{KeyPadding, Layout, Source};
use crate::picture;
use crate::signals;

/// Characters that a `repr` shows of a text, which may list a million lengths.
const MOST_CHARACTERS: usize = 1_000;

/// Which query may attend to which key, by position.
///
/// A pattern is made of primitives (`longspan.causal()`, `longspan.window(256, 0)`, …) with `&`,
/// `|` and `~`, or read from text. It costs nothing until it is compiled.
///
/// >>> import longspan
/// >>> pattern = longspan.Pattern("causal & (window(256, 0) | sinks(16))")
/// >>> pattern == longspan.causal() & (longspan.window(256, 0) | longspan.sinks(16))
/// True
/// >>> pattern.allows(1000, 3), pattern.allows(1000, 700)
/// (True, False)
/// >>> print(~longspan.strided(4))
/// !strided(4)
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Pattern(pub(crate) Heads);

impl Pattern {
    /// The one pattern for all heads, to combine with another.
    fn single(&self) -> PyResult<longspan::Pattern> {
        match &self.0 {
            Heads::Same(pattern) => Ok(pattern.clone()),
            _ => Err(errors::value(
                "heads(…) and batch(…) are outermost: combine the patterns inside, as in \
                 heads([a & b, a & c])",
            )),
        }
    }

    /// A pattern, or the text of one; nothing of other objects.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Heads>> {
        if let Ok(pattern) = object.cast::<Pattern>() {
            return Ok(Some(pattern.get().0.clone()));
        }
        match object.cast::<PyString>() {
            Ok(text) => parse(&text.to_cow()?).map(Some),
            Err(_) => Ok(None),
        }
    }

    fn combined(
        &self,
        other: &Bound<'_, PyAny>,
        join: impl FnOnce(longspan::Pattern, longspan::Pattern) -> longspan::Pattern,
    ) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Some(other) = Pattern::of(other)? else { return Ok(py.NotImplemented()) };
        let joined = join(self.single()?, Pattern(other).single()?);
        joined.check().map_err(errors::raise_pattern)?;
        Ok(Py::new(py, Pattern(joined.into()))?.into_any())
    }
}

fn parse(text: &str) -> PyResult<Heads> {
    text.parse().map_err(|error: longspan_pattern::Error| {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        if !words.into_iter().any(|word| word == "heads") {
            return errors::raise_pattern(error);
        }
        errors::value(format!(
            "{error}\nheads([…]) is outermost: combine the patterns inside it, as in \
             heads([a & b, a & c]), without parentheses around it"
        ))
    })
}

#[pymethods]
impl Pattern {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        parse(text).map(Pattern)
    }

    /// Whether the query at position `query` may attend to the key at position `key`.
    ///
    /// `head` says which one is meant of a pattern that differs by head.
    ///
    /// >>> import longspan
    /// >>> longspan.window(2, 1).allows(5, 3)
    /// True
    #[pyo3(signature = (query, key, *, head=None))]
    fn allows(&self, query: i64, key: i64, head: Option<usize>) -> PyResult<bool> {
        let pattern = match (self.0.count(), head) {
            (Some(count), None) => {
                return Err(errors::value(format!(
                    "the pattern differs by head, expected head=0 to head={}",
                    count - 1
                )));
            }
            (Some(count), Some(head)) if head >= count => {
                return Err(errors::value(format!(
                    "head is {head}, expected less than {count}, the number of patterns"
                )));
            }
            (Some(count), Some(head)) => self.0.get(head, count),
            (None, _) => self.0.get(0, 1),
        };
        Ok(pattern.map_err(errors::raise_pattern)?.allows(query, key))
    }

    /// How many batch entries the pattern is for; `None` where it is the same for all.
    #[getter]
    fn batch(&self) -> Option<usize> {
        self.0.entries()
    }

    /// How many query heads the pattern is for; `None` where it is the same for all.
    #[getter]
    fn heads(&self) -> Option<usize> {
        self.0.count()
    }

    /// The pattern compiled to blocks, for `tokens_q` queries over `tokens_k` keys (as many where
    /// left out).
    ///
    /// Query `i` stands at position `i + query_offset`, key `j` at `j + key_offset`. Left out,
    /// `key_offset` is 0 and `query_offset` is `key_offset + tokens_k - tokens_q`: the queries are the
    /// *last* positions. `block` is the number of tokens
    /// per block, 16 to 256: 64 unless it is given, and 128 or 256 for long sequences with strides
    /// above 64.
    ///
    /// `query_map` and `key_map` are for a shard of the sequence: the positions of the queries and
    /// keys at hand, in their order, as integers, a `range` or a list of ranges (each ascending).
    /// `tokens_q` and `tokens_k` then are those of the whole sequence, and the layout is for tensors
    /// that hold the shard.
    ///
    /// `key_padding` has a pair `(first, end)` for each batch entry: the keys that hold tokens;
    /// the others are seen by no query.
    ///
    /// `mask_bytes` is the memory that masks of partial blocks may take; all that fit are made now. Left
    /// out, those that many blocks share are stored within an eighth of the lists of blocks, and the
    /// others are made again in every call.
    ///
    /// `max_work` bounds the work of compiling, and of each of counting, hashing, comparing and
    /// drawing the layout: units of about a nanosecond, 2**30 where left out.
    ///
    /// >>> import longspan
    /// >>> layout = longspan.Pattern("causal & window(256, 0)").compile(8192)
    /// >>> layout.tokens_q, layout.block
    /// (8192, 64)
    /// >>> longspan.causal().compile(100, key_padding=[(0, 100), (40, 100)]).batch
    /// 2
    /// >>> longspan.causal().compile(8192, query_map=range(1, 8192, 4)).tokens_q
    /// 2048
    #[pyo3(signature = (
        tokens_q, tokens_k=None, *, block=None, query_offset=None, key_offset=None,
        query_map=None, key_map=None, key_padding=None, mask_bytes=None, max_work=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn compile(
        &self,
        py: Python<'_>,
        tokens_q: Whole,
        tokens_k: Option<Whole>,
        block: Option<Whole>,
        query_offset: Option<i64>,
        key_offset: Option<i64>,
        query_map: Option<Map>,
        key_map: Option<Map>,
        key_padding: Option<Vec<(Whole, Whole)>>,
        mask_bytes: Option<Whole>,
        max_work: Option<Whole>,
    ) -> PyResult<Layout> {
        let block = block.map(|block| block.0);
        let mask_bytes = mask_bytes.map(|bytes| bytes.0);
        let max_work = max_work.map(|units| units.0);
        let (query_map, key_map) = (query_map.map(|map| map.0), key_map.map(|map| map.0));
        let placement =
            Placement { block, query_offset, key_offset, query_map, key_map, mask_bytes, max_work };
        let tokens_q = tokens_q.0 as usize;
        let tokens_k = tokens_k.map_or(tokens_q, |tokens| tokens.0 as usize);
        Layout::compile(py, &self.0, (tokens_q, tokens_k), placement, key_padding.map(pairs))
    }

    /// The pattern as torch's `BlockMask`, for `flex_attention` on a GPU or on the CPU: compiled to
    /// blocks of `block` tokens, then `Layout.to_block_mask`. Needs torch.
    ///
    /// ```python
    /// mask = longspan.Pattern("causal & window(1024, 0)").to_block_mask(65536, device="cuda")
    /// out = torch.compile(flex_attention)(q, k, v, block_mask=mask)
    /// ```
    #[pyo3(signature = (
        tokens_q, tokens_k=None, *, device=None, block=Whole(128), query_offset=None,
        key_offset=None, key_padding=None, width="all",
    ), text_signature = "($self, tokens_q, tokens_k=None, *, device='cpu', block=128, \
        query_offset=None, key_offset=None, key_padding=None, width='all')")]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn to_block_mask<'py>(
        &self,
        py: Python<'py>,
        tokens_q: Whole,
        tokens_k: Option<Whole>,
        device: Option<Bound<'py, PyAny>>,
        block: Whole,
        query_offset: Option<i64>,
        key_offset: Option<i64>,
        key_padding: Option<Vec<(Whole, Whole)>>,
        width: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let placement =
            Placement { block: Some(block.0), query_offset, key_offset, ..Placement::default() };
        let tokens_q = tokens_q.0 as usize;
        let tokens_k = tokens_k.map_or(tokens_q, |tokens| tokens.0 as usize);
        let layout =
            Layout::compile(py, &self.0, (tokens_q, tokens_k), placement, key_padding.map(pairs))?;
        Layout::to_block_mask(&Bound::new(py, layout)?, device, width)
    }

    fn __and__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.combined(other, |a, b| a & b)
    }

    fn __or__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.combined(other, |a, b| a | b)
    }

    fn __rand__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.combined(other, |a, b| b & a)
    }

    fn __ror__(&self, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.combined(other, |a, b| b | a)
    }

    fn __invert__(&self) -> PyResult<Self> {
        let inverted = !self.single()?;
        inverted.check().map_err(errors::raise_pattern)?;
        Ok(Pattern(inverted.into()))
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(errors::kind("a pattern is neither true nor false: use & for and, | for or, ~ for not"))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> Py<PyAny> {
        let py = other.py();
        match other.cast::<Pattern>() {
            Ok(other) => {
                let equal = self.0 == other.get().0;
                pyo3::types::PyBool::new(py, equal).to_owned().into_any().unbind()
            }
            Err(_) => py.NotImplemented(),
        }
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let text = self.0.to_string();
        match text.char_indices().nth(MOST_CHARACTERS) {
            None => format!("longspan.Pattern(\"{text}\")"),
            Some((end, _)) => format!("<longspan.Pattern {}…>", &text[..end]),
        }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        (slf.get_type(), (slf.get().0.to_string(),)).into_pyobject(slf.py())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    /// What a notebook shows: the pattern over 4,096 tokens, or as many as its documents have.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let draw = |watch: &mut signals::Watch| picture::of_patterns(&self.0, watch);
        signals::released(py, draw, errors::raise_pattern)
    }
}

/// The pattern, the positions of the first query and the first key, and the key ranges that a layout
/// was compiled from. For the package's own glue.
#[pyfunction]
pub(crate) fn layout_source(
    layout: &Bound<'_, Layout>,
) -> PyResult<(Pattern, (i64, i64), Option<KeyPadding>)> {
    let source = layout.get().source(layout.py())?;
    let Source { pattern, tokens, placement, key_padding } = source;
    let key_offset = placement.key_offset.unwrap_or(0);
    let aligned = key_offset + tokens.1 as i64 - tokens.0 as i64;
    let offsets = (placement.query_offset.unwrap_or(aligned), key_offset);
    Ok((Pattern(pattern.clone()), offsets, key_padding.clone()))
}
