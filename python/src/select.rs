//! `longspan.BlockSelector`: layouts from the content of queries and keys.

use longspan::{BlockSelector as Engine, Dims, Estimator, Heads, Hook, Selector, Sharing};
use longspan_pattern::Pattern as Rule;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Whole;
use crate::call::new_list;
use crate::layout::{Layout, Source};
use crate::options::Options;
use crate::pattern::Pattern;
use crate::primitives::inner;
use crate::tensor::{Tensor, with_element};
use crate::{errors, signals};

/// Chooses key blocks from the content of queries and keys: of every row of query blocks those with
/// the largest estimated attention mass.
///
/// `base` is the pattern (or its text) whose blocks are chosen from; edges inside blocks stay those
/// of the pattern. Blocks with an active pair of `always` are kept whatever the content says.
///
/// - `mass`: blocks are added until they hold this share of the row's estimated mass.
/// - `block_mass`: blocks that hold less than this share of the row's mass are dropped. One threshold
///   for all rows spends blocks where they hold most.
/// - `min_blocks`, `max_blocks`: floor and cap on the number of blocks per row.
/// - `estimator`: `"clusters"` (of similar keys, the default), `"means"` (of neighboring keys) or
///   `"antidiagonals"` (XAttention; `groups` is block / stride). `queries` sampled queries and `groups`
///   summaries of keys per block: 10 clusters, or 8 of the others.
/// - `dense_below`: rows with fewer keys keep all of them. `coarse_from`: rows with as many keys look for
///   candidates in blocks of 256 tokens first.
/// - `sharing`: `"head"`, or `"key_head"` for one choice per group of query heads that share keys, which
///   takes one pattern for all heads.
///
/// Attention over the choice is exact, forward and backward; the choice is a constant for gradients.
/// It does not depend on the number of threads, on other batch entries, or on how a prompt is cut into
/// chunks that start at multiples of 256.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 2, 2048, 32), dtype="float32") * 2
/// >>> selector = longspan.BlockSelector("causal", always="window(64, 0) | sinks(1)", max_blocks=8)
/// >>> selection = selector.select(x, x)
/// >>> output = longspan.forward(x, x, x, selection.layout)
/// >>> kept = selection.kept_mass(x, x, output.lse)
/// >>> 0 < kept.mean <= 1 and selection.density < 0.5
/// True
#[pyclass(frozen, module = "longspan")]
pub(crate) struct BlockSelector {
    engine: Engine,
    base: Heads,
}

#[pymethods]
impl BlockSelector {
    #[new]
    #[pyo3(
        signature = (base, *, always=None, mass=0.95, block_mass=0.0, min_blocks=None,
            max_blocks=None, estimator="clusters", queries=None, groups=None, sharing="head",
            dense_below=None, coarse_from=None),
        text_signature = "(base, *, always=None, mass=0.95, block_mass=0.0, min_blocks=1, \
            max_blocks=None, estimator='clusters', queries=8, groups=None, sharing='head', \
            dense_below=1024, coarse_from=16384)"
    )]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn new(
        base: &Bound<'_, PyAny>,
        always: Option<&Bound<'_, PyAny>>,
        mass: f32,
        block_mass: f32,
        min_blocks: Option<Whole>,
        max_blocks: Option<Whole>,
        estimator: &str,
        queries: Option<Whole>,
        groups: Option<Whole>,
        sharing: &str,
        dense_below: Option<Whole>,
        coarse_from: Option<Whole>,
    ) -> PyResult<Self> {
        let base = pattern("base", base)?;
        let count = |given: Option<Whole>, default: usize| given.map_or(default, |n| n.0 as usize);
        let queries = count(queries, 8);
        let groups = count(groups, if estimator == "clusters" { 10 } else { 8 });
        let estimator = match estimator {
            "clusters" => Estimator::Clusters { queries, clusters: groups },
            "means" => Estimator::Means { queries, means: groups },
            "antidiagonals" if queries == groups => Estimator::Antidiagonals { sums: groups },
            "antidiagonals" => {
                return Err(errors::value(format!(
                    "queries is {queries} and groups {groups}, expected as many of both for \
                     antidiagonals: block / stride"
                )));
            }
            other => {
                return Err(errors::value(format!(
                    "estimator is {other:?}, expected \"clusters\", \"means\" or \"antidiagonals\""
                )));
            }
        };
        let sharing = match sharing {
            "head" => Sharing::PerHead,
            "key_head" => Sharing::PerKeyHead,
            other => {
                return Err(errors::value(format!(
                    "sharing is {other:?}, expected \"head\" or \"key_head\""
                )));
            }
        };
        let mut engine = Engine::new(base.clone())
            .mass(mass)
            .block_mass(block_mass)
            .min_blocks(count(min_blocks, 1))
            .max_blocks(count(max_blocks, usize::MAX))
            .estimator(estimator)
            .sharing(sharing);
        if let Some(keys) = dense_below {
            engine = engine.dense_below(keys.0 as usize);
        }
        if let Some(keys) = coarse_from {
            engine = engine.coarse_from(keys.0 as usize);
        }
        if let Some(always) = always {
            let always: Rule = inner("always", always)?;
            engine = engine.always(always);
        }
        Ok(BlockSelector { engine, base })
    }

    /// The same selector for blocks of another pattern, or its text.
    fn over(&self, base: &Bound<'_, PyAny>) -> PyResult<Self> {
        let base = pattern("base", base)?;
        Ok(BlockSelector { engine: self.engine.clone().base(base.clone()), base })
    }

    /// The pattern whose blocks are chosen from.
    #[getter]
    fn base(&self) -> Pattern {
        Pattern(self.base.clone())
    }

    /// Chooses blocks for `q` and `k`. Options are those of `attention`: `order`, `block`, offsets,
    /// `key_padding`, `scale`, `threads`, `isa` and `precision`.
    #[pyo3(
        signature = (q, k, **options),
        text_signature = "($self, q, k, *, order='bhsd', block=None, scale=None, \
            query_offset=None, key_offset=None, key_padding=None, threads=None, isa=None, \
            precision=None)"
    )]
    fn select(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Selection> {
        let options = Options::read("select", options)?;
        let engine = self.engine.clone().options(options.calls()?);
        select(py, &engine, &self.base, [q, k], &options)
    }
}

/// Key blocks that were chosen elsewhere, in the form of FlexAttention's block lists.
///
/// `counts` is `(batch, heads, rows)`, the number of key blocks per row of query blocks, and `indices`
/// `(batch, heads, rows, width)` has them, of which the first `counts` of each row are read, in any
/// order: `kv_num_blocks` and `kv_indices` of a `BlockMask`. Batch and heads may be 1, for all. Edges
/// inside blocks are those of the pattern `base`; listed blocks that it does not have are ignored.
///
/// >>> import longspan, numpy
/// >>> x = numpy.ones((1, 2, 192, 8), dtype="float32")
/// >>> counts = numpy.array([[[1, 2, 2]]])
/// >>> indices = numpy.array([[[[0, 0], [1, 0], [2, 0]]]])
/// >>> longspan.ListedBlocks("causal", counts, indices).select(x, x)
/// <longspan.Selection of 83.3 % of the blocks>
#[pyclass(frozen, module = "longspan")]
pub(crate) struct ListedBlocks {
    engine: longspan::ListedBlocks,
    base: Heads,
}

#[pymethods]
impl ListedBlocks {
    #[new]
    fn new(
        base: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let base = pattern("base", base)?;
        let (lists, counts) = integers::<3>("counts", "(batch, heads, rows)", counts)?;
        let rule = "(batch, heads, rows, width)";
        let (shape, indices) = integers::<4>("indices", rule, indices)?;
        let ([entries, heads, _], width) = (lists, shape[3]);
        if shape[..3] != lists {
            return Err(errors::value(format!(
                "indices has shape {shape:?}, expected {rule} with the first three of counts, {lists:?}"
            )));
        }
        let counts = counts.into_iter().map(|count| count as usize).collect();
        let engine =
            longspan::ListedBlocks::padded(base.clone(), (entries, heads), counts, &indices, width)
                .map_err(errors::raise)?;
        Ok(ListedBlocks { engine, base })
    }

    /// The listed blocks for `q` and `k`. Options are those of `BlockSelector.select`.
    #[pyo3(
        signature = (q, k, **options),
        text_signature = "($self, q, k, *, order='bhsd', block=None, scale=None, \
            query_offset=None, key_offset=None, key_padding=None, threads=None, isa=None, \
            precision=None)"
    )]
    fn select(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Selection> {
        let options = Options::read("select", options)?;
        let engine = self.engine.clone().options(options.calls()?);
        select(py, &engine, &self.base, [q, k], &options)
    }
}

/// The shape and the elements of an array of integers from 0 on, with so many axes.
fn integers<const N: usize>(
    name: &str,
    axes: &str,
    given: &Bound<'_, PyAny>,
) -> PyResult<([usize; N], Vec<u32>)> {
    let numpy = given.py().import("numpy")?;
    let array = numpy.call_method1("asarray", (given,))?;
    let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
    if !matches!(&*kind, "i" | "u") {
        return Err(errors::kind(format!("{name} holds no integers, expected {axes} of them")));
    }
    let shape: Vec<usize> = array.getattr("shape")?.extract()?;
    let Ok(shape) = <[usize; N]>::try_from(shape.as_slice()) else {
        return Err(errors::value(format!("{name} has shape {shape:?}, expected {axes}")));
    };
    let elements = shape.iter().product::<usize>();
    let limit = u64::from(u32::MAX);
    let fits = elements == 0
        || array.call_method0("min")?.ge(0)? && array.call_method0("max")?.le(limit)?;
    if !fits {
        return Err(errors::value(format!("{name} has a number below 0 or above {limit}")));
    }
    let bytes = array.call_method1("astype", ("<u4",))?.call_method0("tobytes")?;
    let bytes: &[u8] = bytes.extract()?;
    Ok((shape, bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()))
}

/// What a selector chooses for two tensors.
fn select<S: Selector + Sync>(
    py: Python<'_>,
    selector: &S,
    base: &Heads,
    [q, k]: [&Bound<'_, PyAny>; 2],
    options: &Options,
) -> PyResult<Selection> {
    let (q, k) = (Tensor::import("q", q)?, Tensor::import("k", k)?);
    k.same_element(&q)?;
    let order = options.order();
    let (queries, keys) = (q.dims(order)?, k.dims(order)?);
    let (shape, padding, source) = options.place(base, queries, keys)?;
    let selected = with_element!(q.element(), E => {
        let (q, k) = (q.view::<E>(order)?, k.view::<E>(order)?);
        let work = |watch: &mut signals::Watch| {
            let mut between = |_: longspan::Progress| watch.look();
            selector.select_with(q, k, &shape, &padding, Hook::new(&mut between))
        };
        signals::released(py, work, errors::raise)?
    });
    Ok(Selection { selected, source, order })
}

fn pattern(name: &str, given: &Bound<'_, PyAny>) -> PyResult<Heads> {
    match Pattern::of(given)? {
        Some(pattern) => Ok(pattern),
        None => Err(errors::kind(format!(
            "{name} is a {}, expected a longspan.Pattern or its text",
            given.get_type().name()?
        ))),
    }
}

/// What `BlockSelector.select` or `ListedBlocks.select` chose.
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Selection {
    selected: longspan::Selection,
    source: Source,
    order: longspan::Order,
}

#[pymethods]
impl Selection {
    /// The chosen blocks, for `attention`, `forward` and `longspan.torch.attention`.
    #[getter]
    fn layout(&self) -> Layout {
        Layout::selected(self.selected.layouts().clone(), self.source.clone())
    }

    /// The share of the base's blocks that are kept.
    #[getter]
    fn density(&self) -> f64 {
        self.selected.density()
    }

    /// Measures how much attention mass the choice keeps, given the log-sum-exp of attention over it,
    /// `(batch, heads, tokens)`: on sampled queries, as many as a 95 % interval of 0.01 takes. `seed`
    /// says which.
    #[pyo3(signature = (q, k, lse, *, seed=0))]
    fn kept_mass<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        lse: &Bound<'py, PyAny>,
        seed: u64,
    ) -> PyResult<KeptMass> {
        let (q, k) = (Tensor::import("q", q)?, Tensor::import("k", k)?);
        k.same_element(&q)?;
        let lse = Tensor::import("lse", lse)?;
        let Dims { batch, tokens, heads, .. } = q.dims(self.order)?;
        let rows = lse.rows(Dims { batch, tokens, heads, dim: 1 })?;
        let kept = with_element!(q.element(), E => {
            let (q, k) = (q.view::<E>(self.order)?, k.view::<E>(self.order)?);
            let work = |watch: &mut signals::Watch| {
                let mut between = |_: longspan::Progress| watch.look();
                self.selected.kept_mass_with(q, k, rows, seed, Hook::new(&mut between))
            };
            signals::released(py, work, errors::raise)?
        });
        Ok(KeptMass { kept })
    }

    fn __repr__(&self) -> String {
        format!("<longspan.Selection of {:.1} % of the blocks>", 100.0 * self.density())
    }
}

/// The share of attention mass that a choice keeps, measured on sampled queries.
#[pyclass(frozen, module = "longspan")]
pub(crate) struct KeptMass {
    kept: longspan::KeptMass,
}

#[pymethods]
impl KeptMass {
    /// The mean over all queries and heads, estimated.
    #[getter]
    fn mean(&self) -> f64 {
        self.kept.mean
    }

    /// A 95 % confidence interval of that mean.
    #[getter]
    fn interval(&self) -> (f64, f64) {
        self.kept.interval
    }

    /// The kept mass of each sampled query and head, ascending.
    #[getter]
    fn sampled<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        new_list(py, &self.kept.sampled)
    }

    fn __repr__(&self) -> String {
        let (low, high) = self.kept.interval;
        format!("<longspan.KeptMass {:.4}, 95 % interval {low:.4} to {high:.4}>", self.kept.mean)
    }
}
