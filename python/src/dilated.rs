//! `longspan.Dilated`: LongNet's branches, in the place of a pattern.

use std::fmt::Write;

use longspan::{Branch, Dilated as Engine, Overlap, Pattern as Rule};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arguments::{Whole, Wholes, pairs};
use crate::errors;
use crate::pattern::Pattern;
use crate::primitives::inner;

/// LongNet's dilated attention (arXiv 2307.02486): what `attention`, `forward`, `backward` and
/// `longspan.torch.ring_attention` take in place of a pattern.
///
/// Branch `b` cuts the sequence into segments of `segment_lengths[b]` tokens. Of each, head `h` has
/// the tokens whose number in it is `h % r` modulo the rate `r = dilation_rates[b]`, as queries, keys
/// and values. Branches are weighted by their softmax denominators, and gradients go through the
/// weights. Any length will do: last segments are short, rates needn't divide segments.
///
/// `within` is a pattern, or the text of one, that every branch is cut with: `"causal"`,
/// `"causal & documents([100, 28])"`. It speaks of positions in the whole sequence.
///
/// `also` is a pattern, or the text of one, that queries see besides their branches, such as a window:
/// one more branch, over all tokens and the same for all heads, cut like the others.
///
/// `overlap` says how often a key counts that several branches have: `"weighted"` is the paper,
/// `"union"` is attention over the union of the branches' sets.
///
/// A query that no branch has (possible where no rate is 1) has output 0. Layouts of the last shapes
/// are kept with the object. `padded` and `packed_cu_seqlens` are for sequences of several lengths.
///
/// >>> import longspan, numpy
/// >>> dilated = longspan.Dilated([64, 128, 256], [1, 2, 4], within="causal")
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 4, 301, 16), dtype="float32")
/// >>> out = longspan.attention(x, x, x, dilated)
/// >>> bool(numpy.allclose(out[0, :, 0], x[0, :, 0]))  # the first query sees only itself
/// True
/// >>> dilated
/// longspan.Dilated([64, 128, 256], [1, 2, 4], within="causal")
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Dilated {
    engine: Engine,
    within: Rule,
    also: Option<Rule>,
    overlap: Overlap,
    lengths: Option<Lengths>,
}

/// Sequences of several lengths.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Lengths {
    /// First and end of the valid keys of each batch entry.
    Padded(Vec<(usize, usize)>),
    /// Where queries and keys of each begin, and the end.
    Packed(Vec<u64>, Vec<u64>),
}

impl Dilated {
    /// The engine, without what a call tells it; layouts stay shared.
    pub(crate) fn shared(&self) -> Engine {
        self.engine.clone()
    }

    /// Whether it is for sequences of given lengths.
    pub(crate) fn has_lengths(&self) -> bool {
        self.lengths.is_some()
    }

    fn with_lengths(&self, engine: Engine, lengths: Lengths) -> Self {
        let (within, also) = (self.within.clone(), self.also.clone());
        Dilated { engine, within, also, overlap: self.overlap, lengths: Some(lengths) }
    }

    fn list(&self, number: fn(&Branch) -> u64) -> Vec<u64> {
        self.engine.branches().iter().map(number).collect()
    }
}

#[pymethods]
impl Dilated {
    #[new]
    #[pyo3(
        signature = (segment_lengths, dilation_rates, *, within=None, also=None, overlap=WEIGHTED),
        text_signature = "(segment_lengths, dilation_rates, *, within='full', also=None, \
            overlap='weighted')"
    )]
    fn new(
        segment_lengths: Wholes,
        dilation_rates: Wholes,
        within: Option<&Bound<'_, PyAny>>,
        also: Option<&Bound<'_, PyAny>>,
        overlap: &str,
    ) -> PyResult<Self> {
        if segment_lengths.0.len() != dilation_rates.0.len() {
            return Err(errors::value(format!(
                "segment_lengths has {} elements and dilation_rates has {}, expected as many: one of \
                 each per branch",
                segment_lengths.0.len(),
                dilation_rates.0.len()
            )));
        }
        let within = within.map_or(Ok(Rule::full()), |within| inner("within", within))?;
        let also = also.map(|also| inner("also", also)).transpose()?;
        let overlap = match overlap {
            WEIGHTED => Overlap::Weighted,
            UNION => Overlap::Union,
            other => {
                return Err(errors::value(format!(
                    "overlap is {other:?}, expected {WEIGHTED:?} (the paper) or {UNION:?} (the \
                     union of the branches)"
                )));
            }
        };
        let pairs = segment_lengths.0.into_iter().zip(dilation_rates.0);
        let branches: longspan::Result<Vec<Branch>> =
            pairs.map(|(segment, rate)| Branch::new(segment, rate)).collect();
        let engine = branches.and_then(Engine::new).map_err(errors::raise)?;
        let mut engine = engine.within(within.clone()).overlap(overlap);
        if let Some(also) = &also {
            engine = engine.also(also.clone());
        }
        Ok(Dilated { engine, within, also, overlap, lengths: None })
    }

    /// Tokens per segment, of each branch.
    #[getter]
    fn segment_lengths(&self) -> Vec<u64> {
        self.list(Branch::segment)
    }

    /// Steps between the tokens of a segment, of each branch.
    #[getter]
    fn dilation_rates(&self) -> Vec<u64> {
        self.list(Branch::rate)
    }

    /// What every branch is cut with.
    #[getter]
    fn within(&self) -> Pattern {
        Pattern(self.within.clone().into())
    }

    /// What queries see besides their branches, if anything.
    #[getter]
    fn also(&self) -> Option<Pattern> {
        self.also.clone().map(|also| Pattern(also.into()))
    }

    /// `"weighted"` or `"union"`.
    #[getter]
    fn overlap(&self) -> &'static str {
        match self.overlap {
            Overlap::Weighted => WEIGHTED,
            Overlap::Union => UNION,
        }
    }

    /// The same for a batch with padding: `key_padding` has the first key of each batch entry that is a
    /// token, and the end of them. They are a sequence of their own: segments, offsets, `within` and
    /// `also` count from the first of them. Queries at other positions have output 0 and no gradient.
    ///
    /// >>> import longspan, numpy
    /// >>> dilated = longspan.Dilated([8, 16], [1, 2], within="causal").padded([(0, 40), (10, 40)])
    /// >>> x = numpy.random.default_rng(0).standard_normal((2, 2, 40, 8), dtype="float32")
    /// >>> out = longspan.attention(x, x, x, dilated)
    /// >>> bool((out[1, :, :10] == 0).all()), bool(numpy.allclose(out[1, :, 10], x[1, :, 10]))
    /// (True, True)
    fn padded(&self, key_padding: Vec<(Whole, Whole)>) -> Self {
        let ranges = pairs(key_padding);
        let engine = self.engine.clone().padded(ranges.iter().map(|&(first, end)| first..end));
        self.with_lengths(engine, Lengths::Padded(ranges))
    }

    /// The same for sequences that lie side by side in tensors of batch 1: sequence `i` has the queries
    /// from `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, and keys likewise; where left out, as queries.
    /// Segments, offsets, `within` and `also` count from its first key. With fewer queries than keys the
    /// queries of a sequence are its last.
    ///
    /// >>> import longspan
    /// >>> longspan.Dilated([8, 16], [1, 2]).packed_cu_seqlens([0, 10, 40])
    /// longspan.Dilated([8, 16], [1, 2]).packed_cu_seqlens([0, 10, 40])
    #[pyo3(signature = (cu_seqlens_q, cu_seqlens_k=None))]
    fn packed_cu_seqlens(
        &self,
        cu_seqlens_q: Wholes,
        cu_seqlens_k: Option<Wholes>,
    ) -> PyResult<Self> {
        let queries = cu_seqlens_q.0;
        let keys = cu_seqlens_k.map_or_else(|| queries.clone(), |keys| keys.0);
        let engine = self.engine.clone().packed_cu_seqlens(&queries, &keys);
        Ok(self.with_lengths(engine.map_err(errors::raise)?, Lengths::Packed(queries, keys)))
    }

    /// First and end of the valid keys of each batch entry, where `padded` has given them.
    #[getter]
    fn key_padding(&self) -> Option<Vec<(usize, usize)>> {
        match &self.lengths {
            Some(Lengths::Padded(ranges)) => Some(ranges.clone()),
            _ => None,
        }
    }

    /// Where sequences of queries and of keys begin, and the end, where `packed_cu_seqlens` has given
    /// them.
    #[getter]
    fn cu_seqlens(&self) -> Option<(Vec<u64>, Vec<u64>)> {
        match &self.lengths {
            Some(Lengths::Packed(queries, keys)) => Some((queries.clone(), keys.clone())),
            _ => None,
        }
    }

    fn __repr__(&self) -> String {
        let (segments, rates) = (self.segment_lengths(), self.dilation_rates());
        let mut text = format!("longspan.Dilated({segments:?}, {rates:?}");
        if self.within != Rule::full() {
            write!(text, ", within=\"{}\"", self.within).expect("a string takes everything");
        }
        if let Some(also) = &self.also {
            write!(text, ", also=\"{also}\"").expect("a string takes everything");
        }
        if self.overlap != Overlap::Weighted {
            write!(text, ", overlap={:?}", self.overlap()).expect("a string takes everything");
        }
        text.push(')');
        match &self.lengths {
            None => Ok(()),
            Some(Lengths::Padded(ranges)) => write!(text, ".padded({ranges:?})"),
            Some(Lengths::Packed(queries, keys)) if queries == keys => {
                write!(text, ".packed_cu_seqlens({queries:?})")
            }
            Some(Lengths::Packed(queries, keys)) => {
                write!(text, ".packed_cu_seqlens({queries:?}, {keys:?})")
            }
        }
        .expect("a string takes everything");
        text
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> Py<PyAny> {
        let py = other.py();
        let Ok(other) = other.cast::<Dilated>() else { return py.NotImplemented() };
        let other = other.get();
        let equal = self.engine.branches() == other.engine.branches()
            && (&self.within, &self.also, self.overlap, &self.lengths)
                == (&other.within, &other.also, other.overlap, &other.lengths);
        pyo3::types::PyBool::new(py, equal).to_owned().into_any().unbind()
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        let Dilated { engine, within, also, lengths, .. } = self;
        (engine.branches(), within, also, self.overlap(), lengths).hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let named = PyDict::new(py);
        named.set_item("within", self.within.to_string())?;
        named.set_item("also", self.also.as_ref().map(Rule::to_string))?;
        named.set_item("overlap", self.overlap())?;
        let restore = py.import("longspan._restore")?.getattr("dilated")?;
        let lists = (self.segment_lengths(), self.dilation_rates());
        (restore, (lists, named, self.key_padding(), self.cu_seqlens())).into_pyobject(py)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}

const WEIGHTED: &str = "weighted";
const UNION: &str = "union";
