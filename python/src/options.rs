//! What a call may be told besides its tensors, and the engine that comes of it.
//!
//! All functions take the same options by keyword, so they are read in one place. Layouts are kept
//! from call to call within [`CACHE_BYTES`], and all calls share their scratch.

use std::num::NonZeroUsize;
use std::sync::LazyLock;

use longspan::{
    Arrived, Attention, Dims, Element, GradientsMut, Heads, Hook, Inputs, Isa, LayoutCache,
    LayoutSet, Layouts, Order, OutputMut, Pattern as Rule, Precision, Score, Shape, Threads,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::dilated::Dilated;
use crate::errors;
use crate::layout::Layout;
use crate::pattern::{Pattern, Places, padding, pairs};
use crate::primitives::Whole;
use crate::signals;

/// Bytes of layouts that are kept: a window over 16 M tokens takes 13 MiB, its transpose as much
/// again.
const CACHE_BYTES: usize = 64 << 20;

static LAYOUTS: LazyLock<LayoutCache> = LazyLock::new(|| LayoutCache::new(CACHE_BYTES));

/// Who holds the scratch of all calls.
static SCRATCH: LazyLock<Attention> = LazyLock::new(|| {
    let nothing = longspan::Layout::compile(&Rule::full(), &Shape::new(0, 0));
    Attention::new(nothing.expect("no tokens, no error"))
});

const NAMES: [&str; 11] = [
    "order",
    "block",
    "query_offset",
    "key_offset",
    "key_ranges",
    "scale",
    "softcap",
    "alibi_slopes",
    "threads",
    "isa",
    "precision",
];

/// The keyword arguments that every call has.
pub(crate) struct Options {
    pub(crate) order: Order,
    places: Places,
    key_ranges: Option<Vec<(u64, u64)>>,
    scale: Option<f32>,
    score: Score,
    threads: Threads,
    isa: Option<Isa>,
    precision: Precision,
}

/// What decides who sees whom.
enum Asked {
    Patterns(Heads),
    Layouts(Layouts),
    Dilated(longspan::Dilated),
}

/// What computes a call.
pub(crate) enum Engine {
    Attention(Attention),
    Dilated(longspan::Dilated),
}

impl Engine {
    pub(crate) fn forward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> longspan::Result<()> {
        match self {
            Engine::Attention(attention) => attention.forward_into(inputs, output, hook),
            Engine::Dilated(dilated) => dilated.forward_into(inputs, output, hook),
        }
    }

    pub(crate) fn backward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
        gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> longspan::Result<()> {
        match self {
            Engine::Attention(engine) => engine.backward_into(inputs, arrived, gradients, hook),
            Engine::Dilated(engine) => engine.backward_into(inputs, arrived, gradients, hook),
        }
    }
}

/// What an engine is told of the options; both kinds have the same setters.
macro_rules! told {
    ($engine:expr, $options:expr) => {{
        let mut engine = $engine
            .score($options.score)
            .threads($options.threads)
            .precision($options.precision)
            .share_scratch(&SCRATCH);
        if let Some(scale) = $options.scale {
            engine = engine.scale(scale);
        }
        if let Some(isa) = $options.isa {
            engine = engine.isa(isa);
        }
        engine
    }};
}

impl Options {
    /// Reads them; a name that `function` doesn't know is an error.
    pub(crate) fn read(function: &str, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut read = Options {
            order: Order::BatchHeadTokenDim,
            places: Places::default(),
            key_ranges: None,
            scale: None,
            score: Score::Plain,
            threads: Threads::Auto,
            isa: None,
            precision: Precision::Fastest,
        };
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
        Ok(read)
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match name {
            "order" => self.order = order(value)?,
            "block" => self.places.block = Some(value.extract::<Whole>()?.0),
            "query_offset" => self.places.query_offset = Some(value.extract()?),
            "key_offset" => self.places.key_offset = Some(value.extract()?),
            "key_ranges" => {
                self.key_ranges = Some(pairs(value.extract()?));
            }
            "scale" => self.scale = Some(value.extract()?),
            "softcap" => self.set_score(Score::Softcap(value.extract()?))?,
            "alibi_slopes" => {
                let slopes: Vec<f32> = value.extract()?;
                self.set_score(Score::Alibi(slopes.into()))?;
            }
            "threads" => {
                let count = NonZeroUsize::new(value.extract::<Whole>()?.0 as usize);
                let count = count.ok_or_else(|| {
                    errors::value("threads is 0, expected 1 to 4096, or None for all CPUs")
                })?;
                self.threads = Threads::Count(count);
            }
            "isa" => {
                let text = value.extract::<String>()?;
                self.isa = Some(text.parse().map_err(errors::raise)?);
            }
            "precision" => self.precision = precision(value)?,
            other => unreachable!("{other} is in NAMES"),
        }
        Ok(())
    }

    fn set_score(&mut self, score: Score) -> PyResult<()> {
        if self.score != Score::Plain {
            return Err(errors::value(
                "softcap and alibi_slopes: expected one of both, there is no kernel for the two \
                 together",
            ));
        }
        self.score = score;
        Ok(())
    }

    /// What computes `pattern` (a pattern, its text, a layout, or dilated attention) for tensors of
    /// these sizes.
    pub(crate) fn engine(self, pattern: &Bound<'_, PyAny>, q: Dims, k: Dims) -> PyResult<Engine> {
        let layouts = match self.asked(pattern, q)? {
            Asked::Layouts(layouts) => layouts,
            Asked::Patterns(heads) => self.compile(pattern.py(), &heads, q, k)?,
            Asked::Dilated(mut dilated) => {
                if let Some(offset) = self.places.query_offset {
                    dilated = dilated.query_offset(offset);
                }
                return Ok(Engine::Dilated(told!(dilated, self)));
            }
        };
        Ok(Engine::Attention(told!(Attention::new(layouts), self)))
    }

    fn asked(&self, pattern: &Bound<'_, PyAny>, q: Dims) -> PyResult<Asked> {
        if let Ok(layout) = pattern.cast::<Layout>() {
            let names = ["block", "query_offset", "key_offset", "key_ranges"];
            if let Some(name) = self.first_set(&names) {
                return Err(errors::value(format!(
                    "{name}: a layout has its own; leave it out, or give it to Pattern.compile"
                )));
            }
            let layouts = layout.get().widened(q.batch, q.heads);
            return layouts.map(Asked::Layouts).map_err(errors::raise_pattern);
        }
        if let Ok(dilated) = pattern.cast::<Dilated>() {
            if let Some(name) = self.first_set(&["block", "key_offset", "key_ranges"]) {
                return Err(errors::value(format!(
                    "{name}: dilated attention has none, its segments begin at the first key and \
                     every key holds a token; leave it out"
                )));
            }
            return Ok(Asked::Dilated(dilated.get().shared()));
        }
        match Pattern::of(pattern)? {
            Some(heads) => Ok(Asked::Patterns(heads)),
            None => Err(errors::kind(format!(
                "pattern is a {}, expected a longspan.Pattern, its text, a longspan.Layout, or a \
                 longspan.Dilated",
                pattern.get_type().name()?
            ))),
        }
    }

    /// The first of these that the caller has given.
    fn first_set<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        let is_set = |name: &&&str| match **name {
            "block" => self.places.block.is_some(),
            "query_offset" => self.places.query_offset.is_some(),
            "key_offset" => self.places.key_offset.is_some(),
            "key_ranges" => self.key_ranges.is_some(),
            other => unreachable!("{other} is no place"),
        };
        names.iter().find(is_set).copied()
    }

    fn compile(&self, py: Python<'_>, heads: &Heads, q: Dims, k: Dims) -> PyResult<Layouts> {
        let shape = self.places.shape(q.tokens as u64, k.tokens as u64)?;
        if let Some(ranges) = self.key_ranges.as_ref().filter(|ranges| ranges.len() != q.batch) {
            return Err(errors::value(format!(
                "key_ranges has {} pairs, expected {}: one (first, end) a batch entry",
                ranges.len(),
                q.batch
            )));
        }
        let padding = padding(self.key_ranges.clone(), q.batch);
        let compile = |watch: &mut signals::Watch| {
            let look = |_, _| watch.look();
            match (heads, &self.key_ranges) {
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

fn order(value: &Bound<'_, PyAny>) -> PyResult<Order> {
    match &*value.extract::<String>()? {
        "bhsd" => Ok(Order::BatchHeadTokenDim),
        "bshd" => Ok(Order::BatchTokenHeadDim),
        other => Err(errors::value(format!(
            "order is {other:?}, expected \"bhsd\" (batch, heads, tokens, dim) or \"bshd\" (batch, \
             tokens, heads, dim)"
        ))),
    }
}

fn precision(value: &Bound<'_, PyAny>) -> PyResult<Precision> {
    match &*value.extract::<String>()? {
        "fastest" => Ok(Precision::Fastest),
        "exact" => Ok(Precision::Exact),
        other => Err(errors::value(format!(
            "precision is {other:?}, expected \"fastest\" (bf16 products where a matrix unit has them) \
             or \"exact\" (f32 products)"
        ))),
    }
}

/// Adds the name of the argument to what Python says of a value that doesn't convert.
fn named(name: &str, value: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = value.py();
    if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
        return errors::kind(format!("{name}: {}", error.value(py)));
    }
    error
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
