//! The options of a call, and the engine that they configure.
//!
//! All functions take the same options by keyword, so they are read in one place. Layouts are kept
//! from call to call within [`CACHE_BYTES`], and all calls share their scratch.

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use longspan::{
    Attention, BiasTable, Dims, Dropout, Heads, Isa, LayoutCache, LayoutSet, Layouts, Order,
    Padding, Precision, Score, Shape, Threads,
};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::arguments::{Placement, Rows, Whole, elements, padding, pairs, rows};
use crate::dilated::Dilated;
use crate::engine::Engine;
use crate::errors;
use crate::layout::{Layout, Source};
use crate::pattern::Pattern;
use crate::primitives::batch;
use crate::signals;

/// Bytes of layouts that are kept: a window over 16 M tokens takes 13 MiB, its transpose as much
/// again.
const CACHE_BYTES: usize = 64 << 20;

static LAYOUTS: LazyLock<LayoutCache> = LazyLock::new(|| LayoutCache::new(CACHE_BYTES));

/// Its clones share the workspaces of all calls.
static SHARED: LazyLock<longspan::Options> = LazyLock::new(longspan::Options::default);

/// Options without any set, whose calls share the workspaces of all others.
pub(crate) fn shared() -> longspan::Options {
    SHARED.clone()
}

/// Layouts that are kept from call to call.
pub(crate) fn layouts() -> &'static LayoutCache {
    &LAYOUTS
}

const NAMES: [&str; 16] = [
    "order",
    "block",
    "query_offset",
    "key_offset",
    "key_padding",
    "scale",
    "softcap",
    "alibi_slopes",
    "bias_table",
    "bias_right",
    "sink_logits",
    "dropout_p",
    "dropout_seed",
    "threads",
    "isa",
    "precision",
];

/// Options that choose how a result is computed, not which: `backward` may be given others than the
/// forward pass had.
pub(crate) const EXECUTION: [&str; 4] = ["block", "threads", "isa", "precision"];

/// The keyword arguments that every call has; `None` where left out.
#[derive(Default)]
pub(crate) struct Options {
    order: Option<Order>,
    placement: Placement,
    key_padding: Option<Vec<(usize, usize)>>,
    scale: Option<f64>,
    softcap: Option<f64>,
    alibi_slopes: Option<Vec<f32>>,
    bias_table: Option<Rows>,
    bias_right: Option<u64>,
    sink_logits: Option<Vec<f32>>,
    dropout_p: Option<f64>,
    dropout_seed: Option<u64>,
    threads: Option<NonZeroUsize>,
    isa: Option<Isa>,
    precision: Option<Precision>,
}

/// What selects the pairs that are computed.
enum Selection {
    Patterns(Heads),
    Layouts(Layouts),
    Dilated(Box<longspan::Dilated>),
}

impl Options {
    /// Elements of the sink logits, the bias table and the slopes, where there are any.
    pub(crate) fn gradient_lens(&self) -> [Option<usize>; 3] {
        [
            self.sink_logits.as_ref().map(Vec::len),
            self.bias_table.as_ref().map(|rows| rows.values.len()),
            self.alibi_slopes.as_ref().map(Vec::len),
        ]
    }

    /// Those of the library.
    pub(crate) fn calls(&self) -> PyResult<longspan::Options> {
        let mut calls = shared()
            .score(self.score()?)
            .dropout(self.dropout()?)
            .threads(self.threads.map_or(Threads::Auto, |count| Threads::Count(count.get())))
            .precision(self.precision.unwrap_or(Precision::Highest));
        if let Some(scale) = self.scale {
            calls = calls.scale(scale as f32);
        }
        if let Some(logits) = &self.sink_logits {
            calls = calls.sink_logits(logits.as_slice());
        }
        if let Some(isa) = self.isa {
            calls = calls.isa(isa);
        }
        Ok(calls)
    }

    /// The same, with what most calls give besides: arguments cost less than names.
    pub(crate) fn executed(
        mut self,
        threads: Option<usize>,
        precision: Option<&str>,
    ) -> PyResult<Self> {
        self.threads = threads.and_then(NonZeroUsize::new).or(self.threads);
        if let Some(precision) = precision {
            self.precision = Some(precision.parse().map_err(errors::raise)?);
        }
        Ok(self)
    }

    /// Reads them; a name that `function` doesn't know is an error.
    pub(crate) fn read(function: &str, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut read = Options::default();
        let Some(options) = options else { return Ok(read) };
        for (name, value) in options {
            let name = name.cast::<PyString>()?.to_cow()?;
            if NAMES.contains(&&*name) {
                if !value.is_none() {
                    read.set(&name, &value).map_err(|error| named(&name, &value, error))?;
                }
            } else {
                return Err(errors::kind(format!(
                    "{function}() has no argument {name:?}, expected one of {}",
                    NAMES.join(", ")
                )));
            }
        }
        if read.bias_right.is_some() && read.bias_table.is_none() {
            return Err(errors::value("bias_right is given without a bias_table: leave it out"));
        }
        if read.dropout_p.is_some_and(|p| p > 0.0) && read.dropout_seed.is_none() {
            return Err(errors::value(
                "dropout_p is given without a dropout_seed, expected an integer: which pairs are \
                 dropped is a function of it, the same in both passes",
            ));
        }
        Ok(read)
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match name {
            "order" => self.order = Some(order(value)?),
            "block" => self.placement.block = Some(value.extract::<Whole>()?.0),
            "query_offset" => self.placement.query_offset = Some(value.extract()?),
            "key_offset" => self.placement.key_offset = Some(value.extract()?),
            "key_padding" => self.key_padding = Some(pairs(value.extract()?)),
            "scale" => self.scale = Some(value.extract()?),
            "softcap" => self.softcap = Some(value.extract()?),
            "alibi_slopes" => self.alibi_slopes = Some(value.extract()?),
            "bias_table" => self.bias_table = Some(rows(value)?),
            "bias_right" => self.bias_right = Some(value.extract::<Whole>()?.0),
            "sink_logits" => self.sink_logits = Some(elements(value)?.extract()?),
            "dropout_p" => {
                let p = value.extract()?;
                Dropout::new(p, 0).map_err(errors::raise)?;
                self.dropout_p = Some(p);
            }
            "dropout_seed" => self.dropout_seed = Some(value.extract()?),
            "threads" => {
                let count = NonZeroUsize::new(value.extract::<Whole>()?.0 as usize);
                let count = count.ok_or_else(|| {
                    errors::value("threads is 0, expected 1 to 4096, or None for all CPUs")
                })?;
                self.threads = Some(count);
            }
            "isa" => {
                let text = value.extract::<String>()?;
                self.isa = Some(text.parse().map_err(errors::raise)?);
            }
            "precision" => self.precision = Some(precision(value)?),
            other => unreachable!("{other} is in NAMES"),
        }
        Ok(())
    }

    /// Those that were given, as Python's immutable values.
    pub(crate) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for name in NAMES {
            if let Some(value) = self.get(py, name)? {
                dict.set_item(name, value)?;
            }
        }
        Ok(dict)
    }

    fn get<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let placement = &self.placement;
        match name {
            "order" => self.order.map(|order| order_name(order).into_bound_py_any(py)),
            "block" => placement.block.map(|block| block.into_bound_py_any(py)),
            "query_offset" => placement.query_offset.map(|offset| offset.into_bound_py_any(py)),
            "key_offset" => placement.key_offset.map(|offset| offset.into_bound_py_any(py)),
            "key_padding" => {
                let ranges = self.key_padding.as_ref();
                ranges.map(|ranges| Ok(PyTuple::new(py, ranges)?.into_any()))
            }
            "scale" => self.scale.map(|scale| scale.into_bound_py_any(py)),
            "softcap" => self.softcap.map(|cap| cap.into_bound_py_any(py)),
            "alibi_slopes" => {
                let slopes = self.alibi_slopes.as_ref();
                slopes.map(|slopes| Ok(PyTuple::new(py, slopes)?.into_any()))
            }
            "bias_table" => self.bias_table.as_ref().map(|Rows { values, columns }| {
                let rows = values.chunks((*columns).max(1)).map(|row| PyTuple::new(py, row));
                Ok(PyTuple::new(py, rows.collect::<PyResult<Vec<_>>>()?)?.into_any())
            }),
            "bias_right" => self.bias_right.map(|right| right.into_bound_py_any(py)),
            "dropout_p" => self.dropout_p.map(|p| p.into_bound_py_any(py)),
            "dropout_seed" => self.dropout_seed.map(|seed| seed.into_bound_py_any(py)),
            "sink_logits" => {
                let logits = self.sink_logits.as_ref();
                logits.map(|logits| Ok(PyTuple::new(py, logits)?.into_any()))
            }
            "threads" => self.threads.map(|count| count.get().into_bound_py_any(py)),
            "isa" => self.isa.map(|isa| isa.to_string().into_bound_py_any(py)),
            "precision" => self.precision.map(|value| value.to_string().into_bound_py_any(py)),
            other => unreachable!("{other} is in NAMES"),
        }
        .transpose()
    }

    /// The options of a backward pass: those of its forward pass (`self`), and of those that were
    /// given again the ones that choose how it is computed. Any other that is given again has to be
    /// the same; `dim` is the head dim, which the default of `scale` depends on.
    pub(crate) fn again(mut self, py: Python<'_>, given: Options, dim: usize) -> PyResult<Self> {
        for name in NAMES {
            let Some(value) = given.get(py, name)? else { continue };
            if EXECUTION.contains(&name) {
                self.set(name, &value)?;
            } else if !self.agrees(&given, name, dim) {
                let forward = match self.get(py, name)? {
                    Some(kept) => kept.repr()?.to_string(),
                    None => "its default".into(),
                };
                return Err(errors::value(format!(
                    "{name} is {}, but the forward pass had {forward}: leave {name} out, as `output` \
                     holds the options of the forward pass",
                    value.repr()?
                )));
            }
        }
        Ok(self)
    }

    fn agrees(&self, given: &Options, name: &str, dim: usize) -> bool {
        let scale = |options: &Options| options.scale.unwrap_or(1.0 / (dim as f64).sqrt()) as f32;
        let (a, b) = (&self.placement, &given.placement);
        match name {
            "order" => self.order() == given.order(),
            "query_offset" => a.query_offset == b.query_offset,
            "key_offset" => a.key_offset.unwrap_or(0) == b.key_offset.unwrap_or(0),
            "key_padding" => self.key_padding == given.key_padding,
            // The default is rounded once more or less, depending on where it was worked out.
            "scale" => (scale(self) - scale(given)).abs() <= f32::EPSILON * scale(self).abs(),
            "softcap" => self.softcap == given.softcap,
            "alibi_slopes" => self.alibi_slopes == given.alibi_slopes,
            "bias_table" => self.bias_table == given.bias_table,
            "bias_right" => self.bias_right.unwrap_or(0) == given.bias_right.unwrap_or(0),
            "sink_logits" => self.sink_logits == given.sink_logits,
            "dropout_p" => self.dropout_p.unwrap_or(0.0) == given.dropout_p.unwrap_or(0.0),
            "dropout_seed" => self.dropout_seed == given.dropout_seed,
            other => unreachable!("{other} doesn't change results"),
        }
    }

    pub(crate) fn order(&self) -> Order {
        self.order.unwrap_or(Order::Bhsd)
    }

    pub(crate) fn sink_logits(&self) -> Option<&[f32]> {
        self.sink_logits.as_deref()
    }

    pub(crate) fn dropout(&self) -> PyResult<Option<Dropout>> {
        let (Some(p), Some(seed)) = (self.dropout_p, self.dropout_seed) else { return Ok(None) };
        Ok(Some(Dropout::new(p, seed).map_err(errors::raise)?))
    }

    pub(crate) fn score(&self) -> PyResult<Score> {
        let mut score = Score::default();
        if let Some(cap) = self.softcap {
            score = score.softcap(cap as f32);
        }
        if let Some(slopes) = &self.alibi_slopes {
            score = score.alibi_slopes(slopes.as_slice());
        }
        if let Some(Rows { values, columns }) = &self.bias_table {
            let right = self.bias_right.unwrap_or(0) as usize;
            let left = columns.checked_sub(right + 1).ok_or_else(|| {
                errors::value(format!(
                    "bias_right is {right} and bias_table has {columns} columns, expected bias_right \
                     below that: one column per distance from -bias_right on"
                ))
            })?;
            let table = BiasTable::new(values, left, right).map_err(errors::raise)?;
            score = score.bias_table(table);
        }
        Ok(score)
    }

    /// What computes `pattern` (a pattern, its text, a layout, or dilated attention) for tensors of
    /// these sizes.
    pub(crate) fn engine(self, pattern: &Bound<'_, PyAny>, q: Dims, k: Dims) -> PyResult<Engine> {
        let layouts = match self.selection(pattern, q)? {
            Selection::Layouts(layouts) => layouts,
            Selection::Patterns(heads) => self.compile(pattern.py(), &heads, q, k)?,
            Selection::Dilated(dilated) => {
                let mut dilated = *dilated;
                if let Some(ranges) = &self.key_padding {
                    let valid = ranges.iter().map(|&(first, end)| first..end);
                    dilated = dilated.padded(valid);
                }
                if let Some(offset) = self.placement.query_offset {
                    dilated = dilated.query_offset(offset);
                }
                return Ok(Engine::Dilated(dilated.options(self.calls()?)));
            }
        };
        Ok(Engine::Attention(Attention::new(layouts).options(self.calls()?)))
    }

    fn selection(&self, pattern: &Bound<'_, PyAny>, q: Dims) -> PyResult<Selection> {
        self.check(pattern)?;
        if let Ok(layout) = pattern.cast::<Layout>() {
            let layouts = layout.get().widened(q.batch, q.heads);
            return layouts.map(Selection::Layouts).map_err(errors::raise_pattern);
        }
        if let Ok(dilated) = pattern.cast::<Dilated>() {
            return Ok(Selection::Dilated(Box::new(dilated.get().shared())));
        }
        known(pattern).map(Selection::Patterns)
    }

    /// Refuses options that the kind of `pattern` doesn't have.
    pub(crate) fn check(&self, pattern: &Bound<'_, PyAny>) -> PyResult<()> {
        let names: &[_] = match pattern {
            layout if layout.is_instance_of::<Layout>() => {
                &["block", "query_offset", "key_offset", "key_padding"]
            }
            dilated if dilated.is_instance_of::<Dilated>() => {
                let has_lengths =
                    dilated.cast::<Dilated>().is_ok_and(|own| own.get().has_lengths());
                if has_lengths && self.first_set(&["key_padding"]).is_some() {
                    return Err(errors::value(
                        "key_padding: the dilated attention is padded or packed already; leave it out",
                    ));
                }
                &["block", "key_offset"]
            }
            _ => return Ok(()),
        };
        match self.first_set(names) {
            None => Ok(()),
            Some(name) if pattern.is_instance_of::<Layout>() => Err(errors::value(format!(
                "{name}: a layout has its own; leave it out, or give it to Pattern.compile"
            ))),
            Some(name) => Err(errors::value(format!(
                "{name}: dilated attention has none, its segments begin at the first key; leave it out"
            ))),
        }
    }

    /// The first of these that the caller has given.
    pub(crate) fn first_set<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        let is_set = |name: &&&str| match **name {
            "block" => self.placement.block.is_some(),
            "query_offset" => self.placement.query_offset.is_some(),
            "key_offset" => self.placement.key_offset.is_some(),
            "key_padding" => self.key_padding.is_some(),
            other => unreachable!("{other} is no place"),
        };
        names.iter().find(is_set).copied()
    }

    /// Where a pattern is to be compiled, and what a layout of it is made from.
    pub(crate) fn place(
        &self,
        heads: &Heads,
        q: Dims,
        k: Dims,
    ) -> PyResult<(Shape, Padding, Source)> {
        let tokens = (q.tokens, k.tokens);
        let shape = self.placement.shape(tokens.0, tokens.1)?;
        if let Some(ranges) = self.key_padding.as_ref().filter(|ranges| ranges.len() != q.batch) {
            return Err(errors::value(format!(
                "key_padding has {} pairs, expected {}: one (first, end) per batch entry",
                ranges.len(),
                q.batch
            )));
        }
        let padding = padding(self.key_padding.clone(), q.batch);
        let (placement, key_padding) = (self.placement.clone(), self.key_padding.clone());
        Ok((shape, padding, Source { pattern: heads.clone(), tokens, placement, key_padding }))
    }

    fn compile(&self, py: Python<'_>, heads: &Heads, q: Dims, k: Dims) -> PyResult<Layouts> {
        let (shape, padding, _) = self.place(heads, q, k)?;
        let compile = |watch: &mut signals::Watch| {
            let look = |_, _| watch.look();
            match (heads, &self.key_padding) {
                (Heads::Same(pattern), None) => {
                    LAYOUTS.get_with(pattern, &shape, look).map(Layouts::One)
                }
                _ => {
                    LayoutSet::compile_with(heads, q.heads, &shape, &padding, Some(&LAYOUTS), look)
                        .map(Layouts::Each)
                }
            }
        };
        signals::released(py, compile, errors::raise_pattern)
    }
}

/// A pattern, its text, or a list of these.
pub(crate) fn known(pattern: &Bound<'_, PyAny>) -> PyResult<Heads> {
    if pattern.is_instance_of::<PyList>() || pattern.is_instance_of::<PyTuple>() {
        return batch(pattern).map(|pattern| pattern.0);
    }
    match Pattern::of(pattern)? {
        Some(heads) => Ok(heads),
        None => Err(errors::kind(format!(
            "pattern is a {}, expected a longspan.Pattern, its text, a list of these, a \
             longspan.Layout, or a longspan.Dilated",
            pattern.get_type().name()?
        ))),
    }
}

fn order(value: &Bound<'_, PyAny>) -> PyResult<Order> {
    match &*value.extract::<String>()? {
        "bhsd" => Ok(Order::Bhsd),
        "bshd" => Ok(Order::Bshd),
        other => Err(errors::value(format!(
            "order is {other:?}, expected \"bhsd\" (batch, heads, tokens, dim) or \"bshd\" (batch, \
             tokens, heads, dim)"
        ))),
    }
}

fn order_name(order: Order) -> &'static str {
    match order {
        Order::Bhsd => "bhsd",
        Order::Bshd => "bshd",
    }
}

fn precision(value: &Bound<'_, PyAny>) -> PyResult<Precision> {
    value.extract::<String>()?.parse().map_err(errors::raise)
}

/// Adds the name of the argument to what Python says of a value that doesn't convert.
fn named(name: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = value.py();
    if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
        return errors::kind(format!("{name}: {}", error.value(py)));
    }
    error
}

/// A pattern and options as `Attention` holds them: text is parsed, options that were left out are
/// missing, lists are tuples. For the package's own Python part.
#[pyfunction]
#[pyo3(signature = (pattern, **options))]
pub(crate) fn check_options<'py>(
    pattern: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyDict>)> {
    let py = pattern.py();
    let options = Options::read("Attention", options)?;
    options.check(pattern)?;
    let is_compiled = pattern.is_instance_of::<Layout>() || pattern.is_instance_of::<Dilated>();
    let pattern = match is_compiled {
        true => pattern.clone(),
        false => Pattern(known(pattern)?).into_bound_py_any(py)?,
    };
    Ok((pattern, options.to_dict(py)?))
}

/// Bytes of layouts that are kept at present, and how many calls found theirs.
#[pyfunction]
pub(crate) fn cache_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = LAYOUTS.stats();
    let dict = PyDict::new(py);
    dict.set_item("hits", stats.hits)?;
    dict.set_item("misses", stats.misses)?;
    dict.set_item("layouts", stats.layouts)?;
    dict.set_item("bytes", stats.bytes)?;
    Ok(dict)
}
